from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from edge.errors import ConfigError
from edge.tasks import labels

if TYPE_CHECKING:
    from pathlib import Path


def test_coco80_is_the_dataset_in_order_of_its_ids(data: Path) -> None:
    categories = json.loads((data / "labels.json").read_text(encoding="utf-8"))["categories"]

    names = labels.load("coco80", classes=80, source="m.onnx").names

    assert list(names) == [category["name"] for category in sorted(categories, key=lambda category: category["id"])]


@pytest.mark.parametrize("content", ["cat\ndog\n", "cat\r\ndog", "\ufeffcat\n dog \n\n\n"])
def test_text_file_has_one_label_a_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "names.txt"
    path.write_text(content, encoding="utf-8", newline="")

    assert labels.load(str(path), classes=2, source="m.onnx").names == ("cat", "dog")


def test_classes_without_labels_are_numbered() -> None:
    found = labels.load([], classes=3, source="m.onnx")

    assert found.names == ("class_0", "class_1", "class_2")
    assert labels.load(["cat"], classes=None, source="m.onnx").name(7) == "class_7"


def test_wrong_number_of_labels_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"task\.labels: has 2 names, but m\.onnx has 80 classes"):
        labels.load(["cat", "dog"], classes=80, source="m.onnx")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("no.txt", None, "cannot be read .no such file"),
        ("", None, "cannot be read .is a directory"),
        ("empty.txt", b"\n\n", "is empty"),
        ("gap.txt", b"cat\n\ndog\n", r"gap\.txt:2: is empty"),
        ("latin.txt", b"caf\xe9\n", "is not UTF-8 text"),
    ],
)
def test_unusable_file_is_refused(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ConfigError, match=message):
        labels.load(str(path), classes=2, source="m.onnx")


def test_kept_labels_become_class_ids() -> None:
    assert labels.load(["cat", "dog", "cat"], keep=["cat"], classes=3, source="m").wanted == frozenset({0, 2})
    assert labels.load([], keep=["class_1"], classes=3, source="m").wanted == frozenset({1})
    assert labels.load("coco80", keep=[], classes=80, source="m").wanted is None


def test_unknown_kept_labels_are_all_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        labels.load("coco80", keep=["persn", "Dog", "zzz"], classes=80, source="m.onnx")

    first, second, third = caught.value.problems
    assert "task.keep: 'persn' is not a label of the model; did you mean 'person'?" in first
    assert "did you mean 'dog'?" in second
    assert "allowed: person, bicycle" in third
    assert "and 72 more" in third


def test_numbered_classes_can_be_kept_where_the_model_does_not_say_how_many_there_are() -> None:
    assert labels.load([], keep=["class_7"], classes=None, source="m").wanted == frozenset({7})
    assert labels.load(["cat"], keep=["cat", "class_1"], classes=None, source="m").wanted == frozenset({0, 1})
    with pytest.raises(ConfigError, match="class_0"):
        labels.load(["cat"], keep=["class_0"], classes=None, source="m")
    with pytest.raises(ConfigError, match="classes are called class_0"):
        labels.load([], keep=["cat"], classes=None, source="m")

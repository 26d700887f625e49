from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from edge.errors import ConfigError, ModelError
from edge.tasks.heads import HEADS
from edge.tasks.segmentation import MASKS
from edge.tasks.signature import recognise, signature_of
from edge.types import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

FLOAT = np.dtype(np.float32)
YUNET = {
    f"{kind}_{stride}": (1, (320 // stride) ** 2, width)
    for kind, width in (("cls", 1), ("obj", 1), ("bbox", 4), ("kps", 10))
    for stride in (8, 16, 32)
}


def signature(shapes: Mapping[str, tuple[int, ...]], size: tuple[int, int]) -> Any:
    inputs = (TensorSpec("images", (1, 3, size[1], size[0]), FLOAT),)
    outputs = tuple(TensorSpec(name, shape, FLOAT) for name, shape in shapes.items())
    return signature_of(inputs, outputs, source="m.onnx")


def auto(shapes: dict[str, tuple[int, ...]], size: tuple[int, int]) -> tuple[str, int | None]:
    name, head = recognise(HEADS, signature(shapes, size), layout="auto", source="m.onnx")
    return name, head.classes


@pytest.mark.parametrize(
    ("shapes", "size", "layout", "classes"),
    [
        ({"output": (1, 3549, 85)}, (416, 416), "yolox", 80),
        ({"output": (1, 21760, 85)}, (1024, 1024), "yolox", 80),
        ({"output": (1, 5040, 8)}, (640, 384), "yolox", 3),
        ({"output0": (1, 25200, 85)}, (640, 640), "yolov5", 80),
        ({"output0": (1, 65280, 85)}, (1024, 1024), "yolov5", 80),
        ({"output0": (1, 84, 8400)}, (640, 640), "yolov8", 80),
        ({"output0": (1, 5, 8400)}, (640, 640), "yolov8", 1),
        ({"output0": (1, 84, 5040)}, (640, 384), "yolov8", 80),
        ({"output0": (1, 84, 34000)}, (640, 640), "yolov8", 80),
        ({"output0": (1, 300, 6)}, (640, 640), "end-to-end", None),
        ({"output0": (1, 3549, 6)}, (416, 320), "end-to-end", None),
        ({"pred_logits": (1, 300, 80), "pred_boxes": (1, 300, 4)}, (640, 640), "detr", 80),
        ({"dets": (1, 300, 4), "labels": (1, 300, 91)}, (560, 560), "detr", 91),
        ({"758": (1, 85, 22, 22)}, (352, 352), "fastestdet", 80),
        (YUNET, (320, 320), "yunet", 1),
    ],
)
def test_detection_layouts_are_recognised(
    shapes: dict[str, tuple[int, ...]], size: tuple[int, int], layout: str, classes: int | None
) -> None:
    assert auto(shapes, size) == (layout, classes)


@pytest.mark.parametrize(
    ("shape", "size", "named"),
    [
        ((1, 3549, 6), (416, 416), "can't tell yolox from end-to-end"),
        ((1, 10647, 6), (416, 416), "can't tell yolov5 from end-to-end"),
        ((1, 21, 21), (32, 32), "can't tell yolox from yolov8"),
    ],
)
def test_ambiguous_outputs_are_refused_with_what_they_could_be(
    shape: tuple[int, ...], size: tuple[int, int], named: str
) -> None:
    with pytest.raises(ModelError) as caught:
        auto({"output": shape}, size)

    text = str(caught.value)
    assert named in text
    assert "m.onnx" in text
    assert f"'output' {list(shape)}" in text
    assert "set task.layout" in text


@pytest.mark.parametrize("layout", ["yolox", "end-to-end"])
def test_setting_the_layout_settles_it(layout: str) -> None:
    found = recognise(HEADS, signature({"o": (1, 3549, 6)}, (416, 416)), layout=layout, source="m.onnx")

    assert found[0] == layout


@pytest.mark.parametrize(
    "shapes",
    [{"output": (1, 1000)}, {"a": (1, 100, 7)}, {"a": (1, 9, 4), "b": (1, 9, 4)}, {"a": (1, 3, 80, 80, 85)}, {}],
)
def test_unknown_outputs_are_refused_with_all_that_is_known(shapes: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(ModelError) as caught:
        auto(shapes, (640, 640))

    text = str(caught.value)
    assert "640x640" in text
    assert "set task.layout" in text
    assert all(f"'{name}' {list(shape)}" in text for name, shape in shapes.items())
    assert all(name in text for name in HEADS)


def test_set_layout_that_does_not_fit_is_refused_with_the_reason() -> None:
    with pytest.raises(ModelError) as caught:
        recognise(HEADS, signature({"output": (1, 3549, 85)}, (416, 416)), layout="yolov8", source="m.onnx")

    text = str(caught.value)
    assert "'output' [1, 3549, 85]" in text
    assert "don't fit task.layout 'yolov8': expected 4 + C channels for each cell, found 3549 for 85" in text
    assert "set task.layout to 'auto'" in text


def test_activation_must_be_one_of_the_layout() -> None:
    with pytest.raises(
        ConfigError, match=r"task\.activation: is 'softmax'; allowed for layout yolox: auto, none, sigmoid"
    ):
        recognise(
            HEADS, signature({"o": (1, 3549, 85)}, (416, 416)), layout="auto", activation="softmax", source="m.onnx"
        )


def test_softmax_takes_the_last_class_of_a_detr_as_no_object() -> None:
    shapes = {"logits": (1, 100, 92), "boxes": (1, 100, 4)}

    _, head = recognise(HEADS, signature(shapes, (800, 800)), layout="detr", activation="softmax", source="m.onnx")

    assert head.classes == 91


@pytest.mark.parametrize(
    ("shapes", "layout", "classes"),
    [
        ({"output0": (1, 116, 8400), "output1": (1, 32, 160, 160)}, "yolo-seg", 80),
        ({"protos": (1, 32, 160, 160), "rows": (1, 37, 8400)}, "yolo-seg", 1),
        ({"sigmoid_0.tmp_0": (1, 1, 640, 640)}, "map", 1),
        ({"mask": (1, 160, 160)}, "map", 1),
        ({"logits": (1, 21, 80, 80)}, "map", 21),
    ],
)
def test_segmentation_layouts_are_recognised(shapes: dict[str, tuple[int, ...]], layout: str, classes: int) -> None:
    name, head = recognise(MASKS, signature(shapes, (640, 640)), layout="auto", source="m.onnx")

    assert (name, head.classes) == (layout, classes)


@pytest.mark.parametrize(
    "shapes",
    [
        {"a": (1, 36, 8400), "b": (1, 32, 160, 160)},  # no class left
        {"a": (1, 116, 8400), "b": (1, 32, 80, 80)},
        {"a": (1, 116, 8400), "b": (1, 117, 8400)},
        {"a": (1, 116, 8400)},
        {"a": (1, 1, 640, 320)},
        {},
    ],
)
def test_other_outputs_are_no_masks(shapes: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(ModelError, match=r"set task\.layout"):
        recognise(MASKS, signature(shapes, (640, 640)), layout="auto", source="m.onnx")


def test_a_map_of_class_numbers_is_refused() -> None:
    inputs = (TensorSpec("x", (1, 3, 64, 64), FLOAT),)
    outputs = (TensorSpec("ids", (1, 64, 64), np.dtype(np.int64)),)

    with pytest.raises(ModelError, match="'ids' is int64; expected probabilities or logits"):
        recognise(MASKS, signature_of(inputs, outputs, source="m"), layout="map", source="m")


@pytest.mark.parametrize("shape", [(1, 3, 480, 640), (1, 480, 640, 3), (1, 1, 480, 640), (1, 480, 640, 1)])
def test_input_size_is_found_in_either_channel_order(shape: tuple[int, ...]) -> None:
    assert signature_of((TensorSpec("x", shape, FLOAT),), (), source="m").input_wh == (640, 480)


@pytest.mark.parametrize("inputs", [(), (TensorSpec("x", (1, 100), FLOAT),), (TensorSpec("x", (1, 4, 8, 8), FLOAT),)])
def test_input_that_is_no_picture_is_refused(inputs: tuple[TensorSpec, ...]) -> None:
    with pytest.raises(ModelError, match="expected a picture"):
        signature_of(inputs, (), source="m.onnx")

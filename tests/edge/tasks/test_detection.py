from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge import config, tasks
from edge.engine.onnxruntime import OnnxRuntimeEngine
from edge.image import Preprocessor, decode, place

if TYPE_CHECKING:
    from pathlib import Path

    from edge.types import Detection, Letterbox, Tensors

YOLOX = config.Input(color="bgr", divide_by=1.0, anchor="top-left")
FASTESTDET = config.Input(color="bgr", resize="stretch")
SQUARE = place(config.Input(), (64, 64), (64, 64))


@pytest.fixture
def detector(specs_of: Any, picture: Any) -> Any:
    """Builds the detector of outputs for a 64x64 input."""

    def build(outputs: Tensors, **section: Any) -> tasks.Task:
        return tasks.build(config.DetectionTask(**section), picture(64, 64), specs_of(outputs), source="m.onnx")

    return build


def end_to_end(*rows: list[float]) -> Tensors:
    return {"o": np.array([rows], np.float32)}


def test_detections_are_plain_values_best_first(detector: Any) -> None:
    outputs = end_to_end([0, 0, 10, 10, 0.5, 1], [20, 20, 70, 30, 0.75, 0], [0, 0, 9, 9, 0.1, 0])

    found = detector(outputs, labels=["cat", "dog"]).decode(outputs, SQUARE)

    assert [(one.label, one.class_id, one.score, one.box_xyxy) for one in found] == [
        ("cat", 0, 0.75, (20.0, 20.0, 64.0, 30.0)),
        ("dog", 1, 0.5, (0.0, 0.0, 10.0, 10.0)),
    ]
    assert all(type(value) is float for one in found for value in (*one.box_xyxy, one.score))
    assert all(one.mask is None and one.keypoints_xy is None for one in found)


def test_only_kept_labels_are_reported(detector: Any) -> None:
    outputs = end_to_end([0, 0, 10, 10, 0.9, 0], [0, 0, 10, 10, 0.8, 1], [0, 0, 10, 10, 0.7, 2])

    found = detector(outputs, labels=["cat", "dog"], keep=["dog", "class_2"]).decode(outputs, SQUARE)

    assert [one.label for one in found] == ["dog", "class_2"]


def test_no_more_than_the_most_are_reported(detector: Any) -> None:
    outputs = end_to_end(*([0, 0, 10, 10, 0.3 + index / 100, 0] for index in range(20)))

    found = detector(outputs, max_detections=3).decode(outputs, SQUARE)

    assert [round(one.score, 2) for one in found] == [0.49, 0.48, 0.47]


def test_outputs_are_neither_changed_nor_kept(detector: Any) -> None:
    outputs = end_to_end([0, 0, 10, 10, 0.9, 0])
    outputs["o"].flags.writeable = False
    task = detector(outputs)

    first = task.decode(outputs, SQUARE)
    second = task.decode(end_to_end([5, 5, 10, 10, 0.8, 0]), SQUARE)

    assert first[0].box_xyxy == (0, 0, 10, 10)
    assert second[0].box_xyxy == (5, 5, 10, 10)


@pytest.mark.parametrize(
    "shapes",
    [
        {"o": (1, 84, 9)},
        {"o": (1, 9, 84)},
        {"o": (1, 252, 9)},
        {"o": (1, 50, 6)},
        {"logits": (1, 20, 5), "boxes": (1, 20, 4)},
        {"o": (1, 9, 4, 4)},
        {
            f"{kind}_{stride}": (1, (64 // stride) ** 2, width)
            for kind, width in (("cls", 1), ("obj", 1), ("bbox", 4), ("kps", 10))
            for stride in (8, 16, 32)
        },
    ],
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(st.integers(0, 2**32 - 1))
def test_garbage_gives_only_sound_detections(detector: Any, shapes: dict[str, tuple[int, ...]], seed: int) -> None:
    """NaN, infinities and the largest numbers, as a broken model may give, from every layout; no warning either."""
    rng = np.random.default_rng(seed)
    values = np.array([np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-40, 0, 0.5, 1, 100], np.float32)
    outputs = {name: rng.choice(values, shape) for name, shape in shapes.items()}
    letterbox = place(config.Input(), (1920, 1080), (64, 64))

    found = detector(outputs, score=0.0).decode(outputs, letterbox)

    for one in found:
        x1, y1, x2, y2 = one.box_xyxy
        assert 0 <= x1 < x2 <= 1920
        assert 0 <= y1 < y2 <= 1080
        assert 0 <= one.score <= 1
    scores = [one.score for one in found]
    assert scores == sorted(scores, reverse=True)


# Real models on real photographs.


class Eye:
    """A model and its pre-processing, ready to look at photographs of the test data."""

    def __init__(
        self, data: Path, engine: OnnxRuntimeEngine, section: config.Input, task: config.DetectionTask
    ) -> None:
        self._data = data
        self._engine = engine
        self._preprocess = Preprocessor(section, engine.inputs[0])
        self.task = tasks.build(task, engine.inputs, engine.outputs, source="model")

    def outputs(self, name: str) -> tuple[Tensors, Letterbox]:
        image = decode((self._data / "images" / name).read_bytes(), name=name)
        array, letterbox = self._preprocess(image)
        return self._engine.infer({self._engine.inputs[0].name: array}), letterbox

    def detect(self, name: str) -> list[Detection]:
        return self.task.decode(*self.outputs(name))


@pytest.fixture
def eye(data: Path) -> Any:
    """Opens a model of the test data."""

    def look(model: str, section: config.Input, **task: Any) -> Eye:
        engine = OnnxRuntimeEngine(data / "models" / model, threads=2)
        return Eye(data, engine, section, config.DetectionTask(**task))

    return look


def truth(data: Path) -> dict[str, list[tuple[str, list[float]]]]:
    """Name and box of each labelled object, by photograph."""
    labels = json.loads((data / "labels.json").read_text(encoding="utf-8"))
    names = {category["id"]: category["name"] for category in labels["categories"]}
    files = {image["id"]: image["file_name"] for image in labels["images"]}
    found: dict[str, list[tuple[str, list[float]]]] = {name: [] for name in files.values()}
    for annotation in labels["annotations"]:
        x, y, w, h = annotation["bbox"]
        found[files[annotation["image_id"]]].append((names[annotation["category_id"]], [x, y, x + w, y + h]))
    return found


def iou(a: Any, b: Any) -> float:
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    if width <= 0 or height <= 0:
        return 0.0
    shared = width * height
    return float(shared / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared))


@pytest.mark.parametrize(
    ("model", "section", "layout"), [("yolox_nano.onnx", YOLOX, "yolox"), ("fastestdet.onnx", FASTESTDET, "fastestdet")]
)
@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("000000000086.jpg", {"person", "motorcycle"}),
        ("000000000285.jpg", {"bear"}),
        ("000000000599.jpg", {"cat", "remote"}),
        ("000000078499.jpg", {"horse"}),
        ("000000183709.jpg", {"person", "car"}),
        ("000000252639.jpg", {"bus", "car"}),
        ("000000403353.jpg", {"bed"}),
        ("000000434204.jpg", {"person", "skateboard"}),
    ],
)
def test_labelled_objects_are_found(
    eye: Any, data: Path, model: str, section: config.Input, layout: str, name: str, labels: set[str]
) -> None:
    """For each label at least one object stands where people drew its box, with an overlap of more than a half."""
    looking = eye(model, section, score=0.5, labels="coco80")

    found = looking.detect(name)

    assert looking.task.layout == layout
    drawn = truth(data)[name]
    right = {
        one.label for one in found if any(one.label == label and iou(one.box_xyxy, box) > 0.5 for label, box in drawn)
    }
    assert labels <= right


def test_most_of_what_yolox_is_sure_of_is_labelled(eye: Any, data: Path) -> None:
    """On twenty photographs, at a score of 0.7."""
    looking = eye("yolox_nano.onnx", YOLOX, score=0.7, labels="coco80")
    drawn = truth(data)

    right = wrong = 0
    for name in sorted(drawn)[:20]:
        for one in looking.detect(name):
            known = any(one.label == label and iou(one.box_xyxy, box) > 0.5 for label, box in drawn[name])
            right, wrong = right + known, wrong + (not known)

    assert right >= 30
    assert wrong <= right / 10


def test_faces_are_where_opencv_finds_them(eye: Any, data: Path) -> None:
    """OpenCV's own decoder of the same model, on the same 320x320 picture."""
    import cv2

    name = "000000000165.jpg"
    looking = eye(
        "yunet_n_320.onnx", config.Input(color="bgr", divide_by=1.0, resize="stretch"), score=0.6, nms_iou=0.3
    )
    image = decode((data / "images" / name).read_bytes(), name=name)
    reference = cv2.FaceDetectorYN.create(str(data / "models/yunet_n_320.onnx"), "", (320, 320), 0.6, 0.3)
    _, rows = reference.detect(cv2.resize(image, (320, 320), interpolation=cv2.INTER_LINEAR))
    rows = rows[np.argsort(-rows[:, 14])]
    scale = np.array([image.shape[1] / 320, image.shape[0] / 320])

    found = looking.detect(name)

    assert len(found) == len(rows) >= 2
    for one, row in zip(found, rows, strict=True):
        x, y, w, h = row[:4]
        box = np.array([x, y, x + w, y + h]) * np.tile(scale, 2)
        assert one.score == pytest.approx(row[14], abs=0.01)
        assert iou(one.box_xyxy, box) > 0.95
        np.testing.assert_allclose(one.keypoints_xy, row[4:14].reshape(5, 2) * scale, atol=2)


def test_twice_the_same_frame_gives_the_same(eye: Any) -> None:
    looking = eye("yolox_nano.onnx", YOLOX, score=0.1)

    assert looking.detect("000000000086.jpg") == looking.detect("000000000086.jpg")

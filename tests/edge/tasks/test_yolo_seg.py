from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge import config, tasks
from edge.image import place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge.types import Detection, Letterbox, Tensors

SIZE = (64, 64)
CELLS = 8 * 8 + 4 * 4 + 2 * 2
CLASSES, MASKS = 2, 3


@pytest.fixture
def segmenter(specs_of: Any, picture: Any) -> Any:
    def build(outputs: Tensors, **section: Any) -> tasks.Task:
        return tasks.build(config.Segmentation(**section), picture(*SIZE), specs_of(outputs), source="m.onnx")

    return build


def outputs_of(
    boxes_cxcywh: Sequence[Sequence[float]], coefficients: Sequence[Sequence[float]], prototypes: np.ndarray
) -> Tensors:
    """The first object of class 0, the second of class 1, and so on; the better the earlier."""
    rows = np.zeros((1, 4 + CLASSES + MASKS, CELLS), np.float32)
    for index, (box, mix) in enumerate(zip(boxes_cxcywh, coefficients, strict=True)):
        rows[0, :4, index] = box
        rows[0, 4 + index % CLASSES, index] = 0.9 - index / 100
        rows[0, 4 + CLASSES :, index] = mix
    return {"rows": rows, "prototypes": prototypes[None].astype(np.float32)}


def smooth(rng: np.random.Generator) -> np.ndarray:
    """Waves, as a network's prototypes are smooth."""
    y, x = np.mgrid[:16, :16]
    waves = [np.sin(rng.uniform(0.1, 0.6) * x + rng.uniform(0.1, 0.6) * y + rng.uniform(0, 6)) for _ in range(MASKS)]
    return np.stack(waves)


def slow_mixture(prototypes: Any, coefficients: list[float], x: int, y: int, letterbox: Letterbox) -> float:
    """The mixture under the centre of one source pixel: bilinear between cell centres, the outermost continued."""
    at = []
    for axis, pixel in enumerate((x, y)):
        model = (pixel + 0.5) * letterbox.scale_xy[axis] + letterbox.offset_xy[axis]
        at.append(min(max(model / 4 - 0.5, 0), 15))
    x0, y0 = min(int(at[0]), 14), min(int(at[1]), 14)
    fx, fy = at[0] - x0, at[1] - y0
    total = 0.0
    for weight, (px, py) in (
        ((1 - fx) * (1 - fy), (x0, y0)),
        (fx * (1 - fy), (x0 + 1, y0)),
        ((1 - fx) * fy, (x0, y0 + 1)),
        (fx * fy, (x0 + 1, y0 + 1)),
    ):
        total += weight * sum(mix * prototypes[k][py][px] for k, mix in enumerate(coefficients))
    return total


def assert_mask(
    found: Detection, prototypes: Any, coefficients: list[float], letterbox: Letterbox, threshold: float
) -> None:
    assert found.mask is not None
    assert found.box_xyxy is not None
    full = found.mask.full()
    width, height = letterbox.source_wh
    x1, y1, x2, y2 = found.box_xyxy
    for y in range(height):
        for x in range(width):
            if x1 <= x + 0.5 < x2 and y1 <= y + 0.5 < y2:
                mixture = slow_mixture(prototypes, coefficients, x, y, letterbox)
                # OpenCV before 5 takes positions in 32nds of a cell.
                if abs(mixture - threshold) > 0.1:
                    assert full[y, x] == (mixture > threshold), (x, y)
            else:
                assert not full[y, x]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["letterbox", "stretch", "crop"]), st.sampled_from([0.3, 0.5, 0.8]))
def test_masks_equal_the_slow_reference(segmenter: Any, seed: int, resize: Any, threshold: float) -> None:
    rng = np.random.default_rng(seed)
    boxes = np.concatenate([rng.uniform(10, 54, (2, 2)), rng.uniform(4, 60, (2, 2))], axis=1).tolist()
    coefficients = rng.normal(0, 2, (2, MASKS)).tolist()
    prototypes = smooth(rng)
    outputs = outputs_of(boxes, coefficients, prototypes)
    source_wh = tuple(rng.integers(20, 90, 2).tolist())
    letterbox = place(config.Input(resize=resize), source_wh, SIZE)

    found = segmenter(outputs, mask_threshold=threshold).decode(outputs, letterbox)

    for one in found:
        limit = math.log(threshold / (1 - threshold))
        assert_mask(one, prototypes.tolist(), coefficients[one.class_id], letterbox, limit)


def test_object_worked_by_hand(segmenter: Any) -> None:
    """The left half of the input is on; the box reaches over the middle; the picture is twice the input's size."""
    prototypes = np.full((MASKS, 16, 16), -1.0)
    prototypes[0, :, :8] = 1
    outputs = outputs_of([[32, 20, 32, 8]], [[9, 0, 0]], prototypes)
    letterbox = place(config.Input(), (128, 128), SIZE)

    (one,) = segmenter(outputs, labels=["cat", "dog"]).decode(outputs, letterbox)

    assert (one.label, one.score) == ("cat", pytest.approx(0.9))
    assert one.box_xyxy == (32, 32, 96, 48)
    assert one.mask is not None
    assert one.mask.offset_xy == (32, 32)
    assert one.mask.bits.shape == (16, 64)
    assert one.mask.bits[:, :32].all()
    assert not one.mask.bits[:, 32:].any()


def test_objects_are_suppressed_kept_and_limited_like_boxes(segmenter: Any) -> None:
    boxes = [[30, 30, 20, 20], [30, 30, 20, 20], [31, 30, 20, 20], [50, 50, 9, 9]]
    outputs = outputs_of(boxes, [[1, 0, 0]] * 4, np.ones((MASKS, 16, 16)))
    letterbox = place(config.Input(), SIZE, SIZE)

    found = segmenter(outputs).decode(outputs, letterbox)
    kept = segmenter(outputs, keep=["class_1"], max_detections=1).decode(outputs, letterbox)

    assert [one.class_id for one in found] == [0, 1, 1]
    assert [one.box_xyxy for one in kept] == [(20, 20, 40, 40)]


@pytest.mark.parametrize(("threshold", "covered"), [(0.0, True), (1.0, False)])
def test_extreme_thresholds_give_all_or_nothing(segmenter: Any, threshold: float, covered: bool) -> None:
    outputs = outputs_of([[30, 30, 20, 20]], [[5, 0, 0]], np.ones((MASKS, 16, 16)))

    (one,) = segmenter(outputs, mask_threshold=threshold).decode(outputs, place(config.Input(), SIZE, SIZE))

    assert one.mask is not None
    assert one.mask.bits.all() == covered
    assert one.mask.bits.any() == covered


def test_sliver_of_a_box_has_at_least_one_pixel(segmenter: Any) -> None:
    outputs = outputs_of([[63.9, 30.2, 0.1, 0.1]], [[5, 0, 0]], np.ones((MASKS, 16, 16)))

    (one,) = segmenter(outputs).decode(outputs, place(config.Input(), SIZE, SIZE))

    assert one.mask is not None
    assert one.mask.bits.tolist() == [[True]]


def test_broken_coefficients_give_an_empty_mask_without_a_warning(segmenter: Any) -> None:
    outputs = outputs_of([[30, 30, 20, 20]], [[np.nan, np.inf, 3e38]], np.full((MASKS, 16, 16), 3e38))

    (one,) = segmenter(outputs).decode(outputs, place(config.Input(), SIZE, SIZE))

    assert one.mask is not None
    assert not one.mask.bits.any()

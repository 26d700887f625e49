from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge import config
from edge.image import place
from edge.tasks.candidates import Candidates, select, suppress

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edge.types import Letterbox

IDENTITY = place(config.Input(resize="stretch"), (640, 480), (640, 480))


def overlap(a: list[float], b: list[float]) -> float:
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    if width <= 0 or height <= 0:
        return 0.0
    shared = width * height
    return shared / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared)


def slow_suppress(boxes: list[list[float]], classes: list[int], iou: float) -> list[int]:
    kept: list[int] = []
    for index, box in enumerate(boxes):
        if all(classes[index] != classes[other] or overlap(box, boxes[other]) <= iou for other in kept):
            kept.append(index)
    return kept


def candidates(boxes: NDArray[np.floating], scores: list[float], classes: list[int] | None = None) -> Candidates:
    count = len(scores)
    return Candidates(
        np.asarray(boxes, np.float32).reshape(count, 4),
        np.array(scores, np.float32),
        np.array(classes or [0] * count, np.intp),
        np.arange(count),
    )


@st.composite
def crowds(draw: st.DrawFn) -> tuple[NDArray[np.float32], NDArray[np.intp]]:
    """Boxes on a coarse grid, so that equal ones and exact overlaps occur; some have negative coordinates."""
    count = draw(st.integers(1, 25))
    cells = st.tuples(st.integers(-6, 30), st.integers(-6, 30), st.integers(1, 8), st.integers(1, 8))
    drawn = np.array([draw(cells) for _ in range(count)], np.float32) * 7
    classes = np.array([draw(st.integers(0, 3)) for _ in range(count)], np.intp)
    return np.concatenate([drawn[:, :2], drawn[:, :2] + drawn[:, 2:]], axis=1), classes


@given(crowds(), st.sampled_from([0.0, 0.3, 0.45, 0.65, 1.0]))
def test_suppression_equals_the_slow_reference(crowd: tuple[NDArray[np.float32], NDArray[np.intp]], iou: float) -> None:
    boxes, classes = crowd

    kept = suppress(boxes, classes, iou=iou, at_most=1000)

    # A hair over the threshold, since an overlap that equals it exactly may be rounded either way.
    slow = {tuple(slow_suppress(boxes.tolist(), classes.tolist(), iou + hair)) for hair in (-1e-6, 1e-6)}
    assert tuple(kept.tolist()) in slow


def test_boxes_of_different_classes_never_suppress_each_other() -> None:
    boxes = np.array([[-50, -50, 10, 10], [-50, -50, 10, 10], [550, 550, 610, 610]], np.float32)

    assert suppress(boxes, np.array([0, 1, 0]), iou=0.0, at_most=10).tolist() == [0, 1, 2]


@pytest.mark.parametrize("at_most", [1, 50, 5000])
def test_search_in_a_crowd_ends_early_with_the_same_result(at_most: int) -> None:
    rng = np.random.default_rng(1)
    centres, sizes = rng.uniform(0, 300, (3000, 2)), rng.uniform(20, 60, (3000, 2))
    boxes = np.concatenate([centres, centres + sizes], axis=1).astype(np.float32)
    classes = rng.integers(0, 3, 3000)

    kept = suppress(boxes, classes, iou=0.5, at_most=at_most)

    slow = slow_suppress(boxes.tolist(), classes.tolist(), 0.5)
    assert kept.tolist() == slow[: len(kept)]
    assert len(kept) >= min(at_most, len(slow))


@given(st.integers(0, 2**32 - 1))
def test_selection_is_sorted_inside_the_picture_and_wanted(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(0, 40))
    boxes = rng.uniform(-100, 800, (count, 4))
    found = candidates(boxes, rng.random(count).tolist(), rng.integers(0, 4, count).tolist())

    chosen = select(found, IDENTITY, wanted=frozenset({1, 3}), nms_iou=0.5, max_detections=7)

    assert len(chosen) <= 7
    assert (np.diff(chosen.scores) <= 0).all()
    assert set(chosen.class_ids.tolist()) <= {1, 3}
    assert (chosen.boxes_xyxy >= 0).all()
    assert (chosen.boxes_xyxy <= [640, 480, 640, 480]).all()
    assert (chosen.boxes_xyxy[:, 2:] > chosen.boxes_xyxy[:, :2]).all()
    np.testing.assert_array_equal(chosen.scores, found.scores[chosen.rows])


@pytest.mark.parametrize("resize", ["letterbox", "stretch", "crop"])
@pytest.mark.parametrize("anchor", ["center", "top-left"])
@pytest.mark.parametrize("source_wh", [(640, 480), (333, 500), (1920, 1080), (31, 7)])
def test_boxes_return_to_the_source_picture(resize: str, anchor: str, source_wh: tuple[int, int]) -> None:
    """A box that is known in the source picture is found there again, through each kind of pre-processing."""
    letterbox: Letterbox = place(config.Input(resize=resize, anchor=anchor), source_wh, (416, 352))  # type: ignore[arg-type]
    width, height = source_wh
    box = np.array([[0.4 * width, 0.45 * height, 0.55 * width, 0.6 * height]], np.float32)
    (scale_x, scale_y), (left, top) = letterbox.scale_xy, letterbox.offset_xy
    x1, y1, x2, y2 = box[0].tolist()
    in_model = [x1 * scale_x + left, y1 * scale_y + top, x2 * scale_x + left, y2 * scale_y + top]

    chosen = select(candidates(np.array(in_model), [0.9]), letterbox, wanted=None, nms_iou=0.5, max_detections=9)

    np.testing.assert_allclose(chosen.boxes_xyxy, box, atol=1e-3)


def test_boxes_in_the_padding_are_no_objects() -> None:
    letterbox = place(config.Input(anchor="top-left"), (640, 320), (640, 640))
    boxes = np.array([[10, 400, 50, 450], [10, 300, 50, 450], [10, 10, 50, 50]])

    chosen = select(candidates(boxes, [0.9, 0.8, 0.7]), letterbox, wanted=None, nms_iou=0.5, max_detections=9)

    assert chosen.boxes_xyxy.tolist() == [[10, 300, 50, 320], [10, 10, 50, 50]]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_boxes_that_are_not_finite_are_left_out(value: float) -> None:
    found = candidates(np.array([[0, 0, value, 10], [0, 0, 10, 10]]), [0.9, 0.8])

    chosen = select(found, IDENTITY, wanted=None, nms_iou=0.5, max_detections=9)

    assert chosen.rows.tolist() == [1]


def test_huge_coordinates_are_clipped_without_overflow() -> None:
    chosen = select(
        candidates(np.array([[-3e38, -3e38, 3e38, 3e38]]), [0.9]),
        place(config.Input(), (4000, 3000), (64, 64)),
        wanted=None,
        nms_iou=0.5,
        max_detections=9,
    )

    assert chosen.boxes_xyxy.tolist() == [[0, 0, 4000, 3000]]


def test_equal_scores_keep_the_order_of_their_rows() -> None:
    boxes = np.array([[20 * index, 0, 20 * index + 10, 10] for index in range(20)])

    chosen = select(candidates(boxes, [0.5] * 20), IDENTITY, wanted=None, nms_iou=0.5, max_detections=99)

    assert chosen.rows.tolist() == list(range(20))


def test_without_suppression_duplicates_stay() -> None:
    found = candidates(np.array([[0, 0, 10, 10]] * 3), [0.5, 0.7, 0.6])

    chosen = select(found, IDENTITY, wanted=None, nms_iou=None, max_detections=2)

    assert chosen.rows.tolist() == [1, 2]


def test_keypoints_return_to_the_source_picture_unclipped() -> None:
    letterbox = place(config.Input(), (200, 100), (100, 100))  # half the size, 25 rows of padding above
    found = Candidates(
        np.array([[10, 30, 20, 40]], np.float32),
        np.array([0.9], np.float32),
        np.array([0]),
        np.array([0]),
        np.array([[10, 30, -5, 45]], np.float32),
    )

    chosen = select(found, letterbox, wanted=None, nms_iou=0.5, max_detections=9)

    assert chosen.keypoints_xy is not None
    assert chosen.keypoints_xy.tolist() == [[20, 10, -10, 40]]

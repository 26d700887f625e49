from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge import config, tasks
from edge.errors import ModelError
from edge.image import place

if TYPE_CHECKING:
    from edge.types import Letterbox, Tensors


@pytest.fixture
def segmenter(specs_of: Any, picture: Any) -> Any:
    def build(outputs: Tensors, size: tuple[int, int], **section: Any) -> tasks.Task:
        section = {"min_area": 1, **section}
        return tasks.build(config.Segmentation(**section), picture(*size), specs_of(outputs), source="m.onnx")

    return build


def slow_regions(values: list[list[float]], threshold: float) -> dict[int, list[tuple[int, int]]]:
    """Flood fill: sets of touching pixels over the threshold, by number."""
    height, width = len(values), len(values[0])
    rest = {(x, y) for y in range(height) for x in range(width) if values[y][x] > threshold}
    regions: dict[int, list[tuple[int, int]]] = {}
    while rest:
        region, edge = [], [rest.pop()]
        while edge:
            x, y = edge.pop()
            region.append((x, y))
            near = {(x + dx, y + dy) for dx in (-1, 0, 1) for dy in (-1, 0, 1)} & rest
            rest -= near
            edge += near
        regions[len(regions)] = region
    return regions


def source_pixels(region: list[tuple[int, int]], letterbox: Letterbox, cell: float) -> set[tuple[int, int]]:
    """Source pixels whose centre lies in a region."""
    width, height = letterbox.source_wh
    cells = set(region)
    found = set()
    for y in range(height):
        for x in range(width):
            model_x = (x + 0.5) * letterbox.scale_xy[0] + letterbox.offset_xy[0]
            model_y = (y + 0.5) * letterbox.scale_xy[1] + letterbox.offset_xy[1]
            if (int(model_x // cell), int(model_y // cell)) in cells:
                found.add((x, y))
    return found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["stretch", "letterbox", "crop"]),
    st.sampled_from([(20, 15), (9, 30), (40, 37)]),
    st.sampled_from([1, 2]),
)
def test_regions_equal_the_slow_reference(
    segmenter: Any, seed: int, resize: Any, size: tuple[int, int], cell: int
) -> None:
    """On the part of the map that shows the picture: padding is filled with nothing here."""
    rng = np.random.default_rng(seed)
    letterbox = place(config.Input(resize=resize), size, (24, 24))
    side = 24 // cell
    values = (rng.random((side, side)) * (rng.random((side, side)) < 0.4)).astype(np.float32)
    centres = (np.arange(side) + 0.5) * cell
    for axis in (0, 1):
        low = letterbox.offset_xy[axis]
        outside = (centres < low) | (centres > low + size[axis] * letterbox.scale_xy[axis])
        values[(slice(None), outside) if axis == 0 else outside] = 0

    found = segmenter({"o": values[None]}, (24, 24), score=0.3, mask_threshold=0.2).decode(
        {"o": values[None]}, letterbox
    )

    expected = []
    for region in slow_regions(values.tolist(), 0.2).values():
        score = sum(float(values[y, x]) for x, y in region) / len(region)
        pixels = source_pixels(region, letterbox, cell)
        if score >= 0.3 and pixels:
            expected.append((round(score, 4), pixels))
    got = []
    for one in found:
        assert one.mask is not None
        y, x = np.nonzero(one.mask.full())
        got.append((round(one.score, 4), set(zip(x.tolist(), y.tolist(), strict=True))))
        x1, y1, x2, y2 = one.box_xyxy
        assert 0 <= x1 <= x.min() + 0.5 <= x.max() + 0.5 <= x2 <= size[0]
        assert 0 <= y1 <= y.min() + 0.5 <= y.max() + 0.5 <= y2 <= size[1]
    assert sorted(got, key=str) == sorted(expected, key=str)
    assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)


def test_map_worked_by_hand(segmenter: Any) -> None:
    """A map of half the input's size, of a picture twice as large as the input: one cell is four source pixels wide."""
    values = np.zeros((1, 1, 8, 8), np.float32)
    values[0, 0, 2:4, 1:4] = [[0.5, 0.7, 0.9], [0.9, 0.7, 0.0]]
    letterbox = place(config.Input(), (32, 32), (16, 16))

    (one,) = segmenter({"o": values}, (16, 16), labels=["text"], mask_threshold=0.4).decode({"o": values}, letterbox)

    assert one.label == "text"
    assert one.score == pytest.approx(0.74)
    assert one.box_xyxy == (4, 8, 16, 16)
    assert one.mask is not None
    assert one.mask.offset_xy == (4, 8)
    assert one.mask.bits.sum() == 5 * 16
    assert not one.mask.bits[4:, 8:].any()


def test_small_regions_are_dropped_by_their_area_in_the_source(segmenter: Any) -> None:
    values = np.zeros((1, 8, 8), np.float32)
    values[0, 1, 1] = 0.9
    values[0, 5:7, 5:7] = 0.8
    outputs = {"o": values}
    letterbox = place(config.Input(), (16, 16), (8, 8))

    areas = {
        least: [one.mask.bits.sum() for one in segmenter(outputs, (8, 8), min_area=least).decode(outputs, letterbox)]
        for least in (4, 5, 17)
    }

    assert areas == {4: [4, 16], 5: [16], 17: []}


def test_no_more_than_the_most_are_reported(segmenter: Any) -> None:
    values = np.zeros((1, 16, 16), np.float32)
    values[0, ::2, ::2] = np.linspace(0.6, 0.9, 64).reshape(8, 8)
    outputs = {"o": values}

    found = segmenter(outputs, (16, 16), max_detections=3).decode(outputs, place(config.Input(), (16, 16), (16, 16)))

    np.testing.assert_allclose([one.score for one in found], np.linspace(0.6, 0.9, 64)[:-4:-1], rtol=1e-5)


def test_padding_holds_no_regions(segmenter: Any) -> None:
    values = np.full((1, 16, 16), 0.9, np.float32)
    letterbox = place(config.Input(), (32, 16), (16, 16))

    (one,) = segmenter({"o": values}, (16, 16)).decode({"o": values}, letterbox)

    assert one.box_xyxy == (0, 0, 32, 16)
    assert one.mask is not None
    assert one.mask.bits.shape == (16, 32)
    assert one.mask.bits.all()


def test_nan_is_in_no_region(segmenter: Any) -> None:
    values = np.full((1, 8, 8), np.nan, np.float32)
    values[0, 2:4, 2:4] = 0.8

    (one,) = segmenter({"o": values}, (8, 8)).decode({"o": values}, place(config.Input(), (8, 8), (8, 8)))

    assert one.score == pytest.approx(0.8)


def test_logits_of_a_single_class_are_refused(segmenter: Any) -> None:
    values = np.linspace(-7, 5, 64, dtype=np.float32).reshape(1, 8, 8)

    with pytest.raises(ModelError, match=r"values from -7 to 5; .* end the model with a Sigmoid"):
        segmenter({"o": values}, (8, 8)).decode({"o": values}, place(config.Input(), (8, 8), (8, 8)))


@pytest.mark.parametrize("as_probabilities", [True, False])
def test_each_class_has_its_own_regions(segmenter: Any, as_probabilities: bool) -> None:
    """Three classes, of which the first is the background and not wanted; two of them touch."""
    logits = np.zeros((1, 3, 8, 8), np.float32)
    logits[0, 0] = 2
    logits[0, 1, 1:4, 1:4] = 6
    logits[0, 2, 1:4, 4:7] = 8
    powers = np.exp(logits)
    probabilities = powers / powers.sum(axis=1, keepdims=True)
    outputs = {"o": probabilities if as_probabilities else logits}

    task = segmenter(outputs, (8, 8), labels=["sky", "cat", "dog"], keep=["cat", "dog"])
    found = task.decode(outputs, place(config.Input(), (8, 8), (8, 8)))

    assert [(one.label, one.box_xyxy) for one in found] == [("dog", (4, 1, 7, 4)), ("cat", (1, 1, 4, 4))]
    assert found[0].score == pytest.approx(probabilities[0, 2, 1, 4], rel=1e-5)
    assert found[1].score == pytest.approx(probabilities[0, 1, 1, 1], rel=1e-5)
    assert task.layout == "map"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(st.integers(0, 2**32 - 1))
def test_garbage_in_class_maps_gives_only_sound_detections(segmenter: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = np.array([np.nan, np.inf, -np.inf, 3e38, -3e38, 0, 1, 5], np.float32)
    outputs = {"o": rng.choice(values, (1, 3, 8, 8))}

    found = segmenter(outputs, (8, 8), score=0.0).decode(outputs, place(config.Input(), (50, 30), (8, 8)))

    assert all(0 <= one.score <= 1 for one in found)

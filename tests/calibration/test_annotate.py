"""Pictures for people: what can be checked without eyes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration import annotate
from edge.types import Detection, Mask

if TYPE_CHECKING:
    from pathlib import Path

    from edge.types import Image


def grey(width: int = 640, height: int = 480) -> Image:
    return np.full((height, width, 3), 90, np.uint8)


CAR = Detection("car", 2, 0.87, (100, 120, 300, 260))


def changed(before: Image, after: Image) -> Image:
    return np.any(before != after, axis=2)


def color(class_id: int) -> tuple[int, ...]:
    """What a class is drawn in: the ground of a classifier's answer in the corner."""
    return tuple(annotate.draw(grey(), [Detection("x", class_id, 0.5)])[0, 0].tolist())


def test_picture_itself_is_left_alone() -> None:
    image = grey()

    drawn = annotate.draw(image, [CAR])

    assert np.array_equal(image, grey())
    assert drawn.shape == image.shape


def test_nothing_found_changes_nothing() -> None:
    assert np.array_equal(annotate.draw(grey(), []), grey())


def test_box_is_drawn_along_its_edges_and_not_inside() -> None:
    touched = changed(grey(), annotate.draw(grey(), [CAR]))

    assert touched[120:261, 100].all()
    assert touched[260, 100:301].all()
    assert not touched[140:250, 200:290].any()
    assert not touched[:, :90].any()


def test_label_stands_above_its_box() -> None:
    touched = changed(grey(), annotate.draw(grey(), [CAR]))

    assert touched[110:118, 102:150].all()


@pytest.mark.parametrize("box", [(0, 0, 640, 480), (600, 0, 640, 30), (0, 470, 20, 480), (0, 0, 0, 0)])
def test_label_stays_in_the_picture(box: tuple[float, float, float, float]) -> None:
    drawn = annotate.draw(grey(), [Detection("a long name of a class", 3, 0.5, box)])

    ground = np.array(color(3))
    filled = np.all(drawn == ground, axis=2)
    assert filled.sum() > 1500  # what the letters leave of the label's ground


def test_labels_of_near_boxes_do_not_cover_each_other() -> None:
    pair = [Detection("car", 0, 0.9, (100, 120, 300, 260)), Detection("van", 1, 0.8, (102, 122, 302, 262))]

    alone, together = (annotate.draw(grey(), shown) for shown in (pair[:1], pair))

    assert np.array_equal(alone[:115], together[:115])  # the better one's, above the box
    assert np.all(together[122:] == color(1), axis=2).sum() > 800  # the other's, of which the letters leave 500


def test_mask_tints_its_pixels_and_lets_them_show() -> None:
    bits = np.ones((60, 80), np.bool_)
    found = Detection("car", 2, 0.9, (300, 200, 380, 260), Mask(bits, (300, 200), (640, 480)))

    drawn = annotate.draw(grey(), [found])

    inside = drawn[215:250, 320:360].reshape(-1, 3)
    expected = 90 * 0.55 + np.array(color(2)) * 0.45
    assert np.abs(inside - expected).max() <= 1


def test_keypoints_are_dots_wherever_they_are() -> None:
    found = Detection("face", 0, 0.9, (100, 100, 200, 200), None, ((150.0, 150.0), (-30.0, 900.0)))

    drawn = annotate.draw(grey(), [found])

    assert tuple(drawn[150, 150]) == color(0)


def test_classifiers_answers_are_listed_in_the_corner() -> None:
    answers = [Detection("cat", 0, 0.7), Detection("dog", 1, 0.2)]

    drawn = annotate.draw(grey(), answers)

    touched = changed(grey(), drawn)
    assert touched[:30, :40].mean() > 0.9
    assert not touched[100:].any()


def test_small_picture_is_enlarged_with_its_boxes() -> None:
    drawn = annotate.draw(grey(64, 48), [Detection("car", 2, 0.9, (10, 12, 30, 26))])

    assert drawn.shape == (48 * 7, 64 * 7, 3)
    assert changed(grey(64 * 7, 48 * 7), drawn)[26 * 7, 70:210].all()


def test_lines_and_letters_grow_with_the_picture() -> None:
    box = (0.25, 0.25, 0.75, 0.75)
    shares = []
    for width, height in ((640, 480), (3840, 2880)):
        scaled = tuple(side * size for side, size in zip(box, (width, height) * 2, strict=True))
        drawn = annotate.draw(grey(width, height), [Detection("car", 2, 0.9, scaled)])
        shares.append(changed(grey(width, height), drawn).mean())

    assert 0.4 < shares[1] / shares[0] < 1.5


def test_letters_that_opencv_lacks_are_replaced() -> None:
    drawn = [annotate.draw(grey(), [Detection(label, 1, 0.5)]) for label in ("Förderband 传é", "Forderband ?e")]

    assert np.array_equal(*drawn)


def test_class_keeps_its_colour_and_neighbours_differ() -> None:
    colors = [np.array(color(index), float) for index in range(80)]

    assert color(7) == color(7)
    for one in range(80):
        for other in range(one + 1, min(one + 21, 80)):
            assert np.linalg.norm(colors[one] - colors[other]) > 20


def test_side_by_side_has_a_panel_and_a_title_for_each_answer() -> None:
    shown = annotate.side_by_side(grey(), {"FP32": [CAR], "INT8": []})

    height, width = shown.shape[:2]
    assert width > 2 * 640
    assert height > 480
    assert np.array_equal(shown[-480:, -640:], grey())
    assert changed(grey(), shown[-480:, :640]).any()


@pytest.mark.parametrize("name", ["a.jpg", "a.JPEG", "a.png"])
def test_written_picture_can_be_read(tmp_path: Path, name: str) -> None:
    annotate.save(tmp_path / name, grey(), [CAR])

    back = cv2.imread(str(tmp_path / name))
    assert np.abs(back.astype(int) - annotate.draw(grey(), [CAR])).mean() < 2
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_unknown_format_is_a_programming_mistake(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a\.svg: pictures cannot be written as '\.svg'; use \.jpg or \.png"):
        annotate.save(tmp_path / "a.svg", grey(), [])
    assert list(tmp_path.iterdir()) == []


@given(
    size=st.tuples(st.integers(1, 700), st.integers(1, 700)),
    corners=st.lists(st.tuples(*[st.floats(0, 1)] * 4), max_size=5),
    label=st.text(max_size=60),
)
def test_no_box_size_or_label_is_too_odd(
    size: tuple[int, int], corners: list[tuple[float, float, float, float]], label: str
) -> None:
    width, height = size
    boxes = [(min(a, c) * width, min(b, d) * height, max(a, c) * width, max(b, d) * height) for a, b, c, d in corners]

    drawn = annotate.draw(grey(width, height), [Detection(label, 5, 0.5, box) for box in boxes])

    assert min(drawn.shape[:2]) >= 320

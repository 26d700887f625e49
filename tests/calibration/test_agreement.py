"""How close two models' answers are, finer than objects can be counted. Counting them is in test_evaluate.py."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration.agreement import closeness
from edge.types import Detection, Mask

Box = tuple[float, float, float, float]

LEFT: Box = (0, 0, 100, 100)
RIGHT: Box = (200, 0, 300, 100)


def found(score: float, box: Box = LEFT, *, label: str = "person", mask: Mask | None = None) -> Detection:
    return Detection(label, {"person": 0, "car": 1}[label], score, box, mask)


def rectangle(x: int, width: int, *, height: int = 10) -> Mask:
    """A filled mask at the top of a picture of 100 x 50."""
    return Mask(np.ones((height, width), np.bool_), (x, 0), (100, 50))


class TestObjects:
    def test_identical_answers_are_as_close_as_can_be(self) -> None:
        answer = [found(0.9), found(0.6, RIGHT, label="car"), found(0.1, RIGHT)]

        assert closeness(answer, answer) == 1.0

    def test_nothing_on_either_side_says_nothing(self) -> None:
        assert closeness([], []) is None

    def test_object_that_only_one_side_has_is_not_close_at_all(self) -> None:
        assert closeness([found(0.9)], []) == 0.0
        assert closeness([], [found(0.9)]) == 0.0
        assert closeness([found(0.9)], [found(0.9, label="car")]) == 0.0

    def test_of_two_equal_objects_one_lost_is_half(self) -> None:
        assert closeness([found(0.8), found(0.8, RIGHT)], [found(0.8)]) == pytest.approx(0.5)

    def test_faint_objects_weigh_as_little_as_their_score(self) -> None:
        """0.9 of a weight of 1.0 is found; the other way round 0.1."""
        both = [found(0.9), found(0.1, RIGHT)]

        assert closeness(both, [found(0.9)]) == pytest.approx(0.9)
        assert closeness(both, [found(0.1, RIGHT)]) == pytest.approx(0.1)

    def test_pair_gives_its_overlap(self) -> None:
        assert closeness([found(0.9)], [found(0.9, (0, 0, 100, 80))]) == pytest.approx(0.8)

    def test_difference_of_scores_is_taken_off(self) -> None:
        assert closeness([found(0.9)], [found(0.7)]) == pytest.approx(0.8)

    def test_objects_without_any_score_agree(self) -> None:
        assert closeness([found(0.0)], [found(0.0)]) == 1.0


class TestMasks:
    def test_masks_count_instead_of_boxes(self) -> None:
        """The boxes are equal, the masks 0.5, and so are all masks together."""
        whole, half = found(0.9, mask=rectangle(0, 20)), found(0.9, mask=rectangle(0, 10))

        assert closeness([whole], [half]) == pytest.approx(0.5)

    def test_all_masks_together_count_as_much_as_the_objects(self) -> None:
        """Of two objects the large one is lost: half of the objects, and a tenth of the pixels."""
        large, small = found(0.9, mask=rectangle(0, 90)), found(0.9, RIGHT, mask=rectangle(90, 10))

        assert closeness([large, small], [small]) == pytest.approx((0.5 + 0.1) / 2)

    def test_identical_masks_are_as_close_as_can_be(self) -> None:
        answer = [found(0.9, mask=rectangle(5, 20)), found(0.4, RIGHT, mask=rectangle(50, 3))]

        assert closeness(answer, answer) == 1.0

    def test_empty_masks_are_equal(self) -> None:
        empty = found(0.9, mask=Mask(np.zeros((3, 3), np.bool_), (0, 0), (100, 50)))

        assert closeness([empty], [empty]) == 1.0

    def test_masks_that_only_one_side_has_are_not_close_at_all(self) -> None:
        assert closeness([], [found(0.9, mask=rectangle(5, 20))]) == 0.0


def answers(**scores: float) -> list[Detection]:
    return [Detection(name, ord(name), score) for name, score in scores.items()]


class TestAnswers:
    def test_identical_answers_are_as_close_as_can_be(self) -> None:
        assert closeness(answers(a=0.7, b=0.3), answers(b=0.3, a=0.7)) == 1.0

    def test_same_first_answer_is_half_and_overlap_of_the_scores_the_other(self) -> None:
        """The smaller scores add up to 0.6 + 0.3, the larger to 0.7 + 0.4."""
        assert closeness(answers(a=0.7, b=0.3), answers(a=0.6, b=0.4)) == pytest.approx(0.5 + 0.5 * 0.9 / 1.1)

    def test_other_first_answer_leaves_the_overlap(self) -> None:
        assert closeness(answers(a=0.6, b=0.4), answers(a=0.4, b=0.6)) == pytest.approx(0.5 * 0.8 / 1.2)

    def test_answers_that_have_nothing_in_common_are_not_close_at_all(self) -> None:
        assert closeness(answers(a=0.6), answers(b=0.6)) == 0.0
        assert closeness(answers(a=0.6), []) == 0.0


objects = st.lists(
    st.builds(
        found,
        st.floats(0, 1),
        st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(1, 4), st.integers(1, 4)).map(
            lambda b: (float(b[0]), float(b[1]), float(b[0] + b[2]), float(b[1] + b[3]))
        ),
        label=st.sampled_from(["person", "car"]),
        mask=st.none() | st.builds(rectangle, st.integers(0, 40), st.integers(1, 40), height=st.integers(1, 20)),
    ),
    max_size=5,
)
classes = st.dictionaries(st.sampled_from("abcd"), st.floats(0, 1), max_size=4).map(lambda scores: answers(**scores))


@given(st.tuples(objects, objects) | st.tuples(classes, classes))
def test_closeness_is_symmetric_and_a_share(sides: tuple[list[Detection], list[Detection]]) -> None:
    one, other = sides

    result = closeness(one, other)

    assert (result is None) == (not one and not other)
    assert result == pytest.approx(closeness(other, one))
    assert result is None or -1e-9 <= result <= 1 + 1e-9


@given(objects | classes)
def test_every_answer_is_closest_to_itself(answer: list[Detection]) -> None:
    assert closeness(answer, answer) == (pytest.approx(1.0) if answer else None)

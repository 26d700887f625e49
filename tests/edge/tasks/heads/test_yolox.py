from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge.tasks.signature import UnfitError

# The fixtures are functions without state.
STATELESS = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def slow(table: list[list[float]], width: int, height: int, strides: tuple[int, ...], score: float) -> list[Any]:
    """YOLOX by the book: walk the maps cell by cell."""
    found = []
    row = 0
    for stride in strides:
        for y in range(height // stride):
            for x in range(width // stride):
                dx, dy, log_w, log_h, objectness, *classes = table[row]
                centre_x, centre_y = (x + dx) * stride, (y + dy) * stride
                w, h = math.exp(log_w) * stride, math.exp(log_h) * stride
                box = [centre_x - w / 2, centre_y - h / 2, centre_x + w / 2, centre_y + h / 2]
                for class_id, value in enumerate(classes):
                    if objectness * value >= score:
                        found.append((row, class_id, objectness * value, box))
                row += 1
    return found


def outputs_of(seed: int, width: int, height: int, strides: tuple[int, ...], classes: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    count = sum((width // stride) * (height // stride) for stride in strides)
    regression = rng.normal(0, 1.5, (1, count, 4))
    # In 64ths, so that no product comes within a rounding error of the scores that are asked for.
    scores = rng.integers(0, 65, (1, count, 1 + classes)) / 64
    return {"output": np.concatenate([regression, scores], axis=2).astype(np.float32)}


@STATELESS
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([(64, 96), (128, 64), (160, 224)]),
    st.sampled_from([(8, 16, 32), (8, 16, 32, 64)]),
    st.integers(1, 5),
    st.sampled_from([0.2003, 0.5003, 0.9003]),
)
def test_decoding_equals_the_slow_reference(
    fit_head: Any,
    assert_same: Any,
    seed: int,
    size: tuple[int, int],
    strides: tuple[int, ...],
    classes: int,
    score: float,
) -> None:
    outputs = outputs_of(seed, *size, strides, classes)
    head = fit_head("yolox", outputs, size)

    found = head.candidates(outputs, score)

    assert head.classes == classes
    assert_same(found, slow(outputs["output"][0].tolist(), *size, strides, score))


def test_one_cell_worked_by_hand(fit_head: Any) -> None:
    """In a 64x32 input there are 8x4, 4x2 and 2x1 cells; row 32 + 5 is column 1, row 1 at stride 16."""
    table = np.zeros((1, 32 + 8 + 2, 5 + 2), np.float32)
    table[0, 37] = [0.5, 0.25, math.log(2), math.log(3), 0.8, 0.1, 0.5]

    found = fit_head("yolox", {"o": table}, (64, 32)).candidates({"o": table}, 0.4)

    assert found.class_ids.tolist() == [1]
    assert found.scores.tolist() == pytest.approx([0.4])
    np.testing.assert_allclose(found.boxes_xyxy, [[24 - 16, 20 - 24, 24 + 16, 20 + 24]], rtol=1e-6)


def test_row_counts_for_each_class_that_reaches_the_score(fit_head: Any) -> None:
    table = np.zeros((1, 42, 5 + 3), np.float32)
    table[0, 3, 4:] = [1.0, 0.6, 0.2, 0.7]

    found = fit_head("yolox", {"o": table}, (64, 32)).candidates({"o": table}, 0.5)

    assert found.rows.tolist() == [3, 3]
    assert found.class_ids.tolist() == [0, 2]


def test_logits_are_activated_on_request(fit_head: Any) -> None:
    table = np.full((1, 42, 5 + 2), -1000, np.float32)
    table[0, 0] = [0, 0, 0, 0, 0, 1000, -3]

    found = fit_head("yolox", {"o": table}, (64, 32), "sigmoid").candidates({"o": table}, 0.25)

    assert found.rows.tolist() == [0]
    assert found.scores.tolist() == [0.5]


@pytest.mark.parametrize("at", [(7, 4), (7, 5), (7, 6)])
def test_row_with_a_nan_score_is_no_object(fit_head: Any, at: tuple[int, int]) -> None:
    table = np.ones((1, 42, 5 + 2), np.float32)
    table[0][at] = np.nan

    found = fit_head("yolox", {"o": table}, (64, 32)).candidates({"o": table}, 0.5)

    assert 7 not in found.rows
    assert len(set(found.rows.tolist())) == 41


def test_broken_model_costs_a_bounded_number_of_candidates(fit_head: Any) -> None:
    outputs = outputs_of(0, 416, 416, (8, 16, 32), 40)
    outputs["output"][..., 4:] = np.random.default_rng(0).uniform(0.9, 1, outputs["output"][..., 4:].shape)

    found = fit_head("yolox", outputs, (416, 416)).candidates(outputs, 0.1)

    assert len(found) == 4096
    products = np.sort((outputs["output"][0, :, 4:5] * outputs["output"][0, :, 5:]).ravel())
    assert found.scores.min() >= products[-4096] - 1e-6


def test_half_precision_is_decoded(fit_head: Any) -> None:
    table = np.zeros((1, 42, 5 + 2), np.float16)
    table[0, 0] = [0, 0, 0, 0, 1, 1, 0]

    found = fit_head("yolox", {"o": table}, (64, 32)).candidates({"o": table}, 0.5)

    assert found.boxes_xyxy.tolist() == [[-4, -4, 4, 4]]
    assert found.boxes_xyxy.dtype == np.float32


@pytest.mark.parametrize("shape", [(1, 41, 7), (1, 42, 5), (42, 7), (2, 42, 7)])
def test_other_shapes_are_refused(fit_head: Any, shape: tuple[int, ...]) -> None:
    with pytest.raises(UnfitError):
        fit_head("yolox", {"o": np.zeros(shape, np.float32)}, (64, 32))

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge.tasks.signature import UnfitError


def slow(channels: list[list[float]], score: float) -> list[Any]:
    found = []
    for column in range(len(channels[0])):
        x, y, w, h, *classes = (channel[column] for channel in channels)
        for class_id, value in enumerate(classes):
            if value >= score:
                found.append((column, class_id, value, [x - w / 2, y - h / 2, x + w / 2, y + h / 2]))
    return found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.sampled_from([0.2, 0.5, 0.9]))
def test_decoding_equals_the_slow_reference(
    fit_head: Any, assert_same: Any, seed: int, classes: int, score: float
) -> None:
    rng = np.random.default_rng(seed)
    boxes = rng.uniform(0, 64, (1, 4, 42))
    outputs = {"o": np.concatenate([boxes, rng.random((1, classes, 42))], axis=1).astype(np.float32)}
    head = fit_head("yolov8", outputs, (64, 32))

    assert head.classes == classes
    assert_same(head.candidates(outputs, score), slow(outputs["o"][0].tolist(), score))


def test_logits_are_activated_on_request(fit_head: Any) -> None:
    table = np.full((1, 4 + 2, 42), -1000, np.float32)
    table[0, 5, 9] = 0

    found = fit_head("yolov8", {"o": table}, (64, 32), "sigmoid").candidates({"o": table}, 0.25)

    assert (found.rows.tolist(), found.class_ids.tolist(), found.scores.tolist()) == ([9], [1], [0.5])


def test_column_with_a_nan_score_is_no_object(fit_head: Any) -> None:
    table = np.ones((1, 4 + 2, 42), np.float32)
    table[0, 5, 7] = np.nan

    assert 7 not in fit_head("yolov8", {"o": table}, (64, 32)).candidates({"o": table}, 0.5).rows


@pytest.mark.parametrize("cells", [42, 8 * 16 + 42, 10])
def test_other_pyramids_are_known(fit_head: Any, cells: int) -> None:
    """Strides 8-32, 4-32 and 16-32."""
    assert fit_head("yolov8", {"o": np.zeros((1, 9, cells), np.float32)}, (64, 32)).classes == 5


@pytest.mark.parametrize("shape", [(1, 9, 41), (1, 4, 42), (1, 42, 9), (2, 9, 42)])
def test_other_shapes_are_refused(fit_head: Any, shape: tuple[int, ...]) -> None:
    with pytest.raises(UnfitError):
        fit_head("yolov8", {"o": np.zeros(shape, np.float32)}, (64, 32))

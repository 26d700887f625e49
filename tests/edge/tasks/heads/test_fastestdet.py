from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge.tasks.signature import UnfitError


def slow(channels: list[list[list[float]]], size: tuple[int, int], score: float) -> list[Any]:
    """FastestDet.cpp's loops: a cell at a time, the best class of it."""
    height, width = len(channels[0]), len(channels[0][0])
    found = []
    for y in range(height):
        for x in range(width):
            objectness, dx, dy, w, h, *classes = (channel[y][x] for channel in channels)
            best = max(classes)
            value = objectness**0.6 * best**0.4
            if value >= score:
                centre_x, centre_y = (x + math.tanh(dx)) / width, (y + math.tanh(dy)) / height
                half_w, half_h = 0.5 / (1 + math.exp(-w)), 0.5 / (1 + math.exp(-h))
                box = [
                    (centre_x - half_w) * size[0],
                    (centre_y - half_h) * size[1],
                    (centre_x + half_w) * size[0],
                    (centre_y + half_h) * size[1],
                ]
                found.append((y * width + x, classes.index(best), value, box))
    return found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.sampled_from([0.2, 0.5, 0.9]))
def test_decoding_equals_the_slow_reference(
    fit_head: Any, assert_same: Any, seed: int, classes: int, score: float
) -> None:
    rng = np.random.default_rng(seed)
    table = rng.random((1, 5 + classes, 3, 5)).astype(np.float32)
    table[:, 1:5] = rng.normal(0, 2, (1, 4, 3, 5))
    head = fit_head("fastestdet", {"758": table}, (80, 48))

    assert head.classes == classes
    assert_same(head.candidates({"758": table}, score), slow(table[0].tolist(), (80, 48), score))


def test_cell_with_a_nan_score_is_no_object(fit_head: Any) -> None:
    table = np.ones((1, 7, 2, 2), np.float32)
    table[0, 0, 0, 1] = table[0, 6, 1, 0] = np.nan

    assert fit_head("fastestdet", {"o": table}, (32, 32)).candidates({"o": table}, 0.5).rows.tolist() == [0, 3]


@pytest.mark.parametrize("shape", [(1, 85, 22, 21), (1, 5, 22, 22), (1, 85, 352, 352), (1, 85, 0, 0), (1, 85, 22)])
def test_other_shapes_are_refused(fit_head: Any, shape: tuple[int, ...]) -> None:
    with pytest.raises(UnfitError):
        fit_head("fastestdet", {"o": np.zeros(shape, np.float32)}, (352, 352))

"""The slope of measurements."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import trend


@given(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3), st.integers(3, 2000))
def test_a_line_is_found(slope: float, start: float, count: int) -> None:
    xs = np.arange(count) * 0.5

    found = trend.fit(xs.tolist(), (start + slope * xs).tolist())

    assert found is not None
    assert found.slope == pytest.approx(slope, abs=1e-6)
    assert found.grown == pytest.approx(slope * xs[-1], abs=1e-3)
    assert found.n == min(count, 500)


def test_a_quarter_of_wild_values_moves_nothing() -> None:
    ys = [float(x) for x in range(40)]
    ys[::4] = [1e6] * 10

    found = trend.fit(list(range(40)), ys)

    assert found is not None
    assert found.slope == pytest.approx(1.0, abs=0.1)


def test_a_step_in_noise_is_no_slope() -> None:
    """An allocator that took one more arena early on is no leak."""
    ys = [100.0] * 10 + [104.0] * 90

    found = trend.fit(list(range(100)), ys)

    assert found is not None
    assert found.slope == 0


@pytest.mark.parametrize(("xs", "ys"), [([], []), ([0, 1], [0, 1]), ([5, 5, 5], [1, 2, 3])])
def test_too_little_is_no_trend(xs: list[float], ys: list[float]) -> None:
    assert trend.fit(xs, ys) is None


def test_places_and_measurements_come_in_pairs() -> None:
    with pytest.raises(ValueError, match="2 places, but 1"):
        trend.fit([1, 2], [1])

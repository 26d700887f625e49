"""Histograms of a snapshot: quantiles as PromQL has them, and what came since an earlier look."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.status import Histogram

COUNTS = st.lists(st.integers(0, 1000), min_size=4, max_size=4)
BOUNDS = (0.1, 0.2, 0.4)


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ((0, 0, 0, 0), 0.5, None),
        ((10, 0, 0, 0), 0.5, 0.05),  # evenly between 0 and 0.1
        ((5, 5, 0, 0), 0.5, 0.1),
        ((5, 5, 0, 0), 0.75, 0.15),
        ((5, 0, 5, 0), 0.75, 0.3),  # the empty bucket has no share
        ((5, 5, 0, 0), 1.0, 0.2),
        ((0, 0, 0, 7), 0.5, 0.4),  # beyond the last bound: nothing better is known
        ((1, 0, 0, 9), 0.95, 0.4),
    ],
)
def test_quantiles_are_those_of_histogram_quantile(
    counts: tuple[int, ...], share: float, expected: float | None
) -> None:
    assert Histogram(BOUNDS, counts, 1.0).quantile(share) == (None if expected is None else pytest.approx(expected))


@given(COUNTS, st.floats(0.01, 1), st.floats(0.01, 1))
def test_a_larger_share_has_no_smaller_quantile(counts: list[int], one: float, other: float) -> None:
    histogram = Histogram(BOUNDS, counts, 1.0)
    lower, upper = histogram.quantile(min(one, other)), histogram.quantile(max(one, other))

    if sum(counts):
        assert lower is not None
        assert upper is not None
        assert 0 <= lower <= upper <= BOUNDS[-1]
    else:
        assert lower is upper is None


@given(COUNTS, COUNTS)
def test_what_came_since_is_the_difference(before: list[int], more: list[int]) -> None:
    now = Histogram(BOUNDS, [a + b for a, b in zip(before, more, strict=True)], 5.0)

    since = now.since(Histogram(BOUNDS, before, 2.0))

    assert since.counts == more
    assert since.total == 3.0


def test_counts_that_began_anew_are_all_new() -> None:
    now = Histogram(BOUNDS, (1, 0, 0, 0), 0.1)

    assert now.since(Histogram(BOUNDS, (5, 0, 0, 0), 0.5)) is now
    assert now.since(Histogram((0.1,), (0, 0), 0.0)) is now

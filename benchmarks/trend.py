"""Whether a series of measurements grows: slopes that a few wild values do not move. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Trend", "fit"]

# Pairs grow with the square: 500 points are 124 750 of them, more points say nothing new about a line.
_MOST_POINTS = 500


@dataclass(frozen=True, slots=True)
class Trend:
    """A line through measurements."""

    slope: float
    """Units of y for each unit of x: the median of the slopes between all pairs of points."""
    grown: float
    """``slope`` over the whole of x."""
    n: int
    """Points that it is made of."""


def fit(xs: Sequence[float], ys: Sequence[float]) -> Trend | None:
    """The Theil-Sen line: up to 29 % of the points may be anything without moving it (Sen 1968, JASA 63, 1379-1389).

    Args:
        xs: where it was measured, rising; two points of the same x say nothing about a slope.
        ys: what was measured there.

    Returns:
        None of fewer than three points, or where all x are the same.
    """
    if len(xs) != len(ys):
        raise ValueError(f"{len(xs)} places, but {len(ys)} measurements")
    keep = np.unique(np.linspace(0, len(xs) - 1, min(len(xs), _MOST_POINTS)).round().astype(int))
    x, y = np.asarray(xs, float)[keep], np.asarray(ys, float)[keep]
    first, second = np.triu_indices(len(x), k=1)
    run = x[second] - x[first]
    if len(x) < 3 or not run.any():
        return None
    slope = float(np.median((y[second] - y[first])[run != 0] / run[run != 0]))
    return Trend(slope, slope * float(x[-1] - x[0]), len(x))

"""INT8 ranges from activation histograms. Pure: no files, no model, no TensorRT.

A range is the amax that INT8 has to cover: scale = amax / 127, symmetric, zero point 0. A method is one function and
one line in ``METHODS``.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np
from msgspec import Struct

from calibration.histogram import BINS
from edge.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from calibration.histogram import Histogram

__all__ = ["METHODS", "Range", "Ranges", "entropy", "largest", "mse", "percentile", "select"]

LEVELS = 128
"""Magnitudes that symmetric INT8 tells apart."""

MOST_CLIPPED = 0.01
"""Share of the values that the entropy search may clip: far more than a tail, far less than a crowd."""

PERCENTILE = 0.9999
"""Of the values other than zero."""

MSE_STRIDE = 8
"""Bins between candidates: 1/256 of the histogram's range."""

ZERO_AMAX = 1.0
"""Range of a tensor that was zero on every picture. Any positive range holds zeros; 0 makes TensorRT's build fail, and
a tiny one would overflow the requantisation factor (scale in x scale weight / scale out) if the tensor ever woke up."""


class Range(Struct, frozen=True, kw_only=True):
    """The range of one tensor, and where it came from."""

    amax: float
    scale: float
    """amax / 127, rounded to float32: the number that both the cache and the Q/DQ model carry."""
    source: Literal["measured", "zero", "bounded", "same", "tied"]
    """measured: by the method, from the tensor's own histogram.

    zero: the tensor was zero on every picture, or too small for a float32 scale, and amax is ``ZERO_AMAX``. bounded:
    the operator that computes it bounds its values. same: a tensor that holds the same values has this range. tied: it
    shares one range with other tensors, because the hardware wants that.
    """
    of: str | None = None
    """The tensor, or the tensors with commas between, that the range comes from; None: the tensor itself."""
    method: str | None = None
    """The method that chose amax; None: no method did, or the file is older than this field."""
    observed_amax: float | None = None
    """The largest |x| seen; None: the tensor was not observed."""
    clipped: float = 0.0
    """Share of the values that lie beyond the range."""
    alone: float | None = None
    """amax before the range was tied to others; None: it was not."""


class Ranges(Struct, frozen=True, kw_only=True):
    """``ranges.json``: the range of every tensor that has one."""

    schema: Literal["edge.ranges/1"] = "edge.ranges/1"
    method: str
    images: int
    reason: str = ""
    """Why this method, where it was chosen by measuring."""
    tensors: dict[str, Range]
    missing: dict[str, str] = {}
    """Floating-point tensors without a range, and why."""
    fp16_only: dict[str, str] = {}
    """Tensors that must stay in FP16, and why."""

    @property
    def scales(self) -> dict[str, float]:
        """Scale by tensor name."""
        return {name: entry.scale for name, entry in self.tensors.items()}


def largest(histogram: Histogram) -> float:
    """The largest |x| seen: nothing is clipped, and one outlier costs every other value its resolution."""
    return histogram.amax


def entropy(histogram: Histogram) -> float:
    """The amax whose INT8 distribution has the least Kullback-Leibler divergence from the one measured.

    S. Migacz, "8-bit Inference with TensorRT", GTC 2017, slides 36-40: for every number of bins i from 128 up, P is the
    first i bins with all that lies beyond added to the last, Q is the same bins squeezed into 128 levels and spread
    again over the bins that are not empty; the i of the least KL(P || Q) wins, and of equals the largest.

    Departures:
        - The bin of the zeros is given its neighbour's count first. Taken as the slides print it, the many exact zeros
          behind a ReLU outweigh everything, and the search clips so hard that a classifier loses its answers
          (tests/calibration/test_ranges.py has such a tensor). TensorRT's own rule is not public.
        - A candidate that clips more than ``MOST_CLIPPED`` of the values is passed over. Sigmoid outputs crowd around a
          value far from zero; a nearly empty prefix with everything in its last bin then looks cheap to the search, and
          two tensors of YOLOX-Nano were clipped in every value.
        - Levels are bins [ceil(k * i / 128), ceil((k + 1) * i / 128)), without the rounding of i / 128 to a whole
          number, so that every i is a candidate.
        - The sums over bins come from running totals, which makes the search exact and O(128) for each candidate.
    """
    if histogram.exponent is None:
        return 0.0
    counts = histogram.counts.astype(np.float64)
    counts[0] = counts[1]
    used = int(np.flatnonzero(histogram.counts)[-1]) + 1
    if used <= LEVELS or not counts.any():
        return histogram.amax
    kept = _least_divergence(counts[:used])
    return min(kept * histogram.bin_width, histogram.amax)


def percentile(histogram: Histogram) -> float:
    """The amax that ``PERCENTILE`` of the values stay below, to a bin's upper edge.

    As the percentile calibrators of onnxruntime (99.999 %) and ModelOpt (99.99 %) do, with one departure: exact zeros
    are left out of the count. They need no range, and behind a ReLU there may be so many of them that the percentile of
    the rest depends on how often the layer is silent.
    """
    counts = histogram.counts.copy()
    counts[0] -= histogram.zeros
    total = int(counts.sum())
    if not total:
        return histogram.amax
    inside = int(np.searchsorted(np.cumsum(counts), math.ceil(PERCENTILE * total))) + 1
    return min(inside * histogram.bin_width, histogram.amax)


def mse(histogram: Histogram) -> float:
    """The amax with the least mean squared error of rounding to INT8 and clipping.

    For step d = amax / 127 a value x costs (x - d round(x / d))^2 up to amax, and (x - amax)^2 beyond; values are taken
    to lie evenly within their bins, over which both are integrated exactly, but exact zeros, which cost nothing.
    Candidates are every ``MSE_STRIDE`` bins; of equals the largest wins. The criterion is that of R. Banner et al.,
    "Post training 4-bit quantization of convolutional networks", NeurIPS 2019, section 3, who assume a distribution
    where this has the histogram.
    """
    if histogram.exponent is None:
        return 0.0
    counts = histogram.counts.astype(np.float64)
    counts[0] -= histogram.zeros
    used = int(np.flatnonzero(histogram.counts)[-1]) + 1
    candidates = -(-used // MSE_STRIDE)
    errors = _squared_errors()[:candidates] @ counts
    best = candidates - int(np.argmin(errors[::-1]))
    return min(best * MSE_STRIDE * histogram.bin_width, histogram.amax)


METHODS: dict[str, Callable[[Histogram], float]] = {
    "entropy": entropy,
    "percentile": percentile,
    "mse": mse,
    "max": largest,
}


def select(
    histograms: Mapping[str, Histogram], *, method: str, images: int, others: Mapping[str, str] | None = None
) -> Ranges:
    """Choose the range of every tensor.

    Args:
        histograms: by tensor name.
        method: one of ``METHODS``.
        images: how many pictures the histograms hold.
        others: tensors for which another method chooses.

    Raises:
        ModelError: a tensor held NaN or infinite values; the message names all of them.
        ValueError: ``others`` names a tensor that has no histogram.
    """
    broken = [name for name, histogram in histograms.items() if histogram.nonfinite]
    if broken:
        raise ModelError(f"NaN or infinite activations in: {', '.join(broken)}")
    others = others or {}
    unknown = [name for name in others if name not in histograms]
    if unknown:
        raise ValueError(f"another method is given for tensors that have no histogram: {', '.join(unknown)}")
    return Ranges(
        method=method,
        images=images,
        tensors={name: _range(histogram, others.get(name, method)) for name, histogram in histograms.items()},
    )


def render(ranges: Ranges) -> bytes:
    """``ranges.json``'s content, byte-identical for equal ranges."""
    return msgspec.json.format(msgspec.json.encode(ranges), indent=2) + b"\n"


def _range(histogram: Histogram, method: str) -> Range:
    amax = METHODS[method](histogram)
    scale = _scale(amax)
    if scale < np.finfo(np.float32).tiny:
        return Range(amax=ZERO_AMAX, scale=_scale(ZERO_AMAX), source="zero", observed_amax=histogram.amax)
    # Counted in whole bins: the values in the bin that holds amax are taken to be inside.
    inside = int(np.ceil(amax / histogram.bin_width))
    clipped = float(histogram.counts[inside:].sum() / max(1, histogram.total)) if amax < histogram.amax else 0.0
    return Range(
        amax=amax,
        scale=scale,
        source="measured",
        method=method,
        observed_amax=histogram.amax,
        clipped=clipped,
    )


def _scale(amax: float) -> float:
    return float(np.float32(amax / 127))


@lru_cache(maxsize=1)
def _squared_errors() -> NDArray[np.float64]:
    """(candidates, BINS): what a value that lies evenly in a bin costs, in squared bin widths; amax is a bin's edge."""
    amax = np.arange(MSE_STRIDE, BINS + 1, MSE_STRIDE, dtype=np.float64)[:, None]
    edges = np.arange(BINS + 1, dtype=np.float64)[None, :]
    step = amax / 127
    level = np.floor(edges / step + 0.5)
    # The integral from 0 to x of the squared distance to the nearest level.
    rounding = step**3 * (level / 12 + (edges / step - level) ** 3 / 3)
    clipping = np.maximum(edges - amax, 0.0) ** 3 / 3
    return np.where(edges[:, 1:] <= amax, np.diff(rounding, axis=1), np.diff(clipping, axis=1))


@lru_cache(maxsize=1)
def _level_edges() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Every candidate i, (C,), and the bins at which its 128 levels begin, with i at the end, (C, 129)."""
    candidates = np.arange(LEVELS, BINS + 1)
    edges = -(-(candidates[:, None] * np.arange(LEVELS + 1)[None, :]) // LEVELS)
    return candidates, edges


def _least_divergence(counts: NDArray[np.float64]) -> int:
    """The number of bins to keep, from ``LEVELS`` to ``len(counts)``."""
    total = counts.sum()
    mass = np.concatenate(([0.0], np.cumsum(counts)))
    # What clips too much is not looked at.
    first = max(LEVELS, int(np.searchsorted(mass, (1 - MOST_CLIPPED) * total)))
    candidates, edges = (table[first - LEVELS : len(counts) - LEVELS + 1] for table in _level_edges())
    with np.errstate(divide="ignore", invalid="ignore"):
        plogp = np.where(counts > 0, counts * np.log(counts), 0.0)
        entropy_sum = np.concatenate(([0.0], np.cumsum(plogp)))
        level_mass = np.diff(mass[edges], axis=1)
        filled = edges if counts.all() else np.concatenate(([0], np.cumsum(counts > 0)))[edges]
        log_q = np.log(level_mass / np.diff(filled, axis=1))
        beyond = total - mass[candidates]
        last = counts[candidates - 1] + beyond
        # sum p log p over the kept bins, the last of which holds what lies beyond
        self_entropy = entropy_sum[candidates] - plogp[candidates - 1] + np.where(last > 0, last * np.log(last), 0.0)
        cross = np.where(level_mass > 0, level_mass * log_q, 0.0).sum(axis=1)
        cross += np.where(beyond > 0, beyond * log_q[:, -1], 0.0)
        divergence = (self_entropy - cross) / total - np.log(total) + np.log(mass[candidates])
    # P has mass in the last bin where Q has none
    divergence[(counts[candidates - 1] == 0) & (beyond > 0)] = np.inf
    divergence[~np.isfinite(divergence)] = np.inf
    return int(candidates[::-1][np.argmin(divergence[::-1])])

"""Mergeable histograms of |x|, the only thing that calibration keeps of an activation. Pure: numpy only.

The range of a histogram is always a power of two, so that a wider one is made by adding up neighbouring bins, exactly.
The counts therefore depend on nothing but the values: not on the order of the pictures, nor on how they are split over
runs or machines. Histograms that grow from the first picture's range, as TensorRT's do, lack this property
(docs/decisions/0003-histograms.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from calibration import kernel
from calibration.kernel import BINS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

__all__ = ["BINS", "Histogram", "from_columns", "to_columns"]

_ZEROS_ONLY = -149
"""float32's smallest number is 2**-149, so that only zeros are below 2**_ZEROS_ONLY."""


@dataclass(slots=True)
class Histogram:
    """Counts of |x| in ``BINS`` equal bins over [0, 2**exponent), with the statistics that bins cannot give.

    ``exponent`` is the smallest with amax < 2**exponent, and None while every value was zero.
    """

    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(BINS, np.int64))
    exponent: int | None = None
    minimum: float = math.inf
    maximum: float = -math.inf
    zeros: int = 0
    """Values that are exactly zero; they are in bin 0 as well."""
    nonfinite: int = 0
    """NaN and infinite values; they are in no bin."""
    _likely: int = field(default=_ZEROS_ONLY, repr=False, compare=False)
    """The exponent that the first values will probably need. It saves a pass over them and changes no count."""

    @property
    def amax(self) -> float:
        """The largest |x|, 0.0 for an empty or all-zero tensor."""
        return max(0.0, -self.minimum, self.maximum)

    @property
    def total(self) -> int:
        """Finite values counted."""
        return int(self.counts.sum())

    @property
    def bin_width(self) -> float:
        """Width of a bin; 0.0 while every value was zero."""
        return 0.0 if self.exponent is None else math.ldexp(1.0, self.exponent) / BINS

    def add(self, values: NDArray[Any]) -> None:
        """Count an array of floating-point values of any shape."""
        flat = np.ascontiguousarray(values, np.float32).reshape(-1)
        if not flat.size:
            return
        # The range so far nearly always holds, and then one pass is enough.
        guess = self._likely if self.exponent is None else self.exponent
        found = kernel.count(flat, guess, self.counts)
        if not (math.isfinite(found.minimum) and math.isfinite(found.maximum)):
            finite = flat[np.isfinite(flat)]
            self.nonfinite += flat.size - finite.size
            self.add(finite)
            return
        needed = max(_exponent_of(found), _ZEROS_ONLY if self.exponent is None else self.exponent)
        if found.counted and needed < guess:  # only where nothing but zeros was counted before
            self.counts[:] = 0
            self.counts[0] = self.zeros
        if needed != _ZEROS_ONLY:
            self._widen(needed)
        if needed != guess:
            found = kernel.count(flat, needed, self.counts)
        # Of the two zeros one is as small as the other; adding 0.0 leaves only the positive one, whatever came first.
        self.minimum, self.maximum = min(self.minimum, found.minimum + 0.0), max(self.maximum, found.maximum + 0.0)
        self.zeros += found.zeros

    def merge(self, other: Histogram) -> None:
        """Add the counts of another histogram, as if its values had been added here."""
        self.minimum, self.maximum = min(self.minimum, other.minimum), max(self.maximum, other.maximum)
        self.zeros += other.zeros
        self.nonfinite += other.nonfinite
        if other.exponent is None:
            self.counts += other.counts
            return
        self._widen(other.exponent)
        assert self.exponent is not None
        wider = self.exponent - other.exponent
        self.counts += _folded(other.counts, wider) if wider else other.counts

    def drain_into(self, total: Histogram) -> None:
        """Merge into another histogram, and be empty again; the buffer stays."""
        total.merge(self)
        self._likely = _ZEROS_ONLY if self.exponent is None else self.exponent
        self.counts[:] = 0
        self.exponent, self.minimum, self.maximum = None, math.inf, -math.inf
        self.zeros = self.nonfinite = 0

    def _widen(self, exponent: int) -> None:
        if self.exponent is None:
            self.exponent = exponent
        elif exponent > self.exponent:
            self.counts = _folded(self.counts, exponent - self.exponent)
            self.exponent = exponent


def _exponent_of(found: kernel.Extremes) -> int:
    """The smallest e with |x| < 2**e for all values."""
    amax = max(-found.minimum, found.maximum)
    return math.frexp(amax)[1] if amax > 0 else _ZEROS_ONLY


def _folded(counts: NDArray[np.int64], times: int) -> NDArray[np.int64]:
    """The counts over a range that is 2**times as wide."""
    group = 1 << min(times, 11)
    out = np.zeros(BINS, np.int64)
    out[: BINS // group] = counts.reshape(-1, group).sum(axis=1)
    return out


def to_columns(histograms: Mapping[str, Histogram]) -> dict[str, NDArray[Any]]:
    """Histograms as arrays, one row each in the given order.

    Returns:
        ``names`` (N,) str, ``counts`` (N, BINS) int64, ``exponent`` (N,) int32, ``minimum`` and ``maximum`` (N,)
        float64, ``zeros`` and ``nonfinite`` (N,) int64.
    """
    values = list(histograms.values())
    return {
        "names": np.array(list(histograms), np.str_),
        "counts": np.array([h.counts for h in values], np.int64).reshape(-1, BINS),
        "exponent": np.array([_NO_EXPONENT if h.exponent is None else h.exponent for h in values], np.int32),
        "minimum": np.array([h.minimum for h in values], np.float64),
        "maximum": np.array([h.maximum for h in values], np.float64),
        "zeros": np.array([h.zeros for h in values], np.int64),
        "nonfinite": np.array([h.nonfinite for h in values], np.int64),
    }


def from_columns(columns: Mapping[str, NDArray[Any]]) -> dict[str, Histogram]:
    """The histograms that ``to_columns`` made these arrays of, with buffers of their own.

    Raises:
        ValueError: a column is missing, is of another shape or dtype, or holds what no histogram can.
    """
    _check(columns)
    return {
        str(name): Histogram(
            counts=columns["counts"][index].copy(),
            exponent=None if columns["exponent"][index] == _NO_EXPONENT else int(columns["exponent"][index]),
            minimum=float(columns["minimum"][index]),
            maximum=float(columns["maximum"][index]),
            zeros=int(columns["zeros"][index]),
            nonfinite=int(columns["nonfinite"][index]),
        )
        for index, name in enumerate(columns["names"])
    }


def _check(columns: Mapping[str, NDArray[Any]]) -> None:
    rows = len(columns["names"]) if "names" in columns and columns["names"].ndim == 1 else 0
    for name, (kind, *shape) in _COLUMNS.items():
        if name not in columns:
            raise ValueError(f"has no column '{name}'")
        column = columns[name]
        if (column.dtype.kind if kind == "U" else column.dtype.str[1:]) != kind:
            raise ValueError(f"column '{name}' is of {column.dtype}; expected {kind}")
        if column.shape != (rows, *shape):
            raise ValueError(f"column '{name}' has the shape {column.shape}; expected {(rows, *shape)}")
    if len(set(columns["names"].tolist())) < rows:
        raise ValueError("names a tensor twice")
    exponent, counts = columns["exponent"], columns["counts"]
    amax = np.maximum(0.0, np.maximum(-columns["minimum"], columns["maximum"]))
    needed = np.where(amax > 0, np.frexp(amax)[1], _NO_EXPONENT)
    wrong = ~np.isfinite(amax) | (exponent != needed) | (columns["zeros"] < 0) | (columns["nonfinite"] < 0)
    wrong |= (counts < 0).any(axis=1) | (columns["zeros"] > counts[:, 0])
    wrong |= (exponent == _NO_EXPONENT) & counts[:, 1:].any(axis=1)
    if wrong.any():
        raise ValueError(f"tensor '{columns['names'][wrong.argmax()]}' has numbers that no histogram can have")


# an exponent is never below -148 (float32's smallest number), so the sentinel cannot be one
_NO_EXPONENT = -(1 << 30)

_COLUMNS: dict[str, tuple[str | int, ...]] = {
    "names": ("U",),
    "counts": ("i8", BINS),
    "exponent": ("i4",),
    "minimum": ("f8",),
    "maximum": ("f8",),
    "zeros": ("i8",),
    "nonfinite": ("i8",),
}
"""Kind and size of each column's numbers, as numpy writes them, and its shape beyond the rows."""

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
from zipfile import BadZipFile

import numpy as np

from calibration import kernel
from calibration.kernel import BINS
from edge.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["BINS", "Histogram", "load", "save"]


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

    @property
    def amax(self) -> float:
        """The largest |x|, 0.0 for an empty or all-zero tensor."""
        return max(-self.minimum, self.maximum, 0.0)

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
        guess = _ZEROS_ONLY if self.exponent is None else self.exponent
        found = kernel.count(flat, guess, self.counts)
        if not (math.isfinite(found.minimum) and math.isfinite(found.maximum)):
            finite = flat[np.isfinite(flat)]
            self.nonfinite += flat.size - finite.size
            self.add(finite)
            return
        if not found.counted:
            self._widen(math.frexp(max(-found.minimum, found.maximum))[1])
            assert self.exponent is not None
            found = kernel.count(flat, self.exponent, self.counts)
        self.minimum, self.maximum = min(self.minimum, found.minimum), max(self.maximum, found.maximum)
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
        self.counts += _folded(other.counts, self.exponent - other.exponent)

    def _widen(self, exponent: int) -> None:
        if self.exponent is None:
            self.exponent = exponent
        elif exponent > self.exponent:
            self.counts = _folded(self.counts, exponent - self.exponent)
            self.exponent = exponent


def _folded(counts: NDArray[np.int64], times: int) -> NDArray[np.int64]:
    """The counts over a range that is 2**times as wide."""
    group = 1 << min(times, 11)
    out = np.zeros(BINS, np.int64)
    out[: BINS // group] = counts.reshape(-1, group).sum(axis=1)
    return out


def save(path: Path, histograms: Mapping[str, Histogram]) -> None:
    """Write histograms to an .npz file, byte-identical for equal histograms."""
    values = list(histograms.values())
    np.savez_compressed(
        path,
        names=np.array(list(histograms), np.str_),
        counts=np.stack([h.counts for h in values]),
        # an exponent is never below -148 (float32's smallest number), so the sentinel cannot be one
        exponent=np.array([_NO_EXPONENT if h.exponent is None else h.exponent for h in values], np.int32),
        minimum=np.array([h.minimum for h in values], np.float64),
        maximum=np.array([h.maximum for h in values], np.float64),
        zeros=np.array([h.zeros for h in values], np.int64),
        nonfinite=np.array([h.nonfinite for h in values], np.int64),
    )


def load(path: Path) -> dict[str, Histogram]:
    """Read what ``save`` wrote.

    Raises:
        DataError: the file is no such archive, or of another number of bins.
    """
    try:
        # np.load leaves a file that it cannot read open, unless somebody else opened it
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            columns = {key: archive[key] for key in archive.files}
        names = columns.pop("names")
        counts = columns["counts"]
    except (ValueError, KeyError, TypeError, EOFError, BadZipFile) as error:
        raise DataError(f"{path}: is not a histogram file ({error})") from None
    if counts.shape != (len(names), BINS):
        raise DataError(f"{path}: has counts of shape {counts.shape}; expected ({len(names)}, {BINS})")
    return {
        str(name): Histogram(
            counts=counts[index].copy(),
            exponent=None if columns["exponent"][index] == _NO_EXPONENT else int(columns["exponent"][index]),
            minimum=float(columns["minimum"][index]),
            maximum=float(columns["maximum"][index]),
            zeros=int(columns["zeros"][index]),
            nonfinite=int(columns["nonfinite"][index]),
        )
        for index, name in enumerate(names)
    }


_ZEROS_ONLY = -149
"""float32's smallest number is 2**-149, so that only zeros are below 2**_ZEROS_ONLY."""

_NO_EXPONENT = -(1 << 30)

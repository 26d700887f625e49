"""What a person should know about the tensors of a calibration, each by its name. Pure: histograms and ranges in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from calibration import rules

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from calibration.histogram import Histogram
    from calibration.ranges import Ranges

__all__ = ["Finding", "bulk", "of"]

OUTLIER_RATIO = 8.0
"""A tensor whose largest |x| is more than this many times what 99.9 % of its values stay below is dominated by
outliers: without clipping, INT8 would leave those values 127 / 8, some 16 levels a side, which is 4 bits."""

NAMED = 5
"""Tensors that a sentence names; the report and ``ranges.json`` have all of them."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is true of some tensors."""

    kind: Literal["zero", "constant", "outliers", "tied", "missing", "fp16"]
    text: str
    """What it means, to be followed by the tensors."""
    tensors: tuple[str, ...]
    grave: bool
    """Whether a person should look at it: a warning rather than a fact."""

    def __str__(self) -> str:
        more = f" and {len(self.tensors) - NAMED} more" if len(self.tensors) > NAMED else ""
        return f"{_count(len(self.tensors))} {self.text}: {', '.join(self.tensors[:NAMED])}{more}"


def of(histograms: Mapping[str, Histogram], ranges: Ranges) -> list[Finding]:
    """Everything worth telling, the grave first."""
    found = [
        Finding(
            "zero",
            "zero on every picture; a branch that never wakes, or pictures that never wake it",
            (),
            True,
        ),
        Finding("constant", "of one value on every picture", (), True),
        Finding(
            "outliers",
            f"dominated by outliers (the largest value is over {OUTLIER_RATIO:g} times what 99.9 % stay below)",
            (),
            False,
        ),
        Finding("tied", "of a step over 4 times as wide, for a scale that the DLA needs to be shared", (), True),
        Finding("missing", "without a range, so that TensorRT runs their layers in floating point", (), True),
        Finding("fp16", "of layers that TensorRT has no INT8 form of", (), False),
    ]
    # One that is tied to others has their range, and one that is too small for a scale is as good as zero.
    low = {name for name, entry in ranges.tensors.items() if entry.source == "zero"}
    never = [name for name, histogram in histograms.items() if histogram.exponent is None or name in low]
    tensors = {
        "zero": never,
        "constant": [n for n, h in histograms.items() if h.exponent is not None and h.minimum == h.maximum],
        "outliers": _by_size({name: _outlier_ratio(histogram) for name, histogram in histograms.items()}),
        "tied": [name for name, _ in rules.costs(ranges)],
        "missing": list(ranges.missing),
        "fp16": list(ranges.fp16_only),
    }
    full = [Finding(f.kind, f.text, tuple(tensors[f.kind]), f.grave) for f in found if tensors[f.kind]]
    return sorted(full, key=lambda finding: not finding.grave)


def bulk(histogram: Histogram, share: float = 0.999) -> float:
    """What a share of the values other than zero stay below, to a bin's upper edge; 0.0 without any."""
    counts = histogram.counts.copy()
    counts[0] -= histogram.zeros
    total = int(counts.sum())
    if not total:
        return 0.0
    inside = int(np.searchsorted(np.cumsum(counts), math.ceil(share * total))) + 1
    return min(inside * histogram.bin_width, histogram.amax)


def _outlier_ratio(histogram: Histogram) -> float:
    most = bulk(histogram)
    return histogram.amax / most if most else 0.0


def _by_size(ratios: Mapping[str, float]) -> list[str]:
    over: Iterable[str] = (name for name, ratio in ratios.items() if ratio > OUTLIER_RATIO)
    return sorted(over, key=lambda name: (-ratios[name], name))


def _count(number: int) -> str:
    return f"{number} tensor{'' if number == 1 else 's'}"

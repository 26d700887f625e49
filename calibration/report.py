"""``report.html``: one calibration on one page, for people. Pure: values in, text out.

The page needs nothing but itself: no script, no network, styles and drawings inline. Everything that comes from outside
(names of files, tensors and layers) is escaped by the template engine.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2
import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from calibration.calibrate import Calibrated
    from calibration.findings import Finding
    from calibration.histogram import Histogram
    from calibration.images import ImageSet
    from calibration.ranges import Range
    from edge import config

__all__ = ["CalibrationReport", "Found", "Picture", "TensorRow", "of", "render"]

BARS = 64
"""Of a drawn histogram."""

DRAWN = 6
"""Histograms of the most clipped tensors, and as many of the widest, and of each finding."""

_HEIGHT = 24.0


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture that was used."""

    path: str
    width: int
    height: int
    sha256: str


@dataclass(frozen=True, slots=True)
class TensorRow:
    """The range of one tensor."""

    name: str
    amax: float
    scale: float
    source: str
    """Where the range comes from, in words."""
    observed_amax: float | None
    """None: the tensor was not observed."""
    clipped: float
    """Share of the values beyond the range."""
    quantized: bool
    """Whether it carries a Q/DQ pair; the others' ranges stand in the cache only."""
    bars: tuple[int, ...] = ()
    """Counts of |x| in equal parts of 0..``observed_amax``, empty for a tensor that was always zero."""

    @property
    def path(self) -> str:
        """SVG outline of the histogram in a box of 64 x 24, counts on a logarithmic scale."""
        top = math.log1p(max(self.bars, default=0)) or 1.0
        width = BARS / max(1, len(self.bars))
        steps = [
            f"V{_HEIGHT * (1 - math.log1p(count) / top):.1f}H{(index + 1) * width:.2f}"
            for index, count in enumerate(self.bars)
        ]
        return f"M0 {_HEIGHT:g}{''.join(steps)}V{_HEIGHT:g}Z"

    @property
    def edge(self) -> float:
        """Where the range ends in the box of ``path``, 0..64."""
        return BARS * min(1.0, self.amax / self.observed_amax) if self.observed_amax else float(BARS)


@dataclass(frozen=True, slots=True)
class Found:
    """Something that is true of some tensors."""

    text: str
    grave: bool
    drawn: tuple[TensorRow, ...]
    """Those that have a histogram, at most ``DRAWN``."""
    others: tuple[str, ...]
    """Names of the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationReport:
    """What the page says."""

    model: str
    summary: tuple[tuple[str, str], ...]
    """(figure, what it counts), for the head of the page."""
    warnings: tuple[str, ...]
    folder: str
    """That ``used`` and ``refused`` are relative to."""
    used: tuple[Picture, ...]
    refused: tuple[tuple[str, str], ...]
    """(path, reason)."""
    image_facts: tuple[tuple[str, str], ...]
    model_facts: tuple[tuple[str, str], ...]
    input_facts: tuple[tuple[str, str], ...]
    """Pre-processing, as in the deployment."""
    method: str
    trials: tuple[tuple[str, float, bool], ...]
    """(method, agreement with FP32 on held-out pictures, whether it was chosen)."""
    reason: str
    """Why that method; empty where the deployment names it."""
    found: tuple[Found, ...]
    missing: tuple[tuple[str, str], ...]
    """(tensor, why it has no range)."""
    fp16_only: tuple[tuple[str, str], ...]
    """(tensor, why it stays in FP16)."""
    tensors: tuple[TensorRow, ...]
    kept: tuple[str, ...]
    """Layers that rules keep in floating point."""
    skipped: tuple[tuple[str, str], ...]
    """(layer, why it could not be quantized)."""
    files: tuple[tuple[str, str], ...]
    """(name, SHA-256) of what was written."""
    provenance: tuple[tuple[str, str], ...]

    @property
    def drawn(self) -> tuple[TensorRow, ...]:
        """Tensors whose histograms are worth a look: the most clipped, then the widest.

        Of tensors that hold the same values (slices, reshapes) the first is shown.
        """
        unlike = {(f"{row.amax:.3g}", f"{row.observed_amax:.3g}"): row for row in reversed(self.tensors) if row.bars}
        clipped = sorted((row for row in unlike.values() if row.clipped > 0), key=lambda row: -row.clipped)[:DRAWN]
        others = (row for row in unlike.values() if row not in clipped)
        return (*clipped, *sorted(others, key=lambda row: -(row.observed_amax or 0.0))[:DRAWN])


def of(result: Calibrated, model: config.Model, images: ImageSet) -> CalibrationReport:
    """Gather what there is to say about a calibration."""
    record, placement = result.manifest, result.placement
    quantized = set(placement.activations)
    paths = [str(file.path) for file in images.used] + [str(refusal.path) for refusal in images.refused]
    folder = os.path.commonpath([os.path.dirname(path) for path in paths])  # noqa: PTH120 - of texts, no file is asked
    clipped = sum(entry.clipped > 0 for entry in result.ranges.tensors.values())
    rows = {
        name: _row(name, entry, result.histograms.get(name), quantized=name in quantized)
        for name, entry in result.ranges.tensors.items()
    }
    choice = result.choice
    trials = choice.agreement if choice is not None else {}
    return CalibrationReport(
        model=model.name,
        summary=(
            (str(result.ranges.images), "pictures"),
            (str(len(placement.layers)), "layers in INT8"),
            (str(len(placement.kept) + len(placement.skipped)), "layers in FP16"),
            (str(len(result.ranges.tensors)), "tensors with a range"),
            (str(clipped), "of them clipped"),
        ),
        warnings=result.warnings,
        folder=folder,
        used=tuple(Picture(os.path.relpath(file.path, folder), *file.size_wh, file.sha256) for file in images.used),
        refused=tuple((os.path.relpath(refusal.path, folder), refusal.reason) for refusal in images.refused),
        image_facts=(
            ("folder", folder),
            ("found", str(images.found)),
            ("used", str(len(images.used))),
            ("refused", str(len(images.refused))),
            ("distinct", f"{images.distinct} of {len(images.used)}"),
            ("digest", images.digest),
        ),
        model_facts=(
            ("file", Path(model.path).name),
            ("SHA-256", record.model_sha256),
            ("opset", f"{result.opset[0]}, of the INT8 model {result.opset[1]}"),
            ("rewritten", f"outputs differ by at most {result.rewrite_difference:.2g} of their largest value"),
        ),
        input_facts=tuple((key, _plain(value)) for key, value in msgspec.to_builtins(model.input).items()),
        method=result.ranges.method,
        trials=tuple((name, share, choice is not None and name == choice.method) for name, share in trials.items()),
        reason=choice.reason if choice is not None else "",
        found=tuple(_found(finding, rows) for finding in result.findings),
        missing=tuple(result.ranges.missing.items()),
        fp16_only=tuple(result.ranges.fp16_only.items()),
        tensors=tuple(rows.values()),
        kept=placement.kept,
        skipped=placement.skipped,
        files=tuple(record.files.items()),
        provenance=(
            ("made by", record.tool),
            ("at", record.created_at),
            ("cache for", f"TensorRT {record.tensorrt}"),
            *record.packages.items(),
        ),
    )


def render(report: CalibrationReport) -> str:
    """The page, the same text for the same report."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("calibration"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["figure"] = lambda value: f"{value:.4g}"
    environment.filters["share"] = _share
    return environment.get_template("report.html.j2").render(report=report)


def _row(name: str, entry: Range, histogram: Histogram | None, *, quantized: bool) -> TensorRow:
    return TensorRow(
        name=name,
        amax=entry.amax,
        scale=entry.scale,
        source=_source(entry),
        observed_amax=entry.observed_amax,
        clipped=entry.clipped,
        quantized=quantized,
        bars=_bars(histogram) if histogram is not None else (),
    )


def _source(entry: Range) -> str:
    """Where a range comes from: ``measured (mse)``, ``tied to conv_12; 0.83 alone``."""
    texts = {
        "measured": "measured",
        "zero": "zero on every picture",
        "bounded": "bounded by its operator",
        "same": f"as {entry.of}",
        "tied": f"tied to {entry.of}" if entry.of else "tied",
    }
    text = texts[entry.source]
    if entry.source == "measured" and entry.method:
        text += f" ({entry.method})"
    return f"{text}; {entry.alone:.4g} alone" if entry.alone is not None else text


def _found(finding: Finding, rows: Mapping[str, TensorRow]) -> Found:
    drawn = [rows[name] for name in finding.tensors if name in rows and rows[name].bars][:DRAWN]
    shown = {row.name for row in drawn}
    return Found(finding.text, finding.grave, tuple(drawn), tuple(n for n in finding.tensors if n not in shown))


def _bars(histogram: Histogram) -> tuple[int, ...]:
    """Counts of |x| in ``BARS`` parts of 0..amax, fewer where the histogram has fewer bins there."""
    if not histogram.amax or not histogram.bin_width:
        return ()
    # A value on a bin's lower edge is in that bin.
    counts = histogram.counts[: math.floor(histogram.amax / histogram.bin_width) + 1]
    edges = np.arange(min(BARS, len(counts))) * len(counts) // min(BARS, len(counts))
    return tuple(np.add.reduceat(counts, edges).tolist())


def _share(value: float) -> str:
    if value == 0:
        return "0"
    return f"{100 * value:.2f} %" if value >= 0.0001 else f"{1e6 * value:.2g} ppm"


def _plain(value: object) -> str:
    if value is None:
        return "the model's"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)

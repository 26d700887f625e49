"""From an FP32 model and a set of pictures to INT8: the steps of ``edge-calibrate calibrate`` in their order.

Nothing is written before everything has been computed; then the files appear one by one, the manifest that vouches for
them last. A run that fails or is interrupted leaves the previous calibration as it was.
"""

from __future__ import annotations

import datetime as dt
import logging
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import onnx_ir as ir

import edge
from calibration import cache, graph, histogram, observe, qdq, ranges
from edge import files, manifest
from edge.engine import open_engine
from edge.errors import ConfigError, ModelError
from edge.image import Preprocessor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from calibration.images import ImageSet
    from edge import config
    from edge.types import Tensors, TensorSpec

__all__ = ["Calibrated", "Prepared", "calibrate", "prepare"]

logger = logging.getLogger(__name__)

PROOF_IMAGES = 2
PROOF_TOLERANCE = 1e-4
"""Largest accepted difference, relative to the output's largest magnitude, between the model and its rewritten form.
Folding a normalisation reorders float32 sums, which costs some 1e-6; a conversion that changes what the model computes
is far above."""


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What a calibration found and wrote."""

    folder: Path
    manifest: manifest.Manifest
    ranges: ranges.Ranges
    histograms: dict[str, histogram.Histogram]
    placement: qdq.Placement
    opset: tuple[int, int]
    """Of the FP32 model and of the Q/DQ model."""
    rewrite_difference: float
    """Between the model and its form of the newer opset, before Q/DQ; 0.0 where nothing was rewritten."""
    warnings: tuple[str, ...]


def calibrate(
    model: config.Model,
    images: ImageSet,
    folder: Path,
    *,
    on_image: Callable[[], None] = lambda: None,
    report: Callable[[Calibrated], str] | None = None,
) -> Calibrated:
    """Calibrate one model of a deployment.

    Args:
        model: with a ``calibration`` section.
        images: the calibration set.
        folder: where the files of ``edge.manifest`` are written.
        on_image: called after each picture.
        report: renders ``report.html``; None writes none.

    Raises:
        ConfigError: a rule for FP16 layers matches nothing.
        ModelError: the model cannot be read, is quantized already, computes NaN, or cannot be rewritten.
    """
    section = model.calibration
    if section is None:
        raise ConfigError([f"models.{model.name}.calibration is missing; it names the calibration images"])
    source = Path(model.path)
    prepared = prepare(model)
    spec, rewritten = prepared.spec, prepared.rewritten
    preprocess = Preprocessor(model.input, spec)

    # The rewriting is proved, and the rules are tried, before the long part begins.
    proof = [tensors for _, (_, tensors) in zip(range(PROOF_IMAGES), _prepared(images, preprocess), strict=False)]
    difference = _prove(prepared, source, proof)
    key = f"models.{model.name}.calibration.fp16"
    graph.match_layers(prepared.candidates, section.fp16, key=key)

    observed = graph.load(source)
    graph.fix_input(observed, spec)
    observer = observe.Observer(observed, threads=model.engine.threads)
    for name, tensors in _prepared(images, preprocess):
        observer.observe(tensors, source=name)
        on_image()

    chosen = ranges.select(observer.histograms, method=section.method, images=observer.images)
    opset = (prepared.opset, rewritten.opset_imports[""])
    placement = qdq.insert(rewritten, chosen.scales, section.fp16, key=key)
    _check_runs(rewritten, proof[0])

    with files.replacing(folder, last=manifest.MANIFEST) as scratch:
        text = cache.render(chosen.scales, tensorrt=section.tensorrt)
        (scratch / manifest.CACHE).write_text(text, encoding="utf-8")
        ir.save(rewritten, scratch / manifest.INT8_MODEL)
        (scratch / manifest.RANGES).write_bytes(ranges.render(chosen))
        histogram.save(scratch / manifest.HISTOGRAMS, observer.histograms)
        record = _manifest(model, section, images, placement, {path.name: path for path in scratch.iterdir()})
        result = Calibrated(
            folder=folder,
            manifest=record,
            ranges=chosen,
            histograms=observer.histograms,
            placement=placement,
            opset=opset,
            rewrite_difference=difference,
            warnings=(*images.warnings, *_warnings(chosen, placement)),
        )
        if report is not None:
            (scratch / manifest.REPORT).write_text(files.printable(report(result)), encoding="utf-8")
        (scratch / manifest.MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
    return result


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model that is ready for Q/DQ."""

    spec: TensorSpec
    """The picture it takes."""
    rewritten: ir.Model
    """Opset 13 or later, normalisations folded, shapes fixed."""
    opset: int
    """Before."""
    folded: int
    """Normalisations."""

    @property
    def candidates(self) -> list[ir.Node]:
        """The layers that INT8 is for."""
        return [node for node in self.rewritten.graph if node.op_type in qdq.QUANTIZABLE]


def prepare(model: config.Model) -> Prepared:
    """Load a model and rewrite it for Q/DQ.

    Raises:
        ModelError: it cannot be read, is quantized already or not FP32, takes more than a picture, or cannot be
            converted.
    """
    source = Path(model.path)
    loaded = graph.load(source)
    if graph.is_quantized(loaded):
        raise ModelError(f"{source}: is quantized already (it has Q/DQ nodes); calibration starts from the FP32 model")
    with open_engine(source, model.engine, size_wh=model.input.size) as engine:
        if len(engine.inputs) != 1:
            names = ", ".join(spec.name for spec in engine.inputs)
            raise ModelError(f"{source}: has {len(engine.inputs)} inputs ({names}); expected one picture")
        spec = engine.inputs[0]
    graph.fix_input(loaded, spec)
    rewritten = graph.to_opset(loaded, graph.QDQ_OPSET)
    folded = graph.fold_batch_norm(rewritten)
    return Prepared(spec, rewritten, loaded.opset_imports[""], folded)


def _prepared(images: ImageSet, preprocess: Preprocessor) -> Iterator[tuple[str, Tensors]]:
    for file, image in zip(images.used, images, strict=True):
        array, _ = preprocess(image)
        yield str(file.path), {preprocess.tensor.name: array.copy()}


def _prove(prepared: Prepared, source: Path, proof: list[Tensors]) -> float:
    """The largest difference between the rewritten model's outputs and the original's, on real pictures.

    Raises:
        ModelError: it is more than rounding explains.
    """
    before, after, folded = prepared.opset, prepared.rewritten.opset_imports[""], prepared.folded
    if not folded and after == before:
        return 0.0
    original = graph.load(source)
    graph.fix_input(original, prepared.spec)
    difference = observe.largest_difference(original, prepared.rewritten, proof)
    if difference > PROOF_TOLERANCE:
        raise ModelError(
            f"{source}: converted from opset {before} to {after} with {folded} normalisations folded, its outputs"
            f" differ by {difference:.2g} (allowed: {PROOF_TOLERANCE}); export the model with opset"
            f" {graph.QDQ_OPSET} or later and normalisations folded"
        )
    text = "opset %d -> %d, %d normalisations folded: largest difference %.2g on %d pictures"
    logger.info(text, before, after, folded, difference, len(proof))
    return difference


def _check_runs(model: ir.Model, tensors: Tensors) -> None:
    """Run the Q/DQ model once: a graph that onnxruntime refuses, or that computes NaN, is not written."""
    outputs: list[Any] = observe.run(observe.session(model), tensors)
    for value, array in zip(model.graph.outputs, outputs, strict=True):
        if not np.isfinite(array).all():
            raise ModelError(f"output '{value.name}' of the Q/DQ model holds NaN or infinite values")


def _manifest(
    model: config.Model,
    section: config.Calibration,
    images: ImageSet,
    placement: qdq.Placement,
    written: dict[str, Path],
) -> manifest.Manifest:
    source = Path(model.path)
    return manifest.Manifest(
        tool=f"jetson-edge {edge.__version__}",
        created_at=dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z"),
        model=model.name,
        model_sha256=manifest.sha256_of(source),
        model_data={path.name: manifest.sha256_of(path) for path in graph.data_files(source)},
        input=model.input,
        method=section.method,
        tensorrt=section.tensorrt,
        fp16=section.fp16,
        fp16_layers=list(placement.kept),
        images=manifest.ImageSetRecord(
            digest=images.digest, count=len(images.used), sha256=sorted(file.sha256 for file in images.used)
        ),
        files={name: manifest.sha256_of(path) for name, path in sorted(written.items())},
        packages={name: metadata.version(name) for name in ("numpy", "onnx", "onnx-ir", "onnxruntime")},
    )


def _warnings(chosen: ranges.Ranges, placement: qdq.Placement) -> list[str]:
    found = [f"layer {layer} stays in floating point: {reason}" for layer, reason in placement.skipped]
    zero = [name for name, entry in chosen.tensors.items() if entry.source == "zero"]
    if zero:
        found.append(f"{len(zero)} tensors were zero on every picture: {', '.join(zero[:10])}")
    return found

"""From an FP32 model and a set of pictures to INT8: the steps of ``edge-calibrate calibrate`` in their order.

Nothing is written before everything has been computed, but what has been observed: then the files appear one by one,
the manifest that vouches for them last. A run that fails or is interrupted leaves the previous calibration as it was,
and the next one goes on from the picture where it stopped.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import logging
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import onnx_ir as ir

import edge
from calibration import cache, choose, findings, gather, graph, observation, observe, qdq, ranges, rules
from calibration.images import digest as image_digest
from calibration.trial import Trial
from edge import files, manifest
from edge.engine import open_engine
from edge.errors import ConfigError, DataError, ModelError
from edge.image import Preprocessor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from calibration.histogram import Histogram
    from calibration.images import ImageSet
    from calibration.observation import Observation
    from edge import config
    from edge.types import Image, Tensors, TensorSpec

__all__ = ["Calibrated", "Prepared", "calibrate", "gathered", "prepare"]

logger = logging.getLogger(__name__)

PROOF_IMAGES = 2
PROOF_TOLERANCE = 1e-4
"""Largest accepted difference, relative to the output's largest magnitude, between the model and its rewritten form.
Folding a normalisation reorders float32 sums, which costs some 1e-6; a conversion that changes what the model computes
is far above."""

TRIAL_IMAGES = 32
TRIAL_BYTES = 64 * 2**20
"""Held-out pictures that methods are tried on, and what their tensors may take: 13 at 640 x 640."""
VIEWS = 4
"""Of each, at most, where they are few."""


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What a calibration found and wrote."""

    folder: Path
    manifest: manifest.Manifest
    ranges: ranges.Ranges
    histograms: dict[str, Histogram]
    choice: choose.Choice | None
    """How the method was chosen; None where the deployment names one."""
    findings: tuple[findings.Finding, ...]
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
    earlier: Sequence[Path] = (),
    memory: int | None = None,
    on_images: Callable[[int], None] = lambda _: None,
    on_step: Callable[[str], None] = lambda _: None,
    report: Callable[[Calibrated], str] | None = None,
) -> Calibrated:
    """Calibrate one model of a deployment.

    Args:
        model: with a ``calibration`` section.
        images: the calibration set.
        folder: where the files of ``edge.manifest`` are written.
        earlier: histogram files of other pictures, which count as well.
        memory: bytes that observing may take; None: half of what is available.
        on_images: called with the number of pictures that were done since the last call.
        on_step: called with what begins after the pictures.
        report: renders ``report.html``; None writes none.

    Raises:
        ConfigError: a rule for FP16 layers matches nothing.
        DataError: an earlier file is not one, or is of another model or pre-processing.
        DeviceError: the memory is not enough.
        ModelError: the model cannot be read, is quantized already, computes NaN, or cannot be rewritten.
    """
    section = model.calibration
    if section is None:
        raise ConfigError([f"models.{model.name}.calibration is missing; it names the calibration images"])
    source = Path(model.path)
    key = f"models.{model.name}.calibration.fp16"
    with files.folder_lock(folder):
        prepared = prepare(model)
        rewritten = prepared.rewritten
        # The rewriting is proved, and the rules are tried, before the long part begins.
        preprocess = Preprocessor(model.input, prepared.spec)
        proof = [tensors for _, tensors in zip(range(PROOF_IMAGES), _prepared(images, preprocess), strict=False)]
        difference = _prove(prepared, source, proof)
        graph.match_layers(prepared.candidates, section.fp16, key=key)

        partial_file = folder / manifest.PARTIAL
        observed = gathered(
            model,
            prepared,
            images,
            start=[folder / manifest.HISTOGRAMS],
            earlier=earlier,
            partial_file=partial_file,
            memory=memory,
            on_images=on_images,
        )
        histograms = observed.merged()
        complete = partial(rules.complete, prepared.model, ties=section.ties)
        choice = None
        if section.method == "auto":
            on_step("trying methods")
            choice = _choose(model, prepared, observed, images, complete)
        method, others = (section.method, {}) if choice is None else (choice.method, choice.others)
        chosen = complete(ranges.select(histograms, method=method, images=observed.images, others=others))
        if choice is not None:
            chosen = msgspec.structs.replace(chosen, reason=choice.reason)
        placement = qdq.insert(rewritten, chosen.scales, section.fp16, key=key)
        _check_runs(rewritten, proof[0])

        on_step("writing")
        with files.replacing(folder, last=manifest.MANIFEST) as scratch:
            text = cache.render(chosen.scales, tensorrt=section.tensorrt)
            (scratch / manifest.CACHE).write_text(text, encoding="utf-8")
            ir.save(rewritten, scratch / manifest.INT8_MODEL)
            (scratch / manifest.RANGES).write_bytes(ranges.render(chosen))
            observation.save(scratch / manifest.HISTOGRAMS, observed)
            record = _manifest(model, section, observed, placement, {path.name: path for path in scratch.iterdir()})
            found = tuple(findings.of(histograms, chosen))
            result = Calibrated(
                folder=folder,
                manifest=record,
                ranges=chosen,
                histograms=histograms,
                choice=choice,
                findings=found,
                placement=placement,
                opset=(prepared.opset, rewritten.opset_imports[""]),
                rewrite_difference=difference,
                warnings=(*images.warnings, *_warnings(found, placement)),
            )
            if report is not None:
                (scratch / manifest.REPORT).write_text(files.printable(report(result)), encoding="utf-8")
            encoded = msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"
            (scratch / manifest.MANIFEST).write_bytes(encoded)
        partial_file.unlink(missing_ok=True)
    return result


def gathered(
    model: config.Model,
    prepared: Prepared,
    images: ImageSet,
    *,
    start: Sequence[Path] = (),
    earlier: Sequence[Path] = (),
    partial_file: Path,
    memory: int | None = None,
    on_images: Callable[[int], None] = lambda _: None,
) -> Observation:
    """What the model computes on the pictures, and on those of the earlier files.

    Args:
        model: of the deployment.
        prepared: the same.
        images: to observe, unless an earlier file has them.
        start: files that may hold some of the pictures already; used where they fit.
        earlier: files that count as well, whatever their pictures.
        partial_file: where an interrupted run leaves what it has.
        memory: bytes; None: half of what is available.
        on_images: called with the number of pictures that were done since the last call.

    Raises:
        DataError: an earlier file is not one, or does not belong to this model and pre-processing.
        DeviceError: the memory is not enough.
        ModelError: the model computes NaN.
    """
    known: Observation | None = None
    if earlier:
        wanted = gather.identity_of(model, prepared.spec)
        known = observation.merge_files(earlier)
        differences = observation.difference(known.identity, wanted)
        if differences:
            named = ", ".join(map(str, earlier))
            raise DataError(f"{named}: not of this deployment: {'; '.join(differences)}")
        known = _with_more(known, start, images)
        rest = images.without(known.sha256)
        on_images(len(images) - len(rest))
        if not rest:
            return known
        images = rest
    found = gather.gather(
        model,
        prepared.spec,
        images,
        graph_model=prepared.model,
        earlier=start,
        partial=partial_file,
        memory=memory,
        on_image=on_images,
    )
    if known is None:
        return found.observation
    return observation.merge(known, found.observation, names=("earlier files", "the pictures"))


def _with_more(known: Observation, start: Sequence[Path], images: ImageSet) -> Observation:
    """The result of an earlier run, if it holds what is known, and beside it pictures of the set alone."""
    wanted = known.sha256 | {file.sha256 for file in images.used}
    for path in filter(Path.exists, start):
        try:
            found = observation.load(path)
        except DataError:
            continue  # gather tells of it
        same = not observation.difference(found.identity, known.identity) and set(found.tensors) == set(known.tensors)
        if same and known.sha256 <= found.sha256 <= wanted:
            logger.info("%s: %d pictures are taken from it", path, found.images)
            known = found
    return known


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model that is ready for Q/DQ."""

    spec: TensorSpec
    """The picture it takes."""
    model: ir.Model
    """As it was read, with the fixed shapes: what is observed, and what TensorRT's parser sees."""
    rewritten: ir.Model
    """Opset 13 or later, constants and normalisations folded, shapes fixed."""
    opset: int
    """Before."""
    folded: int
    """Constants and normalisations."""

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
    broken = [value.name for node in loaded.graph for value in node.outputs if set(value.name or "") & {"\n", "\r"}]
    if broken:
        raise ModelError(f"{source}: tensor {broken[0]!r} has a line break in its name, which no cache can hold")
    graph.fix_input(loaded, spec)
    rewritten = graph.to_opset(ir.from_proto(ir.to_proto(loaded)), graph.QDQ_OPSET)
    if not any(node.op_type in qdq.QUANTIZABLE for node in rewritten.graph):
        raise ModelError(f"{source}: has no layer to quantize; expected one of {', '.join(qdq.QUANTIZABLE)}")
    folded = graph.fold_constants(rewritten, observe.evaluate) + graph.fold_batch_norm(rewritten)
    return Prepared(spec, loaded, rewritten, loaded.opset_imports[""], folded)


def _choose(
    model: config.Model,
    prepared: Prepared,
    observed: Observation,
    images: ImageSet,
    complete: Callable[[ranges.Ranges], ranges.Ranges],
) -> choose.Choice:
    """Try the methods on held-out pictures, as many as fit into ``TRIAL_BYTES``, spread evenly over them."""
    at_hand = [index for index, file in enumerate(images.used) if file.sha256 in observed.held.sha256]
    most = max(choose.FEWEST_HELD, TRIAL_BYTES // (math.prod(prepared.spec.shape) * prepared.spec.dtype.itemsize))
    most = min(most, TRIAL_IMAGES)
    count = min(most, len(at_hand))
    chosen = [at_hand[part * len(at_hand) // count] for part in range(count)]
    views = min(most // count, VIEWS) if count else 1
    trial = None
    if count >= choose.FEWEST_HELD:
        trial = Trial(
            model,
            prepared.rewritten,
            prepared.spec,
            (view for index in chosen for view in _views(images.load(index), views)),
            tensors=observed.tensors,
            views=views,
        )
    choice = choose.choose(trial, observed.fit.histograms, complete, images=len(observed.fit.sha256), held=count)
    elsewhere = len(observed.held.sha256) - len(at_hand)
    if elsewhere:
        reason = f"{choice.reason} ({elsewhere} more are held out, but not at hand)"
        choice = dataclasses.replace(choice, reason=reason)
    return choice


def _views(image: Image, number: int) -> list[Image]:
    """A picture, its mirror image, and two parts of it: of few pictures one alone would decide too much."""
    height, width = image.shape[:2]
    h, w = -(-height * 3 // 4), -(-width * 3 // 4)
    views = [image, image[:, ::-1], image[:h, :w], image[height - h :, width - w :]]
    return [np.ascontiguousarray(view) for view in views[:number]]


def _prepared(images: ImageSet, preprocess: Preprocessor) -> Iterator[Tensors]:
    for image in images:
        array, _ = preprocess(image)
        yield {preprocess.tensor.name: array.copy()}


def _prove(prepared: Prepared, source: Path, proof: list[Tensors]) -> float:
    """The largest difference between the rewritten model's outputs and the original's, on real pictures.

    Raises:
        ModelError: it is more than rounding explains.
    """
    before, after, folded = prepared.opset, prepared.rewritten.opset_imports[""], prepared.folded
    if not folded and after == before:
        return 0.0
    difference = observe.largest_difference(prepared.model, prepared.rewritten, proof)
    if difference > PROOF_TOLERANCE:
        raise ModelError(
            f"{source}: converted from opset {before} to {after} with {folded} constants and normalisations folded,"
            f" its outputs differ by {difference:.2g} (allowed: {PROOF_TOLERANCE}); export the model with opset"
            f" {graph.QDQ_OPSET} or later and normalisations folded"
        )
    text = "opset %d -> %d, %d constants and normalisations folded: largest difference %.2g on %d pictures"
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
    observed: Observation,
    placement: qdq.Placement,
    written: dict[str, Path],
) -> manifest.Manifest:
    source = Path(model.path)
    pictures = sorted(observed.sha256)
    return manifest.Manifest(
        tool=f"jetson-edge {edge.__version__}",
        created_at=dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z"),
        model=model.name,
        model_sha256=manifest.sha256_of(source),
        model_data={name: manifest.sha256_of(path) for name, path in graph.data_files(source).items()},
        input=model.input,
        method=section.method,
        ties=section.ties,
        tensorrt=section.tensorrt,
        fp16=section.fp16,
        fp16_layers=list(placement.kept),
        images=manifest.ImageSetRecord(digest=image_digest(pictures), count=len(pictures), sha256=pictures),
        files={name: manifest.sha256_of(path) for name, path in sorted(written.items())},
        packages=manifest.versions_of("numpy", "onnx", "onnx-ir", "onnxruntime", "onnxruntime-gpu"),
    )


def _warnings(found: Sequence[findings.Finding], placement: qdq.Placement) -> list[str]:
    skipped = [f"layer {layer} stays in floating point: {reason}" for layer, reason in placement.skipped]
    return skipped + [str(finding) for finding in found if finding.grave]

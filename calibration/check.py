"""What can be said about a deployment's calibration before it runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from calibration import build, graph, images
from calibration.calibrate import prepare
from calibration.recipe import decide
from edge import config, manifest
from edge.engine import backend_of
from edge.engine.tensorrt import probe
from edge.errors import ConfigError, DataError, EdgeError
from edge.process import open_pipeline

__all__ = ["Findings", "check"]


@dataclass(frozen=True, slots=True)
class Findings:
    """Sentences about a deployment."""

    facts: list[str] = field(default_factory=list)
    faults: list[EdgeError] = field(default_factory=list)
    """What would make ``calibrate`` or ``evaluate`` stop."""


def check(deployment: config.Deployment) -> Findings:
    """Look at every model, its pictures and its rules, without running the model on a picture."""
    findings = Findings()
    for model in deployment.models:
        prefix = f"models.{model.name}"
        for step in (_check_model, _check_rules, _check_pictures, _check_artifacts, _check_engine):
            try:
                findings.facts.extend(f"{prefix}: {fact}" for fact in step(model))
            except ConfigError as error:
                findings.faults.append(error)
            except EdgeError as error:
                named = str(error) if str(error).startswith(prefix) else f"{prefix}: {error}"
                findings.faults.append(type(error)(named))
                if step is _check_model:
                    break  # nothing else can be said about a model that cannot be read
    return findings


def _check_model(model: config.Model) -> list[str]:
    prepared = prepare(model)
    with open_pipeline(model, precision="fp32") as pipeline:
        counts = Counter(node.op_type for node in prepared.rewritten.graph).most_common(4)
        operators = ", ".join(f"{count} {name}" for name, count in counts)
        return [pipeline.description, f"opset {prepared.opset}: {operators}, ..."]


def _check_rules(model: config.Model) -> list[str]:
    if model.calibration is None:
        return ["has no calibration section"]
    candidates = prepare(model).candidates
    kept = graph.match_layers(candidates, model.calibration.fp16, key=f"models.{model.name}.calibration.fp16")
    return [f"{len(candidates) - len(kept)} layers would run in INT8, {len(kept)} are kept in floating point"]


def _check_pictures(model: config.Model) -> list[str]:
    facts: list[str] = []
    used: frozenset[str] = frozenset()
    if model.calibration is not None:
        section = model.calibration
        found = images.collect(section.images, count=section.count, seed=section.seed)
        used = frozenset(file.sha256 for file in found.used)
        facts += _described(found, "calibration") + _moved(model, used)
    if model.evaluation is not None:
        facts += _described(images.collect(model.evaluation.images, exclude=used), "evaluation")
        labels = model.evaluation.labels
        if labels is not None and not Path(labels).is_file():
            raise DataError(f"evaluation.labels: {labels}: no such file")
    return facts


def _moved(model: config.Model, used: frozenset[str]) -> list[str]:
    """How the pictures differ from those of the last calibration."""
    try:
        record = manifest.read(model.artifacts_dir)
    except EdgeError:
        return []  # a damaged one is told of by _check_artifacts
    if record is None:
        return []
    before = frozenset(record.images.sha256)
    new, gone = len(used - before), len(before - used)
    if not new and not gone:
        return []
    return [
        f"{new} of the {len(used)} pictures are new since the calibration, {gone} of its {len(before)} are not used now"
    ]


def _described(found: images.ImageSet, purpose: str) -> list[str]:
    refused = [f"{refusal.path}: {refusal.reason}; would be left out" for refusal in found.refused]
    return [f"{len(found.used)} pictures for {purpose}", *refused, *found.warnings]


def _check_artifacts(model: config.Model) -> list[str]:
    record = manifest.read(model.artifacts_dir)
    if record is None:
        return [f"not calibrated yet ({model.artifacts_dir})"]
    path = manifest.artifact_to_run(model, "int8").path
    return [f"calibrated: {path}", *manifest.outdated(model, record)]


def _check_engine(model: config.Model) -> list[str]:
    """What would run the model here, and whether its engine is up to date."""
    key = f"models.{model.name}.engine"
    if backend_of(model.engine) == "onnxruntime":
        there = manifest.read_engine(model.artifacts_dir)
        if there is None:
            return ["runs in onnxruntime here"]
        return [f"runs in onnxruntime here; its engine is for {there.device.name}, TensorRT {there.device.tensorrt}"]
    device = probe()
    facts = [f"the engine: {reason}" for reason in decide(model.engine, device, key=key).reasons]
    reasons = build.needed(model, device)
    if not reasons:
        there = manifest.read_engine(model.artifacts_dir)
        known = [] if there is None else manifest.reservations(model, there)
        return [*facts, f"{model.artifacts_dir / manifest.PLAN}: is up to date", *known]
    return [*facts, *(f"the engine has to be built: {reason}" for reason in reasons)]

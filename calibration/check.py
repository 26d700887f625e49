"""What can be said about a deployment's calibration before it runs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from msgspec import Struct

from calibration import graph, images, qdq
from edge import config, manifest
from edge.errors import ConfigError, DataError, EdgeError, ModelError
from edge.process import open_pipeline

__all__ = ["Findings", "check"]


class Findings(Struct, frozen=True):
    """Sentences about a deployment."""

    facts: list[str]
    problems: list[str]
    """What would make ``calibrate`` or ``evaluate`` stop."""


def check(deployment: config.Deployment) -> Findings:
    """Look at every model, its pictures and its rules, without running the model on a picture."""
    findings = Findings([], [])
    for model in deployment.models:
        prefix = f"models.{model.name}"
        for step in (_check_model, _check_rules, _check_pictures, _check_artifacts):
            try:
                findings.facts.extend(f"{prefix}: {fact}" for fact in step(model))
            except ConfigError as error:
                findings.problems.extend(error.problems)
            except EdgeError as error:
                findings.problems.append(f"{prefix}: {error}")
                if step is _check_model:
                    break  # nothing else can be said about a model that cannot be read
    return findings


def _check_model(model: config.Model) -> list[str]:
    loaded = graph.load(Path(model.path))
    if graph.is_quantized(loaded):
        raise ModelError(f"{model.path}: is quantized already; calibration starts from the FP32 model")
    with open_pipeline(model, precision="fp32") as pipeline:
        operators = ", ".join(
            f"{count} {name}" for name, count in Counter(n.op_type for n in loaded.graph).most_common(4)
        )
        return [pipeline.description, f"opset {loaded.opset_imports.get('', 0)}: {operators}, ..."]


def _check_rules(model: config.Model) -> list[str]:
    if model.calibration is None:
        return ["has no calibration section"]
    loaded = graph.load(Path(model.path))
    candidates = [node for node in loaded.graph if node.op_type in qdq.QUANTIZABLE]
    kept = graph.match_layers(candidates, model.calibration.fp16, key=f"models.{model.name}.calibration.fp16")
    return [f"{len(candidates) - len(kept)} layers would run in INT8, {len(kept)} are kept in floating point"]


def _check_pictures(model: config.Model) -> list[str]:
    facts: list[str] = []
    for name, section in (("calibration", model.calibration), ("evaluation", model.evaluation)):
        if section is None:
            continue
        patterns = [section.images] if isinstance(section.images, str) else section.images
        found = images.collect(patterns, count=section.count if isinstance(section, config.Calibration) else None)
        facts.append(f"{len(found.used)} pictures for {name}")
        facts += [f"{refusal.path}: {refusal.reason}; would be left out" for refusal in found.refused]
        facts += list(found.warnings)
    labels = model.evaluation.labels if model.evaluation else None
    if labels is not None and not Path(labels).is_file():
        raise DataError(f"evaluation.labels: {labels}: no such file")
    return facts


def _check_artifacts(model: config.Model) -> list[str]:
    if manifest.read(model.artifacts_dir) is None:
        return [f"not calibrated yet ({model.artifacts_dir})"]
    artifact = manifest.artifact_to_run(model, "int8")
    return [f"calibrated: {artifact.path}"]

"""From a deployment to a TensorRT engine on this device: the steps of ``edge-calibrate build`` in their order.

Decide, build in a child process, compare the new engine with FP32 on real pictures, and only then let it replace the
one in use. An engine that misses a limit of the deployment's ``parity`` is not installed; the deployment's fallbacks
are tried instead, each in its turn. Whatever fails, the engine in use stays what it was.

What TensorRT is told is ``planning``'s to decide and ``builder``'s to do; how far an engine is off is ``parity``'s.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import logging
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

import edge
from calibration import child, graph, placement
from calibration.parity import Reference
from calibration.planning import network_of, plan_build, steps
from calibration.recipe import settings
from edge import files, manifest
from edge.engine import open_engine
from edge.errors import DataError, ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from calibration.events import Done, Event
    from calibration.images import ImageSet
    from calibration.parity import Parity
    from calibration.placement import Placement
    from calibration.planning import Planned
    from calibration.recipe import Decision
    from edge import config

__all__ = ["BUILDER_LOG", "Attempt", "Built", "build", "needed"]

logger = logging.getLogger(__name__)

_WORK = ".building-"
BUILDER_LOG = "builder.log"
"""What TensorRT said in the last build, also of one that failed."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One build, done."""

    planned: Planned
    outcome: Done
    """What the builder says of it."""
    placement: Placement
    parity: Parity | None
    """None where there were no pictures to compare on."""

    @property
    def passed(self) -> bool:
        """Whether every limit is kept."""
        return self.parity is not None and not self.parity.failures


@dataclass(frozen=True, slots=True)
class Built:
    """What ``build`` did."""

    folder: Path
    manifest: manifest.EngineManifest | None
    """Of the engine that was installed; None: the one that was there stays."""
    attempts: tuple[Attempt, ...]
    """All that were built, the installed one last."""


def needed(model: config.Model, device: manifest.Device) -> list[str]:
    """Why the engine has to be built again, one sentence each; empty where the one in use is up to date.

    Raises:
        ModelError: the engine's manifest is damaged, or a file that it depends on is missing.
    """
    folder = model.artifacts_dir
    there = manifest.read_engine(folder)
    if there is None:
        return [f"{folder} holds no engine"]
    then = there.device
    pairs = [(name, getattr(then, name), getattr(device, name)) for name in ("tensorrt", "compute_capability")]
    pairs += [("integrated", then.integrated, device.integrated)]
    found = [f"{name} was {before} and is {now}" for name, before, now in pairs if before != now]
    if there.dla_core is not None and not device.dla_cores:
        found.append("it was built for the DLA, and there is none")
    plan = folder / manifest.PLAN
    if not plan.is_file() or manifest.sha256_of(plan) != there.files.get(manifest.PLAN):
        found.append(f"{plan} is missing or was changed after it was written")
    if there.requested != _requested(model, device):
        found.append("the model, its calibration or the deployment has changed")
    return found


def build(
    model: config.Model,
    device: manifest.Device,
    *,
    deployment: Path,
    pictures: ImageSet | None,
    force: bool = False,
    on_event: Callable[[Event], None] = lambda _: None,
    on_attempt: Callable[[Planned], None] = lambda _: None,
) -> Built:
    """Build an engine for a device, and install it if it is close enough to FP32.

    Args:
        model: of the deployment.
        device: this one, as ``edge.engine.tensorrt.probe`` finds it.
        deployment: the file.
        pictures: of the calibration; the engine is compared with FP32 on some of them.
        force: install what the deployment asks for, whatever the comparison says, or without one.
        on_event: called with what the builder reports.
        on_attempt: called with what is about to be built.

    Returns:
        What was built; its ``manifest`` is None where nothing passed.

    Raises:
        ConfigError: the deployment asks for what this TensorRT does not have, or a rule matches nothing.
        DataError: there are no pictures to compare on.
        DeviceError: the DLA that is asked for is not there, or the builder ran out of memory.
        ModelError: the model cannot be built, or the calibration is not of this deployment.
    """
    if pictures is None and not force:
        raise DataError(
            f"models.{model.name}: there are no pictures to compare the new engine with FP32 on; give --images, or"
            " --force to install it unchecked"
        )
    folder = model.artifacts_dir
    done: list[Attempt] = []
    with files.folder_lock(folder):
        network = network_of(model)
        reference = None if pictures is None else _reference(model, pictures)
        for step in steps(model.engine, network)[: 1 if force else None]:
            with _workshop(folder) as work:
                planned = plan_build(model, device, network, work, step, deployment=deployment)
                on_attempt(planned)
                attempt, record = _attempt(model, device, planned, work, reference, on_event)
                done.append(attempt)
                if attempt.passed or force:
                    _install(folder, work, record)
                    return Built(folder, record, tuple(done))
                assert attempt.parity is not None, "without pictures, and without force, nothing is built"
                logger.warning("%s: not installed: %s", step, "; ".join(attempt.parity.failures))
    return Built(folder, None, tuple(done))


def _attempt(
    model: config.Model,
    device: manifest.Device,
    planned: Planned,
    work: Path,
    reference: Reference | None,
    on_event: Callable[[Event], None],
) -> tuple[Attempt, manifest.EngineManifest]:
    outcome = child.run(planned.recipe, on_event=on_event)
    placed = placement.read_folder(work)
    (work / manifest.PLACEMENT).write_bytes(msgspec.json.format(msgspec.json.encode(placed.to_json()), indent=2))
    record = _record(model, device, planned, work)
    compared = None
    if reference is not None:
        plan = work / manifest.PLAN
        with open_engine(plan, model.engine, built=record) as engine:
            compared = reference.compare(engine, model.engine.parity)
        record = msgspec.structs.replace(record, parity=compared.record())
    return Attempt(planned, outcome, placed, compared), record


@contextmanager
def _workshop(folder: Path) -> Iterator[Path]:
    """A scratch folder on the file system of the result. What TensorRT said outlives it."""
    for stale in folder.glob(f"{_WORK}*"):  # of a process that was killed: the lock is ours
        shutil.rmtree(stale)
    with tempfile.TemporaryDirectory(prefix=_WORK, dir=folder) as work:
        try:
            yield Path(work)
        finally:
            log = Path(work) / BUILDER_LOG
            if log.is_file():
                log.replace(folder / BUILDER_LOG)


def _install(folder: Path, work: Path, record: manifest.EngineManifest) -> None:
    encoded = msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"
    with files.replacing(folder, last=manifest.ENGINE_MANIFEST) as scratch:
        for name in (*record.files, manifest.TIMING_CACHE):
            if (work / name).is_file():
                (work / name).replace(scratch / name)
        (scratch / manifest.ENGINE_MANIFEST).write_bytes(encoded)


def _record(model: config.Model, device: manifest.Device, planned: Planned, work: Path) -> manifest.EngineManifest:
    source = Path(model.path)
    decision, recipe = planned.decision, planned.recipe
    written = [manifest.PLAN, manifest.PLACEMENT, manifest.PARSED, manifest.ENGINE_CACHE]
    if decision.quantization == "calibrator" and recipe.cache is not None:
        written.append(Path(recipe.cache).name)
    return manifest.EngineManifest(
        tool=f"jetson-edge {edge.__version__}",
        created_at=dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        model=model.name,
        model_sha256=manifest.sha256_of(source),
        model_data={path.name: manifest.sha256_of(path) for path in graph.data_files(source)},
        input=model.input,
        precision=decision.precision,
        quantization=decision.quantization,
        dla_core=decision.dla_core,
        fallback=decision.step.fallback,
        device=device,
        requested=_requested(model, device),
        made_from=_made_from(model, decision),
        shapes={io.name: io.shape for io in (*recipe.inputs, *recipe.outputs)},
        io_scales={io.name: io.scale for io in (*recipe.inputs, *recipe.outputs) if io.scale is not None},
        parity=None,
        files={name: manifest.sha256_of(work / name) for name in written if (work / name).is_file()},
    )


def _made_from(model: config.Model, decision: Decision) -> dict[str, str]:
    """The file of the calibration that a build takes its INT8 from, with its SHA-256."""
    used = {"qdq": manifest.INT8_MODEL, "cache": manifest.RANGES, "ranges": manifest.RANGES}.get(decision.quantization)
    calibrated = manifest.read(model.artifacts_dir)
    # A model that comes with Q/DQ of its own has none; what lies there is of another.
    if used is None or calibrated is None or calibrated.model_sha256 != manifest.sha256_of(Path(model.path)):
        return {}
    return {used: calibrated.files[used]}


def _requested(model: config.Model, device: manifest.Device) -> str:
    """Digest of everything that an engine depends on."""
    source = Path(model.path)
    if not source.is_file():
        raise ModelError(f"models.{model.name}.path: {source}: no such model file")
    calibrated = manifest.read(model.artifacts_dir) if model.engine.precision == "int8" else None
    evidence: dict[str, Any] = {
        "model": [manifest.sha256_of(path) for path in (source, *graph.data_files(source))],
        "input": msgspec.to_builtins(model.input),
        "engine": settings(model.engine),
        "calibration": None if calibrated is None else [calibrated.files, calibrated.fp16_layers],
        "device": [device.tensorrt, device.compute_capability, device.integrated, bool(device.dla_cores)],
    }
    return hashlib.sha256(msgspec.json.encode(evidence, order="deterministic")).hexdigest()


def _reference(model: config.Model, pictures: ImageSet) -> Reference:
    """FP32's answers to some of the pictures, spread evenly over them."""
    count = min(model.engine.parity.images, len(pictures))
    chosen = [part * len(pictures) // count for part in range(count)]
    return Reference.of(model, ((pictures.used[index].path.name, pictures.load(index)) for index in chosen))

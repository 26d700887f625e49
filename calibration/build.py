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
from msgspec import Struct

import edge
from calibration import child, graph, measure, observe, placement
from calibration.events import LOG
from calibration.parity import Reference
from calibration.planning import calibrator_cache, network_of, plan_build, steps
from calibration.recipe import REVISION, decide
from edge import files, manifest
from edge.errors import DataError, DeviceError, ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from calibration.events import Done, Event
    from calibration.images import ImageSet
    from calibration.parity import Parity
    from calibration.placement import Placement
    from calibration.planning import Planned
    from calibration.recipe import Decision
    from edge import config
    from edge.errors import EdgeError

__all__ = ["REFUSED", "Attempt", "Built", "Refused", "build", "needed", "refused_before"]

logger = logging.getLogger(__name__)

_WORK = ".building-"
REFUSED = "engine.refused.json"
"""What came of the last build, where nothing of it could be installed."""
_OF_A_BUILD = (manifest.PARSED, manifest.ENGINE_CACHE)
"""Files that an engine may have, and another one not."""


class Refused(Struct, frozen=True, kw_only=True):
    """A build of which nothing was installed."""

    requested: dict[str, str]
    """As the manifest of an engine has it."""
    device: manifest.Device
    created_at: str
    reasons: dict[str, str]
    """Why not, by what was tried."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One build, done."""

    planned: Planned
    outcome: Done | None
    """What the builder says of it; None where there is no plan."""
    placement: Placement | None
    parity: Parity | None
    """None where there were no pictures to compare on, or no outputs."""
    error: EdgeError | None = None
    """Why there is no plan, or none that runs."""

    @property
    def passed(self) -> bool:
        """Whether every limit is kept."""
        return self.error is None and self.parity is not None and not self.parity.failures


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
        ModelError: a file that it depends on is missing.
    """
    folder = model.artifacts_dir
    try:
        there = manifest.read_engine(folder)
    except ModelError as error:
        return [str(error)]
    if there is None:
        return [f"{folder} holds no engine"]
    found = manifest.device_differences(there, device)
    plan = folder / manifest.PLAN
    if not plan.is_file() or manifest.sha256_of(plan) != there.files.get(manifest.PLAN):
        found.append(f"{plan} is missing or was changed after it was written")
    now = _requested(model, device)
    found += [f"{what} has changed" for what, digest in now.items() if there.requested.get(what) != digest]
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
        first = decide(model.engine, device, key=f"models.{model.name}.engine")
        network = network_of(model)
        reference = None if pictures is None else _reference(model, pictures)
        in_order = steps(model.engine, network, on_dla=first.dla_core is not None)
        for step in in_order[: 1 if force else None]:
            with _workshop(folder) as work:
                free = observe.available_bytes()
                planned = plan_build(model, device, network, work, step, deployment=deployment, free_bytes=free)
                on_attempt(planned)
                record = _record(model, device, planned)
                attempt = _attempt(model, planned, work, record, reference, on_event)
                done.append(attempt)
                if attempt.passed or (force and attempt.error is None):
                    return Built(folder, _install(folder, work, record, attempt), tuple(done))
            logger.warning("%s: not installed: %s", step, _why(attempt))
        if all(attempt.error is not None for attempt in done):
            assert done[0].error is not None, "there is a step, and it failed"
            raise done[0].error
        _refuse(folder, model, device, done)
    return Built(folder, None, tuple(done))


def refused_before(model: config.Model, device: manifest.Device) -> Refused | None:
    """What came of a build of just this, if nothing of it could be installed and nothing has changed since."""
    path = model.artifacts_dir / REFUSED
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Refused)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    same = (found.requested, found.device) == (_requested(model, device), device)
    return found if same else None


def _attempt(
    model: config.Model,
    planned: Planned,
    work: Path,
    record: manifest.EngineManifest,
    reference: Reference | None,
    on_event: Callable[[Event], None],
) -> Attempt:
    """Build, and compare in a process of its own: a fault of the driver's must not end what comes after.

    Raises:
        DeviceError: the builder lacks something, memory for example, that a fallback would lack as well.
    """
    try:
        outcome = child.run(planned.recipe, on_event=on_event)
    except ModelError as error:
        return Attempt(planned, None, None, None, error)
    placed = placement.read_folder(work)
    (work / manifest.PLACEMENT).write_bytes(msgspec.json.format(msgspec.json.encode(placed.to_json()), indent=2))
    if reference is None:
        return Attempt(planned, outcome, placed, None)
    core = planned.decision.dla_core
    try:
        run = measure.run(work / manifest.PLAN, reference.inputs, work, dla_core=core, built=record, iterations=0)
        compared = reference.compare(run.outputs, model.engine.parity)
    except (DeviceError, ModelError) as error:
        return Attempt(planned, outcome, placed, None, error)
    return Attempt(planned, outcome, placed, compared)


def _why(attempt: Attempt) -> str:
    if attempt.error is not None:
        return str(attempt.error)
    assert attempt.parity is not None, "without pictures, and without force, nothing is built"
    return "; ".join(attempt.parity.failures)


@contextmanager
def _workshop(folder: Path) -> Iterator[Path]:
    """A scratch folder on the file system of the result. What TensorRT said and timed outlives it."""
    for stale in folder.glob(f"{_WORK}*"):  # of a process that was killed: the lock is ours
        shutil.rmtree(stale)
    with tempfile.TemporaryDirectory(prefix=_WORK, dir=folder) as work:
        try:
            yield Path(work)
        except OSError as error:
            if error.filename is not None or error.errno is None:
                raise
            # A full disk does not say where it is.
            raise type(error)(error.errno, error.strerror, str(folder)) from error
        finally:
            for name in (LOG, manifest.TIMING_CACHE):
                if (Path(work) / name).is_file():
                    (Path(work) / name).replace(folder / name)


def _install(folder: Path, work: Path, record: manifest.EngineManifest, attempt: Attempt) -> manifest.EngineManifest:
    """Let an engine replace the one in use, and remove what only that one needed."""
    names = (manifest.PLAN, manifest.PLACEMENT, *_OF_A_BUILD, Path(attempt.planned.recipe.cache or "").name)
    written = {name: work / name for name in names if (work / name).is_file()}
    compared = None if attempt.parity is None else attempt.parity.record()
    sums = {name: manifest.sha256_of(path) for name, path in sorted(written.items())}
    record = msgspec.structs.replace(record, parity=compared, files=sums)
    with files.replacing(folder, last=manifest.ENGINE_MANIFEST) as scratch:
        for name, path in written.items():
            path.replace(scratch / name)
        _write_json(scratch / manifest.ENGINE_MANIFEST, record)
    for name in {*_OF_A_BUILD, REFUSED} - written.keys():
        (folder / name).unlink(missing_ok=True)
    return record


def _refuse(folder: Path, model: config.Model, device: manifest.Device, done: list[Attempt]) -> None:
    """Remember that nothing could be installed, so that ``--if-needed`` does not try the same at every start."""
    reasons = {str(attempt.planned.decision.step): _why(attempt) for attempt in done}
    refused = Refused(requested=_requested(model, device), device=device, created_at=_now(), reasons=reasons)
    _write_json(folder / REFUSED, refused)


def _record(model: config.Model, device: manifest.Device, planned: Planned) -> manifest.EngineManifest:
    """What an engine is for, before it is there."""
    source = Path(model.path)
    decision, recipe = planned.decision, planned.recipe
    return manifest.EngineManifest(
        tool=f"jetson-edge {edge.__version__}",
        created_at=_now(),
        model=model.name,
        model_sha256=manifest.sha256_of(source),
        model_data={name: manifest.sha256_of(path) for name, path in graph.data_files(source).items()},
        input=model.input,
        precision=decision.precision,
        quantization=decision.quantization,
        dla_core=decision.dla_core,
        fallback=decision.step.fallback,
        device=device,
        settings=manifest.engine_settings(model.engine),
        requested=_requested(model, device),
        made_from=_made_from(model, decision),
        shapes={io.name: io.shape for io in (*recipe.inputs, *recipe.outputs)},
        io_scales={io.name: io.scale for io in (*recipe.inputs, *recipe.outputs) if io.scale is not None},
        parity=None,
        files={},
    )


def _made_from(model: config.Model, decision: Decision) -> dict[str, str]:
    """The file of the calibration that a build takes its INT8 from, with its SHA-256."""
    used = {"qdq": manifest.INT8_MODEL, "cache": manifest.RANGES, "ranges": manifest.RANGES}.get(decision.quantization)
    calibrated = manifest.read(model.artifacts_dir)
    # A model that comes with Q/DQ of its own has none; what lies there is of another.
    if used is None or calibrated is None or calibrated.model_sha256 != manifest.sha256_of(Path(model.path)):
        return {}
    return {used: calibrated.files[used]}


def _requested(model: config.Model, device: manifest.Device) -> dict[str, str]:
    """Digest of each thing that an engine depends on, but the device."""
    source, section = Path(model.path), model.engine
    if not source.is_file():
        raise ModelError(f"models.{model.name}.path: {source}: no such model file")
    weights = graph.data_files(source).values()
    evidence: dict[str, Any] = {
        "what a build does": REVISION,
        "the model": [manifest.sha256_of(path) for path in (source, *weights)],
        "input": msgspec.to_builtins(model.input),
        "engine": manifest.engine_settings(section),
    }
    calibrated = manifest.read(model.artifacts_dir) if section.precision == "int8" else None
    if calibrated is not None:
        used = [calibrated.files.get(name) for name in (manifest.INT8_MODEL, manifest.RANGES)]
        evidence["the calibration"] = [used, calibrated.fp16_layers]
    if section.precision == "int8" and section.quantization == "calibrator":
        evidence["the set of calibration pictures"] = calibrator_cache(model, device)
    return {
        what: hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()
        for what, value in evidence.items()
    }


def _now() -> str:
    return dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")


def _write_json(path: Path, value: object) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


def _reference(model: config.Model, pictures: ImageSet) -> Reference:
    """FP32's answers to some of the pictures, spread evenly over them."""
    count = min(model.engine.parity.images, len(pictures))
    chosen = [part * len(pictures) // count for part in range(count)]
    return Reference.of(model, ((pictures.used[index].path.name, pictures.load(index)) for index in chosen))

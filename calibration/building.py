"""What a person sees of ``edge-calibrate build``: decisions, progress, outcome. The work is done in ``build``."""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from calibration import build, console, events, observe
from calibration.events import LOG
from calibration.planning import network_of, plan_build, steps
from calibration.recipe import Step
from edge import config, manifest
from edge.engine import backend_of
from edge.engine.tensorrt import probe
from edge.errors import ConfigError
from edge.systemd import notify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from calibration.images import ImageSet
    from calibration.planning import Planned

__all__ = ["elsewhere", "run", "show_plan"]

logger = logging.getLogger(__name__)

_NOTIFY_PERIOD_S = 10
ASSUMED = "Orin (assumed)"
"""Name of a device that nobody has looked at."""
_LONGEST_S = 7200
_EXTEND_S = 120
"""How much longer than now systemd shall wait for a unit that builds before it starts."""


def elsewhere(model: config.Model, tensorrt: str | None, dla_cores: int | None) -> manifest.Device:
    """The device that a dry run is for: this one, or an Orin with what is said of it.

    Raises:
        click.BadParameter: the version is none that engines are built with.
        ConfigError: likewise, and it is the deployment's.
    """
    if tensorrt is None and dla_cores is None and backend_of(config.Engine()) == "tensorrt":
        return probe()
    section = model.calibration
    assumed = tensorrt or (section.tensorrt if section is not None else "10.3.0")
    try:
        known = manifest.version(assumed) >= (8, 5, 0)
    except ValueError:
        known = False
    if not known:
        wanted = f"{assumed!r} is no TensorRT that engines are built with; expected 8.5 or later, such as 10.3.0"
        if tensorrt is not None:
            raise click.BadParameter(wanted, param_hint="--tensorrt")
        raise ConfigError([f"models.{model.name}.calibration.tensorrt: {wanted}"])
    cores = 2 if dla_cores is None else dla_cores
    return manifest.Device(
        name=ASSUMED,
        tensorrt=assumed,
        compute_capability="8.7",
        integrated=True,
        dla_cores=cores,
        cuda="",
    )


def show_plan(
    model: config.Model,
    deployment: Path,
    device: manifest.Device,
    pictures: Callable[[], ImageSet | None],
    *,
    quiet: bool,
) -> dict[str, Any]:
    """Say what ``build`` would do, and why; return the same as a document."""
    network = network_of(model)
    found = pictures()
    with tempfile.TemporaryDirectory() as work:
        planned = plan_build(
            model,
            device,
            network,
            Path(work),
            Step(model.engine.precision),
            deployment=deployment,
            free_bytes=None if device.name == ASSUMED else observe.available_bytes(),
        )
    on_dla = planned.decision.dla_core is not None
    in_order = [str(step) for step in steps(model.engine, network, on_dla=on_dla)]
    document = {
        "model": model.name,
        "device": msgspec.to_builtins(device),
        "decision": msgspec.to_builtins(planned.decision),
        "recipe": msgspec.to_builtins(planned.recipe),
        "steps": in_order,
        "pictures": 0 if found is None else min(model.engine.parity.images, len(found)),
        "notes": list(planned.notes),
        "trtexec": planned.trtexec,
        "trtexec_cannot_say": list(planned.unsaid),
    }
    if quiet:
        return document
    for note in planned.notes:
        console.warn(note)
    recipe = planned.recipe
    workspace = recipe.pools.workspace
    rows = [
        ("device", f"{device.name}, TensorRT {device.tensorrt}, {_counted(device.dla_cores, 'DLA core')}"),
        *(("", reason) if index else ("decisions", reason) for index, reason in enumerate(planned.decision.reasons)),
        ("workspace", "half of what is free there" if workspace is None else f"{workspace / 2**20:.0f} MiB"),
        ("single layers", f"{len(recipe.float_layers)} kept in floating point" if recipe.float_layers else "none"),
        ("compared on", f"{document['pictures']} pictures" if found is not None else "nothing: build needs --images"),
        ("in this order", " -> ".join(in_order)),
    ]
    console.table(f"{model.name}: what build would do", ("", ""), rows)
    click.echo(planned.trtexec)
    later = [name for name in (manifest.PARSED, manifest.ENGINE_CACHE) if f"/{name}" in planned.trtexec]
    if later:
        console.warn(f"the trtexec line names {' and '.join(later)}, which a build leaves in {model.artifacts_dir}")
    if planned.unsaid:
        console.warn(f"trtexec cannot say {'; '.join(planned.unsaid)}: it builds another engine")
    return document


def run(
    model: config.Model,
    deployment: Path,
    pictures: Callable[[], ImageSet | None],
    *,
    if_needed: bool,
    force: bool,
    quiet: bool,
) -> dict[str, Any]:
    """Build, and say what came of it; return the same as a document."""
    device = probe()
    reasons = build.needed(model, device) if if_needed else []
    if if_needed and not reasons:
        if not quiet:
            click.echo(f"{model.artifacts_dir / manifest.PLAN}: is up to date")
        there = manifest.read_engine(model.artifacts_dir)
        for text in manifest.reservations(model, there) if there is not None else ():
            console.warn(f"{model.name}: {text}")
        return {"model": model.name, "installed": True, "kept_limits": True, "built": False, "attempts": []}
    refused = build.refused_before(model, device) if if_needed else None
    if refused is not None:
        last = "; ".join(f"{step}: {why}" for step, why in refused.reasons.items())
        console.warn(
            f"{model.name}: the same was built at {refused.created_at} and could not be installed ({last}); it is not"
            " built again until something changes, or without --if-needed"
        )
        return {"model": model.name, "installed": False, "kept_limits": False, "built": False, "attempts": []}
    for reason in reasons:
        logger.info("models.%s: %s", model.name, reason)
    found = pictures()
    with _progress(model.name) as progress:
        built = build.build(
            model,
            device,
            deployment=deployment,
            pictures=found,
            force=force,
            on_event=progress.on_event,
            on_attempt=progress.on_attempt,
        )
    if not quiet:
        _show(model, built)
    return {
        "model": model.name,
        "installed": built.manifest is not None,
        "kept_limits": built.manifest is not None and _kept(built.manifest),
        "built": True,
        "attempts": [_attempt_json(attempt) for attempt in built.attempts],
        "manifest": None if built.manifest is None else msgspec.to_builtins(built.manifest),
    }


def _show(model: config.Model, built: build.Built) -> None:
    rows = [_attempt_row(attempt) for attempt in built.attempts]
    columns = ("engine", "built in", "cosine", "relative error", "agreement", "limits")
    console.table(f"{model.name}: engines that were built, against FP32", columns, rows)
    last = built.attempts[-1]
    for text in _warnings(last):
        console.warn(f"{model.name}: {text}")
    if last.placement is not None:
        title = f"{model.name}: where {last.planned.decision.step} runs"
        console.table(title if built.manifest else f"{title} (not installed)", ("", ""), last.placement.rows())
    if built.manifest is None:
        console.warn(
            f"{model.name}: no engine kept the limits of engine.parity; the one in use, if any, stays. --force installs"
            " what the deployment asks for"
        )
        return
    for text in manifest.reservations(model, built.manifest):
        console.warn(f"{model.name}: {text}")
    for name in (*built.manifest.files, manifest.ENGINE_MANIFEST, LOG):
        click.echo(str(built.folder / name))


def _kept(engine: manifest.EngineManifest) -> bool:
    """Whether an engine has missed no limit; one that was not compared, as --force allows, has not."""
    return engine.parity is None or not engine.parity.failures


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _warnings(attempt: build.Attempt) -> Iterator[str]:
    outcome = attempt.outcome
    if outcome is not None and outcome.simulated:
        yield "SIMULATED: the tests' stand-in for TensorRT answered; nothing here is a measurement"
    if outcome is not None and outcome.without_range:
        names = ", ".join(outcome.without_range[:5]) + ", ..." * (len(outcome.without_range) > 5)
        yield f"{len(outcome.without_range)} activations have no INT8 range, so their layers run in FP16: {names}"
    if attempt.parity is not None:
        yield from attempt.parity.warnings


def _attempt_row(attempt: build.Attempt) -> tuple[str, ...]:
    title = str(attempt.planned.decision.step)
    seconds = "-" if attempt.outcome is None else f"{attempt.outcome.seconds:.0f} s"
    if attempt.parity is None:
        failed = "failed" if attempt.outcome is None else "does not run"
        return title, seconds, "-", "-", "-", "not compared" if attempt.error is None else failed
    record = attempt.parity.record()
    cosine = "NaN" if record.relative_error is None else f"{record.cosine:.5f}"
    error = "-" if record.relative_error is None else f"{record.relative_error:.4f}"
    agreed = "-" if record.agreement is None else f"{record.agreement:.4f}"
    return title, seconds, cosine, error, agreed, "missed" if record.failures else "kept"


def _attempt_json(attempt: build.Attempt) -> dict[str, Any]:
    return {
        "step": msgspec.to_builtins(attempt.planned.decision.step),
        "reasons": list(attempt.planned.decision.reasons),
        "notes": list(attempt.planned.notes),
        "error": None if attempt.error is None else str(attempt.error),
        "seconds": None if attempt.outcome is None else attempt.outcome.seconds,
        "parity": None if attempt.parity is None else msgspec.to_builtins(attempt.parity.record()),
        "placement": None if attempt.placement is None else attempt.placement.to_json(),
    }


class _Progress:
    """Follows the builder: what it is at, for whoever watches, and for systemd."""

    def __init__(self, name: str, show: Callable[[str, int, int], None]) -> None:
        self._name = name
        self._show = show
        self._phases: dict[str, tuple[int, int]] = {}
        """Those that have begun and not ended, outermost first: steps done, of how many."""
        self._at = "preparing"
        self._told: set[str] = set()

    def on_attempt(self, planned: Planned) -> None:
        self._phases.clear()
        for note in dict.fromkeys(planned.notes):
            if note not in self._told:
                self._told.add(note)
                console.warn(note)
        decision = planned.decision
        where = "the GPU" if decision.dla_core is None else f"DLA core {decision.dla_core}"
        logger.info("%s: building for %s: %s", self._name, where, decision.step)

    def on_event(self, event: events.Event) -> None:
        if isinstance(event, events.Phase):
            self._phases[event.name] = (0, event.steps or 0)
        elif isinstance(event, events.Step) and event.name in self._phases:
            self._phases[event.name] = (event.step + 1, self._phases[event.name][1])
        elif isinstance(event, events.Finished):
            self._phases.pop(event.name, None)
        elif isinstance(event, events.Log):
            logger.debug("TensorRT: %s", event.text)
        elif isinstance(event, events.Done):
            self._phases = {"comparing with FP32": (0, 0)}
        if self._phases:
            name, (done, total) = next(reversed(self._phases.items()))
            self._at = f"{name} {done}/{total}" if total else name
            self._show(name, done, total)

    def tell_systemd(self, stop: threading.Event) -> None:
        """Keep systemd from stopping a unit whose ExecStartPre builds: it takes minutes, and systemd waits 90 s.

        By the clock, not by the builder's events: a single tactic, or a TensorRT without a progress monitor, is silent
        for longer than that. Not for ever, since a builder can hang. The unit needs NotifyAccess=exec: main, the
        default, listens to the main process alone.
        """
        told, ends_s = True, time.monotonic() + _LONGEST_S
        while told and time.monotonic() < ends_s and not stop.wait(_NOTIFY_PERIOD_S):
            told = notify(f"STATUS=building {self._name}: {self._at}", f"EXTEND_TIMEOUT_USEC={_EXTEND_S * 1_000_000}")


@contextmanager
def _progress(name: str) -> Iterator[_Progress]:
    stop = threading.Event()
    with console.activity(f"building {name}") as show:
        progress = _Progress(name, show)
        teller = threading.Thread(target=progress.tell_systemd, args=(stop,), name="tell-systemd", daemon=True)
        teller.start()
        try:
            yield progress
        finally:
            stop.set()
            teller.join()

"""Runs the builder as a child process, and makes its end, whatever it is, a plan or an error that a person can act on.

The child cannot outlive the parent's interest: an exception or Ctrl-C here stops it, and if the parent is killed the
kernel kills the child.
"""

from __future__ import annotations

import errno
import logging
import signal
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from calibration import events
from calibration.events import Done, Failed, Finished, Phase
from calibration.observe import available_bytes
from edge.errors import DataError, DeviceError, EdgeError, ModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    from calibration.events import Event
    from calibration.recipe import Recipe

__all__ = ["command", "run"]

logger = logging.getLogger(__name__)

RECIPE = "recipe.json"

GRACE_S = 10.0
"""From asking the child to stop to killing it: TensorRT looks only between two steps, of seconds at most."""

# As ``python -m`` does it, less the current folder, which is first on sys.path there: a tensorrt.py or a calibration/
# that lies in it would be run. Python 3.10 has no -P, and -I would ignore PYTHONPATH.
_START = (
    "import sys; sys.path[:] = filter(None, sys.path); import runpy;"
    " runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)

_MORE_MEMORY = "lower engine.workspace_mb, stop other programs, or add swap"


def command(module: str, *args: str) -> list[str]:
    """The command that runs one of our modules as a program, whatever lies in the current folder."""
    return [sys.executable, "-c", _START, module, *args]


def run(recipe: Recipe, *, on_event: Callable[[Event], None]) -> Done:
    """Build a plan into ``recipe.out``, an existing folder.

    Args:
        recipe: of the build.
        on_event: called with each event as it comes, the last included.

    Raises:
        DataError: calibration by TensorRT failed.
        DeviceError: what the build needs is not there, or memory ran out.
        ModelError: TensorRT cannot build the model.
        OSError: what it gave cannot be written.
        RuntimeError: the builder has a fault of its own; the text ends with its traceback.
    """
    out = Path(recipe.out)
    path, log_path = out / RECIPE, out / events.LOG
    path.write_bytes(msgspec.json.format(msgspec.json.encode(recipe), indent=1))
    free = available_bytes()
    with log_path.open("wb") as log:
        process = subprocess.Popen(  # noqa: S603 - ourselves
            command("calibration.builder", str(path)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
        )
    try:
        assert process.stdout is not None, "it is a pipe"
        with process.stdout:
            outcome, phase = _follow(process.stdout, on_event)
        code = _ended(process)
    finally:
        _stop(process)
    if isinstance(outcome, Done):
        if code != 0:  # the plan has been written and loaded by then
            logger.debug("the builder was done, but ended with %d", code)
        return outcome
    if isinstance(outcome, Failed):
        raise _error(outcome, recipe, free)
    raise _died(code, phase, recipe, free, log_path)


def _follow(stdout: IO[bytes], on_event: Callable[[Event], None]) -> tuple[Done | Failed | None, str]:
    """Hand on what the child says until it says no more; the outcome, if it gave one, and the phase it was in."""
    outcome: Done | Failed | None = None
    phases = ["setting up"]
    for line in stdout:
        if not line.endswith(b"\n"):  # a child that was killed has not ended it
            break
        event = events.decode(line)
        if isinstance(event, Phase):
            phases.append(event.name)
        elif isinstance(event, Finished) and event.name in phases:
            phases.remove(event.name)
        elif isinstance(event, Done | Failed):
            outcome = event
        on_event(event)
    return outcome, phases[-1]


def _ended(process: subprocess.Popen[bytes]) -> int:
    """How the child ended; it closes its output a moment before."""
    try:
        return process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()  # said all it has to say, and hangs: TensorRT's libraries unload
        return process.wait()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the child if it still runs. A second Ctrl-C kills it at once."""
    if process.poll() is not None:
        return
    try:
        process.terminate()
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        logger.debug("the builder does not stop by itself; killing it")
    finally:
        process.kill()
        process.wait()


def _error(failed: Failed, recipe: Recipe, free: int) -> EdgeError | OSError:
    """What went wrong, which layers, and what to do."""
    if failed.kind == "io":
        return OSError(errno.EIO, failed.reason)
    layers = f": {', '.join(failed.nodes)}" if failed.nodes else ""
    if failed.kind == "parse":
        return ModelError(f"{recipe.model}: TensorRT {recipe.tensorrt} cannot read the model: {failed.reason}")
    if failed.kind == "unsupported" and recipe.dla_core is not None and not recipe.gpu_fallback:
        return ModelError(f"{recipe.model}: {failed.reason}{layers}; set engine.dla.gpu_fallback to true")
    if failed.kind == "unsupported":
        return ModelError(
            f"{recipe.model}: {failed.reason} ({recipe.precision}){layers}; keep those layers in FP32 (engine.fp32), or"
            " choose another engine.precision"
        )
    if failed.kind == "memory":
        return DeviceError(
            f"{recipe.model}: the build ran out of memory: {failed.reason}{layers} ({_memory(recipe, free)});"
            f" {_MORE_MEMORY}"
        )
    if failed.kind == "build":
        return ModelError(
            f"{recipe.model}: TensorRT {recipe.tensorrt} cannot build it: {failed.reason}{layers}; all that it said is"
            f" in {events.LOG}"
        )
    return {"device": DeviceError, "calibration": DataError, "usage": ModelError}[failed.kind](failed.reason)


def _died(code: int, phase: str, recipe: Recipe, free: int, log_path: Path) -> Exception:
    """Why a child is gone that gave no outcome."""
    if code >= 0:
        said = _tail(log_path, 20)
        return RuntimeError(f"the builder ended with {code} while {phase}, and gave no reason; its last words:\n{said}")
    name = signal.Signals(-code).name
    if -code == signal.SIGKILL:
        return DeviceError(
            f"{recipe.model}: the builder was killed while {phase} (signal 9), most likely because memory ran out:"
            f" {_memory(recipe, free)}; {_MORE_MEMORY}"
        )
    if -code in (signal.SIGTERM, signal.SIGINT):
        return ModelError(f"{recipe.model}: the builder was stopped while {phase} (signal {-code}, {name})")
    words = [line for line in _tail(log_path, 1000).splitlines() if line.startswith("[")]
    last = f", TensorRT's last words: {words[-1]}" if words else ""
    return ModelError(
        f"{recipe.model}: the builder crashed while {phase} (signal {-code}, {name}){last}; where it was, and all else"
        f" that was said, is in {events.LOG}"
    )


def _memory(recipe: Recipe, free: int) -> str:
    workspace = recipe.pools.workspace
    limit = "" if workspace is None else f", and the workspace could be {workspace >> 20} MiB"
    return f"{free >> 20} MiB were free when it began{limit}"


def _tail(path: Path, lines: int) -> str:
    with path.open(encoding="utf-8", errors="replace") as file:
        return "".join(deque(file, maxlen=lines)).rstrip()

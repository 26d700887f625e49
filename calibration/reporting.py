"""What the builder's child process reports while TensorRT works: its log, its progress, and phases of our own.

Nothing here may raise: an exception that leaves a callback of TensorRT's is lost, or ends the process without a word.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections import deque
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any

import msgspec

from calibration.events import Finished, Log, Phase, Step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from calibration.events import Event

__all__ = ["BUILDING", "Reporter", "make_logger", "make_monitor", "phase"]

BUILDING = "building"
"""Our name of the phase that TensorRT's own phases are parts of."""

# Verbose messages count in the hundred thousands; of them only those that say where a layer runs are kept.
_PLACEMENT = re.compile(r"DLA|DlaLayer|GpuLayer")
# Reported once for each tensor; Done sums it up instead.
_SUMMED_UP = "Missing scale and zero-point for tensor"


class Reporter:
    """Writes events. TensorRT calls back from several threads."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Write one event; without anybody who reads it, end the process: an exception would get lost in a callback."""
        with self._lock:
            try:
                self._file.write(msgspec.json.encode(event) + b"\n")
                self._file.flush()
            except BrokenPipeError:
                os._exit(1)

    def warn(self, text: str) -> None:
        """Tell of something that a person should look at."""
        _log("W", text)
        self(Log("warning", text))


def _log(letter: str, text: str) -> None:
    """Add a line to the log, as trtexec writes its own; on a full disk there is none."""
    with suppress(OSError):
        sys.stderr.write(f"[{letter}] {text}\n")


@contextmanager
def phase(report: Reporter, name: str, *, steps: int | None = None, parent: str | None = None) -> Iterator[None]:
    """Report a phase of our own; one that fails does not finish."""
    report(Phase(name, parent, steps))
    yield
    report(Finished(name))


def make_logger(trt: ModuleType, report: Reporter) -> Any:
    """TensorRT's log to standard error; errors and warnings to whoever follows the build as well, each text once."""
    severities = trt.ILogger.Severity
    letters = {
        severities.INTERNAL_ERROR: "F",
        severities.ERROR: "E",
        severities.WARNING: "W",
        severities.INFO: "I",
        severities.VERBOSE: "V",
    }

    class Logger(trt.ILogger):  # type: ignore[name-defined, misc]  # a module's, at run time
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: deque[str] = deque(maxlen=100)
            self.warnings: deque[str] = deque(maxlen=1000)
            self._told: set[str] = set()

        def log(self, severity: Any, msg: str) -> None:
            letter = letters.get(severity, "?")
            if letter == "V" and not _PLACEMENT.search(msg):
                return
            _log(letter, msg)
            if letter in "FE":
                self.errors.append(msg)
                self._tell("error", msg)
            elif letter == "W":
                self.warnings.append(msg)
                if not msg.startswith(_SUMMED_UP):
                    self._tell("warning", msg)

        def _tell(self, severity: Any, msg: str) -> None:
            if msg not in self._told:
                self._told.add(msg)
                report(Log(severity, msg))

    return Logger()


def make_monitor(trt: ModuleType, report: Reporter, stopped: Callable[[], bool]) -> Any:
    """TensorRT's progress to whoever follows the build; the build ends after the step in which it is stopped."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[name-defined, misc]  # a module's, at run time
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            report(Phase(phase_name, parent_phase or BUILDING, num_steps))

        def step_complete(self, phase_name: str, step: int) -> bool:
            report(Step(phase_name, step))
            return not stopped()

        def phase_finish(self, phase_name: str) -> None:
            report(Finished(phase_name))

    return Monitor()

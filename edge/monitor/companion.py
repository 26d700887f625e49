"""The process that asks jtop's service: started when there is a service, listened to, replaced when it goes quiet.

A new process is the one reconnect that always works; see ``edge.monitor.jtop`` for why. Nothing here waits: each call
of ``poll`` takes what has come since the last one and decides.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import stat
import subprocess
import sys
import tempfile
from typing import IO, TYPE_CHECKING

from edge.monitor import jtop
from edge.monitor.notice import Changes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from edge.events import Events
    from edge.monitor.jtop import Sample

__all__ = ["Companion", "command"]

logger = logging.getLogger(__name__)

SOCKET = "run/jtop.sock"
"""Under the root; the path is fixed in jetson-stats."""
START_S = 30.0
"""From starting a process to its first sample: importing on a busy Orin Nano takes seconds."""
QUIET_PERIODS, QUIET_S = 3, 5.0
"""A process that brings nothing new for so many periods, and so many seconds, hangs with its service."""
BACKOFF_S = (5.0, 300.0)
"""From a failure to the next try: at first, doubled each time, and at most. A new socket is tried at once."""
STEADY_S = 60.0
"""A process that has worked for so long was no failure: the wait after it is the first again."""
SERVICE_PERIOD_S = (0.5, 5.0)
"""How often the service may be asked for a sample, whatever the period of readings is."""

# As ``python -m`` does it, less the current folder, where a jtop.py may lie. Python 3.10 has no -P.
_START = (
    "import sys; sys.path[:] = filter(None, sys.path); import runpy;"
    " runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def command(period_s: float) -> Sequence[str]:
    """The command that prints samples."""
    return [sys.executable, "-c", _START, jtop.__name__, f"{period_s:g}"]


class _Child:
    """One process and what it has said."""

    def __init__(self, arguments: Sequence[str], now_s: float) -> None:
        self.started_s = now_s
        self._rest = b""
        # A file, not a pipe, for what it complains of: nobody has to empty it.
        self._complaints: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in end()
        try:
            self._process = subprocess.Popen(  # noqa: S603 - ourselves
                arguments,
                stdin=subprocess.PIPE,  # held open: its end is how the child learns of ours
                stdout=subprocess.PIPE,
                stderr=self._complaints,
                start_new_session=True,  # Ctrl-C is for us, and kill() finds what the client has started
            )
        except BaseException:
            self._complaints.close()
            raise
        assert self._process.stdout is not None
        self._stdout = self._process.stdout.fileno()
        os.set_blocking(self._stdout, False)

    def samples(self) -> Iterator[Sample]:
        """What has come since the last call."""
        while True:
            try:
                piece = os.read(self._stdout, 1 << 16)
            except BlockingIOError:
                return
            *lines, self._rest = (self._rest + piece).split(b"\n")
            yield from filter(None, map(jtop.decode, lines))
            if not piece:
                return

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> str:
        """Kill it, if it still runs; the last line of its complaints."""
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        with self._complaints as file:
            file.seek(0)
            lines = file.read().decode("utf-8", "replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


class Companion:
    """Samples of jtop's service while it answers, for ever, at no cost while there is none. One thread at a time."""

    def __init__(
        self,
        root: Path,
        *,
        period_s: float,
        events: Events,
        arguments: Callable[[float], Sequence[str]] = command,
        installed: Callable[[], bool] = lambda: importlib.util.find_spec("jtop") is not None,
    ) -> None:
        """Start nothing yet.

        Args:
            root: under which the service's socket is.
            period_s: of readings.
            events: where loss and return are told.
            arguments: gives the command of the process, for a period in seconds.
            installed: whether the client is.
        """
        self._socket = str(root / SOCKET)
        self._events = events
        self._arguments = arguments
        self._period_s = min(max(period_s, SERVICE_PERIOD_S[0]), SERVICE_PERIOD_S[1])
        self._quiet_s = max(QUIET_PERIODS * period_s, QUIET_S)
        self._child: _Child | None = None
        self._sample: Sample | None = None
        self._sampled_s = 0.0
        self._backoff_s = BACKOFF_S[0]
        self._retry_s: float | None = None
        self._tried: tuple[int, int] | None = None
        self._answers = Changes(False)
        self._told: str | None = None
        self._reason = ""
        self._installed = installed()
        if not self._installed:
            logger.info("jtop is not installed (pip install 'jetson-edge[jetson]'): the power mode will not be known")

    @property
    def pid(self) -> int | None:
        """Of the process that asks the service, while there is one."""
        return None if self._child is None else self._child.pid

    def close(self) -> None:
        """End the process, if there is one."""
        if self._child is not None:
            self._child.end()
            self._child = self._sample = None

    def poll(self, now_s: float) -> Sample | None:
        """The newest sample, while the service answers."""
        if not self._installed:
            return None
        if self._child is None:
            self._start_if_due(now_s)
        else:
            self._listen(self._child, now_s)
        if self._answers.announce(self._sample is not None, now_s):
            self._announce()
        return self._sample

    def _start_if_due(self, now_s: float) -> None:
        socket = self._find_socket()
        if socket is None:
            return
        if self._retry_s is not None and now_s < self._retry_s and socket == self._tried:
            return
        self._tried = socket
        try:
            self._child = _Child(self._arguments(self._period_s), now_s)
        except OSError as error:  # no memory or no process left: worth another try, and not worth the reading
            self._retry(now_s, f"cannot start a process: {error.strerror or error}")

    def _find_socket(self) -> tuple[int, int] | None:
        """What tells the service's socket from its predecessor; None where there is none that could be used."""
        try:
            found = os.stat(self._socket)  # noqa: PTH116 - once a second
        except OSError:
            return None
        if not stat.S_ISSOCK(found.st_mode):
            self._warn_once(f"{self._socket} is no socket: it was mounted into the container before jtop's service ran")
            return None
        if not os.access(self._socket, os.W_OK):
            self._warn_once(f"{self._socket} may not be used: add the user to the group jtop")
            return None
        return found.st_ino, found.st_mtime_ns

    def _listen(self, child: _Child, now_s: float) -> None:
        for sample in child.samples():
            if self._sample is None or sample.uptime_s > self._sample.uptime_s:
                self._sample, self._sampled_s = sample, now_s
                if now_s - child.started_s > STEADY_S:
                    self._backoff_s = BACKOFF_S[0]
        if child.ended:
            self._lose(child, now_s, "")
        elif self._sample is None:
            if now_s - child.started_s > START_S:
                self._lose(child, now_s, f"no answer in {START_S:g} s")
        elif now_s - self._sampled_s > self._quiet_s:
            self._lose(child, now_s, f"nothing new for {self._quiet_s:g} s")

    def _lose(self, child: _Child, now_s: float, reason: str) -> None:
        complaint = child.end()
        self._child = self._sample = None
        self._retry(now_s, reason or complaint or "its client has ended")

    def _retry(self, now_s: float, reason: str) -> None:
        self._reason = reason
        self._retry_s = now_s + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, BACKOFF_S[1])
        if not self._answers.announced:  # else an event says so
            self._warn_once(f"jtop's service does not answer: {reason}")

    def _announce(self) -> None:
        if self._answers.announced:
            self._told = None
            self._events.emit("jtop_found", "jtop's service answers: power mode and clocks are known")
        else:
            self._events.emit(
                "jtop_lost",
                f"jtop's service is lost ({self._reason}): readings come from sysfs alone",
                severity="warning",
                reason=self._reason,
            )

    def _warn_once(self, text: str) -> None:
        """Say it, unless it was the last thing said."""
        if text != self._told:
            self._told = text
            logger.warning("%s", text)

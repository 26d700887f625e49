"""Keeps a daemon running as systemd would with ``Restart=always``, watches it from outside, and kills it if asked."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from benchmarks.rig import Memory, Missing, poll
from benchmarks.soak_books import Counts, Life

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from benchmarks.soak_driver import Job

__all__ = ["Keeper", "Sample"]

ROOT = Path(__file__).parents[1]
_POLL_S = 0.2
_MEMORY_EVERY_S = 1.0
_MOST_FAILURES = 3
_STOP_DEADLINE_S = 15.0
End: TypeAlias = Literal["stopped", "restart", "hung", "killed", "failed"]
_ENDS: dict[int, End] = {0: "stopped", 75: "restart", 79: "hung"}


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory of a life at a moment."""

    life: int
    at_s: float
    rss_mb: float
    """The process's real one."""


class Keeper:
    """The daemon's process, the next one when it ends, and what was seen of each."""

    def __init__(self, folder: Path, job: Job, status_port: int) -> None:
        """Prepare; the block runs it, and ends it in order.

        Args:
            folder: for what the processes print: ``life1.log`` and so on.
            job: of every life but for its number.
            status_port: of the daemon's status page.
        """
        self.lives: list[Life] = []
        """Those that have ended."""
        self.samples: list[Sample] = []
        self.modes: list[tuple[float, str]] = []
        """When the governor's mode changed, and to what."""
        self.pending = 0
        """Results that wait, by the newest status page."""
        self._folder = folder
        self._job = job
        self._url = f"http://127.0.0.1:{status_port}/status"
        self._number = 0
        self._process: subprocess.Popen[str] | None = None
        self._killed = 0
        self._started_s = time.monotonic()
        self._last: Counts | None = None
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), name=work.__name__, daemon=True)
            for work in (self._keep, self._watch)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        poll(lambda: self._process is not None or self._error, "the daemon's process")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopping.set()
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
        for thread in self._threads:
            thread.join(_STOP_DEADLINE_S)
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._threads[0].join()
        if error is None:
            self.check()

    @property
    def life(self) -> int:
        """Number of the process that runs."""
        return self._number

    @property
    def age_s(self) -> float:
        """Seconds since that was started."""
        return time.monotonic() - self._started_s

    def check(self) -> None:
        """Raise what ended the keeping."""
        if self._error is not None:
            raise self._error

    def kill(self) -> None:
        """End the process as the kernel does when memory runs out, and wait until it has."""
        life = self._number
        self._killed = life
        self._send(signal.SIGKILL)
        self.await_end(life)

    def reload(self) -> None:
        """Have it read its deployment file again."""
        self._send(signal.SIGHUP)

    def await_end(self, life: int, *, deadline_s: float = 30.0) -> Life:
        """Wait until a life has ended, and say how."""
        poll(lambda: len(self.lives) >= life or self._error, f"life {life} to end", deadline_s=deadline_s)
        self.check()
        return self.lives[life - 1]

    def _send(self, number: signal.Signals) -> None:
        assert self._process is not None, "the block waits for it"
        self._process.send_signal(number)

    def _guarded(self, work: Any) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again by check()
            self._error = error

    def _keep(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            life = self._run()
            self.lives.append(life)
            failures = failures + 1 if life.end == "failed" else 0
            if failures >= _MOST_FAILURES:
                log = (self._folder / f"life{life.number}.log").read_text()
                raise Missing(f"the daemon failed {failures} times in a row:\n{log[-2000:]}")

    def _run(self) -> Life:
        self._last = None
        number = self._number + 1
        job = self._folder / "job.json"
        job.write_text(json.dumps({**asdict(self._job), "life": number}))
        output = self._folder / f"life{number}.json"
        with output.open("w") as stdout, (self._folder / f"life{number}.log").open("w") as stderr:
            process = subprocess.Popen(  # noqa: S603 - our own daemon
                [sys.executable, "-m", "benchmarks.soak_driver", str(job)],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                text=True,
            )
            self._process, self._number, self._started_s = process, number, time.monotonic()
            code = process.wait()
        ended_s = time.monotonic()
        summary = _summary(output.read_text())
        end: End = _ENDS.get(code, "failed")
        if self._killed == number and code == -signal.SIGKILL:
            end = "killed"
        elif end == "stopped" and not self._stopping.is_set():
            end = "failed"  # nobody asked it to
        return Life(number, end, ended_s, summary=summary, last=self._last)

    def _watch(self) -> None:
        memory_due_s = 0.0
        while not self._stopping.wait(_POLL_S):
            number, process = self._number, self._process
            document = self._fetch()
            if document is not None and number == self._number and process is not None and process.poll() is None:
                self._last = _counts(document)
                self.pending = document["publisher"]["pending"]
                mode = document["governor"]["mode"]
                if not self.modes or self.modes[-1][1] != mode:
                    self.modes.append((time.monotonic(), mode))
            now_s = time.monotonic()
            if process is not None and now_s >= memory_due_s:
                memory_due_s = now_s + _MEMORY_EVERY_S
                memory = Memory.of(process.pid)
                if memory is not None:
                    self.samples.append(Sample(number, now_s, memory.rss_mb))

    def _fetch(self) -> dict[str, Any] | None:
        """The status page; None while there is nobody to give it."""
        try:
            with urllib.request.urlopen(self._url, timeout=2) as reply:  # noqa: S310 - our own page
                document: dict[str, Any] = json.load(reply)
        except (OSError, urllib.error.URLError, json.JSONDecodeError):  # killed while it answered, or not there yet
            return None
        return document


def _counts(document: dict[str, Any]) -> Counts:
    """Of a status page."""
    dropped: Counter[str] = Counter()
    for stream in document["streams"]:
        dropped.update(stream["dropped"])
    publisher = document["publisher"]
    return Counts(
        captured=sum(stream["captured"] for stream in document["streams"]),
        inferred=sum(stream["inferred"] for stream in document["streams"]),
        failed=sum(stream["failed"] for stream in document["streams"]),
        dropped=dropped,
        waiting=sum(stream["waiting"] for stream in document["streams"]),
        published=publisher["published"],
        results_dropped=publisher["dropped"],
        results_left=publisher["pending"],
    )


def _summary(output: str) -> Counts | None:
    """Of what a life printed at its end, if it came to that."""
    if not output.strip():
        return None
    summary: dict[str, Any] = json.loads(output.splitlines()[-1])
    return Counts(
        captured=summary["frames_captured"],
        inferred=summary["frames_inferred"],
        failed=summary["frames_failed"],
        dropped=summary["frames_dropped_by"],
        published=summary["results_published"],
        results_dropped=summary["results_dropped"],
        results_left=summary["results_left"],
    )

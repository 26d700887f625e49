"""Threads with an owner: named, started again when they fail, ended together, and none dies unnoticed.

A failure is told once as an event with its traceback in the log; what keeps failing is handed to the owner, which ends
the process. Before ``arm`` nothing is started again: what cannot even start should say so at once.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edge.backoff import backoff
from edge.errors import BrokenPartError, DeviceLostError
from edge.status import PartState

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Literal

    from typing_extensions import Self

    from edge import config
    from edge.events import Events

__all__ = ["Part", "Supervisor"]

logger = logging.getLogger(__name__)

# A part that has worked for so long is sound: its next failure is a new story with short delays.
_STEADY_AFTER_S = 60.0


@dataclass(slots=True, eq=False)
class Part:
    """One thread and what is known of it. Written by its thread, read by others."""

    name: str
    work: Callable[[], None]
    essential: bool
    """Whether the process ends when it keeps failing; others are started again for ever."""
    forgiving: Callable[[BaseException], bool]
    """Whether a failure after ``arm`` may be followed by another attempt."""
    adopted: bool = True
    """Whether it is the supervisor's to start again and ``check``'s to complain of; else the starter looks itself."""
    state: Literal["running", "restarting", "ended"] = "running"
    restarts: int = 0
    trouble: str | None = None
    error: BaseException | None = None
    """What ended it for good."""
    thread: threading.Thread | None = None
    failures_s: deque[float] = field(default_factory=deque)

    @property
    def alive(self) -> bool:
        """Whether its thread has not returned."""
        return self.thread is not None and self.thread.is_alive()


def _always(_error: BaseException) -> bool:
    return True


class Supervisor:
    """Parts that end together. What ends a part for good is raised by ``check`` in the owner."""

    def __init__(
        self,
        section: config.Watch,
        *,
        end: Callable[[], object],
        events: Events,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        """Make one without parts.

        Args:
            section: how often a part may fail.
            end: makes every part's work return.
            events: where failures are told.
            clock: monotonic seconds.
            uniform: a random number between two.
        """
        self._section = section
        self._end = end
        self._events = events
        self._clock = clock
        self._uniform = uniform
        self._parts: list[Part] = []
        self._ending = threading.Event()
        self._armed = False

    def arm(self) -> None:
        """From now on, start parts again that fail."""
        self._armed = True

    def start(
        self,
        name: str,
        work: Callable[[], None],
        *,
        essential: bool = True,
        forgiving: Callable[[BaseException], bool] = _always,
        adopted: bool = True,
    ) -> Part:
        """Run ``work`` in a thread until it returns; after an exception it is called again, in the same thread."""
        part = Part(name, work, essential, forgiving, adopted)
        # Daemon threads, so that the process ends even where native code does not come back.
        part.thread = threading.Thread(target=self._run, args=(part,), name=name, daemon=True)
        self._parts = [*(kept for kept in self._parts if kept.name != name or kept.alive), part]
        part.thread.start()
        return part

    @property
    def parts(self) -> list[PartState]:
        """Every part that was started, the newest of each name."""
        newest = {part.name: part for part in self._parts}
        return [
            PartState(part.name, part.state, part.restarts, None if part.state == "running" else part.trouble)
            for part in newest.values()
        ]

    def check(self) -> None:
        """Raise the first exception that ended a part for good."""
        for part in self._parts:
            if part.error is not None and part.adopted:
                raise part.error

    def finish(self, deadline_s: float) -> list[str]:
        """Make the parts return, wait for that, and say which did not in time."""
        self._ending.set()
        self._end()
        until_s = self._clock() + deadline_s
        for part in self._parts:
            if part.thread is not None:
                part.thread.join(max(0.0, until_s - self._clock()))
        return [part.name for part in self._parts if part.alive]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """After an error, end the parts that still work; in good order the owner calls ``finish`` itself."""
        if not self._ending.is_set():
            self.finish(1.0)

    def _run(self, part: Part) -> None:
        delays = backoff(self._uniform)
        while True:
            started_s = self._clock()
            try:
                part.work()
            except Exception as error:  # noqa: BLE001 - the supervisor: told, and followed by another attempt or the end
                if self._clock() - started_s > _STEADY_AFTER_S:
                    delays = backoff(self._uniform)
                if not self._may_restart(part, error):
                    if self._ending.is_set() and self._armed and not part.essential:
                        logger.warning("while stopping: %s: %s", part.name, _first_line(error))
                    else:
                        part.error = self._verdict(part, error)
                    part.state, part.trouble = "ended", _first_line(error)
                    return
                self._await_restart(part, error, next(delays))
                if self._ending.is_set():
                    part.state = "ended"
                    return
            else:
                part.state, part.trouble = "ended", None
                return

    def _may_restart(self, part: Part, error: Exception) -> bool:
        if self._ending.is_set() or not self._armed or not part.adopted:
            return False
        if isinstance(error, DeviceLostError) or not part.forgiving(error):
            return False
        now_s = self._clock()
        part.failures_s.append(now_s)
        while now_s - part.failures_s[0] > self._section.within_s:
            part.failures_s.popleft()
        return not part.essential or len(part.failures_s) <= self._section.restarts

    def _verdict(self, part: Part, error: Exception) -> BaseException:
        """What the owner is told: that a part kept failing, or just what happened."""
        count = len(part.failures_s)
        if not self._armed or not part.essential or count <= self._section.restarts:
            return error
        verdict = BrokenPartError(
            f"{part.name}: failed {count} times within {self._section.within_s:g} s, last with: {_first_line(error)}"
        )
        verdict.__cause__ = error
        return verdict

    def _await_restart(self, part: Part, error: Exception, delay_s: float) -> None:
        again = part.trouble == _first_line(error)
        part.state, part.trouble = "restarting", _first_line(error)
        level = logging.DEBUG if again else logging.WARNING
        logger.log(level, "%s: what ended it:", part.name, exc_info=error)
        if not again:
            text = f"{part.name} has failed: {part.trouble}; it is started again"
            self._events.emit("part_failed", text, severity="error", part=part.name, restarts=part.restarts)
        self._ending.wait(delay_s)
        if not self._ending.is_set():
            part.restarts += 1
            part.state = "running"
            logger.debug("%s is started again", part.name)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__

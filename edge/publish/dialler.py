"""When to connect, and the connecting, which a slow name server can hold up for longer than a shutdown may take."""

from __future__ import annotations

import queue
import random
import threading
import time
from typing import TYPE_CHECKING, Generic, TypeVar

from edge.backoff import backoff

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Dialler"]

T = TypeVar("T")

# A connection that has lasted this long was a good one: the next attempt after it comes soon again. One that the broker
# cuts at once, as with two clients of one id, is not.
_STEADY_AFTER_S = 10.0


class Dialler(Generic[T]):
    """Makes one attempt at a time, each in a thread of its own that can be left behind."""

    def __init__(
        self,
        dial: Callable[[], T],
        ring: Callable[[], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        """Prepare.

        Args:
            dial: blocks until there is an answer.
            ring: called in the dialling thread when there is one.
            clock: monotonic seconds.
            uniform: a random number between two.
        """
        self.busy = False
        self.started_at_s = 0.0
        self.due_at_s = 0.0
        self._dial = dial
        self._ring = ring
        self._clock = clock
        self._uniform = uniform
        self._delays = backoff(uniform)
        self._answers: queue.SimpleQueue[T | Exception] = queue.SimpleQueue()

    def start(self) -> None:
        """Begin an attempt."""
        self.started_at_s = self._clock()
        threading.Thread(target=self._attempt, name="mqtt-dial", daemon=True).start()
        # Not before: where no thread can be started, the next attempt must not wait for this one.
        self.busy = True

    def answer(self) -> T | None:
        """What the attempt gave, once, or None while there is nothing yet. What it raised is raised here."""
        if self._answers.empty():
            return None
        self.busy = False
        answer = self._answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def back_off(self, *, was_connected: bool) -> None:
        """Put the next attempt off, for longer each time, unless the last one led to a steady connection."""
        if was_connected and self._clock() - self.started_at_s > _STEADY_AFTER_S:
            self._delays = backoff(self._uniform)
        self.due_at_s = self._clock() + next(self._delays)

    def _attempt(self) -> None:
        try:
            self._answers.put(self._dial())
        except Exception as error:  # noqa: BLE001 - raised again by answer(), in the thread that can tell somebody
            self._answers.put(error)
        self._ring()

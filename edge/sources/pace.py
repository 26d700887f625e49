"""When frames are due, and their stamps. Clocks come in; the only waiting is on the stop event."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from edge.types import Frame

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from edge.types import Image

__all__ = ["BEAT_S", "Pacer", "Stamper", "StopEvent"]

BEAT_S = 0.5
"""So often a source that has no frame says so."""


class StopEvent(Protocol):
    """The part of ``threading.Event`` that pacing needs."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the event; return whether it is set."""


class Pacer:
    """Keeps a rate on a fixed grid of the monotonic clock, so that small delays don't add up.

    Who comes late by a period or more skips what was missed: frames never come in a burst.
    """

    def __init__(self, fps: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._period_s = 1.0 / fps
        self._clock = clock
        self._due_s: float | None = None

    def wait(self, stop: StopEvent) -> bool:
        """Wait until the next frame is due; return False if ``stop`` was set instead."""
        beats = self.beats(stop)
        while True:
            try:
                next(beats)
            except StopIteration as end:
                return bool(end.value)

    def beats(self, stop: StopEvent) -> Generator[None, None, bool]:
        """The same, but with a None every ``BEAT_S`` while it waits, for use with ``yield from``."""
        now_s = self._clock()
        if self._due_s is None:
            self._due_s = now_s
        late_s = now_s - self._due_s
        if late_s >= self._period_s:
            self._due_s += self._period_s * (late_s // self._period_s)
        due_s, self._due_s = self._due_s, self._due_s + self._period_s
        while (left_s := due_s - self._clock()) > BEAT_S:
            if stop.wait(BEAT_S):
                return False
            yield None
        return not stop.wait(max(0.0, left_s))


class Stamper:
    """Makes frames of one stream: counts them and stamps them with both clocks."""

    def __init__(
        self,
        stream: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        utc_clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._utc_clock_ns = utc_clock_ns
        self._count = 0

    def __call__(self, image: Image, name: str | None = None) -> Frame:
        """Make the next frame of a picture that has just arrived."""
        index, self._count = self._count, self._count + 1
        return Frame(
            image=image,
            stream=self._stream,
            index=index,
            captured_at_s=self._clock(),
            captured_at_utc_us=self._utc_clock_ns() // 1000,
            name=name,
        )

"""Frames a second over the last seconds, from counters that only rise."""

from __future__ import annotations

from collections import deque

__all__ = ["Rate"]

_WINDOW_S = 10.0


class Rate:
    """How fast a counter has risen over the last ten seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque()

    def note(self, at_s: float, count: float) -> None:
        """Note where the counter stands at a moment of the monotonic clock."""
        self._samples.append((at_s, count))
        while len(self._samples) > 2 and self._samples[1][0] <= at_s - _WINDOW_S:
            self._samples.popleft()

    @property
    def rise(self) -> float:
        """By how much it has risen over the window."""
        return self._samples[-1][1] - self._samples[0][1] if self._samples else 0.0

    @property
    def window_s(self) -> float:
        """How long the window is by now."""
        return self._samples[-1][0] - self._samples[0][0] if self._samples else 0.0

    @property
    def per_s(self) -> float:
        """By how much a second; 0 until there are two samples."""
        return self.rise / self.window_s if self.window_s > 0 else 0.0

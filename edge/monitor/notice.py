"""When to say something: changes and counts that may come in floods, made into a few events. Pure."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

__all__ = ["Changes", "Tally"]

State = TypeVar("State")


class Changes(Generic[State]):
    """A state that is announced when it changes, but no more than so often: in the end what was said last is true."""

    def __init__(self, state: State, *, most: int = 6, within_s: float = 600.0) -> None:
        """Take ``state`` as known to everybody."""
        self.announced = state
        self._within_s = within_s
        self._announcements_s: deque[float] = deque(maxlen=most)

    def announce(self, state: State, now_s: float) -> bool:
        """Whether to announce the state now."""
        if state == self.announced:
            return False
        full = len(self._announcements_s) == self._announcements_s.maxlen
        if full and now_s - self._announcements_s[0] < self._within_s:
            return False
        self._announcements_s.append(now_s)
        self.announced = state
        return True


class Tally:
    """Counts what happens, and lets go of the sum at once, but then not again before ``every_s`` have passed."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._count = 0
        self._told_s: float | None = None

    def add(self, count: int, now_s: float) -> int:
        """The sum to tell of now; 0 while there is nothing to tell."""
        self._count += count
        if self._count == 0 or (self._told_s is not None and now_s - self._told_s < self._every_s):
            return 0
        told, self._count, self._told_s = self._count, 0, now_s
        return told

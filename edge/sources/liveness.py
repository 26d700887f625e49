"""Whether a camera that is being read still gives pictures, and new ones. Pure but for the clock that comes in."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge import config
    from edge.sources.wire import Picture

__all__ = ["OPEN_S", "Liveness"]

OPEN_S = 15.0
"""A network camera that boots may take this long to send its first picture, whatever ``stall_s`` says."""


class Liveness:
    """What has come from one process since it was started, and what follows from it."""

    def __init__(self, section: config.Camera, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.digest = 0
        """Of the last picture that was measured; 0 before."""
        self._stall_s = section.stall_s
        self._frozen_s = section.frozen_s
        self._clock = clock
        self._grabbed = 0
        self._progress_s = clock()
        self._same_since_s = self._measured_s = 0.0

    def saw(self, grabbed: int, picture: Picture | None) -> None:
        """Take note of what has come.

        Args:
            grabbed: how many pictures the process has grabbed so far. They count also where no slot was free to hand
                them over: then the engine is slow, and not the camera.
            picture: the newest of them that was handed over since the last call.
        """
        if grabbed > self._grabbed:
            self._grabbed, self._progress_s = grabbed, self._clock()
        if picture is not None and picture.digest:
            self._measured_s = picture.captured_at_s
            if picture.digest != self.digest:
                self.digest, self._same_since_s = picture.digest, picture.captured_at_s

    @property
    def frozen(self) -> bool:
        """Whether all pictures have been the same for ``frozen_s``."""
        return self._frozen_s is not None and self._measured_s - self._same_since_s >= self._frozen_s

    def trouble(self, *, opened: bool) -> str | None:
        """Why the camera counts as lost, as the end of a sentence about it; None while it does not.

        Args:
            opened: whether it could be opened.
        """
        if self.frozen:
            return f"gives the same picture for {self._frozen_s:g} s"
        limit_s = self._stall_s if self._grabbed else max(self._stall_s, OPEN_S)
        if self._clock() - self._progress_s <= limit_s:
            return None
        if self._grabbed:
            return f"has given no picture for {limit_s:g} s"
        return f"is open, but has given no picture in {limit_s:g} s" if opened else f"has not opened in {limit_s:g} s"

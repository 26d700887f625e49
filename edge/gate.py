"""How many frames a second a lane may take. Set by the governor, asked by the lane; neither waits for the other."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge.status import DropReason

__all__ = ["Gate"]


class Gate:
    """Open, open so many times a second, or closed."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_fps: float | None = None
        """None is no limit, 0 is closed."""
        self._clock = clock
        self._due_s = -math.inf

    def due_in_s(self) -> float:
        """Seconds until the next frame may be taken; infinity while it is closed."""
        if self.limit_fps is None:
            return 0.0
        if self.limit_fps <= 0:
            return math.inf
        return max(0.0, self._due_s - self._clock())

    def passed(self) -> None:
        """Note that a frame was taken.

        The next one is due on a grid, so that the limit is met in the mean; a period that was missed altogether is not
        made up for, so that frames never come in a burst.
        """
        if self.limit_fps:
            now_s, period_s = self._clock(), 1.0 / self.limit_fps
            on_the_grid = now_s - self._due_s < period_s
            self._due_s = (self._due_s if on_the_grid else now_s) + period_s

    def why_not_taken(self) -> DropReason:
        """Why a frame that is replaced now was not taken."""
        return "governor" if self.due_in_s() > 0 else "overload"

"""A steady leak, told from caches, plateaus and jumps by the lowest memory of equal spans of time. Pure.

A window is cut into eight spans. Of each only the lowest value is kept: a cache that fills and is emptied has a low
floor, a leak lifts the floor. A leak is suspected when the floor rises from every span to the next by much the same:
one jump (a model was swapped) is in one span only, and growth towards a plateau (arenas, warm-up) gets slower. And it
must lead to where memory never was before: a cache that takes longer to fill than the window does so only once. Windows
of one minute to a day see leaks of 1 MB a second as well as of 1 MB a minute, with a dozen numbers each to remember.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import median
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from edge.monitor.reading import Memory

__all__ = ["Leak", "LeakDetector", "LeakWatch"]

_MB = 1 << 20
_SPANS = 8
_WINDOWS_S = (64.0, 600.0, 7200.0, 86400.0)
_LEAST_BYTES = 48 * _MB
"""Growth within a window that is worth a word."""
_EVEN = 0.4
"""Every span must rise by at least this share of the mean rise ..."""
_STEADY = 0.8
"""... and the later half of the window by this share of the earlier half."""
_WARM_UP_S = 120.0
"""After the start and after a model was swapped: CUDA, engines and arenas take what they need."""
_HORIZON_S = 60.0
"""A restart comes this long before the leak reaches 1.5 reserves: before a pause, with room for the last results."""
_TIGHT = 1.5
_WORTH = 0.5
"""Share of the reserve that this process must have grown by, or a restart would not help."""
_STUCK_S = 60.0
"""So long a pause for want of memory may last if this process itself is what took it."""


@dataclass(frozen=True, slots=True)
class Leak:
    """Memory that grows and grows."""

    bytes_per_s: float
    """Median of the slopes between the spans (Theil-Sen)."""
    grown_bytes: int
    """Within the window."""
    window_s: float


class LeakDetector:
    """Watches one amount of memory."""

    def __init__(self) -> None:
        self._windows = [_Window(length_s) for length_s in _WINDOWS_S]
        self._begin_s: float | None = None
        self._lowest: int | None = None
        self._used = 0

    @property
    def grown_bytes(self) -> int:
        """Since the warm-up; 0 during it."""
        return 0 if self._lowest is None else self._used - self._lowest

    def forget(self) -> None:
        """Begin anew: memory was just taken or given back on purpose."""
        for window in self._windows:
            window.clear()
        self._begin_s = self._lowest = None

    def step(self, at_s: float, used_bytes: int) -> Leak | None:
        """Take a value; gives the fastest leak that any window sees."""
        if self._begin_s is None:
            self._begin_s = at_s + _WARM_UP_S
        if at_s < self._begin_s:
            return None
        self._used = used_bytes
        self._lowest = used_bytes if self._lowest is None else min(self._lowest, used_bytes)
        leaks = [leak for window in self._windows if (leak := window.step(at_s, used_bytes)) is not None]
        return max(leaks, key=lambda leak: leak.bytes_per_s, default=None)


class _Window:
    """One length of time."""

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._span_s = length_s / _SPANS
        self._floors: deque[tuple[float, int]] = deque(maxlen=_SPANS)
        self._peaks: deque[int] = deque(maxlen=_SPANS)
        self._ceiling = 0
        """Highest value before the window."""
        self._started_s = 0.0
        self._lowest: tuple[float, int] | None = None
        self._highest = 0
        self._leak: Leak | None = None

    def clear(self) -> None:
        self._floors.clear()
        self._peaks.clear()
        self._ceiling = 0
        self._lowest = self._leak = None

    def step(self, at_s: float, used_bytes: int) -> Leak | None:
        if self._lowest is not None and at_s - self._started_s >= 3 * self._span_s:
            # After a gap (suspend, rare readings) nothing is known of what lies between.
            self.clear()
        if self._lowest is None:
            self._begin(at_s, used_bytes)
        elif at_s - self._started_s >= self._span_s:
            if len(self._peaks) == _SPANS:
                self._ceiling = max(self._ceiling, self._peaks[0])
            self._floors.append(self._lowest)
            self._peaks.append(self._highest)
            self._begin(at_s, used_bytes)
            self._leak = self._judge()
        else:
            self._lowest = min(self._lowest, (at_s, used_bytes), key=lambda moment: moment[1])
            self._highest = max(self._highest, used_bytes)
        return self._leak

    def _begin(self, at_s: float, used_bytes: int) -> None:
        """A new span."""
        self._started_s, self._lowest, self._highest = at_s, (at_s, used_bytes), used_bytes

    def _judge(self) -> Leak | None:
        floors = list(self._floors)
        if len(floors) < _SPANS:
            return None
        rises = [after[1] - before[1] for before, after in pairwise(floors)]
        grown = floors[-1][1] - floors[0][1]
        half = len(rises) // 2
        if (
            grown < _LEAST_BYTES
            or floors[-1][1] <= self._ceiling
            or min(rises) < _EVEN * grown / len(rises)
            or sum(rises[-half:]) < _STEADY * sum(rises[:half])
        ):
            return None
        slopes = [(after[1] - before[1]) / (after[0] - before[0]) for before, after in combinations(floors, 2)]
        return Leak(median(slopes), grown, self._length_s)


class LeakWatch:
    """Whether this process leaks, and when it should be started again because of that."""

    def __init__(self, reserve_bytes: int) -> None:
        self.leak: Leak | None = None
        """What is suspected now."""
        self.where: Literal["process", "gpu"] = "process"
        """Whether it is in this process's own memory, or in what the GPU holds for all of them."""
        self.restart: str | None = None
        """Why the process should end and be started again. Once said, it stays."""
        self._reserve_bytes = reserve_bytes
        self._process, self._gpu = LeakDetector(), LeakDetector()
        self._low_since_s: float | None = None

    def forget(self) -> None:
        """Begin anew: a model was just loaded or given up."""
        self._process.forget()
        self._gpu.forget()

    def step(self, at_s: float, memory: Memory, *, low: bool) -> bool:
        """Take a reading.

        Args:
            at_s: when it was read.
            memory: of the reading.
            low: inference is paused for want of memory.

        Returns:
            Whether a leak has just come under suspicion.
        """
        before = self.leak
        self.leak, self.where = self._process.step(at_s, memory.rss_bytes), "process"
        gpu = None if memory.gpu_bytes is None else self._gpu.step(at_s, memory.gpu_bytes)
        if self.leak is None and gpu is not None:
            # CUDA's memory is not in RSS. It may be another process's, but most of the GPU's memory is ours.
            self.leak, self.where = gpu, "gpu"
        self._low_since_s = (self._low_since_s if self._low_since_s is not None else at_s) if low else None
        if self.restart is None:
            self.restart = self._reason(at_s, memory)
        return before is None and self.leak is not None

    def _reason(self, at_s: float, memory: Memory) -> str | None:
        left = memory.available_bytes - _TIGHT * self._reserve_bytes
        grown = (self._process if self.where == "process" else self._gpu).grown_bytes
        if (
            self.leak is not None
            and grown >= _WORTH * self._reserve_bytes
            and left <= _HORIZON_S * self.leak.bytes_per_s
        ):
            rate_mb, left_mb = 60 * self.leak.bytes_per_s / _MB, memory.available_bytes // _MB
            what = "this process" if self.where == "process" else "GPU memory"
            return (
                f"{what} grows by {rate_mb:.1f} MB a minute, and {left_mb} MB are left of which"
                f" {self._reserve_bytes // _MB} MB are to be kept"
            )
        taken = self._process.grown_bytes
        # A leak that was too fast to be told, or stopped with the pause: only a restart ends that pause.
        if (
            self._low_since_s is not None
            and at_s - self._low_since_s >= _STUCK_S
            and memory.available_bytes + taken >= 2 * self._reserve_bytes
        ):
            return f"memory is low, and this process has taken {taken // _MB} MB since it began to work"
        return None

"""Whether there is memory enough to go on: MemAvailable and pressure against a reserve, with hysteresis. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edge.monitor.reading import Memory

__all__ = ["Headroom", "default_reserve_bytes"]

_MB = 1 << 20
_TIGHT = 1.5
"""Below this many reserves, memory is low if tasks wait for it as well."""
_AMPLE = 2.0
"""Above this many reserves it is no longer low ..."""
_AMPLE_S = 10.0
"""... after so long, which is doubled for each time that it did not last ..."""
_LONGEST_S = 600.0
_LASTED_S = 300.0
_SOME_PERCENT = 20.0
"""PSI: share of the last ten seconds in which some task waited for memory ..."""
_FULL_PERCENT = 5.0
"""... and in which all did."""


def default_reserve_bytes(total_bytes: int) -> int:
    """6 % of the memory, at least 128 MB."""
    return max(total_bytes * 6 // 100, 128 * _MB)


class Headroom:
    """Low or not. Swap does not count: CUDA's memory cannot be swapped, and the swap of a Jetson is its own memory."""

    def __init__(self, reserve_bytes: int) -> None:
        self.reserve_bytes = reserve_bytes
        self.low = False
        self._wait_s = _AMPLE_S
        self._ample_since_s: float | None = None
        self._recovered_at_s: float | None = None

    def step(self, at_s: float, memory: Memory) -> bool:
        """Take a reading; gives whether ``low`` changed."""
        if not self.low:
            if not self._is_low(memory):
                return False
            relapse = self._recovered_at_s is not None and at_s - self._recovered_at_s < _LASTED_S
            self._wait_s = min(2 * self._wait_s, _LONGEST_S) if relapse else _AMPLE_S
            self.low, self._ample_since_s = True, None
            return True
        if memory.available_bytes <= _AMPLE * self.reserve_bytes:
            self._ample_since_s = None
            return False
        if self._ample_since_s is None:
            self._ample_since_s = at_s
        if at_s - self._ample_since_s < self._wait_s:
            return False
        self.low, self._recovered_at_s = False, at_s
        return True

    def _is_low(self, memory: Memory) -> bool:
        if memory.available_bytes < self.reserve_bytes:
            return True
        pressure = memory.pressure
        if pressure is None or memory.available_bytes >= _TIGHT * self.reserve_bytes:
            return False
        return pressure.some_avg10_percent >= _SOME_PERCENT or pressure.full_avg10_percent >= _FULL_PERCENT

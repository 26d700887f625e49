"""Full model, lighter model, pause: when the lowest rate is still too hot, and when it is safe to go back. Pure.

A swap of engines costs seconds and memory, so that it must not happen often. Going down needs the lowest rate and heat
that lasts. Going up needs the temperature well under the set point for a while. A way up that failed before is tried
only when it is cooler than it was then: the difference between two rungs is a property of the models and the box, and
does not change with the weather.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["Ladder", "Rung"]

Rung: TypeAlias = Literal["full", "lighter", "paused"]

_HOT_C = 0.25
"""Above the set point by this at the lowest rate, for _HOT_S: the rung is too hot."""
_HOT_S = 30.0
_VERY_HOT_C = 0.75
_VERY_HOT_S = 5.0
_DWELL_S = 60.0
"""Shortest time between swaps, and of a pause; and in which a new rung may cool the chip."""
_GRACE_S = 20.0
"""The same where it is very hot."""
_COOL_S = {"lighter": 60.0, "paused": 10.0}
"""How long it must be cool before the rung is left upwards."""
_LONGEST_S = 3600.0
"""The wait is doubled after each failed return up to this."""
_FAILED_S = 6 * 3600.0
"""A rung that is too hot within this after a return: the return failed. A case takes hours to warm up through."""
_COOLER_C = 2.0
"""So much cooler than at a failed return the next one must be, and twice that after the next failure ..."""
_FORGET_C_PER_S = 0.25 / 3600
"""... which is slowly forgotten: boxes are moved, and cleaned."""


@dataclass(slots=True)
class _Return:
    """What is known of the way up from one rung."""

    wait_s: float = _DWELL_S
    tried_at_s: float | None = None
    tried_c: float = 0.0
    failed_at_s: float | None = None
    highest_c: float = 0.0
    """From where the next may be tried, as far as failures tell."""
    failures: int = 0


class Ladder:
    """Where it stands, and for how long."""

    def __init__(self) -> None:
        self.rung: Rung = "full"
        self.lighter = False
        """Whether lighter models should be loaded: on their rung, and in a pause that was reached from it."""
        self._since_s: float | None = None
        self._swapped_at_s: float | None = None
        self._at_s: float | None = None
        self._hot_s = self._very_hot_s = self._cool_s = 0.0
        self._returns = {"lighter": _Return(), "paused": _Return()}

    def step(
        self,
        at_s: float,
        *,
        temperature_c: float,
        mean_c: float,
        set_point_c: float,
        hysteresis_c: float,
        at_floor: bool,
        unlimited: bool,
        has_lighter: bool,
        emergency: bool,
    ) -> bool:
        """Move at most one rung; gives whether it moved.

        Args:
            at_s: now.
            temperature_c: without noise.
            mean_c: over half a minute or so.
            set_point_c: to stay under.
            hysteresis_c: so far under it the way up begins.
            at_floor: every model is at its lowest rate.
            unlimited: no model is limited.
            has_lighter: some model has a lighter one.
            emergency: the chip throttles, or is about to.
        """
        passed_s = 0.0 if self._at_s is None else max(at_s - self._at_s, 0.0)
        self._at_s = at_s
        if self._since_s is None:
            self._since_s = at_s
        if self.rung != "paused":
            hot = at_floor and temperature_c > set_point_c + _HOT_C
            self._hot_s = self._hot_s + passed_s if hot else 0.0
            very_hot = hot and temperature_c > set_point_c + _VERY_HOT_C
            self._very_hot_s = self._very_hot_s + passed_s if very_hot else 0.0
            urgent = emergency and at_floor
            here_s = at_s - self._since_s
            too_hot = self._hot_s >= _HOT_S and here_s >= _DWELL_S
            far_too_hot = self._very_hot_s >= _VERY_HOT_S and here_s >= _GRACE_S
            if urgent or too_hot or far_too_hot:
                return self._down(at_s, has_lighter=has_lighter, urgent=urgent or very_hot)
        if self.rung == "full":
            return False
        cool = mean_c <= min(set_point_c - hysteresis_c, self._highest_c(at_s)) and not emergency
        cool = cool and (unlimited or self.rung == "paused")
        self._cool_s = self._cool_s + passed_s if cool else 0.0
        waited = at_s - self._since_s >= self._returns[self.rung].wait_s
        if cool and waited and self._cool_s >= _COOL_S[self.rung]:
            self._up(at_s, mean_c, has_lighter=has_lighter)
            return True
        return False

    def give_up_lighter(self) -> None:
        """There is no lighter model any more."""
        self.lighter = False
        if self.rung == "lighter":
            assert self._at_s is not None, "it has climbed there"
            self._go(self._at_s, "full")

    def _down(self, at_s: float, *, has_lighter: bool, urgent: bool) -> bool:
        swap = self.rung == "full" and has_lighter
        if swap and self._swapped_at_s is not None and at_s - self._swapped_at_s < _DWELL_S:
            if not urgent:
                return False
            swap = False
        self._judge(at_s, "lighter" if self.rung == "full" and has_lighter else "paused")
        if swap:
            self._swapped_at_s = at_s
        self._go(at_s, "lighter" if swap else "paused")
        return True

    def _judge(self, at_s: float, below: Literal["lighter", "paused"]) -> None:
        """Was the last return from the rung below too early?"""
        way = self._returns[below]
        if way.tried_at_s is None:
            return
        if at_s - way.tried_at_s < _FAILED_S:
            way.wait_s = min(2 * way.wait_s, _LONGEST_S)
            way.failed_at_s, way.highest_c = at_s, way.tried_c - _COOLER_C * 2.0 ** min(way.failures, 3)
            way.failures += 1
        else:
            way.wait_s, way.failed_at_s, way.failures = _DWELL_S, None, 0
        way.tried_at_s = None

    def _highest_c(self, at_s: float) -> float:
        """From how warm a return may be tried, as far as failures tell."""
        assert self.rung != "full"
        way = self._returns[self.rung]
        if way.failed_at_s is None:
            return float("inf")
        return way.highest_c + _FORGET_C_PER_S * (at_s - way.failed_at_s)

    def _up(self, at_s: float, mean_c: float, *, has_lighter: bool) -> None:
        assert self.rung != "full"
        way = self._returns[self.rung]
        way.tried_at_s, way.tried_c = at_s, mean_c
        above: Rung = "lighter" if self.rung == "paused" and has_lighter else "full"
        if (above == "lighter") != self.lighter:
            self._swapped_at_s = at_s
        self._go(at_s, above)

    def _go(self, at_s: float, rung: Rung) -> None:
        self.rung, self._since_s = rung, at_s
        self.lighter = rung == "lighter" or (rung == "paused" and self.lighter)
        self._hot_s = self._very_hot_s = self._cool_s = 0.0

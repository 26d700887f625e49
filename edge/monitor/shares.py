"""How many frames each model wants, from noisy measurements, and each model's share of a budget. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Shares"]

_QUICK_S = 3.0
_STEADY_S = 60.0
_JUMP = 0.2
"""A demand that differs by this much has changed; less is noise, and is followed slowly."""
_SAME = 0.02
"""Limits that differ by less from the last ones are not worth an order."""


class Shares:
    """Demands by model, and limits that add up to a budget."""

    def __init__(self, min_fps: float) -> None:
        self._min_fps = min_fps
        self._quick: dict[str, float] = {}
        self._steady: dict[str, float] = {}
        self._limits: dict[str, float | None] = {}
        self._budget_fps = math.inf

    @property
    def total_fps(self) -> float:
        """What all models want together."""
        return sum(self._steady.values())

    @property
    def floor_fps(self) -> float:
        """What all models get together at the lowest rate: each its minimum, or what it wants if that is less."""
        return sum(min(self._min_fps, fps) for fps in self._steady.values())

    def observe(self, demands_fps: Mapping[str, float], passed_s: float) -> None:
        """Take new measurements of what each model wants, ``passed_s`` after the last ones."""
        for known in [name for name in self._steady if name not in demands_fps]:
            del self._steady[known], self._quick[known]
        for name, measured in demands_fps.items():
            fps = measured if math.isfinite(measured) and measured > 0 else 0.0
            if name not in self._steady:
                self._quick[name] = self._steady[name] = fps
                continue
            self._quick[name] += (1 - math.exp(-passed_s / _QUICK_S)) * (fps - self._quick[name])
            quick, steady = self._quick[name], self._steady[name]
            if abs(quick - steady) > _JUMP * steady:
                self._steady[name] = quick if quick > 1e-3 else 0.0
            else:
                self._steady[name] += (1 - math.exp(-passed_s / _STEADY_S)) * (quick - steady)

    def limits(self, budget_fps: float) -> dict[str, float | None]:
        """Limit of each model in frames a second; None where it may do what it wants.

        What is left of the budget above the minima is shared in proportion to what each model wants beyond its own.
        """
        total, floor = self.total_fps, self.floor_fps
        part = 1.0 if budget_fps >= total else max(budget_fps - floor, 0.0) / (total - floor) if total > floor else 1.0
        wanted = {
            name: None if part >= 1 or fps <= self._min_fps else self._min_fps + part * (fps - self._min_fps)
            for name, fps in self._steady.items()
        }
        # The demands' noise is no reason to move the limits of several models against each other.
        if budget_fps != self._budget_fps or not _alike(wanted, self._limits):
            self._budget_fps, self._limits = budget_fps, wanted
        return dict(self._limits)


def _alike(one: Mapping[str, float | None], other: Mapping[str, float | None]) -> bool:
    if one.keys() != other.keys():
        return False
    pairs = [(one[name], other[name]) for name in one]
    return all(a == b or (a is not None and b is not None and abs(a - b) <= _SAME * b) for a, b in pairs)

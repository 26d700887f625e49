"""Trades frame rate for temperature and memory, so that neither the chip throttles nor the kernel kills. DESIGN 10.

This module joins the parts and says what happened: which temperature counts (``setpoint``), which rate it allows
(``rate``), who gets how much of it (``shares``), lighter model or pause (``ladder``), memory (``headroom``) and leaks
(``leak``). It decides from readings and demands alone. It never sleeps and starts no thread; time is the reading's.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from edge.monitor.headroom import Headroom, default_reserve_bytes
from edge.monitor.ladder import Ladder
from edge.monitor.leak import LeakWatch
from edge.monitor.rate import RateController
from edge.monitor.setpoint import Thermometer
from edge.monitor.shares import Shares
from edge.status import GovernorState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge import config
    from edge.events import Events
    from edge.monitor.reading import Memory, Reading
    from edge.monitor.setpoint import Heat

__all__ = ["Demand", "Governor", "Order"]

logger = logging.getLogger(__name__)

_MB = 1 << 20
_EMERGENCY_C = 1.0
"""So near the kernel's throttle point the budget is halved at once ..."""
_EMERGENCY_S = 5.0
"""... and again after so long, as long as it lasts."""
_BLIND = 0.5
"""Share of the demand that is allowed while no temperature can be read."""
_RISING_C = 3.0
"""A limit so far under the set point is on its way up."""
_TELL_FACTOR = 1.5
_TELL_S = 60.0
_RESTORED_S = 60.0
"""How long nothing must have been limited before that is an event."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What one model would do if nothing held it back."""

    fps: float
    """Frames a second that it would infer: what arrives, at most what the engine can do. It may be noisy."""
    has_lighter: bool
    """Whether the deployment names a lighter model to stand in for it, at work now or not."""


@dataclass(frozen=True, slots=True)
class Order:
    """What the models may do until the next order."""

    mode: Literal["full", "limited", "lighter", "paused"]
    limits_fps: Mapping[str, float | None]
    """By model: frames a second; None is no limit, 0 a pause."""
    lighter: bool
    """Models that have a lighter one should run that."""
    reason: str | None
    """Why it is not full, as the end of a sentence."""
    restart: str | None
    """Why the process should end cleanly and be started again; None: it need not."""


class Governor:
    """From readings and demands to orders. Calls come from one thread; ``state`` may be read by any."""

    def __init__(self, section: config.Governor, *, events: Events, memory_total_bytes: int) -> None:
        self._section = section
        self._events = events
        wanted = section.memory_reserve_mb
        reserve = default_reserve_bytes(memory_total_bytes) if wanted is None else wanted * _MB
        self._thermometer = Thermometer(section)
        self._rate = RateController()
        self._ladder = Ladder()
        self._shares = Shares(section.min_fps)
        self._headroom = Headroom(reserve)
        self._leaks = LeakWatch(reserve)
        self._at_s: float | None = None
        self._cut_at_s = -math.inf
        self._blind = False
        self._told_fps: float | None = None
        self._told_at_s = -math.inf
        self._free_since_s: float | None = None
        self._ungoverned: str | None = None
        self._state = GovernorState("full" if section.enabled else "off", None, None, None, None)

    @property
    def state(self) -> GovernorState:
        """What is allowed now, and why."""
        return self._state

    def step(self, reading: Reading, demands: Mapping[str, Demand]) -> Order:
        """Decide anew.

        Args:
            reading: of now; its time must not run backwards.
            demands: by model name.

        Returns:
            An order with a limit for each model of ``demands``.
        """
        if not self._section.enabled:
            return Order("full", dict.fromkeys(demands), lighter=False, reason=None, restart=None)
        passed_s = 0.0 if self._at_s is None else max(reading.at_s - self._at_s, 0.0)
        self._at_s = reading.at_s
        self._shares.observe({name: demand.fps for name, demand in demands.items()}, passed_s)
        heat = self._thermometer.read(reading)
        recovered = self._step_memory(reading)
        has_lighter = any(demand.has_lighter for demand in demands.values())
        if demands and not has_lighter:
            self._give_up_lighter(heat)
        self._step_heat(reading, heat, has_lighter=has_lighter, memory_recovered=recovered)
        return self._order(reading, heat)

    # Memory

    def _step_memory(self, reading: Reading) -> bool:
        """Gives whether a pause for want of memory has just ended."""
        memory = reading.memory
        changed = self._headroom.step(reading.at_s, memory)
        low = self._headroom.low
        if self._leaks.step(reading.at_s, memory, low=low):
            self._tell_leak(memory)
        if not changed:
            return False
        fields: dict[str, Any] = {
            "available_mb": memory.available_bytes // _MB,
            "reserve_mb": self._headroom.reserve_bytes // _MB,
        }
        if memory.pressure is not None:
            fields["pressure_some_percent"] = round(memory.pressure.some_avg10_percent, 1)
        paused_already = self._ladder.rung == "paused"
        if low:
            text = f"memory is low: {fields['available_mb']} MB are available"
            self._events.emit("memory_low", text, severity="warning", **fields)
            if not paused_already:
                self._events.emit("paused", f"inference pauses: {text}", severity="warning", reason="memory", **fields)
        else:
            text = f"memory suffices again: {fields['available_mb']} MB are available"
            self._events.emit("memory_recovered", text, **fields)
            if not paused_already:
                self._events.emit("resumed", f"inference resumes: {text}", reason="memory", **fields)
        return not low

    def _tell_leak(self, memory: Memory) -> None:
        leak = self._leaks.leak
        assert leak is not None, "it has just been suspected"
        what = "the process" if self._leaks.where == "process" else "GPU memory"
        per_minute = 60 * leak.bytes_per_s / _MB
        self._events.emit(
            "leak_suspected",
            f"{what} has grown by {leak.grown_bytes // _MB} MB at a steady {per_minute:.1f} MB a minute",
            severity="warning",
            mb_per_minute=round(per_minute, 2),
            grown_mb=leak.grown_bytes // _MB,
            window_s=leak.window_s,
            rss_mb=memory.rss_bytes // _MB,
            available_mb=memory.available_bytes // _MB,
        )

    # Heat

    def _step_heat(self, reading: Reading, heat: Heat, *, has_lighter: bool, memory_recovered: bool) -> None:
        if heat.set_point_c is None:
            self._without_set_point(heat)
            return
        total_fps, floor_fps = self._shares.total_fps, self._shares.floor_fps
        self._ungoverned = None
        if heat.temperature_c is None:
            if heat.lost and not self._blind:
                self._blind = True
                self._rate.restart(max(min(self._rate.budget_fps, _BLIND * total_fps), floor_fps))
            return
        if self._blind:
            self._blind = False
        if memory_recovered:
            self._rate.resume(total_fps, heat.set_point_c)
        emergency = bool(reading.throttling)
        if self._ladder.rung == "paused" or self._headroom.low or total_fps <= 0:
            self._rate.observe(reading.at_s, heat.temperature_c)
        else:
            self._rate.step(
                reading.at_s,
                heat.temperature_c,
                set_point_c=heat.set_point_c,
                demand_fps=total_fps,
                floor_fps=floor_fps,
            )
        if heat.throttle_c is not None and self._rate.temperature_c > heat.throttle_c - _EMERGENCY_C:
            emergency = True
        if emergency and reading.at_s - self._cut_at_s >= _EMERGENCY_S:
            self._cut_at_s = reading.at_s
            self._rate.restart(max(0.5 * min(self._rate.budget_fps, total_fps), floor_fps))
        budget = self._rate.budget_fps
        before = self._ladder.rung
        moved = self._ladder.step(
            reading.at_s,
            temperature_c=self._rate.temperature_c,
            mean_c=self._rate.mean_c,
            set_point_c=heat.set_point_c,
            hysteresis_c=self._section.hysteresis_c,
            at_floor=total_fps > 0 and budget <= floor_fps * 1.001,
            unlimited=budget >= total_fps,
            has_lighter=has_lighter,
            emergency=emergency and self._rate.temperature_c > heat.set_point_c - self._section.hysteresis_c,
        )
        if moved:
            self._rate.restart(floor_fps)
            self._tell_rung(before, heat)

    def _give_up_lighter(self, heat: Heat) -> None:
        """A lighter model that was at work could not be loaded, or the deployment names none any more."""
        before = self._ladder.rung
        self._ladder.give_up_lighter()
        if before != self._ladder.rung:
            self._rate.restart(self._shares.floor_fps)
            self._tell_rung(before, heat)

    def _without_set_point(self, heat: Heat) -> None:
        reason = (
            "no thermal zone can be read"
            if heat.zone is None
            else "no zone has a trip point, and governor.set_point_c is not given: heat is not governed"
        )
        if reason != self._ungoverned:
            self._ungoverned = reason
            logger.info("governor: %s", reason)

    def _tell_rung(self, before: str, heat: Heat) -> None:
        now = self._ladder.rung
        fields = self._heat_fields(heat)
        warm = f"{fields['temperature_c']} degrees in {heat.zone}, set point {fields['set_point_c']}"
        if now == "paused":
            self._events.emit("paused", f"inference pauses, {warm}", severity="warning", reason="heat", **fields)
        elif before == "paused":
            self._events.emit("resumed", f"inference resumes, {warm}", reason="heat", **fields)
        elif now == "lighter":
            self._events.emit("lighter_model", f"lighter models take over, {warm}", severity="warning", **fields)
        else:
            self._events.emit("full_model", f"full models return, {warm}", **fields)
        if "paused" not in {now, before}:
            self._leaks.forget()

    def _heat_fields(self, heat: Heat) -> dict[str, Any]:
        return {
            "zone": heat.zone,
            "temperature_c": None if heat.temperature_c is None else round(self._rate.temperature_c, 1),
            "set_point_c": None if heat.set_point_c is None else round(heat.set_point_c, 1),
        }

    # The order

    def _order(self, reading: Reading, heat: Heat) -> Order:
        lighter = self._ladder.lighter
        limits = self._shares.limits(self._rate.budget_fps)
        mode: Literal["full", "limited", "lighter", "paused"] = "full"
        if self._headroom.low or self._ladder.rung == "paused":
            mode, limits = "paused", dict.fromkeys(limits, 0.0)
        elif lighter:
            mode = "lighter"
        elif any(limit is not None for limit in limits.values()):
            mode = "limited"
        if mode != "paused":
            self._tell_rate(reading.at_s, limits, heat)
        reason = None if mode == "full" else self._reason(heat)
        temperature_c = None if heat.temperature_c is None else round(heat.temperature_c, 2)
        self._state = GovernorState(mode, reason or self._ungoverned, heat.set_point_c, heat.zone, temperature_c)
        return Order(mode, limits, lighter=lighter, reason=reason, restart=self._leaks.restart)

    def _reason(self, heat: Heat) -> str | None:
        if self._headroom.low:
            return f"memory is low (less than {self._headroom.reserve_bytes // _MB} MB to spare)"
        if heat.lost:
            return "no temperature can be read"
        if heat.temperature_c is None or heat.set_point_c is None:
            return f"{heat.zone} was hot, and cannot be read now" if heat.zone is not None else None
        text = f"{heat.zone} is at {self._rate.temperature_c:.1f} degrees, set point {heat.set_point_c:g}"
        rising = self._rate.temperature_c < heat.set_point_c - _RISING_C
        return f"{text}; the rate rises step by step" if rising else text

    def _tell_rate(self, at_s: float, limits: Mapping[str, float | None], heat: Heat) -> None:
        """Say that rates are limited, that this changed much, or that it is over: rarely, whatever the noise does."""
        limited = {name: limit for name, limit in limits.items() if limit is not None}
        if not limited:
            if self._told_fps is None:
                return
            if self._free_since_s is None:
                self._free_since_s = at_s
            if at_s - self._free_since_s >= _RESTORED_S:
                self._told_fps = self._free_since_s = None
                self._events.emit("rate_restored", "full frame rate again", **self._heat_fields(heat))
            return
        self._free_since_s = None
        total = sum(limited.values())
        lower = self._told_fps is None or total < self._told_fps
        if self._told_fps is not None:
            factor = max(total, 1e-9) / max(self._told_fps, 1e-9)
            if at_s - self._told_at_s < _TELL_S or 1 / _TELL_FACTOR < factor < _TELL_FACTOR:
                return
        self._told_fps, self._told_at_s = total, at_s
        why = self._reason(heat)
        self._events.emit(
            "rate_limited",
            f"frame rate {'limited' if lower else 'may rise'} to {total:.1f}/s: {why}",
            severity="warning" if lower else "info",
            limit_fps=round(total, 2),
            limits_fps={name: round(limit, 2) for name, limit in limited.items()},
            **self._heat_fields(heat),
        )

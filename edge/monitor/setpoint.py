"""Which temperature to govern by, and how warm it may be: zones, trip points, the deployment's wishes. No control."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge import config
    from edge.monitor.reading import Reading, Trips

__all__ = ["Heat", "Thermometer"]

logger = logging.getLogger(__name__)

_BELOW_TRIP_C = 10.0
"""Default distance of the set point from the trip point at which the kernel throttles."""
_LEAST_BELOW_TRIP_C = 2.0
"""A set point that is nearer would leave no room for the controller's overshoot."""
_PATIENCE_S = 30.0
"""How long a zone may be unreadable before another takes its place; power-gated ones are, for moments."""
_PLAUSIBLE_C = (-60.0, 200.0)
_CHIP = ("cpu", "gpu", "soc", "cv", "tj")


@dataclass(frozen=True, slots=True)
class Heat:
    """What a reading says of the temperature."""

    zone: str | None
    """That is governed by; None where there is none."""
    temperature_c: float | None
    """None where the zone cannot be read now."""
    set_point_c: float | None
    """None where none is known."""
    throttle_c: float | None
    """From where the kernel slows the chip; None where none is known."""
    lost: bool = False
    """There was a temperature, and has been none for too long."""


class Thermometer:
    """Picks zone and set point from readings. It remembers what readings leave out for a while."""

    def __init__(self, section: config.Governor) -> None:
        self._section = section
        self._wanted = section.zone
        self._seen_at_s: float | None = None
        self._last: Heat | None = None
        self._reported: Mapping[str, Trips] = {}
        self._trips: dict[str, float] = {}
        self._warned: set[str] = set()

    def read(self, reading: Reading) -> Heat:
        """Zone, temperature and limits as of this reading."""
        temperatures_c = {zone: value for zone, value in reading.temperatures_c.items() if _plausible(value)}
        if reading.trips != self._reported:
            self._reported = reading.trips
            self._trips.update(_throttle_points(reading.trips))
        if self._wanted is None and "tj" in temperatures_c:
            self._wanted = "tj"
        if self._seen_at_s is None:
            self._seen_at_s = reading.at_s
        zone = self._wanted
        if zone is None or zone not in temperatures_c:
            if zone is not None and reading.at_s - self._seen_at_s <= _PATIENCE_S:
                return self._about(zone, None)
            zone = max(temperatures_c, key=lambda name: temperatures_c[name], default=None)
            if zone is None:
                return self._without(reading.at_s)
            if self._wanted is not None:
                self._warn(f"thermal zone {self._wanted} cannot be read; the hottest of the others is governed by")
        else:
            self._seen_at_s = reading.at_s
        self._last = self._about(zone, temperatures_c[zone])
        if self._wanted is None:
            self._seen_at_s = reading.at_s
        return self._last

    def _without(self, at_s: float) -> Heat:
        """No zone can be read."""
        if self._last is None:
            return Heat(None, None, None, None)
        assert self._seen_at_s is not None
        return self._about(self._last.zone, None, lost=at_s - self._seen_at_s > _PATIENCE_S)

    def _about(self, zone: str | None, temperature_c: float | None, *, lost: bool = False) -> Heat:
        throttle_c = self._throttle_c(zone)
        return Heat(zone, temperature_c, self._set_point_c(throttle_c), throttle_c, lost)

    def _throttle_c(self, zone: str | None) -> float | None:
        # Orin's tj has trip points for the fan only; the chip is throttled by those of cpu, gpu, soc and cv.
        if zone in self._trips:
            return self._trips[zone]
        chip = [trip for name, trip in self._trips.items() if name.startswith(_CHIP)]
        return min(chip or self._trips.values(), default=None)

    def _set_point_c(self, throttle_c: float | None) -> float | None:
        wanted_c = self._section.set_point_c
        if throttle_c is None:
            return wanted_c
        if wanted_c is None:
            return throttle_c - _BELOW_TRIP_C
        highest_c = throttle_c - _LEAST_BELOW_TRIP_C
        if wanted_c > highest_c:
            self._warn(
                f"governor.set_point_c is {wanted_c:g}, too near the throttle point of {throttle_c:g}; {highest_c:g} is"
                " used"
            )
        return min(wanted_c, highest_c)

    def _warn(self, text: str) -> None:
        """Once for each text: readings come every second."""
        if text not in self._warned:
            self._warned.add(text)
            logger.warning("%s", text)


def _plausible(value_c: float) -> bool:
    return math.isfinite(value_c) and _PLAUSIBLE_C[0] < value_c < _PLAUSIBLE_C[1]


def _throttle_points(trips: Mapping[str, Trips]) -> dict[str, float]:
    return {
        zone: trip.throttle_c
        for zone, trip in trips.items()
        if trip.throttle_c is not None and _plausible(trip.throttle_c)
    }

"""One reading from whoever has something to say, and an event when the chip is held back or a sensor is gone.

sysfs and /proc decide; jtop's service fills in what they lack, and its loss disturbs nothing.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from edge.monitor.companion import Companion
from edge.monitor.notice import Changes, Tally
from edge.monitor.proc import Proc
from edge.monitor.pseudofiles import read_text
from edge.monitor.reading import Reading
from edge.monitor.sysfs import Sysfs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import TracebackType

    from typing_extensions import Self

    from edge import config
    from edge.events import Events
    from edge.monitor.jtop import Sample
    from edge.monitor.reading import Memory
    from edge.monitor.sysfs import Chip

__all__ = ["Monitor", "device_name", "merge"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
OVER_CURRENT_EVERY_S = 60.0
INSTANTANEOUS_EVERY_S = 600.0
"""In its highest power mode an Orin Nano is said to count several a second, a millisecond each: no alarm."""
SENSOR_LOST_S = 30.0
SLEEPING_ZONES = ("cv", "gpu")
"""Beginnings of the names of zones that lose their power, and with it their sensor, while nobody needs them."""


def device_name(root: Path) -> str | None:
    """What the device tree calls the board, such as "NVIDIA Jetson AGX Orin Developer Kit"; None off such boards."""
    return read_text(str(root / "proc/device-tree/model"))


def merge(at_s: float, chip: Chip, memory: Memory, sample: Sample | None) -> Reading:
    """What the files say, and jtop of what they do not."""
    reading = Reading(
        at_s=at_s,
        memory=memory,
        temperatures_c=chip.temperatures_c,
        trips=chip.trips,
        throttling=chip.throttling,
        over_current_events=chip.over_current_events,
        power_mw=chip.power_mw,
        total_power_mw=chip.total_power_mw,
        gpu_load_percent=chip.gpu_load_percent,
        gpu_clock_hz=chip.gpu_clock_hz,
        dla_active=chip.dla_active,
        fan_percent=chip.fan_percent,
    )
    if sample is None:
        return reading
    return replace(
        reading,
        memory=memory if memory.gpu_bytes is not None else replace(memory, gpu_bytes=sample.gpu_bytes),
        temperatures_c=chip.temperatures_c or sample.temperatures_c,
        power_mw=chip.power_mw or sample.power_mw,
        total_power_mw=chip.total_power_mw if chip.power_mw else sample.total_power_mw,
        gpu_load_percent=_first(chip.gpu_load_percent, sample.gpu_load_percent),
        gpu_clock_hz=_first(chip.gpu_clock_hz, sample.gpu_clock_hz),
        dla_active=chip.dla_active or sample.dla_active,
        fan_percent=_first(chip.fan_percent, sample.fan_percent),
        power_mode=sample.power_mode,
        jetson_clocks=sample.jetson_clocks,
        jtop=True,
    )


def _first(value: T | None, other: T | None) -> T | None:
    return value if value is not None else other


class Monitor:
    """Reads the device. ``read`` is one thread's at a time; a context manager, since jtop's client is a process."""

    def __init__(
        self,
        section: config.Monitor,
        *,
        events: Events,
        root: Path = Path("/"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start nothing yet.

        Args:
            section: of the deployment.
            events: where throttling, over-current, lost sensors and jtop's loss and return are told.
            root: where sys, proc and run are.
            clock: monotonic seconds.
        """
        self._events = events
        self._clock = clock
        self._sysfs = Sysfs(root)
        self._proc = Proc(root)
        self._companion = Companion(root, period_s=section.period_s, events=events) if section.jtop == "auto" else None
        self._throttling: Changes[tuple[str, ...]] = Changes(())
        self._counted: dict[str, int] = {}
        self._tallies: dict[str, Tally] = {}
        self._lost_after_s = max(SENSOR_LOST_S, 2 * section.period_s)
        self._seen_s: dict[str, float] = {}
        self._lost: dict[str, Changes[bool]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._companion is not None:
            self._companion.close()

    def read(self) -> Reading:
        """The device as it is now.

        Raises:
            DeviceError: /proc/meminfo, which everything rests on, cannot be read.
        """
        now_s = self._clock()
        chip = self._sysfs.read(now_s)
        self._tell_throttling(chip.throttling, now_s)
        self._tell_over_current(chip.over_current_events, now_s)
        self._tell_lost_sensors(chip.temperatures_c, now_s)
        memory = self._proc.read(now_s)
        return merge(now_s, chip, memory, None if self._companion is None else self._companion.poll(now_s))

    def _tell_throttling(self, throttling: tuple[str, ...], now_s: float) -> None:
        if not self._throttling.announce(throttling, now_s):
            return
        if throttling:
            text = f"the chip is throttled: {', '.join(throttling)}"
            self._events.emit("throttled", text, severity="warning", devices=list(throttling))
        else:
            self._events.emit("throttling_ended", "the chip is not throttled any more")

    def _tell_over_current(self, counts: Mapping[str, int], now_s: float) -> None:
        for cause, count in counts.items():
            # The first count is since the device was started. One that falls began anew, and says nothing this once.
            new = max(0, count - self._counted.get(cause, count))
            self._counted[cause] = count
            harmless = cause == "instantaneous"
            tally = self._tallies.setdefault(cause, Tally(INSTANTANEOUS_EVERY_S if harmless else OVER_CURRENT_EVERY_S))
            told = tally.add(new, now_s)
            if told:
                times = "once" if told == 1 else f"{told} times"
                self._events.emit(
                    "over_current",
                    f"over-current protection ({cause.replace('_', ' ')}) held the chip back {times}",
                    severity="info" if harmless else "warning",
                    cause=cause,
                    count=told,
                )

    def _tell_lost_sensors(self, readable: Iterable[str], now_s: float) -> None:
        """Tell of zones that could be read before and have not been for long."""
        self._seen_s.update(dict.fromkeys(readable, now_s))
        for zone, seen_s in self._seen_s.items():
            lost = now_s - seen_s > self._lost_after_s
            changes = self._lost.setdefault(zone, Changes(False))
            if zone.startswith(SLEEPING_ZONES) or not changes.announce(lost, now_s):
                continue
            if lost:
                text = f"the temperature of {zone} cannot be read any more"
                self._events.emit("sensor_lost", text, severity="warning", zone=zone)
            else:
                logger.info("the temperature of %s can be read again", zone)

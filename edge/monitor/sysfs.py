"""The chip by its files under /sys: temperatures, trip points, throttling, rails, GPU, DLA, fan.

Everything is found by what it is called (``type``, ``name``, ``label``), never by its number: those change with the
board and the kernel. What cannot be read is left out. Paths are those of JetPack 5 and 6 on Orin; see docs/monitor.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edge.monitor.pseudofiles import integer, read_text
from edge.monitor.reading import Trips

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

__all__ = ["Chip", "Sysfs", "celsius", "total_power", "zone_name"]

REDISCOVER_S = 60.0
"""Drivers come late, and go: all is looked for again after so long."""
REDISCOVER_SOONEST_S = 5.0
"""The same where a file has vanished: a driver that comes and goes must not make every reading a search."""
OVER_CURRENT_S = 2.0
"""The counters are the BPMP's, a small processor with other things to do, and change no more often than this."""

OVER_CURRENT_CAUSES = {1: "under_voltage", 2: "average", 3: "instantaneous"}
"""What Orin's soctherm counts as oc1, oc2 and oc3."""

_COLDEST_C, _HOTTEST_C = -60.0, 200.0
_ZONE_SUFFIX = re.compile(r"[-_]therm(al)?$")
_GPU_NAMES = ("gpu", "ga10b", "gv11b")
# Where the load is besides devfreq's link; the first that can be read counts.
_GPU_LOADS = (
    "sys/devices/platform/bus@0/17000000.gpu/load",  # JetPack 6
    "sys/devices/platform/17000000.gpu/load",
    "sys/devices/17000000.ga10b/load",  # JetPack 5
    "sys/devices/platform/17000000.ga10b/load",
    "sys/devices/platform/gpu.0/load",
    "sys/devices/gpu.0/load",
)
_DLA_STATES = (
    "sys/bus/platform/devices/*nvdla*/power/runtime_status",
    "sys/devices/platform/bus@0/*.host1x/*nvdla*/power/runtime_status",  # JetPack 6
    "sys/devices/platform/host1x/*nvdla*/power/runtime_status",  # JetPack 5
    "sys/devices/platform/*.host1x/*nvdla*/power/runtime_status",
)
_DLA_NAME = re.compile(r"nvdla(\d)")
_POWERED = {"active": True, "resuming": True, "suspended": False, "suspending": False}
_INPUT_RAILS = ("VDD_IN", "VIN")
"""Measured where power enters the module, so that the others are parts of it: Orin NX and Nano; Thor."""


@dataclass(frozen=True, slots=True)
class Chip:
    """What /sys says of the chip; the fields mean what they mean in ``Reading``."""

    temperatures_c: Mapping[str, float] = field(default_factory=dict)
    trips: Mapping[str, Trips] = field(default_factory=dict)
    throttling: tuple[str, ...] = ()
    over_current_events: Mapping[str, int] = field(default_factory=dict)
    power_mw: Mapping[str, int] = field(default_factory=dict)
    total_power_mw: int | None = None
    gpu_load_percent: float | None = None
    gpu_clock_hz: int | None = None
    dla_active: Mapping[str, bool] = field(default_factory=dict)
    fan_percent: float | None = None


@dataclass(frozen=True, slots=True)
class _Rail:
    label: str
    voltage: str
    """Path; millivolts."""
    current: str
    """Path; milliamperes."""


@dataclass(frozen=True, slots=True)
class _Paths:
    """Which files to read."""

    zones: tuple[tuple[str, str], ...] = ()
    trips: Mapping[str, Trips] = field(default_factory=dict)
    """Trip points do not move while the device runs: they are read when they are found."""
    alerts: tuple[tuple[str, str], ...] = ()
    over_current: tuple[tuple[str, str], ...] = ()
    rails: tuple[_Rail, ...] = ()
    gpu_load: str | None = None
    gpu_clock: str | None = None
    dla: tuple[tuple[str, str], ...] = ()
    fan: str | None = None


def celsius(text: str | None) -> float | None:
    """Millidegrees as degrees; None for what is no chip's temperature, such as an unpowered sensor's -256000."""
    value = integer(text)
    if value is None or not _COLDEST_C < value / 1000 < _HOTTEST_C:
        return None
    return value / 1000


def zone_name(kind: str) -> str:
    """``cpu`` for JetPack 6's ``cpu-thermal`` and JetPack 5's ``CPU-therm``."""
    return _ZONE_SUFFIX.sub("", kind.lower())


def total_power(rails: Mapping[str, int]) -> int | None:
    """The input's, where that is measured, else the sum of all rails."""
    for label in _INPUT_RAILS:
        if label in rails:
            return rails[label]
    return sum(rails.values()) if rails else None


class Sysfs:
    """Reads the chip. One thread at a time."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._paths = _Paths()
        self._searched_s: float | None = None
        self._readable: set[str] = set()
        self._vanished = False
        self._over_current: Mapping[str, int] = {}
        self._over_current_read_s: float | None = None

    def read(self, now_s: float) -> Chip:
        """What the files say now. ``now_s`` is a monotonic clock's."""
        self._search_if_due(now_s)
        paths = self._paths
        rails = dict(self._read_rails(paths.rails))
        load = None if paths.gpu_load is None else integer(self._read(paths.gpu_load))
        clock = None if paths.gpu_clock is None else integer(self._read(paths.gpu_clock))
        pwm = None if paths.fan is None else integer(self._read(paths.fan))
        states = ((name, self._read(path)) for name, path in paths.dla)
        return Chip(
            temperatures_c=self._read_zones(paths.zones),
            trips=paths.trips,
            throttling=tuple(kind for kind, path in paths.alerts if (integer(self._read(path)) or 0) > 0),
            over_current_events=self._read_over_current(now_s),
            power_mw=rails,
            total_power_mw=total_power(rails),
            gpu_load_percent=load / 10 if load is not None and 0 <= load <= 1000 else None,  # per mille
            gpu_clock_hz=clock,
            dla_active={name: _POWERED[state] for name, state in states if state in _POWERED},
            fan_percent=100 * pwm / 255 if pwm is not None and 0 <= pwm <= 255 else None,
        )

    def _search_if_due(self, now_s: float) -> None:
        wait_s = REDISCOVER_SOONEST_S if self._vanished else REDISCOVER_S
        if self._searched_s is None or now_s - self._searched_s >= wait_s:
            self._paths = _search(self._root)
            self._searched_s, self._vanished = now_s, False

    def _read(self, path: str) -> str | None:
        """The file's text. One that could be read before, and now cannot, is a reason to search anew."""
        text = read_text(path)
        if text is not None:
            self._readable.add(path)
        elif path in self._readable:
            self._readable.remove(path)
            self._vanished = True
        return text

    def _read_zones(self, zones: Iterable[tuple[str, str]]) -> dict[str, float]:
        """Degrees by zone; the hottest of those that share a name, as a PC's do."""
        found: dict[str, float] = {}
        for name, path in zones:
            value = celsius(self._read(path))
            if value is not None:
                found[name] = max(value, found.get(name, value))
        return found

    def _read_rails(self, rails: Iterable[_Rail]) -> Iterator[tuple[str, int]]:
        for rail in rails:
            millivolts, milliamperes = integer(self._read(rail.voltage)), integer(self._read(rail.current))
            if millivolts is not None and milliamperes is not None:
                yield rail.label, round(millivolts * milliamperes / 1000)

    def _read_over_current(self, now_s: float) -> Mapping[str, int]:
        if self._over_current_read_s is None or now_s - self._over_current_read_s >= OVER_CURRENT_S:
            counts = ((cause, integer(self._read(path))) for cause, path in self._paths.over_current)
            self._over_current = {cause: count for cause, count in counts if count is not None}
            self._over_current_read_s = now_s
        return self._over_current


def _search(root: Path) -> _Paths:
    """Find every file that there is to read."""
    zones = [(zone_name(kind), folder) for folder, kind in _named(root, "sys/class/thermal/thermal_zone*", "type")]
    coolers = _named(root, "sys/class/thermal/cooling_device*", "type")
    monitors: dict[str, list[Path]] = {}
    for folder, name in _named(root, "sys/class/hwmon/hwmon*", "name"):
        monitors.setdefault(name, []).append(folder)
    load, clock = _find_gpu(root)
    return _Paths(
        zones=tuple((name, str(folder / "temp")) for name, folder in zones),
        trips=_read_trips(zones),
        # The fan and the clocks of CPU and GPU are cooling devices too. These are what the firmware and the kernel
        # raise when they hold the chip back; hot-surface-alert only says that the case is too hot to touch.
        alerts=tuple((kind, str(folder / "cur_state")) for folder, kind in coolers if kind.endswith("-throttle-alert")),
        over_current=tuple(
            (cause, str(path))
            for folder in monitors.get("soctherm_oc", ())
            for number, cause in OVER_CURRENT_CAUSES.items()
            if (path := folder / f"oc{number}_event_cnt").exists()
        ),
        rails=tuple(rail for folder in monitors.get("ina3221", ()) for rail in _find_rails(folder)),
        gpu_load=load,
        gpu_clock=clock,
        dla=tuple(_find_dla(root)),
        fan=next((str(path) for f in monitors.get("pwmfan", ()) if (path := f / "pwm1").exists()), None),
    )


def _named(root: Path, pattern: str, attribute: str) -> list[tuple[Path, str]]:
    """Folders with what their attribute says, in the order of their numbers."""
    folders = sorted(root.glob(pattern), key=lambda folder: (len(folder.name), folder.name))
    named = ((folder, read_text(str(folder / attribute))) for folder in folders)
    return [(folder, text) for folder, text in named if text is not None]


def _read_trips(zones: Iterable[tuple[str, Path]]) -> dict[str, Trips]:
    """The lowest trip point of each type by zone. ``hot`` only warns, and ``active`` turns the fan."""
    points: dict[tuple[str, str], list[float]] = {}
    for name, folder in zones:
        for path in folder.glob("trip_point_*_type"):
            kind = read_text(str(path))
            value = celsius(read_text(str(path).removesuffix("_type") + "_temp"))
            # A trip point that is switched off is at 0 or far below.
            if kind in ("passive", "critical") and value is not None and value > 0:
                points.setdefault((name, kind), []).append(value)
    return {
        name: Trips(
            throttle_c=min(points.get((name, "passive"), ()), default=None),
            shutdown_c=min(points.get((name, "critical"), ()), default=None),
        )
        for name in dict.fromkeys(name for name, _ in points)
    }


def _find_rails(folder: Path) -> Iterator[_Rail]:
    for path in sorted(folder.glob("in*_label")):
        label, number = read_text(str(path)), path.name.removeprefix("in").removesuffix("_label")
        # NC: not connected. The sum of the shunts' voltages is no rail.
        if label is None or label.startswith(("NC", "sum of")):
            continue
        voltage, current = folder / f"in{number}_input", folder / f"curr{number}_input"
        if voltage.exists() and current.exists():
            yield _Rail(label, str(voltage), str(current))


def _find_gpu(root: Path) -> tuple[str | None, str | None]:
    """Paths of the GPU's load and clock."""
    load = clock = None
    for folder in sorted(root.glob("sys/class/devfreq/*")):
        names = (folder.name.rpartition(".")[2], read_text(str(folder / "device/of_node/name")))
        if any(name in _GPU_NAMES for name in names):
            clock = str(folder / "cur_freq") if (folder / "cur_freq").exists() else None
            load = str(folder / "device/load") if (folder / "device/load").exists() else None
            break
    if load is None:
        load = next((str(root / path) for path in _GPU_LOADS if (root / path).exists()), None)
    return load, clock


def _find_dla(root: Path) -> Iterator[tuple[str, str]]:
    found: dict[str, str] = {}
    for pattern in _DLA_STATES:
        for path in sorted(root.glob(pattern)):
            match = _DLA_NAME.search(path.parts[-3])
            if match is not None:
                found.setdefault(f"dla{match[1]}", str(path))
    yield from sorted(found.items())

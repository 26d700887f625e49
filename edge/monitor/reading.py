"""One reading of the device. Units stand in the names; what could not be read is absent or None, never 0 or -256."""

from __future__ import annotations

# Not for type checkers only: edge/document.py reads snapshots back by these annotations.
from collections.abc import Mapping  # noqa: TC003
from dataclasses import dataclass, field

__all__ = ["Memory", "Pressure", "Reading", "Trips"]


@dataclass(frozen=True, slots=True)
class Trips:
    """At which temperatures the kernel acts on a thermal zone, in degrees Celsius; None where it says nothing."""

    throttle_c: float | None = None
    """Lowest passive trip point: clocks go down from here."""
    shutdown_c: float | None = None
    """Lowest critical trip point."""


@dataclass(frozen=True, slots=True)
class Pressure:
    """Share of the last ten seconds in which tasks waited for memory (/proc/pressure/memory), 0..100."""

    some_avg10_percent: float
    full_avg10_percent: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory in bytes. On a Jetson, CPU and GPU share it."""

    total_bytes: int
    available_bytes: int
    """MemAvailable: what can be had without swapping."""
    swap_total_bytes: int
    swap_used_bytes: int
    rss_bytes: int
    """Of this process and its children. CUDA's memory is not in it."""
    gpu_bytes: int | None = None
    """What the GPU holds (NvMapMemUsed, or jtop's ``shared``); None off the Jetson."""
    pressure: Pressure | None = None
    """None where the kernel has no PSI."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The device at one moment."""

    at_s: float
    """time.monotonic() when it was read."""
    memory: Memory
    temperatures_c: Mapping[str, float] = field(default_factory=dict)
    """Degrees Celsius by zone: cpu, gpu, soc0, tj ... as the kernel calls them, in lower case, without '-thermal'."""
    trips: Mapping[str, Trips] = field(default_factory=dict)
    """By zone, of those that have any."""
    throttling: tuple[str, ...] = ()
    """Cooling devices that throttle the chip now, such as ``cpu-throttle-alert``. A running fan is none."""
    over_current_events: Mapping[str, int] = field(default_factory=dict)
    """Over-current events by cause since the device was started: under_voltage, average, instantaneous."""
    power_mw: Mapping[str, int] = field(default_factory=dict)
    """By rail, such as VDD_IN or VDD_GPU_SOC."""
    total_power_mw: int | None = None
    gpu_load_percent: float | None = None
    gpu_clock_hz: int | None = None
    dla_active: Mapping[str, bool] = field(default_factory=dict)
    """Whether each DLA core is powered: dla0, dla1. Empty where there is none."""
    fan_percent: float | None = None
    power_mode: str | None = None
    """nvpmodel's name for it, by jtop."""
    jetson_clocks: bool | None = None
    """By jtop."""
    jtop: bool = False
    """Whether jtop's service contributed."""

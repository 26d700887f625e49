"""What does the governor give and cost, against no governor, a thermostat, and the best constant rate?

Simulated, not measured on a Jetson: an Orin NX in a fanless box (benchmarks/thermal.py) runs a model at 30 frames/s in
three kinds of heat. The chip throttles from 99 degrees as the kernel does it (one step of its clocks a second). The set
point is 89 degrees. The thermostat knows full rate and a quarter of it, and switches at the set point and 5 degrees
below, as scripts in the field do. The best constant rate is the one with which the box settles just at the set point
in the heat of the end; nobody knows it beforehand.

--sweep N asks the same of N other boxes, whose every figure is up to 50 % off (a Latin hypercube), in heat that allows
15 to 90 % of the demand, with a sensor noise of 0.5 degrees: the worst of them, by how often the device is read.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from benchmarks import machine
from benchmarks.thermal import Box, Plant, sweep
from edge import config
from edge.events import Events
from edge.monitor.governor import Demand, Governor
from edge.monitor.reading import Memory, Reading, Trips

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from edge.monitor.governor import Order

DEMAND_FPS = 30.0
TRIP_C = 99.0
SET_POINT_C = 89.0
MODEL = "detector"
_MB = 1 << 20
# As on Orin: tj has no passive trip point, the zones of the chip's parts have.
_TRIPS = {"cpu": Trips(TRIP_C, 104.5), "tj": Trips()}


class Policy(Protocol):
    """Whatever decides on the rate."""

    def rate(self, at_s: float, measured_c: float) -> float:
        """Frames a second from now on."""
        ...


class Governed:
    """Our governor, with what the daemon would tell it."""

    def __init__(self, section: config.Governor | None = None, *, has_lighter: bool = False) -> None:
        self.events = Events()
        self.demand_fps = DEMAND_FPS
        self.order: Order | None = None
        self.governor = Governor(section or config.Governor(), events=self.events, memory_total_bytes=8192 * _MB)
        self.memory = Memory(
            total_bytes=8192 * _MB, available_bytes=4096 * _MB, swap_total_bytes=0, swap_used_bytes=0, rss_bytes=_MB
        )
        self._has_lighter = has_lighter

    def rate(self, at_s: float, measured_c: float) -> float:
        """What the governor's limit leaves of the demand."""
        reading = Reading(at_s, self.memory, {"tj": measured_c}, _TRIPS)
        self.order = self.governor.step(reading, {MODEL: Demand(self.demand_fps, self._has_lighter)})
        limit = self.order.limits_fps[MODEL]
        return self.demand_fps if limit is None else min(limit, self.demand_fps)


class Thermostat:
    """Full rate, or a quarter of it."""

    def __init__(self) -> None:
        self._hot = False

    def rate(self, at_s: float, measured_c: float) -> float:
        """Full rate below the set point, a quarter above it until it is 5 degrees cooler."""
        del at_s
        self._hot = measured_c > (SET_POINT_C - 5 if self._hot else SET_POINT_C)
        return DEMAND_FPS / 4 if self._hot else DEMAND_FPS


@dataclass
class Constant:
    """Always the same."""

    fps: float

    def rate(self, at_s: float, measured_c: float) -> float:
        """The same."""
        del at_s, measured_c
        return self.fps


@dataclass(frozen=True, slots=True)
class Sample:
    """The truth, at the end of a period."""

    at_s: float
    junction_c: float
    fps: float
    """That were inferred, less than was allowed while the chip throttles."""
    throttled: bool


def simulate(
    policy: Policy,
    plant: Plant,
    *,
    hours: float,
    period_s: float = 1.0,
    happenings: Sequence[tuple[float, Callable[[], None]]] = (),
) -> list[Sample]:
    """Run a policy on a plant; each happening is called once its time (seconds) has come."""
    samples: list[Sample] = []
    waiting = sorted(happenings, key=lambda happening: happening[0])
    clocks = 1.0
    for number in range(round(hours * 3600 / period_s)):
        at_s = number * period_s
        while waiting and waiting[0][0] <= at_s:
            waiting.pop(0)[1]()
        allowed = policy.rate(at_s, plant.measured_c())
        # The kernel's step_wise governor: a step down for each second above the trip point, up again below it.
        clocks = max(clocks - 0.05, 0.2) if plant.junction_c >= TRIP_C else min(clocks + 0.05, 1.0)
        fps = min(allowed, clocks * DEMAND_FPS) if clocks < 1 else allowed
        plant.step(period_s, fps)
        samples.append(Sample(at_s, plant.junction_c, fps, clocks < 1))
    return samples


def changes(samples: Sequence[Sample], *, least_fps: float) -> int:
    """How often the rate changed by at least so much from what it was at the last such change."""
    count, last = 0, samples[0].fps
    for sample in samples:
        if abs(sample.fps - last) >= least_fps:
            count, last = count + 1, sample.fps
    return count


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    """What counts in the field."""
    later = samples[2 * len(samples) // 3 :]
    return {
        "mean_fps": round(sum(sample.fps for sample in samples) / len(samples), 2),
        "last_third_fps": round(sum(sample.fps for sample in later) / len(later), 2),
        "overshoot_c": round(max(sample.junction_c for sample in samples) - SET_POINT_C, 2),
        "above_percent": round(100 * sum(s.junction_c > SET_POINT_C + 0.5 for s in samples) / len(samples), 1),
        "throttled_percent": round(100 * sum(sample.throttled for sample in samples) / len(samples), 1),
        "changes_per_hour": round(3600 / (later[-1].at_s - later[0].at_s) * changes(later, least_fps=0.3), 1),
    }


def main() -> None:
    """Print the table."""
    parser = machine.arguments(__doc__ or "")
    parser.add_argument("--sweep", type=int, metavar="N", help="the worst of N boxes instead")
    options = parser.parse_args()
    # Events would be logged: a simulated box is no news.
    logging.disable(logging.WARNING)
    machine.finish(_scenes() if options.sweep is None else _sweep(options.sweep), options.json)


def _sweep(count: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    rng = Random(0)  # noqa: S311
    heats = [(box, rng.uniform(0.15, 0.9)) for box in sweep(seed=1, count=count)]
    print(f"{count} boxes, 4 h each; rates are those of the last third")
    print(f"{'read every':>10} {'overshoot, worst':>16} {'median':>7} {'rate/best, worst':>16} {'largest change':>14}")
    for period_s in (1.0, 2.0, 5.0, 20.0, 60.0):
        overshoots, ratios, steps = [], [], []
        for number, (box, share) in enumerate(heats):
            ambient_c = box.ambient_for(SET_POINT_C, share * DEMAND_FPS)
            plant = Plant(box, ambient_c=ambient_c, noise_c=0.5, seed=number)
            samples = simulate(Governed(), plant, hours=4, period_s=period_s)
            row = summary(samples)
            later = samples[2 * len(samples) // 3 :]
            overshoots.append(row["overshoot_c"])
            ratios.append(row["last_third_fps"] / (share * DEMAND_FPS))
            steps.append(max(abs(after.fps - before.fps) for before, after in pairwise(later)) / DEMAND_FPS)
        worst = {
            "period_s": period_s,
            "overshoot_worst_c": max(overshoots),
            "overshoot_median_c": median(overshoots),
            "rate_to_best_worst": round(min(ratios), 3),
            "largest_change_percent": round(100 * max(steps), 2),
        }
        rows.append(worst)
        print(
            f"{period_s:>8g} s {worst['overshoot_worst_c']:>14.1f} C {worst['overshoot_median_c']:>5.1f} C"
            f" {worst['rate_to_best_worst']:>16.3f} {worst['largest_change_percent']:>12.2f} %"
        )
    return rows


def _scenes() -> list[dict[str, Any]]:
    scenes: Mapping[str, tuple[float, float, float]] = {
        "warm, 50 C": (50.0, 50.0, 0.0),
        "hot, 58 C": (58.0, 58.0, 0.0),
        "sun after 1 h, 45 C": (45.0, 45.0, 10.0),
    }
    rows: list[dict[str, Any]] = []
    print("6 h, 30 frames/s wanted, sensor noise 0.2 C; junction against a set point of 89 C, throttling from 99 C")
    print(
        f"{'heat':<20} {'policy':<14} {'mean fps':>8} {'last 2 h':>8} {'overshoot':>9} {'above':>6} {'throttled':>9}"
        f" {'changes/h':>9}"
    )
    for scene, (before_c, after_c, sun_w) in scenes.items():
        box = Box()
        best_fps = min(box.best_fps(SET_POINT_C, ambient_c=after_c, sun_w=sun_w), DEMAND_FPS)
        policies: dict[str, Policy] = {
            "governor": Governed(),
            "none": Constant(DEMAND_FPS),
            "thermostat": Thermostat(),
            "best constant": Constant(best_fps),
        }
        for name, policy in policies.items():
            plant = Plant(box, ambient_c=before_c, noise_c=0.2)
            sun = (3600.0, lambda plant=plant, sun_w=sun_w: setattr(plant, "sun_w", sun_w))
            row = summary(simulate(policy, plant, hours=6, happenings=[sun]))
            rows.append({"heat": scene, "policy": name, **row})
            print(
                f"{scene:<20} {name:<14} {row['mean_fps']:>8.1f} {row['last_third_fps']:>8.1f}"
                f" {row['overshoot_c']:>7.1f} C {row['above_percent']:>4.0f} % {row['throttled_percent']:>7.0f} %"
                f" {row['changes_per_hour']:>9.0f}"
            )
    return rows


if __name__ == "__main__":
    main()

"""The governor against a simulated box, and against anything a reading may say."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.governor import DEMAND_FPS, MODEL, SET_POINT_C, TRIP_C, Governed, Sample, simulate
from benchmarks.thermal import PARAMETERS, Box, Plant, sweep
from edge import config
from edge.events import Events
from edge.monitor.governor import Demand, Governor, Order
from edge.monitor.reading import Memory, Pressure, Reading, Trips

if TYPE_CHECKING:
    from edge.events import Event

MB = 1 << 20
TOTAL = 8192 * MB
ROOMY = Memory(TOTAL, 4096 * MB, 0, 0, 300 * MB)
CPU_TRIPS = {"cpu": Trips(TRIP_C, 104.5), "tj": Trips()}
ONE = {"a": Demand(30.0, has_lighter=False)}


def ambient_for(box: Box, share: float) -> float:
    """Ambient temperature in which ``share`` of the demand is the best constant rate."""
    return box.ambient_for(SET_POINT_C, share * DEMAND_FPS)


def biggest_change(samples: list[Sample]) -> float:
    """Of the rate from one period to the next, in frames a second."""
    return max(abs(after.fps - before.fps) for before, after in pairwise(samples))


def mean_rate(samples: list[Sample]) -> float:
    return sum(sample.fps for sample in samples) / len(samples)


def assert_governed(samples: list[Sample], best_fps: float, *, overshoot_c: float = 1.5) -> None:
    """The claims of docs/governor.md under constant conditions."""
    hottest_c = max(sample.junction_c for sample in samples)
    assert hottest_c < SET_POINT_C + overshoot_c
    assert hottest_c < TRIP_C
    settled = samples[2 * len(samples) // 3 :]
    # At rest but for trims of some thousandths of the demand.
    assert biggest_change(settled) < 0.02 * DEMAND_FPS
    assert mean_rate(settled) == pytest.approx(best_fps, rel=0.05)


class Scripted:
    """A governor that is given readings by hand, one a second."""

    def __init__(self, section: config.Governor | None = None, demands: dict[str, Demand] | None = None) -> None:
        self.events = Events()
        self.heard: list[Event] = []
        self.events.subscribe(self.heard.append)
        self.governor = Governor(section or config.Governor(), events=self.events, memory_total_bytes=TOTAL)
        self.demands = demands or ONE
        self.reading = Reading(100.0, ROOMY, {"tj": 40.0}, CPU_TRIPS)

    def step(self, seconds: int = 1, **changed: object) -> Order:
        assert seconds >= 1
        self.reading = replace(self.reading, **changed)  # type: ignore[arg-type]
        for _ in range(seconds):
            order = self.governor.step(self.reading, self.demands)
            self.reading = replace(self.reading, at_s=self.reading.at_s + 1)
        return order

    def kinds(self) -> list[str]:
        return [event.kind for event in self.heard]


# The claims, by simulation


@pytest.mark.parametrize("factor", [0.5, 1.5])
@pytest.mark.parametrize("parameter", PARAMETERS)
def test_any_one_parameter_may_be_50_percent_off(parameter: str, factor: float) -> None:
    box = Box().scaled(**{parameter: factor})
    ambient_c = ambient_for(box, 0.5)

    samples = simulate(Governed(), Plant(box, ambient_c=ambient_c, noise_c=0.2), hours=3, period_s=2.0)

    assert_governed(samples, box.best_fps(SET_POINT_C, ambient_c=ambient_c))


@pytest.mark.parametrize("tenth", range(10))
def test_all_parameters_may_be_50_percent_off_at_once(tenth: int) -> None:
    """A Latin hypercube of 100 boxes in heat that allows 15 to 90 % of the demand, noise of 0.5 or 0.3 degrees."""
    for number, box in enumerate(list(sweep(seed=11, count=100))[tenth::10]):
        share = Random(100 * tenth + number).uniform(0.15, 0.9)  # noqa: S311
        ambient_c = ambient_for(box, share)
        noise_c, period_s = (0.5, 1.0) if number % 2 else (0.3, 2.0)
        plant = Plant(box, ambient_c=ambient_c, noise_c=noise_c, seed=number)

        samples = simulate(Governed(), plant, hours=3 * period_s**0.5, period_s=period_s)

        assert_governed(samples, box.best_fps(SET_POINT_C, ambient_c=ambient_c))


@pytest.mark.parametrize("resolution_c", [0.001, 0.5, 1.0])
def test_the_steps_of_the_sensor_do_not_matter(resolution_c: float) -> None:
    ambient_c = ambient_for(Box(), 0.5)
    plant = Plant(Box(), ambient_c=ambient_c, noise_c=0.05, resolution_c=resolution_c)

    samples = simulate(Governed(), plant, hours=3)

    # Without noise to blur it, a step hides up to half of it.
    settled = samples[2 * len(samples) // 3 :]
    assert max(sample.junction_c for sample in samples) < SET_POINT_C + 1.5
    assert biggest_change(settled) < 0.02 * DEMAND_FPS
    assert mean_rate(settled) == pytest.approx(15.0, rel=0.05)


@pytest.mark.parametrize(("period_s", "overshoot_c"), [(0.2, 1.5), (1.0, 1.5), (5.0, 2.0), (60.0, 4.0)])
def test_rare_readings_cost_overshoot_but_neither_rest_nor_rate(period_s: float, overshoot_c: float) -> None:
    hours = 1.5 if period_s < 1 else 4
    for share in (0.3, 0.7):
        ambient_c = ambient_for(Box(), share)

        samples = simulate(Governed(), Plant(Box(), ambient_c=ambient_c), hours=hours, period_s=period_s)

        assert_governed(samples, share * DEMAND_FPS, overshoot_c=overshoot_c)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"sun_w": 8.0}),
        ({}, {"ambient_c": 52.0}),
        ({"ambient_c": 25.0}, {"ambient_c": 55.0}),
    ],
    ids=["sun", "warmer", "from cool to hot"],
)
def test_heat_that_comes_is_met_and_heat_that_goes_gives_the_rate_back(
    before: dict[str, float], after: dict[str, float]
) -> None:
    plant = Plant(Box(), ambient_c=42.0, noise_c=0.2)

    def become(values: dict[str, float]) -> None:
        for name, value in values.items():
            setattr(plant, name, value)

    become(before)
    happenings = [
        (3600.0, lambda: become(after)),
        (4 * 3600.0, lambda: become({"sun_w": 0.0, "ambient_c": 20.0})),
    ]

    governed = Governed()
    samples = simulate(governed, plant, hours=7, happenings=happenings)

    hot = [sample for sample in samples if 3600 <= sample.at_s < 4 * 3600]
    best_fps = Box().best_fps(SET_POINT_C, ambient_c=after.get("ambient_c", 42.0), sun_w=after.get("sun_w", 0.0))
    assert max(sample.junction_c for sample in hot) < SET_POINT_C + 1.5
    assert mean_rate(hot[-1800:]) == pytest.approx(best_fps, rel=0.05)
    assert biggest_change(hot[-1800:]) < 0.02 * DEMAND_FPS
    assert samples[-1].fps == DEMAND_FPS
    assert governed.governor.state.mode == "full"


def test_a_demand_that_doubles_in_the_heat_is_let_in_slowly() -> None:
    ambient_c = ambient_for(Box(), 0.55)
    governed = Governed()
    governed.demand_fps = 15.0

    def double() -> None:
        governed.demand_fps = 30.0

    samples = simulate(governed, Plant(Box(), ambient_c=ambient_c), hours=5, happenings=[(7200.0, double)])

    assert max(sample.junction_c for sample in samples) < SET_POINT_C + 1.5
    assert [sample.fps for sample in samples[6000:7200]] == [15.0] * 1200
    assert mean_rate(samples[-3600:]) == pytest.approx(16.5, rel=0.05)


def test_a_camera_that_comes_and_goes_while_limited_does_not_overheat() -> None:
    governed = Governed()
    ambient_c = ambient_for(Box(), 0.5)

    def want(fps: float) -> None:
        governed.demand_fps = fps

    flaps = [(7200.0 + 60 * k, lambda k=k: want(0.0 if k % 2 == 0 else 30.0)) for k in range(20)]
    samples = simulate(governed, Plant(Box(), ambient_c=ambient_c), hours=5, happenings=flaps)

    assert max(sample.junction_c for sample in samples) < SET_POINT_C + 1.5
    assert mean_rate(samples[-1800:]) == pytest.approx(15.0, rel=0.05)


def test_the_demands_noise_does_not_keep_the_rate_moving() -> None:
    rng = Random(1)  # noqa: S311
    governed = Governed()
    plant = Plant(Box(), ambient_c=ambient_for(Box(), 0.5), noise_c=0.2)
    rates: list[float] = []

    for second in range(3 * 3600):
        governed.demand_fps = rng.gauss(30.0, 2.0)
        rates.append(governed.rate(float(second), plant.measured_c()))
        plant.step(1.0, rates[-1])

    later = rates[2 * 3600 :]
    assert max(later) - min(later) < 0.02 * DEMAND_FPS


def test_a_cool_box_is_never_limited() -> None:
    governed = Governed()

    samples = simulate(governed, Plant(Box(), ambient_c=25.0, noise_c=0.5), hours=2)

    assert {sample.fps for sample in samples} == {DEMAND_FPS}
    assert governed.events.recent == []


def test_a_box_that_just_holds_full_rate_is_not_limited_now_and_then() -> None:
    """Full rate settles 0.4 degrees under the set point, with noise of 0.5."""
    box = Box()
    share = 1 + 0.4 / (box.resistance_k_per_w * box.inference_j * DEMAND_FPS)
    plant = Plant(box, ambient_c=ambient_for(box, share), noise_c=0.5)

    samples = simulate(Governed(), plant, hours=6)

    assert {sample.fps for sample in samples[3 * 3600 :]} == {DEMAND_FPS}


# The ladder


def ladder_run(
    plant: Plant, section: config.Governor, *, hours: float, lighter_j: float | None, cool_at_s: float | None = None
) -> tuple[list[str], list[Order], Governed, float]:
    """Kinds of events in order, all orders, the governor and the hottest junction."""
    governed = Governed(section, has_lighter=lighter_j is not None)
    kinds: list[str] = []
    governed.events.subscribe(lambda event: kinds.append(event.kind))
    orders: list[Order] = []
    hottest_c = 0.0
    for second in range(round(3600 * hours)):
        if cool_at_s is not None and second == cool_at_s:
            plant.ambient_c = 20.0
        fps = governed.rate(float(second), plant.measured_c())
        assert governed.order is not None
        orders.append(governed.order)
        if lighter_j is not None:
            plant.inference_j = lighter_j if governed.order.lighter else plant.box.inference_j
        plant.step(1.0, fps)
        hottest_c = max(hottest_c, plant.junction_c)
    return kinds, orders, governed, hottest_c


def test_a_lighter_model_takes_over_when_the_lowest_rate_is_too_hot_and_leaves_when_it_is_cool() -> None:
    section = config.Governor(min_fps=15.0)
    plant = Plant(Box(), ambient_c=62.0)

    kinds, orders, _, hottest_c = ladder_run(plant, section, hours=7, lighter_j=0.15, cool_at_s=4 * 3600)

    assert [kind for kind in kinds if not kind.startswith("rate_")] == ["lighter_model", "full_model"]
    assert orders[4 * 3600 - 1].mode == "lighter"
    # With a lighter model the rate is free to rise: 0.15 J allow far more than 15 frames/s.
    held = orders[4 * 3600 - 1].limits_fps[MODEL]
    assert held is None or held > 20.0
    assert orders[-1].mode == "full"
    assert hottest_c < SET_POINT_C + 1.5


def test_inference_pauses_when_even_that_is_too_hot_and_resumes_by_itself() -> None:
    plant = Plant(Box(), ambient_c=74.0)

    kinds, orders, governed, hottest_c = ladder_run(
        plant, config.Governor(min_fps=10.0), hours=8, lighter_j=0.4, cool_at_s=4 * 3600
    )

    steps = [kind for kind in kinds if not kind.startswith("rate_")]
    assert steps == ["lighter_model", "paused", "resumed", "full_model"]
    assert orders[4 * 3600 - 1].mode == "paused"
    assert orders[4 * 3600 - 1].limits_fps == {MODEL: 0.0}
    assert governed.governor.state.mode == "full"
    assert hottest_c < TRIP_C - 1


def test_where_idling_alone_is_too_hot_it_pauses_for_good() -> None:
    """68 degrees and 20 W of sun: 4.5 W idle and leakage would settle above the set point without any inference."""
    box = Box()
    plant = Plant(box, ambient_c=68.0, sun_w=5.0)
    assert box.best_fps(SET_POINT_C, ambient_c=68.0, sun_w=5.0) < 0

    kinds, orders, _, _ = ladder_run(plant, config.Governor(), hours=6, lighter_j=None)

    assert [kind for kind in kinds if not kind.startswith("rate_")] == ["paused"]
    assert orders[-1].mode == "paused"


def test_swaps_do_not_flap_where_the_lighter_model_is_cool_and_the_full_one_too_hot() -> None:
    """The lighter model at full rate is far under the set point, the full one at its lowest rate above it."""
    section = config.Governor(min_fps=15.0)
    box = Box()
    plant = Plant(box, ambient_c=ambient_for(box, 0.45), noise_c=0.3)

    kinds, orders, _, _ = ladder_run(plant, section, hours=16, lighter_j=0.02)

    returns = kinds.count("full_model")
    assert 1 <= returns <= 4, "each failed return is a lesson"
    assert orders[-1].mode == "lighter"


def test_min_fps_is_kept_while_inference_runs_at_all() -> None:
    plant = Plant(Box(), ambient_c=62.0)

    _, orders, _, _ = ladder_run(plant, config.Governor(min_fps=4.0), hours=3, lighter_j=None)

    limits = [order.limits_fps[MODEL] for order in orders]
    assert all(limit is None or limit == 0.0 or limit >= 4.0 for limit in limits)


def test_a_lighter_model_that_is_gone_is_not_waited_for() -> None:
    scripted = Scripted(config.Governor(min_fps=15.0), {"a": Demand(30.0, has_lighter=True)})
    scripted.step(30)
    assert scripted.step(45, temperatures_c={"tj": 91.0}).lighter

    scripted.demands = {"a": Demand(30.0, has_lighter=False)}
    order = scripted.step()

    assert not order.lighter
    assert order.limits_fps == {"a": 15.0}
    assert scripted.kinds()[-1] == "full_model"


def test_work_that_begins_on_a_hot_box_begins_slowly_even_after_minutes_of_loading() -> None:
    scripted = Scripted(demands={"a": Demand(0.0, has_lighter=False)})
    scripted.step(300, temperatures_c={"tj": 80.0})

    scripted.demands = {"a": Demand(30.0, has_lighter=False)}
    order = scripted.step(2)

    assert order.limits_fps["a"] is not None
    assert order.limits_fps["a"] < 10.0


# Step by step


def test_two_models_share_the_budget_in_proportion_above_their_minimum() -> None:
    scripted = Scripted(demands={"a": Demand(21.0, has_lighter=False), "b": Demand(11.0, has_lighter=False)})

    order = scripted.step(20, temperatures_c={"tj": 87.0})

    assert order.mode == "limited"
    a, b = order.limits_fps["a"], order.limits_fps["b"]
    assert a is not None
    assert b is not None
    assert (a - 1.0) / (b - 1.0) == pytest.approx(20.0 / 10.0, rel=0.03)


def test_a_model_below_its_minimum_is_not_limited() -> None:
    scripted = Scripted(demands={"a": Demand(30.0, has_lighter=False), "slow": Demand(0.5, has_lighter=False)})

    scripted.step(5)
    order = scripted.step(15, temperatures_c={"tj": 91.0})

    assert order.limits_fps["slow"] is None
    assert order.limits_fps["a"] is not None


def test_a_chip_that_throttles_is_an_emergency() -> None:
    scripted = Scripted()
    scripted.step(5, temperatures_c={"tj": 88.0})
    before = scripted.step().limits_fps["a"]

    order = scripted.step(throttling=("gpu-throttle-alert",))

    assert before is None or before > 7.0
    assert order.limits_fps["a"] is not None
    assert order.limits_fps["a"] <= 0.5 * (before or 30.0) + 1e-9


def test_close_to_the_throttle_point_it_does_not_wait_for_the_ladder() -> None:
    scripted = Scripted()
    scripted.step(60)

    scripted.step(60, temperatures_c={"tj": 98.9})

    assert scripted.governor.state.mode == "paused"
    assert "paused" in scripted.kinds()


def test_the_set_point_is_10_under_the_lowest_passive_trip_point_where_tj_has_none() -> None:
    scripted = Scripted()

    scripted.step(trips={"cpu": Trips(99.0), "gpu": Trips(97.0), "pmic": Trips(70.0), "tj": Trips()})

    assert scripted.governor.state.set_point_c == 87.0
    assert scripted.governor.state.zone == "tj"


def test_without_tj_the_hottest_zone_counts_and_its_own_trip_point() -> None:
    scripted = Scripted()

    scripted.step(temperatures_c={"cpu": 70.0, "gpu": 75.0}, trips={"cpu": Trips(99.0), "gpu": Trips(95.0)})

    state = scripted.governor.state
    assert (state.zone, state.temperature_c, state.set_point_c) == ("gpu", 75.0, 85.0)


def test_a_zone_of_the_deployment_is_taken_instead() -> None:
    scripted = Scripted(config.Governor(zone="cpu"))

    scripted.step(temperatures_c={"cpu": 70.0, "tj": 75.0})

    assert scripted.governor.state.zone == "cpu"


def test_a_set_point_too_near_the_throttle_point_is_lowered_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    scripted = Scripted(config.Governor(set_point_c=98.5))

    with caplog.at_level(logging.WARNING):
        scripted.step(10)

    assert scripted.governor.state.set_point_c == 97.0
    assert [r.getMessage() for r in caplog.records] == [
        "governor.set_point_c is 98.5, too near the throttle point of 99; 97 is used"
    ]


def test_without_trip_points_heat_is_governed_only_by_a_set_point_of_the_deployment() -> None:
    free, told = Scripted(), Scripted(config.Governor(set_point_c=80.0))

    assert free.step(60, trips={}, temperatures_c={"x86_pkg_temp": 95.0}).mode == "full"
    assert told.step(60, trips={}, temperatures_c={"x86_pkg_temp": 95.0}).mode != "full"
    assert "set_point_c" in (free.governor.state.reason or "")


def test_a_machine_without_any_sensor_runs_freely_and_says_so() -> None:
    scripted = Scripted()

    order = scripted.step(120, temperatures_c={}, trips={})

    assert (order.mode, order.limits_fps) == ("full", {"a": None})
    assert scripted.governor.state.reason == "no thermal zone can be read"


def test_a_zone_that_is_unreadable_for_a_moment_changes_nothing() -> None:
    scripted = Scripted()
    before = scripted.step(60, temperatures_c={"tj": 90.0})

    order = scripted.step(20, temperatures_c={"cpu": 40.0})

    assert order.limits_fps == before.limits_fps


def test_after_half_a_minute_the_hottest_of_the_other_zones_takes_over(caplog: pytest.LogCaptureFixture) -> None:
    scripted = Scripted()
    scripted.step(5)

    scripted.step(40, temperatures_c={"cpu": 70.0, "gpu": 71.0})

    assert scripted.governor.state.zone == "gpu"
    assert "thermal zone tj cannot be read" in caplog.text


def test_without_any_temperature_left_half_the_rate_is_kept_until_one_is_back() -> None:
    scripted = Scripted()
    scripted.step(5)

    order = scripted.step(40, temperatures_c={})
    assert (order.mode, order.reason) == ("limited", "no temperature can be read")
    assert order.limits_fps["a"] == pytest.approx(15.0, abs=0.1)

    assert scripted.step(180, temperatures_c={"tj": 50.0}).mode == "full"


def test_nan_and_absurd_temperatures_are_no_temperatures() -> None:
    scripted = Scripted()
    scripted.step(5)

    order = scripted.step(10, temperatures_c={"tj": math.nan, "cpu": -256.0})

    assert order.mode == "full"


def test_disabled_it_does_nothing_and_says_off() -> None:
    scripted = Scripted(config.Governor(enabled=False))

    order = scripted.step(60, temperatures_c={"tj": 104.0}, memory=replace(ROOMY, available_bytes=1))

    assert order == Order("full", {"a": None}, lighter=False, reason=None, restart=None)
    assert scripted.governor.state.mode == "off"
    assert scripted.heard == []


def test_events_are_few_and_carry_numbers() -> None:
    scripted = Scripted()
    scripted.step(60)

    scripted.step(300, temperatures_c={"tj": 89.8})
    limited = [event for event in scripted.heard if event.kind == "rate_limited"]

    assert 1 <= len(limited) <= 6
    assert limited[0].severity == "warning"
    assert set(limited[0].fields) == {"limit_fps", "limits_fps", "temperature_c", "set_point_c", "zone"}
    assert limited[0].fields["set_point_c"] == 89.0


def test_a_rate_is_called_restored_only_when_it_stays_so() -> None:
    scripted = Scripted()
    scripted.step(60)
    scripted.step(60, temperatures_c={"tj": 90.5})

    scripted.step(400, temperatures_c={"tj": 60.0})

    assert scripted.kinds()[0] == "rate_limited"
    assert scripted.kinds()[-1] == "rate_restored"
    assert scripted.kinds().count("rate_restored") == 1


# Memory


def test_below_the_reserve_inference_pauses_and_resumes_once_there_is_twice_as_much() -> None:
    """6 % of 8 GB are 491 MB."""
    scripted = Scripted()
    scripted.step(10)

    order = scripted.step(memory=replace(ROOMY, available_bytes=480 * MB))
    assert (order.mode, order.limits_fps) == ("paused", {"a": 0.0})
    assert order.reason == "memory is low (less than 491 MB to spare)"
    assert scripted.step(60, memory=replace(ROOMY, available_bytes=900 * MB)).mode == "paused"
    assert scripted.step(9, memory=replace(ROOMY, available_bytes=1100 * MB)).mode == "paused"
    assert scripted.step(5).mode == "full"

    assert scripted.kinds() == ["memory_low", "paused", "memory_recovered", "resumed"]
    assert scripted.heard[1].fields["reason"] == "memory"
    assert scripted.heard[0].fields["available_mb"] == 480


def test_pressure_pauses_earlier_and_swap_is_no_headroom() -> None:
    tight = replace(ROOMY, available_bytes=700 * MB, swap_total_bytes=4096 * MB)
    relaxed, pressed = Scripted(), Scripted()

    assert relaxed.step(10, memory=replace(tight, pressure=Pressure(3.0, 0.0))).mode == "full"
    assert pressed.step(10, memory=replace(tight, pressure=Pressure(40.0, 10.0))).mode == "paused"


def test_memory_that_is_low_again_and_again_makes_the_pauses_longer() -> None:
    scripted = Scripted()
    low, ample = (replace(ROOMY, available_bytes=size * MB) for size in (400, 1100))
    waits = []

    for _ in range(4):
        scripted.step(memory=low)
        waited = 0
        while scripted.step(memory=ample).mode == "paused":
            waited += 1
        waits.append(waited)

    assert waits == [10, 20, 40, 80]


def test_growth_of_other_processes_pauses_but_never_restarts() -> None:
    scripted = Scripted()
    available = 3000

    for second in range(3000):
        available = max(available - 1, 300)
        order = scripted.step(memory=replace(ROOMY, available_bytes=available * MB, rss_bytes=(300 + second % 7) * MB))

    assert order.mode == "paused"
    assert order.restart is None
    assert "leak_suspected" not in scripted.kinds()


def test_the_reserve_may_be_given() -> None:
    scripted = Scripted(config.Governor(memory_reserve_mb=1000))

    assert scripted.step(memory=replace(ROOMY, available_bytes=999 * MB)).mode == "paused"


# Anything


temperatures = st.one_of(
    st.none(), st.just(math.nan), st.just(-256.0), st.floats(min_value=-40, max_value=130), st.floats(80, 101)
)
steps = st.lists(
    st.tuples(
        st.floats(min_value=0, max_value=120),  # seconds until this reading
        temperatures,
        temperatures,
        st.booleans(),  # throttling
        st.integers(min_value=0, max_value=8192),  # MB available
        st.one_of(st.just(0.0), st.just(math.nan), st.floats(min_value=0, max_value=1000)),  # demand of a
        st.one_of(st.none(), st.floats(min_value=0, max_value=60)),  # demand of b; None: there is no b
    ),
    min_size=1,
    max_size=60,
)


@given(
    steps=steps,
    min_fps=st.floats(min_value=0.1, max_value=50),
    has_lighter=st.booleans(),
    set_point_c=st.one_of(st.none(), st.floats(min_value=1, max_value=150)),
)
@settings(max_examples=150)
def test_whatever_is_read_orders_stay_within_bounds(
    steps: list[tuple[float, float | None, float | None, bool, int, float, float | None]],
    min_fps: float,
    has_lighter: bool,
    set_point_c: float | None,
) -> None:
    section = config.Governor(min_fps=min_fps, set_point_c=set_point_c)
    governor = Governor(section, events=Events(), memory_total_bytes=TOTAL)
    at_s = 0.0
    for passed_s, tj_c, cpu_c, throttles, available_mb, a_fps, b_fps in steps:
        at_s += passed_s
        temperatures_c = {zone: value for zone, value in (("tj", tj_c), ("cpu", cpu_c)) if value is not None}
        reading = Reading(
            at_s,
            replace(ROOMY, available_bytes=available_mb * MB),
            temperatures_c,
            CPU_TRIPS,
            throttling=("cpu-throttle-alert",) if throttles else (),
        )
        demands = {"a": Demand(a_fps, has_lighter=has_lighter)}
        if b_fps is not None:
            demands["b"] = Demand(b_fps, has_lighter=False)

        order = governor.step(reading, demands)

        assert order.limits_fps.keys() == demands.keys()
        for limit in order.limits_fps.values():
            if order.mode == "paused":
                assert limit == 0.0
            elif limit is not None:
                assert math.isfinite(limit)
                assert limit >= min_fps
        assert order.mode != "full" or all(limit is None for limit in order.limits_fps.values())
        assert not order.lighter or has_lighter
        assert governor.state.mode == order.mode
        assert (order.reason is None) == (order.mode == "full")

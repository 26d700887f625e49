"""A leak is told from everything else that memory does, and ends in a restart while there is room for one."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge import config
from edge.events import Events
from edge.monitor.governor import Demand, Governor
from edge.monitor.leak import LeakDetector, LeakWatch
from edge.monitor.reading import Memory, Reading

if TYPE_CHECKING:
    from collections.abc import Callable

MB = 1 << 20
HOUR = 3600
ROOMY = Memory(8192 * MB, 4096 * MB, 0, 0, 300 * MB)


def suspected(use_mb: Callable[[float], float], *, seconds: int, period_s: int = 1) -> list[float]:
    """Moments at which a leak is suspected."""
    detector = LeakDetector()
    return [
        float(at_s)
        for at_s in range(0, seconds, period_s)
        if detector.step(float(at_s), int(use_mb(at_s) * MB)) is not None
    ]


@pytest.mark.parametrize(
    ("mb_per_s", "within_s"), [(10.0, 240), (1.0, 300), (0.2, 20 * 60), (1 / 60, 4 * HOUR), (1 / 600, 40 * HOUR)]
)
def test_a_steady_leak_is_found_however_slow(mb_per_s: float, within_s: int) -> None:
    rng = Random(1)  # noqa: S311

    found = suspected(
        lambda at_s: 300 + mb_per_s * at_s + rng.uniform(0, 3), seconds=within_s, period_s=1 if within_s < HOUR else 5
    )

    assert found


@pytest.mark.parametrize("mb_per_s", [1.0, 1 / 60])
def test_its_slope_is_measured(mb_per_s: float) -> None:
    detector = LeakDetector()
    leak = None

    for at_s in range(0, 600 if mb_per_s == 1.0 else 4 * HOUR, 2):
        leak = detector.step(float(at_s), int((300 + mb_per_s * at_s) * MB))

    assert leak is not None
    assert leak.bytes_per_s / MB == pytest.approx(mb_per_s, rel=0.05)


def noise(at_s: float) -> float:
    """Up to 5 MB, the same at the same time."""
    return 5 * Random(at_s).random()  # noqa: S311


INNOCENT: dict[str, Callable[[float], float]] = {
    "flat": lambda _: 300,
    "noise": lambda t: 300 + noise(t),
    "warm-up to a plateau within minutes": lambda t: 300 + 400 * (1 - math.exp(-t / 100)),
    "growth to a plateau within the hour": lambda t: 300 + 300 * (1 - math.exp(-t / 900)),
    "growth that stops at once": lambda t: 300 + min(t, 90.0) * 5,
    "one jump": lambda t: 300 if t < 2 * HOUR else 900,
    "three jumps": lambda t: 300 + 150 * sum(t > 1000 * k for k in (2, 5, 9)),
    "a cache that is emptied every minute": lambda t: 300 + 200 * (t % 60) / 60,
    "a cache that is emptied every seven minutes": lambda t: 300 + 100 * (t % 420) / 420,
    "swings": lambda t: 600 + 200 * math.sin(t / 300),
    "falls": lambda t: 3000 - t / 10,
}


@pytest.mark.parametrize("use_mb", INNOCENT.values(), ids=INNOCENT.keys())
def test_what_is_no_leak_is_not_taken_for_one(use_mb: Callable[[float], float]) -> None:
    assert suspected(lambda at_s: use_mb(at_s) + noise(at_s), seconds=6 * HOUR, period_s=2) == []


def test_a_suspicion_ends_with_the_growth() -> None:
    found = suspected(lambda t: 300 + min(t, 600.0), seconds=2 * HOUR)

    assert found
    assert max(found) < 1800


def test_rare_readings_find_it_too() -> None:
    assert suspected(lambda t: 300 + t / 60, seconds=5 * HOUR, period_s=60)


def test_a_gap_in_time_is_no_growth() -> None:
    detector = LeakDetector()
    for at_s in range(0, 1000, 2):
        assert detector.step(float(at_s), 300 * MB) is None

    for at_s in range(9000, 10000, 2):
        assert detector.step(float(at_s), 900 * MB) is None


def test_what_it_remembers_does_not_grow() -> None:
    detector = LeakDetector()

    for at_s in range(0, 30 * HOUR, 10):
        detector.step(float(at_s), 300 * MB)

    assert max(len(window._floors) for window in detector._windows) == 8  # noqa: SLF001


def drive(
    mb_per_s: float, *, available_mb: float, reserve_mb: int = 491, others_mb_per_s: float = 0.0, gpu: bool = False
) -> tuple[float, str | None, list[str]]:
    """Run the whole governor until it wants a restart or memory is out; gives MB that are left, why, and the events."""
    events = Events()
    kinds: list[str] = []
    events.subscribe(lambda event: kinds.append(event.kind))
    governor = Governor(
        config.Governor(memory_reserve_mb=reserve_mb), events=events, memory_total_bytes=ROOMY.total_bytes
    )
    rss_mb, gpu_mb = 300.0, 200.0
    for second in range(40 * HOUR):
        running = governor.state.mode != "paused"
        leaked = mb_per_s if running else 0.0
        rss_mb, gpu_mb = (rss_mb, gpu_mb + leaked) if gpu else (rss_mb + leaked, gpu_mb)
        available_mb -= leaked + others_mb_per_s
        if available_mb < reserve_mb / 4:
            break
        memory = replace(
            ROOMY,
            available_bytes=int(available_mb * MB),
            rss_bytes=int(rss_mb * MB),
            gpu_bytes=int(gpu_mb * MB) if gpu else None,
        )
        order = governor.step(Reading(float(second), memory), {"a": Demand(30.0, has_lighter=False)})
        if order.restart is not None:
            return available_mb, order.restart, kinds
    return available_mb, None, kinds


@pytest.mark.parametrize("mb_per_s", [5.0, 1.0, 1 / 60])
def test_a_leak_ends_in_a_restart_before_the_reserve_is_touched(mb_per_s: float) -> None:
    left_mb, why, kinds = drive(mb_per_s, available_mb=2000.0)

    assert why is not None
    assert "this process grows by" in why
    assert 491 < left_mb < 1100, "neither too late nor much too early"
    assert kinds == ["leak_suspected"]


def test_a_leak_too_fast_to_be_told_pauses_and_then_restarts() -> None:
    """It stops with the pause, which nothing but a restart would end."""
    _, why, kinds = drive(80.0, available_mb=12000.0)

    assert why is not None
    assert "this process has taken" in why or "this process grows by" in why
    assert set(kinds) <= {"leak_suspected", "memory_low", "paused"}


def test_a_leak_on_the_gpu_is_not_in_rss_and_found_as_well() -> None:
    left_mb, why, _ = drive(1.0, available_mb=2000.0, gpu=True)

    assert why is not None
    assert "GPU memory grows by" in why
    assert left_mb > 491


def test_growth_of_others_is_not_ours_to_end() -> None:
    _, why, kinds = drive(0.0, available_mb=2000.0, others_mb_per_s=1.0)

    assert why is None
    assert kinds[:2] == ["memory_low", "paused"]


def test_a_small_leak_beside_big_growth_of_others_is_no_reason_to_restart() -> None:
    """What this process would give back is not worth it."""
    _, why, _ = drive(1 / 60, available_mb=1200.0, others_mb_per_s=0.1)

    assert why is None


def test_a_swap_of_models_starts_the_books_anew() -> None:
    watch = LeakWatch(491 * MB)
    for second in range(600):
        watch.step(float(second), replace(ROOMY, rss_bytes=(300 + second) * MB), low=False)
    assert watch.leak is not None

    watch.forget()

    assert not watch.step(600.0, replace(ROOMY, rss_bytes=900 * MB), low=False)
    assert watch.leak is None


def test_once_wanted_a_restart_stays_wanted() -> None:
    watch = LeakWatch(491 * MB)
    for second in range(900):
        memory = replace(ROOMY, rss_bytes=(300 + second) * MB, available_bytes=(1500 - second) * MB)
        watch.step(float(second), memory, low=False)
    why = watch.restart
    assert why is not None

    watch.step(900.0, ROOMY, low=False)

    assert watch.restart == why


@given(
    st.lists(
        st.tuples(st.floats(min_value=0, max_value=5000), st.integers(min_value=0, max_value=1 << 36)), max_size=200
    )
)
@settings(max_examples=100)
def test_any_history_is_survived_and_a_leak_always_grows(history: list[tuple[float, int]]) -> None:
    detector = LeakDetector()
    at_s = 0.0
    for passed_s, used_bytes in history:
        at_s += passed_s
        leak = detector.step(at_s, used_bytes)
        assert leak is None or (leak.bytes_per_s > 0 and leak.grown_bytes > 0)
        assert detector.grown_bytes >= 0

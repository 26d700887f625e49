"""The order of a soak."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from benchmarks.soak_faults import CAMERA_FAULTS, FAULTS, Fault, rounds
from edge.events import KINDS


def plan(count: int, *, seed: int = 0, left_out: dict[str, str] | None = None) -> list[list[tuple[Fault, float]]]:
    rng = random.Random(seed)  # noqa: S311 - no secret
    return list(rounds(FAULTS, rng, count=count, left_out=left_out or {}))


def names(one: list[tuple[Fault, float]]) -> list[str]:
    return [fault.name for fault, _ in one]


def test_a_single_round_has_every_fault_once_that_does_not_take_minutes() -> None:
    (only,) = plan(1)

    assert sorted(names(only)) == sorted(fault.name for fault in FAULTS if not fault.long)


def test_between_the_first_round_and_the_last_one_process_lives_on() -> None:
    first, *between, last = plan(8)

    assert not any(fault.ends_life for one in between for fault, _ in one)
    assert {"daemon killed", "engine hangs"} <= set(names(first)) & set(names(last))
    assert names(last)[0] == "leak"
    assert Counter(name for one in plan(8) for name in names(one))["leak"] == 1


def test_memory_is_short_seldom_since_each_relapse_makes_the_daemon_wait_longer() -> None:
    counted = Counter(name for one in plan(10) for name in names(one))

    assert counted["memory short"] == 2
    assert counted["broker killed"] == 10


def test_the_seed_decides_the_order_and_the_lengths_and_nothing_else_does() -> None:
    assert plan(5, seed=3) == plan(5, seed=3)
    assert names(plan(5, seed=3)[1]) != names(plan(5, seed=4)[1])


def test_what_cannot_be_had_is_left_out() -> None:
    assert "disk full, broker frozen" not in names(plan(1, left_out={"disk full, broker frozen": "no mounts"})[0])


@pytest.mark.parametrize("fault", [*FAULTS, *CAMERA_FAULTS], ids=lambda fault: fault.name)
def test_the_events_that_are_waited_for_exist(fault: Fault) -> None:
    assert fault.events <= set(KINDS)
    assert fault.lasts_s[0] <= fault.lasts_s[1]

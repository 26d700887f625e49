from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.gate import Gate


def test_a_gate_is_open_until_it_is_told_otherwise() -> None:
    gate = Gate()

    assert gate.due_in_s() == 0
    gate.passed()
    assert gate.due_in_s() == 0
    assert gate.why_not_taken() == "overload"


def test_a_closed_gate_opens_never() -> None:
    gate = Gate()
    gate.limit_fps = 0

    assert gate.due_in_s() == math.inf
    assert gate.why_not_taken() == "governor"


@given(st.floats(0.5, 100), st.lists(st.floats(0, 0.3), min_size=200, max_size=300))
def test_the_limit_is_met_in_the_mean_and_never_made_up_for_in_a_burst(limit: float, waits: list[float]) -> None:
    now = [0.0]
    gate = Gate(clock=lambda: now[0])
    gate.limit_fps = limit
    taken: list[float] = []
    for wait in waits:
        now[0] += wait
        if gate.due_in_s() <= 0:
            gate.passed()
            taken.append(now[0])

    assert len(taken) <= now[0] * limit + 2
    for first, third in zip(taken, taken[2:], strict=False):
        assert third - first >= 1 / limit - 1e-9  # the one between was late by less than a period


def test_frames_that_are_always_there_come_at_the_limit() -> None:
    now = [0.0]
    gate = Gate(clock=lambda: now[0])
    gate.limit_fps = 7.0
    count = 0
    for _ in range(10_000):
        now[0] += 0.01
        if gate.due_in_s() <= 0:
            gate.passed()
            count += 1

    assert count / now[0] == pytest.approx(7.0, rel=0.01)

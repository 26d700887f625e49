"""Demands are noisy; shares add up."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.monitor.shares import Shares

demands = st.dictionaries(st.sampled_from("abcd"), st.floats(min_value=0, max_value=200), min_size=1)


@given(demands=demands, min_fps=st.floats(min_value=0.1, max_value=20), part=st.floats(min_value=0, max_value=0.99))
def test_limits_add_up_to_the_budget(demands: dict[str, float], min_fps: float, part: float) -> None:
    shares = Shares(min_fps)
    shares.observe(demands, 1.0)
    budget = shares.floor_fps + part * (shares.total_fps - shares.floor_fps)

    limits = shares.limits(budget)

    allowed = sum(demands[name] if limit is None else limit for name, limit in limits.items())
    assert allowed == pytest.approx(budget, rel=1e-6, abs=1e-6)


@given(demands=demands, min_fps=st.floats(min_value=0.1, max_value=20))
def test_an_ample_budget_limits_nobody(demands: dict[str, float], min_fps: float) -> None:
    shares = Shares(min_fps)
    shares.observe(demands, 1.0)

    assert set(shares.limits(math.inf).values()) == {None}
    assert set(shares.limits(shares.total_fps).values()) == {None}


def test_a_demand_that_jumps_is_followed_in_seconds_and_noise_hardly() -> None:
    rng = Random(3)  # noqa: S311
    shares = Shares(1.0)
    noisy = []
    for _ in range(300):
        shares.observe({"a": rng.gauss(15.0, 1.5)}, 1.0)
        noisy.append(shares.total_fps)
    assert max(noisy[100:]) - min(noisy[100:]) < 1.5

    for _ in range(12):
        shares.observe({"a": 30.0}, 1.0)

    assert shares.total_fps == pytest.approx(30.0, rel=0.2)


def test_models_that_are_gone_want_nothing() -> None:
    shares = Shares(1.0)
    shares.observe({"a": 10.0, "b": 20.0}, 1.0)

    shares.observe({"a": 10.0}, 1.0)

    assert shares.total_fps == 10.0
    assert shares.limits(5.0).keys() == {"a"}

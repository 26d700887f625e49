"""The plant of the governor's tests obeys physics where physics can be calculated by hand."""

from __future__ import annotations

import math

import pytest

from benchmarks.thermal import PARAMETERS, Box, Plant, sweep


def test_at_the_best_rate_the_junction_settles_at_the_limit() -> None:
    box = Box()
    best_fps = box.best_fps(89.0, ambient_c=50.0, sun_w=3.0)
    plant = Plant(box, ambient_c=50.0, sun_w=3.0)

    for _ in range(20 * 3600 // 10):
        plant.step(10.0, best_fps)

    assert plant.junction_c == pytest.approx(89.0, abs=0.01)


def test_the_steady_state_is_power_times_resistance() -> None:
    """Without leakage, board and idle power: 10 W through 0.35 + 0.45 + 1.6 K/W are 24 K."""
    plant = Plant(Box(leakage_w=0.0, idle_w=0.0, board_w=0.0), ambient_c=20.0)

    for _ in range(1000):
        plant.step(60.0, fps=20.0)

    assert plant.junction_c == pytest.approx(44.0, abs=1e-6)


def test_the_case_warms_up_with_its_own_time_constant() -> None:
    """Nearly all heat capacity in the case: 1 - 1/e of the way after R C = 1.6 x 900 = 1440 s."""
    box = Box(leakage_w=0.0, idle_w=0.0, board_w=10.0, junction_j_per_k=1e-3, module_j_per_k=1e-3)
    plant = Plant(box, ambient_c=20.0)

    plant.step(1440.0, fps=0.0)

    assert plant.junction_c == pytest.approx(20.0 + 16.0 * (1 - math.exp(-1)), abs=0.01)


def test_the_length_of_a_step_does_not_matter_while_power_is_constant() -> None:
    coarse, fine = (Plant(Box(leakage_w=0.0), ambient_c=30.0) for _ in range(2))

    for _ in range(10):
        coarse.step(60.0, fps=30.0)
    for _ in range(3000):
        fine.step(0.2, fps=30.0)

    assert coarse.junction_c == pytest.approx(fine.junction_c, abs=1e-6)


def test_the_sensor_is_noisy_quantised_and_repeatable() -> None:
    one, other = (Plant(Box(), ambient_c=40.0, noise_c=0.5, resolution_c=0.5, seed=7) for _ in range(2))

    readings = [one.measured_c() for _ in range(2000)]

    assert readings == [other.measured_c() for _ in range(2000)]
    assert all(reading * 2 == round(reading * 2) for reading in readings)
    mean = sum(readings) / len(readings)
    assert mean == pytest.approx(40.0, abs=0.05)
    # Rounding to half a degree adds 0.5^2 / 12 to the variance.
    assert math.sqrt(sum((r - mean) ** 2 for r in readings) / len(readings)) == pytest.approx(0.52, abs=0.04)


def test_a_sweep_covers_the_range_of_every_parameter() -> None:
    boxes = list(sweep(seed=3, count=40))

    for name in PARAMETERS:
        factors = sorted(getattr(box, name) / getattr(Box(), name) for box in boxes)
        assert 0.5 <= factors[0] < 0.53
        assert 1.47 < factors[-1] <= 1.5

"""Down when it lasts, up when it is safe, and not twice into the same mistake."""

from __future__ import annotations

from edge.monitor.ladder import Ladder

SET_POINT_C = 89.0


def stay(ladder: Ladder, start_s: float, seconds: int, temperature_c: float, **changed: bool) -> float:
    """Hold a temperature at the lowest rate (above the set point) or at full rate (below it)."""
    hot = temperature_c > SET_POINT_C
    told = {"at_floor": hot, "unlimited": not hot, "has_lighter": True, "emergency": False} | changed
    for second in range(seconds):
        ladder.step(
            start_s + second,
            temperature_c=temperature_c,
            mean_c=temperature_c,
            set_point_c=SET_POINT_C,
            hysteresis_c=5.0,
            at_floor=told["at_floor"],
            unlimited=told["unlimited"],
            has_lighter=told["has_lighter"],
            emergency=told["emergency"],
        )
    return start_s + seconds


def test_a_rate_that_can_still_fall_is_no_reason_to_go_down() -> None:
    ladder = Ladder()

    stay(ladder, 0, 600, 91.0, at_floor=False)

    assert ladder.rung == "full"


def test_it_goes_down_rung_by_rung_and_leaves_each_the_time_to_cool() -> None:
    ladder = Ladder()
    rungs = []

    at_s = 0.0
    for _ in range(150):
        at_s = stay(ladder, at_s, 1, 89.5)
        rungs.append(ladder.rung)

    assert rungs.index("lighter") == 60
    assert rungs.index("paused") == 120


def test_in_an_emergency_it_does_not_wait() -> None:
    ladder = Ladder()

    stay(ladder, 0, 3, 98.5, emergency=True)

    assert ladder.rung == "paused"


def test_up_again_it_takes_the_lighter_model_first() -> None:
    ladder = Ladder()
    at_s = stay(ladder, 0, 3, 98.5, emergency=True)

    at_s = stay(ladder, at_s, 70, 70.0)
    assert (ladder.rung, ladder.lighter) == ("lighter", True)

    stay(ladder, at_s, 130, 70.0)
    assert (ladder.rung, ladder.lighter) == ("full", False)


def test_within_the_hysteresis_it_stays() -> None:
    ladder = Ladder()
    at_s = stay(ladder, 0, 70, 89.5)

    stay(ladder, at_s, 3600, 84.5)

    assert ladder.rung == "lighter"


def test_a_lighter_model_that_is_itself_held_back_is_not_left() -> None:
    ladder = Ladder()
    at_s = stay(ladder, 0, 70, 89.5)

    stay(ladder, at_s, 3600, 70.0, unlimited=False)

    assert ladder.rung == "lighter"


def test_after_a_return_that_failed_the_next_needs_it_cooler() -> None:
    ladder = Ladder()
    at_s = stay(ladder, 0, 70, 89.5)
    at_s = stay(ladder, at_s, 130, 83.0)
    assert ladder.rung == "full"
    at_s = stay(ladder, at_s, 70, 89.5)
    assert ladder.rung == "lighter"

    at_s = stay(ladder, at_s, 3600, 83.0)
    assert ladder.rung == "lighter", "it was 83 degrees before the return that failed"

    stay(ladder, at_s, 130, 80.5)
    assert ladder.rung == "full"

from __future__ import annotations

import pytest

from edge.rates import Rate


def test_a_rate_needs_two_looks() -> None:
    rate = Rate()
    assert rate.per_s == 0
    rate.note(5.0, 100)
    assert rate.per_s == 0
    rate.note(7.0, 160)
    assert rate.per_s == pytest.approx(30)


def test_what_was_more_than_ten_seconds_ago_does_not_count() -> None:
    rate = Rate()
    for second in range(100):
        rate.note(float(second), 30 * min(second, 50))

    assert rate.per_s == 0
    assert rate.window_s == pytest.approx(10)


def test_a_long_pause_between_looks_is_averaged_over() -> None:
    rate = Rate()
    rate.note(0.0, 0)
    rate.note(60.0, 600)

    assert rate.per_s == pytest.approx(10)

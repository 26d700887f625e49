from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from numpy import uint8, zeros

from edge.sources.pace import Pacer, Stamper


class FakeTime:
    """A clock that moves only when somebody waits or works."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def clock(self) -> float:
        return self.now_s

    def wait(self, timeout: float | None = None) -> bool:
        self.now_s += timeout or 0.0
        return False


class Stopped:
    def wait(self, timeout: float | None = None) -> bool:
        del timeout
        return True


@given(st.lists(st.floats(0, 0.099), min_size=2, max_size=50))
def test_frames_stay_on_the_grid_whatever_work_takes_less_than_a_period(works_s: list[float]) -> None:
    time = FakeTime()
    pacer = Pacer(10, clock=time.clock)
    for index, work_s in enumerate(works_s):
        assert pacer.wait(time)
        assert abs(time.now_s - (100 + index / 10)) < 1e-6
        time.now_s += work_s


def test_who_is_late_skips_what_was_missed_and_returns_to_the_grid() -> None:
    time = FakeTime()
    pacer = Pacer(10, clock=time.clock)
    pacer.wait(time)
    time.now_s += 0.57  # due at 100.1; 100.1 to 100.5 are missed

    moments = []
    for _ in range(3):
        pacer.wait(time)
        moments.append(round(time.now_s, 6))

    assert moments == [100.57, 100.6, 100.7]


def test_stop_ends_the_wait() -> None:
    assert not Pacer(10).wait(Stopped())


def test_a_stamper_counts_frames_and_reads_both_clocks() -> None:
    stamp = Stamper("belt", clock=lambda: 12.5, utc_clock_ns=lambda: 1_700_000_000_123_456_789)
    image = zeros((2, 3, 3), uint8)

    first, second = stamp(image, "a.jpg"), stamp(image)

    assert (first.index, first.name, first.stream) == (0, "a.jpg", "belt")
    assert (second.index, second.name) == (1, None)
    assert first.captured_at_s == 12.5
    assert first.captured_at_utc_us == 1_700_000_000_123_456

from __future__ import annotations

from edge import config
from edge.sources.liveness import OPEN_S, Liveness
from edge.sources.wire import Picture


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def picture(at_s: float, digest: int = 0) -> Picture:
    return Picture(0, 6, 4, 0, at_s, 0, digest)


def watched(clock: Clock, **options: float | None) -> Liveness:
    return Liveness(config.Rtsp(url="rtsp://camera/1", **options), clock=clock)  # type: ignore[arg-type]


def test_opening_may_take_longer_than_a_stall() -> None:
    clock = Clock()
    liveness = watched(clock, stall_s=2.0)

    clock.now_s += OPEN_S
    assert liveness.trouble(opened=False) is None
    clock.now_s += 0.1
    assert liveness.trouble(opened=False) == "has not opened in 15 s"
    assert liveness.trouble(opened=True) == "is open, but has given no picture in 15 s"


def test_a_camera_is_lost_when_pictures_stop() -> None:
    clock = Clock()
    liveness = watched(clock, stall_s=2.0)
    liveness.saw(1, picture(clock.now_s))

    clock.now_s += 2.0
    assert liveness.trouble(opened=True) is None
    clock.now_s += 0.1
    assert liveness.trouble(opened=True) == "has given no picture for 2 s"


def test_pictures_that_found_no_room_are_signs_of_life() -> None:
    clock = Clock()
    liveness = watched(clock, stall_s=2.0)

    for grabbed in range(1, 20):
        liveness.saw(grabbed, None)
        clock.now_s += 1.5
        assert liveness.trouble(opened=True) is None


def test_the_same_picture_for_too_long_is_a_frozen_camera() -> None:
    clock = Clock()
    liveness = watched(clock, frozen_s=30.0)
    for second in range(30):
        liveness.saw(second + 1, picture(second, digest=7))
        assert liveness.trouble(opened=True) is None
    liveness.saw(31, picture(29.5))  # not measured: says nothing
    assert not liveness.frozen

    liveness.saw(32, picture(30.0, digest=7))

    assert liveness.frozen
    assert liveness.trouble(opened=True) == "gives the same picture for 30 s"


def test_any_other_picture_begins_a_new_count() -> None:
    liveness = watched(Clock(), frozen_s=30.0)

    for second in range(200):
        liveness.saw(second + 1, picture(second, digest=1 + second // 29))
        assert not liveness.frozen


def test_a_camera_that_may_freeze_is_never_lost_for_it() -> None:
    liveness = watched(Clock(), frozen_s=None)

    liveness.saw(1, picture(0, digest=7))
    liveness.saw(2, picture(1e6, digest=7))

    assert not liveness.frozen

"""Parts that fail, and what becomes of them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from edge import config
from edge.errors import BrokenPartError, DeviceLostError, ModelError
from edge.events import Events
from edge.supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import Callable


def no_wait(_low: float, _high: float) -> float:
    return 0.0


def make(
    stop: threading.Event, *, restarts: int = 3, clock: Callable[[], float] | None = None
) -> tuple[Supervisor, Events]:
    events = Events()
    section = config.Watch(restarts=restarts, within_s=100)
    extra = {} if clock is None else {"clock": clock}
    return Supervisor(section, end=stop.set, events=events, uniform=no_wait, **extra), events


def test_a_part_that_fails_is_started_again_and_told_once(wait_until: Any) -> None:
    stop = threading.Event()
    supervisor, events = make(stop)
    attempts: list[int] = []

    def work() -> None:
        attempts.append(1)
        if len(attempts) < 3:
            raise ModelError("out of sorts")
        stop.wait(60)

    supervisor.arm()
    part = supervisor.start("infer-m", work)
    wait_until(lambda: len(attempts) == 3, "the third attempt")
    assert supervisor.finish(20) == []

    supervisor.check()
    assert part.restarts == 2
    assert [(event.kind, event.severity) for event in events.recent] == [("part_failed", "error")]
    assert events.recent[0].text == "infer-m has failed: out of sorts; it is started again"


def test_a_part_that_keeps_failing_is_handed_to_the_owner_with_its_cause(wait_until: Any) -> None:
    stop = threading.Event()
    supervisor, _ = make(stop, restarts=2)
    attempts: list[int] = []

    def work() -> None:
        attempts.append(1)
        raise ModelError("never well")

    supervisor.arm()
    part = supervisor.start("infer-m", work)
    wait_until(lambda: not part.alive, "the end of the part")

    with pytest.raises(BrokenPartError, match="infer-m: failed 3 times within 100 s, last with: never well") as caught:
        supervisor.check()
    assert isinstance(caught.value.__cause__, ModelError)
    assert len(attempts) == 3


def test_failures_that_are_far_apart_do_not_add_up(wait_until: Any) -> None:
    stop = threading.Event()
    now = [0.0]
    supervisor, _ = make(stop, restarts=1, clock=lambda: now[0])
    attempts: list[int] = []

    def work() -> None:
        attempts.append(1)
        now[0] += 101
        if len(attempts) < 10:
            raise ModelError("now and then")
        stop.wait(60)

    supervisor.arm()
    supervisor.start("infer-m", work)
    wait_until(lambda: len(attempts) == 10, "the tenth attempt")
    stop.set()
    supervisor.check()


def test_a_part_that_is_not_essential_is_started_again_for_ever(wait_until: Any) -> None:
    stop = threading.Event()
    supervisor, _ = make(stop, restarts=1)
    attempts: list[int] = []

    def work() -> None:
        attempts.append(1)
        raise OSError("port taken")

    supervisor.arm()
    part = supervisor.start("status", work, essential=False)
    wait_until(lambda: len(attempts) > 20, "many attempts")
    assert supervisor.finish(20) == []

    supervisor.check()
    assert part.restarts >= 20


def test_before_arming_a_failure_is_final_and_as_it_was(wait_until: Any) -> None:
    stop = threading.Event()
    supervisor, events = make(stop)

    def work() -> None:
        raise ModelError("cannot be loaded")

    part = supervisor.start("infer-m", work)
    wait_until(lambda: not part.alive, "the end of the part")

    with pytest.raises(ModelError, match="cannot be loaded"):
        supervisor.check()
    assert events.recent == []


def test_a_lost_gpu_is_final_at_once(wait_until: Any) -> None:
    supervisor, _ = make(threading.Event())

    def work() -> None:
        raise DeviceLostError("gone")

    supervisor.arm()
    part = supervisor.start("infer-m", work)
    wait_until(lambda: not part.alive, "the end of the part")

    with pytest.raises(DeviceLostError):
        supervisor.check()


def test_an_error_of_a_part_that_is_not_adopted_is_its_starters(wait_until: Any) -> None:
    supervisor, events = make(threading.Event())

    def work() -> None:
        raise ModelError("the new engine is bad")

    supervisor.arm()
    part = supervisor.start("infer-m", work, adopted=False)
    wait_until(lambda: not part.alive, "the end of the part")

    supervisor.check()
    assert isinstance(part.error, ModelError)
    assert events.recent == []


def test_a_part_that_does_not_come_back_is_named_and_not_waited_for() -> None:
    hung = threading.Event()
    supervisor, _ = make(threading.Event())
    supervisor.start("infer-m", lambda: hung.wait(60) and None)

    assert supervisor.finish(0.05) == ["infer-m"]
    hung.set()


def test_after_an_error_of_the_owner_the_parts_are_ended() -> None:
    stop = threading.Event()
    supervisor, _ = make(stop)

    def fail() -> None:
        with supervisor:
            supervisor.start("waits", lambda: stop.wait(60) and None)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert stop.is_set()


def test_a_part_in_trouble_says_so_until_it_works_again(wait_until: Any) -> None:
    stop = threading.Event()
    events = Events()
    supervisor = Supervisor(config.Watch(), end=stop.set, events=events, uniform=lambda _low, _high: 60.0)

    def work() -> None:
        raise OSError(98, "Address already in use")

    supervisor.arm()
    supervisor.start("status", work, essential=False)
    wait_until(lambda: supervisor.parts[0].state == "restarting", "the failure")

    assert supervisor.parts[0].trouble == "[Errno 98] Address already in use"
    assert supervisor.finish(20) == []
    assert supervisor.parts[0].state == "ended"

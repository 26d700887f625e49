"""Events: counted, remembered, told to everybody, whoever else fails."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from itertools import count

import pytest

from edge.events import KINDS, Event, Events


def ticking(start_us: int = 0, step_us: int = 1) -> Events:
    """Events whose clock moves on with each look."""
    clock = count(start_us * 1000, step_us * 1000)
    return Events(utc_clock_ns=lambda: next(clock))


def test_an_event_reaches_every_listener_with_all_that_was_said() -> None:
    events, heard_a, heard_b = ticking(7), list[Event](), list[Event]()
    events.subscribe(heard_a.append)
    events.subscribe(heard_b.append)

    event = events.emit("camera_lost", "stream gate: lost", severity="warning", stream="gate", silent_s=5.0)

    assert heard_a == heard_b == [event]
    assert event == Event("camera_lost", "stream gate: lost", "warning", 7, "gate", None, {"silent_s": 5.0})


def test_a_listener_hears_only_what_comes_after_it() -> None:
    events, heard = ticking(), list[Event]()
    events.emit("started", "one")

    events.subscribe(heard.append)
    events.emit("stopping", "two")

    assert [event.kind for event in heard] == ["stopping"]


def test_the_last_hundred_are_remembered_and_all_are_counted() -> None:
    events = ticking()

    for number in range(150):
        events.emit("frame_failed", str(number), severity="warning")
    events.emit("started", "150")

    assert [event.text for event in events.recent] == [str(number) for number in range(51, 151)]
    assert events.counts == {("frame_failed", "warning"): 150, ("started", "info"): 1}


def test_counts_are_a_copy() -> None:
    events = ticking()
    events.emit("started", "x")

    events.counts["started", "info"] = 99

    assert events.counts["started", "info"] == 1


def test_each_event_is_one_line_in_the_log_with_its_fields(caplog: pytest.LogCaptureFixture) -> None:
    events = ticking()

    with caplog.at_level(logging.DEBUG, logger="edge.events"):
        events.emit("camera_lost", "100 % lost", severity="warning", stream="gate", model="yolox", event="mine")
        events.emit("engine_hung", "hung", severity="error")
        events.emit("started", "up")

    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.ERROR, logging.INFO]
    assert caplog.records[0].getMessage() == "100 % lost"
    assert caplog.records[0].fields == {"event": "camera_lost", "stream": "gate", "model": "yolox"}  # type: ignore[attr-defined]
    assert caplog.records[2].fields == {"event": "started"}  # type: ignore[attr-defined]


def test_a_listener_that_raises_harms_neither_the_emitter_nor_the_others(caplog: pytest.LogCaptureFixture) -> None:
    events, heard = ticking(), list[Event]()
    broken = True

    def listener(event: Event) -> None:
        if broken:
            raise ZeroDivisionError(event.text)

    events.subscribe(listener)
    events.subscribe(heard.append)

    with caplog.at_level(logging.ERROR, logger="edge.events"):
        for text in ("one", "two"):
            events.emit("started", text)
        broken = False
        events.emit("started", "three")
        broken = True
        events.emit("started", "four")

    assert [event.text for event in heard] == ["one", "two", "three", "four"]
    # Once a row of failures, each with its traceback.
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["one", "four"]


def test_a_listener_may_emit_and_subscribe() -> None:
    events, heard = ticking(), list[Event]()

    def listener(event: Event) -> None:
        if event.kind == "started":
            events.subscribe(heard.append)
            events.emit("stopping", "in between")

    events.subscribe(listener)
    events.emit("started", "x")

    assert [event.text for event in heard] == ["in between"]
    assert [event.text for event in events.recent] == ["x", "in between"]


def test_many_threads_lose_nothing_and_keep_their_order() -> None:
    events, heard = ticking(), list[Event]()
    events.subscribe(heard.append)
    threads = [
        threading.Thread(target=lambda name=name: [events.emit("started", f"{n}", stream=name) for n in range(200)])
        for name in "abcd"
    ]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert events.counts["started", "info"] == 800
    assert Counter(event.stream for event in heard) == dict.fromkeys("abcd", 200)
    for name in "abcd":
        assert [int(event.text) for event in heard if event.stream == name] == list(range(200))
    times = [event.at_utc_us for event in events.recent]
    assert times == sorted(times)


def test_kinds_are_plain_names() -> None:
    assert len(set(KINDS)) == len(KINDS)
    assert all(kind.replace("_", "").isalpha() and kind.islower() for kind in KINDS)

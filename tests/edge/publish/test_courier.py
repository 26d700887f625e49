"""One turn after the other, over a link and a clock that do as they are told. No thread, no network."""

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge import config
from edge.events import Event, Events
from edge.publish.courier import Courier
from edge.publish.inbox import Inbox
from edge.publish.mqtt import Accepted, Acknowledged, Ended
from edge.publish.outbox import Outbox
from edge.publish.presence import Presence

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

RESULTS, EVENTS, STATUS, TELEMETRY = "edge/dev/s/results", "edge/dev/events", "edge/dev/status", "edge/dev/telemetry"


class BoomError(Exception):
    """What nobody has expected."""


class Clock:
    """Stands still unless it is moved."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Wire:
    """A broker and the one connection to it, which answer as ``outcome`` says."""

    def __init__(self, accepted: Accepted = Accepted(None, None)) -> None:  # noqa: B008
        self.outcome = "ack"
        self.sent: list[tuple[str, bytes, int, int | None]] = []
        self.delivered: list[bytes] = []
        self.left = self.closed = False
        self._accepted = accepted
        self._new = True
        self._number = 0
        self._open: list[tuple[int, str, bytes]] = []

    def dial(self, _section: config.Mqtt, **_: object) -> Wire | Ended:
        if self.outcome == "absent":
            return Ended("unreachable", "cannot be reached")
        self._new, self.closed, self._open = True, False, []
        return self

    def send(self, topic: str, payload: bytes, *, qos: int, retain: bool = False, expiry_s: int | None = None) -> int:
        assert retain == (topic == STATUS)
        assert not self.closed
        if self.outcome == "boom in send":
            raise BoomError
        self._number += 1
        self.sent.append((topic, payload, qos, expiry_s))
        self._open.append((self._number, topic, payload))
        return self._number

    def poll(self, timeout_s: float, wake: socket.socket) -> list[Accepted | Acknowledged | Ended]:
        del timeout_s, wake
        if self.outcome == "boom in poll":
            raise BoomError
        if self.outcome in {"lost", "absent"}:
            return [Ended("lost", "has gone")]
        if self._new:
            self._new = False
            return [self._accepted]
        if self.outcome == "silence":
            return []
        count = 1 if self.outcome == "one ack" else len(self._open)
        answered, self._open = self._open[:count], self._open[count:]
        code = {"denied": 135, "too large": 149}.get(self.outcome, 0)
        self.delivered += [payload for _, topic, payload in answered if topic == RESULTS and not code]
        return [Acknowledged(number, code if topic == RESULTS else 0, "") for number, topic, _ in answered]

    def goodbye(self) -> None:
        self.left = True

    def close(self) -> None:
        self.closed = True

    def on(self, topic: str) -> list[Any]:
        """What was sent there, parsed."""
        return [json.loads(payload) for sent_to, payload, *_ in self.sent if sent_to == topic]


class Rig:
    """A courier with all that it needs."""

    def __init__(
        self, wire: Wire, *, path: Path | None = None, max_mb: float = 1.0, events: Events | None = None, qos: Any = 1
    ) -> None:
        self.wire = wire
        self.clock = Clock()
        self.inbox = Inbox(50)
        self.presence = Presence("dev", ["s"])
        self.courier = Courier(
            config.Mqtt(qos=qos, outbox=config.Outbox(max_mb=max_mb)),
            device="dev",
            password=None,
            outbox_path=path,
            inbox=self.inbox,
            presence=self.presence,
            events=events,
            dial=wire.dial,
            clock=self.clock,
            utc_clock_ns=lambda: 0,
            uniform=lambda *_: 0.0,
        )
        self.courier.open()

    def turn(self, outcome: str = "ack", *, times: int = 1) -> None:
        """Take turns as the publisher does, which hangs up and flushes after an exception."""
        self.wire.outcome = outcome
        for _ in range(times):
            try:
                self.courier.turn()
            except BoomError:
                self.courier.hang_up()
                self.courier.flush()

    def connect(self) -> None:
        """Take turns until there is a connection and the status is out."""
        self.turn(times=4)
        assert self.courier.accepted

    def put(self, *payloads: str) -> None:
        for payload in payloads:
            self.inbox.put(RESULTS, payload.encode())

    def balance(self) -> tuple[int, int]:
        """What came in, and what became of it."""
        courier = self.courier
        came = self.inbox.results_put + courier.taken_up
        return came, courier.acknowledged + courier.dropped + courier.waiting

    def close(self) -> None:
        self.courier.close()
        self.inbox.close()


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    """Makes rigs that are closed with the test."""
    made: list[Rig] = []

    def make(wire: Wire, **arguments: Any) -> Rig:
        made.append(Rig(wire, **arguments))
        return made[-1]

    yield make
    for each in made:
        each.close()


OUTCOMES = ("ack", "ack", "one ack", "silence", "lost", "absent", "denied", "too large", "boom in send", "boom in poll")
actions = st.lists(
    st.one_of(
        st.tuples(st.just("results"), st.integers(1, 70)),
        st.tuples(st.just("events"), st.integers(1, 10)),
        st.tuples(st.sampled_from(OUTCOMES), st.integers(1, 4)),
        st.tuples(st.just("new process"), st.just(0)),
    ),
    max_size=25,
)


@settings(max_examples=120, deadline=None)
@given(actions, st.sampled_from([0.002, 1.0]), st.booleans())
def test_every_result_is_acknowledged_dropped_or_pending_whatever_happens(
    script: list[tuple[str, int]], max_mb: float, on_disk: bool
) -> None:
    logging.getLogger("edge.publish").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "outbox.db" if on_disk else None
        wire, number = Wire(), 0
        rig = Rig(wire, path=path, max_mb=max_mb, events=Events())
        for action, amount in script:
            if action == "results":
                rig.put(*(f"{number + index:050}" for index in range(amount)))
                number += amount
            elif action == "events":
                for _ in range(amount):
                    rig.inbox.put(EVENTS, b"e" * 50)
            elif action == "new process":
                rig.close()
                left = rig.courier.waiting
                rig = Rig(wire, path=path, max_mb=max_mb, events=Events())
                assert rig.courier.taken_up == (left if on_disk else 0)
            else:
                rig.turn(action, times=amount)
            came, gone = rig.balance()
            assert came == gone

        rig.turn(times=100)
        came, gone = rig.balance()
        assert came == gone
        assert rig.courier.waiting == 0
        rig.close()
    logging.getLogger("edge.publish").setLevel(logging.NOTSET)


def test_events_and_results_share_one_order_and_events_are_acknowledged_even_at_qos_0(rig: Any) -> None:
    wire = Wire()
    made = rig(wire, qos=0)
    made.put("1")
    made.inbox.put(EVENTS, b"2")
    made.put("3")

    made.connect()

    assert [(topic, payload, qos) for topic, payload, qos, _ in wire.sent if topic != STATUS] == [
        (RESULTS, b"1", 0),
        (EVENTS, b"2", 1),
        (RESULTS, b"3", 0),
    ]
    made.turn()
    assert (made.courier.acknowledged, made.courier.waiting) == (2, 0)


def test_an_event_that_is_dropped_is_no_dropped_result(rig: Any, tmp_path: Path) -> None:
    made = rig(Wire(), max_mb=0.001, path=tmp_path / "outbox.db")
    for _ in range(8):
        made.inbox.put(EVENTS, b"e" * 200)
        made.turn("absent")
    made.put("x" * 200)
    made.turn("absent")

    assert (made.courier.dropped, made.courier.waiting) == (0, 1)


def dropped_events(events: Events) -> list[Event]:
    return [event for event in events.recent if event.kind == "results_dropped"]


def test_dropping_is_told_at_once_and_then_once_a_minute_with_the_count(rig: Any) -> None:
    events = Events()
    made = rig(Wire(), max_mb=0.001, events=events)  # room for two

    for count, wait_s in ((3, 1), (5, 58), (2, 2), (0, 100), (1, 0)):
        made.put(*["x" * 400] * count)
        made.turn("absent")
        made.clock.now_s += wait_s

    told = dropped_events(events)
    assert [(event.fields["dropped"], event.fields["dropped_total"]) for event in told] == [(1, 1), (7, 8), (1, 9)]
    assert told[0].text == (
        "results are being dropped, 1 more and 1 in all:"
        " the outbox holds 0.001 MB, and MQTT broker 127.0.0.1:1883 has not been reached yet"
    )


def test_an_event_about_dropped_results_that_itself_displaces_some_is_not_followed_by_another(rig: Any) -> None:
    events = Events()
    made = rig(Wire(), max_mb=0.002, events=events)
    events.subscribe(lambda event: made.inbox.put(EVENTS, event.text.encode() * 5))
    made.put(*["x" * 400] * 10)

    for _ in range(20):
        made.turn("absent")
        made.clock.now_s += 61

    (first,) = dropped_events(events)
    displaced = made.courier.dropped - first.fields["dropped"]
    assert displaced > 0

    made.put("x" * 400)
    made.turn("absent")

    second = dropped_events(events)[1]
    assert second.fields["dropped"] == displaced + 1


def test_an_inbox_that_overflows_is_told_as_such(rig: Any) -> None:
    events = Events()
    made = rig(Wire(), events=events)
    made.put(*map(str, range(60)))  # it holds fifty
    made.turn()

    (told,) = dropped_events(events)
    assert told.fields["dropped"] == 10
    assert told.text.endswith("they came faster than the publishing thread could take them in")


def test_what_the_broker_refuses_for_good_is_told_as_dropped(rig: Any) -> None:
    events = Events()
    made = rig(Wire(), events=events)
    made.connect()
    made.put("1", "2")
    made.turn("too large")
    made.turn()

    (told,) = dropped_events(events)
    assert told.text == "results are being dropped, 2 more and 2 in all: MQTT broker 127.0.0.1:1883 refuses it ()"


def test_the_status_follows_condition_models_and_streams_at_most_once_a_second(rig: Any) -> None:
    wire = Wire()
    made = rig(wire)
    made.connect()
    made.presence.set_condition("paused: tj is 91.2 C")
    made.turn(times=3)
    made.presence.set_condition(None)
    made.presence.set_condition("stream gate is lost")
    made.clock.now_s += 0.5
    made.turn(times=3)
    said_early = len(wire.on(STATUS))
    made.clock.now_s += 0.5
    made.turn(times=3)
    made.clock.now_s += 1
    made.presence.set_condition(None)
    made.presence.announce([], ["s", "t"])
    made.turn(times=3)
    made.turn(times=3)

    assert said_early == 1
    assert [(status["health"], status.get("reason"), status["streams"]) for status in wire.on(STATUS)] == [
        ("ok", None, ["s"]),
        ("degraded", "stream gate is lost", ["s"]),
        ("ok", None, ["s", "t"]),
    ]


def test_what_has_not_changed_is_not_said_again_but_to_a_new_connection(rig: Any) -> None:
    wire = Wire()
    made = rig(wire)
    made.connect()
    assert not made.presence.set_condition(None)
    assert not made.presence.announce([], ["s"])
    made.clock.now_s += 10
    made.turn(times=3)
    assert len(wire.on(STATUS)) == 1

    made.turn("lost")
    made.connect()

    assert len(wire.on(STATUS)) == 2


def test_the_status_keeps_to_the_window_of_the_broker(rig: Any) -> None:
    wire = Wire(Accepted(window=2, max_packet_bytes=None))
    made = rig(wire)
    made.connect()
    made.put("1", "2", "3")
    made.turn("silence")
    made.clock.now_s += 5
    made.presence.set_condition("trouble")
    made.turn("silence", times=3)
    assert [topic for topic, *_ in wire.sent] == [STATUS, RESULTS, RESULTS]

    made.turn("one ack", times=2)

    assert [topic for topic, *_ in wire.sent] == [STATUS, RESULTS, RESULTS, STATUS]


def test_telemetry_is_sent_once_without_being_kept_and_expires(rig: Any) -> None:
    wire = Wire()
    made = rig(wire)
    made.connect()
    made.courier.offer_telemetry(b"1", expiry_s=60)
    made.courier.offer_telemetry(b"2", expiry_s=60)
    made.turn(times=3)
    made.turn("lost")
    made.courier.offer_telemetry(b"3", expiry_s=None)
    made.turn("absent", times=2)
    made.connect()

    sent = [(payload, qos, expiry_s) for topic, payload, qos, expiry_s in wire.sent if topic == TELEMETRY]
    assert sent == [(b"2", 0, 60)]
    assert made.courier.acknowledged == 0


def test_telemetry_does_not_pile_up_in_front_of_a_broker_that_does_not_read(rig: Any) -> None:
    wire = Wire()
    made = rig(wire)
    made.connect()
    for index in range(5):
        made.courier.offer_telemetry(str(index).encode(), expiry_s=None)
        made.turn("silence")
    made.turn()
    made.courier.offer_telemetry(b"after", expiry_s=None)
    made.turn()

    assert [payload for topic, payload, *_ in wire.sent if topic == TELEMETRY] == [b"0", b"after"]


def test_a_drain_ends_within_its_deadline_and_leaves_the_farewell_to_the_will_when_the_broker_is_silent(
    rig: Any,
) -> None:
    wire = Wire()
    made = rig(wire)
    made.connect()
    made.put(*"0123456789")
    made.courier.drain(made.clock.now_s + 2)
    while not made.courier.done:
        made.turn("silence")
        made.clock.now_s += 0.05
    wire.outcome = "silence"
    assert made.clock.now_s < 1002
    poll = wire.poll

    def slow_poll(timeout_s: float, wake: Any) -> Any:
        made.clock.now_s += timeout_s
        return poll(timeout_s, wake)

    wire.poll = slow_poll  # type: ignore[method-assign]
    made.courier.say_goodbye()
    made.courier.hang_up()

    assert made.clock.now_s <= 1002.1
    assert not wire.left
    assert wire.closed
    assert made.courier.waiting == 10


def test_a_connection_that_comes_after_the_end_is_closed(rig: Any) -> None:
    wire = Wire()
    made = rig(wire)
    wire.outcome = "ack"
    made.courier.turn()  # starts to dial and is woken by the answer
    made.close()

    assert wire.closed


def test_results_in_a_file_of_the_previous_version_are_taken_up(rig: Any, tmp_path: Path) -> None:
    import sqlite3

    path = tmp_path / "outbox.db"
    database = sqlite3.connect(path)
    database.executescript(
        "PRAGMA journal_mode = WAL; PRAGMA user_version = 1;"
        "CREATE TABLE results (seq INTEGER PRIMARY KEY, topic TEXT NOT NULL, payload BLOB NOT NULL);"
    )
    database.executemany(
        "INSERT INTO results VALUES (?, ?, ?)", [(7, RESULTS, "a"), (8, EVENTS, "b"), (9, RESULTS, "c")]
    )
    database.commit()
    database.close()
    wire = Wire()
    made = rig(wire, path=path)

    assert (made.courier.taken_up, made.courier.waiting) == (2, 2)
    made.connect()
    made.turn()
    assert (made.courier.acknowledged, made.courier.waiting) == (2, 0)


def test_a_file_that_becomes_free_is_used_without_losing_or_repeating_anything(rig: Any, tmp_path: Path) -> None:
    path = tmp_path / "outbox.db"
    wire = Wire()
    with Outbox(path, max_bytes=1_000_000) as other_owner:
        other_owner.append(RESULTS, b"old")
        other_owner.flush()
        made = rig(wire, path=path)
        made.connect()
        made.put("1", "2")
        made.turn(times=2)
        made.put("3")
        made.turn("silence")  # under way, so that numbers must not change now
    made.clock.now_s += 20
    made.turn("silence")
    assert made.courier.location == "memory"

    made.turn("ack", times=2)
    made.put("4")
    made.turn("ack", times=3)

    assert made.courier.location == str(path)
    assert sorted(wire.delivered) == [b"1", b"2", b"3", b"4", b"old"]
    assert made.balance() == (5, 5)
    assert made.courier.waiting == 0

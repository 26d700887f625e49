"""The publisher's policy against a broker that fails on command, without threads or sockets of the network."""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge import config
from edge.backoff import backoff
from edge.errors import ConfigError
from edge.events import Event as Happening
from edge.events import Events
from edge.publish.dialler import Dialler
from edge.publish.inbox import Inbox
from edge.publish.mqtt import Accepted, Acknowledged, Ended, Event, find_password
from edge.publish.outbox import Outbox
from edge.publish.publisher import Publisher, outbox_path
from edge.status import PublisherState

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator
    from pathlib import Path

TOPIC = "edge/dev/s/results"
FATES = ("ack", "ack", "ack", "ack", "lost", "stuck", "stuck after delivery")


class BoomError(Exception):
    """What nobody has expected."""


class FakeTime:
    """Every look at the clock takes a while, so that waiting ends without waiting."""

    def __init__(self, step_s: float) -> None:
        self.now_s = 0.0
        self.step_s = step_s

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


class FakeLink:
    """Keeps the Link protocol: a connection whose answers are told beforehand."""

    def __init__(self, fates: Iterator[str], delivered: list[bytes], accepted: Event = Accepted(None, None)) -> None:  # noqa: B008
        self.sent: list[tuple[str, bytes, bool]] = []
        self.most_in_flight = 0
        self.left = self.closed = False
        self._fates = fates
        self._delivered = delivered
        self._events: list[Event] = [accepted]
        self._in_flight = 0
        self._ended = self._stuck = False

    def send(self, topic: str, payload: bytes, *, qos: int, retain: bool = False, expiry_s: int | None = None) -> int:
        del qos, expiry_s
        assert not self.closed
        self.sent.append((topic, payload, retain))
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        number = len(self.sent)
        fate = "ack" if topic.endswith("/status") else next(self._fates, "ack")
        if self._ended or self._stuck:
            return number
        if fate == "boom":
            raise BoomError
        if fate.startswith("stuck"):
            self._stuck = True
            if fate == "stuck after delivery":
                self._delivered.append(payload)
        elif fate == "lost":
            self._ended = True
            self._events.append(Ended("lost", "has gone"))
        elif fate == "denied":
            self._events.append(Acknowledged(number, 135, "Not authorized"))
        elif fate == "too large":
            self._events.append(Acknowledged(number, 149, "Packet too large"))
        else:
            if not topic.endswith("/status"):
                self._delivered.append(payload)
            self._events.append(Acknowledged(number, 0, "Success"))
        return number

    def poll(self, timeout_s: float, wake: socket.socket) -> list[Event]:
        del timeout_s, wake
        events, self._events = self._events, []
        self._in_flight -= sum(isinstance(event, Acknowledged) for event in events)
        if not events and self._in_flight and not self._ended:
            # What was never answered ends the connection in the end: the keepalive sees to that.
            self._ended = True
            return [Ended("lost", "has gone (Keep alive timeout)")]
        return events

    def goodbye(self) -> None:
        self.left = True

    def close(self) -> None:
        self.closed = True


class FakeBroker:
    """Dials: the connections take their fates from one script, then everything goes well."""

    def __init__(self, fates: list[str], refusals: list[Ended] | None = None, accepted: Event | None = None) -> None:
        self.delivered: list[bytes] = []
        self.links: list[FakeLink] = []
        self.calls: list[dict[str, Any]] = []
        self._fates = iter(fates)
        self._refusals = iter(refusals or [])
        self._accepted = accepted or Accepted(None, None)

    def dial(self, _section: config.Mqtt, **arguments: Any) -> FakeLink | Ended:
        self.calls.append(arguments)
        refusal = next(self._refusals, None)
        if refusal is not None:
            return refusal
        self.links.append(FakeLink(self._fates, self.delivered, self._accepted))
        return self.links[-1]


def publish_all(
    broker: FakeBroker, count: int, *, section: config.Mqtt | None = None, step_s: float = 0.01, deadline_s: float = 1e6
) -> Publisher:
    """Publish so many messages, then drain."""
    section = section or config.Mqtt()
    publisher = Publisher(
        section, device="dev", dial=broker.dial, environ={}, clock=FakeTime(step_s), uniform=lambda low, _high: low
    )
    with publisher:
        server = threading.Thread(target=publisher.serve)
        server.start()
        for index in range(count):
            publisher.publish(TOPIC, str(index).encode())
        publisher.drain(deadline_s)
        server.join(30)
        assert not server.is_alive()
    return publisher


@settings(max_examples=80)
@given(st.integers(0, 60), st.lists(st.sampled_from(FATES), max_size=60))
def test_every_message_is_delivered_and_first_in_order_whatever_the_broker_does(count: int, fates: list[str]) -> None:
    broker = FakeBroker(fates)

    counters = publish_all(broker, count).counters

    first_time = [int(payload) for payload in dict.fromkeys(broker.delivered)]
    assert first_time == list(range(len(first_time)))
    assert counters.acknowledged + counters.pending == count
    assert len(first_time) >= counters.acknowledged
    if counters.pending:  # the drain's one more attempt was broken by the script as well
        assert set(fates) - {"ack"}
    assert all(link.most_in_flight <= 21 for link in broker.links)


def test_a_connection_begins_with_the_status_and_ends_with_another_one() -> None:
    broker = FakeBroker([])

    publish_all(broker, 3)

    (link,) = broker.links
    statuses = [json.loads(payload) for topic, payload, retain in link.sent if topic == "edge/dev/status" and retain]
    assert link.sent[0][0] == "edge/dev/status"
    assert link.sent[-1][0] == "edge/dev/status"
    assert [(status["state"], status.get("reason")) for status in statuses] == [
        ("online", None),
        ("offline", "stopped"),
    ]
    assert link.left
    assert broker.calls[0]["client_id"] == "jetson-edge-dev"
    assert json.loads(broker.calls[0]["will"][1])["reason"] == "connection lost"


def test_a_denied_result_is_kept_and_sent_again_in_order(
    caplog: pytest.LogCaptureFixture, wait_until: Callable[..., None]
) -> None:
    caplog.set_level(logging.INFO, "edge")
    broker = FakeBroker(["denied"] * 5)
    with Publisher(config.Mqtt(), device="dev", dial=broker.dial, environ={}, clock=FakeTime(0.01)) as publisher:
        server = threading.Thread(target=publisher.serve)
        for index in range(5):
            publisher.publish(TOPIC, str(index).encode())
        server.start()
        wait_until(lambda: publisher.counters.acknowledged == 5, "the second round")
        publisher.drain(1e6)
        server.join(10)

    assert [int(payload) for payload in broker.delivered] == [0, 1, 2, 3, 4]
    assert publisher.counters.dropped == 0
    assert publisher.trouble is None
    assert caplog.text.count("takes no messages under edge/dev/ (Not authorized)") == 1
    assert caplog.text.count("takes results again") == 1


def test_what_the_broker_will_never_take_is_dropped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    broker = FakeBroker(["ack", "too large", "ack"])

    publisher = publish_all(broker, 3)

    assert broker.delivered == [b"0", b"2"]
    assert publisher.counters.dropped == 1
    assert "refuses it (Packet too large)" in caplog.text


def test_limits_that_the_broker_states_are_kept() -> None:
    broker = FakeBroker([], accepted=Accepted(window=3, max_packet_bytes=len(TOPIC) + 64 + 1))

    publisher = publish_all(broker, 15)

    assert broker.links[0].most_in_flight <= 3 + 1
    assert broker.delivered == [str(index).encode() for index in range(10)]  # of one digit; two are too large
    assert publisher.counters.dropped == 5


def test_the_same_trouble_is_said_once_however_often_it_repeats(
    caplog: pytest.LogCaptureFixture, wait_until: Callable[..., None]
) -> None:
    caplog.set_level(logging.INFO, "edge")
    refused = Ended("refused", "refused the user name or password")
    absent = Ended("unreachable", "cannot be reached (Connection refused)")
    broker = FakeBroker([], [absent] * 5 + [refused] * 5)
    with Publisher(config.Mqtt(), device="dev", dial=broker.dial, environ={}, uniform=lambda *_: 0.0) as publisher:
        server = threading.Thread(target=publisher.serve)
        server.start()
        wait_until(lambda: len(broker.calls) == 11, "ten refusals")
        publisher.drain(1e6)
        server.join(10)

    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert lines == [
        ("WARNING", "MQTT broker 127.0.0.1:1883 cannot be reached (Connection refused)"),
        ("ERROR", "MQTT broker 127.0.0.1:1883 refused the user name or password"),
        ("INFO", "MQTT broker 127.0.0.1:1883 is connected, 0 results wait"),
    ]


def test_a_drain_without_a_broker_takes_one_attempt_and_tells_what_is_left() -> None:
    broker = FakeBroker([], [Ended("unreachable", "cannot be reached (Connection refused)")] * 1000)

    publisher = publish_all(broker, 7, step_s=1e-6)

    assert publisher.counters.pending == 7
    assert publisher.trouble == "cannot be reached (Connection refused)"
    assert 1 <= len(broker.calls) <= 2


def test_what_is_left_waits_on_disk_for_the_next_process(tmp_path: Path) -> None:
    section = config.Mqtt(outbox=config.Outbox(path=str(tmp_path / "outbox.db")))
    absent = FakeBroker([], [Ended("unreachable", "cannot be reached")] * 1000)
    publisher = publish_all(absent, 4, section=section)
    assert publisher.waits_in == str(tmp_path / "outbox.db")
    present = FakeBroker([])

    publisher = publish_all(present, 2, section=section)

    assert present.delivered == [b"0", b"1", b"2", b"3", b"0", b"1"]
    assert dataclasses.astuple(publisher.counters) == (2, 4, 6, 0, 0)


def test_a_failure_of_our_own_while_dialling_is_not_taken_for_an_absent_broker() -> None:
    def dial(*_: object, **__: object) -> Ended:
        raise ZeroDivisionError

    with (
        Publisher(config.Mqtt(), device="dev", dial=dial, environ={}) as publisher,
        pytest.raises(ZeroDivisionError),
    ):
        publisher.serve()


def serve_until_it_ends(publisher: Publisher) -> None:
    """What a supervisor does, with a thread for each attempt."""
    while True:
        failures: list[BoomError] = []

        def attempt(failures: list[BoomError] = failures) -> None:
            try:
                publisher.serve()
            except BoomError as error:
                failures.append(error)

        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
        if not failures:
            return


@pytest.mark.parametrize("on_disk", [False, True])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fates=st.lists(st.sampled_from([*FATES, "boom"]), max_size=30))
def test_nothing_is_lost_when_the_thread_fails_and_another_goes_on(
    fates: list[str], on_disk: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = str(tmp_path_factory.mktemp("outbox") / "outbox.db") if on_disk else None
    broker = FakeBroker(fates)
    section = config.Mqtt(outbox=config.Outbox(path=path))
    with Publisher(
        section, device="dev", dial=broker.dial, environ={}, clock=FakeTime(0.01), uniform=lambda *_: 0.0
    ) as publisher:
        supervisor = threading.Thread(target=serve_until_it_ends, args=(publisher,))
        supervisor.start()
        for index in range(30):
            publisher.publish(TOPIC, str(index).encode())
        publisher.drain(1e6)
        supervisor.join(30)
        assert not supervisor.is_alive()

    counters = publisher.counters
    first_time = [int(payload) for payload in dict.fromkeys(broker.delivered)]
    assert first_time == list(range(len(first_time)))
    assert counters.acknowledged + counters.pending == 30
    assert counters.dropped == 0
    assert all(link.closed for link in broker.links)


def test_a_drain_while_nobody_serves_returns_before_its_deadline_and_the_results_are_written(tmp_path: Path) -> None:
    path = tmp_path / "outbox.db"
    section = config.Mqtt(outbox=config.Outbox(path=str(path)))
    broker = FakeBroker(["boom"])
    with Publisher(section, device="dev", dial=broker.dial, environ={}) as publisher:
        publisher.publish(TOPIC, b"1")
        with pytest.raises(BoomError):
            publisher.serve()
        publisher.publish(TOPIC, b"2")

        assert publisher.drain(1e6) == 2

    with Outbox(path, max_bytes=1000) as outbox:
        assert [entry.payload for entry in outbox.oldest(10)] == [b"1", b"2"]
        assert outbox.taken_up == 2


def test_between_two_attempts_the_state_does_not_say_that_all_is_well(wait_until: Callable[..., None]) -> None:
    broker = FakeBroker(["boom"], [])
    dialled = threading.Event()

    def dial(section: config.Mqtt, **arguments: Any) -> FakeLink | Ended:
        if broker.links:
            dialled.wait(10)
        return broker.dial(section, **arguments)

    with Publisher(config.Mqtt(), device="dev", dial=dial, environ={}) as publisher:
        publisher.publish(TOPIC, b"1")
        with pytest.raises(BoomError):
            publisher.serve()
        assert not publisher.state.connected
        server = threading.Thread(target=publisher.serve)
        server.start()
        wait_until(lambda: publisher.trouble == "is being connected again", "the second attempt")
        dialled.set()
        wait_until(lambda: publisher.state.acknowledged == 1, "the result")
        publisher.drain(1e6)
        server.join(10)


def test_it_cannot_be_served_twice_at_a_time_nor_after_its_end(wait_until: Callable[..., None]) -> None:
    broker = FakeBroker([])
    with Publisher(config.Mqtt(), device="dev", dial=broker.dial, environ={}) as publisher:
        server = threading.Thread(target=publisher.serve)
        server.start()
        wait_until(lambda: publisher.state.connected, "the connection")

        with pytest.raises(RuntimeError, match="served already"):
            publisher.serve()

        publisher.drain(1e6)
        server.join(10)
        publisher.serve()  # has nothing to do any more

    assert len(broker.links) == 1


def test_events_keep_their_order_when_the_clock_is_set_back_and_threads_emit_at_once() -> None:
    broker = FakeBroker([])
    clock_ns = iter(range(2_000_000_000_000_000_000, 0, -60_000_000_000))
    with Publisher(
        config.Mqtt(),
        device="dev",
        dial=broker.dial,
        environ={},
        clock=FakeTime(0.01),
        utc_clock_ns=lambda: next(clock_ns),
    ) as publisher:
        events = Events(utc_clock_ns=lambda: next(clock_ns))
        events.subscribe(publisher.publish_event)

        def emit() -> None:
            for _ in range(50):
                events.emit("paused", "paused: tj is 91.2 C")

        emitters = [threading.Thread(target=emit) for _ in range(4)]
        for emitter in emitters:
            emitter.start()
        for emitter in emitters:
            emitter.join()
        server = threading.Thread(target=publisher.serve)
        server.start()
        publisher.drain(1e6)
        server.join(10)

    (link,) = broker.links
    ids = [json.loads(payload)["id"] for topic, payload, _ in link.sent if topic == "edge/dev/events"]
    assert len(ids) == 200
    assert ids == sorted(set(ids))
    assert dataclasses.astuple(publisher.counters) == (0, 0, 0, 0, 0)


def test_the_state_tells_of_results_only_and_beats_with_every_turn(
    wait_until: Callable[..., None], tmp_path: Path
) -> None:
    broker = FakeBroker(["stuck"])
    section = config.Mqtt(outbox=config.Outbox(path=str(tmp_path / "outbox.db")))
    with Publisher(
        section, device="dev", dial=broker.dial, environ={}, clock=FakeTime(0.01), uniform=lambda *_: 0.0
    ) as publisher:
        publisher.publish(TOPIC, b"1")
        publisher.publish_event(Happening("started", "ready", "info", 0))
        before = publisher.state
        began_s = publisher.beat_at_s
        server = threading.Thread(target=publisher.serve)
        server.start()
        wait_until(lambda: publisher.state.acknowledged == 1, "the result to arrive at the second attempt")
        after = publisher.state
        assert publisher.beat_at_s > began_s
        publisher.drain(1e6)
        server.join(10)

    location = str(tmp_path / "outbox.db")
    assert before == PublisherState("127.0.0.1:1883", False, "has not been reached yet", 1, 0, 0, 1, location, 0)
    assert after == PublisherState("127.0.0.1:1883", True, None, 1, 1, 0, 0, location, 0)


def test_the_inbox_is_bounded_and_drops_the_oldest() -> None:
    inbox = Inbox(3)
    for index in range(5):
        inbox.put(TOPIC if index else "edge/dev/events", bytes([index]))
    taken: list[bytes] = []
    inbox.empty_into(lambda _topic, payload: taken.append(payload))
    inbox.close()
    inbox.put("t", b"late")

    assert taken == [b"\2", b"\3", b"\4"]
    assert inbox.results_dropped == 1
    assert len(inbox) == 1


def test_backoff_doubles_up_to_a_cap_with_jitter() -> None:
    longest, shortest = backoff(lambda _low, high: high), backoff(lambda low, _high: low)

    assert [next(longest) for _ in range(9)] == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert [next(shortest) for _ in range(3)] == [0.25, 0.5, 1]


def test_only_a_connection_that_lasted_makes_the_next_attempt_come_soon() -> None:
    now_s = 0.0
    dialler: Dialler[str] = Dialler(lambda: "", lambda: None, clock=lambda: now_s, uniform=lambda _low, high: high)
    waits = []
    for lasted_s, was_connected in ((1, False), (1, True), (1, True), (60, True), (60, False)):
        dialler.started_at_s = now_s
        now_s += lasted_s
        dialler.back_off(was_connected=was_connected)
        waits.append(dialler.due_at_s - now_s)

    assert waits == [0.5, 1, 2, 0.5, 1]


def test_the_password_comes_from_the_file_the_credential_or_the_environment(tmp_path: Path) -> None:
    (tmp_path / "mqtt_password").write_text("credential\n")
    (tmp_path / "file").write_text("file \nsecond line\n")
    section = config.Mqtt(username="edge", password_file=str(tmp_path / "file"))
    environ = {"EDGE_MQTT_PASSWORD": "environment", "CREDENTIALS_DIRECTORY": str(tmp_path)}

    assert find_password(section, environ) == "file "
    assert find_password(config.Mqtt(username="edge"), environ) == "credential"
    assert find_password(config.Mqtt(username="edge"), {"EDGE_MQTT_PASSWORD": "environment"}) == "environment"
    assert find_password(config.Mqtt(username="edge"), {"CREDENTIALS_DIRECTORY": str(tmp_path / "empty")}) is None
    assert "file" not in repr(find_password(section, environ))


@pytest.mark.parametrize("content", [None, b"", b"\n", b"\xff\xfe"])
def test_a_password_file_that_gives_no_password_is_bad_configuration(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "password"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ConfigError, match=r"^mqtt\.password_file: .*password: "):
        Publisher(config.Mqtt(username="edge", password_file=str(path)), device="dev", environ={})


def test_the_outbox_stands_where_the_deployment_or_systemd_says() -> None:
    assert str(outbox_path(config.Outbox(path="/a/b.db"), {"STATE_DIRECTORY": "/var/lib/x"})) == "/a/b.db"
    assert str(outbox_path(config.Outbox(), {"STATE_DIRECTORY": "/var/lib/x:/var/lib/y"})) == "/var/lib/x/outbox.db"
    assert outbox_path(config.Outbox(), {}) is None

"""The publisher on a real mosquitto, heard by paho and by mosquitto_sub."""

from __future__ import annotations

import json
import logging
import shutil
import socket
import subprocess
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from edge import config
from edge.events import Events
from edge.publish import mqtt
from edge.publish.message import ModelIdentity
from edge.publish.mqtt import Ended
from edge.publish.publisher import Publisher
from edge.status import GovernorState, PublisherState, Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.broker

TOPIC = "edge/dev/s/results"


@contextmanager
def serving(section: config.Mqtt, **arguments: Any) -> Iterator[Publisher]:
    """A publisher at work; leaving the block drains it."""
    with Publisher(section, device="dev", environ={}, uniform=lambda low, _high: low / 5, **arguments) as publisher:
        server = threading.Thread(target=publisher.serve)
        server.start()
        try:
            yield publisher
        finally:
            publisher.drain(10)
            server.join(20)
        assert not server.is_alive()


def publish(publisher: Publisher, numbers: range) -> None:
    for number in numbers:
        publisher.publish(TOPIC, str(number).encode())


def numbers_heard(subscriber: Any) -> list[int]:
    return [int(payload) for payload in subscriber.payloads("/results")]


@pytest.mark.parametrize("protocol", ["5", "3.1.1"])
@pytest.mark.parametrize("qos", [1, 0])
def test_messages_arrive_once_and_in_order(broker: Any, ears: Any, wait_until: Any, protocol: Any, qos: Any) -> None:
    with ears(broker.port) as subscriber:
        with serving(config.Mqtt(port=broker.port, protocol=protocol, qos=qos)) as publisher:
            publish(publisher, range(300))
        wait_until(lambda: len(numbers_heard(subscriber)) >= 300, "300 messages")

        assert numbers_heard(subscriber) == list(range(300))
        assert publisher.counters.acknowledged == 300
        assert publisher.counters.pending == 0


def test_the_status_is_retained_and_follows_the_life_of_the_daemon(broker: Any, ears: Any, wait_until: Any) -> None:
    def retained() -> list[tuple[str, bool]]:
        with ears(broker.port, "edge/dev/status") as subscriber:
            wait_until(lambda: subscriber.heard, "the retained status")
            return [(json.loads(payload)["state"], retain) for _, payload, retain in subscriber.heard]

    with serving(config.Mqtt(port=broker.port)) as publisher:
        wait_until(lambda: publisher.trouble is None, "the connection")
        assert retained() == [("online", True)]

    assert retained() == [("offline", True)]


def test_a_broker_that_starts_late_gets_everything_in_order(
    make_broker: Any, ears: Any, wait_until: Any, tmp_path: Path
) -> None:
    late = make_broker()
    section = config.Mqtt(port=late.port, outbox=config.Outbox(path=str(tmp_path / "outbox.db")))
    gate = threading.Event()

    def dial(*args: Any, **kwargs: Any) -> Any:
        return mqtt.dial(*args, **kwargs) if gate.is_set() else Ended("unreachable", "is behind a closed gate")

    with serving(section, dial=dial) as publisher:
        publish(publisher, range(100))
        wait_until(lambda: publisher.trouble == "is behind a closed gate", "a first attempt")
        late.start()
        with ears(late.port) as subscriber:
            gate.set()
            wait_until(lambda: len(numbers_heard(subscriber)) >= 100, "100 messages")

            assert numbers_heard(subscriber) == list(range(100))


def test_a_broker_that_is_killed_and_restarted_costs_no_message(broker: Any, ears: Any, wait_until: Any) -> None:
    gate = threading.Event()
    gate.set()

    def dial(*args: Any, **kwargs: Any) -> Any:
        return mqtt.dial(*args, **kwargs) if gate.is_set() else Ended("unreachable", "is behind a closed gate")

    with serving(config.Mqtt(port=broker.port), dial=dial) as publisher:
        with ears(broker.port) as before:
            publish(publisher, range(500))
            wait_until(lambda: len(numbers_heard(before)) >= 50, "some messages")
            gate.clear()
            broker.kill()
            publish(publisher, range(500, 700))
            wait_until(lambda: publisher.trouble is not None, "the publisher to notice")
            wait_until(before.cut_off.is_set, "the subscriber to have read what had been sent to it")
        broker.start()
        with ears(broker.port) as after:
            gate.set()
            wait_until(lambda: publisher.counters.pending == 0, "everything to be acknowledged")
            wait_until(lambda: numbers_heard(after)[-1:] == [699], "the last message")

    assert numbers_heard(before) == sorted(set(numbers_heard(before)))
    assert numbers_heard(after) == sorted(set(numbers_heard(after)))
    assert sorted(set(numbers_heard(before)) | set(numbers_heard(after))) == list(range(700))
    assert len(set(numbers_heard(before)) & set(numbers_heard(after))) <= 20  # what was in flight can come twice


@pytest.fixture
def guarded(make_broker: Any, tmp_path: Path) -> Any:
    """A broker with the accounts edge (may publish under edge/dev/) and viewer (may not)."""
    passwords, rules = tmp_path / "passwords", tmp_path / "rules"
    passwords.touch(mode=0o600)
    for user in ("edge", "viewer"):
        subprocess.run(["mosquitto_passwd", "-b", passwords, user, "secret"], check=True, capture_output=True)
    rules.write_text("user edge\ntopic readwrite edge/dev/#\nuser viewer\ntopic read edge/#\n")
    made = make_broker("allow_anonymous false", f"password_file {passwords}", f"acl_file {rules}")
    made.start()
    return made


@pytest.mark.parametrize("protocol", ["5", "3.1.1"])
def test_a_wrong_password_is_told_from_an_absent_broker_once_and_mended_by_the_right_one(
    guarded: Any, wait_until: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, protocol: Any
) -> None:
    caplog.set_level(logging.DEBUG, "edge")
    secret = tmp_path / "secret"
    secret.write_text("wrong\n")
    section = config.Mqtt(port=guarded.port, protocol=protocol, username="edge", password_file=str(secret))
    attempts = 0

    def dial(*args: Any, **kwargs: Any) -> Any:
        nonlocal attempts
        attempts += 1
        return mqtt.dial(*args, **kwargs)

    with serving(section, dial=dial) as publisher:
        wait_until(lambda: attempts >= 4, "some retries")

        assert publisher.trouble is not None
        assert "refused the user name or password" in publisher.trouble
    lines = [record.getMessage() for record in caplog.records if record.levelno > logging.DEBUG]
    assert lines == [
        (
            f"MQTT broker 127.0.0.1:{guarded.port} refused the user name or password;"
            " check mqtt.username and the password (Not authorized)"
        )
    ]
    assert "wrong" not in caplog.text

    secret.write_text("secret\n")
    with serving(section) as publisher:
        wait_until(lambda: publisher.trouble is None, "the connection")


def test_an_absent_broker_is_told_from_a_wrong_password(
    free_port: Callable[[], int], wait_until: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(config.Mqtt(port=free_port())) as publisher:
        wait_until(lambda: publisher.trouble and "Connection refused" in publisher.trouble, "a refused connection")
        publisher.publish(TOPIC, b"kept")

    assert publisher.counters.pending == 1
    assert caplog.text.count("cannot be reached (Connection refused)") == 1


def test_an_access_rule_that_forbids_results_keeps_them_and_says_so(
    guarded: Any, wait_until: Any, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("secret")
    section = config.Mqtt(port=guarded.port, username="viewer", password_file=str(tmp_path / "secret"))
    with serving(section) as publisher:
        publish(publisher, range(5))
        wait_until(lambda: "takes no messages" in (publisher.trouble or ""), "the denial")

    assert publisher.counters.pending == 5
    assert publisher.counters.acknowledged == 0
    assert publisher.trouble == "takes no messages under edge/dev/ (Not authorized)"


def test_a_message_that_is_too_large_for_the_broker_does_not_block_the_others(
    make_broker: Any, ears: Any, wait_until: Any
) -> None:
    small = make_broker("max_packet_size 2000")
    small.start()
    with ears(small.port) as subscriber, serving(config.Mqtt(port=small.port)) as publisher:
        publisher.publish(TOPIC, b"1")
        publisher.publish(TOPIC, b"9" * 5000)
        publisher.publish(TOPIC, b"3")
        wait_until(lambda: numbers_heard(subscriber) == [1, 3], "the other two")

        assert publisher.counters.dropped == 1


def test_a_broker_that_stops_answering_does_not_hold_up_the_end(broker: Any, wait_until: Any) -> None:
    with Publisher(config.Mqtt(port=broker.port), device="dev", environ={}) as publisher:
        server = threading.Thread(target=publisher.serve)
        server.start()
        wait_until(lambda: publisher.trouble is None, "the connection")
        broker.freeze()
        publish(publisher, range(50))

        left = publisher.drain(0.3)
        server.join(20)

    assert not server.is_alive()
    assert left == publisher.counters.pending == 50


def test_something_else_on_the_port_is_reported_as_such(free_port: Callable[[], int], wait_until: Any) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        stranger = threading.Thread(target=answer)
        stranger.start()
        with serving(config.Mqtt(port=server.getsockname()[1])) as publisher:
            wait_until(lambda: publisher.trouble != "has not been reached yet", "a verdict")
            trouble = publisher.trouble
            stranger.join(10)
            server.close()

    assert trouble is not None
    assert "MQTT 5" in trouble


def test_the_one_liner_of_the_documentation_shows_results(broker: Any) -> None:
    """What docs/mqtt.md tells a reader to type, with another implementation of MQTT than ours."""
    listener = shutil.which("mosquitto_sub")
    if listener is None:
        pytest.skip("mosquitto_sub is not installed; apt-get install mosquitto-clients")
    command = [listener, "-p", str(broker.port), "-v", "-t", "edge/+/+/results", "-C", "1"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as process,
        serving(config.Mqtt(port=broker.port)) as publisher,
    ):
        while process.poll() is None:  # it says nothing when it has subscribed, so keep talking
            publisher.publish(TOPIC, b'{"hello":1}')
            threading.Event().wait(0.02)
        assert process.stdout is not None

        assert process.stdout.read() == b'edge/dev/s/results {"hello":1}\n'


def wait_for_turns(publisher: Publisher, wait_until: Any) -> None:
    """Wait until the serving thread has been seen to move a few times."""
    for _ in range(3):
        seen_s = publisher.beat_at_s
        wait_until(lambda seen_s=seen_s: publisher.beat_at_s > seen_s, "another turn")


def snapshot(uptime_s: float) -> Snapshot:
    return Snapshot(
        device="dev",
        version="0.1.0",
        deployment="",
        started_at_utc_us=0,
        uptime_s=uptime_s,
        state="running",
        streams=[],
        models=[],
        publisher=PublisherState("", True, None, 0, 0, 0, 0, "memory"),
        parts=[],
        governor=GovernorState("off", None, None, None, None),
        reading=None,
        event_counts={},
    )


@pytest.mark.parametrize("protocol", ["5", "3.1.1"])
def test_events_wait_for_the_broker_in_order_with_the_results_and_telemetry_does_not(
    make_broker: Any, ears: Any, wait_until: Any, protocol: Any
) -> None:
    late = make_broker()
    gate = threading.Event()

    def dial(*args: Any, **kwargs: Any) -> Any:
        return mqtt.dial(*args, **kwargs) if gate.is_set() else Ended("unreachable", "is behind a closed gate")

    with serving(config.Mqtt(port=late.port, protocol=protocol, qos=0), dial=dial) as publisher:
        events = Events()
        events.subscribe(publisher.publish_event)
        publish(publisher, range(2))
        events.emit("camera_lost", "stream s is lost", severity="warning", stream="s", age_s=5.5)
        publish(publisher, range(2, 4))
        publisher.publish_telemetry(snapshot(1.0), period_s=30)
        late.start()
        with ears(late.port) as subscriber:
            gate.set()
            wait_until(lambda: numbers_heard(subscriber) == [0, 1, 2, 3], "the results")
            publisher.publish_telemetry(snapshot(2.0), period_s=30)
            wait_until(lambda: subscriber.payloads("/telemetry"), "the telemetry")

            order = [topic for topic, *_ in subscriber.heard if not topic.endswith(("/status", "/telemetry"))]
            assert order == [TOPIC, TOPIC, "edge/dev/events", TOPIC, TOPIC]
            (event,) = subscriber.payloads("/events")
            assert json.loads(event)["fields"] == {"age_s": 5.5}
            assert [json.loads(payload)["uptime_s"] for payload in subscriber.payloads("/telemetry")] == [2.0]
    assert publisher.counters.acknowledged == 4


def test_the_retained_status_tells_of_a_condition_and_of_a_reload(broker: Any, ears: Any, wait_until: Any) -> None:
    with ears(broker.port, "edge/dev/status") as subscriber, serving(config.Mqtt(port=broker.port)) as publisher:
        wait_until(lambda: len(subscriber.statuses()) == 1, "the first status")
        publisher.set_condition("paused: tj is 91.2 C")
        wait_until(lambda: len(subscriber.statuses()) == 2, "the pause")
        publisher.set_condition(None)
        publisher.announce([ModelIdentity.of("yolox", precision="int8", sha256="a" * 64)], ["belt"])
        wait_until(lambda: subscriber.statuses()[-1].get("streams") == ["belt"], "the reload")

        told = [(status["health"], status.get("reason")) for status in subscriber.statuses()]
        assert told[:2] == [("ok", None), ("degraded", "paused: tj is 91.2 C")]
        assert told[-1] == ("ok", None)
        assert [model["name"] for model in subscriber.statuses()[-1]["models"]] == ["yolox"]


def test_a_broker_that_does_not_read_holds_up_neither_turns_nor_the_end(broker: Any, wait_until: Any) -> None:
    with Publisher(config.Mqtt(port=broker.port), device="dev", environ={}) as publisher:
        server = threading.Thread(target=publisher.serve)
        server.start()
        wait_until(lambda: publisher.state.connected, "the connection")
        broker.freeze()
        for _ in range(20):  # more than the buffers of both sockets hold
            publisher.publish(TOPIC, b"x" * 1_000_000)
        wait_for_turns(publisher, wait_until)

        left = publisher.drain(0.5)
        server.join(20)

    assert not server.is_alive()
    assert left == 20


@pytest.mark.parametrize("protocol", ["5", "3.1.1"])
def test_a_port_that_takes_connections_and_never_answers_does_not_hold_up_turns(
    free_port: Callable[[], int], wait_until: Any, protocol: Any
) -> None:
    with (
        socket.create_server(("127.0.0.1", free_port())) as silent,
        Publisher(config.Mqtt(port=silent.getsockname()[1], protocol=protocol), device="dev", environ={}) as publisher,
    ):
        server = threading.Thread(target=publisher.serve)
        server.start()
        publisher.publish(TOPIC, b"kept")
        wait_for_turns(publisher, wait_until)

        left = publisher.drain(0.5)
        server.join(20)

    assert not server.is_alive()
    assert left == 1


def test_a_name_server_that_does_not_answer_does_not_hold_up_turns(wait_until: Any) -> None:
    answer = threading.Event()

    def dial(*_: Any, **__: Any) -> Ended:
        answer.wait(30)
        return Ended("unreachable", "cannot be reached (Name or service not known)")

    try:
        with Publisher(config.Mqtt(), device="dev", environ={}, dial=dial) as publisher:
            server = threading.Thread(target=publisher.serve)
            server.start()
            publisher.publish(TOPIC, b"kept")
            wait_for_turns(publisher, wait_until)

            assert publisher.drain(0.5) == 1
            server.join(20)
            assert not server.is_alive()
    finally:
        answer.set()


def test_a_thread_that_failed_is_followed_by_another_over_a_new_connection(
    broker: Any, ears: Any, wait_until: Any
) -> None:
    calls = iter(["go on", "fail", *["go on"] * 1000])

    class FailingOnce(mqtt.PahoLink):
        """Fails when the second message is sent."""

        def send(self, topic: str, *args: Any, **kwargs: Any) -> int:
            if topic == TOPIC and next(calls) == "fail":
                raise ZeroDivisionError
            return super().send(topic, *args, **kwargs)

    def dial(*args: Any, **kwargs: Any) -> Any:
        link = mqtt.dial(*args, **kwargs)
        if isinstance(link, mqtt.PahoLink):
            link.__class__ = FailingOnce
        return link

    with (
        ears(broker.port) as subscriber,
        Publisher(config.Mqtt(port=broker.port), device="dev", environ={}, dial=dial) as publisher,
    ):
        publish(publisher, range(50))
        with pytest.raises(ZeroDivisionError):
            publisher.serve()
        server = threading.Thread(target=publisher.serve)
        server.start()
        wait_until(lambda: publisher.counters.acknowledged == 50, "everything to be acknowledged")
        publisher.drain(10)
        server.join(20)
        wait_until(lambda: numbers_heard(subscriber)[-1:] == [49], "the last message")

    assert list(dict.fromkeys(numbers_heard(subscriber))) == list(range(50))

"""The publisher on a real mosquitto, heard by paho and by mosquitto_sub."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from edge import config
from edge.publish import mqtt
from edge.publish.mqtt import Ended
from edge.publish.publisher import Publisher

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
    import socket

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

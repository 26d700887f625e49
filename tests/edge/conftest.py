"""A real broker, and ears on it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Self

_DEADLINE_S = 20.0
# Debian puts daemons where an ordinary user's PATH does not look.
_SEARCH_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])


def wait_until(condition: Callable[[], Any], what: str, *, deadline_s: float = _DEADLINE_S) -> None:
    """Poll until the condition holds; a test that waits in vain fails with what it waited for."""
    ends_s = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > ends_s:
            pytest.fail(f"waited {deadline_s:g} s in vain for: {what}")
        time.sleep(0.01)


def free_port() -> int:
    """A TCP port of the loopback that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Broker:
    """A mosquitto on a port of its own. It can be killed and started again."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.port = free_port()
        self.folder = folder
        self._config = folder / "mosquitto.conf"
        # Started as root it would drop to a user who cannot read a private temporary folder.
        lines = [f"listener {self.port} 127.0.0.1", "user root", "persistence false", *options]
        if not any(line.startswith("allow_anonymous") for line in options):
            lines.append("allow_anonymous true")
        self._config.write_text("\n".join(lines) + "\n")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it listens."""
        program = shutil.which("mosquitto", path=_SEARCH_PATH)
        assert program is not None, "the broker fixture asks first"
        with (self.folder / "mosquitto.log").open("ab") as log:
            self._process = subprocess.Popen([program, "-c", self._config], stdout=log, stderr=log)
        wait_until(self._listens, "mosquitto to listen")

    def kill(self) -> None:
        """End it as a power cut would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Let it keep its connections without answering any more."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True


class Ears:
    """A subscriber that remembers everything it hears."""

    def __init__(
        self, port: int, topic: str = "#", *, username: str | None = None, password: str | None = None
    ) -> None:
        self.heard: list[tuple[str, bytes, bool]] = []
        self._topic = topic
        self.cut_off = threading.Event()
        """Set when the connection has ended and everything that came over it was heard."""
        self._subscribed = threading.Event()
        self._client = paho.Client(CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
        if username is not None:
            self._client.username_pw_set(username, password)
        self._client.on_connect = lambda client, *_: client.subscribe(self._topic, qos=0)
        self._client.on_subscribe = lambda *_: self._subscribed.set()
        self._client.on_disconnect = lambda *_: self.cut_off.set()
        self._client.on_message = lambda _client, _userdata, message: self.heard.append(
            (message.topic, bytes(message.payload), message.retain)
        )
        self._client.connect("127.0.0.1", port)

    def __enter__(self) -> Self:
        self._client.loop_start()
        assert self._subscribed.wait(_DEADLINE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._client.disconnect()
        self._client.loop_stop()

    def payloads(self, suffix: str) -> list[bytes]:
        """What came under topics of that ending."""
        return [payload for topic, payload, _ in list(self.heard) if topic.endswith(suffix)]

    def results(self) -> list[dict[str, Any]]:
        """Every result heard."""
        return [json.loads(payload) for payload in self.payloads("/results")]

    def statuses(self) -> list[dict[str, Any]]:
        """Every status heard."""
        return [json.loads(payload) for payload in self.payloads("/status")]


@pytest.fixture(name="wait_until", scope="session")
def _wait_until() -> Callable[..., None]:
    return wait_until


@pytest.fixture(scope="session")
def ears() -> type[Ears]:
    """The class of subscribers, each a context manager."""
    return Ears


@pytest.fixture
def make_broker(tmp_path: Path) -> Iterator[Callable[..., Broker]]:
    """Make brokers that are not started yet; all end with the test."""
    if shutil.which("mosquitto", path=_SEARCH_PATH) is None:
        if os.environ.get("CI"):
            pytest.fail("mosquitto is not installed; apt-get install mosquitto")
        pytest.skip("mosquitto is not installed; apt-get install mosquitto")
    made: list[Broker] = []

    def make(*options: str) -> Broker:
        folder = tmp_path / f"broker{len(made)}"
        folder.mkdir()
        made.append(Broker(folder, *options))
        return made[-1]

    yield make
    for broker in made:
        broker.kill()


@pytest.fixture
def broker(make_broker: Callable[..., Broker]) -> Broker:
    """A broker that listens and lets everybody in."""
    made = make_broker()
    made.start()
    return made


@pytest.fixture(name="free_port", scope="session")
def _free_port() -> Callable[[], int]:
    return free_port

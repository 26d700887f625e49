"""A broker for the demo, and a subscriber: one that runs here, else mosquitto, else an embedded one."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from typing_extensions import Self

HOST = "127.0.0.1"
START_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Broker:
    """Where a broker listens."""

    port: int
    protocol: Literal["5", "3.1.1"]
    description: str
    host: str = HOST


@contextmanager
def open_broker(folder: Path) -> Iterator[Broker]:
    """The broker of this machine if one accepts us, else a mosquitto of our own, else amqtt in a thread."""
    if _accepts(1883, "5"):
        yield Broker(1883, "5", f"the one that runs on {HOST}:1883")
    elif path := shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin"):
        with _mosquitto(path, folder) as port:
            yield Broker(port, "5", f"{path} on {HOST}:{port}, for this demo")
    else:
        with _embedded() as port:
            yield Broker(port, "3.1.1", f"amqtt, embedded, on {HOST}:{port} (no mosquitto is installed)")


class Subscriber:
    """Receives JSON messages of a topic, and when each arrived."""

    def __init__(self, broker: Broker, *, topic: str, on_message: Callable[[dict[str, Any], float], None]) -> None:
        self.received: list[tuple[dict[str, Any], float]] = []
        self._broker = broker
        self._topic = topic
        self._show = on_message
        self._subscribed = threading.Event()
        protocol = paho.MQTTv5 if broker.protocol == "5" else paho.MQTTv311
        self._client = paho.Client(CallbackAPIVersion.VERSION2, protocol=protocol)
        self._client.on_connect = lambda client, *_: client.subscribe(topic, qos=1)
        self._client.on_subscribe = lambda *_: self._subscribed.set()
        self._client.on_message = self._on_message

    def __enter__(self) -> Self:
        """Connect, and wait until the broker has confirmed the subscription."""
        self._client.connect(self._broker.host, self._broker.port)
        self._client.loop_start()
        if not self._subscribed.wait(START_TIMEOUT_S):
            raise TimeoutError(f"the broker did not confirm the subscription to {self._topic}")
        return self

    def __exit__(self, *_: object) -> None:
        """Disconnect."""
        self._client.disconnect()
        self._client.loop_stop()

    def settle(self, quiet_s: float = 0.5) -> None:
        """Wait until nothing has arrived for a while: the last results may still be on their way."""
        seen = -1
        while seen != len(self.received):
            seen = len(self.received)
            time.sleep(quiet_s)

    def _on_message(self, _client: object, _data: object, message: paho.MQTTMessage) -> None:
        now = time.time()
        document = json.loads(message.payload)
        self.received.append((document, now))
        self._show(document, now)


def _accepts(port: int, protocol: Literal["5", "3.1.1"]) -> bool:
    """Whether a broker there lets an anonymous client in."""
    answered = threading.Event()
    accepted: list[bool] = []

    def on_connect(_client: object, _data: object, _flags: object, reason: Any, _properties: object) -> None:
        accepted.append(not reason.is_failure)
        answered.set()

    client = paho.Client(
        CallbackAPIVersion.VERSION2,
        protocol=paho.MQTTv5 if protocol == "5" else paho.MQTTv311,
        reconnect_on_failure=False,
    )
    client.on_connect = on_connect
    try:
        client.connect(HOST, port)
    except OSError:
        return False
    client.loop_start()
    answered.wait(3.0)
    client.disconnect()
    client.loop_stop()
    return bool(accepted and accepted[0])


@contextmanager
def _mosquitto(path: str, folder: Path) -> Iterator[int]:
    port = _free_port()
    folder.mkdir(exist_ok=True)
    configuration = folder / "mosquitto.conf"
    configuration.write_text(f"listener {port} {HOST}\nallow_anonymous true\n")
    log = (folder / "mosquitto.log").open("wb")
    process = subprocess.Popen([path, "-c", str(configuration)], stdout=log, stderr=log, start_new_session=True)
    try:
        _wait(port, lambda: process.poll() is None, f"mosquitto did not start; see {folder / 'mosquitto.log'}")
        yield port
    finally:
        process.terminate()
        process.wait(timeout=10)
        log.close()


@contextmanager
def _embedded() -> Iterator[int]:
    from amqtt.broker import Broker as EmbeddedBroker

    port = _free_port()
    loop = asyncio.new_event_loop()
    broker: list[EmbeddedBroker] = []

    async def start() -> None:
        settings = {
            "listeners": {"default": {"type": "tcp", "bind": f"{HOST}:{port}"}},
            "plugins": {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}},
        }
        broker.append(EmbeddedBroker(settings))
        await broker[0].start()

    thread = threading.Thread(target=loop.run_forever, name="broker", daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(start(), loop).result(START_TIMEOUT_S)
    try:
        _wait(port, thread.is_alive, "the embedded broker did not start")
        yield port
    finally:
        asyncio.run_coroutine_threadsafe(broker[0].shutdown(), loop).result(START_TIMEOUT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(START_TIMEOUT_S)


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as server:
        return int(server.getsockname()[1])


def _wait(port: int, alive: Callable[[], bool], complaint: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and alive():
        try:
            socket.create_connection((HOST, port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise SystemExit(f"error: {complaint}")

"""What stands around a daemon while it is measured: a real broker, a subscriber, a service manager's socket, /proc.

For ``benchmarks.daemon`` and ``benchmarks.soak``. Nothing here knows what is measured, or judges it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["Broker", "Cpu", "Heard", "Manager", "Memory", "Missing", "Subscriber", "free_port", "poll"]

DEADLINE_S = 30.0
# Debian puts daemons where an ordinary user's PATH does not look.
_SEARCH_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
_SESSION_EXPIRY_S = 86400


class Missing(RuntimeError):  # noqa: N818 - it is not there: that is the whole of it
    """Something that the rig needs is not installed, or did not come up."""


def poll(condition: Callable[[], object], what: str, *, deadline_s: float = DEADLINE_S) -> None:
    """Wait until the condition holds.

    Raises:
        TimeoutError: it did not in time; the text says what was waited for.
    """
    ends_s = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > ends_s:
            raise TimeoutError(f"waited {deadline_s:g} s in vain for {what}")
        time.sleep(0.01)


def free_port() -> int:
    """A TCP port of the loopback that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Broker:
    """A mosquitto of our own. It can be frozen, killed and started again; with ``durable`` it then knows what it knew.

    A durable one saves about every second. What it acknowledged after that, and had not passed on, a kill takes.
    """

    def __init__(self, folder: Path, *, durable: bool = False) -> None:
        program = shutil.which("mosquitto", path=_SEARCH_PATH)
        if program is None:
            raise Missing("mosquitto is not installed; apt-get install mosquitto")
        self._program = program
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        persistence = [
            "persistence true",
            f"persistence_location {folder}/",
            "autosave_interval 1",
            # Without bounds, so that a subscriber which is behind is never the reason for a loss.
            "max_queued_messages 0",
            "max_inflight_messages 0",
        ]
        lines = [
            f"listener {self.port} 127.0.0.1",
            "allow_anonymous true",
            # Started as root it would drop to a user who cannot write into a private folder.
            *(["user root"] if os.geteuid() == 0 else []),
            *(persistence if durable else ["persistence false"]),
        ]
        (folder / "mosquitto.conf").write_text("\n".join(lines) + "\n")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()

    def start(self) -> None:
        """Start it and wait until it listens."""
        with (self._folder / "mosquitto.log").open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own broker
                [self._program, "-c", self._folder / "mosquitto.conf"], stdout=log, stderr=log
            )
        poll(self._listens, "mosquitto to listen")

    def save(self) -> None:
        """Write what it knows to disk, now and complete: sessions and what waits for them."""
        database = self._folder / "mosquitto.db"
        before = database.stat().st_mtime_ns if database.exists() else 0
        self._signal(signal.SIGUSR1)
        poll(lambda: database.exists() and database.stat().st_mtime_ns > before, "mosquitto to save")

    def freeze(self) -> None:
        """Let it keep its connections without answering any more."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it as a power cut would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None:
            raise Missing("mosquitto does not run")
        self._process.send_signal(number)

    def _listens(self) -> bool:
        if self._process is not None and self._process.poll() is not None:
            raise Missing(f"mosquitto ended: {(self._folder / 'mosquitto.log').read_text()}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True
        return False


class Heard(NamedTuple):
    """One result as it arrived."""

    id: str
    stream: str
    frame_id: int
    captured_at: str
    """RFC 3339, as in the message."""
    arrived_s: float
    """time.monotonic(), which every process of a machine shares."""
    arrived_utc_us: int


class _Message(msgspec.Struct):
    """The part of a result or an event that the rig looks at."""

    id: str = ""
    stream: str | None = None
    frame_id: int = 0
    captured_at: str = ""
    kind: str = ""


class Subscriber:
    """Hears everything under one device's topics, by QoS 1 and in a session that outlives its connections.

    Keeps a result in about 300 bytes; an hour at 60 a second is 65 MB.
    """

    def __init__(self, port: int, topic: str) -> None:
        """Prepare; the block connects and ends it.

        Args:
            port: of the broker, on this machine.
            topic: filter of what to hear.
        """
        self.results: list[Heard] = []
        """In the order of arrival, repetitions included. Written by the client's thread alone."""
        self.events: list[tuple[str, float]] = []
        """Kind and moment of arrival of each event message."""
        self.sessions_lost = 0
        """Connections that the broker began with an empty session: after the first, it had forgotten us."""
        self.other: Counter[str] = Counter()
        """Other messages by the last level of their topic."""
        self.unreadable: list[str] = []
        self._topic = topic
        self._connects = 0
        self._subscribed = threading.Event()
        self._decode = msgspec.json.Decoder(_Message).decode
        self._client = paho.Client(
            CallbackAPIVersion.VERSION2, client_id=f"rig-{os.getpid()}", protocol=paho.MQTTv5, reconnect_on_failure=True
        )
        self._client.reconnect_delay_set(min_delay=1, max_delay=1)
        self._client.on_connect = self._on_connect
        self._client.on_subscribe = lambda *_: self._subscribed.set()
        self._client.on_message = self._on_message
        expiry = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        expiry.SessionExpiryInterval = _SESSION_EXPIRY_S
        self._client.connect_async("127.0.0.1", port, keepalive=10, clean_start=False, properties=expiry)

    def __enter__(self) -> Self:
        self._client.loop_start()
        if not self._subscribed.wait(DEADLINE_S):
            self._client.loop_stop()
            raise Missing("the broker took no subscription")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._client.disconnect()
        self._client.loop_stop()

    def first_after(self, moment_s: float) -> dict[str, float]:
        """The first arrival after a moment, by stream, of those that had one."""
        first: dict[str, float] = {}
        for heard in reversed(self.results):
            if heard.arrived_s <= moment_s:
                break
            first[heard.stream] = heard.arrived_s
        return first

    def _on_connect(self, client: paho.Client, _data: object, flags: paho.ConnectFlags, *_: object) -> None:
        self._connects += 1
        self.sessions_lost += self._connects > 1 and not flags.session_present
        client.subscribe(self._topic, qos=1)

    def _on_message(self, _client: paho.Client, _data: object, message: paho.MQTTMessage) -> None:
        arrived_s, arrived_utc_us = time.monotonic(), time.time_ns() // 1000
        kind = message.topic.rsplit("/", 1)[-1]
        if kind not in ("results", "events"):
            self.other[kind] += 1
            return
        try:
            found = self._decode(message.payload)
        except msgspec.DecodeError as error:
            self.unreadable.append(f"{message.topic}: {error}")
            return
        if kind == "events":
            self.events.append((found.kind, arrived_s))
            return
        self.results.append(
            Heard(found.id, found.stream or "", found.frame_id, found.captured_at, arrived_s, arrived_utc_us)
        )


class Manager:
    """The socket of a service manager, as systemd gives it to a unit of ``Type=notify``."""

    def __init__(self, folder: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.address = str(folder / "notify")
        """For NOTIFY_SOCKET."""
        self._socket.bind(self.address)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._socket.close()

    def ready_s(self, *, deadline_s: float = 120.0) -> float:
        """The moment, by time.monotonic(), at which READY=1 arrived.

        Raises:
            Missing: it did not in time.
        """
        self._socket.settimeout(deadline_s)
        try:
            while True:
                if "READY=1" in self._socket.recv(4096).decode().splitlines():
                    return time.monotonic()
        except TimeoutError:
            raise Missing(f"no READY=1 within {deadline_s:g} s") from None


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident memory of a process in megabytes (1e6 bytes), as /proc/PID/status tells it."""

    rss_mb: float
    anonymous_mb: float
    """Of its own: heap, stacks, what was written to."""
    file_mb: float
    """Of files, libraries above all, which other processes may share."""

    @classmethod
    def of(cls, pid: int | str) -> Memory | None:
        """Of a process, or None if it has ended."""
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            return None
        kib = {key: int(value.split()[0]) for key, value in (line.split(":", 1) for line in lines) if key[:3] == "Rss"}
        rss = next((int(line.split()[1]) for line in lines if line.startswith("VmRSS:")), None)
        if rss is None:
            return None  # a zombie has none
        return cls(rss * 1.024e-3, kib["RssAnon"] * 1.024e-3, kib["RssFile"] * 1.024e-3)


class Cpu:
    """CPU time of a process since this was made, in nanoseconds as the scheduler counts them.

    ``/proc/PID/stat`` counts in hundredths of a second: too coarse for a few milliseconds of work.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before = self._by_thread()

    def spent_s(self) -> float:
        """Seconds by all threads that live still."""
        return sum(ns - self._before.get(tid, 0) for tid, ns in self._by_thread().items()) / 1e9

    def _by_thread(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for task in Path(f"/proc/{self._pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found[task.name] = int((task / "schedstat").read_text().split()[0])
        return found

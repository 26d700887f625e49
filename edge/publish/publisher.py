"""Results to the broker, each until it is acknowledged, whatever the broker does. Owns the policy; ``mqtt`` the wire.

One thread calls ``serve`` and owns everything behind it: the outbox, the connection and their bookkeeping. Other
threads only put messages into a bounded inbox, so that no broker, disk or name server can hold up inference.
"""

from __future__ import annotations

import logging
import os
import random
import select
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from edge import __version__
from edge.backoff import backoff
from edge.publish import mqtt
from edge.publish.dialler import Dialler
from edge.publish.inbox import Inbox
from edge.publish.message import encode_status, status_topic
from edge.publish.outbox import Entry, Outbox

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Self

    from edge import config
    from edge.publish.message import ModelIdentity

__all__ = ["Counters", "Link", "Publisher", "outbox_path"]

logger = logging.getLogger(__name__)

# paho's own limit is 20 as well, and mosquitto's default Receive Maximum.
_WINDOW = 20
_INBOX_MESSAGES = 2000
_FLUSH_PERIOD_S = 0.25
_FLUSH_PERIOD_IN_TROUBLE_S = 10.0
_ANSWER_TIMEOUT_S = 10.0
_GOODBYE_S = 1.0
# Fixed header, packet number and properties of a PUBLISH, generously.
_PACKET_OVERHEAD_BYTES = 64
# PUBACK codes that no repetition changes: invalid topic, packet too large, payload format invalid.
_HOPELESS = frozenset({144, 149, 153})


class Link(Protocol):
    """A connection, as ``mqtt.dial`` gives it."""

    def send(self, topic: str, payload: bytes, *, retain: bool = False) -> int:
        """Hand over a message and return the number that its acknowledgement will carry."""

    def poll(self, timeout_s: float, wake: socket.socket) -> list[mqtt.Event]:
        """Wait for the network, for ``wake``, or for the time to pass; then say what happened."""

    def goodbye(self) -> None:
        """Leave in good order, so that the will is not published."""

    def close(self) -> None:
        """Free the connection."""


@dataclass(frozen=True, slots=True)
class Counters:
    """What became of the messages: a snapshot, exact once ``serve`` has ended."""

    published: int
    """Handed to ``publish`` by this process."""
    acknowledged: int
    """Delivered by this process, those that an earlier one left included."""
    dropped: int
    """Lost to a bound, or refused by the broker for good."""
    pending: int
    """Waiting now."""


def outbox_path(section: config.Outbox, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Where results wait: as configured, else in systemd's state directory, else nowhere but in memory."""
    if section.path is not None:
        return Path(section.path)
    # systemd separates several directories with colons.
    state = environ.get("STATE_DIRECTORY", "").split(":")[0]
    return Path(state) / "outbox.db" if state else None


class Publisher:
    """Publishes results and the device's status."""

    def __init__(
        self,
        section: config.Mqtt,
        *,
        device: str,
        streams: Sequence[str] = (),
        dial: Callable[..., Link | mqtt.Ended] = mqtt.dial,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        """Prepare; ``serve`` does the work, and ends before the block that this was opened in.

        Raises:
            ConfigError: the file that should hold the password cannot be read.
        """
        self.broker = f"{section.host}:{section.port}"
        self._section = section
        self._device = device
        self._streams = tuple(streams)
        self._models: tuple[ModelIdentity, ...] = ()
        self._dial = dial
        self._password = mqtt.find_password(section, environ) if section.username is not None else None
        self._outbox_path = outbox_path(section.outbox, environ)
        self._clock, self._uniform = clock, uniform

        # What other threads may touch.
        self._inbox = Inbox(_INBOX_MESSAGES)
        self._drain_until_s: float | None = None
        self._served = threading.Event()

        # Of the serving thread; others read the numbers only.
        self._outbox = Outbox(None, max_bytes=0)
        self._dialler = Dialler(self._call, self._inbox.ring, clock=clock, uniform=uniform)
        self._last_chance_taken = False
        self._link: Link | None = None
        self._accepted = False
        self._in_flight: dict[int, Entry | None] = {}  # by number; None is a status message
        self._window = _WINDOW
        self._max_packet_bytes: int | None = None
        self._sent_seq = 0
        self._hold_delays = backoff(uniform)
        self._hold_until_s: float | None = None
        self._flush_at_s = 0.0
        self._acknowledged = 0
        self._refused = 0
        self._trouble: str | None = "has not been reached yet"
        self._reported: tuple[str, str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close what ``serve`` was woken by; the counters stay."""
        self._inbox.close()

    def publish(self, topic: str, payload: bytes) -> None:
        """Take a message. Never blocks: if the serving thread falls behind, the oldest goes and is counted."""
        self._inbox.put(topic, payload)

    def drain(self, deadline_s: float) -> int:
        """Deliver what waits, say goodbye and end ``serve``; what is still left then stays in the outbox.

        With a broker that cannot be reached this takes one more attempt, not the whole time.

        Returns:
            How many messages are left.
        """
        self._drain_until_s = self._clock() + deadline_s
        self._inbox.ring()
        self._served.wait(deadline_s + 2 * _GOODBYE_S)
        return self.counters.pending

    @property
    def counters(self) -> Counters:
        """What became of the messages so far."""
        inbox, outbox = self._inbox, self._outbox
        dropped = inbox.dropped + outbox.dropped + self._refused
        return Counters(inbox.put_count, self._acknowledged, dropped, len(inbox) + len(outbox))

    @property
    def trouble(self) -> str | None:
        """Why nothing can be delivered now, as the end of a sentence about the broker; None if all is well."""
        return self._trouble

    @property
    def waits_in(self) -> str:
        """Where undelivered messages wait: a file's path, or memory."""
        return self._outbox.location

    def serve(self, models: Sequence[ModelIdentity] = ()) -> None:
        """Publish until ``drain``. The calling thread owns the outbox and the connection meanwhile.

        Args:
            models: what the status says is loaded.
        """
        self._models = tuple(models)
        with ExitStack() as stack:
            stack.callback(self._served.set)
            max_bytes = int(self._section.outbox.max_mb * 1e6)
            self._outbox = stack.enter_context(Outbox(self._outbox_path, max_bytes=max_bytes))
            stack.callback(self._hang_up)
            if len(self._outbox):
                logger.info("outbox %s: %d results of an earlier run wait", self._outbox_path, len(self._outbox))
            while not self._is_done():
                self._step()
            self._say_goodbye()

    def _step(self) -> None:
        """One turn: take in, connect if it is time, send, wait for something to happen, and note it."""
        now_s = self._clock()
        self._inbox.empty_into(self._outbox.append)
        self._connect(now_s)
        self._send(now_s)
        if now_s >= self._flush_at_s:
            self._outbox.flush()
            self._flush_at_s = now_s + (_FLUSH_PERIOD_IN_TROUBLE_S if self._outbox.troubled else _FLUSH_PERIOD_S)
        for event in self._wait(self._pause_s(now_s)):
            self._note(event)

    def _connect(self, now_s: float) -> None:
        answer = self._dialler.answer()
        if isinstance(answer, mqtt.Ended):
            self._note(answer)
        elif answer is not None:
            self._link = answer
        if self._link is not None:
            if not self._accepted and now_s - self._dialler.started_at_s > _ANSWER_TIMEOUT_S:
                protocol = self._section.protocol
                self._note(mqtt.Ended("unreachable", f"does not answer; does it speak MQTT {protocol}?"))
            return
        if self._dialler.busy:
            return
        draining = self._drain_until_s is not None
        if now_s >= self._dialler.due_at_s or (draining and not self._last_chance_taken):
            self._last_chance_taken = draining
            self._dialler.start()

    def _call(self) -> Link | mqtt.Ended:
        """Open a connection; runs in the dialler's thread."""
        will = encode_status("offline", device=self._device, reason="connection lost")
        link = self._dial(
            self._section,
            client_id=f"jetson-edge-{self._device}",
            password=self._password,
            will=(status_topic(self._section.topic, self._device), will),
        )
        if self._served.is_set() and not isinstance(link, mqtt.Ended):
            link.close()
        return link

    def _send(self, now_s: float) -> None:
        if self._link is None or not self._accepted:
            return
        if self._hold_until_s is not None:
            if self._in_flight or now_s < self._hold_until_s:
                return
            self._hold_until_s = None
            self._sent_seq = 0
        room = self._window - len(self._in_flight)
        if room <= 0 or self._sent_seq >= self._outbox.last_seq:
            return
        for entry in self._outbox.oldest(room, after=self._sent_seq):
            self._sent_seq = entry.seq
            packet_bytes = len(entry.topic) + len(entry.payload) + _PACKET_OVERHEAD_BYTES
            if self._max_packet_bytes is not None and packet_bytes > self._max_packet_bytes:
                # Sent nevertheless, it would end this connection and each one after it.
                self._refuse(entry, f"takes packets of up to {self._max_packet_bytes} bytes")
            else:
                self._in_flight[self._link.send(entry.topic, entry.payload)] = entry

    def _wait(self, timeout_s: float) -> list[mqtt.Event]:
        if self._link is not None:
            return self._link.poll(timeout_s, self._inbox.bell)
        select.select([self._inbox.bell], [], [], timeout_s)
        return []

    def _pause_s(self, now_s: float) -> float:
        """How long nothing is due."""
        due = [now_s + 1.0, self._flush_at_s]
        if self._link is None and not self._dialler.busy:
            due.append(self._dialler.due_at_s)
        if self._hold_until_s is not None and not self._in_flight:
            due.append(self._hold_until_s)
        if self._drain_until_s is not None:
            due.append(min(self._drain_until_s, now_s + 0.05))
        return max(0.0, min(due) - now_s)

    def _note(self, event: mqtt.Event) -> None:
        if isinstance(event, mqtt.Acknowledged):
            self._note_answer(event)
        elif isinstance(event, mqtt.Accepted):
            self._accepted = True
            self._window = min(_WINDOW, event.window or _WINDOW)
            self._max_packet_bytes = event.max_packet_bytes
            self._announce("online")
            self._trouble = None
            self._report("connected", f"is connected, {len(self._outbox)} results wait", logging.INFO)
        else:
            self._dialler.back_off(was_connected=self._accepted)
            self._hang_up()
            self._trouble = event.text
            self._report(event.cause, event.text, logging.ERROR if event.cause == "refused" else logging.WARNING)

    def _note_answer(self, answer: mqtt.Acknowledged) -> None:
        entry = self._in_flight.pop(answer.mid, None)
        if answer.code >= 128 and (entry is None or answer.code not in _HOPELESS):
            # An access rule or a quota: somebody can mend it, so what was refused is kept, and sent again in order.
            if self._hold_until_s is None:
                self._hold_until_s = self._clock() + next(self._hold_delays)
            self._trouble = f"takes no messages under {self._section.topic}/{self._device}/ ({answer.reason})"
            self._report("denied", self._trouble, logging.ERROR)
        elif entry is not None and answer.code >= 128:
            self._refuse(entry, f"refuses it ({answer.reason})")
        elif entry is not None:
            self._outbox.ack(entry)
            self._acknowledged += 1
            if self._hold_until_s is None and self._trouble is not None:
                self._trouble = None
                self._hold_delays = backoff(self._uniform)
                self._report("connected", "takes results again", logging.INFO)

    def _refuse(self, entry: Entry, why: str) -> None:
        self._outbox.ack(entry)
        self._refused += 1
        self._report("dropped", f"{why}: dropped a result of {len(entry.payload)} bytes", logging.WARNING)

    def _announce(self, state: str) -> None:
        assert self._link is not None, "only a connection can announce"
        now_us = time.time_ns() // 1000
        if state == "online":
            payload = encode_status(
                "online",
                device=self._device,
                at_utc_us=now_us,
                version=__version__,
                streams=self._streams,
                models=self._models,
            )
        else:
            payload = encode_status("offline", device=self._device, reason="stopped", at_utc_us=now_us)
        topic = status_topic(self._section.topic, self._device)
        self._in_flight[self._link.send(topic, payload, retain=True)] = None

    def _is_done(self) -> bool:
        if self._drain_until_s is None:
            return False
        if self._clock() >= self._drain_until_s:
            return True
        if self._accepted:
            nothing_left = not len(self._inbox) and not len(self._outbox) and not self._in_flight
            return nothing_left or self._hold_until_s is not None
        return self._last_chance_taken and self._link is None and not self._dialler.busy

    def _say_goodbye(self) -> None:
        self._inbox.empty_into(self._outbox.append)
        if self._link is None or not self._accepted:
            return
        self._announce("offline")
        until_s = self._clock() + _GOODBYE_S
        while self._accepted and None in self._in_flight.values() and self._clock() < until_s:
            for event in self._wait(0.05):
                self._note(event)
        if self._link is not None:
            self._link.goodbye()

    def _hang_up(self) -> None:
        """Forget the connection. What it had not acknowledged is sent again, in order, over the next one."""
        if self._link is not None:
            self._link.close()
        self._link = None
        self._accepted = False
        self._in_flight.clear()
        self._sent_seq = 0
        self._hold_until_s = None

    def _report(self, state: str, text: str, level: int) -> None:
        """Log a change of state; what stays the same at every attempt is said once."""
        if (state, text) == self._reported:
            level = logging.DEBUG
        self._reported = (state, text)
        logger.log(level, "MQTT broker %s %s", self.broker, text)

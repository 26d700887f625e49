"""What the publishing thread does: each message to the broker until it is acknowledged, whatever the broker does.

Owns the outbox, the connection and their bookkeeping; ``mqtt`` is the wire. One thread at a time calls it, one turn
after the other. A turn waits a second at most for the network, and an exception in one loses nothing: ``hang_up`` and
``flush`` leave everything as a lost connection does, for the next one to go on.
"""

from __future__ import annotations

import logging
import random
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol

from edge.backoff import backoff
from edge.publish import mqtt
from edge.publish.dialler import Dialler
from edge.publish.losses import Losses
from edge.publish.message import encode_status, is_result, status_topic, telemetry_topic
from edge.publish.outbox import Entry, Outbox

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from pathlib import Path

    from edge import config
    from edge.events import Events
    from edge.publish.inbox import Inbox
    from edge.publish.presence import Presence

__all__ = ["Courier", "Dial", "Link"]

logger = logging.getLogger(__name__)

# paho's own limit is 20 as well, and mosquitto's default Receive Maximum.
_WINDOW = 20
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

    def send(self, topic: str, payload: bytes, *, qos: int, retain: bool = False, expiry_s: int | None = None) -> int:
        """Hand over a message, without blocking, and return the number that its acknowledgement will carry."""

    def poll(self, timeout_s: float, wake: socket.socket) -> list[mqtt.Event]:
        """Wait for the network, for ``wake``, or for the time to pass; then say what happened."""

    def goodbye(self) -> None:
        """Leave in good order, so that the will is not published."""

    def close(self) -> None:
        """Free the connection."""


class Dial(Protocol):
    """Opens connections, as ``mqtt.dial`` does."""

    def __call__(
        self, section: config.Mqtt, /, *, client_id: str, password: mqtt.Password | None, will: tuple[str, bytes]
    ) -> Link | mqtt.Ended:
        """Open one; blocks."""


class Courier:
    """The publishing thread's state; other threads read ``accepted``, the numbers and the texts only."""

    def __init__(
        self,
        section: config.Mqtt,
        *,
        device: str,
        password: mqtt.Password | None,
        outbox_path: Path | None,
        inbox: Inbox,
        presence: Presence,
        events: Events | None = None,
        dial: Dial = mqtt.dial,
        clock: Callable[[], float] = time.monotonic,
        utc_clock_ns: Callable[[], int] = time.time_ns,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        """Prepare; ``open`` is called before the first turn.

        Args:
            section: the broker.
            device: what we are called there.
            password: sent with ``section.username``.
            outbox_path: where messages wait; None is in memory.
            inbox: where they come from.
            presence: what the status says.
            events: told about results that are dropped.
            dial: opens a connection.
            clock: monotonic seconds.
            utc_clock_ns: nanoseconds since the Unix epoch, for the status only; nothing waits for it.
            uniform: a random number between two.
        """
        self.accepted = False
        """Whether there is a connection that the broker has accepted."""
        self.acknowledged = 0
        """Results delivered."""
        self.trouble: str | None = "has not been reached yet"
        """Why nothing can be delivered now, as the end of a sentence about the broker."""
        self._broker = f"{section.host}:{section.port}"
        self._section = section
        self._device = device
        self._password = password
        self._status_topic = status_topic(section.topic, device)
        self._telemetry_topic = telemetry_topic(section.topic, device)
        self._outbox_path = outbox_path
        self._inbox = inbox
        self._presence = presence
        self._dial = dial
        self._clock, self._utc_clock_ns, self._uniform = clock, utc_clock_ns, uniform

        self._outbox: Outbox | None = None
        self._losses = Losses(events)
        self._overflown = 0  # results that the inbox had dropped when it was last emptied
        self._refused = 0
        self._flush_at_s = 0.0
        self._drain_until_s: float | None = None
        self._deliver_until_s = 0.0
        self._left = False
        self._telemetry: tuple[bytes, int | None] | None = None

        # Of the connection.
        self._dialler: Dialler[Link | mqtt.Ended] = Dialler(self._call, inbox.ring, clock=clock, uniform=uniform)
        self._last_chance_taken = False
        self._link: Link | None = None
        self._in_flight: dict[int, Entry | None] = {}  # by number; None is a status message
        self._telemetry_number: int | None = None  # of the one that has not left for the network yet
        self._window = _WINDOW
        self._max_packet_bytes: int | None = None
        self._sent_seq = 0
        self._hold_delays = backoff(uniform)
        self._hold_until_s: float | None = None
        self._reported: tuple[str, str] | None = None

    @property
    def taken_up(self) -> int:
        """Results of an earlier run that were found in the outbox."""
        return 0 if self._outbox is None else self._outbox.taken_up

    @property
    def dropped(self) -> int:
        """Results lost to a bound or with the disk, or refused by the broker for good."""
        return self._inbox.results_dropped + self._refused + (0 if self._outbox is None else self._outbox.dropped)

    @property
    def waiting(self) -> int:
        """Results in inbox and outbox, counted one by one; for the publishing thread."""
        return self._inbox.results + (0 if self._outbox is None else self._outbox.results)

    @property
    def location(self) -> str:
        """Where messages wait: a file's path, or memory."""
        if self._outbox is not None:
            return self._outbox.location
        return "memory" if self._outbox_path is None else str(self._outbox_path)

    @property
    def done(self) -> bool:
        """Whether the drain has delivered what it can."""
        if self._drain_until_s is None:
            return False
        if self._clock() >= self._deliver_until_s:
            return True
        if self.accepted:
            nothing_left = not len(self._inbox) and not len(self._opened) and not self._in_flight
            return nothing_left or self._hold_until_s is not None
        return self._last_chance_taken and self._link is None and not self._dialler.busy

    def drain(self, until_s: float) -> None:
        """From any thread: deliver what waits and be ``done`` so early that ``say_goodbye`` ends in time."""
        left_s = max(0.0, until_s - self._clock())
        self._deliver_until_s = until_s - min(_GOODBYE_S, left_s / 4)
        self._drain_until_s = until_s

    def offer_telemetry(self, payload: bytes, *, expiry_s: int | None) -> None:
        """From any thread: send this once, if it can be sent before the next one comes."""
        self._telemetry = payload, expiry_s

    def open(self) -> None:
        """Open the outbox, unless it is open.

        Raises:
            ConfigError: its path names a file of another kind.
        """
        if self.trouble is None:
            self.trouble = "is being connected again"
        if self._outbox is None:
            self._outbox = Outbox(self._outbox_path, max_bytes=int(self._section.outbox.max_mb * 1e6))
            if self._outbox.taken_up:
                logger.info("outbox %s: %d results of an earlier run wait", self._outbox_path, self._outbox.taken_up)

    def turn(self) -> None:
        """Take in, connect if it is time, send, wait for something to happen, and note it."""
        now_s = self._clock()
        self._take_in()
        self._connect(now_s)
        self._send(now_s)
        self._losses.tell(self.dropped, now_s)
        self._write(now_s)
        for event in self._wait(self._pause_s(now_s)):
            self._note(event)

    def say_goodbye(self) -> None:
        """Say that the device has stopped, if the broker answers in time; else the broker says it was lost."""
        self._take_in()
        number: int | None = None
        while self.accepted and self._link is not None and self._clock() < (self._drain_until_s or 0.0):
            if number is None and len(self._in_flight) < self._window:
                payload = encode_status(
                    "offline", device=self._device, reason="stopped", at_utc_us=self._utc_clock_ns() // 1000
                )
                number = self._link.send(self._status_topic, payload, qos=self._section.qos, retain=True)
                self._in_flight[number] = None
            elif number is not None and number not in self._in_flight:
                # Only now: DISCONNECT has the broker forget the will, and nobody would say that we are gone.
                self._link.goodbye()
                return
            for event in self._wait(0.05):
                self._note(event)

    def hang_up(self) -> None:
        """Forget the connection. What it had not acknowledged is sent again, in order, over the next one."""
        link, self._link = self._link, None
        self.accepted = False
        self._in_flight.clear()
        self._telemetry_number = None
        self._telemetry = None
        self._sent_seq = 0
        self._hold_until_s = None
        self._presence.forget()
        if link is not None:
            link.close()

    def flush(self) -> None:
        """Bring the file up to date."""
        if self._outbox is not None:
            self._outbox.flush()

    def close(self) -> None:
        """Take in what has come since the last turn, write it and close the file; hang up."""
        self._left = True
        with ExitStack() as stack:
            stack.callback(self.hang_up)
            if self._outbox is not None:
                stack.callback(self._outbox.close)
                self._take_in()
            late = self._dialler.answer()
            if late is not None and not isinstance(late, mqtt.Ended):
                late.close()

    @property
    def _opened(self) -> Outbox:
        assert self._outbox is not None, "the outbox is opened before the first turn"
        return self._outbox

    def _take_in(self) -> None:
        overflown = self._inbox.results_dropped
        if overflown != self._overflown:
            self._overflown = overflown
            self._losses.cause = "they came faster than the publishing thread could take them in"
        self._inbox.empty_into(self._take)

    def _take(self, topic: str, payload: bytes) -> None:
        outbox = self._opened
        before = outbox.dropped
        outbox.append(topic, payload)
        if outbox.dropped != before:
            how = self.trouble or "takes them more slowly than they come"
            max_mb = self._section.outbox.max_mb
            self._losses.cause = f"the outbox holds {max_mb:g} MB, and MQTT broker {self._broker} {how}"
            if not is_result(topic):
                self._losses.excuse(outbox.dropped - before)

    def _connect(self, now_s: float) -> None:
        answer = self._dialler.answer()
        if isinstance(answer, mqtt.Ended):
            self._note(answer)
        elif answer is not None:
            self._link = answer
        if self._link is not None:
            if not self.accepted and now_s - self._dialler.started_at_s > _ANSWER_TIMEOUT_S:
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
            will=(self._status_topic, will),
        )
        if self._left and not isinstance(link, mqtt.Ended):
            link.close()
        return link

    def _send(self, now_s: float) -> None:
        if self._link is None or not self.accepted:
            return
        if self._telemetry is not None:
            self._send_telemetry(self._link)
        if self._hold_until_s is not None:
            if self._in_flight or now_s < self._hold_until_s:
                return
            self._hold_until_s = None
            self._sent_seq = 0
        # The status counts too: a broker ends the connection over one message more than it has room for.
        room = self._window - len(self._in_flight)
        due_at_s = self._presence.due_at_s
        if room > 0 and due_at_s is not None and now_s >= due_at_s:
            payload = self._presence.say(now_s, self._utc_clock_ns() // 1000)
            self._in_flight[self._link.send(self._status_topic, payload, qos=self._section.qos, retain=True)] = None
            room -= 1
        if room > 0 and self._sent_seq < self._opened.last_seq:
            self._send_waiting(self._link, room)

    def _send_waiting(self, link: Link, room: int) -> None:
        for entry in self._opened.oldest(room, after=self._sent_seq):
            self._sent_seq = entry.seq
            packet_bytes = len(entry.topic) + len(entry.payload) + _PACKET_OVERHEAD_BYTES
            if self._max_packet_bytes is not None and packet_bytes > self._max_packet_bytes:
                # Sent nevertheless, it would end this connection and each one after it.
                self._refuse(entry, f"takes packets of up to {self._max_packet_bytes} bytes")
            else:
                qos = self._section.qos if is_result(entry.topic) else 1
                self._in_flight[link.send(entry.topic, entry.payload, qos=qos)] = entry

    def _send_telemetry(self, link: Link) -> None:
        offer, self._telemetry = self._telemetry, None
        # While one has not left yet, the next would only lengthen a queue that nothing bounds.
        if offer is not None and self._telemetry_number is None:
            payload, expiry_s = offer
            self._telemetry_number = link.send(self._telemetry_topic, payload, qos=0, expiry_s=expiry_s)

    def _write(self, now_s: float) -> None:
        outbox = self._opened
        if outbox.unopened:
            if now_s >= self._flush_at_s and not self._in_flight:
                self._flush_at_s = now_s + _FLUSH_PERIOD_IN_TROUBLE_S
                if outbox.reopen():
                    self._sent_seq = 0
        elif not outbox.unwritten:
            # The period begins with the first message: most are acknowledged within it and never touch the flash.
            self._flush_at_s = now_s + _FLUSH_PERIOD_S
        elif now_s >= self._flush_at_s:
            outbox.flush()
            self._flush_at_s = now_s + (_FLUSH_PERIOD_IN_TROUBLE_S if outbox.troubled else _FLUSH_PERIOD_S)

    def _wait(self, timeout_s: float) -> list[mqtt.Event]:
        if self._link is not None:
            return self._link.poll(timeout_s, self._inbox.bell)
        self._inbox.wait(timeout_s)
        return []

    def _pause_s(self, now_s: float) -> float:
        """How long nothing is due."""
        due = [now_s + 1.0]
        if self._opened.unwritten:
            due.append(self._flush_at_s)
        if self._link is None and not self._dialler.busy:
            due.append(self._dialler.due_at_s)
        if self._hold_until_s is not None and not self._in_flight:
            due.append(self._hold_until_s)
        status_at_s = self._presence.due_at_s
        # What has to wait for room in the window comes with the acknowledgement that makes it.
        if self.accepted and self._hold_until_s is None and status_at_s is not None and status_at_s > now_s:
            due.append(status_at_s)
        if self._drain_until_s is not None:
            due.append(min(self._deliver_until_s, now_s + 0.05))
        return max(0.0, min(due) - now_s)

    def _note(self, event: mqtt.Event) -> None:
        if isinstance(event, mqtt.Acknowledged):
            self._note_answer(event)
        elif isinstance(event, mqtt.Accepted):
            self.accepted = True
            self._window = min(_WINDOW, event.window or _WINDOW)
            self._max_packet_bytes = event.max_packet_bytes
            self.trouble = None
            self._report("connected", f"is connected, {self._opened.results} results wait", logging.INFO)
        else:
            self._dialler.back_off(was_connected=self.accepted)
            self.hang_up()
            self.trouble = event.text
            self._report(event.cause, event.text, logging.ERROR if event.cause == "refused" else logging.WARNING)

    def _note_answer(self, answer: mqtt.Acknowledged) -> None:
        if answer.mid == self._telemetry_number:
            self._telemetry_number = None
            return
        if answer.mid not in self._in_flight:
            return
        entry = self._in_flight.pop(answer.mid)
        if answer.code >= 128 and (entry is None or answer.code not in _HOPELESS):
            # An access rule or a quota: somebody can mend it, so what was refused is kept, and sent again in order.
            if self._hold_until_s is None:
                self._hold_until_s = self._clock() + next(self._hold_delays)
            self.trouble = f"takes no messages under {self._section.topic}/{self._device}/ ({answer.reason})"
            self._report("denied", self.trouble, logging.ERROR)
        elif entry is not None and answer.code >= 128:
            self._refuse(entry, f"refuses it ({answer.reason})")
        elif entry is not None:
            # One that the bound has dropped meanwhile was counted then.
            if self._opened.ack(entry) and is_result(entry.topic):
                self.acknowledged += 1
            if self._hold_until_s is None and self.trouble is not None:
                self.trouble = None
                self._hold_delays = backoff(self._uniform)
                self._report("connected", "takes results again", logging.INFO)

    def _refuse(self, entry: Entry, why: str) -> None:
        if self._opened.ack(entry) and is_result(entry.topic):
            self._refused += 1
            self._losses.cause = f"MQTT broker {self._broker} {why}"
        self._report("dropped", f"{why}: dropped a message of {len(entry.payload)} bytes", logging.WARNING)

    def _report(self, state: str, text: str, level: int) -> None:
        """Log a change of state; what stays the same at every attempt is said once."""
        if (state, text) == self._reported:
            level = logging.DEBUG
        self._reported = (state, text)
        logger.log(level, "MQTT broker %s %s", self._broker, text)

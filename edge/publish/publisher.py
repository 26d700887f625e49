"""Results, events, telemetry and status to the broker: what the rest of the daemon sees of it.

One thread calls ``serve`` and does everything behind it (``edge.publish.courier``). Other threads only put messages
into a bounded inbox, so that no broker, disk or name server can hold up inference.
"""

from __future__ import annotations

import logging
import math
import os
import random
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edge.publish import mqtt
from edge.publish.courier import Courier, Link
from edge.publish.inbox import Inbox
from edge.publish.message import UlidSource, encode_event, events_topic
from edge.publish.presence import Presence
from edge.publish.telemetry import encode_telemetry
from edge.status import PublisherState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Self

    from edge import config
    from edge.events import Event, Events
    from edge.publish.courier import Dial
    from edge.publish.message import ModelIdentity
    from edge.status import Snapshot

__all__ = ["Counters", "Link", "Publisher", "outbox_path"]

logger = logging.getLogger(__name__)

_INBOX_MESSAGES = 2000
# A supervisor starts ``serve`` again within this, if it does so at all.
_RESTART_S = 1.0


@dataclass(frozen=True, slots=True)
class Counters:
    """What became of the results: published + taken_up = acknowledged + dropped + pending, whenever it is looked at."""

    published: int
    """Handed to ``publish`` by this process."""
    taken_up: int
    """Found in the outbox, from an earlier process."""
    acknowledged: int
    """Delivered by this process."""
    dropped: int
    """Lost to a bound or with the disk, or refused by the broker for good."""
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
    """Publishes results, events, telemetry and the device's status. Every method but ``serve`` is for any thread."""

    def __init__(
        self,
        section: config.Mqtt,
        *,
        device: str,
        streams: Sequence[str] = (),
        events: Events | None = None,
        dial: Dial = mqtt.dial,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
        utc_clock_ns: Callable[[], int] = time.time_ns,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        """Prepare; ``serve`` does the work, and ends before the block that this was opened in.

        Args:
            section: the broker.
            device: what we are called there.
            streams: what the status says is published.
            events: told when results are dropped. Whatever else is emitted there comes in by ``publish_event``.
            dial: opens a connection.
            environ: where the password may be, and systemd's state directory.
            clock: monotonic seconds.
            utc_clock_ns: nanoseconds since the Unix epoch, for ids and time stamps; nothing waits for it.
            uniform: a random number between two.

        Raises:
            ConfigError: the file that should hold the password cannot be read.
        """
        password = mqtt.find_password(section, environ) if section.username is not None else None
        self.broker = f"{section.host}:{section.port}"
        self.beat_at_s = clock()
        """When ``serve`` took its last turn, by ``clock``."""
        self._device = device
        self._events_topic = events_topic(section.topic, device)
        self._clock, self._utc_clock_ns = clock, utc_clock_ns
        self._inbox = Inbox(_INBOX_MESSAGES)
        self._presence = Presence(device, streams)
        self._courier = Courier(
            section,
            device=device,
            password=password,
            outbox_path=outbox_path(section.outbox, environ),
            inbox=self._inbox,
            presence=self._presence,
            events=events,
            dial=dial,
            clock=clock,
            utc_clock_ns=utc_clock_ns,
            uniform=uniform,
        )
        # So that the order of ids is the order of messages.
        self._event_lock = threading.Lock()
        self._new_event_id = UlidSource(utc_clock_ns)
        self._changed = threading.Condition()
        self._serving = self._ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Write what still waits and close the outbox; the numbers stay."""
        with ExitStack() as stack:
            stack.callback(self._inbox.close)
            with self._changed:
                self._ended = True
                if self._serving:
                    # It is stuck, or its owner has given it up: the outbox is still its own.
                    logger.warning("the publishing thread has not ended; what it has not written yet is lost")
                else:
                    self._courier.close()

    def publish(self, topic: str, payload: bytes) -> None:
        """Take a result. Never blocks: if the serving thread falls behind, the oldest goes and is counted."""
        self._inbox.put(topic, payload)

    def publish_event(self, event: Event) -> None:
        """Take an event; it waits among the results, and is kept like one. Never blocks."""
        with self._event_lock:
            payload = encode_event(event, message_id=self._new_event_id(), device=self._device)
            self._inbox.put(self._events_topic, payload)

    def publish_telemetry(self, snapshot: Snapshot, *, period_s: float | None = None) -> None:
        """Send how the device is, if the broker is there now; it is never kept.

        Args:
            snapshot: the daemon as it is now.
            period_s: when the next one comes. The broker forgets this one after twice that (MQTT 5).
        """
        if not self._courier.accepted:
            return
        payload = encode_telemetry(snapshot, at_utc_us=self._utc_clock_ns() // 1000)
        self._courier.offer_telemetry(payload, expiry_s=None if period_s is None else math.ceil(2 * period_s))
        self._inbox.ring()

    def set_condition(self, reason: str | None) -> None:
        """Have the status say why results do not flow as they should, or with None that all is well.

        Costs nothing while it stays the same; what changes is said at most once a second.
        """
        if self._presence.set_condition(reason):
            self._inbox.ring()

    def announce(self, models: Sequence[ModelIdentity], streams: Sequence[str]) -> None:
        """Have the status name what is loaded and published now."""
        if self._presence.announce(models, streams):
            self._inbox.ring()

    def drain(self, deadline_s: float) -> int:
        """Deliver what waits, say goodbye and end ``serve``; what is still left then stays in the outbox.

        With a broker that cannot be reached this takes one more attempt, not the whole time. Returns early as well if
        ``serve`` has failed and nobody calls it again.

        Args:
            deadline_s: how long it takes at most.

        Returns:
            How many results are left.
        """
        until_s = self._clock() + deadline_s
        self._courier.drain(until_s)
        self._inbox.ring()
        with self._changed:
            while self._serving or not self._ended:
                left_s = until_s - self._clock()
                if left_s <= 0:
                    break
                if not self._changed.wait(left_s if self._serving else min(left_s, _RESTART_S)) and not self._serving:
                    break
        return self.counters.pending

    @property
    def counters(self) -> Counters:
        """What became of the results so far."""
        courier = self._courier
        # Read backwards along the way that a result takes, so that none is seen to arrive that has not set out. What
        # is between inbox and outbox just now is pending as well, so that this is what is left, not what is counted.
        acknowledged, dropped = courier.acknowledged, courier.dropped
        taken_up, published = courier.taken_up, self._inbox.results_put
        pending = published + taken_up - acknowledged - dropped
        return Counters(published, taken_up, acknowledged, dropped, pending)

    @property
    def state(self) -> PublisherState:
        """The publisher as it is now."""
        counters = self.counters
        return PublisherState(
            broker=self.broker,
            connected=self._courier.accepted,
            trouble=self.trouble,
            published=counters.published,
            acknowledged=counters.acknowledged,
            dropped=counters.dropped,
            pending=counters.pending,
            location=self.waits_in,
            taken_up=counters.taken_up,
        )

    @property
    def trouble(self) -> str | None:
        """Why nothing can be delivered now, as the end of a sentence about the broker; None if all is well."""
        return self._courier.trouble

    @property
    def waits_in(self) -> str:
        """Where undelivered messages wait: a file's path, or memory."""
        return self._courier.location

    def serve(self, models: Sequence[ModelIdentity] = ()) -> None:
        """Publish until ``drain``. The calling thread owns the outbox and the connection meanwhile.

        After an exception it may be called again, from any thread: what was not acknowledged is sent again.

        Args:
            models: what the status says is loaded.

        Raises:
            ConfigError: the outbox's path names a file of another kind.
        """
        with self._changed:
            if self._ended:
                return
            if self._serving:
                raise RuntimeError("the publisher is being served already")
            self._serving = True
            self._changed.notify_all()
        self._presence.announce(models)
        with ExitStack() as stack:
            stack.callback(self._leave)
            # These in any case: what is lost with a thread is only its place in the window.
            stack.callback(self._courier.flush)
            stack.callback(self._courier.hang_up)
            self._courier.open()
            while not self._courier.done:
                self.beat_at_s = self._clock()
                self._courier.turn()
            self._courier.say_goodbye()
            self._ended = True

    def _leave(self) -> None:
        with self._changed:
            self._serving = False
            self._changed.notify_all()

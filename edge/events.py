"""What happened, once: a line in the log, a message over MQTT, a counter. Per event, never per frame.

Whoever sees something happen calls ``emit``; who wants to know subscribes. Nothing is decided here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque

# Not for type checkers only: edge/document.py reads events back by these annotations.
from collections.abc import Mapping  # noqa: TC003
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["KINDS", "Event", "Events", "Kind", "Severity"]

logger = logging.getLogger(__name__)

Severity: TypeAlias = Literal["info", "warning", "error"]
Kind: TypeAlias = Literal[
    # the process
    "started",
    "stopping",
    "part_failed",
    "engine_hung",
    "restart_wanted",
    # reload
    "reload_started",
    "reload_done",
    "reload_failed",
    # sources
    "camera_opened",
    "camera_lost",
    "stream_ended",
    # models
    "model_swapped",
    "frame_failed",
    # governor and monitor
    "rate_limited",
    "rate_restored",
    "lighter_model",
    "full_model",
    "paused",
    "resumed",
    "memory_low",
    "memory_recovered",
    "leak_suspected",
    "throttled",
    "throttling_ended",
    "over_current",
    "jtop_lost",
    "jtop_found",
    "sensor_lost",
    # publishing
    "results_dropped",
]
KINDS: tuple[str, ...] = get_args(Kind)
"""Every kind of event. Subscribers may rely on the names; more may come."""

_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_RECENT = 100


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened."""

    kind: Kind
    text: str
    """A sentence for people, without a full stop."""
    severity: Severity
    at_utc_us: int
    """Microseconds since the Unix epoch, UTC."""
    stream: str | None = None
    model: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    """What a machine would want to know: JSON values, units in the names."""


class Events:
    """Where events go through. Any thread may emit; listeners run on the emitter's thread and must not block.

    No lock is held while listeners run, so a listener, or who calls ``emit`` while holding a lock that a listener
    needs, cannot end in a deadlock. The price: ``recent`` is in the order of time, but two events that two threads emit
    at once may reach a listener in either order. Those of one thread come in its order.
    """

    def __init__(self, *, utc_clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._utc_clock_ns = utc_clock_ns
        self._lock = threading.Lock()
        self._listeners: tuple[Callable[[Event], None], ...] = ()
        self._failing: set[Callable[[Event], None]] = set()
        self._counts: Counter[tuple[Kind, Severity]] = Counter()
        self._recent: deque[Event] = deque(maxlen=_RECENT)

    def subscribe(self, listener: Callable[[Event], None]) -> None:
        """Have ``listener`` called for each event from now on.

        What it raises is logged, and keeps neither the emitter nor other listeners from going on.
        """
        with self._lock:
            self._listeners = (*self._listeners, listener)

    @property
    def counts(self) -> Counter[tuple[Kind, Severity]]:
        """How many events there were of each kind and severity; a copy."""
        with self._lock:
            return self._counts.copy()

    @property
    def recent(self) -> list[Event]:
        """The last hundred, oldest first."""
        with self._lock:
            return list(self._recent)

    def emit(
        self,
        kind: Kind,
        text: str,
        *,
        severity: Severity = "info",
        stream: str | None = None,
        model: str | None = None,
        **fields: Any,
    ) -> Event:
        """Say that something happened.

        Args:
            kind: of event.
            text: a sentence for people that names the stream or model itself.
            severity: ``warning`` where results suffer, ``error`` where somebody should come and look.
            stream: that it is about.
            model: that it is about.
            fields: JSON values for machines.
        """
        with self._lock:
            event = Event(kind, text, severity, self._utc_clock_ns() // 1000, stream, model, fields)
            self._counts[kind, severity] += 1
            self._recent.append(event)
        about = {key: value for key, value in (("stream", stream), ("model", model)) if value is not None}
        logger.log(_LEVELS[severity], "%s", text, extra={"fields": {**fields, "event": kind, **about}})
        for listener in self._listeners:
            self._tell(listener, event)
        return event

    def _tell(self, listener: Callable[[Event], None], event: Event) -> None:
        try:
            listener(event)
        except Exception:  # whoever emits is in the middle of its own work, and not to blame
            # One traceback a row of failures: what fails for every event would bury them all.
            level = logging.DEBUG if listener in self._failing else logging.ERROR
            self._failing.add(listener)
            logger.log(level, "%r cannot take the event %s", listener, event.kind, exc_info=True)
        else:
            self._failing.discard(listener)

"""Tells that results are being dropped: at once, and then at most once a minute however many they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edge.events import Events

__all__ = ["Losses"]

_PERIOD_S = 60.0
# Rare: a damaged file, whose loss is in the log.
_UNKNOWN = "the outbox has lost them, and the log says why"


class Losses:
    """Turns a rising count into a few events.

    Each event is a message that may itself displace a result from a full outbox. Those are in the count, but none of
    them is a reason to speak: otherwise the telling would go on for ever, and eat what it tells of.
    """

    def __init__(self, events: Events | None) -> None:
        """Tell through ``events``; None tells nobody."""
        self.cause = _UNKNOWN
        """Why the last one went, as a part of a sentence. Set by whoever drops."""
        self._events = events
        self._told = 0
        self._by_events = 0
        self._not_before_s = 0.0

    def excuse(self, count: int) -> None:
        """So many of those to come were displaced by events."""
        self._by_events += count

    def tell(self, total: int, now_s: float) -> None:
        """Emit ``results_dropped`` if it is time.

        Args:
            total: dropped since the start.
            now_s: monotonic seconds.
        """
        count = total - self._told
        if self._events is None or count <= self._by_events or now_s < self._not_before_s:
            return
        # Before emitting: the event comes back here as a message.
        self._told = total
        self._by_events = 0
        self._not_before_s = now_s + _PERIOD_S
        text = f"results are being dropped, {count} more and {total} in all: {self.cause}"
        self.cause = _UNKNOWN
        self._events.emit("results_dropped", text, severity="warning", dropped=count, dropped_total=total)

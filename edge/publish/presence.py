"""What the retained status says of a device that is there, and when it has to be said again. No socket.

It is set by the daemon's owner and said by the publishing thread.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from edge import __version__
from edge.publish.message import encode_status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge.publish.message import ModelIdentity

__all__ = ["Presence"]

# Every subscriber of the status gets each change, and the broker writes it to its disk: a condition that flickers
# is told this often.
_PERIOD_S = 1.0


@dataclass(frozen=True, slots=True)
class _Online:
    streams: tuple[str, ...]
    models: tuple[ModelIdentity, ...] = ()
    condition: str | None = None


class Presence:
    """The status ``online``."""

    def __init__(self, device: str, streams: Sequence[str]) -> None:
        """Start with nothing loaded and nothing said."""
        self._device = device
        self._lock = threading.Lock()
        self._wanted = _Online(tuple(streams))
        # Of the publishing thread.
        self._said: _Online | None = None
        self._not_before_s = 0.0

    def announce(self, models: Sequence[ModelIdentity], streams: Sequence[str] | None = None) -> bool:
        """Set what is loaded and, unless they stay the same, what streams there are; return whether that is new."""
        with self._lock:
            before = self._wanted
            names = before.streams if streams is None else tuple(streams)
            self._wanted = replace(before, models=tuple(models), streams=names)
            return self._wanted != before

    def set_condition(self, reason: str | None) -> bool:
        """Set why results do not flow as they should, None for all is well; return whether that is new."""
        if reason == self._wanted.condition:
            return False
        with self._lock:
            self._wanted = replace(self._wanted, condition=reason)
        return True

    @property
    def due_at_s(self) -> float | None:
        """From when on it has to be said; None while the broker knows it already."""
        return None if self._said == self._wanted else self._not_before_s

    def say(self, now_s: float, at_utc_us: int) -> bytes:
        """The message, which counts as said from now on."""
        online = self._wanted
        self._said = online
        self._not_before_s = now_s + _PERIOD_S
        return encode_status(
            "online",
            device=self._device,
            health="ok" if online.condition is None else "degraded",
            reason=online.condition,
            at_utc_us=at_utc_us,
            version=__version__,
            streams=online.streams,
            models=online.models,
        )

    def forget(self) -> None:
        """A new connection has to be told at once."""
        self._said = None
        self._not_before_s = 0.0

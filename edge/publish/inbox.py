"""From any thread to the one that publishes: a bounded inbox, and a bell that ends its wait for the network."""

from __future__ import annotations

import math
import select
import socket
import threading
from collections import deque
from typing import TYPE_CHECKING

from edge.publish.message import is_result

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Inbox"]


class Inbox:
    """Putting never blocks on anything slow: when the reader falls behind, the oldest message goes and is counted."""

    def __init__(self, limit: int) -> None:
        """Make an empty one for up to ``limit`` messages."""
        self.results_put = 0
        self.results_dropped = 0
        self._limit = limit
        self._lock = threading.Lock()
        self._messages: deque[tuple[str, bytes]] = deque()
        self._rung = False
        self._closed = False
        # The reader waits for the network, which only a socket can end.
        self.bell, self._hammer = socket.socketpair()
        self.bell.setblocking(False)
        self._hammer.setblocking(False)

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def results(self) -> int:
        """How many results are in it. Counts them."""
        with self._lock:
            return sum(is_result(topic) for topic, _ in self._messages)

    def put(self, topic: str, payload: bytes) -> None:
        """Add a message and ring. After ``close`` it stays here, unread."""
        with self._lock:
            self.results_put += is_result(topic)
            self._messages.append((topic, payload))
            if len(self._messages) > self._limit:
                gone, _ = self._messages.popleft()
                self.results_dropped += is_result(gone)
            self._ring()

    def ring(self) -> None:
        """Make ``bell`` readable until the reader empties the inbox."""
        with self._lock:
            self._ring()

    def wait(self, timeout_s: float) -> None:
        """Wait until the bell rings, or for the time to pass."""
        # Not select(), which knows the first 1024 files of a process only.
        poller = select.poll()
        poller.register(self.bell, select.POLLIN)
        poller.poll(math.ceil(timeout_s * 1000))

    def empty_into(self, take: Callable[[str, bytes], None]) -> None:
        """Silence the bell and pass every message on, oldest first. What ``take`` has not seen when it raises stays."""
        with self._lock:
            if self._rung:
                self._rung = False
                if not self._closed:
                    self.bell.recv(1)
            messages, self._messages = self._messages, deque()
        try:
            while messages:
                take(*messages.popleft())
        finally:
            if messages:
                with self._lock:
                    self._messages.extendleft(reversed(messages))

    def close(self) -> None:
        """Close the bell's sockets."""
        with self._lock:
            self._closed = True
            self.bell.close()
            self._hammer.close()

    def _ring(self) -> None:
        if not self._rung and not self._closed:
            self._rung = True
            self._hammer.send(b"\0")

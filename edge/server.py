"""The daemon's own HTTP pages, for Prometheus, probes and people: one thread, bounded in connections, bytes and time.

Only GET and HEAD, one request a connection. A selector rather than a thread for each client: whoever is slow, or opens
connections and says nothing, costs a slot for some seconds, and when slots run out the oldest connection gives way.
What the pages say is made elsewhere (edge/metrics.py, edge/document.py, edge/page.py).
"""

from __future__ import annotations

import errno
import logging
import math
import re
import selectors
import socket
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from edge.publish.message import json_value

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Iterator
    from types import TracebackType

    from typing_extensions import Self

    from edge import config
    from edge.status import Snapshot

__all__ = ["PATHS", "Reply", "StatusServer", "answer"]

logger = logging.getLogger(__name__)

PATHS = ("/", "/healthz", "/metrics", "/readyz", "/status")
"""Every page."""

_CONNECTIONS = 32
# That wait to be accepted: beyond it clients try again after a second or more.
_BACKLOG = 128
_REQUEST_BYTES = 8192
_REQUEST_S = 5.0
_REPLY_S = 10.0
# For a client that still sends after our answer: closing at once would have TCP take the answer back.
_LINGER_S = 1.0
_POLL_S = 0.5
_READ_BYTES = 65536
# The target has no spaces and no control characters; what follows the version is the line's end, or nothing.
_REQUEST_LINE = re.compile(rb"([A-Z]{1,20}) ([!-~]+) HTTP/1\.[0-9]\r?(?:\n|$)")
_END_OF_HEAD = re.compile(rb"\r?\n\r?\n")
_PHRASES = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
_JSON = "application/json"
_TEXT = "text/plain; charset=utf-8"
_HTML = "text/html; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Reply:
    """What is answered."""

    status: int
    content_type: str
    body: bytes

    def encode(self, *, head_only: bool = False) -> bytes:
        """The reply as it is sent."""
        lines = [
            f"HTTP/1.1 {self.status} {_PHRASES[self.status]}",
            f"Content-Type: {self.content_type}",
            f"Content-Length: {len(self.body)}",
            "Cache-Control: no-store",
            "Connection: close",
            "X-Content-Type-Options: nosniff",
            # Nothing of ours runs scripts or loads anything, so nothing that slipped in may either.
            "Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'",
        ]
        if self.status == 405:
            lines.append("Allow: GET, HEAD")
        head = "\r\n".join([*lines, "", ""]).encode("ascii")
        return head if head_only else head + self.body


def answer(method: str, target: str, snapshot: Callable[[], Snapshot], *, now_utc_us: int) -> Reply:
    """Answer a request.

    Args:
        method: of HTTP.
        target: path, and perhaps a query that is ignored.
        snapshot: asked once, and only for a page that shows it.
        now_utc_us: microseconds since the Unix epoch, for the page for people.
    """
    path = _path(target)
    if path not in PATHS:
        return Reply(404, _TEXT, f"there is nothing here; look at {', '.join(PATHS)}\n".encode())
    if method not in {"GET", "HEAD"}:
        return Reply(405, _TEXT, b"this can be read only: GET or HEAD\n")
    # Imported by the request that needs it: memory that a daemon without a Prometheus never takes.
    if path == "/metrics":
        from edge import metrics

        return Reply(200, metrics.CONTENT_TYPE, metrics.render(snapshot()))
    if path == "/status":
        from edge import document

        return Reply(200, _JSON, document.encode(snapshot()))
    if path == "/":
        from edge import page

        return Reply(200, _HTML, page.render(snapshot(), now_utc_us=now_utc_us).encode("utf-8", "replace"))
    now = snapshot()
    verdict, reasons = ("healthy", now.unhealthy) if path == "/healthz" else ("ready", now.not_ready)
    body = msgspec.json.encode(json_value({verdict: not reasons, "reasons": reasons}))
    return Reply(503 if reasons else 200, _JSON, body + b"\n")


def _path(target: str) -> str:
    """The path that a request is about; a proxy may have named the whole URL."""
    return re.sub(r"^https?://[^/?]*", "", target).partition("?")[0]


class StatusServer:
    """Answers on ``status.host`` and ``status.port`` of the deployment."""

    def __init__(
        self,
        section: config.Status,
        *,
        snapshot: Callable[[], Snapshot],
        clock: Callable[[], float] = time.monotonic,
        utc_clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Prepare; ``serve`` does the work.

        Args:
            section: where to listen.
            snapshot: the daemon as it is; called on the thread that serves.
            clock: monotonic seconds.
            utc_clock_ns: nanoseconds since the Unix epoch.
        """
        self._section = section
        self._snapshot = snapshot
        self._clock = clock
        self._utc_clock_ns = utc_clock_ns
        self._failing: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Nothing is left: sockets live and die in ``serve``."""

    def serve(self, stop: threading.Event) -> None:
        """Answer until ``stop`` is set; return within a second of it. May be called again after it raised.

        Raises:
            OSError: nobody can listen there, with the reason as its whole text.
        """
        if self._section.port is None:
            return
        connections: deque[_Connection] = deque()
        with ExitStack() as stack:
            selector = stack.enter_context(selectors.DefaultSelector())
            stack.callback(_close_all, connections)
            for listener in _listen(self._section.host, self._section.port):
                stack.enter_context(listener)
                selector.register(listener, selectors.EVENT_READ, data=listener)
            while not stop.is_set():
                for key, _ in selector.select(_POLL_S):
                    if isinstance(key.data, _Connection):
                        key.data.advance()
                    else:
                        for client in _accept(key.data):
                            connections.append(_Connection(client, selector, respond=self._respond, clock=self._clock))
                while len(connections) > _CONNECTIONS:
                    connections.popleft().close()
                for connection in [one for one in connections if one.ends_s <= self._clock()]:
                    connection.close()
                    connections.remove(connection)

    def _respond(self, head: bytes) -> bytes:
        """The whole reply to a request, given everything in front of its body."""
        match = _REQUEST_LINE.match(head)
        if match is None:
            return Reply(400, _TEXT, b"this is no request of HTTP/1.0 or 1.1\n").encode()
        method, target = match[1].decode("ascii"), match[2].decode("ascii")
        try:
            reply = answer(method, target, self._snapshot, now_utc_us=self._utc_clock_ns() // 1000)
        except Exception:  # one page that is broken must not take /healthz away from who watches the others
            level = logging.DEBUG if _path(target) in self._failing else logging.ERROR
            self._failing.add(_path(target))
            logger.log(level, "status page %s: cannot be made:", _path(target), exc_info=True)
            reply = Reply(500, _TEXT, b"this page cannot be made; the reason is in the daemon's log\n")
        else:
            self._failing.discard(_path(target))
        return reply.encode(head_only=method == "HEAD")


class _Connection:
    """One client: its request comes in, the reply goes out, and both sides close. Nothing here blocks."""

    def __init__(
        self,
        client: socket.socket,
        selector: selectors.BaseSelector,
        *,
        respond: Callable[[bytes], bytes],
        clock: Callable[[], float],
    ) -> None:
        self.ends_s = clock() + _REQUEST_S
        """When it has lasted long enough, whatever it is doing."""
        self._client = client
        self._selector = selector
        self._respond = respond
        self._clock = clock
        self._phase: Literal["request", "reply", "linger"] = "request"
        self._received = b""
        self._to_send = memoryview(b"")
        selector.register(client, selectors.EVENT_READ, data=self)

    def advance(self) -> None:
        """Do what can be done now."""
        try:
            if self._phase == "reply":
                self._send()
            else:
                self._receive()
        except BlockingIOError:
            pass  # the selector was too optimistic
        except OSError as error:
            logger.debug("status page: a client has gone: %s", error)
            self._end()

    def close(self) -> None:
        """Close it, from whichever phase."""
        if self._client.fileno() >= 0:
            self._selector.unregister(self._client)
            self._client.close()

    def _receive(self) -> None:
        data = self._client.recv(_READ_BYTES)
        if not data:
            self._end()
        elif self._phase == "request":
            self._received += data
            end = _END_OF_HEAD.search(self._received)
            if end is not None and end.start() <= _REQUEST_BYTES:
                self._reply(self._respond(self._received[: end.start()]))
            elif len(self._received) > _REQUEST_BYTES:
                self._reply(Reply(431, _TEXT, b"this request is too long\n").encode())

    def _reply(self, data: bytes) -> None:
        self._phase, self._to_send = "reply", memoryview(data)
        self.ends_s = self._clock() + _REPLY_S
        self._selector.modify(self._client, selectors.EVENT_WRITE, data=self)
        self._send()

    def _send(self) -> None:
        self._to_send = self._to_send[self._client.send(self._to_send) :]
        if not self._to_send:
            self._client.shutdown(socket.SHUT_WR)
            self._phase = "linger"
            self.ends_s = self._clock() + _LINGER_S
            self._selector.modify(self._client, selectors.EVENT_READ, data=self)

    def _end(self) -> None:
        self.ends_s = -math.inf


def _close_all(connections: Iterable[_Connection]) -> None:
    for connection in connections:
        connection.close()


def _accept(listener: socket.socket) -> Iterator[socket.socket]:
    """The clients that wait, as many as are served at once."""
    for _ in range(_CONNECTIONS):
        try:
            client, _ = listener.accept()
        except BlockingIOError:
            return
        except ConnectionAbortedError:
            continue  # it has gone again
        client.setblocking(False)
        yield client


def _listen(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen on every address of ``host``: a name may have one of IPv4 and one of IPv6.

    Raises:
        OSError: with the reason as its whole text.
    """
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    listeners: list[socket.socket] = []
    trouble: OSError | None = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
            try:
                listeners.append(_listener(family, address))
            except OSError as error:
                # /etc/hosts gives localhost an address of IPv6 on machines without it.
                if error.errno not in {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}:
                    raise
                trouble = error
        if not listeners and trouble is not None:
            raise trouble
    except OSError as error:
        for listener in listeners:
            listener.close()
        raise OSError(f"status page: cannot listen on {where}: {_reason(error)}") from error
    return listeners


def _listener(family: int, address: Any) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections that an earlier run has closed linger for a minute; a port that is listened on stays taken.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # "::" means every address, whatever net.ipv6.bindv6only says.
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _reason(error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return "the port is taken, perhaps by another deployment; give status.port a number of its own"
        case errno.EACCES:
            return "ports below 1024 are for root; give status.port a higher number"
        case errno.EADDRNOTAVAIL:
            return "this device has no such address; see status.host"
        case _:
            return error.strerror or str(error)

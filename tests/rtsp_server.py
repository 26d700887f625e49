"""An RTSP camera for tests, benchmarks and the soak: RTSP 1.0 (RFC 2326) with RTP/JPEG (RFC 2435) over TCP, loopback.

In a test::

    with RtspServer(fps=25) as camera:
        config.Rtsp(url=camera.url)
        camera.stall()        # keeps connections, sends nothing
        camera.freeze()       # sends the same picture again and again
        camera.go_on()        # neither any more
        camera.resize(320, 240)
        camera.kill()         # cuts every connection and stops listening
        camera.start()        # on the same port as before

As a program, for benchmarks: ``python tests/rtsp_server.py --port 8554 --fps 25 --size 640x480``. It prints its
address, then obeys lines on stdin: ``stall``, ``freeze``, ``go_on``, ``resize 320x240``, ``kill``, ``start``,
``status`` (prints how many pictures were sent and how many clients there are), ``quit``; the end of stdin ends it too.
SIGUSR1 stalls it, SIGUSR2 lets it go on, SIGTERM ends it.

Only interleaved TCP is served: who asks for UDP gets 461. With ``username`` and ``password`` every request but OPTIONS
needs Basic or Digest (``auth``) credentials. Pictures show a moving ramp, so that no two that follow each other are
equal, and their number in the first pixels; they are made once for all clients, at ``fps``.

How a JPEG becomes RTP (RFC 2435): the headers are stripped, the quantisation tables travel in the first packet of each
picture (Q = 255), and the receiver puts the standard Huffman tables back, which are those that OpenCV's encoder uses.
The type is 0 for 4:2:2 and 1 for 4:2:0; width and height are sent in units of 8 pixels, up to 2040.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import re
import signal
import socket
import struct
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import cv2
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from typing_extensions import Self

__all__ = ["RtspServer"]

_REALM = "camera"
_CLOCK_HZ = 90_000
_PAYLOAD_TYPE = 26  # JPEG, RFC 3551
_CHUNK = 1400
_SEND_DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True)
class Jpeg:
    """What of a JPEG travels over RTP."""

    tables: bytes
    """Quantisation tables, 64 bytes each."""
    scan: bytes
    width: int
    height: int
    type: int


def strip(data: bytes) -> Jpeg:
    """Take a baseline JPEG apart.

    Raises:
        ValueError: it is one that RFC 2435 cannot carry.
    """
    tables: dict[int, bytes] = {}
    width = height = kind = -1
    at = 2
    while True:
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        body = data[at + 4 : at + 2 + length]
        if marker == 0xDB:
            while body:
                if body[0] >> 4:
                    raise ValueError("16-bit quantisation tables")
                tables[body[0] & 15] = body[1:65]
                body = body[65:]
        elif marker == 0xC0:
            height, width = struct.unpack_from(">HH", body, 1)
            sampling = (body[7], body[10], body[13])
            kinds = {(0x21, 0x11, 0x11): 0, (0x22, 0x11, 0x11): 1}
            if sampling not in kinds:
                raise ValueError(f"sampling {sampling} is neither 4:2:2 nor 4:2:0")
            kind = kinds[sampling]
        elif marker in {0xC1, 0xC2, 0xDD}:
            raise ValueError(f"marker {marker:#x}: not a baseline JPEG without restart intervals")
        elif marker == 0xDA:
            scan = data[at + 2 + length :].removesuffix(b"\xff\xd9")
            return Jpeg(b"".join(tables[key] for key in sorted(tables)), scan, width, height, kind)
        at += 2 + length


def packets(jpeg: Jpeg, *, sequence: int, timestamp: int, ssrc: int) -> Iterator[bytes]:
    """The RTP packets of one picture."""
    offset = 0
    while offset < len(jpeg.scan):
        head = struct.pack(">BBHBBBB", 0, *divmod(offset, 1 << 16), jpeg.type, 255, jpeg.width // 8, jpeg.height // 8)
        if not offset:
            head += struct.pack(">BBH", 0, 0, len(jpeg.tables)) + jpeg.tables
        chunk = jpeg.scan[offset : offset + _CHUNK]
        offset += len(chunk)
        last = offset >= len(jpeg.scan)
        payload_type = _PAYLOAD_TYPE | (0x80 if last else 0)
        yield struct.pack(">BBHII", 0x80, payload_type, sequence & 0xFFFF, timestamp & 0xFFFFFFFF, ssrc) + head + chunk
        sequence += 1


@dataclass(eq=False)
class _Client:
    """One connection."""

    socket: socket.socket
    nonce: str
    playing: bool = False
    channel: int = 0
    sequence: int = 0
    sending: threading.Lock = field(default_factory=threading.Lock)

    def send(self, data: bytes) -> None:
        with self.sending:
            self.socket.sendall(data)


class RtspServer:
    """A camera at ``url``. Thread-safe; leaving the block ends it."""

    def __init__(
        self,
        *,
        port: int = 0,
        fps: float = 25.0,
        size_wh: tuple[int, int] = (320, 240),
        username: str | None = None,
        password: str | None = None,
        auth: Literal["basic", "digest"] = "digest",
    ) -> None:
        """Prepare a camera; ``start`` or the ``with`` block lets it listen.

        Args:
            port: of the loopback; 0 takes a free one and keeps it.
            fps: pictures a second.
            size_wh: multiples of 8, up to 2040.
            username: asked for, with ``password``, where given.
            password: see ``username``.
            auth: how they are to be given.
        """
        self.port = port
        self.fps = fps
        self.sent = 0
        """Pictures that were sent, each counted once however many clients there are."""
        self.requests: list[str] = []
        """Methods that were asked for, in order."""
        self._account = None if username is None else (username, password or "")
        self._auth = auth
        self._size_wh = size_wh
        self._mode: Literal["live", "stalled", "frozen"] = "live"
        self._clients: set[_Client] = set()
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._listener: socket.socket | None = None
        self._threads: list[threading.Thread] = []

    @property
    def url(self) -> str:
        """Its address, without credentials."""
        return f"rtsp://127.0.0.1:{self.port}/stream"

    @property
    def playing(self) -> int:
        """How many clients are being sent pictures."""
        with self._lock:
            return sum(client.playing for client in self._clients)

    def start(self) -> None:
        """Listen."""
        self._ending = threading.Event()
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen()
        self.port = listener.getsockname()[1]
        self._listener = listener
        self._spawn(self._accept, listener, self._ending)
        self._spawn(self._film, self._ending)

    def kill(self) -> None:
        """Cut every connection and stop listening, as a power cut would."""
        self._ending.set()
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
            self._listener.close()
            self._listener = None
        with self._lock:
            clients = list(self._clients)
        for client in clients:
            with contextlib.suppress(OSError):
                client.socket.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def stall(self) -> None:
        """Keep connections and answer requests, but send no pictures."""
        self._mode = "stalled"

    def freeze(self) -> None:
        """Send the same picture again and again."""
        self._mode = "frozen"

    def go_on(self) -> None:
        """Neither stall nor freeze any more."""
        self._mode = "live"

    def resize(self, width: int, height: int) -> None:
        """Send pictures of another size from now on."""
        self._size_wh = (width, height)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _spawn(self, work: object, *args: object) -> None:
        thread = threading.Thread(target=work, args=args, name="rtsp-camera", daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket, ending: threading.Event) -> None:
        while not ending.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            # Who does not read blocks the camera for so long, then is cut off.
            connection.settimeout(_SEND_DEADLINE_S)
            nonce = hashlib.sha256(str(time.monotonic_ns()).encode()).hexdigest()[:16]
            client = _Client(connection, nonce)
            with self._lock:
                self._clients.add(client)
            self._spawn(self._converse, client, ending)

    def _converse(self, client: _Client, ending: threading.Event) -> None:
        buffer = b""
        try:
            while not ending.is_set():
                try:
                    data = client.socket.recv(4096)
                except TimeoutError:
                    continue
                if not data:
                    return
                buffer += data
                while buffer:
                    if buffer[:1] == b"$":  # the client's RTCP
                        if len(buffer) < 4 or len(buffer) < 4 + int.from_bytes(buffer[2:4], "big"):
                            break
                        buffer = buffer[4 + int.from_bytes(buffer[2:4], "big") :]
                        continue
                    head, found, rest = buffer.partition(b"\r\n\r\n")
                    if not found:
                        break
                    headers = self._headers(head.decode())
                    length = int(headers.get("content-length", 0))
                    if len(rest) < length:
                        break
                    buffer = rest[length:]
                    self._answer(client, head.decode().split("\r\n")[0], headers)
        except OSError:
            pass
        finally:
            with self._lock:
                self._clients.discard(client)
            client.socket.close()

    @staticmethod
    def _headers(head: str) -> dict[str, str]:
        lines = (line.partition(":") for line in head.split("\r\n")[1:])
        return {name.strip().lower(): value.strip() for name, _, value in lines}

    def _answer(self, client: _Client, request: str, headers: Mapping[str, str]) -> None:
        method, url = request.split()[:2]
        self.requests.append(method)
        session = {"Session": "12345678;timeout=60"}
        if method == "OPTIONS":
            self._reply(client, headers, extra={"Public": "OPTIONS, DESCRIBE, SETUP, PLAY, TEARDOWN, GET_PARAMETER"})
        elif not self._is_welcome(client, method, headers):
            ask = f'Basic realm="{_REALM}"'
            if self._auth == "digest":
                ask = f'Digest realm="{_REALM}", nonce="{client.nonce}"'
            self._reply(client, headers, status="401 Unauthorized", extra={"WWW-Authenticate": ask})
        elif method == "DESCRIBE":
            lines = ["v=0", "o=- 1 1 IN IP4 127.0.0.1", "s=camera", "c=IN IP4 0.0.0.0", "t=0 0", "a=control:*"]
            lines += [f"m=video 0 RTP/AVP {_PAYLOAD_TYPE}", f"a=framerate:{self.fps:g}", "a=control:track0"]
            extra = {"Content-Type": "application/sdp", "Content-Base": url.rstrip("/") + "/"}
            self._reply(client, headers, extra=extra, body="\r\n".join(lines) + "\r\n")
        elif method == "SETUP":
            found = re.search(r"RTP/AVP/TCP.*?interleaved=(\d+)-(\d+)", headers.get("transport", ""))
            if found is None:
                self._reply(client, headers, status="461 Unsupported Transport")
                return
            client.channel = int(found[1])
            transport = f"RTP/AVP/TCP;unicast;interleaved={found[1]}-{found[2]}"
            self._reply(client, headers, extra={"Transport": transport, **session})
        elif method == "PLAY":
            self._reply(client, headers, extra={**session, "Range": "npt=0.000-"})
            client.playing = True
        elif method == "TEARDOWN":
            client.playing = False
            self._reply(client, headers, extra=session)
        else:  # GET_PARAMETER and the like keep the session alive
            self._reply(client, headers, extra=session)

    @staticmethod
    def _reply(
        client: _Client,
        headers: Mapping[str, str],
        *,
        status: str = "200 OK",
        extra: Mapping[str, str] | None = None,
        body: str = "",
    ) -> None:
        lines = [f"RTSP/1.0 {status}", f"CSeq: {headers.get('cseq', '0')}"]
        lines += [f"{name}: {value}" for name, value in (extra or {}).items()]
        if body:
            lines.append(f"Content-Length: {len(body)}")
        client.send(("\r\n".join(lines) + "\r\n\r\n" + body).encode())

    def _is_welcome(self, client: _Client, method: str, headers: Mapping[str, str]) -> bool:
        if self._account is None:
            return True
        username, password = self._account
        given = headers.get("authorization", "")
        if self._auth == "basic":
            return given == "Basic " + base64.b64encode(f"{username}:{password}".encode()).decode()
        fields = dict(re.findall(r'(\w+)="([^"]*)"', given))
        # RFC 2617 without qop, as RTSP cameras have it.
        secret = _md5(f"{username}:{_REALM}:{password}")
        wanted = _md5(f"{secret}:{client.nonce}:{_md5(method + ':' + fields.get('uri', ''))}")
        return fields.get("username") == username and fields.get("response") == wanted

    def _film(self, ending: threading.Event) -> None:
        picture, began_s, due_s = None, time.monotonic(), time.monotonic()
        while not ending.wait(max(0.0, due_s - time.monotonic())):
            due_s = max(due_s + 1 / self.fps, time.monotonic() - 1 / self.fps)
            with self._lock:
                clients = [client for client in self._clients if client.playing]
            if not clients or self._mode == "stalled":
                continue
            if picture is None or self._mode == "live":
                picture = self._shoot(self.sent)
            timestamp = int((time.monotonic() - began_s) * _CLOCK_HZ)
            for client in clients:
                self._show(client, picture, timestamp)
            self.sent += 1

    def _show(self, client: _Client, picture: Jpeg, timestamp: int) -> None:
        parts = []
        for packet in packets(picture, sequence=client.sequence, timestamp=timestamp, ssrc=0x1234):
            parts.append(struct.pack(">cBH", b"$", client.channel, len(packet)) + packet)
            client.sequence += 1
        try:
            client.send(b"".join(parts))
        except OSError:
            client.playing = False
            with contextlib.suppress(OSError):
                client.socket.shutdown(socket.SHUT_RDWR)

    def _shoot(self, number: int) -> Jpeg:
        width, height = self._size_wh
        ramp = (np.arange(width, dtype=np.int64) + 5 * number) % 256
        image = np.empty((height, width, 3), np.uint8)
        image[:] = ramp.astype(np.uint8)[None, :, None]
        image[:16, :16] = number % 8 * 32
        options = [cv2.IMWRITE_JPEG_QUALITY, 80, cv2.IMWRITE_JPEG_OPTIMIZE, 0]
        if hasattr(cv2, "IMWRITE_JPEG_SAMPLING_FACTOR"):
            options += [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420]
        encoded, data = cv2.imencode(".jpg", image, options)
        assert encoded
        return strip(data.tobytes())


def _md5(text: str) -> str:
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def _wh(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    return int(width), int(height)


def main() -> None:
    """Serve until stdin ends, ``quit``, or SIGTERM."""
    parser = argparse.ArgumentParser(description="An RTSP camera of the loopback.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--fps", type=float, default=25.0)
    parser.add_argument("--size", type=_wh, default=(320, 240), metavar="WxH")
    parser.add_argument("--username")
    parser.add_argument("--password")
    parser.add_argument("--auth", choices=["basic", "digest"], default="digest")
    options = parser.parse_args()
    camera = RtspServer(
        port=options.port,
        fps=options.fps,
        size_wh=options.size,
        username=options.username,
        password=options.password,
        auth=options.auth,
    )
    signal.signal(signal.SIGUSR1, lambda *_: camera.stall())
    signal.signal(signal.SIGUSR2, lambda *_: camera.go_on())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with camera:
        print(camera.url, flush=True)  # noqa: T201
        for line in sys.stdin:
            match line.split():
                case ["quit"]:
                    return
                case ["resize", size]:
                    camera.resize(*_wh(size))
                case ["status"]:
                    print(f"sent={camera.sent} playing={camera.playing}", flush=True)  # noqa: T201
                case [("stall" | "freeze" | "go_on" | "kill" | "start") as command]:
                    getattr(camera, command)()
                case _:
                    print(f"unknown: {line.strip()}", file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()

"""The process that reads one camera: ``python -m edge.sources.grabber FD``, started by ``edge.sources.child`` alone.

It is a process because a camera's driver or decoder may never return from a call, and only a process can then be ended
(docs/decisions/0016-capture-process.md). What to open comes as JSON over stdin: there may be a password in it, which an
argument would show to every user of the machine. Pictures and messages leave as ``edge.sources.wire`` says. What the
libraries print goes to stdout and stderr, which the daemon reads.

It ends when the daemon closes its end of the socket, or dies: then the camera is released in good order, if that takes
no longer than ``grace_s``. Signals that a terminal or a service manager sends to all processes alike are ignored: when
this one ends is the daemon's business.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from typing import TYPE_CHECKING, Any, TypedDict

import cv2
import numpy as np

from edge.sources.wire import FAILED, MAX_MESSAGE, OPENED, Picture, Pool

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge.types import Image

__all__ = ["CameraEndedError", "Errand", "Grabber", "main"]

_BACKENDS = {"ffmpeg": cv2.CAP_FFMPEG, "gstreamer": cv2.CAP_GSTREAMER, "v4l2": cv2.CAP_V4L2}
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


class Errand(TypedDict):
    """What to do, as JSON."""

    backend: str
    """ffmpeg, gstreamer or v4l2."""
    target: str
    """Address, pipeline or device; may hold a password."""
    parameters: dict[str, float]
    """Properties of ``cv2`` to open with, by name; one that this OpenCV does not know is left out."""
    settings: list[tuple[str, float]]
    """Properties to set once it is open, in this order."""
    elements: list[str]
    """Of GStreamer, that the pipeline needs."""
    digest_s: float | None
    """How often the digest of a picture is computed; None: never."""
    grace_s: float
    """How long releasing the camera may take."""
    abrupt: bool
    """Whether the kernel may end this process with the daemon, before it has released the camera."""


class CameraEndedError(Exception):
    """There is nothing more to come; the text says why."""


class Grabber:
    """Grabs pictures and hands them over. Where no slot is free it goes on grabbing, so that the next is new."""

    def __init__(
        self,
        capture: cv2.VideoCapture,
        send: Callable[..., object],
        *,
        digest_s: float | None,
        clock: Callable[[], float] = time.monotonic,
        utc_clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Prepare.

        Args:
            capture: an open camera.
            send: takes a message and, with a pool, its file descriptor.
            digest_s: see ``Errand``.
            clock: monotonic seconds.
            utc_clock_ns: nanoseconds since the epoch.
        """
        self._capture = capture
        self._send = send
        self._digest_s = digest_s
        self._clock = clock
        self._utc_clock_ns = utc_clock_ns
        self._pool: Pool | None = None
        self._shape: tuple[int, ...] | None = None
        self._scratch: Any = None
        self._next_digest_s = clock()
        self._grabbed = 0

    def turn(self) -> None:
        """Grab one picture and hand it over, if there is room.

        Raises:
            CameraEndedError: the camera gives no more.
        """
        if not self._capture.grab():
            raise CameraEndedError("has ended the stream")
        number, self._grabbed = self._grabbed, self._grabbed + 1
        at_s, at_utc_us = self._clock(), self._utc_clock_ns() // 1000
        if self._pool is not None:
            self._pool.count(self._grabbed)
        landed = self._retrieve()
        if landed is None:
            return
        pool, slot, image = landed
        pool.take(slot)
        height, width = image.shape[:2]
        self._send(Picture(slot, width, height, number, at_s, at_utc_us, self._digest(image, at_s)).pack())

    def _retrieve(self) -> tuple[Pool, int, Image] | None:
        """Bring the picture that was grabbed into a free slot; None if there is none, or it cannot be decoded."""
        slot = 0 if self._pool is None else self._pool.free()
        if slot is None:
            return None
        target = self._target(slot)
        found, given = self._capture.retrieve() if target is None else self._capture.retrieve(target)
        if not found:
            return None
        if given.dtype != np.uint8:
            raise CameraEndedError(f"gives pictures of {given.dtype}; only 8 bits for each channel can be used")
        height, width = given.shape[:2]
        if self._pool is None or height * width * 3 > self._pool.slot_bytes:
            self._pool, slot = self._new_pool(height * width * 3), 0
        image = self._pool.view(slot, width, height)
        if not np.may_share_memory(given, image):
            _convert(given, image)
        self._shape, self._scratch = given.shape, None if given.shape == image.shape else given
        return self._pool, slot, image

    def _target(self, slot: int) -> Any:
        """Where OpenCV shall write, so that it allocates nothing and, if pictures come as BGR, nobody copies."""
        if self._shape is None or self._pool is None:
            return None
        if self._scratch is not None:
            return self._scratch
        height, width = self._shape[:2]
        return self._pool.view(slot, width, height)

    def _new_pool(self, picture_bytes: int) -> Pool:
        """Make one and send it; what the old one holds stays good until the daemon has forgotten it."""
        if self._pool is not None:
            self._pool.close()
        try:
            pool = Pool(picture_bytes)
        except OSError as error:
            raise CameraEndedError(f"needs memory for its pictures: {error.strerror}") from error
        pool.count(self._grabbed)
        self._send(pool.announce(), pool.fd)
        return pool

    def _digest(self, image: Image, now_s: float) -> int:
        """Of all bytes, now and then: a clock in a corner of the picture, or a lamp, must count as change."""
        if self._digest_s is None or now_s < self._next_digest_s:
            return 0
        self._next_digest_s = now_s + self._digest_s
        return zlib.crc32(image.data) or 1


def _convert(given: Any, image: Image) -> None:
    """Copy a picture of 4, 3 or 1 channels into a BGR one. nvvidconv gives BGRx: its 4th channel is dropped here."""
    channels = given.shape[2] if given.ndim == 3 else 1
    if channels == 4:
        cv2.cvtColor(given, cv2.COLOR_BGRA2BGR, dst=image)
    elif channels == 3:
        np.copyto(image, given)
    elif channels == 1:
        cv2.cvtColor(given, cv2.COLOR_GRAY2BGR, dst=image)
    else:
        raise CameraEndedError(f"gives pictures of {channels} channels; allowed are 1, 3 and 4")


def _open(errand: Errand) -> cv2.VideoCapture:
    """Open the camera. An OpenCV without the backend says no more than that it did not work."""
    backend, target = _BACKENDS[errand["backend"]], errand["target"]
    parameters = [
        number
        for name, value in errand["parameters"].items()
        if hasattr(cv2, name)
        for number in (getattr(cv2, name), int(value))
    ]
    capture = cv2.VideoCapture(target, backend, parameters) if parameters else cv2.VideoCapture(target, backend)
    if not capture.isOpened():
        _name_missing(errand["elements"])
        raise CameraEndedError("cannot be opened")
    for name, value in errand["settings"]:
        capture.set(getattr(cv2, name), value)  # cameras take what comes nearest; the pictures show what it was
    return capture


def _name_missing(elements: list[str]) -> None:
    """Print which elements are missing, as GStreamer would: OpenCV does not, and tells of what failed next instead."""
    program = shutil.which("gst-inspect-1.0")
    if program is None:
        return
    for name in elements:
        if subprocess.run([program, "--exists", name], check=False).returncode:  # noqa: S603 - names are ours
            sys.stderr.write(f'no element "{name}"\n')


def _end_with_daemon(control: socket.socket, ending: threading.Event, grace_s: float) -> None:
    """Wait until the daemon closes its end or dies; then leave the camera ``grace_s`` to be released.

    A thread of its own, since the main thread may be in a call that does not return. OpenCV lets other threads run
    meanwhile.
    """
    control.recv(1)
    ending.set()
    time.sleep(grace_s)
    os._exit(1)


def _be_subordinate(*, abrupt: bool) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if abrupt:
        # Should even that thread be stuck. The kernel looks at the thread that started us, which is the one that reads
        # the source.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    """Do one errand; return the exit code."""
    control = socket.socket(fileno=int(sys.argv[1]))
    errand: Errand = json.load(sys.stdin.buffer)
    _be_subordinate(abrupt=errand["abrupt"])
    ending = threading.Event()
    threading.Thread(target=_end_with_daemon, args=(control, ending, errand["grace_s"]), daemon=True).start()
    # Conversions here take about a millisecond: more threads would cost more than they bring.
    cv2.setNumThreads(1)

    def send(message: bytes, fd: int | None = None) -> None:
        if fd is None:
            control.send(message)
        else:
            socket.send_fds(control, [message], [fd])

    capture: cv2.VideoCapture | None = None
    try:
        capture = _open(errand)
        send(OPENED)
        grabber = Grabber(capture, send, digest_s=errand["digest_s"])
        while not ending.is_set():
            grabber.turn()
    except (CameraEndedError, cv2.error) as error:
        text = error.err if isinstance(error, cv2.error) else str(error)
        sys.stderr.flush()
        _tell(send, text)
        return 1
    except OSError:
        if not ending.is_set():  # else: the daemon has gone, and nobody wants to know
            raise
    finally:
        if capture is not None:
            capture.release()
    return 0


def _tell(send: Callable[[bytes], object], text: str) -> None:
    try:
        send(FAILED + text.encode()[: MAX_MESSAGE - 1])
    except OSError:
        sys.exit(1)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by way of the libraries' exit handlers: nobody would end the process if one of those did not return.
    os._exit(code)

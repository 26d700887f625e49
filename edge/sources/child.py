"""The daemon's hold on the process that reads a camera: starts it, takes what it sends, ends it.

When it is to be ended, and what that means, is ``edge.sources.camera``'s business. For one thread.
"""

from __future__ import annotations

import json
import logging
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections import deque
from typing import TYPE_CHECKING

from edge.sources.diagnosis import diagnose, last_words
from edge.sources.pipelines import elements_of
from edge.sources.wire import FAILED, MAX_MESSAGE, OPENED, PICTURE, POOL, Gallery, Picture

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge.sources.grabber import Errand
    from edge.sources.pipelines import Opening
    from edge.types import Image

__all__ = ["Child"]

logger = logging.getLogger(__name__)

_LINES = 30
_LONGEST_LINE = 4096
# From the end of what it sends to the end of the process.
_LAST_WORDS_S = 1.0


class Child:
    """One process that reads one camera, from its start to its end."""

    def __init__(
        self,
        opening: Opening,
        *,
        name: str,
        digest_s: float | None,
        mask: Callable[[str], str],
        python: str = sys.executable,
    ) -> None:
        """Start it.

        Args:
            opening: what to open.
            name: of the stream, for the log.
            digest_s: how often a picture's digest is wanted; None: never.
            mask: takes secrets out of what it prints.
            python: the interpreter to run it with.

        Raises:
            OSError: no process can be started.
        """
        self.opened = False
        """Whether the camera could be opened."""
        self.ended = False
        """Whether nothing more will come."""
        self._name = name
        self._mask = mask
        self._grace_s = opening.grace_s
        self._gallery: Gallery | None = None
        self._failure: str | None = None
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._rest = b""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [python, "-m", "edge.sources.grabber", str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env=_environ(opening),
                # Else a Ctrl-C in the daemon's terminal would end it too, before the daemon has said so.
                start_new_session=True,
            )
        except BaseException:
            self._control.close()
            raise
        finally:
            theirs.close()
        assert self._process.stdin is not None, "it is a pipe"
        assert self._process.stdout is not None, "it is a pipe"
        errand: Errand = {
            "backend": opening.backend,
            "target": opening.target,
            "parameters": dict(opening.parameters),
            "settings": list(opening.settings),
            "elements": elements_of(opening.target) if opening.backend == "gstreamer" else [],
            "digest_s": digest_s,
            "grace_s": opening.grace_s,
            "abrupt": opening.abrupt,
        }
        try:
            with self._process.stdin as stdin:
                stdin.write(json.dumps(errand).encode())
        except BrokenPipeError:
            pass  # it has died already: reason() will say of what
        self._control.setblocking(False)
        self._output = self._process.stdout
        self._output_fd = self._output.fileno()
        os.set_blocking(self._output_fd, False)
        self._poll = select.poll()
        self._poll.register(self._control, select.POLLIN)
        self._poll.register(self._output, select.POLLIN)

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    @property
    def grace_s(self) -> float:
        """How long it may take to end by itself once it is dismissed."""
        return self._grace_s

    @property
    def grabbed(self) -> int:
        """How many pictures it has grabbed, handed over or not."""
        return 0 if self._gallery is None else self._gallery.grabbed

    def receive(self, timeout_s: float) -> Picture | None:
        """Take all that has come, if need be after waiting for it; return the newest picture.

        Those before it are given back. The picture's slot is taken until ``show``'s view is forgotten or ``give_back``.
        """
        if not self.ended:
            ready = {fd for fd, _ in self._poll.poll(timeout_s * 1000)}
            if self._output_fd in ready:
                self._read_lines()
        newest: Picture | None = None
        while (message := self._next_message()) is not None:
            (text, fds) = message
            kind, body = text[:1], text[1:]
            if kind == PICTURE:
                if newest is not None:
                    self.give_back(newest)
                newest = Picture.unpack(body)
            elif kind == POOL:
                newest = None  # of the pool before, which nothing is written to any more
                self._gallery = Gallery(fds[0], body)
            elif kind == OPENED:
                self.opened = True
            elif kind == FAILED:
                self._failure = self._mask(body.decode(errors="replace"))
        if newest is not None:
            self._lines.clear()  # they were no reason to fail
        return newest

    def show(self, picture: Picture) -> Image:
        """A read-only view of what ``receive`` returned; see ``Gallery.show``."""
        assert self._gallery is not None, "there is a picture"
        return self._gallery.show(picture)

    def give_back(self, picture: Picture) -> None:
        """Leave a picture that ``receive`` returned unseen."""
        assert self._gallery is not None, "there is a picture"
        self._gallery.give_back(picture)

    def reason(self) -> str:
        """Why it has ended by itself, as the end of a sentence about the camera."""
        code = self._await(_LAST_WORDS_S)
        self._read_lines()
        known, words = diagnose(self._lines), last_words(self._lines)
        if known is not None:
            return known
        if self._failure is not None:
            text = self._failure
        elif code is None:
            text = "has closed its connection to the daemon"
        elif code < 0:
            text = f"was read by a process that was ended by {signal.Signals(-code).name}"
        else:
            text = f"was read by a process that ended with exit code {code}"
        return text if words is None else f"{text} ({words})"

    def dismiss(self) -> None:
        """Ask it to release the camera and end. It does so by itself after its grace, whatever hangs."""
        if self._control.fileno() >= 0:
            try:
                self._control.shutdown(socket.SHUT_RDWR)
            except OSError as error:
                logger.debug("camera %s: its process has gone already (%s)", self._name, error)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def has_gone(self, timeout_s: float = 0.0) -> bool:
        """Whether the process has ended; if so, all that belonged to it is closed. Pictures that are shown stay."""
        if self._await(timeout_s) is None:
            return False
        self.ended = True
        self._control.close()
        self._output.close()
        return True

    def _next_message(self) -> tuple[bytes, list[int]] | None:
        """The next message and the descriptors that came with it; None if there is none now, or will be none."""
        if self.ended:
            return None
        try:
            message, fds, _, _ = socket.recv_fds(self._control, MAX_MESSAGE, 1)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            message, fds = b"", []
        if message:
            return message, fds
        self.ended = True
        self._poll.unregister(self._control)
        return None

    def _await(self, timeout_s: float) -> int | None:
        if timeout_s <= 0:
            return self._process.poll()
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def _read_lines(self) -> None:
        """Take what it has printed."""
        while not self._output.closed:
            try:
                data = os.read(self._output_fd, _LONGEST_LINE)
            except BlockingIOError:
                return
            if not data:
                self._poll.unregister(self._output)
                self._output.close()
            *lines, self._rest = (self._rest + data).split(b"\n")
            if len(self._rest) > _LONGEST_LINE or not data:
                lines, self._rest = [*lines, self._rest], b""
            for line in lines:
                text = self._mask(line.decode(errors="replace")).strip()
                if text:
                    self._lines.append(text)
                    logger.debug("camera %s: %s", self._name, text)


def _environ(opening: Opening) -> dict[str, str]:
    """Ours, in which an operator may have set an option of OpenCV otherwise, without the passwords that are there."""
    ours = {name: value for name, value in os.environ.items() if not re.fullmatch("EDGE_.*_PASSWORD", name)}
    return {**opening.environ, **ours}

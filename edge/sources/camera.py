"""A live camera that is never given up: lost or frozen, it is opened anew, for ever.

This room decides when a camera counts as lost and when to try again. The camera itself is read by a process
(``edge.sources.grabber``) behind ``edge.sources.child``; how to open it is ``edge.sources.pipelines``'s knowledge.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from edge import config
from edge.backoff import backoff
from edge.sources import SourceHealth
from edge.sources.child import Child
from edge.sources.credential import disguises, find_password
from edge.sources.diagnosis import masker
from edge.sources.liveness import Liveness
from edge.sources.pace import BEAT_S
from edge.sources.pipelines import backend_of, opening
from edge.sources.survey import describe, is_jetson
from edge.sources.video import opencv_build
from edge.types import Frame

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Generator, Iterator, Mapping
    from types import TracebackType

    from typing_extensions import Self

    from edge.events import Events
    from edge.sources.pipelines import Opening
    from edge.sources.wire import Picture

__all__ = ["CameraSource"]

logger = logging.getLogger(__name__)

# So soon a stop is noticed where no pictures come.
_POLL_S = 0.25
# A camera that has been live for so long was sound: after it, attempts begin with short delays again.
_STEADY_AFTER_S = 10.0
_DIGEST_S = 1.0
# More pictures than this that were grabbed after one and could not be handed over: its reader was away.
_STALE_PICTURES = 2
# Between what the process allows itself and what it is allowed.
_KILL_AFTER_S = 1.0
_CLOSE_S = 1.0


class CameraSource:
    """Reads a CSI, V4L2 or RTSP camera. The images of its frames are read-only views of memory that is used again.

    There are six such views (``edge.sources.wire.SLOTS``): who keeps frames for long makes the camera skip.
    """

    lossless = False

    def __init__(
        self,
        stream: config.Stream,
        *,
        key: str,
        events: Events,
        root: Path = Path("/"),
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[float, float], float] = random.uniform,
        python: str = sys.executable,
        gstreamer: bool | None = None,
    ) -> None:
        """Prepare; ``frames`` opens the camera.

        Args:
            stream: whose source is a camera.
            key: what the source is called in the deployment.
            events: where it is told that the camera was opened or lost.
            root: where /proc and /dev are.
            environ: where a password may be.
            clock: monotonic seconds.
            uniform: a random number between two.
            python: the interpreter that reads the camera.
            gstreamer: whether its OpenCV has GStreamer; None: as this one's.

        Raises:
            ConfigError: the section cannot work, or its password file cannot be read.
        """
        section = stream.source
        assert isinstance(section, config.Csi | config.V4l2 | config.Rtsp), "SOURCES says so"
        self._section = section
        self._stream = stream.name
        self._key = key
        self._events = events
        self._root = root
        self._clock = clock
        self._uniform = uniform
        self._python = python
        jetson = is_jetson(root)
        has_gstreamer = opencv_build()[1] if gstreamer is None else gstreamer
        self._backend = backend_of(section, jetson=jetson, gstreamer=has_gstreamer)
        if jetson and not has_gstreamer and self._backend != "gstreamer":
            logger.warning(
                "stream %s: this OpenCV has no GStreamer, so that the CPU decodes; docs/cameras.md", stream.name
            )
        self._password: str | None = None
        self._mask = masker([])
        if isinstance(section, config.Rtsp):
            self._password = find_password(section, stream=stream.name, key=key, environ=environ)
            if section.username is not None and self._password is not None:
                self._mask = masker(disguises(section.username, self._password))
        self._plan(None)  # says at once what is wrong with the section

        self.health = SourceHealth("opening")
        self.skipped = 0
        """Grabbed, and never handed on."""
        self._child: Child | None = None
        self._starts = 0
        self._first_index = 0
        """Index of the first picture of the process at work."""
        self._handed = 0
        """How many of its pictures have been accounted for."""
        self._lost_at_s: float | None = None
        self._frozen_digest = 0
        """Of the picture that the camera was given up for, until it gives another."""
        self._gave_up_one = False

    @property
    def description(self) -> str:
        """What is read, and by what."""
        return f"{describe(self._section)}, by {self._backend}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the camera's process, if ``frames`` has left one."""
        child, self._child = self._child, None
        if child is None:
            return
        child.dismiss()
        if not child.has_gone(child.grace_s + _KILL_AFTER_S):
            child.kill()
            if not child.has_gone(_CLOSE_S):
                logger.error("camera %s: process %d hangs in a driver", self._stream, child.pid)

    def frames(self, stop: threading.Event, *, fit_wh: tuple[int, int] | None = None) -> Iterator[Frame | None]:
        """Yield frames, the newest first of all; None while there is none."""
        delays = backoff(self._uniform)
        try:
            while not stop.is_set():
                reason, live_s = yield from self._attempt(stop, fit_wh)
                if reason is None:
                    return
                self._lose(reason)
                yield from self._retire(stop)
                if live_s > _STEADY_AFTER_S:
                    delays = backoff(self._uniform)
                yield from self._rest(next(delays), stop)
        finally:
            if self._child is not None:
                self._child.dismiss()  # __exit__ waits for it

    def _attempt(
        self, stop: threading.Event, fit_wh: tuple[int, int] | None
    ) -> Generator[Frame | None, None, tuple[str | None, float]]:
        """Open the camera and yield its frames; return why it is lost, None after a stop, and how long it was live."""
        if isinstance(self._section, config.V4l2) and not self._under_root(self._section.device).exists():
            return f"is not there: {self._section.device} does not exist", 0.0
        plan = self._plan(fit_wh)
        try:
            child = self._child = Child(
                plan, name=self._stream, digest_s=self._digest_s, mask=self._mask, python=self._python
            )
        except OSError as error:
            return f"needs a process of its own: {error.strerror}", 0.0
        self._starts += 1
        self._handed = 0
        if self._starts > 1:
            self.health = replace(self.health, restarts=self._starts - 1)
        live_at_s: float | None = None
        liveness = Liveness(self._section, clock=self._clock)
        try:
            while not stop.is_set():
                picture = child.receive(_POLL_S)
                liveness.saw(child.grabbed, picture)
                trouble = liveness.trouble(opened=child.opened)
                if picture is None and child.ended:
                    trouble = child.reason()
                if trouble is not None:
                    if liveness.frozen:
                        self._frozen_digest = liveness.digest
                    return trouble, 0.0 if live_at_s is None else self._clock() - live_at_s
                if picture is None or self._is_unwanted(picture, child):
                    yield None
                    continue
                if live_at_s is None:
                    live_at_s = self._clock()
                    self._find(picture, plan)
                yield self._frame(picture, child)
        finally:
            self._account(child.grabbed)
            self._first_index += child.grabbed
        return None, 0.0

    def _is_unwanted(self, picture: Picture, child: Child) -> bool:
        """Whether a picture is not worth handing on; then it is given back.

        That is what a camera which was given up for its frozen picture still shows: it is not live again. And what lies
        here since its reader was away, while so many newer ones found no free slot; but never two in a row of those, so
        that a reader who is always late gets something.
        """
        if self._frozen_digest and picture.digest not in {0, self._frozen_digest}:
            self._frozen_digest = 0
        stale = child.grabbed - picture.number - 1 > _STALE_PICTURES and not self._gave_up_one
        self._gave_up_one = stale
        if stale or self._frozen_digest:
            child.give_back(picture)
            return True
        return False

    def _frame(self, picture: Picture, child: Child) -> Frame:
        self._account(picture.number)
        self._handed = picture.number + 1
        return Frame(
            image=child.show(picture),
            stream=self._stream,
            index=self._first_index + picture.number,
            captured_at_s=picture.captured_at_s,
            captured_at_utc_us=picture.captured_at_utc_us,
        )

    def _account(self, grabbed: int) -> None:
        """Count as skipped what was grabbed since the last frame and will not be handed on."""
        self.skipped += max(0, grabbed - self._handed)

    def _retire(self, stop: threading.Event) -> Iterator[None]:
        """End the process and wait until it has gone: it may hold the camera."""
        child = self._child
        if child is None:
            return
        child.dismiss()
        kill_at_s: float | None = self._clock() + child.grace_s + _KILL_AFTER_S
        while not child.has_gone():
            if stop.wait(_POLL_S / 5):
                return
            if kill_at_s is not None and self._clock() > kill_at_s:
                logger.warning("camera %s: its process does not end, and is killed", self._stream)
                child.kill()
                kill_at_s = None
            elif kill_at_s is None:
                # In an uninterruptible call of a driver. Another process would hang beside it.
                self.health = replace(self.health, trouble="hangs in its driver; only a restart of the device may help")
            yield None
        self._child = None

    def _rest(self, delay_s: float, stop: threading.Event) -> Iterator[None]:
        """Wait before the next attempt."""
        ends_s = self._clock() + delay_s
        while (left_s := ends_s - self._clock()) > 0 and not stop.wait(min(BEAT_S, left_s)):
            yield None

    def _find(self, picture: Picture, plan: Opening) -> None:
        """The first picture of a process has come."""
        outage_s = None if self._lost_at_s is None else self._clock() - self._lost_at_s
        self._lost_at_s = None
        self.health = SourceHealth("live", None, self.health.restarts)
        text = f"camera {self._stream} is live: {picture.width}x{picture.height} from {self.description}"
        if outage_s is not None:
            text += f", after {outage_s:.0f} s"
        self._events.emit(
            "camera_opened",
            text,
            stream=self._stream,
            width=picture.width,
            height=picture.height,
            fps=plan.fps,
            outage_s=None if outage_s is None else round(outage_s, 3),
        )

    def _lose(self, reason: str) -> None:
        """Tell it once for each outage; further attempts that fail show in ``health`` and in the log at debug level."""
        trouble = self._mask(reason)
        first = self._lost_at_s is None
        if first:
            self._lost_at_s = self._clock()
        was_live = self.health.state == "live"
        self.health = SourceHealth("lost", trouble, self.health.restarts)
        if not first:
            logger.debug("camera %s: attempt %d: it %s", self._stream, self._starts, trouble)
            return
        text = f"camera {self._stream} {'is lost' if was_live else 'cannot be opened'}: it {trouble}"
        self._events.emit("camera_lost", text, severity="warning", stream=self._stream, reason=trouble)

    def _plan(self, fit_wh: tuple[int, int] | None) -> Opening:
        return opening(self._section, self._backend, key=self._key, password=self._password, fit_wh=fit_wh)

    @property
    def _digest_s(self) -> float | None:
        frozen_s = self._section.frozen_s
        return None if frozen_s is None else min(_DIGEST_S, frozen_s / 4)

    def _under_root(self, path: str) -> Path:
        return self._root / path.lstrip("/")

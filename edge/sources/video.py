"""A video file as a stream: at its own rate, at another, or as fast as its frames are taken."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np

from edge.errors import DataError, SourceError
from edge.sources import SourceHealth
from edge.sources.pace import Pacer, Stamper

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator
    from types import TracebackType

    from typing_extensions import Self

    from edge import config
    from edge.types import Frame

__all__ = ["VideoSource", "missing", "opencv_build", "own_fps"]

logger = logging.getLogger(__name__)

_DEFAULT_FPS = 25.0
_MAX_FPS = 1000.0
_LIVE = SourceHealth("live")


class VideoSource:
    """Plays a file once or for ever, by OpenCV's FFmpeg backend."""

    skipped = 0

    def __init__(self, section: config.Video, *, stream: str, key: str) -> None:
        """Open the file.

        Raises:
            DataError: there is no such file.
            SourceError: it is no video that FFmpeg can open.
        """
        self._path = Path(section.path)
        self._key = f"{key}.path"
        self._loop = section.loop
        self.lossless = section.pace == "fast"
        self.health = _LIVE
        self._stamp = Stamper(stream)
        if not self._path.exists():
            raise DataError(f"{self._key}: {self._path}: no such file")
        self._capture = self._open()
        self._fps = section.fps or own_fps(self._capture)

    @property
    def description(self) -> str:
        """What is read and how fast."""
        pace = "as fast as it is taken" if self.lossless else f"{self._fps:g} frames a second"
        return f"video {self._path}, {pace}{', looped' if self._loop else ''}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._capture.release()

    def frames(self, stop: threading.Event, *, fit_wh: tuple[int, int] | None = None) -> Iterator[Frame | None]:
        """Yield the frames.

        Raises:
            SourceError: not one frame can be decoded, or the file can't be opened again for the next round.
        """
        del fit_wh
        pacer = None if self.lossless else Pacer(self._fps)
        while True:
            count = 0
            while not stop.is_set():
                found, image = self._capture.read()
                if not found:
                    break
                count += 1
                if pacer is not None and not (yield from pacer.beats(stop)):
                    return
                yield self._stamp(np.ascontiguousarray(image, np.uint8))
            if stop.is_set():
                return
            self._judge_end(count)
            if not self._loop:
                self.health = SourceHealth("ended")
                return
            # Opening again is exact for every container; seeking to frame 0 is not.
            self._capture.release()
            self._capture = self._open()

    def _open(self) -> cv2.VideoCapture:
        capture = cv2.VideoCapture(str(self._path), cv2.CAP_FFMPEG)
        if not capture.isOpened():
            raise SourceError(f"{self._key}: {self._path}: is not a video that OpenCV's FFmpeg can open")
        return capture

    def _judge_end(self, count: int) -> None:
        """Tell the end of the file from a break: OpenCV gives the same answer for both."""
        if not count:
            raise SourceError(f"{self._key}: {self._path}: not one frame can be decoded")
        more = missing(self._capture, count)
        if more is not None:
            logger.warning(
                "%s: ended after %d of about %d frames; the file may be damaged", self._path, count, count + more
            )


def own_fps(capture: cv2.VideoCapture) -> float:
    """Frames a second, or a guess where the container has no rate: those give 0, NaN or their time base (90000)."""
    fps = float(capture.get(cv2.CAP_PROP_FPS))
    return fps if 0 < fps <= _MAX_FPS else _DEFAULT_FPS


def missing(capture: cv2.VideoCapture, count: int) -> int | None:
    """About how many frames the container promises beyond the ``count`` that were read; None if as good as none.

    Containers estimate their length from time and rate, so that a few frames mean nothing.
    """
    expected = capture.get(cv2.CAP_PROP_FRAME_COUNT)
    return int(expected) - count if expected > 0 and count < 0.9 * expected else None


def opencv_build() -> tuple[str, bool]:
    """Version of the OpenCV that was found, and whether it has GStreamer: JetPack's has, PyPI's has not."""
    lines = [line.split(":", 1) for line in cv2.getBuildInformation().splitlines() if ":" in line]
    gstreamer = any(key.strip() == "GStreamer" and value.strip().startswith("YES") for key, value in lines)
    return cv2.__version__, gstreamer

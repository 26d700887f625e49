"""Single frames of a video file by their numbers, for whoever picks some rather than plays all.

Frames are counted and found by reading forwards from the first one, never by seeking: ``CAP_PROP_POS_FRAMES`` goes by
time stamps and an assumed rate to a key frame, and in many containers (MPEG-TS, variable rates, open GOPs) arrives at
another frame than reading does.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import cv2
import numpy as np

from edge.errors import DataError
from edge.sources.video import missing, own_fps

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

    from edge.types import Image

__all__ = ["SUFFIXES", "Clip", "Length", "measure"]

SUFFIXES = frozenset({".avi", ".m4v", ".mjpeg", ".mkv", ".mov", ".mp4", ".ts", ".webm"})
"""What counts as a video, in upper or lower case."""

_KEPT = 16


@dataclass(frozen=True, slots=True)
class Length:
    """How long a video is."""

    frames: int
    """That can be read; at least 1."""
    fps: float
    """By the container, or a guess."""
    missing: int | None
    """About how many more the container promises, if the file breaks off early."""


def measure(path: Path) -> Length:
    """Count the frames of a video by reading all of them: what a container says is an estimate.

    Raises:
        OSError: the file cannot be read.
        DataError: it is no video, or holds no frame.
    """
    capture = _open(path)
    try:
        frames = 0
        while capture.grab():
            frames += 1
        if not frames:
            raise DataError(f"{path}: holds no frame that can be read")
        return Length(frames, own_fps(capture), missing(capture, frames))
    finally:
        capture.release()


class Clip:
    """Decodes frames of one video. Thread-safe: a lock guards the one capture.

    A frame further on is read up to; an earlier one opens the file again and reads from its start. The file is opened
    by the first call, and closed by ``close`` or after the last of the wanted frames.
    """

    def __init__(self, path: Path, wanted: Iterable[int] = ()) -> None:
        """Open nothing yet.

        Args:
            path: of the video.
            wanted: frames that will be asked for once each, by several threads in nearly their order: up to 16 that
                are passed are kept, so that a thread which comes late does not start the file again.
        """
        self.path = path
        self._wanted = frozenset(wanted)
        self._last = max(self._wanted, default=None)
        self._lock = threading.Lock()
        self._capture: cv2.VideoCapture | None = None
        self._next = 0
        self._passed: dict[int, Image] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file and forget what was kept; the next frame opens it again."""
        with self._lock:
            self._passed.clear()
            self._release()

    def frame(self, number: int) -> Image:
        """Decode one frame, counted from 0, to (H, W, 3) uint8 BGR: upright, as the daemon plays it.

        Raises:
            OSError: the file cannot be read.
            DataError: it is no video, ends before this frame, or the frame cannot be decoded.
        """
        with self._lock:
            if number in self._passed:
                return self._passed.pop(number)
            if self._capture is None or number < self._next:
                self._release()
                self._capture, self._next = _open(self.path), 0
            for passing in range(self._next, number + 1):
                if not self._capture.grab():
                    self._release()
                    raise DataError(f"{self.path}: ends after {passing} frames, before frame {number}")
                self._next = passing + 1
                if passing in self._wanted and passing < number:
                    self._passed[passing] = self._retrieve(self._capture)
                    if len(self._passed) > _KEPT:
                        del self._passed[next(iter(self._passed))]
            image = self._retrieve(self._capture)
            if number == self._last:
                self._release()
            return image

    def _retrieve(self, capture: cv2.VideoCapture) -> Image:
        found, image = capture.retrieve()
        if not found:
            raise DataError(f"{self.path}: frame {self._next - 1} cannot be decoded")
        return np.ascontiguousarray(image, np.uint8)

    def _release(self) -> None:
        if self._capture is not None:
            self._capture.release()
            self._capture = None


def _open(path: Path) -> cv2.VideoCapture:
    with path.open("rb") as file:  # OpenCV does not say why a file cannot be opened
        if not file.read(1):
            raise DataError(f"{path}: is empty (0 bytes)")
    capture = cv2.VideoCapture(str(path), cv2.CAP_FFMPEG)
    if not capture.isOpened():
        raise DataError(
            f"{path}: is not a video that OpenCV's FFmpeg can open, or was cut off before the index at its end"
        )
    return capture

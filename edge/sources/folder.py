"""The pictures of a folder as a stream, in order of their names."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from edge.errors import DataError
from edge.files import printable
from edge.image import decode
from edge.sources import SourceHealth
from edge.sources.pace import BEAT_S, Pacer, Stamper

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator
    from types import TracebackType

    from typing_extensions import Self

    from edge import config
    from edge.types import Frame, Image

__all__ = ["SUFFIXES", "FolderSource"]

logger = logging.getLogger(__name__)

SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
"""What counts as a picture in a folder, in upper or lower case, here and in calibration."""

_DEFAULT_FPS = 10.0
_LIVE = SourceHealth("live")


class FolderSource:
    """Plays a folder once or for ever. Each pass lists it anew, so pictures may come and go."""

    lossless = False
    skipped = 0

    def __init__(self, section: config.Folder, *, stream: str, key: str) -> None:
        """Look at the folder.

        Raises:
            DataError: it is missing or holds no picture file.
        """
        self._folder = Path(section.path)
        self._key = f"{key}.path"
        self._loop = section.loop
        self._fps = section.fps or _DEFAULT_FPS
        self._stamp = Stamper(stream)
        self._refused: set[str] = set()
        self._has_given = False
        self.health = _LIVE
        self._list()

    @property
    def description(self) -> str:
        """What is read and how fast."""
        return f"pictures of {self._folder}, {self._fps:g} a second{', looped' if self._loop else ''}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Nothing stays open between frames."""

    def frames(self, stop: threading.Event, *, fit_wh: tuple[int, int] | None = None) -> Iterator[Frame | None]:
        """Yield the pictures; one that cannot be read is skipped, with a warning the first time.

        A looped folder that has given pictures, and is empty or gone for a while, is waited for as a camera would be.

        Raises:
            DataError: the folder holds no picture that can be read.
        """
        del fit_wh
        pacer = Pacer(self._fps)
        while not stop.is_set():
            try:
                yield from self._pass(pacer, stop)
            except DataError as error:
                if not (self._loop and self._has_given):
                    raise
                if self.health.state == "live":
                    logger.warning("%s; waiting for pictures", error)
                    self.health = SourceHealth("lost", str(error))
                stop.wait(BEAT_S)
                yield None
            if not self._loop:
                self.health = SourceHealth("ended")
                return

    def _pass(self, pacer: Pacer, stop: threading.Event) -> Iterator[Frame | None]:
        """The pictures that are there now, once."""
        usable = 0
        for path in self._list():
            image = self._read(path)
            if image is not None:
                usable += 1
                if not (yield from pacer.beats(stop)):
                    return
                if self.health.state == "lost":
                    logger.info("%s: %s: has pictures again", self._key, self._folder)
                self.health, self._has_given = _LIVE, True
                yield self._stamp(image, printable(path.name))
            if stop.is_set():
                return
        if not usable:
            raise DataError(f"{self._key}: {self._folder}: none of its pictures can be read")

    def _list(self) -> list[Path]:
        try:
            paths = sorted(path for path in self._folder.iterdir() if path.suffix.lower() in SUFFIXES)
        except FileNotFoundError:
            raise DataError(f"{self._key}: {self._folder}: no such folder") from None
        except NotADirectoryError:
            raise DataError(f"{self._key}: {self._folder}: is not a folder; for a video set type: video") from None
        except OSError as error:
            raise DataError(f"{self._key}: {self._folder}: {error.strerror}") from error
        self._refused &= {path.name for path in paths}
        if not paths:
            known = ", ".join(sorted(SUFFIXES))
            raise DataError(f"{self._key}: {self._folder}: holds no picture (looked for {known})")
        return paths

    def _read(self, path: Path) -> Image | None:
        try:
            return decode(path.read_bytes(), name=printable(path))
        except (DataError, OSError) as error:
            if path.name not in self._refused:
                self._refused.add(path.name)
                logger.warning("skipped: %s", printable(error))
            return None

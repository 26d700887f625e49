"""A folder into which pictures come: each is given once, when it is complete, in order of arrival."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from edge.errors import DataError
from edge.files import printable
from edge.image import decode
from edge.sources import SourceHealth
from edge.sources.folder import SUFFIXES
from edge.sources.pace import Pacer, Stamper

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from typing_extensions import Self

    from edge import config
    from edge.types import Frame, Image

__all__ = ["WatchSource"]

logger = logging.getLogger(__name__)

_Stamp: TypeAlias = tuple[int, int]
"""Modification time in ns, and size: what changes while a file is written."""

_POLL_S = 0.25
# A file that has not changed between two looks is taken for complete; one this old need not be looked at twice.
_OLD_S = 2.0
# A picture that is cut off, and stays so for this long, will not be completed: its writer has died.
_PATIENCE_S = 10.0


@dataclass(slots=True)
class _Seen:
    """One file."""

    stamp: _Stamp
    since_s: float
    """When it was first seen with this stamp."""
    done: bool = False
    """Given, or refused for good."""


class WatchSource:
    """Gives each picture of a folder once, and waits for more. A file that is written anew is a new picture.

    The folder is listed four times a second, which works on every file system; with ten thousand files that is a few
    percent of a core, so what has been taken should be removed from time to time. Nothing is remembered over a restart.
    """

    lossless = True
    skipped = 0

    def __init__(
        self,
        section: config.Folder,
        *,
        stream: str,
        key: str,
        clock: Callable[[], float] = time.monotonic,
        utc_clock: Callable[[], float] = time.time,
    ) -> None:
        """Look whether there is a folder; it may be empty.

        Raises:
            DataError: there is none.
        """
        self._folder = Path(section.path)
        self._key = f"{key}.path"
        self._fps = section.fps
        self._clock = clock
        self._utc_clock = utc_clock
        self._stamp = Stamper(stream)
        self._seen: dict[str, _Seen] = {}
        self.health = SourceHealth("live")
        if not self._folder.is_dir():
            raise DataError(f"{self._key}: {self._folder}: no such folder")

    @property
    def description(self) -> str:
        """What is read and how fast."""
        pace = "as fast as they are taken" if self._fps is None else f"at most {self._fps:g} a second"
        return f"pictures as they come into {self._folder}, {pace}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Nothing stays open between frames."""

    def frames(self, stop: threading.Event, *, fit_wh: tuple[int, int] | None = None) -> Iterator[Frame | None]:
        """Yield pictures; one that cannot be read is skipped, with a warning."""
        del fit_wh
        pacer = None if self._fps is None else Pacer(self._fps, clock=self._clock)
        while not stop.is_set():
            for name in self._complete():
                image = self._read(name)
                if image is None:
                    continue
                if pacer is not None and not (yield from pacer.beats(stop)):
                    return
                yield self._stamp(image, printable(name))
                if stop.is_set():
                    return
            yield None
            stop.wait(_POLL_S)

    def _complete(self) -> list[str]:
        """List the folder; return the pictures that nobody is writing any more, in order of arrival."""
        try:
            with os.scandir(self._folder) as entries:
                found = {entry.name: entry for entry in entries if Path(entry.name).suffix.lower() in SUFFIXES}
                stamps = {name: stamp for name, entry in found.items() if (stamp := _stamp_of(entry)) is not None}
        except OSError as error:
            if self.health.state != "lost":
                trouble = f"{self._key}: {self._folder}: {error.strerror}"
                logger.warning("%s; waiting for it", trouble)
                self.health = SourceHealth("lost", trouble)
            return []
        if self.health.state != "live":
            if self.health.state == "lost":
                logger.info("%s: %s: is there again", self._key, self._folder)
            self.health = SourceHealth("live")
        now_s, ready = self._clock(), []
        self._seen = {name: self._seen.get(name) or _Seen(stamp, now_s) for name, stamp in stamps.items()}
        for name, stamp in stamps.items():
            seen = self._seen[name]
            if seen.stamp != stamp:
                self._seen[name] = seen = _Seen(stamp, now_s)
            settled = now_s > seen.since_s or self._utc_clock() - stamp[0] / 1e9 > _OLD_S
            if settled and not seen.done and stamp[1]:
                ready.append((stamp[0], name))
        return [name for _, name in sorted(ready)]

    def _read(self, name: str) -> Image | None:
        seen, path = self._seen[name], self._folder / name
        try:
            image = decode(path.read_bytes(), name=printable(path))
        except (DataError, OSError) as error:
            if self._clock() - seen.since_s >= _PATIENCE_S:
                seen.done = True
                logger.warning("skipped: %s", printable(error))
            return None
        seen.done = True
        return image


def _stamp_of(entry: os.DirEntry[str]) -> _Stamp | None:
    """None for what is no file, or has vanished since the folder was listed."""
    try:
        status = entry.stat()
        return (status.st_mtime_ns, status.st_size) if entry.is_file() else None
    except OSError:
        return None

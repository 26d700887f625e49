"""Where frames come from. A source is added by one file and one line in ``SOURCES``; none knows of inference.

Importing this package imports nothing else of ours: a camera's own process (``edge.sources.grabber``) lives in it, and
should be small.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from typing_extensions import Self

    from edge import config
    from edge.errors import EdgeError
    from edge.events import Events
    from edge.types import Frame

__all__ = ["SOURCES", "Source", "SourceHealth", "describe", "open_source", "problems"]


@dataclass(frozen=True, slots=True)
class SourceHealth:
    """How a source is. A new one for each change, so that other threads can read it."""

    state: Literal["opening", "live", "lost", "ended"]
    trouble: str | None = None
    """Why it is lost, as the end of a sentence about the camera; secrets are masked."""
    restarts: int = 0
    """How often it was opened anew."""


class Source(Protocol):
    """An open stream, read by one thread."""

    @property
    def description(self) -> str:
        """What is read and how fast, for logs."""

    @property
    def lossless(self) -> bool:
        """Whether every frame counts: the next one is then asked for when the model has taken the one before."""

    @property
    def health(self) -> SourceHealth:
        """How it is; may be read by any thread."""

    @property
    def skipped(self) -> int:
        """Frames that arrived and were never handed on, since newer ones came or no buffer was free.

        They have indexes too: what arrived is what was handed on and what was skipped.
        """

    def frames(self, stop: threading.Event, *, fit_wh: tuple[int, int] | None = None) -> Iterator[Frame | None]:
        """Yield frames at the source's pace until it ends or ``stop`` is set; either takes effect within a second.

        Args:
            stop: ends it.
            fit_wh: input size of the model, for cameras that can scale (``scale: model``).

        Yields:
            A frame, or at least once a second None while there is none.

        Raises:
            SourceError: the stream has broken off. Cameras never raise it: they are opened anew, for ever.
            DataError: what is read holds no usable picture.
        """

    def __enter__(self) -> Self:
        """Sources are context managers; leaving the block closes the camera or file."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the source."""


def open_source(stream: config.Stream, *, key: str, events: Events) -> Source:
    """Open what a stream names. A camera that is away is no error: ``frames`` tries it for ever.

    Args:
        stream: the section of the deployment.
        key: what its source is called in the deployment, such as ``streams[0].source``, for messages.
        events: where it is told that a camera was opened or lost.

    Raises:
        ConfigError: the section cannot work, or names a password file that cannot be read.
        DataError: the file or folder is missing, or holds no picture.
        SourceError: it is there, but cannot be opened.
    """
    return SOURCES[_tag(stream.source)](stream, key, events)


def describe(source: config.Source) -> str:
    """What a section reads, in one phrase without secrets."""
    from edge.sources.survey import describe as describe_section

    return describe_section(source)


def problems(stream: config.Stream, *, key: str) -> list[EdgeError]:
    """What would keep a stream from running, as far as it can be known without opening it.

    Args:
        stream: the section of the deployment.
        key: what its source is called in the deployment, such as ``streams[0].source``.
    """
    from edge.sources.survey import problems as survey_problems

    return survey_problems(stream, key=key)


def _tag(section: config.Source) -> str:
    return str(section.__struct_config__.tag)


def _folder(stream: config.Stream, key: str, _events: Events) -> Source:
    from edge import config
    from edge.sources.folder import FolderSource
    from edge.sources.watch import WatchSource

    assert isinstance(stream.source, config.Folder)
    kind = WatchSource if stream.source.watch else FolderSource
    return kind(stream.source, stream=stream.name, key=key)


def _video(stream: config.Stream, key: str, _events: Events) -> Source:
    from edge import config
    from edge.sources.video import VideoSource

    assert isinstance(stream.source, config.Video)
    return VideoSource(stream.source, stream=stream.name, key=key)


def _pattern(stream: config.Stream, _key: str, _events: Events) -> Source:
    from edge import config
    from edge.sources.pattern import PatternSource

    assert isinstance(stream.source, config.TestPattern)
    return PatternSource(stream.source, stream=stream.name)


def _camera(stream: config.Stream, key: str, events: Events) -> Source:
    from edge.sources.camera import CameraSource

    return CameraSource(stream, key=key, events=events)


SOURCES: dict[str, Callable[[config.Stream, str, Events], Source]] = {
    "folder": _folder,
    "video": _video,
    "pattern": _pattern,
    "csi": _camera,
    "v4l2": _camera,
    "rtsp": _camera,
}
"""By the ``type`` that a source has in the deployment."""

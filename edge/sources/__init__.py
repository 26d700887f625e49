"""Where frames come from. A source is added by one file and one line in ``SOURCES``; none knows of inference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from edge import config

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from typing_extensions import Self

    from edge.types import Frame

__all__ = ["SOURCES", "Source", "SourceHealth", "describe", "open_source"]


@dataclass(frozen=True, slots=True)
class SourceHealth:
    """How a source is."""

    state: Literal["opening", "live", "lost", "ended"]
    trouble: str | None = None
    """Why it is lost."""
    restarts: int = 0
    """How often it was opened anew."""


class Source(Protocol):
    """An open stream, read by one thread."""

    @property
    def description(self) -> str:
        """What is read and how fast, for logs."""

    @property
    def lossless(self) -> bool:
        """Whether every frame counts: its reader then asks for the next one when the last has been taken."""

    @property
    def health(self) -> SourceHealth:
        """How it is; for other threads too."""

    @property
    def skipped(self) -> int:
        """Frames that arrived, got an index, and were replaced by newer ones before they could be handed on."""

    def frames(self, stop: threading.Event, *, fit_wh: tuple[int, int] | None = None) -> Iterator[Frame | None]:
        """Yield frames at the source's pace until it ends or ``stop`` is set; either takes effect within a second.

        A None says that nothing has come for a while.

        Args:
            stop: ends it.
            fit_wh: the model's input size, for cameras that can scale.

        Raises:
            SourceError: the stream has broken off.
            DataError: what is read holds no usable picture.
        """

    def __enter__(self) -> Self:
        """Sources are context managers; leaving the block closes the camera or file."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the source."""


def open_source(stream: config.Stream, *, key: str) -> Source:
    """Open what a stream names.

    Args:
        stream: the section of the deployment.
        key: what its source is called in the deployment, such as ``streams[0].source``, for messages.

    Raises:
        DataError: the file or folder is missing, or holds no picture.
        SourceError: it is there, but cannot be opened.
    """
    return SOURCES[type(stream.source)](stream.source, stream.name, key)


def _folder(section: config.Folder, stream: str, key: str) -> Source:
    from edge.sources.folder import FolderSource

    return FolderSource(section, stream=stream, key=key)


def _video(section: config.Video, stream: str, key: str) -> Source:
    from edge.sources.video import VideoSource

    return VideoSource(section, stream=stream, key=key)


def _pattern(section: config.TestPattern, stream: str, _key: str) -> Source:
    from edge.sources.pattern import PatternSource

    return PatternSource(section, stream=stream)


def describe(section: config.Source) -> str:
    """What a source reads, in a few words."""
    kind = str(section.__struct_config__.tag)
    if isinstance(section, config.TestPattern):
        return f"{kind} {section.size[0]}x{section.size[1]}, {section.fps:g} a second"
    return f"{kind} {getattr(section, 'path', '')}".rstrip()


SOURCES: dict[type[config.Source], Callable[[Any, str, str], Source]] = {
    config.Folder: _folder,
    config.TestPattern: _pattern,
    config.Video: _video,
}

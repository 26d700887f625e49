"""Where frames come from. A source is added by one file and one line in ``SOURCES``; none knows of inference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from edge import config

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from typing_extensions import Self

    from edge.types import Frame

__all__ = ["SOURCES", "Source", "open_source"]


class Source(Protocol):
    """An open stream, read by one thread."""

    @property
    def description(self) -> str:
        """What is read and how fast, for logs."""

    def frames(self, stop: threading.Event) -> Iterator[Frame]:
        """Yield frames at the source's pace until it ends or ``stop`` is set; either takes effect within a second.

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


SOURCES: dict[type[config.Source], Callable[[Any, str, str], Source]] = {
    config.Folder: _folder,
    config.Video: _video,
}

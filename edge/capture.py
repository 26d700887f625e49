"""One stream: its source, and the feed that its frames go into."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

from edge.errors import EdgeError
from edge.sources import SourceHealth

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge import config
    from edge.events import Events
    from edge.lane import Feed
    from edge.sources import Source

__all__ = ["Capture"]


class Capture:
    """Reads a source until it ends. ``serve`` is the work of one thread, and may be called again after it failed."""

    def __init__(
        self, section: config.Stream, model: str, feed: Feed, open_source: Callable[[], Source], events: Events
    ) -> None:
        """Open the source.

        Args:
            section: of the deployment.
            model: that the frames are for.
            feed: where frames go.
            open_source: opens it, and again after a failure.
            events: where the stream's end is told.

        Raises:
            EdgeError: it cannot be opened.
        """
        self.section = section
        self.model = model
        self.feed = feed
        self.fit_wh: tuple[int, int] | None = None
        """Input size of the model, for cameras that can scale."""
        self._open_source = open_source
        self._events = events
        self._stop = threading.Event()
        self._failures = 0
        self._source: Source | None = None
        self._closing = ExitStack()
        self.description = self._opened().description
        self.ended = False

    def serve(self) -> None:
        """Pass frames on until the source ends or ``stop`` is called."""
        source = self._opened()
        mailbox = self.feed.mailbox
        missed = 0
        try:
            for frame in source.frames(self._stop, fit_wh=self.fit_wh):
                if source.skipped > missed:
                    mailbox.miss(source.skipped - missed)
                    missed = source.skipped
                if frame is None:
                    continue
                self.feed.newest_at_s = frame.captured_at_s
                mailbox.put(frame)
                if source.lossless:
                    mailbox.wait_empty(self._stop.is_set)
        except BaseException:
            self.close()  # to be opened anew: what has broken off seldom goes on where it was
            self._failures += 1
            raise
        self.ended = True
        mailbox.close()
        if not self._stop.is_set():
            name = self.section.name
            self._events.emit("stream_ended", f"stream {name} has ended: {self.description}", stream=name)

    def is_passing(self, error: BaseException) -> bool:
        """Whether a failure is one that trying again may mend: not one before the first frame that is our user's."""
        return self.feed.newest_at_s is not None or not isinstance(error, EdgeError)

    @property
    def health(self) -> SourceHealth:
        """How the source is."""
        source = self._source
        if source is None:
            return SourceHealth("lost", "it is opened again", self._failures)
        health = source.health
        state = "ended" if self.ended else health.state
        return SourceHealth(state, health.trouble, health.restarts + self._failures)

    @property
    def lossless(self) -> bool:
        """Whether the source waits for its reader."""
        return self._source is not None and self._source.lossless

    def stop(self) -> None:
        """Make ``serve`` return."""
        self._stop.set()

    def close(self) -> None:
        """Close the source."""
        self._source = None
        self._closing.close()

    def _opened(self) -> Source:
        if self._source is None:
            self._source = self._closing.enter_context(self._open_source())
        return self._source

"""One model and the streams that share it: frames from their mailboxes through the pipeline, each in its turn."""

from __future__ import annotations

import logging
import threading
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from edge.errors import DeviceLostError
from edge.publish.message import ModelIdentity, UlidSource
from edge.sources.mailbox import Mailbox, take_turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from edge import config
    from edge.types import Frame, Result

__all__ = ["Lane", "Pipeline"]

logger = logging.getLogger(__name__)

# One bad frame is noise, a row of them is a fault that must not pass for a quiet camera.
_FAILURES_IN_A_ROW = 20
# For the percentiles of a run that never ends: the last 18 minutes at 60 frames a second.
_LATENCIES_KEPT = 65536


class Pipeline(Protocol):
    """The part of ``edge.process.Pipeline`` that a lane needs."""

    digest: str
    precision: str

    @property
    def description(self) -> str:
        """What runs, for logs."""

    def warm_up(self) -> None:
        """Run once, so that the first frame does not pay for what is allocated lazily."""

    @property
    def depth(self) -> int:
        """How many frames may be begun before the first of them is finished."""

    def begin(self, frame: Frame) -> None:
        """Hand a frame to the engine."""

    def finish(self) -> Result:
        """The result of the oldest frame that was begun."""


class Lane:
    """A model at work. ``serve`` runs in a thread of its own; others read the numbers."""

    def __init__(self, model: config.Model) -> None:
        self.model = model
        self.mailboxes: list[Mailbox[Frame]] = []
        self.ready = threading.Event()
        self.identity: ModelIdentity | None = None
        self.inferred = 0
        self.failed = 0
        self.latencies_ms: deque[float] = deque(maxlen=_LATENCIES_KEPT)
        self._bell = threading.Condition()
        self._failed_in_a_row = 0

    def add_stream(self) -> Mailbox[Frame]:
        """A mailbox for one more stream."""
        self.mailboxes.append(Mailbox(self._bell))
        return self.mailboxes[-1]

    def serve(
        self,
        open_model: Callable[[config.Model], AbstractContextManager[Pipeline]],
        deliver: Callable[[Result, str, ModelIdentity], None],
        stop: threading.Event,
    ) -> None:
        """Load the model, warm it up, then process frames until there are no more."""
        # Opened on the thread that uses it, so that the lanes load their models side by side.
        with open_model(self.model) as pipeline:
            pipeline.warm_up()
            logger.info("model %s", pipeline.description)
            identity = ModelIdentity.of(self.model.name, precision=pipeline.precision, sha256=pipeline.digest)
            self.identity = identity
            self.ready.set()
            new_id = UlidSource()
            for result in self._results(pipeline, stop):
                deliver(result, new_id(), identity)

    def _results(self, pipeline: Pipeline, stop: threading.Event) -> Iterator[Result]:
        """Process what the mailboxes give.

        Where the engine takes a second frame while it computes the first, that frame is prepared meanwhile, if it is
        there already: nobody waits for one, since that would cost the first its latency.
        """
        begun: deque[Frame] = deque()
        for frame in take_turns(self.mailboxes, stop, busy=lambda: bool(begun)):
            if frame is not None:
                with self._surviving(frame):
                    pipeline.begin(frame)
                    begun.append(frame)
            if begun and (frame is None or len(begun) == pipeline.depth):
                yield from self._finished(pipeline, begun.popleft())
        for frame in begun:
            yield from self._finished(pipeline, frame)

    def _finished(self, pipeline: Pipeline, frame: Frame) -> list[Result]:
        """The frame's result, or nothing where it failed."""
        found: list[Result] = []
        with self._surviving(frame):
            found.append(pipeline.finish())
            self._failed_in_a_row = 0
            self.inferred += 1
            self.latencies_ms.append(found[0].latency.total_ms)
        return found

    @contextmanager
    def _surviving(self, frame: Frame) -> Iterator[None]:
        """Count a frame that fails, and go on; a row of them is an error."""
        try:
            yield
        except DeviceLostError:
            raise  # not about this frame: no other will fare better
        except Exception as error:  # whatever it is, it is about one frame until it repeats
            self.failed += 1
            self._failed_in_a_row += 1
            if self._failed_in_a_row >= _FAILURES_IN_A_ROW:
                raise
            where = f"stream {frame.stream}, frame {frame.name or frame.index}"
            logger.warning("%s: skipped: %s", where, error, exc_info=self._failed_in_a_row == 1)

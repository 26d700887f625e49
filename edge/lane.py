"""One model of the deployment and the streams that share it: frames from their mailboxes through whoever runs it.

The lane outlives its runners. When an engine is swapped, the new runner loads and warms up beside the old one, which
then finishes what it has begun and leaves; the frames that come meanwhile wait in the mailboxes, the newest of each.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from bisect import bisect_left
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from edge.errors import DeviceLostError
from edge.gate import Gate
from edge.publish.message import ModelIdentity, UlidSource
from edge.sources.mailbox import Mailbox, take_turns
from edge.status import Histogram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from edge import config
    from edge.events import Events
    from edge.types import Frame, Result

__all__ = ["Feed", "Lane", "Pipeline", "Runner", "Tally"]

logger = logging.getLogger(__name__)

# One bad frame is noise, a row of them is a fault that must not pass for a quiet camera.
_FAILURES_IN_A_ROW = 20
_FAILURES_TOLD_EVERY_S = 60.0
# For the percentiles of a run that never ends: the last 18 minutes at 60 frames a second.
_LATENCIES_KEPT = 65536
# Upper bounds in seconds, finest where cameras and engines of this class are.
_BOUNDS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)


class Pipeline(Protocol):
    """The part of ``edge.process.Pipeline`` that a runner needs."""

    digest: str
    precision: str

    @property
    def description(self) -> str:
        """What runs, for logs."""

    @property
    def input_wh(self) -> tuple[int, int]:
        """Width and height of the pictures that the model takes."""

    def warm_up(self) -> None:
        """Run once, so that the first frame does not pay for what is allocated lazily."""

    @property
    def depth(self) -> int:
        """How many frames may be begun before the first of them is finished."""

    def begin(self, frame: Frame) -> None:
        """Hand a frame to the engine."""

    def finish(self) -> Result:
        """The result of the oldest frame that was begun."""


class Tally:
    """Counts values by size. One thread adds; others take snapshots, which may be one value behind."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS_S) + 1)
        self._total_s = 0.0

    def add(self, value_s: float) -> None:
        """Count one value, in seconds."""
        self._counts[bisect_left(_BOUNDS_S, value_s)] += 1
        self._total_s += value_s

    def histogram(self) -> Histogram:
        """What was counted so far."""
        return Histogram(_BOUNDS_S, tuple(self._counts), self._total_s)


class Feed:
    """One stream on its way into a lane, and what became of its frames. The mailbox is the lane's way to it."""

    def __init__(self, stream: str, bell: threading.Condition, gate: Gate) -> None:
        self.stream = stream
        self.mailbox: Mailbox[Frame] = Mailbox(bell, why=gate.why_not_taken)
        self.inferred = 0
        self.failed = 0
        self.latency = Tally()
        self.newest_at_s: float | None = None
        """When the newest frame was captured, on the monotonic clock."""


class Lane:
    """Streams, gate and counters of one model. A runner serves it; the owner and the governor read the numbers."""

    def __init__(self, name: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.clock = clock
        self.bell = threading.Condition()
        self.gate = Gate(clock=clock)
        self.feeds: dict[str, Feed] = {}
        self.inference = Tally()
        self.latencies_ms: deque[float] = deque(maxlen=_LATENCIES_KEPT)
        self.idle_s = 0.0
        """Seconds that a runner has spent waiting for frames or for the gate."""
        self._known: dict[str, Feed] = {}
        self._mailboxes: list[Mailbox[Frame]] = []

    def new_feed(self, stream: str) -> Feed:
        """Make room for a stream; its frames get their turns from ``add_feed`` on."""
        return Feed(stream, self.bell, self.gate)

    def add_feed(self, feed: Feed) -> None:
        """Give a stream its turns."""
        self._known[feed.stream] = feed
        self._replace({**self.feeds, feed.stream: feed})

    def remove_feed(self, feed: Feed) -> None:
        """Let go of a stream; the frame of it that waits is dropped."""
        self._replace({name: kept for name, kept in self.feeds.items() if kept is not feed})
        feed.mailbox.discard()

    def limit(self, fps: float | None) -> None:
        """Set the frame rate that the lane may reach; None is no limit, 0 a pause."""
        if fps != self.gate.limit_fps:
            self.gate.limit_fps = fps
            self.ring()

    def ring(self) -> None:
        """Wake the runner, because what it waits for may have changed."""
        with self.bell:
            self.bell.notify_all()

    def turns(self, until: Callable[[], bool], busy: Callable[[], bool]) -> Iterator[Frame | None]:
        """The frames of its streams as ``take_turns`` gives them, no faster than the gate allows."""
        asked_s = self.clock()
        for frame in take_turns(lambda: self._mailboxes, self.bell, until, busy=busy, due_in_s=self.gate.due_in_s):
            self.idle_s += self.clock() - asked_s
            if frame is not None:
                self.gate.passed()
            yield frame
            asked_s = self.clock()

    @property
    def inferred(self) -> int:
        """Frames of all its streams that became results."""
        return sum(feed.inferred for feed in self.feeds.values())

    def note_result(self, result: Result) -> None:
        """Count a frame that became a result."""
        self.inference.add(result.latency.inference_ms / 1e3)
        self.latencies_ms.append(result.latency.total_ms)
        feed = self._known[result.frame.stream]
        feed.inferred += 1
        feed.latency.add(result.latency.total_ms / 1e3)

    def note_failure(self, frame: Frame) -> None:
        """Count a frame that did not."""
        self._known[frame.stream].failed += 1

    def _replace(self, feeds: dict[str, Feed]) -> None:
        """Swap the whole mapping: the runner's thread may be looking at the old one."""
        with self.bell:
            self.feeds = feeds
            self._mailboxes = [feed.mailbox for feed in feeds.values()]
            self.bell.notify_all()


class Runner:
    """A model at work on a lane. ``serve`` is the work of one thread, and may be called again after it failed."""

    def __init__(self, lane: Lane, model: config.Model, events: Events, *, at_once: bool = True) -> None:
        """Prepare.

        Args:
            lane: to serve.
            model: to load.
            events: told of the first of several frames in a row that fail.
            at_once: begin as soon as the model is loaded; otherwise when ``take_over`` is called.
        """
        self.model = model
        self.ready = threading.Event()
        self.identity: ModelIdentity | None = None
        self.sha256: str | None = None
        self.description: str | None = None
        self.input_wh: tuple[int, int] | None = None
        self.loading_since_s: float | None = None
        self.busy_since_s: float | None = None
        """When the call into the pipeline that goes on now began."""
        self._lane = lane
        self._events = events
        self._leave = False
        self._go = threading.Event()
        if at_once:
            self._go.set()
        self._begun: deque[Frame] = deque()
        self._failed_in_a_row = 0
        self._next_failure_told_s = -math.inf

    def take_over(self) -> None:
        """Begin to take frames."""
        self._go.set()

    def leave(self) -> None:
        """Finish what has begun, and return from ``serve``."""
        self._leave = True
        self._go.set()
        self._lane.ring()

    def serve(
        self,
        open_model: Callable[[config.Model], AbstractContextManager[Pipeline]],
        deliver: Callable[[Result, str, ModelIdentity], None],
        stop: threading.Event,
    ) -> None:
        """Load the model, warm it up, then process frames until there are no more."""
        if self._leave:
            return
        self._failed_in_a_row = 0
        self.loading_since_s = self._lane.clock()
        # Opened on the thread that uses it, as CUDA asks, and so that lanes load their models side by side.
        with open_model(self.model) as pipeline:
            pipeline.warm_up()
            self.loading_since_s = None
            identity = ModelIdentity.of(self.model.name, precision=pipeline.precision, sha256=pipeline.digest)
            self.identity, self.sha256 = identity, pipeline.digest
            self.description, self.input_wh = pipeline.description, pipeline.input_wh
            self.ready.set()
            self._go.wait()
            new_id = UlidSource()
            try:
                for result in self._results(pipeline, lambda: self._leave or stop.is_set()):
                    deliver(result, new_id(), identity)
            finally:
                while self._begun:  # after an error: lost with the engine
                    self._lane.note_failure(self._begun.popleft())

    def _results(self, pipeline: Pipeline, until: Callable[[], bool]) -> Iterator[Result]:
        """Process what the mailboxes give.

        Where the engine takes a second frame while it computes the first, that frame is prepared meanwhile, if it is
        there already: nobody waits for one, since that would cost the first its latency.
        """
        begun = self._begun
        for frame in self._lane.turns(until, busy=lambda: bool(begun)):
            if frame is not None:
                begun.append(frame)
                with self._surviving(begun.pop):
                    pipeline.begin(frame)
            if begun and (frame is None or len(begun) == pipeline.depth):
                yield from self._finished(pipeline)
        while begun:
            yield from self._finished(pipeline)

    def _finished(self, pipeline: Pipeline) -> list[Result]:
        """The result of the oldest frame that has begun, or nothing where it failed."""
        found: list[Result] = []
        with self._surviving(self._begun.popleft):
            found.append(pipeline.finish())
            self._begun.popleft()
            self._failed_in_a_row = 0
            self._lane.note_result(found[0])
        return found

    @contextmanager
    def _surviving(self, take_out: Callable[[], Frame]) -> Iterator[None]:
        """Count a frame that fails, which ``take_out`` removes, and go on; a row of them is an error."""
        self.busy_since_s = self._lane.clock()
        try:
            yield
        except DeviceLostError:
            raise  # not about this frame: no other will fare better
        except Exception as error:  # whatever it is, it is about one frame until it repeats
            frame = take_out()
            self._lane.note_failure(frame)
            self._failed_in_a_row += 1
            if self._failed_in_a_row >= _FAILURES_IN_A_ROW:
                raise
            self._tell_failure(frame, error)
        finally:
            self.busy_since_s = None

    def _tell_failure(self, frame: Frame, error: Exception) -> None:
        where = f"stream {frame.stream}, frame {frame.name or frame.index}"
        logger.debug("%s: what failed:", where, exc_info=error)
        now_s = self._lane.clock()
        if now_s >= self._next_failure_told_s:
            self._next_failure_told_s = now_s + _FAILURES_TOLD_EVERY_S
            text = f"{where}: skipped: {error}"
            self._events.emit("frame_failed", text, severity="warning", stream=frame.stream, model=self.model.name)

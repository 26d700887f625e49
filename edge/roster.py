"""Who is at work: the models with their runners and the streams with their captures, as the deployment wants them.

The owner's thread changes it; the monitor's and the status server's threads read it. Mappings are therefore replaced,
never changed in place.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from edge.capture import Capture
from edge.lane import Lane
from edge.sources import open_source
from edge.worker import Worker

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from edge import config
    from edge.events import Events
    from edge.lane import Feed, Pipeline
    from edge.publish.message import ModelIdentity
    from edge.supervisor import Supervisor
    from edge.types import Result

__all__ = ["Roster"]


class Roster:
    """Workers by model and captures by stream."""

    def __init__(
        self,
        deployment: config.Deployment,
        *,
        crew: Supervisor,
        open_model: Callable[[config.Model], AbstractContextManager[Pipeline]],
        deliver: Callable[[Result, str, ModelIdentity], None],
        events: Events,
        halt: threading.Event,
        clock: Callable[[], float],
    ) -> None:
        self.deployment = deployment
        self.workers: dict[str, Worker] = {}
        self.captures: dict[str, Capture] = {}
        self.feeds: list[Feed] = []
        """Of all streams there ever were, for the sums."""
        self._crew = crew
        self._open_model = open_model
        self._deliver = deliver
        self._events = events
        self._halt = halt
        self._clock = clock

    def hire(self, model: str) -> Worker:
        """A worker for a model, not yet loaded nor in the roster."""
        return Worker(
            Lane(model, clock=self._clock),
            crew=self._crew,
            open_model=self._open_model,
            deliver=self._deliver,
            events=self._events,
            stop=self._halt,
        )

    def open_capture(self, deployment: config.Deployment, stream: config.Stream, lane: Lane) -> Capture:
        """Open a stream whose frames will go to a lane.

        Raises:
            EdgeError: it cannot be opened.
        """
        key = f"streams[{deployment.streams.index(stream)}].source"
        opened = partial(open_source, stream, key=key, events=self._events)
        return Capture(stream, lane.name, lane.new_feed(stream.name), opened, self._events)

    def worker_of(self, capture: Capture) -> Worker:
        """Who works on a stream."""
        return self.workers[capture.model]

    def staff(self) -> None:
        """Open every stream, and hire a worker for every model that one goes to.

        Raises:
            EdgeError: a stream cannot be opened.
        """
        for stream in self.deployment.streams:
            name = self.deployment.model(stream.model).name
            if name not in self.workers:
                self.workers = {**self.workers, name: self.hire(name)}
            capture = self.open_capture(self.deployment, stream, self.workers[name].lane)
            self.captures = {**self.captures, stream.name: capture}

    def start(self, capture: Capture, *, tolerant: bool = False) -> None:
        """Begin to capture.

        Args:
            capture: of a stream whose worker is in the roster.
            tolerant: keep trying with bad input too, so as not to end what runs beside it.
        """
        worker = self.worker_of(capture)
        self.captures = {**self.captures, capture.section.name: capture}
        self.feeds.append(capture.feed)
        worker.lane.add_feed(capture.feed)
        capture.fit_wh = worker.runner.input_wh if worker.runner is not None else None
        self._crew.start(
            f"capture-{capture.section.name}",
            capture.serve,
            essential=False,
            forgiving=lambda error: tolerant or capture.is_passing(error),
        )

    def drop(self, stream: str) -> None:
        """End a stream."""
        capture = self.captures[stream]
        capture.stop()
        self.worker_of(capture).lane.remove_feed(capture.feed)
        self.captures = {name: kept for name, kept in self.captures.items() if name != stream}

    def keep_only(self, models: set[str]) -> None:
        """Let the workers of other models go."""
        for name, worker in self.workers.items():
            if name not in models:
                worker.leave()
        self.workers = {name: worker for name, worker in self.workers.items() if name in models}

    @property
    def ready(self) -> bool:
        """Whether every model is loaded."""
        return all(worker.runner is not None and worker.runner.ready.is_set() for worker in self.workers.values())

    @property
    def working(self) -> bool:
        """Whether a model is at work: not any more when all streams have ended."""
        return any(worker.working for worker in self.workers.values())

    @property
    def identities(self) -> list[ModelIdentity]:
        """What is loaded."""
        runners = [worker.runner for worker in self.workers.values()]
        return [runner.identity for runner in runners if runner is not None and runner.identity is not None]

    def end(self) -> None:
        """Make every capture and every runner return."""
        self._halt.set()
        for capture in self.captures.values():
            capture.stop()
        for worker in self.workers.values():
            worker.leave()

    def close(self) -> None:
        """Close every source."""
        for capture in self.captures.values():
            capture.close()

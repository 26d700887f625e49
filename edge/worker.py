"""A lane and who serves it: the runner at work, and while an engine is swapped the next one, loading beside it.

Methods are the owner's thread's; only what a runner does happens in threads of their own.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from edge.lane import Lane, Runner

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from edge import config
    from edge.events import Events
    from edge.lane import Pipeline
    from edge.publish.message import ModelIdentity
    from edge.supervisor import Part, Supervisor
    from edge.types import Result

__all__ = ["Worker"]


class Worker:
    """One model of the deployment at work."""

    def __init__(
        self,
        lane: Lane,
        *,
        crew: Supervisor,
        open_model: Callable[[config.Model], AbstractContextManager[Pipeline]],
        deliver: Callable[[Result, str, ModelIdentity], None],
        events: Events,
        stop: threading.Event,
    ) -> None:
        """Prepare; ``load`` begins.

        Args:
            lane: to serve.
            crew: runs the threads.
            open_model: loads a model; called in the thread that will use it.
            deliver: takes the results, in that thread.
            events: where a swap is told.
            stop: ends the runners.
        """
        self.lane = lane
        self.runner: Runner | None = None
        """At work, or loading for the first time; None before ``load``."""
        self._crew = crew
        self._serve = partial(Runner.serve, open_model=open_model, deliver=deliver, stop=stop)
        self._events = events
        self._part: Part | None = None
        self._next: tuple[Runner, Part] | None = None
        self.handing_over = False
        """Whether the one at work was told to leave."""

    def load(self, model: config.Model, *, at_once: bool = False) -> None:
        """Load a model: the first one, or beside the one at work, which goes on.

        Args:
            model: to load.
            at_once: the first one; it begins as soon as it is loaded, and fails as any part does.
        """
        runner = Runner(self.lane, model, self._events, at_once=at_once)
        part = self._crew.start(f"infer-{self.lane.name}", partial(self._serve, runner), adopted=at_once)
        if at_once:
            self.runner, self._part = runner, part
        else:
            self._next = runner, part

    @property
    def loading(self) -> bool:
        """Whether another runner is being loaded, has failed to load, or waits to take over."""
        return self._next is not None

    @property
    def loaded(self) -> bool:
        """Whether the other runner can take over."""
        return self._next is not None and self._next[0].ready.is_set() and self.failure is None

    @property
    def failure(self) -> BaseException | None:
        """Why the other runner could not be loaded."""
        return self._next[1].error if self._next is not None else None

    @property
    def next_model(self) -> config.Model | None:
        """Which model the other runner loads."""
        return self._next[0].model if self._next is not None else None

    def discard(self) -> None:
        """Let the other runner go."""
        if self._next is not None:
            self._next[0].leave()
            self._next = None

    def hand_over(self) -> None:
        """Make the runner at work leave after what it has begun; ``tend`` then lets the other one begin."""
        assert self.loaded, "there must be somebody to hand over to"
        self.handing_over = True
        if self.runner is not None and self._part is not None:
            self._part.adopted = False  # its troubles are over
            self.runner.leave()

    def tend(self) -> bool:
        """Complete a hand-over whose old runner has left; return whether that was the case."""
        if not self.handing_over or (self._part is not None and self._part.alive):
            return False
        assert self._next is not None, "hand_over has seen to it"
        before = self.runner.model.name if self.runner is not None else None
        (self.runner, self._part), self._next, self.handing_over = self._next, None, False
        self._part.adopted = True
        self.runner.take_over()
        name, lane = self.runner.model.name, self.lane.name
        if before is not None:
            text = f"model {lane}: now runs {self.runner.description}"
            self._events.emit("model_swapped", text, model=lane, now=name, before=before, sha256=self.runner.sha256)
        return True

    @property
    def working(self) -> bool:
        """Whether a runner is alive or about to be: false when all streams have ended, or it was told to leave."""
        return self.handing_over or (self._part is not None and self._part.alive)

    def leave(self) -> None:
        """Make every runner return."""
        self.discard()
        if self.runner is not None:
            self.runner.leave()

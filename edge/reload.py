"""Another deployment, or another version of a model, without a pause: loaded beside what runs, then handed over to.

All or nothing: where one model or one stream of a changed deployment cannot be opened, what ran goes on. Called by the
owner's thread; only loading happens elsewhere.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge.errors import ConfigError, EdgeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge import config
    from edge.capture import Capture
    from edge.events import Events
    from edge.publish.publisher import Publisher
    from edge.roster import Roster
    from edge.worker import Worker

__all__ = ["Changes", "Reloader", "compare"]

# What only the start of the process reads.
_AT_START = ("device", "mqtt", "status", "watch")


@dataclass(frozen=True, slots=True)
class Changes:
    """From one deployment to the next."""

    stop: tuple[str, ...]
    """Streams that end: gone, or to be started anew."""
    start: tuple[config.Stream, ...]
    """Streams that begin: new, or with another source or model."""
    keep: tuple[str, ...]
    models: tuple[str, ...]
    """Models that streams of the next deployment use, each once."""
    later: tuple[str, ...]
    """Sections that differ, and take effect when the process is started again."""


def compare(old: config.Deployment, new: config.Deployment) -> Changes:
    """Say what is to be done to get from one to the other."""
    before = {stream.name: (stream.source, old.model(stream.model).name) for stream in old.streams}
    after = {stream.name: (stream.source, new.model(stream.model).name) for stream in new.streams}
    keep = tuple(name for name in before if after.get(name) == before[name])
    return Changes(
        stop=tuple(name for name in before if name not in keep),
        start=tuple(stream for stream in new.streams if stream.name not in keep),
        keep=keep,
        models=tuple(dict.fromkeys(model for _source, model in after.values())),
        later=tuple(key for key in _AT_START if getattr(old, key) != getattr(new, key)),
    )


class _Attempt:
    """A new deployment whose models are being loaded and whose streams are open, but not running yet."""

    def __init__(self, deployment: config.Deployment, changes: Changes) -> None:
        self.deployment = deployment
        self.changes = changes
        self.fresh: dict[str, Worker] = {}  # of models that were not at work
        self.swapped: list[Worker] = []
        self.captures: list[Capture] = []

    @property
    def workers(self) -> list[Worker]:
        return [*self.swapped, *self.fresh.values()]


class Reloader:
    """Has the roster follow the deployment file and the governor."""

    def __init__(
        self,
        roster: Roster,
        *,
        publisher: Publisher,
        events: Events,
        notify: Callable[..., object],
        lighter: Callable[[], bool],
        digest_of: Callable[[config.Model], str],
    ) -> None:
        """Prepare.

        Args:
            roster: to change.
            publisher: told what is loaded.
            events: where each outcome is told.
            notify: tells the service manager.
            lighter: whether the governor wants lighter models.
            digest_of: SHA-256 of the file that a model runs, to tell one that was built again.
        """
        self.without_lighter: set[str] = set()
        """Models whose lighter one could not be loaded."""
        self._roster = roster
        self._publisher = publisher
        self._events = events
        self._notify = notify
        self._lighter = lighter
        self._digest_of = digest_of
        self._attempt: _Attempt | None = None

    @property
    def busy(self) -> bool:
        """Whether a reload goes on."""
        return self._attempt is not None

    def begin(self, load: Callable[[], config.Deployment]) -> None:
        """Load the deployment, its new models and its new streams; nothing that runs is touched."""
        # Type=notify-reload wants the moment, to tell this reload from an earlier one (sd_notify(3)).
        self._notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}", "STATUS=reloading")
        self._events.emit("reload_started", "reload: looking at the deployment file")
        attempt: _Attempt | None = None
        try:
            deployment = load()
            if not deployment.streams:
                raise ConfigError(["streams: is empty; name at least one stream to run"])
            attempt = _Attempt(deployment, compare(self._roster.deployment, deployment))
            self._prepare(attempt)
        except (EdgeError, OSError) as error:
            self._refuse(attempt, error)
        else:
            self._attempt = attempt

    def tend(self) -> None:
        """Complete hand-overs, the reload that goes on, and what the governor wants."""
        promoted = [worker for worker in self._roster.workers.values() if worker.tend()]
        if promoted:
            self._announce()
        if self._attempt is None:
            for name, worker in self._roster.workers.items():
                self._tend_version(name, worker)
            return
        workers = self._attempt.workers
        failure = next((worker.failure for worker in workers if worker.failure is not None), None)
        if failure is not None:
            self._refuse(self._attempt, failure)
        elif all(worker.loaded for worker in workers):
            self._commit(self._attempt)

    def abort(self) -> None:
        """Let go of a reload that goes on."""
        if self._attempt is not None:
            self._let_go(self._attempt)

    def _wanted(self, deployment: config.Deployment, name: str) -> config.Model:
        """What should run for a model: itself, or its lighter one where the governor says so."""
        model = deployment.model(name)
        if self._lighter() and model.lighter is not None and name not in self.without_lighter:
            return deployment.model(model.lighter)
        return model

    def _tend_version(self, name: str, worker: Worker) -> None:
        """Have a model run in the version that the governor wants."""
        wanted = self._wanted(self._roster.deployment, name)
        if not worker.loading:
            if worker.runner is not None and worker.working and worker.runner.model != wanted:
                worker.load(wanted)
        elif worker.handing_over:
            return
        elif worker.failure is not None:
            text = f"model {name}: cannot change to {wanted.name}: {worker.failure}"
            self._events.emit("reload_failed", text, severity="error", model=name)
            self.without_lighter.add(name)
            worker.discard()
        elif worker.next_model != wanted:
            worker.discard()  # the governor has changed its mind
        elif worker.loaded:
            worker.hand_over()

    def _prepare(self, attempt: _Attempt) -> None:
        """Open and load what is new."""
        roster, deployment = self._roster, attempt.deployment
        self.without_lighter.clear()
        for name in attempt.changes.models:
            wanted, worker = self._wanted(deployment, name), roster.workers.get(name)
            if worker is None or not worker.working:
                attempt.fresh[name] = roster.hire(name)
                attempt.fresh[name].load(wanted)
                continue
            runner = worker.runner
            worker.discard()
            # An engine that was built again has the same section, and is another file.
            if runner is None or runner.model != wanted or self._digest_of(wanted) != runner.sha256:
                worker.load(wanted)
                attempt.swapped.append(worker)
        for stream in attempt.changes.start:
            name = deployment.model(stream.model).name
            lane = (attempt.fresh.get(name) or roster.workers[name]).lane
            attempt.captures.append(roster.open_capture(deployment, stream, lane))

    def _commit(self, attempt: _Attempt) -> None:
        """Everything is there: let it take over."""
        roster, changes = self._roster, attempt.changes
        for name in changes.stop:
            roster.drop(name)
        for worker in attempt.workers:
            worker.hand_over()
            worker.tend()  # one without a predecessor begins at once
        roster.keep_only(set(changes.models) - set(attempt.fresh))
        roster.workers = {**roster.workers, **attempt.fresh}
        roster.deployment = attempt.deployment
        for capture in attempt.captures:
            roster.start(capture, tolerant=True)
        self._attempt = None
        self._announce()
        done = [
            f"{len(attempt.workers)} models loaded",
            f"{len(changes.keep)} streams kept, {len(changes.start)} started, {len(changes.stop)} stopped",
        ]
        if changes.later:
            done.append(f"changes of {', '.join(changes.later)} take effect when the service is restarted")
        self._events.emit("reload_done", f"reload: {'; '.join(done)}", severity="warning" if changes.later else "info")
        self._notify("READY=1", f"STATUS=running {len(roster.captures)} streams")

    def _announce(self) -> None:
        """Have the retained status say what is loaded."""
        self._publisher.announce(self._roster.identities, list(self._roster.captures))

    def _refuse(self, attempt: _Attempt | None, error: BaseException) -> None:
        if attempt is not None:
            self._let_go(attempt)
        lines = str(error).splitlines() or [type(error).__name__]
        more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
        text = f"reload: refused, what ran goes on: {lines[0]}{more}"
        self._events.emit("reload_failed", text, severity="error", problems=lines)
        streams = len(self._roster.captures)
        self._notify("READY=1", f"STATUS=running {streams} streams; last reload refused: {lines[0]}")

    def _let_go(self, attempt: _Attempt) -> None:
        for worker in attempt.swapped:
            worker.discard()
        for worker in attempt.fresh.values():
            worker.leave()
        for capture in attempt.captures:
            capture.close()
        self._attempt = None

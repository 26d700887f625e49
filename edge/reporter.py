"""Looks at every part from outside: one snapshot for metrics, page and telemetry, and the verdicts on it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

from edge import __version__, health
from edge.status import ModelState, Snapshot, StreamState

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from edge.capture import Capture
    from edge.events import Events
    from edge.publish.publisher import Publisher
    from edge.regulator import Regulator
    from edge.roster import Roster
    from edge.supervisor import Supervisor
    from edge.worker import Worker

__all__ = ["Reporter"]


class Reporter:
    """Reads what the parts say of themselves. ``snapshot`` is for any thread, the rest for the owner's."""

    def __init__(
        self,
        roster: Roster,
        *,
        regulator: Regulator,
        publisher: Publisher,
        supervisors: tuple[Supervisor, ...],
        events: Events,
        path: Path | None,
        clock: Callable[[], float],
        utc_clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.state: Literal["starting", "running", "stopping"] = "starting"
        """Set by the owner."""
        self._roster = roster
        self._regulator = regulator
        self._publisher = publisher
        self._supervisors = supervisors
        self._events = events
        self._path = path
        self._clock = clock
        self._device = roster.deployment.device_id
        self._started_s, self._started_utc_us = clock(), utc_clock_ns() // 1000
        self._unhealthy: list[str] = []
        self._moved: dict[str, tuple[int, float]] = {}

    @property
    def uptime_s(self) -> float:
        """Seconds since the start of the process's work."""
        return self._clock() - self._started_s

    def snapshot(self) -> Snapshot:
        """The daemon as it is now."""
        return Snapshot(
            device=self._device,
            version=__version__,
            deployment="" if self._path is None else str(self._path),
            started_at_utc_us=self._started_utc_us,
            uptime_s=self.uptime_s,
            state=self.state,
            streams=[self._stream(capture) for capture in self._roster.captures.values()],
            models=[self._model(worker) for worker in self._roster.workers.values()],
            publisher=self._publisher.state,
            parts=[part for supervisor in self._supervisors for part in supervisor.parts],
            governor=self._regulator.state,
            reading=self._regulator.reading,
            event_counts={(kind, severity): count for (kind, severity), count in self._events.counts.items()},
            recent_events=self._events.recent,
            unhealthy=self._unhealthy,
            not_ready=self.not_ready(),
        )

    def not_ready(self, *, broker: bool = True) -> list[str]:
        """Why results do not flow, or with ``broker`` do not arrive: a broker need not be told of its own absence."""
        return health.not_ready(
            state=self.state,
            streams=[self._stream(capture) for capture in self._roster.captures.values()],
            models=[self._model(worker) for worker in self._roster.workers.values()],
            governor=self._regulator.state,
            publisher=self._publisher.state if broker else None,
        )

    def examine(self) -> list[str]:
        """Look for what has hung, and remember it for the next snapshot."""
        self._unhealthy = health.unhealthy(
            self._roster.deployment.watch,
            models=[self._model(worker) for worker in self._roster.workers.values()],
            loading_s=[(worker.lane.name, self._loading_s(worker)) for worker in self._roster.workers.values()],
            untouched_s=[(name, self._untouched_s(capture)) for name, capture in self._roster.captures.items()],
            publisher_silent_s=self._clock() - self._publisher.beat_at_s if self.state == "running" else 0.0,
        )
        return self._unhealthy

    def _loading_s(self, worker: Worker) -> float:
        since_s = None if worker.runner is None else worker.runner.loading_since_s
        return 0.0 if since_s is None else self._clock() - since_s

    def _untouched_s(self, capture: Capture) -> float:
        """For how long a frame of a stream has waited although its model was loaded and allowed to take it."""
        feed, worker = capture.feed, self._roster.worker_of(capture)
        now_s, count = self._clock(), feed.inferred + feed.failed
        seen, since_s = self._moved.get(feed.stream, (count, now_s))
        idle = not feed.mailbox.waiting or worker.lane.gate.due_in_s() > 0
        runner = worker.runner
        # While it loads or computes, it is judged by that.
        occupied = runner is None or runner.loading_since_s is not None or runner.busy_since_s is not None
        if seen != count or idle or occupied or worker.handing_over:
            since_s = now_s
        self._moved[feed.stream] = count, since_s
        return now_s - since_s

    def _stream(self, capture: Capture) -> StreamState:
        feed, source = capture.feed, capture.health
        fps_in, fps = self._regulator.rates(feed.stream)
        inferred, failed, dropped = feed.inferred, feed.failed, dict(feed.mailbox.dropped_by)
        captured = feed.mailbox.put_count
        return StreamState(
            name=feed.stream,
            model=capture.model,
            source=capture.description,
            state=source.state,
            trouble=source.trouble,
            captured=captured,
            inferred=inferred,
            failed=failed,
            dropped=dropped,
            waiting=captured - inferred - failed - sum(dropped.values()),
            restarts=source.restarts,
            last_frame_age_s=None if feed.newest_at_s is None else max(0.0, self._clock() - feed.newest_at_s),
            latency_s=feed.latency.histogram(),
            fps_in=fps_in,
            fps=fps,
        )

    def _model(self, worker: Worker) -> ModelState:
        runner, lane = worker.runner, worker.lane
        at_work = runner if runner is not None and runner.loading_since_s is None else None
        identity = at_work.identity if at_work is not None else None
        busy_since_s = at_work.busy_since_s if at_work is not None else None
        return ModelState(
            name=lane.name,
            running=None if identity is None else identity.name,
            precision=None if identity is None else identity.precision,
            digest=None if identity is None else identity.digest,
            description=None if at_work is None else at_work.description,
            inferred=lane.inferred,
            busy_s=None if busy_since_s is None else max(0.0, self._clock() - busy_since_s),
            limit_fps=lane.gate.limit_fps,
            inference_s=lane.inference.histogram(),
        )

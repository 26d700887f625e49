"""The monitor's thread: reads the device, asks the governor, and sets what each model may do."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from edge.monitor.governor import Demand, Governor
from edge.rates import Rate
from edge.status import GovernorState

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from edge import config
    from edge.events import Events
    from edge.monitor.governor import Order
    from edge.monitor.monitor import Monitor
    from edge.monitor.reading import Reading
    from edge.roster import Roster
    from edge.worker import Worker

__all__ = ["Regulator"]


class _Gauges:
    """Rates of one stream or one model."""

    def __init__(self) -> None:
        self.arriving = Rate()
        self.inferred = Rate()
        self.idle_s = Rate()
        self.capacity_fps: float | None = None
        """Frames a second that the engine could do, when it was last seen at work."""


class Regulator:
    """``serve`` is the work of one thread; others read what it has found."""

    def __init__(
        self,
        roster: Roster,
        *,
        without_lighter: Callable[[], set[str]],
        events: Events,
        clock: Callable[[], float],
    ) -> None:
        self.reading: Reading | None = None
        self.order: Order | None = None
        self._roster = roster
        self._without_lighter = without_lighter
        self._events = events
        self._clock = clock
        self._section: config.Governor | None = None
        self._governor: Governor | None = None
        self._streams: dict[str, _Gauges] = {}
        self._models: dict[str, _Gauges] = {}

    def serve(self, monitor: Monitor, halt: threading.Event) -> None:
        """Regulate until ``halt``."""
        while not halt.is_set():
            self.step(monitor.read())
            halt.wait(self._roster.deployment.monitor.period_s)

    def step(self, reading: Reading) -> None:
        """Have the governor decide, and apply it."""
        self.reading = reading
        section = self._roster.deployment.governor
        if self._governor is None or section != self._section:
            memory_bytes = reading.memory.total_bytes
            self._governor = Governor(section, events=self._events, memory_total_bytes=memory_bytes)
            self._section = section
        workers = self._roster.workers
        demands = {name: self._demand(name, worker) for name, worker in workers.items()}
        order = self.order = self._governor.step(reading, demands)
        for name, worker in workers.items():
            worker.lane.limit(order.limits_fps.get(name))

    @property
    def wants_lighter(self) -> bool:
        """Whether the governor wants lighter models."""
        return self.order is not None and self.order.lighter

    @property
    def wants_restart(self) -> str | None:
        """Why the process should be started again."""
        return None if self.order is None else self.order.restart

    @property
    def state(self) -> GovernorState:
        """What the governor allows, and why."""
        return self._governor.state if self._governor is not None else GovernorState("full", None, None, None, None)

    def rates(self, stream: str) -> tuple[float, float]:
        """Frames of a stream that arrive, and that become results, a second."""
        gauges = self._streams.get(stream)
        return (0.0, 0.0) if gauges is None else (gauges.arriving.per_s, gauges.inferred.per_s)

    def _demand(self, name: str, worker: Worker) -> Demand:
        """How many frames a second a model would infer if nothing held it back."""
        now_s, lane, arriving_fps = self._clock(), worker.lane, 0.0
        for capture in self._roster.captures.values():
            feed = capture.feed
            if lane.feeds.get(feed.stream) is feed:
                gauges = self._streams.setdefault(feed.stream, _Gauges())
                gauges.arriving.note(now_s, feed.mailbox.put_count)
                gauges.inferred.note(now_s, feed.inferred)
                arriving_fps += math.inf if capture.lossless else gauges.arriving.per_s
        gauges = self._models.setdefault(name, _Gauges())
        gauges.inferred.note(now_s, lane.inferred)
        gauges.idle_s.note(now_s, lane.idle_s)
        busy_s = gauges.inferred.window_s - gauges.idle_s.rise
        if gauges.inferred.rise > 0 and busy_s > 0:
            gauges.capacity_fps = gauges.inferred.rise / busy_s
        possible_fps = gauges.capacity_fps if gauges.capacity_fps is not None else gauges.inferred.per_s
        has_lighter = self._roster.deployment.model(name).lighter is not None
        return Demand(
            fps=min(arriving_fps, possible_fps), has_lighter=has_lighter and name not in self._without_lighter()
        )

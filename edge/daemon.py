"""The daemon: sources -> mailboxes -> inference -> publisher. Owns the parts and wires them; decides nothing.

::

    capture-<stream>  Capture.serve        one a stream: the newest frame wins, nothing queues up
    infer-<model>     Runner.serve         one a model: its streams get their turns, one frame each
    publish           Publisher.serve      outbox and broker: nothing in front of it ever waits for it
    monitor           Monitor -> Governor  readings; what the governor allows each model
    status            StatusServer.serve   metrics, health and a page over HTTP
    (owner)           run                  starts, watches, swaps, reloads, stops in the order of the arrows
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edge import __version__, systemd
from edge.errors import ConfigError, HungError, RestartWantedError, ServiceError
from edge.events import Events
from edge.monitor.monitor import Monitor
from edge.process import digest_to_run, open_pipeline
from edge.publish.message import encode_result, results_topic
from edge.publish.publisher import Publisher
from edge.regulator import Regulator
from edge.reload import Reloader
from edge.reporter import Reporter
from edge.roster import Roster
from edge.server import StatusServer
from edge.sources.video import opencv_build
from edge.supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from edge import config
    from edge.lane import Pipeline
    from edge.publish.message import ModelIdentity
    from edge.types import Result

__all__ = ["Summary", "run"]

logger = logging.getLogger(__name__)

DRAIN_S = 4.5
"""From a stop to the end of ``run``, at most."""
_WATCH_PERIOD_S = 0.1
_STATUS_PERIOD_S = 5.0
_CONDITION_PERIOD_S = 1.0
# So much of the drain is the inference's: what is with an engine then is finished, but not waited for longer.
_LAST_FRAMES_S = 2.0
_LEAST_DRAIN_S = 0.5
# A restart that is wanted sooner than this has not helped before: memory that is short from the start is not a leak.
_RESTART_NOT_BEFORE_S = 60.0


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run did."""

    duration_s: float
    """From READY to the end of the drain."""
    frames_captured: int
    frames_dropped: int
    """Never inferred; ``frames_dropped_by`` says why."""
    frames_dropped_by: Mapping[str, int]
    """overload: replaced by a newer one while the engine was busy; governor: or while it held the rate down or paused;
    stopped: waiting when its stream or the run ended."""
    frames_failed: int
    frames_inferred: int
    results_published: int
    results_acknowledged: int
    results_dropped: int
    """Beyond the outbox's bound, or refused by the broker for good."""
    results_left: int
    """Not acknowledged: in the outbox, if there is one on disk."""
    latency_ms: dict[str, float] | None
    """p50, p95 and p99 from capture to decoded objects; None without a result."""
    stuck: tuple[str, ...] = ()
    """Parts that did not come back in time: the process can end only without waiting for them."""


def run(
    deployment: config.Deployment,
    *,
    duration_s: float | None = None,
    stop: threading.Event | None = None,
    reload_wanted: threading.Event | None = None,
    load: Callable[[], config.Deployment] | None = None,
    path: Path | None = None,
    open_model: Callable[[config.Model], AbstractContextManager[Pipeline]] = open_pipeline,
    digest_of: Callable[[config.Model], str] = digest_to_run,
    notify: Callable[..., object] = systemd.notify,
    environ: Mapping[str, str] = os.environ,
    clock: Callable[[], float] = time.monotonic,
    root: Path = Path("/"),
    drain_s: float = DRAIN_S,
) -> Summary:
    """Run a deployment until its sources end, the time is up, or ``stop`` is set.

    Args:
        deployment: what to run.
        duration_s: seconds from READY; None runs for as long as the sources last.
        stop: ends the run in good order.
        reload_wanted: set, it has the deployment loaded again; cleared here.
        load: loads it again.
        path: of the deployment file, for the status.
        open_model: loads a model; called in the thread that will use it.
        digest_of: SHA-256 of the file that a model runs.
        notify: tells the service manager.
        environ: says whether the service manager's watchdog waits for us.
        clock: monotonic seconds.
        root: where /sys and /proc are.
        drain_s: how long the end may take, the last results' way to the broker included.

    Raises:
        ConfigError: there is nothing to run.
        EdgeError: a model, a source or another part cannot start.
        BrokenPartError: a part keeps failing, or hangs.
        RestartWantedError: the run has ended in good order, to be started again by the service manager.
        ServiceError: the run came to its end, but results could not be delivered.
    """
    if not deployment.streams:
        raise ConfigError(["streams: is empty; name at least one stream to run"])
    daemon = _Daemon(
        deployment,
        stop=stop or threading.Event(),
        reload_wanted=reload_wanted or threading.Event(),
        load=load,
        path=path,
        open_model=open_model,
        digest_of=digest_of,
        notify=notify,
        watchdog_s=systemd.watchdog_period_s(environ),
        clock=clock,
        drain_s=drain_s,
    )
    return daemon.run(duration_s, root)


class _Daemon:
    """One run: the parts, and what the owner's thread does with them."""

    def __init__(
        self,
        deployment: config.Deployment,
        *,
        stop: threading.Event,
        reload_wanted: threading.Event,
        load: Callable[[], config.Deployment] | None,
        path: Path | None,
        open_model: Callable[[config.Model], AbstractContextManager[Pipeline]],
        digest_of: Callable[[config.Model], str],
        notify: Callable[..., object],
        watchdog_s: float | None,
        clock: Callable[[], float],
        drain_s: float,
    ) -> None:
        self._deployment = deployment
        self._stop = stop
        self._reload_wanted = reload_wanted
        self._load = load
        self._notify = notify
        self._watchdog_s = watchdog_s
        self._clock = clock
        self._drain_s = drain_s
        self._halt = threading.Event()
        self._due: dict[str, float] = {}
        self._told_inferred = 0

        events = self._events = Events()
        self._publisher = Publisher(
            deployment.mqtt,
            device=deployment.device_id,
            streams=[stream.name for stream in deployment.streams],
            clock=clock,
            events=events,
        )
        events.subscribe(self._publisher.publish_event)
        watch = deployment.watch
        self._crew = Supervisor(watch, end=self._end_work, events=events, clock=clock)
        self._post = Supervisor(watch, end=lambda: self._publisher.drain(drain_s), events=events, clock=clock)
        self._roster = Roster(
            deployment,
            crew=self._crew,
            open_model=open_model,
            deliver=self._deliver,
            events=events,
            halt=self._halt,
            clock=clock,
        )
        self._reloader = Reloader(
            self._roster,
            publisher=self._publisher,
            events=events,
            notify=notify,
            lighter=lambda: self._regulator.wants_lighter,
            digest_of=digest_of,
        )
        self._regulator = Regulator(
            self._roster, without_lighter=lambda: self._reloader.without_lighter, events=events, clock=clock
        )
        self._reporter = Reporter(
            self._roster,
            regulator=self._regulator,
            publisher=self._publisher,
            supervisors=(self._crew, self._post),
            events=events,
            path=path,
            clock=clock,
        )

    def run(self, duration_s: float | None, root: Path) -> Summary:
        """The whole run."""
        opencv, gstreamer = opencv_build()
        # On a Jetson, PyPI's OpenCV would shadow JetPack's, which alone has GStreamer.
        logger.info("OpenCV %s, %s GStreamer", opencv, "with" if gstreamer else "without")
        roster = self._roster
        with ExitStack() as stack:
            stack.enter_context(self._publisher)
            monitor = stack.enter_context(Monitor(self._deployment.monitor, events=self._events, root=root))
            stack.callback(roster.close)
            roster.staff()
            for name, capture in roster.captures.items():
                logger.info("stream %s: %s -> %s", name, capture.description, capture.model)
            stack.enter_context(self._post)
            stack.enter_context(self._crew)

            self._crew.start("monitor", lambda: self._regulator.serve(monitor, self._halt))
            for name, worker in roster.workers.items():
                worker.load(self._deployment.model(name), at_once=True)
            stopped = self._await_ready()
            self._post.start("publish", lambda: self._publisher.serve(roster.identities))
            ready_s = self._clock()
            if not stopped:
                self._begin()
                stopped = self._watch(None if duration_s is None else ready_s + duration_s)
            restart = self._restart_wanted()
            if restart is not None:
                self._events.emit("restart_wanted", f"to be started again: {restart}", severity="warning")
            stuck = self._wind_up()
        summary = self._summarise(self._clock() - ready_s, stuck)
        if summary.results_left:
            self._tell_left(summary.results_left, fatal=not stopped and restart is None)
        if restart is not None:
            raise RestartWantedError(restart)
        return summary

    def _await_ready(self) -> bool:
        """Wait for every model; return whether a stop came first."""
        while not self._roster.ready:
            self._crew.check()
            self._check_health()
            if self._is_due("extend", 1.0):
                # Loading may take longer than the unit's TimeoutStartSec; a hang is ended by load_s.
                self._notify("STATUS=loading models", "EXTEND_TIMEOUT_USEC=10000000")
            if self._stop.wait(_WATCH_PERIOD_S / 4):
                return True
        return self._stop.is_set()

    def _begin(self) -> None:
        """Let the frames flow."""
        for name, worker in self._roster.workers.items():
            assert worker.runner is not None, "it is ready"
            logger.info("model %s: %s", name, worker.runner.description)
        for capture in self._roster.captures.values():
            self._roster.start(capture)
        self._crew.arm()
        self._post.arm()
        self._due["status"] = self._clock() + _STATUS_PERIOD_S
        server = StatusServer(self._deployment.status, snapshot=self._reporter.snapshot)
        # Only now, when a port that is taken is a failure to recover from: results matter more than the page.
        self._crew.start("status", lambda: server.serve(self._halt), essential=False)
        self._reporter.state = "running"
        streams = list(self._roster.captures)
        self._notify("READY=1", f"STATUS=running {len(streams)} streams")
        topic = results_topic(self._deployment.mqtt.topic, self._deployment.device_id, "+")
        text = f"ready, results to {topic}"
        self._events.emit("started", text, version=__version__, streams=streams)

    def _watch(self, ends_s: float | None) -> bool:
        """Tend everything until the sources have ended or the time is up; return whether a stop came first."""
        while self._roster.working:
            self._crew.check()
            self._post.check()
            if self._reload_wanted.is_set() and self._load is not None and not self._reloader.busy:
                self._reload_wanted.clear()
                self._reloader.begin(self._load)
            self._reloader.tend()
            self._check_health()
            self._tell()
            if self._restart_wanted() is not None:
                return False
            left_s = _WATCH_PERIOD_S if ends_s is None else ends_s - self._clock()
            if left_s <= 0:
                return False
            if self._stop.wait(min(_WATCH_PERIOD_S, left_s)):
                return True
        return False

    def _check_health(self) -> None:
        """End the process over what only a new one can mend; else feed the watchdog."""
        reasons = self._reporter.examine()
        if reasons:
            text = "; ".join(reasons)
            self._events.emit("engine_hung", text, severity="error", reasons=reasons)
            raise HungError(text)
        if self._watchdog_s is not None and self._is_due("watchdog", self._watchdog_s):
            self._notify("WATCHDOG=1")

    def _restart_wanted(self) -> str | None:
        return self._regulator.wants_restart if self._reporter.uptime_s > _RESTART_NOT_BEFORE_S else None

    def _tell(self) -> None:
        """What others want to know from time to time."""
        if self._is_due("condition", _CONDITION_PERIOD_S):
            self._publisher.set_condition("; ".join(self._reporter.not_ready(broker=False)) or None)
        if self._is_due("status", _STATUS_PERIOD_S):
            inferred = sum(feed.inferred for feed in self._roster.feeds)
            rate, self._told_inferred = (inferred - self._told_inferred) / _STATUS_PERIOD_S, inferred
            publisher = self._publisher.state
            broker = f"MQTT broker {publisher.broker} {publisher.trouble or 'is connected'}"
            self._notify(f"STATUS={rate:.1f} results/s; {broker}; {publisher.pending} results wait")
        telemetry_s = self._roster.deployment.monitor.telemetry_s
        if telemetry_s is not None and self._regulator.reading is not None and self._is_due("telemetry", telemetry_s):
            self._publisher.publish_telemetry(self._reporter.snapshot(), period_s=telemetry_s)

    def _is_due(self, what: str, period_s: float) -> bool:
        now_s = self._clock()
        if now_s < self._due.get(what, now_s):
            return False
        self._due[what] = now_s + period_s
        return True

    def _deliver(self, result: Result, message_id: str, model: ModelIdentity) -> None:
        """Of the runners' threads."""
        device = self._deployment.device_id
        payload = encode_result(result, message_id=message_id, device=device, model=model)
        self._publisher.publish(results_topic(self._deployment.mqtt.topic, device, result.frame.stream), payload)

    def _end_work(self) -> None:
        self._halt.set()
        self._roster.end()

    def _wind_up(self) -> list[str]:
        """Stop in the order of the arrows; return the parts that did not come back."""
        ends_s = self._clock() + self._drain_s
        self._reporter.state = "stopping"
        self._notify("STOPPING=1", "STATUS=draining")
        self._events.emit("stopping", "stopping: the last results are on their way")
        self._reloader.abort()
        stuck = self._crew.finish(min(_LAST_FRAMES_S, self._drain_s))
        self._crew.check()
        for feed in self._roster.feeds:
            feed.mailbox.discard()
        self._publisher.drain(max(_LEAST_DRAIN_S, ends_s - self._clock()))
        stuck += self._post.finish(_LEAST_DRAIN_S)
        self._post.check()
        return stuck

    def _summarise(self, duration_s: float, stuck: list[str]) -> Summary:
        feeds = self._roster.feeds
        latencies = [value for worker in self._roster.workers.values() for value in worker.lane.latencies_ms]
        percentiles = None
        if latencies:
            p50, p95, p99 = (round(float(value), 3) for value in np.percentile(latencies, (50, 95, 99)))
            percentiles = {"p50": p50, "p95": p95, "p99": p99}
        publisher = self._publisher.state
        dropped_by: Counter[str] = Counter()
        for feed in feeds:
            dropped_by.update(feed.mailbox.dropped_by)
        return Summary(
            duration_s=round(duration_s, 3),
            frames_captured=sum(feed.mailbox.put_count for feed in feeds),
            frames_dropped=dropped_by.total(),
            frames_dropped_by=dict(dropped_by),
            frames_failed=sum(feed.failed for feed in feeds),
            frames_inferred=sum(feed.inferred for feed in feeds),
            results_published=publisher.published,
            results_acknowledged=publisher.acknowledged,
            results_dropped=publisher.dropped,
            results_left=publisher.pending,
            latency_ms=percentiles,
            stuck=tuple(stuck),
        )

    def _tell_left(self, left: int, *, fatal: bool) -> None:
        state = self._publisher.state
        if state.location == "memory":
            fate = f"{left} results were kept in memory only and are lost; set mqtt.outbox.path to keep them"
        else:
            fate = f"{left} results wait in {state.location}"
        text = f"MQTT broker {state.broker} {state.trouble or 'did not take everything in time'}; {fate}"
        if fatal:
            raise ServiceError(text)
        logger.warning("%s", text)

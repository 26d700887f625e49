"""The daemon: sources -> mailboxes -> inference -> publisher. Owns the threads and wires them; decides nothing.

::

    capture-<stream>  source.frames -> Mailbox     one a stream: the newest frame wins, nothing queues up
    infer-<model>     take_turns -> Pipeline       one a model: its streams get their turns, one frame each
    publish           Publisher.serve              outbox and broker: nothing in front of it ever waits for it
    (owner)           run                          starts, watches, stops in the order of the arrows
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from edge import systemd
from edge.crew import Crew
from edge.errors import ConfigError, ServiceError
from edge.lane import Lane
from edge.process import open_pipeline
from edge.publish.message import encode_result, results_topic
from edge.publish.publisher import Publisher
from edge.sources import open_source
from edge.sources.video import opencv_build

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from edge import config
    from edge.lane import Pipeline
    from edge.publish.message import ModelIdentity
    from edge.sources import Source
    from edge.sources.mailbox import Mailbox
    from edge.types import Frame, Result

__all__ = ["Summary", "run"]

logger = logging.getLogger(__name__)

DRAIN_S = 5.0
_WATCH_PERIOD_S = 0.1
_STATUS_PERIOD_S = 5.0


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run did."""

    duration_s: float
    """From READY to the end of the drain."""
    frames_captured: int
    frames_dropped: int
    """Replaced by a newer one before inference was free, or waiting when the run was stopped."""
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


def run(
    deployment: config.Deployment,
    *,
    duration_s: float | None = None,
    stop: threading.Event | None = None,
    open_model: Callable[[config.Model], AbstractContextManager[Pipeline]] = open_pipeline,
    notify: Callable[..., object] = systemd.notify,
    clock: Callable[[], float] = time.monotonic,
    drain_s: float = DRAIN_S,
) -> Summary:
    """Run a deployment until its sources end, the time is up, or ``stop`` is set.

    Args:
        deployment: what to run.
        duration_s: seconds from READY; None runs for as long as the sources last.
        stop: ends the run in good order.
        open_model: loads a model; called in the thread that will use it.
        notify: tells the service manager.
        clock: monotonic seconds.
        drain_s: how long the last results may take to reach the broker.

    Raises:
        ConfigError: there is nothing to run.
        EdgeError: a model, a source or another part cannot start, or has failed.
        ServiceError: the run came to its end, but results could not be delivered.
    """
    if not deployment.streams:
        raise ConfigError(["streams: is empty; name at least one stream to run"])
    stop = stop or threading.Event()
    halt = threading.Event()
    device, mqtt = deployment.device_id, deployment.mqtt
    streams = [stream.name for stream in deployment.streams]
    publisher = Publisher(mqtt, device=device, streams=streams, clock=clock)
    lanes: dict[str, Lane] = {}

    def deliver(result: Result, message_id: str, model: ModelIdentity) -> None:
        payload = encode_result(result, message_id=message_id, device=device, model=model)
        publisher.publish(results_topic(mqtt.topic, device, result.frame.stream), payload)

    opencv, gstreamer = opencv_build()
    # On a Jetson, PyPI's OpenCV would shadow JetPack's, which alone has GStreamer.
    logger.info("OpenCV %s, %s GStreamer", opencv, "with" if gstreamer else "without")
    with ExitStack() as stack:
        stack.enter_context(publisher)
        captures: list[tuple[str, Callable[[], None]]] = []
        for index, stream in enumerate(deployment.streams):
            source = stack.enter_context(open_source(stream, key=f"streams[{index}].source"))
            model = deployment.model(stream.model)
            mailbox = lanes.setdefault(model.name, Lane(model)).add_stream()
            captures.append((f"capture-{stream.name}", partial(_capture, source, mailbox, halt)))
            logger.info("stream %s: %s -> %s", stream.name, source.description, model.name)
        post = stack.enter_context(Crew(lambda: publisher.drain(drain_s)))
        crew = stack.enter_context(Crew(halt.set))

        for lane in lanes.values():
            crew.start(f"infer-{lane.model.name}", partial(lane.serve, open_model, deliver, halt))
        stopped = _await_ready(lanes, crew, stop)
        identities = [lane.identity for lane in lanes.values() if lane.identity is not None]
        post.start("publish", partial(publisher.serve, identities))
        started_s = clock()
        if not stopped:
            for name, capture in captures:
                crew.start(name, capture)
            notify("READY=1", f"STATUS=running {len(captures)} streams")
            logger.info("ready: %d streams, results to %s", len(captures), results_topic(mqtt.topic, device, "+"))
            ends_s = None if duration_s is None else started_s + duration_s
            tell = _StatusLine(lanes, publisher, notify, clock)
            stopped = _watch((crew, post), stop, ends_s, clock, tell)

        notify("STOPPING=1", "STATUS=draining")
        crew.finish()
        post.finish()
    summary = _summarise(lanes, publisher, clock() - started_s)
    if summary.results_left:
        _tell_left(publisher, summary.results_left, fatal=not stopped)
    return summary


def _capture(source: Source, mailbox: Mailbox[Frame], stop: threading.Event) -> None:
    try:
        for frame in source.frames(stop):
            mailbox.put(frame)
    finally:
        mailbox.close()


def _await_ready(lanes: dict[str, Lane], crew: Crew, stop: threading.Event) -> bool:
    """Wait for every model; return whether ``stop`` came first."""
    while not all(lane.ready.is_set() for lane in lanes.values()):
        crew.check()
        if stop.wait(_WATCH_PERIOD_S / 4):
            return True
    return stop.is_set()


def _watch(
    crews: tuple[Crew, Crew],
    stop: threading.Event,
    ends_s: float | None,
    clock: Callable[[], float],
    tell: Callable[[], None],
) -> bool:
    """Wait until the first crew has ended, the time is up, or one fails; return whether ``stop`` came first."""
    while crews[0].busy:
        for crew in crews:
            crew.check()
        left_s = _WATCH_PERIOD_S if ends_s is None else ends_s - clock()
        if left_s <= 0:
            return False
        tell()
        if stop.wait(min(_WATCH_PERIOD_S, left_s)):
            return True
    return False


class _StatusLine:
    """What ``systemctl status`` shows, every few seconds."""

    def __init__(
        self,
        lanes: dict[str, Lane],
        publisher: Publisher,
        notify: Callable[..., object],
        clock: Callable[[], float],
    ) -> None:
        self._lanes, self._publisher, self._notify, self._clock = lanes, publisher, notify, clock
        self._told_s, self._told_count = clock(), 0

    def __call__(self) -> None:
        passed_s = self._clock() - self._told_s
        if passed_s < _STATUS_PERIOD_S:
            return
        count = sum(lane.inferred for lane in self._lanes.values())
        rate = (count - self._told_count) / passed_s
        waiting = self._publisher.counters.pending
        broker = f"MQTT broker {self._publisher.broker} {self._publisher.trouble or 'is connected'}"
        self._notify(f"STATUS={rate:.1f} results/s; {broker}; {waiting} results wait")
        self._told_s, self._told_count = self._told_s + passed_s, count


def _summarise(lanes: dict[str, Lane], publisher: Publisher, duration_s: float) -> Summary:
    mailboxes = [mailbox for lane in lanes.values() for mailbox in lane.mailboxes]
    for mailbox in mailboxes:
        mailbox.discard()
    latencies = [value for lane in lanes.values() for value in lane.latencies_ms]
    percentiles = None
    if latencies:
        p50, p95, p99 = (round(float(value), 3) for value in np.percentile(latencies, (50, 95, 99)))
        percentiles = {"p50": p50, "p95": p95, "p99": p99}
    counters = publisher.counters
    return Summary(
        duration_s=round(duration_s, 3),
        frames_captured=sum(mailbox.put_count for mailbox in mailboxes),
        frames_dropped=sum(mailbox.dropped for mailbox in mailboxes),
        frames_failed=sum(lane.failed for lane in lanes.values()),
        frames_inferred=sum(lane.inferred for lane in lanes.values()),
        results_published=counters.published,
        results_acknowledged=counters.acknowledged,
        results_dropped=counters.dropped,
        results_left=counters.pending,
        latency_ms=percentiles,
    )


def _tell_left(publisher: Publisher, left: int, *, fatal: bool) -> None:
    if publisher.waits_in == "memory":
        fate = f"{left} results were kept in memory only and are lost; set mqtt.outbox.path to keep them"
    else:
        fate = f"{left} results wait in {publisher.waits_in}"
    text = f"MQTT broker {publisher.broker} {publisher.trouble or 'did not take everything in time'}; {fate}"
    if fatal:
        raise ServiceError(text)
    logger.warning("%s", text)

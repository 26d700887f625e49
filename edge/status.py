"""The daemon as it is now: one snapshot, from which health, metrics, the status page and telemetry are made. Pure."""

from __future__ import annotations

# Not for type checkers only: edge/document.py reads snapshots back by these annotations.
from collections.abc import Mapping, Sequence  # noqa: TC003
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from edge.events import Event  # noqa: TC001
from edge.monitor.reading import Reading  # noqa: TC001

__all__ = [
    "DropReason",
    "GovernorState",
    "Histogram",
    "ModelState",
    "PartState",
    "PublisherState",
    "Snapshot",
    "StreamState",
]

DropReason: TypeAlias = Literal["overload", "governor", "stopped"]
"""Why a frame was never inferred: a newer one replaced it while the engine was busy, or while the governor held the
rate down or paused; or the daemon stopped."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of values by upper bound, as Prometheus has them, but not cumulative."""

    bounds: Sequence[float]
    """Upper bounds, rising; what is beyond the last is counted in the last of ``counts``."""
    counts: Sequence[int]
    """One more than ``bounds``."""
    total: float
    """Sum of all values."""

    def quantile(self, share: float) -> float | None:
        """The value that ``share`` (0..1) of all values do not exceed, as PromQL's ``histogram_quantile`` has it.

        Within a bucket the values are taken to lie evenly; what is beyond the last bound counts as that bound. None
        without a value.
        """
        rank = share * sum(self.counts)
        if rank <= 0:
            return None
        below, lower = 0, 0.0
        for upper, count in zip(self.bounds, self.counts, strict=False):
            if count and below + count >= rank:
                return lower + (upper - lower) * (rank - below) / count
            below, lower = below + count, upper
        return lower

    def since(self, before: Histogram) -> Histogram:
        """What was counted after ``before``, an earlier look at the same values; all of it if they began anew."""
        counts = [now - then for now, then in zip(self.counts, before.counts, strict=False)]
        if self.bounds != before.bounds or any(count < 0 for count in counts):
            return self
        return Histogram(self.bounds, counts, self.total - before.total)


@dataclass(frozen=True, slots=True)
class StreamState:
    """One stream."""

    name: str
    model: str
    source: str
    """What is read, for people."""
    state: Literal["opening", "live", "lost", "ended"]
    trouble: str | None
    """Why it is lost."""
    captured: int
    inferred: int
    failed: int
    dropped: Mapping[DropReason, int]
    waiting: int
    """Captured, and neither inferred nor dropped yet: captured = inferred + failed + dropped + waiting."""
    restarts: int
    """How often the camera was opened anew."""
    last_frame_age_s: float | None
    """Seconds since the newest frame; None before the first."""
    latency_s: Histogram
    """From capture to decoded objects."""
    fps_in: float = 0.0
    """Frames a second that arrived, over the last ten seconds."""
    fps: float = 0.0
    """Frames a second that became results, over the last ten seconds."""


@dataclass(frozen=True, slots=True)
class ModelState:
    """One model at work, or the lighter one that stands in for it."""

    name: str
    """As the deployment calls it."""
    running: str | None
    """Name of the model that runs now: itself, or its lighter one; None while it is loaded."""
    precision: str | None
    digest: str | None
    description: str | None
    """Engine, size and layout, for people."""
    inferred: int
    busy_s: float | None
    """How long the frame that is computed now has been with the engine; None while it is idle."""
    limit_fps: float | None
    """Frame rate that the governor allows; None is no limit, 0 a pause."""
    inference_s: Histogram
    """Seconds in the engine for each frame."""


@dataclass(frozen=True, slots=True)
class PublisherState:
    """Messages on their way to the broker."""

    broker: str
    """host:port."""
    connected: bool
    trouble: str | None
    """Why nothing is delivered now, as the end of a sentence about the broker."""
    published: int
    """Results handed over by this process."""
    acknowledged: int
    dropped: int
    pending: int
    """Results that wait."""
    location: str
    """Where they wait: a file, or memory."""
    taken_up: int = 0
    """Results that an earlier run left in the outbox. published + taken_up = acknowledged + dropped + pending."""


@dataclass(frozen=True, slots=True)
class PartState:
    """One supervised thread."""

    name: str
    state: Literal["running", "restarting", "ended"]
    restarts: int
    trouble: str | None
    """What ended it last, where it is being restarted."""


@dataclass(frozen=True, slots=True)
class GovernorState:
    """What the governor allows, and why."""

    mode: Literal["off", "full", "limited", "lighter", "paused"]
    reason: str | None
    set_point_c: float | None
    zone: str | None
    temperature_c: float | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The whole daemon."""

    device: str
    version: str
    deployment: str
    """Path of the deployment file."""
    started_at_utc_us: int
    uptime_s: float
    state: Literal["starting", "running", "stopping"]
    streams: Sequence[StreamState]
    models: Sequence[ModelState]
    publisher: PublisherState
    parts: Sequence[PartState]
    governor: GovernorState
    reading: Reading | None
    """None before the first."""
    event_counts: Mapping[tuple[str, str], int]
    """By kind and severity."""
    recent_events: Sequence[Event] = field(default_factory=tuple)
    unhealthy: Sequence[str] = ()
    """Why a restart would help: what has hung or stopped. Empty is healthy; systemd's watchdog is then fed."""
    not_ready: Sequence[str] = ()
    """Why results do not flow now, the good reasons included: a lost camera, a pause, a broker that is away."""

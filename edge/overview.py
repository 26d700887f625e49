"""What a person at the box wants to know of a snapshot, in short texts: the status page and the command show the same.

Pure. Says nothing of colours, columns or HTML; a tone says what deserves attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge.events import Event
    from edge.monitor.reading import Reading
    from edge.status import GovernorState, ModelState, PublisherState, Snapshot, StreamState

__all__ = ["Fact", "Overview", "Row", "Table", "Tone", "overview"]

Tone: TypeAlias = Literal["good", "plain", "dim", "warning", "bad"]

_EVENT_TONES: dict[str, Tone] = {"info": "plain", "warning": "warning", "error": "bad"}
_STREAM_TONES: dict[str, Tone] = {"live": "plain", "ended": "dim", "opening": "warning", "lost": "bad"}
_MODE_TONES: dict[str, Tone] = {"off": "dim", "full": "plain", "limited": "warning", "lighter": "warning"}
_EVENTS = 10


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table, and what is to be said under it."""

    cells: tuple[str, ...]
    tone: Tone = "plain"
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a header. All but the first two columns hold numbers."""

    header: tuple[str, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Fact:
    """One line: what it is about, and what is to be said."""

    label: str
    text: str
    tone: Tone = "plain"


@dataclass(frozen=True, slots=True)
class Overview:
    """The whole picture."""

    title: str
    subtitle: str
    verdict: str
    tone: Tone
    reasons: tuple[str, ...]
    streams: Table
    models: Table
    facts: tuple[Fact, ...]
    events: tuple[tuple[Event, Tone], ...]
    """The last ones, oldest first."""


def overview(snapshot: Snapshot, *, before: Snapshot | None = None) -> Overview:
    """Sum a snapshot up.

    Args:
        snapshot: the daemon as it is.
        before: an earlier one; latencies are of the time since, else of the whole run.
    """
    verdict, tone, reasons = _verdict(snapshot)
    past_streams = {} if before is None else {stream.name: stream for stream in before.streams}
    past_models = {} if before is None else {model.name: model for model in before.models}
    return Overview(
        title=f"{snapshot.device}: edge-daemon {snapshot.version}",
        subtitle=f"up {_duration(snapshot.uptime_s)}, {snapshot.deployment or 'without a deployment file'}",
        verdict=verdict,
        tone=tone,
        reasons=tuple(reasons),
        streams=Table(
            ("stream", "state", "fps in", "fps out", "p50", "p95", "failed", "dropped", "reopened"),
            tuple(_stream(stream, past_streams.get(stream.name)) for stream in snapshot.streams),
        ),
        models=Table(
            ("model", "runs", "limit", "p50", "p95", "frames"),
            tuple(_model(model, past_models.get(model.name)) for model in snapshot.models),
        ),
        facts=tuple(_facts(snapshot)),
        events=tuple((event, _EVENT_TONES[event.severity]) for event in snapshot.recent_events[-_EVENTS:]),
    )


def _verdict(snapshot: Snapshot) -> tuple[str, Tone, Sequence[str]]:
    if snapshot.unhealthy:
        return "broken", "bad", [*snapshot.unhealthy, *snapshot.not_ready]
    if snapshot.state != "running":
        return snapshot.state, "warning", []
    if snapshot.not_ready:
        return "running, not ready", "warning", snapshot.not_ready
    return "running, ready", "good", []


def _stream(stream: StreamState, before: StreamState | None) -> Row:
    latency_s = stream.latency_s if before is None else stream.latency_s.since(before.latency_s)
    notes = [stream.trouble] if stream.trouble else []
    if stream.state == "lost" and stream.last_frame_age_s is not None:
        notes.append(f"the last frame came {_duration(stream.last_frame_age_s)} ago")
    if why := ", ".join(f"{reason} {count}" for reason, count in sorted(stream.dropped.items()) if count):
        notes.append(f"dropped: {why}")
    return Row(
        (
            stream.name,
            stream.state,
            f"{stream.fps_in:.1f}",
            f"{stream.fps:.1f}",
            _milliseconds(latency_s.quantile(0.5)),
            _milliseconds(latency_s.quantile(0.95)),
            str(stream.failed),
            str(sum(stream.dropped.values())),
            str(stream.restarts),
        ),
        _STREAM_TONES[stream.state],
        "; ".join(notes) or None,
    )


def _model(model: ModelState, before: ModelState | None) -> Row:
    inference_s = model.inference_s if before is None else model.inference_s.since(before.inference_s)
    runs = "is being loaded"
    if model.running is not None:
        runs = " ".join(part for part in (model.running, model.precision, model.digest) if part)
    tone: Tone = "plain" if model.running == model.name and model.limit_fps is None else "warning"
    limit = "none" if model.limit_fps is None else f"{model.limit_fps:.1f} fps" if model.limit_fps else "paused"
    quantiles = (_milliseconds(inference_s.quantile(share)) for share in (0.5, 0.95))
    cells = (model.name, runs, limit, *quantiles, str(model.inferred))
    return Row(cells, tone, model.description)


def _facts(snapshot: Snapshot) -> list[Fact]:
    facts = [_governor(snapshot.governor)]
    if snapshot.reading is not None:
        facts += _device(snapshot.reading)
    facts += _publisher(snapshot.publisher)
    for part in snapshot.parts:
        if part.state == "restarting":
            text = f"{part.name} waits to be started again, {part.restarts} times so far: {part.trouble}"
            facts.append(Fact("trouble", text, "bad"))
    return facts


def _governor(governor: GovernorState) -> Fact:
    parts = [governor.mode if governor.reason is None else f"{governor.mode}: {governor.reason}"]
    if governor.temperature_c is not None:
        limit = "" if governor.set_point_c is None else f" of {governor.set_point_c:.1f}"
        parts.append(f"{governor.zone or 'temperature'} {governor.temperature_c:.1f}{limit} °C")
    return Fact("governor", "; ".join(parts), _MODE_TONES.get(governor.mode, "bad"))


def _device(reading: Reading) -> list[Fact]:
    memory = reading.memory
    parts = [f"{_size(memory.available_bytes)} of {_size(memory.total_bytes)} available"]
    parts.append(f"daemon {_size(memory.rss_bytes)}")
    if memory.gpu_bytes is not None:
        parts.append(f"GPU {_size(memory.gpu_bytes)}")
    if memory.swap_used_bytes:
        parts.append(f"swap {_size(memory.swap_used_bytes)}")
    facts = [Fact("memory", ", ".join(parts))]
    if reading.throttling:
        facts.append(Fact("throttled", f"by {', '.join(reading.throttling)}", "bad"))
    parts = []
    if reading.total_power_mw is not None:
        parts.append(f"{reading.total_power_mw / 1000:.1f} W")
    if reading.power_mode is not None:
        parts.append(f"mode {reading.power_mode}")
    if reading.gpu_load_percent is not None:
        parts.append(f"GPU {reading.gpu_load_percent:.0f} %")
    if reading.fan_percent is not None:
        parts.append(f"fan {reading.fan_percent:.0f} %")
    return [*facts, Fact("power", ", ".join(parts))] if parts else facts


def _publisher(publisher: PublisherState) -> list[Fact]:
    broker = f"{publisher.broker} {publisher.trouble or 'is connected'}"
    tone: Tone = "plain" if publisher.trouble is None else "warning"
    results = (
        f"{publisher.acknowledged} acknowledged, {publisher.dropped} dropped,"
        f" {publisher.pending} wait in {publisher.location}"
    )
    return [Fact("broker", broker, tone), Fact("results", results, "warning" if publisher.dropped else "plain")]


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.1f} ms" if seconds < 0.01 else f"{seconds * 1000:.0f} ms"


def _size(count: int) -> str:
    """Bytes as people say them, in powers of ten."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _duration(seconds: float) -> str:
    """The two largest units."""
    whole = int(seconds)
    for size, unit, smaller_size, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller_size
            return f"{whole // size} {unit} {rest} {smaller}" if rest else f"{whole // size} {unit}"
    return f"{whole} s"

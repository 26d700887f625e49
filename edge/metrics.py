"""A snapshot as Prometheus metrics. Pure: no default registry, no state, no socket.

``CATALOGUE`` is the whole list, in the order of the output; docs/observability.md shows it as ``table`` writes it.
Names follow https://prometheus.io/docs/practices/naming/: base units, ``_total`` for counters and nothing else,
``_info`` for what is a label's value. What is not known has no sample, rather than 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    StateSetMetricFamily,
)
from prometheus_client.registry import Collector

from edge.status import DropReason, Histogram, Snapshot

if TYPE_CHECKING:
    from prometheus_client import Metric as Family

    from edge.monitor.reading import Memory, Reading

__all__ = ["CATALOGUE", "CONTENT_TYPE", "Metric", "render", "table"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FAMILIES = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
    "info": InfoMetricFamily,
    "stateset": StateSetMetricFamily,
}

Type: TypeAlias = Literal["counter", "gauge", "histogram", "info", "stateset"]
Value: TypeAlias = float | bool | Histogram | dict[str, str] | str | None
"""Of a sample: a number; for info its labels; for a stateset the state; None is not known."""
Samples: TypeAlias = Iterable[tuple[Sequence[str], Value]]
"""Values of the labels, in the order of ``Metric.labels``, and the value that goes with them."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, and where its samples are in a snapshot."""

    name: str
    """As it is scraped."""
    type: Type
    help: str
    labels: tuple[str, ...]
    samples: Callable[[Snapshot], Samples]
    states: tuple[str, ...] = ()
    """Of a stateset."""


def render(snapshot: Snapshot) -> bytes:
    """The metrics in Prometheus's text format, as ``CONTENT_TYPE`` names it."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(snapshot))
    return generate_latest(registry)


def table() -> str:
    """The catalogue as a Markdown table."""
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for metric in CATALOGUE:
        labels = [*metric.labels, *([metric.name] if metric.states else [])]
        kind = "gauge" if metric.type in {"info", "stateset"} else metric.type
        rows.append(f"| `{metric.name}` | {kind} | {', '.join(f'`{label}`' for label in labels)} | {metric.help} |")
    return "\n".join(rows) + "\n"


class _Families(Collector):
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Family]:
        for metric in CATALOGUE:
            if family := _family(metric, self._snapshot):
                yield family


def _family(metric: Metric, snapshot: Snapshot) -> Family | None:
    """The metric's family with its samples; None without any."""
    # The labels of an info are part of its value.
    labels = () if metric.type == "info" else metric.labels
    family = _FAMILIES[metric.type](metric.name.removesuffix("_info"), metric.help, labels=labels)
    for values, value in metric.samples(snapshot):
        if value is not None:
            _add(family, values, value, metric.states)
    return family if family.samples else None


def _add(family: Family, labels: Sequence[str], value: Value, states: Sequence[str]) -> None:
    match family, value:
        case HistogramMetricFamily(), Histogram():
            family.add_metric(labels, _buckets(value), value.total)
        case InfoMetricFamily(), dict():
            family.add_metric(labels, value)
        case StateSetMetricFamily(), str():
            family.add_metric(labels, {state: state == value for state in states})
        case ((CounterMetricFamily() | GaugeMetricFamily()), (int() | float())):
            family.add_metric(labels, float(value))
        case _:
            raise TypeError(f"{family.name} is a {family.type}, and {value!r} no value for it")


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound, as Prometheus wants them."""
    bounds = [*(repr(float(bound)) for bound in histogram.bounds), "+Inf"]
    return list(zip(bounds, accumulate(histogram.counts), strict=True))


def _one(value: Value) -> Samples:
    return [((), value)]


def _frames(snapshot: Snapshot) -> Samples:
    for stream in snapshot.streams:
        yield (stream.name, "inferred", ""), stream.inferred
        yield (stream.name, "failed", ""), stream.failed
        # All reasons from the start: rate() does not see the step from absence to the first one.
        for reason in get_args(DropReason):
            yield (stream.name, "dropped", reason), stream.dropped.get(reason, 0)


def _stream_info(snapshot: Snapshot) -> Samples:
    for stream in snapshot.streams:
        yield (), {"stream": stream.name, "model": stream.model, "source": stream.source}


def _model_info(snapshot: Snapshot) -> Samples:
    for model in snapshot.models:
        if model.running is not None:
            labels = {"model": model.name, "running": model.running, "precision": model.precision or ""}
            yield (), {**labels, "digest": model.digest or "", "description": model.description or ""}


def _events(snapshot: Snapshot) -> Samples:
    return (((kind, severity), count) for (kind, severity), count in sorted(snapshot.event_counts.items()))


def _publisher_info(snapshot: Snapshot) -> Samples:
    return _one({"broker": snapshot.publisher.broker, "outbox": snapshot.publisher.location})


def _memory(value: Callable[[Memory], float | None]) -> Callable[[Snapshot], Samples]:
    return _reading(lambda reading: _one(value(reading.memory)))


def _pressure(reading: Reading) -> Samples:
    if (pressure := reading.memory.pressure) is not None:
        yield ("some",), pressure.some_avg10_percent / 100
        yield ("full",), pressure.full_avg10_percent / 100


def _set_point(snapshot: Snapshot) -> Samples:
    governor = snapshot.governor
    return [((governor.zone or "",), governor.set_point_c)]


def _reading(samples: Callable[[Reading], Samples]) -> Callable[[Snapshot], Samples]:
    """Samples of the reading; none before the first."""
    return lambda snapshot: () if snapshot.reading is None else samples(snapshot.reading)


def _over(value: float | None, unit: float) -> Samples:
    return _one(None if value is None else value / unit)


CATALOGUE: tuple[Metric, ...] = (
    # The daemon
    Metric("edge_build_info", "info", "Version of the daemon.", ("version",), lambda s: _one({"version": s.version})),
    Metric(
        "edge_device_info",
        "info",
        "Name of the device in topics, and its deployment file.",
        ("device", "deployment"),
        lambda s: _one({"device": s.device, "deployment": s.deployment}),
    ),
    Metric(
        "edge_start_time_seconds",
        "gauge",
        "When the daemon was started, in seconds since the Unix epoch.",
        (),
        lambda s: _one(s.started_at_utc_us / 1e6),
    ),
    Metric(
        "edge_daemon_state",
        "stateset",
        "1 for the state that the daemon is in.",
        (),
        lambda s: _one(s.state),
        states=("starting", "running", "stopping"),
    ),
    Metric("edge_healthy", "gauge", "0 if only a restart would help.", (), lambda s: _one(not s.unhealthy)),
    Metric("edge_ready", "gauge", "1 while results flow and arrive.", (), lambda s: _one(not s.not_ready)),
    Metric(
        "edge_part_up",
        "gauge",
        "1 while the part, a thread of the daemon, works; 0 while it waits to be started again, or has ended.",
        ("part",),
        lambda s: (((part.name,), part.state == "running") for part in s.parts),
    ),
    Metric(
        "edge_part_restarts_total",
        "counter",
        "How often the part was started again after a failure.",
        ("part",),
        lambda s: (((part.name,), part.restarts) for part in s.parts),
    ),
    Metric("edge_events_total", "counter", "Events by kind and severity.", ("kind", "severity"), _events),
    # Streams
    Metric(
        "edge_stream_info",
        "info",
        "What the stream reads, for which model.",
        ("stream", "model", "source"),
        _stream_info,
    ),
    Metric(
        "edge_stream_up",
        "gauge",
        "1 while frames arrive.",
        ("stream",),
        lambda s: (((stream.name,), stream.state == "live") for stream in s.streams),
    ),
    Metric(
        "edge_stream_state",
        "stateset",
        "1 for the state that the stream is in.",
        ("stream",),
        lambda s: (((stream.name,), stream.state) for stream in s.streams),
        states=("opening", "live", "lost", "ended"),
    ),
    Metric(
        "edge_stream_restarts_total",
        "counter",
        "How often the camera was opened anew.",
        ("stream",),
        lambda s: (((stream.name,), stream.restarts) for stream in s.streams),
    ),
    Metric(
        "edge_stream_last_frame_age_seconds",
        "gauge",
        "Seconds since the newest frame.",
        ("stream",),
        lambda s: (((stream.name,), stream.last_frame_age_s) for stream in s.streams),
    ),
    Metric(
        "edge_frames_captured_total",
        "counter",
        "Frames that arrived.",
        ("stream",),
        lambda s: (((stream.name,), stream.captured) for stream in s.streams),
    ),
    Metric(
        "edge_frames_total",
        "counter",
        "Frames by what became of them: inferred, failed, or dropped for the reason overload, governor or stopped.",
        ("stream", "outcome", "reason"),
        _frames,
    ),
    Metric(
        "edge_frames_waiting",
        "gauge",
        "Frames that arrived and have no outcome yet.",
        ("stream",),
        lambda s: (((stream.name,), stream.waiting) for stream in s.streams),
    ),
    Metric(
        "edge_frame_latency_seconds",
        "histogram",
        "From capture to decoded objects.",
        ("stream",),
        lambda s: (((stream.name,), stream.latency_s) for stream in s.streams),
    ),
    # Models
    Metric(
        "edge_model_info",
        "info",
        "What runs for the model: itself or its lighter one, and the first digits of its file's SHA-256.",
        ("model", "running", "precision", "digest", "description"),
        _model_info,
    ),
    Metric(
        "edge_model_loaded",
        "gauge",
        "0 while the model is being loaded.",
        ("model",),
        lambda s: (((model.name,), model.running is not None) for model in s.models),
    ),
    Metric(
        "edge_inference_seconds",
        "histogram",
        "In the engine, for each frame.",
        ("model",),
        lambda s: (((model.name,), model.inference_s) for model in s.models),
    ),
    Metric(
        "edge_inference_busy_seconds",
        "gauge",
        "For how long the present frame has been with the engine; 0 while it is idle.",
        ("model",),
        lambda s: (((model.name,), model.busy_s or 0.0) for model in s.models),
    ),
    Metric(
        "edge_rate_limit_fps",
        "gauge",
        "Frames a second that the governor allows; 0 is a pause, absence no limit.",
        ("model",),
        lambda s: (((model.name,), model.limit_fps) for model in s.models),
    ),
    # Results
    Metric(
        "edge_mqtt_info", "info", "The broker, and where results wait for it.", ("broker", "outbox"), _publisher_info
    ),
    Metric(
        "edge_mqtt_connected", "gauge", "1 while the broker is connected.", (), lambda s: _one(s.publisher.connected)
    ),
    Metric(
        "edge_results_published_total",
        "counter",
        "Results handed to the publisher.",
        (),
        lambda s: _one(s.publisher.published),
    ),
    Metric(
        "edge_results_taken_up_total",
        "counter",
        "Results that an earlier run had left in the outbox.",
        (),
        lambda s: _one(s.publisher.taken_up),
    ),
    Metric(
        "edge_results_acknowledged_total",
        "counter",
        "Results that the broker has.",
        (),
        lambda s: _one(s.publisher.acknowledged),
    ),
    Metric(
        "edge_results_dropped_total",
        "counter",
        "Results that were lost to the outbox's bound, or refused by the broker for good.",
        (),
        lambda s: _one(s.publisher.dropped),
    ),
    Metric(
        "edge_results_pending",
        "gauge",
        "Results that wait: published + taken up - acknowledged - dropped.",
        (),
        lambda s: _one(s.publisher.pending),
    ),
    # Governor
    Metric(
        "edge_governor_mode",
        "stateset",
        "1 for what the governor allows.",
        (),
        lambda s: _one(s.governor.mode),
        states=("off", "full", "limited", "lighter", "paused"),
    ),
    Metric(
        "edge_temperature_set_point_celsius",
        "gauge",
        "Temperature that the governor stays under, in the zone that it governs by.",
        ("zone",),
        _set_point,
    ),
    # The device
    Metric(
        "edge_temperature_celsius",
        "gauge",
        "Temperature of the thermal zone.",
        ("zone",),
        _reading(lambda r: (((zone,), value) for zone, value in r.temperatures_c.items())),
    ),
    Metric(
        "edge_temperature_throttle_celsius",
        "gauge",
        "Trip point from which the kernel lowers clocks.",
        ("zone",),
        _reading(lambda r: (((zone,), trips.throttle_c) for zone, trips in r.trips.items())),
    ),
    Metric(
        "edge_temperature_shutdown_celsius",
        "gauge",
        "Trip point at which the kernel switches the device off.",
        ("zone",),
        _reading(lambda r: (((zone,), trips.shutdown_c) for zone, trips in r.trips.items())),
    ),
    Metric(
        "edge_throttling",
        "gauge",
        "1 while a cooling device throttles the chip; /status names it.",
        (),
        _reading(lambda r: _one(bool(r.throttling))),
    ),
    Metric(
        "edge_over_current_events_total",
        "counter",
        "Over-current events since the device was started.",
        ("cause",),
        _reading(lambda r: (((cause,), count) for cause, count in r.over_current_events.items())),
    ),
    Metric(
        "edge_memory_size_bytes", "gauge", "Memory of the device, CPU and GPU.", (), _memory(lambda m: m.total_bytes)
    ),
    Metric(
        "edge_memory_available_bytes",
        "gauge",
        "MemAvailable: what can be had without swapping.",
        (),
        _memory(lambda m: m.available_bytes),
    ),
    Metric("edge_swap_size_bytes", "gauge", "Swap space.", (), _memory(lambda m: m.swap_total_bytes)),
    Metric("edge_swap_used_bytes", "gauge", "Swap space in use.", (), _memory(lambda m: m.swap_used_bytes)),
    Metric(
        "edge_gpu_memory_bytes",
        "gauge",
        "Memory that the GPU holds, of all processes; on a Jetson only.",
        (),
        _memory(lambda m: m.gpu_bytes),
    ),
    Metric(
        "edge_resident_memory_bytes",
        "gauge",
        "Resident memory of the daemon and its child processes, without CUDA's.",
        (),
        _memory(lambda m: m.rss_bytes),
    ),
    Metric(
        "edge_memory_pressure_ratio",
        "gauge",
        "Share of the last ten seconds in which some or all tasks waited for memory.",
        ("tasks",),
        _reading(_pressure),
    ),
    Metric(
        "edge_power_watts",
        "gauge",
        "Power by rail.",
        ("rail",),
        _reading(lambda r: (((rail,), value / 1e3) for rail, value in r.power_mw.items())),
    ),
    Metric(
        "edge_device_power_watts",
        "gauge",
        "Power of the whole device.",
        (),
        _reading(lambda r: _over(r.total_power_mw, 1e3)),
    ),
    Metric("edge_gpu_load_ratio", "gauge", "Load of the GPU.", (), _reading(lambda r: _over(r.gpu_load_percent, 1e2))),
    Metric("edge_gpu_clock_hertz", "gauge", "Clock of the GPU.", (), _reading(lambda r: _one(r.gpu_clock_hz))),
    Metric(
        "edge_dla_active",
        "gauge",
        "1 while the DLA core is powered.",
        ("core",),
        _reading(lambda r: (((core,), active) for core, active in r.dla_active.items())),
    ),
    Metric("edge_fan_ratio", "gauge", "Speed of the fan.", (), _reading(lambda r: _over(r.fan_percent, 1e2))),
    Metric(
        "edge_power_mode_info",
        "info",
        "Power mode as nvpmodel calls it, by jtop.",
        ("mode",),
        _reading(lambda r: _one(None if r.power_mode is None else {"mode": r.power_mode})),
    ),
    Metric(
        "edge_jetson_clocks",
        "gauge",
        "1 while jetson_clocks holds the clocks at their maximum, by jtop.",
        (),
        _reading(lambda r: _one(r.jetson_clocks)),
    ),
    Metric("edge_jtop_connected", "gauge", "1 while jtop's service contributes.", (), _reading(lambda r: _one(r.jtop))),
)

"""How the device and its streams are doing, as one JSON message made from a snapshot. Pure.

Units stand in the names, as in ``edge.monitor.reading``; what is not known is left out, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import Struct

from edge.publish.message import json_value, utc_text

if TYPE_CHECKING:
    from edge.monitor.reading import Memory, Reading
    from edge.status import GovernorState, ModelState, Snapshot, StreamState

__all__ = ["encode_telemetry"]


# A field that equals its default is left out, so what is required has none.
class _Memory(Struct, frozen=True, kw_only=True, omit_defaults=True):
    total_bytes: int
    available_bytes: int
    swap_total_bytes: int
    swap_used_bytes: int
    rss_bytes: int
    gpu_bytes: int | None = None
    pressure_some_avg10_percent: float | None = None
    pressure_full_avg10_percent: float | None = None


class _Governor(Struct, frozen=True, kw_only=True, omit_defaults=True):
    mode: str
    reason: str | None = None
    zone: str | None = None
    temperature_c: float | None = None
    set_point_c: float | None = None


class _Stream(Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    model: str
    state: str
    trouble: str | None = None
    captured: int
    inferred: int
    failed: int
    dropped: Mapping[str, int]
    waiting: int
    restarts: int
    captured_fps: float
    inferred_fps: float
    last_frame_age_s: float | None = None


class _Model(Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    running: str | None = None
    precision: str | None = None
    digest: str | None = None
    inferred: int
    limit_fps: float | None = None


class _Outbox(Struct, frozen=True, kw_only=True):
    published: int
    taken_up: int
    acknowledged: int
    dropped: int
    pending: int


class _TelemetryMessage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    schema: Literal["edge.telemetry/1"]
    device: str
    at: str
    version: str
    state: str
    uptime_s: float
    streams: Sequence[_Stream]
    models: Sequence[_Model]
    governor: _Governor
    outbox: _Outbox
    memory: _Memory | None = None
    temperatures_c: Mapping[str, float] | None = None
    throttling: Sequence[str] | None = None
    over_current_events: Mapping[str, int] | None = None
    power_mw: Mapping[str, int] | None = None
    total_power_mw: int | None = None
    gpu_load_percent: float | None = None
    gpu_clock_hz: int | None = None
    dla_active: Mapping[str, bool] | None = None
    fan_percent: float | None = None
    power_mode: str | None = None
    jetson_clocks: bool | None = None


def encode_telemetry(snapshot: Snapshot, *, at_utc_us: int) -> bytes:
    """A snapshot as JSON, as ``schemas/telemetry.schema.json`` describes it."""
    publisher, reading = snapshot.publisher, snapshot.reading
    message = _TelemetryMessage(
        schema="edge.telemetry/1",
        device=snapshot.device,
        at=utc_text(at_utc_us),
        version=snapshot.version,
        state=snapshot.state,
        uptime_s=round(snapshot.uptime_s, 3),
        streams=[_stream(stream) for stream in snapshot.streams],
        models=[_model(model) for model in snapshot.models],
        governor=_governor(snapshot.governor),
        outbox=_Outbox(
            published=publisher.published,
            taken_up=publisher.taken_up,
            acknowledged=publisher.acknowledged,
            dropped=publisher.dropped,
            pending=publisher.pending,
        ),
    )
    if reading is not None:
        message = _with_reading(message, reading)
    return msgspec.json.encode(_known(json_value(msgspec.to_builtins(message, enc_hook=json_value))))


def _with_reading(message: _TelemetryMessage, reading: Reading) -> _TelemetryMessage:
    return msgspec.structs.replace(
        message,
        memory=_memory(reading.memory),
        temperatures_c={zone: round(value, 2) for zone, value in reading.temperatures_c.items()} or None,
        throttling=reading.throttling,
        over_current_events=reading.over_current_events or None,
        power_mw=reading.power_mw or None,
        total_power_mw=reading.total_power_mw,
        gpu_load_percent=_rounded(reading.gpu_load_percent),
        gpu_clock_hz=reading.gpu_clock_hz,
        dla_active=reading.dla_active or None,
        fan_percent=_rounded(reading.fan_percent),
        power_mode=reading.power_mode,
        jetson_clocks=reading.jetson_clocks,
    )


def _memory(memory: Memory) -> _Memory:
    pressure = memory.pressure
    return _Memory(
        total_bytes=memory.total_bytes,
        available_bytes=memory.available_bytes,
        swap_total_bytes=memory.swap_total_bytes,
        swap_used_bytes=memory.swap_used_bytes,
        rss_bytes=memory.rss_bytes,
        gpu_bytes=memory.gpu_bytes,
        pressure_some_avg10_percent=None if pressure is None else pressure.some_avg10_percent,
        pressure_full_avg10_percent=None if pressure is None else pressure.full_avg10_percent,
    )


def _governor(governor: GovernorState) -> _Governor:
    return _Governor(
        mode=governor.mode,
        reason=governor.reason,
        zone=governor.zone,
        temperature_c=_rounded(governor.temperature_c),
        set_point_c=_rounded(governor.set_point_c),
    )


def _stream(stream: StreamState) -> _Stream:
    return _Stream(
        name=stream.name,
        model=stream.model,
        state=stream.state,
        trouble=stream.trouble,
        captured=stream.captured,
        inferred=stream.inferred,
        failed=stream.failed,
        dropped={str(reason): count for reason, count in stream.dropped.items()},
        waiting=stream.waiting,
        restarts=stream.restarts,
        captured_fps=round(stream.fps_in, 2),
        inferred_fps=round(stream.fps, 2),
        last_frame_age_s=_rounded(stream.last_frame_age_s),
    )


def _model(model: ModelState) -> _Model:
    return _Model(
        name=model.name,
        running=model.running,
        precision=model.precision,
        digest=model.digest,
        inferred=model.inferred,
        limit_fps=_rounded(model.limit_fps),
    )


def _known(value: Any) -> Any:
    """Without the null that a sensor's NaN has become: unknown is absent."""
    if isinstance(value, dict):
        return {key: _known(item) for key, item in value.items() if item is not None}
    return [_known(item) for item in value] if isinstance(value, list) else value


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)

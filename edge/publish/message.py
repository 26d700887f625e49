"""What is said over MQTT: results, events and status as JSON. Pure: no socket, no file; clock and randomness come in.

The schemas in ``schemas/`` are the contract, and docs/mqtt.md explains it. Within a version, fields are only added.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import Struct

from edge.masks import encode_rle

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge.events import Event
    from edge.types import Detection, Result

__all__ = [
    "RESULTS_SUFFIX",
    "ModelIdentity",
    "UlidSource",
    "encode_event",
    "encode_result",
    "encode_status",
    "events_topic",
    "is_result",
    "json_value",
    "results_topic",
    "status_topic",
    "telemetry_topic",
    "ulid",
    "utc_text",
]

RESULTS_SUFFIX = "/results"
"""How the topic of every result ends, and no other."""

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
# What a consumer reads of a SHA-256: enough to tell models apart, short enough for every message.
_DIGEST_DIGITS = 12


class ModelIdentity(Struct, frozen=True, kw_only=True):
    """Which model spoke."""

    name: str
    precision: str
    digest: str
    """First digits of the SHA-256 of the model file that ran."""

    @classmethod
    def of(cls, name: str, *, precision: str, sha256: str) -> ModelIdentity:
        """Identify a model by the file that runs."""
        return cls(name=name, precision=precision, digest=sha256[:_DIGEST_DIGITS])


class _Image(Struct, frozen=True, kw_only=True, omit_defaults=True):
    width: int
    height: int
    name: str | None = None


class _LatencyMs(Struct, frozen=True, kw_only=True):
    queue: float
    preprocess: float
    inference: float
    postprocess: float
    total: float


class _Rle(Struct, frozen=True, kw_only=True):
    size: tuple[int, int]
    counts: str


class _Object(Struct, frozen=True, kw_only=True, omit_defaults=True):
    label: str
    class_id: int
    score: float
    box: tuple[float, float, float, float] | None = None
    mask: _Rle | None = None
    keypoints: list[tuple[float, float]] | None = None


class _ResultMessage(Struct, frozen=True, kw_only=True):
    schema: Literal["edge.result/1"] = "edge.result/1"
    id: str
    device: str
    stream: str
    frame_id: int
    captured_at: str
    latency_ms: _LatencyMs
    model: ModelIdentity
    image: _Image
    objects: list[_Object]


class _EventMessage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    # A field that equals its default is left out, so what is required has none.
    schema: Literal["edge.event/1"]
    id: str
    device: str
    at: str
    kind: str
    severity: Literal["info", "warning", "error"]
    text: str
    stream: str | None = None
    model: str | None = None
    fields: Mapping[str, Any]


class _StatusMessage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    schema: Literal["edge.status/1"]
    device: str
    state: Literal["online", "offline"]
    health: Literal["ok", "degraded"] | None = None
    reason: str | None = None
    at: str | None = None
    version: str | None = None
    streams: Sequence[str] | None = None
    models: Sequence[ModelIdentity] | None = None


def results_topic(prefix: str, device: str, stream: str) -> str:
    """Where the results of a stream go."""
    return f"{prefix}/{device}/{stream}{RESULTS_SUFFIX}"


def is_result(topic: str) -> bool:
    """Whether results go there."""
    return topic.endswith(RESULTS_SUFFIX)


def events_topic(prefix: str, device: str) -> str:
    """Where the device says what has happened."""
    return f"{prefix}/{device}/events"


def telemetry_topic(prefix: str, device: str) -> str:
    """Where the device says how it is."""
    return f"{prefix}/{device}/telemetry"


def status_topic(prefix: str, device: str) -> str:
    """Where the device says whether it is there."""
    return f"{prefix}/{device}/status"


def ulid(time_ms: int, randomness: int) -> str:
    """A ULID: 48 bits of milliseconds and 80 random bits in Crockford's base 32, so that text order is time order."""
    value = (time_ms & (1 << 48) - 1) << 80 | randomness & (1 << 80) - 1
    return "".join(_CROCKFORD[value >> shift & 31] for shift in range(125, -1, -5))


class UlidSource:
    """Ids that rise strictly, within a millisecond and when the clock is set back too. Used by one thread."""

    def __init__(
        self, clock_ns: Callable[[], int] = time.time_ns, bits: Callable[[int], int] = secrets.randbits
    ) -> None:
        self._clock_ns = clock_ns
        self._bits = bits
        self._last = (0, 0)

    def __call__(self) -> str:
        """The next id."""
        now_ms, (last_ms, last_randomness) = self._clock_ns() // 1_000_000, self._last
        # The top bit stays free on a new millisecond, so that counting up cannot overflow.
        self._last = (now_ms, self._bits(79)) if now_ms > last_ms else (last_ms, last_randomness + 1)
        return ulid(*self._last)


def utc_text(microseconds: int) -> str:
    """RFC 3339 in UTC with six decimals: ``2026-12-01T08:30:00.000000Z``."""
    moment = _EPOCH + timedelta(microseconds=microseconds)
    return f"{moment:%Y-%m-%dT%H:%M:%S.%f}Z"


def encode_result(result: Result, *, message_id: str, device: str, model: ModelIdentity) -> bytes:
    """One result as JSON, as ``schemas/result.schema.json`` describes it."""
    frame, latency = result.frame, result.latency
    height, width = frame.image.shape[:2]
    message = _ResultMessage(
        id=message_id,
        device=device,
        stream=frame.stream,
        frame_id=frame.index,
        captured_at=utc_text(frame.captured_at_utc_us),
        latency_ms=_LatencyMs(
            queue=round(latency.queue_ms, 3),
            preprocess=round(latency.preprocess_ms, 3),
            inference=round(latency.inference_ms, 3),
            postprocess=round(latency.postprocess_ms, 3),
            total=round(latency.total_ms, 3),
        ),
        model=model,
        image=_Image(width=width, height=height, name=None if frame.name is None else _text(frame.name)),
        objects=[_object(detection) for detection in result.detections],
    )
    return msgspec.json.encode(message)


def encode_event(event: Event, *, message_id: str, device: str) -> bytes:
    """One event as JSON, as ``schemas/event.schema.json`` describes it. Never raises for what its fields hold."""
    message = _EventMessage(
        schema="edge.event/1",
        id=message_id,
        device=device,
        at=utc_text(event.at_utc_us),
        kind=event.kind,
        severity=event.severity,
        text=_text(event.text),
        stream=event.stream,
        model=event.model,
        fields={_text(str(key)): json_value(value) for key, value in event.fields.items()},
    )
    return msgspec.json.encode(message)


def json_value(value: Any) -> Any:
    """The nearest value that JSON has.

    numpy's numbers and arrays become numbers and lists; NaN and infinities, which JSON lacks, null; what is left over,
    such as a path, its text.
    """
    if isinstance(value, str):
        return _text(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        # Beyond 64 bits most readers of JSON lose digits, and msgspec refuses.
        return int(value) if -(1 << 63) <= value < 1 << 64 else str(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_text(str(key)): json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [json_value(item) for item in value]
    if hasattr(value, "tolist"):  # numpy's arrays and scalars alike
        return json_value(value.tolist())
    return _text(str(value))


def encode_status(
    state: Literal["online", "offline"],
    *,
    device: str,
    health: Literal["ok", "degraded"] | None = None,
    reason: str | None = None,
    at_utc_us: int | None = None,
    version: str | None = None,
    streams: Sequence[str] | None = None,
    models: Sequence[ModelIdentity] | None = None,
) -> bytes:
    """The device's status as JSON, as ``schemas/status.schema.json`` describes it."""
    message = _StatusMessage(
        schema="edge.status/1",
        device=device,
        state=state,
        health=health,
        reason=None if reason is None else _text(reason),
        at=None if at_utc_us is None else utc_text(at_utc_us),
        version=version,
        streams=streams,
        models=models,
    )
    return msgspec.json.encode(message)


def _text(text: str) -> str:
    """Without lone surrogates, which file names of another encoding bring along and UTF-8 cannot hold."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _object(detection: Detection) -> _Object:
    box, mask, points = detection.box_xyxy, detection.mask, detection.keypoints_xy
    rle = None
    if mask is not None:
        width, height = mask.source_wh
        rle = _Rle(size=(height, width), counts=encode_rle(mask))
    return _Object(
        label=detection.label,
        class_id=detection.class_id,
        score=round(float(detection.score), 4),
        box=None if box is None else (_pixel(box[0]), _pixel(box[1]), _pixel(box[2]), _pixel(box[3])),
        mask=rle,
        keypoints=None if points is None else [(_pixel(x), _pixel(y)) for x, y in points],
    )


def _pixel(value: float) -> float:
    """A coordinate to a hundredth of a pixel: beyond what INT8 can tell, and half the digits."""
    return round(float(value), 2)

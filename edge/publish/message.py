"""What is said over MQTT: results and status as JSON. Pure: no socket, no file; clock and randomness come in.

The schemas in ``schemas/`` are the contract, and docs/mqtt.md explains it. Within a version, fields are only added.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec import Struct

from edge.masks import encode_rle

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge.types import Detection, Result

__all__ = ["ModelIdentity", "UlidSource", "encode_result", "encode_status", "results_topic", "status_topic", "ulid"]

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


class _StatusMessage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    # A field that equals its default is left out, so what is required has none.
    schema: Literal["edge.status/1"]
    device: str
    state: Literal["online", "offline"]
    reason: Literal["stopped", "connection lost"] | None = None
    at: str | None = None
    version: str | None = None
    streams: Sequence[str] | None = None
    models: Sequence[ModelIdentity] | None = None


def results_topic(prefix: str, device: str, stream: str) -> str:
    """Where the results of a stream go."""
    return f"{prefix}/{device}/{stream}/results"


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
        image=_Image(width=width, height=height, name=frame.name),
        objects=[_object(detection) for detection in result.detections],
    )
    return msgspec.json.encode(message)


def encode_status(
    state: Literal["online", "offline"],
    *,
    device: str,
    reason: Literal["stopped", "connection lost"] | None = None,
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
        reason=reason,
        at=None if at_utc_us is None else utc_text(at_utc_us),
        version=version,
        streams=streams,
        models=models,
    )
    return msgspec.json.encode(message)


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

"""The values that rooms hand to each other. numpy only: no files, no engine, no configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Image: TypeAlias = NDArray[np.uint8]
    """(H, W, 3) uint8 in BGR order, C-contiguous: what OpenCV and the cameras give."""

    Tensors: TypeAlias = dict[str, NDArray[Any]]
    """Arrays by tensor name, each of the shape and dtype that its TensorSpec says."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, fixed shape and dtype of one input or output of an engine."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class Frame:
    """One picture of a stream.

    The image belongs to whoever holds the frame; nobody writes to it.
    """

    image: Image
    stream: str
    index: int
    """Counts the frames that the source delivered, from 0, dropped ones included."""
    captured_at_s: float
    """time.monotonic() when the frame left the source."""
    captured_at_utc_us: int
    """Microseconds since the Unix epoch, UTC, at the same moment."""
    name: str | None = None
    """File name for an image folder, None for a camera."""


@dataclass(frozen=True, slots=True)
class Letterbox:
    """How a source picture lies in the model's input: letterboxed, stretched or cropped.

    Coordinates are continuous with the origin at the top left corner of the top left pixel, so
    ``model = source * scale + offset`` holds for box edges, and the inverse is exact.
    """

    scale_xy: tuple[float, float]
    offset_xy: tuple[float, float]
    source_wh: tuple[int, int]
    model_wh: tuple[int, int]

    def to_model(self, points: NDArray[Any]) -> NDArray[np.float32]:
        """Map ``(..., 2k)`` coordinates x, y, x, y, ... in source pixels to model pixels."""
        scale, offset = self._vectors(points.shape[-1])
        return np.asarray(points * scale + offset, np.float32)

    def to_source(self, points: NDArray[Any]) -> NDArray[np.float32]:
        """Map ``(..., 2k)`` coordinates x, y, x, y, ... in model pixels to source pixels, not clipped."""
        scale, offset = self._vectors(points.shape[-1])
        return np.asarray((points - offset) / scale, np.float32)

    def clip(self, boxes_xyxy: NDArray[np.float32]) -> NDArray[np.float32]:
        """Clip ``(N, 4)`` boxes in source pixels to the source picture."""
        width, height = self.source_wh
        return np.clip(boxes_xyxy, 0, np.array([width, height, width, height], np.float32))

    def _vectors(self, width: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return np.tile(self.scale_xy, width // 2), np.tile(self.offset_xy, width // 2)


@dataclass(frozen=True, slots=True)
class Mask:
    """A binary mask that covers only the rectangle in which it can be set."""

    bits: NDArray[np.bool_]
    """(h, w) bool."""
    offset_xy: tuple[int, int]
    """Top left corner of ``bits`` in the source picture."""
    source_wh: tuple[int, int]

    def full(self) -> NDArray[np.bool_]:
        """The mask in the size of the source picture, ``(H, W)`` bool."""
        width, height = self.source_wh
        x, y = self.offset_xy
        out = np.zeros((height, width), np.bool_)
        out[y : y + self.bits.shape[0], x : x + self.bits.shape[1]] = self.bits
        return out


@dataclass(frozen=True, slots=True)
class Detection:
    """One object found, or for a classifier one answer about the whole picture."""

    label: str
    class_id: int
    score: float
    box_xyxy: tuple[float, float, float, float] | None = None
    """In source pixels, clipped to the picture; None for a classifier's answer."""
    mask: Mask | None = None
    keypoints_xy: tuple[tuple[float, float], ...] | None = None
    """In source pixels, not clipped."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds that one frame spent in each stage."""

    queue_ms: float
    """From capture to the start of pre-processing."""
    preprocess_ms: float
    inference_ms: float
    postprocess_ms: float

    @property
    def total_ms(self) -> float:
        """From capture to decoded detections."""
        return self.queue_ms + self.preprocess_ms + self.inference_ms + self.postprocess_ms


@dataclass(frozen=True, slots=True)
class Result:
    """What one model said about one frame."""

    frame: Frame
    model: str
    detections: Sequence[Detection]
    latency: Latency

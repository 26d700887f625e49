"""Pictures in, model input out: the one pre-processing that calibration, evaluation and the daemon share.

Decoding turns whatever a file holds into what a camera would give: upright, 8-bit, three channels, BGR. Pre-processing
resizes, orders the channels and normalises, and says where the picture lies in the input, so that boxes and masks can
be mapped back exactly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import cv2
import numpy as np

from edge.errors import DataError, ModelError
from edge.types import Letterbox

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

    from edge import config
    from edge.types import Image, TensorSpec

__all__ = ["Preprocessor", "decode", "place"]

_INTERPOLATION = {
    "linear": cv2.INTER_LINEAR,
    "area": cv2.INTER_AREA,
    "cubic": cv2.INTER_CUBIC,
    "nearest": cv2.INTER_NEAREST,
}


def decode(data: bytes, *, name: str) -> Image:
    """Decode a picture file to (H, W, 3) uint8 BGR.

    EXIF orientation is applied, grey becomes three equal channels, alpha is dropped, CMYK is converted and 16-bit
    samples keep their upper 8 bits.

    Args:
        data: the whole file.
        name: what to call the picture in messages.

    Raises:
        DataError: the file is empty, truncated, or no picture that OpenCV can read.
    """
    if not data:
        raise DataError(f"{name}: is empty (0 bytes)")
    # OpenCV decodes a cut-off JPEG or PNG to a picture with a grey or black rest and only prints a warning.
    if _is_truncated(data):
        raise DataError(f"{name}: is truncated ({len(data)} bytes, the end of the picture is missing)")
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    except cv2.error as error:
        raise DataError(f"{name}: cannot be decoded ({error.err})") from None
    if image is None:
        raise DataError(f"{name}: is not a picture that can be read (starts with {data[:8].hex(' ')})")
    return np.ascontiguousarray(image, np.uint8)


def place(section: config.Input, source_wh: tuple[int, int], model_wh: tuple[int, int]) -> Letterbox:
    """Where a picture of one size lies in an input of another.

    The scale is that of the resized picture's whole pixels, not of the ideal ratio, so that the inverse is exact.
    """
    (width, height), (model_w, model_h) = source_wh, model_wh
    if section.resize == "stretch":
        resized_w, resized_h = model_w, model_h
    elif section.resize == "letterbox":
        ratio = min(model_w / width, model_h / height)
        # Cut off, not rounded, as YOLOX does: its published accuracy needs it. ultralytics rounds; either way the
        # difference is within a pixel. The long side fills the input even where its product falls short by rounding.
        resized_w, resized_h = (max(1, int(side * ratio + 1e-6)) for side in (width, height))
    else:
        # The short side becomes model / crop_fraction, and never less than the model needs.
        ratio = max(model_w / width, model_h / height) / section.crop_fraction
        resized_w, resized_h = max(model_w, round(width * ratio)), max(model_h, round(height * ratio))
    if section.resize == "letterbox" and section.anchor == "top-left":
        left, top = 0, 0
    else:
        left, top = (model_w - resized_w) // 2, (model_h - resized_h) // 2
    return Letterbox((resized_w / width, resized_h / height), (float(left), float(top)), source_wh, model_wh)


class Preprocessor:
    """Turns pictures into one model's input. Not thread-safe: it reuses its buffers."""

    def __init__(self, section: config.Input, tensor: TensorSpec) -> None:
        """Prepare for one input tensor.

        Raises:
            ModelError: the tensor is no picture of the section's channels: allowed are (1, C, H, W) and (1, H, W, C).
        """
        self.tensor = tensor
        self._section = section
        channels = 1 if section.color == "gray" else 3
        if len(tensor.shape) != 4 or tensor.shape[0] != 1 or channels not in (tensor.shape[1], tensor.shape[3]):
            raise ModelError(
                f"input '{tensor.name}' is {list(tensor.shape)}; expected [1, {channels}, H, W] or"
                f" [1, H, W, {channels}] for input.color '{section.color}'"
            )
        self._channels_first = tensor.shape[1] == channels
        height, width = tensor.shape[2:] if self._channels_first else tensor.shape[1:3]
        self.model_wh = (width, height)
        self._canvas = np.empty((height, width, 3), np.uint8)
        self._output = np.empty(tensor.shape, tensor.dtype)
        self._tables = _normalisation_tables(section, channels, tensor.dtype)

    def __call__(self, image: Image) -> tuple[NDArray[Any], Letterbox]:
        """Pre-process one (H, W, 3) uint8 BGR picture.

        Returns:
            The input array, which the next call overwrites, and where the picture lies in it.
        """
        height, width = image.shape[:2]
        letterbox = place(self._section, (width, height), self.model_wh)
        planes = self._planes(self._fit(image, letterbox))
        for index, (plane, table) in enumerate(zip(planes, self._tables, strict=True)):
            target = self._output[0, index] if self._channels_first else self._output[0, :, :, index]
            if target.dtype == np.float32 and self._channels_first:
                cv2.LUT(plane, table, dst=target)  # a third of numpy's time, but for contiguous float32 only
            else:
                np.take(table, plane, out=target, mode="clip")
        return self._output, letterbox

    def _fit(self, image: Image, letterbox: Letterbox) -> Image:
        """Resize and pad or crop to the model's size."""
        width, height = letterbox.source_wh
        model_w, model_h = self.model_wh
        resized_wh = (round(width * letterbox.scale_xy[0]), round(height * letterbox.scale_xy[1]))
        left, top = int(letterbox.offset_xy[0]), int(letterbox.offset_xy[1])
        if resized_wh != (width, height):
            resized = cv2.resize(image, resized_wh, interpolation=_INTERPOLATION[self._section.interpolation])
            image = np.asarray(resized, np.uint8)
        if resized_wh == (model_w, model_h):
            return image
        if self._section.resize == "crop":
            return image[-top : -top + model_h, -left : -left + model_w]
        self._canvas[:] = self._section.fill
        self._canvas[top : top + resized_wh[1], left : left + resized_wh[0]] = image
        return self._canvas

    def _planes(self, image: Image) -> list[NDArray[np.uint8]]:
        if self._section.color == "gray":
            return [np.asarray(cv2.cvtColor(image, cv2.COLOR_BGR2GRAY), np.uint8)]
        blue, green, red = (np.asarray(plane, np.uint8) for plane in cv2.split(image))
        return [red, green, blue] if self._section.color == "rgb" else [blue, green, red]


def _normalisation_tables(section: config.Input, channels: int, dtype: np.dtype[Any]) -> list[NDArray[Any]]:
    """For each channel, what each of the 256 pixel values becomes: computed once, in double precision."""
    pixels = np.arange(256, dtype=np.float64) / section.divide_by
    mean = np.broadcast_to(np.asarray(section.mean, np.float64), (channels,))
    std = np.broadcast_to(np.asarray(section.std, np.float64), (channels,))
    tables = [(pixels - m) / s for m, s in zip(mean, std, strict=True)]
    if not np.issubdtype(dtype, np.floating):
        limits = np.iinfo(dtype)
        tables = [np.clip(np.rint(table), limits.min, limits.max) for table in tables]
    return [table.astype(dtype) for table in tables]


def _is_truncated(data: bytes) -> bool:
    if data.startswith(b"\xff\xd8"):
        return not _jpeg_ends(data)
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        end = data.rfind(b"IEND")
        return end < 0 or len(data) < end + 8  # the chunk's name is followed by its checksum
    return False


def _jpeg_ends(data: bytes) -> bool:
    """Whether an end-of-image marker follows the last scan (ITU-T T.81, B.1.1).

    The segments are walked, since the thumbnail inside an EXIF segment has an end marker of its own, and cameras append
    data after the real one.
    """
    at = 2
    while at + 4 <= len(data):
        if data[at] != 0xFF:
            return True  # not a marker where one must be: corrupt rather than short, which is the decoder's to judge
        marker = data[at + 1]
        if marker == 0xFF:
            at += 1  # fill byte
            continue
        if marker == 0xDA:
            return data.find(b"\xff\xd9", at) >= 0
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return False

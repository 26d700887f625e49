"""Detections drawn on pictures, for people to look at. Decides nothing and measures nothing."""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING

import cv2
import numpy as np

from edge import files

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from edge.types import Detection, Image

__all__ = ["draw", "save", "side_by_side", "write"]

MIN_SIDE = 320
"""Pixels. Smaller pictures are enlarged by a whole factor, since no legible letter fits on them."""

_FONT = cv2.FONT_HERSHEY_SIMPLEX
_MASK_OPACITY = 0.45
_JPEG_QUALITY = 90

_Box = tuple[int, int, int, int]
_Color = tuple[int, int, int]


def draw(image: Image, detections: Sequence[Detection]) -> Image:
    """A copy of the picture with boxes, labels, scores, masks and keypoints; enlarged where it is small.

    Line and letter sizes follow the picture's, a class has one colour everywhere, and the best detections lie on top.
    """
    factor = -(-MIN_SIDE // min(image.shape[:2]))
    canvas = np.repeat(np.repeat(image, factor, axis=0), factor, axis=1)
    pen = _Pen(canvas)
    objects = sorted((d for d in detections if d.box_xyxy is not None), key=lambda d: d.score)
    for detection in objects:
        pen.mask(detection, factor)
    for detection in objects:
        pen.box(detection, factor)
    for detection in objects:
        pen.keypoints(detection, factor)
    for detection in reversed(objects):  # the best choose their place first
        pen.tag(detection, factor)
    pen.answers([d for d in detections if d.box_xyxy is None])
    return canvas


def side_by_side(image: Image, answers: Mapping[str, Sequence[Detection]]) -> Image:
    """The same picture once for each title, with its detections, titles above."""
    panels: list[Image] = []
    for title, detections in answers.items():
        panel = draw(image, detections)
        pen = _Pen(panel)
        header = np.full((2 * pen.height, panel.shape[1], 3), 32, np.uint8)
        text = f"{title}: {len(detections)} object{'' if len(detections) == 1 else 's'}"
        if any(d.box_xyxy is None for d in detections):
            text = title
        pen.write(header, text, (pen.height // 2, round(1.5 * pen.height)), (255, 255, 255))
        gap = np.full((header.shape[0] + panel.shape[0], max(2, pen.thickness), 3), 32, np.uint8)
        panels += [np.concatenate([header, panel]), gap]
    return np.concatenate(panels[:-1], axis=1)


def save(path: Path, image: Image, detections: Sequence[Detection]) -> None:
    """Draw on a copy of the picture and write it; the suffix says the format."""
    write(path, draw(image, detections))


def write(path: Path, image: Image) -> None:
    """Write a picture in one go; the suffix says the format.

    Raises:
        ValueError: OpenCV does not know the suffix.
    """
    suffix = path.suffix.lower()
    options = [cv2.IMWRITE_JPEG_QUALITY, _JPEG_QUALITY] if suffix in {".jpg", ".jpeg"} else []
    try:
        _, data = cv2.imencode(suffix, image, options)
    except cv2.error as error:
        raise ValueError(f"{path}: pictures cannot be written as '{suffix}'; use .jpg or .png") from error
    files.write(path, data.tobytes())


class _Pen:
    """Draws on one picture, in sizes that suit it, and remembers where its labels are."""

    def __init__(self, canvas: Image) -> None:
        short = int(min(canvas.shape[:2]))
        self.thickness = max(2, round(short / 250))
        self.height = max(10, round(short / 40))
        """Of capital letters, in pixels."""
        self._stroke = max(1, round(self.height / 12))
        self._scale = cv2.getFontScaleFromHeight(_FONT, self.height, self._stroke)
        self._canvas = canvas
        self._tags: list[_Box] = []

    def mask(self, detection: Detection, factor: int) -> None:
        mask = detection.mask
        if mask is None or not mask.bits.any():
            return
        color = _color(detection.class_id)
        bits = np.repeat(np.repeat(mask.bits, factor, axis=0), factor, axis=1)
        x, y = (factor * value for value in mask.offset_xy)
        under = self._canvas[y : y + bits.shape[0], x : x + bits.shape[1]]
        under[bits] = (under[bits] * (1 - _MASK_OPACITY) + np.array(color) * _MASK_OPACITY).astype(np.uint8)
        contours, _ = cv2.findContours(bits.astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
        cv2.drawContours(self._canvas, contours, -1, color, self.thickness, cv2.LINE_AA, offset=(x, y))

    def box(self, detection: Detection, factor: int) -> None:
        x1, y1, x2, y2 = self._corners(detection, factor)
        # A dark rim keeps the line visible on a ground of its own colour.
        for color, thickness in (((0, 0, 0), self.thickness + 2), (_color(detection.class_id), self.thickness)):
            cv2.rectangle(self._canvas, (x1, y1), (x2, y2), color, thickness)

    def keypoints(self, detection: Detection, factor: int) -> None:
        radius = 1 + round(1.5 * self.thickness)
        for x, y in detection.keypoints_xy or ():
            center = (round(x * factor), round(y * factor))
            cv2.circle(self._canvas, center, radius + 1, (0, 0, 0), cv2.FILLED, cv2.LINE_AA)
            cv2.circle(self._canvas, center, radius, _color(detection.class_id), cv2.FILLED, cv2.LINE_AA)

    def tag(self, detection: Detection, factor: int) -> None:
        """Write label and score at the box, where no better detection has written yet."""
        text = _caption(detection)
        width, height = self._size(text)
        x1, y1, x2, y2 = self._corners(detection, factor)
        places = [(x1, y1 - height), (x1, y1), (x1, y2), (x2 - width, y1 - height), (x2 - width, y2 - height)]
        fitted = [self._inside(place, width, height) for place in places]
        free = [box for box in fitted if not any(_overlap(box, other) for other in self._tags)]
        # In a crowd every place may be taken; a label on a label beats none.
        self._label(text, (free or fitted)[0], _color(detection.class_id))

    def answers(self, detections: Sequence[Detection]) -> None:
        """List a classifier's answers in the corner, best first."""
        top = 0
        for detection in detections:
            text = _caption(detection)
            width, height = self._size(text)
            self._label(text, (0, top, width, top + height), _color(detection.class_id))
            top += height

    def write(self, canvas: Image, text: str, baseline_xy: tuple[int, int], color: _Color) -> None:
        cv2.putText(canvas, _ascii(text), baseline_xy, _FONT, self._scale, color, self._stroke, cv2.LINE_AA)

    def _label(self, text: str, box: _Box, ground: _Color) -> None:
        x1, y1, x2, y2 = box
        self._tags.append(box)
        cv2.rectangle(self._canvas, (x1, y1), (x2 - 1, y2 - 1), ground, cv2.FILLED)
        # Rec. 601 luma tells whether black or white letters are legible on it.
        blue, green, red = ground
        ink = 0 if 0.114 * blue + 0.587 * green + 0.299 * red > 128 else 255
        self.write(self._canvas, text, (x1 + self._margin, y2 - self._margin - self.height // 4), (ink, ink, ink))

    @property
    def _margin(self) -> int:
        return max(2, self.height // 5)

    def _size(self, text: str) -> tuple[int, int]:
        (width, _), _ = cv2.getTextSize(_ascii(text), _FONT, self._scale, self._stroke)
        return int(width) + 2 * self._margin, self.height + self.height // 4 + 2 * self._margin

    def _inside(self, place: tuple[int, int], width: int, height: int) -> _Box:
        x = max(0, min(place[0], self._canvas.shape[1] - width))
        y = max(0, min(place[1], self._canvas.shape[0] - height))
        return x, y, x + width, y + height

    def _corners(self, detection: Detection, factor: int) -> _Box:
        assert detection.box_xyxy is not None
        x1, y1, x2, y2 = (round(value * factor) for value in detection.box_xyxy)
        # The far edge of a box at the border is one pixel outside of the picture.
        return x1, y1, min(x2, self._canvas.shape[1] - 1), min(y2, self._canvas.shape[0] - 1)


def _caption(detection: Detection) -> str:
    return f"{detection.label} {detection.score:.2f}"


def _ascii(text: str) -> str:
    """OpenCV 4 has no other letters: accents go, and what is left becomes a question mark."""
    letters = (letter for letter in unicodedata.normalize("NFKD", text) if not unicodedata.combining(letter))
    return "".join(letters).encode("ascii", "replace").decode()


def _overlap(a: _Box, b: _Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _color(class_id: int) -> _Color:
    """BGR. Golden-angle steps around the colour circle keep neighbouring classes apart.

    Every 5th, 8th and 13th class comes close to the same hue again and differs in brightness, every 21st in saturation.
    """
    hue = round(class_id * 137.508) % 360
    hsv = np.array([[[hue // 2, (200, 110)[class_id // 21 % 2], (255, 205, 155)[class_id % 3]]]], np.uint8)
    blue, green, red = cv2.cvtColor(hsv, cv2.COLOR_HSV2BGR)[0, 0].tolist()
    return blue, green, red

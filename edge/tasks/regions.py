"""Regions of a map that covers the picture: a probability for each pixel (text detectors), or several classes.

A region is a set of touching pixels of one class; corners touch. Its score is the mean probability in it. For PP-OCR's
text map the regions are the shrunk lines that the model was trained on, not the outlines that PP-OCR grows from them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import cv2
import numpy as np

from edge.errors import ModelError
from edge.tasks.signature import UnfitError
from edge.types import Detection, Mask

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from numpy.typing import NDArray

    from edge import config
    from edge.tasks.labels import Labels
    from edge.tasks.signature import Signature
    from edge.types import Letterbox, Tensors

__all__ = ["RegionMap"]

# INT8 may carry a probability slightly out of 0..1; logits are far out.
_TOLERANCE = 0.05


@dataclass(frozen=True, slots=True)
class _Region:
    """Pixels of one class that touch each other."""

    score: float
    class_id: int
    number: int
    """What the region's pixels hold in ``numbers``."""
    numbers: NDArray[np.int32]
    """(h, w), the part of the map that shows the picture."""
    box_xyxy: tuple[int, int, int, int]
    """In pixels of ``numbers``."""


class RegionMap:
    """One output [1, H, W] or [1, 1, H, W] of probabilities, or [1, C, H, W] of classes, logits or probabilities."""

    expects: ClassVar[str] = "[1, H, W] or [1, 1, H, W] probabilities, or [1, C, H, W] classes"
    activations: ClassVar[tuple[str, ...]] = ("none",)

    def __init__(self, output: str, shape: tuple[int, int, int]) -> None:
        """Take the output's name and its (C, H, W)."""
        self.classes = shape[0]
        self._output = output
        self._shape = shape

    @classmethod
    def fit(cls, signature: Signature, /) -> RegionMap:
        """Make the decoder; see ``Layout.fit``."""
        rank = len(signature.outputs[0].shape) if signature.outputs else 0
        spec = signature.single(rank=3 if rank == 3 else 4)
        *channels, height, width = spec.shape[1:]
        model_w, model_h = signature.input_wh
        if not np.issubdtype(spec.dtype, np.floating):
            raise UnfitError(f"'{spec.name}' is {spec.dtype}; expected probabilities or logits")
        if height < 2 or width < 2 or abs(width * model_h / model_w - height) > 1:
            raise UnfitError(f"a map of {width}x{height} does not cover an input of {model_w}x{model_h}")
        return cls(spec.name, (channels[0] if channels else 1, height, width))

    def objects(
        self, outputs: Tensors, letterbox: Letterbox, section: config.Segmentation, names: Labels
    ) -> list[Detection]:
        """Decode one frame; see ``MaskHead.objects``.

        Raises:
            ModelError: the map of a single class holds no probabilities.
        """
        maps = outputs[self._output].reshape(self._shape)
        view = _View(letterbox, (self._shape[2], self._shape[1]))
        class_map, probability = self._classify(maps[:, view.rows, view.columns])
        regions = [
            region
            for region in _regions(class_map, probability, section.mask_threshold, names.wanted)
            if region.score >= section.score
        ]
        found: list[Detection] = []
        for region in sorted(regions, key=lambda region: -region.score):
            mask = view.mask(region)
            if mask.bits.sum() < section.min_area:
                continue
            name = names.name(region.class_id)
            found.append(Detection(name, region.class_id, region.score, view.box_xyxy(region), mask))
            if len(found) == section.max_detections:
                break
        return found

    def _classify(self, maps: NDArray[Any]) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
        """The best class of each pixel, and its probability."""
        maps = maps.astype(np.float32, copy=False)
        if len(maps) == 1:
            low, high = float(maps.min(initial=0)), float(maps.max(initial=0))
            if low < -_TOLERANCE or high > 1 + _TOLERANCE:
                raise ModelError(
                    f"output '{self._output}' has values from {low:.3g} to {high:.3g}; layout 'map' takes"
                    " probabilities, 0 to 1: end the model with a Sigmoid"
                )
            return np.zeros(maps.shape[1:], np.intp), maps[0]
        class_map = maps.argmax(axis=0)
        best = maps.max(axis=0)
        sample = maps[:, ::16, ::16]
        if (sample >= 0).all() and (np.abs(sample.sum(axis=0) - 1) < _TOLERANCE).all():
            return class_map, best
        return class_map, 1 / np.exp(maps - best).sum(axis=0)  # softmax at the best class


class _View:
    """Which part of a map shows the picture, and how its pixels and the picture's correspond."""

    def __init__(self, letterbox: Letterbox, map_wh: tuple[int, int]) -> None:
        self._letterbox = letterbox
        self._cell_wh = (letterbox.model_wh[0] / map_wh[0], letterbox.model_wh[1] / map_wh[1])
        self._map_x, self.columns = self._axis(0, map_wh[0])
        self._map_y, self.rows = self._axis(1, map_wh[1])

    def _axis(self, axis: int, size: int) -> tuple[NDArray[np.intp], slice]:
        """The map's pixel under the centre of each source pixel, and the range of all that show some of the picture."""
        count, cell = self._letterbox.source_wh[axis], self._cell_wh[axis]
        scale, offset = self._letterbox.scale_xy[axis], self._letterbox.offset_xy[axis]
        pixels = np.floor(((np.arange(count) + 0.5) * scale + offset) / cell).astype(np.intp)
        # A hair inside, so that a rounding error does not add a pixel of padding.
        first, last = math.floor(offset / cell + 1e-6), math.ceil((count * scale + offset) / cell - 1e-6)
        shown = slice(max(first, 0), min(last, size))
        return pixels - shown.start, shown

    def box_xyxy(self, region: _Region) -> tuple[float, float, float, float]:
        """The rectangle of a region in the source picture, clipped to it."""
        first = np.array([self.columns.start, self.rows.start] * 2, np.float64)
        edges = np.array([region.box_xyxy], np.float64) + first
        box = self._letterbox.clip(self._letterbox.to_source(edges * np.tile(self._cell_wh, 2)))[0].tolist()
        return box[0], box[1], box[2], box[3]

    def mask(self, region: _Region) -> Mask:
        """The source pixels whose centre lies in a region."""
        x1, y1, x2, y2 = region.box_xyxy
        left, right = np.searchsorted(self._map_x, [x1, x2]).tolist()
        top, bottom = np.searchsorted(self._map_y, [y1, y2]).tolist()
        rows, columns = self._map_y[top:bottom], self._map_x[left:right]
        bits = region.numbers[rows[:, None], columns] == region.number
        return Mask(bits, (left, top), self._letterbox.source_wh)


def _regions(
    class_map: NDArray[np.intp], probability: NDArray[np.float32], threshold: float, wanted: frozenset[int] | None
) -> Iterator[_Region]:
    """Regions of pixels over a threshold, class by class."""
    over = probability > threshold  # not so for NaN
    for class_id in np.unique(class_map[over]).tolist():
        if wanted is not None and class_id not in wanted:
            continue
        pixels = (over & (class_map == class_id)).astype(np.uint8)
        count, numbers, stats, _ = cv2.connectedComponentsWithStats(pixels, connectivity=8)
        numbers = np.asarray(numbers, np.int32)
        sums = np.bincount(numbers[over], weights=probability[over], minlength=count)
        for number in range(1, count):
            x, y, width, height, area = stats[number].tolist()
            score = min(float(sums[number]) / area, 1.0)
            yield _Region(score, class_id, number, numbers, (x, y, x + width, y + height))

"""Segmentation: objects with masks. How each layout finds them stands in its file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from edge.tasks import labels
from edge.tasks.regions import RegionMap
from edge.tasks.signature import recognise, signature_of
from edge.tasks.yolo_seg import YoloSeg

if TYPE_CHECKING:
    from edge import config
    from edge.tasks.labels import Labels
    from edge.tasks.signature import Layout
    from edge.types import Detection, Letterbox, Tensors, TensorSpec

__all__ = ["MASKS", "MaskHead", "Segmenter", "build"]


class MaskHead(Protocol):
    """Decodes one layout of masks."""

    @property
    def classes(self) -> int:
        """How many classes the model tells apart."""

    def objects(
        self, outputs: Tensors, letterbox: Letterbox, section: config.Segmentation, names: Labels
    ) -> list[Detection]:
        """Decode one frame: wanted objects that reach the score, best first, at most ``max_detections``."""


MASKS: dict[str, Layout[MaskHead]] = {
    "yolo-seg": YoloSeg,
    "map": RegionMap,
}
"""By the name that ``task.layout`` gives them."""


class Segmenter:
    """Finds the objects of one frame and their masks."""

    def __init__(self, section: config.Segmentation, layout: str, head: MaskHead, names: Labels) -> None:
        self.layout = layout
        self._section = section
        self._head = head
        self._labels = names

    def decode(self, outputs: Tensors, letterbox: Letterbox) -> list[Detection]:
        """Decode one frame; see ``edge.tasks.Task.decode``."""
        with np.errstate(over="ignore", invalid="ignore"):  # as in Detector.decode
            return self._head.objects(outputs, letterbox, self._section, self._labels)


def build(
    section: config.Segmentation, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], *, source: str
) -> Segmenter:
    """Make the decoder for a model's outputs; see ``edge.tasks.build``."""
    signature = signature_of(inputs, outputs, source=source)
    layout, head = recognise(MASKS, signature, layout=section.layout, source=source)
    names = labels.load(section.labels, keep=section.keep, classes=head.classes, source=source)
    return Segmenter(section, layout, head, names)

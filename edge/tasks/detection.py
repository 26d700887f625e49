"""Detection: boxes with a class and a score, from any of the heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edge.tasks import labels
from edge.tasks.candidates import select
from edge.tasks.heads import HEADS
from edge.tasks.signature import recognise, signature_of
from edge.types import Detection

if TYPE_CHECKING:
    from edge import config
    from edge.tasks.heads.head import Head
    from edge.tasks.labels import Labels
    from edge.types import Letterbox, Tensors, TensorSpec

__all__ = ["Detector", "build"]


class Detector:
    """Finds the objects of one frame in a head's outputs."""

    def __init__(self, section: config.DetectionTask, layout: str, head: Head, names: Labels) -> None:
        self.layout = layout
        self._section = section
        self._head = head
        self._labels = names

    def decode(self, outputs: Tensors, letterbox: Letterbox) -> list[Detection]:
        """Decode one frame; see ``edge.tasks.Task.decode``."""
        section = self._section
        # A broken model's numbers may overflow on the way; what is not finite in the end is left out by select.
        with np.errstate(over="ignore", invalid="ignore"):
            found = self._head.candidates(outputs, section.score)
        chosen = select(
            found,
            letterbox,
            wanted=self._labels.wanted,
            nms_iou=section.nms_iou if self._head.overlapping else None,
            max_detections=section.max_detections,
        )
        points = chosen.keypoints_xy
        return [
            Detection(
                label=self._labels.name(class_id),
                class_id=class_id,
                score=score,
                box_xyxy=(box[0], box[1], box[2], box[3]),
                keypoints_xy=None
                if points is None
                else tuple((x, y) for x, y in points[index].reshape(-1, 2).tolist()),
            )
            for index, (box, score, class_id) in enumerate(
                zip(chosen.boxes_xyxy.tolist(), chosen.scores.tolist(), chosen.class_ids.tolist(), strict=True)
            )
        ]


def build(
    section: config.DetectionTask, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], *, source: str
) -> Detector:
    """Make the decoder for a model's outputs; see ``edge.tasks.build``."""
    layout, head = recognise(
        HEADS,
        signature_of(inputs, outputs, source=source),
        layout=section.layout,
        activation=section.activation,
        source=source,
    )
    names = labels.load(section.labels, keep=section.keep, classes=head.classes, source=source)
    return Detector(section, layout, head, names)

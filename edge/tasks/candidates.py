"""From what a head proposes to the few boxes that are reported: usable, wanted, not suppressed, best first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edge.types import Letterbox

__all__ = ["Candidates", "select", "suppress"]

# No picture is this large. Beyond it, scaling a broken model's coordinates could overflow float32.
_FAR = 1e6


@dataclass(frozen=True, slots=True)
class Candidates:
    """Boxes with one class each, in parallel arrays that the holder owns."""

    boxes_xyxy: NDArray[np.float32]
    """(N, 4)."""
    scores: NDArray[np.float32]
    class_ids: NDArray[np.intp]
    rows: NDArray[np.intp]
    """Where each stands in the head's outputs, to find there what else belongs to it."""
    keypoints_xy: NDArray[np.float32] | None = None
    """(N, 2k): x, y, x, y, ..."""

    def __len__(self) -> int:
        """How many there are."""
        return len(self.scores)

    def take(self, index: NDArray[Any]) -> Candidates:
        """Those that an index or a mask chooses."""
        return Candidates(
            self.boxes_xyxy[index],
            self.scores[index],
            self.class_ids[index],
            self.rows[index],
            None if self.keypoints_xy is None else self.keypoints_xy[index],
        )


def select(
    found: Candidates,
    letterbox: Letterbox,
    *,
    wanted: frozenset[int] | None,
    nms_iou: float | None,
    max_detections: int,
) -> Candidates:
    """Choose what is reported.

    Args:
        found: in model pixels, in any order; scores are not NaN.
        letterbox: where the picture lies in the model's input.
        wanted: class ids to keep; None for all.
        nms_iou: of two boxes of a class that overlap more, the weaker goes; None if the model gives each object once.
        max_detections: the most that are kept.

    Returns:
        In source pixels, boxes clipped to the picture, best score first, of equal ones the earlier row. Boxes that are
        not finite or lie outside the picture, in its padding, are left out.
    """
    usable: NDArray[np.bool_] = np.all(np.isfinite(found.boxes_xyxy), axis=1)
    if wanted is not None:
        usable &= np.isin(found.class_ids, list(wanted))
    found = found.take(usable)
    boxes = letterbox.to_source(np.clip(found.boxes_xyxy, -_FAR, _FAR))
    clipped = letterbox.clip(boxes)
    inside = (clipped[:, 2] > clipped[:, 0]) & (clipped[:, 3] > clipped[:, 1])
    order = np.flatnonzero(inside)
    order = order[np.argsort(-found.scores[order], kind="stable")]
    if nms_iou is not None and len(order) > 1:
        # Overlap is judged before clipping, as all the original decoders do.
        order = order[suppress(boxes[order], found.class_ids[order], iou=nms_iou, at_most=max_detections)]
    chosen = found.take(order[:max_detections])
    keypoints = chosen.keypoints_xy
    if keypoints is not None:
        keypoints = letterbox.to_source(np.clip(keypoints, -_FAR, _FAR))
    return Candidates(clipped[order[:max_detections]], chosen.scores, chosen.class_ids, chosen.rows, keypoints)


def suppress(
    boxes_xyxy: NDArray[np.float32], class_ids: NDArray[np.intp], *, iou: float, at_most: int
) -> NDArray[np.intp]:
    """Greedy non-maximum suppression inside each class.

    Args:
        boxes_xyxy: (N, 4), the best first.
        class_ids: (N,).
        iou: a box goes when its overlap with a kept one of its class is greater.
        at_most: how many are needed; the search ends when they are found.

    Returns:
        Indices of the kept boxes, ascending; at least ``at_most`` of them where there are as many.
    """
    corners = boxes_xyxy.astype(np.float64)
    rects: Any = np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], axis=1)
    # Classes are laid side by side, so that boxes of different ones never meet: one search instead of one for each.
    # OpenCV's NMSBoxesBatched does the same from 0 on, and lets boxes with negative coordinates meet.
    rects[:, 0] += class_ids * (corners[:, 2].max() - corners[:, 0].min() + 1)
    # OpenCV takes scores and sorts by them: the rank says the same without its rules for equal and zero scores.
    ranks: Any = np.arange(len(rects), 0, -1, dtype=np.float32)
    # On one x86 core this takes 1/9 of the time of a greedy search in numpy for 30 boxes, 1/3 for 1000, 2/3 for 3000.
    # Whether a box is kept depends on better ones only, so a few of the best usually answer for thousands.
    count = 1024
    while True:
        kept = np.asarray(cv2.dnn.NMSBoxes(rects[:count], ranks[:count], 0.0, iou), np.intp).reshape(-1)
        if len(kept) >= at_most or count >= len(rects):
            return kept
        count *= 4

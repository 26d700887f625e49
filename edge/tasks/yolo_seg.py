"""Instance masks of YOLOv8-seg and its kin: each object mixes a set of prototype maps by its own coefficients.

Formulas: Bolya et al., YOLACT (arXiv 1904.02689), section 3: mask = sigmoid(prototypes * coefficients), cropped to the
box. As in ultralytics' process_mask, the sum is resized before it is thresholded, not after.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import cv2
import numpy as np

from edge.tasks.activation import logit
from edge.tasks.candidates import select
from edge.tasks.heads.yolov8 import YoloV8
from edge.tasks.signature import UnfitError
from edge.types import Detection, Mask

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

    from edge import config
    from edge.tasks.labels import Labels
    from edge.tasks.signature import Signature
    from edge.types import Letterbox, Tensors, TensorSpec

__all__ = ["YoloSeg"]


class YoloSeg:
    """Two outputs in any order: YOLOv8's with M coefficients, [1, 4 + C + M, N]; prototypes [1, M, H / 4, W / 4]."""

    expects: ClassVar[str] = "two outputs, [1, 4 + C + M, cells] and prototypes [1, M, H / 4, W / 4]"
    activations: ClassVar[tuple[str, ...]] = ("none",)

    def __init__(self, rows: TensorSpec, prototypes: TensorSpec) -> None:
        self.classes = rows.shape[1] - 4 - prototypes.shape[1]
        self._rows = rows.name
        self._prototypes = prototypes.name
        self._boxes = YoloV8(rows.name, self.classes)

    @classmethod
    def fit(cls, signature: Signature, /) -> YoloSeg:
        """Make the decoder; see ``Layout.fit``."""
        by_rank = {len(spec.shape): spec for spec in signature.outputs if spec.shape[0] == 1}
        if len(signature.outputs) != 2 or set(by_rank) != {3, 4}:
            raise UnfitError("expected two outputs, one of 3 and one of 4 dimensions")
        rows, prototypes = by_rank[3], by_rank[4]
        width, height = signature.input_wh
        if prototypes.shape[2:] != (height // 4, width // 4):
            raise UnfitError(f"expected prototypes of {height // 4}x{width // 4}, found {list(prototypes.shape)}")
        if rows.shape[1] - 4 - prototypes.shape[1] < 1 or not signature.pyramid(rows.shape[2]):
            raise UnfitError(f"expected [1, 4 + C + {prototypes.shape[1]}, cells], found {list(rows.shape)}")
        return cls(rows, prototypes)

    def objects(
        self, outputs: Tensors, letterbox: Letterbox, section: config.Segmentation, names: Labels
    ) -> list[Detection]:
        """Decode one frame; see ``MaskHead.objects``. Masks are made for the objects that are kept, and no others."""
        chosen = select(
            self._boxes.candidates(outputs, section.score),
            letterbox,
            wanted=names.wanted,
            nms_iou=section.nms_iou,
            max_detections=section.max_detections,
        )
        coefficients = outputs[self._rows][0][4 + self.classes :, chosen.rows].T.astype(np.float32)
        prototypes = outputs[self._prototypes][0]
        threshold = logit(section.mask_threshold)
        return [
            Detection(
                label=names.name(class_id),
                class_id=class_id,
                score=score,
                box_xyxy=(box[0], box[1], box[2], box[3]),
                mask=_mask(prototypes, coefficients[index], box, letterbox, threshold),
            )
            for index, (box, score, class_id) in enumerate(
                zip(chosen.boxes_xyxy.tolist(), chosen.scores.tolist(), chosen.class_ids.tolist(), strict=True)
            )
        ]


def _mask(
    prototypes: NDArray[Any],
    coefficients: NDArray[np.float32],
    box: list[float],
    letterbox: Letterbox,
    threshold: float,
) -> Mask:
    """The mask of one object: pixels of the picture in its box where the mixture of prototypes is over a threshold."""
    left, right = _pixels(box[0], box[2], letterbox.source_wh[0])
    top, bottom = _pixels(box[1], box[3], letterbox.source_wh[1])
    columns, scale_x, offset_x = _sampling(left, right, letterbox, axis=0, size=prototypes.shape[2])
    rows, scale_y, offset_y = _sampling(top, bottom, letterbox, axis=1, size=prototypes.shape[1])
    mixed = np.tensordot(coefficients, prototypes[:, rows, columns].astype(np.float32), axes=1)
    resized = cv2.warpAffine(
        mixed,
        np.array([[scale_x, 0, offset_x], [0, scale_y, offset_y]]),
        (right - left, bottom - top),
        flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP,
        borderMode=cv2.BORDER_REPLICATE,
    )
    return Mask(np.asarray(resized) > threshold, (left, top), letterbox.source_wh)


def _pixels(begin: float, end: float, size: int) -> tuple[int, int]:
    """First and one after the last pixel whose centre lies in an interval of the picture; at least one pixel."""
    first = min(math.ceil(begin - 0.5), size - 1)
    return first, max(math.ceil(end - 0.5), first + 1)


def _sampling(begin: int, end: int, letterbox: Letterbox, *, axis: int, size: int) -> tuple[slice, float, float]:
    """Where the centres of source pixels lie in a map that covers the model's input with ``size`` cells.

    Returns:
        The cells that are needed, and scale and offset such that pixel ``begin + i`` lies at ``i * scale + offset`` of
        them, where 0 is the first one's centre, as for OpenCV.
    """
    cells = size / letterbox.model_wh[axis]
    scale = letterbox.scale_xy[axis] * cells
    offset = (begin + 0.5) * scale + letterbox.offset_xy[axis] * cells - 0.5
    first = min(max(math.floor(offset), 0), size - 1)
    last = min(max(math.floor(offset + (end - begin - 1) * scale) + 2, first + 1), size)
    return slice(first, last), scale, offset - first

"""YOLOv8, YOLO11 and their kin: decoded boxes without an objectness, one column a cell."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from edge.tasks.activation import probability
from edge.tasks.candidates import Candidates
from edge.tasks.heads.head import corners, reaching, strongest
from edge.tasks.signature import UnfitError

if TYPE_CHECKING:
    from edge.tasks.signature import Signature
    from edge.types import Tensors

__all__ = ["YoloV8"]


class YoloV8:
    """One output [1, 4 + C, N]: centre and size in model pixels, then the classes."""

    expects: ClassVar[str] = "[1, 4 + C, cells] decoded"
    activations: ClassVar[tuple[str, ...]] = ("none", "sigmoid")
    overlapping = True

    def __init__(self, output: str, classes: int, activation: str = "none") -> None:
        self.classes = classes
        self._output = output
        self._activation = activation

    @classmethod
    def fit(cls, signature: Signature, /) -> YoloV8:
        """Make the decoder; see ``Layout.fit``."""
        spec = signature.single(rank=3)
        channels, columns = spec.shape[1:]
        if channels <= 4 or not signature.pyramid(columns):
            raise UnfitError(f"expected 4 + C channels for each cell, found {channels} for {columns}")
        return cls(spec.name, channels - 4, signature.activation)

    def candidates(self, outputs: Tensors, score: float) -> Candidates:
        """Decode; see ``Head.candidates``. What follows the C classes in a column is not looked at."""
        table = outputs[self._output][0]
        classes = table[4 : 4 + self.classes]
        # Every activation is monotonic, so the greatest output is the greatest score. Most columns end here.
        likely = strongest(probability(classes.max(axis=0), self._activation), score)
        scores = probability(classes[:, likely].T, self._activation)
        index, class_ids = reaching(scores, score)
        rows = likely[index]
        boxes = table[:4, rows].T.astype(np.float32)
        return Candidates(corners(boxes[:, :2], boxes[:, 2:]), scores[index, class_ids], class_ids, rows)

"""YOLOv5, and others that decode their boxes but keep an objectness (YOLOv7, YOLOX with decoding in the graph)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from edge.tasks.candidates import Candidates
from edge.tasks.heads.head import corners, rows_with_objectness
from edge.tasks.signature import UnfitError

if TYPE_CHECKING:
    from edge.tasks.signature import Signature
    from edge.types import Tensors

__all__ = ["YoloV5"]


class YoloV5:
    """One output [1, N, 5 + C]: centre and size in model pixels, objectness and classes."""

    expects: ClassVar[str] = "[1, 3 * cells, 5 + C] decoded"
    activations: ClassVar[tuple[str, ...]] = ("none", "sigmoid")
    overlapping = True

    def __init__(self, output: str, classes: int, activation: str) -> None:
        self.classes = classes
        self._output = output
        self._activation = activation

    @classmethod
    def fit(cls, signature: Signature, /) -> YoloV5:
        """Make the decoder; see ``Layout.fit``."""
        spec = signature.single(rank=3)
        rows, columns = spec.shape[1:]
        # One row a cell is what a raw YOLOX has as well: only the deployment can say that the boxes are decoded.
        anchors = (3,) if signature.guessing else (3, 1)
        if columns <= 5 or not any(signature.pyramid(rows, anchors=count) for count in anchors):
            raise UnfitError(f"expected 3 rows for each cell, or one, of 5 + C values; found {rows} of {columns}")
        return cls(spec.name, columns - 5, signature.activation)

    def candidates(self, outputs: Tensors, score: float) -> Candidates:
        """Decode; see ``Head.candidates``."""
        table = outputs[self._output][0]
        rows, scores, class_ids = rows_with_objectness(table, score=score, activation=self._activation)
        boxes = table[rows, :4].astype("float32")
        return Candidates(corners(boxes[:, :2], boxes[:, 2:]), scores, class_ids, rows)

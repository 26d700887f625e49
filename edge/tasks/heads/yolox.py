"""YOLOX: anchor-free rows in units of their cell, to be decoded here.

Formulas: demo_postprocess of Megvii-BaseDetection/YOLOX, yolox/utils/demo_utils.py. The same model exported with
``--decode_in_inference`` has the same shape but decoded boxes: set ``task.layout: yolov5`` for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from edge.tasks.activation import bounded_exp
from edge.tasks.candidates import Candidates
from edge.tasks.heads.head import cell_grid, corners, rows_with_objectness
from edge.tasks.signature import UnfitError

if TYPE_CHECKING:
    from edge.tasks.signature import Signature
    from edge.types import Tensors

__all__ = ["YoloX"]

_PYRAMIDS = ((8, 16, 32), (8, 16, 32, 64))


class YoloX:
    """One output [1, N, 5 + C]: centre in its cell, log of the size, objectness and classes."""

    expects: ClassVar[str] = "[1, cells, 5 + C] raw"
    activations: ClassVar[tuple[str, ...]] = ("none", "sigmoid")
    overlapping = True

    def __init__(
        self, output: str, classes: int, input_wh: tuple[int, int], strides: tuple[int, ...], activation: str
    ) -> None:
        self.classes = classes
        self._output = output
        self._activation = activation
        self._cells, self._strides = cell_grid(input_wh, strides)

    @classmethod
    def fit(cls, signature: Signature, /) -> YoloX:
        """Make the decoder; see ``Layout.fit``."""
        spec = signature.single(rank=3)
        rows, columns = spec.shape[1:]
        for strides in _PYRAMIDS:
            if rows == signature.cells(strides) and columns > 5:
                return cls(spec.name, columns - 5, signature.input_wh, strides, signature.activation)
        counts = " or ".join(str(signature.cells(strides)) for strides in _PYRAMIDS)
        raise UnfitError(f"expected {counts} rows of 5 + C values, found {rows} of {columns}")

    def candidates(self, outputs: Tensors, score: float) -> Candidates:
        """Decode; see ``Head.candidates``."""
        table = outputs[self._output][0]
        rows, scores, class_ids = rows_with_objectness(table, score=score, activation=self._activation)
        raw = table[rows, :4].astype("float32")
        strides = self._strides[rows]
        boxes = corners((raw[:, :2] + self._cells[rows]) * strides, bounded_exp(raw[:, 2:]) * strides)
        return Candidates(boxes, scores, class_ids, rows)

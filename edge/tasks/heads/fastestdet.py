"""FastestDet: one feature map, one object a cell.

Formulas: dog-qiuqiu/FastestDet, example/ncnn/FastestDet.cpp, which runs the published model (output '758'); its Python
examples of other years leave the powers out of the score. Channels are objectness, centre x and y, width, height, then
classes; objectness and classes are probabilities already in the graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from edge.tasks.activation import probability, sigmoid
from edge.tasks.candidates import Candidates
from edge.tasks.heads.head import corners
from edge.tasks.signature import UnfitError

if TYPE_CHECKING:
    from edge.tasks.signature import Signature
    from edge.types import Tensors

__all__ = ["FastestDet"]


class FastestDet:
    """One output [1, 5 + C, H / stride, W / stride]."""

    expects: ClassVar[str] = "[1, 5 + C, H / stride, W / stride]"
    activations: ClassVar[tuple[str, ...]] = ("none",)
    overlapping = True

    def __init__(self, output: str, classes: int, grid_wh: tuple[int, int], input_wh: tuple[int, int]) -> None:
        self.classes = classes
        self._output = output
        self._grid_wh = grid_wh
        self._input_wh = np.array(input_wh, np.float32)

    @classmethod
    def fit(cls, signature: Signature, /) -> FastestDet:
        """Make the decoder; see ``Layout.fit``."""
        spec = signature.single(rank=4)
        channels, height, width = spec.shape[1:]
        input_w, input_h = signature.input_wh
        stride = input_w // width if width else 0
        if stride < 2 or (width * stride, height * stride) != (input_w, input_h):
            raise UnfitError(f"a map of {width}x{height} has no whole stride in an input of {input_w}x{input_h}")
        if channels <= 5:
            raise UnfitError(f"expected 5 + C channels, found {channels}")
        return cls(spec.name, channels - 5, (width, height), signature.input_wh)

    def candidates(self, outputs: Tensors, score: float) -> Candidates:
        """Decode; see ``Head.candidates``."""
        channels = outputs[self._output][0].reshape(5 + self.classes, -1)
        best = channels[5:].max(axis=0)
        scores = probability(channels[0], "none") ** 0.6 * probability(best, "none") ** 0.4
        rows = np.flatnonzero(scores >= score)
        class_ids = channels[5:, rows].argmax(axis=0)
        raw = channels[1:5, rows].T.astype(np.float32)
        cell_y, cell_x = np.divmod(rows, self._grid_wh[0])
        cells = np.stack([cell_x, cell_y], axis=1).astype(np.float32)
        centres = (cells + np.tanh(raw[:, :2])) / np.array(self._grid_wh, np.float32)
        boxes = corners(centres * self._input_wh, sigmoid(raw[:, 2:]) * self._input_wh)
        return Candidates(boxes, scores[rows], class_ids, rows)

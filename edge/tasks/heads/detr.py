"""DETR and its descendants: a set of queries, each with class logits and a box relative to the input.

Formulas: PostProcess of facebookresearch/detr (softmax, the last class is 'no object') and of lyuwenyu/RT-DETR
(sigmoid, no such class).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from edge.tasks.activation import probability, softmax
from edge.tasks.candidates import Candidates
from edge.tasks.heads.head import corners, reaching
from edge.tasks.signature import UnfitError

if TYPE_CHECKING:
    from edge.tasks.signature import Signature
    from edge.types import Tensors, TensorSpec

__all__ = ["Detr"]

_BOX_NAMES = ("box", "dets", "coord")
_CLASS_NAMES = ("logit", "label", "class", "cls", "score")


class Detr:
    """Two outputs in any order: class logits [1, Q, C], and boxes [1, Q, 4] as centre and size in 0..1."""

    expects: ClassVar[str] = "two outputs, logits [1, Q, C] and boxes [1, Q, 4]"
    activations: ClassVar[tuple[str, ...]] = ("sigmoid", "softmax", "none")
    overlapping = False

    def __init__(self, logits: TensorSpec, boxes: TensorSpec, input_wh: tuple[int, int], activation: str) -> None:
        self.classes = logits.shape[2] - (activation == "softmax")
        self._logits = logits.name
        self._boxes = boxes.name
        self._input_wh = np.array(input_wh, np.float32)
        self._activation = activation

    @classmethod
    def fit(cls, signature: Signature, /) -> Detr:
        """Make the decoder; see ``Layout.fit``."""
        specs = signature.outputs
        if len(specs) != 2:
            raise UnfitError(f"expected two outputs, found {len(specs)}")
        first, second = specs
        if any(len(spec.shape) != 3 or spec.shape[0] != 1 for spec in specs) or first.shape[1] != second.shape[1]:
            raise UnfitError("expected two outputs [1, Q, ...] with the same number of queries Q")
        logits, boxes = _in_order(first, second)
        if logits.shape[2] < 1 + (signature.activation == "softmax"):
            raise UnfitError(f"'{logits.name}' {list(logits.shape)} has no class")
        return cls(logits, boxes, signature.input_wh, signature.activation)

    def candidates(self, outputs: Tensors, score: float) -> Candidates:
        """Decode; see ``Head.candidates``."""
        logits = outputs[self._logits][0]
        if self._activation == "softmax":
            logits = softmax(logits)[:, :-1]
        scores = probability(logits, "sigmoid" if self._activation == "sigmoid" else "none")
        rows, class_ids = reaching(scores, score, exclusive=self._activation == "softmax")
        boxes = outputs[self._boxes][0][rows].astype(np.float32)
        centres, sizes = boxes[:, :2] * self._input_wh, boxes[:, 2:] * self._input_wh
        return Candidates(corners(centres, sizes), scores[rows, class_ids], class_ids, rows)


def _in_order(first: TensorSpec, second: TensorSpec) -> tuple[TensorSpec, TensorSpec]:
    """Logits, then boxes."""
    if first.shape[2] == 4 and second.shape[2] == 4:
        # Four classes: only the names tell.
        named = [any(word in spec.name.lower() for word in _BOX_NAMES) for spec in (first, second)]
        if named[0] == named[1]:
            named = [not any(word in spec.name.lower() for word in _CLASS_NAMES) for spec in (first, second)]
        if named[0] == named[1]:
            raise UnfitError(
                f"'{first.name}' and '{second.name}' both have 4 values a query, and their names don't say which are"
                " the boxes; rename the outputs to 'logits' and 'boxes'"
            )
        return (second, first) if named[0] else (first, second)
    if second.shape[2] == 4:
        return first, second
    if first.shape[2] == 4:
        return second, first
    raise UnfitError(f"neither '{first.name}' nor '{second.name}' has the 4 values of a box for each query")

"""End-to-end detectors (YOLOv10, YOLO26, exports with NMS inside): each object once, ready to use."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from edge.tasks.activation import probability
from edge.tasks.candidates import Candidates
from edge.tasks.signature import UnfitError

if TYPE_CHECKING:
    from edge.tasks.signature import Signature
    from edge.types import Tensors

__all__ = ["EndToEnd"]


class EndToEnd:
    """One output [1, N, 6]: corners in model pixels, score, class id."""

    expects: ClassVar[str] = "[1, N, 6] corners, score, class"
    activations: ClassVar[tuple[str, ...]] = ("none",)
    overlapping = False
    classes = None

    def __init__(self, output: str) -> None:
        self._output = output

    @classmethod
    def fit(cls, signature: Signature, /) -> EndToEnd:
        """Make the decoder; see ``Layout.fit``."""
        spec = signature.single(rank=3)
        if spec.shape[2] != 6:
            raise UnfitError(f"expected rows of 6 values, found {spec.shape[2]}")
        return cls(spec.name)

    def candidates(self, outputs: Tensors, score: float) -> Candidates:
        """Decode; see ``Head.candidates``. Rows without a class, which fill up the output, are left out."""
        table = outputs[self._output][0]
        scores = probability(table[:, 4], "none")
        # The class is a whole number; below 0 or not a number, the row is padding.
        rows = np.flatnonzero((scores >= score) & (table[:, 5] > -0.5) & (table[:, 5] < 1e6))
        chosen = table[rows].astype(np.float32)
        return Candidates(chosen[:, :4], scores[rows], np.rint(chosen[:, 5]).astype(np.intp), rows)

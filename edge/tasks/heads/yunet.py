"""YuNet: faces with five points.

Formulas: FaceDetectorYNImpl::postProcess of opencv/opencv, modules/objdetect/src/face_detect.cpp. The points are the
right eye, the left eye, the tip of the nose, and the right and left corner of the mouth, as the face has them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from edge.tasks.activation import bounded_exp, probability
from edge.tasks.candidates import Candidates
from edge.tasks.heads.head import cell_grid, corners
from edge.tasks.signature import UnfitError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edge.tasks.signature import Signature
    from edge.types import Tensors

__all__ = ["YuNet"]

_STRIDES = (8, 16, 32)
_POINTS = 5


class YuNet:
    """Twelve outputs: class [1, n, 1], objectness [1, n, 1], box [1, n, 4] and points [1, n, 10] for three strides."""

    expects: ClassVar[str] = "twelve outputs, cls, obj, bbox and kps at strides 8, 16, 32"
    activations: ClassVar[tuple[str, ...]] = ("none", "sigmoid")
    overlapping = True
    classes = 1

    def __init__(self, names: dict[str, list[str]], input_wh: tuple[int, int], activation: str) -> None:
        """Take the names of the outputs of each kind, by stride."""
        self._names = names
        self._activation = activation
        self._cells, self._strides = cell_grid(input_wh, _STRIDES)

    @classmethod
    def fit(cls, signature: Signature, /) -> YuNet:
        """Make the decoder; see ``Layout.fit``."""
        if len(signature.outputs) != 12:
            raise UnfitError(f"expected twelve outputs, found {len(signature.outputs)}")
        names: dict[str, list[str]] = {"cls": [], "obj": [], "bbox": [], "kps": []}
        for stride in _STRIDES:
            # By shape: names differ between exports. Class and objectness look alike, and the score is the same if they
            # are swapped.
            count = signature.cells((stride,))
            for kinds, width in ((("cls", "obj"), 1), (("bbox",), 4), (("kps",), 2 * _POINTS)):
                found = [spec.name for spec in signature.outputs if spec.shape == (1, count, width)]
                if len(found) != len(kinds):
                    raise UnfitError(
                        f"expected {len(kinds)} of [1, {count}, {width}] for stride {stride}, found {len(found)}"
                    )
                for kind, name in zip(kinds, found, strict=True):
                    names[kind].append(name)
        return cls(names, signature.input_wh, signature.activation)

    def candidates(self, outputs: Tensors, score: float) -> Candidates:
        """Decode; see ``Head.candidates``."""
        cls, obj, bbox, kps = (self._table(outputs, kind) for kind in ("cls", "obj", "bbox", "kps"))
        scores = np.sqrt(probability(cls[:, 0], self._activation) * probability(obj[:, 0], self._activation))
        rows = np.flatnonzero(scores >= score)
        cells, strides = self._cells[rows], self._strides[rows]
        boxes, points = bbox[rows].astype(np.float32), kps[rows].astype(np.float32)
        return Candidates(
            corners((cells + boxes[:, :2]) * strides, bounded_exp(boxes[:, 2:]) * strides),
            scores[rows],
            np.zeros(len(rows), np.intp),
            rows,
            (points + np.tile(cells, _POINTS)) * strides,
        )

    def _table(self, outputs: Tensors, kind: str) -> NDArray[np.floating]:
        """Rows of all strides."""
        return np.concatenate([outputs[name][0] for name in self._names[kind]])

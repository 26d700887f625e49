"""Classification: answers about the whole picture, best first."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from edge.errors import ModelError
from edge.tasks import labels
from edge.tasks.activation import probability, softmax
from edge.types import Detection

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edge import config
    from edge.tasks.labels import Labels
    from edge.types import Letterbox, Tensors, TensorSpec

__all__ = ["Classifier", "build"]

# Probabilities in half precision, or rounded by INT8, don't sum to 1 exactly.
_SUM_TOLERANCE = 0.01


class Classifier:
    """Ranks the classes of one frame."""

    layout = "classification"

    def __init__(self, section: config.Classification, output: str, names: Labels) -> None:
        self._section = section
        self._output = output
        self._labels = names

    def decode(self, outputs: Tensors, letterbox: Letterbox) -> list[Detection]:  # noqa: ARG002 - the whole picture
        """Decode one frame; see ``edge.tasks.Task.decode``. Answers have no box."""
        scores = _scores(outputs[self._output].reshape(-1), self._section.activation)
        order = np.argsort(-scores, kind="stable")
        best = order[scores[order] >= self._section.score][: self._section.top_k]  # NaN is never >=
        return [
            Detection(label=self._labels.name(class_id), class_id=class_id, score=score)
            for class_id, score in zip(best.tolist(), scores[best].tolist(), strict=True)
        ]


def build(
    section: config.Classification,
    inputs: tuple[TensorSpec, ...],  # noqa: ARG001 - every task is built with the same arguments
    outputs: tuple[TensorSpec, ...],
    *,
    source: str,
) -> Classifier:
    """Make the decoder for a model's output; see ``edge.tasks.build``."""
    shape = outputs[0].shape if len(outputs) == 1 else ()
    if len(shape) < 2 or shape[1] < 1 or math.prod(shape) != shape[1]:
        found = ", ".join(f"'{spec.name}' {list(spec.shape)}" for spec in outputs)
        raise ModelError(
            f"{source}: has outputs {found}; task.type 'classification' takes one output, [1, C] or [1, C, 1, 1]"
        )
    return Classifier(section, outputs[0].name, labels.load(section.labels, classes=shape[1], source=source))


def _scores(values: NDArray[Any], activation: str) -> NDArray[np.float32]:
    values = values.astype(np.float32)
    if activation == "auto":
        activation = "none" if _is_distribution(values) else "softmax"
    return softmax(values) if activation == "softmax" else probability(values, activation)


def _is_distribution(values: NDArray[np.float32]) -> bool:
    """Whether softmax has been applied already: nothing is negative and the sum is 1."""
    return bool((values >= 0).all() and abs(values.sum(dtype=np.float64) - 1) <= _SUM_TOLERANCE)

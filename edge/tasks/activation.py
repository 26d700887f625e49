"""What turns a network's outputs into scores and sizes, without overflow for any finite input. NaN stays NaN."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["bounded_exp", "logit", "probability", "sigmoid", "softmax"]


def probability(outputs: NDArray[Any], activation: str) -> NDArray[np.float32]:
    """Scores in 0..1 from class outputs; ``activation`` is 'none', for outputs that are scores already, or 'sigmoid'.

    Quantisation may carry a score of 1 slightly over it, which is clipped, so that a product of scores is never
    greater than its factors.
    """
    if activation == "sigmoid":
        return sigmoid(outputs)
    return np.clip(outputs.astype(np.float32, copy=False), 0, 1)


def sigmoid(x: NDArray[Any]) -> NDArray[np.float32]:
    """1 / (1 + exp(-x)), elementwise."""
    # exp overflows float32 above 88.7; at 80 the result is already 0 or 1 to within 2e-35.
    return np.asarray(1 / (1 + np.exp(-np.clip(x.astype(np.float32, copy=False), -80, 80))), np.float32)


def softmax(x: NDArray[Any], axis: int = -1) -> NDArray[np.float32]:
    """exp(x) / sum(exp(x)) along an axis. NaN and infinity make the whole sum NaN."""
    x = x.astype(np.float32, copy=False)
    with np.errstate(invalid="ignore"):  # infinity - infinity
        powers = np.exp(x - x.max(axis=axis, keepdims=True))
    return np.asarray(powers / powers.sum(axis=axis, keepdims=True), np.float32)


def bounded_exp(x: NDArray[Any]) -> NDArray[np.float32]:
    """exp(x) for box sizes in strides, at most e^16: larger than any picture and far from float32's end."""
    return np.exp(np.minimum(x.astype(np.float32, copy=False), 16))


def logit(p: float) -> float:
    """The x whose sigmoid is p: a threshold on scores as one on raw outputs. -inf at 0, inf at 1."""
    if p <= 0 or p >= 1:
        return -math.inf if p <= 0 else math.inf
    return math.log(p / (1 - p))

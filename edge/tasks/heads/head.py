"""What a detection head is, and the arithmetic that several share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from edge.tasks.activation import probability

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edge.tasks.candidates import Candidates
    from edge.types import Tensors

__all__ = ["Head", "cell_grid", "corners", "reaching", "rows_with_objectness", "strongest"]

# A sane picture has some hundreds even at a score of 0.01. The limit bounds the time that a broken model takes, whose
# every cell is an object of every class.
_MOST = 4096


class Head(Protocol):
    """Decodes one layout of detections. Its class is the layout: see ``edge.tasks.signature.Layout``."""

    @property
    def classes(self) -> int | None:
        """How many classes the model tells apart; None if its outputs don't say."""

    @property
    def overlapping(self) -> bool:
        """Whether several rows can be about one object, so that suppression is needed."""

    def candidates(self, outputs: Tensors, score: float) -> Candidates:
        """Decode the rows that have at least this score. Others cost no more than finding their score.

        Args:
            outputs: the model's, by name; not written to, and the result is no view of them.
            score: in 0..1.

        Returns:
            Boxes in model pixels, in the order of the rows. A row whose score is NaN is left out; boxes may have
            non-finite coordinates.
        """


def strongest(scores: NDArray[np.float32], score: float) -> NDArray[np.intp]:
    """Indices, ascending, of the (N,) scores that reach a score: the best 4096 of them. NaN reaches none."""
    found = np.flatnonzero(scores >= score)
    if len(found) > _MOST:
        found = np.sort(found[np.argpartition(-scores[found], _MOST)[:_MOST]])
    return found


def reaching(
    scores: NDArray[np.float32], score: float, *, exclusive: bool = False
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Rows and classes of an (N, C) table of scores that reach a score, as in ``strongest``.

    A row with a NaN gives nothing. Where classes are judged independently, as by sigmoids, a row counts for each that
    reaches the score. That is how mAP is measured by those who publish it (YOLOX-Nano has 0.004 more at score 0.01 than
    with the best class alone), and at a deployment's scores two classes hardly ever do: for 1 of 377 objects at 0.25 on
    the test photographs.

    Args:
        scores: not written to.
        score: in 0..1.
        exclusive: only the best class of a row counts, for scores that a softmax made.
    """
    rows = strongest(scores.max(axis=1), score)
    chosen = scores[rows]
    if exclusive:
        return rows, chosen.argmax(axis=1)
    index, class_ids = np.divmod(strongest(chosen.reshape(-1), score), chosen.shape[1])
    return rows[index], class_ids


def rows_with_objectness(
    table: NDArray[Any], *, score: float, activation: str
) -> tuple[NDArray[np.intp], NDArray[np.float32], NDArray[np.intp]]:
    """What reaches a score in an (N, 5 + C) table of box, objectness and classes; a score is objectness * class.

    Returns:
        Rows, scores and classes.
    """
    objectness = probability(table[:, 4], activation)
    # A class is at most 1, so the product can't be more than the objectness: most rows end here.
    likely = strongest(objectness, score)
    scores = objectness[likely, None] * probability(table[likely, 5:], activation)
    index, class_ids = reaching(scores, score)
    return likely[index], scores[index, class_ids], class_ids


def cell_grid(input_wh: tuple[int, int], strides: tuple[int, ...]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cells of feature maps, map by map, row by row.

    Returns:
        (N, 2) column and row of each cell, and (N, 1) the stride of its map.
    """
    cells, sizes = [], []
    for stride in strides:
        width, height = input_wh[0] // stride, input_wh[1] // stride
        rows, columns = np.divmod(np.arange(width * height), max(width, 1))
        cells.append(np.stack([columns, rows], axis=1))
        sizes.append(np.full((width * height, 1), stride))
    return np.concatenate(cells).astype(np.float32), np.concatenate(sizes).astype(np.float32)


def corners(centres: NDArray[np.float32], sizes: NDArray[np.float32]) -> NDArray[np.float32]:
    """(N, 4) xyxy from (N, 2) centres and (N, 2) widths and heights."""
    half = sizes / 2
    return np.concatenate([centres - half, centres + half], axis=1)

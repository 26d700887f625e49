"""COCO's run-length encoding of binary masks, in the compressed form that messages and pycocotools carry.

Runs go down the columns, of the whole picture, and start with the length of a run of zeros. The masks themselves cover
only their box, so runs are computed from the box and moved to where it lies: the whole picture is never made.
Format and formulas: rleEncode, rleToString and rleFrString of cocodataset/cocoapi, common/maskApi.c.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from edge.types import Mask

__all__ = ["compress", "counts_of", "decode_rle", "decompress", "encode_rle"]

# The compressed form writes five bits a character, as '0' + bits; the sixth bit says that the number goes on.
_BITS = 5
_GOES_ON = 1 << _BITS
_SIGN = 1 << (_BITS - 1)
_ZERO = ord("0")


def encode_rle(mask: Mask) -> str:
    """Compressed run lengths of a mask in its source picture: the ``counts`` of COCO's ``{size, counts}``."""
    return compress(counts_of(mask))


def decode_rle(counts: str | Sequence[int], size_wh: tuple[int, int]) -> NDArray[np.bool_]:
    """The mask, ``(H, W)`` bool, that compressed or plain run lengths stand for.

    Raises:
        ValueError: the text is no run-length encoding, or its runs don't fill just this size.
    """
    width, height = size_wh
    runs = decompress(counts) if isinstance(counts, str) else np.asarray(counts, np.int64)
    if (runs < 0).any() or runs.sum() != width * height:
        raise ValueError(f"the runs cover {runs.sum()} pixels; expected {width}x{height} = {width * height}")
    values = np.arange(len(runs)) % 2 == 1
    bits: NDArray[np.bool_] = np.repeat(values, runs)
    return np.ascontiguousarray(bits.reshape(width, height).T)


def counts_of(mask: Mask) -> NDArray[np.int64]:
    """Plain run lengths of a mask in its source picture: zeros, ones, zeros, ... down the columns."""
    width, height = mask.source_wh
    x, y = mask.offset_xy
    rows, columns = mask.bits.shape
    # A zero above and below each column makes every run begin and end inside it.
    padded = np.zeros((columns, rows + 2), np.int8)
    padded[:, 1:-1] = mask.bits.T
    steps = np.diff(padded, axis=1)
    column, row = np.nonzero(steps)  # column by column: a run's begin, its end, the next one's begin, ...
    edges = (x + column) * height + y + row
    # Where a run reaches the bottom and the next column's starts at the top, the two are one.
    joined = np.flatnonzero(edges[1:-1:2] == edges[2::2])
    edges = np.delete(edges, np.concatenate([2 * joined + 1, 2 * joined + 2]))
    total = width * height
    if len(edges) and edges[-1] == total:
        edges = edges[:-1]  # no last run of no zeros
    return np.diff(np.concatenate([[0], edges, [total]])).astype(np.int64)


def compress(counts: NDArray[np.int64]) -> str:
    """Run lengths as text: from the fourth on, the difference to the one before last, in signed groups of 5 bits."""
    rest = counts.astype(np.int64)
    rest[3:] -= counts[1:-2]
    groups: list[NDArray[Any]] = []
    used: list[NDArray[np.bool_]] = []
    going = np.ones(len(rest), np.bool_)
    while going.any():
        group = rest & (_GOES_ON - 1)
        rest = rest >> _BITS
        used.append(going)
        # A number ends where the sign bit of its last group already says what all higher bits are.
        going = going & np.where(group & _SIGN, rest != -1, rest != 0)
        groups.append(np.where(going, group | _GOES_ON, group) + _ZERO)
    # Row by row: all groups of one number before the next number's.
    text = np.stack(groups, axis=1)[np.stack(used, axis=1)] if groups else np.empty(0)
    return text.astype(np.uint8).tobytes().decode("ascii")


def decompress(text: str) -> NDArray[np.int64]:
    """Run lengths from their compressed text.

    Raises:
        ValueError: a character is outside '0'..'o', or the text ends inside a number.
    """
    codes = np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int64) - _ZERO
    if ((codes < 0) | (codes >= 2 * _GOES_ON)).any():
        raise ValueError("is not a run-length encoding: a character is outside '0'..'o'")
    last = np.flatnonzero(codes & _GOES_ON == 0)
    if len(codes) and (not len(last) or last[-1] != len(codes) - 1):
        raise ValueError("is not a run-length encoding: it ends inside a number")
    if not len(codes):
        return np.empty(0, np.int64)
    first = np.concatenate([[0], last[:-1] + 1])
    lengths = last - first + 1
    if lengths.max() * _BITS > 60:
        raise ValueError("is not a run-length encoding: a number has more than 60 bits")
    place = np.arange(len(codes)) - np.repeat(first, lengths)
    counts = np.add.reduceat((codes & (_GOES_ON - 1)) << (_BITS * place), first)
    counts -= np.where(codes[last] & _SIGN, np.int64(1) << (_BITS * lengths), 0)
    # Undo the differences: each number from the fourth on builds on the one before last.
    counts[1::2] = np.cumsum(counts[1::2])
    counts[2::2] = np.cumsum(counts[2::2])
    return counts

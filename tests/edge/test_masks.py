from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pycocotools import mask as coco

from edge import masks
from edge.types import Mask

BITS = hnp.arrays(np.bool_, hnp.array_shapes(min_dims=2, max_dims=2, max_side=12))


@st.composite
def placed(draw: st.DrawFn) -> Mask:
    """A mask somewhere in a larger picture, often touching its edges."""
    bits = draw(BITS)
    height, width = bits.shape
    left, top, right, bottom = (draw(st.integers(0, 3)) for _ in range(4))
    return Mask(bits, (left, top), (left + width + right, top + height + bottom))


def pycocotools_text(bits: np.ndarray) -> str:
    return str(coco.encode(np.asfortranarray(bits.astype(np.uint8)))["counts"], "ascii")


@given(placed())
def test_encoding_equals_pycocotools(mask: Mask) -> None:
    assert masks.encode_rle(mask) == pycocotools_text(mask.full())


@given(placed())
def test_decoding_gives_the_mask_back(mask: Mask) -> None:
    decoded = masks.decode_rle(masks.encode_rle(mask), mask.source_wh)

    np.testing.assert_array_equal(decoded, mask.full())


@given(placed())
def test_plain_runs_are_decoded_as_well(mask: Mask) -> None:
    runs = masks.counts_of(mask).tolist()

    np.testing.assert_array_equal(masks.decode_rle(runs, mask.source_wh), mask.full())


@given(st.lists(st.integers(0, 2**31), max_size=30))
def test_any_counts_survive_compression(counts: list[int]) -> None:
    text = masks.compress(np.array(counts, np.int64))

    assert masks.decompress(text).tolist() == counts


def test_large_masks_equal_pycocotools() -> None:
    y, x = np.mgrid[:1080, :1920]
    bits = ((x - 900) ** 2 + (y - 500) ** 2 < 400**2) ^ (np.random.default_rng(0).random((1080, 1920)) < 0.001)

    assert masks.encode_rle(Mask(bits, (0, 0), (1920, 1080))) == pycocotools_text(bits)


def test_runs_go_down_the_columns_and_start_with_zeros() -> None:
    bits = np.array([[1, 0], [1, 1]], np.bool_)

    assert masks.counts_of(Mask(bits, (0, 0), (2, 2))).tolist() == [0, 2, 1, 1]
    assert masks.counts_of(Mask(bits, (1, 1), (3, 4))).tolist() == [5, 2, 3, 1, 1]


def test_run_over_the_border_of_two_columns_is_one_run() -> None:
    bits = np.array([[0, 1], [1, 1], [1, 0]], np.bool_)

    assert masks.counts_of(Mask(bits, (0, 0), (2, 3))).tolist() == [1, 4, 1]


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0), (2, 2)])
def test_mask_without_a_pixel_is_one_run_of_zeros(shape: tuple[int, int]) -> None:
    mask = Mask(np.zeros(shape, np.bool_), (1, 0), (4, 5))

    assert masks.counts_of(mask).tolist() == [20]
    assert masks.encode_rle(mask) == pycocotools_text(mask.full())


@pytest.mark.parametrize("text", ["~", "0 1", "ä"])
def test_foreign_characters_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"outside '0'\.\.'o'"):
        masks.decompress(text)


@pytest.mark.parametrize(("text", "reason"), [("P", "ends inside"), ("o" * 20 + "0", "60 bits")])
def test_broken_numbers_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        masks.decompress(text)


@pytest.mark.parametrize("runs", [[3], [5], [5, -1], []])
def test_runs_that_do_not_fill_the_picture_are_refused(runs: list[int]) -> None:
    with pytest.raises(ValueError, match="expected 2x2 = 4"):
        masks.decode_rle(runs, (2, 2))

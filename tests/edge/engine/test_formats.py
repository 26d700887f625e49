"""TensorRT's memory layouts: a hand-worked example of each family, and the way there and back for all."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from edge import config
from edge.engine.formats import DTYPES, LAYOUTS, Layout, numpy_type
from edge.errors import ModelError

SHAPES = st.tuples(st.integers(1, 2), st.integers(1, 37), st.integers(1, 5), st.integers(1, 70))


def layout(
    shape: tuple[int, ...], name: str = "chw", dtype: str = "float32", scale: float | None = None, tensor: str = "x"
) -> Layout:
    return Layout(tensor, shape, np.dtype(dtype), name, scale)


def packed(made: Layout, values: np.ndarray) -> np.ndarray:
    memory = np.zeros(made.nbytes + 7, np.uint8)
    view = made.view(memory)
    made.pack(np.asarray(values, made.spec.dtype).reshape(made.shape), view)
    return view


def test_plain_memory_is_the_array() -> None:
    made = layout((2, 3))

    assert made.plain
    assert packed(made, np.arange(6)).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_blocked_channels_lie_together_and_the_last_block_is_padded() -> None:
    # Three channels of 1x2 pixels; with two to a block, the fourth is padding.
    made = layout((1, 3, 1, 2), "chw2", "float16")

    found = packed(made, [0, 1, 10, 11, 20, 21])

    assert found.ravel().tolist() == [0, 10, 1, 11, 20, 0, 21, 0]


@pytest.mark.parametrize(("name", "vector"), [("chw4", 4), ("chw16", 16), ("chw32", 32)])
def test_blocks_have_as_many_channels_as_their_name_says(name: str, vector: int) -> None:
    made = layout((1, vector + 1, 2, 3), name, "float16")

    assert made.packed_shape == (1, 2, 2, 3, vector)


def test_channels_last_are_padded_to_their_multiple() -> None:
    found = packed(layout((1, 3, 1, 2), "hwc8", "float16"), [0, 1, 10, 11, 20, 21])

    assert found.ravel().tolist() == [0, 10, 20, 0, 0, 0, 0, 0, 1, 11, 21, 0, 0, 0, 0, 0]


def test_channels_last_without_padding() -> None:
    assert packed(layout((3, 1, 2), "hwc"), [0, 1, 10, 11, 20, 21]).ravel().tolist() == [0, 10, 20, 1, 11, 21]


@pytest.mark.parametrize(("dtype", "in_row"), [("float16", 32), ("int8", 64)])
def test_rows_for_the_dla_start_at_multiples_of_64_bytes(dtype: str, in_row: int) -> None:
    made = layout((1, 2, 2, 3), "dla_linear", dtype, 1.0)

    found = packed(made, np.arange(12))

    assert made.packed_shape == (1, 2, 2, in_row)
    assert found[0, 1, 0, :4].tolist() == [6, 7, 8, 0]


@pytest.mark.parametrize(
    ("channels", "dtype", "shape"),
    [
        (1, "float16", (1, 2, 32, 1)),
        (1, "int8", (1, 2, 64, 1)),
        (3, "float16", (1, 2, 8, 4)),
        (3, "int8", (1, 2, 16, 4)),
        (4, "int8", (1, 2, 16, 4)),
    ],
)
def test_pictures_for_the_dla_have_one_or_four_channels_last(channels: int, dtype: str, shape: tuple[int, ...]) -> None:
    made = layout((1, channels, 2, 3), "dla_hwc4", dtype, 1.0)

    found = packed(made, np.arange(channels * 6))

    assert made.packed_shape == shape
    assert found[0, 1, 2, :channels].tolist() == [5 + 6 * channel for channel in range(channels)]
    assert not found[0, 1, 2, channels:].any()
    assert not found[:, :, 3:].any()


@pytest.mark.parametrize(
    ("shape", "name", "dtype", "strides"),
    [
        ((2, 40, 4, 5), "chw", "float32", (3200, 80, 20, 4)),
        ((2, 40, 4, 5), "chw16", "float16", (1920, 640, 160, 32)),
        ((2, 16, 4, 5), "chw16", "float16", (640, 0, 160, 32)),
        ((2, 3, 4, 5), "hwc8", "float16", (320, 0, 80, 16)),
        ((2, 3, 4, 5), "dla_linear", "int8", (768, 256, 64, 1)),
        ((2, 3, 4, 5), "dla_hwc4", "float16", (256, 0, 64, 8)),
        ((3, 1, 1), "dla_linear", "float16", (64, 0, 0)),
        ((2, 2, 3, 4, 5), "hwc", "float16", (240, 120, 0, 30, 6)),
        ((), "chw", "float32", ()),
    ],
)
def test_strides_are_those_of_the_memory(
    shape: tuple[int, ...], name: str, dtype: str, strides: tuple[int, ...]
) -> None:
    assert layout(shape, name, dtype, 1.0).strides == strides


def test_int8_is_rounded_half_to_even_and_saturated() -> None:
    made = layout((8,), dtype="int8", scale=0.5)

    found = packed(made, [0.25, 0.75, -0.25, -0.75, 63.5, 64, 1e9, -1e9])

    assert found.tolist() == [0, 2, 0, -2, 127, 127, 127, -128]
    assert (made.spec.dtype, made.plain) == (np.float32, False)


def test_fp16_beyond_its_range_is_infinite_and_warns_nobody() -> None:
    assert packed(layout((3,), dtype="float16"), [65504, 1e6, -1e6]).tolist() == [65504, np.inf, -np.inf]


def test_integers_stay_what_they_are_outside() -> None:
    assert [layout((1,), dtype=name).spec.dtype for name in ("int32", "int64", "uint8", "bool")] == [
        np.int32,
        np.int64,
        np.uint8,
        np.bool_,
    ]


@given(SHAPES, st.sampled_from(list(LAYOUTS)), st.sampled_from(list(DTYPES)), st.data())
def test_unpack_undoes_pack_and_padding_stays_zero(
    shape: tuple[int, ...], name: str, dtype: str, data: st.DataObject
) -> None:
    if name == "dla_hwc4":
        shape = (shape[0], data.draw(st.sampled_from((1, 3, 4))), *shape[2:])
    made = layout(shape, name, numpy_type(dtype).name, 0.25 if dtype == "int8" else None)
    # What the engine's type holds exactly; one in the place of zero, so that whatever is zero is padding.
    stored = data.draw(arrays.arrays(made.dtype, shape, elements=st.integers(0, 1 if dtype == "bool" else 120)))
    stored[stored == 0] = 1
    values = (stored * (0.25 if dtype == "int8" else 1)).astype(made.spec.dtype)

    view = made.view(np.zeros(made.nbytes, np.uint8))
    made.pack(values, view, made.scratch())
    back = np.empty_like(values)
    made.unpack(view, back)

    assert np.array_equal(back, values)
    assert np.count_nonzero(view) == values.size


def test_the_deployment_may_ask_for_just_these_layouts_and_types_among_these() -> None:
    (pattern,) = (meta.pattern for meta in config.IoFormat.__metadata__)
    types, layouts = (group.split("|") for group in re.findall(r"\(([a-z0-9_|]+)\)", pattern))

    assert set(layouts) == set(LAYOUTS)
    assert set(types) <= set(DTYPES)


@pytest.mark.parametrize("version", ["8.5.2", "10.3.0", "10.16.1", "11.4.0"])
def test_tensorrt_has_the_layouts_and_types_by_these_names(version: str, standin: Callable[..., ModuleType]) -> None:
    trt = standin(version)
    later = {"INT64", "UINT8"} if version == "8.5.2" else set()

    assert set(LAYOUTS.values()) <= set(trt.TensorFormat.__members__)
    assert set(DTYPES.values()) - later <= set(trt.DataType.__members__)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((1, 3, 4, 4), "cdhw32"), "tensor 'x' has layout cdhw32; allowed: chw, chw2, chw4"),
        (((3, 4), "chw16"), r"layout chw16 but shape \[3, 4\]; expected channels, rows and columns"),
        (((1, 2, 4, 4), "dla_hwc4", "float16"), "dla_hwc4 and 2 channels; allowed: 1, 3, 4"),
        (
            ((4,), "chw", "int8"),
            "tensor 'x' is INT8 and its scale is not known; it is told by io_scales in engine.json",
        ),
        (((4,), "chw", "int8", 0.0), "its scale is 0.0"),
        (((4,), "chw", "float64"), "tensor 'x' is float64; allowed: float32, float16"),
    ],
)
def test_what_cannot_be_fed_is_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        layout(*arguments)

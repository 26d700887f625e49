"""Histograms that do not depend on order or split."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from calibration import histogram, kernel
from calibration.histogram import BINS, Histogram

Kernel: TypeAlias = Callable[[np.ndarray, int, np.ndarray], kernel.Extremes]

floats = hnp.arrays(
    np.float32,
    st.integers(1, 200),
    elements=st.floats(-(2.0**100), 2.0**100, width=32, allow_nan=False, allow_infinity=False),
)


def of(*arrays: np.ndarray) -> Histogram:
    result = Histogram()
    for array in arrays:
        result.add(array)
    return result


def same(a: Histogram, b: Histogram) -> bool:
    return np.array_equal(a.counts, b.counts) and (a.exponent, a.minimum, a.maximum, a.zeros, a.nonfinite) == (
        b.exponent,
        b.minimum,
        b.maximum,
        b.zeros,
        b.nonfinite,
    )


@given(floats)
def test_counts_equal_those_of_a_plain_loop(values: np.ndarray) -> None:
    """In exact arithmetic: Python's fractions, one value at a time."""
    from fractions import Fraction

    result = of(values)

    expected = [0] * BINS
    for value in values:
        if result.exponent is None:
            expected[0] += 1
        else:
            expected[int(abs(Fraction(float(value))) * BINS / Fraction(2) ** result.exponent)] += 1
    assert result.counts.tolist() == expected


@given(st.lists(floats, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_order_does_not_matter(arrays: list[np.ndarray], random: object) -> None:
    shuffled = list(arrays)
    random.shuffle(shuffled)  # type: ignore[attr-defined]

    assert same(of(*arrays), of(*shuffled))


@given(st.lists(floats, min_size=2, max_size=6), st.integers(1, 5))
def test_merged_shards_equal_one_run(arrays: list[np.ndarray], cut: int) -> None:
    first, second = of(*arrays[:cut]), of(*arrays[cut:])

    first.merge(second)

    assert same(first, of(*arrays))


@pytest.mark.parametrize("size", [1, 32767, 32768, 32769, 100_000])
def test_chunks_leave_nothing_out(size: int) -> None:
    values = np.random.default_rng(0).standard_normal(size).astype(np.float32)

    result = of(values)

    assert result.total == size
    assert result.amax == np.abs(values).max()


def test_zeros_have_no_range() -> None:
    result = of(np.zeros(5, np.float32), np.float32([-0.0]))

    assert (result.exponent, result.amax, result.zeros, result.total) == (None, 0.0, 6, 6)


def test_the_largest_value_is_below_the_range() -> None:
    result = of(np.float32([1.0, -4.0]))

    assert result.exponent == 3
    assert result.counts[BINS // 2] == 1
    assert result.counts[BINS // 8] == 1


@pytest.mark.parametrize("value", [1e-45, 1e-38, 3.4e38])
def test_the_ends_of_float32(value: float) -> None:
    result = of(np.float32([value, 0.0]))

    assert result.total == 2
    assert result.amax == float(np.float32(value))
    assert math.ldexp(1, result.exponent or 0) > result.amax


def test_nan_and_infinity_are_counted_apart() -> None:
    result = of(np.float32([np.nan, np.inf, -np.inf, 2.0]))

    assert (result.nonfinite, result.total, result.amax) == (3, 1, 2.0)


def test_float16_activations_are_counted() -> None:
    assert of(np.float16([65504, 6e-8])).total == 2


def test_an_empty_array_changes_nothing() -> None:
    assert same(of(np.zeros((0, 3), np.float32)), Histogram())


def test_the_two_zeros_are_one() -> None:
    """Of 0.0 and -0.0 Python's min() gives whichever comes first."""
    zeros = [np.float32([0.0]), np.float32([-0.0])]

    results = [of(*zeros), of(*reversed(zeros))]

    assert [(math.copysign(1, h.minimum), math.copysign(1, h.maximum)) for h in results] == [(1.0, 1.0)] * 2


@given(st.lists(st.one_of(floats, st.just(np.zeros(3, np.float32))), min_size=1, max_size=6))
def test_a_drained_histogram_counts_as_a_new_one(arrays: list[np.ndarray]) -> None:
    """Whatever it has counted before, which it takes as a hint."""
    total, reused = Histogram(), Histogram()

    for array in arrays:
        reused.add(array)
        assert same(reused, of(array))
        reused.add(array)
        assert same(reused, of(array, array))
        reused.drain_into(total)
        assert same(reused, Histogram())

    assert same(total, of(*(array for array in arrays for _ in range(2))))


def test_draining_keeps_the_buffer() -> None:
    reused, total = of(np.float32([1, 2])), Histogram()
    buffer = reused.counts

    reused.drain_into(total)
    reused.add(np.float32([3]))

    assert reused.counts is buffer
    assert (total.total, total.amax) == (2, 2.0)


@given(st.dictionaries(st.text(st.characters(exclude_characters="\0"), min_size=1), floats, max_size=3))
def test_columns_hold_everything(values: dict[str, np.ndarray]) -> None:
    histograms = {name: of(array) for name, array in values.items()}
    histograms |= {"zero": of(np.zeros(3, np.float32)), "empty": Histogram(), "broken": of(np.float32([np.nan]))}

    loaded = histogram.from_columns(histogram.to_columns(histograms))

    assert list(loaded) == list(histograms)
    assert all(same(loaded[name], histograms[name]) for name in histograms)


def test_histograms_from_columns_own_their_buffers() -> None:
    columns = histogram.to_columns({"a": of(np.float32([1, 2]))})

    histogram.from_columns(columns)["a"].add(np.float32([1]))

    assert columns["counts"].sum() == 2


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("names", np.array([["a", "b"]]), r"'names' has the shape \(1, 2\)"),
        ("names", np.array([1, 2]), "'names' is of int64; expected U"),
        ("names", np.array(["a", "a"]), "names a tensor twice"),
        ("names", np.array(["a"]), r"'counts' has the shape \(2, 2048\); expected \(1, 2048\)"),
        ("counts", np.zeros((2, 1024), np.int64), r"shape \(2, 1024\); expected \(2, 2048\)"),
        ("counts", np.full((2, BINS), -1), "tensor 'a' has numbers that no histogram can have"),
        ("exponent", np.array([2, 3], np.int32), "tensor 'b' has numbers"),
        ("exponent", np.array([2, 2], np.int64), "'exponent' is of int64; expected i4"),
        ("maximum", np.array([2, np.nan]), "tensor 'b' has numbers"),
        ("maximum", np.array([2, np.inf]), "tensor 'b' has numbers"),
        ("zeros", np.array([5, 0]), "tensor 'a' has numbers"),
        ("nonfinite", np.array([-1, 0]), "tensor 'a' has numbers"),
    ],
)
def test_columns_that_no_histograms_have_are_refused(column: str, value: np.ndarray, message: str) -> None:
    columns = histogram.to_columns({"a": of(np.float32([0, 2])), "b": of(np.float32([0, 2]))})

    with pytest.raises(ValueError, match=message):
        histogram.from_columns(columns | {column: value})


def test_a_missing_column_is_named() -> None:
    columns = histogram.to_columns({"a": of(np.float32([1, 2]))})
    del columns["zeros"]

    with pytest.raises(ValueError, match="has no column 'zeros'"):
        histogram.from_columns(columns)


@pytest.fixture(params=["c", "numpy"])
def count(request: pytest.FixtureRequest) -> Kernel:
    """Each kernel. CI has a compiler: there the C kernel may not be missing."""
    if request.param not in kernel.KERNELS and not os.environ.get("CI"):
        pytest.skip("the C kernel was not built: no C compiler when the package was installed")
    return kernel.KERNELS[request.param]


@pytest.mark.parametrize("shape", [(7,), (256,), (1027,), (3, 40_000)])
def test_kernels_count_as_a_plain_sum(count: Kernel, shape: tuple[int, ...], rng: np.random.Generator) -> None:
    values = np.maximum(rng.standard_normal(shape).astype(np.float32), -0.5).reshape(-1)
    values[::3] = 0
    counts, expected = np.zeros(BINS, np.int64), np.zeros(BINS, np.int64)

    found = count(values, 3, counts)

    np.add.at(expected, (np.abs(values) * 256).astype(np.int64), 1)
    assert counts.tolist() == expected.tolist()
    assert found == (values.min(), values.max(), np.count_nonzero(values == 0), True)


@pytest.mark.parametrize("value", [8.0, -9.0, math.inf, -math.inf, math.nan])
def test_kernels_leave_the_counts_alone_when_a_value_does_not_fit(count: Kernel, value: float) -> None:
    counts = np.zeros(BINS, np.int64)
    values = np.array([1, value, 2], np.float32)

    found = count(values, 3, counts)

    assert not found.counted
    assert not counts.any()
    assert (math.isfinite(found.minimum) and math.isfinite(found.maximum)) or not math.isfinite(value)

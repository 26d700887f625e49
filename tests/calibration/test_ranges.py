"""From histograms to ranges."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration import ranges
from calibration.histogram import Histogram
from edge.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable


def of(values: np.ndarray) -> Histogram:
    result = Histogram()
    result.add(np.asarray(values, np.float32))
    return result


def literal_entropy(histogram: Histogram) -> float:
    """The search written as the slides and the docstring tell it, one bin at a time."""
    counts = histogram.counts.astype(float).tolist()
    counts[0] = counts[1]
    used = max(index for index, count in enumerate(histogram.counts) if count) + 1
    if used <= 128 or not any(counts):
        return histogram.amax
    counts = counts[:used]
    best, best_divergence = used, math.inf
    for kept in range(128, used + 1):
        if sum(counts[kept:]) > 0.01 * sum(counts):
            continue
        p = counts[:kept]
        p[-1] += sum(counts[kept:])
        q = [0.0] * kept
        for level in range(128):
            start, stop = math.ceil(level * kept / 128), math.ceil((level + 1) * kept / 128)
            filled = [index for index in range(start, stop) if counts[index] > 0]
            for index in filled:
                q[index] = sum(counts[start:stop]) / len(filled)
        divergence = 0.0
        for pi, qi in zip(p, q, strict=True):
            if pi > 0:
                divergence += math.inf if qi == 0 else pi / sum(p) * math.log(pi / sum(p) / (qi / sum(q)))
        if divergence <= best_divergence + 1e-12:
            best, best_divergence = kept, divergence
    return min(best * histogram.bin_width, histogram.amax)


@pytest.mark.parametrize("seed", range(3))
def test_entropy_equals_the_literal_search(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shapes = [rng.standard_normal(3000), rng.laplace(size=3000), np.maximum(rng.standard_normal(3000), 0)]
    values = np.concatenate([shapes[seed % 3], [shapes[seed % 3].max() * 3]])

    assert ranges.entropy(of(values)) == pytest.approx(literal_entropy(of(values)), rel=1e-9)


def test_entropy_cuts_off_a_thin_tail() -> None:
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.standard_normal(100_000), rng.uniform(3, 60, 300)])

    assert 2.5 < ranges.entropy(of(values)) < 0.8 * np.abs(values).max()


def test_entropy_survives_a_relu_full_of_zeros() -> None:
    """With the zero bin kept, the range would shrink to a fraction of what the other values need."""
    values = np.concatenate([np.zeros(900_000), np.abs(np.random.default_rng(0).standard_normal(100_000))])

    assert ranges.entropy(of(values)) > 1.5


def test_entropy_keeps_what_crowds_far_from_zero() -> None:
    """As a Sigmoid's output may: hardly anything near zero, nearly everything around 0.1, a little up to 1."""
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.normal(0.1, 0.01, 99_000), rng.uniform(0.1, 1, 1000)])

    assert (values > ranges.entropy(of(values))).mean() <= 0.01


def test_max_clips_nothing() -> None:
    assert ranges.largest(of(np.array([-3.0, 2.0]))) == 3.0


class TestPercentile:
    """By hand: of 4.0 in 2048 bins each is 1/512 wide."""

    def test_one_value_in_ten_thousand_is_left_out(self) -> None:
        values = np.append(np.full(9_999, 1.0), 3.0)

        assert ranges.percentile(of(values)) == 1.0 + 1 / 512

    def test_one_value_in_fewer_is_kept(self) -> None:
        values = np.append(np.full(9_998, 1.0), 3.0)

        assert ranges.percentile(of(values)) == 3.0

    def test_zeros_are_left_out_of_the_count(self) -> None:
        """With them the one large value would be one in a million."""
        values = np.concatenate([np.zeros(1_000_000), np.full(9_000, 1.0), [3.0]])

        assert ranges.percentile(of(values)) == 3.0

    def test_small_values_in_the_bin_of_the_zeros_are_counted(self) -> None:
        values = np.concatenate([np.zeros(5), np.full(9_999, 1e-5), [3.0]])

        assert ranges.percentile(of(values)) == 1 / 512

    @pytest.mark.parametrize("shape", [np.random.Generator.standard_normal, np.random.Generator.standard_exponential])
    def test_equals_numpy_to_a_bin(self, shape: Callable[..., np.ndarray]) -> None:
        values = shape(np.random.default_rng(0), 200_000).astype(np.float32)
        histogram = of(values)

        expected = np.quantile(np.abs(values), ranges.PERCENTILE, method="inverted_cdf")
        assert expected < ranges.percentile(histogram) <= expected + histogram.bin_width

    def test_nothing_but_zeros_has_no_range(self) -> None:
        assert ranges.percentile(of(np.zeros(10))) == 0.0
        assert ranges.percentile(Histogram()) == 0.0

    def test_one_value_is_its_own_range(self) -> None:
        assert ranges.percentile(of(np.array([-0.7]))) == np.float32(0.7)


def rounding_cost(values: np.ndarray, amax: float) -> float:
    """Mean squared error of rounding to INT8, as it is computed on the values themselves."""
    step = amax / 127
    return float(np.square(values - np.minimum(np.rint(values / step), 127) * step).mean())


N = 40_000
DISTRIBUTIONS: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "normal": lambda rng: rng.standard_normal(N),
    "laplace": lambda rng: rng.laplace(size=N),
    "uniform": lambda rng: rng.uniform(-1, 1, N),
    "relu": lambda rng: np.maximum(rng.standard_normal(N), 0),
    "heavy tail": lambda rng: rng.standard_t(3, N),
    "lognormal": lambda rng: rng.lognormal(size=N),
    "crowd": lambda rng: rng.normal(5, 0.3, N),
    "outliers": lambda rng: np.append(rng.standard_normal(N), np.full(5, 30.0)),
}


class TestMse:
    @pytest.mark.parametrize("shape", list(DISTRIBUTIONS))
    def test_equals_a_search_on_the_values_themselves(self, shape: str) -> None:
        values = np.abs(DISTRIBUTIONS[shape](np.random.default_rng(0)).astype(np.float32)).astype(np.float64)
        histogram = of(values)
        stride = ranges.MSE_STRIDE * histogram.bin_width

        candidates = np.unique(np.minimum(np.arange(1, 257) * stride, histogram.amax))
        costs = [rounding_cost(values, amax) for amax in candidates]

        found = ranges.mse(histogram)
        assert abs(found - candidates[np.argmin(costs)]) <= stride
        assert rounding_cost(values, found) <= 1.001 * min(costs)

    def test_few_outliers_among_many_values_are_clipped(self) -> None:
        values = np.append(np.random.default_rng(0).standard_normal(200_000), [12.0])

        assert 4.0 < ranges.mse(of(values)) < 8.0

    def test_zeros_cost_nothing(self) -> None:
        """Spread over their bin, so many of them would outweigh everything else."""
        values = of(np.random.default_rng(0).standard_exponential(2_000))
        with_zeros = of(np.zeros(1))
        with_zeros.counts[0] = with_zeros.zeros = 10**10
        with_zeros.merge(values)

        assert ranges.mse(with_zeros) == ranges.mse(values)

    def test_nothing_but_zeros_has_no_range(self) -> None:
        assert ranges.mse(of(np.zeros(10))) == 0.0
        assert ranges.mse(Histogram()) == 0.0

    def test_one_value_is_kept_to_a_stride(self) -> None:
        histogram = of(np.full(100, 0.7))

        assert 0.7 - ranges.MSE_STRIDE * histogram.bin_width <= ranges.mse(histogram) <= np.float32(0.7)


@pytest.mark.parametrize("method", sorted(ranges.METHODS))
@settings(max_examples=25)
@given(
    st.lists(st.floats(-1000, 1000, width=32).filter(lambda x: x == 0 or abs(x) > 1e-6), min_size=1, max_size=200),
    st.integers(-12, 12),
)
def test_twice_the_values_make_twice_the_range(method: str, values: list[float], power: int) -> None:
    choose = ranges.METHODS[method]

    assert choose(of(np.ldexp(values, power))) == math.ldexp(choose(of(np.array(values))), power)


@pytest.mark.parametrize("method", sorted(ranges.METHODS))
@pytest.mark.parametrize("shape", list(DISTRIBUTIONS))
def test_range_never_exceeds_what_was_seen(method: str, shape: str) -> None:
    histogram = of(DISTRIBUTIONS[shape](np.random.default_rng(1)))

    assert 0 < ranges.METHODS[method](histogram) <= histogram.amax


@settings(max_examples=40)
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=300), st.sampled_from(sorted(ranges.METHODS)))
def test_every_range_is_positive_and_no_wider_than_what_was_seen(values: list[float], method: str) -> None:
    histogram = of(np.array(values))

    entry = ranges.select({"x": histogram}, method=method, images=1).tensors["x"]

    assert entry.scale > 0
    assert math.isfinite(entry.scale)
    assert np.float32(entry.scale) == entry.scale
    assert 0 <= entry.clipped <= 1
    assert entry.source == "zero" or entry.amax <= histogram.amax


def test_an_all_zero_tensor_gets_a_neutral_range_and_is_named() -> None:
    entry = ranges.select({"dead": of(np.zeros(4))}, method="entropy", images=1).tensors["dead"]

    assert entry.source == "zero"
    assert entry.amax == 1.0
    assert entry.scale == float(np.float32(1 / 127))


def test_clipped_share_counts_what_lies_beyond() -> None:
    values = np.append(np.random.default_rng(0).standard_normal(100_000), np.full(100, 200.0))

    entry = ranges.select({"x": of(values)}, method="entropy", images=1).tensors["x"]

    expected = (np.abs(values) > entry.amax).mean()
    assert entry.clipped == pytest.approx(expected, abs=2e-3)


def test_nan_is_an_error_that_names_the_tensors() -> None:
    histograms = {"good": of(np.ones(2)), "bad": of(np.array([np.nan, 1])), "worse": of(np.array([np.inf]))}

    with pytest.raises(ModelError, match="NaN or infinite activations in: bad, worse"):
        ranges.select(histograms, method="max", images=1)


class TestOtherMethods:
    VALUES = np.append(np.random.default_rng(0).standard_normal(50_000), [40.0])

    def test_named_tensors_take_the_other_method(self) -> None:
        histograms = {"a": of(self.VALUES), "b": of(self.VALUES), "c": of(self.VALUES)}

        chosen = ranges.select(histograms, method="max", images=1, others={"b": "percentile"})

        assert chosen.method == "max"
        assert {name: entry.method for name, entry in chosen.tensors.items()} == {
            "a": "max",
            "b": "percentile",
            "c": "max",
        }
        assert chosen.tensors["a"].amax == chosen.tensors["c"].amax == 40.0
        assert chosen.tensors["b"].amax == ranges.percentile(of(self.VALUES))
        assert 1 <= chosen.tensors["b"].clipped * len(self.VALUES) <= 5

    def test_without_others_all_take_the_method(self) -> None:
        histograms = {"a": of(self.VALUES)}

        assert ranges.select(histograms, method="mse", images=1, others={}) == ranges.select(
            histograms, method="mse", images=1
        )

    def test_tensor_without_a_histogram_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="tensors that have no histogram: y, z"):
            ranges.select({"x": of(self.VALUES)}, method="max", images=1, others={"x": "mse", "y": "mse", "z": "mse"})


def test_the_file_is_json_and_reproducible() -> None:
    chosen = ranges.select({"b": of(np.ones(3)), "a:0": of(np.ones(2))}, method="max", images=2)

    document = json.loads(ranges.render(chosen))

    assert document["schema"] == "edge.ranges/1"
    assert list(document["tensors"]) == ["b", "a:0"]
    assert document["tensors"]["b"]["source"] == "measured"
    assert ranges.render(chosen) == ranges.render(chosen)


def test_a_file_from_before_the_newer_fields_is_read() -> None:
    text = """{
      "schema": "edge.ranges/1", "method": "entropy", "images": 24,
      "tensors": {
        "images": {"amax": 254.0, "scale": 2.0, "source": "measured", "observed_amax": 255.0, "clipped": 0.001},
        "dead": {"amax": 1.0, "scale": 0.007874015718698502, "source": "zero", "observed_amax": 0.0, "clipped": 0.0}
      }
    }"""

    read = msgspec.json.decode(text, type=ranges.Ranges)

    assert read.scales == {"images": 2.0, "dead": float(np.float32(1 / 127))}
    assert read.tensors["images"].method is None
    assert (read.tensors["images"].of, read.tensors["images"].alone) == (None, None)
    assert (read.reason, read.missing, read.fp16_only) == ("", {}, {})


def test_what_is_written_is_read_again() -> None:
    chosen = ranges.select({"b": of(np.ones(3)), "dead": of(np.zeros(2))}, method="mse", images=2)
    chosen = msgspec.structs.replace(chosen, reason="because", missing={"x": "not seen"}, fp16_only={"y": "Softmax"})

    assert msgspec.json.decode(ranges.render(chosen), type=ranges.Ranges) == chosen

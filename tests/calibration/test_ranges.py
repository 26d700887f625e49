"""From histograms to ranges."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration import ranges
from calibration.histogram import Histogram
from edge.errors import ModelError


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


@pytest.mark.parametrize("seed", range(4))
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


def test_the_file_is_json_and_reproducible() -> None:
    chosen = ranges.select({"b": of(np.ones(3)), "a:0": of(np.ones(2))}, method="max", images=2)

    document = json.loads(ranges.render(chosen))

    assert document["schema"] == "edge.ranges/1"
    assert list(document["tensors"]) == ["b", "a:0"]
    assert document["tensors"]["b"]["source"] == "measured"
    assert ranges.render(chosen) == ranges.render(chosen)

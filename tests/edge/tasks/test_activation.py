from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.tasks import activation

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(FINITE)
def test_sigmoid_is_right_and_never_overflows(x: float) -> None:
    expected = 1 / (1 + math.exp(-x)) if x > -700 else 0.0

    assert activation.sigmoid(np.array([x]))[0] == pytest.approx(expected, rel=1e-5, abs=1e-30)


@given(st.lists(FINITE, min_size=1, max_size=8))
def test_softmax_is_a_distribution(values: list[float]) -> None:
    top = max(values)
    powers = [math.exp(max(value - top, -700)) for value in values]

    np.testing.assert_allclose(
        activation.softmax(np.array(values)), np.array(powers) / sum(powers), rtol=1e-4, atol=1e-7
    )


@given(FINITE)
def test_bounded_exp_is_finite(x: float) -> None:
    assert activation.bounded_exp(np.array([x]))[0] == pytest.approx(
        math.exp(max(min(x, 16), -700)), rel=1e-5, abs=1e-37
    )


@given(st.floats(0.001, 0.999))
def test_logit_is_the_inverse_of_sigmoid(p: float) -> None:
    assert activation.sigmoid(np.array([activation.logit(p)]))[0] == pytest.approx(p, rel=1e-4)


def test_logit_of_certainties_is_infinite() -> None:
    assert activation.logit(0) == -math.inf
    assert activation.logit(1) == math.inf


@pytest.mark.parametrize("kind", ["none", "sigmoid"])
def test_nan_stays_nan(kind: str) -> None:
    assert np.isnan(activation.probability(np.array([np.nan], np.float32), kind)).all()


def test_softmax_with_an_infinity_is_nan_without_a_warning() -> None:
    assert np.isnan(activation.softmax(np.array([np.inf, 0, 1], np.float32))).any()


def test_scores_that_quantisation_carried_over_one_are_clipped() -> None:
    assert activation.probability(np.array([1.004, -0.004, 0.5]), "none").tolist() == [1.0, 0.0, 0.5]


def test_half_precision_becomes_single() -> None:
    assert activation.sigmoid(np.zeros(1, np.float16)).dtype == np.float32
    assert activation.softmax(np.zeros(2, np.float16)).dtype == np.float32

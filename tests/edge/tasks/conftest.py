"""What tests of heads share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pytest

from edge.tasks.heads import HEADS
from edge.tasks.signature import Signature
from edge.types import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge.tasks.candidates import Candidates
    from edge.tasks.heads.head import Head
    from edge.types import Tensors

    Row = tuple[int, int, float, list[float]]
    """Row, class, score and box of a slow reference."""


class FitHead(Protocol):
    """Makes the head of a layout for outputs."""

    def __call__(
        self, layout: str, outputs: Tensors, input_wh: tuple[int, int], activation: str = ..., *, guessing: bool = ...
    ) -> Head: ...


def specs_of(outputs: Tensors) -> tuple[TensorSpec, ...]:
    """What an engine would say of these outputs."""
    return tuple(TensorSpec(name, value.shape, value.dtype) for name, value in outputs.items())


@pytest.fixture(name="specs_of")
def specs_of_fixture() -> Callable[[Tensors], tuple[TensorSpec, ...]]:
    """As a fixture, since test modules can't import each other."""
    return specs_of


@pytest.fixture
def picture() -> Callable[[int, int], tuple[TensorSpec, ...]]:
    """Makes the only input of a model from width and height."""
    return lambda width, height: (TensorSpec("images", (1, 3, height, width), np.dtype(np.float32)),)


@pytest.fixture
def fit_head() -> FitHead:
    """Makes the head of a layout for outputs."""

    def fit(
        layout: str,
        outputs: Tensors,
        input_wh: tuple[int, int],
        activation: str | None = None,
        *,
        guessing: bool = False,
    ) -> Any:
        chosen = activation or HEADS[layout].activations[0]
        return HEADS[layout].fit(Signature(specs_of(outputs), input_wh, chosen, guessing))

    return fit


@pytest.fixture
def assert_same() -> Callable[[Candidates, list[Row]], None]:
    """Compares what a head found with what a slow reference found."""

    def compare(found: Candidates, expected: list[Row]) -> None:
        assert found.rows.tolist() == [row for row, _, _, _ in expected]
        assert found.class_ids.tolist() == [class_id for _, class_id, _, _ in expected]
        np.testing.assert_allclose(found.scores, [score for _, _, score, _ in expected], rtol=1e-5)
        boxes = np.array([box for *_, box in expected]).reshape(-1, 4)
        np.testing.assert_allclose(found.boxes_xyxy, boxes, rtol=1e-4, atol=1e-3)
        assert found.boxes_xyxy.dtype == found.scores.dtype == np.float32

    return compare

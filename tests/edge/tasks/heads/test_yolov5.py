from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge.tasks.signature import UnfitError


def slow(table: list[list[float]], score: float) -> list[Any]:
    found = []
    for row, (x, y, w, h, objectness, *classes) in enumerate(table):
        for class_id, value in enumerate(classes):
            if objectness * value >= score:
                found.append((row, class_id, objectness * value, [x - w / 2, y - h / 2, x + w / 2, y + h / 2]))
    return found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.sampled_from([0.2003, 0.5003, 0.9003]))
def test_decoding_equals_the_slow_reference(
    fit_head: Any, assert_same: Any, seed: int, classes: int, score: float
) -> None:
    rng = np.random.default_rng(seed)
    boxes = rng.uniform(0, 64, (1, 3 * 42, 4))
    # In 64ths, so that no product comes within a rounding error of the scores that are asked for.
    scores = rng.integers(0, 65, (1, 3 * 42, 1 + classes)) / 64
    outputs = {"o": np.concatenate([boxes, scores], axis=2).astype(np.float32)}
    head = fit_head("yolov5", outputs, (64, 32))

    assert head.classes == classes
    assert_same(head.candidates(outputs, score), slow(outputs["o"][0].tolist(), score))


def test_one_row_a_cell_is_taken_only_when_the_deployment_says_so(fit_head: Any) -> None:
    """A YOLOX that decodes its boxes in the graph has the shape of one that does not."""
    outputs = {"o": np.zeros((1, 42, 7), np.float32)}

    assert fit_head("yolov5", outputs, (64, 32)).classes == 2
    with pytest.raises(UnfitError):
        fit_head("yolov5", outputs, (64, 32), guessing=True)


@pytest.mark.parametrize("shape", [(1, 125, 7), (1, 126, 5), (1, 7, 126)])
def test_other_shapes_are_refused(fit_head: Any, shape: tuple[int, ...]) -> None:
    with pytest.raises(UnfitError):
        fit_head("yolov5", {"o": np.zeros(shape, np.float32)}, (64, 32))

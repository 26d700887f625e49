from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from edge.tasks.signature import UnfitError


def slow(
    logits: list[list[float]], boxes: list[list[float]], size: tuple[int, int], activation: str, score: float
) -> list[Any]:
    width, height = size
    found = []
    for query, (values, (x, y, w, h)) in enumerate(zip(logits, boxes, strict=True)):
        box = [(x - w / 2) * width, (y - h / 2) * height, (x + w / 2) * width, (y + h / 2) * height]
        if activation == "sigmoid":
            for class_id, value in enumerate(values):
                if 1 / (1 + math.exp(-value)) >= score:
                    found.append((query, class_id, 1 / (1 + math.exp(-value)), box))
        else:
            powers = [math.exp(value) for value in values]
            shares = [power / sum(powers) for power in powers[:-1]]  # the last is 'no object'
            if max(shares) >= score:
                found.append((query, shares.index(max(shares)), max(shares), box))
    return found


def outputs_of(seed: int, classes: int, *, queries: int = 30, swapped: bool = False) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2, (1, queries, classes)).astype(np.float32)
    boxes = rng.random((1, queries, 4)).astype(np.float32)
    return {"boxes": boxes, "logits": logits} if swapped else {"logits": logits, "boxes": boxes}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(0, 2**32 - 1),
    st.integers(2, 6),
    st.booleans(),
    st.sampled_from(["sigmoid", "softmax"]),
    st.sampled_from([0.2, 0.5, 0.9]),
)
def test_decoding_equals_the_slow_reference(
    fit_head: Any, assert_same: Any, seed: int, classes: int, swapped: bool, activation: str, score: float
) -> None:
    """Four classes among them: then only the names tell logits from boxes."""
    outputs = outputs_of(seed, classes, swapped=swapped)
    head = fit_head("detr", outputs, (640, 480), activation)

    found = head.candidates(outputs, score)

    assert head.classes == (classes if activation == "sigmoid" else classes - 1)
    arguments = outputs["logits"][0].tolist(), outputs["boxes"][0].tolist(), (640, 480), activation
    # A score within a rounding error of the threshold may fall either way.
    assume(len(slow(*arguments, score - 1e-6)) == len(slow(*arguments, score + 1e-6)))
    assert_same(found, slow(*arguments, score))


def test_queries_are_no_rivals(fit_head: Any) -> None:
    assert not fit_head("detr", outputs_of(0, 5), (64, 64)).overlapping


@pytest.mark.parametrize("value", [1e30, -1e30, np.inf, np.nan])
@pytest.mark.parametrize("activation", ["sigmoid", "softmax", "none"])
def test_extreme_logits_neither_warn_nor_make_nan_scores(fit_head: Any, value: float, activation: str) -> None:
    outputs = outputs_of(0, 5)
    outputs["logits"][0, 3] = value

    found = fit_head("detr", outputs, (64, 64), activation).candidates(outputs, 0.0)

    assert np.isfinite(found.scores).all()
    assert (3 in found.rows) == (not np.isnan(value) and not (activation == "softmax" and np.isinf(value)))


@pytest.mark.parametrize(
    ("names", "logits"),
    [
        (("pred_logits", "pred_boxes"), 0),
        (("pred_boxes", "pred_logits"), 1),
        (("dets", "labels"), 1),
        (("scores", "x"), 0),
        (("x", "class_scores"), 1),
    ],
)
def test_names_tell_boxes_from_four_classes(fit_head: Any, names: tuple[str, str], logits: int) -> None:
    outputs = {name: np.zeros((1, 2, 4), np.float32) for name in names}
    outputs[names[logits]][0, 1, 2] = 3
    outputs[names[1 - logits]][:] = 0.5

    found = fit_head("detr", outputs, (64, 64)).candidates(outputs, 0.9)

    assert (found.rows.tolist(), found.class_ids.tolist()) == ([1], [2])
    assert found.boxes_xyxy.tolist() == [[16, 16, 48, 48]]


@pytest.mark.parametrize(
    "shapes",
    [
        {"a": (1, 9, 4), "b": (1, 9, 4)},
        {"a": (1, 9, 5), "b": (1, 9, 6)},
        {"a": (1, 9, 5), "b": (1, 8, 4)},
        {"a": (1, 9, 5)},
        {"a": (1, 9, 5), "b": (9, 4)},
    ],
)
def test_other_outputs_are_refused(fit_head: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(UnfitError):
        fit_head("detr", {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, (64, 64))


def test_softmax_needs_a_class_beside_no_object(fit_head: Any) -> None:
    with pytest.raises(UnfitError, match="has no class"):
        fit_head("detr", outputs_of(0, 1), (64, 64), "softmax")

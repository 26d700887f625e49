"""Every activation of every picture ends up in its histogram."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
import pytest
from onnx import helper

from calibration import observe
from edge.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable


def test_every_activation_is_observed_once_a_picture(residual_model: ir.Model, rng: np.random.Generator) -> None:
    expected = {"images", *(value.name for node in residual_model.graph for value in node.outputs)}
    observer = observe.Observer(residual_model)

    for _ in range(3):
        observer.observe({"images": rng.standard_normal((1, 3, 8, 8)).astype(np.float32)}, source="x")

    assert set(observer.histograms) == expected
    assert observer.images == 3
    assert observer.histograms["images"].total == 3 * 3 * 64
    assert observer.histograms["stem_act"].total == 3 * 4 * 64


def test_histograms_equal_those_of_the_tensors_themselves(
    build_model: Callable[..., ir.Model], rng: np.random.Generator
) -> None:
    model = build_model([helper.make_node("Mul", ["images", "images"], ["out"])], {})
    picture = rng.standard_normal((1, 3, 8, 8)).astype(np.float32)
    observer = observe.Observer(model)

    observer.observe({"images": picture}, source="x")

    assert observer.histograms["out"].amax == np.square(picture).max()
    assert observer.histograms["images"].amax == np.abs(picture).max()


def test_constants_integers_and_what_is_computed_from_them_are_left_out(build_model: Callable[..., ir.Model]) -> None:
    nodes = [
        helper.make_node("Constant", [], ["two"], value_float=2.0),
        helper.make_node("Mul", ["two", "weight"], ["four"]),
        helper.make_node("Shape", ["images"], ["shape"]),
        helper.make_node("Mul", ["images", "four"], ["scaled"]),
        helper.make_node("Reshape", ["scaled", "shape"], ["out"]),
    ]
    model = build_model(nodes, {"weight": np.float32([2.0])})
    observer = observe.Observer(model)

    observer.observe({"images": np.ones((1, 3, 8, 8), np.float32)}, source="x")

    assert set(observer.histograms) == {"images", "scaled", "out"}


def test_nan_names_the_tensor_and_the_picture(build_model: Callable[..., ir.Model]) -> None:
    model = build_model(
        [helper.make_node("Log", ["images"], ["logarithm"]), helper.make_node("Relu", ["logarithm"], ["out"])], {}
    )
    observer = observe.Observer(model)

    with pytest.raises(ModelError, match=r"tensor 'logarithm' has 192 NaN or infinite values on cat\.jpg"):
        observer.observe({"images": np.full((1, 3, 8, 8), -1, np.float32)}, source="cat.jpg")


def test_a_model_that_cannot_run_is_refused(build_model: Callable[..., ir.Model]) -> None:
    model = build_model([helper.make_node("Relu", ["images"], ["out"])], {})
    model.graph[0].op_type = "NoSuchOperator"

    with pytest.raises(ModelError, match=r"onnxruntime cannot load the model: .*NoSuchOperator"):
        observe.Observer(model)

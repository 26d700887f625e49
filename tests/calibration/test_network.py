"""What the stand-in's parser does not make: several TensorRT layers of one ONNX node, and layers of constants."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from calibration import network

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


class Tensor:
    def __init__(self, name: str, dtype: str = "FLOAT") -> None:
        self.name = name
        self.dtype = SimpleNamespace(name=dtype)
        self.is_shape_tensor = False


class Layer:
    """One output; inputs that are None are absent, as optional ones may be."""

    def __init__(self, kind: str, inputs: list[Tensor | None], output: Tensor, note: str | None = None) -> None:
        self.name = f"{kind} of {output.name}"
        self.type = SimpleNamespace(name=kind)
        self.num_inputs, self.num_outputs = len(inputs), 1
        self.get_input, self.get_output = inputs.__getitem__, [output].__getitem__
        self.precision = None
        self.output_types: dict[int, object] = {}
        if note is not None:  # from TensorRT 8.6 on
            self.metadata = note

    def set_output_type(self, index: int, dtype: object) -> None:
        self.output_types[index] = dtype


class Network:
    def __init__(self, inputs: list[Tensor], layers: list[Layer]) -> None:
        self.num_inputs, self.num_layers = len(inputs), len(layers)
        self.get_input, self.get_layer = inputs.__getitem__, layers.__getitem__


@pytest.fixture
def trt(standin: Callable) -> ModuleType:
    return standin("10.3.0")


def old_softmax(note: str | None, *, inner: str, before: str | None = None) -> list[Layer]:
    """A Softmax of opset 11 and the Relu before it, as the parser makes them."""
    images, relu, flat, weights, out = (
        Tensor("images"),
        Tensor("relu"),
        Tensor(f"{inner} 1"),
        Tensor(f"{inner} 2"),
        Tensor("p"),
    )
    return [
        Layer("ACTIVATION", [images], relu, before),
        Layer("SHUFFLE", [relu, None], flat, note),
        Layer("SOFTMAX", [flat], weights, note),
        Layer("SHUFFLE", [weights], out, note),
    ]


@pytest.mark.parametrize(
    "layers",
    [
        pytest.param(old_softmax(None, inner="(Unnamed Layer* 1)"), id="8.5"),
        pytest.param(
            old_softmax("[ONNX Layer: softmax]", inner="softmax", before="[ONNX Layer: relu]"), id="8.6 and later"
        ),
    ],
)
def test_all_layers_of_one_onnx_node_are_kept_in_floating_point(trt, make_recipe, layers):
    made = make_recipe(float_layers={"p": "fp32"})

    unmatched = network.keep_float(trt, Network([], layers), None, made)

    assert unmatched == ()
    assert [layer.precision for layer in layers] == [None, *[trt.DataType.FLOAT] * 3]
    assert [layer.output_types for layer in layers] == [{}, *[{0: trt.DataType.FLOAT}] * 3]


def test_a_layer_of_integers_has_no_precision(trt, make_recipe):
    layer = Layer("TOPK", [Tensor("images")], Tensor("index", "INT32"))

    network.keep_float(trt, Network([], [layer]), None, make_recipe(float_layers={"index": "fp16"}))

    assert layer.precision is None
    assert layer.output_types == {}


def test_a_constant_has_no_precision(trt, make_recipe):
    layer = Layer("CONSTANT", [], Tensor("scale"))
    made = make_recipe(quantization="ranges", float_layers={"scale": "fp32"})

    unmatched = network.keep_float(trt, Network([], [layer]), None, made)

    assert unmatched == ()
    assert layer.precision is None
    assert layer.output_types == {}
    assert network.asked(Network([], [layer]), None, made)[0].precision == "fp32", "as it is, not the engine's INT8"


def test_what_comes_of_constants_alone_needs_no_range():
    scale, reshaped, images, product, shape = (
        Tensor("scale"),
        Tensor("reshaped"),
        Tensor("images"),
        Tensor("product"),
        Tensor("shape", "INT32"),
    )
    layers = [
        Layer("CONSTANT", [], scale),
        Layer("SHUFFLE", [scale, None], reshaped),
        Layer("ELEMENTWISE", [images, reshaped], product),
        Layer("SHAPE", [product], shape),
    ]

    found = network.coverage(Network([images], layers), {"images"})

    assert found == network.Coverage(missing=("product",), harmless=3)

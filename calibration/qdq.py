"""Explicit quantization: a Q/DQ ONNX as TensorRT wants it.

Where the pairs stand follows the TensorRT developer guide, "Explicit Quantization: Q/DQ Layer-Placement
Recommendations": on the inputs of the layers that INT8 makes faster, and on nothing else.

- Convolutions and matrix products get Q/DQ on their activations, per tensor, and on their weights, per output channel;
  biases stay in floating point.
- Their outputs get none. What follows a Conv (activation, SiLU's Sigmoid and Mul, a residual Add) is then free to be
  fused with it, and the next quantized layer brings its own pair.
- An Add that takes the output of a quantized Conv directly gets a pair on its other input, the residual branch, if that
  tensor has one already: TensorRT then fuses Conv and Add in INT8.
- A tensor has one pair, shared by every quantized layer that reads it.
- Weights stay FP32 with a Q *and* a DQ, which every TensorRT since 8.0 takes; INT8 initializers with a DQ alone are
  newer.

Scales are symmetric, zero points are INT8 zeros: TensorRT takes nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from calibration import graph
from edge.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from numpy.typing import NDArray

    from edge import config

__all__ = ["QUANTIZABLE", "Placement", "insert", "label", "without"]

QUANTIZABLE = ("Conv", "ConvTranspose", "Gemm", "MatMul")
"""Operators that TensorRT and the DLA run in INT8 and that are worth it."""


_SUFFIXES = ("_scale", "_zero_point", "_quantized", "_dequantized")


@dataclass(frozen=True, slots=True)
class Placement:
    """What ``insert`` did."""

    layers: tuple[str, ...]
    """Names of the nodes that run in INT8."""
    kept: tuple[str, ...]
    """Names of the nodes that a rule kept in floating point."""
    skipped: tuple[tuple[str, str], ...]
    """Names of the nodes that could not be quantized, each with why."""
    activations: tuple[str, ...]
    """Tensors that carry a pair."""


def insert(model: ir.Model, scales: Mapping[str, float], rules: Sequence[config.LayerRule], *, key: str) -> Placement:
    """Insert Q/DQ pairs, in place.

    Args:
        model: FP32, opset 13 or later, batch normalisation folded.
        scales: activation scale (amax / 127) by tensor name.
        rules: layers that stay in floating point.
        key: of the rules in the deployment, for messages.

    Raises:
        ConfigError: a rule matches no layer.
        ModelError: the model holds no layer to quantize, or has Q/DQ already.
    """
    if graph.is_quantized(model):
        raise ModelError("the model is quantized already (it has Q/DQ nodes); calibration starts from the FP32 model")
    candidates = [node for node in model.graph if node.op_type in QUANTIZABLE]
    if not candidates:
        raise ModelError(f"the model has no layer to quantize; expected one of {', '.join(QUANTIZABLE)}")
    in_float = graph.match_layers(candidates, rules, key=key)
    pairs = _Pairs(model.graph, scales)
    layers: list[ir.Node] = []
    kept: list[str] = []
    skipped: list[tuple[str, str]] = []
    for node in candidates:
        if node.outputs[0].name in in_float:
            kept.append(label(node))
            continue
        missing = [str(value.name) for value in _activations(node) if value.name not in scales]
        if missing:
            skipped.append((label(node), f"no range for {', '.join(missing)}"))
            continue
        for index, value in enumerate(node.inputs[:2]):
            assert value is not None, "the quantizable operators have no optional input among the first two"
            weight = graph.constant(value)
            quantized = pairs.of_activation(value) if weight is None else pairs.of_weight(node, index, value, weight)
            node.replace_input_with(index, quantized)
        layers.append(node)
    for node in layers:
        _quantize_residual(node, pairs)
    model.graph.sort()
    return Placement(tuple(map(label, layers)), tuple(kept), tuple(skipped), tuple(pairs.activations))


def without(model: ir.Model, layers: Collection[str]) -> int:
    """Take the pairs off the inputs of some layers, in place, so that they run in floating point.

    Args:
        model: with Q/DQ.
        layers: names of the nodes' first outputs.

    Returns:
        The number of inputs that carried a pair.
    """
    taken = 0
    for node in model.graph:
        if str(node.outputs[0].name) in layers:
            # An Add has a pair for the sake of the Conv that it is fused with.
            sums = [user for user, _ in node.outputs[0].uses() if user.op_type == "Add"]
            taken += sum(_take_pairs(each) for each in (node, *sums))
    RemoveUnusedNodesPass()(model)
    return taken


def _take_pairs(node: ir.Node) -> int:
    taken = 0
    for index, value in enumerate(node.inputs):
        dequantize = None if value is None else value.producer()
        if dequantize is None or dequantize.op_type != "DequantizeLinear" or dequantize.inputs[0] is None:
            continue
        quantize = dequantize.inputs[0].producer()
        if quantize is not None and quantize.op_type == "QuantizeLinear":
            node.replace_input_with(index, quantize.inputs[0])
            taken += 1
    return taken


class _Pairs:
    """Makes Q/DQ pairs, one for each tensor."""

    def __init__(self, target: ir.Graph, scales: Mapping[str, float]) -> None:
        self.activations: dict[str, ir.Value] = {}
        self._weights: dict[tuple[str, int | None], ir.Value] = {}
        self._graph = target
        self._taken = {str(value.name) for node in target for value in (*node.inputs, *node.outputs) if value}
        self._taken.update(target.initializers)
        self._scales = scales

    def of_activation(self, value: ir.Value) -> ir.Value:
        """The dequantized form of an activation, per tensor."""
        name = str(value.name)
        if name not in self.activations:
            scale = np.asarray(self._scales[name], np.float32)
            self.activations[name] = self._pair(value, scale, axis=None)
        return self.activations[name]

    def of_weight(self, node: ir.Node, index: int, value: ir.Value, weight: NDArray[Any]) -> ir.Value:
        """The dequantized form of a weight, per output channel; a vector, which makes one output, per tensor."""
        axis = _output_axis(node, index) if weight.ndim > 1 else None
        key = (str(value.name), axis)
        if key not in self._weights:
            axis = None if axis is None else axis % weight.ndim
            others = tuple(other for other in range(weight.ndim) if other != axis)
            amax = np.abs(weight).max(axis=others)
            # A channel of zeros is held by any scale; 0 is not one.
            scale = np.asarray(np.where(amax > 0, amax / 127, 1.0), np.float32)
            self._weights[key] = self._pair(value, np.maximum(scale, np.finfo(np.float32).tiny), axis=axis)
        return self._weights[key]

    def _pair(self, value: ir.Value, scale: NDArray[np.float32], *, axis: int | None) -> ir.Value:
        stem = self._stem(f"{value.name}" if axis is None else f"{value.name}_axis{axis}")
        attributes = {} if axis is None else {"axis": axis}
        parameters = [
            self._initializer(f"{stem}_scale", scale),
            self._initializer(f"{stem}_zero_point", np.zeros(scale.shape, np.int8)),
        ]
        quantize = ir.node("QuantizeLinear", [value, *parameters], attributes, name=f"{stem}_QuantizeLinear")
        quantize.outputs[0].name = f"{stem}_quantized"
        dequantize = ir.node(
            "DequantizeLinear", [quantize.outputs[0], *parameters], attributes, name=f"{stem}_DequantizeLinear"
        )
        dequantize.outputs[0].name = f"{stem}_dequantized"
        self._graph.extend([quantize, dequantize])
        return dequantize.outputs[0]

    def _stem(self, wanted: str) -> str:
        """Where a name made from ``wanted`` is the model's own already (bn and bn_scale are common), another one."""
        stem, number = wanted, 1
        while any(f"{stem}{suffix}" in self._taken for suffix in _SUFFIXES):
            stem, number = f"{wanted}_{number}", number + 1
        self._taken.update(f"{stem}{suffix}" for suffix in _SUFFIXES)
        return stem

    def _initializer(self, name: str, array: NDArray[Any]) -> ir.Value:
        value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
        value.dtype, value.shape = ir.DataType.from_numpy(array.dtype), ir.Shape(array.shape)
        self._graph.register_initializer(value)
        return value


def _activations(node: ir.Node) -> list[ir.Value]:
    return [value for value in node.inputs[:2] if value is not None and graph.constant(value) is None]


def _output_axis(node: ir.Node, index: int) -> int:
    """The axis of a weight that counts output channels: TensorRT quantizes weights along it."""
    if node.op_type == "Conv":
        return 0
    if node.op_type == "ConvTranspose":
        return 1
    if node.op_type == "Gemm":
        transposed = node.attributes.get_int("transB" if index == 1 else "transA", 0) == 1
        return 0 if transposed == (index == 1) else 1
    return -1 if index == 1 else -2


def _quantize_residual(node: ir.Node, pairs: _Pairs) -> None:
    for user, _ in list(node.outputs[0].uses()):
        if user.op_type != "Add" or len(user.inputs) != 2:
            continue
        index = 1 if user.inputs[0] is node.outputs[0] else 0
        other = user.inputs[index]
        if other is not None and str(other.name) in pairs.activations:
            user.replace_input_with(index, pairs.activations[str(other.name)])


def label(node: ir.Node) -> str:
    """A node's name, or what TensorRT's ONNX parser calls a node without one."""
    return node.name or f"node_of_{node.outputs[0].name}"

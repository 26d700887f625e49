"""FP16 by typing the model: what a strongly typed TensorRT network takes its precision from.

TensorRT 11 has no FP16 flag any more; every tensor is computed in the type that the ONNX file gives it. ``to_fp16``
turns float32 tensors into float16 and puts Casts where the two meet; ``norm_layers`` names the nodes that suffer most
from it. Which layers are worth keeping is for the caller to say, and whether the result is good enough for the parity
gate.

What may be float16 is read from ONNX's own operator schemas, for the model's opset: Resize's scales, NonMaxSuppression
and, before opset 27, Range are float32 by their types. These stay as well:

1. Arithmetic on shapes and indices: FP16 counts to 2048 only. It is what has nothing but integers and constants below
   it, and is done by one of the operators in ``_INDEX_ARITHMETIC``. The scaling of a picture given in bytes is part of
   it.
2. Operators of other domains, whose types nobody tells, and those whose output's type is an attribute.
3. Q/DQ pairs of activations with a scale that FP16 cannot hold. On weights such scales are those of dead channels;
   they are raised to the smallest that it holds, since a pair in FP32 would cost the whole layer its INT8.

Q/DQ takes x and scale of one type, float16 from opset 19 on, so that a quantized model is converted to that opset. In
the next ones the parser of TensorRT wants them so as well, and every scale above 0 (onnx-tensorrt 10 and 11,
QuantDequantLinearHelper).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import (
    LiftConstantsToInitializersPass,
    RemoveInitializersFromInputsPass,
    ShapeInferencePass,
)

from calibration import graph
from edge.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from numpy.typing import NDArray

__all__ = ["MOST", "Typed", "norm_layers", "to_fp16"]

MOST = float(np.finfo(np.float16).max)
"""65504, the largest number in FP16."""

_LEAST = float(np.finfo(np.float16).smallest_subnormal)  # 6e-8
_QDQ_OPSET = 19
_QDQ_IR = 9  # the IR version that came with opset 19

_LEAST_SCALE = 2.0**-17
"""7.6e-6, the smallest scale that FP16, which counts in steps of 2**-24 down there, holds to within half of 1/127: the
ends of the range then move by less than half of one of its own steps. A weight whose scale is raised to this changes by
3.8e-6 at most, which is what FP16 rounds a weight of 0.01 by."""

_INDEX_ARITHMETIC = {
    *("Add", "Cast", "Ceil", "Clip", "Concat", "ConstantOfShape", "Div", "Expand", "Flatten", "Floor", "Gather"),
    *("Identity", "Max", "Min", "Mod", "Mul", "Neg", "Pow", "Range", "ReduceProd", "Reshape", "Round", "Slice"),
    *("Split", "Sqrt", "Squeeze", "Sub", "Tile", "Transpose", "Unsqueeze"),
}

# Where an operator's output has the type that an attribute says, and may be told another.
_TYPE_ATTRIBUTE = {"Cast": "to", "DequantizeLinear": "output_dtype"}

_NORMS = {
    *("GroupNormalization", "InstanceNormalization", "LayerNormalization", "LogSoftmax", "LpNormalization"),
    *("MeanVarianceNormalization", "RMSNormalization", "Softmax"),
}
_SUMS = {"ReduceL1", "ReduceL2", "ReduceMean", "ReduceSum", "ReduceSumSquare"}
_ON_THE_WAY = {"Add", "Clip", "Expand", "Identity", "Max", "Reciprocal", "Sqrt", "Squeeze", "Unsqueeze"}


@dataclass(frozen=True, slots=True)
class Typed:
    """A model in FP16, and what could not be."""

    model: ir.Model
    half: int
    """Nodes that compute in FP16."""
    kept: tuple[str, ...]
    """First outputs of the nodes that stay in FP32."""
    casts: int
    """Casts between the two, those at the model's inputs and outputs included."""
    saturated: tuple[str, ...]
    """Weights with values beyond ``MOST``, which are ``MOST`` now. The minus infinity that masks are made of is often
    written as -3.4e38."""
    raised: tuple[str, ...]
    """Scales of quantized weights that were too small for FP16 in some channel."""
    float_pairs: tuple[str, ...]
    """Outputs of DequantizeLinear nodes that stay in FP32: their scale is none that FP16 holds, or no constant."""


def to_fp16(model: ir.Model, keep: Collection[str], *, half_io: Collection[str] = ()) -> Typed:
    """Make every float32 tensor float16, except what has to stay.

    Tensors keep their names, whatever their type becomes. A Cast's output takes the name of its input with ``_fp16`` or
    ``_fp32`` behind it; at the graph's outputs it is the tensor before the Cast that is renamed so.

    Args:
        model: FP32, shapes fixed. Used up: go on with ``Typed.model``.
        keep: first outputs of the nodes that stay in FP32.
        half_io: names of the graph's inputs and outputs that become float16 as well; the others stay as they are.

    Raises:
        ModelError: a node has a body (If, Loop, Scan), the type of a tensor is unknown, or the opset cannot be
            converted.
        ValueError: ``keep`` or ``half_io`` names what is not there.
    """
    _refuse_bodies(model)
    if graph.is_quantized(model):
        model = graph.to_opset(model, _QDQ_OPSET)
        model.ir_version = max(model.ir_version, _QDQ_IR)
    RemoveInitializersFromInputsPass()(model)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    model.graph.sort()
    ShapeInferencePass()(model)
    _check(model, keep, half_io)
    return _Typist(model, keep, half_io).run()


def norm_layers(model: ir.Model) -> set[str]:
    """First outputs of Softmax and normalisations, which lose most in FP16: their sums overflow, their squares vanish.

    Those that exporters write as small nodes are found from their last one, a division (or a product with a
    Reciprocal) by a sum over the numerator itself (softmax, L2) or over its square (layer and RMS normalisation):

        Exp(x - ReduceMax(x)) / ReduceSum(Exp(..))
        (x - ReduceMean(x)) / Sqrt(ReduceMean((x - ReduceMean(x))^2) + e)
        x / Clip(ReduceL2(x))
    """
    found: set[ir.Node] = set()
    for node in model.graph:
        if node.op_type in _NORMS:
            found.add(node)
        elif node.op_type in {"Div", "Mul"} and len(node.inputs) == 2:
            found.update(_decomposed_norm(node))
    return {str(node.outputs[0].name) for node in found}


class _Typist:
    """Types one model, in place."""

    def __init__(self, model: ir.Model, keep: Collection[str], half_io: Collection[str]) -> None:
        self._model, self._graph, self._half_io = model, model.graph, half_io
        self._nodes = list(model.graph)
        self._floats = {value for value in _values(model.graph) if value.dtype == ir.DataType.FLOAT}
        self._raised = _raise_weight_scales(model.graph)
        exact = _index_arithmetic(self._nodes)
        self._kept = {node for node in self._nodes if node in exact or self._stays(node, keep)}
        self._half: set[ir.Value] = set()
        self._casts: dict[ir.Value, ir.Value] = {}
        self._saturated: list[str] = []

    def run(self) -> Typed:
        wanted = {node: self._inputs_wanted(node) for node in self._nodes if node not in self._kept}
        for value in self._graph.inputs:
            if value.name in self._half_io:
                self._make_half(value)
        for node in wanted:
            self._type_outputs(node)
        self._type_weights(wanted)
        for index, value in enumerate(self._graph.outputs):
            self._type_graph_output(index, value)
        for node in self._nodes:
            for index, source in enumerate(node.inputs):
                if source is None or source not in self._floats or source.is_initializer():
                    continue
                if (source in self._half) != (index in wanted.get(node, ())):
                    node.replace_input_with(index, self._cast(source))
        floating = [node for node in self._nodes if self._touches_float(node)]
        return Typed(
            model=self._model,
            half=sum(node in wanted for node in floating),
            kept=tuple(str(node.outputs[0].name) for node in floating if node in self._kept),
            casts=len(self._casts),
            saturated=tuple(self._saturated),
            raised=self._raised,
            float_pairs=tuple(
                str(node.outputs[0].name)
                for node in self._nodes
                if node.op_type == "DequantizeLinear" and node in self._kept and not _scale_fits(node)
            ),
        )

    def _touches_float(self, node: ir.Node) -> bool:
        return any(value in self._floats for value in (*node.inputs, *node.outputs))

    def _stays(self, node: ir.Node, keep: Collection[str]) -> bool:
        if node.domain or node.outputs[0].name in keep or "dtype" in node.attributes:
            return True
        if any(not isinstance(value.type, ir.TensorType | None) for value in (*node.inputs, *node.outputs) if value):
            return True  # sequences and optionals
        return node.op_type in {"QuantizeLinear", "DequantizeLinear"} and not _scale_fits(node)

    def _inputs_wanted(self, node: ir.Node) -> set[int]:
        """Which float32 inputs a node takes as float16."""
        parameters = self._schema(node).inputs
        return {
            index
            for index, value in enumerate(node.inputs)
            # Resize may have its region in float16; TensorRT's parser reads it as a float32 constant, like the scales.
            if value in self._floats and _may_be_half(parameters, index) and not (node.op_type == "Resize" and index)
        }

    def _type_outputs(self, node: ir.Node) -> None:
        parameters = self._schema(node).outputs
        for index, value in enumerate(node.outputs):
            if value not in self._floats or not _may_be_half(parameters, index):
                continue
            self._make_half(value)
            attribute = _TYPE_ATTRIBUTE.get(node.op_type)
            if attribute is not None and attribute in node.attributes:
                node.attributes[attribute] = ir.AttrInt64(attribute, int(ir.DataType.FLOAT16))

    def _type_weights(self, wanted: dict[ir.Node, set[int]]) -> None:
        """Convert the weights that are read as float16, in place or, where they are read as float32 too, as a copy."""
        for value in list(self._graph.initializers.values()):
            if value not in self._floats:
                continue
            uses = list(value.uses())
            half = [(node, index) for node, index in uses if index in wanted.get(node, ())]
            if not half:
                continue
            tensor = ir.tensor(self._rounded(value), name=value.name)
            if len(half) == len(uses) and not value.is_graph_output():
                value.const_value, value.dtype = tensor, ir.DataType.FLOAT16
                continue
            name = graph.fresh_name(self._graph, f"{value.name}_fp16")
            copy = ir.Value(name=name, shape=value.shape, type=ir.TensorType(ir.DataType.FLOAT16), const_value=tensor)
            self._graph.register_initializer(copy)
            for node, index in half:
                node.replace_input_with(index, copy)

    def _rounded(self, value: ir.Value) -> NDArray[np.float16]:
        assert value.const_value is not None, "initializers of a loaded model have values"
        array = value.const_value.numpy()
        beyond = np.isfinite(array) & (np.abs(array) > MOST)
        if beyond.any():
            self._saturated.append(str(value.name))
            array = np.where(beyond, np.copysign(MOST, array), array)
        if array.size == 1:
            # The epsilon of a normalisation, often 1e-12, guards a division and must not become 0.
            array = np.where(array == 0, array, np.copysign(np.maximum(np.abs(array), _LEAST), array))
        return array.astype(np.float16)

    def _type_graph_output(self, index: int, value: ir.Value) -> None:
        producer = value.producer()
        if producer is None or value not in self._floats or (value in self._half) == (value.name in self._half_io):
            return
        name = str(value.name)
        value.name = graph.fresh_name(self._graph, f"{name}{'_fp16' if value in self._half else '_fp32'}")
        self._graph.outputs[index] = self._cast(value, name)

    def _make_half(self, value: ir.Value) -> None:
        value.dtype = ir.DataType.FLOAT16
        self._half.add(value)

    def _cast(self, value: ir.Value, name: str | None = None) -> ir.Value:
        """The tensor in the other type: one Cast for all who read it."""
        if value in self._casts:
            return self._casts[value]
        half = value not in self._half
        name = name or graph.fresh_name(self._graph, f"{value.name}{'_fp16' if half else '_fp32'}")
        to = ir.DataType.FLOAT16 if half else ir.DataType.FLOAT
        node = ir.node("Cast", [value], {"to": int(to)}, name=f"Cast_{name}")
        output = node.outputs[0]
        output.name, output.dtype, output.shape = name, to, value.shape
        producer = value.producer()
        if producer is None:
            self._graph.insert_before(self._graph[0], node)
        else:
            self._graph.insert_after(producer, node)
        self._casts[value] = output
        return output

    def _schema(self, node: ir.Node) -> Any:
        return onnx.defs.get_schema(node.op_type, self._model.opset_imports[""], "")


def _refuse_bodies(model: ir.Model) -> None:
    bodies = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    for node in model.graph:
        if any(attribute.type in bodies for attribute in node.attributes.values()):
            raise ModelError(
                f"{node.op_type} '{node.name or node.outputs[0].name}' has a body, which cannot be typed as FP16;"
                " export the model without control flow, or use engine.precision fp32"
            )


def _check(model: ir.Model, keep: Collection[str], half_io: Collection[str]) -> None:
    unknown = set(keep) - {str(node.outputs[0].name) for node in model.graph}
    unknown |= set(half_io) - {str(value.name) for value in (*model.graph.inputs, *model.graph.outputs)}
    if unknown:
        raise ValueError(f"the model has no such node, input or output: {', '.join(sorted(unknown))}")
    for node in model.graph:
        for value in node.outputs:
            if value.name and value.type is None and (value.uses() or value.is_graph_output()):
                raise ModelError(
                    f"the type of tensor '{value.name}' is unknown ({node.op_type} '{node.name}' of domain"
                    f" '{node.domain or 'ai.onnx'}' makes it); the model cannot be typed as FP16"
                )


def _values(target: ir.Graph) -> Iterable[ir.Value]:
    yield from target.inputs
    yield from target.initializers.values()
    for node in target:
        yield from node.outputs


def _index_arithmetic(nodes: Iterable[ir.Node]) -> set[ir.Node]:
    """The nodes, given in order, that reckon with nothing but integers and constants."""
    found: set[ir.Node] = set()

    def exact(value: ir.Value | None) -> bool:
        if value is None or value.is_initializer():
            return True
        return value.producer() in found or (value.dtype is not None and not value.dtype.is_floating_point())

    for node in nodes:
        if node.op_type in _INDEX_ARITHMETIC and all(map(exact, node.inputs)):
            found.add(node)
    return found


def _may_be_half(parameters: Any, index: int) -> bool:
    # The last parameter may be variadic.
    return "tensor(float16)" in parameters[min(index, len(parameters) - 1)].types


def _scale_fits(node: ir.Node) -> bool:
    scale = graph.constant(node.inputs[1])
    return scale is not None and bool(((scale >= _LEAST_SCALE) & (scale <= MOST)).all())


def _raise_weight_scales(target: ir.Graph) -> tuple[str, ...]:
    """Make the scales of quantized weights large enough for FP16, in place; gives their names.

    Only where the weight is quantized in the graph: integers that are stored already belong to the scale they have.
    """
    of_weights = {
        node.inputs[1]
        for node in target
        if node.op_type == "QuantizeLinear" and graph.constant(node.inputs[0]) is not None
    }
    raised = []
    for value in target.initializers.values():
        if value not in of_weights or not all(_quantizes_weight(user, value) for user, _ in value.uses()):
            continue
        assert value.const_value is not None, "initializers of a loaded model have values"
        scale = value.const_value.numpy()
        if scale.min() < _LEAST_SCALE:
            value.const_value = ir.tensor(np.maximum(scale, np.float32(_LEAST_SCALE)), name=value.name)
            raised.append(str(value.name))
    return tuple(raised)


def _quantizes_weight(node: ir.Node, scale: ir.Value) -> bool:
    """Whether a node is part of a Q/DQ pair on a weight, with this scale on both."""
    if node.op_type == "DequantizeLinear":
        producer = node.inputs[0].producer() if node.inputs[0] is not None else None
        if producer is None or producer.inputs[1] is not scale:
            return False
        node = producer
    return node.op_type == "QuantizeLinear" and graph.constant(node.inputs[0]) is not None


def _decomposed_norm(node: ir.Node) -> set[ir.Node]:
    """The nodes of the normalisation that ends in this one, if it does."""
    for numerator, divisor in ((node.inputs[0], node.inputs[1]), (node.inputs[1], node.inputs[0])):
        way = _way_to_sum(divisor)
        if node.op_type == "Mul" and not any(step.op_type == "Reciprocal" for step in way):
            continue
        if numerator is not None and way:
            square = _summed(way[-1], numerator)
            if square is not None:
                return {node, *way, *square, *_centring(numerator)}
        if node.op_type == "Div":
            break  # only the second input divides
    return set()


def _way_to_sum(value: ir.Value | None) -> list[ir.Node]:
    """The nodes from a divisor back to the sum that it is made from, the sum last; empty if it is not."""
    way: list[ir.Node] = []
    while value is not None and (node := value.producer()) is not None:
        way.append(node)
        if node.op_type in _SUMS:
            return way
        if node.op_type not in _ON_THE_WAY:
            return []
        # an epsilon may be written on either side of its Add
        open_inputs = [source for source in node.inputs if source is not None and graph.constant(source) is None]
        value = open_inputs[0] if open_inputs else None
    return []


def _summed(total: ir.Node, numerator: ir.Value) -> set[ir.Node] | None:
    """The nodes between the numerator and the sum: none, its square, or None if the sum is over something else."""
    source = total.inputs[0]
    if source is numerator:
        return set()
    square = None if source is None else source.producer()
    if square is None or square.inputs[0] is not numerator:
        return None
    if square.op_type == "Mul" and square.inputs[1] is numerator:
        return {square}
    power = graph.constant(square.inputs[1]) if square.op_type == "Pow" else None
    return {square} if power is not None and np.all(power == 2) else None


def _centring(numerator: ir.Value) -> set[ir.Node]:
    """Exp, and the subtraction of the mean or the maximum, before a normalisation."""
    found: set[ir.Node] = set()
    node = numerator.producer()
    if node is not None and node.op_type == "Exp":
        found.add(node)
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    if node is None or node.op_type != "Sub" or node.inputs[1] is None:
        return found
    middle = node.inputs[1].producer()
    if middle is None or middle.op_type not in {"ReduceMean", "ReduceMax"} or middle.inputs[0] is not node.inputs[0]:
        return found
    return {*found, node, middle}

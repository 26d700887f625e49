"""Reading ONNX models, and the edits that make one ready for Q/DQ: opset 13, constants and batch normalisation folded.

Every edit keeps the names of the tensors that survive it, since ranges are matched by name.
"""

from __future__ import annotations

import fnmatch
import math
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx.version_converter
import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from edge.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from edge import config
    from edge.types import TensorSpec

__all__ = ["constant", "data_files", "depthwise", "fix_input", "fold_batch_norm", "fold_constants", "foldable"]
__all__ += ["fresh_name", "is_quantized", "load", "match_layers", "to_opset"]

MOST_BYTES = 1_900_000_000

MOST_GROWTH = 64 * 2**20
"""Bytes that a folded node's outputs may take beyond its inputs. A transposed weight takes none; what an Expand, a Tile
or a ConstantOfShape makes of one number would swell the file for nothing."""

_RANDOM = {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}

# Where a Conv that took over its normalisation's output keeps the name of its own, which a rule may use.
_FORMER_NAME = "output before folding"

QDQ_OPSET = 13
"""The first in which QuantizeLinear takes a scale for each channel."""


def load(path: Path) -> ir.Model:
    """Read an ONNX model, weights in files beside it included.

    Raises:
        ModelError: the file is missing, no ONNX model, too large, or not FP32.
    """
    if not path.is_file():
        raise ModelError(f"{path}: no such model file")
    try:
        model = ir.load(path)
    except Exception as error:
        # protobuf's DecodeError, and whatever the reader trips over in a file that is not what it says
        raise ModelError(f"{path}: is not an ONNX model ({str(error).strip() or type(error).__name__})") from error
    if not model.graph.outputs:
        raise ModelError(f"{path}: is not an ONNX model (it has no outputs)")
    weights = [value.const_value for value in model.graph.initializers.values() if value.const_value is not None]
    size = sum(tensor.nbytes for tensor in weights)
    if size > MOST_BYTES:
        raise ModelError(
            f"{path}: has {size / 1e9:.1f} GB of weights; up to {MOST_BYTES / 1e9:.1f} GB can be calibrated, since a"
            " protobuf message ends at 2 GB"
        )
    half = [value.name for value in model.graph.inputs if value.dtype == ir.DataType.FLOAT16]
    half += [tensor.name for tensor in weights if tensor.dtype == ir.DataType.FLOAT16]
    if half:
        raise ModelError(f"{path}: is FP16 ('{half[0]}' is float16); calibration starts from the FP32 model")
    for tensor in weights:
        place = PurePosixPath(tensor.location) if isinstance(tensor, ir.ExternalTensor) else PurePosixPath()
        if place.is_absolute() or ".." in place.parts:
            raise ModelError(f"{path}: keeps weights in {place}; they have to lie beside the model")
    try:
        ir.external_data.load_to_model(model)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: its weights cannot be read ({error})") from error
    return model


def data_files(path: Path) -> dict[str, Path]:
    """The files that hold a model's weights, where they are not in it, by their names relative to its folder."""
    tensors = (value.const_value for value in ir.load(path).graph.initializers.values())
    names = sorted({str(tensor.location) for tensor in tensors if isinstance(tensor, ir.ExternalTensor)})
    return {name: path.parent / name for name in names}


def fresh_name(graph: ir.Graph, wanted: str) -> str:
    """A name that no value of the graph has yet."""
    taken = set(graph.initializers)
    taken.update(str(value.name) for value in graph.inputs)
    taken.update(str(value.name) for node in graph for value in node.outputs)
    name, number = wanted, 1
    while name in taken:
        name, number = f"{wanted}_{number}", number + 1
    return name


def fix_input(model: ir.Model, spec: TensorSpec) -> None:
    """Give the model's input the fixed shape that the engine has, in place, and infer all other shapes and types."""
    for value in model.graph.inputs:
        if value.name == spec.name:
            value.shape = ir.Shape(spec.shape)
    ShapeInferencePass()(model)


def is_quantized(model: ir.Model) -> bool:
    """Whether the model holds Q/DQ nodes or integer operators already."""
    return any("Quantize" in node.op_type or node.op_type.startswith("QLinear") for node in model.graph)


def to_opset(model: ir.Model, opset: int) -> ir.Model:
    """Convert a model of an older opset; a newer one is returned as it is.

    The converter is ONNX's own. That the result computes the same is for the caller to prove, on real inputs.

    Raises:
        ModelError: it cannot be converted; the message names the operator.
    """
    current = model.opset_imports.get("", 0)
    if current >= opset:
        return model
    try:
        converted = onnx.version_converter.convert_version(ir.to_proto(model), opset)
    except Exception as error:
        raise ModelError(f"opset {current} cannot be converted to {opset}: {str(error).strip()}") from error
    return ir.from_proto(converted)


def fold_constants(model: ir.Model, evaluate: Callable[[bytes], dict[str, NDArray[Any]]]) -> int:
    """Turn what is computed from constants alone into initializers, in place, so that a weight is seen to be one.

    Exporters write weights as Transpose, Cast or Reshape of an initializer, and shapes as long chains of small nodes.
    The initializers keep the names of the tensors that they replace, graph outputs included. The shape of a tensor is a
    constant too, where it is static. Constants that nothing reads any more are removed.

    Not folded: random numbers; nodes with a body; operators that are not ONNX's own; initializers that a caller may
    override (from IR version 4 on, those listed as inputs) and what depends on them; outputs that are no plain numbers,
    of unknown size, or larger than the inputs by over ``MOST_GROWTH`` bytes.

    Args:
        model: shapes inferred, as ``fix_input`` leaves it.
        evaluate: runs a serialized model without inputs and gives its outputs by name, as ``observe.evaluate``.

    Returns:
        The number of nodes removed.
    """
    target = model.graph
    before = len(target)
    # IR version 3 lists every initializer as an input; that one may be overridden came with version 4.
    overridable = set(target.inputs) if model.ir_version >= 4 else set()
    for node in list(target):
        if not foldable(node) or node.op_type == "Constant":
            continue
        arrays = _shape_of_static(node)
        if arrays is None:
            known = [value for value in node.inputs if value is not None]
            if any(value in overridable or _tensor(value) is None for value in known):
                continue
            alone = _alone(model, node)
            if not _worth_folding(node, alone):
                continue
            arrays = evaluate(ir.to_proto(alone).SerializeToString())
        _replace_by_initializers(target, node, arrays)
    return before - len(target)


def foldable(node: ir.Node) -> bool:
    """Whether what a node computes from constants alone is a constant itself.

    It is, if the operator is ONNX's own, draws no random numbers, and has no body, which could read activations that
    are not among the node's inputs.
    """
    bodies = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    return (
        not node.domain
        and node.op_type not in _RANDOM
        and all(attribute.type not in bodies for attribute in node.attributes.values())
    )


def fold_batch_norm(model: ir.Model) -> int:
    """Fold every BatchNormalization that follows a Conv into its weights, in place, as TensorRT does before quantizing.

    The Conv takes over the name of the normalisation's output. Weights: Ioffe and Szegedy 2015, section 3.1:
    ``w' = w * gamma / sqrt(var + eps)`` and ``b' = (b - mean) * gamma / sqrt(var + eps) + beta``.

    Returns:
        The number of nodes folded.
    """
    folded = 0
    for node in list(model.graph):
        if node.op_type != "BatchNormalization":
            continue
        conv = node.inputs[0].producer() if node.inputs[0] is not None else None
        if conv is None or conv.op_type != "Conv" or len(list(conv.outputs[0].uses())) != 1:
            continue
        values = [constant(value) for value in (conv.inputs[1], *node.inputs[1:5])]
        if any(value is None for value in values) or conv.outputs[0].is_graph_output():
            continue
        weight, gamma, beta, mean, variance = (np.asarray(value, np.float64) for value in values)
        bias_value = constant(conv.inputs[2]) if len(conv.inputs) > 2 else None
        if bias_value is None and len(conv.inputs) > 2 and conv.inputs[2] is not None:
            continue
        bias = np.zeros(len(weight)) if bias_value is None else np.asarray(bias_value, np.float64)
        factor = gamma / np.sqrt(variance + _attribute(node, "epsilon", 1e-5))
        new = (weight * factor.reshape(-1, *[1] * (weight.ndim - 1)), (bias - mean) * factor + beta)
        _replace_conv(model.graph, conv, node, *(np.asarray(array, np.float32) for array in new))
        folded += 1
    return folded


def constant(value: ir.Value | None) -> np.ndarray[Any, Any] | None:
    """The array of a value that is an initializer or the output of a Constant node, else None."""
    tensor = None if value is None else _tensor(value)
    return None if tensor is None else tensor.numpy()


def depthwise(node: ir.Node) -> bool:
    """Whether a node is a convolution with one input channel a group, and more than one group."""
    groups = int(_attribute(node, "group", 1))
    if node.op_type not in ("Conv", "ConvTranspose") or groups == 1:
        return False
    weight = node.inputs[1]
    shape = weight.shape if weight is not None else None
    if shape is None:
        return False
    return shape[1] == 1 if node.op_type == "Conv" else shape[0] == groups


def match_layers(
    nodes: Iterable[ir.Node], rules: Sequence[config.LayerRule], *, key: str, among: str = "would be quantized"
) -> set[str]:
    """Names of the first outputs of the nodes that any of the rules chooses.

    An output's name identifies a node: node names may be empty or repeated.

    Args:
        nodes: to choose from.
        rules: of the deployment.
        key: of the rules in the deployment, for messages.
        among: what the nodes have in common, for messages.

    Raises:
        ConfigError: a rule matches no node, so that it does not do what its author meant.
    """
    candidates = list(nodes)
    chosen: set[str] = set()
    problems: list[str] = []
    for index, rule in enumerate(rules):
        matched = [str(node.outputs[0].name) for node in candidates if _matches(node, rule)]
        if not matched:
            operators = ", ".join(sorted({node.op_type for node in candidates}))
            problems.append(f"{key}[{index}]: matches no layer that {among}; their operators are: {operators}")
        chosen.update(matched)
    if problems:
        raise ConfigError(problems)
    return chosen


def _tensor(value: ir.Value) -> ir.TensorProtocol | None:
    if value.is_initializer() and value.const_value is not None:
        return value.const_value
    return ir.convenience.get_const_tensor(value)


def _shape_of_static(node: ir.Node) -> dict[str, NDArray[Any]] | None:
    """What a Shape node gives, where that is known without running anything."""
    value = node.inputs[0] if node.op_type == "Shape" else None
    if value is None or value.shape is None or not value.shape.is_static():
        return None
    # ONNX takes start and end, from opset 15 on, as Python's slices do: negative from the back, clamped.
    part = slice(_attribute(node, "start", 0), _attribute(node, "end", None))
    return {str(node.outputs[0].name): np.asarray(value.shape.numpy()[part], np.int64)}


def _alone(model: ir.Model, node: ir.Node) -> ir.Model:
    """A model of one node, all of whose inputs are constants."""
    copies: dict[ir.Value, ir.Value] = {}
    for value in node.inputs:
        tensor = None if value is None else _tensor(value)
        if value is not None and tensor is not None:
            copies[value] = ir.Value(
                name=value.name,
                type=ir.TensorType(tensor.dtype),
                shape=ir.Shape(tensor.shape.numpy()),
                const_value=tensor,
            )
    copy = ir.Node(
        node.domain,
        node.op_type,
        [None if value is None else copies[value] for value in node.inputs],
        list(node.attributes.values()),
        num_outputs=len(node.outputs),
    )
    for new, old in zip(copy.outputs, node.outputs, strict=True):
        new.name, new.type, new.shape = old.name, old.type, old.shape
    part = ir.Graph(
        [],
        [value for value in copy.outputs if value.name],
        nodes=[copy],
        initializers=list(copies.values()),
        opset_imports=model.opset_imports,
        name="constants",
    )
    return ir.Model(part, ir_version=max(model.ir_version, 8))


def _worth_folding(node: ir.Node, alone: ir.Model) -> bool:
    """Whether the outputs of a node, of which ``alone`` is a model, are plain numbers and not too many."""
    if any(value.shape is None or not value.shape.is_static() for value in alone.graph.outputs):
        # With its inputs at hand, the shape of nearly every output can be inferred.
        ShapeInferencePass()(alone)
    size = 0
    for value in alone.graph.outputs:
        if value.dtype is None or value.shape is None or not value.shape.is_static():
            return False
        if value.dtype == ir.DataType.STRING or value.dtype.numpy().isbuiltin != 1:
            return False  # text, and numbers that numpy has no type of its own for
        size += math.prod(value.shape.numpy()) * value.dtype.numpy().itemsize
    tensors = [_tensor(value) for value in set(node.inputs) if value is not None]
    return size - sum(tensor.nbytes for tensor in tensors if tensor is not None) <= MOST_GROWTH


def _replace_by_initializers(target: ir.Graph, node: ir.Node, arrays: dict[str, NDArray[Any]]) -> None:
    """Replace a node by what it computes, and remove the constants that only it has read."""
    read = {value for value in node.inputs if value is not None}
    for output in node.outputs:
        name = output.name
        if not name:
            continue
        value = _initializer(name, np.asarray(arrays[name]))
        used = bool(output.uses()) or output.is_graph_output()
        ir.convenience.replace_all_uses_with(output, value, replace_graph_outputs=True)
        output.name = None
        if used:
            target.register_initializer(value)
    target.remove(node, safe=True)
    for value in read:
        producer = value.producer()
        if value.uses() or value.is_graph_output() or value.is_graph_input():
            continue
        if producer is not None and producer.op_type == "Constant":
            target.remove(producer, safe=True)
        elif value.is_initializer():
            del target.initializers[str(value.name)]


def _initializer(name: str, array: NDArray[Any]) -> ir.Value:
    value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
    value.dtype, value.shape = ir.DataType.from_numpy(array.dtype), ir.Shape(array.shape)
    return value


def _matches(node: ir.Node, rule: config.LayerRule) -> bool:
    names = [node.name or "", *(str(value.name) for value in node.outputs), str(node.meta.get(_FORMER_NAME, ""))]
    return (
        (rule.name is None or any(fnmatch.fnmatchcase(name, rule.name) for name in names))
        and (rule.op is None or rule.op == node.op_type)
        and (rule.depthwise is None or (node.op_type.startswith("Conv") and rule.depthwise == depthwise(node)))
        and all(_attribute(node, name, None) == wanted for name, wanted in rule.attributes.items())
    )


def _attribute(node: ir.Node, name: str, default: Any) -> Any:
    attribute = node.attributes.get(name)
    if attribute is None:
        return default
    return list(attribute.value) if isinstance(attribute.value, (list, tuple)) else attribute.value


def _replace_conv(
    graph: ir.Graph, conv: ir.Node, norm: ir.Node, weight: np.ndarray[Any, Any], bias: np.ndarray[Any, Any]
) -> None:
    output = norm.outputs[0]
    name = str(output.name)
    parameters = []
    for suffix, array in (("weight", weight), ("bias", bias)):
        value = _initializer(fresh_name(graph, f"{name}_folded_{suffix}"), array)
        graph.register_initializer(value)
        parameters.append(value)
    output.name = fresh_name(graph, f"{name}_before_folding")
    fused = ir.Node(
        "", "Conv", [conv.inputs[0], *parameters], list(conv.attributes.values()), name=conv.name, num_outputs=1
    )
    fused.outputs[0].name, fused.outputs[0].shape, fused.outputs[0].type = name, output.shape, output.type
    fused.meta[_FORMER_NAME] = str(conv.outputs[0].name)
    graph.insert_before(norm, fused)
    ir.convenience.replace_all_uses_with(output, fused.outputs[0], replace_graph_outputs=True)
    graph.remove([norm, conv], safe=True)

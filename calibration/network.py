"""What a recipe says of single tensors and layers, put on a parsed TensorRT network. Imports no TensorRT: it is given.

Layers are found by the names of their outputs, which are those of the ONNX file: node names may be empty or repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from edge.engine.formats import DTYPES, LAYOUTS
from edge.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from types import ModuleType

    from calibration.recipe import Recipe, TensorIo

__all__ = ["Asked", "Coverage", "asked", "coverage", "keep_float", "set_io", "set_ranges"]

_PRECISIONS = {member: name for name, member in DTYPES.items()}
_ACTIVATIONS = ("FLOAT", "HALF", "INT8")
"""Types of tensors whose precision is TensorRT's to choose; INT8 is that of inputs and outputs asked for so."""


class Asked(Struct, frozen=True):
    """What TensorRT was asked for one layer of the network."""

    name: str
    type: str
    """Member of LayerType."""
    output: str
    """Name of its first output."""
    dla: bool | None
    """Whether TensorRT says that the DLA can run it; None where the DLA is not asked for."""
    precision: str
    """fp32, fp16 or int8; of other data the type, such as int32."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """Which activations have an INT8 range."""

    missing: tuple[str, ...]
    harmless: int
    """Tensors that need none: constants and what comes of them alone, shapes, integers."""


def set_io(trt: ModuleType, network: Any, recipe: Recipe) -> None:
    """Give the network's inputs and outputs their types and layouts.

    Raises:
        ModelError: one is missing, its shape is not fixed or another, or TensorRT refuses its range.
    """
    inputs = {tensor.name: tensor for tensor in map(network.get_input, range(network.num_inputs))}
    outputs = {tensor.name: tensor for tensor in map(network.get_output, range(network.num_outputs))}
    for kind, wanted, found in (("input", recipe.inputs, inputs), ("output", recipe.outputs, outputs)):
        for name, tensor in found.items():
            _require_fixed(recipe.model, kind, name, tuple(tensor.shape))
            # By default all formats are allowed (NvInfer.h), and whichever is fastest is taken.
            tensor.allowed_formats = 1 << int(trt.TensorFormat.LINEAR)
        for io in wanted:
            if io.name not in found:
                raise ModelError(f"{recipe.model}: has no {kind} '{io.name}'; it has: {', '.join(found)}")
            _set_one(trt, found[io.name], io, recipe, kind)


def _require_fixed(model: str, kind: str, name: str, shape: tuple[int, ...]) -> None:
    if any(size < 0 for size in shape):
        raise ModelError(
            f"{model}: {kind} '{name}' is {list(shape)}, where -1 is dynamic; engines have fixed shapes: set"
            " input.size, or export the model with fixed shapes"
        )


def _set_one(trt: ModuleType, tensor: Any, io: TensorIo, recipe: Recipe, kind: str) -> None:
    if tuple(tensor.shape) != io.shape:
        raise ModelError(f"{recipe.model}: {kind} '{io.name}' is {list(tensor.shape)}; expected {list(io.shape)}")
    # In strongly typed networks the types are the model's own; integer tensors keep theirs everywhere.
    if not recipe.strongly_typed and _is_activation(tensor):
        tensor.dtype = getattr(trt.DataType, DTYPES[io.dtype])
        if io.dtype == "int8":
            assert io.scale is not None, "of an INT8 one"
            # Needed beside a cache and a calibrator as well (trtexec's setTensorScalesFromCalibration).
            _set_range(tensor, 127 * io.scale)
    tensor.allowed_formats = 1 << int(getattr(trt.TensorFormat, LAYOUTS[io.layout]))


def keep_float(trt: ModuleType, network: Any, config: Any, recipe: Recipe) -> tuple[str, ...]:
    """Hold layers in FP16 or FP32 against the engine's INT8 or FP16.

    Returns:
        The tensors that no layer gives: folded or renamed by the parser.

    Raises:
        ConfigError: a layer in FP32 can only run on the GPU, which is not allowed.
    """
    producers = {tensor.name: layer for layer in _layers(network) for tensor in _outputs(layer)}
    for name, precision in recipe.float_layers.items():
        # A type that is set on a constant is lost when it is fused (NVIDIA/TensorRT issue 3224).
        if name not in producers or producers[name].type.name == "CONSTANT":
            continue
        for layer in _made_of(producers[name], producers):
            _keep_one(layer, getattr(trt.DataType, DTYPES[precision]))
            if recipe.dla_core is not None and precision == "fp32":
                _require_fallback(layer, recipe)
                config.set_device_type(layer, trt.DeviceType.GPU)
    return tuple(name for name in recipe.float_layers if name not in producers)


def _keep_one(layer: Any, dtype: Any) -> None:
    floats = [index for index in range(layer.num_outputs) if _is_activation(layer.get_output(index))]
    if floats:
        layer.precision = dtype
    for index in floats:
        layer.set_output_type(index, dtype)


def _require_fallback(layer: Any, recipe: Recipe) -> None:
    if not recipe.gpu_fallback:
        text = f"layer '{layer.name}' is to stay in FP32, which no DLA runs, and engine.dla.gpu_fallback is false"
        raise ConfigError([f"models.{recipe.name}.engine: {text}"])


def _made_of(last: Any, producers: Mapping[str, Any]) -> list[Any]:
    """The layers that the parser made of one ONNX node, from the one that gives its output.

    A Softmax before opset 13 becomes Shuffle, Softmax, Shuffle, a Gemm a product and a sum. They are told by the
    parser's note of the ONNX node in the metadata, which TensorRT 8.5 lacks; there, by outputs that have no ONNX name.
    """
    note = getattr(last, "metadata", "")
    found, pending = [], [last]
    while pending:
        layer = pending.pop()
        found.append(layer)
        for tensor in _inputs(layer):
            before = producers.get(tensor.name)
            if before is None or before in found or before.type.name == "CONSTANT":
                continue
            if before.metadata == note if note else tensor.name.startswith("(Unnamed Layer*"):
                pending.append(before)
    return found


def set_ranges(network: Any, ranges: Mapping[str, float]) -> None:
    """Give activations their INT8 ranges, -amax to amax, by ONNX tensor name.

    Raises:
        ModelError: TensorRT refuses one.
    """
    for tensor in _tensors(network):
        if tensor.name in ranges:
            _set_range(tensor, ranges[tensor.name])


def _set_range(tensor: Any, amax: float) -> None:
    if not tensor.set_dynamic_range(-amax, amax):
        raise ModelError(f"TensorRT refuses the range {amax:.6g} for tensor '{tensor.name}'")


def coverage(network: Any, known: Collection[str]) -> Coverage:
    """Which activations have no INT8 range, given the names of those that have one."""
    constant: set[str] = set()
    for layer in _layers(network):
        if layer.type.name == "CONSTANT" or (
            layer.num_inputs > 0 and all(tensor.name in constant for tensor in _inputs(layer))
        ):
            constant.update(tensor.name for tensor in _outputs(layer))
    missing: list[str] = []
    harmless = 0
    for tensor in _tensors(network):
        if tensor.name in known:
            continue
        if tensor.name in constant or tensor.is_shape_tensor or not _is_activation(tensor):
            harmless += 1
        else:
            missing.append(tensor.name)
    return Coverage(tuple(missing), harmless)


def asked(network: Any, config: Any, recipe: Recipe) -> list[Asked]:
    """What every layer was asked for. The DLA's answer depends on the configuration, which must be complete."""
    return [_asked(layer, config, recipe) for layer in _layers(network)]


def _asked(layer: Any, config: Any, recipe: Recipe) -> Asked:
    outputs = _outputs(layer)
    dtype = outputs[0].dtype.name if outputs else "none"
    precision = _PRECISIONS.get(dtype, dtype.lower())
    if not recipe.strongly_typed and dtype in _ACTIVATIONS and layer.type.name != "CONSTANT":
        precision = _PRECISIONS[layer.precision.name] if layer.precision_is_set else recipe.precision
    dla = None if recipe.dla_core is None else bool(config.can_run_on_DLA(layer))
    return Asked(layer.name, layer.type.name, outputs[0].name if outputs else "", dla, precision)


def _is_activation(tensor: Any) -> bool:
    return tensor is not None and tensor.dtype.name in _ACTIVATIONS


def _layers(network: Any) -> Iterator[Any]:
    return map(network.get_layer, range(network.num_layers))


def _inputs(layer: Any) -> list[Any]:
    """Its inputs; optional ones that are absent are left out."""
    return [tensor for tensor in map(layer.get_input, range(layer.num_inputs)) if tensor is not None]


def _outputs(layer: Any) -> list[Any]:
    return [tensor for tensor in map(layer.get_output, range(layer.num_outputs)) if tensor is not None]


def _tensors(network: Any) -> Iterator[Any]:
    """Every tensor once: the inputs, then what the layers give."""
    yield from map(network.get_input, range(network.num_inputs))
    for layer in _layers(network):
        yield from _outputs(layer)

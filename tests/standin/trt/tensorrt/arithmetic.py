# ruff: noqa: SLF001 - modules of one simulated library
"""What is simulated of the hardware: which layers the DLA takes, calibration by maxima, and the loss of precision.

INT8: the data inputs of Conv, ConvTranspose, Gemm and MatMul that have a scale go through QuantizeLinear and
DequantizeLinear, their weights are rounded to 127 steps of each output channel's maximum. FP16: the weights of those
layers go through float16. Everything else is computed in float32 by onnxruntime. Times are not simulated.
"""

from __future__ import annotations

import struct

import numpy as np
import onnx
from onnx import helper, numpy_helper

from tensorrt.graph import attribute
from tensorrt.listing import NUMBERS

WITH_WEIGHTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_DIGITS = NUMBERS[0] * (10_000 if NUMBERS >= (10,) else 1_000) + NUMBERS[1] * 100 + NUMBERS[2]
CACHE_HEADER = f"TRT-{_DIGITS}-EntropyCalibration2"

_ON_DLA = ["Conv", "ConvTranspose", "MaxPool", "AveragePool", "Relu", "Sigmoid", "Tanh", "Clip", "LeakyRelu", "PRelu"]
_ON_DLA += ["BatchNormalization", "Add", "Sub", "Mul", "Max", "Min", "Sum", "Concat", "Resize", "Slice", "Split"]
_ON_DLA += ["Softmax", "Transpose", "Reshape", "Abs"]
_ON_DLA += ["Div", "Pow", "Sin", "Cos"] if NUMBERS >= (8, 6, 12) else []


def dla_refuses(layer) -> str | None:
    """Why the DLA does not take a layer: part of NVIDIA's rules, None where it does."""
    node = layer._node
    tensors = [*layer._inputs, *layer._outputs]
    if node.op_type not in _ON_DLA:
        return "operation"
    if any(len(tensor._shape) != 4 for tensor in tensors):
        return "DLA only supports 4 dimensional tensors"
    if any(not 1 <= size <= 8192 for tensor in tensors for size in tensor._shape[1:]):
        return "dimensions"
    if any(tensor._shape[0] < 1 or tensor._shape[0] > 4096 for tensor in tensors):
        return "batch"
    if node.op_type == "ConvTranspose" and (any(attribute(node, "pads", [0])) or attribute(node, "group", 1) != 1):
        return "padding of a deconvolution"
    if node.op_type in ("MaxPool", "AveragePool") and max(attribute(node, "kernel_shape", [1])) > 8:
        return "window"
    if node.op_type == "Conv" and len(layer._inputs) > 1:
        return "weights that are not constant"
    if node.op_type == "Concat" and attribute(node, "axis", 1) not in (1, -3):
        return "DLA only supports concatenation on the C dimension"
    if node.op_type == "Softmax" and attribute(node, "axis", -1) == 0:
        return "axis"
    return None


def render_cache(scales: dict[str, float]) -> bytes:
    """A calibration cache: hexadecimal big-endian float32 by tensor."""
    lines = [f"{name}: {struct.pack('>f', scale).hex()}" for name, scale in scales.items()]
    return ("\n".join([CACHE_HEADER, *lines]) + "\n").encode()


def parse_cache(content: bytes) -> dict[str, float] | None:
    """Scales of a cache, None where it is another version's."""
    lines = content.decode().splitlines()
    if not lines or lines[0] != CACHE_HEADER:
        return None
    pairs = [line.rsplit(": ", 1) for line in lines[1:] if line]
    return {name: struct.unpack(">f", bytes.fromhex(digits.zfill(8)))[0] for name, digits in pairs}


def float_tensors(network) -> list[str]:
    """Names of the tensors that need a scale in INT8 mode."""
    constants = {name for layer in network._layers if layer._type.name == "CONSTANT" for name in layer._node.output}
    return [
        name
        for name, tensor in network._tensors.items()
        if tensor._dtype.name in ("FLOAT", "HALF", "INT8") and name not in constants
    ]


class Maxima:
    """The largest absolute value of every float tensor."""

    def __init__(self, network):
        model = onnx.ModelProto()
        model.CopyFrom(network._model)
        self._names = float_tensors(network)
        present = {value.name for value in model.graph.output}
        inputs = {value.name for value in model.graph.input}
        for name in self._names:
            if name not in present and name not in inputs:
                model.graph.output.append(onnx.ValueInfoProto(name=name))
        self._session = session(model.SerializeToString())
        self._found = dict.fromkeys(self._names, 0.0)

    def add(self, feeds: dict[str, np.ndarray]) -> None:
        names = [output.name for output in self._session.get_outputs()]
        values = dict(zip(names, self._session.run(names, feeds), strict=True)) | feeds
        for name in self._names:
            self._found[name] = max(self._found[name], float(np.abs(values[name].astype(np.float32)).max(initial=0)))

    def scales(self) -> dict[str, float]:
        return {name: largest / 127 for name, largest in self._found.items() if largest > 0}


def session(model: bytes):
    """An onnxruntime session, quiet."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 2
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def lowered(network, precisions: dict[int, str], scales: dict[str, float]) -> onnx.ModelProto:
    """The model with each layer's loss of precision in it.

    Args:
        network: parsed.
        precisions: "INT8", "HALF" or "FLOAT" by the index of an ONNX node.
        scales: by tensor.
    """
    model = onnx.ModelProto()
    model.CopyFrom(network._model)
    graph = model.graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    nodes = []
    quantized: dict[str, str] = {}
    for number, node in enumerate(graph.node):
        precision = precisions.get(number, "FLOAT")
        if node.op_type in WITH_WEIGHTS and precision != "FLOAT":
            for index, name in enumerate(node.input[:2]):
                if name in weights:
                    node.input[index] = _rounded(graph, weights[name], node, precision)
                elif precision == "INT8" and name in scales:
                    if name not in quantized:
                        quantized[name] = f"{name}/standin_dq"
                        nodes += _fake_quantization(graph, name, scales[name])
                    node.input[index] = quantized[name]
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    return model


def _rounded(graph, tensor: onnx.TensorProto, node: onnx.NodeProto, precision: str) -> str:
    name = f"{tensor.name}/standin_{precision.lower()}"
    if any(other.name == name for other in graph.initializer):
        return name
    values = numpy_helper.to_array(tensor)
    if values.dtype != np.float32:
        return tensor.name
    if precision == "HALF":
        rounded = values.astype(np.float16).astype(np.float32)
    else:
        axis = 1 if node.op_type == "ConvTranspose" else 0 if node.op_type == "Conv" else values.ndim - 1
        if node.op_type == "Gemm" and attribute(node, "transB", 0):
            axis = 0
        others = tuple(other for other in range(values.ndim) if other != axis)
        steps = np.maximum(np.abs(values).max(axis=others, keepdims=True), 1e-12) / 127
        rounded = (np.round(values / steps) * steps).astype(np.float32)
    graph.initializer.append(numpy_helper.from_array(rounded, name))
    return name


def _fake_quantization(graph, name: str, scale: float) -> list[onnx.NodeProto]:
    step, zero, whole = f"{name}/standin_scale", f"{name}/standin_zero", f"{name}/standin_q"
    graph.initializer.append(numpy_helper.from_array(np.float32(scale), step))
    graph.initializer.append(numpy_helper.from_array(np.int8(0), zero))
    return [
        helper.make_node("QuantizeLinear", [name, step, zero], [whole]),
        helper.make_node("DequantizeLinear", [whole, step, zero], [f"{name}/standin_dq"]),
    ]

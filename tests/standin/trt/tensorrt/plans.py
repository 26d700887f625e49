# ruff: noqa: SLF001 - modules of one simulated library
"""Serialised engines, their layers as the inspector tells them, and device memory."""

from __future__ import annotations

import hashlib
import json
import os
import struct

import numpy as np
import onnx

from tensorrt import layouts
from tensorrt.listing import EXPORTS, NUMBERS, VERSION, bound

MAGIC = b"standin-plan"
_KINDS = {"CONVOLUTION": "CaskConvolution", "DECONVOLUTION": "CaskDeconvolution", "POOLING": "CaskPooling"}
_KINDS |= {"ACTIVATION": "PointWiseV2", "ELEMENTWISE": "PointWiseV2", "MATRIX_MULTIPLY": "gemm", "SHUFFLE": "NoOp"}
_KINDS |= {"SOFTMAX": "CaskSoftMaxV2", "CONCATENATION": "Reformat", "SLICE": "Slice", "RESIZE": "Resize"}
_KINDS |= {"REDUCE": "Reduce"}


@bound
class IHostMemory(bytes):
    """The library's memory. A Python class has no buffer protocol before 3.12: bytes, with this class's names."""

    __slots__ = ()
    __len__ = None

    def __init__(self, *args):
        pass

    def __getattribute__(self, name):
        if not name.startswith("_") and name not in ("nbytes", "dtype"):
            raise AttributeError(f"'tensorrt.IHostMemory' object has no attribute '{name}'")
        return bytes.__getattribute__(self, name)

    @property
    def nbytes(self):
        return memoryview(self).nbytes

    @property
    def dtype(self):
        return EXPORTS["DataType"].INT8


def compute() -> str:
    """Compute capability of the simulated GPU."""
    return os.environ.get("STANDIN_COMPUTE", "8.7")


def write(model: bytes, **header: object) -> bytes:
    """A plan: magic, header as JSON, model, checksum."""
    text = json.dumps({"version": VERSION, "compute": compute(), **header}).encode()
    body = MAGIC + struct.pack("<QQ", len(text), len(model)) + text + model
    return body + hashlib.sha256(body).digest()


def read(content: bytes) -> tuple[dict, bytes] | None:
    """Header and model of a plan, None where it is damaged."""
    start = len(MAGIC) + 16
    if content[: len(MAGIC)] != MAGIC or hashlib.sha256(content[:-32]).digest() != content[-32:]:
        return None
    length, model = struct.unpack("<QQ", content[len(MAGIC) : start])
    return json.loads(content[start : start + length]), content[start + length : start + length + model]


def fetch(address: int, shape: tuple[int, ...], dtype) -> np.ndarray:
    """A linear array from device memory."""
    import pycuda.driver as cuda

    array = np.empty(shape, dtype)
    cuda.memcpy_dtoh(array, address)
    return array


def logical_type(network, tensor):
    """The element type that the ONNX model has for an input or output."""
    values = [*network._model.graph.input, *network._model.graph.output, *network._model.graph.value_info]
    value = next((value for value in values if value.name == tensor._onnx_name and value.HasField("type")), None)
    if value is None:
        return np.float32
    return onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)


def foreign_nodes(network, on_dla: set[int]) -> list[list]:
    """Runs of layers that lie on the DLA one after the other."""
    parts: list[list] = []
    inside = False
    for layer in network._layers:
        if layer._type.name == "CONSTANT":
            continue
        if id(layer) in on_dla:
            if not inside:
                parts.append([])
            parts[-1].append(layer)
        inside = id(layer) in on_dla
    return parts


def foreign_name(part: list) -> str:
    if len(part) == 1:
        return f"{{ForeignNode[{part[0]._name}]}}"
    return f"{{ForeignNode[{part[0]._name}...{part[-1]._name}]}}"


def described(network, precisions: dict[int, str], on_dla: set[int], scales: dict[str, float], verbosity: str) -> list:
    """The layers of the engine: names, or everything where the verbosity is DETAILED."""
    if verbosity == "NONE":
        return []
    consumers: dict[str, int] = {}
    for layer in network._layers:
        for tensor in layer._inputs:
            consumers[tensor._name] = consumers.get(tensor._name, 0) + 1
    parts = foreign_nodes(network, on_dla)
    first_of = {id(part[0]): part for part in parts}
    groups: list[tuple[str, list]] = []
    for layer in network._layers:
        if id(layer) in first_of:
            groups.append(("DLA", first_of[id(layer)]))
        elif id(layer) in on_dla or layer._type.name in ("CONSTANT", "SHAPE"):
            continue
        elif _fuses(layer, groups, consumers):
            groups[-1][1].append(layer)
        else:
            groups.append((_KINDS.get(layer._type.name, layer._type.name.title().replace("_", "")), [layer]))
    return [_layer(kind, group, precisions, scales, verbosity) for kind, group in groups]


def _fuses(layer, groups: list, consumers: dict[str, int]) -> bool:
    if layer._type.name not in ("ACTIVATION", "SCALE") or not groups or groups[-1][0] != "CaskConvolution":
        return False
    before = groups[-1][1][-1]._outputs[0]
    return before in layer._inputs and consumers[before._name] == 1 and not before._output


def _layer(kind: str, group: list, precisions: dict[int, str], scales: dict[str, float], verbosity: str):
    name = foreign_name(group) if kind == "DLA" else " + ".join(layer._name for layer in group)
    if verbosity != "DETAILED":
        return name
    made = {id(tensor) for layer in group for tensor in layer._outputs}
    used = {id(tensor) for layer in group for tensor in layer._inputs}
    inputs = {id(t): t for layer in group for t in layer._inputs if id(t) not in made}
    outputs = {id(t): t for layer in group for t in layer._outputs if id(t) not in used or t._output}
    precision = precisions[id(group[0])]

    def told(tensor) -> dict:
        whole = tensor._dtype.name if tensor._dtype.name not in ("FLOAT", "HALF", "INT8") else precision
        if whole == "INT8" and scales and tensor._name not in scales:
            whole = "HALF"
        form = "LINEAR"
        if len(tensor._shape) == 4 and whole in ("HALF", "INT8"):
            form = "CHW32" if whole == "INT8" else "CHW16" if kind == "DLA" else "HWC8"
        return {
            "Name": tensor._name,
            "Location": "Device",
            "Dimensions": list(tensor._shape),
            "Format/Datatype": layouts.description(form, whole),
        }

    entry = {
        "Name": name,
        "LayerType": kind,
        "Inputs": [told(tensor) for tensor in inputs.values()],
        "Outputs": [told(tensor) for tensor in outputs.values()],
        "TacticName": "",
        "StreamId": 0,
        "Metadata": "\x1e".join(layer._metadata for layer in group if layer._metadata),
    }
    if NUMBERS < (8, 6):
        del entry["StreamId"], entry["Metadata"]
    return entry

# ruff: noqa: SLF001 - modules of one simulated library
"""Networks: what the ONNX parser makes of a model, with the names, types and shapes that TensorRT gives layers."""

from __future__ import annotations

import os
from pathlib import Path

import onnx
from onnx import shape_inference

from tensorrt.callbacks import say
from tensorrt.listing import EXPORTS, NUMBERS, Bound, bound, fixed, new, slot

DataType, LayerType = EXPORTS["DataType"], EXPORTS["LayerType"]

_BY_OPERATOR = {
    "CONVOLUTION": "Conv",
    "DECONVOLUTION": "ConvTranspose",
    "MATRIX_MULTIPLY": "Gemm MatMul",
    "ACTIVATION": "Relu Sigmoid Tanh LeakyRelu Clip Elu Selu Softplus Softsign HardSigmoid ThresholdedRelu Gelu",
    "POOLING": "MaxPool AveragePool",
    "SCALE": "BatchNormalization",
    "SOFTMAX": "Softmax LogSoftmax",
    "LRN": "LRN",
    "CONCATENATION": "Concat",
    "ELEMENTWISE": "Add Sub Mul Div Max Min Pow Sum And Or Xor Equal Greater Less GreaterOrEqual LessOrEqual",
    "UNARY": "Abs Exp Log Sqrt Reciprocal Neg Sin Cos Tan Atan Ceil Floor Erf Not Sign Round",
    "SHUFFLE": "Reshape Transpose Flatten Squeeze Unsqueeze DepthToSpace SpaceToDepth",
    "SLICE": "Slice Split Expand Tile Pad",
    "REDUCE": "GlobalAveragePool GlobalMaxPool ReduceMean ReduceMax ReduceMin ReduceSum ReduceProd ReduceL2",
    "TOPK": "TopK ArgMax ArgMin",
    "GATHER": "Gather GatherElements GatherND",
    "RESIZE": "Resize Upsample",
    "CONSTANT": "Constant",
    "IDENTITY": "Identity Dropout",
    "CAST": "Cast",
    "SHAPE": "Shape",
    "PARAMETRIC_RELU": "PRelu",
    "SELECT": "Where",
    "QUANTIZE": "QuantizeLinear",
    "DEQUANTIZE": "DequantizeLinear",
    "NORMALIZATION": "InstanceNormalization LayerNormalization GroupNormalization",
    "NMS": "NonMaxSuppression",
    "FILL": "ConstantOfShape Range",
}
TYPE_OF = {operator: kind for kind, operators in _BY_OPERATOR.items() for operator in operators.split()}
_TYPES = {onnx.TensorProto.FLOAT: "FLOAT", onnx.TensorProto.FLOAT16: "HALF", onnx.TensorProto.INT8: "INT8"}
_TYPES |= {onnx.TensorProto.INT32: "INT32", onnx.TensorProto.BOOL: "BOOL", onnx.TensorProto.UINT8: "UINT8"}
_TYPES |= {onnx.TensorProto.BFLOAT16: "BF16", onnx.TensorProto.DOUBLE: "FLOAT"}
_TYPES |= {onnx.TensorProto.INT64: "INT64" if NUMBERS >= (10,) else "INT32"}  # 8.x has no INT64
_ALL_FORMATS = sum(1 << int(member) for member in EXPORTS["TensorFormat"].__members__.values())


def faults() -> list[str]:
    """What STANDIN_FAULT asks to go wrong."""
    return [fault for fault in os.environ.get("STANDIN_FAULT", "").split(",") if fault]


@bound
class Dims(tuple):
    """A shape. The real class is no tuple, but compares, slices and prints like one."""

    __slots__ = ()
    MAX_DIMS = fixed(8)


@bound
class ITensor(Bound):
    __slots__ = ("_allowed_formats", "_dtype", "_input", "_name", "_onnx_name", "_output", "_range", "_shape")
    name = slot("name", str)
    shape = slot("shape", settable=False)

    @shape.setter
    def shape(self, value):
        if not self._input:
            raise RuntimeError("only shapes of network inputs can be set")
        self._shape = Dims(value)

    dtype = slot("dtype", "DataType")
    allowed_formats = slot("allowed_formats", int)  # a mask: 1 << int(tensorrt.TensorFormat.X)
    is_network_input = slot("input", settable=False)
    is_network_output = slot("output", settable=False)
    is_shape_tensor = fixed(False)
    is_execution_tensor = fixed(True)
    dynamic_range = slot("range", tuple)

    def set_dynamic_range(self, min, max):  # noqa: A002 - the bindings' names
        self._range = (float(min), float(max))
        return True

    def reset_dynamic_range(self):
        self._range = None


@bound
class ILayer(Bound):
    __slots__ = ("_index", "_inputs", "_metadata", "_name", "_node", "_output_types", "_outputs", "_precision", "_type")

    name = slot("name", str)
    metadata = slot("metadata")
    type = slot("type", settable=False)

    precision = property(lambda self: self._precision or DataType.FLOAT, slot("precision", "DataType").fset)

    @property
    def precision_is_set(self):
        return self._precision is not None

    def reset_precision(self):
        self._precision = None

    @property
    def num_inputs(self):
        return len(self._inputs)

    @property
    def num_outputs(self):
        return len(self._outputs)

    def get_input(self, index):
        return self._inputs[index] if index < len(self._inputs) else None

    def get_output(self, index):
        return self._outputs[index] if index < len(self._outputs) else None

    def set_output_type(self, index, dtype):
        self._output_types[index] = dtype

    def output_type_is_set(self, index):
        return index in self._output_types

    def reset_output_type(self, index):
        self._output_types.pop(index, None)

    def get_output_type(self, index):
        return self._output_types.get(index, self._outputs[index]._dtype)


@bound
class INetworkDefinition(Bound):
    __slots__ = ("_builder", "_flags", "_layers", "_logger", "_model", "_name", "_tensors")

    name = slot("name", str)
    builder = slot("builder", settable=False)
    flags = slot("flags", settable=False)

    def get_flag(self, flag):
        return bool(self._flags >> int(flag) & 1)

    @property
    def has_implicit_batch_dimension(self):
        return NUMBERS < (10,) and not self._flags & 1

    @property
    def _typed(self):
        """Strongly typed: always from 11 on."""
        if NUMBERS >= (11,):
            return True
        flag = EXPORTS["NetworkDefinitionCreationFlag"].__members__.get("STRONGLY_TYPED")
        return flag is not None and self.get_flag(flag)

    @property
    def _ins(self):
        return [tensor for tensor in self._tensors.values() if tensor._input]

    @property
    def _outs(self):
        if self._model is None:
            return []
        names = [value.name for value in self._model.graph.output]
        return [self._tensors[name] for name in names if self._tensors[name]._output]

    @property
    def num_inputs(self):
        return len(self._ins)

    @property
    def num_outputs(self):
        return len(self._outs)

    @property
    def num_layers(self):
        return len(self._layers)

    def get_input(self, index):
        return self._ins[index] if index < len(self._ins) else None

    def get_output(self, index):
        return self._outs[index] if index < len(self._outs) else None

    def get_layer(self, index):
        return self._layers[index] if index < len(self._layers) else None

    def mark_output(self, tensor):
        tensor._output = True
        if tensor._onnx_name not in [value.name for value in self._model.graph.output]:
            self._model.graph.output.append(onnx.ValueInfoProto(name=tensor._onnx_name))

    def unmark_output(self, tensor):
        tensor._output = False


@bound
class ParserError(Bound):
    __slots__ = ("_code", "_desc", "_node", "_node_name", "_node_operator")

    def code(self):
        return self._code

    def desc(self):
        return self._desc

    def file(self):
        return "/_src/parsers/onnx/ModelImporter.cpp"

    def func(self):
        return "importModel" if self._node < 0 else f"import{self._node_operator}"

    def line(self):
        return 1

    def node(self):
        return self._node

    def node_name(self):
        return self._node_name

    def node_operator(self):
        return self._node_operator

    def __str__(self):
        named = f" with name: {self._node_name} and operator: {self._node_operator}" if NUMBERS >= (10,) else ""
        return f"In node {self._node}{named} ({self.func()}): {self._code.name}: {self._desc}"

    __repr__ = __str__


@bound
class OnnxParser(Bound):
    """Really parses, with the package onnx."""

    __slots__ = ("_errors", "_flags", "_logger", "_network")

    def __init__(self, network, logger):
        self._network, self._logger, self._errors, self._flags = network, logger, [], 0

    @property
    def num_errors(self):
        return len(self._errors)

    flags = slot("flags", int)

    def set_flag(self, flag):
        self._flags |= 1 << int(flag)

    def clear_flag(self, flag):
        self._flags &= ~(1 << int(flag))

    def get_flag(self, flag):
        return bool(self._flags >> int(flag) & 1)

    def get_error(self, index):
        return self._errors[index]

    def clear_errors(self):
        self._errors = []

    def supports_operator(self, op_name):
        return op_name in TYPE_OF

    def parse_from_file(self, model):
        if not Path(model).is_file():
            return self._fail("MODEL_DESERIALIZE_FAILED", f"Failed to open file: {model}")
        return self.parse(Path(model).read_bytes(), model)

    def parse(self, model, path=None):
        if self._network.has_implicit_batch_dimension:
            return self._fail(
                "INVALID_VALUE",
                'Assertion failed: !_importer_ctx.network()->hasImplicitBatchDimension() && "This version of the ONNX'
                " parser only supports TensorRT INetworkDefinitions with an explicit batch dimension. Please ensure the"
                ' network was created using the EXPLICIT_BATCH NetworkDefinitionCreationFlag."',
            )
        try:
            proto = onnx.load_model_from_string(bytes(model))
            folder = Path(path).parent if path else Path()
            onnx.load_external_data_for_model(proto, str(folder))
        except Exception as error:  # noqa: BLE001 - protobuf's and onnx's errors have no common base
            return self._fail("MODEL_DESERIALIZE_FAILED", f"Failed to parse ONNX model from buffer ({error})")
        for index, node in enumerate(proto.graph.node):
            if f"parse:{node.name}" in faults():
                return self._fail("UNSUPPORTED_NODE", "Assertion failed: false: not supported here", index, node)
            if node.op_type not in TYPE_OF:
                text = (
                    "Assertion failed: creator: Plugin not found, are the plugin name, version, and namespace correct?"
                )
                return self._fail("UNSUPPORTED_NODE", text, index, node)
        _fill(self._network, shape_inference.infer_shapes(proto))
        return True

    def _fail(self, code, desc, index=-1, node=None):
        name, operator = (node.name, node.op_type) if node is not None else ("", "")
        code = EXPORTS["ErrorCode"].__members__[code]
        error = new(ParserError, code=code, desc=desc, node=index, node_name=name, node_operator=operator)
        self._errors.append(error)
        say(self._logger, "ERROR", str(error))
        return False


def _fill(network: INetworkDefinition, model: onnx.ModelProto) -> None:
    graph = model.graph
    constants = {tensor.name for tensor in graph.initializer}
    network._model, network._name, network._layers, network._tensors = model, graph.name, [], {}
    outputs = {value.name for value in graph.output}
    for value in graph.input:
        if value.name not in constants:
            _tensor(network, value, source=True)
    for value in [*graph.value_info, *graph.output]:
        if value.name not in constants:  # onnx_ir lists initializers as well
            _tensor(network, value, output=value.name in outputs)
    for index, node in enumerate(graph.node):
        names = [name for name in node.output if name]
        for name in names:
            _tensor(network, onnx.ValueInfoProto(name=name))
        # TensorRT's slice layer has one output, so that Split becomes several.
        for part in [[name] for name in names] if node.op_type == "Split" else [names]:
            _layer(network, index, node, part)


def _tensor(network: INetworkDefinition, value: onnx.ValueInfoProto, *, source: bool = False, output: bool = False):
    if value.name in network._tensors:
        network._tensors[value.name]._output |= output
        return
    kind = value.type.tensor_type
    dims = [d.dim_value if d.HasField("dim_value") else -1 for d in kind.shape.dim]
    network._tensors[value.name] = new(
        ITensor,
        name=value.name,
        onnx_name=value.name,
        shape=Dims(dims),
        dtype=DataType.__members__[_TYPES.get(kind.elem_type, "FLOAT")],
        allowed_formats=_ALL_FORMATS,
        range=None,
        input=source,
        output=output,
    )


def _layer(network: INetworkDefinition, index: int, node: onnx.NodeProto, outputs: list[str]) -> None:
    kind = TYPE_OF[node.op_type]
    name = node.name
    if not name and NUMBERS >= (10,):
        name = f"node_of_{node.output[0]}"
    elif not name:
        name = f"(Unnamed Layer* {len(network._layers)}) [{kind.replace('_', ' ').title()}]"
    taken = sum(layer._name == name or layer._name.startswith(f"{name}_") for layer in network._layers)
    network._layers.append(
        new(
            ILayer,
            name=f"{name}_{taken}" if taken and node.op_type == "Split" else name,
            node=node,
            index=index,
            type=LayerType.__members__.get(kind, LayerType.IDENTITY),  # 8.5 has neither CAST nor NORMALIZATION
            precision=None,
            output_types={},
            metadata=f"[ONNX Layer: {node.name}]" if node.name else "",
            inputs=[network._tensors[source] for source in node.input if source in network._tensors],
            outputs=[network._tensors[target] for target in outputs],
        )
    )


def attribute(node: onnx.NodeProto, name: str, default):
    """An attribute's value."""
    found = next((entry for entry in node.attribute if entry.name == name), None)
    return default if found is None else onnx.helper.get_attribute_value(found)

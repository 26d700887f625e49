"""Plans, built by the stand-in for TensorRT."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import onnx
import pytest
from onnx import TensorProto, helper

ONNX = {"FLOAT": TensorProto.FLOAT, "HALF": TensorProto.FLOAT16, "INT8": TensorProto.FLOAT, "INT32": TensorProto.INT32}


def doubling(shape: Sequence[int | str], kind: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """A model that adds its input ``x`` to itself."""
    info = helper.make_tensor_value_info
    node = helper.make_node("Add", ["x", "x"], ["y"], name="double")
    graph = helper.make_graph([node], "g", [info("x", kind, shape)], [info("y", kind, shape)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture
def plan(tmp_path: Path) -> Callable[..., Path]:
    """Builds a plan; twice the input by default.

    Args of what it gives:
        trt: the stand-in.
        shape: of input and output.
        dtype: of both, as TensorRT names it. INT8 has scale 0.5 inside and 1.0 outside.
        formats: by tensor name, as TensorRT names them.
        dla: build for the DLA's core 0.
        model: another one than the doubling model.
    """

    def build(
        trt: ModuleType,
        shape: Sequence[int] = (1, 3, 4, 5),
        *,
        dtype: str = "FLOAT",
        formats: Mapping[str, str] | None = None,
        dla: bool = False,
        model: onnx.ModelProto | None = None,
        name: str = "engine.plan",
    ) -> Path:
        typed = not hasattr(trt.BuilderFlag, "FP16")
        kind = ONNX[dtype] if typed or dtype == "INT32" else TensorProto.FLOAT
        logger = trt.Logger(trt.Logger.ERROR)
        builder = trt.Builder(logger)
        network = builder.create_network(1 if trt.__version__.startswith("8.") else 0)
        parser = trt.OnnxParser(network, logger)
        assert parser.parse((model or doubling(shape, kind)).SerializeToString()), parser.get_error(0).desc()
        config = builder.create_builder_config()
        tensors = [network.get_input(i) for i in range(network.num_inputs)]
        tensors += [network.get_output(i) for i in range(network.num_outputs)]
        for tensor in tensors:
            if formats and tensor.name in formats:
                tensor.allowed_formats = 1 << int(getattr(trt.TensorFormat, formats[tensor.name]))
            if not typed and dtype in ("HALF", "INT8"):
                tensor.dtype = getattr(trt.DataType, dtype)
        if not typed and (dla or dtype == "HALF"):
            config.set_flag(trt.BuilderFlag.FP16)
        if dtype == "INT8":
            config.set_flag(trt.BuilderFlag.INT8)
            network.get_input(0).set_dynamic_range(-63.5, 63.5)
            network.get_output(0).set_dynamic_range(-127, 127)
        if dla:
            config.default_device_type = trt.DeviceType.DLA
            config.DLA_core = 0
            config.set_flag(trt.BuilderFlag.GPU_FALLBACK)
        serialized = builder.build_serialized_network(network, config)
        assert serialized is not None
        path = tmp_path / name
        path.write_bytes(serialized)
        return path

    return build

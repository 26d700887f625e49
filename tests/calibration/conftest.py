"""Small ONNX models, built in code."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from calibration import cache
from calibration.recipe import Pools, Recipe, TensorIo

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


def build(
    nodes: Sequence[onnx.NodeProto],
    weights: dict[str, np.ndarray],
    *,
    input_shape: Sequence[int | str] = (1, 3, 8, 8),
    outputs: Sequence[str] = ("out",),
    opset: int = 17,
) -> ir.Model:
    """A model with the input 'images' and the named outputs, checked by ONNX, shapes inferred."""
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, input_shape)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    model = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    onnx.checker.check_model(model)
    return ir.from_proto(model)


@pytest.fixture
def build_model() -> Callable[..., ir.Model]:
    """``build`` above."""
    return build


@pytest.fixture
def rng() -> np.random.Generator:
    """The same numbers each time."""
    return np.random.default_rng(0)


@pytest.fixture
def residual_model(rng: np.random.Generator) -> ir.Model:
    """Stem (Conv, ReLU), then a residual block: depthwise, pointwise, Add with the stem, ReLU; then a Gemm head."""

    def weight(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    node = helper.make_node
    nodes = [
        node("Conv", ["images", "w_stem", "b_stem"], ["stem"], name="stem_conv", pads=[1, 1, 1, 1]),
        node("Relu", ["stem"], ["stem_act"], name="stem_relu"),
        node("Conv", ["stem_act", "w_dw"], ["dw"], name="block.depthwise", group=4, pads=[1, 1, 1, 1]),
        node("Sigmoid", ["dw"], ["dw_sigmoid"], name="block.sigmoid"),
        node("Mul", ["dw", "dw_sigmoid"], ["dw_act"], name="block.mul"),
        node("Conv", ["dw_act", "w_pw"], ["pw"], name="block.pointwise"),
        node("Add", ["pw", "stem_act"], ["sum"], name="block.add"),
        node("Relu", ["sum"], ["sum_act"], name="block.relu"),
        node("Conv", ["sum_act", "w_last"], ["last"], name="block.last"),
        node("GlobalAveragePool", ["last"], ["pooled"], name="pool"),
        node("Flatten", ["pooled"], ["flat"], name="flatten"),
        node("Gemm", ["flat", "w_head", "b_head"], ["out"], name="head", transB=1),
    ]
    weights = {
        "w_stem": weight(4, 3, 3, 3),
        "b_stem": weight(4),
        "w_dw": weight(4, 1, 3, 3),
        "w_pw": weight(4, 4, 1, 1),
        "w_last": weight(4, 4, 1, 1),
        "w_head": weight(5, 4),
        "b_head": weight(5),
    }
    return build(nodes, weights)


@pytest.fixture
def make_recipe(residual_model: ir.Model, tmp_path: Path) -> Callable[..., Recipe]:
    """Writes ``residual_model``, or another with the same input and output, and gives a recipe for a build of it.

    ``scales`` are what a calibration cache and ranges come from; default: every float tensor of the model has one.
    """

    def make(tensorrt: str = "10.3.0", *, model: ir.Model | None = None, **changes: object) -> Recipe:
        model = model or residual_model
        out = tmp_path / "out"
        out.mkdir(exist_ok=True)
        ir.save(model, tmp_path / "model.onnx")
        quantization = changes.setdefault("quantization", "none")
        scales = changes.pop("scales", None)
        if scales is None:
            scales = dict.fromkeys(
                [value.name for value in model.graph.inputs] + [v.name for node in model.graph for v in node.outputs],
                0.05,
            )
        if quantization == "cache" and "cache" not in changes:
            path = tmp_path / "calibration.cache"
            path.write_text(cache.render(scales, tensorrt=tensorrt))
            changes["cache"] = str(path)
        if quantization == "ranges":
            changes.setdefault("ranges", {name: 127 * scale for name, scale in scales.items()})
        given = {
            "model": str(tmp_path / "model.onnx"),
            "name": "residual",
            "tensorrt": tensorrt,
            "precision": "fp32" if quantization == "none" else "int8",
            "strongly_typed": tensorrt.startswith("11"),
            "inputs": (TensorIo(name="images", shape=(1, 3, 8, 8), dtype="fp32", layout="chw"),),
            "outputs": (TensorIo(name="out", shape=(1, 5), dtype="fp32", layout="chw"),),
            "pools": Pools(workspace=256 << 20),
            "timing_cache": str(tmp_path / "timing.cache"),
            "out": str(out),
        }
        return Recipe(**{**given, **changes})

    return make

"""Reading ONNX models, and the edits that prepare them for Q/DQ."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
import pytest
from onnx import helper

from calibration import graph, observe
from edge.config import LayerRule
from edge.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from collections.abc import Callable


def matched(model: ir.Model, *rules: LayerRule) -> set[str]:
    return graph.match_layers([node for node in model.graph if "Conv" in node.op_type], rules, key="fp16")


def test_what_is_no_model_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "text.onnx").write_text("hello")
    (tmp_path / "empty.onnx").write_bytes(b"")

    with pytest.raises(ModelError, match=r"absent\.onnx: no such model file"):
        graph.load(tmp_path / "absent.onnx")
    with pytest.raises(ModelError, match=r"text\.onnx: is not an ONNX model"):
        graph.load(tmp_path / "text.onnx")
    with pytest.raises(ModelError, match=r"empty\.onnx: is not an ONNX model"):
        graph.load(tmp_path / "empty.onnx")


def test_a_truncated_model_is_refused(tmp_path: Path, data: Path) -> None:
    content = (data / "models" / "yunet_n_320.onnx").read_bytes()
    (tmp_path / "cut.onnx").write_bytes(content[: len(content) // 2])

    with pytest.raises(ModelError, match=r"cut\.onnx: is not an ONNX model"):
        graph.load(tmp_path / "cut.onnx")


@pytest.mark.parametrize("name", ["yolox_nano", "fastestdet", "yunet_n_320"])
def test_real_models_of_opset_11_are_converted_and_compute_the_same(data: Path, name: str) -> None:
    path = data / "models" / f"{name}.onnx"
    original, converted = graph.load(path), graph.to_opset(graph.load(path), graph.QDQ_OPSET)
    (value,) = original.graph.inputs
    shape = [int(size) for size in value.shape or ()]
    picture = np.random.default_rng(0).uniform(0, 255, shape).astype(np.float32)

    difference = observe.largest_difference(original, converted, [{str(value.name): picture}])

    assert converted.opset_imports[""] == 13
    assert difference == 0.0


def test_a_newer_opset_is_left_alone(residual_model: ir.Model) -> None:
    assert graph.to_opset(residual_model, 13) is residual_model


def test_tensor_names_survive_the_conversion(data: Path) -> None:
    path = data / "models" / "yolox_nano.onnx"
    names = {value.name for node in graph.load(path).graph for value in node.outputs}

    assert names <= {value.name for node in graph.to_opset(graph.load(path), 13).graph for value in node.outputs}


def normalised(build_model: Callable[..., ir.Model], rng: np.random.Generator, *, bias: bool) -> ir.Model:
    weights = {
        "w": rng.standard_normal((4, 3, 3, 3)),
        "b": rng.standard_normal(4),
        "gamma": rng.uniform(0.5, 2, 4),
        "beta": rng.standard_normal(4),
        "mean": rng.standard_normal(4),
        "var": rng.uniform(0.5, 2, 4),
    }
    if not bias:
        del weights["b"]
    nodes = [
        helper.make_node("Conv", ["images", "w", *(["b"] if bias else [])], ["conv"], name="conv"),
        helper.make_node("BatchNormalization", ["conv", "gamma", "beta", "mean", "var"], ["normed"], epsilon=1e-3),
        helper.make_node("Relu", ["normed"], ["out"]),
    ]
    return build_model(nodes, {name: array.astype(np.float32) for name, array in weights.items()})


@pytest.mark.parametrize("bias", [True, False])
def test_batch_normalisation_is_folded(
    build_model: Callable[..., ir.Model], rng: np.random.Generator, *, bias: bool
) -> None:
    model = normalised(build_model, rng, bias=bias)
    original = ir.from_proto(ir.to_proto(model))

    folded = graph.fold_batch_norm(model)

    assert folded == 1
    assert [node.op_type for node in model.graph] == ["Conv", "Relu"]
    assert model.graph[0].outputs[0].name == "normed"
    picture = rng.standard_normal((1, 3, 8, 8)).astype(np.float32)
    assert observe.largest_difference(original, model, [{"images": picture}]) < 1e-6


def test_a_conv_that_something_else_reads_keeps_its_normalisation(
    build_model: Callable[..., ir.Model], rng: np.random.Generator
) -> None:
    nodes = [
        helper.make_node("Conv", ["images", "w"], ["conv"]),
        helper.make_node("BatchNormalization", ["conv", "g", "g", "g", "g"], ["normed"]),
        helper.make_node("Add", ["normed", "conv"], ["out"]),
    ]
    weights = {"w": rng.standard_normal((4, 3, 3, 3)).astype(np.float32), "g": np.ones(4, np.float32)}
    model = build_model(nodes, weights)

    assert graph.fold_batch_norm(model) == 0
    assert len(model.graph) == 3


class TestMatchLayers:
    def test_by_shell_pattern_of_the_node(self, residual_model: ir.Model) -> None:
        assert matched(residual_model, LayerRule(name="block.*")) == {"dw", "pw", "last"}

    def test_by_the_name_of_an_output(self, residual_model: ir.Model) -> None:
        assert matched(residual_model, LayerRule(name="p[vw]")) == {"pw"}

    def test_depthwise_and_not(self, residual_model: ir.Model) -> None:
        assert matched(residual_model, LayerRule(op="Conv", depthwise=True)) == {"dw"}
        assert matched(residual_model, LayerRule(depthwise=False)) == {"stem", "pw", "last"}

    def test_by_attribute(self, residual_model: ir.Model) -> None:
        assert matched(residual_model, LayerRule(attributes={"group": 4})) == {"dw"}
        assert matched(residual_model, LayerRule(attributes={"pads": [1, 1, 1, 1]}, depthwise=False)) == {"stem"}

    def test_rules_add_up_and_keys_of_one_rule_must_all_match(self, residual_model: ir.Model) -> None:
        rules = [LayerRule(name="stem_conv"), LayerRule(name="block.*", depthwise=True)]

        assert matched(residual_model, *rules) == {"stem", "dw"}

    def test_a_rule_that_matches_nothing_is_an_error(self, residual_model: ir.Model) -> None:
        with pytest.raises(ConfigError, match=r"fp16\[1\]: matches no layer that would be quantized.*: Conv"):
            matched(residual_model, LayerRule(op="Conv"), LayerRule(name="head.*"))

    def test_the_depthwise_layers_of_a_real_model(self, data: Path) -> None:
        model = graph.load(data / "models" / "yolox_nano.onnx")

        assert len(matched(model, LayerRule(op="Conv", depthwise=True))) == 30

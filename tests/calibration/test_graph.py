"""Reading ONNX models, and the edits that prepare them for Q/DQ."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from calibration import graph, observe, qdq
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


def evaluate(content: bytes) -> dict[str, Any]:
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {}), strict=True))


def refused(_: bytes) -> dict[str, Any]:
    pytest.fail("nothing was to be evaluated")


class TestFoldConstants:
    @pytest.fixture
    def transposed_head(self, build_model: Callable[..., ir.Model], rng: np.random.Generator) -> ir.Model:
        """Flatten and a MatMul whose weight is a chain: Transpose, then Mul by a Constant node."""
        half = numpy_helper.from_array(np.float32(0.5), "half")
        nodes = [
            helper.make_node("Constant", [], ["half"], value=half),
            helper.make_node("Transpose", ["w"], ["w_t"], perm=[1, 0]),
            helper.make_node("Mul", ["w_t", "half"], ["w_half"]),
            helper.make_node("Flatten", ["images"], ["flat"]),
            helper.make_node("MatMul", ["flat", "w_half"], ["out"]),
        ]
        return build_model(nodes, {"w": rng.standard_normal((5, 192)).astype(np.float32)})

    def test_a_computed_weight_becomes_a_plain_one_of_the_same_name(
        self, transposed_head: ir.Model, rng: np.random.Generator
    ) -> None:
        model, original = transposed_head, ir.from_proto(ir.to_proto(transposed_head))

        removed = graph.fold_constants(model, evaluate)

        assert removed == 3
        assert [node.op_type for node in model.graph] == ["Flatten", "MatMul"]
        assert list(model.graph.initializers) == ["w_half"]
        weight = graph.constant(model.graph[1].inputs[1])
        expected = np.asarray(graph.constant(original.graph.initializers["w"])).T / 2
        np.testing.assert_array_equal(weight, expected)
        onnx.checker.check_model(ir.to_proto(model), full_check=True)
        picture = rng.standard_normal((1, 3, 8, 8)).astype(np.float32)
        assert observe.largest_difference(original, model, [{"images": picture}]) < 1e-6

    def test_a_layer_with_a_computed_weight_can_then_be_quantized(self, transposed_head: ir.Model) -> None:
        unfolded, folded = ir.from_proto(ir.to_proto(transposed_head)), transposed_head

        graph.fold_constants(folded, evaluate)

        (skipped,) = qdq.insert(unfolded, {"flat": 0.1}, [], key="fp16").skipped
        assert skipped == ("node_of_out", "no range for w_half")
        assert qdq.insert(folded, {"flat": 0.1}, [], key="fp16").layers == ("node_of_out",)

    def test_folding_again_finds_nothing(self, transposed_head: ir.Model) -> None:
        graph.fold_constants(transposed_head, evaluate)

        assert graph.fold_constants(transposed_head, refused) == 0

    def test_the_shape_of_a_static_tensor_and_what_follows_from_it_are_constants(
        self, build_model: Callable[..., ir.Model]
    ) -> None:
        nodes = [
            helper.make_node("Shape", ["images"], ["shape"]),
            helper.make_node("Gather", ["shape", "zero"], ["batch"]),
            helper.make_node("Concat", ["batch", "rest"], ["target"], axis=0),
            helper.make_node("Reshape", ["images", "target"], ["out"]),
        ]
        weights = {"zero": np.array([0]), "rest": np.array([-1])}
        model = build_model(nodes, weights)

        assert graph.fold_constants(model, evaluate) == 3
        assert [node.op_type for node in model.graph] == ["Reshape"]
        assert graph.constant(model.graph[0].inputs[1]).tolist() == [1, -1]  # type: ignore[union-attr]

    @pytest.mark.parametrize(("bounds", "expected"), [({"start": 2}, [8, 8]), ({"end": -3}, [1]), ({"start": 9}, [])])
    def test_a_part_of_a_shape_is_the_part_that_onnxruntime_gives(
        self, build_model: Callable[..., ir.Model], bounds: dict[str, int], expected: list[int]
    ) -> None:
        nodes = [
            helper.make_node("Shape", ["images"], ["shape"], **bounds),
            helper.make_node("Cast", ["shape"], ["out"], to=TensorProto.FLOAT),
        ]
        model = build_model(nodes, {})
        original = ir.from_proto(ir.to_proto(model))

        assert graph.fold_constants(model, evaluate) == 2

        picture = np.zeros((1, 3, 8, 8), np.float32)
        assert graph.constant(model.graph.outputs[0]).tolist() == expected  # type: ignore[union-attr]
        assert observe.run(observe.session(original), {"images": picture})[0].tolist() == expected

    def test_a_dynamic_shape_stays(self, build_model: Callable[..., ir.Model]) -> None:
        nodes = [
            helper.make_node("Shape", ["images"], ["shape"]),
            helper.make_node("Cast", ["shape"], ["out"], to=TensorProto.FLOAT),
        ]
        model = build_model(nodes, {}, input_shape=("batch", 3, 8, 8))

        assert graph.fold_constants(model, refused) == 0

    def test_a_constant_graph_output_stays_one(self, build_model: Callable[..., ir.Model]) -> None:
        nodes = [helper.make_node("Neg", ["w"], ["minus"]), helper.make_node("Add", ["images", "minus"], ["out"])]
        model = build_model(nodes, {"w": np.float32([2])}, outputs=["minus", "out"])

        graph.fold_constants(model, evaluate)

        onnx.checker.check_model(ir.to_proto(model), full_check=True)
        minus, _ = observe.run(observe.session(model), {"images": np.zeros((1, 3, 8, 8), np.float32)})
        assert [value.name for value in model.graph.outputs] == ["minus", "out"]
        assert minus.tolist() == [-2]

    def test_every_output_of_a_node_is_folded(self, build_model: Callable[..., ir.Model]) -> None:
        nodes = [
            helper.make_node("Split", ["w"], ["first", "second"], axis=0),
            helper.make_node("Add", ["images", "second"], ["out"]),
        ]
        model = build_model(nodes, {"w": np.float32([1, 2])}, opset=13)

        assert graph.fold_constants(model, evaluate) == 1
        assert list(model.graph.initializers) == ["second"]

    def test_what_a_body_reads_is_folded_and_the_node_with_the_body_is_not(
        self, build_model: Callable[..., ir.Model]
    ) -> None:
        body = helper.make_graph(
            [helper.make_node("Mul", ["images", "minus"], ["inner"])],
            "body",
            [],
            [helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)],
        )
        nodes = [
            helper.make_node("Neg", ["w"], ["minus"]),
            helper.make_node("If", ["yes"], ["out"], then_branch=body, else_branch=body),
        ]
        model = build_model(nodes, {"w": np.float32([2]), "yes": np.array(True)})

        assert graph.fold_constants(model, evaluate) == 1
        (out,) = observe.run(observe.session(model), {"images": np.ones((1, 3, 8, 8), np.float32)})
        assert out.max() == -2

    def test_random_numbers_are_no_constant(self, build_model: Callable[..., ir.Model]) -> None:
        nodes = [
            helper.make_node("RandomNormal", [], ["noise"], shape=[1]),
            helper.make_node("RandomNormalLike", ["w"], ["more"]),
            helper.make_node("Add", ["noise", "more"], ["both"]),
            helper.make_node("Add", ["images", "both"], ["out"]),
        ]

        assert graph.fold_constants(build_model(nodes, {"w": np.float32([2])}), refused) == 0

    def test_what_grows_beyond_the_limit_stays_and_a_smaller_one_does_not(
        self, build_model: Callable[..., ir.Model]
    ) -> None:
        nodes = [
            helper.make_node("ConstantOfShape", ["huge"], ["zeros"]),
            helper.make_node("Expand", ["w", "small"], ["few"]),
            helper.make_node("ReduceMax", ["zeros"], ["top"]),
            helper.make_node("Add", ["images", "few"], ["sum"]),
            helper.make_node("Add", ["sum", "top"], ["out"]),
        ]
        side = graph.MOST_GROWTH // 4 + 8
        weights = {"huge": np.array([side]), "small": np.array([1, 3, 8, 8]), "w": np.float32([1])}
        model = build_model(nodes, weights)

        assert graph.fold_constants(model, evaluate) == 1
        assert "few" in model.graph.initializers
        assert [node.op_type for node in model.graph] == ["ConstantOfShape", "ReduceMax", "Add", "Add"]

    @pytest.mark.parametrize(("version", "removed"), [(3, 1), (8, 0)])
    def test_an_initializer_that_a_caller_may_override_is_none_from_ir_version_4_on(
        self, version: int, removed: int
    ) -> None:
        values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("images", "w", "out")]
        nodes = [helper.make_node("Neg", ["w"], ["minus"]), helper.make_node("Add", ["images", "minus"], ["out"])]
        weight = numpy_helper.from_array(np.float32([1, 2]), "w")
        proto = helper.make_model(
            helper.make_graph(nodes, "test", values[:2], values[2:], [weight]),
            opset_imports=[helper.make_opsetid("", 13)],
            ir_version=version,
        )
        model = ir.from_proto(onnx.shape_inference.infer_shapes(proto))

        assert graph.fold_constants(model, evaluate) == removed
        (out,) = observe.run(observe.session(model), {"images": np.float32([0, 0])})
        assert out.tolist() == [-1, -2]

    @pytest.mark.parametrize("name", ["yolox_nano", "fastestdet", "yunet_n_320"])
    def test_real_models_compute_the_same(self, data: Path, name: str) -> None:
        path = data / "models" / f"{name}.onnx"
        original, folded = graph.load(path), graph.load(path)
        (value,) = original.graph.inputs
        picture = np.random.default_rng(0).uniform(0, 255, [int(size) for size in value.shape or ()])

        graph.fold_constants(folded, evaluate)

        inputs = {str(value.name): picture.astype(np.float32)}
        assert observe.largest_difference(original, folded, [inputs]) == 0.0


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

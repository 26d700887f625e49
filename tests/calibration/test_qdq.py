"""Where Q/DQ pairs stand, and what they compute."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

from calibration import graph, observe, qdq
from edge.config import LayerRule
from edge.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from collections.abc import Callable

ACTIVATIONS = ("images", "stem_act", "dw_act", "sum_act", "flat")


def scales_of(model: ir.Model, value: float = 0.05) -> dict[str, float]:
    names = [str(v.name) for v in model.graph.inputs] + [str(v.name) for node in model.graph for v in node.outputs]
    return dict.fromkeys(names, value)


def inserted(model: ir.Model, *rules: LayerRule) -> qdq.Placement:
    placement = qdq.insert(model, scales_of(model), rules, key="fp16")
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    return placement


def inputs_of(model: ir.Model, node_name: str) -> list[str]:
    node = next(node for node in model.graph if node.name == node_name)
    return [str(value.name) for value in node.inputs if value is not None]


def attribute(model: ir.Model, node_name: str, name: str) -> Any:
    return next(node for node in model.graph if node.name == node_name).attributes[name].value


def array_of(model: ir.Model, name: str) -> np.ndarray:
    value = model.graph.initializers[name].const_value
    assert value is not None
    return value.numpy()


def test_pairs_stand_on_the_inputs_of_convolutions_and_products(residual_model: ir.Model) -> None:
    placement = inserted(residual_model)

    assert placement.activations == ACTIVATIONS
    assert placement.layers == ("stem_conv", "block.depthwise", "block.pointwise", "block.last", "head")
    assert inputs_of(residual_model, "stem_conv") == ["images_dequantized", "w_stem_axis0_dequantized", "b_stem"]


def test_nothing_stands_between_a_conv_and_its_activation(residual_model: ir.Model) -> None:
    inserted(residual_model)

    assert inputs_of(residual_model, "stem_relu") == ["stem"]
    assert inputs_of(residual_model, "block.sigmoid") == ["dw"]
    assert inputs_of(residual_model, "block.mul") == ["dw", "dw_sigmoid"]
    assert inputs_of(residual_model, "block.relu") == ["sum"]


def test_a_residual_add_shares_the_pair_of_its_other_input(residual_model: ir.Model) -> None:
    inserted(residual_model)

    assert inputs_of(residual_model, "block.add") == ["pw", "stem_act_dequantized"]
    quantizers = [node for node in residual_model.graph if node.op_type == "QuantizeLinear"]
    assert [str(node.inputs[0].name) for node in quantizers].count("stem_act") == 1  # type: ignore[union-attr]


def test_a_layer_kept_in_float_reads_unquantized_tensors(residual_model: ir.Model) -> None:
    placement = inserted(residual_model, LayerRule(depthwise=True))

    assert placement.kept == ("block.depthwise",)
    assert inputs_of(residual_model, "block.depthwise") == ["stem_act", "w_dw"]
    # no quantized layer reads stem_act any more, so the Add has no pair to share either
    assert inputs_of(residual_model, "block.add") == ["pw", "stem_act"]


def test_weights_are_quantized_per_output_channel(residual_model: ir.Model) -> None:
    weight = np.array(array_of(residual_model, "w_stem"))

    inserted(residual_model)

    scale = array_of(residual_model, "w_stem_axis0_scale")
    assert scale == pytest.approx(np.abs(weight).max(axis=(1, 2, 3)) / 127)
    assert attribute(residual_model, "w_stem_axis0_QuantizeLinear", "axis") == 0
    assert array_of(residual_model, "w_stem").dtype == np.float32
    assert array_of(residual_model, "w_stem_axis0_zero_point").dtype == np.int8
    assert not array_of(residual_model, "w_stem_axis0_zero_point").any()


def test_activations_are_quantized_per_tensor(residual_model: ir.Model) -> None:
    inserted(residual_model)

    assert array_of(residual_model, "images_scale").shape == ()
    assert array_of(residual_model, "images_scale") == np.float32(0.05)


def test_the_result_equals_a_numpy_model_of_int8(
    build_model: Callable[..., ir.Model], rng: np.random.Generator
) -> None:
    """One 1 x 1 convolution, quantized by hand: round half to even, saturate, per-channel weights."""
    weight, bias = rng.standard_normal((4, 3, 1, 1)).astype(np.float32), rng.standard_normal(4).astype(np.float32)
    model = build_model([helper.make_node("Conv", ["images", "w", "b"], ["out"])], {"w": weight, "b": bias})
    picture = (rng.standard_normal((1, 3, 8, 8)) * 4).astype(np.float32)
    scale = np.float32(0.05)

    qdq.insert(model, {"images": float(scale)}, [], key="fp16")
    (found,) = observe.session(model).run(None, {"images": picture})

    x = np.clip(np.rint(picture / scale), -128, 127) * scale
    weight_scale = (np.abs(weight).max(axis=(1, 2, 3), keepdims=True) / 127).astype(np.float32)
    w = np.clip(np.rint(weight / weight_scale), -128, 127) * weight_scale
    expected = np.einsum("oi,nihw->nohw", w[:, :, 0, 0], x) + bias[None, :, None, None]
    assert np.abs(found - expected).max() < 1e-4


@pytest.mark.parametrize(
    ("node", "weight_shape", "input_shape", "axis"),
    [
        (helper.make_node("ConvTranspose", ["images", "w"], ["out"]), (3, 5, 2, 2), (1, 3, 8, 8), 1),
        (helper.make_node("Gemm", ["images", "w"], ["out"]), (8, 5), (1, 8), 1),
        (helper.make_node("Gemm", ["images", "w"], ["out"], transB=1), (5, 8), (1, 8), 0),
        (helper.make_node("MatMul", ["images", "w"], ["out"]), (8, 5), (1, 2, 8), 1),
        (helper.make_node("MatMul", ["w", "images"], ["out"]), (5, 8), (1, 8, 2), 0),
    ],
)
def test_the_axis_of_output_channels(
    build_model: Callable[..., ir.Model],
    rng: np.random.Generator,
    node: onnx.NodeProto,
    weight_shape: tuple[int, ...],
    input_shape: tuple[int, ...],
    axis: int,
) -> None:
    weight = rng.standard_normal(weight_shape).astype(np.float32)
    model = build_model([node], {"w": weight}, input_shape=input_shape)
    original = ir.from_proto(ir.to_proto(model))
    picture = rng.standard_normal(input_shape).astype(np.float32)

    qdq.insert(model, {"images": float(np.abs(picture).max() / 127)}, [], key="fp16")

    assert array_of(model, f"w_axis{axis}_scale").shape == (weight_shape[axis],)
    assert observe.largest_difference(original, model, [{"images": picture}]) < 0.03


def test_a_vector_is_quantized_per_tensor(build_model: Callable[..., ir.Model], rng: np.random.Generator) -> None:
    model = build_model(
        [helper.make_node("MatMul", ["images", "w"], ["out"])],
        {"w": rng.standard_normal(8).astype(np.float32)},
        input_shape=(1, 8),
    )

    inserted(model)

    assert array_of(model, "w_scale").shape == ()


def test_a_weight_channel_of_zeros_has_a_usable_scale(build_model: Callable[..., ir.Model]) -> None:
    weight = np.ones((2, 3, 1, 1), np.float32)
    weight[0] = 0
    model = build_model([helper.make_node("Conv", ["images", "w"], ["out"])], {"w": weight})

    qdq.insert(model, {"images": 0.1}, [], key="fp16")
    (found,) = observe.session(model).run(None, {"images": np.ones((1, 3, 8, 8), np.float32)})

    assert not found[:, 0].any()
    assert np.isfinite(found).all()


def test_two_activations_of_a_product_both_get_a_pair(build_model: Callable[..., ir.Model]) -> None:
    nodes = [
        helper.make_node("Transpose", ["images"], ["turned"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["images", "turned"], ["out"], name="attention"),
    ]
    model = build_model(nodes, {}, input_shape=(1, 4, 6))

    placement = qdq.insert(model, {"images": 0.1, "turned": 0.1}, [], key="fp16")

    assert placement.activations == ("images", "turned")


def test_a_layer_without_a_range_is_skipped_and_named(residual_model: ir.Model) -> None:
    scales = scales_of(residual_model)
    del scales["dw_act"]

    placement = qdq.insert(residual_model, scales, [], key="fp16")

    assert placement.skipped == (("block.pointwise", "no range for dw_act"),)


def test_a_quantized_model_and_a_model_without_layers_are_refused(
    residual_model: ir.Model, build_model: Callable[..., ir.Model]
) -> None:
    inserted(residual_model)

    with pytest.raises(ModelError, match="is quantized already"):
        inserted(residual_model)
    with pytest.raises(ModelError, match="no layer to quantize; expected one of Conv"):
        inserted(build_model([helper.make_node("Relu", ["images"], ["out"])], {}))


def test_a_rule_that_matches_nothing_is_refused(residual_model: ir.Model) -> None:
    with pytest.raises(ConfigError, match=r"fp16\[0\]: matches no layer"):
        inserted(residual_model, LayerRule(name="nothing"))


def test_a_shared_weight_has_one_pair(build_model: Callable[..., ir.Model]) -> None:
    nodes = [
        helper.make_node("Conv", ["images", "w"], ["a"]),
        helper.make_node("Conv", ["a", "w"], ["out"]),
    ]
    model = build_model(nodes, {"w": np.ones((3, 3, 1, 1), np.float32)})

    inserted(model)

    assert sum(node.op_type == "QuantizeLinear" for node in model.graph) == 3


def test_a_real_model_passes_onnx_checks(data: Path) -> None:
    model = graph.to_opset(graph.load(data / "models" / "yolox_nano.onnx"), graph.QDQ_OPSET)

    placement = inserted(model, LayerRule(op="Conv", depthwise=True))

    assert (len(placement.layers), len(placement.kept)) == (83, 30)


def test_layers_without_pairs_compute_as_if_they_never_had_any(residual_model: ir.Model) -> None:
    kept = ir.from_proto(ir.to_proto(residual_model))
    inserted(residual_model)
    inserted(kept, LayerRule(name="block.pointwise"), LayerRule(name="head"))

    taken = qdq.without(residual_model, {"pw", "out"})

    assert taken == 5, "two of each, and the one of the Add"
    onnx.checker.check_model(ir.to_proto(residual_model), full_check=True)
    images = np.random.default_rng(1).standard_normal((1, 3, 8, 8)).astype(np.float32)
    assert observe.largest_difference(residual_model, kept, [{"images": images}]) == 0

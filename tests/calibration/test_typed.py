"""FP16 by typing the model: which tensors become float16, where the Casts stand, and what the result computes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from calibration import graph, observe, qdq, typed
from edge.errors import ModelError
from edge.types import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    Build = Callable[..., ir.Model]

DATA = Path(__file__).parents[1] / "data"
HALF, FULL = ir.DataType.FLOAT16, ir.DataType.FLOAT
node = helper.make_node


def typed_and_checked(model: ir.Model, keep: set[str] | None = None, **options: list[str]) -> typed.Typed:
    """``to_fp16``, with ONNX's own checks of every type in the result."""
    result = typed.to_fp16(model, keep or set(), **options)
    proto = ir.to_proto(result.model)
    onnx.checker.check_model(proto, full_check=True)
    onnx.shape_inference.infer_shapes(proto, strict_mode=True, check_type=True)
    return result


def types(model: ir.Model) -> dict[str, ir.DataType | None]:
    values = [*model.graph.inputs, *model.graph.initializers.values(), *(v for n in model.graph for v in n.outputs)]
    return {str(value.name): value.dtype for value in values}


def inputs_of(model: ir.Model, output: str) -> list[str]:
    producer = next(n for n in model.graph if n.outputs[0].name == output)
    return [str(value.name) for value in producer.inputs if value is not None]


def casts(model: ir.Model) -> list[tuple[str, str]]:
    return [(str(n.inputs[0].name), str(n.outputs[0].name)) for n in model.graph if n.op_type == "Cast"]  # type: ignore[union-attr]


def array_of(model: ir.Model, name: str) -> np.ndarray:
    value = model.graph.initializers[name].const_value
    assert value is not None
    return value.numpy()


def test_everything_is_half_but_the_inputs_and_outputs(residual_model: ir.Model) -> None:
    result = typed_and_checked(residual_model)

    found = types(result.model)
    assert casts(result.model) == [("images", "images_fp16"), ("out_fp16", "out")]
    assert {name for name, dtype in found.items() if dtype == FULL} == {"images", "out"}
    assert (result.half, result.kept, result.casts) == (12, (), 2)


def test_inputs_and_outputs_can_be_half_too(residual_model: ir.Model) -> None:
    result = typed_and_checked(residual_model, half_io=["images", "out"])

    assert casts(result.model) == []
    assert {types(result.model)[name] for name in ("images", "out")} == {HALF}


def test_kept_nodes_read_each_other_in_fp32_and_share_their_casts(residual_model: ir.Model) -> None:
    result = typed_and_checked(residual_model, {"dw_sigmoid", "dw_act"})

    assert result.kept == ("dw_sigmoid", "dw_act")
    assert inputs_of(result.model, "dw_sigmoid") == ["dw_fp32"]
    assert inputs_of(result.model, "dw_act") == ["dw_fp32", "dw_sigmoid"]
    assert casts(result.model)[1:-1] == [("dw", "dw_fp32"), ("dw_act", "dw_act_fp16")]


def test_a_kept_node_at_the_border_needs_no_cast(residual_model: ir.Model) -> None:
    result = typed_and_checked(residual_model, {"stem", "out"})

    assert inputs_of(result.model, "stem") == ["images", "w_stem", "b_stem"]
    assert casts(result.model) == [("stem", "stem_fp16"), ("flat", "flat_fp32")]


def test_an_output_that_a_kept_node_reads_is_cast_once(build_model: Build) -> None:
    model = build_model(
        [node("Relu", ["images"], ["a"]), node("Sigmoid", ["a"], ["b"])], {}, outputs=("a", "b"), opset=17
    )

    result = typed_and_checked(model, {"b"})

    assert casts(result.model) == [("images", "images_fp16"), ("a_fp16", "a")]
    assert inputs_of(result.model, "b") == ["a"]


def test_a_weight_of_kept_and_half_nodes_is_there_twice(build_model: Build) -> None:
    model = build_model(
        [node("Add", ["images", "w"], ["a"]), node("Mul", ["a", "w"], ["out"])], {"w": np.float32([0.1])}
    )

    result = typed_and_checked(model, {"a"})

    assert inputs_of(result.model, "a") == ["images", "w"]
    assert inputs_of(result.model, "out_fp16") == ["a_fp16", "w_fp16"]
    assert array_of(result.model, "w") == np.float32(0.1)
    assert array_of(result.model, "w_fp16") == np.float16(0.1)


def test_what_is_beyond_fp16_is_its_largest_number_and_infinity_stays(build_model: Build) -> None:
    model = build_model(
        [node("Add", ["images", "mask"], ["out"])], {"mask": np.float32([-3.4e38, -np.inf, 1, 7e4] * 2)}
    )

    result = typed_and_checked(model)

    assert array_of(result.model, "mask")[:4].tolist() == [-65504, -np.inf, 1, 65504]
    assert result.saturated == ("mask",)


def test_an_epsilon_does_not_become_0_and_small_weights_do(build_model: Build) -> None:
    nodes = [node("Add", ["images", "epsilon"], ["a"]), node("Mul", ["a", "w"], ["out"])]

    result = typed_and_checked(build_model(nodes, {"epsilon": np.float32([1e-12]), "w": np.float32([1e-12, 1] * 4)}))

    assert array_of(result.model, "epsilon") == np.float16(6e-8)
    assert array_of(result.model, "w")[:2].tolist() == [0, 1]


def test_constant_nodes_are_weights(build_model: Build) -> None:
    nodes = [node("Constant", [], ["half"], value_float=0.5), node("Mul", ["images", "half"], ["out"])]

    result = typed_and_checked(build_model(nodes, {}))

    assert array_of(result.model, "half").dtype == np.float16


def test_resize_keeps_its_scales_and_region_in_fp32(build_model: Build) -> None:
    weights = {"roi": np.zeros(8, np.float32), "scales": np.float32([1, 1, 2, 2])}
    model = build_model([node("Resize", ["images", "roi", "scales"], ["out"], mode="nearest")], weights)

    result = typed_and_checked(model)

    assert types(result.model)["images_fp16"] == HALF
    assert {types(result.model)[name] for name in weights} == {FULL}


def test_arithmetic_on_shapes_and_indices_stays_in_fp32(build_model: Build) -> None:
    """Index 8399 is 8400 in FP16."""
    nodes = [
        node("Reshape", ["images", "flat"], ["row"]),
        node("TopK", ["row", "k"], ["top", "index"]),
        node("Cast", ["index"], ["index_float"], to=TensorProto.FLOAT),
        node("Div", ["index_float", "width"], ["y"]),
        node("Floor", ["y"], ["y_floor"]),
        node("Mul", ["top", "y_floor"], ["out"]),
    ]
    weights = {"flat": np.int64([-1]), "k": np.int64([4]), "width": np.float32([8])}

    result = typed_and_checked(build_model(nodes, weights))

    assert result.kept == ("index_float", "y", "y_floor")
    assert types(result.model)["top"] == HALF
    assert casts(result.model)[2:] == [("y_floor", "y_floor_fp16"), ("out_fp16", "out")]


def test_a_cast_to_float_of_the_picture_becomes_one_to_half(build_model: Build) -> None:
    nodes = [
        node("Cast", ["images"], ["wide"], to=TensorProto.DOUBLE),
        node("Cast", ["wide"], ["narrow"], to=TensorProto.FLOAT),
        node("Relu", ["narrow"], ["out"]),
    ]

    result = typed_and_checked(build_model(nodes, {}))

    assert types(result.model)["wide"] == ir.DataType.DOUBLE
    assert types(result.model)["narrow"] == HALF


def test_operators_that_take_no_fp16_get_casts(build_model: Build) -> None:
    nodes = [
        node("Reshape", ["images", "as_boxes"], ["boxes"]),
        node("Reshape", ["images", "as_scores"], ["scores"]),
        node("NonMaxSuppression", ["boxes", "scores", "", "iou"], ["picked"]),
        node("Cast", ["picked"], ["out"], to=TensorProto.FLOAT),
    ]
    weights = {"as_boxes": np.int64([1, 48, 4]), "as_scores": np.int64([1, 4, 48]), "iou": np.float32([0.5])}

    result = typed_and_checked(build_model(nodes, weights))

    assert inputs_of(result.model, "picked") == ["boxes_fp32", "scores_fp32", "iou"]


def test_a_quantized_model_has_fp16_scales_and_keeps_its_names(residual_model: ir.Model) -> None:
    before = quantized(residual_model)
    names = {str(v.name) for n in before.graph for v in n.outputs}

    result = typed_and_checked(ir.from_proto(ir.to_proto(before)))

    found = types(result.model)
    assert result.model.opset_imports[""] == 19
    assert names <= set(found)
    assert {found[name] for name in found if name.endswith(("_scale", "_dequantized"))} == {HALF}
    assert (result.casts, result.raised, result.float_pairs) == (2, (), ())


def test_a_quantized_model_computes_what_it_did(residual_model: ir.Model, rng: np.random.Generator) -> None:
    before = quantized(residual_model)
    tensors = {"images": rng.standard_normal((1, 3, 8, 8)).astype(np.float32)}
    expected = observe.run(observe.session(before), tensors)[0]

    found = reference(typed_and_checked(before).model, tensors)

    # measured: 0.05 to 4 % of the largest over eight inputs, since a rounding may tip a value into the next step
    assert np.abs(found - expected).max() < 0.08 * np.abs(expected).max()


def test_the_scale_of_a_dead_channel_is_raised_and_the_pair_stays_in_int8(residual_model: ir.Model) -> None:
    weight = array_of(residual_model, "w_last").copy()
    weight[2] *= 1e-18
    residual_model.graph.initializers["w_last"].const_value = ir.tensor(weight)

    result = typed_and_checked(quantized(residual_model))

    assert result.raised == ("w_last_axis0_scale",)
    assert array_of(result.model, "w_last_axis0_scale")[2] == np.float16(2**-17)
    assert (result.float_pairs, result.casts) == ((), 2)


@pytest.mark.parametrize("scale", [1e-6, 1e5])
def test_a_pair_whose_scale_fp16_cannot_hold_stays_in_fp32(residual_model: ir.Model, scale: float) -> None:
    result = typed_and_checked(quantized(residual_model, dw_act=scale))

    assert result.float_pairs == ("dw_act_dequantized",)
    assert result.kept == ("dw_act_quantized", "dw_act_dequantized")
    assert ("dw_act_dequantized", "dw_act_dequantized_fp16") in casts(result.model)


def test_stored_integers_keep_the_scale_they_have(build_model: Build) -> None:
    """Raising it would change the weights."""
    weights = {
        "w_int8": np.full((4, 3, 1, 1), 100, np.int8),
        "w_scale": np.float32([1e-7, 1, 1, 1]),
        "zero": np.zeros(4, np.int8),
    }
    nodes = [
        node("DequantizeLinear", ["w_int8", "w_scale", "zero"], ["w"], axis=0),
        node("Conv", ["images", "w"], ["out"]),
    ]

    result = typed_and_checked(build_model(nodes, weights))

    assert (result.raised, result.float_pairs) == ((), ("w",))
    assert array_of(result.model, "w_scale").tolist() == weights["w_scale"].tolist()


def test_bodies_are_refused(build_model: Build) -> None:
    branch = helper.make_graph(
        [node("Relu", ["images"], ["b"])], "b", [], [helper.make_tensor_value_info("b", 1, None)]
    )
    model = build_model(
        [node("If", ["yes"], ["out"], name="choice", then_branch=branch, else_branch=branch)],
        {"yes": np.array(1, bool)},
    )

    with pytest.raises(ModelError, match="If 'choice' has a body, which cannot be typed as FP16"):
        typed.to_fp16(model, ())


def test_names_that_are_not_there_are_refused(residual_model: ir.Model) -> None:
    with pytest.raises(ValueError, match="no such node, input or output: image, stem_conv"):
        typed.to_fp16(residual_model, ["stem_conv"], half_io=["image"])


# measured on six pictures: 1 - cosine of at most 3.1e-5, 2.4e-5 and 5.3e-5 (obj_32)
@pytest.mark.parametrize(
    ("name", "size", "factor"), [("yolox_nano", 416, 1.0), ("fastestdet", 352, 1 / 255), ("yunet_n_320", 320, 1.0)]
)
def test_real_models_compute_nearly_the_same(name: str, size: int, factor: float) -> None:
    model = graph.load(DATA / "models" / f"{name}.onnx")
    entry = str(model.graph.inputs[0].name)
    graph.fix_input(model, TensorSpec(entry, (1, 3, size, size), np.dtype(np.float32)))
    picture = cv2.resize(cv2.imread(str(DATA / "images" / "000000000127.jpg")), (size, size))
    tensors = {entry: np.ascontiguousarray(picture.transpose(2, 0, 1)[None] * np.float32(factor), np.float32)}
    expected = observe.run(observe.session(model), tensors)

    result = typed_and_checked(ir.from_proto(ir.to_proto(model)))

    assert (result.kept, result.saturated) == ((), ())
    for a, b in zip(observe.run(observe.session(result.model), tensors), expected, strict=True):
        assert cosine(a, b) > 0.9998


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([node("Softmax", ["images"], ["out"])], {"out"}),
        (
            [
                node("ReduceMax", ["images"], ["max"], axes=[1]),
                node("Sub", ["images", "max"], ["d"]),
                node("Exp", ["d"], ["e"]),
                node("ReduceSum", ["e", "axis"], ["sum"]),
                node("Div", ["e", "sum"], ["out"]),
            ],
            {"max", "d", "e", "sum", "out"},
        ),
        (
            [
                node("ReduceMean", ["images"], ["mean"], axes=[1]),
                node("Sub", ["images", "mean"], ["d"]),
                node("Pow", ["d", "two"], ["square"]),
                node("ReduceMean", ["square"], ["variance"], axes=[1]),
                node("Add", ["epsilon", "variance"], ["v"]),
                node("Sqrt", ["v"], ["deviation"]),
                node("Div", ["d", "deviation"], ["normal"]),
                node("Mul", ["normal", "two"], ["out"]),
            ],
            {"mean", "d", "square", "variance", "v", "deviation", "normal"},
        ),
        (
            [
                node("Mul", ["images", "images"], ["square"]),
                node("ReduceMean", ["square"], ["mean"], axes=[1]),
                node("Add", ["mean", "epsilon"], ["m"]),
                node("Sqrt", ["m"], ["root"]),
                node("Reciprocal", ["root"], ["inverse"]),
                node("Mul", ["inverse", "images"], ["out"]),
            ],
            {"square", "mean", "m", "root", "inverse", "out"},
        ),
        (
            [
                node("ReduceL2", ["images"], ["length"], axes=[1]),
                node("Clip", ["length", "least"], ["l"]),
                node("Div", ["images", "l"], ["out"]),
            ],
            {"length", "l", "out"},
        ),
    ],
    ids=["softmax", "softmax in parts", "layer norm", "rms norm", "l2"],
)
def test_normalisations_are_found(build_model: Build, nodes: list[onnx.NodeProto], expected: set[str]) -> None:
    weights = {
        "axis": np.int64([1]),
        "two": np.float32([2]),
        "epsilon": np.float32([1e-5]),
        "least": np.array(1e-6, np.float32),
    }

    assert typed.norm_layers(build_model(nodes, weights)) == expected


@pytest.mark.parametrize(
    "nodes",
    [
        [node("Div", ["images", "two"], ["out"])],
        [node("ReduceMean", ["images"], ["m"], axes=[1]), node("Mul", ["images", "m"], ["out"])],  # squeeze and excite
        [
            node("Relu", ["images"], ["r"]),
            node("ReduceSum", ["r", "axis"], ["s"]),
            node("Div", ["images", "s"], ["out"]),  # of something else
        ],
        [node("ReduceSum", ["images", "axis"], ["s"]), node("Div", ["s", "images"], ["out"])],
    ],
    ids=["scaling", "attention", "another sum", "the other way round"],
)
def test_what_only_looks_like_a_normalisation_is_not(build_model: Build, nodes: list[onnx.NodeProto]) -> None:
    assert typed.norm_layers(build_model(nodes, {"axis": np.int64([1]), "two": np.float32([2])})) == set()


def quantized(model: ir.Model, **scales: float) -> ir.Model:
    """The model with a pair on every input of its convolutions and products."""
    names = ["images", *(str(value.name) for n in model.graph for value in n.outputs)]
    qdq.insert(model, dict.fromkeys(names, 0.05) | scales, [], key="fp16")
    return model


def reference(model: ir.Model, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """ONNX's own implementation: onnxruntime 1.18 quantizes float16 by cutting off, not by rounding."""
    with np.errstate(all="ignore"):
        return ReferenceEvaluator(ir.to_proto(model)).run(None, tensors)[0]  # type: ignore[return-value, no-any-return]


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    x, y = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    return float(x @ y / np.sqrt((x @ x) * (y @ y)))

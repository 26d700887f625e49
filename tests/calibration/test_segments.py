"""A model in segments is the same model, in less memory."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from calibration import graph, observe, segments

if TYPE_CHECKING:
    from collections.abc import Callable

    from calibration.segments import Plan

node = helper.make_node


def names_of(model: ir.Model) -> list[str]:
    return observe.activations(model)[1]


def proto(plan: Plan, index: int) -> onnx.GraphProto:
    model = onnx.load_from_string(plan.model(index))
    onnx.checker.check_model(model)
    return model.graph


def assert_sound(plan: Plan) -> None:
    """Nothing is read before it is there, and nothing lies on something that is still needed."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for number, segment in enumerate(plan.segments):
        for name in segment.inputs:
            assert name in plan.inputs or name in first
            last[name] = number
        first.update(dict.fromkeys(segment.outputs, number))
        last.update(dict.fromkeys(segment.outputs, number))
    for number in range(len(plan.segments)):
        live = sorted(
            (slot.offset, slot.offset + slot.nbytes, name)
            for name, slot in plan.slots.items()
            if first[name] <= number <= last[name]
        )
        for (_, end, one), (begin, _, other) in itertools.pairwise(live):
            assert end <= begin, f"{one} and {other} overlap in segment {number}"
        assert not live or live[-1][1] <= plan.arena_bytes
    assert all(slot.offset % segments.ALIGNMENT == 0 for slot in plan.slots.values())


@pytest.mark.parametrize("most_bytes", [0, 2048, 3000, 4096, 5000, 1 << 20])
def test_each_operator_is_in_one_segment_whatever_the_size(residual_model: ir.Model, most_bytes: int) -> None:
    plan = segments.cut(residual_model, names_of(residual_model), most_bytes=most_bytes)

    assert_sound(plan)
    operators = [part.op_type for index in range(len(plan.segments)) for part in proto(plan, index).node]
    assert operators == [part.op_type for part in residual_model.graph]
    assert sum(segment.operators for segment in plan.segments) == len(operators)
    assert {name for segment in plan.segments for name in segment.outputs} == set(names_of(residual_model))


def test_one_segment_is_enough_if_all_fits(residual_model: ir.Model) -> None:
    names = names_of(residual_model)
    together = sum(
        math.ceil(math.prod(value.shape.numpy()) * 4 / 64) * 64
        for part in residual_model.graph
        for value in part.outputs
    )

    assert len(segments.cut(residual_model, names, most_bytes=together).segments) == 1
    assert len(segments.cut(residual_model, names, most_bytes=together - 1).segments) > 1


def test_less_memory_means_more_segments_down_to_one_for_each_operator(residual_model: ir.Model) -> None:
    names = names_of(residual_model)
    sizes = (20_000, 7000, 5200, 4096)
    plans = [segments.cut(residual_model, names, most_bytes=size) for size in sizes]

    counts = [len(plan.segments) for plan in plans]
    assert counts == sorted(set(counts))
    assert all(plan.arena_bytes <= size for plan, size in zip(plans, sizes, strict=True))
    assert len(segments.cut(residual_model, names, most_bytes=0).segments) == len(residual_model.graph)


def test_what_cannot_be_cut_finer_says_what_it_takes(residual_model: ir.Model) -> None:
    plan = segments.cut(residual_model, names_of(residual_model), most_bytes=100)

    # The Mul reads two tensors of 4 x 8 x 8 float32 and makes a third, while 'stem_act' waits for the Add.
    assert plan.arena_bytes == 4 * 4 * 8 * 8 * 4


def test_a_segment_has_its_own_weights_only(residual_model: ir.Model) -> None:
    plan = segments.cut(residual_model, names_of(residual_model), most_bytes=0)

    weights = [[tensor.name for tensor in proto(plan, index).initializer] for index in range(len(plan.segments))]

    assert [sorted(names) for names in weights if names] == [
        ["b_stem", "w_stem"],
        ["w_dw"],
        ["w_pw"],
        ["w_last"],
        ["b_head", "w_head"],
    ]
    assert plan.segments[0].weight_bytes == (4 * 3 * 3 * 3 + 4) * 4


def test_constants_are_computed_where_they_are_needed(build_model: Callable[..., ir.Model]) -> None:
    nodes = [
        node("Constant", [], ["two"], value_float=2.0),
        node("Mul", ["two", "weight"], ["four"]),
        node("Mul", ["images", "four"], ["first"]),
        node("Relu", ["first"], ["second"]),
        node("Mul", ["second", "four"], ["out"]),
    ]
    model = build_model(nodes, {"weight": np.float32([2.0])})

    plan = segments.cut(model, names_of(model), most_bytes=0)

    operators = [[part.op_type for part in proto(plan, index).node] for index in range(3)]
    assert operators == [["Constant", "Mul", "Mul"], ["Relu"], ["Constant", "Mul", "Mul"]]
    assert [segment.operators for segment in plan.segments] == [1, 1, 1]
    assert [segment.inputs for segment in plan.segments] == [("images",), ("first",), ("second",)]


def test_integers_that_a_later_segment_needs_are_kept(build_model: Callable[..., ir.Model]) -> None:
    nodes = [
        node("ArgMax", ["images"], ["where"], axis=1),
        node("Relu", ["images"], ["positive"]),
        node("Cast", ["where"], ["index"], to=TensorProto.FLOAT),
        node("Add", ["index", "positive"], ["out"]),
    ]
    model = build_model(nodes, {})

    plan = segments.cut(model, names_of(model), most_bytes=0)

    assert_sound(plan)
    assert plan.segments[0].outputs == ("where",)
    assert plan.slots["where"].dtype == np.int64
    one = segments.cut(model, names_of(model), most_bytes=1 << 20)
    assert one.segments[0].outputs == ("positive", "index", "out")


def test_what_no_observed_tensor_needs_is_left_out(build_model: Callable[..., ir.Model]) -> None:
    nodes = [
        node("Relu", ["images"], ["out"]),
        node("ArgMax", ["out"], ["label"], axis=1),
        node("Neg", ["label"], ["negative"]),
    ]
    model = build_model(nodes, {})

    plan = segments.cut(model, names_of(model), most_bytes=1 << 20)

    assert [part.op_type for part in proto(plan, 0).node] == ["Relu"]


def test_what_a_body_reads_of_the_graph_around_it_is_an_input(build_model: Callable[..., ir.Model]) -> None:
    result = helper.make_tensor_value_info
    scaled = helper.make_graph(
        [node("Mul", ["positive", "weight"], ["scaled"])], "then", [], [result("scaled", TensorProto.FLOAT, None)]
    )
    plain = helper.make_graph(
        [node("Neg", ["images"], ["negative"])], "else", [], [result("negative", TensorProto.FLOAT, None)]
    )
    nodes = [
        node("Relu", ["images"], ["positive"]),
        node("ReduceSum", ["images"], ["sum"], keepdims=0),
        node("Greater", ["sum", "zero"], ["bright"]),
        node("If", ["bright"], ["out"], then_branch=scaled, else_branch=plain),
    ]
    model = build_model(nodes, {"weight": np.float32([2.0]), "zero": np.float32(0)})

    plan = segments.cut(model, names_of(model), most_bytes=0)

    assert_sound(plan)
    assert set(plan.segments[-1].inputs) == {"bright", "positive", "images"}
    assert [tensor.name for tensor in proto(plan, 3).initializer] == ["weight"]


def test_a_tensor_whose_shape_depends_on_the_picture_has_no_place_in_the_arena(
    build_model: Callable[..., ir.Model],
) -> None:
    nodes = [
        node("NonZero", ["images"], ["where"]),
        node("Cast", ["where"], ["index"], to=TensorProto.FLOAT),
        node("ReduceSum", ["index"], ["out"], keepdims=0),
    ]
    model = build_model(nodes, {})

    plan = segments.cut(model, names_of(model), most_bytes=0)

    assert [segment.outputs for segment in plan.segments] == [("index",), ("out",)]
    assert set(plan.slots) == {"out"}


def test_no_border_is_where_a_sequence_would_cross_it(build_model: Callable[..., ir.Model]) -> None:
    nodes = [
        node("Relu", ["images"], ["positive"]),
        node("SplitToSequence", ["positive"], ["parts"], axis=1, keepdims=1),
        node("Neg", ["images"], ["negative"]),
        node("SequenceAt", ["parts", "one"], ["part"]),
        node("Add", ["part", "negative"], ["out"]),
    ]
    model = build_model(nodes, {"one": np.int64(1)})

    plan = segments.cut(model, names_of(model), most_bytes=0)

    operators = [[part.op_type for part in proto(plan, index).node] for index in range(len(plan.segments))]
    assert operators == [["Relu"], ["SplitToSequence", "Neg", "SequenceAt"], ["Add"]]


@pytest.mark.parametrize("most_bytes", [0, 9 << 20, 16 << 20, 50 << 20, 1 << 30])
def test_a_real_detector_takes_what_it_is_allowed(data: Path, most_bytes: int) -> None:
    model = graph.load(data / "models" / "yolox_nano.onnx")
    ir.passes.common.ShapeInferencePass()(model)
    names = names_of(model)

    plan = segments.cut(model, names, most_bytes=most_bytes)

    assert_sound(plan)
    assert sum(segment.operators for segment in plan.segments) == len(model.graph)
    # All activations of a picture take 121 MiB.
    assert plan.arena_bytes <= max(most_bytes, 8 << 20)
    assert (len(plan.segments) == 1) == (most_bytes == 1 << 30)

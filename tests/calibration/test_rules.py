"""What the graph says about ranges that measuring left open, and which tensors the DLA wants in one scale."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from calibration import graph, observe, ranges, rules
from calibration.histogram import Histogram
from calibration.ranges import Range, Ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from onnx import NodeProto

node = helper.make_node


def measured(amax: Mapping[str, float]) -> Ranges:
    """Ranges as ``select`` gives them: 0.0 stands for a tensor that was zero on every picture."""
    entries = {
        name: Range(
            amax=value or ranges.ZERO_AMAX,
            scale=float(np.float32((value or ranges.ZERO_AMAX) / 127)),
            source="measured" if value else "zero",
            method="max" if value else None,
            observed_amax=value,
        )
        for name, value in amax.items()
    }
    return Ranges(method="max", images=1, tensors=entries)


@pytest.fixture
def completed(build_model: Callable[..., ir.Model]) -> Callable[..., Ranges]:
    """Complete what was measured of a model of these nodes."""

    def run(
        nodes: list[NodeProto],
        amax: Mapping[str, float],
        *,
        ties: str = "none",
        weights: dict[str, np.ndarray] | None = None,
        **more: object,
    ) -> Ranges:
        return rules.complete(build_model(nodes, weights or {}, **more), measured(amax), ties=ties)  # type: ignore[arg-type]

    return run


def amax(found: Ranges) -> dict[str, float]:
    return {name: entry.amax for name, entry in found.tensors.items()}


class TestBounded:
    @pytest.mark.parametrize("op", ["Sigmoid", "HardSigmoid", "Softmax", "Tanh"])
    @pytest.mark.parametrize("known", [{}, {"out": 0.0}, {"out": 1.5}])
    def test_a_bounded_output_always_has_a_range_and_never_one_beyond_its_bound(
        self, completed: Callable[..., Ranges], op: str, known: dict[str, float]
    ) -> None:
        found = completed([node(op, ["images"], ["out"])], {"images": 9.0, **known})

        entry = found.tensors["out"]
        assert (entry.amax, entry.source, entry.clipped) == (1.0, "bounded", 0.0)
        assert entry.scale == float(np.float32(1 / 127))
        assert entry.observed_amax == known.get("out")
        assert not found.missing

    def test_a_finer_measured_range_is_kept(self, completed: Callable[..., Ranges]) -> None:
        found = completed([node("Sigmoid", ["images"], ["out"])], {"images": 9.0, "out": 0.01})

        assert (found.tensors["out"].amax, found.tensors["out"].source) == (0.01, "measured")

    def test_relu_is_not_bounded_and_a_dead_one_keeps_what_measuring_gave(
        self, completed: Callable[..., Ranges]
    ) -> None:
        found = completed([node("Relu", ["images"], ["out"])], {"images": 9.0, "out": 0.0})

        assert (found.tensors["out"].amax, found.tensors["out"].source) == (ranges.ZERO_AMAX, "zero")


CHAIN = [
    node("Relu", ["images"], ["relu"]),
    node("Identity", ["relu"], ["same"]),
    node("Transpose", ["same"], ["turned"], perm=[0, 2, 3, 1]),
    node("Unsqueeze", ["turned", "axis"], ["longer"]),
    node("Squeeze", ["longer", "axis"], ["shorter"]),
    node("Dropout", ["shorter"], ["dropped"]),
    node("Reshape", ["dropped", "shape"], ["shaped"]),
    node("Flatten", ["shaped"], ["out"]),
]
CHAIN_WEIGHTS = {"axis": np.array([0]), "shape": np.array([1, -1, 8])}


class TestSame:
    @pytest.mark.parametrize("known", ["relu", "turned", "out"])
    def test_a_range_passes_both_ways_through_a_chain_that_keeps_the_values(
        self, completed: Callable[..., Ranges], known: str
    ) -> None:
        found = completed(CHAIN, {"images": 9.0, known: 3.0}, weights=CHAIN_WEIGHTS)

        assert not found.missing
        others = {name: entry for name, entry in found.tensors.items() if name not in ("images", known)}
        assert len(others) == 7
        assert all((entry.amax, entry.source, entry.method) == (3.0, "same", "max") for entry in others.values())
        assert all(entry.of in found.tensors and entry.observed_amax is None for entry in others.values())
        assert found.tensors["images"].amax == 9.0

    def test_a_relu_ends_the_chain(self, completed: Callable[..., Ranges]) -> None:
        found = completed(CHAIN, {"images": 9.0}, weights=CHAIN_WEIGHTS)

        assert list(found.tensors) == ["images"]
        assert found.missing["relu"] == "not observed, computed by Relu"
        assert set(found.missing) == {"relu", "same", "turned", "longer", "shorter", "dropped", "shaped", "out"}

    @pytest.mark.parametrize(
        ("part", "weights"),
        [
            (node("Slice", ["x", "i", "j"], ["out"]), {"i": np.array([0]), "j": np.array([1])}),
            (node("Gather", ["x", "i"], ["out"], axis=1), {"i": np.array([0, 2])}),
            (node("MaxPool", ["x"], ["out"], kernel_shape=[9, 9], pads=[4, 4, 4, 4]), {}),
            (node("GlobalAveragePool", ["x"], ["out"]), {}),
            (node("Pad", ["x", "i"], ["out"]), {"i": np.array([0, 0, 1, 1, 0, 0, 1, 1])}),
            (node("Pad", ["x", "i", "v"], ["out"]), {"i": np.array([0, 0, 1, 1] * 2), "v": np.float32(0)}),
            (node("Pad", ["x", "i", "v"], ["out"], mode="edge"), {"i": np.array([0, 0, 1, 1] * 2), "v": np.float32(7)}),
            (node("Resize", ["x", "", "s"], ["out"], mode="linear"), {"s": np.float32([1, 1, 2, 2])}),
        ],
        ids=lambda value: value.op_type if hasattr(value, "op_type") else "",
    )
    def test_a_part_takes_the_range_of_the_whole_and_never_the_other_way(
        self, completed: Callable[..., Ranges], part: NodeProto, weights: dict[str, np.ndarray]
    ) -> None:
        nodes = [node("Relu", ["images"], ["x"]), part]

        down = completed(nodes, {"images": 9.0, "x": 3.0, "out": 0.0}, weights=weights)
        up = completed(nodes, {"images": 9.0, "out": 3.0}, weights=weights)

        assert (down.tensors["out"].amax, down.tensors["out"].source, down.tensors["out"].of) == (3.0, "same", "x")
        assert list(up.missing) == ["x"]

    @pytest.mark.parametrize(
        ("other", "weights"),
        [
            (node("Pad", ["x", "i", "v"], ["out"]), {"i": np.array([0, 0, 1, 1] * 2), "v": np.float32(7)}),
            (node("Resize", ["x", "", "s"], ["out"], mode="cubic"), {"s": np.float32([1, 1, 2, 2])}),
            (node("Dropout", ["x", "", "yes"], ["out"]), {"yes": np.array(True)}),
            (node("Mul", ["x", "x"], ["out"]), {}),
        ],
        ids=["pad with 7", "cubic", "training", "product"],
    )
    def test_what_makes_values_of_its_own_passes_no_range(
        self, completed: Callable[..., Ranges], other: NodeProto, weights: dict[str, np.ndarray]
    ) -> None:
        nodes = [node("Relu", ["images"], ["x"]), other]

        assert list(completed(nodes, {"images": 9.0, "x": 3.0}, weights=weights).missing) == ["out"]

    def test_every_output_of_a_split_lies_within_its_input(self, completed: Callable[..., Ranges]) -> None:
        nodes = [node("Split", ["images", "sizes"], ["a", "b"], axis=1), node("Relu", ["a"], ["out"])]

        found = completed(nodes, {"images": 9.0, "b": 2.0, "out": 1.0}, weights={"sizes": np.array([1, 2])})

        assert amax(found) == {"images": 9.0, "a": 9.0, "b": 2.0, "out": 1.0}

    def test_a_measured_part_keeps_its_finer_range(self, completed: Callable[..., Ranges]) -> None:
        nodes = [node("MaxPool", ["images"], ["out"], kernel_shape=[2, 2])]

        assert completed(nodes, {"images": 9.0, "out": 3.0}).tensors["out"].source == "measured"

    def test_a_concat_is_as_wide_as_its_widest_input(self, completed: Callable[..., Ranges]) -> None:
        nodes = [node("Relu", ["images"], ["x"]), node("Concat", ["images", "x"], ["out"], axis=1)]

        found = completed(nodes, {"images": 9.0, "x": 3.0})

        assert (found.tensors["out"].amax, found.tensors["out"].of) == (9.0, "images")

    def test_a_concat_with_an_unknown_input_stays_unknown_and_a_known_one_covers_its_inputs(
        self, completed: Callable[..., Ranges]
    ) -> None:
        nodes = [node("Relu", ["images"], ["x"]), node("Concat", ["images", "x"], ["out"], axis=1)]

        assert set(completed(nodes, {"images": 9.0}).missing) == {"x", "out"}
        assert completed(nodes, {"out": 9.0}).tensors["x"].amax == 9.0

    def test_a_constant_input_of_a_concat_may_be_the_widest(self, completed: Callable[..., Ranges]) -> None:
        nodes = [node("Concat", ["images", "w"], ["out"], axis=1)]

        found = completed(nodes, {"images": 9.0}, weights={"w": np.full((1, 1, 8, 8), 50, np.float32)})

        assert list(found.missing) == ["out"]

    def test_a_zero_tensor_takes_the_range_of_the_whole_that_it_is_a_part_of(
        self, completed: Callable[..., Ranges]
    ) -> None:
        nodes = [node("Split", ["images", "sizes"], ["a", "b"], axis=1), node("Relu", ["a"], ["out"])]

        found = completed(nodes, {"images": 9.0, "a": 0.0, "b": 9.0, "out": 0.0}, weights={"sizes": np.array([1, 2])})

        entry = found.tensors["a"]
        assert (entry.amax, entry.source, entry.of, entry.observed_amax) == (9.0, "same", "images", 0.0)
        assert found.tensors["out"].source == "zero"


class TestTied:
    def test_pooling_has_one_range_for_input_and_output(self, completed: Callable[..., Ranges]) -> None:
        nodes = [node("AveragePool", ["images"], ["out"], kernel_shape=[2, 2])]

        found = completed(nodes, {"images": 9.0, "out": 3.0}, ties="dla")

        entry = found.tensors["out"]
        assert (entry.amax, entry.source, entry.of, entry.alone) == (9.0, "tied", "images", 3.0)
        assert entry.scale == found.tensors["images"].scale
        assert found.tensors["images"].source == "measured"
        assert found.tensors["images"].alone is None

    def test_none_ties_nothing(self, completed: Callable[..., Ranges]) -> None:
        nodes = [node("AveragePool", ["images"], ["out"], kernel_shape=[2, 2])]

        assert amax(completed(nodes, {"images": 9.0, "out": 3.0})) == {"images": 9.0, "out": 3.0}

    @pytest.mark.parametrize(
        "attributes",
        [
            {"kernel_shape": [9, 9], "pads": [4, 4, 4, 4]},
            {"kernel_shape": [2, 2], "strides": [17, 17]},
            {"kernel_shape": [2, 2], "dilations": [2, 2]},
        ],
    )
    def test_pooling_beyond_the_limits_of_the_dla_runs_on_the_gpu_and_ties_nothing(
        self, completed: Callable[..., Ranges], attributes: dict[str, list[int]]
    ) -> None:
        nodes = [node("MaxPool", ["images"], ["out"], **attributes)]

        found = completed(nodes, {"images": 9.0, "out": 3.0}, ties="dla", input_shape=(1, 3, 20, 20))

        assert amax(found) == {"images": 9.0, "out": 3.0}

    def test_concat_has_one_range_for_all(self, completed: Callable[..., Ranges]) -> None:
        nodes = [
            node("Relu", ["images"], ["a"]),
            node("Sigmoid", ["images"], ["b"]),
            node("Concat", ["a", "b"], ["out"], axis=-3),
        ]

        found = completed(nodes, {"images": 20.0, "a": 9.0, "b": 0.5, "out": 8.5}, ties="dla")

        assert amax(found) == {"images": 20.0, "a": 9.0, "b": 9.0, "out": 9.0}
        assert rules.costs(found) == [("b", 18.0)]

    @pytest.mark.parametrize(
        ("axis", "shape"), [(2, (1, 3, 8, 8)), (1, (1, 3, 8)), (1, (1, 3, 1, 8400)), (1, ("n", 3, 8, 8))]
    )
    def test_a_concat_that_the_dla_does_not_take_ties_nothing(
        self, completed: Callable[..., Ranges], axis: int, shape: tuple[int | str, ...]
    ) -> None:
        nodes = [node("Relu", ["images"], ["a"]), node("Concat", ["images", "a"], ["out"], axis=axis)]

        found = completed(nodes, {"images": 9.0, "a": 3.0, "out": 8.0}, ties="dla", input_shape=shape)

        assert amax(found) == {"images": 9.0, "a": 3.0, "out": 8.0}

    @pytest.mark.parametrize("op", ["Add", "Sub", "Max", "Min", "Sum"])
    def test_the_inputs_of_an_elementwise_layer_share_a_range_and_its_output_has_its_own(
        self, completed: Callable[..., Ranges], op: str
    ) -> None:
        nodes = [node("Relu", ["images"], ["a"]), node(op, ["images", "a"], ["out"])]

        found = completed(nodes, {"images": 9.0, "a": 3.0, "out": 12.0}, ties="dla")

        assert amax(found) == {"images": 9.0, "a": 9.0, "out": 12.0}

    def test_the_two_sides_of_a_product_are_not_tied(self, completed: Callable[..., Ranges]) -> None:
        nodes = [node("Sigmoid", ["images"], ["gate"]), node("Mul", ["images", "gate"], ["out"])]
        known = {"images": 9.0, "gate": 1.0, "out": 9.0}

        assert amax(completed(nodes, known, ties="dla")) == known

    def test_a_constant_operand_ties_nothing_and_gets_no_range(self, completed: Callable[..., Ranges]) -> None:
        nodes = [node("Neg", ["w"], ["minus"]), node("Add", ["images", "minus"], ["out"])]

        found = completed(nodes, {"images": 9.0, "out": 3.0}, ties="dla", weights={"w": np.float32([100])})

        assert amax(found) == {"images": 9.0, "out": 3.0}
        assert not found.missing

    def test_groups_that_share_a_tensor_are_one_even_in_a_ring(self, completed: Callable[..., Ranges]) -> None:
        pool = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
        nodes = [
            node("Relu", ["images"], ["a"]),
            node("MaxPool", ["a"], ["b"], **pool),
            node("MaxPool", ["b"], ["c"], **pool),
            node("Concat", ["a", "b", "c"], ["d"], axis=1),
            node("Identity", ["c"], ["e"]),
            node("Add", ["e", "a"], ["f"]),
            node("Relu", ["d"], ["g"]),
            node("Add", ["f", "images"], ["out"]),
        ]
        known = {"images": 2.0, "a": 3.0, "b": 4.0, "c": 7.0, "d": 5.0, "e": 7.0, "f": 1.0, "g": 1.5, "out": 3.0}

        found = completed(nodes, known, ties="dla")

        wide = dict.fromkeys("abcde", 7.0)
        assert amax(found) == {**known, **wide, "f": 2.0}
        assert {entry.of for entry in found.tensors.values() if entry.source == "tied"} == {"c", "images"}

    def test_a_diamond_ties_its_branches_where_they_meet_and_not_their_stem(
        self, completed: Callable[..., Ranges], rng: np.random.Generator
    ) -> None:
        weights = {name: rng.standard_normal((3, 3, 1, 1)).astype(np.float32) for name in "wv"}
        nodes = [
            node("Relu", ["images"], ["stem"]),
            node("Conv", ["stem", "w"], ["left"]),
            node("Conv", ["stem", "v"], ["right"]),
            node("Add", ["left", "right"], ["out"]),
        ]
        known = {"images": 9.0, "stem": 8.0, "left": 2.0, "right": 3.0, "out": 4.0}

        assert amax(completed(nodes, known, ties="dla", weights=weights)) == {**known, "left": 3.0}

    def test_a_tensor_that_never_woke_up_does_not_widen_its_group(self, completed: Callable[..., Ranges]) -> None:
        nodes = [node("Relu", ["images"], ["dead"]), node("Add", ["images", "dead"], ["out"])]

        found = completed(nodes, {"images": 0.25, "dead": 0.0, "out": 0.25}, ties="dla")

        assert amax(found) == {"images": 0.25, "dead": 0.25, "out": 0.25}
        assert found.tensors["dead"].source == "tied"

    def test_a_group_that_never_woke_up_keeps_what_measuring_gave(self, completed: Callable[..., Ranges]) -> None:
        nodes = [node("Relu", ["images"], ["dead"]), node("Add", ["images", "dead"], ["out"])]

        found = completed(nodes, {"images": 0.0, "dead": 0.0, "out": 0.0}, ties="dla")

        assert {entry.source for entry in found.tensors.values()} == {"zero"}

    def test_a_member_that_was_not_observed_stays_missing(self, completed: Callable[..., Ranges]) -> None:
        nodes = [node("Relu", ["images"], ["a"]), node("Add", ["images", "a"], ["out"])]

        found = completed(nodes, {"images": 9.0, "out": 9.0}, ties="dla")

        assert list(found.missing) == ["a"]

    def test_a_tied_range_reaches_a_dead_tensor_of_the_same_values(self, completed: Callable[..., Ranges]) -> None:
        nodes = [
            node("Relu", ["images"], ["dead"]),
            node("Transpose", ["dead"], ["turned"], perm=[0, 1, 3, 2]),
            node("Add", ["images", "turned"], ["out"]),
        ]

        found = completed(nodes, {"images": 0.25, "dead": 0.0, "turned": 0.0, "out": 0.25}, ties="dla")

        assert (found.tensors["dead"].source, found.tensors["dead"].of) == ("same", "turned")
        assert amax(found)["dead"] == 0.25

    def test_a_wider_range_clips_less(self, build_model: Callable[..., ir.Model]) -> None:
        model = build_model([node("MaxPool", ["images"], ["out"], kernel_shape=[2, 2])], {})
        known = measured({"images": 9.0})
        clipping = Range(amax=3.0, scale=3 / 127, source="measured", observed_amax=8.0, clipped=0.01)
        given_ranges = Ranges(method="entropy", images=1, tensors={**known.tensors, "out": clipping})

        assert rules.complete(model, given_ranges, ties="dla").tensors["out"].clipped == 0.0


class TestNamed:
    def test_what_only_layers_without_int8_touch_is_named_and_what_others_read_is_not(
        self, completed: Callable[..., Ranges], rng: np.random.Generator
    ) -> None:
        nodes = [
            node("LayerNormalization", ["images", "w"], ["normal"]),
            node("Softmax", ["normal"], ["soft"], name="attention"),
            node("MatMul", ["soft", "m"], ["out"]),
        ]
        weights = {"w": np.ones(8, np.float32), "m": rng.standard_normal((8, 8)).astype(np.float32)}

        found = completed(nodes, {"images": 9.0, "normal": 3.0, "soft": 1.0, "out": 2.0}, weights=weights)

        assert list(found.fp16_only) == ["images", "normal"]
        assert found.fp16_only["normal"] == (
            "only LayerNormalization and Softmax 'attention' use it, and TensorRT has Normalization and SoftMax in"
            " floating point alone"
        )
        assert amax(found)["soft"] == 1.0

    def test_integers_need_neither_a_range_nor_a_reason(self, completed: Callable[..., Ranges]) -> None:
        nodes = [
            node("TopK", ["images", "k"], ["top", "indices"]),
            node("Cast", ["indices"], ["out"], to=TensorProto.FLOAT),
        ]

        found = completed(nodes, {"images": 9.0}, weights={"k": np.array([1])})

        assert list(found.missing) == ["top", "out"]
        assert list(found.fp16_only) == ["images", "top"]

    def test_tensors_in_a_body_and_of_other_types_are_named(self, completed: Callable[..., Ranges]) -> None:
        body = helper.make_graph(
            [node("Neg", ["images"], ["inner"])], "body", [], [helper.make_tensor_value_info("inner", 1, None)]
        )
        nodes = [
            node("If", ["yes"], ["either"], then_branch=body, else_branch=body),
            node("Cast", ["either"], ["double"], to=TensorProto.DOUBLE),
            node("Cast", ["double"], ["out"], to=TensorProto.FLOAT),
        ]

        found = completed(nodes, {"images": 9.0, "either": 9.0, "out": 9.0}, weights={"yes": np.array(True)})

        assert found.missing == {
            "inner": "not observed, computed by Neg, in the body of another node",
            "double": "not observed, computed by Cast, as DOUBLE",
        }

    def test_an_output_of_unknown_type_is_named(self, build_model: Callable[..., ir.Model]) -> None:
        model = build_model([node("Relu", ["images"], ["x"]), node("Relu", ["x"], ["out"])], {})
        custom = ir.Node("acme", "Secret", [model.graph[0].outputs[0]], num_outputs=1, name="vault")
        custom.outputs[0].name = "secret"
        model.graph.insert_after(model.graph[0], custom)

        found = rules.complete(model, measured({"images": 9.0, "x": 9.0, "out": 9.0}), ties="none")

        assert found.missing == {"secret": "not observed, computed by Secret 'vault', as a type that is not known"}

    def test_a_reason_that_was_given_is_kept(self, build_model: Callable[..., ir.Model]) -> None:
        model = build_model([node("Relu", ["images"], ["out"])], {})
        told = Ranges(method="max", images=1, tensors={}, missing={"out": "told so"}, fp16_only={"out": "a rule"})

        found = rules.complete(model, told, ties="dla")

        assert found.missing == {"images": "not observed, an input of the model", "out": "told so"}
        assert found.fp16_only == {"out": "a rule"}

    def test_constants_and_what_is_computed_from_them_are_unquantized(
        self, build_model: Callable[..., ir.Model]
    ) -> None:
        nodes = [
            node("Transpose", ["w"], ["w_t"]),
            node("Shape", ["images"], ["shape"]),
            node("Cast", ["shape"], ["sizes"], to=TensorProto.FLOAT),
            node("RandomNormal", [], ["noise"], shape=[1]),
            node("MatMul", ["images", "w_t"], ["product"]),
            node("Add", ["product", "noise"], ["out"]),
        ]
        model = build_model(nodes, {"w": np.ones((8, 8), np.float32)})

        assert rules.unquantized(model) == {"w", "w_t", "shape", "sizes"}


BRANCHES = [
    node("Relu", ["images"], ["a"]),
    node("Sigmoid", ["a"], ["b"]),
    node("Transpose", ["b"], ["c"], perm=[0, 1, 3, 2]),
    node("MaxPool", ["a"], ["d"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
    node("Concat", ["c", "d"], ["e"], axis=1),
    node("Split", ["e"], ["f", "g"], axis=1),
    node("Add", ["f", "a"], ["h"]),
    node("Identity", ["h"], ["i"]),
    node("Sub", ["i", "g"], ["out"]),
]
BRANCH_NAMES = ["images", *"abcdefghi", "out"]


@pytest.mark.parametrize("ties", ["dla", "none"])
@given(
    known=st.dictionaries(st.sampled_from(BRANCH_NAMES), st.sampled_from([0.0, 0.25, 1.0, 3.0, 9.0])),
    seed=st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_completing_again_and_in_any_order_gives_the_same(
    build_model: Callable[..., ir.Model], known: dict[str, float], seed: random.Random, ties: str
) -> None:
    model = build_model(BRANCHES, {}, opset=13)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    shuffled = list(known.items())
    seed.shuffle(shuffled)

    found = rules.complete(model, measured(known), ties=ties)  # type: ignore[arg-type]
    other = rules.complete(model, measured(dict(shuffled)), ties=ties)  # type: ignore[arg-type]
    again = rules.complete(model, found, ties=ties)  # type: ignore[arg-type]

    assert ranges.render(found) == ranges.render(other) == ranges.render(again)
    assert found.tensors.keys() | found.missing.keys() == set(BRANCH_NAMES)
    assert not found.tensors.keys() & found.missing.keys()
    assert all(entry.amax >= (entry.observed_amax or 0.0) or name == "b" for name, entry in found.tensors.items())
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


class TestRealModel:
    @pytest.fixture
    def model(self, data: Path) -> ir.Model:
        loaded = graph.load(data / "models" / "yolox_nano.onnx")
        return ir.passes.common.ShapeInferencePass()(loaded).model

    @pytest.fixture
    def observed(self, model: ir.Model, rng: np.random.Generator) -> Ranges:
        """What is measured on noise."""
        exposed = ir.from_proto(ir.to_proto(model))
        (images,) = exposed.graph.inputs
        names = [str(value.name) for part in exposed.graph for value in part.outputs if value.dtype == images.dtype]
        exposed.graph.outputs.extend(
            v for part in exposed.graph for v in part.outputs if v.name in names and not v.is_graph_output()
        )
        picture = rng.uniform(0, 255, (1, 3, 416, 416)).astype(np.float32)
        arrays = observe.run(observe.session(exposed), {"images": picture}, names)
        histograms = {name: Histogram() for name in ["images", *names]}
        for name, array in zip(histograms, [picture, *arrays], strict=True):
            histograms[name].add(array)
        return ranges.select(histograms, method="max", images=1)

    def test_every_activation_of_yolox_has_a_range_and_no_weight_has(self, model: ir.Model, observed: Ranges) -> None:
        found = rules.complete(model, observed, ties="dla")

        activations = {str(v.name) for part in model.graph for v in part.outputs if v.dtype == ir.DataType.FLOAT}
        assert found.tensors.keys() == {"images"} | activations
        assert not found.missing
        assert not found.tensors.keys() & set(model.graph.initializers)

    def test_ties_hold_in_yolox_and_the_scores_pay_for_them(self, model: ir.Model, observed: Ranges) -> None:
        found = rules.complete(model, observed, ties="dla")

        concats = [part for part in model.graph if part.op_type == "Concat" and len(part.outputs[0].shape or ()) == 4]
        assert len(concats) > 10
        for concat in concats:
            values = [*concat.inputs, concat.outputs[0]]
            assert len({found.tensors[str(value.name)].scale for value in values if value is not None}) == 1
        heads = [
            part for part in concats if any(v is not None and v.producer().op_type == "Sigmoid" for v in part.inputs)
        ]
        scores = {str(v.name) for part in heads for v in part.inputs if v.producer().op_type == "Sigmoid"}
        assert len(scores) == 6
        assert all(found.tensors[name].amax >= observed.tensors[name].amax for name in scores)

    def test_what_folding_removed_from_the_histograms_is_filled_in(self, model: ir.Model, observed: Ranges) -> None:
        shapes = {str(part.outputs[0].name) for part in model.graph if part.op_type in ("Reshape", "Slice", "Sigmoid")}
        left = {name: entry for name, entry in observed.tensors.items() if name not in shapes}
        given_ranges = Ranges(method="max", images=1, tensors=left)

        found = rules.complete(model, given_ranges, ties="none")

        assert not found.missing
        assert {found.tensors[name].source for name in shapes} == {"same", "bounded"}

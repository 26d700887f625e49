"""A candidate against FP32: output by output, and in the task's answers."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import helper

from calibration.agreement import below_threshold
from calibration.parity import OutputParity, Parity, Reference, difference
from edge import config, manifest
from edge.engine.onnxruntime import OnnxRuntimeEngine
from edge.errors import DataError, ModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge.types import Image, Tensors

NAMES = ("a.jpg", "b.jpg", "c.jpg")
GREY = ("grey.png", np.full((320, 320, 3), 114, np.uint8))
STRICT = config.Parity(cosine=0.99, relative_error=0.01, agreement=0.95)


def spoiled(outputs: list[Tensors], change: Callable[[Tensors], Tensors], *pictures: str) -> list[Tensors]:
    """A candidate's outputs, changed on some pictures, or on all where none is named."""
    named = [not pictures or name in pictures for name in NAMES]
    return [change(dict(each)) if here else each for each, here in zip(outputs, named, strict=True)]


def run(path: Path, inputs: list[Tensors]) -> list[Tensors]:
    with OnnxRuntimeEngine(path) as engine:
        return [{name: array.copy() for name, array in engine.infer(each).items()} for each in inputs]


@pytest.fixture
def model(build_model: Callable[..., ir.Model], rng: np.random.Generator, tmp_path: Path) -> config.Model:
    """A classifier of three classes."""
    nodes = [
        helper.make_node("Conv", ["images", "weight"], ["conv"]),
        helper.make_node("GlobalAveragePool", ["conv"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["out"]),
    ]
    path = tmp_path / "kind.onnx"
    ir.save(build_model(nodes, {"weight": rng.standard_normal((3, 3, 3, 3)).astype(np.float32)}), path)
    return config.Model(
        name="kind", path=str(path), task=config.Classification(labels=["nut", "bolt", "washer"], activation="softmax")
    )


@pytest.fixture
def faces(data: Path) -> config.Model:
    """A detector, which finds nothing in ``GREY``."""
    return config.Model(
        name="faces",
        path=str(data / "models" / "yunet_n_320.onnx"),
        input=config.Input(color="bgr", divide_by=1.0),
        task=config.DetectionTask(labels=["face"]),
    )


@pytest.fixture
def pictures(rng: np.random.Generator) -> list[tuple[str, Image]]:
    return [(name, rng.integers(0, 256, (8, 8, 3), np.uint8)) for name in NAMES]


@pytest.fixture
def reference(model: config.Model, pictures: list[tuple[str, Image]]) -> Reference:
    return Reference.of(model, pictures)


@pytest.fixture
def outputs(model: config.Model, reference: Reference) -> list[Tensors]:
    """Of a candidate that is as good as FP32."""
    return run(Path(model.path), reference.inputs)


class TestDifference:
    def test_hand_worked(self) -> None:
        found = difference(np.array([[3.0, 4.0]]), np.array([[4.0, 3.0]]))

        assert found == (pytest.approx(24 / 25), pytest.approx(0.25), True)

    def test_zeros_equal_zeros(self) -> None:
        assert difference(np.zeros(4), np.zeros(4)) == (1.0, 0.0, True)

    def test_zeros_for_something_have_lost_all_of_it(self) -> None:
        assert difference(np.array([2.0, 0.0]), np.zeros(2)) == (0.0, 1.0, True)

    def test_something_for_zeros_has_no_measure(self) -> None:
        assert difference(np.zeros(2), np.array([2.0, 0.0])) == (0.0, math.inf, True)

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_value_that_is_no_number_fails_both_measures(self, value: float) -> None:
        assert difference(np.ones(3), np.array([1.0, value, 1.0])) == (0.0, math.inf, False)

    def test_integers_are_compared_as_numbers(self) -> None:
        assert difference(np.array([200, 100], np.uint8), np.array([100, 200], np.uint8)).relative_error == 0.5

    def test_cosine_cannot_see_lost_scores_beside_boxes(self, rng: np.random.Generator) -> None:
        """Why agreement is measured as well."""
        output = np.concatenate([rng.uniform(50, 600, (4, 100)), rng.uniform(0, 1, (8, 100))])
        spoiled = output.copy()
        spoiled[4:] = 0.0

        found = difference(output, spoiled)

        assert found.cosine > 0.999
        assert found.relative_error < 0.002

    @given(hnp.arrays(np.float32, st.integers(1, 20), elements=st.floats(-(2**60), 2**60, width=32)), st.data())
    def test_measures_stay_within_their_bounds(self, array: np.ndarray, data: st.DataObject) -> None:
        other = data.draw(hnp.arrays(np.float32, array.shape, elements=st.floats(-(2**60), 2**60, width=32)))

        assert difference(array, array)[1:] == (0.0, True)
        assert difference(array, array).cosine == pytest.approx(1.0)
        assert -1.0 <= difference(array, other).cosine <= 1.0
        assert difference(array, other).relative_error >= 0.0


class TestReference:
    def test_model_equals_itself(self, reference: Reference, outputs: list[Tensors]) -> None:
        found = reference.compare(outputs, STRICT)

        assert found == Parity(3, (OutputParity("out", pytest.approx(1.0), 0.0, finite=True),), 1.0, ())

    def test_reference_serves_several_candidates(self, reference: Reference, outputs: list[Tensors]) -> None:
        negated = spoiled(outputs, lambda each: {"out": -each["out"]})

        found = [reference.compare(each, STRICT) for each in (outputs, negated, outputs)]

        assert found[0] == found[2]
        assert found[1].outputs[0].cosine == pytest.approx(-1.0)

    def test_a_picture_on_which_an_output_is_next_to_nothing_does_not_decide(
        self, reference: Reference, outputs: list[Tensors]
    ) -> None:
        total = sum(float(np.square(each["out"]).sum()) for each in outputs)

        found = reference.compare(spoiled(outputs, lambda each: {"out": each["out"] * 0}, "b.jpg"), STRICT)

        rest = total - float(np.square(outputs[1]["out"]).sum())
        assert found.outputs[0].cosine == pytest.approx((rest / total) ** 0.5), "pictures weigh as much as they hold"

    def test_missed_limits_name_output_picture_value_and_limit(
        self, reference: Reference, outputs: list[Tensors]
    ) -> None:
        found = reference.compare(spoiled(outputs, lambda each: {"out": -2 * each["out"]}, "b.jpg"), STRICT)

        assert found.failures[:2] == (
            "output 'out': cosine -0.0898, worst on b.jpg (allowed: at least 0.99)",
            "output 'out': relative error 3 on b.jpg (allowed: at most 0.01)",
        )
        assert found.failures[2].startswith("the task's answers agree with FP32's to 0.")
        assert found.failures[2].endswith(", mean of 3 pictures (allowed: at least 0.95)")

    def test_relative_error_without_a_limit_is_only_told(self, reference: Reference, outputs: list[Tensors]) -> None:
        doubled = spoiled(outputs, lambda each: {"out": each["out"] * 2})

        found = reference.compare(doubled, config.Parity(agreement=0.0))

        assert found.outputs[0].relative_error == pytest.approx(1.0)
        assert found.failures == ()

    def test_value_a_hair_below_its_limit_does_not_read_as_the_limit(
        self, reference: Reference, outputs: list[Tensors]
    ) -> None:
        off = spoiled(outputs, lambda each: {"out": each["out"] * np.float32(1.0100001)})

        found = reference.compare(off, config.Parity(relative_error=0.01, agreement=0.0))

        assert found.failures[0].startswith("output 'out': relative error 0.0100")

    def test_nan_is_named_with_its_first_picture(self, reference: Reference, outputs: list[Tensors]) -> None:
        def spoil(each: Tensors) -> Tensors:
            return {"out": np.where([[False, True, False]], np.float32(np.nan), each["out"])}

        found = reference.compare(spoiled(outputs, spoil, "b.jpg", "c.jpg"), config.Parity(agreement=0.0))

        assert found.outputs == (OutputParity("out", 0.0, math.inf, finite=False),)
        assert found.agreement == pytest.approx(1 / 3)
        assert found.failures == ("output 'out': holds NaN or infinite values on 2 of 3 pictures, the first is b.jpg",)

    def test_outputs_go_by_name_and_others_are_ignored(self, reference: Reference, outputs: list[Tensors]) -> None:
        wider = spoiled(outputs, lambda each: {"debug": -each["out"], **each})

        assert reference.compare(wider, STRICT).failures == ()

    def test_missing_output_is_an_error(self, reference: Reference, outputs: list[Tensors]) -> None:
        other = spoiled(outputs, lambda each: {"logits": each["out"]}, "c.jpg")

        with pytest.raises(ModelError, match=r"output 'out' is missing in the engine, which has: logits"):
            reference.compare(other, STRICT)

    def test_output_of_another_shape_is_an_error(self, reference: Reference, outputs: list[Tensors]) -> None:
        other = spoiled(outputs, lambda _: {"out": np.zeros((1, 4), np.float32)}, "b.jpg")

        with pytest.raises(ModelError, match=r"output 'out' is \[1, 4\] in the engine, but \[1, 3\] in the FP32 model"):
            reference.compare(other, STRICT)

    def test_no_picture_is_an_error(self, model: config.Model) -> None:
        with pytest.raises(DataError, match=r"kind\.onnx: there is no picture"):
            Reference.of(model, [])

    def test_model_that_is_not_finite_itself_is_an_error(
        self,
        build_model: Callable[..., ir.Model],
        model: config.Model,
        pictures: list[tuple[str, Image]],
        tmp_path: Path,
    ) -> None:
        nodes = [
            helper.make_node("GlobalAveragePool", ["images"], ["pooled"]),
            helper.make_node("Flatten", ["pooled"], ["flat"]),
            helper.make_node("Div", ["flat", "zero"], ["out"]),
        ]
        ir.save(build_model(nodes, {"zero": np.zeros(1, np.float32)}), tmp_path / "broken.onnx")
        broken = msgspec.structs.replace(model, path=str(tmp_path / "broken.onnx"))

        with pytest.raises(ModelError, match=r"broken\.onnx: output 'out' holds NaN .* on a\.jpg in FP32 already"):
            Reference.of(broken, pictures)

    @pytest.mark.parametrize(
        ("pictures", "told"), [(1, "FP32 finds nothing on the picture,"), (2, "nothing on any of the 2 pictures,")]
    )
    def test_pictures_without_answers_agree_in_nothing_and_that_is_told(
        self, faces: config.Model, pictures: int, told: str
    ) -> None:
        reference = Reference.of(faces, [GREY] * pictures)

        found = reference.compare(run(Path(faces.path), reference.inputs), STRICT)

        assert (found.agreement, found.record().agreement, found.failures) == (None, None, ())
        assert told in found.warnings[0]
        assert found.warnings[0].endswith("were not compared: give --images with objects")

    def test_candidate_that_is_broken_does_not_agree_where_there_are_no_answers(self, faces: config.Model) -> None:
        reference = Reference.of(faces, [GREY])
        (outputs,) = run(Path(faces.path), reference.inputs)

        found = reference.compare([{name: value * np.float32(np.nan) for name, value in outputs.items()}], STRICT)

        assert (found.agreement, found.warnings) == (0.0, ())
        assert found.failures[-1].startswith("the task's answers agree with FP32's to 0,")

    def test_session_of_fp32_is_gone_when_candidates_are_built(
        self, model: config.Model, pictures: list[tuple[str, Image]]
    ) -> None:
        def sessions() -> int:
            gc.collect()
            return sum(isinstance(each, onnxruntime.InferenceSession) for each in gc.get_objects())

        before = sessions()

        reference = Reference.of(model, pictures)

        assert len(reference.inputs) == len(pictures)
        assert sessions() == before


class TestRecord:
    def test_worst_of_all_outputs(self) -> None:
        outputs = (OutputParity("boxes", 0.99, 0.3, finite=True), OutputParity("scores", 0.95, 0.1, finite=True))

        record = Parity(8, outputs, 0.9, ("one sentence",)).record()

        assert record == manifest.ParityRecord(
            images=8, cosine=0.95, relative_error=0.3, agreement=0.9, failures=["one sentence"]
        )

    def test_record_of_a_broken_plan_can_be_written_and_read(self) -> None:
        record = Parity(1, (OutputParity("out", 0.0, math.inf, finite=False),), None, ("NaN",)).record()

        assert record.relative_error is None
        assert msgspec.json.decode(msgspec.json.encode(record), type=manifest.ParityRecord) == record


def test_comparing_goes_below_the_threshold_of_each_task() -> None:
    detection = config.DetectionTask(score=0.5)
    classification = config.Classification(labels=["a", "b"], score=0.5)

    assert below_threshold(detection).score == 0.25
    assert below_threshold(classification).score == 0.0

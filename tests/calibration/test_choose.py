"""Trying ranges on pictures, and choosing the method by what came of it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
import pytest
from onnx import helper

from calibration import choose, observe, qdq, ranges, rules
from calibration.agreement import closeness
from calibration.choose import Choice
from calibration.histogram import Histogram
from calibration.trial import Outcome, Trial
from edge import config, tasks
from edge.errors import ConfigError
from edge.image import Preprocessor
from edge.types import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from calibration.ranges import Ranges
    from edge.types import Image

SPEC = TensorSpec("images", (1, 3, 8, 8), np.dtype(np.float32))


def deployment(*, classes: int = 5, score: float = 0.0, fp16: Sequence[config.LayerRule] = ()) -> config.Model:
    return config.Model(
        name="kind",
        path="kind.onnx",
        task=config.Classification(labels=[f"class {k}" for k in range(classes)], score=score, top_k=classes),
        calibration=config.Calibration(images="pictures", fp16=list(fp16)),
    )


def pictures(number: int, size: int = 8) -> list[Image]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, 256, (size, size, 3), dtype=np.uint8) for _ in range(number)]


def names_of(model: ir.Model) -> list[str]:
    inputs, computed = observe.activations(model)
    return [*inputs, *computed]


def some_scales(model: ir.Model) -> dict[str, float]:
    """Of all sizes, so that some clip and some are coarse."""
    return {name: float(np.float32(0.007 * (index + 1))) for index, name in enumerate(names_of(model))}


def copy_of(model: ir.Model) -> ir.Model:
    return ir.from_proto(ir.to_proto(model))


@pytest.fixture
def chain_model(build_model: Callable[..., ir.Model], rng: np.random.Generator) -> ir.Model:
    """Layers without an activation between them, which onnxruntime fuses with the pairs around them."""
    node = helper.make_node
    nodes = [
        node("Conv", ["images", "w_a"], ["a"], name="a", pads=[1, 1, 1, 1]),
        node("Conv", ["a", "w_b"], ["b"], name="b"),
        node("MaxPool", ["b"], ["pooled"], kernel_shape=[8, 8]),
        node("Flatten", ["pooled"], ["flat"]),
        node("Gemm", ["flat", "w_c"], ["c"], name="c"),
        node("MatMul", ["c", "w_d"], ["out"], name="d"),
    ]
    shapes = {"w_a": (4, 3, 3, 3), "w_b": (4, 4, 1, 1), "w_c": (4, 6), "w_d": (6, 5)}
    return build_model(nodes, {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()})


class TestTrial:
    @pytest.mark.parametrize("fixture", ["residual_model", "chain_model"])
    @pytest.mark.parametrize("fp16", [[], [config.LayerRule(op="Gemm")]], ids=["all", "no-gemm"])
    def test_computes_what_the_qdq_model_does_bit_by_bit(
        self, fixture: str, fp16: list[config.LayerRule], request: pytest.FixtureRequest
    ) -> None:
        """A last bit that differs in one output changes the error, which is in float64."""
        fp32: ir.Model = request.getfixturevalue(fixture)
        scales, model = some_scales(fp32), deployment(fp16=fp16)
        written = copy_of(fp32)
        qdq.insert(written, scales, fp16, key="fp16")

        outcome = Trial(model, fp32, SPEC, pictures(6), tensors=names_of(fp32)).run(scales)

        before, after = observe.session(fp32), observe.session(written)
        task = tasks.build(model.task, (SPEC,), (TensorSpec("out", (1, 5), np.dtype(np.float32)),), source="test")
        for index, picture in enumerate(pictures(6)):
            array, letterbox = Preprocessor(model.input, SPEC)(picture)
            (reference,), (candidate,) = (observe.run(session, {"images": array}) for session in (before, after))
            rms = np.sqrt(np.mean((reference.astype(np.float64) - candidate) ** 2))
            assert outcome.errors[index] == rms / float(reference.std())
            answers = [task.decode({"out": output}, letterbox) for output in (reference, candidate)]
            assert outcome.closeness[index] == closeness(*answers)
        assert outcome.error == outcome.errors.mean() > 0
        assert outcome.share == outcome.closeness.mean() < 1

    def test_fine_scales_come_closer_than_coarse_ones(self, residual_model: ir.Model) -> None:
        names = names_of(residual_model)
        trial = Trial(deployment(), residual_model, SPEC, pictures(4), tensors=names)

        fine, coarse = trial.run(dict.fromkeys(names, 0.2)), trial.run(dict.fromkeys(names, 20.0))

        assert fine.error < coarse.error

    def test_some_of_the_pictures_may_be_tried(self, residual_model: ir.Model) -> None:
        scales = some_scales(residual_model)
        trial = Trial(deployment(), residual_model, SPEC, pictures(5), tensors=names_of(residual_model))

        everything, some = trial.run(scales), trial.run(scales, range(1, 5, 2))

        assert len(trial) == 5
        assert some.closeness.tolist() == everything.closeness[1::2].tolist()
        assert some.errors.tolist() == everything.errors[1::2].tolist()

    def test_model_is_left_as_it_was(self, residual_model: ir.Model) -> None:
        before = ir.to_proto(residual_model).SerializeToString(deterministic=True)

        Trial(deployment(), residual_model, SPEC, pictures(1), tensors=names_of(residual_model))

        assert ir.to_proto(residual_model).SerializeToString(deterministic=True) == before

    def test_layers_in_fp16_carry_no_pairs(self, residual_model: ir.Model) -> None:
        kept = [config.LayerRule(op="Gemm"), config.LayerRule(depthwise=True)]

        plain = Trial(deployment(), residual_model, SPEC, pictures(1), tensors=names_of(residual_model))
        ruled = Trial(deployment(fp16=kept), residual_model, SPEC, pictures(1), tensors=names_of(residual_model))

        assert plain.tensors == ("images", "stem_act", "dw_act", "sum_act", "flat")
        assert ruled.tensors == ("images", "dw_act", "sum_act")
        scales = some_scales(residual_model)
        changed = scales | {"stem_act": 9.0, "flat": 9.0}
        assert ruled.run(scales).errors.tolist() == ruled.run(changed).errors.tolist()
        assert plain.run(scales).errors.tolist() != plain.run(changed).errors.tolist()

    def test_rule_that_matches_nothing_is_an_error(self, residual_model: ir.Model) -> None:
        model = deployment(fp16=[config.LayerRule(name="nothing")])

        with pytest.raises(ConfigError, match=r"models\.kind\.calibration\.fp16\[0\]: matches no layer"):
            Trial(model, residual_model, SPEC, pictures(1), tensors=["images"], key="models.kind.calibration.fp16")

    def test_answers_below_the_threshold_are_compared_too(self, residual_model: ir.Model) -> None:
        trial = Trial(deployment(score=1.0), residual_model, SPEC, pictures(2), tensors=names_of(residual_model))

        assert trial.run(some_scales(residual_model)).share is not None

    def test_nothing_found_has_no_share_but_an_error(self) -> None:
        outcome = Outcome(np.array([math.nan, math.nan]), np.array([0.1, 0.3]))

        assert outcome.share is None
        assert outcome.error == pytest.approx(0.2)

    def test_pictures_without_answers_are_left_out_of_the_share(self) -> None:
        assert Outcome(np.array([math.nan, 0.5, 1.0]), np.zeros(3)).share == 0.75


# Choosing, from outcomes that are given


def of(values: NDArray[np.float64]) -> Histogram:
    result = Histogram()
    result.add(np.asarray(values, np.float32))
    return result


def tailed(number: int, largest: float) -> Histogram:
    """Of which each method makes a different range."""
    rng = np.random.default_rng(number)
    return of(np.append(rng.standard_normal(50_000), np.linspace(largest / 2, largest, 4)))


class Prescribed:
    """Stands in for a trial: the outcome of scales is what a function says."""

    def __init__(
        self, tensors: Sequence[str], outcome: Callable[[Mapping[str, float]], Outcome], pictures: int = 8
    ) -> None:
        self.tensors = tuple(tensors)
        self.runs: list[tuple[Mapping[str, float], list[int]]] = []
        self._outcome = outcome
        self._pictures = pictures

    def __len__(self) -> int:
        return self._pictures

    def run(self, scales: Mapping[str, float], pictures: Sequence[int] | None = None) -> Outcome:
        wanted = list(range(len(self)) if pictures is None else pictures)
        self.runs.append((scales, wanted))
        full = self._outcome(scales)
        return Outcome(full.closeness[wanted], full.errors[wanted])


def flat(share: float, error: float, pictures: int = 8) -> Outcome:
    return Outcome(np.full(pictures, share), np.full(pictures, error))


METHODS = ("entropy", "percentile", "mse", "max")


def by_method(
    outcomes: Mapping[str, Outcome], histograms: Mapping[str, Histogram]
) -> Callable[[Mapping[str, float]], Outcome]:
    """What ``Prescribed`` says of scales that one method has chosen for all tensors; of mixtures, the worst."""
    of_method = {method: ranges.select(histograms, method=method, images=1).scales for method in METHODS}

    def outcome(scales: Mapping[str, float]) -> Outcome:
        found = [method for method, those in of_method.items() if those == scales]
        return outcomes[found[0]] if found else flat(0.0, 99.0)

    return outcome


HISTOGRAMS = {"a": tailed(3, 8.0), "b": tailed(4, 12.0)}


def chosen(
    trial: object, histograms: Mapping[str, Histogram] = HISTOGRAMS, *, held: int = 8, images: int = 24
) -> Choice:
    return choose.choose(trial, histograms, lambda found: found, images=images, held=held)  # type: ignore[arg-type]


def ranked(**outcomes: Outcome) -> Choice:
    return chosen(Prescribed(list(HISTOGRAMS), by_method(outcomes, HISTOGRAMS)))


class TestMethod:
    def test_methods_give_the_histograms_of_these_tests_different_ranges(self) -> None:
        for histogram in HISTOGRAMS.values():
            assert len({method(histogram) for method in ranges.METHODS.values()}) == len(METHODS)

    @pytest.mark.parametrize("best", METHODS)
    def test_method_that_agrees_most_is_chosen_even_with_a_larger_error(self, best: str) -> None:
        outcomes = {m: flat(0.9 if m == best else 0.8, 0.4 if m == best else 0.1) for m in METHODS}

        result = ranked(**outcomes)

        assert result.method == best
        assert result.agreement == pytest.approx({m: outcomes[m].share for m in METHODS})
        assert result.error == pytest.approx({m: outcomes[m].error for m in METHODS})
        assert next(iter(result.agreement)) == best
        assert result.held == 8

    def test_among_methods_within_the_noise_the_smaller_error_decides(self) -> None:
        noisy = np.array([0.9, 0.7, 0.9, 0.7, 0.9, 0.7, 0.9, 0.71])
        outcomes = {
            "entropy": flat(0.2, 0.1),
            "percentile": Outcome(noisy, np.full(8, 0.3)),
            "mse": Outcome(noisy[::-1].copy(), np.full(8, 0.25)),
            "max": Outcome(noisy[::-1] - 0.002, np.full(8, 0.2)),
        }

        result = ranked(**outcomes)

        assert result.method == "mse"
        assert "max" in result.agreement

    def test_what_is_ahead_by_less_than_the_noise_is_told(self) -> None:
        noisy = np.array([0.9, 0.7, 0.9, 0.7, 0.9, 0.7, 0.9, 0.71])
        outcomes = {m: flat(0.2, 0.5) for m in METHODS} | {
            "percentile": Outcome(noisy, np.full(8, 0.3)),
            "max": Outcome(noisy[[1, 0, 3, 2, 5, 4, 6, 7]] - 0.001, np.full(8, 0.2)),
        }

        result = ranked(**outcomes)

        assert result.method == "max"
        assert "what others agree more is within the noise" in result.reason

    def test_methods_that_are_equal_in_everything_go_by_a_fixed_order(self) -> None:
        assert ranked(**{m: flat(0.9, 0.1) for m in METHODS}).method == "mse"

    def test_without_any_answers_the_error_decides(self) -> None:
        errors = {"entropy": 0.3, "percentile": 0.1, "mse": 0.2, "max": 0.4}

        result = ranked(**{m: Outcome(np.full(8, math.nan), np.full(8, error)) for m, error in errors.items()})

        assert result.method == "percentile"
        assert result.agreement == {}
        assert result.reason == (
            "percentile: no model finds anything on 8 held-out pictures; the outputs' error decides:"
            " percentile 0.100, mse 0.200, entropy 0.300, max 0.400"
        )

    def test_reason_gives_the_numbers_best_first(self) -> None:
        shares = {"entropy": 0.5, "percentile": 0.9, "mse": 0.8, "max": 0.25}

        result = ranked(**{m: flat(share, 0.1) for m, share in shares.items()})

        assert result.reason == (
            "percentile: agreement with FP32 on 8 held-out pictures:"
            " percentile 0.900, mse 0.800, entropy 0.500, max 0.250"
        )

    def test_same_outcomes_make_the_same_choice(self) -> None:
        outcomes = {m: flat(0.9 - k / 10, 0.1) for k, m in enumerate(METHODS)}

        assert ranked(**outcomes) == ranked(**outcomes)

    def test_ranges_are_completed_before_they_are_tried(self) -> None:
        trial = Prescribed(["a"], lambda _: flat(0.9, 0.1))

        def complete(found: Ranges) -> Ranges:
            widest = max(found.tensors.values(), key=lambda entry: entry.amax)
            return ranges.Ranges(method="tied", images=1, tensors=dict.fromkeys(found.tensors, widest))

        choose.choose(trial, HISTOGRAMS, complete, images=1, held=8)  # type: ignore[arg-type]

        assert all(len(set(scales.values())) == 1 for scales, _ in trial.runs)


class TestTooLittle:
    @pytest.mark.parametrize("held", range(choose.FEWEST_HELD))
    def test_few_held_out_pictures_measure_nothing(self, held: int) -> None:
        trial = Prescribed(["a"], lambda _: flat(1.0, 0.0))

        result = chosen(trial, held=held)

        assert result == Choice(choose.FALLBACK, held=held, reason=result.reason)
        assert (result.agreement, result.error, result.others) == ({}, {}, {})
        counted = "1 picture is held out" if held == 1 else f"{held} pictures are held out"
        assert result.reason.startswith(f"mse, unmeasured: {counted} to try the methods on, and it takes 4")
        assert trial.runs == []

    def test_no_trial_measures_nothing(self) -> None:
        assert chosen(None, held=0).method == "mse"

    def test_no_picture_to_fit_to_measures_nothing_and_says_so(self) -> None:
        trial = Prescribed(["a"], lambda _: flat(1.0, 0.0))

        result = chosen(trial, {"a": Histogram()}, held=5, images=0)

        assert (result.method, trial.runs) == ("mse", [])
        assert result.reason == (
            "mse, unmeasured: all pictures are held out to try the methods on;"
            " about one calibration picture in four is held out"
        )

    def test_as_many_as_it_takes_are_measured(self) -> None:
        trial = Prescribed(["a"], lambda _: flat(1.0, 0.0, 4), pictures=4)

        assert chosen(trial, held=choose.FEWEST_HELD).agreement == dict.fromkeys(METHODS, 1.0)


class Exceptions:
    """Prescribes that mse is the best and max the second, and what single tensors with max do to it."""

    def __init__(
        self,
        histograms: Mapping[str, Histogram],
        *,
        tuning: Mapping[str, float],
        judging: Mapping[str, tuple[float, float]],
    ) -> None:
        """By tensor, what max does to the error of tuning pictures, and to closeness and error of judging ones."""
        self._plain = {m: ranges.select(histograms, method=m, images=1).scales for m in METHODS}
        self._tuning = tuning
        self._judging = judging

    def __call__(self, scales: Mapping[str, float]) -> Outcome:
        others = {"max": (0.8, 0.3), "entropy": (0.5, 0.4), "percentile": (0.4, 0.5)}
        for method, (share, error) in others.items():
            if scales == self._plain[method]:
                return flat(share, error)
        changed = [name for name, scale in scales.items() if scale != self._plain["mse"][name]]
        assert all(scales[name] == self._plain["max"][name] for name in changed)
        closeness, errors = np.full(8, 0.9), np.full(8, 0.2)
        for name in changed:
            errors[::2] += self._tuning.get(name, 0.1)
            gain, error = self._judging.get(name, (0.0, 0.0))
            closeness[1::2] += gain
            errors[1::2] += error
        return Outcome(closeness, errors)


class TestExceptions:
    def test_tensor_that_does_better_with_the_second_method_takes_it(self) -> None:
        outcome = Exceptions(HISTOGRAMS, tuning={"a": -0.05}, judging={"a": (0.02, -0.05)})

        result = chosen(Prescribed(list(HISTOGRAMS), outcome))

        assert (result.method, result.others) == ("mse", {"a": "max"})
        assert result.reason.endswith(". 1 tensor does better with max")

    def test_several_add_up(self) -> None:
        histograms = HISTOGRAMS | {"c": tailed(5, 10.0)}
        good = (0.02, -0.05)
        outcome = Exceptions(histograms, tuning={"a": -0.05, "c": -0.05}, judging={"a": good, "c": good})

        result = chosen(Prescribed(list(histograms), outcome), histograms)

        assert result.others == {"c": "max", "a": "max"}
        assert result.reason.endswith(". 2 tensors do better with max")

    @pytest.mark.parametrize(("gain", "error"), [(0.0, -0.05), (-0.01, -0.05), (0.02, 0.0), (0.02, 0.05)], ids=str)
    def test_pictures_that_it_was_not_chosen_by_must_agree_more_and_err_less(self, gain: float, error: float) -> None:
        outcome = Exceptions(HISTOGRAMS, tuning={"a": -0.05}, judging={"a": (gain, error)})

        assert chosen(Prescribed(list(HISTOGRAMS), outcome)).others == {}

    def test_gain_that_may_be_chance_is_not_taken(self) -> None:
        outcome = Exceptions(HISTOGRAMS, tuning={"a": -0.0019}, judging={"a": (0.02, -0.05)})

        assert chosen(Prescribed(list(HISTOGRAMS), outcome)).others == {}

    def test_one_half_of_the_pictures_tunes_and_the_other_judges(self) -> None:
        trial = Prescribed(list(HISTOGRAMS), Exceptions(HISTOGRAMS, tuning={"a": -0.05}, judging={"a": (0.02, -0.05)}))

        chosen(trial)

        tried = [numbers for _, numbers in trial.runs]
        assert tried == [list(range(8))] * 4 + [[0, 2, 4, 6]] * 2 + [[1, 3, 5, 7]]

    def test_only_the_tensors_that_methods_disagree_on_most_are_tried(self) -> None:
        histograms = {f"t{k}": tailed(k, 8.0 + 4 * k) for k in range(9)}
        trial = Prescribed(list(histograms), Exceptions(histograms, tuning={}, judging={}))

        chosen(trial, histograms)

        best, second = (ranges.select(histograms, method=m, images=1).tensors for m in ("mse", "max"))
        ratio = {name: second[name].amax / best[name].amax for name in histograms}
        changed = [
            next(n for n in scales if scales[n] != best[n].scale) for scales, half in trial.runs if len(half) < 8
        ]
        assert changed == sorted(ratio, key=lambda name: -ratio[name])[: choose.SINGLE_TENSORS]

    def test_tensors_without_a_pair_or_with_one_range_are_not_tried(self) -> None:
        same = {"same": of(np.full(10, 1.0)), "unpaired": tailed(1, 40.0)}
        trial = Prescribed(["same"], by_method({m: flat(0.9, 0.1) for m in METHODS}, same))

        assert chosen(trial, same).others == {}
        assert len(trial.runs) == len(METHODS)


# Choosing, with a real model

SIZE = 128
"""One pixel of so many in three channels is less than the share that the percentile clips."""


def spiked(build_model: Callable[..., ir.Model], *, reads_spike: bool) -> tuple[ir.Model, NDArray[np.float32]]:
    """The mean colour of a picture, or that of its first pixel, which is made 200 times as large before a Conv.

    Only the Conv's input carries a pair. Where the first pixel is not read, its size is a harmless outlier; where it
    is, pixels of sizes between are there as well, so that the methods are not stopped by the gap.
    """
    gain = np.ones((1, 1, SIZE, SIZE), np.float32)
    gain[..., 0, 0] = 200
    if reads_spike:
        gain[..., 0, 1:121] = np.linspace(1, 60, 120)
    read = np.full((1, 1, SIZE, SIZE), 0.0 if reads_spike else 20.0, np.float32)
    read[..., 0, 0] = SIZE**2 / 10 if reads_spike else 0
    node = helper.make_node
    nodes = [
        node("Mul", ["images", "gain"], ["spiked"]),
        node("Conv", ["spiked", "w"], ["mixed"], name="mix"),
        node("Mul", ["mixed", "read"], ["seen"]),
        node("GlobalAveragePool", ["seen"], ["pooled"]),
        node("Flatten", ["pooled"], ["out"]),
    ]
    weights = {"gain": gain, "read": read, "w": np.eye(3, dtype=np.float32).reshape(3, 3, 1, 1)}
    return build_model(nodes, weights, input_shape=(1, 3, SIZE, SIZE)), gain


def noisy_pictures(number: int) -> list[Image]:
    """Of a colour each, with noise but in the first pixel, which is bright."""
    rng = np.random.default_rng(3)
    result: list[Image] = []
    for _ in range(number):
        picture = (rng.random((SIZE, SIZE, 3)) * rng.uniform(100, 256, 3)).astype(np.uint8)
        picture[0, 0] = rng.integers(190, 256, 3)
        result.append(picture)
    return result


def auto(model: ir.Model, gain: NDArray[np.float32]) -> Choice:
    spec = TensorSpec("images", (1, 3, SIZE, SIZE), np.dtype(np.float32))
    preprocess = Preprocessor(config.Input(), spec)
    histograms = {"images": Histogram(), "spiked": Histogram()}
    for picture in noisy_pictures(12):
        array, _ = preprocess(picture)
        histograms["images"].add(array)
        histograms["spiked"].add(array * gain)
    held = noisy_pictures(20)[12:]
    trial = Trial(deployment(classes=3), model, spec, held, tensors=list(histograms))
    assert trial.tensors == ("spiked",)
    return choose.choose(
        trial, histograms, lambda found: rules.complete(model, found, ties="dla"), images=12, held=len(held)
    )


class TestRealTrial:
    def test_harmless_outlier_is_clipped(self, build_model: Callable[..., ir.Model]) -> None:
        result = auto(*spiked(build_model, reads_spike=False))

        assert result.method in ("entropy", "percentile")
        assert result.agreement[result.method] > 0.95
        assert result.agreement["max"] < 0.9

    def test_nothing_is_clipped_where_clipping_hurts(self, build_model: Callable[..., ir.Model]) -> None:
        result = auto(*spiked(build_model, reads_spike=True))

        assert result.method == "max"
        assert result.agreement["max"] > 0.95
        assert result.agreement["percentile"] < 0.9

    def test_is_the_same_each_time(self, build_model: Callable[..., ir.Model]) -> None:
        first, second = (auto(*spiked(build_model, reads_spike=True)) for _ in range(2))

        assert first == second

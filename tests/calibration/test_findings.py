"""What a person is told about the tensors of a calibration."""

from __future__ import annotations

import re

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration import findings, ranges
from calibration.findings import Finding, bulk
from calibration.histogram import Histogram
from calibration.ranges import Range, Ranges


def of(values: np.ndarray) -> Histogram:
    result = Histogram()
    result.add(np.asarray(values, np.float32))
    return result


def sound(seed: int = 0) -> Histogram:
    return of(np.random.default_rng(seed).standard_normal(5_000))


def with_outlier(largest: float) -> Histogram:
    """4999 values up to 1.0, and one that is larger."""
    return of(np.append(np.linspace(0.01, 1.0, 4_999), [largest]))


def told(histograms: dict[str, Histogram], **values: object) -> list[Finding]:
    chosen = ranges.select(histograms, method="max", images=2)
    return findings.of(histograms, msgspec.structs.replace(chosen, **values))


def tied(amax: float, alone: float) -> Range:
    return Range(amax=amax, scale=amax / 127, source="tied", of="wide", observed_amax=alone, alone=alone)


def test_sound_tensors_are_not_worth_a_word() -> None:
    assert told({"a": sound(1), "b": sound(2)}) == []


class TestKinds:
    def test_zero(self) -> None:
        (finding,) = told({"a": sound(), "dead": of(np.zeros(9)), "unseen": Histogram()})

        assert (finding.kind, finding.tensors, finding.grave) == ("zero", ("dead", "unseen"), True)

    @pytest.mark.parametrize("value", [0.5, -3.0])
    def test_constant(self, value: float) -> None:
        (finding,) = told({"a": sound(), "stuck": of(np.full(9, value))})

        assert (finding.kind, finding.tensors, finding.grave) == ("constant", ("stuck",), True)

    def test_one_magnitude_of_both_signs_is_not_constant(self) -> None:
        assert told({"sign": of(np.array([1.0, -1.0, 1.0]))}) == []

    def test_outliers_the_worst_first(self) -> None:
        histograms = {"some": with_outlier(9.0), "none": with_outlier(7.0), "worst": with_outlier(40.0), "a": sound()}

        (finding,) = told(histograms)

        assert (finding.kind, finding.tensors, finding.grave) == ("outliers", ("worst", "some"), False)

    def test_many_large_values_are_no_outliers(self) -> None:
        assert told({"two": of(np.append(np.full(990, 1.0), np.full(10, 50.0)))}) == []

    def test_zeros_do_not_make_the_others_outliers(self) -> None:
        """Behind a ReLU that is mostly silent every value would be one."""
        assert told({"relu": of(np.append(np.zeros(1_000_000), np.linspace(0.1, 5.0, 50)))}) == []

    def test_ties_that_cost_much_the_dearest_first(self) -> None:
        histograms = {"cheap": sound(1), "dear": sound(2), "dearest": sound(3)}
        tensors = {"cheap": tied(8.0, 2.0), "dear": tied(8.0, 1.9), "dearest": tied(80.0, 2.0)}

        (finding,) = told(histograms, tensors=tensors)

        assert (finding.kind, finding.tensors, finding.grave) == ("tied", ("dearest", "dear"), True)

    def test_missing_ranges(self) -> None:
        (finding,) = told({"a": sound()}, missing={"x": "not observed", "y": "not observed either"})

        assert (finding.kind, finding.tensors, finding.grave) == ("missing", ("x", "y"), True)

    def test_layers_in_fp16(self) -> None:
        (finding,) = told({"a": sound()}, fp16_only={"probabilities": "only Softmax uses it"})

        assert (finding.kind, finding.tensors, finding.grave) == ("fp16", ("probabilities",), False)

    def test_grave_ones_come_first(self) -> None:
        histograms = {"spiky": with_outlier(40.0), "dead": of(np.zeros(3)), "stuck": of(np.ones(3)), "low": sound()}
        tensors = ranges.select(histograms, method="max", images=1).tensors | {"low": tied(80.0, 2.0)}

        found = told(histograms, tensors=tensors, missing={"x": "why"}, fp16_only={"y": "why"})

        assert [finding.kind for finding in found] == ["zero", "constant", "tied", "missing", "outliers", "fp16"]
        assert [finding.grave for finding in found] == [True] * 4 + [False] * 2


class TestSentences:
    def test_one_tensor_is_singular(self) -> None:
        (finding,) = told({"dead": of(np.zeros(3))})

        assert str(finding) == (
            "1 tensor zero on every picture; a branch that never wakes, or pictures that never wake it: dead"
        )

    def test_two_tensors_are_plural(self) -> None:
        (finding,) = told({"a": of(np.ones(3)), "b": of(np.ones(3))})

        assert str(finding) == "2 tensors of one value on every picture: a, b"

    @pytest.mark.parametrize(("number", "end"), [(5, ": t0, t1, t2, t3, t4"), (7, ": t0, t1, t2, t3, t4 and 2 more")])
    def test_few_of_many_are_named(self, number: int, end: str) -> None:
        (finding,) = told({f"t{k}": of(np.zeros(3)) for k in range(number)})

        assert str(finding).startswith(f"{number} tensors zero")
        assert str(finding).endswith(end)
        assert len(finding.tensors) == number

    def test_no_kind_says_one_tensors(self) -> None:
        histograms = {"spiky": with_outlier(40.0), "dead": of(np.zeros(3)), "stuck": of(np.ones(3)), "low": sound()}
        tensors = ranges.select(histograms, method="max", images=1).tensors | {"low": tied(80.0, 2.0)}

        sentences = [
            str(finding) for finding in told(histograms, tensors=tensors, missing={"x": "w"}, fp16_only={"y": "w"})
        ]

        assert len(sentences) == 6
        assert all(sentence.startswith("1 tensor ") for sentence in sentences)
        assert not any(re.search(r"\b1 tensors\b", sentence) for sentence in sentences)


class TestBulk:
    def test_is_what_a_share_stays_below(self) -> None:
        """Of 5000 values the 4995th is in the last bin below 1.0, where bins are 1/32 wide."""
        assert bulk(with_outlier(40.0)) == 1.0
        assert bulk(with_outlier(40.0), 0.5) == 0.53125

    def test_leaves_zeros_out(self) -> None:
        values = np.linspace(0.1, 5.0, 50)

        assert bulk(of(np.append(np.zeros(10_000), values))) == bulk(of(values)) == 5.0

    def test_of_nothing_is_nothing(self) -> None:
        assert bulk(Histogram()) == 0.0
        assert bulk(of(np.zeros(5))) == 0.0

    @given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=200), st.floats(0.01, 1.0))
    def test_lies_within_what_was_seen(self, values: list[float], share: float) -> None:
        histogram = of(np.array(values))

        inside = np.abs(np.array(values, np.float32)) <= bulk(histogram, share)
        assert bulk(histogram, share) <= histogram.amax
        assert inside[np.array(values) != 0].mean() >= share - 1e-9 if any(values) else inside.all()


def test_ranges_of_tensors_without_histograms_are_no_trouble() -> None:
    chosen = Ranges(method="max", images=1, tensors={"bounded": Range(amax=1.0, scale=1 / 127, source="bounded")})

    assert findings.of({}, chosen) == []

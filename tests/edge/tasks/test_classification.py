from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge import config, tasks
from edge.errors import ConfigError, ModelError
from edge.image import place

if TYPE_CHECKING:
    from edge.types import Tensors

LETTERBOX = place(config.Input(), (640, 480), (224, 224))


@pytest.fixture
def classifier(specs_of: Any, picture: Any) -> Any:
    def build(outputs: Tensors, **section: Any) -> tasks.Task:
        return tasks.build(config.Classification(**section), picture(224, 224), specs_of(outputs), source="m.onnx")

    return build


def answers(task: tasks.Task, outputs: Tensors) -> list[tuple[str, float]]:
    return [(one.label, round(one.score, 4)) for one in task.decode(outputs, LETTERBOX)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=20), st.integers(1, 25))
def test_logits_are_ranked_by_softmax(classifier: Any, values: list[float], top_k: int) -> None:
    outputs = {"o": np.array([values], np.float32)}

    found = classifier(outputs, top_k=top_k, activation="softmax").decode(outputs, LETTERBOX)

    total = sum(math.exp(value) for value in values)
    expected = sorted(((math.exp(value) / total, -index) for index, value in enumerate(values)), reverse=True)[:top_k]
    np.testing.assert_allclose([one.score for one in found], [score for score, _ in expected], rtol=1e-4, atol=1e-6)
    assert len(found) == min(top_k, len(values))
    assert all(one.box_xyxy is None and one.mask is None for one in found)


def test_probabilities_are_taken_as_they_are(classifier: Any) -> None:
    outputs = {"o": np.array([[0.1, 0.7, 0.2]], np.float32)}

    task = classifier(outputs, labels=["cat", "dog", "owl"], top_k=2)

    assert answers(task, outputs) == [("dog", 0.7), ("owl", 0.2)]
    assert task.layout == "classification"


def test_logits_without_a_negative_one_are_no_probabilities(classifier: Any) -> None:
    outputs = {"o": np.array([[0, math.log(3)]], np.float32)}

    assert answers(classifier(outputs), outputs) == [("class_1", 0.75), ("class_0", 0.25)]


@pytest.mark.parametrize(
    ("activation", "expected"), [("none", [0.9, 0.0]), ("sigmoid", [0.7109, 0.2689]), ("softmax", [0.8699, 0.1301])]
)
def test_activation_can_be_set(classifier: Any, activation: str, expected: list[float]) -> None:
    outputs = {"o": np.array([[0.9, -1.0]], np.float32)}

    assert [score for _, score in answers(classifier(outputs, activation=activation), outputs)] == expected


def test_answers_below_the_score_are_not_reported(classifier: Any) -> None:
    outputs = {"o": np.array([[0.1, 0.7, 0.2]], np.float32)}

    assert answers(classifier(outputs, score=0.5), outputs) == [("class_1", 0.7)]


@pytest.mark.parametrize("values", [[np.nan, 1], [np.inf, 1], [np.nan, np.nan]])
def test_nan_is_no_answer(classifier: Any, values: list[float]) -> None:
    outputs = {"o": np.array([values], np.float32)}

    assert all(one.score == one.score for one in classifier(outputs).decode(outputs, LETTERBOX))
    assert len(classifier(outputs, activation="softmax").decode(outputs, LETTERBOX)) < 2


@pytest.mark.parametrize("shape", [(1, 10), (1, 10, 1, 1)])
def test_pooled_maps_are_answers_too(classifier: Any, shape: tuple[int, ...]) -> None:
    outputs = {"o": np.zeros(shape, np.float16)}

    assert len(classifier(outputs, top_k=20).decode(outputs, LETTERBOX)) == 10


@pytest.mark.parametrize(
    "shapes", [{"o": (1, 10, 2)}, {"o": (10,)}, {"o": (2, 10)}, {"a": (1, 10), "b": (1, 10)}, {"o": (1, 0)}]
)
def test_other_outputs_are_refused(classifier: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(ModelError, match=r"m\.onnx: has outputs .*'classification' takes one output"):
        classifier({name: np.zeros(shape, np.float32) for name, shape in shapes.items()})


def test_wrong_number_of_labels_is_refused(classifier: Any) -> None:
    with pytest.raises(ConfigError, match=r"has 2 names, but m\.onnx has 10 classes"):
        classifier({"o": np.zeros((1, 10), np.float32)}, labels=["cat", "dog"])

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edge.tasks.signature import UnfitError


def test_rows_are_taken_as_they_are(fit_head: Any, assert_same: Any) -> None:
    table = np.array([[[1, 2, 30, 40, 0.9, 5], [3, 4, 5, 6, 0.2, 0], [7, 8, 9, 10, 0.5, 79.0001]]], np.float32)

    found = fit_head("end-to-end", {"o": table}, (64, 64)).candidates({"o": table}, 0.5)

    assert_same(found, [(0, 5, 0.9, [1, 2, 30, 40]), (2, 79, 0.5, [7, 8, 9, 10])])


@pytest.mark.parametrize(
    "row", [[0, 0, 9, 9, np.nan, 1], [0, 0, 9, 9, 1, np.nan], [0, 0, 9, 9, 1, -1], [0, 0, 9, 9, 1, np.inf]]
)
def test_rows_without_score_or_class_are_left_out(fit_head: Any, row: list[float]) -> None:
    table = np.array([[row]], np.float32)

    assert len(fit_head("end-to-end", {"o": table}, (64, 64)).candidates({"o": table}, 0.0)) == 0


def test_model_does_not_say_how_many_classes_it_has_and_needs_no_suppression(fit_head: Any) -> None:
    head = fit_head("end-to-end", {"o": np.zeros((1, 300, 6), np.float32)}, (64, 64))

    assert head.classes is None
    assert not head.overlapping


@pytest.mark.parametrize("shape", [(1, 300, 7), (1, 6), (2, 300, 6)])
def test_other_shapes_are_refused(fit_head: Any, shape: tuple[int, ...]) -> None:
    with pytest.raises(UnfitError):
        fit_head("end-to-end", {"o": np.zeros(shape, np.float32)}, (64, 64))

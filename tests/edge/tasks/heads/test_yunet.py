from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge.tasks.signature import UnfitError

SIZE = (96, 64)


def outputs_of(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    outputs = {}
    for kind, width in (("cls", 1), ("obj", 1), ("bbox", 4), ("kps", 10)):
        for stride in (8, 16, 32):
            count = (SIZE[0] // stride) * (SIZE[1] // stride)
            # In 64ths, so that no score comes within a rounding error of what is asked for.
            values = (
                rng.integers(-12, 77, (1, count, width)) / 64 if width == 1 else rng.normal(0, 1, (1, count, width))
            )
            outputs[f"{kind}_{stride}"] = values.astype(np.float32)
    return outputs


def slow(outputs: dict[str, np.ndarray], score: float) -> tuple[list[Any], list[list[float]]]:
    """FaceDetectorYNImpl::postProcess, cell by cell."""
    found, points = [], []
    row = 0
    for stride in (8, 16, 32):
        cls, obj, bbox, kps = (outputs[f"{kind}_{stride}"][0].tolist() for kind in ("cls", "obj", "bbox", "kps"))
        columns = SIZE[0] // stride
        for cell in range(len(cls)):
            r, c = divmod(cell, columns)
            value = math.sqrt(min(max(cls[cell][0], 0), 1) * min(max(obj[cell][0], 0), 1))
            if value >= score:
                x, y = (c + bbox[cell][0]) * stride, (r + bbox[cell][1]) * stride
                w, h = math.exp(bbox[cell][2]) * stride, math.exp(bbox[cell][3]) * stride
                found.append((row, 0, value, [x - w / 2, y - h / 2, x + w / 2, y + h / 2]))
                points.append([(kps[cell][n] + (r if n % 2 else c)) * stride for n in range(10)])
            row += 1
    return found, points


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.2003, 0.5003, 0.9003]), st.randoms())
def test_decoding_equals_the_slow_reference(
    fit_head: Any, assert_same: Any, seed: int, score: float, random: Any
) -> None:
    """Whatever the order of the outputs."""
    outputs = outputs_of(seed)
    names = list(outputs)
    random.shuffle(names)
    head = fit_head("yunet", {name: outputs[name] for name in names}, SIZE)

    found = head.candidates(outputs, score)

    expected, points = slow(outputs, score)
    assert_same(found, expected)
    np.testing.assert_allclose(found.keypoints_xy, np.array(points).reshape(-1, 10), rtol=1e-4, atol=1e-3)


def test_outputs_may_have_other_names(fit_head: Any) -> None:
    outputs = {f"tensor_{index}": value for index, value in enumerate(outputs_of(1).values())}

    found = fit_head("yunet", outputs, SIZE).candidates(outputs, 0.5)

    assert found.rows.tolist() == [row for row, *_ in slow(outputs_of(1), 0.5)[0]]


def test_nan_scores_are_no_faces(fit_head: Any) -> None:
    outputs = outputs_of(0)
    outputs["cls_8"][:] = outputs["obj_16"][:] = outputs["cls_32"][:] = np.nan

    assert len(fit_head("yunet", outputs, SIZE).candidates(outputs, 0.0)) == 0


def test_missing_and_misshapen_outputs_are_refused(fit_head: Any) -> None:
    outputs = outputs_of(0)

    with pytest.raises(UnfitError, match="stride 8"):
        fit_head("yunet", {**outputs, "kps_8": outputs["bbox_8"]}, SIZE)
    del outputs["kps_8"]
    with pytest.raises(UnfitError, match="found 11"):
        fit_head("yunet", outputs, SIZE)

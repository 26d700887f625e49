"""TensorRT's calibration cache, against files that NVIDIA's own tools wrote."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration import cache
from edge.errors import DataError

CACHES = sorted((Path(__file__).parents[1] / "data" / "caches").glob("*.cache"))


def read(path: Path) -> str:
    return path.read_bytes().decode()


@pytest.mark.parametrize("path", CACHES, ids=lambda path: path.name)
def test_real_caches_are_written_back_byte_for_byte(path: Path) -> None:
    parsed = cache.parse(read(path), source=path.name)

    assert len(parsed.scales) > 100
    assert cache.render(parsed.scales, tensorrt=parsed.tensorrt, algorithm=parsed.algorithm) == read(path)


@pytest.mark.parametrize(
    ("name", "tensor", "amax"),
    [
        ("mlperf_v2.0_NVIDIA_ssd-mobilenet.calibrator.cache", "Input", 1.0),
        ("mlperf_v2.0_NVIDIA_resnet50.calibrator.cache", "input_tensor_0", 128.0),
        (
            "mlperf_v2.0_NVIDIA_ssd-resnet34.calibrator.cache",
            "input",
            2.6406,
        ),  # (1 - 0.406) / 0.225 is 2.6400: a bin further
    ],
)
def test_scales_are_amax_over_127(name: str, tensor: str, amax: float) -> None:
    """The inputs' ranges follow from the models' pre-processing, so they prove how the number is meant."""
    path = next(path for path in CACHES if path.name == name)

    scale = cache.parse(read(path), source=name).scales[tensor]

    assert scale * 127 == pytest.approx(amax, rel=1e-4)


@pytest.mark.parametrize(
    ("version", "digits"),
    [
        ("8.5.1", "8501"),
        ("8.6.0", "8600"),
        ("8.0.1", "8001"),
        ("7.2.3", "7203"),
        ("10.3.0", "100300"),
        ("10.9.0", "100900"),
        ("10.14.1", "101401"),
        ("8.5", "8500"),
    ],
)
def test_version_digits(version: str, digits: str) -> None:
    assert cache.version_digits(version) == digits
    parsed = cache.parse(f"TRT-{digits}-EntropyCalibration2\n", source="x")
    assert parsed.tensorrt.startswith(version)
    assert parsed.header == f"TRT-{digits}-EntropyCalibration2"


@pytest.mark.parametrize("version", ["", "ten", "10", "10.3.0.1", "10.-1", "10.3.100"])
def test_what_is_no_version_is_refused(version: str) -> None:
    with pytest.raises(ValueError, match=r"is no TensorRT version; expected one such as 10\.3\.0"):
        cache.version_digits(version)


def test_names_end_at_the_last_colon() -> None:
    parsed = cache.parse("TRT-8501-EntropyCalibration2\nRelu:0: 3f800000\n", source="x")

    assert parsed.scales == {"Relu:0": 1.0}


def test_zero_is_written_without_padding() -> None:
    text = "TRT-100900-EntropyCalibration2\nONNXTRT_Broadcast: 0\n"

    assert cache.parse(text, source="x").scales == {"ONNXTRT_Broadcast": 0.0}
    assert cache.render({"ONNXTRT_Broadcast": 0.0}, tensorrt="10.9.0") == text


def test_windows_line_ends_are_read() -> None:
    assert cache.parse("TRT-8501-EntropyCalibration2\r\na: 3f800000\r\n", source="x").scales == {"a": 1.0}


scales = st.floats(0, 2.0**127, width=32)
names = st.text(st.characters(blacklist_categories=("Cs", "Cc", "Zl", "Zp")), min_size=1).filter(
    lambda name: name == name.strip()
)


@given(st.dictionaries(names, scales))
def test_what_is_written_is_read_back(entries: dict[str, float]) -> None:
    text = cache.render(entries, tensorrt="10.3.0")

    assert cache.parse(text, source="x").scales == {name: abs(scale) for name, scale in entries.items()}


@pytest.mark.parametrize("scale", [-1.0, math.nan, math.inf, -math.inf])
def test_impossible_scales_are_not_written(scale: float) -> None:
    with pytest.raises(ValueError, match="scale of tensor 'x' is"):
        cache.render({"x": scale}, tensorrt="10.3.0")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"x: starts with ''; a calibration cache starts with"),
        ("{}\n", "x: starts with '{}'"),
        ("TRT-8501-EntropyCalibration2\na 3f800000\n", r"x:2: is 'a 3f800000'; expected '<tensor>: <up to 8 hex"),
        ("TRT-8501-EntropyCalibration2\na: 3f80000g\n", "x:2: is"),
        ("TRT-8501-EntropyCalibration2\na: 3f8000000\n", "x:2: is"),
        ("TRT-8501-EntropyCalibration2\na: 1\nb: 1\na: 1\n", "x:4: tensor 'a' is listed twice"),
    ],
)
def test_damaged_files_are_refused_by_line(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        cache.parse(text, source="x")


def test_scales_are_exact_float32() -> None:
    parsed = cache.parse(read(CACHES[0]), source="x")

    assert all(float(np.float32(scale)) == scale for scale in parsed.scales.values())

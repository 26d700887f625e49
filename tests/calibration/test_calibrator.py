from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from calibration import cache, calibrator
from edge.errors import DataError, DeviceError, ModelError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from calibration.calibrator import Calibrator

PICTURE = np.zeros((1, 3, 4, 4), np.float32)


@pytest.fixture
def trt(standin: Callable):
    return standin("10.3.0")


def upload(name: str, array: np.ndarray) -> int:
    """Where an array lies, as if that were on the GPU."""
    del name
    return array.ctypes.data


def serving(trt, path: Path) -> Calibrator:
    return calibrator.make(trt, None, cache=path, upload=upload)


def feeding(trt, *pictures: dict, cache: Path | None = None, upload=upload, shapes=None) -> Calibrator:
    return calibrator.make(trt, iter(pictures), cache=cache, upload=upload, shapes=shapes)


def test_is_what_tensorrt_takes(trt):
    made = feeding(trt, {"images": PICTURE})

    assert isinstance(made, trt.IInt8EntropyCalibrator2)
    assert made.get_batch_size() == 1


def test_hands_out_a_pointer_for_each_input_in_the_order_of_the_names_and_none_at_the_end(trt):
    other = np.ones((1, 2), np.float32)
    made = feeding(trt, {"images": PICTURE, "scale": other})

    assert made.get_batch(["scale", "images"]) == [other.ctypes.data, PICTURE.ctypes.data]
    assert made.get_batch(["scale", "images"]) is None
    assert made.batches == 1
    assert made.error is None


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ({}, "input 'images' is missing; given: none"),
        ({"image": PICTURE}, "input 'images' is missing; given: image"),
        ({"images": PICTURE.astype(np.float64)}, r"is float64\[1, 3, 4, 4\]; expected C-contiguous float32"),
        ({"images": PICTURE[:, :, :2]}, r"is float32\[1, 3, 2, 4\], not C-contiguous; expected"),
        ({"images": PICTURE[:, :1].copy()}, r"is float32\[1, 1, 4, 4\]; expected C-contiguous float32\[1, 3, 4, 4\]"),
        ({"images": PICTURE.transpose(0, 1, 3, 2)}, "not C-contiguous"),
    ],
)
def test_a_picture_that_does_not_fit_ends_the_calibration_and_is_kept(trt, second, expected):
    copied = []
    made = feeding(
        trt, {"images": PICTURE}, second, {"images": PICTURE}, upload=lambda name, _: copied.append(name) or 4096
    )

    batches = [made.get_batch(["images"]) for _ in range(3)]

    assert batches == [[4096], None, None]
    assert copied == ["images"], "nothing is copied of what does not fit, nor after it"
    with pytest.raises(DataError, match=expected):
        raise made.error


def test_the_first_picture_is_held_to_the_shapes_that_are_given(trt):
    made = feeding(trt, {"images": PICTURE}, shapes={"images": (1, 3, 8, 8)})

    assert made.get_batch(["images"]) is None
    assert "expected C-contiguous float32[1, 3, 8, 8]" in str(made.error)


def test_what_the_pictures_source_raises_is_kept_and_not_taken_for_the_end(trt):
    def source():
        yield {"images": PICTURE}
        raise DataError("cat.jpg: is truncated")

    made = calibrator.make(trt, source(), cache=None, upload=upload)

    assert made.get_batch(["images"]) is not None
    assert made.get_batch(["images"]) is None
    assert str(made.error) == "cat.jpg: is truncated"


def test_what_the_copy_raises_is_kept(trt):
    def refuse(name: str, _: np.ndarray) -> int:
        raise DeviceError(f"no memory for {name}")

    made = feeding(trt, {"images": PICTURE}, upload=refuse)

    assert made.get_batch(["images"]) is None
    assert str(made.error) == "no memory for images"
    assert made.batches == 0


@pytest.mark.parametrize("version", ["10.3", "10.3.0"])
def test_serves_a_cache_of_this_version(trt, tmp_path, version):
    path = tmp_path / "calibration.cache"
    path.write_text(cache.render({"images": 0.5}, tensorrt=version))
    made = serving(trt, path)

    assert made.read_calibration_cache() == path.read_bytes()
    assert made.cache_read
    assert made.error is None


@pytest.mark.parametrize(
    ("text", "error", "expected"),
    [
        ("TRT-8502-EntropyCalibration2\nimages: 3f000000\n", ModelError, "is for TensorRT 8.5.2, but this is 10.3.0"),
        ("TRT-100300-MinMaxCalibration\nimages: 3f000000\n", ModelError, "is of algorithm MinMaxCalibration"),
        ("images: 3f000000\n", DataError, "a calibration cache starts with a line such as"),
        (None, DataError, r"calibration.cache: cannot be read \(no such file or directory\)"),
    ],
)
def test_a_cache_that_tensorrt_would_skip_is_an_error(trt, tmp_path, text, error, expected):
    path = tmp_path / "calibration.cache"
    if text is not None:
        path.write_text(text)
    made = serving(trt, path)

    assert made.read_calibration_cache() is None
    assert not made.cache_read
    with pytest.raises(error, match=expected):
        raise made.error


def test_a_cache_that_tensorrt_did_not_take_is_an_error_where_there_are_no_pictures(trt, tmp_path):
    path = tmp_path / "calibration.cache"
    path.write_text(cache.render({"images": 0.5}, tensorrt="10.3.0"))
    made = serving(trt, path)

    made.read_calibration_cache()

    assert made.get_batch(["images"]) is None
    assert "has not taken it and asks for pictures" in str(made.error)


def test_pictures_need_no_cache(trt, tmp_path):
    made = feeding(trt, {"images": PICTURE}, cache=tmp_path / "not there yet")

    assert made.read_calibration_cache() is None
    assert made.error is None


def test_keeps_a_copy_of_what_tensorrt_writes(trt):
    made = feeding(trt)
    buffer = bytearray(b"TRT-100300-EntropyCalibration2\n")

    made.write_calibration_cache(memoryview(buffer))
    buffer[:] = bytes(len(buffer))

    assert made.written == b"TRT-100300-EntropyCalibration2\n"


def test_a_fourth_part_of_the_version_does_not_matter():
    text = cache.render({"images": 0.5}, tensorrt="8.5.2").encode()

    assert calibrator.difference(text, "8.5.2.2", source="c") is None
    assert "is for TensorRT 8.5.2, but this is 8.6.2" in calibrator.difference(text, "8.6.2.3", source="c")


def test_tensorrt_11_has_no_calibrator(standin):
    trt = standin("11.4.0")

    with pytest.raises(DeviceError, match=r"TensorRT 11.4.0 has no calibrator.*engine.quantization to qdq"):
        feeding(trt)


def test_names_are_not_looked_up_before_they_are_needed():
    """TensorRT 11 crashes others at import (NVIDIA/TensorRT issue 4357)."""
    with pytest.raises(DeviceError):
        feeding(SimpleNamespace(__version__="11.4.0.106"))

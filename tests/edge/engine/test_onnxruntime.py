"""The engine contract, on onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from edge import config
from edge.engine import open_engine
from edge.errors import DeviceError, ModelError

YOLOX = Path(__file__).parents[2] / "data" / "models" / "yolox_nano.onnx"


def doubling_model(path: Path, shape: list[Any], dtype: int = TensorProto.FLOAT) -> Path:
    """A model that adds its input to itself."""
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "x"], ["y"])], "g", [info("x", dtype, shape)], [info("y", dtype, None)]
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def open_(path: Path, **section: Any) -> Any:
    return open_engine(path, config.Engine(**section))


def test_specifications_are_the_models(tmp_path: Path) -> None:
    with open_(doubling_model(tmp_path / "m.onnx", [1, 3, 4, 4])) as engine:
        (spec,), (out,) = engine.inputs, engine.outputs

    assert (spec.name, spec.shape, spec.dtype) == ("x", (1, 3, 4, 4), np.float32)
    assert (out.name, out.shape, out.dtype) == ("y", (1, 3, 4, 4), np.float32)


@pytest.mark.parametrize(
    ("onnx_type", "dtype"),
    [(TensorProto.FLOAT, "float32"), (TensorProto.FLOAT16, "float16"), (TensorProto.INT32, "int32")],
)
def test_types(tmp_path: Path, onnx_type: int, dtype: str) -> None:
    with open_(doubling_model(tmp_path / "m.onnx", [2, 2], onnx_type)) as engine:
        found = engine.infer({"x": np.full((2, 2), 3, dtype)})["y"]

    assert found.dtype == dtype
    assert (found == 6).all()


def test_a_real_model_computes_what_a_plain_session_does(rng_picture: np.ndarray) -> None:
    (expected,) = onnxruntime.InferenceSession(str(YOLOX), providers=["CPUExecutionProvider"]).run(
        None, {"images": rng_picture}
    )

    with open_(YOLOX, threads=2) as engine:
        found = engine.infer({"images": rng_picture})["output"]

        assert np.array_equal(found, expected)
        assert "2 threads" in engine.description


def test_outputs_are_valid_until_the_next_call(tmp_path: Path) -> None:
    with open_(doubling_model(tmp_path / "m.onnx", [2])) as engine:
        first = engine.infer({"x": np.float32([1, 2])})["y"]
        kept = first.copy()
        second = engine.infer({"x": np.float32([5, 6])})["y"]

    assert kept.tolist() == [2, 4]
    assert second.tolist() == [10, 12]


def test_inputs_are_not_written_to(tmp_path: Path) -> None:
    array = np.float32([1, 2])
    array.setflags(write=False)

    with open_(doubling_model(tmp_path / "m.onnx", [2])) as engine:
        engine.infer({"x": array})


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "input 'x' is missing; given: none"),
        ({"y": np.zeros(2, np.float32)}, "input 'x' is missing; given: y"),
        ({"x": np.zeros(3, np.float32)}, r"input 'x' is float32\[3\]; expected float32\[2\]"),
        ({"x": np.zeros(2, np.float64)}, r"input 'x' is float64\[2\]; expected float32\[2\]"),
    ],
)
def test_wrong_inputs_are_named(tmp_path: Path, tensors: Any, message: str) -> None:
    with open_(doubling_model(tmp_path / "m.onnx", [2])) as engine, pytest.raises(ModelError, match=message):
        engine.infer(tensors)


def test_dynamic_sizes_are_fixed_by_the_deployment(tmp_path: Path) -> None:
    path = doubling_model(tmp_path / "m.onnx", ["batch", 3, "height", "width"])

    with open_engine(path, config.Engine(), size_wh=(64, 32)) as engine:
        assert engine.inputs[0].shape == (1, 3, 32, 64)
        assert engine.outputs[0].shape == (1, 3, 32, 64)


def test_a_dynamic_size_that_nobody_fixes_is_refused_by_name(tmp_path: Path) -> None:
    path = doubling_model(tmp_path / "m.onnx", [1, 3, "height", "width"])

    with pytest.raises(ModelError, match=r"dimension 2 \(height\) of input 'x' is dynamic; set input.size"):
        open_(path)


def test_a_size_that_contradicts_the_model_is_refused() -> None:
    with pytest.raises(ModelError, match=r"input.size asks for 640x640, but input 'images' is fixed to \[1, 3, 416"):
        open_engine(YOLOX, config.Engine(), size_wh=(640, 640))


def test_missing_and_broken_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.onnx").write_bytes(YOLOX.read_bytes()[:1000])

    with pytest.raises(ModelError, match=r"absent\.onnx: no such model file"):
        open_(tmp_path / "absent.onnx")
    with pytest.raises(ModelError, match=r"broken\.onnx: onnxruntime cannot load it"):
        open_(tmp_path / "broken.onnx")


def test_a_provider_that_is_not_installed_is_named_with_those_that_are() -> None:
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this machine has CUDA")

    with pytest.raises(DeviceError, match="names cuda, but this onnxruntime has: cpu"):
        open_(YOLOX, providers=["cuda", "cpu"])


@pytest.fixture
def rng_picture() -> np.ndarray:
    return np.random.default_rng(0).uniform(0, 255, (1, 3, 416, 416)).astype(np.float32)

"""The engine contract, on onnxruntime."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from edge import config
from edge.engine import artifact_of, open_engine
from edge.engine.onnxruntime import options_of, provider_options
from edge.errors import ConfigError, DeviceError, ModelError

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


def test_arrays_that_lie_scattered_in_memory_are_read_right(tmp_path: Path) -> None:
    with open_(doubling_model(tmp_path / "m.onnx", [2, 3])) as engine:
        found = engine.infer({"x": np.arange(6, dtype=np.float32).reshape(3, 2).T})["y"]

    assert found.tolist() == [[0, 4, 8], [2, 6, 10]]


def tensorrt(**section: Any) -> config.Engine:
    return config.Engine(providers=["tensorrt", "cuda", "cpu"], **section)


@pytest.mark.parametrize(
    ("precision", "quantized", "half"),
    [("int8", True, "True"), ("int8", False, "False"), ("fp16", False, "True"), ("fp32", False, "False")],
)
def test_tensorrts_precision_is_that_of_the_file_and_the_deployment(precision: Any, quantized: bool, half: str) -> None:
    found = provider_options(tensorrt(precision=precision), quantized=quantized, cache=None)

    assert found["tensorrt"] == {"trt_fp16_enable": half, "trt_int8_enable": str(quantized)}


def test_what_the_deployment_says_of_tensorrt_is_passed_on(tmp_path: Path) -> None:
    section = tensorrt(precision="fp16", workspace_mb=512, optimization_level=4, dla=config.Dla(core=1))

    found = provider_options(section, quantized=False, cache=tmp_path)["tensorrt"]

    assert found == {
        "trt_fp16_enable": "True",
        "trt_int8_enable": "False",
        "trt_max_workspace_size": str(512 * 2**20),
        "trt_builder_optimization_level": "4",
        "trt_dla_enable": "True",
        "trt_dla_core": "1",
        "trt_engine_cache_enable": "True",
        "trt_engine_cache_path": str(tmp_path),
        "trt_timing_cache_enable": "True",
        "trt_timing_cache_path": str(tmp_path),
    }


def test_the_dla_refuses_a_quantized_model_in_onnxruntime() -> None:
    with pytest.raises(ConfigError, match=r"engine\.dla: the DLA runs no model with Q/DQ in onnxruntime; use"):
        provider_options(tensorrt(dla=config.Dla()), quantized=True, cache=None)


def test_q_dq_in_the_file_asks_tensorrt_for_int8(tmp_path: Path) -> None:
    plain = options_of(YOLOX, tensorrt(), tmp_path)
    quantized = options_of(quantizing_model(tmp_path / "q.onnx"), tensorrt(), tmp_path)

    assert plain["tensorrt"]["trt_int8_enable"] == "False"
    assert quantized["tensorrt"]["trt_int8_enable"] == "True"


def test_each_content_of_a_model_has_its_own_cache_of_engines(tmp_path: Path) -> None:
    """By its own names onnxruntime would take the old engine: they tell neither weights nor scales."""
    cache, model = tmp_path / "cache", tmp_path / "q.onnx"

    folders = []
    for scale in (0.5, 0.25, 0.5):
        quantizing_model(model, scale)
        folders.append(options_of(model, tensorrt(), cache)["tensorrt"]["trt_engine_cache_path"])

    assert folders[0] == folders[2] != folders[1]
    assert all(Path(folder).is_dir() and Path(folder).parent == cache / "ort-tensorrt" for folder in folders)


def test_weights_beside_the_model_belong_to_its_content(tmp_path: Path) -> None:
    model = doubling_model(tmp_path / "m.onnx", [2])
    model.write_bytes(model.read_bytes() + b"m.onnx.data")

    folders = []
    for weights in (b"1", b"22"):
        (tmp_path / "m.onnx.data").write_bytes(weights)
        folders.append(options_of(model, tensorrt(), tmp_path / "cache")["tensorrt"]["trt_engine_cache_path"])

    assert folders[0] != folders[1]


def test_without_tensorrt_nothing_is_read_or_made(tmp_path: Path) -> None:
    found = options_of(tmp_path / "absent.onnx", config.Engine(), tmp_path / "cache")

    assert "trt_engine_cache_path" not in found["tensorrt"]
    assert not (tmp_path / "cache").exists()


def test_a_missing_model_is_refused_with_tensorrt_as_well(tmp_path: Path) -> None:
    assert options_of(tmp_path / "absent.onnx", tensorrt(), tmp_path)["cuda"]
    assert not (tmp_path / "ort-tensorrt").exists()


def test_onnxruntime_accepts_the_options_of_the_providers_that_it_has(tmp_path: Path) -> None:
    """On a CPU alone there are none to accept; with CUDA it refuses unknown names."""
    path = doubling_model(tmp_path / "m.onnx", [2])
    available = onnxruntime.get_available_providers()
    providers = [key for key in ("cuda", "cpu") if f"{key.upper()}ExecutionProvider" in available]

    with open_(path, providers=providers) as engine:
        for value in (1, 2):  # on CUDA an input that is bound once would be read once
            assert engine.infer({"x": np.full(2, value, np.float32)})["y"].tolist() == [2 * value] * 2


def test_a_missing_onnxruntime_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)

    with pytest.raises(DeviceError, match=r"pip install 'jetson-edge\[cpu\]', on a Jetson 'jetson-edge\[build\]'"):
        open_(Path("m.onnx"))


def test_fp16_runs_the_fp32_model_where_tensorrts_provider_comes_first(tmp_path: Path) -> None:
    section = tensorrt(precision="fp16", backend="onnxruntime")
    model = a_model(doubling_model(tmp_path / "m.onnx", [2]), section)

    artifact = artifact_of(model)

    assert (artifact.path, artifact.precision) == (tmp_path / "m.onnx", "fp16")


def test_fp16_is_refused_where_only_the_cpu_could_run_it(tmp_path: Path) -> None:
    model = a_model(tmp_path / "m.onnx", config.Engine(precision="fp16", backend="onnxruntime"))

    with pytest.raises(DeviceError, match="precision is fp16, which is for TensorRT"):
        artifact_of(model)


def quantizing_model(path: Path, scale: float = 0.5) -> Path:
    info = helper.make_tensor_value_info
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [info("x", TensorProto.FLOAT, [2])],
        [info("y", TensorProto.FLOAT, [2])],
        [helper.make_tensor("scale", TensorProto.FLOAT, [], [scale])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def a_model(path: Path, section: config.Engine) -> config.Model:
    return config.Model(name="m", path=str(path), task=config.DetectionTask(), engine=section)


@pytest.fixture
def rng_picture() -> np.ndarray:
    return np.random.default_rng(0).uniform(0, 255, (1, 3, 416, 416)).astype(np.float32)

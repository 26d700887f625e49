# ruff: noqa: SLF001 - names with _standin are for tests
"""The engine contract on plans, what ties a plan to its device, and frames in flight; on the stand-ins."""

from __future__ import annotations

import gc
import importlib
import logging
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import msgspec
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from edge import config
from edge.engine import Pipelined, open_engine
from edge.engine.tensorrt import TensorRtEngine, load_tensorrt, probe
from edge.errors import DeviceError, DeviceLostError, ModelError
from edge.manifest import Device, EngineManifest

YOLOX = Path(__file__).parents[2] / "data" / "models" / "yolox_nano.onnx"
VERSIONS = ["8.5.2", "10.3.0", "10.16.1", "11.4.0"]


@pytest.fixture(params=VERSIONS)
def trt(request: pytest.FixtureRequest, standin: Callable[..., ModuleType]) -> ModuleType:
    return standin(request.param)


@pytest.fixture(params=[True, False], ids=["integrated", "discrete"])
def trt10(request: pytest.FixtureRequest, standin: Callable[..., ModuleType]) -> ModuleType:
    return standin("10.3.0", integrated=request.param)


@pytest.fixture(autouse=True)
def nothing_is_left(assert_released: Callable[[], None]) -> Iterator[None]:
    """Whatever a test does, in the end the GPU is as it was."""
    yield
    if "pycuda.driver" in sys.modules and hasattr(sys.modules["pycuda.driver"], "_standin_live"):
        assert_released()


def built(device: Device, *, dla_core: int | None = None, io_scales: dict[str, float] | None = None) -> EngineManifest:
    return EngineManifest(
        tool="test",
        created_at="2026-01-01T00:00:00Z",
        model="m",
        model_sha256="",
        input=config.Input(),
        precision="fp16",
        quantization="none",
        dla_core=dla_core,
        fallback=None,
        device=device,
        requested={},
        io_scales=io_scales or {},
        parity=None,
        files={},
    )


def picture(shape: tuple[int, ...] = (1, 3, 4, 5)) -> np.ndarray:
    """Small whole numbers, which every precision holds exactly."""
    return np.random.default_rng(0).integers(-60, 60, shape).astype(np.float32)


# The contract of edge.engine.Engine.


def test_specifications_are_the_models(trt: ModuleType, plan: Callable[..., Path]) -> None:
    with TensorRtEngine(plan(trt)) as engine:
        (spec,), (out,) = engine.inputs, engine.outputs

    assert (spec.name, spec.shape, spec.dtype) == ("x", (1, 3, 4, 5), np.float32)
    assert (out.name, out.shape, out.dtype) == ("y", (1, 3, 4, 5), np.float32)


@pytest.mark.parametrize("integrated", [True, False])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_real_model_computes_what_onnxruntime_does(
    version: str, integrated: bool, standin: Callable[..., ModuleType], plan: Callable[..., Path]
) -> None:
    image = np.random.default_rng(0).uniform(0, 255, (1, 3, 416, 416)).astype(np.float32)
    session = onnxruntime.InferenceSession(str(YOLOX), providers=["CPUExecutionProvider"])
    path = plan(standin(version, integrated=integrated), model=onnx.load(YOLOX))

    with open_engine(path, config.Engine()) as engine:
        found = engine.infer({"images": image})["output"]

        np.testing.assert_allclose(found, session.run(None, {"images": image})[0], rtol=1e-4, atol=1e-4)


def test_several_inputs_and_outputs_keep_their_order(trt10: ModuleType, plan: Callable[..., Path]) -> None:
    info = helper.make_tensor_value_info
    nodes = [helper.make_node("Sub", ["b", "a"], ["first"]), helper.make_node("Add", ["a", "b"], ["second"])]
    values = {name: info(name, TensorProto.FLOAT, [2]) for name in ("b", "a", "first", "second")}
    graph = helper.make_graph(nodes, "g", [values["b"], values["a"]], [values["first"], values["second"]])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    with TensorRtEngine(plan(trt10, model=model)) as engine:
        found = engine.infer({"a": np.float32([1, 2]), "b": np.float32([10, 20])})

        assert [spec.name for spec in engine.inputs] == ["b", "a"]
        assert {name: value.tolist() for name, value in found.items()} == {"first": [9, 18], "second": [11, 22]}


def test_outputs_are_valid_until_the_next_call(trt10: ModuleType, plan: Callable[..., Path]) -> None:
    with TensorRtEngine(plan(trt10, (2,))) as engine:
        first = engine.infer({"x": np.float32([1, 2])})["y"].copy()
        second = engine.infer({"x": np.float32([5, 6])})["y"].copy()

    assert (first.tolist(), second.tolist()) == ([2, 4], [10, 12])


def test_inputs_are_not_written_to(trt10: ModuleType, plan: Callable[..., Path]) -> None:
    array = np.float32([1, 2])
    array.setflags(write=False)

    with TensorRtEngine(plan(trt10, (2,))) as engine:
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
def test_wrong_inputs_are_named(
    tensors: dict[str, np.ndarray], message: str, standin: Callable[..., ModuleType], plan: Callable[..., Path]
) -> None:
    with TensorRtEngine(plan(standin(), (2,))) as engine:
        with pytest.raises(ModelError, match=message):
            engine.infer(tensors)

        assert engine.infer({"x": np.float32([1, 2])})["y"].tolist() == [2, 4]


def test_integers_stay_integers(trt10: ModuleType, plan: Callable[..., Path]) -> None:
    with TensorRtEngine(plan(trt10, (3,), dtype="INT32")) as engine:
        found = engine.infer({"x": np.int32([1, 2, 3])})["y"]

        assert (found.dtype, found.tolist()) == (np.int32, [2, 4, 6])


def test_the_description_says_what_runs_it_and_that_it_is_simulated(trt: ModuleType, plan: Callable[..., Path]) -> None:
    with TensorRtEngine(plan(trt)) as engine:
        assert engine.description == f"TensorRT {trt.__version__} SIMULATED (Orin)"


# Types and layouts inside, float32 outside.


@pytest.mark.parametrize(
    ("dtype", "formats"),
    [
        ("FLOAT", {"x": "HWC", "y": "CHW32"}),
        ("HALF", {}),
        ("HALF", {"x": "CHW16", "y": "CHW16"}),
        ("HALF", {"x": "CHW2", "y": "HWC8"}),
        ("HALF", {"x": "DLA_LINEAR", "y": "DLA_LINEAR"}),
        ("HALF", {"x": "DLA_HWC4", "y": "CHW16"}),
        ("INT8", {}),
        ("INT8", {"x": "CHW32", "y": "CHW4"}),
        ("INT8", {"x": "DLA_HWC4", "y": "DLA_LINEAR"}),
    ],
)
@pytest.mark.parametrize(("slots", "mapped"), [(1, None), (2, True), (2, False)])
def test_the_engines_layout_is_not_seen_outside(
    dtype: str,
    formats: dict[str, str],
    slots: int,
    mapped: bool | None,
    trt10: ModuleType,
    plan: Callable[..., Path],
) -> None:
    path = plan(trt10, dtype=dtype, formats=formats)
    manifest = built(probe(), io_scales={"x": 0.5, "y": 1.0})

    with TensorRtEngine(path, built=manifest, slots=slots, mapped=mapped) as engine:
        for image in (picture(), -picture()):
            found = engine.infer({"x": image})["y"]

            assert found.dtype == np.float32
            assert np.array_equal(found, np.clip(2 * image, -128, 127) if dtype == "INT8" else 2 * image)


def test_strongly_typed_halves_are_float32_outside(
    standin: Callable[..., ModuleType], plan: Callable[..., Path]
) -> None:
    with TensorRtEngine(plan(standin("11.4.0"), dtype="HALF", formats={"x": "CHW16"})) as engine:
        assert np.array_equal(engine.infer({"x": picture()})["y"], 2 * picture())


def test_an_int8_tensor_without_a_scale_is_refused_by_name(trt10: ModuleType, plan: Callable[..., Path]) -> None:
    with pytest.raises(ModelError, match=r"engine\.plan: tensor 'x' is INT8 and its scale is not known"):
        TensorRtEngine(plan(trt10, dtype="INT8"))


def test_a_type_or_layout_that_cannot_be_fed_is_refused_by_name(
    trt10: ModuleType, plan: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = plan(trt10)

    monkeypatch.setattr(trt10.ICudaEngine, "get_tensor_format", lambda _self, _name: trt10.TensorFormat.CDHW32)
    with pytest.raises(ModelError, match=r"engine\.plan: tensor 'x' has layout CDHW32; allowed: chw"):
        TensorRtEngine(path)
    monkeypatch.setattr(trt10.ICudaEngine, "get_tensor_dtype", lambda _self, _name: trt10.DataType.BF16)
    with pytest.raises(ModelError, match=r"engine\.plan: tensor 'x' is BF16; allowed: FLOAT, HALF"):
        TensorRtEngine(path)
    monkeypatch.setattr(trt10.ICudaEngine, "get_tensor_location", lambda _self, _name: trt10.TensorLocation.HOST)
    with pytest.raises(ModelError, match=r"engine\.plan: tensor 'x' holds shapes"):
        TensorRtEngine(path)


def test_rows_that_are_longer_than_their_layout_says_are_refused(
    trt10: ModuleType, plan: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = plan(trt10, (1, 40, 4, 5), dtype="HALF", formats={"x": "CHW16"})
    strides = {"x": (96, 32, 8, 1), "y": (800, 20, 5, 1)}  # of x in vectors of 16
    monkeypatch.setattr(trt10.IExecutionContext, "get_tensor_strides", lambda _self, name: strides[name])

    with pytest.raises(ModelError) as raised:
        TensorRtEngine(path)

    assert str(raised.value) == (
        f"{path}: tensor 'x' is chw16 with strides of [3072, 1024, 256, 32] bytes; expected [3072, 640, 160, 32]; build"
        " the engine with another engine.input_format or output_format"
    )


def test_a_dynamic_dimension_is_refused_by_name(
    trt10: ModuleType, plan: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = plan(trt10)
    monkeypatch.setattr(trt10.ICudaEngine, "get_tensor_shape", lambda _self, _name: (1, 3, -1, 5))

    with pytest.raises(ModelError, match=r"dimension 2 of tensor 'x' is dynamic: \[1, 3, -1, 5\]; build the engine"):
        TensorRtEngine(path)


# Files and devices.


def test_missing_empty_and_damaged_plans_are_refused(trt: ModuleType, plan: Callable[..., Path]) -> None:
    path = plan(trt)
    empty, short = path.with_name("empty.plan"), path.with_name("short.plan")
    empty.touch()
    short.write_bytes(path.read_bytes()[:-100])

    with pytest.raises(ModelError, match=r"absent\.plan: no such plan"):
        TensorRtEngine(path.with_name("absent.plan"))
    with pytest.raises(ModelError, match=r"empty\.plan: is empty"):
        TensorRtEngine(empty)
    with pytest.raises(ModelError, match=r"short\.plan: is no TensorRT plan, or damaged; run .*kPLAN_MAGIC_TAG"):
        TensorRtEngine(short)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"version": "10.16.1"}, r"was built by another version of TensorRT; .*Version tag does not match"),
        ({"compute": "8.6"}, r"was built on another GPU; .*expecting compute 8\.6 got compute 8\.7"),
    ],
)
def test_a_foreign_plan_without_a_manifest_is_told_by_tensorrts_own_words(
    environment: dict[str, str], message: str, standin: Callable[..., ModuleType], plan: Callable[..., Path]
) -> None:
    path = plan(standin("10.3.0"))
    standin(**{"version": "10.3.0", **environment})

    with pytest.raises(DeviceError, match=r"engine\.plan: " + message):
        TensorRtEngine(path)


@pytest.mark.parametrize(
    "words",
    [
        "IRuntime::deserializeCudaEngine: Error Code 2: OutOfMemory (Requested size was 104857600 bytes.)",
        "1: [defaultAllocator.cpp::allocate::20] Error Code 1: Cuda Runtime (out of memory)",
    ],
)
def test_a_plan_that_does_not_fit_into_memory_is_not_to_be_built_again(
    words: str, trt10: ModuleType, plan: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = plan(trt10)

    def refuse(runtime: object, _content: bytes) -> None:
        runtime.logger.log(trt10.ILogger.Severity.ERROR, words)

    monkeypatch.setattr(trt10.Runtime, "deserialize_cuda_engine", refuse)

    with pytest.raises(DeviceError) as raised:
        TensorRtEngine(path)

    assert str(raised.value) == f"{path}: does not fit into memory: 8192 MiB are free ({words})"


def test_a_foreign_plan_with_a_manifest_is_told_field_by_field(
    standin: Callable[..., ModuleType], plan: Callable[..., Path]
) -> None:
    path = plan(standin("8.5.2", integrated=False), dla=True)
    manifest = built(probe(), dla_core=0)
    standin("10.3.0", compute="8.6", dla_cores=0)

    with pytest.raises(DeviceError) as raised:
        TensorRtEngine(path, dla_core=0, built=manifest)

    assert str(raised.value) == (
        f"{path}: was built for another device: TensorRT was 8.5.2 and is 10.3.0; compute capability was 8.7 and is"
        " 8.6; GPU was discrete and is integrated; it is for the DLA, and there is none; run edge-calibrate build"
    )


@pytest.mark.parametrize(("then", "warnings"), [(14, 1), (16, 0), (0, 0)])
def test_another_number_of_multiprocessors_is_told_and_no_obstacle(
    then: int, warnings: int, trt10: ModuleType, plan: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    manifest = built(msgspec.structs.replace(probe(), multiprocessors=then))

    with TensorRtEngine(plan(trt10), built=manifest) as engine:
        assert np.array_equal(engine.infer({"x": picture()})["y"], 2 * picture())

    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == warnings
    assert all("was timed on a GPU of 14 multiprocessors, and this one has 16" in text for text in told)


def test_the_core_is_chosen_before_the_plan_is_loaded(
    standin: Callable[..., ModuleType], plan: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    trt = standin("10.3.0")
    path = plan(trt, dla=True)
    cores: list[int] = []
    load = trt.Runtime.deserialize_cuda_engine

    def noting(runtime: object, content: bytes) -> object:
        cores.append(runtime.DLA_core)
        return load(runtime, content)

    monkeypatch.setattr(trt.Runtime, "deserialize_cuda_engine", noting)

    with TensorRtEngine(path, dla_core=1) as engine:
        description = engine.description

    assert cores == [1]
    assert description == "TensorRT 10.3.0 SIMULATED (DLA 1, Orin)"


def test_a_core_that_is_not_there_is_told_with_those_that_are(
    standin: Callable[..., ModuleType], plan: Callable[..., Path]
) -> None:
    path = plan(standin("10.3.0", dla_cores=1), dla=True)

    with pytest.raises(DeviceError, match=r"DLA core 1 is asked for, but this module has 1 \(allowed: 0\)"):
        TensorRtEngine(path, dla_core=1)

    path = plan(standin("10.16.1"))
    with pytest.raises(DeviceError, match=r"DLA core 0 is asked for.* its TensorRT, 10\.16\.1, has none"):
        TensorRtEngine(path, dla_core=0)


def test_the_device_is_found(standin: Callable[..., ModuleType], tmp_path: Path) -> None:
    standin("10.3.0", integrated=True)
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "nv_tegra_release").write_text(
        "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64, DATE: Wed Jan"
        "  8 01:49:37 UTC 2025\n# KERNEL_VARIANT: oot\n"
    )

    found = probe(root=tmp_path)

    assert found == Device(
        name="Orin",
        tensorrt="10.3.0",
        compute_capability="8.7",
        integrated=True,
        dla_cores=2,
        multiprocessors=16,
        cuda="12.6",
        l4t="36.4.3",
    )


def test_a_device_that_is_no_jetson_has_no_l4t(standin: Callable[..., ModuleType], tmp_path: Path) -> None:
    standin()

    assert probe(root=tmp_path).l4t is None


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("raise ModuleNotFoundError(\"No module named 'tensorrt'\", name='tensorrt')", "--system-site-packages"),
        ("import no_such_module_either", "cannot be imported: No module named 'no_such_module_either'"),
        ("raise ImportError('libnvdla_compiler.so: cannot open shared object file')", "nvidia-l4t-dla-compiler"),
        ("raise ImportError('libnvinfer.so.10: cannot open')", r"cannot be imported: libnvinfer\.so\.10: cannot open$"),
        (
            "raise OSError('libcudart.so.12: wrong ELF class')",
            r"cannot be imported: libcudart\.so\.12: wrong ELF class$",
        ),
    ],
)
def test_why_tensorrt_cannot_be_imported_is_told(
    failure: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tensorrt.py").write_text(failure + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt"]:
        monkeypatch.delitem(sys.modules, name)

    with pytest.raises(DeviceError, match=message):
        load_tensorrt()


# Failures while running.


def test_a_run_that_tensorrt_refuses_is_told_with_its_words(
    standin: Callable[..., ModuleType], plan: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = plan(standin(faults=["execute-fails"]))

    with TensorRtEngine(path) as engine:
        with pytest.raises(DeviceError, match=r"engine\.plan: TensorRT could not run it: .*unspecified launch failure"):
            engine.infer({"x": picture()})

        monkeypatch.setenv("STANDIN_FAULT", "")
        assert np.array_equal(engine.infer({"x": picture()})["y"], 2 * picture())


def test_a_context_that_cannot_be_made_is_told(
    trt10: ModuleType, plan: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = plan(trt10)
    monkeypatch.setattr(trt10.ICudaEngine, "create_execution_context", lambda _self: None)

    with pytest.raises(DeviceError, match=r"engine\.plan: cannot be made ready to run: it gave no reason; .* MiB"):
        TensorRtEngine(path)


def test_memory_that_runs_out_half_way_leaves_nothing(
    trt10: ModuleType, plan: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = plan(trt10)
    driver = importlib.import_module("pycuda.driver")
    give, given = driver.pagelocked_empty, []

    def run_out(*arguments: object, **options: object) -> np.ndarray:
        if len(given) == 3:
            raise driver.MemoryError("cuMemHostAlloc failed: out of memory")
        given.append(arguments)
        return give(*arguments, **options)

    monkeypatch.setattr(driver, "pagelocked_empty", run_out)

    with pytest.raises(DeviceError, match=r"GPU out of memory: asked 0\.0 MiB"):
        TensorRtEngine(path)
    assert len(given) == 3


def test_a_failure_on_the_gpu_asks_for_a_restart(
    trt10: ModuleType, plan: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = importlib.import_module("pycuda.driver")
    enqueue = driver._standin_enqueue

    def illegal() -> None:
        raise driver.LogicError("an illegal memory access was encountered")

    with TensorRtEngine(plan(trt10)) as engine:
        monkeypatch.setattr(driver, "_standin_enqueue", lambda handle, _job: enqueue(handle, illegal))

        with pytest.raises(DeviceLostError, match=r"the GPU failed: .*illegal memory access.*must be restarted"):
            engine.infer({"x": picture()})


def test_what_tensorrt_refuses_after_the_gpu_has_failed_asks_for_a_restart(
    trt10: ModuleType, plan: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = importlib.import_module("pycuda.driver")

    def illegal() -> None:
        raise driver.LogicError("an illegal memory access was encountered")

    def refuse(_context: object, handle: int) -> bool:
        driver._standin_enqueue(handle, illegal)
        return False

    with TensorRtEngine(plan(trt10)) as engine:
        monkeypatch.setattr(trt10.IExecutionContext, "execute_async_v3", refuse)

        with pytest.raises(DeviceLostError, match="must be restarted"):
            engine.submit({"x": picture()})


def test_an_error_in_the_block_passes_through(trt10: ModuleType, plan: Callable[..., Path]) -> None:
    with pytest.raises(ZeroDivisionError), TensorRtEngine(plan(trt10)) as engine:
        engine.submit({"x": picture() * (1 // engine.in_flight)})


def test_closing_twice_is_harmless_and_a_closed_engine_says_so(trt10: ModuleType, plan: Callable[..., Path]) -> None:
    engine = TensorRtEngine(plan(trt10))
    engine.submit({"x": picture()})

    engine.__exit__(None, None, None)
    engine.__exit__(None, None, None)

    assert engine.in_flight == 0
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.infer({"x": picture()})


def test_tensorrts_messages_go_to_the_log(
    standin: Callable[..., ModuleType], plan: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = plan(standin())
    caplog.set_level(logging.DEBUG, logger="edge.engine.tensorrt")
    path.write_bytes(b"nonsense")

    with pytest.raises(ModelError):
        TensorRtEngine(path)

    assert [(record.name, record.levelname) for record in caplog.records] == [("edge.engine.tensorrt", "ERROR")]


def test_an_exception_of_a_log_handler_does_not_reach_tensorrt(
    standin: Callable[..., ModuleType], plan: Callable[..., Path]
) -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError(record)

    path = plan(standin())
    path.write_bytes(b"nonsense")
    handler = Broken()
    log = logging.getLogger("edge.engine.tensorrt")
    log.addHandler(handler)

    try:
        with pytest.raises(ModelError, match="kPLAN_MAGIC_TAG"):
            TensorRtEngine(path)
    finally:
        log.removeHandler(handler)


# Frames in flight.


class Gate:
    """Holds back what TensorRT computes until it is opened, and notes what happens on the GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.started: list[int] = []
        driver = importlib.import_module("pycuda.driver")
        enqueue = driver._standin_enqueue

        def gated(handle: int, job: Callable[[], None]) -> None:
            def held() -> None:
                self.started.append(handle)
                assert self.opened.wait(30)
                job()

            enqueue(handle, held)

        monkeypatch.setattr(driver, "_standin_enqueue", gated)


def test_submit_returns_while_frames_are_computed(
    trt10: ModuleType, plan: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)

    with TensorRtEngine(plan(trt10, (2,))) as engine:
        assert isinstance(engine, Pipelined)
        array = np.float32([1, 2])
        engine.submit({"x": array})
        array[:] = [3, 4]
        engine.submit({"x": array})
        array[:] = 0
        assert engine.in_flight == 2
        with pytest.raises(RuntimeError, match="all 2 slots are in flight; collect one first"):
            engine.submit({"x": array})
        with pytest.raises(RuntimeError, match="2 frames are in flight; collect them first"):
            engine.infer({"x": array})

        gate.opened.set()
        first, second = engine.collect()["y"], engine.collect()["y"]

        assert (first.tolist(), second.tolist()) == ([2, 4], [6, 8])
        assert engine.in_flight == 0
        with pytest.raises(RuntimeError, match="no frame is in flight"):
            engine.collect()


def test_the_next_frame_is_uploaded_while_one_is_computed(
    standin: Callable[..., ModuleType], plan: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    trt = standin(integrated=False)
    driver = importlib.import_module("pycuda.driver")
    enqueue, copy = driver._standin_enqueue, driver.memcpy_htod_async
    gate = Gate(monkeypatch)
    uploaded: list[threading.Event] = []

    def noting(dest: object, src: np.ndarray, stream: object) -> None:
        copy(dest, src, stream)
        uploaded.append(threading.Event())
        enqueue(stream.handle, uploaded[-1].set)

    monkeypatch.setattr(driver, "memcpy_htod_async", noting)

    with TensorRtEngine(plan(trt)) as engine:
        engine.submit({"x": picture()})
        engine.submit({"x": picture()})

        assert uploaded[1].wait(30)
        assert len(gate.started) <= 1
        gate.opened.set()
        engine.collect()
        engine.collect()


def test_outputs_stay_valid_until_their_slot_is_used_again(trt10: ModuleType, plan: Callable[..., Path]) -> None:
    with TensorRtEngine(plan(trt10, (1,)), slots=3) as engine:
        for value in (1, 2):
            engine.submit({"x": np.float32([value])})
        first = engine.collect()["y"]
        engine.submit({"x": np.float32([3])})
        second, third = engine.collect()["y"], engine.collect()["y"]

        assert [value.tolist() for value in (first, second, third)] == [[2], [4], [6]]


def test_a_refused_frame_takes_no_slot(trt10: ModuleType, plan: Callable[..., Path]) -> None:
    with TensorRtEngine(plan(trt10, (1,))) as engine:
        for _ in range(3):
            with pytest.raises(ModelError):
                engine.submit({})
        engine.submit({"x": np.float32([1])})
        engine.submit({"x": np.float32([2])})

        assert [engine.collect()["y"].item() for _ in range(2)] == [2, 4]


def test_leaving_waits_for_frames_in_flight(
    trt10: ModuleType, plan: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    engine = TensorRtEngine(plan(trt10))
    engine.submit({"x": picture()})

    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(engine.__exit__, None, None, None)
        assert not leaving.done()
        gate.opened.set()
        leaving.result(30)


@pytest.mark.parametrize("dtype", ["FLOAT", "HALF", "INT8"])
def test_nothing_is_allocated_per_frame(dtype: str, trt10: ModuleType, plan: Callable[..., Path]) -> None:
    shape = (1, 3, 256, 256)
    image = picture(shape)
    path = plan(trt10, shape, dtype=dtype)
    trt10.IExecutionContext.execute_async_v3 = lambda _self, _handle: True  # the stand-in's arithmetic allocates
    driver = importlib.import_module("pycuda.driver")

    with TensorRtEngine(path, built=built(probe(), io_scales={"x": 0.5, "y": 1.0})) as engine:
        engine.infer({"x": image})
        engine.infer({"x": image})
        gc.collect()
        live = driver._standin_live()
        tracemalloc.start()
        try:
            for _ in range(10):
                engine.infer({"x": image})
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

        assert driver._standin_live() == live
        assert peak < image.nbytes / 4


def test_engines_run_side_by_side_in_threads(standin: Callable[..., ModuleType], plan: Callable[..., Path]) -> None:
    trt = standin("10.3.0")
    path = plan(trt, dla=True)
    meeting = threading.Barrier(2)

    def work(core: int) -> bool:
        with TensorRtEngine(path, dla_core=core) as engine:
            meeting.wait(30)
            return all(
                np.array_equal(engine.infer({"x": picture() + index})["y"], 2 * (picture() + index))
                for index in range(20)
            )

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, (0, 1))) == [True, True]


def test_an_engine_may_move_to_another_thread(trt10: ModuleType, plan: Callable[..., Path]) -> None:
    engine = TensorRtEngine(plan(trt10))

    def work() -> np.ndarray:
        with engine:
            return engine.infer({"x": picture()})["y"].copy()

    with ThreadPoolExecutor(1) as pool:
        assert np.array_equal(pool.submit(work).result(), 2 * picture())

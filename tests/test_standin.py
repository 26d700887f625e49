# ruff: noqa: SLF001 - names with _standin are for tests
"""The stand-ins for TensorRT and pycuda: their names are the real bindings', and they behave where it matters."""

from __future__ import annotations

import inspect
import json
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

VERSIONS = {"10.3.0": "10.3.0", "10.16.1": "10.16.1.11", "11.4.0": "11.4.0.106"}
OURS = {"SIMULATED"}
SHAPE = (1, 3, 8, 8)


def listing(data: Path, version: str) -> dict[str, Any]:
    return json.loads((data / "tensorrt-api" / f"tensorrt-{VERSIONS[version]}.json").read_text())


def public(thing: object) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


def submodules(module: ModuleType) -> set[str]:
    return {name for name, value in vars(module).items() if isinstance(value, ModuleType)} | {"annotations"}


# ------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("version", VERSIONS)
def test_module_has_exactly_the_names_of_the_real_bindings(standin: Any, data: Path, version: str) -> None:
    module = standin(version)

    assert public(module) - OURS - submodules(module) == set(listing(data, version))


@pytest.mark.parametrize("version", VERSIONS)
def test_enumerations_have_the_members_and_numbers_of_the_real_ones(standin: Any, data: Path, version: str) -> None:
    module = standin(version)

    for name, entry in listing(data, version).items():
        if entry["kind"] == "enum":
            members = {member: int(value) for member, value in getattr(module, name).__members__.items()}
            assert members == entry["members"], name
        elif entry["kind"] == "DataType":
            assert str(getattr(module, name)) == entry["value"]


@pytest.mark.parametrize("version", VERSIONS)
def test_classes_have_exactly_the_members_of_the_real_ones(standin: Any, data: Path, version: str) -> None:
    module = standin(version)

    for name, entry in listing(data, version).items():
        if entry["kind"] == "class":
            # Two classes are more than the real ones, for Python's own use: one has to be a buffer, one a sequence.
            found = public(getattr(module, name)) - {"IHostMemory": public(bytes), "Dims": public(tuple)}.get(
                name, set()
            )
            assert found == set(entry["members"]) - {"__init__"}, name


@pytest.mark.parametrize("version", VERSIONS)
def test_properties_can_be_set_where_the_real_ones_can(standin: Any, data: Path, version: str) -> None:
    module = standin(version)

    for name, entry in listing(data, version).items():
        for member, what in entry["members"].items() if entry["kind"] == "class" else ():
            static = inspect.getattr_static(getattr(module, name), member)
            if isinstance(what, str) and what.startswith("property"):
                assert isinstance(static, property), f"{name}.{member}"
                assert (static.fset is not None) == (what == "property rw"), f"{name}.{member}"
            elif member != "__init__":
                assert not isinstance(static, property), f"{name}.{member}"


@pytest.mark.parametrize("version", VERSIONS)
def test_methods_take_the_arguments_that_the_real_ones_take(standin: Any, data: Path, version: str) -> None:
    module = standin(version)
    arguments = sys.modules["tensorrt.listing"].arguments
    checked = 0

    for name, entry in listing(data, version).items():
        for member, what in entry["members"].items() if entry["kind"] == "class" else ():
            signatures = [what] if isinstance(what, str) else what if isinstance(what, list) else []
            wanted = [list(arguments(signature)) for signature in signatures if "(" in signature]
            parameters = list(inspect.signature(getattr(getattr(module, name), member)).parameters) if wanted else []
            if not wanted or parameters in (["_args", "_kwargs"], ["self", "args", "kwargs"]):
                continue  # a property, or not simulated
            checked += 1
            # create_execution_context(strategy) and the like: the optional ones may be missing.
            assert any(given[: len(parameters) - 1] == parameters[1:] for given in wanted), f"{name}.{member}"
    assert checked > 80


def test_names_that_a_version_lacks_can_be_neither_read_nor_set(standin: Any) -> None:
    module = standin("8.5.2")
    config = module.Builder(module.Logger()).create_builder_config()

    for missing in ("progress_monitor", "builder_optimization_level", "made_up"):
        with pytest.raises(AttributeError):
            getattr(config, missing)
        with pytest.raises(AttributeError):
            setattr(config, missing, None)
    assert not hasattr(module, "IProgressMonitor")
    assert not hasattr(module.ParserError, "node_name")


def test_arguments_of_another_type_are_refused(standin: Any) -> None:
    module = standin()
    config = module.Builder(module.Logger()).create_builder_config()

    with pytest.raises(TypeError, match="set_flag"):
        config.set_flag("INT8")
    with pytest.raises(TypeError, match="set_flag"):
        config.set_flag(module.QuantizationFlag.CALIBRATE_BEFORE_FUSION)
    with pytest.raises(TypeError):
        1 << module.TensorFormat.CHW32
    with pytest.raises(TypeError, match="No constructor"):
        module.IBuilderConfig()
    with pytest.raises(TypeError, match="IInt8Calibrator"):
        config.int8_calibrator = object()


# ---------------------------------------------------------------------------------------------------------- building


def tiny() -> onnx.ModelProto:
    """Convolution, ReLU and a global average: the last one is nothing for a DLA."""
    weights = np.random.default_rng(0).standard_normal((8, 3, 3, 3)).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"], name="relu"),
        helper.make_node("GlobalAveragePool", ["r"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(*entry) for entry in (("x", 1, SHAPE), ("y", 1, (1, 8, 1, 1)))]
    graph = helper.make_graph(nodes, "tiny", ends[:1], ends[1:], [numpy_helper.from_array(weights, "w")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def reference(image: NDArray[np.float32]) -> NDArray[np.float32]:
    session = onnxruntime.InferenceSession(tiny().SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": image})[0]


@pytest.fixture
def image() -> NDArray[np.float32]:
    return np.random.default_rng(1).standard_normal(SHAPE).astype(np.float32)


@contextmanager
def current() -> Iterator[Any]:
    """A current context of the stand-in GPU."""
    import pycuda.driver as cuda

    cuda.init()
    context = cuda.Device(0).retain_primary_context()
    context.push()
    yield cuda
    cuda.Context.pop()
    context.detach()


@pytest.fixture
def context(standin: Any, assert_released: Callable[[], None]) -> Iterator[Any]:
    """The same, with TensorRT 10.3; afterwards nothing may be left of what a test has made there."""
    standin()
    with current() as cuda:
        yield cuda
    assert_released()


class Parts(SimpleNamespace):
    """What a build needs, and its log."""

    def build(self) -> Any:
        return self.builder.build_serialized_network(self.network, self.config)

    def said(self, part: str) -> bool:
        return any(part in text for _, text in self.log)


def parts(module: ModuleType, model: onnx.ModelProto | None = None, *, flags: int | None = None) -> Parts:
    log: list[tuple[str, str]] = []

    class Log(module.ILogger):
        def __init__(self) -> None:
            module.ILogger.__init__(self)

        def log(self, severity: Any, msg: str) -> None:
            log.append((severity.name, msg))

    logger = Log()
    builder = module.Builder(logger)
    explicit = getattr(module.NetworkDefinitionCreationFlag, "EXPLICIT_BATCH", None)
    if flags is None:
        flags = 0 if explicit is None else 1 << int(explicit)
    network = builder.create_network(flags)
    parser = module.OnnxParser(network, logger)
    parsed = parser.parse((model or tiny()).SerializeToString())
    config = builder.create_builder_config()
    return Parts(log=log, logger=logger, builder=builder, network=network, parser=parser, parsed=parsed, config=config)


def run(module: ModuleType, logger: Any, plan: Any, image: NDArray[np.generic]) -> NDArray[np.float32]:
    """One inference, asynchronous as the product does it."""
    import pycuda.driver as cuda

    engine = module.Runtime(logger).deserialize_cuda_engine(plan)
    execution, stream = engine.create_execution_context(), cuda.Stream()
    source, target = cuda.pagelocked_empty(image.shape, image.dtype), cuda.pagelocked_zeros((1, 8, 1, 1), np.float32)
    source[...] = image
    into, out = cuda.mem_alloc(source.nbytes), cuda.mem_alloc(target.nbytes)
    assert execution.set_tensor_address("x", int(into))
    assert execution.set_tensor_address("y", int(out))
    cuda.memcpy_htod_async(into, source, stream)
    assert execution.execute_async_v3(stream.handle)
    cuda.memcpy_dtoh_async(target, out, stream)
    stream.synchronize()
    return target.copy()


@pytest.mark.parametrize("version", ["8.5.2", *VERSIONS])
def test_fp32_engines_compute_what_onnxruntime_does(standin: Any, image: NDArray[np.float32], version: str) -> None:
    module = standin(version)
    made = parts(module)

    with current():
        output = run(module, made.logger, made.build(), image)

    assert np.array_equal(output, reference(image))


def calibrator(module: ModuleType, batches: list[Any], cache: bytes | None = None) -> Any:
    class Calibrator(module.IInt8EntropyCalibrator2):
        def __init__(self) -> None:
            module.IInt8EntropyCalibrator2.__init__(self)
            self.left, self.written = list(batches), None

        def get_batch_size(self) -> int:
            return 1

        def get_batch(self, names: list[str]) -> Any:
            assert names == ["x"]
            return self.left.pop(0) if self.left else None

        def read_calibration_cache(self) -> bytes | None:
            return cache

        def write_calibration_cache(self, cache: Any) -> None:
            self.written = bytes(cache)

    return Calibrator()


def test_int8_calibration_reads_device_memory_and_loses_some_precision(
    context: Any, image: NDArray[np.float32]
) -> None:
    module = sys.modules["tensorrt"]
    memory = context.mem_alloc(image.nbytes)
    context.memcpy_htod(memory, image)
    made = parts(module)
    made.config.set_flag(module.BuilderFlag.INT8)
    made.config.int8_calibrator = calibrator(module, [[int(memory)]])

    plan = made.build()

    scale = struct.pack(">f", np.abs(image).max() / 127).hex()
    header, first = made.config.int8_calibrator.written.decode().splitlines()[:2]
    assert header == "TRT-100300-EntropyCalibration2"
    assert first == f"x: {scale}"
    difference = np.abs(run(module, made.logger, plan, image) - reference(image)).max()
    assert 0 < difference < 0.05 * np.abs(reference(image)).max()


@pytest.mark.usefixtures("context")
def test_a_cache_of_this_version_is_used_and_one_of_another_is_not() -> None:
    module = sys.modules["tensorrt"]
    body = b"\nx: 3c010a14\nc: 3c010a14\nr: 3c010a14\ny: 3c010a14\n"
    used, skipped = parts(module), parts(module)
    for made, header in ((used, b"TRT-100300-EntropyCalibration2"), (skipped, b"TRT-8502-EntropyCalibration2")):
        made.config.set_flag(module.BuilderFlag.INT8)
        made.config.int8_calibrator = calibrator(module, [], header + body)

    assert used.build() is not None
    assert skipped.build() is None
    assert skipped.said("no scaling factors detected")
    assert not skipped.said("TRT-8502")  # not a word about it


@pytest.mark.usefixtures("context")
def test_exceptions_in_callbacks_are_lost(capfd: pytest.CaptureFixture[str]) -> None:
    module = sys.modules["tensorrt"]
    made = parts(module)
    made.config.set_flag(module.BuilderFlag.INT8)
    made.config.int8_calibrator = calibrator(module, [np.zeros(3)])

    assert made.build() is None
    assert "Exception caught in get_batch()" in capfd.readouterr().err


@pytest.mark.usefixtures("context")
def test_layer_precision_counts_only_with_a_constraint_flag(image: NDArray[np.float32]) -> None:
    module = sys.modules["tensorrt"]
    outputs = []
    for constrained in (False, True):
        made = parts(module)
        made.config.set_flag(module.BuilderFlag.INT8)
        made.network.get_layer(0).precision = module.DataType.FLOAT
        for index in range(made.network.num_layers):
            for tensor in (made.network.get_layer(index).get_input(0), made.network.get_layer(index).get_output(0)):
                tensor.set_dynamic_range(-4.0, 4.0)
        if constrained:
            made.config.set_flag(module.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)
        outputs.append(run(module, made.logger, made.build(), image))

    assert not np.array_equal(outputs[0], reference(image))
    assert np.array_equal(outputs[1], reference(image))


def test_what_the_dla_refuses_falls_back_when_allowed(standin: Any) -> None:
    module = standin("10.3.0")
    made, strict = parts(module), parts(module)
    for build in (made, strict):
        build.config.set_flag(module.BuilderFlag.FP16)
        build.config.default_device_type = module.DeviceType.DLA
        build.config.DLA_core = 0
    made.config.set_flag(module.BuilderFlag.GPU_FALLBACK)
    made.config.profiling_verbosity = module.ProfilingVerbosity.DETAILED

    plan = made.build()

    assert strict.build() is None
    assert strict.said("layer node_of_y is not supported on DLA")
    assert made.said("Layer 'node_of_y' (REDUCE): Unsupported on DLA. Switching this layer's device type to GPU.")
    assert made.said("[DlaLayer] {ForeignNode[conv...relu]}")
    assert made.said("[GpuLayer] REDUCE: node_of_y")
    inspector = module.Runtime(made.logger).deserialize_cuda_engine(plan).create_engine_inspector()
    layers = json.loads(inspector.get_engine_information(module.LayerInformationFormat.JSON))["Layers"]
    assert [(layer["Name"], layer["LayerType"]) for layer in layers] == [
        ("{ForeignNode[conv...relu]}", "DLA"),
        ("node_of_y", "Reduce"),
    ]
    assert layers[0]["Inputs"][0]["Format/Datatype"] == "Sixteen wide channel vectorized row major FP16 format"


@pytest.mark.parametrize(("version", "cores"), [("8.5.2", 2), ("10.3.0", 2), ("10.16.1", 0), ("11.4.0", 0)])
def test_only_versions_with_dla_have_cores(standin: Any, version: str, cores: int) -> None:
    module = standin(version, dla_cores=2)

    assert module.Builder(module.Logger()).num_DLA_cores == cores


def test_dla_memory_must_be_a_power_of_two(standin: Any) -> None:
    module = standin()
    made = parts(module)

    made.config.set_memory_pool_limit(module.MemoryPoolType.DLA_MANAGED_SRAM, 3 << 20)

    assert made.build() is None


def test_strongly_typed_networks_refuse_precision_flags(standin: Any) -> None:
    module = standin()
    made = parts(module, flags=1 << int(module.NetworkDefinitionCreationFlag.STRONGLY_TYPED))

    made.config.set_flag(module.BuilderFlag.FP16)

    assert made.build() is None
    assert made.said("condition: !config.getFlag(BuilderFlag::kFP16)")


def test_8_5_wants_explicit_batch(standin: Any) -> None:
    module = standin("8.5.2")

    made = parts(module, flags=0)

    assert not made.parsed
    assert "EXPLICIT_BATCH" in made.parser.get_error(0).desc()


def test_progress_is_told_in_nested_phases_and_can_stop_the_build(standin: Any) -> None:
    module = standin()
    told: list[tuple[Any, ...]] = []

    class Monitor(module.IProgressMonitor):
        def __init__(self, *, stop: bool) -> None:
            module.IProgressMonitor.__init__(self)
            self.stop = stop

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            told.append((phase_name, parent_phase, num_steps))

        def step_complete(self, phase_name: str, step: int) -> bool:  # noqa: ARG002 - given by position
            return not self.stop

        def phase_finish(self, phase_name: str) -> None:
            told.append((phase_name,))

    made = parts(module)
    made.config.progress_monitor = Monitor(stop=False)
    assert made.build() is not None
    assert told[0][:2] == ("Building Engine", None)
    assert told[1][:2] == ("Building engine from subgraph", "Building Engine")
    assert told[-1] == ("Building Engine",)

    made.config.progress_monitor = Monitor(stop=True)
    assert made.build() is None


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize(
    ("form", "dtype"),
    [("DLA_LINEAR", "HALF"), ("DLA_HWC4", "INT8"), ("CHW32", "INT8"), ("CHW16", "HALF"), ("HWC8", "HALF")],
)
def test_inputs_are_read_in_their_format(image: NDArray[np.float32], form: str, dtype: str) -> None:
    module = sys.modules["tensorrt"]
    made = parts(module)
    tensor = made.network.get_input(0)
    tensor.dtype = module.DataType.__members__[dtype]
    tensor.allowed_formats = 1 << int(module.TensorFormat.__members__[form])
    tensor.set_dynamic_range(-4.0, 4.0)
    made.config.set_flag(module.BuilderFlag.FP16)
    if dtype == "INT8":
        made.config.set_flag(module.BuilderFlag.INT8)
    plan = made.build()
    step = 4.0 / 127 if dtype == "INT8" else 1
    exact = np.clip(np.rint(image / step), -127, 127).astype(np.int8) if dtype == "INT8" else image.astype(np.float16)

    output = run(module, made.logger, plan, by_hand(exact, form))

    seen = exact.astype(np.float32) * np.float32(step)
    assert np.allclose(output, reference(seen), rtol=0.02, atol=0.02)


@pytest.mark.usefixtures("context")
def test_int8_inputs_need_a_range_whatever_the_cache_says() -> None:
    module = sys.modules["tensorrt"]
    body = b"TRT-100300-EntropyCalibration2\nx: 3c010a14\nc: 3c010a14\nr: 3c010a14\ny: 3c010a14\n"
    without, ranged = parts(module), parts(module)
    for made in (without, ranged):
        made.config.set_flag(module.BuilderFlag.INT8)
        made.config.int8_calibrator = calibrator(module, [], body)
        made.network.get_input(0).dtype = module.DataType.INT8
    ranged.network.get_input(0).set_dynamic_range(-1.0, 1.0)

    assert without.build() is None
    assert without.said("no dynamic range")
    assert ranged.build() is not None


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize(("linear", "expected"), [(False, "HWC8"), (True, "LINEAR")])
def test_where_all_formats_are_allowed_the_fastest_is_taken(linear: bool, expected: str) -> None:
    module = sys.modules["tensorrt"]
    made = parts(module)
    tensor = made.network.get_input(0)
    tensor.dtype = module.DataType.HALF
    if linear:
        tensor.allowed_formats = 1 << int(module.TensorFormat.LINEAR)
    made.config.set_flag(module.BuilderFlag.FP16)

    engine = module.Runtime(made.logger).deserialize_cuda_engine(made.build())

    assert engine.get_tensor_format("x").name == expected


def by_hand(array: NDArray[np.generic], form: str) -> NDArray[np.generic]:
    """Each element put where the header says that it lies."""
    _, channels, height, width = array.shape
    size = array.itemsize
    vector = {"CHW32": 32, "CHW16": 16, "HWC8": 8, "DLA_HWC4": 4, "DLA_LINEAR": 1}[form]
    row = -(-width * size * (4 if form == "DLA_HWC4" else 1) // 64) * 64 // size
    memory = np.zeros(4096, array.dtype)
    for c in range(channels):
        for y in range(height):
            for x in range(width):
                place = {
                    "DLA_LINEAR": (c * height + y) * row + x,
                    "DLA_HWC4": y * row + x * 4 + c,
                    "HWC8": (y * width + x) * 8 + c,
                }.get(form, ((c // vector * height + y) * width + x) * vector + c % vector)
                memory[place] = array[0, c, y, x]
    return memory


# ------------------------------------------------------------------------------------------------------------- plans


def refusal(standin: Any, plan: bytes, **machine: Any) -> list[str]:
    module = standin(**machine)
    made = parts(module)
    assert module.Runtime(made.logger).deserialize_cuda_engine(plan) is None
    return [text for severity, text in made.log if severity == "ERROR"]


def test_plans_that_do_not_fit_are_refused_as_tensorrt_refuses_them(standin: Any) -> None:
    module = standin("10.3.0")
    made = parts(module)
    made.config.set_flag(module.BuilderFlag.FP16)
    made.config.set_flag(module.BuilderFlag.GPU_FALLBACK)
    made.config.default_device_type = module.DeviceType.DLA
    made.config.DLA_core = 1
    plan = bytes(made.build())

    assert "Version tag does not match" in refusal(standin, plan, version="8.5.2")[0]
    assert "Error Code 6: API Usage Error" in refusal(standin, plan, compute="8.6")[0]
    assert "expecting compute 8.6 got compute 8.7, please rebuild" in refusal(standin, plan, compute="8.6")[0]
    assert "DLA" in refusal(standin, plan, dla_cores=0)[0]
    for damaged in (b"", b"garbage", plan[:-1], plan[:100] + b"\x00" + plan[101:]):
        assert "kPLAN_MAGIC_TAG" in refusal(standin, damaged)[0]


def test_a_plan_is_a_buffer_and_nothing_else(standin: Any) -> None:
    plan = parts(standin()).build()

    assert memoryview(plan).nbytes == plan.nbytes == len(bytes(plan))
    with pytest.raises(AttributeError):
        plan.decode()
    with pytest.raises(TypeError):
        len(plan)


# ------------------------------------------------------------------------------------------------------------ faults


@pytest.mark.parametrize(
    ("fault", "text"), [("build-fails", "Could not find any implementation"), ("out-of-memory", "OutOfMemory")]
)
def test_builds_fail_as_asked(standin: Any, fault: str, text: str) -> None:
    made = parts(standin(faults=[fault]))

    assert made.build() is None
    assert made.said(text)


def test_parser_refuses_the_node_that_is_named(standin: Any) -> None:
    made = parts(standin(faults=["parse:relu"]))

    assert not made.parsed
    error = made.parser.get_error(0)
    assert (error.node(), error.node_name(), error.node_operator()) == (1, "relu", "Relu")
    assert made.said("In node 1 with name: relu and operator: Relu")


@pytest.mark.parametrize(("fault", "code"), [("oom-kill", -9), ("crash", -11)])
def test_builds_kill_their_process_as_asked(standin: Any, tmp_path: Path, fault: str, code: int) -> None:
    standin(faults=[fault])
    (tmp_path / "tiny.onnx").write_bytes(tiny().SerializeToString())
    script = """if True:
        import sys, tensorrt as trt
        builder = trt.Builder(trt.Logger())
        network = builder.create_network(1)
        trt.OnnxParser(network, trt.Logger()).parse_from_file(sys.argv[1])
        builder.build_serialized_network(network, builder.create_builder_config())
    """

    process = subprocess.run([sys.executable, "-c", script, str(tmp_path / "tiny.onnx")], check=False)

    assert process.returncode == code


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize(("fault", "spoiled"), [("wrong-fp16", True), ("wrong-int8", False), ("nan", True)])
def test_engines_compute_rubbish_as_asked(
    monkeypatch: pytest.MonkeyPatch, image: NDArray[np.float32], fault: str, *, spoiled: bool
) -> None:
    monkeypatch.setenv("STANDIN_FAULT", fault)
    made = parts(sys.modules["tensorrt"])
    made.config.set_flag(sys.modules["tensorrt"].BuilderFlag.FP16)

    output = run(sys.modules["tensorrt"], made.logger, made.build(), image)

    assert spoiled != np.allclose(output, reference(image), atol=0.1)


# -------------------------------------------------------------------------------------------------------------- CUDA


# What pycuda 2026.1's extension has of the classes that the stand-in has.
PYCUDA = {
    "Device": "compute_capability count get_attribute name retain_primary_context total_memory",
    "Context": "detach get_current get_device pop push synchronize",
    "Stream": "handle is_done synchronize wait_for_event",
    "Event": "query record synchronize time_since time_till",
    "DeviceAllocation": "free",
    "PagelockedHostAllocation": "free get_device_pointer get_flags",
}
PYCUDA_FUNCTIONS = {
    "get_driver_version": [],
    "get_version": [],
    "init": ["flags"],
    "mem_get_info": [],
    "memcpy_dtoh": ["dest", "src"],
    "memcpy_dtoh_async": ["dest", "src", "stream"],
    "memcpy_htod": ["dest", "src"],
    "memcpy_htod_async": ["dest", "src", "stream"],
    "pagelocked_empty": ["shape", "dtype", "order", "mem_flags"],
    "pagelocked_zeros": ["shape", "dtype", "order", "mem_flags"],
}


def test_pycuda_has_the_real_ones_names(context: Any) -> None:
    enumerations = {"ctx_flags", "event_flags", "host_alloc_flags", "device_attribute"}
    errors = {"Error", "LaunchError", "LogicError", "MemoryError", "RuntimeError"}
    own = {name for name in public(context) if getattr(getattr(context, name), "__module__", "") == "pycuda.driver"}

    assert own == {*PYCUDA, *PYCUDA_FUNCTIONS, *enumerations, *errors, "mem_alloc"}
    for name, members in PYCUDA.items():
        instance = context.Stream() if name == "Stream" else getattr(context, name)
        assert public(instance) == set(members.split()), name
    for name, arguments in PYCUDA_FUNCTIONS.items():
        assert list(inspect.signature(getattr(context, name)).parameters) == arguments, name


def test_memory_is_asked_for_in_python_numbers(context: Any) -> None:
    """As the real one, which Boost.Python binds."""
    with pytest.raises(TypeError, match="unsigned long"):
        context.mem_alloc(np.int64(16))


def test_nothing_works_without_a_context_on_the_thread(standin: Any) -> None:
    standin()
    import pycuda.driver as cuda

    cuda.init()
    for call in (cuda.Stream, cuda.Event, cuda.mem_get_info, lambda: cuda.mem_alloc(1)):
        with pytest.raises(cuda.LogicError, match="invalid device context"):
            call()


def test_asynchronous_copies_take_page_locked_memory_only(context: Any) -> None:
    memory, stream = context.mem_alloc(16), context.Stream()

    with pytest.raises(context.LogicError, match="pageable"):
        context.memcpy_htod_async(memory, np.zeros(4, np.float32), stream)


def test_freed_memory_cannot_be_copied(context: Any) -> None:
    memory, host = context.mem_alloc(16), context.pagelocked_zeros(4, np.float32)
    memory.free()

    with pytest.raises(context.LogicError, match="no live allocation"):
        context.memcpy_htod(int(memory), host)
    with pytest.raises(context.LogicError):
        memory.free()


def test_copies_that_leave_their_memory_fail(context: Any) -> None:
    memory = context.mem_alloc(16)

    with pytest.raises(context.LogicError, match="no live allocation"):
        context.memcpy_htod(memory, np.zeros(5, np.float32))


def test_a_copy_whose_memory_is_freed_before_it_runs_fails_at_the_next_wait(context: Any) -> None:
    memory, host, stream = context.mem_alloc(16), context.pagelocked_zeros(4, np.float32), context.Stream()
    gate = context.Event()
    blocked = threading.Event()
    context._standin_enqueue(stream.handle, blocked.wait)
    context.memcpy_htod_async(memory, host, stream)
    gate.record(stream)

    assert not gate.query()
    memory.free()
    blocked.set()

    with pytest.raises(context.LogicError):
        stream.synchronize()


def test_streams_wait_for_events_of_others(context: Any) -> None:
    first, second, event = context.Stream(), context.Stream(), context.Event()
    order: list[str] = []
    blocked = threading.Event()
    context._standin_enqueue(first.handle, blocked.wait)
    context._standin_enqueue(first.handle, lambda: order.append("first"))
    event.record(first)
    second.wait_for_event(event)
    context._standin_enqueue(second.handle, lambda: order.append("second"))

    assert not second.is_done()
    blocked.set()
    second.synchronize()

    assert order == ["first", "second"]


def test_mapped_memory_is_the_devices_too(context: Any) -> None:
    mapped = context.pagelocked_zeros(4, np.float32, mem_flags=context.host_alloc_flags.DEVICEMAP)
    plain = context.pagelocked_zeros(4, np.float32)
    read = np.empty(4, np.float32)
    mapped[:] = 7

    context.memcpy_dtoh(read, mapped.base.get_device_pointer())

    assert read.tolist() == [7, 7, 7, 7]
    with pytest.raises(context.LogicError, match="DEVICEMAP"):
        plain.base.get_device_pointer()

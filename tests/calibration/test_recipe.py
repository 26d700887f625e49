"""What a build decides, by deployment, TensorRT and device."""

from __future__ import annotations

import shlex
from typing import Any

import msgspec
import pytest

from calibration.recipe import Decision, Pools, Recipe, Step, TensorIo, decide, has_dla, pools, trtexec
from edge import config
from edge.errors import ConfigError, DeviceError
from edge.manifest import Device, engine_settings, version

DLA = config.Dla()


def device(tensorrt: str = "10.3.0", *, dla_cores: int = 2) -> Device:
    return Device(
        name="Orin", tensorrt=tensorrt, compute_capability="8.7", integrated=True, dla_cores=dla_cores, cuda="12.6"
    )


def decided(*, tensorrt: str = "10.3.0", dla_cores: int = 2, precision: Any = None, **section: Any) -> Decision:
    engine = config.Engine(**section)
    step = Step(precision or engine.precision)
    return decide(engine, device(tensorrt, dla_cores=dla_cores), step, key="models.m.engine")


@pytest.mark.parametrize(
    ("tensorrt", "dla", "expected"),
    [
        ("8.5.2", None, "qdq"),
        ("10.3.0", None, "qdq"),
        ("10.16.1", None, "qdq"),
        ("11.4.0", None, "qdq"),
        ("8.5.2", DLA, "cache"),
        ("10.3.0", DLA, "cache"),
        ("11.4.1", DLA, "qdq"),
    ],
)
def test_int8_takes_the_route_that_the_version_has(tensorrt: str, dla: config.Dla | None, expected: str) -> None:
    assert decided(tensorrt=tensorrt, dla=dla).quantization == expected


@pytest.mark.parametrize(("tensorrt", "typed"), [("8.5.2", False), ("10.16.1", False), ("11.0.0", True)])
def test_networks_are_strongly_typed_from_11_on(tensorrt: str, typed: bool) -> None:
    assert decided(tensorrt=tensorrt).strongly_typed is typed


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_floating_point_needs_no_quantization(precision: str) -> None:
    assert decided(precision=precision, quantization="cache").quantization == "none"


@pytest.mark.parametrize("quantization", ["cache", "ranges", "calibrator"])
def test_implicit_int8_ended_with_10(quantization: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine.quantization is {quantization}, which ended .*allowed: auto, qdq"):
        decided(tensorrt="11.4.0", quantization=quantization)


def test_no_dla_takes_qdq_before_11() -> None:
    with pytest.raises(ConfigError, match="allowed: auto, cache, ranges, calibrator"):
        decided(dla=DLA, quantization="qdq")


def test_the_core_is_the_deployments() -> None:
    assert decided(dla=config.Dla(core=1)).dla_core == 1


def test_a_core_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(DeviceError, match=r"dla.core is 1, but Orin has 1 DLA core \(allowed: 0\)"):
        decided(dla=config.Dla(core=1), dla_cores=1)


@pytest.mark.parametrize(
    ("tensorrt", "cores", "why"),
    [("10.3.0", 0, "Orin Nano has not"), ("10.16.1", 2, "10.7 was the last"), ("11.4.0", 2, "11.4.1 brings it back")],
)
def test_a_dla_that_is_not_there_is_an_error_or_a_warning(tensorrt: str, cores: int, why: str) -> None:
    with pytest.raises(DeviceError, match=why):
        decided(tensorrt=tensorrt, dla=DLA, dla_cores=cores)

    found = decided(tensorrt=tensorrt, dla=config.Dla(if_missing="gpu"), dla_cores=cores)

    assert found.dla_core is None
    assert why in found.warnings[0]


@pytest.mark.parametrize(
    ("section", "tensorrt", "problem"),
    [
        ({"input_format": "fp16:chw16"}, "11.4.0", "input_format is fp16:chw16; a strongly typed engine"),
        ({"output_format": "int8:chw32"}, "10.3.0", "output_format is int8:chw32, which needs scales"),
        ({"input_format": "fp16:dla_linear"}, "10.3.0", "a layout of the DLA, and the engine is for the GPU"),
    ],
)
def test_formats_that_an_engine_cannot_have(section: dict[str, Any], tensorrt: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        decided(tensorrt=tensorrt, **section)


def test_onnxruntime_needs_no_engine() -> None:
    with pytest.raises(ConfigError, match=r"engine\.backend is onnxruntime, which runs the ONNX model itself"):
        decided(backend="onnxruntime")


def test_of_what_is_free_half_is_workspace_and_a_quarter_is_left_alone() -> None:
    assert pools(config.Engine(), device(), on_dla=False, free_bytes=4000) == Pools(workspace=2000, tactic_dram=3000)


def test_a_workspace_that_is_asked_for_is_given() -> None:
    found = pools(config.Engine(workspace_mb=64), device(), on_dla=False, free_bytes=4000)

    assert found.workspace == found.tactic_dram == 64 * 2**20


def test_a_gpu_with_memory_of_its_own_needs_no_limits() -> None:
    discrete = msgspec.structs.replace(device(), integrated=False)

    assert pools(config.Engine(), discrete, on_dla=False, free_bytes=4000) == Pools(workspace=None)


def test_dla_pools_are_in_bytes_and_for_the_dla_alone() -> None:
    section = config.Engine(dla=DLA)

    assert pools(section, device(), on_dla=False, free_bytes=0).dla_managed_sram is None
    assert pools(section, device(), on_dla=True, free_bytes=0) == Pools(
        workspace=0, tactic_dram=0, dla_managed_sram=2**20, dla_local_dram=2**30, dla_global_dram=2**29
    )


@pytest.mark.parametrize(
    ("tensorrt", "cores", "expected"),
    [("10.3.0", 1, True), ("10.16.1", 2, False), ("11.4.1", 2, True), ("8.5.2", 0, False)],
)
def test_which_devices_have_a_dla(tensorrt: str, cores: int, expected: bool) -> None:
    assert has_dla(device(tensorrt, dla_cores=cores)) is expected


def test_an_engine_does_not_depend_on_which_core_runs_it() -> None:
    first, second = (config.Engine(dla=config.Dla(core=core)) for core in (0, 1))

    assert engine_settings(first) == engine_settings(second) != engine_settings(config.Engine())


def test_versions_have_three_parts() -> None:
    assert version("10.3") == version("10.3.0.30") == (10, 3, 0)


def recipe(**changes: Any) -> Recipe:
    tensor = TensorIo(name="images", shape=(1, 3, 8, 8), dtype="fp32", layout="chw")
    given: dict[str, Any] = {
        "model": "m.onnx",
        "name": "m",
        "tensorrt": "10.3.0",
        "precision": "int8",
        "quantization": "cache",
        "strongly_typed": False,
        "cache": "a folder/calibration.cache",
        "inputs": (tensor,),
        "outputs": (tensor,),
        "pools": Pools(workspace=2**31),
        "timing_cache": "timing.cache",
        "out": "work",
    }
    return Recipe(**{**given, **changes})


def test_the_trtexec_line_builds_the_same_engine() -> None:
    line, unsaid = trtexec(
        recipe(
            dla_core=1,
            float_layers={"out": "fp16"},
            inputs=(TensorIo(name="images", shape=(1, 3, 8, 8), dtype="fp16", layout="chw16"),),
            pools=pools(config.Engine(dla=DLA, workspace_mb=512), device(), on_dla=True, free_bytes=0),
            optimization_level=4,
        ),
        plan="engine.plan",
        layer_names={"out": "head/Conv"},
    )

    assert unsaid == ()
    assert shlex.split(line) == [
        "trtexec",
        "--onnx=m.onnx",
        "--saveEngine=engine.plan",
        "--int8",
        "--fp16",
        "--calib=a folder/calibration.cache",
        "--useDLACore=1",
        "--allowGPUFallback",
        "--memPoolSize=workspace:512,dlaSRAM:1,dlaLocalDRAM:1024,dlaGlobalDRAM:512",
        "--inputIOFormats=fp16:chw16",
        "--precisionConstraints=obey",
        "--layerPrecisions=head/Conv:fp16",
        "--layerOutputTypes=head/Conv:fp16",
        "--builderOptimizationLevel=4",
        "--timingCacheFile=timing.cache",
        "--profilingVerbosity=detailed",
        "--skipInference",
    ]


def test_what_trtexec_of_a_version_lacks_is_not_said() -> None:
    old, _ = trtexec(recipe(tensorrt="8.5.2"), plan="p", layer_names={})
    new, _ = trtexec(recipe(tensorrt="11.4.0", strongly_typed=True, cache=None), plan="p", layer_names={})

    assert old.endswith("--buildOnly")
    assert "--int8" not in new
    assert "--stronglyTyped" not in new


def test_what_trtexec_has_no_words_for_is_told() -> None:
    layers = recipe(quantization="ranges", float_layers={"a": "fp16", "b": "fp32"})

    line, unsaid = trtexec(layers, plan="p", layer_names={"a": "head:0", "b": "neck"})

    assert "--layerPrecisions=neck:fp32" in shlex.split(line)
    assert unsaid == ("ranges: it takes the same from a calibration cache", "the precision of head:0")

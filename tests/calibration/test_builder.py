"""The builder inside the tests' process, on the stand-in; as a child process it is in test_child.py."""

from __future__ import annotations

import io
import itertools
import json
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import msgspec
import numpy as np
import onnx_ir as ir
import pytest
from onnx import helper

from calibration import builder, cache, events, images, qdq
from calibration.recipe import Pools, TensorIo
from calibration.reporting import Reporter
from edge import manifest
from edge.errors import ConfigError, DataError, DeviceError, ModelError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from calibration.events import Done, Event
    from calibration.recipe import Recipe

VERSIONS = ["8.5.2", "10.3.0", "10.16.1", "11.4.0"]


@pytest.fixture
def build() -> Callable[[Recipe], tuple[Done, list[Event]]]:
    """Builds, and gives the outcome and what was reported before it."""

    def run(recipe: Recipe) -> tuple[Done, list[Event]]:
        buffer = io.BytesIO()
        done = builder.build(recipe, Reporter(buffer))
        return done, [events.decode(line) for line in buffer.getvalue().splitlines()]

    return run


@pytest.fixture
def watched(standin: Callable, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[ModuleType, dict]]:
    """A stand-in that keeps the network and the configuration of the last build in a dict."""

    def use(version: str = "10.3.0", **options: object) -> tuple[ModuleType, dict]:
        trt, seen = standin(version, **options), {}

        class Watched(trt.Builder):
            def build_serialized_network(self, network, config):
                seen["network"], seen["config"] = network, config
                return super().build_serialized_network(network, config)

        monkeypatch.setattr(trt, "Builder", Watched)
        return trt, seen

    return use


def flags_of(trt: ModuleType, config: object) -> set[str]:
    return {name for name, member in trt.BuilderFlag.__members__.items() if config.get_flag(member)}


def asked_of(made: Recipe) -> dict[str, dict]:
    return {entry["output"]: entry for entry in json.loads(Path(made.out, events.ASKED).read_text())}


def warnings_of(reported: list[Event]) -> list[str]:
    return [event.text for event in reported if isinstance(event, events.Log) and event.severity == "warning"]


def quantized(model: ir.Model) -> ir.Model:
    names = [value.name for value in model.graph.inputs] + [v.name for node in model.graph for v in node.outputs]
    qdq.insert(model, dict.fromkeys(names, 0.05), [], key="fp16")
    return model


# ---------------------------------------------------------------------------------------------------------- routes


@pytest.mark.parametrize(
    ("version", "quantization"),
    [
        *itertools.product(["8.5.2", "10.3.0", "10.16.1"], ["none", "cache", "ranges", "qdq"]),
        *itertools.product(["11.4.0"], ["none", "qdq"]),
    ],
)
def test_every_version_builds_what_it_has(standin, make_recipe, build, residual_model, version, quantization):
    standin(version)
    model = quantized(residual_model) if quantization == "qdq" else residual_model
    made = make_recipe(version, model=model, quantization=quantization)

    done, reported = build(made)

    assert done.tensorrt == version
    assert done.simulated
    assert done.plan_bytes == Path(made.out, manifest.PLAN).stat().st_size
    assert done.layers == len(json.loads(Path(made.out, events.ASKED).read_text()))
    assert json.loads(Path(made.out, events.INSPECTOR).read_text())["Layers"]
    assert [event.name for event in reported if isinstance(event, events.Phase) and event.parent is None] == [
        "parsing",
        "building",
        "reading back",
    ]
    assert not warnings_of(reported)


@pytest.mark.parametrize(
    ("version", "changes", "expected"),
    [
        ("8.5.2", {"precision": "fp32"}, set()),
        ("10.3.0", {"precision": "fp32"}, set()),
        ("11.4.0", {"precision": "fp32"}, set()),
        ("11.4.0", {"precision": "fp16"}, {"TF32"}),
        ("8.5.2", {"precision": "fp16"}, {"TF32", "FP16"}),
        ("10.3.0", {"precision": "fp16"}, {"TF32", "FP16"}),
        ("10.3.0", {"quantization": "cache"}, {"TF32", "FP16", "INT8"}),
        (
            "8.5.2",
            {"quantization": "ranges", "float_layers": {"sum": "fp16"}},
            {"TF32", "FP16", "INT8", "OBEY_PRECISION_CONSTRAINTS"},
        ),
        ("10.3.0", {"precision": "fp16", "dla_core": 1}, {"TF32", "FP16", "GPU_FALLBACK"}),
    ],
)
def test_flags(watched, make_recipe, build, version, changes, expected):
    trt, seen = watched(version)

    build(make_recipe(version, **changes))

    assert flags_of(trt, seen["config"]) == expected


def test_in_a_strongly_typed_network_precisions_are_the_models(standin, make_recipe, build):
    standin("11.4.0")
    made = make_recipe("11.4.0", precision="fp16")

    build(made)

    assert {entry["precision"] for entry in asked_of(made).values()} == {"fp32"}


@pytest.mark.parametrize(
    ("version", "typed", "expected"),
    [("11.4.0", False, "only strongly typed"), ("10.3.0", True, "no strongly typed")],
)
def test_a_recipe_of_the_other_kind_of_network_is_refused(standin, make_recipe, build, version, typed, expected):
    standin(version)

    with pytest.raises(ModelError, match=f"{expected} networks"):
        build(make_recipe(version, strongly_typed=typed))


def test_another_version_than_the_recipe_is_for_is_refused(standin, make_recipe, build):
    standin("10.3.0")

    with pytest.raises(DeviceError, match=r"TensorRT is 10.3.0, but the build was decided for 8.5.2"):
        build(make_recipe("8.5.2"))


# ------------------------------------------------------------------------------------------------------------ INT8


def test_activations_without_a_range_are_told_apart_from_constants(standin, make_recipe, build, build_model, rng):
    standin("10.3.0")
    nodes = [
        helper.make_node("Constant", [], ["two"], value_float=2.0),
        helper.make_node("Conv", ["images", "w"], ["conv"], name="conv"),
        helper.make_node("Mul", ["conv", "two"], ["mul"], name="mul"),
        helper.make_node("Relu", ["mul"], ["out"], name="relu"),
    ]
    model = build_model(nodes, {"w": rng.standard_normal((4, 3, 1, 1)).astype(np.float32)})
    output = (TensorIo(name="out", shape=(1, 4, 8, 8), dtype="fp32", layout="chw"),)

    for quantization in ("ranges", "cache"):
        made = make_recipe(
            model=model, quantization=quantization, outputs=output, scales={"images": 0.1, "conv": 0.1, "out": 0.1}
        )
        done, reported = build(made)

        assert done.without_range == ("mul",)
        assert done.harmless == 1
        assert not warnings_of(reported), "one line for each tensor is TensorRT's habit, and Done sums it up"


def test_ranges_are_set_tensor_by_tensor(watched, make_recipe, build):
    _, seen = watched()

    build(make_recipe(quantization="ranges", ranges={"images": 2.0, "stem": 6.5}))

    network = seen["network"]
    assert network.get_input(0).dynamic_range == (-2.0, 2.0)
    assert network.get_layer(0).get_output(0).dynamic_range == (-6.5, 6.5)


def test_a_cache_of_another_version_fails_before_the_build(standin, make_recipe, build, tmp_path):
    standin("10.3.0")
    path = tmp_path / "old.cache"
    path.write_text(cache.render({"images": 0.05}, tensorrt="8.5.2"))

    with pytest.raises(ModelError, match=r"old.cache: is for TensorRT 8.5.2, but this is 10.3.0, which skips it"):
        build(make_recipe(quantization="cache", cache=str(path)))

    assert not list(Path(tmp_path, "out").iterdir())


def test_a_model_with_qdq_that_ignores_the_cache_is_an_error(standin, make_recipe, build, residual_model):
    standin("10.3.0")

    with pytest.raises(DataError, match=r"asked for no calibration at all.*engine.quantization to qdq"):
        build(make_recipe(model=quantized(residual_model), quantization="cache", scales={"images": 0.05}))


@pytest.fixture
def pictures(tmp_path: Path, rng: np.random.Generator) -> Callable[[str], str]:
    """Writes a deployment with three pictures; gives its path."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for index in range(3):
        image = rng.integers(0, 255, (32, 32, 3), np.uint8)
        image[:16] = 255
        cv2.imwrite(str(folder / f"{index}.png"), image)

    def write(calibration: str = "{images: pictures, count: 2}") -> str:
        path = tmp_path / "line3.yaml"
        path.write_text(
            "version: 1\nmodels:\n  - name: residual\n    path: model.onnx\n    task: {type: classification}\n"
            f"    calibration: {calibration}\n"
        )
        return str(path)

    return write


@pytest.mark.parametrize("version", ["8.5.2", "10.3.0", "10.16.1"])
def test_tensorrt_calibrates_on_the_deployments_pictures(
    standin, assert_released, make_recipe, build, pictures, tmp_path, version
):
    standin(version)
    path = tmp_path / "out" / "tensorrt-123.cache"
    made = make_recipe(version, quantization="calibrator", cache=str(path), deployment=pictures())

    done, reported = build(made)

    assert done.pictures == 2
    written = cache.parse(path.read_text(), source=path.name)
    assert written.tensorrt == version
    assert written.scales["images"] == pytest.approx(1 / 127), "pictures are 0..1 after pre-processing"
    assert [event for event in reported if getattr(event, "name", "") == "calibrating"] == [
        events.Phase("calibrating", "building", 2),
        events.Step("calibrating", 0),
        events.Step("calibrating", 1),
        events.Finished("calibrating"),
    ]
    assert_released()


def test_what_tensorrt_has_calibrated_is_used_again(standin, make_recipe, build, pictures, tmp_path):
    standin("10.3.0")
    made = make_recipe(quantization="calibrator", cache=str(tmp_path / "own.cache"), deployment=pictures())

    first, _ = build(made)
    second, _ = build(made)

    assert (first.pictures, second.pictures) == (2, 0)


def test_tensorrts_own_cache_of_another_version_is_calibrated_anew(standin, make_recipe, build, pictures, tmp_path):
    standin("10.3.0")
    path = tmp_path / "own.cache"
    path.write_text(cache.render({"images": 0.05}, tensorrt="8.5.2"))

    done, reported = build(make_recipe(quantization="calibrator", cache=str(path), deployment=pictures()))

    assert done.pictures == 2
    assert cache.parse(path.read_text(), source="own.cache").tensorrt == "10.3.0"
    assert "is for TensorRT 8.5.2, but this is 10.3.0" in warnings_of(reported)[0]


def test_a_picture_that_cannot_be_read_any_more_is_no_end_of_the_calibration(
    standin, assert_released, make_recipe, build, pictures, tmp_path, monkeypatch
):
    standin("10.3.0")
    made = make_recipe(quantization="calibrator", cache=str(tmp_path / "own.cache"), deployment=pictures())
    collect = images.collect

    def collect_and_lose(*patterns, **options):
        found = collect(*patterns, **options)
        found.used[1].path.unlink()
        return found

    monkeypatch.setattr(images, "collect", collect_and_lose)

    with pytest.raises(DataError, match="cannot be read any more"):
        build(made)

    assert_released()


@pytest.mark.parametrize(
    ("calibration", "error", "expected"),
    [("{images: nowhere}", DataError, "nowhere"), ("null", ConfigError, "calibration is missing")],
)
def test_without_pictures_there_is_no_build(standin, make_recipe, build, pictures, calibration, error, expected):
    standin("10.3.0")

    with pytest.raises(error, match=expected):
        build(make_recipe(quantization="calibrator", deployment=pictures(calibration)))


# ------------------------------------------------------------------------------------------------------ precision


def test_single_layers_stay_in_floating_point_by_the_name_of_their_output(standin, make_recipe, build):
    standin("10.3.0")
    made = make_recipe(quantization="ranges", float_layers={"dw": "fp16", "sum": "fp32", "folded": "fp16"})

    done, reported = build(made)

    precisions = {output: entry["precision"] for output, entry in asked_of(made).items()}
    assert (precisions["dw"], precisions["sum"], precisions["pw"]) == ("fp16", "fp32", "int8")
    assert done.unmatched == ("folded",)
    assert "not in the parsed network: folded" in warnings_of(reported)[0]


def test_the_outputs_type_is_held_as_well(watched, make_recipe, build):
    trt, seen = watched()

    build(make_recipe(quantization="ranges", float_layers={"stem": "fp16"}))

    layer = seen["network"].get_layer(0)
    assert layer.get_output_type(0) == trt.DataType.HALF
    assert layer.output_type_is_set(0)


# ------------------------------------------------------------------------------------------------------------- DLA


@pytest.mark.parametrize("version", ["8.5.2", "10.3.0"])
def test_the_dla_is_asked_layer_by_layer(watched, make_recipe, build, version):
    trt, seen = watched(version)
    sizes = Pools(workspace=1 << 28, dla_managed_sram=1 << 20, dla_local_dram=1 << 30, dla_global_dram=1 << 29)
    made = make_recipe(
        version, quantization="cache", dla_core=1, pools=sizes, float_layers={"stem": "fp32", "dw": "fp16"}
    )

    build(made)

    on_dla = {output: entry["dla"] for output, entry in asked_of(made).items()}
    assert on_dla["sum"] is True
    assert on_dla["dw"] is True
    assert on_dla["stem"] is False, "no DLA runs FP32"
    assert on_dla["flat"] is False
    config, pools = seen["config"], trt.MemoryPoolType
    assert (config.default_device_type, config.DLA_core) == (trt.DeviceType.DLA, 1)
    assert config.get_device_type(seen["network"].get_layer(0)) == trt.DeviceType.GPU
    assert config.get_memory_pool_limit(pools.WORKSPACE) == 1 << 28
    assert config.get_memory_pool_limit(pools.DLA_MANAGED_SRAM) == 1 << 20
    assert config.get_memory_pool_limit(pools.DLA_LOCAL_DRAM) == 1 << 30
    assert config.get_memory_pool_limit(pools.DLA_GLOBAL_DRAM) == 1 << 29


@pytest.mark.parametrize(("version", "expected"), [("8.5.2", None), ("10.3.0", 3 << 30)])
def test_what_tactics_may_take_is_limited_where_it_can_be(watched, make_recipe, build, version, expected):
    trt, seen = watched(version)

    build(make_recipe(version, pools=Pools(workspace=1 << 28, tactic_dram=3 << 30)))

    limits = {pool.name: seen["config"].get_memory_pool_limit(pool) for pool in trt.MemoryPoolType.__members__.values()}
    assert limits.get("TACTIC_DRAM") == expected


@pytest.mark.parametrize(("core", "expected"), [(0, True), (None, False)])
def test_the_parser_adjusts_the_model_for_the_dla(standin, make_recipe, build, monkeypatch, core, expected):
    """From 10.16 on, which the stand-in has without a DLA, as 11.4.0 has."""
    trt, parsers = standin("11.4.0"), []

    class Watched(trt.OnnxParser):
        def __init__(self, network, logger):
            super().__init__(network, logger)
            parsers.append(self)

    monkeypatch.setattr(trt, "OnnxParser", Watched)
    monkeypatch.setattr(builder, "_check_dla", lambda *_: None)

    with suppress(builder.BuildError):
        build(make_recipe("11.4.0", dla_core=core))

    assert parsers[0].get_flag(trt.OnnxParserFlag.ADJUST_FOR_DLA) == expected


def test_without_the_dla_nothing_is_said_of_it(standin, make_recipe, build):
    standin("10.3.0")
    made = make_recipe()

    build(made)

    assert {entry["dla"] for entry in asked_of(made).values()} == {None}


def test_a_layer_that_the_dla_refuses_fails_the_build_where_falling_back_is_off(standin, make_recipe, build):
    standin("10.3.0")

    with pytest.raises(builder.BuildError) as raised:
        build(make_recipe(quantization="cache", dla_core=0, gpu_fallback=False))

    assert raised.value.failed.kind == "unsupported"
    assert raised.value.failed.nodes == ("pool",)


def test_fp32_for_a_layer_contradicts_a_dla_without_fallback(standin, make_recipe, build):
    standin("10.3.0")
    made = make_recipe(quantization="cache", dla_core=0, gpu_fallback=False, float_layers={"sum": "fp32"})

    with pytest.raises(ConfigError, match=r"layer 'block.add' is to stay in FP32, which no DLA runs"):
        build(made)


@pytest.mark.parametrize(
    ("cores", "core", "expected"),
    [
        (0, 0, "DLA core 0 is asked for, but TensorRT 10.3.0 finds no DLA here"),
        (1, 1, r"DLA core 1 is asked for, but there are 1 \(allowed: 0\)"),
    ],
)
def test_a_dla_core_that_is_not_there(standin, make_recipe, build, cores, core, expected):
    standin("10.3.0", dla_cores=cores)

    with pytest.raises(DeviceError, match=expected):
        build(make_recipe(precision="fp16", dla_core=core))


# ------------------------------------------------------------------------------------------------ inputs, outputs


def test_inputs_and_outputs_get_their_types_and_layouts(watched, make_recipe, build, build_model, rng):
    trt, seen = watched()
    model = build_model(
        [helper.make_node("Conv", ["images", "w"], ["out"], name="conv")],
        {"w": rng.standard_normal((8, 3, 1, 1)).astype(np.float32)},
    )
    made = make_recipe(
        model=model,
        quantization="cache",
        dla_core=0,
        inputs=(TensorIo(name="images", shape=(1, 3, 8, 8), dtype="int8", layout="dla_hwc4", scale=0.05),),
        outputs=(TensorIo(name="out", shape=(1, 8, 8, 8), dtype="fp16", layout="chw16"),),
        scales={"images": 0.06, "out": 0.05},
    )

    build(made)

    source, result = seen["network"].get_input(0), seen["network"].get_output(0)
    assert (source.dtype, result.dtype) == (trt.DataType.INT8, trt.DataType.HALF)
    assert source.allowed_formats == 1 << int(trt.TensorFormat.DLA_HWC4)
    assert result.allowed_formats == 1 << int(trt.TensorFormat.CHW16)
    assert source.dynamic_range == pytest.approx((-127 * 0.05, 127 * 0.05)), "the recipe's, beside the cache"
    assert result.dynamic_range is None
    assert asked_of(made)["out"]["precision"] == "int8", "the output's own type is not the layer's precision"


@pytest.mark.parametrize("quantization", ["none", "cache"])
def test_inputs_and_outputs_that_nothing_is_said_of_are_linear(watched, make_recipe, build, build_model, quantization):
    """By default all formats are allowed; not every output is in the recipe."""
    trt, seen = watched()
    nodes = [
        helper.make_node("Relu", ["images"], ["out"], name="relu"),
        helper.make_node("Sigmoid", ["out"], ["other"], name="sigmoid"),
    ]
    model = build_model(nodes, {}, outputs=("out", "other"))
    output = TensorIo(name="out", shape=(1, 3, 8, 8), dtype="fp32" if quantization == "none" else "fp16", layout="chw")
    io = {"inputs": (msgspec.structs.replace(make_recipe().inputs[0], dtype=output.dtype),), "outputs": (output,)}

    build(make_recipe(model=model, quantization=quantization, **io))

    network, linear = seen["network"], 1 << int(trt.TensorFormat.LINEAR)
    assert [network.get_output(index).allowed_formats for index in range(2)] == [linear, linear]
    assert network.get_input(0).allowed_formats == linear


def test_a_range_that_tensorrt_refuses_is_named(standin, make_recipe, build, monkeypatch):
    trt = standin("10.3.0")
    monkeypatch.setattr(trt.ITensor, "set_dynamic_range", lambda *_: False)

    with pytest.raises(ModelError, match=r"refuses the range 6\.35 for tensor 'images'"):
        build(make_recipe(quantization="ranges"))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"name": "image"}, "has no input 'image'; it has: images"),
        ({"shape": (1, 3, 16, 16)}, r"input 'images' is \[1, 3, 8, 8\]; expected \[1, 3, 16, 16\]"),
    ],
)
def test_an_input_that_is_not_the_models_is_refused(standin, make_recipe, build, changes, expected):
    standin("10.3.0")
    given = make_recipe().inputs[0]

    with pytest.raises(ModelError, match=expected):
        build(make_recipe(inputs=(msgspec.structs.replace(given, **changes),)))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_dimension_that_is_left_open_is_named(standin, make_recipe, build, build_model, version):
    standin(version)
    model = build_model([helper.make_node("Relu", ["images"], ["out"], name="relu")], {}, input_shape=(1, 3, "h", 8))

    with pytest.raises(ModelError, match=r"input 'images' is \[1, 3, -1, 8\], where -1 is dynamic"):
        build(make_recipe(version, model=model))


@pytest.mark.parametrize(
    ("version", "nodes"),
    [("8.5.2", ("node 8",)), ("10.3.0", ("block.last (Conv)",)), ("11.4.0", ("block.last (Conv)",))],
)
def test_what_the_parser_refuses_is_named(standin, make_recipe, build, version, nodes):
    standin(version, faults=["parse:block.last"])

    with pytest.raises(builder.BuildError) as raised:
        build(make_recipe(version))

    assert raised.value.failed.kind == "parse"
    assert raised.value.failed.nodes == nodes
    assert "not supported here" in raised.value.failed.reason


# ----------------------------------------------------------------------------------------------------- timing cache


@pytest.mark.parametrize("version", VERSIONS)
def test_the_timing_cache_is_kept_between_builds(standin, make_recipe, build, tmp_path, version):
    standin(version)
    made = make_recipe(version)

    build(made)
    first = Path(made.out, manifest.TIMING_CACHE).read_bytes()
    (tmp_path / "timing.cache").write_bytes(first)
    _, reported = build(made)

    assert Path(made.out, manifest.TIMING_CACHE).read_bytes().startswith(first)
    assert len(Path(made.out, manifest.TIMING_CACHE).read_bytes()) > len(first)
    assert not warnings_of(reported)
    assert (tmp_path / "timing.cache").read_bytes() == first, "the one in use is the parent's to replace"


@pytest.mark.parametrize("content", [b"not a timing cache", b"STANDIN TIMING 8.5.2 8.7\n"])
def test_a_timing_cache_of_another_version_or_a_damaged_one_starts_empty(
    standin, make_recipe, build, tmp_path, content
):
    standin("10.3.0")
    (tmp_path / "timing.cache").write_bytes(content)

    _, reported = build(make_recipe())

    assert any("the timing cache starts empty" in text for text in warnings_of(reported))
    assert Path(tmp_path, "out", manifest.TIMING_CACHE).read_bytes().startswith(b"STANDIN TIMING 10.3.0")


def test_a_build_that_fails_leaves_no_plan(standin, make_recipe, build):
    standin("10.3.0", faults=["build-fails"])
    made = make_recipe()

    with pytest.raises(builder.BuildError):
        build(made)

    assert not Path(made.out, manifest.PLAN).exists()
    assert not Path(made.out, manifest.TIMING_CACHE).exists()


# ---------------------------------------------------------------------------------------------------- what is seen


@pytest.mark.parametrize(("version", "level"), [("8.5.2", None), ("10.3.0", 5)])
def test_the_optimization_level_is_set_where_there_is_one(watched, make_recipe, build, version, level):
    _, seen = watched(version)

    _, reported = build(make_recipe(version, optimization_level=5))

    assert getattr(seen["config"], "builder_optimization_level", None) == level
    assert bool(warnings_of(reported)) == (level is None)


def test_tensorrts_phases_are_parts_of_ours(standin, make_recipe, build):
    standin("10.3.0")

    _, reported = build(make_recipe())

    phases = {event.name: event for event in reported if isinstance(event, events.Phase)}
    assert phases["Building Engine"].parent == "building"
    assert phases["Timing graph nodes"].parent == "Building Engine"
    steps = [event.step for event in reported if isinstance(event, events.Step) and event.name == "Timing graph nodes"]
    assert steps == list(range(phases["Timing graph nodes"].steps))
    assert {event.name for event in reported if isinstance(event, events.Finished)} == set(phases)


def test_a_signal_after_the_last_step_is_not_lost(standin, make_recipe, build, monkeypatch):
    trt = standin("10.3.0")

    class Late(trt.Builder):
        def build_serialized_network(self, network, config):
            plan = super().build_serialized_network(network, config)
            signal.raise_signal(signal.SIGINT)
            return plan

    monkeypatch.setattr(trt, "Builder", Late)

    with pytest.raises(KeyboardInterrupt):
        build(make_recipe())

    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.set_wakeup_fd(-1) == -1


def test_an_inspector_that_gives_no_text_is_no_failure(standin, make_recipe, build, monkeypatch):
    trt = standin("10.3.0")
    monkeypatch.setattr(trt.EngineInspector, "get_engine_information", lambda *_: b"\xff".decode())
    made = make_recipe()

    _, reported = build(made)

    assert "where layers run is not known" in warnings_of(reported)[0]
    assert not Path(made.out, events.INSPECTOR).exists()


def test_before_the_progress_monitor_there_are_our_own_phases_only(standin, make_recipe, build):
    standin("8.5.2")

    _, reported = build(make_recipe("8.5.2"))

    assert [event.name for event in reported if isinstance(event, events.Phase)] == [
        "parsing",
        "building",
        "reading back",
    ]


def test_tensorrts_log_keeps_of_the_verbose_what_says_where_layers_run(standin, capsys):
    trt = standin("10.3.0")
    buffer = io.BytesIO()
    from calibration.reporting import make_logger

    made = make_logger(trt, Reporter(buffer))
    severity = trt.ILogger.Severity
    made.log(severity.VERBOSE, "Tactic: 0x17 Time: 0.01")
    made.log(severity.VERBOSE, "[GpuLayer] CONVOLUTION: conv1")
    made.log(severity.INFO, "Detected 1 inputs and 1 output network tensors.")
    for _ in range(2):
        made.log(severity.WARNING, "Running layernorm after self-attention in FP16 may cause overflow.")
    made.log(severity.WARNING, "Missing scale and zero-point for tensor a, expect fall back to non-int8")
    made.log(severity.ERROR, "it is broken")

    assert capsys.readouterr().err.splitlines() == [
        "[V] [GpuLayer] CONVOLUTION: conv1",
        "[I] Detected 1 inputs and 1 output network tensors.",
        "[W] Running layernorm after self-attention in FP16 may cause overflow.",
        "[W] Running layernorm after self-attention in FP16 may cause overflow.",
        "[W] Missing scale and zero-point for tensor a, expect fall back to non-int8",
        "[E] it is broken",
    ]
    assert [events.decode(line) for line in buffer.getvalue().splitlines()] == [
        events.Log("warning", "Running layernorm after self-attention in FP16 may cause overflow."),
        events.Log("error", "it is broken"),
    ]
    assert list(made.errors) == ["it is broken"]


def test_what_c_code_prints_does_not_get_among_the_events():
    program = (
        "import os\nfrom calibration.builder import _claim_stdout\nevents = _claim_stdout()\n"
        "os.write(1, b'noise\\n')\nprint('more', flush=True)\nevents.write(b'{}\\n')\nevents.flush()\n"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)

    assert done.stdout == b"{}\n"
    assert done.stderr == b"noise\nmore\n"

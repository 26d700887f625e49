"""From a deployment to an installed engine, on the stand-in for TensorRT: decisions, comparison, installation."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import msgspec
import numpy as np
import onnx_ir as ir
import pytest
import yaml

from calibration import build, images
from calibration.calibrate import calibrate
from calibration.events import LOG
from calibration.recipe import Step
from edge import config, manifest
from edge.engine import open_engine
from edge.engine.tensorrt import probe
from edge.errors import ConfigError, DataError, DeviceError, ExitCode, ModelError
from edge.process import open_pipeline

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    Use = Callable[..., ModuleType]

COMMAND = Path(sys.executable).parent / "edge-calibrate"
WEIGHTS = {"w_stem": (8, 3, 3, 3), "w_body": (8, 8, 3, 3), "w_head": (5, 8, 4, 4)}
MODEL = f"""<ir_version: 8, opset_import: ["" : 17]>
classifier (float[1,3,16,16] images, {", ".join(f"float{list(shape)} {name}" for name, shape in WEIGHTS.items())})
=> (float[1,5] out) {{
    stem = Conv <pads = [1, 1, 1, 1]> (images, w_stem)
    act = Relu (stem)
    body = Conv <pads = [1, 1, 1, 1]> (act, w_body)
    sum = Add (body, act)
    pooled = AveragePool <kernel_shape = [4, 4], strides = [4, 4]> (sum)
    head = Conv <kernel_shape = [4, 4]> (pooled, w_head)
    flat = Flatten (head)
    out = Softmax (flat)
}}"""


DOCUMENT = {
    "version": 1,
    "models": [
        {
            "name": "m",
            "path": "model.onnx",
            "artifacts": "artifacts",
            "task": {"type": "classification"},
            "input": {"resize": "stretch"},
            "calibration": {"images": "pictures", "method": "max"},
        }
    ],
}
"""The deployment of ``deployed``, as a file's content."""


def classifier() -> ir.Model:
    """A small one with seeded weights, and names as exporters give them."""
    rng = np.random.default_rng(0)
    model = ir.from_onnx_text(MODEL)
    for value in list(model.graph.inputs)[1:]:
        array = rng.standard_normal(WEIGHTS[str(value.name)]) / np.sqrt(np.prod(WEIGHTS[str(value.name)][1:]))
        value.const_value = ir.tensor(array.astype(np.float32), name=value.name)
        model.graph.inputs.remove(value)
        model.graph.register_initializer(value)
    for node in model.graph:
        node.name = f"/{node.outputs[0].name}/{node.op_type}"
    return model


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small classifier, pictures for it, and its calibration; tests work on copies."""
    folder = tmp_path_factory.mktemp("prepared")
    rng = np.random.default_rng(0)
    ir.save(classifier(), folder / "model.onnx")
    (folder / "pictures").mkdir()
    for index in range(6):
        small = rng.integers(0, 255, (4, 4, 3), np.uint8)
        cv2.imwrite(str(folder / "pictures" / f"{index}.png"), cv2.resize(small, (16, 16)))
    model = deployed(folder)
    calibrate(model, pictures_of(folder), model.artifacts_dir)
    return folder


@pytest.fixture
def site(prepared: Path, tmp_path: Path) -> Path:
    """A copy of the prepared folder."""
    return Path(shutil.copytree(prepared, tmp_path / "site"))


def deployed(folder: Path, **engine: Any) -> config.Model:
    return config.Model(
        name="m",
        path=str(folder / "model.onnx"),
        artifacts=str(folder / "artifacts"),
        task=config.Classification(),
        input=config.Input(resize="stretch"),
        calibration=config.Calibration(images=str(folder / "pictures"), method="max"),
        engine=msgspec.convert(engine, config.Engine),
    )


def pictures_of(folder: Path) -> images.ImageSet:
    return images.collect([str(folder / "pictures")])


def built(folder: Path, *, force: bool = False, pictures: bool = True, **engine: Any) -> build.Built:
    model = deployed(folder, **engine)
    found = pictures_of(folder) if pictures else None
    return build.build(model, probe(), deployment=folder / "d.yaml", pictures=found, force=force)


def left_in(folder: Path) -> set[str]:
    return {path.name for path in (folder / "artifacts").iterdir()}


ENGINE_FILES = {manifest.PLAN, manifest.ENGINE_MANIFEST, manifest.PLACEMENT, manifest.TIMING_CACHE, LOG}


@pytest.mark.parametrize("version", ["8.5.2", "10.3.0", "10.16.1", "11.4.0"])
@pytest.mark.parametrize("precision", ["int8", "fp16", "fp32"])
def test_an_engine_is_built_compared_installed_and_run(
    standin: Use, assert_released: Callable[[], None], site: Path, version: str, precision: str
) -> None:
    standin(version)
    before = left_in(site)

    done = built(site, precision=precision)

    assert done.manifest is not None
    assert (done.manifest.precision, done.manifest.device.tensorrt) == (precision, version)
    assert done.manifest.parity is not None
    assert done.manifest.parity.cosine > 0.99
    assert done.manifest.shapes == {"images": (1, 3, 16, 16), "out": (1, 5)}
    assert left_in(site) - before - {manifest.PARSED} == ENGINE_FILES
    assert Path(done.attempts[0].planned.recipe.model).name in left_in(site) | {"model.onnx"}
    with open_pipeline(deployed(site, precision=precision)) as pipeline:
        assert pipeline.precision == precision
        assert pipeline.detect(np.zeros((16, 16, 3), np.uint8))
    assert_released()


@pytest.mark.parametrize(
    ("engine", "quantization"),
    [
        ({"dla": {}}, "cache"),
        ({"quantization": "cache"}, "cache"),
        ({"quantization": "ranges"}, "ranges"),
        ({"quantization": "qdq"}, "qdq"),
    ],
)
def test_int8_comes_from_where_the_deployment_says(
    standin: Use, site: Path, engine: dict[str, Any], quantization: str
) -> None:
    standin()

    done = built(site, **engine)

    assert done.manifest is not None
    assert done.manifest.quantization == quantization
    assert list(done.manifest.made_from) == [manifest.INT8_MODEL if quantization == "qdq" else manifest.RANGES]
    assert done.attempts[0].placement.precisions()["int8"] + done.attempts[0].placement.devices()["DLA"]


def test_a_cache_is_written_anew_for_the_tensorrt_that_is_here(standin: Use, site: Path) -> None:
    standin("8.5.2")

    done = built(site, quantization="cache")

    assert any("is for TensorRT 10.3.0: written anew" in note for note in done.attempts[0].planned.notes)
    assert (site / "artifacts" / manifest.CACHE).read_text().startswith("TRT-100300-"), "the calibration's stays"
    assert (site / "artifacts" / manifest.ENGINE_CACHE).read_text().startswith("TRT-8502-")
    assert f"--calib={site / 'artifacts' / manifest.ENGINE_CACHE}" in done.attempts[0].planned.trtexec


def test_layers_that_calibration_kept_in_floating_point_are_told_to_tensorrt(standin: Use, site: Path) -> None:
    standin()
    model = deployed(site, quantization="cache")
    assert model.calibration is not None
    section = msgspec.structs.replace(model.calibration, fp16=[config.LayerRule(name="/body/*")])
    calibrate(msgspec.structs.replace(model, calibration=section), pictures_of(site), model.artifacts_dir)

    done = built(site, quantization="cache", fp32=[{"op": "Flatten"}])

    assert done.attempts[0].planned.recipe.float_layers == {"body": "fp16", "flat": "fp32"}


def test_layers_in_fp32_lose_their_pairs_where_int8_is_qdq(standin: Use, site: Path) -> None:
    standin()

    built(site, fp32=[{"name": "/body/*"}])

    parsed = ir.load(site / "artifacts" / manifest.PARSED).graph
    (body,) = (node for node in parsed if node.name == "/body/Conv")
    assert [str(value.name) for value in body.inputs if value is not None] == ["act", "w_body"]
    assert sum(node.op_type == "QuantizeLinear" for node in parsed) == 4, "of the other two: activation and weight"


def test_rules_that_leave_nothing_in_int8_are_refused(standin: Use, site: Path) -> None:
    standin()

    with pytest.raises(ConfigError, match=r"engine.fp32 leaves no layer in INT8; set .* to fp16 or fp32"):
        built(site, fp32=[{"op": "Conv"}])


def test_a_fallback_has_no_int8_inputs(standin: Use, site: Path) -> None:
    standin(faults=["wrong-int8"])

    done = built(site, quantization="cache", input_format="int8:chw32")

    assert done.manifest is not None
    assert (done.manifest.precision, done.manifest.io_scales) == ("fp16", {})


def test_a_rule_that_matches_no_layer_is_refused(standin: Use, site: Path) -> None:
    standin()

    with pytest.raises(ConfigError, match=r"models.m.engine.fp32\[0\]: matches no layer that is in the model"):
        built(site, fp32=[{"op": "Gelu"}])


def test_an_engine_that_misses_a_limit_gives_way_to_the_first_fallback_that_keeps_it(
    standin: Use, site: Path, caplog: pytest.LogCaptureFixture
) -> None:
    standin(faults=["wrong-int8"])

    done = built(site)

    steps = [attempt.planned.decision.step for attempt in done.attempts]
    assert steps == [
        Step("int8"),
        Step("int8", norm_fp32=True, fallback="norm-fp32"),
        Step("fp16", norm_fp32=True, fallback="fp16"),
    ]
    assert done.manifest is not None
    assert (done.manifest.precision, done.manifest.fallback) == ("fp16", "fp16")
    assert done.attempts[2].planned.recipe.float_layers == {"out": "fp32"}
    assert "int8: not installed: output 'out': cosine" in caplog.text


def test_where_nothing_keeps_the_limits_the_engine_in_use_stays(standin: Use, site: Path) -> None:
    standin()
    built(site)
    before = (site / "artifacts" / manifest.ENGINE_MANIFEST).read_bytes()
    standin(faults=["nan"])

    done = built(site)

    assert done.manifest is None
    assert len(done.attempts) == 4
    assert (site / "artifacts" / manifest.ENGINE_MANIFEST).read_bytes() == before


def test_what_cannot_be_built_gives_way_as_well(standin: Use, site: Path) -> None:
    standin(faults=["build-fails"])

    with pytest.raises(ModelError, match="no implementation"):
        built(site)

    assert (site / "artifacts" / LOG).is_file()


def test_an_engine_that_does_not_run_is_not_installed(standin: Use, site: Path) -> None:
    standin(faults=["execute-fails"])

    with pytest.raises((ModelError, DeviceError), match=r"engine\.plan"):
        built(site)

    assert not (site / "artifacts" / manifest.PLAN).exists()
    assert (site / "artifacts" / manifest.TIMING_CACHE).is_file(), "what was timed is of use to the next build"


def test_a_build_of_which_nothing_could_be_installed_is_remembered_until_something_changes(
    standin: Use, site: Path
) -> None:
    standin(faults=["nan"])
    built(site)

    refused = build.refused_before(deployed(site), probe())
    assert refused is not None
    assert list(refused.reasons) == [
        "int8",
        "int8, normalisations in fp32",
        "fp16, normalisations in fp32",
        "fp32",
    ]
    assert build.refused_before(deployed(site, precision="fp16"), probe()) is None
    standin()
    built(site)
    assert build.refused_before(deployed(site), probe()) is None


def test_an_engine_leaves_nothing_of_the_one_before_it(standin: Use, site: Path) -> None:
    standin("8.5.2")
    built(site, quantization="cache")
    assert manifest.ENGINE_CACHE in left_in(site)

    built(site, quantization="qdq")

    assert manifest.ENGINE_CACHE not in left_in(site)


def test_force_installs_what_was_asked_for(standin: Use, site: Path) -> None:
    standin(faults=["wrong-int8"])

    done = built(site, force=True)

    assert done.manifest is not None
    assert done.manifest.parity is not None
    assert (done.manifest.precision, bool(done.manifest.parity.failures)) == ("int8", True)


def test_without_pictures_nothing_is_built_unless_forced(standin: Use, site: Path) -> None:
    standin()

    with pytest.raises(DataError, match="give --images, or --force"):
        built(site, pictures=False)

    assert built(site, pictures=False, force=True).manifest is not None


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("oom-kill", DeviceError),
        ("crash", ModelError),
        ("out-of-memory", DeviceError),
        ("parse:/body/Conv", ModelError),
    ],
)
def test_a_build_that_fails_leaves_the_engine_in_use_and_the_log(
    standin: Use, site: Path, fault: str, kind: type[Exception]
) -> None:
    standin()
    built(site)
    before = {name: (site / "artifacts" / name).read_bytes() for name in ENGINE_FILES - {LOG}}
    standin(faults=[fault])

    with pytest.raises(kind, match=r"memory|crashed|/body/Conv"):
        built(site)

    assert {name: (site / "artifacts" / name).read_bytes() for name in before} == before
    assert left_in(site) - ENGINE_FILES == left_in(site) - before.keys() - {LOG}
    assert not list((site / "artifacts").glob(".building-*"))


def needed(folder: Path, **engine: Any) -> list[str]:
    return build.needed(deployed(folder, **engine), probe())


def test_an_engine_is_up_to_date_until_something_changes(standin: Use, site: Path) -> None:
    standin()
    assert "holds no engine" in needed(site)[0]
    built(site, dla={})
    assert needed(site, dla={}) == []
    assert needed(site, dla={"core": 1}) == [], "a plan for the DLA runs on either core"

    assert needed(site) == ["engine has changed"]
    standin("8.5.2")
    assert needed(site, dla={}) == ["TensorRT was 10.3.0 and is 8.5.2"]
    standin(compute="7.2")
    assert needed(site, dla={}) == ["compute capability was 8.7 and is 7.2"]
    standin()
    (site / "artifacts" / manifest.PLAN).write_bytes(b"other")
    assert "was changed after it was written" in needed(site, dla={})[0]


def test_a_damaged_manifest_is_a_reason_to_build(standin: Use, site: Path) -> None:
    standin()
    built(site)
    (site / "artifacts" / manifest.ENGINE_MANIFEST).write_text("{")

    assert "is not an engine manifest" in needed(site)[0]


def test_other_pictures_are_a_reason_to_build_where_tensorrt_calibrates(standin: Use, site: Path) -> None:
    standin()
    (site / "d.yaml").write_text(yaml.safe_dump(DOCUMENT))
    built(site, quantization="calibrator")
    assert needed(site, quantization="calibrator") == []

    (site / "pictures" / "0.png").unlink()

    assert needed(site, quantization="calibrator") == ["the set of calibration pictures has changed"]


def test_what_has_changed_since_the_build_is_told_when_the_engine_runs(
    standin: Use, site: Path, caplog: pytest.LogCaptureFixture
) -> None:
    standin()
    built(site)

    with open_pipeline(deployed(site, precision="fp16")) as pipeline:
        assert pipeline.precision == "int8"

    assert "models.m: engine.precision has changed since the engine" in caplog.text


@pytest.mark.parametrize(("version", "precision"), [("10.3.0", "fp16"), ("11.4.0", "fp32"), ("11.4.0", "int8")])
def test_a_batch_that_the_model_leaves_open_is_fixed(standin: Use, site: Path, version: str, precision: str) -> None:
    model = ir.load(site / "model.onnx")
    for value in (*model.graph.inputs, *model.graph.outputs):
        assert value.shape is not None
        value.shape = ir.Shape(["batch", *value.shape.numpy()[1:]])
    ir.save(model, site / "model.onnx")
    calibrate(deployed(site), pictures_of(site), deployed(site).artifacts_dir)
    standin(version)

    done = built(site, precision=precision)

    assert done.manifest is not None
    assert done.manifest.shapes["images"] == (1, 3, 16, 16)


def test_a_rule_for_layers_does_not_mean_constants(standin: Use, site: Path) -> None:
    model = ir.load(site / "model.onnx")
    node = ir.node("Constant", [], {"value": ir.tensor(np.ones(1, np.float32))}, name="/head/Constant")
    node.outputs[0].name = "one"
    flat = next(node for node in model.graph if node.op_type == "Flatten")
    scaled = ir.node("Mul", [flat.inputs[0], node.outputs[0]], name="/head/Mul")
    scaled.outputs[0].name = "scaled"
    flat.replace_input_with(0, scaled.outputs[0])
    model.graph.insert_before(flat, [node, scaled])
    ir.save(model, site / "model.onnx")
    standin("11.4.0")

    done = built(site, precision="fp16", fp32=[{"name": "/head/*"}])

    assert done.manifest is not None


def test_an_engine_of_another_device_is_refused_with_what_differs(standin: Use, site: Path) -> None:
    standin()
    built(site)
    standin("10.16.1")

    with pytest.raises(DeviceError, match=r"TensorRT was 10\.3\.0 and is 10\.16\.1; run edge-calibrate build"):
        open_pipeline(deployed(site)).__enter__()


def test_an_engine_for_another_preprocessing_is_refused(standin: Use, site: Path) -> None:
    standin()
    built(site)
    changed = msgspec.structs.replace(deployed(site), input=config.Input(resize="stretch", color="bgr"))

    with pytest.raises(ModelError, match=r"input\.color is bgr but was rgb; build again"):
        open_pipeline(changed).__enter__()


def test_int8_inputs_and_outputs_carry_their_scales(standin: Use, site: Path) -> None:
    standin()

    done = built(site, quantization="cache", input_format="int8:chw32", fp32=[{"op": "Softmax"}])

    assert done.manifest is not None
    assert done.manifest.io_scales.keys() == {"images"}
    with open_engine(site / "artifacts" / manifest.PLAN, config.Engine(), built=done.manifest) as engine:
        assert engine.inputs[0].dtype == np.float32


def test_a_model_with_qdq_of_its_own_needs_no_calibration(standin: Use, site: Path) -> None:
    standin()
    shutil.copy(site / "artifacts" / manifest.INT8_MODEL, site / "model.onnx")
    shutil.rmtree(site / "artifacts")

    done = built(site)

    assert done.manifest is not None
    assert (done.manifest.quantization, done.manifest.made_from) == ("qdq", {})


def test_a_model_with_qdq_of_its_own_cannot_take_a_cache(standin: Use, site: Path) -> None:
    standin()
    shutil.copy(site / "artifacts" / manifest.INT8_MODEL, site / "model.onnx")

    with pytest.raises(ModelError, match="has Q/DQ nodes of its own"):
        built(site, dla={})


# -------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def deployment(site: Path) -> Path:
    """The same deployment as a file."""
    path = site / "line3.yaml"
    path.write_text(yaml.safe_dump(DOCUMENT))
    return path


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run edge-calibrate, where the stand-in was put in place or not."""
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=120, check=False)


def test_a_dry_run_needs_no_tensorrt_and_writes_nothing(deployment: Path) -> None:
    before = left_in(deployment.parent)

    done = command("build", deployment, "--dry-run", "--tensorrt", "8.5.2", "--dla-cores", "1")

    assert done.returncode == 0, done.stderr
    assert "the model with Q/DQ: it is what evaluate has measured" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("trtexec --onnx=")
    assert left_in(deployment.parent) == before


def test_without_tensorrt_a_build_says_how_to_get_it(deployment: Path) -> None:
    done = command("build", deployment)

    assert done.returncode == ExitCode.UNAVAILABLE
    assert done.stderr.count("\n") == 1
    assert "apt install python3-libnvinfer" in done.stderr


@pytest.mark.parametrize("options", [["--tensorrt", "10.3.0"], ["--dla-cores", "1"]])
def test_what_is_for_a_dry_run_is_refused_without_one(deployment: Path, options: list[str]) -> None:
    done = command("build", deployment, *options)

    assert (done.returncode, "for --dry-run" in done.stderr) == (ExitCode.USAGE, True)


def test_the_command_builds_and_then_has_nothing_to_do(standin: Use, deployment: Path) -> None:
    standin()

    first = command("build", deployment)
    second = command("build", deployment, "--if-needed")

    assert first.returncode == 0, first.stderr
    assert f"{deployment.parent / 'artifacts' / manifest.PLAN}\n" in first.stdout
    assert "SIMULATED" in first.stderr
    assert (second.returncode, second.stdout) == (0, f"{deployment.parent}/artifacts/engine.plan: is up to date\n")


def test_an_engine_that_is_too_far_off_ends_with_one_and_says_why(standin: Use, deployment: Path) -> None:
    standin(faults=["nan"])

    done = command("build", deployment, "--json", "-", "-q")

    assert done.returncode == ExitCode.LIMIT_EXCEEDED
    document = json.loads(done.stdout)
    assert (document["installed"], len(document["attempts"])) == (False, 4)
    assert "int8: not installed: output 'out': holds NaN" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_build_leaves_no_child_and_the_engine_in_use(
    standin: Use, deployment: Path, number: signal.Signals
) -> None:
    standin()
    assert command("build", deployment).returncode == 0
    before = (deployment.parent / "artifacts" / manifest.PLAN).read_bytes()
    standin(faults=["slow"])
    with subprocess.Popen([COMMAND, "build", deployment], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        next(line for line in process.stderr if "Building Engine" in line)
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(number)
        rest = process.stderr.read()

    assert process.returncode == ExitCode.INTERRUPTED
    assert rest.splitlines()[-1] == "error: interrupted"
    assert not Path(f"/proc/{child}").exists()
    assert (deployment.parent / "artifacts" / manifest.PLAN).read_bytes() == before
    assert not list((deployment.parent / "artifacts").glob(".building-*"))


def test_an_engine_that_was_forced_ends_with_one_and_is_told_of_ever_after(standin: Use, deployment: Path) -> None:
    standin(faults=["wrong-int8"])

    first = command("build", deployment, "--force")
    second = command("build", deployment, "--if-needed")

    assert first.returncode == ExitCode.LIMIT_EXCEEDED
    assert (deployment.parent / "artifacts" / manifest.PLAN).is_file()
    assert second.returncode == 0
    assert "the engine was installed with --force, although output 'out': cosine" in second.stderr

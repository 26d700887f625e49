"""What people report of INT8 calibration with other tools, and that it does not happen here: a test for each report.

Some reports are answered by a test that stands where the code is tested anyway:

- The last, partial batch breaks calibration (https://github.com/ultralytics/ultralytics/pull/20989): there are no
  batches; test_gather.py, ``test_every_picture_counts_in_every_tensor``.
- Calibration is killed, since it keeps all activations of all pictures
  (https://github.com/microsoft/onnxruntime/issues/10503, https://github.com/microsoft/onnxruntime/issues/21979,
  https://github.com/microsoft/onnxruntime/issues/11020): test_observe.py,
  ``test_memory_does_not_depend_on_the_number_of_pictures_and_stays_under_the_estimate``.
- A model with Q/DQ has no cache for the DLA, or a cache has no Q/DQ model
  (https://github.com/NVIDIA/TensorRT/issues/2222, https://github.com/NVIDIA/Model-Optimizer/issues/135): one run writes
  both; test_calibrate.py, ``test_the_int8_model_carries_the_same_scales`` and ``test_write_for_another_version``.
- Scales change with the batch size and the order of the pictures
  (https://github.com/ultralytics/ultralytics/pull/10165): test_observe.py,
  ``test_neither_the_order_of_the_pictures_nor_a_pause_changes_a_bit``; test_observation.py,
  ``test_order_and_split_leave_no_trace``; test_calibrate.py, ``test_merged_halves_are_the_bytes_of_the_whole``.

These happen on the device, inside a build by TensorRT, which this package does not have. They are for the room that
will have it:

- An error inside a calibrator's callback is swallowed and ends as an unrelated one
  (https://github.com/NVIDIA/TensorRT/issues/3871, https://github.com/NVIDIA/TensorRT/issues/1186).
- A build with dynamic shapes has no calibration profile, or data of another shape
  (https://github.com/NVIDIA/TensorRT/issues/1528, https://github.com/NVIDIA/TensorRT/issues/661): the pictures' side of
  it is tested below.
- A build warns of hundreds of missing scales for constants, shapes and tensors that the parser made
  (https://github.com/NVIDIA/TensorRT/issues/1785, https://github.com/NVIDIA/TensorRT/issues/3131): the names that ONNX
  knows are tested below, the warnings cannot be seen off the device.
- The calibrator's classes are gone from TensorRT 11 (https://github.com/NVIDIA/TensorRT/issues/4357): what a build then
  says. That calibration itself needs none of them is tested below.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx
import pytest
import yaml
from onnx import TensorProto, helper, numpy_helper
from PIL import Image as Pillow

from calibration import cache, calibrate, images, observe, ranges
from calibration.calibrate import Calibrated
from calibration.histogram import Histogram
from edge import config, manifest
from edge.errors import ModelError
from edge.image import decode
from edge.process import open_pipeline

DATA = Path(__file__).parents[1] / "data"
COMMAND = Path(sys.executable).parent / "edge-calibrate"
PICTURES = 6
SIDE = 16

node = helper.make_node


def zoo(path: Path, *, seed: int = 0, shape: tuple[Any, ...] = (1, 3, SIDE, SIDE)) -> None:
    """A classifier with everything that the reports are about.

    SiLU (c1, s1, silu), a dead ReLU (dead, c3), integers and shapes (where, places, shape), a tensor whose shape
    depends on the picture (found), FP16 (half), an If with bodies (chosen), a Softmax of 1024 values (attention).
    """
    rng = np.random.default_rng(seed)
    info = helper.make_tensor_value_info
    bodies = {
        f"{name}_branch": helper.make_graph(
            [node("Mul", ["relu", number], [f"{name}_value"])],
            name,
            [],
            [info(f"{name}_value", TensorProto.FLOAT, (1, 4, SIDE, SIDE))],
        )
        for name, number in (("then", "two"), ("else", "three"))
    }
    weights = {
        "w1": rng.standard_normal((4, 3, 3, 3)).astype(np.float32),
        "w2": rng.standard_normal((4, 4, 1, 1)).astype(np.float32),
        "w3": rng.standard_normal((4, 4, 1, 1)).astype(np.float32),
        "w4": rng.standard_normal((4 * SIDE * SIDE, 5)).astype(np.float32),
        "two": np.float32(2),
        "three": np.float32(3),
        "half_grey": np.float32(0.5),
        "flat_tail": np.int64([4 * SIDE * SIDE]),
        "zero": np.int64([0]),
        "one": np.int64([1]),
    }
    nodes = [
        node("Conv", ["images", "w1"], ["c1"], name="stem", pads=[1, 1, 1, 1]),
        node("Sigmoid", ["c1"], ["s1"], name="sigmoid"),
        node("Mul", ["c1", "s1"], ["silu"], name="mul"),
        node("Conv", ["silu", "w2"], ["c2"], name="second"),
        node("Abs", ["c2"], ["positive"]),
        node("Neg", ["positive"], ["negative"]),
        node("Relu", ["negative"], ["dead"]),
        node("Conv", ["dead", "w3"], ["c3"], name="asleep"),
        node("Add", ["silu", "c3"], ["sum"]),
        node("Relu", ["sum"], ["relu"]),
        node("NonZero", ["relu"], ["where"]),
        node("Transpose", ["where"], ["places"]),
        node("GatherND", ["relu", "places"], ["found"]),
        node("ReduceMean", ["images"], ["mean"], keepdims=0),
        node("Greater", ["mean", "half_grey"], ["bright"]),
        node("If", ["bright"], ["chosen"], **bodies),
        node("Cast", ["chosen"], ["half"], to=TensorProto.FLOAT16),
        node("Cast", ["half"], ["full"], to=TensorProto.FLOAT),
        node("Shape", ["full"], ["shape"]),
        node("Slice", ["shape", "zero", "one"], ["batch"]),
        node("Concat", ["batch", "flat_tail"], ["flat_shape"], axis=0),
        node("Reshape", ["full", "flat_shape"], ["flat"]),
        node("Softmax", ["flat"], ["attention"], axis=-1),
        node("MatMul", ["attention", "w4"], ["logits"], name="head"),
        node("Softmax", ["logits"], ["scores"], axis=-1),
    ]
    graph = helper.make_graph(
        nodes,
        "zoo",
        [info("images", TensorProto.FLOAT, shape)],
        [info("scores", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def write_pictures(folder: Path, count: int = PICTURES) -> None:
    """The first is black, the others get brighter; no two are of one size."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(count):
        pixels = rng.integers(0, 1 + 255 * number // max(1, count - 1), (20 + number, 24, 3), np.uint8, endpoint=False)
        assert cv2.imwrite(str(folder / f"{number:02}.png"), pixels)


def write_deployment(folder: Path, *, input_: dict[str, Any] | None = None, **calibration: Any) -> Path:
    """Of zoo.onnx and the folder ``pictures``, both beside the file."""
    model = {
        "name": "zoo",
        "path": "zoo.onnx",
        "artifacts": "artifacts",
        "input": {"resize": "stretch", **(input_ or {})},
        "task": {"type": "classification"},
        "calibration": {"images": "pictures", "method": "max", **calibration},
    }
    path = folder / "line3.yaml"
    path.write_text(yaml.safe_dump({"version": 1, "models": [model]}))
    return path


def calibrated(deployment: Path, **options: Any) -> Calibrated:
    """As ``edge-calibrate calibrate`` does it."""
    model = config.load(deployment).models[0]
    assert model.calibration is not None
    return calibrate.calibrate(model, images.collect(model.calibration.images), model.artifacts_dir, **options)


def run(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=300, check=False, **options)


@dataclass(frozen=True)
class Site:
    """A calibrated deployment; tests only read it."""

    folder: Path
    done: Calibrated

    @property
    def deployment(self) -> Path:
        return self.folder / "line3.yaml"

    @property
    def scales(self) -> dict[str, float]:
        """What TensorRT would read."""
        return cache.parse((self.done.folder / manifest.CACHE).read_text(), source="cache").scales

    def copy(self, folder: Path) -> Path:
        """Of the whole folder; returns the deployment file."""
        shutil.copytree(self.folder, folder)
        return folder / "line3.yaml"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("site")
    zoo(folder / "zoo.onnx")
    write_pictures(folder / "pictures")
    return Site(folder, calibrated(write_deployment(folder)))


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> Calibrated:
    """YOLOX-Nano, whose activation is SiLU throughout, calibrated on three photographs."""
    folder = tmp_path_factory.mktemp("detector")
    document = yaml.safe_load((DATA.parents[1] / "configs" / "demo.yaml").read_text())
    model = document["models"][0]
    model |= {"path": str(DATA / "models" / "yolox_nano.onnx"), "artifacts": "artifacts"}
    photographs = sorted((DATA / "images").glob("*.jpg"))[:3]
    model["calibration"] |= {"images": list(map(str, photographs)), "method": "max"}
    model["evaluation"] = {"images": str(DATA / "images")}
    document["streams"] = []
    path = folder / "line3.yaml"
    path.write_text(yaml.safe_dump(document))
    return calibrated(path)


def test_cache_of_a_model_that_was_retrained_is_refused_and_the_model_named(site: Site, tmp_path: Path) -> None:
    """https://github.com/NVIDIA/TensorRT/issues/3137, https://github.com/pytorch/TensorRT/issues/2167.

    Every tensor has the name and shape that it had, so that TensorRT would take the cache.
    """
    deployment = site.copy(tmp_path / "retrained")
    zoo(tmp_path / "retrained" / "zoo.onnx", seed=1)

    for command in (["cache", "check", deployment], ["evaluate", deployment, "--images", site.folder / "pictures"]):
        done = run(*command)
        assert done.returncode == 65, done.stderr
        assert f"{tmp_path}/retrained/zoo.onnx has changed since" in done.stderr
        assert "calibrate again" in done.stderr


def test_cache_for_another_tensorrt_is_told_before_the_build_and_can_be_written_for_it(
    site: Site, tmp_path: Path
) -> None:
    """https://github.com/NVIDIA/TensorRT/issues/1378: TensorRT passes over a cache of another version without a word.

    https://github.com/NVIDIA/Deep-Learning-Accelerator-SW/issues/26: TRT-8600 in the header, read by 10.3.
    """
    done = run("cache", "check", site.deployment, "--tensorrt", "8.6.0")
    assert done.returncode == 65
    assert "TensorRT is 8.6.0 but the cache is for 10.3.0; calibrate again" in done.stderr

    written = run("cache", "write", site.done.folder / "ranges.json", "--tensorrt", "8.6.0", "-o", tmp_path / "c")

    assert written.returncode == 0, written.stderr
    assert (tmp_path / "c").read_text().startswith("TRT-8600-EntropyCalibration2\n")
    assert cache.parse((tmp_path / "c").read_text(), source="c").scales == site.scales


@pytest.mark.parametrize(
    "section",
    [
        {"resize": "letterbox", "divide_by": 255},
        {"resize": "letterbox", "divide_by": 1, "anchor": "top-left"},
        {"resize": "crop", "divide_by": 255, "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]},
    ],
    ids=lambda section: f"{section['resize']}-{section['divide_by']}",
)
def test_calibration_sees_bit_by_bit_what_the_engine_is_fed_and_records_how(
    site: Site, tmp_path: Path, section: dict[str, Any]
) -> None:
    """https://github.com/Linaom1214/TensorRT-For-YOLO-Series/issues/45: not divided by 255 as at inference.

    https://github.com/marcoslucianops/DeepStream-Yolo/issues/311: letterbox in training, but not in calibration.
    """

    class Recording:
        """An engine that counts what it is given."""

        def __init__(self, engine: Any) -> None:
            self.engine, self.given = engine, Histogram()

        def infer(self, tensors: dict[str, Any]) -> Any:
            self.given.add(tensors["images"])
            return self.engine.infer(tensors)

    deployment = site.copy(tmp_path / "other")
    write_deployment(deployment.parent, input_=section)
    done = calibrated(deployment)
    model = config.load(deployment).models[0]

    with open_pipeline(model, precision="int8") as pipeline:
        recording = Recording(pipeline.engine)
        pipeline.engine = recording  # type: ignore[assignment]
        for path in sorted((site.folder / "pictures").iterdir()):
            pipeline.detect(decode(path.read_bytes(), name=path.name))

    seen = done.histograms["images"]
    assert np.array_equal(seen.counts, recording.given.counts)
    assert (seen.minimum, seen.maximum) == (recording.given.minimum, recording.given.maximum)
    assert done.manifest.input == model.input
    assert {key: getattr(done.manifest.input, key) for key in section} == section


@pytest.mark.parametrize("count", [1, 4, 17])
def test_any_number_of_pictures_counts_to_the_last_one(tmp_path: Path, count: int) -> None:
    """https://github.com/ultralytics/ultralytics/issues/18512: 4 pictures and a batch of 16 crash the calibration."""
    zoo(tmp_path / "zoo.onnx")
    write_pictures(tmp_path / "pictures", count)

    done = calibrated(write_deployment(tmp_path))

    assert done.ranges.images == done.manifest.images.count == count
    assert done.histograms["images"].total == count * 3 * SIDE * SIDE
    assert done.histograms["scores"].total == count * 5


def test_model_of_a_larger_batch_is_refused_before_any_picture_is_observed(tmp_path: Path) -> None:
    """https://github.com/ultralytics/ultralytics/issues/18512, as above: the batch is 1, and a model says so."""
    zoo(tmp_path / "zoo.onnx", shape=(16, 3, SIDE, SIDE))
    write_pictures(tmp_path / "pictures")

    with pytest.raises(ModelError, match=r"input 'images' is \[16, 3, 16, 16\]; expected \[1, 3, H, W\]"):
        calibrated(write_deployment(tmp_path))


def test_dynamic_shapes_are_fixed_by_the_deployment_and_nothing_of_another_shape_gets_in(tmp_path: Path) -> None:
    """https://github.com/NVIDIA/TensorRT/issues/1528, https://github.com/NVIDIA/TensorRT/issues/661.

    https://github.com/NVIDIA/TensorRT/issues/2561, https://github.com/NVIDIA/TensorRT/issues/3933: which shape is used?
    """
    zoo(tmp_path / "zoo.onnx", shape=("batch", 3, "height", "width"))
    write_pictures(tmp_path / "pictures")
    with pytest.raises(ModelError, match=r"images.*input\.size"):
        calibrated(write_deployment(tmp_path))

    deployment = write_deployment(tmp_path, input_={"size": [SIDE, SIDE]})
    done = calibrated(deployment)

    assert done.histograms["images"].total == PICTURES * 3 * SIDE * SIDE
    int8 = onnx.load(done.folder / manifest.INT8_MODEL)
    assert [d.dim_value for d in int8.graph.input[0].type.tensor_type.shape.dim] == [1, 3, SIDE, SIDE]
    observer = observe.Observer(calibrate.prepare(config.load(deployment).models[0]).model, workers=1)
    for shape in ((1, 3, SIDE, SIDE + 1), (2, 3, SIDE, SIDE), (3, SIDE, SIDE)):
        wrong = {"images": np.zeros(shape, np.float32)}
        with pytest.raises(ModelError, match="the model fails when it runs"):
            observer.run([wrong], lambda: lambda tensors: tensors, lambda *_: None)


def test_every_float_tensor_has_a_range_or_a_reason_and_nothing_else_has(site: Site) -> None:
    """https://github.com/NVIDIA/TensorRT/issues/1785, https://github.com/NVIDIA/TensorRT/issues/3131.

    https://github.com/NVIDIA/TensorRT/issues/3659: hundreds of missing scales, of which none says whether it matters.
    """
    document = json.loads((site.done.folder / manifest.RANGES).read_text())
    named = document["tensors"].keys() | document["missing"].keys()
    computed = {
        "images", "c1", "s1", "silu", "c2", "positive", "negative", "dead", "c3", "sum", "relu", "found", "mean",
        "chosen", "half", "full", "flat", "attention", "logits", "scores", "then_value", "else_value",
    }  # fmt: skip
    # neither constants (w1..., two, zero) nor integers and truth values (where, places, shape, batch, bright)
    assert named == computed

    assert document["missing"].keys() == {"half", "then_value", "else_value"}
    assert "FLOAT16" in document["missing"]["half"]
    assert "in the body of another node" in document["missing"]["then_value"]
    assert site.scales.keys() == document["tensors"].keys()
    assert any("3 tensors without a range" in warning for warning in site.done.warnings)


def test_entropy_clips_the_tails_of_a_real_detector(detector: Calibrated) -> None:
    """https://github.com/microsoft/onnxruntime/issues/9597, https://github.com/microsoft/onnxruntime/pull/10261.

    There "entropy" has one candidate, the maximum, and gives every tensor the range that "max" does.
    """
    histograms = detector.histograms

    chosen = ranges.select(histograms, method="entropy", images=3).tensors

    clipped = [name for name, entry in chosen.items() if entry.amax < histograms[name].amax]
    assert len(clipped) > len(chosen) / 2
    assert all(0 <= chosen[name].clipped <= ranges.MOST_CLIPPED for name in chosen)
    assert all(chosen[name].clipped > 0 for name in clipped if chosen[name].amax < 0.9 * histograms[name].amax)


def test_activations_of_another_shape_for_each_picture_are_observed(site: Site) -> None:
    """https://github.com/microsoft/onnxruntime/issues/18792, https://github.com/huggingface/optimum/issues/409."""
    found, relu = site.done.histograms["found"], site.done.histograms["relu"]

    assert 0 < found.total == relu.total - relu.zeros < PICTURES * 4 * SIDE * SIDE
    assert found.amax == relu.amax
    assert site.scales["found"] > 0


def test_no_scale_is_invented(site: Site) -> None:
    """https://github.com/NVIDIA/TensorRT/issues/3599: tensors without a scale got 1.0; beyond 127 they overflow.

    A range covers what was seen, or says in ``source`` that nothing was; a tensor without one has no line in the cache.
    """
    tensors = site.done.ranges.tensors

    for name, entry in tensors.items():
        assert entry.scale == float(np.float32(entry.amax / 127)) == site.scales[name], name
        if entry.source == "measured":
            assert entry.amax == entry.observed_amax == site.done.histograms[name].amax, name
        else:
            assert entry.amax >= (entry.observed_amax or 0), name
    assert {name for name, entry in tensors.items() if entry.source == "zero"} == {"dead"}
    assert not site.scales.keys() & site.done.ranges.missing.keys()


def test_tensor_that_is_always_zero_is_named_and_has_a_positive_scale(site: Site) -> None:
    """https://github.com/NVIDIA/TensorRT/issues/1102, https://github.com/NVIDIA/TensorRT/issues/3020.

    A scale of 0 makes the build fail.
    """
    (warning,) = [warning for warning in site.done.warnings if "zero on every picture" in warning]

    assert warning.startswith("2 tensors zero on every picture")
    assert warning.endswith(": dead, c3")
    assert min(site.scales.values()) >= float(np.finfo(np.float32).tiny)


def test_black_first_picture_does_not_fix_the_ranges(site: Site, tmp_path: Path) -> None:
    """https://github.com/NVIDIA/Model-Optimizer/pull/2369: the first batch was zero, and so the range stayed."""
    deployment = site.copy(tmp_path / "last")
    pictures = tmp_path / "last" / "pictures"
    (pictures / "00.png").rename(pictures / "99.png")
    shutil.rmtree(tmp_path / "last" / "artifacts")
    assert site.done.histograms["images"].zeros >= 3 * SIDE * SIDE

    again = calibrated(deployment)

    assert again.ranges == site.done.ranges
    assert site.done.ranges.tensors["images"].amax == pytest.approx(1, abs=0.1)


def test_silu_of_a_detector_is_quantized_as_a_whole(detector: Calibrated) -> None:
    """https://github.com/NVIDIA/TensorRT/issues/1114, https://github.com/wang-xinyu/tensorrtx/issues/753.

    mAP 0.362 became 0.054 with Sigmoid and Mul quantized apart: a pair may stand behind the Mul, never before it.
    """
    graph = onnx.load(detector.folder / manifest.INT8_MODEL).graph
    producers = {name: part.op_type for part in graph.node for name in part.output}
    sigmoids = {part.output[0]: part.input[0] for part in graph.node if part.op_type == "Sigmoid"}
    silus = [
        part for part in graph.node if part.op_type == "Mul" and any(sigmoids.get(i) in part.input for i in part.input)
    ]

    assert len(silus) > 50
    for part in silus:
        assert "DequantizeLinear" not in {producers[name] for name in (*part.input, sigmoids[part.input[1]])}
        assert {*part.input, *part.output} <= detector.ranges.tensors.keys()


def test_long_tail_of_silu_can_be_clipped_by_every_method_but_max(detector: Calibrated) -> None:
    """https://github.com/NVIDIA/TensorRT/issues/966: nothing is found in INT8, as the tail takes the levels."""
    graph = onnx.load(DATA / "models" / "yolox_nano.onnx").graph
    silus = [part.output[0] for part in graph.node if part.op_type == "Mul" and part.output[0] in detector.histograms]
    assert len(silus) > 50

    for method in ("entropy", "percentile", "mse"):
        chosen = ranges.select({name: detector.histograms[name] for name in silus}, method=method, images=3).tensors
        narrower = [entry.amax < 0.9 * detector.histograms[name].amax for name, entry in chosen.items()]
        assert sum(narrower) > 10, method


@pytest.mark.parametrize("method", ["entropy", "percentile", "mse", "max"])
def test_softmax_always_has_a_scale_and_none_beyond_its_bound(site: Site, tmp_path: Path, method: str) -> None:
    """https://github.com/mynotwo/yolov3_tensorRT_int8_calibration/issues/2: "Could not find scales for softmax0"."""
    deployment = site.copy(tmp_path / method)
    write_deployment(deployment.parent, method=method)

    scales = cache.parse((calibrated(deployment).folder / manifest.CACHE).read_text(), source="cache").scales

    for name in ("attention", "scores", "s1"):
        assert 0 < scales[name] <= float(np.float32(1 / 127)), name


def test_run_says_how_many_pictures_it_used_and_what_it_took_from_an_earlier_one(site: Site, tmp_path: Path) -> None:
    """https://github.com/NVIDIA/TensorRT/issues/546, https://github.com/NVIDIA/TensorRT/issues/1806.

    There calibration seems to do nothing: an old cache was found, or no picture was asked for.
    """
    deployment = site.copy(tmp_path / "again")
    cv2.imwrite(str(tmp_path / "again/pictures/new.png"), np.full((30, 30, 3), 7, np.uint8))

    done = run("calibrate", deployment)

    assert done.returncode == 0, done.stderr
    assert f"{PICTURES + 1} used, 0 refused" in done.stdout
    assert f"histograms.npz: {PICTURES} pictures are taken from it" in done.stderr
    shutil.rmtree(tmp_path / "again/pictures")
    (tmp_path / "again/pictures").mkdir()
    assert run("calibrate", deployment).returncode == 65


# What a device may lack, or has in a version that breaks when it is imported.
FORBID = """
import sys

class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {modules!r}:
            raise AttributeError(f"{{name}} was imported")

sys.meta_path.insert(0, Forbidden())
from calibration.cli import main
main()
"""


def run_without(modules: set[str], *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The command, in a process where importing these modules fails."""
    program = FORBID.format(modules=modules)
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=300, check=False
    )


def test_device_reads_a_cache_without_any_framework(site: Site) -> None:
    """https://github.com/ultralytics/ultralytics/issues/19614: calibration on the device takes its memory.

    https://github.com/ultralytics/ultralytics/issues/21281: it works once the calibration's file is there.
    """
    heavy = {"cv2", "onnx", "onnx_ir", "onnxruntime", "jinja2", "rich", "torch", "tensorrt"}

    checked = run_without(heavy, "cache", "check", site.deployment)
    shown = run_without(heavy, "cache", "show", site.done.folder / manifest.CACHE)

    assert checked.returncode == shown.returncode == 0, (checked.stderr, shown.stderr)
    assert "belongs to zoo, for TensorRT 10.3.0" in checked.stdout
    assert f"{len(site.scales)} tensors" in shown.stdout
    # That nothing was imported is worth knowing only where importing would have been noticed.
    assert "was imported" in run_without(heavy, "check", site.deployment).stderr


def test_calibration_never_imports_tensorrt(site: Site, tmp_path: Path) -> None:
    """https://github.com/NVIDIA/TensorRT/issues/4357, https://github.com/Jonah-May-OSS/wyoming-whisper-trt/pull/1020.

    'tensorrt' has no attribute 'CalibrationAlgoType' from version 11 on, and a program that asks for it cannot start.
    """
    deployment = site.copy(tmp_path / "trt11")

    done = run_without({"tensorrt", "pycuda", "cuda"}, "calibrate", deployment, "--out", tmp_path / "out")

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / manifest.CACHE).read_bytes() == (site.done.folder / manifest.CACHE).read_bytes()


def test_model_that_has_qdq_already_is_refused_before_the_work(site: Site, tmp_path: Path) -> None:
    """https://github.com/NVIDIA/TensorRT/issues/1837: "Calibrator won't be used in explicit precision mode"."""
    shutil.copytree(site.folder / "pictures", tmp_path / "pictures")
    shutil.copy(site.done.folder / manifest.INT8_MODEL, tmp_path / "zoo.onnx")
    observed: list[int] = []

    with pytest.raises(ModelError, match=r"zoo\.onnx: is quantized already \(it has Q/DQ nodes\)"):
        calibrated(write_deployment(tmp_path), on_images=observed.append)

    assert observed == []
    assert not (tmp_path / "artifacts").exists()


@pytest.mark.parametrize("largest", [1e-40, 6e-8, 1e-30, 65504.0, 3e38])
@pytest.mark.parametrize("method", ["entropy", "percentile", "mse", "max"])
def test_neither_tiny_nor_huge_values_break_a_range(largest: float, method: str) -> None:
    """https://github.com/NVIDIA/Model-Optimizer/pull/1558: "Too many bins for data range", as FP16 edges underflow."""
    values = np.linspace(-largest, largest, 10_001).astype(np.float32)
    histogram = Histogram()
    histogram.add(values)

    assert histogram.total == values.size
    assert (histogram.amax, histogram.nonfinite) == (float(np.abs(values).max()), 0)
    assert np.count_nonzero(histogram.counts) > 1000
    entry = ranges.select({"x": histogram}, method=method, images=1).tensors["x"]
    if largest / 127 < np.finfo(np.float32).tiny:  # INT8 cannot tell these from zero: a scale must be a normal number
        assert entry.source == "zero"
    else:
        assert entry.source == "measured"
        assert 0.9 * histogram.amax <= entry.amax <= histogram.amax
        assert entry.scale == pytest.approx(entry.amax / 127, rel=1e-6)


def test_fp16_model_is_refused_by_name(tmp_path: Path) -> None:
    """https://github.com/NVIDIA/Model-Optimizer/pull/1558, as above."""
    zoo(tmp_path / "zoo.onnx")
    write_pictures(tmp_path / "pictures", 1)
    model = onnx.load(tmp_path / "zoo.onnx")
    for tensor in model.graph.initializer:
        if tensor.name == "w2":
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), "w2"))
    onnx.save(model, tmp_path / "zoo.onnx")

    with pytest.raises(ModelError, match=r"zoo\.onnx: is FP16 \('w2' is float16\); calibration starts from the FP32"):
        calibrated(write_deployment(tmp_path))


def test_odd_pictures_are_read_and_unreadable_ones_named_and_counted(tmp_path: Path) -> None:
    """https://github.com/perfanalytics/pose2sim/issues/43: imread gives None without an error.

    https://github.com/opencv/opencv/pull/28644 (EXIF), https://github.com/opencv/opencv/issues/25274 (CMYK),
    https://github.com/ultralytics/ultralytics/issues/948 (grey).
    """
    rng = np.random.default_rng(0)
    rgb = Pillow.fromarray(rng.integers(0, 255, (48, 64, 3), np.uint8, endpoint=True))
    turned = Pillow.Exif()
    turned[0x0112] = 6  # Orientation: the camera was held upright
    zoo(tmp_path / "zoo.onnx")
    folder = tmp_path / "pictures"
    folder.mkdir()
    rgb.save(folder / "exif.jpg", exif=turned)
    rgb.convert("CMYK").save(folder / "cmyk.jpg")
    rgb.convert("L").save(folder / "grey.png")
    rgb.convert("RGBA").save(folder / "alpha.png")
    Pillow.fromarray(rng.integers(0, 65535, (48, 64), np.uint16)).save(folder / "deep.png")
    (folder / "cut.jpg").write_bytes((folder / "cmyk.jpg").read_bytes()[:2000])
    (folder / "text.jpg").write_text("no picture")

    done = run("calibrate", write_deployment(tmp_path))

    assert done.returncode == 0, done.stderr
    assert "5 used, 2 refused" in done.stdout
    for name in ("cut.jpg", "text.jpg"):
        assert f"pictures/{name}: " in done.stderr
    assert "2 of 7 images were refused" in done.stderr  # more than 5 %: something is wrong with the set
    assert images.collect(str(folder / "exif.jpg")).used[0].size_wh == (48, 64)
    record = manifest.read(tmp_path / "artifacts")
    assert record is not None
    assert record.images.count == 5


def test_tests_that_the_docstring_names_are_there() -> None:
    found = re.findall(r"(test_\w+\.py)|``(test_\w+)``", __doc__ or "")

    file = ""
    for named_file, test in found:
        file = named_file or file
        if test:
            assert f"def {test}(" in (Path(__file__).parent / file).read_text(), f"{file}: {test}"
    assert sum(bool(test) for _, test in found) >= 7

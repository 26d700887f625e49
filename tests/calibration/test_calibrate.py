"""Calibration from the deployment file to the artifacts, on real models and photographs, through the real command."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import yaml

from calibration import cache, observation
from edge import config, files, manifest
from edge.process import open_pipeline

DATA = Path(__file__).parents[1] / "data"
PHOTOS = sorted((DATA / "images").glob("*.jpg"))
COMMAND = Path(sys.executable).parent / "edge-calibrate"


def run(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=300, check=False, **options)


def deployment(folder: Path, images: str | list[str], **calibration: Any) -> Path:
    """YOLOX-Nano as in the demo, with other pictures."""
    document = yaml.safe_load((DATA.parents[1] / "configs" / "demo.yaml").read_text())
    model = document["models"][0]
    model |= {"path": str(DATA / "models" / "yolox_nano.onnx"), "artifacts": "artifacts"}
    model["calibration"] |= {"images": images, "count": 3, **calibration}
    model["evaluation"] |= {"images": str(DATA / "images"), "labels": str(DATA / "labels.json")}
    document["streams"] = []
    path = folder / "line3.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder of three photographs."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for path in PHOTOS[:3]:
        shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifacts of one calibration; tests only read them."""
    folder = tmp_path_factory.mktemp("calibrated")
    done = run("calibrate", deployment(folder, str(DATA / "images"), count=4))
    assert done.returncode == 0, done.stderr
    return folder / "artifacts"


class TestArtifacts:
    def test_every_file_of_the_contract_is_there(self, calibrated: Path) -> None:
        names = {"calibration.cache", "model.int8.onnx", "ranges.json", "histograms.npz", "calibration.json"}

        assert {path.name for path in calibrated.iterdir()} == names | {"report.html"}

    def test_the_cache_covers_every_activation_of_the_original_model(self, calibrated: Path) -> None:
        parsed = cache.parse((calibrated / "calibration.cache").read_text(), source="x")
        model = onnx.load(DATA / "models" / "yolox_nano.onnx")

        assert parsed.header == "TRT-100300-EntropyCalibration2"
        assert {"images", "output"} | {name for node in model.graph.node for name in node.output} == set(parsed.scales)
        assert all(scale > 0 for scale in parsed.scales.values())

    def test_cache_ranges_and_histograms_agree(self, calibrated: Path) -> None:
        scales = cache.parse((calibrated / "calibration.cache").read_text(), source="x").scales
        ranges = json.loads((calibrated / "ranges.json").read_text())["tensors"]
        histograms = observation.load(calibrated / "histograms.npz").merged()

        assert scales == {name: entry["scale"] for name, entry in ranges.items()}
        assert list(histograms) == list(ranges)
        assert all(histograms[name].amax == entry["observed_amax"] for name, entry in ranges.items())

    def test_the_int8_model_carries_the_same_scales(self, calibrated: Path) -> None:
        scales = cache.parse((calibrated / "calibration.cache").read_text(), source="x").scales
        model = onnx.load(calibrated / "model.int8.onnx")
        initializers = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}

        found = {
            name.removesuffix("_scale"): float(a)
            for name, a in initializers.items()
            if name.endswith("_scale") and a.ndim == 0
        }

        assert len(found) > 50
        assert all(scales[name] == scale for name, scale in found.items())

    def test_the_manifest_says_what_it_was_made_from(self, calibrated: Path) -> None:
        record = manifest.read(calibrated)

        assert record is not None
        assert record.model_sha256 == manifest.sha256_of(DATA / "models" / "yolox_nano.onnx")
        assert record.images.count == len(record.images.sha256) == 4
        assert record.input.color == "bgr"
        assert {"Conv_41", "Conv_44"} <= set(record.fp16_layers)
        assert record.files == {name: manifest.sha256_of(calibrated / name) for name in record.files}

    def test_the_int8_model_finds_what_fp32_finds(self, calibrated: Path) -> None:
        path = deployment(calibrated.parent, str(DATA / "images"), count=4)
        model = config.load(path).models[0]
        from edge.image import decode

        image = decode((DATA / "images" / "000000009483.jpg").read_bytes(), name="x")

        with open_pipeline(model, precision="fp32") as fp32, open_pipeline(model) as int8:
            assert int8.precision == "int8"
            expected, found = fp32.detect(image), int8.detect(image)

        assert {d.label for d in expected if d.score > 0.6} <= {d.label for d in found}


def test_calibrating_twice_gives_the_same_bytes(tmp_path: Path, photos: Path) -> None:
    path = deployment(tmp_path, str(photos))
    for out in ("a", "b"):
        assert run("calibrate", path, "--out", tmp_path / out).returncode == 0

    for name in ("calibration.cache", "model.int8.onnx", "ranges.json", "histograms.npz"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_options_go_before_the_file(tmp_path: Path, photos: Path) -> None:
    path = deployment(tmp_path, "nowhere")

    done = run("calibrate", path, "--images", photos, "--count", "2", "--method", "entropy", "--out", tmp_path / "out")

    assert done.returncode == 0, done.stderr
    record = manifest.read(tmp_path / "out")
    assert record is not None
    assert (record.images.count, record.method) == (2, "entropy")


def test_bad_pictures_are_named_and_the_good_ones_are_used(tmp_path: Path, photos: Path) -> None:
    (photos / "empty.jpg").touch()
    (photos / "cut.jpg").write_bytes(PHOTOS[4].read_bytes()[:5000])
    (photos / "text.jpg").write_text("no picture")
    shutil.copy(PHOTOS[0], photos / "again.jpg")

    done = run("calibrate", deployment(tmp_path, str(photos), count=100))

    assert done.returncode == 0, done.stderr
    assert "3 used, 4 refused" in done.stdout
    for name in ("empty.jpg", "cut.jpg", "text.jpg", PHOTOS[0].name):
        assert any(name in line and "left out" in line for line in done.stderr.splitlines()), done.stderr
    assert "100" in done.stderr  # fewer than asked


def failure(done: subprocess.CompletedProcess[str], code: int) -> str:
    """The one line of an error a person can act on."""
    assert done.returncode == code, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    return errors[0]


class TestBadInput:
    def test_a_missing_folder(self, tmp_path: Path) -> None:
        assert "nowhere" in failure(run("calibrate", deployment(tmp_path, "nowhere")), 65)
        assert not (tmp_path / "artifacts").exists()

    def test_an_empty_folder(self, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()

        assert "empty" in failure(run("calibrate", deployment(tmp_path, "empty")), 65)
        assert not (tmp_path / "artifacts").exists()

    def test_a_missing_model(self, tmp_path: Path, photos: Path) -> None:
        path = deployment(tmp_path, str(photos))
        path.write_text(path.read_text().replace("yolox_nano.onnx", "yolox_mano.onnx"))

        assert "yolox_mano.onnx: no such model file" in failure(run("calibrate", path), 65)

    def test_a_model_that_is_none(self, tmp_path: Path, photos: Path) -> None:
        (tmp_path / "model.onnx").write_text("hello")
        path = deployment(tmp_path, str(photos))
        document = yaml.safe_load(path.read_text())
        document["models"][0]["path"] = "model.onnx"
        path.write_text(yaml.safe_dump(document))

        assert "model.onnx" in failure(run("calibrate", path), 65)
        assert not (tmp_path / "artifacts").exists()

    def test_a_rule_that_matches_nothing(self, tmp_path: Path, photos: Path) -> None:
        done = run("calibrate", deployment(tmp_path, str(photos), fp16=[{"name": "Conv_9999"}]))

        assert "models.yolox.calibration.fp16[0]: matches no layer" in failure(done, 78)
        assert not (tmp_path / "artifacts").exists()

    def test_a_typing_error_in_the_file(self, tmp_path: Path, photos: Path) -> None:
        path = deployment(tmp_path, str(photos))
        path.write_text(path.read_text().replace("divide_by", "divide_bye"))

        assert "models[0].input.divide_bye: is not a known key; did you mean 'divide_by'?" in failure(
            run("calibrate", path), 78
        )

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        assert "absent.yaml: no such deployment file" in failure(run("calibrate", tmp_path / "absent.yaml"), 78)

    def test_an_empty_path(self, tmp_path: Path, photos: Path) -> None:
        path = deployment(tmp_path, str(photos))

        assert run("calibrate", path, "--images", "").returncode == 2
        failure(run("calibrate", deployment(tmp_path, "")), 78)

    def test_two_models_in_one_folder(self, tmp_path: Path, photos: Path) -> None:
        path = deployment(tmp_path, str(photos))
        document = yaml.safe_load(path.read_text())
        document["models"].append(document["models"][0] | {"name": "second", "artifacts": "./artifacts"})
        path.write_text(yaml.safe_dump(document))

        assert "models[1].artifacts: './artifacts' is the folder of an earlier entry" in failure(run("check", path), 78)

    def test_an_option_that_does_not_exist(self, tmp_path: Path) -> None:
        done = run("calibrate", tmp_path / "x.yaml", "--methode", "max")

        assert done.returncode == 2
        assert "No such option" in done.stderr

    def test_a_model_calibrated_for_another_preprocessing(self, tmp_path: Path, photos: Path) -> None:
        path = deployment(tmp_path, str(photos))
        assert run("calibrate", path).returncode == 0
        path.write_text(path.read_text().replace("color: bgr", "color: rgb"))

        assert "input.color is rgb but was bgr" in failure(run("evaluate", path, "--images", photos), 65)

    def test_a_folder_that_cannot_be_written(self, tmp_path: Path, photos: Path) -> None:
        (tmp_path / "artifacts").write_text("a file where the folder should be")

        line = failure(run("calibrate", deployment(tmp_path, str(photos))), 74)

        assert "artifacts" in line
        assert (tmp_path / "artifacts").read_text().startswith("a file")

    def test_labels_that_are_none(self, tmp_path: Path, photos: Path) -> None:
        path = deployment(tmp_path, str(photos))
        assert run("calibrate", path).returncode == 0
        (tmp_path / "labels.json").write_text("[]")

        line = failure(run("evaluate", path, "--images", photos, "--labels", tmp_path / "labels.json"), 65)

        assert "labels.json" in line


def test_ctrl_c_leaves_the_previous_calibration(tmp_path: Path, photos: Path) -> None:
    path = deployment(tmp_path, str(photos))
    assert run("calibrate", path).returncode == 0
    before = {file.name: file.read_bytes() for file in (tmp_path / "artifacts").iterdir()}

    process = subprocess.Popen(
        [COMMAND, "calibrate", deployment(tmp_path, str(DATA / "images"), count=72)],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "calibrating" in line:
            break
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=60)

    assert process.returncode == 130
    assert "error: interrupted" in rest
    assert "Traceback" not in rest
    after = {file.name: file.read_bytes() for file in (tmp_path / "artifacts").iterdir()}
    after.pop(manifest.PARTIAL, None)
    assert after == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_when_stopped_the_same_command_goes_on_where_it_was(tmp_path: Path, number: signal.Signals) -> None:
    path = deployment(tmp_path, str(DATA / "images"), count=72)
    whole = run("calibrate", path, "--out", tmp_path / "whole")
    assert whole.returncode == 0
    process = subprocess.Popen([COMMAND, "calibrate", path], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "calibrating" in line:
            break
    process.send_signal(number)
    _, rest = process.communicate(timeout=60)
    kept = observation.load(tmp_path / "artifacts" / manifest.PARTIAL).images
    assert f"{kept} of 72 pictures are kept" in rest
    assert 0 < kept < 72

    done = run("calibrate", path, "-v")

    assert done.returncode == 0
    assert f"{kept} pictures are taken from it" in done.stderr
    assert not (tmp_path / "artifacts" / manifest.PARTIAL).exists()
    for name in ("calibration.cache", "model.int8.onnx", "ranges.json", "histograms.npz"):
        assert (tmp_path / "artifacts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_auto_says_what_it_measured(tmp_path: Path) -> None:
    path = deployment(tmp_path, str(DATA / "images"), count=24, method="auto")

    done = run("calibrate", path)

    assert done.returncode == 0, done.stderr
    ranges = json.loads((tmp_path / "artifacts" / "ranges.json").read_text())
    method = ranges["method"]
    assert ranges["reason"].startswith(f"{method}: agreement with FP32 on ")
    assert all(f"{name} 0." in ranges["reason"] for name in ("entropy", "percentile", "mse", "max"))
    assert ranges["reason"] in done.stdout
    assert ranges["reason"] in (tmp_path / "artifacts" / "report.html").read_text()


def test_ties_are_what_the_deployment_asks_for(tmp_path: Path, photos: Path) -> None:
    for ties in ("dla", "none"):
        assert run("calibrate", deployment(tmp_path, str(photos), ties=ties), "--out", tmp_path / ties).returncode == 0
    tied, alone = (json.loads((tmp_path / ties / "ranges.json").read_text())["tensors"] for ties in ("dla", "none"))

    assert any(entry["source"] == "tied" for entry in tied.values())
    assert not any(entry["source"] == "tied" for entry in alone.values())
    for name, entry in tied.items():
        if entry["source"] == "tied" and entry["alone"] is not None:
            assert entry["alone"] == pytest.approx(alone[name]["amax"]), name
            assert entry["amax"] >= entry["alone"]


class TestSharedWork:
    """``observe`` and ``merge``: several machines, one calibration."""

    @pytest.fixture
    def halves(self, tmp_path: Path) -> tuple[Path, Path]:
        for name, photos in (("a", PHOTOS[:3]), ("b", PHOTOS[3:6])):
            (tmp_path / name).mkdir()
            for photo in photos:
                shutil.copy(photo, tmp_path / name)
            path = deployment(tmp_path, name)
            done = run("observe", path, "-o", tmp_path / f"{name}.npz")
            assert done.returncode == 0, done.stderr
            assert done.stdout == f"{tmp_path / name}.npz: 3 pictures\n"
        return tmp_path / "a.npz", tmp_path / "b.npz"

    def test_merged_halves_are_the_bytes_of_the_whole(self, tmp_path: Path, halves: tuple[Path, Path]) -> None:
        path = deployment(tmp_path, ["a", "b"], count=6)
        assert run("calibrate", path, "--out", tmp_path / "whole").returncode == 0

        merged = run("merge", *reversed(halves), "-o", tmp_path / "all.npz")
        done = run("calibrate", path, "--histograms", tmp_path / "all.npz", "--out", tmp_path / "merged")

        assert merged.stdout == f"{tmp_path / 'all.npz'}: 6 pictures\n"
        assert done.returncode == 0, done.stderr
        for name in ("histograms.npz", "calibration.cache", "model.int8.onnx", "ranges.json"):
            assert (tmp_path / "merged" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
        assert (tmp_path / "all.npz").read_bytes() == (tmp_path / "whole" / "histograms.npz").read_bytes()

    def test_pictures_of_elsewhere_count_as_well(self, tmp_path: Path, halves: tuple[Path, Path]) -> None:
        done = run("calibrate", deployment(tmp_path, "a"), "--histograms", halves[1])

        assert done.returncode == 0, done.stderr
        assert "6 used" in done.stdout
        record = manifest.read(tmp_path / "artifacts")
        assert record is not None
        assert record.images.count == 6

    def test_a_picture_does_not_count_twice(self, tmp_path: Path, halves: tuple[Path, Path]) -> None:
        line = failure(run("merge", halves[0], halves[0], "-o", tmp_path / "all.npz"), 65)

        assert "3 pictures are in both" in line
        assert not (tmp_path / "all.npz").exists()

    def test_another_preprocessing_is_named(self, tmp_path: Path, halves: tuple[Path, Path]) -> None:
        path = deployment(tmp_path, "b")
        path.write_text(path.read_text().replace("divide_by: 1", "divide_by: 255"))

        line = failure(run("calibrate", path, "--histograms", halves[0]), 65)

        assert "a.npz" in line
        assert "input.divide_by is 1" in line

    def test_observing_more_goes_on_with_the_file(self, tmp_path: Path, halves: tuple[Path, Path]) -> None:
        done = run("observe", deployment(tmp_path, ["a", "b"], count=6), "-o", halves[0], "-v")

        assert done.returncode == 0, done.stderr
        assert observation.load(halves[0]).images == 6

    def test_a_file_that_is_none(self, tmp_path: Path, halves: tuple[Path, Path]) -> None:
        (tmp_path / "x.npz").write_text("hello")

        assert "x.npz" in failure(run("merge", halves[0], tmp_path / "x.npz", "-o", tmp_path / "all.npz"), 65)
        assert "y.npz" in failure(run("merge", halves[0], tmp_path / "y.npz", "-o", tmp_path / "all.npz"), 65)

    def test_other_pictures_are_added_to_the_file(self, tmp_path: Path, halves: tuple[Path, Path]) -> None:
        for _ in range(2):
            done = run("observe", deployment(tmp_path, "b"), "-o", halves[0])

            assert done.returncode == 0, done.stderr
            assert done.stdout.endswith("a.npz: 6 pictures\n")

    def test_two_at_once_are_refused(self, tmp_path: Path, halves: tuple[Path, Path]) -> None:
        with files.folder_lock(tmp_path / ".a.npz.observing"):
            line = failure(run("observe", deployment(tmp_path, "b"), "-o", halves[0]), 74)

        assert "is being written by another process" in line

    def test_a_file_of_another_kind_is_not_replaced(self, tmp_path: Path, halves: tuple[Path, Path]) -> None:
        path = deployment(tmp_path, "b")
        before = path.read_text()

        failure(run("observe", path, "-o", path), 65)
        failure(run("merge", *halves, "-o", path), 65)

        assert path.read_text() == before

    def test_calibrating_again_with_the_same_histograms_runs_nothing(
        self, tmp_path: Path, halves: tuple[Path, Path]
    ) -> None:
        path = deployment(tmp_path, "a")
        assert run("calibrate", path, "--histograms", halves[1]).returncode == 0

        done = run("calibrate", path, "--histograms", halves[1])

        assert done.returncode == 0, done.stderr
        assert "6 pictures are taken from it" in done.stderr
        assert "tensors are observed" not in done.stderr

    def test_one_file_cannot_be_merged(self, tmp_path: Path) -> None:
        assert run("merge", tmp_path / "a.npz", "-o", tmp_path / "b.npz").returncode == 2


class TestMemory:
    def test_ranges_do_not_depend_on_it(self, tmp_path: Path, photos: Path) -> None:
        path = deployment(tmp_path, str(photos))
        for out, memory in (("a", "4G"), ("b", "400M")):
            done = run("calibrate", path, "--memory", memory, "--out", tmp_path / out)
            assert done.returncode == 0, done.stderr

        assert (tmp_path / "a" / "histograms.npz").read_bytes() == (tmp_path / "b" / "histograms.npz").read_bytes()

    def test_too_little_says_how_much_it_takes(self, tmp_path: Path, photos: Path) -> None:
        line = failure(run("calibrate", deployment(tmp_path, str(photos)), "--memory", "20M"), 69)

        assert "allowed: 20 MiB" in line
        assert not (tmp_path / "artifacts").exists()

    def test_what_is_no_amount(self, tmp_path: Path, photos: Path) -> None:
        done = run("calibrate", deployment(tmp_path, str(photos)), "--memory", "much")

        assert done.returncode == 2
        assert "'much' is no amount of memory; expected one such as 800M or 2G" in done.stderr


class TestCacheCheck:
    def test_a_cache_that_belongs(self, calibrated: Path) -> None:
        done = run("cache", "check", calibrated.parent / "line3.yaml")

        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith("calibration.cache: belongs to yolox, for TensorRT 10.3.0\n")

    def test_another_tensorrt(self, calibrated: Path) -> None:
        line = failure(run("cache", "check", calibrated.parent / "line3.yaml", "--tensorrt", "8.5.2"), 65)

        assert "TensorRT is 8.5.2 but the cache is for 10.3.0" in line

    def test_another_preprocessing(self, calibrated: Path, tmp_path: Path) -> None:
        path = tmp_path / "other.yaml"
        text = (calibrated.parent / "line3.yaml").read_text()
        path.write_text(text.replace("artifacts: artifacts", f"artifacts: {calibrated}").replace("bgr", "rgb"))

        assert "input.color is rgb but was bgr" in failure(run("cache", "check", path), 65)

    def test_a_cache_of_unknown_origin(self, tmp_path: Path, photos: Path) -> None:
        path = deployment(tmp_path, str(photos))
        (tmp_path / "artifacts").mkdir()
        (tmp_path / "artifacts" / "calibration.cache").write_text("TRT-100300-EntropyCalibration2\n")

        assert "calibration.json: no such file" in failure(run("cache", "check", path), 65)

    def test_a_version_that_is_none(self, calibrated: Path) -> None:
        done = run("cache", "check", calibrated.parent / "line3.yaml", "--tensorrt", "new")

        assert done.returncode == 2
        assert "is no TensorRT version" in done.stderr


class TestEvaluate:
    def test_int8_stays_within_one_and_a_half_points(self, tmp_path: Path) -> None:
        """The acceptance figure: calibrated on 24 photographs, compared on the 48 others."""
        path = deployment(tmp_path, str(DATA / "images"), count=24)
        assert run("calibrate", path).returncode == 0

        done = run("evaluate", path, "--json", tmp_path / "e.json")

        assert done.returncode == 0, done.stderr
        report = json.loads((tmp_path / "e.json").read_text())
        assert report["images"] == 48
        assert report["fp32"]["map"] == pytest.approx(0.367, abs=0.01)
        assert report["int8"]["map"] >= report["fp32"]["map"] - 0.015
        assert report["agreement"]["share"] > 0.9

    def test_an_exceeded_limit_ends_with_one(self, tmp_path: Path, photos: Path) -> None:
        path = deployment(tmp_path, str(photos), fp16=[])
        path.write_text(path.read_text().replace("map_drop: 0.015", "agreement: 1.0"))
        assert run("calibrate", path).returncode == 0

        done = run("evaluate", path)

        assert done.returncode == 1, done.stderr
        assert "exceeded" in done.stdout

    def test_json_alone_on_stdout(self, tmp_path: Path, photos: Path) -> None:
        path = deployment(tmp_path, str(photos))
        assert run("calibrate", path).returncode == 0

        done = run("evaluate", path, "--images", photos, "--json", "-")

        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["images"] == 3
        assert "3 of 3 pictures were used by calibration as well" in done.stderr


class TestCacheCommand:
    def test_show(self, calibrated: Path) -> None:
        done = run("cache", "show", calibrated / "calibration.cache", "--json")

        document = json.loads(done.stdout)
        assert document["header"] == "TRT-100300-EntropyCalibration2"
        assert document["tensorrt"] == "10.3.0"
        entry = document["entries"]["images"]
        assert entry["amax"] == pytest.approx(255)
        assert entry["scale"] * 127 == entry["amax"]

    def test_show_for_people(self, calibrated: Path) -> None:
        done = run("cache", "show", calibrated / "calibration.cache")

        assert done.stdout.startswith("TRT-100300-EntropyCalibration2  (TensorRT 10.3.0, 370 tensors)\n")

    def test_write_for_another_version(self, calibrated: Path, tmp_path: Path) -> None:
        target = tmp_path / "jetpack5.cache"

        done = run("cache", "write", calibrated / "ranges.json", "--tensorrt", "8.5.2", "-o", target)

        assert done.returncode == 0, done.stderr
        original = (calibrated / "calibration.cache").read_text().split("\n", 1)[1]
        assert target.read_text() == f"TRT-8502-EntropyCalibration2\n{original}"

    @pytest.mark.parametrize("content", ["", "hello", "{}", '{"schema": "edge.ranges/1"}'])
    def test_other_files_are_refused(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "x").write_text(content)

        assert "x" in failure(run("cache", "show", tmp_path / "x"), 65)
        assert "x" in failure(run("cache", "write", tmp_path / "x", "--tensorrt", "10.3.0", "-o", tmp_path / "y"), 65)
        assert not (tmp_path / "y").exists()

    def test_an_impossible_version_is_a_usage_error(self, calibrated: Path, tmp_path: Path) -> None:
        done = run("cache", "write", calibrated / "ranges.json", "--tensorrt", "ten", "-o", tmp_path / "y")

        assert done.returncode == 2
        assert "is no TensorRT version" in done.stderr


class TestCheck:
    def test_a_good_deployment(self, tmp_path: Path, photos: Path) -> None:
        done = run("check", deployment(tmp_path, str(photos)))

        assert done.returncode == 0, done.stderr
        assert "72 layers would run in INT8, 41 are kept in floating point" in done.stdout
        assert "not calibrated yet" in done.stdout

    def test_everything_wrong_is_told_at_once(self, tmp_path: Path) -> None:
        path = deployment(tmp_path, "nowhere", fp16=[{"name": "x"}, {"op": "Gemm"}])

        done = run("check", path)

        assert done.returncode == 78
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == 3, done.stderr

    def test_other_pictures_than_those_of_the_calibration(self, tmp_path: Path, photos: Path) -> None:
        path = deployment(tmp_path, str(photos))
        assert run("calibrate", path).returncode == 0
        assert "since the calibration" not in run("check", path).stdout
        (photos / PHOTOS[0].name).unlink()
        for photo in PHOTOS[3:5]:
            shutil.copy(photo, photos)

        done = run("check", deployment(tmp_path, str(photos), count=10))

        assert "2 of the 4 pictures are new since the calibration, 1 of its 3 are not used now" in done.stdout

    def test_as_json(self, tmp_path: Path, photos: Path) -> None:
        done = run("check", deployment(tmp_path, str(photos)), "--json")

        assert json.loads(done.stdout)["problems"] == []


@pytest.mark.parametrize("name", ["fastestdet", "yunet_n_320"])
def test_other_detectors_calibrate_too(tmp_path: Path, photos: Path, name: str) -> None:
    layout = {"fastestdet": {"labels": "coco80"}, "yunet_n_320": {"labels": ["face"]}}[name]
    path = tmp_path / "d.yaml"
    document = {
        "version": 1,
        "models": [
            {
                "name": "m",
                "path": str(DATA / "models" / f"{name}.onnx"),
                "artifacts": "out",
                "input": {"color": "bgr", "divide_by": 255 if name == "fastestdet" else 1, "resize": "stretch"},
                "task": {"type": "detection", **layout},
                "calibration": {"images": str(photos)},
            }
        ],
    }
    path.write_text(yaml.safe_dump(document))

    done = run("calibrate", path)

    assert done.returncode == 0, done.stderr
    session = onnxruntime.InferenceSession(
        str(tmp_path / "out" / "model.int8.onnx"), providers=["CPUExecutionProvider"]
    )
    picture = np.zeros(session.get_inputs()[0].shape, np.float32)
    assert all(np.isfinite(output).all() for output in session.run(None, {session.get_inputs()[0].name: picture}))


@pytest.mark.parametrize("arguments", [[], ["calibrate"], ["evaluate"], ["cache"], ["cache", "show"], ["check"]])
def test_help_shows_an_example(arguments: list[str]) -> None:
    done = run(*arguments, "--help")

    assert done.returncode == 0
    assert "edge-calibrate" in done.stdout
    if arguments != ["cache"]:
        assert "Example" in done.stdout


def test_a_closed_pipe_is_no_error(calibrated: Path) -> None:
    shell = f"set -o pipefail; {COMMAND} cache show {calibrated / 'calibration.cache'} | (read; exec true)"

    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_help_is_quick_to_import_nothing_heavy() -> None:
    code = "import sys, calibration.cli; print(sorted({'onnx', 'onnxruntime', 'rich', 'cv2'} & set(sys.modules)))"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout.strip() == "[]"


def tensor(name: str, shape: list[Any] | None, kind: int = onnx.TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(name, kind, shape)


def odd_model(path: Path, kind: str) -> None:
    """A small classifier as some exporter or hand left it."""
    rng = np.random.default_rng(0)
    node = onnx.helper.make_node
    weights = {
        "w1": rng.standard_normal((4, 3, 3, 3)).astype(np.float32) / 5,
        "w2": rng.standard_normal((5, 4)).astype(np.float32),
    }
    nodes = [
        node("Conv", ["images", "w1"], ["c1"], name="" if kind == "unnamed nodes" else "conv", pads=[1, 1, 1, 1]),
        node("Relu", ["c1"], ["r1"]),
        node("GlobalAveragePool", ["r1"], ["p1"]),
        node("Flatten", ["p1"], ["f1"]),
        node("Gemm", ["f1", "w2"], ["out"], name="gemm", transB=1),
    ]
    inputs, shape = [], [1, 3, 16, 16]
    if kind == "names that collide":
        nodes.insert(1, node("Mul", ["c1", "c1_scale"], ["c1_quantized"]))
        nodes[2] = node("Relu", ["c1_quantized"], ["r1"])
        nodes.append(node("Conv", ["c1", "w3"], ["second"], name="third"))
        weights |= {"c1_scale": np.float32([2.0]), "w3": np.ones((1, 4, 1, 1), np.float32)}
    elif kind == "initializers among the inputs":
        inputs = [tensor(name, list(array.shape)) for name, array in weights.items()]
    elif kind == "weights in Constant nodes":
        nodes = [
            node("Constant", [], [name], value=onnx.numpy_helper.from_array(w)) for name, w in weights.items()
        ] + nodes
        weights = {}
    elif kind == "channels last":
        nodes = [node("Transpose", ["images"], ["nchw"], perm=[0, 3, 1, 2]), *nodes]
        nodes[1] = node("Conv", ["nchw", "w1"], ["c1"], pads=[1, 1, 1, 1])
        shape = [1, 16, 16, 3]
    elif kind == "dynamic shape":
        shape = ["batch", 3, "height", "width"]
    graph = onnx.helper.make_graph(
        nodes,
        kind,
        [tensor("images", shape), *inputs],
        [tensor("out", None)],
        [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=8)
    if kind == "half precision":
        for initializer in graph.initializer:
            half = onnx.numpy_helper.to_array(initializer).astype(np.float16)
            initializer.CopyFrom(onnx.numpy_helper.from_array(half, initializer.name))
        graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
        graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=8)
    beside = kind == "weights beside the model"
    onnx.save(model, path, save_as_external_data=beside, location="weights.bin", size_threshold=0)


def odd_deployment(folder: Path, photos: Path, kind: str) -> Path:
    odd_model(folder / "odd.onnx", kind)
    model = {
        "name": "odd",
        "path": "odd.onnx",
        "artifacts": "out",
        "input": {"resize": "stretch", "size": [16, 16]},
        "task": {"type": "classification"},
        "calibration": {"images": str(photos), "method": "max"},
        "evaluation": {"images": str(DATA / "images")},
    }
    path = folder / "d.yaml"
    path.write_text(yaml.safe_dump({"version": 1, "models": [model]}))
    return path


@pytest.mark.parametrize(
    "kind",
    [
        "names that collide",
        "initializers among the inputs",
        "weights in Constant nodes",
        "weights beside the model",
        "channels last",
        "dynamic shape",
        "unnamed nodes",
    ],
)
def test_odd_models_calibrate_and_answer_as_fp32_does(tmp_path: Path, photos: Path, kind: str) -> None:
    path = odd_deployment(tmp_path, photos, kind)

    assert run("check", path).returncode == 0
    done = run("calibrate", path)
    assert done.returncode == 0, done.stderr
    evaluated = run("evaluate", path, "--images", photos, "--json", "-")

    assert evaluated.returncode == 0, evaluated.stderr
    agreed = json.loads(evaluated.stdout)["agreement"]
    assert agreed["images_identical"] == 3
    assert agreed["score_difference"]["max"] < 0.05


def test_a_half_precision_model_is_refused_before_the_work(tmp_path: Path, photos: Path) -> None:
    path = odd_deployment(tmp_path, photos, "half precision")

    for command in ("check", "calibrate"):
        assert "is FP16 ('images' is float16); calibration starts from the FP32 model" in failure(
            run(command, path), 65
        )


def test_weights_beside_the_model_are_part_of_its_identity(tmp_path: Path, photos: Path) -> None:
    path = odd_deployment(tmp_path, photos, "weights beside the model")
    assert run("calibrate", path).returncode == 0
    data = bytearray((tmp_path / "weights.bin").read_bytes())
    data[0] ^= 1
    (tmp_path / "weights.bin").write_bytes(data)

    assert "weights.bin has changed since" in failure(run("evaluate", path, "--images", photos), 65)


def test_a_changed_method_is_told_until_it_is_calibrated_again(tmp_path: Path, photos: Path) -> None:
    path = deployment(tmp_path, str(photos))
    assert run("calibrate", path).returncode == 0
    path.write_text(path.read_text().replace("method: auto", "method: entropy"))

    assert "calibration.method has changed since the calibration" in run("check", path).stdout

"""The contract between calibration and the device: a model is run only for what it was made for."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from edge import config, manifest
from edge.errors import ModelError


@pytest.fixture
def model(tmp_path: Path) -> config.Model:
    """A calibrated model; its files hold nothing that could run."""
    (tmp_path / "fp32.onnx").write_bytes(b"weights")
    model = config.Model(
        name="people",
        path=str(tmp_path / "fp32.onnx"),
        task=config.DetectionTask(),
        artifacts=str(tmp_path / "artifacts"),
        input=config.Input(mean=[0.5], divide_by=255),
    )
    folder = model.artifacts_dir
    folder.mkdir()
    (folder / manifest.INT8_MODEL).write_bytes(b"int8 weights")
    record = manifest.Manifest(
        tool="jetson-edge test",
        created_at="2026-01-01T00:00:00Z",
        model="people",
        model_sha256=manifest.sha256_of(tmp_path / "fp32.onnx"),
        input=model.input,
        method="max",
        tensorrt="10.3.0",
        fp16=[config.LayerRule(op="Conv", attributes={"group": 4})],
        fp16_layers=["stem"],
        images=manifest.ImageSetRecord(digest="d", count=1, sha256=["a"]),
        files={manifest.INT8_MODEL: manifest.sha256_of(folder / manifest.INT8_MODEL)},
        packages={},
    )
    (folder / manifest.MANIFEST).write_bytes(msgspec.json.encode(record))
    return model


def test_the_calibrated_model_is_run_for_int8(model: config.Model) -> None:
    artifact = manifest.artifact_to_run(model, "int8")

    assert artifact.path == model.artifacts_dir / manifest.INT8_MODEL
    assert artifact.sha256 == manifest.sha256_of(artifact.path)


def test_the_original_is_run_for_fp32(model: config.Model) -> None:
    assert manifest.artifact_to_run(model, "fp32").path == Path(model.path)


def test_a_manifest_is_read_back_as_it_was_written(model: config.Model) -> None:
    record = manifest.read(model.artifacts_dir)

    assert record is not None
    assert record.input == model.input
    assert record.fp16[0].attributes == {"group": 4}


def test_another_preprocessing_is_refused_and_named(model: config.Model) -> None:
    changed = msgspec.structs.replace(model, input=config.Input(mean=[0.5], divide_by=1, color="bgr"))

    with pytest.raises(ModelError) as caught:
        manifest.artifact_to_run(changed, "int8")

    assert "input.color is bgr but was rgb" in str(caught.value)
    assert "input.divide_by is 1 but was 255" in str(caught.value)
    assert "calibrate again" in str(caught.value)


def test_other_weights_are_refused(model: config.Model) -> None:
    Path(model.path).write_bytes(b"retrained weights")

    with pytest.raises(ModelError, match=r"fp32\.onnx has changed since"):
        manifest.artifact_to_run(model, "int8")


def test_a_changed_int8_model_is_refused(model: config.Model) -> None:
    (model.artifacts_dir / manifest.INT8_MODEL).write_bytes(b"another")

    with pytest.raises(ModelError, match=r"model\.int8\.onnx itself was changed"):
        manifest.artifact_to_run(model, "int8")


def test_what_is_missing_is_named_with_what_to_do(model: config.Model) -> None:
    (model.artifacts_dir / manifest.INT8_MODEL).unlink()
    with pytest.raises(ModelError, match=r"is missing, although .*calibration\.json names it; calibrate again"):
        manifest.artifact_to_run(model, "int8")

    (model.artifacts_dir / manifest.MANIFEST).unlink()
    with pytest.raises(ModelError, match="holds no calibration; run edge-calibrate calibrate first"):
        manifest.artifact_to_run(model, "int8")

    Path(model.path).unlink()
    with pytest.raises(ModelError, match=r"models\.people\.path: .*fp32\.onnx: no such model file"):
        manifest.artifact_to_run(model, "fp32")


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"schema": "edge.calibration/9"}'])
def test_a_damaged_manifest_is_an_error_of_its_own(model: config.Model, content: str) -> None:
    (model.artifacts_dir / manifest.MANIFEST).write_text(content)

    with pytest.raises(ModelError, match="is not a calibration manifest"):
        manifest.artifact_to_run(model, "int8")

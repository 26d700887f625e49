"""The deployment file: what is accepted, and how everything else is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import jsonschema
import pytest
import yaml

from edge import config
from edge.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable

    Write = Callable[[str], Path]

CONFIGS = Path(__file__).parents[2] / "configs"

MINIMAL = """
version: 1
models:
  - name: people
    path: model.onnx
    task: {type: detection}
"""


DETECTION, LETTERBOX = "; did you mean 'detection'?", "; did you mean 'letterbox'?"


def problems_of(path: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config.load(path)
    return list(caught.value.problems)


def test_minimal_file_gets_every_default(deployment_file: Write) -> None:
    deployment = config.load(deployment_file(MINIMAL))

    assert deployment.models[0].engine.precision == "int8"
    assert deployment.models[0].input.divide_by == 255
    assert deployment.mqtt.port == 1883
    assert deployment.device_id


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_deployments_load(path: Path) -> None:
    deployment = config.load(path)

    assert config.missing_files(deployment) == []


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_json_schema_accepts_shipped_deployments(path: Path) -> None:
    schema = config.json_schema()

    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(yaml.safe_load(path.read_text()), schema)


def test_json_schema_refuses_what_load_refuses() -> None:
    document = yaml.safe_load(MINIMAL) | {"mqqt": {}}

    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, config.json_schema())


def test_json_schema_describes_fields() -> None:
    assert "Letters, digits" in json.dumps(config.json_schema())


def test_all_problems_are_told_at_once_with_their_lines(deployment_file: Write) -> None:
    path = deployment_file(
        """version: 1
models:
  - name: people
    path: model.onnx
    task: {type: detction}
    input: {resize: letterbx}
    engine: {thread: 2}
mqtt: {port: 70000}
"""
    )

    assert problems_of(path) == [
        f"{path}:5: models[0].task.type: is 'detction'; allowed: detection, segmentation, classification{DETECTION}",
        f"{path}:6: models[0].input.resize: is 'letterbx'; allowed: letterbox, stretch, crop{LETTERBOX}",
        f"{path}:7: models[0].engine.thread: is not a known key; did you mean 'threads'?",
        f"{path}:8: mqtt.port: is 70000; expected a whole number <= 65535",
    ]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"version": 2}, "version: is 2; allowed: 1"),
        ({"models": []}, "models: is empty; at least 1 entry is needed"),
        ({"models": {"name": "x"}}, "models: is a section; expected a list"),
        ({"models": "yolo.onnx"}, "models: is 'yolo.onnx'; expected a list"),
        ({"models": None}, "models: is empty; expected a list"),
        ({"device": "line 3/left"}, "device: is 'line 3/left'; expected a name"),
        ({"mqtt": {"topic": "edge/#"}}, "mqtt.topic: is 'edge/#'; expected a topic without"),
        ({"mqtt": {"qos": 2}}, "mqtt.qos: is 2; allowed: 0, 1"),
        ({"mqtt": {"password_file": "pw"}}, "mqtt.password_file: needs mqtt.username as well"),
        ({"mqtt": {"password": "hunter2"}}, "mqtt.password: is not a known key; did you mean 'password_file'?"),
        ({"streams": [{"name": "a", "source": {"type": "hdmi"}}]}, "streams[0].source.type: is 'hdmi'; allowed"),
        ({"streams": [{"name": "a"}]}, "streams[0].source: is missing"),
        (
            {"streams": [{"name": "a", "source": {"type": "folder", "path": "x"}, "model": "cars"}]},
            "streams[0].model: there is no model 'cars'; allowed: people",
        ),
    ],
)
def test_wrong_values_are_named(deployment_file: Write, change: dict[str, object], expected: str) -> None:
    path = deployment_file(yaml.safe_dump(yaml.safe_load(MINIMAL) | change))

    assert any(expected in problem for problem in problems_of(path)), problems_of(path)


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"input": {"mean": [1, 2]}}, "input.mean: has 2 values; rgb takes 1 or 3"),
        ({"input": {"color": "gray", "std": [1, 1, 1]}}, "input.std: has 3 values; gray takes 1 or 1"),
        ({"input": {"divide_by": 0}}, "input.divide_by: is 0; expected a number > 0.0"),
        ({"input": {"size": [416]}}, "input.size: is a list of 1"),
        ({"task": {"type": "detection", "score": 1.5}}, "task.score: is 1.5; expected a number <= 1.0"),
        ({"task": {"type": "detection", "score": "high"}}, "task.score: is 'high'; expected a number"),
        ({"calibration": {"count": 4}}, "calibration.images: is missing"),
        ({"calibration": {"images": "x", "fp16": [{}]}}, "calibration.fp16[0]: chooses nothing"),
        ({"calibration": {"images": "x", "tensorrt": "ten"}}, "calibration.tensorrt: is 'ten'; expected a version"),
        ({"engine": {"precision": "int4"}}, "engine.precision: is 'int4'; allowed: int8, fp16, fp32; did you mean"),
        ({"engine": {"backend": "onnxruntime", "precision": "fp16"}}, "engine.precision: fp16 is for TensorRT"),
        ({"engine": {"backend": "onnxruntime", "dla": {}}}, "engine.dla: is for TensorRT"),
        ({"engine": {"dla": {}, "precision": "fp32"}}, "engine.precision: is fp32, which no DLA runs"),
        ({"engine": {"dla": {"core": 2}}}, "engine.dla.core: is 2; expected a whole number <= 1"),
        ({"engine": {"dla": {"sram_kb": 1000}}}, "engine.dla.sram_kb: is 1000; a DLA memory pool is a power of two"),
        ({"engine": {"input_format": "fp16:chw64"}}, "engine.input_format: is 'fp16:chw64'; expected a type and"),
        ({"engine": {"fp32": [{}]}}, "engine.fp32[0]: chooses nothing"),
        ({"engine": {"fallbacks": ["bf16"]}}, "engine.fallbacks[0]: is 'bf16'; allowed: norm-fp32, fp16, fp32"),
        ({"engine": {"optimization_level": 6}}, "engine.optimization_level: is 6; expected a whole number <= 5"),
        ({"engine": {"threads": 0}}, "engine.threads: is 0; expected a whole number >= 1"),
    ],
)
def test_wrong_model_sections_are_named(deployment_file: Write, section: dict[str, object], expected: str) -> None:
    document = yaml.safe_load(MINIMAL)
    document["models"][0] |= section
    path = deployment_file(yaml.safe_dump(document))

    assert any(expected in problem for problem in problems_of(path)), problems_of(path)


def test_repeated_names_are_refused(deployment_file: Write) -> None:
    document = yaml.safe_load(MINIMAL)
    document["models"] *= 2
    path = deployment_file(yaml.safe_dump(document))

    assert "models[1].name: 'people' is taken by an earlier entry" in problems_of(path)[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is empty"),
        ("# only a comment\n", "is empty"),
        ("version: 1\nmodels: [", "is not valid YAML"),
        ("version: 1\n\tmodels: 1\n", ":2: is not valid YAML"),
        ("x: " + 3000 * "[", "is nested too deeply"),
        ("a: &a [x]\nb: &b [*a, *a]\nversion: 2\n", "version: is 2; allowed: 1"),
        ("just text", "expected a section with keys such as version"),
        ("version: 1\nversion: 1\n", "version: is given twice, first in line 1"),
        ("a: &a [*a]\n", "an alias stands inside its own section"),
        ("version: !!python/object:os.system x\n", "is not valid YAML"),
    ],
)
def test_documents_that_are_no_deployment(deployment_file: Write, text: str, expected: str) -> None:
    problems = problems_of(deployment_file(text))

    assert any(expected in problem for problem in problems), problems


def test_a_missing_file_a_folder_and_bytes_are_configuration_errors(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")

    assert "no such deployment file" in problems_of(tmp_path / "absent.yaml")[0]
    assert "is a folder" in problems_of(tmp_path)[0]
    assert "is not UTF-8 text" in problems_of(tmp_path / "binary.yaml")[0]
    assert ConfigError([]).exit_code == ExitCode.CONFIG


def test_paths_are_relative_to_the_file(deployment_file: Write, tmp_path: Path) -> None:
    document = yaml.safe_load(MINIMAL)
    document["models"][0] |= {
        "calibration": {"images": ["photos", "/abs/*.jpg"]},
        "task": {"type": "detection", "labels": "names.txt"},
    }

    model = config.load(deployment_file(yaml.safe_dump(document))).models[0]

    assert model.path == str(tmp_path / "model.onnx")
    assert model.artifacts_dir == tmp_path / "artifacts" / "people"
    assert model.calibration is not None
    assert model.calibration.images == [str(tmp_path / "photos"), "/abs/*.jpg"]
    assert model.task.labels == str(tmp_path / "names.txt")


def test_the_label_list_coco80_is_no_path(deployment_file: Write) -> None:
    text = MINIMAL.replace("{type: detection}", "{type: detection, labels: coco80}")

    assert config.load(deployment_file(text)).models[0].task.labels == "coco80"


def test_missing_files_are_named_with_their_keys(deployment_file: Write) -> None:
    (missing,) = config.missing_files(config.load(deployment_file(MINIMAL)))

    assert missing.startswith("models[0].path: ")
    assert missing.endswith("model.onnx: no such file or folder")


def test_a_model_is_found_by_name_or_is_the_first(deployment_file: Write) -> None:
    deployment = config.load(deployment_file(MINIMAL))

    assert deployment.model().name == deployment.model("people").name
    with pytest.raises(ConfigError, match="no model 'cars' in this deployment; it has: people"):
        deployment.model("cars")

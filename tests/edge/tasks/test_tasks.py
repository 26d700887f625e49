from __future__ import annotations

from typing import Any, get_args, get_type_hints

import msgspec
import numpy as np
import pytest

from edge import config, tasks
from edge.errors import ConfigError, ModelError
from edge.tasks.heads import HEADS
from edge.tasks.segmentation import MASKS


def layouts_of(section: type[Any]) -> set[str]:
    """What ``task.layout`` may be, from the annotation of the field."""
    info: Any = msgspec.inspect.type_info(section)
    field = next(field for field in info.fields if field.name == "layout")
    kind: Any = field.type.type if isinstance(field.type, msgspec.inspect.Metadata) else field.type
    return set(kind.values)


def test_every_layout_of_the_deployment_file_has_a_decoder() -> None:
    assert layouts_of(config.DetectionTask) == {"auto", *HEADS}
    assert layouts_of(config.Segmentation) == {"auto", *MASKS}


def test_every_task_of_the_deployment_file_has_a_builder() -> None:
    assert set(get_args(get_type_hints(config.Model)["task"])) == set(tasks.BUILDERS)


def test_exports_are_deliberate() -> None:
    assert tasks.__all__ == ["BUILDERS", "Task", "build"]


def test_build_checks_labels_against_the_model(picture: Any, specs_of: Any) -> None:
    outputs = specs_of({"output": np.zeros((1, 3549, 85), np.float32)})

    task = tasks.build(config.DetectionTask(labels="coco80"), picture(416, 416), outputs, source="m.onnx")
    assert task.layout == "yolox"
    with pytest.raises(ConfigError, match=r"has 2 names, but m\.onnx has 80 classes"):
        tasks.build(config.DetectionTask(labels=["a", "b"]), picture(416, 416), outputs, source="m.onnx")
    with pytest.raises(ConfigError, match="did you mean 'person'"):
        tasks.build(config.DetectionTask(labels="coco80", keep=["persn"]), picture(416, 416), outputs, source="m.onnx")


def test_task_for_another_model_is_refused_by_its_name(picture: Any, specs_of: Any) -> None:
    outputs = specs_of({"output": np.zeros((1, 1000), np.float32)})

    with pytest.raises(ModelError, match=r"^net\.onnx: task\.layout 'auto' does not recognise the outputs 'output'"):
        tasks.build(config.DetectionTask(), picture(224, 224), outputs, source="net.onnx")

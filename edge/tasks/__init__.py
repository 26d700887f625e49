"""What an engine's outputs mean: one file per family of heads. Tasks know no engine, file or socket.

A task is added by its file, its section in ``edge.config`` and one line in ``BUILDERS``; a detection layout by its file
in ``edge/tasks/heads`` and one line there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from edge import config
from edge.tasks import classification, detection, segmentation

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge.types import Detection, Letterbox, Tensors, TensorSpec

__all__ = ["BUILDERS", "Task", "build"]


class Task(Protocol):
    """Decodes the outputs of one frame."""

    @property
    def layout(self) -> str:
        """The layout of the outputs that was set or recognised, for logs."""

    def decode(self, outputs: Tensors, letterbox: Letterbox) -> list[Detection]:
        """Turn an engine's outputs into detections in source pixels, best score first.

        Neither argument is written to, and the result holds no view of ``outputs``.
        """


BUILDERS: dict[type[Any], Callable[..., Task]] = {
    config.DetectionTask: detection.build,
    config.Segmentation: segmentation.build,
    config.Classification: classification.build,
}
"""By the section of the deployment file."""


def build(
    section: config.DetectionTask | config.Segmentation | config.Classification,
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    *,
    source: str,
) -> Task:
    """Make what decodes a model's outputs.

    Args:
        section: the ``task`` section of the deployment.
        inputs: the engine's inputs, of which the first is the picture.
        outputs: the engine's outputs.
        source: what to call the model in messages, usually its file.

    Raises:
        ModelError: the outputs are not laid out as the section says, or in no way that is known.
        ConfigError: labels can't be read or don't match the model, or an option doesn't fit the layout.
    """
    return BUILDERS[type(section)](section, inputs, outputs, source=source)

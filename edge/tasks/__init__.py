"""What an engine's outputs mean: one file per family of heads. Tasks know no engine, file or socket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from edge.types import Detection, Letterbox, Tensors

__all__ = ["Task"]


class Task(Protocol):
    """Decodes the outputs of one frame."""

    def decode(self, outputs: Tensors, letterbox: Letterbox) -> list[Detection]:
        """Turn an engine's outputs into detections in source pixels, best score first.

        Neither argument is written to, and the result holds no view of ``outputs``.
        """

"""The engine protocol: named input arrays in, named output arrays out. Engines know no labels, boxes or threads.

An engine is added by one file and one line in ``BACKENDS``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

    from edge import config
    from edge.types import Tensors, TensorSpec

__all__ = ["BACKENDS", "Engine", "open_engine"]


class Engine(Protocol):
    """A loaded model with fixed shapes, used by one thread at a time."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Every input, in the model's order."""

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Every output, in the model's order."""

    @property
    def description(self) -> str:
        """What runs the model and where, for logs: ``onnxruntime 1.23 (CPU, 2 threads)``."""

    def infer(self, tensors: Tensors) -> Tensors:
        """Run the model once.

        Args:
            tensors: one array for each input, of exactly its shape and dtype, C-contiguous.

        Returns:
            One array for each output. They are views of the engine's buffers, valid until the next call: copy to keep.

        Raises:
            ModelError: a name, shape or dtype differs from the specification.
        """

    def __enter__(self) -> Self:
        """Engines are context managers; leaving the block frees their memory."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Free the engine."""


def open_engine(model: Path, section: config.Engine, *, size_wh: tuple[int, int] | None = None) -> Engine:
    """Load a model file with the backend that the deployment names.

    Args:
        model: the file to run.
        section: how to run it.
        size_wh: width and height of picture inputs, for models that leave them dynamic.

    Raises:
        DeviceError: the backend, or what it needs, is not installed.
        ModelError: the file is missing, cannot be loaded, or its shapes are not fixed.
    """
    return BACKENDS["onnxruntime" if section.backend == "auto" else section.backend](model, section, size_wh)


def _onnxruntime(model: Path, section: config.Engine, size_wh: tuple[int, int] | None) -> Engine:
    from edge.engine.onnxruntime import OnnxRuntimeEngine

    return OnnxRuntimeEngine(model, providers=section.providers, threads=section.threads, size_wh=size_wh)


BACKENDS: dict[str, Callable[[Path, config.Engine, tuple[int, int] | None], Engine]] = {"onnxruntime": _onnxruntime}

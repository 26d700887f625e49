"""The engine protocol: named input arrays in, named output arrays out. Engines know no labels, boxes or threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from edge.types import Tensors, TensorSpec

__all__ = ["Engine"]


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

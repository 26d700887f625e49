"""What every engine asks of the tensors that it is given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edge.errors import ModelError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edge.types import Tensors, TensorSpec

__all__ = ["checked"]


def checked(tensors: Tensors, spec: TensorSpec) -> NDArray[Any]:
    """The array for one input.

    Raises:
        ModelError: it is missing, or its shape or dtype differs from the specification.
    """
    value = tensors.get(spec.name)
    if value is None:
        raise ModelError(f"input '{spec.name}' is missing; given: {', '.join(tensors) or 'none'}")
    if value.shape != spec.shape or value.dtype != spec.dtype:
        raise ModelError(
            f"input '{spec.name}' is {value.dtype}{list(value.shape)}; expected {spec.dtype}{list(spec.shape)}"
        )
    return value

"""How TensorRT lays out an engine's inputs and outputs in memory, and the way there and back. Pure: numpy only.

The layouts are those of ``TensorFormat`` in TensorRT's NvInferRuntimeBase.h, under trtexec's names. Outside the engine
a tensor is what the model means: its logical shape, float32 where the engine has FP16 or INT8.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from edge.errors import ModelError
from edge.types import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = ["DTYPES", "LAYOUTS", "Layout", "numpy_type"]

DTYPES = {
    "fp32": "FLOAT",
    "fp16": "HALF",
    "int8": "INT8",
    "int32": "INT32",
    "int64": "INT64",
    "uint8": "UINT8",
    "bool": "BOOL",
}
"""Types of engine tensors -> member of DataType; TensorRT's BF16, FP8 and INT4 have no numpy counterpart."""

LAYOUTS = {
    "chw": "LINEAR",
    "chw2": "CHW2",
    "chw4": "CHW4",
    "chw16": "CHW16",
    "chw32": "CHW32",
    "hwc": "HWC",
    "hwc8": "HWC8",
    "dla_linear": "DLA_LINEAR",
    "dla_hwc4": "DLA_HWC4",
}
"""Layouts of engine tensors -> member of TensorFormat."""

# NvInferRuntimeBase.h, TensorFormat: kCHWv is [N][ceil(C / v)][H][W][v], kHWCv is [N][H][W][C rounded up to v].
_BLOCKED = {"chw2": 2, "chw4": 4, "chw16": 16, "chw32": 32}
_CHANNELS_LAST = {"hwc": 1, "hwc8": 8}
_DLA_ROW_BYTES = 64
"""Rows of the two DLA layouts start at multiples of this on Orin."""


def numpy_type(name: str) -> np.dtype[Any]:
    """Of one of ``DTYPES``."""
    return np.dtype({"fp32": "float32", "fp16": "float16"}.get(name, name))


_NUMPY_TYPES = tuple(map(numpy_type, DTYPES))


@dataclass(frozen=True, slots=True)
class Layout:
    """One engine tensor in memory.

    Raises:
        ModelError: this type or layout cannot be fed, or an INT8 tensor comes without its scale.
    """

    name: str
    shape: tuple[int, ...]
    """Logical: what the model declares, without padding."""
    dtype: np.dtype[Any]
    """In the engine's memory."""
    layout: str = "chw"
    scale: float | None = None
    """Of an INT8 tensor: value = scale * stored."""

    def __post_init__(self) -> None:
        if self.dtype not in _NUMPY_TYPES:
            raise ModelError(f"tensor '{self.name}' is {self.dtype}; allowed: {', '.join(map(str, _NUMPY_TYPES))}")
        if self.layout not in LAYOUTS:
            raise ModelError(f"tensor '{self.name}' has layout {self.layout}; allowed: {', '.join(LAYOUTS)}")
        if self.layout != "chw" and len(self.shape) < 3:
            raise ModelError(
                f"tensor '{self.name}' has layout {self.layout} but shape {list(self.shape)}; expected channels, rows"
                " and columns as the last three dimensions"
            )
        if self.layout == "dla_hwc4" and self.shape[-3] not in (1, 3, 4):
            raise ModelError(
                f"tensor '{self.name}' has layout dla_hwc4 and {self.shape[-3]} channels; allowed: 1, 3, 4"
            )
        if self.dtype == np.int8 and not (self.scale is not None and 0 < self.scale < math.inf):
            raise ModelError(
                f"tensor '{self.name}' is INT8 and its scale is {'not known' if self.scale is None else self.scale};"
                " it is told by io_scales in engine.json: run edge-calibrate build"
            )

    @property
    def spec(self) -> TensorSpec:
        """The tensor as pre-processing and tasks see it."""
        dtype = np.dtype(np.float32) if self.dtype in (np.float16, np.int8) else self.dtype
        return TensorSpec(self.name, self.shape, dtype)

    @property
    def plain(self) -> bool:
        """Whether memory holds exactly what ``spec`` says, so that no conversion is needed."""
        return self.layout == "chw" and self.dtype == self.spec.dtype

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """Of the tensor in memory, padding included."""
        if self.layout == "chw":
            return self.shape
        batch, channels, rows, columns = self._nchw
        if vector := _BLOCKED.get(self.layout):
            return (batch, -(-channels // vector), rows, columns, vector)
        if vector := _CHANNELS_LAST.get(self.layout):
            return (batch, rows, columns, _rounded_up(channels, vector))
        in_row = _DLA_ROW_BYTES // self.dtype.itemsize
        if self.layout == "dla_linear":
            return (batch, channels, rows, _rounded_up(columns, in_row))
        depth = 1 if channels == 1 else 4
        return (batch, rows, _rounded_up(columns, in_row // depth), depth)

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from one step along each axis of ``shape`` to the next, 0 where there is one step only.

        Channels that lie together are one step.
        """
        batch, sizes = self.shape[:-3], self.packed_shape[1:]
        if self.layout == "chw":
            sizes = (*self.shape, 1)
        elif self.layout in _BLOCKED:
            sizes = (*batch, *sizes)
        elif self.layout == "dla_linear":
            sizes = (*batch, *sizes, 1)
        else:
            sizes = (*batch, 1, *sizes)
        steps = [self.dtype.itemsize * math.prod(sizes[axis + 1 :]) for axis in range(len(self.shape))]
        return tuple(step if min(counts) > 1 else 0 for step, *counts in zip(steps, sizes, self.shape, strict=False))

    @property
    def nbytes(self) -> int:
        """Of the tensor in memory, padding included."""
        return math.prod(self.packed_shape) * self.dtype.itemsize

    def view(self, memory: NDArray[np.uint8]) -> NDArray[Any]:
        """The first ``nbytes`` of a flat buffer as the packed tensor."""
        return memory[: self.nbytes].view(self.dtype).reshape(self.packed_shape)

    def scratch(self) -> NDArray[np.float32] | None:
        """Working memory that ``pack`` takes, so that it need not allocate; None where it needs none."""
        return np.empty(self.shape, np.float32) if self.dtype == np.int8 else None

    def pack(self, values: NDArray[Any], packed: NDArray[Any], scratch: NDArray[np.float32] | None = None) -> None:
        """Write a tensor as the engine wants it. Padding is left as it is: clear the memory once, beforehand.

        Args:
            values: of ``spec``'s shape and dtype, C-contiguous.
            packed: of ``packed_shape`` and ``dtype``.
            scratch: what ``scratch()`` gave; None allocates.
        """
        # A value beyond FP16 becomes infinite, as IEEE 754 has it and CUDA's __float2half does.
        with np.errstate(over="ignore", invalid="ignore"):
            if self.dtype == np.int8:
                values = _quantized(values, self._scale, np.empty_like(values) if scratch is None else scratch)
            for there, here in self._pieces(packed, values):
                np.copyto(there, here, casting="unsafe")

    def unpack(self, packed: NDArray[Any], values: NDArray[Any]) -> None:
        """Read a tensor that the engine wrote; the arguments are as in ``pack``."""
        for there, here in self._pieces(packed, values):
            if self.dtype == np.int8:
                np.multiply(there, self._scale, out=here, dtype=np.float32)
            else:
                np.copyto(here, there, casting="unsafe")

    @property
    def _scale(self) -> np.float32:
        assert self.scale is not None
        scale: np.float32 = np.float32(self.scale)
        return scale

    @property
    def _nchw(self) -> tuple[int, int, int, int]:
        *batch, channels, rows, columns = self.shape
        return math.prod(batch), channels, rows, columns

    def _pieces(self, packed: NDArray[Any], values: NDArray[Any]) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Views of the same elements in both, which together cover the tensor but no padding."""
        if self.layout == "chw":
            yield packed, values
            return
        nchw = values.reshape(self._nchw)
        _, channels, _, columns = self._nchw
        if self.layout == "dla_linear":
            yield packed[..., :columns], nchw
        elif vector := _BLOCKED.get(self.layout):
            for lane in range(min(vector, channels)):
                here = nchw[:, lane::vector]
                yield packed[:, : here.shape[1], :, :, lane], here
        else:
            # Channel by channel: of a few channels numpy copies planes faster than pixels, INT8 three times as fast.
            for channel in range(channels):
                yield packed[:, :, :columns, channel], nchw[:, channel]


def _rounded_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _quantized(values: NDArray[Any], scale: np.float32, out: NDArray[np.float32]) -> NDArray[np.float32]:
    """As TensorRT quantizes: round half to even, then saturate (developer guide, "Quantized Types")."""
    np.divide(values, scale, out=out)
    np.rint(out, out=out)
    return np.clip(out, -128, 127, out=out)

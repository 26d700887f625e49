"""How tensors lie in memory, written for clearness and on its own: what the product's own conversion is checked with.

Formats as NvInferRuntime.h describes TensorFormat. Arrays are NCHW (fewer dimensions for LINEAR).
"""

from __future__ import annotations

import numpy as np

# Format -> element types it is bound to.
TYPES = {
    "LINEAR": None,
    "CHW2": ("HALF",),
    "HWC8": ("HALF", "BF16"),
    "CHW4": ("INT8", "HALF"),
    "CHW16": ("HALF",),
    "CHW32": ("FLOAT", "HALF", "INT8"),
    "HWC": ("FLOAT", "HALF", "UINT8", "INT64", "BF16"),
    "DLA_LINEAR": ("HALF", "INT8"),
    "DLA_HWC4": ("HALF", "INT8"),
    "HWC16": ("HALF", "INT8", "FP8"),
}
NAMES = {"FLOAT": "FP32", "HALF": "FP16", "INT8": "Int8", "INT32": "Int32", "INT64": "Int64", "BOOL": "Bool"}
NAMES |= {"UINT8": "UInt8", "BF16": "BF16"}
DESCRIPTIONS = {
    "LINEAR": "Row major linear {}",
    "CHW2": "Two wide channel vectorized row major {} format",
    "CHW4": "Four wide channel vectorized row major {} format",
    "CHW16": "Sixteen wide channel vectorized row major {} format",
    "CHW32": "Thirty-two wide channel vectorized row major {} format",
    "HWC": "Channel major {} format",
    "HWC8": "Channel major {} format where channel % 8 == 0",
    "HWC16": "Channel major {} format where channel % 16 == 0",
    "DLA_LINEAR": "DLA linear {} format",
    "DLA_HWC4": "DLA HWC4 {} format",
}
NUMPY = {"FLOAT": np.float32, "HALF": np.float16, "INT8": np.int8, "INT32": np.int32, "INT64": np.int64}
NUMPY |= {"BOOL": np.bool_, "UINT8": np.uint8}


def description(form: str, dtype: str) -> str:
    """As the engine inspector writes it."""
    return DESCRIPTIONS[form].format(NAMES[dtype])


def vector(form: str) -> int:
    """Channels that lie together; 1 where they do not."""
    return {"CHW2": 2, "CHW4": 4, "CHW16": 16, "CHW32": 32, "HWC8": 8, "HWC16": 16}.get(form, 1)


def _up(value: int, to: int) -> int:
    return -(-value // to) * to


def strides(form: str, shape: tuple[int, ...], itemsize: int) -> tuple[int, tuple[int, int, int, int]]:
    """Bytes in all, and the step of each dimension of NCHW in bytes, of the formats that only the DLA has."""
    n, c, h, w = shape
    if form == "DLA_LINEAR":  # the step along H is a multiple of 64 bytes
        row = _up(w * itemsize, 64)
        return n * c * h * row, (c * h * row, h * row, row, itemsize)
    if c not in (1, 3, 4):
        raise ValueError(f"DLA_HWC4 has 1, 3 or 4 channels, not {c}")
    pixel = itemsize * (1 if c == 1 else 4)
    row = _up(w * pixel, 64)  # 64 on Orin, 32 on Xavier
    return n * h * row, (h * row, itemsize, row, pixel)


def nbytes(form: str, shape: tuple[int, ...], dtype: str) -> int:
    """Size of a tensor in memory."""
    itemsize = np.dtype(NUMPY[dtype]).itemsize
    if form == "LINEAR":
        return int(np.prod(shape, dtype=np.int64)) * itemsize
    if form.startswith("DLA_"):
        return strides(form, shape, itemsize)[0]
    n, c, h, w = shape
    return n * _up(c, vector(form)) * h * w * itemsize


def _view(memory: np.ndarray, form: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """The elements as a view of the bytes: NCHW, or (N, C/v, H, W, v) of the CHWv formats."""
    kind = np.dtype(NUMPY[dtype])
    if form == "LINEAR":
        return memory.view(kind).reshape(shape)
    n, c, h, w = shape
    if form.startswith("DLA_"):
        return np.lib.stride_tricks.as_strided(memory.view(kind), shape, strides(form, shape, kind.itemsize)[1])
    padded = _up(c, vector(form))
    if form.startswith("HWC"):
        return memory.view(kind).reshape(n, h, w, padded).transpose(0, 3, 1, 2)[:, :c]
    return memory.view(kind).reshape(n, padded // vector(form), h, w, vector(form))


def strides_in_elements(form: str, shape: tuple[int, ...], dtype: str) -> list[int]:
    """Of each dimension, in vectors where the format has them: along channels, from one vector to the next."""
    view = _view(np.zeros(nbytes(form, shape, dtype), np.uint8), form, shape, dtype)
    return [max(1, step // (view.itemsize * vector(form))) for step in view.strides[: len(shape)]]


def unpack(memory: np.ndarray, form: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """The tensor of NCHW from its bytes."""
    view = _view(memory, form, shape, dtype)
    if form.startswith("CHW"):
        n, c, h, w = shape
        view = view.transpose(0, 1, 4, 2, 3).reshape(n, -1, h, w)[:, :c]
    return np.ascontiguousarray(view)


def pack(array: np.ndarray, form: str, dtype: str) -> np.ndarray:
    """The bytes of a tensor of NCHW; padding is filled with garbage, since nobody may rely on it."""
    memory = np.full(nbytes(form, array.shape, dtype), 0x5A, np.uint8)
    view = _view(memory, form, array.shape, dtype)
    if form.startswith("CHW"):
        for channel in range(array.shape[1]):
            view[:, channel // vector(form), :, :, channel % vector(form)] = array[:, channel]
    else:
        view[...] = array
    return memory

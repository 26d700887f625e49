"""The one loop of calibration that numpy cannot do in one pass: sorting a tensor's values into bins.

``kernel.c`` is compiled when the package is installed and there is a C compiler; numpy is the fallback, with the same
counts. See docs/decisions/0007-kernel.md.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["BINS", "KERNELS", "Extremes", "count"]

logger = logging.getLogger(__name__)

BINS = 2048
"""As TensorRT's EntropyCalibration2 uses."""

# Values handled at a time by numpy: 128 KiB of float32 stay in the second-level cache between the passes over them.
_CHUNK = 1 << 15


class Extremes(NamedTuple):
    """What the bins do not tell."""

    minimum: float
    maximum: float
    zeros: int
    """Values that are exactly zero."""
    counted: bool
    """False: a value lies beyond the range or is not finite, and ``counts`` was left as it was."""


def _with_numpy(values: NDArray[np.float32], exponent: int, counts: NDArray[np.int64]) -> Extremes:
    minimum, maximum = float(values.min()), float(values.max())
    if not max(-minimum, maximum) < math.ldexp(1.0, exponent):  # NaN as well
        return Extremes(minimum, maximum, 0, counted=False)
    # Multiplying by a power of two is exact, so that no value crosses a bin's edge by rounding. It is done in two
    # steps where one factor alone would not be a float32.
    shift = 11 - exponent  # log2(BINS) - exponent
    factors = [np.float32(math.ldexp(1.0, part)) for part in (shift // 2, shift - shift // 2)]
    buffer = np.empty(min(_CHUNK, values.size), np.float32)
    zeros = 0
    for start in range(0, values.size, _CHUNK):
        piece = values[start : start + _CHUNK]
        scaled = np.abs(piece, out=buffer[: piece.size])
        for factor in factors:
            scaled *= factor
        counts += np.bincount(scaled.astype(np.uint16), minlength=BINS)
        zeros += piece.size - int(np.count_nonzero(piece))
    return Extremes(minimum, maximum, zeros, counted=True)


def _load() -> Any:
    """The compiled library, or None."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_kernel{suffix}")
        if path.exists():
            try:
                function = ctypes.CDLL(str(path)).edge_histogram
            except (OSError, AttributeError) as error:
                logger.warning("%s; numpy counts instead; install jetson-edge again to build it", error)
                return None
            pointer = ctypes.c_void_p
            function.argtypes = [pointer, ctypes.c_int64, ctypes.c_float, *[pointer] * 4]
            function.restype = ctypes.c_int64
            return function
    return None


_COMPILED = _load()


def _with_c(values: NDArray[np.float32], exponent: int, counts: NDArray[np.int64]) -> Extremes:
    shift = 11 - exponent
    if not -126 <= shift <= 127:  # 2**shift is no normal float32
        return _with_numpy(values, exponent, counts)
    minimum, maximum, zeros = ctypes.c_float(), ctypes.c_float(), ctypes.c_int64()
    beyond = _COMPILED(
        values.ctypes.data,
        values.size,
        math.ldexp(1.0, shift),
        counts.ctypes.data,
        ctypes.byref(minimum),
        ctypes.byref(maximum),
        ctypes.byref(zeros),
    )
    return Extremes(minimum.value, maximum.value, zeros.value, counted=beyond == 0)


KERNELS: dict[str, Callable[[NDArray[np.float32], int, NDArray[np.int64]], Extremes]] = {
    **({"c": _with_c} if _COMPILED is not None else {}),
    "numpy": _with_numpy,
}
"""By name, the fastest first. The C kernel lets other threads run Python while it counts."""

count = next(iter(KERNELS.values()))
"""Add a non-empty, contiguous 1-D array to ``counts``, (BINS,) int64 over [0, 2**exponent)."""

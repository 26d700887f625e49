"""TensorRT's own INT8 calibration: hands it pictures one by one, or a calibration cache instead.

An exception that leaves one of the calibrator's callbacks is swallowed by the bindings and turned into an unrelated
error (NVIDIA/TensorRT issues 3871 and 1186), and no more data is not the same as a failure. So the first exception is
kept, the calibration ends, and whoever started the build raises it afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from calibration import cache as caches
from edge.errors import DataError, DeviceError, ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path
    from types import ModuleType

    from numpy.typing import NDArray

__all__ = ["Calibrator", "difference", "make"]


class Calibrator:
    """The callbacks, and what is known of a calibration after the build. ``make`` adds TensorRT's own class."""

    def __init__(
        self,
        version: str,
        batches: Iterator[Mapping[str, NDArray[Any]]] | None,
        cache: Path | None,
        upload: Callable[[str, NDArray[Any]], int],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        self.error: Exception | None = None
        """The first that a callback met; a plan, if there is one, is not to be used."""
        self.batches = 0
        """Pictures that TensorRT has taken."""
        self.cache_read = False
        """TensorRT was given the cache."""
        self.written: bytes | None = None
        """The cache that TensorRT has written."""
        self._version = version
        self._pending = batches
        self._cache = cache
        self._upload = upload
        self._shapes = dict(shapes)

    def get_batch_size(self) -> int:
        """One: the pictures are never too few for a batch, and none is left over."""
        return 1

    def get_batch(self, names: Sequence[str]) -> list[int] | None:
        """Where the inputs of the next picture lie on the GPU, in the order of their names; None at the end."""
        if self.error is not None:
            return None
        try:
            return self._next(names)
        except Exception as error:  # noqa: BLE001 - see above: none may leave a callback
            self.error = error
            return None

    def read_calibration_cache(self) -> bytes | None:
        """The cache, if TensorRT will take it."""
        try:
            return self._served()
        except Exception as error:  # noqa: BLE001 - see above
            self.error = self.error or error
            return None

    def write_calibration_cache(self, cache: Any) -> None:
        """Keep what TensorRT has found: the buffer is TensorRT's, and files are not written in a callback."""
        self.written = bytes(cache)

    def _next(self, names: Sequence[str]) -> list[int] | None:
        if self._pending is None:
            raise ModelError(f"{self._cache}: TensorRT has not taken it and asks for pictures instead")
        tensors = next(self._pending, None)
        if tensors is None:
            return None
        for name in names:
            self._check(name, tensors)
        pointers = [self._upload(name, tensors[name]) for name in names]
        self.batches += 1
        return pointers

    def _check(self, name: str, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Before anything is copied: a short array would be read past its end on the GPU."""
        array = tensors.get(name)
        if array is None:
            raise DataError(f"calibration: input '{name}' is missing; given: {', '.join(tensors) or 'none'}")
        shape = self._shapes.setdefault(name, array.shape)
        if array.dtype != np.float32 or array.shape != shape or not array.flags.c_contiguous:
            order = "" if array.flags.c_contiguous else ", not C-contiguous"
            raise DataError(
                f"calibration: input '{name}' is {array.dtype}{list(array.shape)}{order}; expected C-contiguous"
                f" float32{list(shape)}"
            )

    def _served(self) -> bytes | None:
        if self._cache is None or (self._pending is not None and not self._cache.exists()):
            return None
        try:
            data = self._cache.read_bytes()
        except OSError as error:
            raise DataError(f"{self._cache}: cannot be read ({(error.strerror or str(error)).lower()})") from error
        wrong = difference(data, self._version, source=str(self._cache))
        if wrong is not None:
            raise ModelError(wrong)
        self.cache_read = True
        return data


def difference(data: bytes, version: str, *, source: str) -> str | None:
    """Why TensorRT would skip a calibration cache, or None if it takes it. It skips without a word.

    Args:
        data: the cache.
        version: of TensorRT, such as 8.5.2.2.
        source: the file's name, for messages.

    Raises:
        DataError: it is no calibration cache.
    """
    found = caches.parse(data.decode("utf-8", "replace"), source=source)
    ours = ".".join(version.split(".")[:3])
    if found.algorithm != caches.ALGORITHM:
        return (
            f"{source}: is of algorithm {found.algorithm}; TensorRT's calibrator for the DLA takes {caches.ALGORITHM}"
        )
    if caches.version_digits(found.tensorrt) != caches.version_digits(ours):
        return f"{source}: is for TensorRT {found.tensorrt}, but this is {ours}, which skips it; calibrate again"
    return None


def make(
    trt: ModuleType,
    batches: Iterator[Mapping[str, NDArray[Any]]] | None,
    *,
    cache: Path | None,
    upload: Callable[[str, NDArray[Any]], int],
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> Calibrator:
    """Make a calibrator: an IInt8EntropyCalibrator2 of batch size 1, the one kind that the DLA takes.

    Args:
        trt: the ``tensorrt`` module.
        batches: inputs of one picture after the other, float32 and C-contiguous; None: the cache must do.
        cache: file to serve; with ``batches`` it may be missing.
        upload: copies an input to the GPU and returns where it lies there; called from the thread that builds.
        shapes: of each input; default: every picture's must be as the first's.

    Raises:
        DeviceError: this TensorRT has no calibrators.
    """
    if not hasattr(trt, "IInt8EntropyCalibrator2"):
        raise DeviceError(
            f"TensorRT {trt.__version__} has no calibrator: INT8 comes from the model's Q/DQ there; set"
            " engine.quantization to qdq"
        )

    class EntropyCalibrator(Calibrator, trt.IInt8EntropyCalibrator2):  # type: ignore[name-defined, misc]  # of a module
        def __init__(self) -> None:
            # pybind11 refuses an object whose base class was not initialised by name.
            trt.IInt8EntropyCalibrator2.__init__(self)
            Calibrator.__init__(self, trt.__version__, batches, cache, upload, shapes or {})

    return EntropyCalibrator()

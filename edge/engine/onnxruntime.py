"""Engines on onnxruntime: the CPU everywhere, CUDA and TensorRT where its providers are installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from edge.engine.inputs import checked
from edge.errors import DeviceError, ModelError
from edge.types import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

    from edge.types import Tensors

__all__ = ["PROVIDERS", "OnnxRuntimeEngine"]

PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
_DTYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(uint8)": np.uint8,
    "tensor(int8)": np.int8,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
    "tensor(bool)": np.bool_,
}


class OnnxRuntimeEngine:
    """An ONNX model in an onnxruntime session, its inputs and outputs bound to buffers that are allocated once."""

    def __init__(
        self,
        model: Path,
        *,
        providers: Sequence[str] = ("cpu",),
        threads: int | None = None,
        size_wh: tuple[int, int] | None = None,
    ) -> None:
        """Load a model.

        Args:
            model: the ONNX file.
            providers: keys of ``PROVIDERS``, in order of preference.
            threads: for one inference on the CPU; None leaves it to onnxruntime, which takes all cores.
            size_wh: width and height of picture inputs, for models that leave them dynamic.

        Raises:
            DeviceError: onnxruntime or one of the providers is not installed.
            ModelError: the file is missing or cannot be loaded, or an input's shape is still dynamic.
        """
        ort = _import()
        self._model = model
        missing = [name for name in providers if PROVIDERS[name] not in ort.get_available_providers()]
        if missing:
            present = ", ".join(key for key, name in PROVIDERS.items() if name in ort.get_available_providers())
            raise DeviceError(
                f"engine.providers names {', '.join(missing)}, but this onnxruntime has: {present};"
                " CUDA and TensorRT come with the package onnxruntime-gpu"
            )
        if not model.is_file():
            raise ModelError(f"{model}: no such model file")
        options = ort.SessionOptions()
        options.log_severity_level = 3  # errors only: the rest is about its own optimisations
        if threads is not None:
            options.intra_op_num_threads = threads
        try:
            self._session = ort.InferenceSession(str(model), options, providers=[PROVIDERS[name] for name in providers])
        except Exception as error:
            # onnxruntime's exceptions have no common base that it exports
            if type(error).__module__.startswith("onnxruntime"):
                raise ModelError(f"{model}: onnxruntime cannot load it: {_first_line(error)}") from error
            raise
        used = self._session.get_providers()[0]
        if used != PROVIDERS[providers[0]]:
            raise DeviceError(
                f"engine.providers asks for {providers[0]} first, but onnxruntime fell back to {used}; the libraries"
                " that it needs (CUDA, cuDNN, TensorRT) are missing or of another version"
            )
        self.inputs = tuple(_fixed(argument, size_wh, model) for argument in self._session.get_inputs())
        self._buffers = {spec.name: np.zeros(spec.shape, spec.dtype) for spec in self.inputs}
        self._binding = self._session.io_binding()
        for name, buffer in self._buffers.items():
            self._binding.bind_cpu_input(name, buffer)
        # The first run also tells the output shapes that shape inference could not.
        names = [argument.name for argument in self._session.get_outputs()]
        first = self._translated(lambda: self._session.run(names, self._buffers))
        self.outputs = tuple(
            TensorSpec(name, tuple(value.shape), value.dtype) for name, value in zip(names, first, strict=True)
        )
        self._results: Tensors = {spec.name: np.empty(spec.shape, spec.dtype) for spec in self.outputs}
        for name, result in self._results.items():
            self._binding.bind_output(name, "cpu", 0, result.dtype, list(result.shape), result.ctypes.data)
        used = used.removesuffix("ExecutionProvider")
        cores = f", {threads} thread{'s' if threads != 1 else ''}" if threads is not None else ""
        self.description = f"onnxruntime {ort.__version__} ({used}{cores})"

    def infer(self, tensors: Tensors) -> Tensors:
        """Run the model once; see ``edge.engine.Engine.infer``. Outputs are valid until the next call."""
        for spec in self.inputs:
            np.copyto(self._buffers[spec.name], checked(tensors, spec))
        self._translated(lambda: self._session.run_with_iobinding(self._binding))
        return self._results

    def _translated(self, call: Callable[[], Any]) -> Any:
        """Make onnxruntime's errors ours, once for loading and running."""
        try:
            return call()
        except Exception as error:
            # onnxruntime's exceptions have no common base that it exports
            if not type(error).__module__.startswith("onnxruntime") and not isinstance(error, RuntimeError):
                raise
            raise ModelError(
                f"{self._model}: fails when it runs: {_first_line(error)} (outputs whose shape depends on the picture,"
                " such as those of an NMS inside the model, are not supported)"
            ) from error

    def __enter__(self) -> Self:
        """The engine is ready when it is constructed."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Free the session and its buffers."""
        self._results = {}
        del self._binding, self._session


def _import() -> Any:
    try:
        import onnxruntime
    except ImportError:
        raise DeviceError("onnxruntime is not installed; pip install 'jetson-edge[cpu]'") from None
    return onnxruntime


def _fixed(argument: Any, size_wh: tuple[int, int] | None, model: Path) -> TensorSpec:
    shape = list(argument.shape)
    if shape and not isinstance(shape[0], int):
        shape[0] = 1
    if size_wh is not None and len(shape) == 4:
        height_axis = 2 if shape[1] in (1, 3) else 1
        for axis, size in ((height_axis, size_wh[1]), (height_axis + 1, size_wh[0])):
            if isinstance(shape[axis], int) and shape[axis] != size:
                raise ModelError(
                    f"{model}: input.size asks for {size_wh[0]}x{size_wh[1]}, but input '{argument.name}' is fixed to"
                    f" {shape}"
                )
            shape[axis] = size
    for axis, size in enumerate(shape):
        if not isinstance(size, int):
            raise ModelError(
                f"{model}: dimension {axis} ({size or 'unnamed'}) of input '{argument.name}' is dynamic; set input.size"
                " in the deployment, engines have fixed shapes"
            )
    if argument.type not in _DTYPES:
        raise ModelError(f"{model}: input '{argument.name}' is {argument.type}; allowed: {', '.join(_DTYPES)}")
    return TensorSpec(argument.name, tuple(shape), np.dtype(_DTYPES[argument.type]))


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]

"""Engines on onnxruntime: the CPU everywhere, CUDA and TensorRT where its providers are installed.

Inputs and outputs are arrays on the CPU with every provider; onnxruntime copies them to and from a GPU.
"""

from __future__ import annotations

import hashlib
import mmap
from typing import TYPE_CHECKING, Any

import numpy as np

from edge.engine.inputs import checked
from edge.errors import ConfigError, DeviceError, ModelError
from edge.manifest import sha256_of
from edge.types import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

    from edge import config
    from edge.types import Tensors

__all__ = ["PROVIDERS", "OnnxRuntimeEngine", "options_of", "provider_options"]

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
    """An ONNX model in an onnxruntime session, its outputs bound to buffers that are allocated once."""

    def __init__(
        self,
        model: Path,
        *,
        providers: Sequence[str] = ("cpu",),
        options: Mapping[str, Mapping[str, str]] | None = None,
        threads: int | None = None,
        size_wh: tuple[int, int] | None = None,
    ) -> None:
        """Load a model.

        Args:
            model: the ONNX file.
            providers: keys of ``PROVIDERS``, in order of preference.
            options: of providers, as ``provider_options`` gives them; one that is missing has its defaults.
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
                " CUDA and TensorRT take a build with them (onnxruntime-gpu on x86-64; on a Jetson one for its JetPack)"
            )
        if not model.is_file():
            raise ModelError(f"{model}: no such model file")
        settings = ort.SessionOptions()
        settings.log_severity_level = 3  # errors only: the rest is about its own optimisations
        if threads is not None:
            settings.intra_op_num_threads = threads
        chosen = [(PROVIDERS[name], dict((options or {}).get(name, {}))) for name in providers]
        try:
            self._session = ort.InferenceSession(str(model), settings, providers=chosen)
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
        self._binding = self._session.io_binding()
        # The first run also tells the output shapes that shape inference could not.
        names = [argument.name for argument in self._session.get_outputs()]
        zeros = {spec.name: np.zeros(spec.shape, spec.dtype) for spec in self.inputs}
        first = self._translated(lambda: self._session.run(names, zeros))
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
        # An input is copied to a GPU when it is bound, not when the session runs (onnxruntime issue 5857), so a buffer
        # that is bound once would be read once. On the CPU binding copies nothing; the arrays live until the run ends.
        arrays = {spec.name: np.ascontiguousarray(checked(tensors, spec)) for spec in self.inputs}
        for name, array in arrays.items():
            self._binding.bind_cpu_input(name, array)
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


def provider_options(section: config.Engine, *, quantized: bool, cache: Path | None) -> dict[str, dict[str, str]]:
    """What the deployment means for CUDA and TensorRT, in onnxruntime's words, by key of ``PROVIDERS``.

    Names are those of the two providers' pages, https://onnxruntime.ai/docs/execution-providers/.

    Args:
        section: of the deployment.
        quantized: whether the model has Q/DQ. TensorRT needs its INT8 flag for those and takes the scales from them;
            the layers between run in FP16.
        cache: folder of this very model for the engines that TensorRT builds, which takes minutes; None: no cache.

    Raises:
        ConfigError: the DLA is asked for and the model has Q/DQ.
    """
    if section.dla is not None and quantized and "tensorrt" in section.providers:
        advice = "use engine.precision: fp16, or engine.backend: tensorrt"
        raise ConfigError([f"engine.dla: the DLA runs no model with Q/DQ in onnxruntime; {advice}"])
    half = quantized or section.precision == "fp16"
    tensorrt = {"trt_fp16_enable": str(half), "trt_int8_enable": str(quantized)}
    if section.workspace_mb is not None:
        tensorrt["trt_max_workspace_size"] = str(section.workspace_mb * 2**20)
    if section.optimization_level is not None:
        tensorrt["trt_builder_optimization_level"] = str(section.optimization_level)
    if section.dla is not None:
        tensorrt |= {"trt_dla_enable": "True", "trt_dla_core": str(section.dla.core)}
    if cache is not None:
        for kind in ("engine", "timing"):
            tensorrt |= {f"trt_{kind}_cache_enable": "True", f"trt_{kind}_cache_path": str(cache)}
    cuda = {
        # Jetsons share their memory between CPU and GPU: doubling the arena at each turn, the default, is a waste.
        "arena_extend_strategy": "kSameAsRequested",
        # The shapes are fixed, so that the search is done once, by the first run.
        "cudnn_conv_algo_search": "EXHAUSTIVE",
    }
    return {"cuda": cuda, "tensorrt": tensorrt}


def options_of(model: Path, section: config.Engine, cache_dir: Path | None) -> dict[str, dict[str, str]]:
    """``provider_options`` of a model file, with a folder for its engines below ``cache_dir``.

    onnxruntime knows an engine again by the model's file name and the names of its tensors, by neither weights nor
    scales (TRTGenerateId): after another calibration it would run the old engine. So each content has its own folder.
    Those of former ones can be deleted at any time.

    Raises:
        ConfigError: as ``provider_options``.
        OSError: the model cannot be read, or the folder cannot be made.
    """
    if "tensorrt" not in section.providers or not model.is_file() or not model.stat().st_size:
        return provider_options(section, quantized=False, cache=None)
    digest = hashlib.sha256(sha256_of(model).encode())
    with model.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        quantized = content.find(b"QuantizeLinear") >= 0
        # Weights may lie in files beside the model, which it names.
        for path in sorted(model.parent.iterdir()):
            if path != model and path.is_file() and content.find(path.name.encode()) >= 0:
                status = path.stat()
                digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}".encode())
    cache = None if cache_dir is None else cache_dir / "ort-tensorrt" / digest.hexdigest()[:16]
    found = provider_options(section, quantized=quantized, cache=cache)
    if cache is not None:
        cache.mkdir(parents=True, exist_ok=True)
    return found


def _import() -> Any:
    try:
        import onnxruntime
    except ImportError:
        raise DeviceError(
            "onnxruntime is not installed; pip install 'jetson-edge[cpu]', on a Jetson 'jetson-edge[build]': the former"
            " puts PyPI's OpenCV over JetPack's"
        ) from None
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

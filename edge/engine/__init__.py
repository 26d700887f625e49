"""The engine protocol: named input arrays in, named output arrays out. Engines know no labels, boxes or threads."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from edge import manifest
from edge.errors import DeviceError

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

    from edge import config
    from edge.manifest import Artifact, EngineManifest
    from edge.types import Tensors, TensorSpec

__all__ = ["PLAN_SUFFIXES", "Engine", "Pipelined", "artifact_of", "backend_of", "examine", "open_engine"]

PLAN_SUFFIXES = (".plan", ".engine", ".trt")


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


@runtime_checkable
class Pipelined(Engine, Protocol):
    """An engine that works on one frame while it is given the next."""

    @property
    def slots(self) -> int:
        """How many frames may be in flight."""

    @property
    def in_flight(self) -> int:
        """Frames that were submitted and not collected."""

    def submit(self, tensors: Tensors) -> None:
        """Hand over one frame and return without waiting for it.

        Args:
            tensors: as for ``infer``; they are copied, and may be written to again at once.

        Raises:
            ModelError: a name, shape or dtype differs from the specification.
            RuntimeError: as many frames are in flight as the engine has slots; collect one first.
        """

    def collect(self) -> Tensors:
        """Wait for the oldest frame in flight.

        Returns:
            Its outputs: views of the engine's buffers. With n slots they are valid until the n-th ``submit`` after the
            frame's own, so with two slots in steady use until the next one, and never longer than the engine is open.

        Raises:
            RuntimeError: no frame is in flight.
        """


def backend_of(section: config.Engine) -> Literal["onnxruntime", "tensorrt"]:
    """What runs a deployment's model: as it says, or TensorRT where it is installed."""
    if section.backend != "auto":
        return section.backend
    return "tensorrt" if importlib.util.find_spec("tensorrt") is not None else "onnxruntime"


def artifact_of(model: config.Model) -> Artifact:
    """The file that the deployment runs for a model, after checking that it is what the deployment means.

    Raises:
        DeviceError: it asks for what only TensorRT has, and that is not installed.
        ModelError: the file is missing, or something it was made from differs; the message names what.
    """
    section = model.engine
    if backend_of(section) == "tensorrt":
        return manifest.engine_to_run(model)
    if section.precision != "fp16":
        return manifest.artifact_to_run(model, section.precision)
    if section.providers[0] != "tensorrt":
        raise DeviceError(
            f"models.{model.name}.engine.precision is fp16, which is for TensorRT, and TensorRT is not installed;"
            " allowed without it: int8, fp32"
        )
    # onnxruntime's TensorRT provider makes the FP16 engine from the FP32 model.
    return replace(manifest.artifact_to_run(model, "fp32"), precision="fp16")


def examine(model: config.Model, artifact: Artifact) -> str | None:
    """What would run a plan here, such as ``TensorRT 10.3.0 (Orin)``, without loading it; None of an ONNX model.

    Raises:
        DeviceError: TensorRT, or the DLA core, is not there, or the plan was built for another device.
    """
    if artifact.path.suffix not in PLAN_SUFFIXES:
        return None
    from edge.engine.tensorrt import examine as examine_plan

    return examine_plan(artifact.path, artifact.engine, _dla_core(model.engine, artifact.engine))


def open_engine(
    model: Path,
    section: config.Engine,
    *,
    size_wh: tuple[int, int] | None = None,
    built: EngineManifest | None = None,
    cache_dir: Path | None = None,
) -> Engine:
    """Load a model file: a plan with TensorRT, everything else, ONNX, with onnxruntime.

    Args:
        model: the file to run; a plan's name ends in one of ``PLAN_SUFFIXES``.
        section: how to run it.
        size_wh: width and height of picture inputs, for ONNX models that leave them dynamic.
        built: what a plan was built for, where that is known.
        cache_dir: where onnxruntime's TensorRT provider may keep the engines that it builds; None: nowhere, so that it
            builds them each time.

    Raises:
        ConfigError: the DLA is asked for, which does not run the model in onnxruntime.
        DeviceError: the backend, or what it needs, is not installed; or a plan was built for another device.
        ModelError: the file is missing, cannot be loaded, or its shapes are not fixed.
    """
    if model.suffix in PLAN_SUFFIXES:
        from edge.engine.tensorrt import TensorRtEngine

        return TensorRtEngine(model, dla_core=_dla_core(section, built), built=built)
    from edge.engine.onnxruntime import OnnxRuntimeEngine, options_of

    return OnnxRuntimeEngine(
        model,
        providers=section.providers,
        options=options_of(model, section, cache_dir),
        threads=section.threads,
        size_wh=size_wh,
    )


def _dla_core(section: config.Engine, built: EngineManifest | None) -> int | None:
    """The core that a plan shall run on. One for the DLA runs on either: which one is the deployment's to say."""
    core = None if built is None else built.dla_core
    return section.dla.core if section.dla is not None and (built is None or core is not None) else core

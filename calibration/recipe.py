"""What a build will do, decided beforehand. Pure: deployment, device and model in, a recipe out, no TensorRT, no files.

A recipe is everything the builder's child process needs, as JSON; the same recipe is what ``--dry-run`` prints, and
what the equivalent ``trtexec`` command line is made from.

What exists in which version of TensorRT: the INT8 that comes from scales beside the network ("implicit") ends with
TensorRT 10, and so do the flags that let TensorRT choose a precision; from 11 on precision is what the tensors' types
say ("strongly typed"). The DLA runs implicit INT8 up to 10.7, is not there from 10.8 to 11.4.0, and comes back on AGX
Orin with 11.4.1, strongly typed (TensorRT 10.x to 11.x migration guide; "Working with DLA", 11.4.1).
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from msgspec import Struct

from edge.errors import ConfigError, DeviceError
from edge.manifest import version

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge import config, manifest

__all__ = ["Decision", "Fallback", "Pools", "Precision", "Quantization", "Recipe", "Step", "TensorIo", "decide"]
__all__ += ["REVISION", "has_dla", "pools", "trtexec", "why_no_dla"]

Precision: TypeAlias = Literal["int8", "fp16", "fp32"]
Quantization: TypeAlias = Literal["none", "cache", "ranges", "calibrator", "qdq"]
Fallback: TypeAlias = Literal["norm-fp32", "fp16", "fp32"]

REVISION = 1
"""Of what a build does with the same settings: engines of another one are built again."""

STRONGLY_TYPED_ONLY = (11, 0, 0)
_UNSAYABLE = {",", ":"}
"""What separates names in trtexec's lists, and so cannot stand in one."""
DLA_ENDS, DLA_RETURNS = (10, 8, 0), (11, 4, 1)
"""No DLA from the first up to the second."""


class Pools(Struct, frozen=True, kw_only=True):
    """Memory that a build may take, in bytes."""

    workspace: int | None
    """Scratch memory of GPU tactics, during the build and in the engine; None: TensorRT's default, all of the GPU's."""
    tactic_dram: int | None = None
    """All that tactics may take while they are timed; None: TensorRT's default, 75 % of all there is."""
    dla_managed_sram: int | None = None
    dla_local_dram: int | None = None
    dla_global_dram: int | None = None


class TensorIo(Struct, frozen=True, kw_only=True):
    """One input or output of the network."""

    name: str
    shape: tuple[int, ...]
    dtype: Literal["fp32", "fp16", "int8"]
    layout: str
    """As trtexec calls it: chw, chw16, chw32, dla_linear, dla_hwc4, ..."""
    scale: float | None = None
    """amax / 127, of an INT8 one."""


class Recipe(Struct, frozen=True, kw_only=True):
    """One build."""

    model: str
    """ONNX file that TensorRT parses."""
    name: str
    """Of the model in the deployment, for messages."""
    tensorrt: str
    """Version that the decisions are for; the child refuses another."""
    precision: Precision
    quantization: Quantization
    strongly_typed: bool
    """Precision comes from the tensors' types in the ONNX file."""
    cache: str | None = None
    """Calibration cache to serve (cache), or to read and write (calibrator)."""
    ranges: dict[str, float] = {}
    """amax by ONNX tensor name, to be set tensor by tensor (ranges)."""
    float_layers: dict[str, Literal["fp16", "fp32"]] = {}
    """Precision of single layers, by the name of the layer's first output: node names may be empty or repeated."""
    inputs: tuple[TensorIo, ...]
    outputs: tuple[TensorIo, ...]
    dla_core: int | None = None
    gpu_fallback: bool = True
    pools: Pools
    optimization_level: int | None = None
    timing_cache: str
    """File to read, if it is there, and to write to the scratch folder after a build that succeeds."""
    deployment: str | None = None
    """The deployment file, from which the child takes pictures and pre-processing where TensorRT calibrates itself."""
    out: str
    """Scratch folder for ``engine.plan``, ``engine.layers.json``, ``timing.cache``, ``builder.log``."""


@dataclass(frozen=True, slots=True)
class Step:
    """What the deployment asks for, or one of its fallbacks."""

    precision: Precision
    norm_fp32: bool = False
    """Softmax and normalisations stay in FP32."""
    fallback: Fallback | None = None
    """What made it another than the deployment asks for."""

    def __str__(self) -> str:
        return f"{self.precision}{', normalisations in fp32' if self.norm_fp32 else ''}"


@dataclass(frozen=True, slots=True)
class Decision:
    """How an engine is built on a device."""

    step: Step
    quantization: Quantization
    strongly_typed: bool
    dla_core: int | None
    reasons: tuple[str, ...]
    """Why, one sentence each."""
    warnings: tuple[str, ...] = ()

    @property
    def precision(self) -> Precision:
        """Of the engine as a whole."""
        return self.step.precision


def decide(section: config.Engine, device: manifest.Device, step: Step | None = None, *, key: str) -> Decision:
    """Decide how to build for a device.

    Args:
        section: of the deployment.
        device: that builds and runs it.
        step: what is tried of it; None: what it asks for.
        key: of the section in the deployment, for messages.

    Raises:
        ConfigError: the section asks for what this TensorRT does not have.
        DeviceError: it asks for a DLA that is not there.
    """
    typed = version(device.tensorrt) >= STRONGLY_TYPED_ONLY
    core, why, warnings = _dla(section, device, key)
    if section.backend == "onnxruntime":
        raise ConfigError([f"{key}.backend is onnxruntime, which runs the ONNX model itself (engines: auto, tensorrt)"])
    step = step or Step(section.precision)
    precision = step.precision
    reasons = [why, f"{precision}: {'fallback' if precision != section.precision else f'{key}.precision'}"]
    quantization, how = _quantization(section, device, precision, on_dla=core is not None, key=key)
    reasons.append(how)
    if typed:
        reasons.append(f"TensorRT {device.tensorrt} takes precision from the tensors' types, so the model is typed")
    if step.norm_fp32:
        reasons.append("Softmax and normalisations stay in FP32")
    if step.fallback is None:
        _check_io(section, typed=typed, quantization=quantization, on_dla=core is not None, key=key)
    if section.optimization_level is not None and version(device.tensorrt) < (8, 6, 0):
        text = f"{key}.optimization_level: TensorRT {device.tensorrt} has none (8.6 and later); ignored"
        warnings = (*warnings, text)
    return Decision(
        step=step,
        quantization=quantization,
        strongly_typed=typed,
        dla_core=core,
        reasons=tuple(reasons),
        warnings=warnings,
    )


def has_dla(device: manifest.Device) -> bool:
    """Whether the device has a DLA that its TensorRT can use."""
    return why_no_dla(device) is None


def why_no_dla(device: manifest.Device) -> str | None:
    """What a device lacks for ``has_dla``; None where it lacks nothing."""
    if DLA_ENDS <= version(device.tensorrt) < DLA_RETURNS:
        return f"TensorRT {device.tensorrt} has none (10.7 was the last, 11.4.1 brings it back)"
    return None if device.dla_cores else f"{device.name} has none (AGX Orin and Orin NX have; Orin Nano has not)"


def pools(section: config.Engine, device: manifest.Device, *, on_dla: bool, free_bytes: int | None) -> Pools:
    """Memory limits of a build.

    Where GPU and CPU share their memory, TensorRT's defaults (all of it, 75 % of it) are more than is free beside a
    daemon. Of what is free, tactics may take three quarters, half of it as workspace; the rest is the parser's, and
    everybody else's.

    Args:
        section: of the deployment.
        device: that builds.
        on_dla: whether the engine uses the DLA.
        free_bytes: of the memory that GPU and CPU share; None: not known.
    """
    workspace = None if section.workspace_mb is None else section.workspace_mb * 2**20
    tactics = None
    if device.integrated and free_bytes is not None:
        workspace = free_bytes // 2 if workspace is None else workspace
        tactics = max(free_bytes * 3 // 4, workspace)
    if not on_dla or section.dla is None:
        return Pools(workspace=workspace, tactic_dram=tactics)
    return Pools(
        workspace=workspace,
        tactic_dram=tactics,
        dla_managed_sram=section.dla.sram_kb * 2**10,
        dla_local_dram=section.dla.local_dram_mb * 2**20,
        dla_global_dram=section.dla.global_dram_mb * 2**20,
    )


def trtexec(recipe: Recipe, *, plan: str, layer_names: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """The ``trtexec`` command line that builds the same engine, for a shell, and what it cannot say.

    Args:
        recipe: of the build.
        plan: file to write.
        layer_names: name of the node by name of its first output, for ``--layerPrecisions``.
    """
    unsaid: list[str] = []
    options = [f"--onnx={recipe.model}", f"--saveEngine={plan}"]
    if not recipe.strongly_typed:
        options += {"int8": ["--int8", "--fp16"], "fp16": ["--fp16"], "fp32": ["--noTF32"]}[recipe.precision]
    if recipe.cache is not None:
        options.append(f"--calib={recipe.cache}")
    if recipe.quantization in ("ranges", "calibrator"):
        unsaid.append(f"{recipe.quantization}: it takes the same from a calibration cache")
    if recipe.dla_core is not None:
        options.append(f"--useDLACore={recipe.dla_core}")
        if recipe.gpu_fallback:
            options.append("--allowGPUFallback")
    sizes = _pool_sizes(recipe.pools)
    if sizes:
        options.append(f"--memPoolSize={sizes}")
    options += _io_options(recipe)
    if recipe.float_layers and not recipe.strongly_typed:
        named = {layer_names[output]: precision for output, precision in recipe.float_layers.items()}
        options += _layer_options({name: named[name] for name in named if not _UNSAYABLE & set(name)})
        unsaid += [f"the precision of {name}" for name in named if _UNSAYABLE & set(name)]
    if recipe.optimization_level is not None and version(recipe.tensorrt) >= (8, 6, 0):
        options.append(f"--builderOptimizationLevel={recipe.optimization_level}")
    options += [f"--timingCacheFile={recipe.timing_cache}", "--profilingVerbosity=detailed"]
    options.append("--skipInference" if version(recipe.tensorrt) >= (8, 6, 0) else "--buildOnly")
    return shlex.join(["trtexec", *options]), tuple(sorted(unsaid))


def _dla(section: config.Engine, device: manifest.Device, key: str) -> tuple[int | None, str, tuple[str, ...]]:
    """The core to build for, why, and warnings."""
    dla = section.dla
    if dla is None:
        return None, f"GPU: {key}.dla is not set", ()
    why = why_no_dla(device)
    if why is None:
        if dla.core >= device.dla_cores:
            allowed = ", ".join(map(str, range(device.dla_cores)))
            raise DeviceError(
                f"{key}.dla.core is {dla.core}, but {device.name} has {device.dla_cores} DLA core"
                f"{'s' if device.dla_cores > 1 else ''} (allowed: {allowed})"
            )
        beside = (
            "layers that it cannot run on the GPU" if dla.gpu_fallback else "a layer that it cannot run is an error"
        )
        return dla.core, f"DLA core {dla.core}, {beside}: {key}.dla", ()
    if dla.if_missing == "error":
        raise DeviceError(f"{key}.dla is set, but {why}; leave it out, or set {key}.dla.if_missing to gpu")
    return None, f"GPU: {key}.dla.if_missing", (f"{key}.dla is set, but {why}: building for the GPU",)


def _quantization(
    section: config.Engine, device: manifest.Device, precision: Precision, *, on_dla: bool, key: str
) -> tuple[Quantization, str]:
    if precision != "int8":
        return "none", f"no quantization: {precision}"
    explicit_only = version(device.tensorrt) >= STRONGLY_TYPED_ONLY
    asked = section.quantization
    if asked == "auto":
        if on_dla and not explicit_only:
            return "cache", "scales from the calibration cache: before TensorRT 11 the DLA takes no Q/DQ"
        return "qdq", "the model with Q/DQ: it is what evaluate has measured"
    problem = None
    if explicit_only and asked != "qdq":
        problem = f"ended with TensorRT 10, and this is {device.tensorrt} (allowed: auto, qdq)"
    elif on_dla and not explicit_only and asked == "qdq":
        problem = "no DLA takes before TensorRT 11 (allowed: auto, cache, ranges, calibrator)"
    if problem is not None:
        raise ConfigError([f"{key}.quantization is {asked}, which {problem}"])
    return asked, f"{asked}: {key}.quantization"


def _check_io(section: config.Engine, *, typed: bool, quantization: Quantization, on_dla: bool, key: str) -> None:
    problems: list[str] = []
    for name in ("input_format", "output_format"):
        dtype, layout = getattr(section, name).split(":")
        text = f"{key}.{name} is {dtype}:{layout}"
        if typed and dtype != "fp32":
            problems.append(f"{text}; a strongly typed engine keeps the model's types (allowed: fp32)")
        if dtype == "int8" and quantization not in ("cache", "ranges"):
            problems.append(f"{text}, which needs scales beside the network (quantization: cache, ranges)")
        if layout.startswith("dla_") and not on_dla:
            problems.append(f"{text}, a layout of the DLA, and the engine is for the GPU")
    if problems:
        raise ConfigError(problems)


def _io_options(recipe: Recipe) -> list[str]:
    found = []
    for option, tensors in (("inputIOFormats", recipe.inputs), ("outputIOFormats", recipe.outputs)):
        formats = [f"{tensor.dtype}:{tensor.layout}" for tensor in tensors]
        if any(text != "fp32:chw" for text in formats):
            found.append(f"--{option}={','.join(formats)}")
    return found


def _layer_options(precisions: Mapping[str, str]) -> list[str]:
    given = ",".join(f"{name}:{precision}" for name, precision in precisions.items())
    return ["--precisionConstraints=obey", f"--layerPrecisions={given}", f"--layerOutputTypes={given}"]


def _pool_sizes(limits: Pools) -> str:
    """In MiB, which every trtexec takes without a suffix."""
    named = {
        "workspace": limits.workspace,
        "dlaSRAM": limits.dla_managed_sram,
        "dlaLocalDRAM": limits.dla_local_dram,
        "dlaGlobalDRAM": limits.dla_global_dram,
    }
    return ",".join(f"{name}:{size / 2**20:g}" for name, size in named.items() if size is not None)

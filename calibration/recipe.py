"""What a build will do, decided beforehand. Pure: deployment, device and model in, a recipe out, no TensorRT.

A recipe is everything the builder's child process needs, as JSON; the same recipe is what ``--dry-run`` prints, and
what the equivalent ``trtexec`` command line is made from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from msgspec import Struct

if TYPE_CHECKING:
    pass

__all__ = ["Pools", "Recipe", "TensorIo"]


class Pools(Struct, frozen=True, kw_only=True):
    """Memory that a build may take, in bytes."""

    workspace: int
    """Scratch memory of GPU tactics, during the build and in the engine."""
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
    precision: Literal["int8", "fp16", "fp32"]
    quantization: Literal["none", "cache", "ranges", "calibrator", "qdq"]
    strongly_typed: bool
    """Precision comes from the tensors' types in the ONNX file: TensorRT 11, and 10 where asked for."""
    cache: str | None = None
    """Calibration cache to serve (cache), or to read and write (calibrator)."""
    ranges: dict[str, float] = {}
    """amax by ONNX tensor name, to be set tensor by tensor (ranges)."""
    float_layers: dict[str, Literal["fp16", "fp32"]] = {}
    """Precision of single layers, by the name of the layer's first output tensor: node names may be empty or repeated."""
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

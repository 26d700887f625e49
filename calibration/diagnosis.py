"""Why TensorRT gave no plan, from what it logged. Pure: texts in, a verdict out."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from calibration.events import Failed

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["diagnose", "nodes_of"]

_MEMORY = re.compile(
    r"OutOfMemory|out of memory|Requested size was|insuff?icient (memory|workspace)|memory is insufficient|bad_alloc"
    r"|cudaErrorMemoryAllocation|Cannot allocate memory|NvMapMemAlloc",
    re.IGNORECASE,
)
# "Default DLA is enabled but layer X is not supported on DLA and falling back to GPU is not enabled."; of standalone
# builds "DLA Standalone is enabled but layer: 'X' is not supported on DLA."
_NOT_ON_DLA = re.compile(r"layer:? (.+?) is not supported on DLA")
_NO_IMPLEMENTATION = re.compile(r"could not find any implementation for node (.+)", re.IGNORECASE)
_LAST = 3
"""Errors that count as the cause: to run out of memory while tactics are timed is routine, and TensorRT skips those
tactics and goes on (NVIDIA/TensorRT issue 2643)."""
_FOREIGN = re.compile(r"\{ForeignNode\[(.+)\]\}")


def diagnose(errors: Sequence[str], warnings: Sequence[str]) -> Failed:
    """Say why a build failed.

    Args:
        errors: that TensorRT logged, in their order.
        warnings: likewise.
    """
    if not errors:
        return Failed("build", "TensorRT gave no reason")
    refused = [match[1].strip("'") for match in map(_NOT_ON_DLA.search, errors) if match is not None]
    if refused:
        return Failed("unsupported", "the DLA cannot run them, and falling back to the GPU is off", _unique(refused))
    out_of_memory = next(filter(_MEMORY.search, _last(errors)), None)
    if out_of_memory is not None:
        return Failed("memory", _cut(out_of_memory))
    homeless = [match[1] for match in map(_NO_IMPLEMENTATION.search, errors) if match is not None]
    if homeless:
        nodes = _unique([node for text in homeless for node in nodes_of(text)])
        # Every implementation was tried and skipped: on a Jetson mostly for want of memory (mmdeploy issue 1059).
        if any(map(_MEMORY.search, _last(warnings))):
            return Failed("memory", "there was too little memory for every implementation", nodes)
        return Failed("unsupported", "TensorRT has no implementation for them in the precision asked for", nodes)
    return Failed("build", _cut(errors[-1]))


def nodes_of(name: str) -> list[str]:
    """The layers that an engine layer's name holds: of ``{ForeignNode[a...b]}`` the first and the last.

    Args:
        name: as it ends TensorRT's message, its bracket and full stop perhaps included.
    """
    if name.count(")") > name.count("("):
        name = name.rstrip().removesuffix(")")
    name = name.split(" due to insufficient workspace")[0].rstrip(" .")
    foreign = _FOREIGN.search(name)
    return foreign[1].split("...") if foreign is not None else name.split(" + ")


def _last(texts: Sequence[str]) -> list[str]:
    return list(texts)[-_LAST:]  # a deque has no slices


def _unique(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def _cut(text: str) -> str:
    """One line of reasonable length."""
    line = " ".join(text.split())
    return line if len(line) <= 500 else f"{line[:500]}..."

"""Runs a plan in a process of its own: its outputs, and what each inference takes.

A fault of a driver's ends that process, or leaves the CUDA context of that process unusable, and not the caller's.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec import Struct

from edge.engine.tensorrt import TensorRtEngine
from edge.errors import DeviceError, EdgeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from edge.types import Tensors

__all__ = ["Measured", "run"]

WARM_UP = 10
TIMEOUT_S = 300.0
"""A hundred inferences of a small network take some tens of milliseconds; a DLA that hangs never ends them."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a plan does."""

    outputs: Tensors
    """Of each input, stacked: (N, ...)."""
    milliseconds: NDArray[np.float64]
    """Of each timed inference, the copies of inputs and outputs included."""


class _Job(Struct, frozen=True, kw_only=True):
    """What the process is told; ``inputs.npz`` is beside."""

    plan: str
    dla_core: int | None
    iterations: int
    inputs: list[str]
    """Names of the arrays."""


class _Done(Struct, frozen=True, kw_only=True):
    """What it answers; ``outputs.npz`` is beside."""

    outputs: list[str]
    """Names of the arrays."""
    milliseconds: list[float]


def run(plan: Path, inputs: Tensors, work: Path, *, dla_core: int | None, iterations: int) -> Measured:
    """Run a plan on some inputs once each, and then several times for the clock.

    Args:
        plan: the file.
        inputs: stacked: (N, ...) for an engine's input of shape (...).
        work: scratch folder.
        dla_core: that it was built for; None for the GPU.
        iterations: that are timed, at least 1, after ``WARM_UP`` to warm up.

    Raises:
        DeviceError: it failed, crashed or hangs.
    """
    job = _Job(plan=str(plan), dla_core=dla_core, iterations=iterations, inputs=list(inputs))
    (work / "job.json").write_bytes(msgspec.json.encode(job))
    np.savez(work / "inputs.npz", *inputs.values())
    try:
        process = subprocess.run(  # noqa: S603 - ourselves
            [sys.executable, "-m", "calibration.measure", str(work)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="backslashreplace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DeviceError(f"running the plan did not end within {TIMEOUT_S:g} s: the device hangs") from None
    if process.returncode:
        code = process.returncode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
        said = process.stderr.strip().splitlines() or ["it said nothing"]
        raise DeviceError(f"running the plan {how}: {said[-1]}")
    done = msgspec.json.decode((work / "done.json").read_bytes(), type=_Done)
    return Measured(_load(work / "outputs.npz", done.outputs), np.array(done.milliseconds))


def _load(path: Path, names: Sequence[str]) -> Tensors:
    """Arrays that were saved in this order: as keys, names would be those of files in an archive."""
    with np.load(path) as arrays:
        return {name: arrays[f"arr_{index}"] for index, name in enumerate(names)}


def _run(work: Path) -> None:
    """What the process does."""
    job = msgspec.json.decode((work / "job.json").read_bytes(), type=_Job)
    stacked = _load(work / "inputs.npz", job.inputs)
    count = len(next(iter(stacked.values())))
    inputs = [{name: array[index] for name, array in stacked.items()} for index in range(count)]
    milliseconds: list[float] = []
    with TensorRtEngine(Path(job.plan), dla_core=job.dla_core) as engine:
        found = [{name: array.copy() for name, array in engine.infer(tensors).items()} for tensors in inputs]
        for _ in range(WARM_UP):
            engine.infer(inputs[0])
        for index in range(job.iterations):
            begin = time.perf_counter()
            engine.infer(inputs[index % count])
            milliseconds.append((time.perf_counter() - begin) * 1e3)
    np.savez(work / "outputs.npz", *(np.stack([tensors[name] for tensors in found]) for name in found[0]))
    (work / "done.json").write_bytes(msgspec.json.encode(_Done(outputs=list(found[0]), milliseconds=milliseconds)))


if __name__ == "__main__":
    try:
        _run(Path(sys.argv[1]))
    except EdgeError as failure:
        sys.exit(str(failure))

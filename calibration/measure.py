"""Runs a plan in a process of its own: its outputs, and what each inference takes.

A fault of the plan's or the driver's ends that process, or loses its CUDA context: the caller goes on.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec
import numpy as np
from msgspec import Struct

from calibration import child, subordinate
from edge import files, manifest
from edge.engine.tensorrt import TensorRtEngine
from edge.errors import DeviceError, EdgeError, ModelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from edge.types import Tensors

__all__ = ["Measured", "run"]

WARM_UP = 10
TIMEOUT_S, EACH_S = 300.0, 1.0
"""To load the plan and time it, and for each input on top. A DLA that hangs never ends an inference."""

_JOB, _ANSWER, _INPUTS, _OUTPUTS = "job.json", "answer.json", "inputs.npy", "outputs.npy"
"""The last two hold one array after the other, as ``np.save`` writes each: the process keeps one input at a time."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a plan does."""

    outputs: list[Tensors]
    """Of each input, by name."""
    milliseconds: NDArray[np.float64]
    """Of each timed inference, the copies of inputs and outputs included."""


class _Job(Struct, frozen=True, kw_only=True):
    """What the process is told."""

    plan: str
    dla_core: int | None
    built: manifest.EngineManifest | None
    mapped: bool | None
    iterations: int
    count: int
    names: list[str]
    """Of the arrays of each input."""


class _Done(Struct, frozen=True, kw_only=True, tag=True):
    """What it answers."""

    names: list[str]
    """Of the arrays of each output."""
    milliseconds: list[float]


class _Failed(Struct, frozen=True, kw_only=True, tag=True):
    """Why there are no outputs."""

    device: bool
    """The device is to blame, not the plan."""
    reason: str


def run(
    plan: Path,
    inputs: Sequence[Tensors],
    work: Path,
    *,
    dla_core: int | None,
    built: manifest.EngineManifest | None = None,
    mapped: bool | None = None,
    iterations: int,
) -> Measured:
    """Run a plan on some inputs once each, and then several times for the clock.

    Args:
        plan: the file.
        inputs: at least one.
        work: folder for scratch.
        dla_core: that a plan for the DLA shall run on.
        built: what the plan was built for, where that is known.
        mapped: as for ``TensorRtEngine``.
        iterations: that are timed, on the last input, after ``WARM_UP`` to warm up; 0: none.

    Raises:
        DeviceError: the device failed or hangs, or memory ran out.
        ModelError: the plan cannot be loaded, or crashes the process.
        RuntimeError: the process has a fault of its own; the text ends with its traceback.
    """
    names = list(inputs[0])
    job = _Job(
        plan=str(plan),
        dla_core=dla_core,
        built=built,
        mapped=mapped,
        iterations=iterations,
        count=len(inputs),
        names=names,
    )
    with tempfile.TemporaryDirectory(prefix="measure-", dir=work) as scratch:
        folder = Path(scratch)
        (folder / _JOB).write_bytes(msgspec.json.encode(job))
        with (folder / _INPUTS).open("wb") as file:
            for tensors in inputs:
                _write(file, tensors, names)
        answer = _answer(folder, TIMEOUT_S + EACH_S * len(inputs))
        with (folder / _OUTPUTS).open("rb") as file:
            return Measured([_read(file, answer.names) for _ in inputs], np.array(answer.milliseconds))


def _answer(folder: Path, timeout_s: float) -> _Done:
    """Start the process, and wait for it to end."""
    try:
        process = subprocess.run(  # noqa: S603 - ourselves
            child.command("calibration.measure", str(folder)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="backslashreplace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DeviceError(f"running the plan did not end within {timeout_s:g} s: the device hangs") from None
    if not (folder / _ANSWER).is_file():
        raise _died(process.returncode, process.stderr.strip())
    # However it ended then: libraries that fail while they unload have done their work.
    answer = msgspec.json.decode((folder / _ANSWER).read_bytes(), type=_Done | _Failed)
    if isinstance(answer, _Failed):
        raise (DeviceError if answer.device else ModelError)(f"running the plan failed: {answer.reason}")
    return answer


def _died(code: int, said: str) -> Exception:
    """Why a process is gone that gave no answer."""
    if code >= 0:
        return RuntimeError(f"running the plan ended with {code}, and gave no reason; its last words:\n{said}")
    if -code == signal.SIGKILL:
        return DeviceError("running the plan was killed (signal 9), most likely because memory ran out")
    last = f"; the last it said: {said.splitlines()[-1]}" if said else ""
    return ModelError(f"running the plan crashed (signal {-code}, {signal.Signals(-code).name}){last}")


def _write(file: BinaryIO, tensors: Tensors, names: Iterable[str]) -> None:
    for name in names:
        np.save(file, tensors[name])


def _read(file: BinaryIO, names: Iterable[str]) -> Tensors:
    return {name: np.load(file) for name in names}


def _measure(folder: Path) -> _Done:
    """What the process does."""
    job = msgspec.json.decode((folder / _JOB).read_bytes(), type=_Job)
    times: list[float] = []
    with (
        TensorRtEngine(Path(job.plan), dla_core=job.dla_core, built=job.built, mapped=job.mapped) as engine,
        (folder / _INPUTS).open("rb") as given,
        (folder / _OUTPUTS).open("wb") as found,
    ):
        names = [spec.name for spec in engine.outputs]
        for _ in range(job.count):
            tensors = _read(given, job.names)
            _write(found, engine.infer(tensors), names)
        for _ in range(WARM_UP + job.iterations if job.iterations else 0):
            begin = time.perf_counter()
            engine.infer(tensors)
            times.append((time.perf_counter() - begin) * 1e3)
    return _Done(names=names, milliseconds=times[WARM_UP:])


def _main(folder: Path) -> None:
    try:
        answer: _Done | _Failed = _measure(folder)
    except EdgeError as error:
        answer = _Failed(device=isinstance(error, DeviceError), reason=str(error))
    files.write(folder / _ANSWER, msgspec.json.encode(answer))


if __name__ == "__main__":
    subordinate.become()
    _main(Path(sys.argv[1]))

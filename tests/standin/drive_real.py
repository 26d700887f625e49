"""Lets C++ call the product's callback classes through the real bindings of TensorRT; prints what came of it as JSON.

    python tests/standin/drive_real.py FOLDER

FOLDER is where ``dump_api.install`` has put the bindings, with ``libdrive.so`` made of ``drive_callbacks.cpp``. It is a
process of its own: bindings on stub libraries are nothing for one that goes on with other things.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import dump_api
import numpy as np

from calibration import calibrator, reporting
from edge.engine import tensorrt as engine

CACHE = b"TRT-100300-EntropyCalibration2\nx: 3c010a14\n"


class Calls:
    """The functions of drive_callbacks.cpp, on one Python object."""

    def __init__(self, folder: Path, instance: Any) -> None:
        self._library = ctypes.CDLL(str(folder / "libdrive.so"))
        self._library.read_cache.restype = ctypes.c_void_p
        self._instance = instance  # must live as long as C++ has its pointer
        # pybind11 keeps the pointer to the C++ object right behind Python's object header, which has two words.
        self._pointer = ctypes.c_void_p.from_address(id(instance) + 2 * ctypes.sizeof(ctypes.c_void_p))

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)
        return lambda *args: function(self._pointer, *args)

    def batch(self, names: list[str]) -> list[int] | None:
        bindings = (ctypes.c_void_p * len(names))()
        texts = (ctypes.c_char_p * len(names))(*(name.encode() for name in names))
        return list(bindings) if self.get_batch(bindings, texts, len(names)) else None

    def cache(self) -> str | None:
        length = ctypes.c_size_t(0)
        start = self.read_cache(ctypes.byref(length))
        return None if start is None else ctypes.string_at(start, length.value).decode()


def pictures(count: int) -> list[dict[str, Any]]:
    return [{"a": np.full((1, 2), number, np.float32), "b": np.zeros(3, np.float32)} for number in range(count)]


def drive_calibrator(trt: Any, folder: Path) -> dict[str, Any]:
    """Two pictures of two inputs, asked for in the other order; then the cache that TensorRT has found."""
    seen: list[tuple[str, float]] = []

    def upload(name: str, array: Any) -> int:
        seen.append((name, float(array.flat[0])))
        return 0x7000_0000_0000 + 0x100 * len(seen)

    made = calibrator.make(trt, iter(pictures(2)), cache=None, upload=upload)
    calls = Calls(folder, made)
    found: dict[str, Any] = {"algorithm": made.get_algorithm().name, "batch_size": calls.batch_size()}
    found["cache"] = calls.cache()
    found["batches"] = [calls.batch(["b", "a"]) for _ in range(3)]
    calls.write_cache(CACHE, ctypes.c_size_t(len(CACHE)))
    return found | {"seen": seen, "count": made.batches, "error": made.error, "written": made.written.decode()}


def drive_failing_calibrator(trt: Any, folder: Path) -> dict[str, Any]:
    def upload(name: str, _array: Any) -> int:
        raise OSError(f"no room for {name}")

    made = calibrator.make(trt, iter(pictures(2)), cache=None, upload=upload)
    calls = Calls(folder, made)
    return {"batches": [calls.batch(["a"]) for _ in range(2)], "count": made.batches, "error": repr(made.error)}


def drive_cache(trt: Any, folder: Path) -> dict[str, Any]:
    version = trt.__version__ = "10.3.0"  # which the package around the bindings has, not they
    path = folder / f"{version}.cache"
    path.write_bytes(CACHE)
    made = calibrator.make(trt, None, cache=path, upload=lambda _name, _array: 1)
    return {"cache": Calls(folder, made).cache(), "read": made.cache_read, "error": made.error}


def drive_raising_calibrator(trt: Any, folder: Path) -> dict[str, Any]:
    """What the bindings do with an exception, and with something that is no list of numbers."""

    class Raising(trt.IInt8EntropyCalibrator2):
        def __init__(self, result: Any) -> None:
            trt.IInt8EntropyCalibrator2.__init__(self)
            self.result = result

        def get_batch(self, names: list[str]) -> Any:  # noqa: ARG002 - given by name
            if self.result is None:
                raise OSError("the disk has gone")
            return self.result

    results = {"raises": None, "arrays": [np.zeros(3)], "empty": []}
    return {name: Calls(folder, Raising(result)).batch(["a"]) for name, result in results.items()}


def drive_monitor(trt: Any, folder: Path) -> dict[str, Any]:
    came: list[int] = []
    told: list[Any] = []
    calls = Calls(folder, reporting.make_monitor(trt, told.append, stopped=lambda: bool(came)))
    calls.phase_start(b"Building Engine", None, 3)
    calls.phase_start(b"Timing", b"Building Engine", 7)
    steps = [bool(calls.step_complete(b"Timing", 0))]
    came.append(15)
    steps.append(bool(calls.step_complete(b"Timing", 1)))
    calls.phase_finish(b"Timing")
    return {"steps": steps, "told": [repr(event) for event in told]}


def drive_raising_monitor(trt: Any, folder: Path) -> dict[str, Any]:
    class Raising(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            raise OSError(f"{phase_name}, {parent_phase}, {num_steps}")

        def step_complete(self, phase_name: str, step: int) -> bool:
            raise OSError(f"{phase_name}, {step}")

        def phase_finish(self, phase_name: str) -> None:
            raise OSError(phase_name)

    calls = Calls(folder, Raising())
    calls.phase_start(b"Building Engine", None, 3)
    calls.phase_finish(b"Building Engine")
    return {"step": bool(calls.step_complete(b"Building Engine", 0))}


def drive_raising_logger(trt: Any, folder: Path) -> None:
    class Raising(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, msg: str) -> None:  # noqa: ARG002 - given by position
            raise OSError(msg)

    Calls(folder, Raising()).logger_log(1, b"text")


def drive_loggers(trt: Any, folder: Path) -> dict[str, Any]:
    told: list[Any] = []
    building, running = reporting.make_logger(trt, told.append), engine.shared_logger(trt)
    for logger in (building, running):
        for severity in range(5):
            Calls(folder, logger).logger_log(severity, f"severity {severity}".encode())
    return {"building": list(building.errors), "warnings": list(building.warnings), "running": list(running.errors)}


if __name__ == "__main__":
    where = Path(sys.argv[1])
    module = dump_api.load(where)
    module.__version__ = "10.3.0"
    drives = [drive_calibrator, drive_failing_calibrator, drive_cache, drive_raising_calibrator, drive_monitor]
    drives += [drive_raising_monitor, drive_raising_logger, drive_loggers]
    results = {drive.__name__.removeprefix("drive_"): drive(module, where) for drive in drives}
    sys.stdout.write(json.dumps(results | {"api": dump_api.describe(module)}))

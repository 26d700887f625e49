"""Lists the public API of the real TensorRT Python bindings, on a machine without TensorRT's libraries or a GPU.

The bindings are on PyPI (``tensorrt-cu12-bindings``); the libraries that they load are not. Nine C entry points are all
that they import, so three small stub libraries let the real pybind11 module load. Its classes, enumerations, signatures
and Python trampolines are then the real ones; nothing can be built or run with it.

    python tests/standin/dump_api.py 10.3.0 tests/data/tensorrt-api/tensorrt-10.3.0.json

Needs gcc, and a wheel on PyPI for the running Python.
"""

from __future__ import annotations

import ctypes
import importlib.util
import inspect
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

STUB = """
void* createInferBuilder_INTERNAL(void* logger, int version) { return 0; }
void* createInferRefitter_INTERNAL(void* engine, void* logger, int version) { return 0; }
void* createInferRuntime_INTERNAL(void* logger, int version) { return 0; }
void* createNvOnnxParserRefitter_INTERNAL(void* refitter, void* logger, int version) { return 0; }
void* createNvOnnxParser_INTERNAL(void* network, void* logger, int version) { return 0; }
void* getBuilderPluginRegistry(int capability) { return 0; }
int getNvOnnxParserVersion(void) { return 0; }
void* getPluginRegistry(void) { return 0; }
int initLibNvInferPlugins(void* logger, const char* space) { return 1; }
"""


def install(version: str, folder: Path) -> None:
    """Put the bindings of that version under a folder, with the stub libraries beside them."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
    wanted = ["--only-binary=:all:", "--target", str(folder), f"tensorrt-cu12-bindings=={version}"]
    subprocess.run([*pip, *wanted], check=True)
    source = folder / "stub.c"
    source.write_text(STUB)
    for name in ("nvinfer", "nvinfer_plugin", "nvonnxparser"):
        library = folder / f"lib{name}.so.{version.split('.', 1)[0]}"
        subprocess.run(
            ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", str(library), str(source)], check=True
        )


def load(folder: Path):
    """The module of the bindings that ``install`` put there. At most one version in a process."""
    for library in sorted(folder.glob("lib*.so.*")):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    spec = importlib.util.spec_from_file_location("tensorrt", folder / "tensorrt_bindings" / "tensorrt.so")
    module = importlib.util.module_from_spec(spec)
    sys.modules["tensorrt"] = module
    spec.loader.exec_module(module)
    return module


def describe(module) -> dict[str, dict]:
    """Every public name: its kind and what it holds."""
    return {name: _described(getattr(module, name)) for name in dir(module) if not name.startswith("_")}


def _described(thing) -> dict:
    if hasattr(thing, "__members__") and inspect.isclass(thing):
        return {"kind": "enum", "members": {name: int(value) for name, value in thing.__members__.items()}}
    if not inspect.isclass(thing):
        if callable(thing):
            return {"kind": "function", "signature": _signature(thing)}
        return {"kind": type(thing).__name__, "value": str(thing)}
    members = {}
    for name in dir(thing):
        if name.startswith("_") and name != "__init__":
            continue
        static, value = inspect.getattr_static(thing, name), getattr(thing, name)
        if isinstance(static, property):
            members[name] = "property" if static.fset is None else "property rw"
        elif callable(value) and not inspect.isclass(value):
            members[name] = _signature(value)
        else:
            members[name] = _described(value) if inspect.isclass(value) else {"kind": type(value).__name__}
    return {"kind": "class", "bases": [base.__name__ for base in thing.__bases__], "members": members}


def _signature(function) -> str | list[str]:
    """As pybind11 writes it into the docstring; a list where it is overloaded, "" where there is none."""
    lines = (function.__doc__ or "").strip().splitlines()
    if len(lines) > 1 and lines[1].strip() == "Overloaded function.":
        return [line.split(". ", 1)[1] for line in lines if re.match(r"\d+\. \w+\(", line)]
    return lines[0] if lines and "(" in lines[0] and "help(type(self))" not in lines[0] else ""


if __name__ == "__main__":
    wanted, target = sys.argv[1:3]
    with tempfile.TemporaryDirectory() as scratch:
        install(wanted, Path(scratch))
        Path(target).write_text(json.dumps(describe(load(Path(scratch))), indent=0, separators=(",", ":")) + "\n")

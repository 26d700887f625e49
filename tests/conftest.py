"""What tests of both packages share."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType

DATA = Path(__file__).parent / "data"

# The machines of CI are shared: an example may take long for reasons of its neighbours'.
hypothesis.settings.register_profile("edge", deadline=None, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.load_profile("edge")


@pytest.fixture
def data() -> Path:
    """The folder of real models and photographs; see its README.md."""
    return DATA


@pytest.fixture
def deployment_file(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a deployment file and gives its path."""

    def write(text: str) -> Path:
        path = tmp_path / "line3.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


STANDIN = Path(__file__).parent / "standin"


def _forget_standins() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in ("tensorrt", "pycuda")]:
        del sys.modules[name]


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModuleType]]:
    """Makes ``import tensorrt`` and ``import pycuda`` give the stand-ins, here and in child processes; see there."""

    def use(
        version: str = "10.3.0",
        *,
        dla_cores: int = 2,
        compute: str = "8.7",
        integrated: bool = True,
        faults: Sequence[str] = (),
    ) -> ModuleType:
        folders = [str(STANDIN / "trt"), str(STANDIN / "cuda")]
        monkeypatch.setenv("STANDIN_TENSORRT", version)
        monkeypatch.setenv("STANDIN_DLA_CORES", str(dla_cores))
        monkeypatch.setenv("STANDIN_COMPUTE", compute)
        monkeypatch.setenv("STANDIN_INTEGRATED", str(int(integrated)))
        monkeypatch.setenv("STANDIN_FAULT", ",".join(faults))
        beyond = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in folders]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*folders, *beyond]))
        monkeypatch.setattr(sys, "path", [*folders, *(path for path in sys.path if path not in folders)])
        _forget_standins()
        return importlib.import_module("tensorrt")

    _forget_standins()
    yield use
    _forget_standins()


@pytest.fixture
def assert_released() -> Callable[[], None]:
    """Asserts that nothing of the stand-in GPU is held: no memory, stream, event or context."""

    def check() -> None:
        gc.collect()
        live = importlib.import_module("pycuda.driver")._standin_live()  # noqa: SLF001 - it is for this
        assert live == 0, f"{live} allocations, streams, events or contexts of the stand-in were not released"

    return check

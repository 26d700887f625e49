"""Boards that are written into a folder."""

from __future__ import annotations

import importlib.util
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def make_orin(tmp_path: Path) -> Callable[..., Any]:
    """Write a board's files under ``tmp_path``; see orin.py for its arguments after the root."""
    # Tests are found by path, and are no packages. The script that runs in a namespace of its own imports the same.
    spec = importlib.util.spec_from_file_location("orin", Path(__file__).with_name("orin.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["orin"] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return lambda name="nx16", jetpack=6: module.Orin(tmp_path, name, jetpack)


class JtopSocket:
    """A socket where jtop's service has its own, under a root; nobody answers."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._path = root / "run/jtop.sock"
        self._path.parent.mkdir()
        self._listener: socket.socket | None = None

    def create(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._path))
        self._listener.listen()

    def remove(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._path.unlink()
            self._listener = None


@pytest.fixture
def jtop_socket(tmp_path: Path) -> Iterator[JtopSocket]:
    made = JtopSocket(tmp_path)
    made.create()
    yield made
    made.remove()

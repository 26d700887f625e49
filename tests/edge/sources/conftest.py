"""A camera to play with, and a reader for sources."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from typing_extensions import Self

    from edge.sources import Source
    from edge.types import Frame


def _load_rtsp_server() -> ModuleType:
    """By its path: the folder of the tests is no place to import from, since it holds an ``edge`` of its own."""
    path = Path(__file__).parents[2] / "rtsp_server.py"
    spec = importlib.util.spec_from_file_location("rtsp_server", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def rtsp_server() -> ModuleType:
    """The module with the RTSP camera."""
    return _load_rtsp_server()


@pytest.fixture
def make_camera(rtsp_server: ModuleType) -> Iterator[Callable[..., object]]:
    """Make RTSP cameras that are on; all end with the test."""
    made = []

    def make(**options: object) -> object:
        camera = rtsp_server.RtspServer(**options)
        camera.start()
        made.append(camera)
        return camera

    yield make
    for camera in made:
        camera.kill()


class Reader:
    """Reads a source in a thread of its own, as the daemon does. Keeps the newest frame, or with ``hold`` all."""

    def __init__(self, source: Source, *, hold: bool = False, fit_wh: tuple[int, int] | None = None) -> None:
        self.source = source
        self.stop = threading.Event()
        self.beats = 0
        self.handed = 0
        self.indexes: list[int] = []
        self.sizes: set[tuple[int, int]] = set()
        self.kept: deque[Frame] = deque(maxlen=None if hold else 1)
        self.go_on = threading.Event()
        self.go_on.set()
        self._fit_wh = fit_wh
        self._thread = threading.Thread(target=self._read, name="reader")

    def __enter__(self) -> Self:
        self.source.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self.source.__exit__(None, None, None)

    def end(self) -> None:
        """Stop reading; the source has to come back soon."""
        self.stop.set()
        self.go_on.set()
        self._thread.join(20)
        assert not self._thread.is_alive(), "frames() did not return after stop"

    def _read(self) -> None:
        for frame in self.source.frames(self.stop, fit_wh=self._fit_wh):
            if frame is None:
                self.beats += 1
            else:
                self.handed += 1
                self.indexes.append(frame.index)
                self.sizes.add((frame.image.shape[1], frame.image.shape[0]))
                self.kept.append(frame)
            self.go_on.wait()


@pytest.fixture(scope="session")
def reading() -> type[Reader]:
    """The class of readers, each a context manager."""
    return Reader

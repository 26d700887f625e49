"""A test picture that moves: for benchmarks, for trying out a broker, for a box whose camera is not there yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edge.sources import SourceHealth
from edge.sources.pace import Pacer, Stamper

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator
    from types import TracebackType

    from typing_extensions import Self

    from edge import config
    from edge.types import Frame, Image

__all__ = ["PatternSource"]

_PICTURES = 16


class PatternSource:
    """Gives a few pictures in turn, a bright bar further along in each. They are made once: a frame costs nothing."""

    lossless = False
    skipped = 0

    def __init__(self, section: config.TestPattern, *, stream: str) -> None:
        self._width, self._height = section.size
        self._fps = section.fps
        self._stamp = Stamper(stream)
        self._pictures = [self._draw(index) for index in range(_PICTURES)]

    @property
    def description(self) -> str:
        """What is made and how fast."""
        return f"test pattern {self._width}x{self._height}, {self._fps:g} a second"

    @property
    def health(self) -> SourceHealth:
        """Always well."""
        return SourceHealth("live")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Nothing is open."""

    def frames(self, stop: threading.Event, *, fit_wh: tuple[int, int] | None = None) -> Iterator[Frame]:  # noqa: ARG002 - it has the size that was asked for
        """Yield pictures until ``stop``."""
        pacer, count = Pacer(self._fps), 0
        while pacer.wait(stop):
            yield self._stamp(self._pictures[count % _PICTURES])
            count += 1

    def _draw(self, index: int) -> Image:
        """A grey ramp with a white bar, ``(H, W, 3)`` uint8."""
        ramp = np.linspace(32, 160, self._width, dtype=np.uint8)
        image = np.repeat(np.tile(ramp, (self._height, 1))[:, :, None], 3, axis=2)
        bar = max(1, self._width // _PICTURES)
        image[:, index * bar : (index + 1) * bar] = 255
        image.flags.writeable = False
        return np.ascontiguousarray(image)

"""A test picture that moves: colour bars over a ramp, scrolling. For trying things out without a camera."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from edge.sources import SourceHealth
from edge.sources.pace import Pacer, Stamper

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from typing_extensions import Self

    from edge import config
    from edge.types import Frame, Image

__all__ = ["PatternSource"]

_BARS_BGR = np.array(
    [(255, 255, 255), (0, 255, 255), (255, 255, 0), (0, 255, 0), (255, 0, 255), (0, 0, 255), (255, 0, 0)], np.uint16
)
_STEP_ROWS = 3
_LIVE = SourceHealth("live")


class PatternSource:
    """Frame n is the same picture every time. Frames are views of one array, so that none is allocated."""

    lossless = False
    skipped = 0

    def __init__(
        self, section: config.TestPattern, *, stream: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._size_wh = section.size
        self._fps = section.fps
        self._clock = clock
        self._stamp = Stamper(stream, clock=clock)
        self.health = _LIVE

    @property
    def description(self) -> str:
        """What is shown and how fast."""
        width, height = self._size_wh
        return f"test pattern, {width}x{height}, {self._fps:g} frames a second"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Nothing is open."""

    def frames(self, stop: threading.Event, *, fit_wh: tuple[int, int] | None = None) -> Iterator[Frame | None]:
        """Yield read-only frames at the pattern's rate."""
        del fit_wh
        height = self._size_wh[1]
        scroll = _scroll(self._size_wh)
        pacer = Pacer(self._fps, clock=self._clock)
        number = 0
        while (yield from pacer.beats(stop)):
            top = number * _STEP_ROWS % height
            yield self._stamp(scroll[top : top + height])
            number += 1


def _scroll(size_wh: tuple[int, int]) -> Image:
    """The picture twice, one above the other: a window of its height that moves down shows it scrolling, for ever."""
    width, height = size_wh
    bars = _BARS_BGR[np.arange(width) * len(_BARS_BGR) // width]
    ramp = (np.arange(height, dtype=np.uint16) * 192 // max(1, height - 1) + 63)[:, None, None]
    picture = (bars[None] * ramp // 255).astype(np.uint8)
    scroll = np.concatenate([picture, picture])
    scroll.flags.writeable = False
    return scroll

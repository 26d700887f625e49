"""Frames from mailboxes through a pipeline that takes the next one while it computes."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from edge import config
from edge.errors import DeviceLostError
from edge.lane import Lane
from edge.types import Frame, Latency, Result

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MODEL = config.Model(name="m", path="m.onnx", task=config.DetectionTask())


class Recorder:
    """A pipeline that notes what is asked of it; ``on`` may fail or feed mailboxes at a step such as ``begin 3``."""

    digest, precision, description = "0" * 64, "int8", "recorder"

    def __init__(self, depth: int, on: Callable[[str], None]) -> None:
        self.depth = depth
        self.steps: list[str] = []
        self._on = on
        self._begun: deque[Frame] = deque()

    def warm_up(self) -> None:
        pass

    def begin(self, frame: Frame) -> None:
        self._note(f"begin {frame.index}")
        self._begun.append(frame)
        assert len(self._begun) <= self.depth

    def finish(self) -> Result:
        frame = self._begun.popleft()
        self._note(f"finish {frame.index}")
        return Result(frame, "m", [], Latency(0, 0, 0, 0))

    def _note(self, step: str) -> None:
        self.steps.append(step)
        self._on(step)


def frame(index: int) -> Frame:
    return Frame(np.zeros((2, 2, 3), np.uint8), "gate", index, 0.0, 0)


def served(
    depth: int,
    feed: dict[str, int | None],
    *,
    fail: str = "",
    error: type[Exception] = RuntimeError,
    stop_at: str = "",
) -> tuple[list[str], list[int]]:
    """Serve frame 0; at a step, put the frame that ``feed`` names, or close (None). Steps, and frames delivered."""
    lane, stop = Lane(MODEL), threading.Event()
    mailbox = lane.add_stream()

    def on(step: str) -> None:
        if step in feed:
            index = feed[step]
            mailbox.close() if index is None else mailbox.put(frame(index))
        if step == stop_at:
            stop.set()
        if step == fail:
            raise error(step)

    recorder = Recorder(depth, on)

    @contextmanager
    def opened(_: config.Model) -> Iterator[Any]:
        yield recorder

    delivered: list[int] = []
    mailbox.put(frame(0))
    lane.serve(opened, lambda result, *_: delivered.append(result.frame.index), stop)
    return recorder.steps, delivered


def test_a_frame_that_waits_is_begun_before_the_last_one_is_finished() -> None:
    steps, delivered = served(2, {"begin 0": 1, "begin 1": 2, "finish 0": None})

    assert steps == ["begin 0", "begin 1", "finish 0", "begin 2", "finish 1", "finish 2"]
    assert delivered == [0, 1, 2]


def test_no_result_waits_for_a_frame_that_is_not_there() -> None:
    steps, _ = served(2, {"finish 0": 1, "finish 1": None})

    assert steps == ["begin 0", "finish 0", "begin 1", "finish 1"]


def test_an_engine_of_one_slot_gets_one_frame_at_a_time() -> None:
    steps, _ = served(1, {"begin 0": 1, "begin 1": None})

    assert steps == ["begin 0", "finish 0", "begin 1", "finish 1"]


def test_what_is_with_the_engine_is_delivered_after_a_stop() -> None:
    _, delivered = served(2, {"begin 0": 1}, stop_at="begin 1")

    assert delivered == [0, 1]


@pytest.mark.parametrize("step", ["begin 1", "finish 1"])
def test_a_frame_that_fails_costs_no_other(step: str) -> None:
    _, delivered = served(2, {"begin 0": 1, "finish 0": 2, "finish 2": None}, fail=step)

    assert delivered == [0, 2]


@pytest.mark.parametrize("step", ["begin 1", "finish 1"])
def test_a_lost_gpu_is_no_bad_frame(step: str) -> None:
    with pytest.raises(DeviceLostError, match=step):
        served(2, {"begin 0": 1, "finish 0": 2, "finish 2": None}, fail=step, error=DeviceLostError)

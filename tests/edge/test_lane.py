"""Frames from mailboxes through a pipeline that takes the next one while it computes."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from edge import config
from edge.errors import DeviceLostError
from edge.events import Events
from edge.lane import Lane, Runner
from edge.types import Frame, Latency, Result

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MODEL = config.Model(name="m", path="m.onnx", task=config.DetectionTask())


class Recorder:
    """A pipeline that notes what is asked of it; ``on`` may fail or feed mailboxes at a step such as ``begin 3``."""

    digest, precision, description, input_wh = "0" * 64, "int8", "recorder", (2, 2)

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
    lane, stop = Lane("m"), threading.Event()
    feed_of_gate = lane.new_feed("gate")
    lane.add_feed(feed_of_gate)
    mailbox = feed_of_gate.mailbox

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
    runner = Runner(lane, MODEL, Events())
    try:
        runner.serve(opened, lambda result, *_: delivered.append(result.frame.index), stop)
    finally:
        waiting = int(mailbox.waiting)
        assert mailbox.put_count == feed_of_gate.inferred + feed_of_gate.failed + mailbox.dropped + waiting
        assert runner.busy_since_s is None
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


def test_a_row_of_failures_is_an_error_and_every_frame_of_it_is_counted() -> None:
    lane, events = Lane("m"), Events()
    stream = lane.new_feed("gate")
    lane.add_feed(stream)

    def on(step: str) -> None:
        verb, index = step.split()
        if verb == "finish":
            raise RuntimeError(step)
        stream.mailbox.put(frame(int(index) + 1))

    recorder = Recorder(1, on)
    stream.mailbox.put(frame(0))

    with pytest.raises(RuntimeError, match="finish 19"):
        Runner(lane, MODEL, events).serve(lambda _: nullcontext(recorder), lambda *_: None, threading.Event())

    assert stream.failed == 20
    assert [event.kind for event in events.recent] == ["frame_failed"]  # the row is one event, not twenty


def test_a_runner_waits_beside_the_one_at_work_until_it_is_told_to_take_over(wait_until: Any) -> None:
    lane = Lane("m")
    stream = lane.new_feed("gate")
    lane.add_feed(stream)
    old, new = Recorder(1, lambda _: None), Recorder(1, lambda _: None)
    runners = [Runner(lane, MODEL, Events()), Runner(lane, MODEL, Events(), at_once=False)]
    threads = [
        threading.Thread(
            target=runner.serve, args=(lambda _, r=recorder: nullcontext(r), lambda *_: None, threading.Event())
        )
        for runner, recorder in zip(runners, (old, new), strict=True)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: all(runner.ready.is_set() for runner in runners), "both are loaded")
    stream.mailbox.put(frame(0))
    wait_until(lambda: stream.inferred == 1, "the first frame")
    runners[0].leave()
    threads[0].join(20)
    stream.mailbox.put(frame(1))
    runners[1].take_over()
    wait_until(lambda: stream.inferred == 2, "the second frame")
    runners[1].leave()
    threads[1].join(20)

    assert old.steps == ["begin 0", "finish 0"]
    assert new.steps == ["begin 1", "finish 1"]


def test_a_runner_that_never_took_over_can_leave() -> None:
    runner = Runner(Lane("m"), MODEL, Events(), at_once=False)
    thread = threading.Thread(
        target=runner.serve, args=(lambda _: nullcontext(Recorder(1, print)), print, threading.Event())
    )
    thread.start()
    runner.leave()
    thread.join(20)

    assert not thread.is_alive()


def test_the_gate_is_asked_before_each_frame() -> None:
    now = [100.0]
    lane = Lane("m", clock=lambda: now[0])
    lane.limit(4.0)
    stream = lane.new_feed("gate")
    lane.add_feed(stream)
    taken: list[float] = []

    def end() -> bool:
        now[0] += 0.01  # each look at the clock's user costs some time
        stream.mailbox.put(frame(0))
        return len(taken) >= 40

    for item in lane.turns(end, lambda: True):
        if item is not None:
            taken.append(now[0])

    gaps = np.diff(taken)
    assert gaps.mean() == pytest.approx(0.25, rel=0.02)
    assert stream.mailbox.dropped_by["governor"] > 800
    assert stream.mailbox.dropped_by["overload"] <= 41  # a frame in the moment that the gate had just opened

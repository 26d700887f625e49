"""The process that asks jtop: when it is started, when it is given up, and what is said of it."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edge.events import Events
from edge.monitor.companion import BACKOFF_S, QUIET_S, START_S, STEADY_S, Companion
from edge.monitor.jtop import Sample

COUNTS = (
    "import time, itertools\nfor i in itertools.count(1): print('{\"uptime_s\": %d}' % i, flush=True); time.sleep(.01)"
)
ONCE = "print('{\"uptime_s\": 7}', flush=True); input()"
SAME = "import time\nwhile True: print('{\"uptime_s\": 7}', flush=True); time.sleep(.01)"
ENDS = "import sys; sys.exit('first line\\nno service at all\\n')"


def runs(pid: int) -> bool:
    """Whether there is a process of our own of that id, ended ones that nobody has asked after included."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class Stage:
    """A companion whose process is any script, on a clock that is turned by hand."""

    def __init__(self, root: Path, script: str, wait_until: Callable[..., None], **options: Any) -> None:
        self.events = Events()
        self.now_s = 0.0
        self.script = script
        self.started: list[float] = []
        self.wait_until = wait_until
        self.companion = Companion(
            root, period_s=1.0, events=self.events, arguments=self._arguments, installed=lambda: True, **options
        )

    def _arguments(self, period_s: float) -> list[str]:
        assert period_s == 1.0
        self.started.append(self.now_s)
        return [sys.executable, "-c", self.script]

    def poll(self) -> Sample | None:
        return self.companion.poll(self.now_s)

    def pass_s(self, seconds: float) -> Sample | None:
        self.now_s += seconds
        return self.poll()

    def await_sample(self) -> None:
        self.wait_until(lambda: self.poll() is not None, "a sample")

    def await_loss(self) -> None:
        self.wait_until(lambda: self.poll() is None, "no sample")

    def await_end(self) -> None:
        """Until the process has ended by itself and been missed."""
        self.wait_until(lambda: self.poll() is None and self.pid is None, "the process to end")

    def await_newer(self) -> None:
        before = self.poll()
        assert before is not None
        self.wait_until(lambda: self.poll() != before, "a newer sample")
        assert self.poll() is not None

    @property
    def pid(self) -> int | None:
        return self.companion.pid

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.events.recent]


@pytest.fixture
def stage(jtop_socket: Any, wait_until: Callable[..., None]) -> Iterator[Callable[..., Stage]]:
    made: list[Stage] = []

    def make(script: str) -> Stage:
        made.append(Stage(jtop_socket.root, script, wait_until))
        return made[-1]

    yield make
    for one in made:
        one.companion.close()


def test_samples_are_the_newest_and_found_is_said_once(stage: Callable[..., Stage]) -> None:
    ours = stage(COUNTS)

    ours.await_sample()
    ours.await_newer()

    assert ours.kinds == ["jtop_found"]
    assert ours.started == [0.0]


def test_without_a_service_no_process_is_started(stage: Callable[..., Stage], jtop_socket: Any) -> None:
    jtop_socket.remove()
    ours = stage(COUNTS)

    for _ in range(100):
        assert ours.pass_s(10) is None

    assert ours.started == []
    assert ours.kinds == []


def test_a_service_that_comes_later_is_found_at_once(stage: Callable[..., Stage], jtop_socket: Any) -> None:
    jtop_socket.remove()
    ours = stage(COUNTS)
    ours.pass_s(1)

    jtop_socket.create()
    ours.await_sample()

    assert ours.started == [1.0]


@pytest.mark.parametrize("script", [ONCE, SAME], ids=["no sample", "the same sample"])
def test_a_service_that_brings_nothing_new_is_lost_and_its_process_killed(
    stage: Callable[..., Stage], script: str
) -> None:
    ours = stage(script)
    ours.await_sample()
    pid = ours.pid
    assert pid is not None

    assert ours.pass_s(QUIET_S) is not None
    assert ours.pass_s(0.1) is None

    assert not runs(pid)
    assert ours.kinds == ["jtop_found", "jtop_lost"]
    assert ours.events.recent[-1].fields == {"reason": "nothing new for 5 s"}


def test_a_process_that_ends_is_lost_with_its_last_words(stage: Callable[..., Stage]) -> None:
    ours = stage(ONCE.replace("input()", "import sys, time; time.sleep(.3); sys.exit('Lost connection')"))

    ours.await_sample()
    ours.await_loss()

    assert ours.kinds == ["jtop_found", "jtop_lost"]
    assert "Lost connection" in ours.events.recent[-1].text


def test_a_process_that_never_says_anything_is_given_time_and_then_killed(
    stage: Callable[..., Stage], caplog: pytest.LogCaptureFixture
) -> None:
    ours = stage("input()")
    ours.poll()
    pid = ours.pid
    assert pid is not None

    ours.pass_s(START_S)
    assert runs(pid)
    ours.pass_s(0.1)

    assert not runs(pid)
    assert ours.kinds == []  # what was never found is not lost
    assert caplog.messages == ["jtop's service does not answer: no answer in 30 s"]


def test_failures_are_tried_again_ever_more_seldom_and_said_once(
    stage: Callable[..., Stage], caplog: pytest.LogCaptureFixture
) -> None:
    ours = stage(ENDS)
    while len(ours.started) < 9:
        ours.poll()
        if ours.pid is not None:
            ours.await_end()
        ours.now_s += 1

    waits = [later - earlier for earlier, later in zip(ours.started, ours.started[1:], strict=False)]
    assert waits == [5, 10, 20, 40, 80, 160, 300, 300]
    assert BACKOFF_S == (5, 300)
    assert caplog.messages == ["jtop's service does not answer: no service at all"]


def test_a_service_that_was_started_anew_is_tried_at_once(stage: Callable[..., Stage], jtop_socket: Any) -> None:
    ours = stage(ENDS)
    for _ in range(5):
        ours.now_s += BACKOFF_S[1]
        ours.poll()
        ours.await_end()
    ours.script = COUNTS
    assert ours.pass_s(1) is None

    jtop_socket.remove()
    jtop_socket.create()
    ours.await_sample()

    assert len(ours.started) == 6


def test_after_good_service_the_first_wait_is_short_again(stage: Callable[..., Stage]) -> None:
    ours = stage(ENDS)
    for _ in range(4):
        ours.now_s += BACKOFF_S[1]
        ours.poll()
        ours.await_end()
    ours.script = COUNTS
    ours.now_s += BACKOFF_S[1]
    ours.await_sample()
    while ours.now_s - ours.started[-1] <= STEADY_S:
        ours.now_s += QUIET_S
        ours.await_newer()

    ours.script = ENDS
    assert ours.pid is not None
    os.kill(ours.pid, signal.SIGKILL)
    ours.await_end()
    count = len(ours.started)

    ours.pass_s(BACKOFF_S[0])
    assert len(ours.started) == count + 1


def test_lines_that_are_no_samples_are_passed_over(stage: Callable[..., Stage]) -> None:
    ours = stage(f"print('chatter'); print('{{}}'); print(); {ONCE}")

    ours.await_sample()

    assert ours.poll() == Sample(uptime_s=7)


def test_a_flapping_service_is_no_flood_of_events(stage: Callable[..., Stage], jtop_socket: Any) -> None:
    ours = stage(ONCE)
    for _ in range(20):
        ours.await_sample()
        ours.pass_s(QUIET_S + 0.1)
        jtop_socket.remove()
        jtop_socket.create()

    assert ours.kinds == ["jtop_found", "jtop_lost"] * 3


def test_a_folder_in_the_place_of_the_socket_is_said_once(
    stage: Callable[..., Stage], jtop_socket: Any, caplog: pytest.LogCaptureFixture
) -> None:
    jtop_socket.remove()
    (jtop_socket.root / "run/jtop.sock").mkdir()
    ours = stage(COUNTS)

    for _ in range(3):
        ours.pass_s(100)

    assert ours.started == []
    assert [message.partition("jtop.sock ")[2] for message in caplog.messages] == [
        "is no socket: it was mounted into the container before jtop's service ran"
    ]


def test_not_installed_is_one_line_and_off(jtop_socket: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    companion = Companion(jtop_socket.root, period_s=1, events=Events(), installed=lambda: False)

    assert companion.poll(0) is None
    assert companion.poll(100) is None
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "pip install 'jetson-edge[jetson]'" in caplog.text


def test_close_ends_the_process_and_may_be_called_twice(stage: Callable[..., Stage]) -> None:
    ours = stage(COUNTS)
    ours.await_sample()
    pid = ours.pid
    assert pid is not None

    ours.companion.close()
    ours.companion.close()

    assert not runs(pid)

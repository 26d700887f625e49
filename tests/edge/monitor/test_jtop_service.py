"""The real jtop service and client, over an emulated /sys, in namespaces of their own: see jtop_box.py."""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private")
ANSWER_S = 30.0


def missing() -> str | None:
    """Why the service cannot be run here."""
    if importlib.util.find_spec("jtop") is None:
        return "jetson-stats is not installed; pip install 'jetson-edge[dev]'"
    if os.geteuid() != 0:
        return "only root may make namespaces and mount in them"
    if shutil.which("unshare") is None:
        return "unshare is not installed; apt-get install util-linux"
    probe = subprocess.run(
        [*NAMESPACES, "mount", "-t", "tmpfs", "none", "/sys"], capture_output=True, text=True, check=False
    )
    return f"no namespace to mount in: {probe.stderr.strip()}" if probe.returncode else None


class Box:
    """The script on the other side of a pipe: its methods, by name."""

    def __init__(self, board: str, log: Path) -> None:
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [*NAMESPACES, sys.executable, HERE / "jtop_box.py", board],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
        self._answers: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, name="box")
        self._reader.start()
        assert self._answer() == "ready"

    def __call__(self, name: str, *arguments: object) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def pids(self) -> list[str]:
        """All its processes, as they are known outside: their namespace is not ours."""
        # unshare's own process stays outside, and knows the namespace that it made for its children.
        theirs = Path(f"/proc/{self._process.pid}/ns/pid_for_children").readlink()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if (folder / "ns/pid").readlink() == theirs:
                    found.append(folder.name)
            except OSError:  # has ended meanwhile, or has nothing any more
                continue
        return found

    def close(self) -> None:
        """End everything in it: with its first process, the kernel ends a process namespace."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(ANSWER_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._answers.put(line)
        self._answers.put("")

    def _answer(self) -> Any:
        """The next line; a monitor that hangs gives none."""
        try:
            line = self._answers.get(timeout=ANSWER_S)
        except queue.Empty:
            pytest.fail(f"no answer in {ANSWER_S:g} s")
        if not line:
            pytest.fail(f"the box has ended: {self._log.read_text()}")
        return json.loads(line)


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Callable[[str], Box]]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    made: list[Box] = []

    def make(board: str) -> Box:
        made.append(Box(board, tmp_path / "box.log"))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def await_reading(wait_until: Callable[..., None]) -> Callable[..., dict[str, Any]]:
    """Read until a condition of the reading holds; the reading."""

    def wait(box: Box, condition: Callable[[dict[str, Any]], Any], what: str) -> dict[str, Any]:
        readings: list[dict[str, Any]] = []

        def holds() -> Any:
            readings.append(box("read"))
            return condition(readings[-1])

        wait_until(holds, what, deadline_s=60)
        return readings[-1]

    return wait


def found(reading: dict[str, Any]) -> bool:
    return reading["jtop"] is True


def lost(reading: dict[str, Any]) -> bool:
    return reading["jtop"] is False


@pytest.mark.parametrize(
    ("board", "mode", "dla"),
    [("agx64", "MAXN", {"dla0", "dla1"}), ("nx16", "MAXN", {"dla0", "dla1"}), ("nano8", "15W", set())],
)
def test_the_service_adds_what_only_it_knows(
    box: Callable[[str], Box], await_reading: Callable[..., dict[str, Any]], board: str, mode: str, dla: set[str]
) -> None:
    inside = box(board)
    without = inside("read")
    assert lost(without)
    assert without["temperatures_c"]["tj"] == 52.0

    inside("start")
    reading = await_reading(inside, found, "the service to answer")

    assert reading["power_mode"] == mode
    assert reading["jetson_clocks"] is False
    assert set(reading["dla_active"]) == dla
    # What sysfs says is the same with it and without.
    moving = ("at_s", "memory", "power_mode", "jetson_clocks", "jtop")
    assert {k: v for k, v in reading.items() if k not in moving} == {
        k: v for k, v in without.items() if k not in moving
    }
    assert inside("events") == ["jtop_found"]


def test_heat_is_seen_at_once_by_us_and_soon_by_the_service(
    box: Callable[[str], Box], await_reading: Callable[..., dict[str, Any]], wait_until: Callable[..., None]
) -> None:
    inside = box("nx16")
    inside("start")
    await_reading(inside, found, "the service to answer")

    inside("heat", "tj", 99.5)

    assert inside("read")["temperatures_c"]["tj"] == 99.5
    wait_until(
        lambda: (sample := inside("sample")) and sample["temperatures_c"].get("tj") == 99.5, "the service's own reading"
    )


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGKILL"])
def test_a_service_that_dies_is_missed_and_found_again(
    box: Callable[[str], Box], await_reading: Callable[..., dict[str, Any]], signal: str
) -> None:
    inside = box("nx16")
    inside("start")
    await_reading(inside, found, "the service to answer")

    inside("signal", signal)
    inside("wait")
    reading = await_reading(inside, lost, "the loss")
    assert reading["power_mode"] is None
    inside("heat", "cpu", 77)
    assert inside("read")["temperatures_c"]["cpu"] == 77
    assert inside("events") == ["jtop_found", "jtop_lost"]

    inside("start")
    await_reading(inside, found, "the service to answer again")
    assert inside("events") == ["jtop_found", "jtop_lost", "jtop_found"]
    assert len(inside("clients")) == 1


def test_a_service_that_hangs_delays_no_reading(
    box: Callable[[str], Box], await_reading: Callable[..., dict[str, Any]]
) -> None:
    inside = box("nx16")
    inside("start")
    await_reading(inside, found, "the service to answer")

    inside("signal", "SIGSTOP")
    await_reading(inside, lost, "the loss")
    for celsius in range(60, 80):  # the next client hangs in its start meanwhile
        inside("heat", "cpu", celsius)
        assert inside("read")["temperatures_c"]["cpu"] == celsius

    inside("signal", "SIGCONT")
    await_reading(inside, found, "the service to answer again")
    assert inside("events") == ["jtop_found", "jtop_lost", "jtop_found"]


def test_the_client_ends_with_the_monitor(
    box: Callable[[str], Box], await_reading: Callable[..., dict[str, Any]]
) -> None:
    inside = box("nx16")
    inside("start")
    await_reading(inside, found, "the service to answer")
    assert len(inside("clients")) == 1

    inside("close")

    assert inside("clients") == []


def test_nothing_of_it_stays_on_this_machine(box: Callable[[str], Box], await_reading: Callable[..., Any]) -> None:
    settings = Path(sys.base_prefix) / "local/jtop"
    before = (Path("/proc/self/mountinfo").read_text(), Path("/etc/group").read_text(), settings.exists())
    inside = box("nx16")
    inside("start")
    await_reading(inside, found, "the service to answer")
    pids = inside.pids()
    assert len(pids) > 3  # the script, its client, the service's own

    inside.close()

    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
    assert (Path("/proc/self/mountinfo").read_text(), Path("/etc/group").read_text(), settings.exists()) == before

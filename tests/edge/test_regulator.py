"""From files under /sys to the rate of a model: the real monitor and governor on a tree of a device."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge import config
from edge.events import Events
from edge.monitor.monitor import Monitor, device_name
from edge.regulator import Regulator
from edge.roster import Roster
from edge.supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import Iterator

MEMINFO = "MemTotal: 8000000 kB\nMemAvailable: {available} kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n"


class Device:
    """A small tree of an Orin's files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.zone = root / "sys/class/thermal/thermal_zone0"
        self.alert = root / "sys/class/thermal/cooling_device0"
        for folder in (self.zone, self.alert, root / "proc/device-tree"):
            folder.mkdir(parents=True)
        (self.zone / "type").write_text("tj-thermal\n")
        (self.zone / "trip_point_0_type").write_text("passive\n")
        (self.zone / "trip_point_0_temp").write_text("99000\n")
        (self.alert / "type").write_text("cpu-throttle-alert\n")
        (root / "proc/device-tree/model").write_text("NVIDIA Jetson AGX Orin Developer Kit\0")
        self.set(celsius=50, throttled=False, available_kb=4000000)

    def set(self, *, celsius: float, throttled: bool = False, available_kb: int = 4000000) -> None:
        (self.zone / "temp").write_text(f"{round(celsius * 1000)}\n")
        (self.alert / "cur_state").write_text(f"{int(throttled)}\n")
        (self.root / "proc/meminfo").write_text(MEMINFO.format(available=available_kb))


class Rig:
    """One model with one stream that would like 30 frames a second."""

    def __init__(self, root: Path) -> None:
        self.now_s = 1000.0
        self.device = Device(root)
        self.events = Events()
        section = config.Deployment(
            version=1,
            models=[config.Model(name="m", path="m.onnx", task=config.DetectionTask())],
            streams=[config.Stream(name="gate", source=config.TestPattern(size=(8, 8)))],
        )
        halt = threading.Event()
        self.roster = Roster(
            section,
            crew=Supervisor(section.watch, end=halt.set, events=self.events),
            open_model=nothing,
            deliver=lambda *_: None,
            events=self.events,
            halt=halt,
            clock=lambda: self.now_s,
        )
        self.roster.staff()
        self.lane = self.roster.workers["m"].lane
        self.feed = self.roster.captures["gate"].feed
        self.lane.add_feed(self.feed)
        self.regulator = Regulator(self.roster, without_lighter=set, events=self.events, clock=lambda: self.now_s)
        monitor = config.Monitor(jtop="off")
        self.monitor = Monitor(monitor, events=self.events, root=root, clock=lambda: self.now_s)

    def run(self, seconds: int, **state: Any) -> None:
        self.device.set(**state)
        for _ in range(seconds):
            self.now_s += 1
            self.feed.mailbox.miss(30)
            limit = self.lane.gate.limit_fps
            done = round(min(20.0, 20.0 if limit is None else limit))
            self.feed.inferred += done
            self.lane.idle_s += 1 - done / 20  # the engine takes a twentieth of a second for each
            self.regulator.step(self.monitor.read())

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events.recent]


@contextmanager
def nothing(_model: config.Model) -> Iterator[Any]:
    yield None


def test_a_cool_device_is_not_limited(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.run(60, celsius=50)

    assert rig.lane.gate.limit_fps is None
    assert rig.regulator.state.mode == "full"
    assert rig.regulator.state.set_point_c == 89
    assert rig.regulator.rates("gate") == (30.0, 20.0)
    assert rig.events.recent == []


def test_a_hot_device_gets_fewer_frames_and_all_of_them_when_it_is_cool_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.run(30, celsius=50)
    rig.run(60, celsius=93)
    assert rig.lane.gate.limit_fps is not None
    assert rig.lane.gate.limit_fps < 10
    assert "rate_limited" in rig.kinds()

    rig.run(1200, celsius=50)
    assert rig.lane.gate.limit_fps is None
    assert "rate_restored" in rig.kinds()


def test_throttling_by_the_chip_is_told_once_and_so_is_its_end(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.run(5, celsius=60)
    rig.run(5, celsius=60, throttled=True)
    rig.run(5, celsius=60)

    told = [event for event in rig.events.recent if event.kind in {"throttled", "throttling_ended"}]
    assert [event.kind for event in told] == ["throttled", "throttling_ended"]
    assert told[0].text == "the chip is throttled: cpu-throttle-alert"


def test_memory_that_runs_out_pauses_until_there_is_some_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.run(10, celsius=50)
    rig.run(10, celsius=50, available_kb=300000)
    assert rig.lane.gate.limit_fps == 0
    assert rig.regulator.state.mode == "paused"

    rig.run(600, celsius=50, available_kb=4000000)
    assert rig.lane.gate.limit_fps is None
    assert {"memory_low", "paused", "resumed"} <= set(rig.kinds())


def test_the_board_says_what_it_is(tmp_path: Path) -> None:
    Device(tmp_path)

    assert device_name(tmp_path) == "NVIDIA Jetson AGX Orin Developer Kit"
    assert device_name(tmp_path / "nowhere") is None

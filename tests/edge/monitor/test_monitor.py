"""One reading of several sources, and the events."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from edge import config
from edge.events import Events
from edge.monitor.jtop import Sample
from edge.monitor.monitor import (
    INSTANTANEOUS_EVERY_S,
    OVER_CURRENT_EVERY_S,
    SENSOR_LOST_S,
    Monitor,
    device_name,
    merge,
)
from edge.monitor.proc import Proc
from edge.monitor.sysfs import Chip, Sysfs

OFF = config.Monitor(jtop="off")


class Watched:
    """A board, its monitor, and a clock that is turned by hand."""

    def __init__(self, orin: Any, section: config.Monitor = OFF) -> None:
        self.orin = orin
        self.now_s = 1000.0
        self.events = Events()
        self.monitor = Monitor(section, events=self.events, root=orin.root, clock=lambda: self.now_s)

    def pass_s(self, seconds: float) -> Any:
        self.now_s += seconds
        return self.monitor.read()

    @property
    def told(self) -> list[tuple[str, str, str]]:
        return [(event.kind, event.severity, event.text) for event in self.events.recent]


@pytest.fixture
def watched(make_orin: Any) -> Watched:
    made = Watched(make_orin("nx16"))
    made.monitor.read()
    return made


@pytest.mark.parametrize("name", ["agx64", "nx16", "nano8"])
def test_without_jtop_a_reading_is_all_that_the_files_say(make_orin: Any, name: str) -> None:
    orin = make_orin(name)

    with Monitor(OFF, events=Events(), root=orin.root, clock=lambda: 5.0) as monitor:
        reading = monitor.read()

    chip = Sysfs(orin.root).read(5)
    assert reading.at_s == 5.0
    assert reading.memory == Proc(orin.root).read(5)
    for field in Chip.__dataclass_fields__:
        assert getattr(reading, field) == getattr(chip, field)
    assert (reading.power_mode, reading.jetson_clocks, reading.jtop) == (None, None, False)


def test_a_machine_that_is_no_jetson_has_a_reading_too() -> None:
    with Monitor(OFF, events=Events()) as monitor:
        reading = monitor.read()

    assert reading.memory.total_bytes > reading.memory.available_bytes > 0
    assert reading.memory.rss_bytes > 1 << 20


SAMPLE = Sample(
    uptime_s=1,
    power_mode="MAXN",
    jetson_clocks=True,
    temperatures_c={"cpu": 20.0},
    power_mw={"VIN": 1},
    total_power_mw=1,
    gpu_load_percent=1.0,
    gpu_clock_hz=1,
    gpu_bytes=1,
    dla_active={"dla0": True},
    fan_percent=1.0,
)


def test_what_sysfs_says_counts_and_jtop_adds_what_only_it_knows(make_orin: Any) -> None:
    orin = make_orin("nx16")
    chip, memory = Sysfs(orin.root).read(0), Proc(orin.root).read(0)

    reading = merge(0.0, chip, memory, SAMPLE)

    for field in Chip.__dataclass_fields__:
        assert getattr(reading, field) == getattr(chip, field)
    assert reading.memory == memory
    assert (reading.power_mode, reading.jetson_clocks, reading.jtop) == ("MAXN", True, True)


def test_where_sysfs_says_nothing_jtop_does(make_orin: Any, tmp_path: Path) -> None:
    orin = make_orin("nx16")
    orin.write("proc/meminfo", "MemTotal: 1000 kB\nMemAvailable: 400 kB")

    reading = merge(0.0, Sysfs(tmp_path / "nothing").read(0), Proc(orin.root).read(0), SAMPLE)

    assert reading.temperatures_c == {"cpu": 20.0}
    assert (reading.power_mw, reading.total_power_mw) == ({"VIN": 1}, 1)
    assert (reading.gpu_load_percent, reading.gpu_clock_hz, reading.fan_percent) == (1.0, 1, 1.0)
    assert reading.dla_active == {"dla0": True}
    assert reading.memory.gpu_bytes == 1


def test_throttling_is_told_when_it_begins_changes_and_ends(watched: Watched) -> None:
    watched.orin.alert("cpu-throttle-alert", 1)
    assert watched.pass_s(1).throttling == ("cpu-throttle-alert",)
    watched.pass_s(1)
    watched.orin.alert("gpu-throttle-alert", 1)
    watched.pass_s(1)
    watched.orin.alert("cpu-throttle-alert", 0)
    watched.orin.alert("gpu-throttle-alert", 0)
    assert watched.pass_s(1).throttling == ()

    assert watched.told == [
        ("throttled", "warning", "the chip is throttled: cpu-throttle-alert"),
        ("throttled", "warning", "the chip is throttled: cpu-throttle-alert, gpu-throttle-alert"),
        ("throttling_ended", "info", "the chip is not throttled any more"),
    ]
    assert watched.events.recent[0].fields == {"devices": ["cpu-throttle-alert"]}


def test_throttling_that_comes_and_goes_every_second_is_no_flood_and_its_end_is_told(watched: Watched) -> None:
    for second in range(1300):
        watched.orin.alert("cpu-throttle-alert", second % 2)
        watched.pass_s(1)
    watched.orin.alert("cpu-throttle-alert", 0)
    for _ in range(600):
        watched.pass_s(1)

    assert 6 <= len(watched.told) <= 6 * 4
    assert watched.told[-1][0] == "throttling_ended"


def test_a_throttled_start_is_told(make_orin: Any) -> None:
    orin = make_orin("nano8")
    orin.alert("soc0-throttle-alert", 1)
    watched = Watched(orin)

    watched.monitor.read()

    assert [kind for kind, *_ in watched.told] == ["throttled"]


def test_counts_from_before_the_start_are_no_events(make_orin: Any) -> None:
    orin = make_orin("nx16")
    orin.over_current(1, 40)
    watched = Watched(orin)
    watched.monitor.read()
    watched.pass_s(10)

    assert watched.told == []


@pytest.mark.parametrize(("number", "name"), [(1, "under voltage"), (2, "average")])
def test_over_current_is_a_warning_at_once_and_then_summed_up(watched: Watched, number: int, name: str) -> None:
    watched.orin.over_current(number, 1)
    watched.pass_s(2)
    for count in range(2, 12):
        watched.orin.over_current(number, count)
        watched.pass_s(2)
    watched.pass_s(OVER_CURRENT_EVERY_S)

    assert watched.told == [
        ("over_current", "warning", f"over-current protection ({name}) held the chip back once"),
        ("over_current", "warning", f"over-current protection ({name}) held the chip back 10 times"),
    ]
    assert watched.events.recent[-1].fields == {"cause": name.replace(" ", "_"), "count": 10}


def test_instantaneous_over_current_is_worth_a_word_every_ten_minutes(watched: Watched) -> None:
    count = 0
    for _ in range(round(INSTANTANEOUS_EVERY_S)):
        count += 8
        watched.orin.over_current(3, count)
        watched.pass_s(2)

    assert [(kind, severity) for kind, severity, _ in watched.told] == [("over_current", "info")] * 2


def test_a_counter_that_begins_anew_is_no_event(watched: Watched) -> None:
    watched.orin.over_current(2, 5)
    watched.pass_s(2)
    watched.orin.over_current(2, 0)
    watched.pass_s(100)
    assert len(watched.told) == 1

    watched.orin.over_current(2, 1)
    watched.pass_s(100)

    assert len(watched.told) == 2


def test_a_lost_sensor_is_told_once(watched: Watched) -> None:
    watched.orin.switch_off("tj")
    for _ in range(int(SENSOR_LOST_S)):
        watched.pass_s(1)
    assert watched.told == []

    for _ in range(100):
        watched.pass_s(1)

    assert watched.told == [("sensor_lost", "warning", "the temperature of tj cannot be read any more")]
    assert watched.events.recent[0].fields == {"zone": "tj"}


def test_a_sensor_that_is_back_may_be_lost_again(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(2):
        watched.orin.switch_off("cpu")
        for _ in range(40):
            watched.pass_s(1)
        watched.orin.heat("cpu", 50)
        watched.pass_s(1)

    assert [kind for kind, *_ in watched.told] == ["sensor_lost", "sensor_lost"]
    assert caplog.messages.count("the temperature of cpu can be read again") == 2


@pytest.mark.parametrize("zone", ["gpu", "cv0"])
def test_zones_that_sleep_are_not_lost(watched: Watched, zone: str) -> None:
    watched.orin.heat(zone, 50)
    watched.pass_s(1)
    watched.orin.switch_off(zone)
    for _ in range(100):
        watched.pass_s(1)

    assert watched.told == []


def test_one_missed_reading_of_a_slow_monitor_is_no_loss(make_orin: Any) -> None:
    watched = Watched(make_orin(), config.Monitor(jtop="off", period_s=60))
    watched.monitor.read()
    watched.orin.switch_off("tj")
    watched.pass_s(60)
    watched.orin.heat("tj", 50)
    watched.pass_s(60)

    assert watched.told == []


@pytest.mark.usefixtures("jtop_socket")
def test_jtops_client_ends_with_the_monitor(make_orin: Any) -> None:
    """Nobody answers it here; where it is not installed, none is started."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = children.read_text() if children.exists() else ""

    with Monitor(config.Monitor(), events=Events(), root=make_orin().root) as monitor:
        monitor.read()

    assert not children.exists() or children.read_text() == before


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("agx64", "NVIDIA Jetson AGX Orin Developer Kit"),
        ("nx16", "NVIDIA Jetson Orin NX Engineering Reference Developer Kit"),
        ("nano8", "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super"),
    ],
)
def test_names_of_devices(make_orin: Any, name: str, expected: str) -> None:
    assert device_name(make_orin(name).root) == expected


def test_a_machine_without_device_tree_has_no_name(tmp_path: Path) -> None:
    assert device_name(tmp_path) is None

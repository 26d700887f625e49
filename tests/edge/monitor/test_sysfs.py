"""The chip, read from trees laid out as on the boards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edge.monitor.pseudofiles import integer, read_text
from edge.monitor.reading import Trips
from edge.monitor.sysfs import OVER_CURRENT_S, REDISCOVER_S, REDISCOVER_SOONEST_S, Sysfs, celsius, zone_name

POWERED_ZONES = {"cpu": 51.687, "gpu": 48.5, "soc0": 50.125, "soc1": 49.0, "soc2": 50.0, "tj": 52.0}
BOARDS = [("agx64", 6), ("nx16", 6), ("nano8", 6), ("agx64", 5), ("nx16", 5), ("nano8", 5)]
# mV times mA, worked out by hand.
RAILS = {
    "agx64": {"VDD_GPU_SOC": 3230, "VDD_CPU_CV": 1520, "VIN_SYS_5V0": 4500, "VDDQ_VDD2_1V8AO": 1100},
    "nx16": {"VDD_IN": 10534, "VDD_CPU_GPU_CV": 3511, "VDD_SOC": 2508},
    "nano8": {"VDD_IN": 8026, "VDD_CPU_GPU_CV": 2257, "VDD_SOC": 2358},
}
TOTALS = {"agx64": 3230 + 1520 + 4500 + 1100, "nx16": 10534, "nano8": 8026}

every_board = pytest.mark.parametrize(("name", "jetpack"), BOARDS)


@every_board
def test_zones_are_those_that_have_power_under_one_name_whatever_jetpack(
    make_orin: Any, name: str, jetpack: int
) -> None:
    orin = make_orin(name, jetpack)

    assert Sysfs(orin.root).read(0).temperatures_c == POWERED_ZONES


@every_board
def test_trips_are_taken_by_type_wherever_they_stand(make_orin: Any, name: str, jetpack: int) -> None:
    orin = make_orin(name, jetpack)

    trips = Sysfs(orin.root).read(0).trips

    # tj has none but those of its fan, and hot, at 70 degrees, throttles nothing.
    assert set(trips) == {"cpu", "gpu", "cv0", "cv1", "cv2", "soc0", "soc1", "soc2"}
    assert set(trips.values()) == {Trips(throttle_c=99.0, shutdown_c=104.5)}


def test_the_lowest_of_several_trips_counts_and_one_that_is_off_does_not(make_orin: Any) -> None:
    orin = make_orin()
    for number, (kind, value) in enumerate([("passive", 95000), ("passive", -274000), ("passive", 0)], 3):
        orin.write(f"sys/class/thermal/thermal_zone8/trip_point_{number}_type", kind)
        orin.write(f"sys/class/thermal/thermal_zone8/trip_point_{number}_temp", value)
    orin.write("sys/class/thermal/thermal_zone8/trip_point_6_type", "passive")
    orin.write("sys/class/thermal/thermal_zone8/trip_point_6_temp", 97000)

    assert Sysfs(orin.root).read(0).trips["tj"] == Trips(throttle_c=95.0, shutdown_c=None)


@every_board
def test_power_is_volts_times_amperes_by_rail(make_orin: Any, name: str, jetpack: int) -> None:
    orin = make_orin(name, jetpack)

    chip = Sysfs(orin.root).read(0)

    assert chip.power_mw == RAILS[name]
    assert chip.total_power_mw == TOTALS[name]


@every_board
def test_gpu_and_fan(make_orin: Any, name: str, jetpack: int) -> None:
    orin = make_orin(name, jetpack)

    chip = Sysfs(orin.root).read(0)

    assert chip.gpu_load_percent == 12.3
    assert chip.gpu_clock_hz == 306_000_000
    assert chip.fan_percent == 20.0


@every_board
def test_dla_cores(make_orin: Any, name: str, jetpack: int) -> None:
    orin = make_orin(name, jetpack)

    expected = {} if name == "nano8" else {"dla0": True, "dla1": False}
    assert Sysfs(orin.root).read(0).dla_active == expected


def test_a_dla_without_power_management_is_absent(make_orin: Any) -> None:
    orin = make_orin("nx16")
    orin.write("sys/devices/platform/bus@0/13e00000.host1x/15880000.nvdla0/power/runtime_status", "unsupported")

    assert Sysfs(orin.root).read(0).dla_active == {"dla1": False}


@every_board
def test_only_alerts_are_throttling(make_orin: Any, name: str, jetpack: int) -> None:
    """The fan runs and the case is hot in every tree."""
    orin = make_orin(name, jetpack)
    sysfs = Sysfs(orin.root)
    assert sysfs.read(0).throttling == ()

    orin.alert("gpu-throttle-alert", 1)
    orin.alert("cpu-throttle-alert", 1)

    assert sysfs.read(1).throttling == ("cpu-throttle-alert", "gpu-throttle-alert")


def test_over_current_counters_are_read_no_more_often_than_they_change(make_orin: Any) -> None:
    orin = make_orin()
    sysfs = Sysfs(orin.root)
    assert sysfs.read(0).over_current_events == {"under_voltage": 0, "average": 0, "instantaneous": 0}

    for number, count in enumerate((3, 5, 7), 1):
        orin.over_current(number, count)

    assert sysfs.read(OVER_CURRENT_S / 2).over_current_events["average"] == 0
    assert sysfs.read(OVER_CURRENT_S).over_current_events == {"under_voltage": 3, "average": 5, "instantaneous": 7}


def test_a_zone_that_loses_its_power_is_absent_until_it_is_back(make_orin: Any) -> None:
    orin = make_orin()
    sysfs = Sysfs(orin.root)
    assert "gpu" in sysfs.read(0).temperatures_c

    orin.switch_off("gpu")
    assert "gpu" not in sysfs.read(1).temperatures_c

    orin.heat("gpu", 71.5)
    assert sysfs.read(2).temperatures_c["gpu"] == 71.5


@pytest.mark.parametrize("text", ["-256000", "", "300000", "-300000", "warm", "5 0", "²", "1_000", "9" * 30, "--5"])
def test_what_is_no_temperature_is_absent(make_orin: Any, text: str) -> None:
    orin = make_orin()
    orin.write("sys/class/thermal/thermal_zone8/temp", text)

    assert "tj" not in Sysfs(orin.root).read(0).temperatures_c


def test_zones_of_the_same_name_are_one_as_hot_as_the_hotter(make_orin: Any) -> None:
    orin = make_orin()
    orin.write("sys/class/thermal/thermal_zone9/type", "CPU-therm")
    orin.write("sys/class/thermal/thermal_zone9/temp", 88000)

    assert Sysfs(orin.root).read(0).temperatures_c["cpu"] == 88.0


def test_a_sensor_that_moves_to_another_number_is_found_again(make_orin: Any) -> None:
    orin = make_orin()
    sysfs = Sysfs(orin.root)
    sysfs.read(0)
    folder = orin.root / "sys/devices/virtual/thermal"
    (folder / "thermal_zone8").rename(folder / "thermal_zone12")
    (orin.root / "sys/class/thermal/thermal_zone8").unlink()
    orin.link("sys/devices/virtual/thermal/thermal_zone12", "sys/class/thermal/thermal_zone12")

    assert "tj" not in sysfs.read(1).temperatures_c
    assert sysfs.read(1 + REDISCOVER_SOONEST_S).temperatures_c["tj"] == 52.0


def test_a_driver_that_comes_late_is_found(make_orin: Any) -> None:
    orin = make_orin("nano8")
    sysfs = Sysfs(orin.root)
    sysfs.read(0)
    orin.write("sys/class/hwmon/hwmon9/name", "ina3221")
    for file, content in {"in1_label": "VDD_LATE", "in1_input": 1000, "curr1_input": 250}.items():
        orin.write(f"sys/class/hwmon/hwmon9/{file}", content)

    assert "VDD_LATE" not in sysfs.read(REDISCOVER_S - 1).power_mw
    assert sysfs.read(REDISCOVER_S).power_mw["VDD_LATE"] == 250


def test_a_machine_without_sensors_gives_a_chip_without_values(tmp_path: Path) -> None:
    chip = Sysfs(tmp_path).read(0)

    assert (chip.temperatures_c, chip.trips, chip.power_mw, chip.dla_active) == ({}, {}, {}, {})
    assert (chip.total_power_mw, chip.gpu_load_percent, chip.fan_percent) == (None, None, None)


@pytest.mark.parametrize(
    "path", ["sys/devices/platform/gpu.0/load", "sys/devices/gpu.0/load", "sys/devices/17000000.ga10b/load"]
)
def test_a_gpu_without_devfreq_still_has_a_load(tmp_path: Path, path: str) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text("1000\n")

    chip = Sysfs(tmp_path).read(0)

    assert (chip.gpu_load_percent, chip.gpu_clock_hz) == (100.0, None)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("cpu-thermal", "cpu"), ("CPU-therm", "cpu"), ("tj-thermal", "tj"), ("Tboard_tegra", "tboard_tegra")],
)
def test_names_of_zones(kind: str, name: str) -> None:
    assert zone_name(kind) == name


@given(st.binary(max_size=200))
@example(b"\xff\xfe")
@example(b"\0")
def test_no_content_of_a_file_is_too_strange(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("strange")
    for path in ("sys/class/thermal/thermal_zone0", "sys/class/hwmon/hwmon0", "sys/class/devfreq/17000000.gpu/device"):
        (folder / path).mkdir(parents=True)
    files = ["thermal/thermal_zone0/temp", "devfreq/17000000.gpu/cur_freq", "devfreq/17000000.gpu/device/load"]
    files += ["hwmon/hwmon0/in1_input", "hwmon/hwmon0/curr1_input", "hwmon/hwmon0/pwm1", "hwmon/hwmon0/in1_label"]
    for file in files:
        (folder / "sys/class" / file).write_bytes(content)
    (folder / "sys/class/thermal/thermal_zone0/type").write_text("tj-thermal")
    (folder / "sys/class/hwmon/hwmon0/name").write_text("ina3221")

    chip = Sysfs(folder).read(0)

    assert all(-60 < value < 200 for value in chip.temperatures_c.values())
    assert chip.gpu_load_percent is None or 0 <= chip.gpu_load_percent <= 100


@given(st.integers(-59999, 199999))
def test_every_temperature_of_a_chip_is_read_to_the_millidegree(millidegrees: int) -> None:
    assert celsius(str(millidegrees)) == millidegrees / 1000


@given(st.text())
def test_a_number_is_one_or_none(text: str) -> None:
    value = integer(text)

    assert value is None or value == int(text)


def test_a_file_that_is_not_there_and_one_that_is_a_folder_are_no_text(tmp_path: Path) -> None:
    assert read_text(str(tmp_path / "nothing")) is None
    assert read_text(str(tmp_path)) is None

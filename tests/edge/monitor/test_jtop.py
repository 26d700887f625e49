"""What is made of jtop's shapes, and the process that asks for them. The real service is in test_jtop_service.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.monitor.companion import command
from edge.monitor.jtop import Sample, decode, sample_of

RAIL = {"avg": 3511, "crit": 4984, "curr": 700, "online": True, "power": 3511, "volt": 5016, "warn": 4984}
# As jetson-stats 7.2.2 and 4.3.2 gave it on a stand-in for an Orin NX.
NX = {
    "uptime": timedelta(seconds=13719, microseconds=180000),
    "nvpmodel": SimpleNamespace(name="MAXN", id=0),
    "jetson_clocks": False,
    "temperature": {"cpu": {"online": True, "temp": 51.687}, "cv0": {"online": False, "temp": -256}},
    "power": {
        "rail": {"VDD_CPU_GPU_CV": RAIL, "VDD_SOC": {**RAIL, "power": 2508}},
        "tot": {**RAIL, "name": "VDD_IN", "power": 10533},
    },
    "gpu": {"gpu": {"freq": {"cur": 306000}, "status": {"load": 12.3, "railgate": True}, "type": "integrated"}},
    "memory": {"RAM": {"shared": 512000, "tot": 16031144}, "SWAP": {}, "EMC": {}},
    "engine": {
        "DLA": {"DLA0_CORE": {"online": True}, "DLA0_FALCON": {"online": False}, "DLA1_CORE": {"online": False}},
        "VIC": {"VIC": {"online": True}},
    },
    "fan": {"pwmfan": {"speed": [34.5], "rpm": [2140]}},
}


def test_a_sample_has_our_units() -> None:
    assert sample_of(SimpleNamespace(**NX)) == Sample(
        uptime_s=13719.18,
        power_mode="MAXN",
        jetson_clocks=False,
        temperatures_c={"cpu": 51.687},
        power_mw={"VDD_CPU_GPU_CV": 3511, "VDD_SOC": 2508, "VDD_IN": 10533},
        total_power_mw=10533,
        gpu_load_percent=12.3,
        gpu_clock_hz=306_000_000,
        gpu_bytes=512000 * 1024,
        dla_active={"dla0": True, "dla1": False},
        fan_percent=34.5,
    )


def test_the_total_of_an_agx_is_no_rail() -> None:
    sample = sample_of(
        SimpleNamespace(**{**NX, "power": {"rail": {"VDD_GPU_SOC": RAIL}, "tot": {"power": 9250, "avg": 9000}}})
    )

    assert (sample.power_mw, sample.total_power_mw) == ({"VDD_GPU_SOC": 3511}, 9250)


def test_dla_cores_are_found_whatever_their_groups_are_called() -> None:
    engine = {"DLA0": {"DLA0_CORE": {"online": False}}, "DLA1": {"DLA1_CORE": {"online": True}}}

    assert sample_of(SimpleNamespace(**{**NX, "engine": engine})).dla_active == {"dla0": False, "dla1": True}


@pytest.mark.parametrize("name", sorted(set(NX) - {"uptime", "nvpmodel", "jetson_clocks"}))
def test_what_the_service_does_not_know_is_absent(name: str) -> None:
    sample = sample_of(SimpleNamespace(**{**NX, name: {}}))

    assert sample.uptime_s == 13719.18
    assert sample != sample_of(SimpleNamespace(**NX))


def test_on_a_machine_that_is_no_jetson_there_is_hardly_anything() -> None:
    nothing = {name: {} for name in NX}

    sample = sample_of(
        SimpleNamespace(**{**nothing, "uptime": timedelta(seconds=1), "nvpmodel": None, "jetson_clocks": None})
    )

    assert sample == Sample(uptime_s=1)


@given(st.binary())
def test_no_line_is_too_strange(line: bytes) -> None:
    assert decode(line) is None


@given(st.floats(0, 1e9), st.dictionaries(st.text(), st.integers(0, 100000)), st.none() | st.booleans())
def test_a_sample_survives_the_pipe(uptime_s: float, power_mw: dict[str, int], clocks: bool | None) -> None:
    sample = Sample(uptime_s=uptime_s, power_mw=power_mw, jetson_clocks=clocks)

    assert decode(msgspec.json.encode(sample)) == sample


CLIENT = """
import datetime, time
class JtopException(Exception):
    pass
class jtop:
    temperature = power = gpu = memory = engine = fan = {}
    nvpmodel = jetson_clocks = None
    def __init__(self, interval):
        self.uptime = datetime.timedelta(seconds=100)
        self.turns = 0
    def __enter__(self):
        START
        return self
    def __exit__(self, *_):
        pass
    def ok(self):
        print("chatter")
        self.uptime += datetime.timedelta(seconds=0.5)
        self.turns += 1
        END
"""


def client(folder: Path, *, start: str = "pass", end: str = "return self.turns < 8") -> dict[str, str]:
    """A module that has the client's interface: environment of a process that imports it."""
    (folder / "jtop.py").write_text(CLIENT.replace("START", start).replace("END", end))
    root = str(Path(__file__).parents[3])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), root])}


def test_each_line_is_a_sample_and_none_comes_more_often_than_asked_for(tmp_path: Path) -> None:
    with subprocess.Popen(
        command(1.0),
        env=client(tmp_path),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        lines, complaints = process.stdout.read().splitlines(), process.stderr.read().splitlines()

    assert [json.loads(line)["uptime_s"] for line in lines] == [100.5, 101.5, 102.5, 103.5]
    assert complaints[-1] == b"the service sends nothing any more"
    assert process.returncode == 1


def test_an_error_of_the_client_is_one_line(tmp_path: Path) -> None:
    text = "Mismatch version jtop service: [7.2.2]\\n and client: [4.3.2]"
    with subprocess.Popen(
        command(1.0),
        env=client(tmp_path, start=f'raise JtopException("{text}")'),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stderr is not None
        complaints = process.stderr.read().splitlines()

    assert complaints == [b"Mismatch version jtop service: [7.2.2] and client: [4.3.2]"]


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"  # it has ended, and nobody has asked yet how


PARENT = """
import sys, time
from pathlib import Path
from edge.events import Events
from edge.monitor.companion import Companion
companion = Companion(Path(sys.argv[1]), period_s=1, events=Events())
companion.poll(0)
print(companion.pid, flush=True)
time.sleep(600)
"""


def test_a_client_that_hangs_ends_with_its_parent_however_that_ends(
    tmp_path: Path, jtop_socket: Any, wait_until: Callable[..., None]
) -> None:
    hung = tmp_path / "hung"
    hangs = f"open({str(hung)!r}, 'w').close(); time.sleep(600)"
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, jtop_socket.root],
        env=client(tmp_path, start=hangs),
        stdout=subprocess.PIPE,
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        wait_until(hung.exists, "the client to hang")

        parent.kill()

        wait_until(lambda: gone(pid), "the client to end")

"""The product's callback classes, called by C++ through the real Python bindings of TensorRT.

No TensorRT, no GPU: the bindings come from PyPI and stand on stub libraries (``tests/standin/dump_api.py``). What this
shows is what no stand-in can: that pybind11 accepts the classes, what reaches C++, and what becomes of exceptions.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
STANDIN = ROOT / "tests" / "standin"
# 10.3.0, of JetPack 6.1 and 6.2, has no wheel for Python 3.13.
VERSIONS = (["10.3.0"] if sys.version_info < (3, 13) else []) + ["10.16.1.11"]


def unavailable(reason: str) -> None:
    """Skip, except in CI, where nobody would notice."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="module", params=VERSIONS)
def driven(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ``tests/standin/drive_real.py`` prints for a version, what it writes to stderr, and the version."""
    for tool in ("gcc", "g++"):
        if shutil.which(tool) is None:
            unavailable(f"{tool} is missing")
    folder = tmp_path_factory.mktemp("bindings")
    path = os.pathsep.join([str(STANDIN), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    script = "import sys, pathlib, dump_api; dump_api.install(sys.argv[1], pathlib.Path(sys.argv[2]))"
    install = [sys.executable, "-c", script, request.param, str(folder)]
    installed = subprocess.run(install, env=environment, capture_output=True, text=True, check=False)
    if installed.returncode:
        unavailable(f"the bindings of {request.param} cannot be installed: {installed.stderr[-300:]}")
    compile_ = ["g++", "-shared", "-fPIC", "-o", str(folder / "libdrive.so"), str(STANDIN / "drive_callbacks.cpp")]
    subprocess.run(compile_, check=True)
    command = [sys.executable, str(STANDIN / "drive_real.py"), str(folder)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert process.returncode == 0, process.stderr
    return {**json.loads(process.stdout), "stderr": process.stderr, "version": request.param}


def test_the_listing_is_still_that_of_the_bindings(driven: dict[str, Any], data: Path) -> None:
    listed = json.loads((data / "tensorrt-api" / f"tensorrt-{driven['version']}.json").read_text())

    # How pybind11 writes types depends on the version of Python; names, kinds and numbers do not.
    assert {name: kinds(entry) for name, entry in driven["api"].items()} == {
        name: kinds(entry) for name, entry in listed.items()
    }


def kinds(entry: dict[str, Any]) -> Any:
    if entry["kind"] != "class":
        return {key: value for key, value in entry.items() if key != "signature"}
    return {name: what if str(what).startswith("property") else "" for name, what in entry["members"].items()}


def test_calibrator_hands_over_pointers_in_tensorrts_order_until_the_pictures_end(driven: dict[str, Any]) -> None:
    found = driven["calibrator"]

    assert (found["algorithm"], found["batch_size"], found["cache"]) == ("ENTROPY_CALIBRATION_2", 1, None)
    assert found["seen"] == [["b", 0.0], ["a", 0.0], ["b", 0.0], ["a", 1.0]]
    base = 0x7000_0000_0000  # beyond 32 bits
    assert found["batches"] == [[base + 0x100, base + 0x200], [base + 0x300, base + 0x400], None]
    assert (found["count"], found["error"]) == (2, None)
    assert found["written"].startswith("TRT-100300-EntropyCalibration2\n")


def test_calibrator_keeps_an_exception_and_ends(driven: dict[str, Any]) -> None:
    found = driven["failing_calibrator"]

    assert found == {"batches": [None, None], "count": 0, "error": "OSError('no room for a')"}
    assert "no room" not in driven["stderr"]  # it never left the callback


def test_calibrator_serves_its_cache(driven: dict[str, Any]) -> None:
    found = driven["cache"]

    assert found == {"cache": "TRT-100300-EntropyCalibration2\nx: 3c010a14\n", "read": True, "error": None}


def test_exceptions_that_leave_a_callback_are_printed_and_lost(driven: dict[str, Any]) -> None:
    """Why the product keeps them itself, and what the stand-in copies."""
    assert driven["raising_calibrator"] == {"raises": None, "arrays": None, "empty": None}
    assert "[ERROR] Exception caught in get_batch(): OSError: the disk has gone" in driven["stderr"]
    assert "[ERROR] Exception caught in get_batch(): Unable to cast Python instance" in driven["stderr"]
    assert driven["raising_monitor"] == {"step": False}  # which ends the build
    for callback in ("phase_start", "step_complete", "phase_finish", "log"):
        assert f"[ERROR] Exception caught in {callback}()" in driven["stderr"]


def test_progress_monitor_tells_phases_and_stops_after_a_signal(driven: dict[str, Any]) -> None:
    found = driven["monitor"]

    assert found["steps"] == [True, False]
    assert [text.split("(")[0] for text in found["told"]] == ["Phase", "Phase", "Step", "Step", "Finished"]


def test_loggers_receive_severities_and_text(driven: dict[str, Any]) -> None:
    found = driven["loggers"]

    assert found["building"] == found["running"] == ["severity 0", "severity 1"]
    assert found["warnings"] == ["severity 2"]

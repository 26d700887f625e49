"""Running a plan in a process of its own, and how it may end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from calibration import measure
from edge.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable

INPUTS = {"images": np.zeros((2, 1, 3, 8, 8), np.float32)}


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a shell script in the place of Python."""

    def use(script: str) -> None:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return use


def run(folder: Path) -> measure.Measured:
    return measure.run(folder / "engine.plan", INPUTS, folder, dla_core=None, iterations=3)


def test_plan_that_is_missing_is_told_in_one_line(standin: Callable[..., Any], tmp_path: Path) -> None:
    standin()

    with pytest.raises(DeviceError, match=r"running the plan failed with exit code 1: .*engine\.plan: no such"):
        run(tmp_path)


def test_process_that_crashes_is_told_by_its_signal(interpreter: Callable[[str], None], tmp_path: Path) -> None:
    interpreter("kill -SEGV $$")

    with pytest.raises(DeviceError, match="running the plan was ended by SIGSEGV: it said nothing"):
        run(tmp_path)


def test_last_line_of_what_it_said_is_told(interpreter: Callable[[str], None], tmp_path: Path) -> None:
    interpreter("echo Traceback >&2; echo ValueError: seven >&2; exit 3")

    with pytest.raises(DeviceError, match="running the plan failed with exit code 3: ValueError: seven"):
        run(tmp_path)


def test_device_that_hangs_is_given_up(
    interpreter: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreter("exec sleep 60")
    monkeypatch.setattr(measure, "TIMEOUT_S", 0.2)

    with pytest.raises(DeviceError, match=r"did not end within 0\.2 s: the device hangs"):
        run(tmp_path)

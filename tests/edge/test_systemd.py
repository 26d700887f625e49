from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

from edge.systemd import notify, watchdog_period_s

if TYPE_CHECKING:
    from pathlib import Path


def test_without_a_service_manager_nothing_is_sent() -> None:
    assert notify("READY=1", environ={}) is False


def test_assignments_arrive_as_the_lines_of_one_datagram(tmp_path: Path) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))

        assert notify("READY=1", "STATUS=two streams", environ={"NOTIFY_SOCKET": str(path)})

        assert manager.recv(1000) == b"READY=1\nSTATUS=two streams"


def test_an_abstract_socket_is_found_by_its_at_sign() -> None:
    name = f"jetson-edge-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{name}")

        assert notify("STOPPING=1", environ={"NOTIFY_SOCKET": f"@{name}"})

        assert manager.recv(1000) == b"STOPPING=1"


def test_a_text_of_several_lines_does_not_become_several_assignments(tmp_path: Path) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))

        notify("STATUS=broken\nREADY=1", environ={"NOTIFY_SOCKET": str(path)})

        assert manager.recv(1000) == b"STATUS=broken READY=1"


def test_a_manager_that_does_not_listen_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told = notify("READY=1", environ={"NOTIFY_SOCKET": str(tmp_path / "nobody")})

    assert told is False
    assert "cannot notify systemd" in caplog.text


def test_the_watchdog_is_fed_twice_as_often_as_the_unit_asks() -> None:
    environ = {"WATCHDOG_USEC": "20000000", "WATCHDOG_PID": "7"}

    assert watchdog_period_s(environ, pid=7) == 10.0
    assert watchdog_period_s({"WATCHDOG_USEC": "20000000"}, pid=7) == 10.0


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"WATCHDOG_USEC": "0"},
        {"WATCHDOG_USEC": "soon"},
        {"WATCHDOG_USEC": "20000000", "WATCHDOG_PID": "8"},  # a child's environment: the parent is the one watched
    ],
)
def test_without_a_watchdog_for_this_process_nothing_is_fed(environ: dict[str, str]) -> None:
    assert watchdog_period_s(environ, pid=7) is None

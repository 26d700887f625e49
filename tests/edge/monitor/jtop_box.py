"""A room of its own for the real jtop service: an Orin's /sys, and nothing that reaches, or stays on, this machine.

Run as root in new mount and process namespaces (see the fixture ``box``). Everything it mounts, writes or starts ends
with it. It obeys lines of JSON, [name, arguments...], and answers each with a line.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import msgspec
from orin import Orin  # beside this file

from edge import config
from edge.events import Events
from edge.monitor.companion import Companion
from edge.monitor.monitor import Monitor

STAGE = Path("/sys/fake")  # on the tmpfs that hides /sys
# Stand in for NVIDIA's tools, which only know their own boards.
NVPMODEL = """#!/bin/sh
case $1 in
-q) echo "NV Power Mode: {mode}"; echo 0 ;;
-p) echo "NVPM VERB: PM_CONFIG: DEFAULT={mode}(0)"; echo "NVPM VERB: POWER_MODEL: ID=0 NAME={mode}" ;;
esac
"""
JETSON_CLOCKS = """#!/bin/sh
[ "$1" = --show ] || exit 0
cat <<END
SOC family:tegra234  Machine:{model}
Online CPUs: 0
cpu0: Online=1 Governor=schedutil MinFreq=729600 MaxFreq=1728000 CurrentFreq=1113600 IdleStates: WFI=1 c7=1
GPU MinFreq=306000000 MaxFreq=918000000 CurrentFreq=306000000
EMC MinFreq=204000000 MaxFreq=3199000000 CurrentFreq=2133000000 FreqOverride=0
NV Power Mode: {mode}
END
"""


def run(*command: str | Path) -> None:
    subprocess.run(command, check=True, stdout=sys.stderr)


def mount_all(board: str) -> Orin:
    """Hide /sys, /run and parts of /proc and /etc, and write the board's files there."""
    run("mount", "-t", "tmpfs", "none", "/sys")
    run("mount", "-t", "tmpfs", "none", "/run")  # the service's socket is always /run/jtop.sock
    orin = Orin(Path("/"), board, proc=STAGE / "proc")
    orin.write_what_jtop_needs()
    for name in ("stat", "meminfo"):
        run("mount", "--bind", orin.proc / name, f"/proc/{name}")
    # The service gives its socket to a group, and keeps settings in a folder beside the interpreter.
    groups = STAGE / "group"
    groups.write_text(Path("/etc/group").read_text() + "jtop:x:64999:\n")
    run("mount", "--bind", groups, "/etc/group")
    overlay(Path(sys.base_prefix), "prefix")
    overlay(Path("/usr/bin"), "bin")
    for name, script in {"nvpmodel": NVPMODEL, "jetson_clocks": JETSON_CLOCKS}.items():
        tool = Path("/usr/bin") / name
        tool.write_text(script.format(mode=orin.board.modes[0], model=orin.board.model))
        tool.chmod(0o755)
    return orin


def overlay(folder: Path, name: str) -> None:
    """What is written into the folder from now on goes nowhere."""
    upper, work = STAGE / name / "upper", STAGE / name / "work"
    upper.mkdir(parents=True)
    work.mkdir()
    run("mount", "-t", "overlay", "-o", f"lowerdir={folder},upperdir={upper},workdir={work}", "none", folder)


class Room:
    """What can be asked for."""

    def __init__(self, orin: Orin) -> None:
        self._orin = orin
        self._events = Events()
        self._monitor = Monitor(config.Monitor(period_s=0.5), events=self._events)
        self._companion = Companion(Path("/"), period_s=0.5, events=Events())
        self._service: subprocess.Popen[bytes] | None = None

    def read(self) -> dict[str, object]:
        return asdict(self._monitor.read())

    def sample(self) -> object:
        """What the service itself says, without our readings in between."""
        return msgspec.to_builtins(self._companion.poll(time.monotonic()))

    def events(self) -> list[str]:
        return [event.kind for event in self._events.recent]

    def heat(self, zone: str, celsius: float) -> None:
        self._orin.heat(zone, celsius)

    def start(self) -> None:
        """Start the service, as its unit does."""
        with (STAGE / "service.log").open("ab") as log:
            self._service = subprocess.Popen(
                [sys.executable, "-m", "jtop", "--force"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "JTOP_SERVICE": "True"},
                start_new_session=True,
            )

    def signal(self, name: str) -> None:
        """Signal the service and all its processes, as systemd does."""
        assert self._service is not None
        os.killpg(self._service.pid, getattr(signal, name))

    def wait(self) -> int:
        assert self._service is not None
        return self._service.wait(30)

    def log(self) -> str:
        return (STAGE / "service.log").read_text()

    def clients(self) -> list[str]:
        """Ids of the processes that talk to the service."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_text().split("\0")
            except OSError:  # has ended meanwhile
                continue
            if "edge.monitor.jtop" in words:
                found.append(folder.name)
        return found

    def close(self) -> None:
        """End the monitor."""
        self._monitor.__exit__(None, None, None)


def main() -> None:
    def answer(value: object) -> None:
        sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()

    room = Room(mount_all(sys.argv[1]))
    answer("ready")
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        answer(getattr(room, name)(*arguments))


if __name__ == "__main__":
    main()

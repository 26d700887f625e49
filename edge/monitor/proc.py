"""Memory by its files: /proc/meminfo, memory pressure, what this process and its children hold, and the cgroup's limit.

On a Jetson, CPU and GPU share the memory, and CUDA cannot use swap: what counts is MemAvailable. In a container, or a
unit with ``MemoryMax=``, less may be left than the machine has.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge.errors import DeviceError
from edge.monitor.pseudofiles import integer, read_text
from edge.monitor.reading import Memory, Pressure

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = ["Proc", "parse_keyed", "parse_pressure"]

CHILDREN_S = 5.0
"""How long the list of child processes is used before it is made anew."""
SCAN_S = 30.0
"""The same on kernels that do not list them, where every process of the machine has to be looked at."""
CGROUP_S = 60.0
"""How long the list of cgroups with a limit is used."""


def parse_keyed(text: str) -> dict[str, int]:
    """Numbers by name from lines such as ``MemTotal:  7789952 kB`` or ``inactive_file 4096``; kB become bytes."""
    found = {}
    for line in text.splitlines():
        words = line.split()
        value = integer(words[1]) if len(words) > 1 else None
        if value is not None and value >= 0:
            found[words[0].removesuffix(":")] = value * 1024 if words[2:] == ["kB"] else value
    return found


def parse_pressure(text: str) -> Pressure | None:
    """Of /proc/pressure/memory: ``some avg10=0.00 avg60=... `` and ``full avg10=...``."""
    shares = {}
    for line in text.splitlines():
        kind, _, rest = line.partition(" avg10=")
        try:
            share = float(rest.partition(" ")[0])
        except ValueError:
            continue
        if 0 <= share <= 100:
            shares[kind] = share
    if "some" not in shares or "full" not in shares:
        return None
    return Pressure(some_avg10_percent=shares["some"], full_avg10_percent=shares["full"])


@dataclass(frozen=True, slots=True)
class _Group:
    """A cgroup that may not use all of the machine's memory."""

    limit: str
    """Paths."""
    current: str
    stat: str


class Proc:
    """Reads the memory. One thread at a time."""

    def __init__(self, root: Path) -> None:
        self._proc = str(root / "proc")
        self._cgroups = str(root / "sys/fs/cgroup")
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._children: Sequence[str] = ()
        self._children_until_s: float | None = None
        self._groups: Sequence[_Group] = ()
        self._groups_until_s: float | None = None

    def read(self, now_s: float) -> Memory:
        """How the memory stands. ``now_s`` is a monotonic clock's.

        Raises:
            DeviceError: /proc/meminfo, which everything rests on, cannot be read.
        """
        path = f"{self._proc}/meminfo"
        info = parse_keyed(read_text(path) or "")
        try:
            total, available = info["MemTotal"], info["MemAvailable"]
        except KeyError as error:
            raise DeviceError(
                f"{path}: has no {error.args[0]}; if a unit file hides it, take ProcSubset=pid out"
            ) from error
        for limit, left in self._limits(now_s):
            total, available = min(total, limit), min(available, left)
        swap_total = info.get("SwapTotal", 0)
        pressure = read_text(f"{self._proc}/pressure/memory")
        return Memory(
            total_bytes=total,
            available_bytes=max(available, 0),
            swap_total_bytes=swap_total,
            swap_used_bytes=max(swap_total - info.get("SwapFree", swap_total), 0),
            rss_bytes=sum(self._rss(pid) for pid in ("self", *self._descendants(now_s))),
            gpu_bytes=info.get("NvMapMemUsed"),
            pressure=None if pressure is None else parse_pressure(pressure),
        )

    def _rss(self, pid: str) -> int:
        """Bytes in memory, those shared with other processes included; 0 of a process that has ended."""
        words = (read_text(f"{self._proc}/{pid}/statm") or "").split()
        return (integer(words[1]) or 0) * self._page_bytes if len(words) > 1 else 0

    def _descendants(self, now_s: float) -> Sequence[str]:
        """Ids of the children and their children."""
        if self._children_until_s is None or now_s >= self._children_until_s:
            if os.path.exists(f"{self._proc}/self/task/{os.getpid()}/children"):  # noqa: PTH110 - no Path is needed
                self._children, self._children_until_s = self._listed("self"), now_s + CHILDREN_S
            else:  # a kernel without CONFIG_PROC_CHILDREN
                self._children, self._children_until_s = self._scanned(), now_s + SCAN_S
        return self._children

    def _listed(self, pid: str) -> list[str]:
        """From the kernel's lists: each thread has one, of the children that it started."""
        try:
            threads = os.listdir(f"{self._proc}/{pid}/task")  # noqa: PTH208 - as above
        except OSError:
            return []
        found: list[str] = []
        for thread in threads:
            for child in (read_text(f"{self._proc}/{pid}/task/{thread}/children") or "").split():
                found += [child, *self._listed(child)]
        return found

    def _scanned(self) -> list[str]:
        """From every process's own word on who its parent is."""
        children: dict[str, list[str]] = {}
        for pid in filter(str.isdigit, os.listdir(self._proc)):  # noqa: PTH208 - as above
            # The name, in brackets, may hold spaces and brackets: pid (name) state parent ...
            words = (read_text(f"{self._proc}/{pid}/stat") or "").rpartition(")")[2].split()
            if len(words) > 1:
                children.setdefault(words[1], []).append(pid)
        found = list(children.get(str(os.getpid()), ()))
        for pid in found:  # grows while it is walked
            found += children.get(pid, ())
        return found

    def _limits(self, now_s: float) -> Iterator[tuple[int, int]]:
        """Limit of each cgroup that has one, and what is left of it, in bytes."""
        if self._groups_until_s is None or now_s >= self._groups_until_s:
            self._groups, self._groups_until_s = list(self._limited_groups()), now_s + CGROUP_S
        for group in self._groups:
            limit, current = integer(read_text(group.limit)), integer(read_text(group.current))
            if limit is not None and current is not None:
                # Files that were read once and not again since are given up before anybody is killed.
                reclaimable = parse_keyed(read_text(group.stat) or "").get("inactive_file", 0)
                yield limit, limit - current + reclaimable

    def _limited_groups(self) -> Iterator[_Group]:
        """This process's cgroup and those above it, as far as they limit memory; the root of the tree has no limit."""
        own = _own_cgroup(read_text(f"{self._proc}/self/cgroup") or "")
        while own is not None:
            folder = f"{self._cgroups}{own}".rstrip("/")
            group = _Group(f"{folder}/memory.max", f"{folder}/memory.current", f"{folder}/memory.stat")
            if integer(read_text(group.limit)) is not None:  # else it is the word "max"
                yield group
            own = None if own in ("", "/") else own.rpartition("/")[0]


def _own_cgroup(text: str) -> str | None:
    """Path of the process's cgroup of version 2, such as /system.slice/edge.service, from /proc/self/cgroup."""
    for line in text.splitlines():
        if line.startswith("0::/"):
            return line.removeprefix("0::")
    return None

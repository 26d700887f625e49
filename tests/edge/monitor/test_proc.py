"""Memory: of the machine, of the process, and what a container leaves of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.errors import DeviceError
from edge.monitor.proc import CGROUP_S, CHILDREN_S, SCAN_S, Proc, parse_keyed, parse_pressure
from edge.monitor.reading import Pressure

KIB, MIB = 1024, 1 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(("name", "total_kib"), [("agx64", 64349808), ("nx16", 16031144), ("nano8", 7789952)])
def test_memory_of_each_board(make_orin: Any, name: str, total_kib: int) -> None:
    orin = make_orin(name)
    orin.available(3000)

    memory = Proc(orin.root).read(0)

    assert memory.total_bytes == total_kib * KIB
    assert memory.available_bytes == 3000 * MIB
    assert memory.swap_total_bytes == total_kib // 2 * KIB
    assert memory.swap_used_bytes == 1000 * KIB
    assert memory.gpu_bytes == 512000 * KIB
    assert memory.pressure == Pressure(some_avg10_percent=1.5, full_avg10_percent=0.25)
    assert memory.rss_bytes == 5000 * PAGE


def test_kernels_without_psi_and_without_nvmap(make_orin: Any) -> None:
    orin = make_orin()
    (orin.root / "proc/pressure/memory").unlink()
    orin.write("proc/meminfo", "MemTotal: 1000 kB\nMemAvailable: 400 kB")

    memory = Proc(orin.root).read(0)

    assert (memory.pressure, memory.gpu_bytes) == (None, None)
    assert (memory.total_bytes, memory.available_bytes) == (1000 * KIB, 400 * KIB)
    assert (memory.swap_total_bytes, memory.swap_used_bytes) == (0, 0)


def test_a_hidden_meminfo_is_one_line_that_says_what_to_do(make_orin: Any) -> None:
    orin = make_orin()
    (orin.root / "proc/meminfo").unlink()

    with pytest.raises(DeviceError, match=r"proc/meminfo: has no MemTotal; .* take ProcSubset=pid out"):
        Proc(orin.root).read(0)


def limit(orin: Any, path: str, most: object, current: int = 0, inactive_file: int = 0) -> None:
    orin.write(f"sys/fs/cgroup{path}/memory.max", most)
    orin.write(f"sys/fs/cgroup{path}/memory.current", current)
    orin.write(f"sys/fs/cgroup{path}/memory.stat", f"anon 1\ninactive_file {inactive_file}\nactive_file 2")


def test_a_unit_with_a_limit_has_what_is_left_of_it(make_orin: Any) -> None:
    orin = make_orin()
    orin.available(9000)
    orin.write("proc/self/cgroup", "1:name=systemd:/x\n0::/system.slice/edge.service")
    limit(orin, "/system.slice/edge.service", 2000 * MIB, 1500 * MIB, 100 * MIB)

    memory = Proc(orin.root).read(0)

    assert memory.total_bytes == 2000 * MIB
    assert memory.available_bytes == (2000 - 1500 + 100) * MIB


@pytest.mark.parametrize(("slice_mib", "available_mib"), [(800, 100), (4000, 600)])
def test_of_several_limits_the_tightest_counts(make_orin: Any, slice_mib: int, available_mib: int) -> None:
    orin = make_orin()
    orin.available(9000)
    orin.write("proc/self/cgroup", "0::/system.slice/edge.service")
    limit(orin, "/system.slice/edge.service", 1200 * MIB, 600 * MIB)
    limit(orin, "/system.slice", slice_mib * MIB, 700 * MIB)

    assert Proc(orin.root).read(0).available_bytes == available_mib * MIB


def test_a_container_sees_its_limit_at_the_root_of_its_own_tree(make_orin: Any) -> None:
    orin = make_orin()
    orin.write("proc/self/cgroup", "0::/")
    limit(orin, "", 1024 * MIB, 24 * MIB)

    assert Proc(orin.root).read(0).available_bytes == 1000 * MIB


def test_no_limit_is_none_and_one_that_comes_later_is_found(make_orin: Any) -> None:
    orin = make_orin()
    orin.available(9000)
    orin.write("proc/self/cgroup", "0::/edge")
    limit(orin, "/edge", "max", 100 * MIB)
    proc = Proc(orin.root)
    assert proc.read(0).available_bytes == 9000 * MIB

    limit(orin, "/edge", 300 * MIB, 100 * MIB)

    assert proc.read(CGROUP_S).available_bytes == 200 * MIB


def test_a_process_over_its_limit_has_nothing_left(make_orin: Any) -> None:
    orin = make_orin()
    orin.write("proc/self/cgroup", "0::/edge")
    limit(orin, "/edge", 100 * MIB, 101 * MIB)

    assert Proc(orin.root).read(0).available_bytes == 0


def test_the_tightest_limit_is_kept_while_there_is_more_memory_than_it(make_orin: Any) -> None:
    orin = make_orin()
    orin.available(50)
    orin.write("proc/self/cgroup", "0::/edge")
    limit(orin, "/edge", 100 * MIB, 10 * MIB)

    assert Proc(orin.root).read(0).available_bytes == 50 * MIB


def statm(orin: Any, pid: int, pages: int) -> None:
    orin.write(f"proc/{pid}/statm", f"{pages * 4} {pages} 100 1 0 1 0")


def test_children_of_any_thread_and_their_children_count(make_orin: Any) -> None:
    orin = make_orin()
    me = os.getpid()
    orin.write(f"proc/self/task/{me}/children", "901 ")
    orin.write("proc/self/task/777/children", "902 903 ")
    orin.write("proc/902/task/902/children", "904 ")
    for pid in (901, 902, 903, 904, 905):
        statm(orin, pid, pid)

    assert Proc(orin.root).read(0).rss_bytes == (5000 + 901 + 902 + 903 + 904) * PAGE


def test_where_the_kernel_lists_no_children_they_are_looked_for(make_orin: Any) -> None:
    orin = make_orin()
    me = os.getpid()
    for pid, parent, name in [(901, me, "gst (x) y"), (902, 901, "sh"), (903, 1, "other"), (904, me, "python3")]:
        orin.write(f"proc/{pid}/stat", f"{pid} ({name}) S {parent} 1 1 0 -1")
        statm(orin, pid, pid)

    assert Proc(orin.root).read(0).rss_bytes == (5000 + 901 + 902 + 904) * PAGE


def test_a_real_child_counts_until_it_ends(wait_until: Callable[..., None]) -> None:
    proc = Proc(Path("/"))
    at_s = 0.0

    def rss() -> int:
        nonlocal at_s
        at_s += max(CHILDREN_S, SCAN_S)
        return proc.read(at_s).rss_bytes

    alone = rss()
    child = subprocess.Popen(
        [sys.executable, "-c", "x = b'x' * (300 << 20); print('big', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with child:
        assert child.stdout is not None
        child.stdout.readline()
        wait_until(lambda: rss() - alone > 280 * MIB, "the child to count")
        child.communicate(b"\n")
    wait_until(lambda: rss() - alone < 100 * MIB, "the child to count no more")


@given(st.text())
def test_no_meminfo_is_too_strange(text: str) -> None:
    assert all(value >= 0 for value in parse_keyed(text).values())


@given(st.text())
def test_no_pressure_is_too_strange(text: str) -> None:
    assert parse_pressure(text) is None


@given(st.floats(0, 100), st.floats(0, 100))
def test_pressure_is_read_as_it_is_written(some: float, full: float) -> None:
    text = f"some avg10={some:.2f} avg60=0.00 avg300=0.00 total=1\nfull avg10={full:.2f} avg60=0.00 avg300=0.00 total=1"

    assert parse_pressure(text) == Pressure(float(f"{some:.2f}"), float(f"{full:.2f}"))

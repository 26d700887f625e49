"""The files of /sys and /proc that an Orin has, written into a folder: own stand-ins, laid out as on the boards.

Nothing here was measured. The layout is the one that drivers, device trees and logs of users show: JetPack 6 (L4T R36)
and JetPack 5 (R35) differ in the names of zones and in where the GPU, the DLA and the power monitor are.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

# chip's address, channel, label, mV, mA
Rail = tuple[str, int, str, int, int]

_AGX_RAILS: tuple[Rail, ...] = (
    ("1-0040", 1, "VDD_GPU_SOC", 19000, 170),
    ("1-0040", 2, "VDD_CPU_CV", 19000, 80),
    ("1-0040", 3, "VIN_SYS_5V0", 5000, 900),
    ("1-0041", 1, "NC", 0, 0),
    ("1-0041", 2, "VDDQ_VDD2_1V8AO", 5000, 220),
    ("1-0041", 3, "NC", 0, 0),
)


def _small_rails(total_ma: int, compute_ma: int, soc_ma: int) -> tuple[Rail, ...]:
    return (
        ("1-0040", 1, "VDD_IN", 5016, total_ma),
        ("1-0040", 2, "VDD_CPU_GPU_CV", 5016, compute_ma),
        ("1-0040", 3, "VDD_SOC", 5016, soc_ma),
    )


@dataclass(frozen=True)
class Board:
    """What tells one board from another."""

    model: str
    memory_kib: int
    cpus: int
    dla_cores: int
    gpu_max_hz: int
    rails: tuple[Rail, ...]
    modes: tuple[str, ...]


BOARDS = {
    "agx64": Board(
        "NVIDIA Jetson AGX Orin Developer Kit",
        64349808,
        12,
        2,
        1300500000,
        _AGX_RAILS,
        ("MAXN", "MODE_15W", "MODE_30W", "MODE_50W"),
    ),
    "nx16": Board(
        "NVIDIA Jetson Orin NX Engineering Reference Developer Kit",
        16031144,
        8,
        2,
        918000000,
        _small_rails(2100, 700, 500),
        ("MAXN", "10W", "15W", "25W"),
    ),
    "nano8": Board(
        "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super",
        7789952,
        6,
        0,
        1020000000,
        _small_rails(1600, 450, 470),
        ("15W", "25W", "MAXN_SUPER"),
    ),
}

# By zone: milli degrees, None for a block without power, whose sensor answers EAGAIN: an empty file stands in for it.
ZONES = {
    "cpu": 51687,
    "gpu": 48500,
    "cv0": None,
    "cv1": None,
    "cv2": None,
    "soc0": 50125,
    "soc1": 49000,
    "soc2": 50000,
    "tj": 52000,
}
ALERTS = ("cpu", "gpu", "cv0", "cv1", "cv2", "soc0", "soc1", "soc2")


class Orin:
    """A board's files under a folder, and what may happen to them."""

    def __init__(self, root: Path, name: str, jetpack: int = 6, *, proc: Path | None = None) -> None:
        """Write all of them.

        Args:
            root: under which sys is, and proc, if not given.
            name: of the board.
            jetpack: 5 or 6.
            proc: where the files of /proc go.
        """
        self.board = BOARDS[name]
        self.root = root
        self.proc = proc or root / "proc"
        self._sys = root / "sys"
        self._jetpack = jetpack
        self._zones: dict[str, Path] = {}
        self._alerts: dict[str, Path] = {}
        self._write_zones()
        self._write_coolers()
        self._write_gpu()
        self._write_dla()
        self._write_hwmon()
        self._write_proc()

    def write(self, path: str, content: object, *, end: str = "\n") -> Path:
        """Write a file; ``path`` starts with sys or proc."""
        file = self.proc / path.removeprefix("proc/") if path.startswith("proc/") else self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}{end}")
        return file

    def heat(self, zone: str, celsius: float) -> None:
        """Let a zone be so hot."""
        self.write(f"{self._zones[zone]}/temp", round(celsius * 1000))

    def switch_off(self, zone: str) -> None:
        """Take the power from a zone's sensor."""
        self.write(f"{self._zones[zone]}/temp", "", end="")

    def alert(self, name: str, state: int) -> None:
        """Let a cooling device say that the chip is throttled (1), or not (0)."""
        self.write(f"{self._alerts[name]}/cur_state", state)

    def over_current(self, number: int, count: int) -> None:
        """Let oc1, oc2 or oc3 have counted so many."""
        self.write(f"sys/devices/platform/soctherm-oc-event/hwmon/hwmon4/oc{number}_event_cnt", count)

    def available(self, mib: int) -> None:
        """Let so much memory be available."""
        self.write("proc/meminfo", self.meminfo(mib * 1024), end="")

    def meminfo(self, available_kib: int) -> str:
        """Text of /proc/meminfo."""
        total = self.board.memory_kib
        rows = {
            "MemTotal": total,
            "MemFree": total // 3,
            "MemAvailable": available_kib,
            "Buffers": 120000,
            "Cached": total // 4,
            "SwapCached": 0,
            "Shmem": 30000,
            "Slab": 200000,
            "SReclaimable": 110000,
            "SwapTotal": total // 2,
            "SwapFree": total // 2 - 1000,
            "NvMapMemFree": 0,
            "NvMapMemUsed": 512000,
            "CmaTotal": 262144,
            "CmaFree": 200000,
        }
        return "".join(f"{name + ':':<16}{kib:>8} kB\n" for name, kib in rows.items()) + "HugePages_Total:       0\n"

    def link(self, target: str, link: str) -> None:
        """Link as the kernel does: relatively."""
        path = self.root / link
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_symlink():
            path.symlink_to(os.path.relpath(self.root / target, path.parent))

    def _write_zones(self) -> None:
        zones = ZONES if self._jetpack == 6 else dict(reversed(ZONES.items()))
        for number, (name, temperature) in enumerate(zones.items()):
            folder = f"sys/devices/virtual/thermal/thermal_zone{number}"
            self._zones[name] = Path(folder)
            jetpack5 = f"{name if name == 'tj' else name.upper()}-therm"
            self.write(f"{folder}/type", f"{name}-thermal" if self._jetpack == 6 else jetpack5)
            self.write(f"{folder}/temp", "" if temperature is None else temperature)
            self.write(f"{folder}/mode", "enabled")
            self.write(f"{folder}/policy", "step_wise")
            # The order differs from kernel to kernel, and hot comes between.
            points = [("critical", 104500), ("hot", 70000), ("passive", 99000)]
            if name == "tj":
                points = [("active", 85000), ("active", 105000)]
            for point, (kind, trip) in enumerate(points):
                self.write(f"{folder}/trip_point_{point}_type", kind)
                self.write(f"{folder}/trip_point_{point}_temp", trip)
                self.write(f"{folder}/trip_point_{point}_hyst", 4000)
            self.link(folder, f"sys/class/thermal/thermal_zone{number}")

    def _write_coolers(self) -> None:
        coolers = [("pwm-fan", 3, 2), ("cpufreq-cpu0", 19, 0), ("devfreq-17000000.gpu", 10, 0)]
        coolers += [(f"{name}-throttle-alert", 1, 0) for name in ALERTS]
        coolers += [("hot-surface-alert", 1, 1)]
        for number, (kind, most, state) in enumerate(coolers):
            folder = f"sys/devices/virtual/thermal/cooling_device{number}"
            self._alerts[kind] = Path(folder)
            self.write(f"{folder}/type", kind)
            self.write(f"{folder}/max_state", most)
            self.write(f"{folder}/cur_state", state)
            self.link(folder, f"sys/class/thermal/cooling_device{number}")

    def _write_gpu(self) -> None:
        device, name = ("sys/devices/platform/bus@0/17000000.gpu", "17000000.gpu")
        if self._jetpack == 5:
            device, name = ("sys/devices/17000000.ga10b", "17000000.ga10b")
        self.gpu = device
        folder = f"{device}/devfreq/{name}"
        self.write(f"{folder}/cur_freq", 306000000)
        self.write(f"{folder}/min_freq", 306000000)
        self.write(f"{folder}/max_freq", self.board.gpu_max_hz)
        self.write(f"{folder}/governor", "nvhost_podgov")
        self.write(f"{device}/load", 123)
        self.write(f"{device}/railgate_enable", 1)
        self.write(f"{device}/power/runtime_status", "active")
        self.write(f"{device}/of_node/name", name.rpartition(".")[2], end="\0")
        self.link(device, f"{folder}/device")
        self.link(folder, f"sys/class/devfreq/{name}")
        # Another device with a clock, which is not the GPU.
        self.write("sys/class/devfreq/15340000.vic/cur_freq", 115200000)
        self.write("sys/class/devfreq/15340000.vic/device/load", 999)

    def _write_dla(self) -> None:
        host = "bus@0/13e00000.host1x" if self._jetpack == 6 else "host1x"
        for core, address in enumerate(("15880000", "158c0000")[: self.board.dla_cores]):
            folder = f"sys/devices/platform/{host}/{address}.nvdla{core}"
            self.write(f"{folder}/power/runtime_status", "suspended" if core else "active")

    def _write_hwmon(self) -> None:
        bus = "bus@0/c240000.i2c" if self._jetpack == 6 else "c240000.i2c"
        i2c = f"sys/devices/platform/{bus}/i2c-1"
        chips = sorted({address for address, *_ in self.board.rails})
        monitors = [
            ("sys/devices/platform/pwm-fan", "pwmfan"),
            ("sys/devices/platform/bus@0/39c0000.tachometer", "pwm_tach"),
            *((f"{i2c}/{address}", "ina3221") for address in chips),
        ]
        for number, (device, name) in enumerate(monitors):
            self._write_monitor(device, number, name)
        self._write_monitor("sys/devices/platform/soctherm-oc-event", 4, "soctherm_oc")
        self.write("sys/devices/platform/pwm-fan/hwmon/hwmon0/pwm1", 51)
        self.write("sys/devices/platform/bus@0/39c0000.tachometer/hwmon/hwmon1/rpm", 2140)
        for number, address in enumerate(chips, 2):
            folder = f"{i2c}/{address}/hwmon/hwmon{number}"
            self.write(f"{i2c}/{address}/name", "ina3221")
            self.link(f"{i2c}/{address}", f"sys/bus/i2c/devices/{address}")
            self.write(f"{folder}/in7_label", "sum of shunt voltages")
            self.write(f"{folder}/in7_input", 3)
            self.write(f"{folder}/curr7_input", 3)
            for chip, channel, label, millivolts, milliamperes in self.board.rails:
                if chip == address:
                    self.write(f"{folder}/in{channel}_label", label)
                    self.write(f"{folder}/in{channel}_input", millivolts)
                    self.write(f"{folder}/curr{channel}_input", milliamperes)
                    for limit in ("max", "crit"):
                        self.write(f"{folder}/curr{channel}_{limit}", 4984)
                        self.write(f"{folder}/curr{channel}_{limit}_alarm", 0)
        for number in (1, 2, 3):
            self.over_current(number, 0)
            self.write(f"sys/devices/platform/soctherm-oc-event/hwmon/hwmon4/oc{number}_throt_en", 1)

    def _write_monitor(self, device: str, number: int, name: str) -> None:
        self.write(f"{device}/hwmon/hwmon{number}/name", name)
        self.link(f"{device}/hwmon/hwmon{number}", f"sys/class/hwmon/hwmon{number}")

    def _write_proc(self) -> None:
        self.available(self.board.memory_kib * 6 // 10 // 1024)
        self.write(
            "proc/pressure/memory",
            "some avg10=1.50 avg60=0.20 avg300=0.00 total=12345\nfull avg10=0.25 avg60=0.00 avg300=0.00 total=345",
        )
        self.write("proc/device-tree/model", self.board.model, end="\0")
        self.write("proc/self/statm", "30000 5000 2000 1 0 4000 0")

    def write_what_jtop_needs(self) -> None:
        """What its service reads besides: CPU, memory clock, engines; without any of it the service gives up."""
        cpus = self.board.cpus
        for number in range(cpus):
            folder = f"sys/devices/system/cpu/cpu{number}"
            self.write(f"{folder}/online", 1)
            self.write(f"{folder}/cpufreq/scaling_governor", "schedutil")
            for name, khz in {"min": 729600, "max": 1728000, "cur": 1113600}.items():
                self.write(f"{folder}/cpufreq/scaling_{name}_freq", khz)
                self.write(f"{folder}/cpufreq/cpuinfo_{name}_freq", khz)
        for name in ("online", "possible", "present"):
            self.write(f"sys/devices/system/cpu/{name}", f"0-{cpus - 1}")
        for name, value in {"tpc_pg_mask": 0, "enable_3d_scaling": 1, "power/control": "auto"}.items():
            self.write(f"{self.gpu}/{name}", value)
        for name, hz in {"rate": 2133000000, "max_rate": 3199000000, "min_rate": 204000000}.items():
            self.write(f"sys/kernel/debug/bpmp/debug/clk/emc/{name}", hz)
        self.write("sys/kernel/debug/bpmp/debug/clk/emc/mrq_rate_locked", 3199000000)
        self.write("sys/kernel/debug/cactmon/mc_all", 640000)
        self.write("sys/kernel/nvpmodel_clk_cap/emc", 3199000000)
        engines = ["vic", "nvenc", "nvdec", *(f"dla{core}_core" for core in range(self.board.dla_cores))]
        for engine in engines:
            for name, value in {
                "clk_enable_count": 0,
                "clk_rate": 0,
                "clk_max_rate": 1600000000,
                "clk_min_rate": 0,
            }.items():
                self.write(f"sys/kernel/debug/clk/{engine}/{name}", value)
        (self.root / "sys/class/power_supply").mkdir(parents=True, exist_ok=True)
        self.write("sys/devices/virtual/dmi/id/product_name", "stand-in")
        counts = [f"cpu{number} 10 0 10 100 0 0 0 0 0 0" for number in range(cpus)]
        rest = ["intr 0", "ctxt 0", "btime 1", "processes 1", "procs_running 1", "procs_blocked 0"]
        self.write("proc/stat", "\n".join(["cpu  100 0 100 1000 0 0 0 0 0 0", *counts, *rest]))

"""What jtop's service says: asks jetson-stats' client, in a process of its own, and prints a line for each sample.

The only module that imports jtop, and it does so only as ``python -m edge.monitor.jtop PERIOD_S``. The client needs
the distance: it can block for ever, cannot connect twice from one thread, and sets ``fork`` as the start method of
multiprocessing, which does not go with CUDA. ``edge.monitor.companion`` starts it, listens, and ends it.

jetson-stats is licensed under the AGPL, so it is neither required nor imported by the daemon's own process.
"""

from __future__ import annotations

import math
import os
import re
import sys
import threading
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["Sample", "decode", "main", "sample_of"]

_DLA_CLOCK = re.compile(r"DLA(\d)")


class Sample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sample of the service; the fields mean what they mean in ``Reading``, and what it does not know is absent."""

    uptime_s: float
    """The device's, by the service: the only sign that a sample is new."""
    power_mode: str | None = None
    jetson_clocks: bool | None = None
    temperatures_c: dict[str, float] = {}
    power_mw: dict[str, int] = {}
    total_power_mw: int | None = None
    gpu_load_percent: float | None = None
    gpu_clock_hz: int | None = None
    gpu_bytes: int | None = None
    dla_active: dict[str, bool] = {}
    fan_percent: float | None = None


def decode(line: bytes) -> Sample | None:
    """The sample of a printed line; None if it is none, as of a process that was killed amid it."""
    try:
        return msgspec.json.decode(line, type=Sample)
    except msgspec.DecodeError:
        return None


def sample_of(client: Any) -> Sample:
    """What a connected ``jtop.jtop`` holds now: shapes of jetson-stats 4.2 to 7.2, of which any part may be missing."""
    power = _part(lambda: client.power)
    rails = {name: rail["power"] for name, rail in _items(power.get("rail")) if "power" in rail}
    total = _mapping(power.get("tot"))
    if "name" in total and "power" in total:  # jtop takes the input's rail away from the others
        rails[total["name"]] = total["power"]
    gpu = next((part for _, part in _items(_part(lambda: client.gpu))), {})
    load = _mapping(gpu.get("status")).get("load")
    clock_khz = _mapping(gpu.get("freq")).get("cur")
    shared_kib = _mapping(_part(lambda: client.memory).get("RAM")).get("shared")
    fan = next((part for _, part in _items(_part(lambda: client.fan))), {})
    speeds = fan.get("speed") or [None]
    return Sample(
        uptime_s=client.uptime.total_seconds(),
        power_mode=None if client.nvpmodel is None else str(client.nvpmodel.name),
        jetson_clocks=None if client.jetson_clocks is None else bool(client.jetson_clocks),
        temperatures_c={
            name: float(zone["temp"])
            for name, zone in _items(_part(lambda: client.temperature))
            if zone.get("online") and "temp" in zone  # -256 stands for none
        },
        power_mw={name: int(power_mw) for name, power_mw in rails.items()},
        total_power_mw=_whole(total.get("power")),
        gpu_load_percent=None if load is None else float(load),
        gpu_clock_hz=None if clock_khz is None else int(clock_khz) * 1000,
        gpu_bytes=None if shared_kib is None else int(shared_kib) * 1024,
        dla_active=_dla(_part(lambda: client.engine)),
        fan_percent=None if speeds[0] is None else float(speeds[0]),
    )


def _part(get: Callable[[], Any]) -> Mapping[str, Any]:
    """A property of the client, or nothing: services and clients of different versions lack some."""
    try:
        return _mapping(get())
    except (AttributeError, KeyError):
        return {}


def _mapping(value: Any) -> Mapping[str, Any]:
    """The value as a mapping: jtop has its own classes, which only look like one."""
    return value if hasattr(value, "get") and hasattr(value, "items") else {}


def _items(value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Pairs whose second is a mapping."""
    for name, part in _mapping(value).items():
        if isinstance(part, dict):
            yield str(name), part


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)


def _dla(engines: Mapping[str, Any]) -> dict[str, bool]:
    """Whether a clock of each DLA core runs. The groups' names differ from start to start; the members' do not."""
    found: dict[str, bool] = {}
    for _, group in _items(engines):
        for name, engine in _items(group):
            match = _DLA_CLOCK.match(name)
            if match is not None:
                core = f"dla{match[1]}"
                found[core] = found.get(core, False) or bool(engine.get("online"))
    return found


def main(period_s: float) -> int:
    """Print samples until the service or the parent is gone.

    Returns:
        Exit code: 0 where the parent has gone, else 1, with the reason on stderr.
    """
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    # None of the client's output may get between the samples.
    samples = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    from jtop import JtopException, jtop

    try:
        with jtop(period_s) as client:
            told_s = -math.inf
            while client.ok():
                sample = sample_of(client)
                # Another client may have set the service to a shorter period.
                if sample.uptime_s - told_s > 0.9 * period_s:
                    samples.write(msgspec.json.encode(sample) + b"\n")
                    told_s = sample.uptime_s
        reason = "the service sends nothing any more"
    except BrokenPipeError:
        return 0
    except JtopException as error:
        reason = " ".join(str(error).split())
    print(reason, file=sys.stderr)  # noqa: T201 - to the parent
    return 1


def _end_with_parent() -> None:
    """End when the other end of stdin is closed, as the kernel does however the parent ends."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(0)  # the main thread may be blocked for ever in the client


if __name__ == "__main__":
    code = main(float(sys.argv[1]))
    sys.stdout.flush()
    # Not sys.exit: it would wait for the client's threads, which may be blocked.
    os._exit(code)

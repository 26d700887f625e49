"""What goes wrong in a soak, for how long, in which order, and by what the daemon must say that it noticed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from benchmarks.soak_site import CAMERA, STEADY

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Mapping

    from benchmarks.soak_keeper import Keeper
    from benchmarks.soak_site import Site

__all__ = ["CAMERA_FAULTS", "FAULTS", "Fault", "rounds"]

Wait: TypeAlias = "Callable[[float], None]"
"""Passes so many seconds, or raises to end the soak."""

_STEP_S = 0.5
_HOUR_NS = 3600 * 1_000_000_000
_LEAK_MB_PER_S = 8.0
_LEAK_WARM_UP_S = 130.0
"""The governor takes two minutes of a process's growth for warming up."""
_LEAK_DEADLINE_S = 300.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault."""

    name: str
    run: Callable[[Site, Keeper, Wait, float], None]
    """Does it and undoes it. Arguments: what to break, the daemon, how to wait, and for how many seconds it lasts."""
    lasts_s: tuple[float, float] = (0.0, 0.0)
    """Shortest and longest."""
    events: frozenset[str] = field(default_factory=frozenset)
    """Kinds of events by which the daemon must say that it noticed."""
    streams: frozenset[str] = STEADY
    """That must give results again afterwards."""
    ends_life: bool = False
    long: bool = False
    """Takes minutes: not in a soak of one round."""
    every: int = 1
    """In one of so many rounds."""


def _ramp(wait: Wait, last_s: float, step: Callable[[float], None]) -> None:
    """Go from 0 to 1 in last_s seconds."""
    began_s = time.monotonic()
    while (passed_s := time.monotonic() - began_s) < last_s:
        step(passed_s / last_s)
        wait(_STEP_S)
    step(1.0)


def _heat(site: Site, _keeper: Keeper, wait: Wait, last_s: float) -> None:
    try:
        _ramp(wait, last_s / 2, site.heat)
        wait(last_s / 2)
    finally:
        _ramp(wait, last_s / 4, lambda share: site.heat(1 - share))


def _memory(site: Site, _keeper: Keeper, wait: Wait, last_s: float) -> None:
    try:
        _ramp(wait, last_s / 2, site.take_memory)
        wait(last_s / 2)
    finally:
        site.give_memory()


def _leak(site: Site, keeper: Keeper, wait: Wait, _last_s: float) -> None:
    life = keeper.life
    while keeper.age_s < _LEAK_WARM_UP_S:
        wait(_STEP_S)
    began_s = time.monotonic()
    try:
        while keeper.life == life and time.monotonic() - began_s < _LEAK_DEADLINE_S:
            site.leak(_LEAK_MB_PER_S * (time.monotonic() - began_s))
            wait(_STEP_S)
    finally:
        site.give_memory()
    ended = keeper.await_end(life)
    if ended.end != "restart":
        raise AssertionError(f"a leak ended life {life} as '{ended.end}', not with a clean restart")


def _reload(site: Site, keeper: Keeper, _wait: Wait, _last_s: float) -> None:
    site.deploy()
    keeper.reload()


def _reload_broken(site: Site, keeper: Keeper, wait: Wait, last_s: float) -> None:
    site.deploy_broken()
    try:
        keeper.reload()
        wait(last_s)
    finally:
        site.deploy()  # what a restart would read


def _broker_freeze(site: Site, _keeper: Keeper, wait: Wait, last_s: float) -> None:
    site.broker.freeze()
    try:
        wait(last_s)
    finally:
        site.broker.thaw()


def _broker_kill(site: Site, _keeper: Keeper, wait: Wait, last_s: float) -> None:
    site.broker.kill()
    try:
        wait(last_s)
    finally:
        site.broker.start()


def _daemon_kill(_site: Site, keeper: Keeper, _wait: Wait, _last_s: float) -> None:
    keeper.kill()


def _daemon_kill_with_backlog(site: Site, keeper: Keeper, wait: Wait, last_s: float) -> None:
    """Kill the daemon while it holds results that nobody has taken: only now its outbox matters."""
    site.broker.freeze()
    try:
        wait(last_s)
        keeper.kill()
    finally:
        site.broker.thaw()


def _engine_hang(site: Site, keeper: Keeper, _wait: Wait, _last_s: float) -> None:
    life = keeper.life
    site.control.hanging_life = life
    ended = keeper.await_end(life)
    if ended.end != "hung":
        raise AssertionError(f"a hung engine ended life {life} as '{ended.end}', not with 79")


def _disk_full(site: Site, _keeper: Keeper, wait: Wait, last_s: float) -> None:
    assert site.disk is not None, "left out without one"
    site.disk.fill()
    site.broker.freeze()  # or nothing would have to be written
    try:
        wait(last_s)
    finally:
        site.disk.free()
        site.broker.thaw()


def _clock_ahead(site: Site, _keeper: Keeper, wait: Wait, last_s: float) -> None:
    site.control.utc_offset_ns += _HOUR_NS
    wait(last_s)


def _clock_back(site: Site, _keeper: Keeper, wait: Wait, last_s: float) -> None:
    site.control.utc_offset_ns -= _HOUR_NS
    wait(last_s)


def _camera_gone(site: Site, _keeper: Keeper, wait: Wait, last_s: float) -> None:
    site.camera.kill()
    try:
        wait(last_s)
    finally:
        site.camera.start()


def _camera_stalls(site: Site, _keeper: Keeper, wait: Wait, last_s: float) -> None:
    site.camera.stall()
    try:
        wait(last_s)
    finally:
        site.camera.go_on()


def _camera_freezes(site: Site, _keeper: Keeper, wait: Wait, last_s: float) -> None:
    site.camera.freeze()
    try:
        wait(last_s)
    finally:
        site.camera.go_on()


FAULTS = (
    Fault("SIGHUP, sound file", _reload, events=frozenset({"reload_done"})),
    Fault("SIGHUP, broken file", _reload_broken, (1.0, 2.0), events=frozenset({"reload_failed"})),
    Fault("clock an hour ahead", _clock_ahead, (1.0, 3.0)),
    Fault("clock an hour back", _clock_back, (1.0, 3.0)),
    Fault("broker frozen", _broker_freeze, (2.0, 8.0)),
    Fault("broker killed", _broker_kill, (0.5, 4.0)),
    Fault("disk full, broker frozen", _disk_full, (2.0, 4.0)),
    Fault("daemon killed", _daemon_kill, events=frozenset({"started"}), ends_life=True),
    Fault(
        "daemon killed, broker frozen",
        _daemon_kill_with_backlog,
        (1.5, 4.0),
        events=frozenset({"started"}),
        ends_life=True,
    ),
    Fault("engine hangs", _engine_hang, events=frozenset({"engine_hung", "started"}), ends_life=True),
    Fault("heat", _heat, (6.0, 12.0), events=frozenset({"rate_limited"}), every=3),
    Fault("memory short", _memory, (3.0, 6.0), events=frozenset({"memory_low", "memory_recovered"}), every=5),
    Fault("leak", _leak, events=frozenset({"leak_suspected", "started"}), ends_life=True, long=True),
)
"""One at a time."""

_LOST = frozenset({"camera_lost", "camera_opened"})
CAMERA_FAULTS = (
    Fault("camera gone", _camera_gone, (2.0, 6.0), events=_LOST, streams=frozenset({CAMERA})),
    Fault("camera stalls", _camera_stalls, (3.0, 6.0), events=_LOST, streams=frozenset({CAMERA})),
    Fault("camera freezes", _camera_freezes, (4.0, 8.0), events=_LOST, streams=frozenset({CAMERA})),
)
"""One at a time as well, and all the while beside the others."""


def rounds(
    faults: tuple[Fault, ...], rng: random.Random, *, count: int, left_out: Mapping[str, str]
) -> Iterator[list[tuple[Fault, float]]]:
    """The order of a soak: ``count`` rounds, each in an order of its own, each fault with how long it lasts.

    What ends the daemon's process comes in the first round and the last, so that between them one process lives through
    everything else: only a long life can show that memory does not grow. What takes minutes ends that life.

    Args:
        faults: to choose from.
        rng: the only source of chance.
        count: at least 1.
        left_out: faults that cannot be had here, by name.
    """
    able = [fault for fault in faults if fault.name not in left_out]
    for number in range(count):
        at_the_ends = number in {0, count - 1}
        chosen = [
            fault
            for fault in able
            if not fault.long and (at_the_ends or not fault.ends_life) and number % fault.every == 0
        ]
        rng.shuffle(chosen)
        if number == count - 1 and count > 1:
            # The longest life is over when this begins.
            chosen = [fault for fault in able if fault.long] + chosen
        yield [(fault, rng.uniform(*fault.lasts_s)) for fault in chosen]

"""Does the daemon keep its promises while everything around it breaks? Drives it through faults, and closes the books.

A real mosquitto with persistence, the real daemon as its own process, a subscriber with a durable session, and faults
in an order that the seed decides: cameras that vanish, stall and freeze; heat; memory that runs short; a leak (in soaks
of five minutes and more); SIGHUP with a sound and with a broken file; a broker that freezes or is killed; a daemon that
is killed; an engine that hangs; a full disk; a clock that jumps. Each fault is undone, the daemon has to say that it
noticed, and results have to flow again before the next one; cameras break beside all that in a row of their own.

At the end every frame and every result is accounted for (benchmarks/soak_books.py says how, and what that can prove).
Exit code 0 only if the books balance, every fault was noticed and overcome, and memory stayed flat.

Needs mosquitto and util-linux (unshare); without root, a kernel that lets users have mount namespaces.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import machine
from benchmarks.rig import Broker, Subscriber, poll
from benchmarks.soak_books import balance, parse_ledger, repairs
from benchmarks.soak_driver import Control, Job
from benchmarks.soak_faults import CAMERA_FAULTS, FAULTS, rounds
from benchmarks.soak_keeper import Keeper
from benchmarks.soak_report import BOUNDS, Occurrence, Outcome, document, judge, memory_of, report
from benchmarks.soak_site import DEVICE, STREAMS, Disk, Site, load_by_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from benchmarks.soak_books import Inferred
    from benchmarks.soak_faults import Fault

ROOT = Path(__file__).parents[1]

ROUND_S = 60.0
_LAST_ROUND_S = 150.0
_SEVERAL_ROUNDS_FROM_S = 300.0
_RECOVERY_DEADLINE_S = 90.0
_FEW_WAIT = 5
_MARK = "EDGE_SOAK_OWN_MOUNTS"


def main() -> None:
    """Soak, print the tables, and exit with 1 unless everything held."""
    parser = machine.arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="at least one round (default: 60)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the order of faults (default: 0)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave logs, ledger and files in this new folder")
    options = parser.parse_args()
    _unshare_mounts()
    with ExitStack() as stack:
        if options.keep is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="edge-soak-")))
        else:
            folder = options.keep.absolute()
            folder.mkdir(parents=True)
        outcome = soak(folder, seconds=options.seconds, seed=options.seed)
    report(outcome)
    if options.json is not None:
        options.json.write_text(json.dumps(document(outcome), indent=2) + "\n")
    sys.exit(1 if outcome.problems else 0)


def soak(folder: Path, *, seconds: float, seed: int) -> Outcome:
    """Run a soak in a folder of its own."""
    rng = random.Random(seed)  # noqa: S311 - no secret
    left_out: dict[str, str] = {}
    ledger_path = folder / "ledger"
    ledger_path.touch()
    with ExitStack() as stack:
        control = stack.enter_context(Control(folder / "control"))
        (folder / "broker").mkdir()
        broker = stack.enter_context(Broker(folder / "broker", durable=True))
        disk = stack.enter_context(_disk(folder, left_out))
        camera = stack.enter_context(load_by_path(ROOT / "tests/rtsp_server.py").RtspServer(fps=10.0))
        site = Site(folder, broker, control, disk=disk, camera=camera)
        subscriber = stack.enter_context(Subscriber(broker.port, f"edge/{DEVICE}/#"))
        broker.save()  # the session must outlive the first kill
        job = Job(str(site.deployment), str(folder / "device"), str(ledger_path), str(control.path), 0)
        with Keeper(folder, job, site.status_port) as keeper:
            runner = Run(site, keeper, subscriber, rng)
            runner.go(seconds, left_out)
        _catch_up(subscriber, ledger_path)
        lives, samples = keeper.lives, keeper.samples
    ledger = parse_ledger(ledger_path.read_text())
    kills_s = [one.began_s for one in runner.occurrences if one.name == "broker killed"]
    books = balance(ledger, subscriber.results, lives, kills_s, BOUNDS)
    occurrences = sorted(runner.occurrences, key=lambda one: one.began_s)
    _repair_times(occurrences, ledger, subscriber)
    memory = memory_of(samples)
    outcome = Outcome(
        seconds=time.monotonic() - runner.began_s,
        seed=seed,
        balance=books,
        occurrences=occurrences,
        events=Counter(kind for kind, _ in subscriber.events),
        memory=memory,
        left_out=left_out,
    )
    outcome.problems = [*books.problems, *judge(occurrences, memory)]
    if subscriber.sessions_lost:
        outcome.problems.append(f"the broker forgot the subscriber {subscriber.sessions_lost} times: the rig's fault")
    outcome.problems += [f"a message cannot be read: {text}" for text in subscriber.unreadable]
    return outcome


class Run:
    """The faults, one after the other, and the cameras' beside them."""

    def __init__(self, site: Site, keeper: Keeper, subscriber: Subscriber, rng: random.Random) -> None:
        self.occurrences: list[Occurrence] = []
        self.began_s = time.monotonic()
        self._site = site
        self._keeper = keeper
        self._subscriber = subscriber
        self._rng = rng
        self._over = threading.Event()
        self._error: BaseException | None = None

    def go(self, seconds: float, left_out: dict[str, str]) -> None:
        """Go through all rounds, and stay until the time is up."""
        count = 1 if seconds < _SEVERAL_ROUNDS_FROM_S else int(seconds // ROUND_S)
        spacing_s = (seconds - _LAST_ROUND_S) / (count - 1) if count > 1 else 0.0
        if count == 1:
            left_out |= {fault.name: f"needs {_SEVERAL_ROUNDS_FROM_S:.0f} s" for fault in FAULTS if fault.long}
        self._await_results(STREAMS, since_s=self.began_s)
        cameras = threading.Thread(target=self._break_cameras, args=(random.Random(self._rng.random()),))  # noqa: S311
        cameras.start()
        try:
            for number, one in enumerate(rounds(FAULTS, self._rng, count=count, left_out=left_out)):
                self._until(self.began_s + number * spacing_s)
                for fault, lasts_s in one:
                    self._meet(fault, lasts_s, self._wait)
                    self._wait(self._rng.uniform(0.5, 1.5))
            self._until(self.began_s + seconds)
        finally:
            self._over.set()
            cameras.join()
        if self._error is not None:
            raise self._error

    def _break_cameras(self, rng: random.Random) -> None:
        """Each kind of camera fault in turn, in a new order each time; at least once round."""
        try:
            once = False
            while not (once and self._over.is_set()):
                for fault in rng.sample(CAMERA_FAULTS, len(CAMERA_FAULTS)):
                    if once and self._over.wait(rng.uniform(1.0, 5.0)):
                        return
                    self._meet(fault, rng.uniform(*fault.lasts_s), time.sleep)
                once = True
        except BaseException as error:  # noqa: BLE001 - raised again by go()
            self._error = error

    def _meet(self, fault: Fault, lasts_s: float, wait: Callable[[float], None]) -> None:
        """Have a fault happen, and wait until it is overcome."""
        print(f"{time.monotonic() - self.began_s:7.1f} s  {fault.name}", file=sys.stderr, flush=True)
        began_s = time.monotonic()
        fault.run(self._site, self._keeper, wait, lasts_s)
        ended_s = time.monotonic()
        if fault.ends_life:
            # Ended by itself or killed: the rig starts the next one at once.
            ended_s = self._keeper.lives[-1].ended_s
        occurrence = Occurrence(fault.name, began_s, ended_s, fault.streams)
        self.occurrences.append(occurrence)
        with contextlib.suppress(TimeoutError):
            poll(lambda: fault.events <= self._seen(began_s), "its events", deadline_s=_RECOVERY_DEADLINE_S)
        occurrence.unseen = fault.events - self._seen(began_s)
        self._await_results(fault.streams, since_s=ended_s)
        # A backlog would make the next fault's losses look like this one's.
        with contextlib.suppress(TimeoutError):
            poll(lambda: self._keeper.pending < _FEW_WAIT, "the outbox", deadline_s=_RECOVERY_DEADLINE_S)

    def _seen(self, since_s: float) -> set[str]:
        return {kind for kind, arrived_s in list(self._subscriber.events) if arrived_s >= since_s}

    def _await_results(self, streams: frozenset[str], *, since_s: float) -> None:
        def flows() -> bool:
            self._keeper.check()
            return streams <= self._subscriber.first_after(since_s).keys()

        with contextlib.suppress(TimeoutError):  # told at the end, with the name of the fault
            poll(flows, "results", deadline_s=_RECOVERY_DEADLINE_S)

    def _until(self, moment_s: float) -> None:
        self._wait(moment_s - time.monotonic())

    def _wait(self, seconds: float) -> None:
        """Pass the time; a rig that broke ends the soak."""
        ends_s = time.monotonic() + seconds
        while True:
            self._keeper.check()
            if self._error is not None:
                raise self._error
            left_s = ends_s - time.monotonic()
            if left_s <= 0:
                return
            time.sleep(min(left_s, 0.1))


@contextmanager
def _disk(folder: Path, left_out: dict[str, str]) -> Iterator[Disk | None]:
    """A disk that can be full, or a word on why there is none."""
    if os.environ.get(_MARK) != "1":
        left_out["disk full, broker frozen"] = "no mount namespace can be had here"
        yield None
        return
    with Disk(folder / "disk") as disk:
        yield disk


def _unshare_mounts() -> None:
    """Go on in a mount namespace of our own, so that nothing stays mounted whatever happens to us."""
    if _MARK in os.environ:
        return
    os.environ[_MARK] = "0"
    program = shutil.which("unshare")
    rights = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    if program is None:
        return
    command = [program, *rights, "--mount"]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:  # noqa: S603 - a trial
        return
    os.environ[_MARK] = "1"
    os.execv(program, [*command, sys.executable, "-m", "benchmarks.soak", *sys.argv[1:]])  # noqa: S606 - ourselves


def _catch_up(subscriber: Subscriber, ledger_path: Path) -> None:
    """Wait until everything has arrived, or nothing has come for a while."""
    expected = ledger_path.read_text().count("\n")
    idle_s = 5.0
    while len({one.id for one in list(subscriber.results)}) < expected:
        before = len(subscriber.results)
        time.sleep(idle_s)
        if len(subscriber.results) == before:
            return


def _repair_times(occurrences: Sequence[Occurrence], ledger: Sequence[Inferred], subscriber: Subscriber) -> None:
    found = repairs(ledger, subscriber.results, [(one.ended_s, one.streams) for one in occurrences])
    for one, repaired_s in zip(occurrences, found, strict=True):
        one.repaired_s = repaired_s


if __name__ == "__main__":
    main()

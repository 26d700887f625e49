"""The books of a soak: every frame and every result, from three witnesses that do not know each other. Pure.

The witnesses:

ledger
    ``benchmarks.soak_driver`` wraps the pipeline and notes every result as it leaves it, before the daemon's own code
    has it, with one write() to a file. That survives a kill -9 of the process, so the ledger is complete to the last
    result of every life. The daemon neither writes nor reads it.
subscriber
    What arrived, in order, at a client of the broker with a durable session.
counters
    What the daemon says of itself: the summary of a life that ended in order, or the last status page of one that was
    killed.

A result is known in both the ledger and the subscriber's list by stream, frame number and moment of capture. So:

- results: each in the ledger arrived, was counted as dropped, waits in the outbox at the end, or is one that a kill may
  cost. Which may it cost? Of the daemon, those made within ``daemon_bound_s`` before its kill, since the outbox writes
  every 250 ms (docs/mqtt.md). Of the broker, those made within ``broker_bound_s`` before its kill, since mosquitto
  acknowledges what it has in memory only. Both are counted apart; anything else that is missing fails the books. An
  arrival that the ledger does not have fails them too.
- repetitions: QoS 1 allows them. After removal by id none may be left: the same result under two ids fails the books.
- order: the first arrivals of each stream come in the order in which the ledger has them.
- frames: of a life that ended in order, captured = inferred + failed + dropped by reason, and inferred is what the
  ledger has. A life that was killed says nothing at its end: of it, the ledger proves the inferred frames, the
  numbers of the frames between them how many were not (``skipped``: dropped or failed), and the last status page how
  the daemon explained them up to then.

What this cannot prove: why a frame of a killed life after its last status page was not inferred, and that a result
which a broker lost had been acknowledged by it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from benchmarks.rig import Heard

__all__ = ["Balance", "Bounds", "Counts", "Frames", "Inferred", "Life", "balance", "parse_ledger", "repairs"]

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_SHOWN = 5
# A stream has one frame in its mailbox, and one or two with the engine.
_MOST_WAITING = 12

Key: TypeAlias = tuple[str, int, int]
"""Stream, frame number, and moment of capture in microseconds UTC: frame numbers begin anew with each process."""


class Inferred(NamedTuple):
    """A line of the ledger: one result."""

    life: int
    """Which process: 1, 2, ..."""
    stream: str
    frame_id: int
    captured_utc_us: int
    at_s: float
    """time.monotonic() when the pipeline gave it."""

    @property
    def key(self) -> Key:
        """What it is known by."""
        return self.stream, self.frame_id, self.captured_utc_us

    def line(self) -> bytes:
        """As it stands in the ledger."""
        return f"{self.life} {self.stream} {self.frame_id} {self.captured_utc_us} {self.at_s!r}\n".encode()


def parse_ledger(text: str) -> list[Inferred]:
    """Read what ``Inferred.line`` wrote.

    Raises:
        ValueError: a line is not of that form.
    """
    found: list[Inferred] = []
    for line in text.splitlines():
        life, stream, frame_id, captured_utc_us, at_s = line.split(" ")
        found.append(Inferred(int(life), stream, int(frame_id), int(captured_utc_us), float(at_s)))
    return found


@dataclass(frozen=True, slots=True)
class Counts:
    """What the daemon says of itself."""

    captured: int = 0
    inferred: int = 0
    failed: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    """By reason."""
    waiting: int = 0
    """Captured, and neither inferred nor dropped yet. Of a summary: 0."""
    published: int = 0
    results_dropped: int = 0
    results_left: int = 0

    def trouble(self) -> str | None:
        """What does not add up, if anything."""
        if not 0 <= self.waiting <= _MOST_WAITING:
            return f"{self.waiting} frames wait, where each stream can have only a few"
        accounted = self.inferred + self.failed + sum(self.dropped.values()) + self.waiting
        if self.captured == accounted:
            return None
        return (
            f"captured {self.captured}, but inferred {self.inferred} + failed {self.failed} + dropped"
            f" {sum(self.dropped.values())} + waiting {self.waiting} = {accounted}"
        )


@dataclass(frozen=True, slots=True)
class Life:
    """One process of the daemon, from its start to its end."""

    number: int
    end: Literal["stopped", "restart", "hung", "killed", "failed"]
    """stopped: SIGTERM, 0. restart: of its own will, 75. hung: 79. killed: by us. failed: in any other way."""
    ended_s: float
    summary: Counts | None = None
    """What it said at its end."""
    last: Counts | None = None
    """Its last status page."""

    @property
    def counts(self) -> Counts | None:
        """The best that is known."""
        return self.summary or self.last


class Bounds(NamedTuple):
    """How old a result may be at a kill that costs it, in seconds."""

    daemon_s: float
    broker_s: float


@dataclass(frozen=True, slots=True)
class Frames:
    """The frames of one life."""

    life: Life
    inferred: int
    """By the ledger."""
    skipped: int
    """Numbers missing between those in the ledger: frames that were dropped or failed."""
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Balance:
    """The books, closed."""

    inferred: int
    """Results in the ledger."""
    received: int
    """Of them, those that arrived."""
    repeats: int
    """Arrivals of an id that had arrived before: QoS 1 allows them."""
    lost_to_kill: int
    """Missing, and made so shortly before a kill of the daemon that it may have cost them."""
    oldest_lost_s: float
    """Age of the oldest of those at the kill; 0 if there are none."""
    lost_to_broker: int
    """The same for the broker's kills."""
    dropped: int
    """Counted as dropped by the daemon."""
    left: int
    """In the outbox at the end."""
    frames: tuple[Frames, ...]
    problems: tuple[str, ...]
    """Why the books do not balance; empty if they do."""


def balance(
    ledger: Sequence[Inferred],
    heard: Iterable[Heard],
    lives: Sequence[Life],
    broker_kills_s: Sequence[float],
    bounds: Bounds,
) -> Balance:
    """Close the books.

    Args:
        ledger: in the order in which it was written.
        heard: in the order of arrival, repetitions included.
        lives: of the daemon, in order.
        broker_kills_s: moments, by time.monotonic().
        bounds: what a kill may cost.
    """
    problems: list[str] = []
    known = {entry.key: place for place, entry in enumerate(ledger)}
    if len(known) < len(ledger):
        problems.append(f"the ledger has {len(ledger) - len(known)} results twice")
    arrivals, repeats, found = _distinct(heard)
    problems += found
    problems += _strangers(arrivals, known)
    problems += _disorder(arrivals, known, ledger)

    missing = [entry for entry in ledger if entry.key not in arrivals]
    killed = {life.number: life.ended_s for life in lives if life.end == "killed"}
    to_kill: list[float] = []
    to_broker = 0
    rest: list[Inferred] = []
    for entry in missing:
        age_s = killed.get(entry.life, float("inf")) - entry.at_s
        if age_s <= bounds.daemon_s:
            to_kill.append(age_s)
        elif any(0 <= kill_s - entry.at_s <= bounds.broker_s for kill_s in broker_kills_s):
            to_broker += 1
        else:
            rest.append(entry)
    dropped = sum(life.counts.results_dropped for life in lives if life.counts is not None)
    left = lives[-1].counts.results_left if lives and lives[-1].counts is not None else 0
    if len(rest) > dropped + left:
        examples = ", ".join(f"{entry.stream} {entry.frame_id} of life {entry.life}" for entry in rest[:_SHOWN])
        problems.append(
            f"{len(rest)} results are missing, of which {dropped} were counted as dropped and {left} wait:"
            f" {examples}{' ...' if len(rest) > _SHOWN else ''}"
        )
    frames = tuple(_frames(life, [entry for entry in ledger if entry.life == life.number]) for life in lives)
    problems += [f"life {one.life.number}: {text}" for one in frames for text in one.problems]
    return Balance(
        inferred=len(known),
        received=len(known) - len(missing),
        repeats=repeats,
        lost_to_kill=len(to_kill),
        oldest_lost_s=max(to_kill, default=0.0),
        lost_to_broker=to_broker,
        dropped=dropped,
        left=left,
        frames=frames,
        problems=tuple(problems),
    )


def repairs(
    ledger: Sequence[Inferred], heard: Iterable[Heard], faults: Iterable[tuple[float, Iterable[str]]]
) -> list[float | None]:
    """How long each fault was felt after its end: until a result made after it had arrived of every stream it concerns.

    What waited during the fault and arrives afterwards does not count, since it says nothing of the present.

    Args:
        ledger: in the order in which it was written.
        heard: in the order of arrival.
        faults: the end of each, by time.monotonic(), and the streams that it concerns.

    Returns:
        Seconds; None where a stream stayed silent.
    """
    arrived_s: dict[Key, float] = {}
    for one in heard:
        arrived_s.setdefault((one.stream, one.frame_id, _utc_us(one.captured_at)), one.arrived_s)
    made: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for entry in ledger:
        if entry.key in arrived_s:
            made[entry.stream].append((entry.at_s, arrived_s[entry.key]))
    found: list[float | None] = []
    for ended_s, streams in faults:
        firsts: list[float] = []
        for stream in streams:
            place = bisect_right(made[stream], (ended_s, float("inf")))
            firsts.append(min((arrival_s for _, arrival_s in made[stream][place:]), default=float("inf")))
        last_s = max(firsts, default=ended_s)
        found.append(None if last_s == float("inf") else max(0.0, last_s - ended_s))
    return found


def _distinct(heard: Iterable[Heard]) -> tuple[dict[Key, str], int, list[str]]:
    """First arrivals: id by key, in order; how many arrivals repeat an id; and what is wrong with the ids."""
    arrivals: dict[Key, str] = {}
    ids: dict[str, Key] = {}
    repeats = doubles = shared = 0
    for one in heard:
        key = (one.stream, one.frame_id, _utc_us(one.captured_at))
        if one.id in ids:
            repeats += 1
            shared += ids[one.id] != key
            continue
        ids[one.id] = key
        doubles += key in arrivals
        arrivals.setdefault(key, one.id)
    problems: list[str] = []
    if doubles:
        problems.append(f"{doubles} results arrived again under another id")
    if shared:
        problems.append(f"{shared} arrivals have the id of another result")
    return arrivals, repeats, problems


def _strangers(arrivals: Iterable[Key], known: Mapping[Key, int]) -> list[str]:
    strange = [key for key in arrivals if key not in known]
    if not strange:
        return []
    return [f"{len(strange)} results arrived that no pipeline gave, such as {strange[0][0]} {strange[0][1]}"]


def _disorder(arrivals: Iterable[Key], known: Mapping[Key, int], ledger: Sequence[Inferred]) -> list[str]:
    """Streams whose first arrivals are not in the ledger's order."""
    newest: dict[str, int] = {}
    late: dict[str, list[Inferred]] = defaultdict(list)
    for key in arrivals:
        place = known.get(key)
        if place is None:
            continue
        if place < newest.get(key[0], -1):
            late[key[0]].append(ledger[place])
        else:
            newest[key[0]] = place
    return [
        f"stream {stream}: {len(entries)} results arrived after younger ones, such as frame {entries[0].frame_id} of"
        f" life {entries[0].life}"
        for stream, entries in sorted(late.items())
    ]


def _frames(life: Life, entries: Sequence[Inferred]) -> Frames:
    last: dict[str, int] = {}
    problems: list[str] = []
    for entry in entries:
        if entry.frame_id <= last.get(entry.stream, -1):
            problems.append(f"stream {entry.stream}: frame {entry.frame_id} after frame {last[entry.stream]}")
        last[entry.stream] = entry.frame_id
    numbered = sum(frame_id + 1 for frame_id in last.values())
    problems += _contradictions(life, inferred=len(entries), numbered=numbered)
    if life.end == "failed":
        problems.append("ended in a way that nobody meant")
    return Frames(life, len(entries), numbered - len(entries), tuple(problems))


def _contradictions(life: Life, *, inferred: int, numbered: int) -> list[str]:
    """Where a life's counters contradict themselves or the ledger, which has frames numbered up to ``numbered``."""
    problems: list[str] = []
    for name, counts in (("summary", life.summary), ("last status", life.last)):
        trouble = counts.trouble() if counts is not None else None
        if trouble is not None:
            problems.append(f"{name}: {trouble}")
    if life.summary is not None:
        for what, count in (("inferred", life.summary.inferred), ("published", life.summary.published)):
            if count != inferred:
                problems.append(f"says that it {what} {count}; the ledger has {inferred}")
        if life.summary.captured < numbered:
            problems.append(f"says that it captured {life.summary.captured}; frames are numbered up to {numbered}")
    elif life.last is not None and life.last.inferred > inferred:
        problems.append(f"said that it inferred {life.last.inferred}; the ledger has {inferred}")
    return problems


def _utc_us(text: str) -> int:
    """Microseconds since the epoch of an RFC 3339 text in UTC."""
    moment = datetime.fromisoformat(text.removesuffix("Z") + "+00:00")
    return (moment - _EPOCH) // timedelta(microseconds=1)

"""What a soak found: the verdict, the tables and the JSON. Pure but for printing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks import machine, trend
from benchmarks.soak_books import Bounds
from benchmarks.soak_faults import CAMERA_FAULTS, FAULTS

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

    from benchmarks.soak_books import Balance
    from benchmarks.soak_keeper import Sample

__all__ = ["BOUNDS", "Occurrence", "Outcome", "document", "judge", "memory_of", "report"]

# The outbox writes every 250 ms (docs/mqtt.md); the rest is for a write that has begun, on a machine that is busy.
# mosquitto saves every second, and looks whether it is time about once a second.
BOUNDS = Bounds(daemon_s=0.25 + 0.5, broker_s=2.5)
_FLAT_MB = 8.0
"""Growth over the longest life that is no leak: arenas of the allocator, a model that was swapped, FFmpeg reopened."""
_FLAT_AFTER_S = 30.0
_LEAST_FOR_FLAT_S = 60.0


@dataclass(slots=True)
class Occurrence:
    """One fault that happened."""

    name: str
    began_s: float
    ended_s: float
    streams: frozenset[str]
    unseen: frozenset[str] = frozenset()
    """Events that did not come."""
    repaired_s: float | None = None
    """From its end until new results had arrived of all its streams."""


@dataclass(slots=True)
class Outcome:
    """Everything that the soak found."""

    seconds: float
    seed: int
    balance: Balance
    occurrences: list[Occurrence]
    events: Counter[str]
    memory: list[dict[str, Any]]
    left_out: dict[str, str]
    problems: list[str] = field(default_factory=list)


def memory_of(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """How the resident memory of each life went, after it had begun to work."""
    found: list[dict[str, Any]] = []
    for life in sorted({sample.life for sample in samples}):
        own = [sample for sample in samples if sample.life == life]
        later = [sample for sample in own if sample.at_s >= own[0].at_s + _FLAT_AFTER_S]
        line = trend.fit([sample.at_s for sample in later], [sample.rss_mb for sample in later])
        span_s = later[-1].at_s - later[0].at_s if later else 0.0
        found.append(
            {
                "life": life,
                "seconds": round(own[-1].at_s - own[0].at_s, 1),
                "rss_mb": round(own[-1].rss_mb, 1),
                "most_mb": round(max(sample.rss_mb for sample in own), 1),
                "grown_mb": None if line is None or span_s < _LEAST_FOR_FLAT_S else round(line.grown, 2),
                "over_s": round(span_s, 1),
            }
        )
    return found


def judge(occurrences: Sequence[Occurrence], memory: Sequence[dict[str, Any]]) -> list[str]:
    """What the books do not know of: faults that were not noticed or not overcome, and memory that grew."""
    problems: list[str] = []
    for one in occurrences:
        if one.unseen:
            problems.append(f"{one.name}: the daemon did not tell {', '.join(sorted(one.unseen))}")
        if one.repaired_s is None:
            problems.append(f"{one.name}: no new result of {', '.join(sorted(one.streams))} afterwards")
    for life in memory:
        if life["grown_mb"] is not None and life["grown_mb"] > _FLAT_MB:
            problems.append(f"life {life['life']}: grew by {life['grown_mb']} MB over {life['over_s']:.0f} s")
    return problems


def report(outcome: Outcome) -> None:
    """Print the tables."""
    books = outcome.balance
    print(f"\nSoak of {outcome.seconds:.0f} s, seed {outcome.seed}\n")
    print(f"{'fault':<29} {'n':>3}   lasted, s      until new results arrived, s: median, longest")
    for name in dict.fromkeys(fault.name for fault in (*FAULTS, *CAMERA_FAULTS)):
        own = [one for one in outcome.occurrences if one.name == name]
        if name in outcome.left_out:
            print(f"{name:<29}   -   left out: {outcome.left_out[name]}")
        elif own:
            lasted = sorted(one.ended_s - one.began_s for one in own)
            repaired = sorted(one.repaired_s for one in own if one.repaired_s is not None)
            middle = f"{repaired[len(repaired) // 2]:7.2f} {repaired[-1]:8.2f}" if repaired else "  never"
            print(f"{name:<29} {len(own):>3}   {lasted[0]:5.1f} .. {lasted[-1]:5.1f}  {middle}")
    print(f"\n{'life':>4} {'end':<8} {'captured':>9} {'inferred':>9} {'failed':>7}  dropped, by reason")
    for one in books.frames:
        counts = one.life.counts
        if counts is None:
            print(f"{one.life.number:>4} {one.life.end:<8} {'?':>9} {one.inferred:>9}")
            continue
        dropped = ", ".join(f"{reason} {count}" for reason, count in sorted(counts.dropped.items()) if count) or "none"
        source = "" if one.life.summary is not None else f"   (last status page: inferred {counts.inferred})"
        print(
            f"{one.life.number:>4} {one.life.end:<8} {counts.captured:>9} {one.inferred:>9} {counts.failed:>7}"
            f"  {dropped}{source}"
        )
    print(f"\nresults made           {books.inferred:>7}")
    for what, count in (
        ("received", books.received),
        ("lost, daemon killed", books.lost_to_kill),
        ("lost, broker killed", books.lost_to_broker),
        ("dropped, counted", books.dropped),
        ("left in the outbox", books.left),
    ):
        print(f"  {what:<20} {count:>7}")
    print(f"  the oldest that was lost with the daemon: {books.oldest_lost_s:.2f} s; {BOUNDS.daemon_s:g} s are allowed")
    print(f"  repetitions removed by id: {books.repeats}")
    print("events:", ", ".join(f"{kind} {count}" for kind, count in sorted(outcome.events.items())) or "none")
    for one_life in outcome.memory:
        grown = "too short to tell" if one_life["grown_mb"] is None else f"{one_life['grown_mb']:+.2f} MB"
        print(
            f"memory of life {one_life['life']}: {one_life['rss_mb']} MB after {one_life['seconds']:.0f} s,"
            f" {one_life['most_mb']} MB at most; slope: {grown}"
        )
    print()
    for text in outcome.problems:
        print(f"PROBLEM: {text}")
    print(
        "The books do not balance, or a fault was not overcome." if outcome.problems else "Everything is accounted for."
    )


def document(outcome: Outcome) -> dict[str, Any]:
    """As JSON."""
    document = dataclasses.asdict(outcome)
    for one in document["occurrences"]:
        one["streams"], one["unseen"] = sorted(one["streams"]), sorted(one["unseen"])
    return {**document, "bounds": BOUNDS._asdict(), "machine": machine.describe()}

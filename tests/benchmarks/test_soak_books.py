"""The books of a soak: what they accept, and each way in which they must not balance."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.rig import Heard
from benchmarks.soak_books import Balance, Bounds, Counts, Inferred, Life, balance, parse_ledger, repairs

BOUNDS = Bounds(daemon_s=0.7, broker_s=2.0)


def made(frame_id: int, *, life: int = 1, stream: str = "gate", at_s: float | None = None) -> Inferred:
    """A result every 0.1 s; a life begins every 100 s."""
    at_s = 100.0 * life + 0.1 * frame_id if at_s is None else at_s
    return Inferred(life, stream, frame_id, round(1e6 * at_s), at_s)


def arrived(entry: Inferred, id: str | None = None) -> Heard:  # noqa: A002 - what the message calls it
    captured_at = datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(microseconds=entry.captured_utc_us)
    text = f"{captured_at:%Y-%m-%dT%H:%M:%S.%f}Z"
    return Heard(id or f"{entry.life}-{entry.stream}-{entry.frame_id:04}", entry.stream, entry.frame_id, text, 0.0, 0)


def stopped(count: int, *, number: int = 1, captured: int | None = None, **more: int) -> Life:
    captured = count if captured is None else captured
    counts = Counts(captured, count, dropped={"overload": captured - count}, published=count, **more)
    return Life(number, "stopped", 100.0 * number + 99, summary=counts)


def close(ledger: list[Inferred], heard: list[Heard], lives: list[Life], kills: tuple[float, ...] = ()) -> Balance:
    return balance(ledger, heard, lives, kills, BOUNDS)


TEN = [made(number) for number in range(10)]


def test_everything_arrived() -> None:
    found = close(TEN, [arrived(entry) for entry in TEN], [stopped(10, captured=12)])

    assert found.problems == ()
    assert (found.inferred, found.received, found.repeats) == (10, 10, 0)
    assert found.frames[0].skipped == 0


def test_frames_that_are_missing_between_others_are_counted() -> None:
    ledger = TEN[::3]

    found = close(ledger, [arrived(entry) for entry in ledger], [stopped(4, captured=10)])

    assert found.problems == ()
    assert found.frames[0].skipped == 6


def test_repetitions_of_an_id_are_allowed_wherever_they_come() -> None:
    heard = [arrived(entry) for entry in TEN]

    found = close(TEN, [*heard[:5], *heard[3:], *heard[8:]], [stopped(10)])

    assert found.problems == ()
    assert found.repeats == 4


def test_a_result_under_two_ids_is_a_duplicate() -> None:
    heard = [arrived(entry) for entry in TEN]

    found = close(TEN, [*heard, arrived(TEN[9], "again")], [stopped(10)])

    assert found.problems == ("1 results arrived again under another id",)


def test_an_id_names_one_result() -> None:
    heard = [arrived(entry) for entry in TEN]

    found = close(TEN, [*heard[:9], arrived(TEN[9], heard[0].id)], [stopped(10)])

    assert "1 arrivals have the id of another result" in found.problems


def test_a_result_that_vanishes_is_told_by_name() -> None:
    heard = [arrived(entry) for entry in TEN]

    found = close(TEN, heard[:4] + heard[5:], [stopped(10)])

    assert found.problems == ("1 results are missing, of which 0 were counted as dropped and 0 wait: gate 4 of life 1",)


@pytest.mark.parametrize("more", [{"results_dropped": 1}, {"results_left": 1}])
def test_a_result_that_was_counted_as_dropped_or_waits_is_accounted_for(more: dict[str, int]) -> None:
    found = close(TEN, [arrived(entry) for entry in TEN[1:]], [stopped(10, **more)])

    assert found.problems == ()
    assert found.received == 9


def test_a_kill_may_cost_the_last_results_and_no_others() -> None:
    """The kill comes 0.05 s after frame 9: frames 3 to 9 are younger than the bound, frame 2 is not."""
    heard = [arrived(entry) for entry in TEN]
    life = Life(1, "killed", TEN[9].at_s + 0.05)

    allowed = close(TEN, heard[:3], [life])
    too_old = close(TEN, heard[:2], [life])

    assert allowed.problems == ()
    assert allowed.lost_to_kill == 7
    assert allowed.oldest_lost_s == pytest.approx(0.65)
    assert too_old.problems == (
        "1 results are missing, of which 0 were counted as dropped and 0 wait: gate 2 of life 1",
    )


def test_a_life_that_ended_in_order_may_not_lose_its_last_results() -> None:
    found = close(TEN, [arrived(entry) for entry in TEN[:9]], [stopped(10)])

    assert len(found.problems) == 1


def test_a_kill_of_the_broker_may_cost_what_it_had_in_memory() -> None:
    heard = [arrived(entry) for entry in TEN]

    found = close(TEN, heard[:8], [stopped(10)], kills=(TEN[9].at_s + 0.1,))
    later = close(TEN, heard[:8], [stopped(10)], kills=(TEN[9].at_s + 5,))

    assert found.problems == ()
    assert found.lost_to_broker == 2
    assert len(later.problems) == 1


def test_what_no_pipeline_gave_must_not_arrive() -> None:
    found = close(TEN[:9], [arrived(entry) for entry in TEN], [stopped(9, captured=10)])

    assert found.problems == ("1 results arrived that no pipeline gave, such as gate 9",)


def test_order_holds_within_a_stream_and_across_lives_and_not_between_streams() -> None:
    second = [made(number, life=2) for number in range(3)]
    other = [made(number, stream="yard", at_s=100.05) for number in range(1)]
    ledger = [TEN[0], *other, *TEN[1:], *second]
    lives = [stopped(11), stopped(3, number=2)]

    across_streams = close(ledger, [arrived(entry) for entry in [*TEN, *other, *second]], lives)
    across_lives = close(ledger, [arrived(entry) for entry in [*second, *other, *TEN]], lives)
    within = close(TEN, [arrived(entry) for entry in [TEN[1], TEN[0], *TEN[2:]]], [stopped(10)])

    assert across_streams.problems == ()
    assert across_lives.problems == ("stream gate: 10 results arrived after younger ones, such as frame 0 of life 1",)
    assert within.problems == ("stream gate: 1 results arrived after younger ones, such as frame 0 of life 1",)


@pytest.mark.parametrize(
    ("summary", "problem"),
    [
        (Counts(12, 10, published=10), "summary: captured 12, but inferred 10 + failed 0 + dropped 0 + waiting 0 = 10"),
        (Counts(9, 9, published=10), "says that it inferred 9; the ledger has 10"),
        (Counts(10, 10, published=9), "says that it published 9; the ledger has 10"),
        (
            Counts(5, 10, dropped={"overload": -5}, published=10),
            "says that it captured 5; frames are numbered up to 10",
        ),
    ],
)
def test_counters_that_contradict_the_ledger_are_told(summary: Counts, problem: str) -> None:
    life = Life(1, "stopped", 199.0, summary=summary)

    found = close(TEN, [arrived(entry) for entry in TEN], [life])

    assert f"life 1: {problem}" in found.problems


def test_the_last_status_of_a_killed_life_lags_behind_the_ledger_and_never_runs_ahead() -> None:
    heard = [arrived(entry) for entry in TEN]

    behind = close(TEN, heard, [Life(1, "killed", 101.0, last=Counts(9, 8, waiting=1))])
    ahead = close(TEN, heard, [Life(1, "killed", 101.0, last=Counts(12, 11, waiting=1))])

    assert behind.problems == ()
    assert ahead.problems == ("life 1: said that it inferred 11; the ledger has 10",)


def test_a_frame_that_is_inferred_twice_is_told() -> None:
    ledger = [*TEN, made(9, at_s=101.5)]

    found = close(ledger, [arrived(entry) for entry in TEN] + [arrived(ledger[-1], "other")], [stopped(11)])

    assert "life 1: stream gate: frame 9 after frame 9" in found.problems


def test_a_life_that_nobody_ended_is_a_problem() -> None:
    found = close(TEN, [arrived(entry) for entry in TEN], [Life(1, "failed", 199.0)])

    assert found.problems == ("life 1: ended in a way that nobody meant",)


@given(
    st.lists(
        st.builds(
            Inferred,
            st.integers(1, 99),
            st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]*", fullmatch=True),
            st.integers(0, 1 << 40),
            st.integers(0, 1 << 52),
            st.floats(0, 1e9),
        )
    )
)
def test_a_ledger_is_read_as_it_was_written(entries: list[Inferred]) -> None:
    assert parse_ledger(b"".join(entry.line() for entry in entries).decode()) == entries


@pytest.mark.parametrize("waiting", [-1, 13])
def test_frames_that_pile_up_between_the_counters_are_told(waiting: int) -> None:
    """A frame that is neither inferred nor dropped, and does not wait either, would be counted as waiting for ever."""
    last = Counts(10 + waiting, 10, waiting=waiting)

    found = close(TEN, [arrived(entry) for entry in TEN], [Life(1, "killed", 101.0, last=last)])

    assert found.problems == (f"life 1: last status: {waiting} frames wait, where each stream can have only a few",)


def test_a_hang_costs_nothing() -> None:
    """The publisher is not what hung."""
    found = close(TEN, [arrived(entry) for entry in TEN[:9]], [Life(1, "hung", TEN[9].at_s + 0.1)])

    assert len(found.problems) == 1


def heard_at(entry: Inferred, seconds_later: float) -> Heard:
    return arrived(entry)._replace(arrived_s=entry.at_s + seconds_later)


def test_a_repair_ends_with_the_first_result_made_after_the_fault() -> None:
    """The fault ends at 100.35, between frames 3 and 4. Frame 3 was kept meanwhile, and comes at 100.5."""
    heard = [heard_at(TEN[3], 0.2), *(heard_at(entry, 0.3) for entry in TEN[4:])]

    (found,) = repairs(TEN, heard, [(100.35, ["gate"])])

    assert found == pytest.approx(100.4 + 0.3 - 100.35)


def test_a_repair_waits_for_every_stream_that_the_fault_concerns() -> None:
    late = made(0, stream="yard", at_s=100.8)
    ledger = [*TEN[:8], late, *TEN[8:]]
    heard = [heard_at(entry, 0.01) for entry in ledger]

    both, one, silent = repairs(ledger, heard, [(100.35, ["gate", "yard"]), (100.35, ["gate"]), (100.85, ["yard"])])

    assert both == pytest.approx(0.46)
    assert one == pytest.approx(0.06)
    assert silent is None

"""Floods, made into a few events."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edge.monitor.notice import Changes, Tally


def test_each_of_a_few_changes_is_announced() -> None:
    changes = Changes(False)

    assert [changes.announce(state, at) for at, state in enumerate([False, True, True, False])] == [
        False,
        True,
        False,
        True,
    ]


@given(st.lists(st.booleans(), max_size=400))
def test_a_flapping_state_is_announced_seldom_and_in_the_end_rightly(states: list[bool]) -> None:
    changes = Changes(False, most=6, within_s=600)
    announced_s = [at for at, state in enumerate(states) if changes.announce(state, at)]

    for first, seventh in zip(announced_s, announced_s[6:], strict=False):
        assert seventh - first >= 600
    last = states[-1] if states else False
    changes.announce(last, len(states) + 600)
    assert changes.announced == last


def test_a_tally_speaks_at_once_and_then_sums_up() -> None:
    tally = Tally(60)

    assert tally.add(0, 0) == 0
    assert tally.add(2, 1) == 2
    assert [tally.add(1, at) for at in range(2, 61)] == [0] * 59
    assert tally.add(0, 61) == 59
    assert tally.add(0, 200) == 0


@given(st.lists(st.integers(0, 5), max_size=300))
def test_a_tally_loses_nothing(counts: list[int]) -> None:
    tally = Tally(60)

    told = sum(tally.add(count, at) for at, count in enumerate(counts))

    assert told + tally.add(0, len(counts) + 60) == sum(counts)

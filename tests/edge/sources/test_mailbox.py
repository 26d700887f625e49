from __future__ import annotations

import math
import threading

from hypothesis import given
from hypothesis import strategies as st

from edge.sources.mailbox import Mailbox, take_turns
from edge.status import DropReason


def never() -> bool:
    return False


@given(st.lists(st.sampled_from(["put", "take"]), max_size=60))
def test_the_newest_wins_and_every_item_is_either_taken_or_counted_as_dropped(actions: list[str]) -> None:
    mailbox: Mailbox[int] = Mailbox()
    taken: list[int] = []
    newest = None
    for number, action in enumerate(actions):
        if action == "put":
            mailbox.put(number)
            newest = number
        else:
            item = mailbox.take()
            assert item is None or item == newest
            if item is not None:
                taken.append(item)
    mailbox.discard()

    assert taken == sorted(set(taken))
    assert mailbox.put_count == actions.count("put")
    assert mailbox.put_count == len(taken) + mailbox.dropped
    assert mailbox.exhausted


def test_what_waits_in_a_closed_mailbox_can_still_be_taken() -> None:
    mailbox: Mailbox[str] = Mailbox()
    mailbox.put("last")
    mailbox.close()
    mailbox.put("too late")

    assert [mailbox.exhausted, mailbox.take(), mailbox.exhausted] == [False, "last", True]
    assert mailbox.dropped == 1


@given(st.integers(1, 5), st.integers(1, 8))
def test_a_stream_that_always_has_a_frame_gets_no_more_than_its_turns(streams: int, rounds: int) -> None:
    bell = threading.Condition()
    mailboxes: list[Mailbox[int]] = [Mailbox(bell) for _ in range(streams)]
    for index, mailbox in enumerate(mailboxes):
        mailbox.put(index)
    order: list[int] = []
    for item in take_turns(lambda: mailboxes, bell, never):
        order.append(item)
        if len(order) == streams * rounds:
            break
        mailboxes[item].put(item)

    assert order == list(range(streams)) * rounds


def test_taking_turns_ends_when_every_stream_has_ended() -> None:
    bell = threading.Condition()
    mailboxes: list[Mailbox[str]] = [Mailbox(bell), Mailbox(bell)]
    mailboxes[0].put("a")
    for mailbox in mailboxes:
        mailbox.close()

    assert list(take_turns(lambda: mailboxes, bell, never)) == ["a"]


def test_a_reader_that_waits_is_woken_by_a_frame_and_by_the_end() -> None:
    mailbox: Mailbox[int] = Mailbox()
    got: list[int] = []
    arrived = threading.Event()

    def read() -> None:
        for item in take_turns(lambda: [mailbox], mailbox.bell, never):
            got.append(item)
            arrived.set()

    reader = threading.Thread(target=read)
    reader.start()
    mailbox.put(7)
    assert arrived.wait(10)
    mailbox.close()
    reader.join(10)

    assert not reader.is_alive()
    assert got == [7]


def test_stop_ends_the_turns_although_a_frame_waits() -> None:
    mailbox: Mailbox[int] = Mailbox()
    mailbox.put(1)

    assert list(take_turns(lambda: [mailbox], mailbox.bell, lambda: True)) == []


def test_what_is_replaced_is_counted_by_the_reason_of_that_moment() -> None:
    reasons: list[DropReason] = ["overload"]
    mailbox: Mailbox[int] = Mailbox(why=lambda: reasons[0])
    for number in range(3):
        mailbox.put(number)
    reasons[0] = "governor"
    mailbox.put(3)
    mailbox.miss(2)
    mailbox.discard()
    mailbox.put(4)

    assert mailbox.dropped_by == {"overload": 2, "governor": 3, "stopped": 2}
    assert mailbox.put_count == mailbox.dropped == 7


def test_nothing_is_taken_before_it_is_due() -> None:
    mailbox: Mailbox[int] = Mailbox()
    mailbox.put(1)
    due = iter([0.001, 0.001, 0.0, 0.0])
    mailbox.close()

    assert list(take_turns(lambda: [mailbox], mailbox.bell, never, due_in_s=lambda: next(due))) == [1]


def test_a_busy_reader_is_not_made_to_wait_while_nothing_may_be_taken() -> None:
    mailbox: Mailbox[int] = Mailbox()
    mailbox.put(1)
    turns = take_turns(lambda: [mailbox], mailbox.bell, never, busy=lambda: True, due_in_s=lambda: math.inf)

    assert [next(turns), next(turns)] == [None, None]


def test_a_source_whose_every_item_counts_waits_until_its_item_is_taken() -> None:
    mailbox: Mailbox[int] = Mailbox()
    taken: list[int] = []
    mailbox.put(0)

    def write() -> None:
        for number in range(1, 20):
            mailbox.wait_empty(lambda: False)
            mailbox.put(number)
        mailbox.close()

    writer = threading.Thread(target=write)
    writer.start()
    for item in take_turns(lambda: [mailbox], mailbox.bell, never):
        assert item is not None
        taken.append(item)
    writer.join(10)

    assert taken == list(range(20))
    assert mailbox.dropped == 0


def test_streams_may_come_and_go_while_a_reader_waits() -> None:
    bell = threading.Condition()
    mailboxes: list[Mailbox[str]] = []
    turns = take_turns(lambda: mailboxes, bell, never)
    late: Mailbox[str] = Mailbox(bell)

    def add() -> None:
        with bell:
            mailboxes.append(late)
        late.put("late")
        late.close()

    adder = threading.Thread(target=add)
    adder.start()
    assert list(turns) == ["late"]
    adder.join(10)

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from edge.sources.mailbox import Mailbox, take_turns


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
    for item in take_turns(mailboxes, threading.Event()):
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

    assert list(take_turns(mailboxes, threading.Event())) == ["a"]


def test_a_reader_that_waits_is_woken_by_a_frame_and_by_the_end() -> None:
    mailbox: Mailbox[int] = Mailbox()
    got: list[int] = []
    arrived = threading.Event()

    def read() -> None:
        for item in take_turns([mailbox], threading.Event()):
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
    stop = threading.Event()
    stop.set()

    assert list(take_turns([mailbox], stop)) == []

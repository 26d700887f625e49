"""Between capture and inference: one slot for each stream, in which the newest frame wins."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from edge.status import DropReason

__all__ = ["Mailbox", "take_turns"]

T = TypeVar("T")
# Only how soon a stop without a last frame is noticed: frames ring the bell.
_POLL_S = 0.2


def _overload() -> DropReason:
    return "overload"


class Mailbox(Generic[T]):
    """One slot. Putting does not block: what was not taken in time is replaced, and counted.

    Latency is bounded by that: nothing waits for longer than one round of inference.
    """

    def __init__(self, bell: threading.Condition | None = None, *, why: Callable[[], DropReason] = _overload) -> None:
        """Make an empty one.

        Args:
            bell: guards the mailbox and rings when something changes; several mailboxes of one reader share theirs.
            why: says why an item that is replaced now was not taken.
        """
        self.bell = bell or threading.Condition()
        self.dropped_by: Counter[DropReason] = Counter()
        self._why = why
        self._item: T | None = None
        self._put = 0
        self._closed = False

    @property
    def put_count(self) -> int:
        """How many items were put in."""
        return self._put

    @property
    def dropped(self) -> int:
        """How many of them were replaced or discarded before anybody took them."""
        return self.dropped_by.total()

    @property
    def waiting(self) -> bool:
        """Whether there is something to take."""
        with self.bell:
            return self._item is not None

    @property
    def exhausted(self) -> bool:
        """Whether it is closed and empty: nothing will come any more."""
        with self.bell:
            return self._closed and self._item is None

    def put(self, item: T) -> None:
        """Put the newest item in; a closed mailbox only counts it."""
        with self.bell:
            self._put += 1
            if self._closed:
                self.dropped_by["stopped"] += 1
                return
            if self._item is not None:
                self.dropped_by[self._why()] += 1
            self._item = item
            self.bell.notify_all()

    def wait_empty(self, until: Callable[[], bool]) -> None:
        """Wait until what was put in has been taken, for a source whose every item counts, or ``until`` says so."""
        with self.bell:
            while self._item is not None and not self._closed and not until():
                self.bell.wait(_POLL_S)

    def miss(self, count: int) -> None:
        """Count items that came, and were replaced by newer ones before they could be put in."""
        with self.bell:
            self._put += count
            self.dropped_by[self._why()] += count

    def take(self) -> T | None:
        """Take the item out, or None if there is none."""
        with self.bell:
            item, self._item = self._item, None
            if item is not None:
                self.bell.notify_all()
            return item

    def close(self) -> None:
        """Say that nothing more comes. What waits can still be taken."""
        with self.bell:
            self._closed = True
            self.bell.notify_all()

    def discard(self) -> None:
        """Close it and drop what waits."""
        with self.bell:
            self.close()
            self.dropped_by["stopped"] += self._item is not None
            self._item = None


def take_turns(
    mailboxes: Callable[[], Sequence[Mailbox[T]]],
    bell: threading.Condition,
    until: Callable[[], bool],
    *,
    busy: Callable[[], bool] = lambda: False,
    due_in_s: Callable[[], float] = lambda: 0.0,
) -> Iterator[T | None]:
    """Yield what arrives in mailboxes, each in its turn, so that a fast one can't starve the others.

    Ends when all are exhausted or ``until`` says so. While the reader is ``busy`` with what it took before, it is not
    made to wait: nothing to take is then a None.

    Args:
        mailboxes: those that there are now; they share ``bell``.
        bell: rings when something arrives, or when another of these arguments would answer differently.
        until: ends the turns.
        busy: whether the reader has something else to do.
        due_in_s: seconds until the next item may be taken; infinity while none may.
    """
    turn = 0
    while not until():
        wait_s = due_in_s()
        if wait_s <= 0:
            boxes = mailboxes()
            for index in (*range(turn, len(boxes)), *range(min(turn, len(boxes)))):
                item = boxes[index].take()
                if item is not None:
                    turn = index + 1
                    yield item
                    break
            else:
                wait_s = _POLL_S
        if wait_s <= 0:
            continue
        if busy():
            yield None
            continue
        with bell:
            boxes = mailboxes()
            # Looked at again under the bell's lock, so that no ring between the two is missed.
            if boxes and all(mailbox.exhausted for mailbox in boxes):
                return
            if due_in_s() > 0 or not any(mailbox.waiting for mailbox in boxes):
                bell.wait(min(_POLL_S, wait_s))

"""Between capture and inference: one slot for each stream, in which the newest frame wins."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["Mailbox", "take_turns"]

T = TypeVar("T")
# Only how soon a stop without a last frame is noticed: frames ring the bell.
_POLL_S = 0.2


class Mailbox(Generic[T]):
    """One slot. Putting never blocks: what was not taken in time is replaced, and counted.

    Latency is bounded by that: nothing waits for longer than one round of inference.
    """

    def __init__(self, bell: threading.Condition | None = None) -> None:
        """Make an empty one.

        Args:
            bell: guards the mailbox and rings when something changes; several mailboxes of one reader share theirs.
        """
        self.bell = bell or threading.Condition()
        self._item: T | None = None
        self._put = 0
        self._dropped = 0
        self._closed = False

    @property
    def put_count(self) -> int:
        """How many items were put in."""
        return self._put

    @property
    def dropped(self) -> int:
        """How many of them were replaced or discarded before anybody took them."""
        return self._dropped

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
                self._dropped += 1
                return
            self._dropped += self._item is not None
            self._item = item
            self.bell.notify_all()

    def take(self) -> T | None:
        """Take the item out, or None if there is none."""
        with self.bell:
            item, self._item = self._item, None
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
            self._dropped += self._item is not None
            self._item = None


def take_turns(
    mailboxes: Sequence[Mailbox[T]], stop: threading.Event, *, busy: Callable[[], bool] = lambda: False
) -> Iterator[T | None]:
    """Yield what arrives in mailboxes that share a bell, each in its turn, so that a fast one can't starve the others.

    Ends when all are exhausted or ``stop`` is set. While the reader is ``busy`` with what it took before, it is not
    made to wait: nothing to take is then a None.
    """
    bell = mailboxes[0].bell
    turn = 0
    while not stop.is_set():
        item = None
        for offset in range(len(mailboxes)):
            index = (turn + offset) % len(mailboxes)
            item = mailboxes[index].take()
            if item is not None:
                turn = index + 1
                break
        if item is not None:
            yield item
            continue
        if busy():
            yield None
            continue
        with bell:
            # Looked at again under the bell's lock, so that no ring between the two is missed.
            if all(mailbox.exhausted for mailbox in mailboxes):
                return
            if not any(mailbox.waiting for mailbox in mailboxes):
                bell.wait(_POLL_S)

"""Threads with an owner: named, ended together, and none dies unnoticed."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["Crew"]

logger = logging.getLogger(__name__)


class Crew:
    """Named threads that end together. An exception in one is kept and raised by ``check`` in the owner."""

    def __init__(self, end: Callable[[], object]) -> None:
        """Make an empty one; ``end`` is what makes its threads return."""
        self._end = end
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []

    def start(self, name: str, work: Callable[[], None]) -> None:
        """Start a thread."""

        def guarded() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised again by check()
                self._errors.append(error)

        # Daemon threads, so that the process ends even if its owner fails while it waits for them.
        thread = threading.Thread(target=guarded, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    @property
    def busy(self) -> bool:
        """Whether a thread still works."""
        return any(thread.is_alive() for thread in self._threads)

    def check(self) -> None:
        """Raise the first exception that ended a thread."""
        if self._errors:
            raise self._errors[0]

    def finish(self) -> None:
        """Make the threads return, wait for that, and ``check``."""
        if self.busy:
            self._end()
        for thread in self._threads:
            thread.join()
        self.check()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
            return
        try:
            self.finish()
        except BaseException as own:  # noqa: BLE001 - the error on its way out is the one to show
            if own is not error:
                logger.error("while stopping: %s", own)  # noqa: TRY400 - one line: its traceback would hide the cause

"""The daemon's process in a soak: ``edge-daemon run`` as it ships, between things that the soak can reach.

``python -m benchmarks.soak_driver JOB.json``. Four things differ from the command:

- each result is noted in the ledger before the daemon has it (``benchmarks.soak_books`` says why);
- /sys and /proc are those of the soak, so that the device can become hot or run out of memory;
- an inference hangs when the soak says so;
- the UTC clock is the machine's plus an offset. ``time.time`` and ``time.time_ns`` are replaced for that before
  anything of ours is imported: Python code has the wall clock from nowhere else but ``datetime``, which we do not ask
  for it. The monotonic clock stays as it is, as it does when somebody sets a machine's clock. A namespace cannot do
  this (Linux has none for CLOCK_REALTIME), and libfaketime, which could, fakes the waiting of threads as well.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import struct
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from typing_extensions import Self

    from edge import config
    from edge.types import Result

__all__ = ["Control", "Job"]

_HANG_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Job:
    """What the process does."""

    deployment: str
    root: str
    """Where its /sys and /proc are."""
    ledger: str
    control: str
    life: int


class Control:
    """Two numbers that the soak sets and the daemon's processes read: a page of memory that they share by a file."""

    _FORMAT = struct.Struct("=qq")

    def __init__(self, path: Path) -> None:
        """Open the file, which is created if it is missing."""
        self.path = path
        path.touch()
        with path.open("r+b") as file:
            file.truncate(self._FORMAT.size)
            self._page = mmap.mmap(file.fileno(), self._FORMAT.size)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._page.close()

    @property
    def utc_offset_ns(self) -> int:
        """What is added to the UTC clock."""
        return self._get(0)

    @utc_offset_ns.setter
    def utc_offset_ns(self, value: int) -> None:
        self._set(0, value)

    @property
    def hanging_life(self) -> int:
        """The life whose inferences hang; 0: none."""
        return self._get(1)

    @hanging_life.setter
    def hanging_life(self, value: int) -> None:
        self._set(1, value)

    def _get(self, place: int) -> int:
        value: int = self._FORMAT.unpack_from(self._page)[place]
        return value

    def _set(self, place: int, value: int) -> None:
        struct.pack_into("=q", self._page, 8 * place, value)


def main() -> None:
    """Run the daemon for one life."""
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    # Where memory runs out it shall end this process, rather than the soak or a neighbour on the same machine.
    Path("/proc/self/oom_score_adj").write_text("1000")
    control = Control(Path(job.control))
    shift_utc(control)

    from edge import daemon
    from edge.cli import main as command

    run = functools.partial(daemon.run, open_model=watching(job, control), root=Path(job.root))
    daemon.run = run
    sys.argv = ["edge-daemon", "run", job.deployment, "--json"]
    command()


def shift_utc(control: Control) -> None:
    """Move the UTC clock of this process by what the control says, from now on."""
    assert "edge" not in sys.modules, "defaults such as utc_clock_ns=time.time_ns are bound when a module is imported"
    time_ns = time.time_ns
    time.time_ns = lambda: time_ns() + control.utc_offset_ns
    time.time = lambda: time.time_ns() / 1e9


def watching(job: Job, control: Control) -> Any:
    """``open_model`` for the daemon: the real pipeline, with the ledger at its end."""
    from benchmarks.soak_books import Inferred
    from benchmarks.watched import Watched
    from edge.process import open_pipeline

    ledger = os.open(job.ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def note(result: Result) -> None:
        frame = result.frame
        entry = Inferred(job.life, frame.stream, frame.index, frame.captured_at_utc_us, time.monotonic())
        # One write: with the kernel, it outlives this process, however that ends.
        os.write(ledger, entry.line())

    class Hanging(Watched):
        """Hangs before an inference when it is told to."""

        def begin(self, frame: Any) -> None:
            """The pipeline's, perhaps much later."""
            while control.hanging_life == job.life:
                time.sleep(_HANG_POLL_S)
            self._pipeline.begin(frame)

    @contextmanager
    def open_model(model: config.Model) -> Iterator[Any]:
        with open_pipeline(model) as pipeline:
            yield Hanging(pipeline, note)

    return open_model


if __name__ == "__main__":
    main()

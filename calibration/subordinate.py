"""What a child process of a build owes its parent: to end with it, and to be the first to go when memory runs out."""

from __future__ import annotations

import ctypes
import signal
from contextlib import suppress
from pathlib import Path

__all__ = ["become"]

_PARENT_DEATH = 1
"""PR_SET_PDEATHSIG of <linux/prctl.h>."""
_FIRST_TO_GO = 800
"""Of 1000, which is always the first."""


def become() -> None:
    """Die with the parent, even one that is killed, and before anybody else when memory runs out.

    On an 8 GB board the kernel would rather end the daemon that is in use, which is the larger for its age.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PARENT_DEATH, signal.SIGKILL)
    with suppress(OSError):  # only advice; a sandbox may forbid it
        Path("/proc/self/oom_score_adj").write_text(str(_FIRST_TO_GO), encoding="ascii")

"""Reading files that the kernel makes up on the spot, under /sys and /proc: cheaply, and a failure is an answer."""

from __future__ import annotations

import os

__all__ = ["integer", "read_text"]

_MOST_BYTES = 1 << 16
"""More than any of the files that are read here holds; sysfs attributes end at one page."""


def read_text(path: str) -> str | None:
    """What stands in the file, without white space or NUL at the ends; None where it cannot be read or holds nothing.

    A sensor whose block of the chip is without power answers EAGAIN, one whose driver has gone ENODEV: to those who
    ask, a value that is not there is the same as a file that is not there.
    """
    # os.open and os.read: a fifth of the time that a Python file object takes, and this happens a hundred times a read.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        content = os.read(descriptor, _MOST_BYTES)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return content.decode("utf-8", "replace").strip(" \t\r\n\0") or None


def integer(text: str | None) -> int | None:
    """The number that the text is, if it is one."""
    # int() would take "1_000", other scripts' digits, and white space.
    if text is None or not text.isascii() or not text.removeprefix("-").isdigit() or len(text) > 20:
        return None
    return int(text)

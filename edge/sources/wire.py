"""What a camera's process and the daemon say to each other, and the memory in which pictures pass between them.

Messages go one way, from the process to the daemon, over a socket that keeps their boundaries (SOCK_SEQPACKET). That
the daemon closes its end is the only message the other way: it asks the process to end.

Pictures lie in a memory file without a name, which the kernel frees with the last process that has it open or mapped::

    page 0    one byte for each slot: 1 while the daemon has it, 0 while it is free
              from byte 64 on: how many pictures were grabbed so far, little-endian uint64
    page 1..  the slots, each a whole number of pages, with one (H, W, 3) uint8 BGR picture at its beginning

The daemon gives a slot back by writing that byte: no system call and no lock, so that it can be done by whichever
thread drops the last reference to a picture, in the middle of whatever it is doing, and also when the process that
filled the slot has long gone. Whoever writes a picture sees the byte before, and tells of the picture by a system call
after: that orders the memory on ARM, too.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import weakref
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from edge.types import Image

__all__ = ["FAILED", "MAX_MESSAGE", "OPENED", "PICTURE", "POOL", "SLOTS", "Gallery", "Picture", "Pool"]

OPENED = b"O"
"""The camera is open; pictures should follow."""
POOL = b"M"
"""Followed by the size of a slot; a file descriptor comes with it. Earlier pools are not written to any more."""
PICTURE = b"P"
"""Followed by the fields of ``Picture``."""
FAILED = b"F"
"""Followed by a text in UTF-8: why there is nothing more to come."""
MAX_MESSAGE = 4096

SLOTS = 6
"""One is being written, one waits in the mailbox, two are with the engine (one computes, one is prepared), one is being
published; and one to spare. Only those that are used take memory: the lowest free one is written next."""

_GRABBED = struct.Struct("<Q")
_GRABBED_AT = 64
_SLOT_SIZE = struct.Struct("<Q")
_PICTURE = struct.Struct("<BHHQdqI")
_PAGE = mmap.PAGESIZE


class Picture(NamedTuple):
    """What is said of a picture in a slot."""

    slot: int
    width: int
    height: int
    number: int
    """Counts what the process grabbed, from 0."""
    captured_at_s: float
    """CLOCK_MONOTONIC, which is the same in all processes of a machine."""
    captured_at_utc_us: int
    digest: int
    """CRC-32 of all its bytes; 0 where it was not computed."""

    def pack(self) -> bytes:
        """The message."""
        return PICTURE + _PICTURE.pack(*self)

    @classmethod
    def unpack(cls, body: bytes) -> Picture:
        """The message without its first byte."""
        return cls(*_PICTURE.unpack(body))


class Pool:
    """The side that writes pictures."""

    def __init__(self, picture_bytes: int) -> None:
        """Make slots for pictures of that size.

        Raises:
            OSError: there is no memory for it, or no file descriptor.
        """
        self.slot_bytes = -(-picture_bytes // _PAGE) * _PAGE
        self.fd = os.memfd_create("edge-camera", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            size = _PAGE + SLOTS * self.slot_bytes
            os.ftruncate(self.fd, size)
            # A page that is cut off would end the daemon with SIGBUS when it looks at a picture.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._memory = mmap.mmap(self.fd, size)
        except BaseException:
            os.close(self.fd)
            raise

    def close(self) -> None:
        """Close the descriptor. The memory stays for as long as there are views of it."""
        os.close(self.fd)

    def announce(self) -> bytes:
        """The message that ``fd`` is sent with."""
        return POOL + _SLOT_SIZE.pack(self.slot_bytes)

    def count(self, grabbed: int) -> None:
        """Say how many pictures were grabbed so far."""
        _GRABBED.pack_into(self._memory, _GRABBED_AT, grabbed)

    def free(self) -> int | None:
        """The lowest free slot."""
        slot = self._memory.find(b"\0", 0, SLOTS)
        return None if slot < 0 else slot

    def take(self, slot: int) -> None:
        """Mark a slot as the daemon's."""
        self._memory[slot] = 1

    def view(self, slot: int, width: int, height: int) -> Image:
        """(height, width, 3) uint8 of a slot, to write to."""
        image: Image = np.ndarray((height, width, 3), np.uint8, self._memory, _PAGE + slot * self.slot_bytes)
        return image


class Gallery:
    """The side that looks at pictures."""

    def __init__(self, fd: int, body: bytes) -> None:
        """Map a pool and close its descriptor.

        Args:
            fd: of the pool.
            body: of the message that it came with.

        Raises:
            OSError: it cannot be mapped.
        """
        (self._slot_bytes,) = _SLOT_SIZE.unpack(body)
        try:
            self._pictures = mmap.mmap(fd, _PAGE + SLOTS * self._slot_bytes, access=mmap.ACCESS_READ)
            self._flags = mmap.mmap(fd, _PAGE)
        finally:
            os.close(fd)

    @property
    def grabbed(self) -> int:
        """How many pictures the process has grabbed so far, handed on or not."""
        count: int = _GRABBED.unpack_from(self._flags, _GRABBED_AT)[0]
        return count

    def show(self, picture: Picture) -> Image:
        """A read-only view. Its slot is given back when the view, and all that was made from it, is forgotten."""
        offset = _PAGE + picture.slot * self._slot_bytes
        # Its base is the memory itself, not another array, so that numpy lets slices of the view keep the view alive.
        image: Image = np.ndarray((picture.height, picture.width, 3), np.uint8, self._pictures, offset)
        weakref.finalize(image, _clear, self._flags, picture.slot).atexit = False
        return image

    def give_back(self, picture: Picture) -> None:
        """Give a slot back without having looked at it."""
        _clear(self._flags, picture.slot)


def _clear(flags: mmap.mmap, slot: int) -> None:
    flags[slot] = 0

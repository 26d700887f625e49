"""Files that are either the old one or the new one, never half of one."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["folder_lock", "printable", "replacing", "write"]

_SCRATCH = ".writing-"


def printable(name: object) -> str:
    """A file's name for messages and documents: bytes of it that are not UTF-8 are escaped."""
    return str(name).encode("utf-8", "backslashreplace").decode()


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Keep other processes that ask for the same lock out; the kernel frees it with the process.

    The folder is made if it is not there, and is gone at the end if it was made here and nothing is in it.

    Raises:
        OSError: another process holds it, or the folder cannot be made.
    """
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, "cannot be written", str(folder))
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(errno.EAGAIN, "is being written by another process", str(folder)) from None
        yield
    finally:
        if made and not any(folder.iterdir()):
            folder.rmdir()
        os.close(descriptor)


@contextmanager
def replacing(folder: Path, *, last: str) -> Iterator[Path]:
    """Give a scratch folder; what it holds at the end of the block replaces the files of that name in ``folder``.

    The scratch folder is inside ``folder``, so that each move is one rename on one file system. After an error or
    Ctrl-C inside the block, ``folder`` is as it was. The moves begin when everything is on the disk, and Ctrl-C waits
    for them; if the power fails among them, ``last``, the manifest that vouches for the others, is still the old one,
    and refuses the set. The caller holds ``folder_lock``.

    Args:
        folder: where the files go.
        last: name of the file that is moved after all others.

    Raises:
        OSError: the folder cannot be written.
    """
    for stale in folder.glob(f"{_SCRATCH}*"):  # of a process that was killed: the lock is the caller's
        shutil.rmtree(stale)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=folder) as scratch:
        try:
            yield Path(scratch)
        except OSError as error:
            if error.filename is not None or error.errno is None:
                raise
            # A full disk does not say where it is.
            raise type(error)(error.errno, error.strerror, str(folder)) from error
        paths = sorted(Path(scratch).iterdir(), key=lambda path: (path.name == last, path.name))
        for path in paths:
            _refuse_folder(folder / path.name)
            _sync(path)
        with _undisturbed():
            for path in paths:
                path.replace(folder / path.name)
            _sync(folder)


def _refuse_folder(path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Hold back Ctrl-C and SIGTERM until the end of the block.

    By handlers, not by the thread's signal mask: another thread, such as onnxruntime's, would take the signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python runs handlers in the main thread only
        return
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda which, _: came.append(which)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])


def write(path: Path, data: bytes) -> None:
    """Write a file at once: readers see the old content or the new, also after a power cut.

    Raises:
        OSError: it cannot be written; the error names the file, not the one it was prepared in.
    """
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from None
    scratch = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp's files are private; these are made as any other is, under the umask
        umask = os.umask(0)
        os.umask(umask)
        scratch.chmod(0o666 & ~umask)
        scratch.replace(path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise type(error)(error.errno, error.strerror, str(path)) from error
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

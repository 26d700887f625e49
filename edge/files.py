"""Files that are either the old one or the new one, never half of one."""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["replacing", "write"]


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Give a scratch folder; what it holds at the end of the block replaces the files of that name in ``folder``.

    The scratch folder is inside ``folder``, so that each move is one rename on one file system. Files are moved in the
    order of their modification: what is written last, such as a manifest that vouches for the others, arrives last.
    After an error, or Ctrl-C, ``folder`` is as it was, and is gone if it was made here.
    """
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".writing-", dir=folder) as scratch:
            yield Path(scratch)
            for path in sorted(Path(scratch).iterdir(), key=lambda path: path.stat().st_mtime_ns):
                _sync(path)
                path.replace(folder / path.name)
        _sync(folder)
    except BaseException:
        if made and not any(folder.iterdir()):
            folder.rmdir()
        raise


def write(path: Path, data: bytes) -> None:
    """Write a file at once: readers see the old content or the new, also after a power cut."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
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

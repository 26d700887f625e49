"""The picture set of a calibration or an evaluation: what is used, what is refused and why.

Every picture is read and decoded once to be checked, then forgotten; whoever needs it decodes it again, through
``edge.image`` as the daemon does. Which pictures are used depends on their paths, the seed and the count only, never on
the order in which a file system lists them.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edge.errors import DataError
from edge.image import decode

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from edge.types import Image

__all__ = ["SUFFIXES", "ImageFile", "ImageSet", "Refusal", "collect"]

SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
"""What counts as a picture in a folder, in upper or lower case. A file that a glob or a list names is tried anyway."""

MIN_SIDE = 16
"""Pixels. Smaller pictures are icons and leftovers, not what a camera gives."""

REFUSED_SHARE = 0.05
"""Beyond it something is wrong with the set rather than with single files."""

_THUMBNAIL = 16
# Root mean square difference of two 16 x 16 grey thumbnails, in grey levels of 255. Measured on 72 COCO photographs: 36
# between the two most alike, 80 on average; against the same scene 0.4 after JPEG at quality 40, 1 with sensor noise of
# 15 levels, 5 when it is 5 levels brighter.
_NEAR = 6.0


@dataclass(frozen=True, slots=True)
class ImageFile:
    """One usable picture."""

    path: Path
    sha256: str
    """Of the file's content."""
    size_wh: tuple[int, int]
    """Upright, as decoded."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A file that was looked at and is not used."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class ImageSet:
    """Checked pictures, decoded when they are asked for.

    Iterating gives (H, W, 3) uint8 BGR pictures in order of ``used``, one in memory at a time.
    """

    used: tuple[ImageFile, ...]
    """In order of their paths."""
    refused: tuple[Refusal, ...]
    """Of the files that were looked at, in order of their paths."""
    warnings: tuple[str, ...]
    found: int
    """Files that the patterns name."""
    excluded: int
    """Of the files that were looked at, those whose content the caller asked to leave out."""
    distinct: int
    """Pictures that do not nearly repeat another one."""
    digest: str = field(init=False)
    """SHA-256 over the sorted SHA-256s of the contents: independent of names and order."""

    def __post_init__(self) -> None:
        hashes = "\n".join(sorted(file.sha256 for file in self.used))
        object.__setattr__(self, "digest", hashlib.sha256(hashes.encode()).hexdigest())

    def __len__(self) -> int:
        return len(self.used)

    def __iter__(self) -> Iterator[Image]:
        return (self.load(index) for index in range(len(self.used)))

    def load(self, index: int) -> Image:
        """Read and decode one picture of ``used``.

        Raises:
            DataError: the file is gone or was changed since it was checked.
        """
        file = self.used[index]
        try:
            data = file.path.read_bytes()
        except OSError as error:
            raise DataError(f"{file.path}: cannot be read any more ({error.strerror})") from error
        if hashlib.sha256(data).hexdigest() != file.sha256:
            raise DataError(f"{file.path}: was changed while it was in use; start again")
        return decode(data, name=str(file.path))


def collect(
    patterns: str | Sequence[str],
    *,
    count: int | None = None,
    seed: int = 0,
    exclude: Collection[str] = (),
    on_progress: Callable[[int, int], None] | None = None,
) -> ImageSet:
    """Choose and check pictures.

    The sorted list of files is cut into ``count`` equal parts and each gives one usable picture, so that a sample
    covers the whole list. Files are looked at only until ``count`` pictures are found: a refused one is replaced.

    Args:
        patterns: folders (with their subfolders; hidden files and folders are passed over), globs (``**`` for any
            depth), single pictures, and ``.txt`` lists with one path a line, relative to the list's folder, where blank
            lines and lines that start with ``#`` mean nothing.
        count: how many to use; None for all.
        seed: same seed, count and paths, same sample.
        exclude: SHA-256s of contents to leave out.
        on_progress: called with (done, total) after each file.

    Raises:
        DataError: a pattern names nothing, or no picture can be used.
    """
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    if count is not None and count < 1:
        raise ValueError(f"count is {count}; expected at least 1")
    paths = sorted({path for pattern in patterns for path in _expand(pattern)})
    named = ", ".join(patterns)
    if not paths:
        raise DataError(f"no images are named ({named}); {_ALLOWED}")
    check = _Checker(frozenset(exclude))
    wanted = len(paths) if count is None else min(count, len(paths))
    parts = _parts(len(paths), wanted, seed)
    remaining = len(paths)
    # Round after round each part that has not given a picture yet offers its next file; then any file will do.
    pending = deque(parts)
    while pending and len(check.used) < wanted:
        part = pending.popleft()
        usable = check(paths[part.popleft()])
        remaining -= 1
        if part and not usable:
            pending.appendleft(part)
        elif not pending and len(check.used) < wanted:
            pending.extend(rest for rest in parts if rest)
        if on_progress is not None:
            on_progress(max(len(check.used), wanted - remaining), wanted)
    if not check.used:
        raise DataError(_nothing_usable(named, len(paths), check))
    order = sorted(range(len(check.used)), key=lambda index: check.used[index].path)
    distinct = _distinct(np.array([check.thumbnails[index] for index in order], np.float32))
    return ImageSet(
        used=tuple(check.used[index] for index in order),
        refused=tuple(sorted(check.refused, key=lambda refusal: refusal.path)),
        warnings=tuple(_warnings(check, count, len(paths), distinct)),
        found=len(paths),
        excluded=check.excluded,
        distinct=distinct,
    )


_ALLOWED = "give a folder of pictures, a glob such as 'images/**/*.jpg', or a .txt list with one path a line"


class _Checker:
    """Looks at one file after the other and sorts it into used, refused or excluded."""

    def __init__(self, exclude: frozenset[str]) -> None:
        self.used: list[ImageFile] = []
        self.thumbnails: list[NDArray[np.float32]] = []
        self.refused: list[Refusal] = []
        self.excluded = 0
        self._exclude = exclude
        self._seen: dict[str, Path] = {}

    @property
    def looked_at(self) -> int:
        return len(self.used) + len(self.refused) + self.excluded

    def __call__(self, path: Path) -> bool:
        """Look at one file and say whether it is used."""
        reason = self._look(path)
        if reason:
            self.refused.append(Refusal(path, reason))
        return reason == ""

    def _look(self, path: Path) -> str | None:
        """Why the file is refused, "" if it is used, None if it is excluded."""
        try:
            if not path.is_file():  # reading a pipe or a device would wait for ever
                return "is not a regular file" if path.exists() else "no such file"
            data = path.read_bytes()
        except OSError as error:
            return f"cannot be read ({(error.strerror or str(error)).lower()})"
        sha256 = hashlib.sha256(data).hexdigest()
        if sha256 in self._exclude:
            self.excluded += 1
            return None
        twin = self._seen.get(sha256)
        if twin is not None:
            return f"has the same content as {twin}"
        try:
            image = decode(data, name=str(path))
        except DataError as error:
            return str(error).removeprefix(f"{path}: ")
        height, width = image.shape[:2]
        if min(width, height) < MIN_SIDE:
            return f"is too small ({width} x {height} pixels; expected at least {MIN_SIDE} a side)"
        self._seen[sha256] = path
        self.used.append(ImageFile(path, sha256, (width, height)))
        self.thumbnails.append(_thumbnail(image))
        return ""


def _expand(pattern: str) -> Iterator[Path]:
    """Every file that a pattern names, in any order, as absolute paths."""
    path = Path(os.path.abspath(Path(pattern).expanduser()))  # noqa: PTH100 - resolve() would follow symbolic links
    if path.is_dir():
        pictures, others = _folder(path)
        if not pictures:
            found = f"{others} other files" if others else "nothing"
            raise DataError(f"{pattern}: holds no pictures ({found} found; looked for {', '.join(sorted(SUFFIXES))})")
        yield from pictures
    elif path.suffix.lower() == ".txt":
        yield from _listed(path, pattern)
    elif path.exists():
        yield path
    elif glob.has_magic(pattern):
        matches = [Path(match) for match in glob.glob(str(path), recursive=True)]  # noqa: PTH207 - ** follows links here
        if not matches:
            raise DataError(f"{pattern}: matches no file; {_ALLOWED}")
        for match in matches:
            yield from _folder(match)[0] if match.is_dir() else [match]
    else:
        raise DataError(f"{pattern}: no such file or folder; {_ALLOWED}")


def _folder(folder: Path) -> tuple[list[Path], int]:
    """The pictures of a folder and its subfolders, and how many other files there are."""
    pictures: list[Path] = []
    others = 0
    visited: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in visited:  # a link to a folder that contains it, or a second way to the same one
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            if Path(name).suffix.lower() in SUFFIXES and not name.startswith("."):
                pictures.append(Path(place, name))
            else:
                others += 1
    return pictures, others


def _listed(path: Path, pattern: str) -> Iterator[Path]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{pattern}: the list cannot be read ({error.strerror}); {_ALLOWED}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{pattern}: is not UTF-8 text ({error.reason} at byte {error.start})") from None
    lines = [line.strip() for line in text.splitlines()]
    entries = [line for line in lines if line and not line.startswith("#")]
    if not entries:
        raise DataError(f"{pattern}: the list names no pictures; write one path a line")
    for entry in entries:
        yield Path(os.path.abspath(path.parent / Path(entry).expanduser()))  # noqa: PTH100 - as above


def _parts(total: int, wanted: int, seed: int) -> list[deque[int]]:
    """Cut 0..total-1 into ``wanted`` equal parts, each shuffled.

    The order within a part comes from a hash rather than from a random generator, whose streams change between versions
    of numpy and Python.
    """

    def rank(index: int) -> bytes:
        return hashlib.sha256(f"{seed}/{index}".encode()).digest()

    return [
        deque(sorted(range(part * total // wanted, (part + 1) * total // wanted), key=rank)) for part in range(wanted)
    ]


def _thumbnail(image: Image) -> NDArray[np.float32]:
    """(256,) mean grey levels of a 16 x 16 grid over the picture."""
    height, width = image.shape[:2]
    rows = np.arange(_THUMBNAIL) * height // _THUMBNAIL
    columns = np.arange(_THUMBNAIL) * width // _THUMBNAIL
    sums = np.add.reduceat(image, rows, axis=0, dtype=np.uint32).sum(axis=2)
    sums = np.add.reduceat(sums, columns, axis=1)
    areas = np.outer(np.diff(rows, append=height), np.diff(columns, append=width))
    return np.asarray(sums / (3 * areas), np.float32).ravel()


def _distinct(thumbnails: NDArray[np.float32]) -> int:
    """Count the ``(N, 256)`` thumbnails that are not near an earlier one."""
    centred = thumbnails - thumbnails.mean(axis=0)  # keeps the subtraction of squares below exact to 0.01 levels
    squares = (centred**2).sum(axis=1)
    limit = _NEAR**2 * thumbnails.shape[1]
    repeats = 0
    for index in range(1, len(centred)):
        distances = squares[:index] + squares[index] - 2 * (centred[:index] @ centred[index])
        repeats += bool(distances.min() < limit)
    return len(centred) - repeats


def _warnings(check: _Checker, count: int | None, found: int, distinct: int) -> Iterable[str]:
    used, refused = len(check.used), len(check.refused)
    if refused > REFUSED_SHARE * check.looked_at:
        first = check.refused[0]
        yield (
            f"{refused} of {check.looked_at} images were refused ({100 * refused / check.looked_at:.0f} %), such as"
            f" {first.path}: {first.reason}"
        )
    if count is not None and used < count:
        excluded = f", {check.excluded} left out because they were used elsewhere" if check.excluded else ""
        yield f"{count} images were asked for, {used} can be used ({found} found, {refused} refused{excluded})"
    if used > 1 and distinct <= used / 2:
        yield (
            f"the images are nearly identical: only {distinct} of {used} differ from all others by more than"
            f" {_NEAR:.0f} of 255 grey levels; add other scenes, times of day and weather"
        )


def _nothing_usable(named: str, found: int, check: _Checker) -> str:
    if not check.refused:
        return f"{named}: all {found} images are left out because they were used elsewhere; add others"
    first = check.refused[0]
    excluded = f" and {check.excluded} were left out because they were used elsewhere" if check.excluded else ""
    return (
        f"{named}: no usable image; {len(check.refused)} of {found} files were refused{excluded},"
        f" such as {first.path}: {first.reason}"
    )

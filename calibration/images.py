"""The picture set of a calibration or an evaluation: what is used, what is refused and why.

Every picture is read and decoded once to be checked, then forgotten; whoever needs it decodes it again, through
``edge.image`` and ``edge.sources`` as the daemon does. A frame of a video is a picture named ``clip.mp4#frame=N``.
Which pictures are used depends on their paths, the seed and the count only, never on the order in which a file system
lists them.
"""

from __future__ import annotations

import glob
import hashlib
import math
import os
from collections import deque
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from edge.errors import DataError
from edge.image import decode
from edge.sources import clip
from edge.sources.clip import Clip
from edge.sources.folder import SUFFIXES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from edge.types import Image

__all__ = ["ImageFile", "ImageSet", "Refusal", "collect", "digest"]

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
    """One usable picture: a file, or a frame of a video."""

    path: Path
    """What to call it; ``clip.mp4#frame=N`` for a frame."""
    sha256: str
    """Of the file's content; of a frame, of its shape as text, ``(H, W, 3)``, and its decoded BGR pixels. Decoders may
    differ in last bits between machines, so that a frame is sure to be recognised only where it was hashed."""
    size_wh: tuple[int, int]
    """Upright, as decoded."""
    frame: int | None = None
    """Its number in its video, from 0; None for a picture file."""

    @property
    def file(self) -> Path:
        """The file that holds it."""
        return self.path if self.frame is None else self.path.with_name(self.path.name.rpartition("#")[0])


@dataclass(frozen=True, slots=True)
class Refusal:
    """A file that was looked at and is not used."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class ImageSet:
    """Checked pictures, decoded when they are asked for.

    Iterating gives (H, W, 3) uint8 BGR pictures in order of ``used``, one in memory at a time; a video is read through
    once.
    """

    used: tuple[ImageFile, ...]
    """In order of their files, frames in that of the video."""
    refused: tuple[Refusal, ...]
    """Of the files that were looked at, in order of their paths."""
    warnings: tuple[str, ...]
    found: int
    """Pictures that the patterns name: files, and of a video its frames, or one a second of them without a count."""
    excluded: int
    """Of the files that were looked at, those whose content the caller asked to leave out."""
    distinct: int
    """Pictures that do not nearly repeat another one."""
    digest: str = field(init=False)
    """SHA-256 over the sorted SHA-256s of the contents: independent of names and order."""
    _clips: dict[Path, Clip] = field(init=False, repr=False, compare=False)
    """The videos that ``load`` shares between its callers."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", digest(file.sha256 for file in self.used))
        object.__setattr__(self, "_clips", _clips(self.used))

    def __len__(self) -> int:
        return len(self.used)

    def __iter__(self) -> Iterator[Image]:
        with ExitStack() as stack:
            own = {path: stack.enter_context(video) for path, video in _clips(self.used).items()}
            for file in self.used:
                yield _load(file, own)

    def without(self, sha256: Collection[str]) -> ImageSet:
        """The same set less the pictures of these contents."""
        return replace(self, used=tuple(file for file in self.used if file.sha256 not in sha256))

    def load(self, index: int) -> Image:
        """Read and decode one picture of ``used``. May be called by several threads at once.

        Frames are cheap in nearly their order, whichever threads ask for them. Going back reads the video from its
        start. A video stays open until its last used frame is read, or the set is forgotten.

        Raises:
            DataError: the file is gone or was changed since it was checked.
        """
        return _load(self.used[index], self._clips)


def digest(sha256: Iterable[str]) -> str:
    """SHA-256 over the sorted SHA-256s of pictures' contents, one a line: what names a set."""
    return hashlib.sha256("\n".join(sorted(sha256)).encode()).hexdigest()


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
    covers the whole list. Files are looked at only until ``count`` pictures are found: a refused one is replaced. A
    video counts as many times as it has frames, which are counted by reading it; without a count it gives at most one
    frame a second.

    Args:
        patterns: folders (with their subfolders; hidden files and folders are passed over), globs (``**`` for any
            depth), single pictures and videos, and ``.txt`` lists with one path a line, relative to the list's folder,
            where blank lines and lines that start with ``#`` mean nothing. Of a folder only the pictures are used.
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
    entries: list[_Entry] = []
    for path in paths:
        entries += check.frames(path, all_of_them=count is not None) if _is_video(path) else [(path, None)]
    found = len(entries) + len(check.refused)
    with closing(check):
        _choose(check, entries, count, seed, on_progress)
    if not check.used:
        raise DataError(_nothing_usable(named, found, check))
    order = sorted(range(len(check.used)), key=lambda index: (check.used[index].file, check.used[index].frame))
    distinct = _distinct(np.array([check.thumbnails[index] for index in order], np.float32))
    return ImageSet(
        used=tuple(check.used[index] for index in order),
        refused=tuple(sorted(check.refused, key=lambda refusal: refusal.path)),
        warnings=tuple(_warnings(check, count, found, distinct)),
        found=found,
        excluded=check.excluded,
        distinct=distinct,
    )


_ALLOWED = "give a folder of pictures, a video, a glob such as 'images/**/*.jpg', or a .txt list with one path a line"

_Entry: TypeAlias = tuple[Path, int | None]
"""A picture file and None, or a video and the number of a frame."""


class _Checker:
    """Looks at one picture after the other and sorts it into used, refused or excluded."""

    def __init__(self, exclude: frozenset[str]) -> None:
        self.used: list[ImageFile] = []
        self.thumbnails: list[NDArray[np.float32]] = []
        self.refused: list[Refusal] = []
        self.excluded = 0
        self.broken: list[str] = []
        """One warning for each video that breaks off."""
        self.sampled: list[tuple[int, int]] = []
        """Of each video that gives one frame a second: those, and all."""
        self._exclude = exclude
        self._seen: dict[str, Path] = {}
        self._clip: Clip | None = None

    @property
    def looked_at(self) -> int:
        return len(self.used) + len(self.refused) + self.excluded

    def close(self) -> None:
        if self._clip is not None:
            self._clip.close()

    def frames(self, path: Path, *, all_of_them: bool) -> list[_Entry]:
        """The frames of a video, or at most one a second of them; none if it is refused."""
        try:
            _require_regular(path)
            length = clip.measure(path)
        except (DataError, OSError) as error:
            self.refused.append(Refusal(path, _reason(path, error)))
            return []
        if length.missing is not None:
            whole = length.frames + length.missing
            self.broken.append(f"{path}: breaks off after {length.frames} of about {whole} frames; those are used")
        numbers = range(0, length.frames, 1 if all_of_them else math.ceil(length.fps))
        if len(numbers) < length.frames:
            self.sampled.append((len(numbers), length.frames))
        return [(path, number) for number in numbers]

    def __call__(self, entry: _Entry) -> bool:
        """Look at one picture and say whether it is used."""
        path, frame = entry
        name = path if frame is None else path.with_name(f"{path.name}#frame={frame}")
        reason = self._look(path, frame, name)
        if reason:
            self.refused.append(Refusal(name, reason))
        return reason == ""

    def _look(self, path: Path, frame: int | None, name: Path) -> str | None:
        """Why the picture is refused, "" if it is used, None if it is excluded."""
        try:
            _require_regular(path)
            sha256, decoded = _read(path, frame, self._opened)
            if sha256 in self._exclude:
                self.excluded += 1
                return None
            twin = self._seen.get(sha256)
            if twin is not None:
                return f"has the same content as {twin}"
            image = decoded()
        except (DataError, OSError) as error:
            return _reason(path, error)
        height, width = image.shape[:2]
        if min(width, height) < MIN_SIDE:
            return f"is too small ({width} x {height} pixels; expected at least {MIN_SIDE} a side)"
        self._seen[sha256] = name
        self.used.append(ImageFile(name, sha256, (width, height), frame))
        self.thumbnails.append(_thumbnail(image))
        return ""

    def _opened(self, path: Path) -> Clip:
        """The video, kept open until the next one is asked for."""
        if self._clip is None or self._clip.path != path:
            self.close()
            self._clip = Clip(path)
        return self._clip


def _choose(
    check: _Checker,
    entries: Sequence[_Entry],
    count: int | None,
    seed: int,
    on_progress: Callable[[int, int], None] | None,
) -> None:
    """Look at entries until ``count`` are used.

    Each part offers one; then those parts whose was refused offer the rest of theirs; at last any other will do.
    """
    wanted = len(entries) if count is None else min(count, len(entries))
    parts = _parts(len(entries), wanted, seed)
    if any(frame is not None for _, frame in entries):
        # Second chances in the order of the list: each round then reads a video once, not once for each refusal.
        parts = [deque([part[0], *sorted(list(part)[1:])]) for part in parts]
    pending = deque(parts)
    looked_at = 0
    while pending and len(check.used) < wanted:
        part = pending.popleft()
        usable = check(entries[part.popleft()])
        looked_at += 1
        if part and not usable:
            (pending.append if looked_at <= len(parts) else pending.appendleft)(part)
        elif not pending and len(check.used) < wanted:
            pending.extend(rest for rest in parts if rest)
        if on_progress is not None:
            on_progress(max(len(check.used), wanted - (len(entries) - looked_at)), wanted)


def _is_video(path: Path) -> bool:
    return path.suffix.lower() in clip.SUFFIXES


def _require_regular(path: Path) -> None:
    if not path.is_file():  # reading a pipe or a device would wait for ever
        raise DataError(f"{path}: {'is not a regular file' if path.exists() else 'no such file'}")


def _reason(path: Path, error: DataError | OSError) -> str:
    if isinstance(error, OSError):
        return f"cannot be read ({(error.strerror or str(error)).lower()})"
    return str(error).removeprefix(f"{path}: ")


def _read(path: Path, frame: int | None, opened: Callable[[Path], Clip]) -> tuple[str, Callable[[], Image]]:
    """The SHA-256 of a picture, and what decodes it: a file that is refused for its content need not be decoded."""
    if frame is None:
        data = path.read_bytes()
        return hashlib.sha256(data).hexdigest(), lambda: decode(data, name=str(path))
    image = opened(path).frame(frame)
    hashed = hashlib.sha256(str(image.shape).encode())
    hashed.update(image.data)
    return hashed.hexdigest(), lambda: image


def _load(file: ImageFile, clips: Mapping[Path, Clip]) -> Image:
    try:
        sha256, decoded = _read(file.file, file.frame, clips.__getitem__)
    except OSError as error:
        raise DataError(f"{file.path}: cannot be read any more ({error.strerror})") from error
    except DataError as error:  # of a video, which could be read when it was checked
        raise DataError(f"{error}; it was changed while it was in use; start again") from error
    if sha256 != file.sha256:
        raise DataError(f"{file.path}: was changed while it was in use; start again")
    return decoded()


def _clips(used: Iterable[ImageFile]) -> dict[Path, Clip]:
    """The videos of a set, not open yet."""
    frames: dict[Path, list[int]] = {}
    for file in used:
        if file.frame is not None:
            frames.setdefault(file.file, []).append(file.frame)
    return {path: Clip(path, numbers) for path, numbers in frames.items()}


def _expand(pattern: str) -> Iterator[Path]:
    """Every file that a pattern names, in any order, as absolute paths."""
    path = Path(os.path.abspath(Path(pattern).expanduser()))  # noqa: PTH100 - resolve() would follow symbolic links
    if path.is_dir():
        pictures, others = _folder(path)
        if not pictures:
            videos = sum(map(_is_video, others))
            named = f", {videos} of them videos, which must be named, such as '{pattern}/*.mp4'" if videos else ""
            found = f"{len(others)} other files{named}" if others else "nothing"
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


def _folder(folder: Path) -> tuple[list[Path], list[Path]]:
    """The pictures of a folder and its subfolders, and the other files."""
    pictures: list[Path] = []
    others: list[Path] = []
    visited: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in visited:  # a link to a folder that contains it, or a second way to the same one
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            path = Path(place, name)
            picture = path.suffix.lower() in SUFFIXES and not name.startswith(".")
            (pictures if picture else others).append(path)
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
    yield from check.broken
    if check.sampled:
        some, frames = (sum(numbers) for numbers in zip(*check.sampled, strict=True))
        yield (
            f"videos give at most one frame a second, {some} of {frames} frames, since no count limits the images; to"
            " use other frames, save them as pictures"
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

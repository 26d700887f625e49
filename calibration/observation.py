"""What has been observed of a model so far: its histograms, and on which pictures they were counted.

Histograms add up, so that pictures may be observed on several machines, at several times, or in several attempts. They
may only be added up if they are of the same model behind the same pre-processing, and a picture may only count once:
an observation therefore carries what it belongs to and the hash of every picture in it.
"""

from __future__ import annotations

import io
import tokenize
import zipfile
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
from msgspec import Struct

from calibration import histogram
from calibration.histogram import BINS, Histogram
from edge import config, files
from edge.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["Group", "Identity", "Observation", "difference", "group_of", "load", "merge"]
__all__ += ["merge_files", "save"]

HELD_SHARE = 4
"""One picture in so many is held out of what ranges are fitted to, to try them on."""


class Identity(Struct, frozen=True, kw_only=True):
    """What must be equal for histograms to be added up.

    The version of onnxruntime is not part of it: versions differ in the last bits of an activation, which moves a value
    to a neighbouring bin at most. An observation tells which versions computed it.
    """

    model_sha256: str
    """Of the FP32 ONNX file."""
    model_data: dict[str, str] = {}
    """SHA-256 by name of the files beside it that hold its weights, where they are not in it."""
    input: config.Input
    shape: tuple[int, ...]
    """Of the model's input, all dimensions fixed."""
    bins: int = BINS


@dataclass(slots=True)
class Group:
    """Pictures, and what was counted on them."""

    sha256: set[str]
    """Of the pictures' contents."""
    histograms: dict[str, Histogram]
    """By tensor name, in the order of the model: its inputs first."""


@dataclass(slots=True)
class Observation:
    """Histograms of one model, pictures that are held out apart. Both groups have all tensors, counted or not.

    Raises:
        ValueError: the groups differ in their tensors, or a picture is in the wrong one.
    """

    identity: Identity
    fit: Group
    held: Group
    onnxruntime: set[str]
    """The versions that computed it."""

    def __post_init__(self) -> None:
        if list(self.fit.histograms) != list(self.held.histograms):
            raise ValueError("its two groups of histograms have different tensors")
        for name, group in (("fit", self.fit), ("held", self.held)):
            wrong = sorted(picture for picture in group.sha256 if group_of(picture) != name)
            if wrong:
                raise ValueError(f"picture {wrong[0]} is in the group '{name}', where it does not belong")

    @classmethod
    def empty(cls, identity: Identity, names: Sequence[str]) -> Observation:
        """An observation of no picture yet."""
        fit, held = (Group(set(), {name: Histogram() for name in names}) for _ in range(2))
        return cls(identity, fit, held, set())

    @property
    def images(self) -> int:
        """The number of pictures."""
        return len(self.fit.sha256) + len(self.held.sha256)

    @property
    def sha256(self) -> set[str]:
        """Of all pictures' contents; a new set."""
        return self.fit.sha256 | self.held.sha256

    @property
    def tensors(self) -> list[str]:
        """Names of what was observed, in the order of the model."""
        return list(self.fit.histograms)

    def group(self, sha256: str) -> Group:
        """The one that a picture belongs to."""
        return self.fit if group_of(sha256) == "fit" else self.held

    def merged(self) -> dict[str, Histogram]:
        """The histograms of all pictures; new ones."""
        return {name: _sum(one, self.held.histograms[name]) for name, one in self.fit.histograms.items()}


def group_of(sha256: str) -> Literal["fit", "held"]:
    """Where a picture belongs, by its content alone: machines agree, and a picture added later moves no other."""
    return "held" if int(sha256[:8], 16) % HELD_SHARE == 0 else "fit"


def difference(first: Identity, second: Identity, *, places: tuple[str, str] = ("there", "here")) -> list[str]:
    """What keeps the histograms of two identities from being added up, one sentence for each field.

    Args:
        first: one.
        second: the other.
        places: how the sentences speak of the two: ``input.divide_by is 255.0 there and 1.0 here``.
    """
    a, b = _fields(first), _fields(second)
    return [
        f"{key} is {_shown(a.get(key, _ABSENT))} {places[0]} and {_shown(b.get(key, _ABSENT))} {places[1]}"
        for key in {**a, **b}
        if a.get(key, _ABSENT) != b.get(key, _ABSENT)
    ]


def merge(first: Observation, second: Observation, *, names: tuple[str, str]) -> Observation:
    """Two observations as one, as if all pictures had been observed at once. A new one; tensors in the first's order.

    Args:
        first: one.
        second: the other, of other pictures.
        names: what to call the two in messages, such as their files.

    Raises:
        DataError: they are of different models, pre-processing or tensors, or have a picture in common.
    """
    cannot = f"{names[0]} and {names[1]} cannot be added up"
    differences = difference(first.identity, second.identity, places=(f"in {names[0]}", f"in {names[1]}"))
    if differences:
        raise DataError(f"{cannot}: {'; '.join(differences)}")
    other = set(first.tensors) ^ set(second.tensors)
    if other:
        raise DataError(f"{cannot}: {len(other)} tensors are in only one of them, such as '{min(other)}'")
    twice = sorted(first.sha256 & second.sha256)
    if twice:
        shown = ", ".join(f"{sha256[:12]}..." for sha256 in twice[:_SHOWN])
        more = f" and {len(twice) - _SHOWN} more" if len(twice) > _SHOWN else ""
        raise DataError(f"{cannot}: {len(twice)} pictures are in both and would count twice (sha256 {shown}{more})")
    return Observation(
        identity=first.identity,
        fit=_union(first.fit, second.fit),
        held=_union(first.held, second.held),
        onnxruntime=first.onnxruntime | second.onnxruntime,
    )


def merge_files(paths: Sequence[Path]) -> Observation:
    """What all the files hold together.

    Args:
        paths: one or more.

    Raises:
        DataError: a file is not one, or two of them cannot be added up.
    """
    total, names = load(paths[0]), str(paths[0])
    for path in paths[1:]:
        total = merge(total, load(path), names=(names, str(path)))
        names += f" + {path}"
    return total


def save(path: Path, observation: Observation) -> None:
    """Write an observation to an .npz file, at once: readers see the old file or the new.

    The bytes depend on what was observed only, not on the order of the pictures or on when they were observed.

    Args:
        path: of the file.
        observation: what to write.

    Raises:
        OSError: it cannot be written.
    """
    header = _Header(
        schema="edge.histograms/1",
        identity=observation.identity,
        fit=observation.fit.sha256,
        held=observation.held.sha256,
        onnxruntime=observation.onnxruntime,
    )
    encoded = msgspec.json.encode(header, order="deterministic")
    buffer = io.BytesIO()
    # What numpy's savez writes, but a column at a time, since all of them would double what the histograms take.
    # Level 1 is four times as fast as the usual 6, and the file a tenth larger (370 tensors of YOLOX-Nano).
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        _write(archive, "header", np.frombuffer(encoded, np.uint8))
        for group in _GROUPS:
            for name, column in histogram.to_columns(getattr(observation, group).histograms).items():
                _write(archive, f"{group}.{name}", column)
    files.write(path, buffer.getvalue())


def load(path: Path) -> Observation:
    """Read what ``save`` wrote.

    Raises:
        DataError: there is no such file, or it is damaged or something else.
    """
    try:
        columns = _read(path)
        header = msgspec.json.decode(columns["header"].tobytes(), type=_Header)
        fit, held = (Group(getattr(header, group), histogram.from_columns(_of(group, columns))) for group in _GROUPS)
        return Observation(header.identity, fit, held, header.onnxruntime)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({(error.strerror or str(error)).lower()})") from error
    except KeyError as error:
        raise DataError(f"{path}: is not a file of observed histograms (it has no member {error})") from error
    except _DAMAGE as error:
        raise DataError(f"{path}: is not a file of observed histograms, or damaged ({error})") from error


class _Header(Struct, frozen=True, kw_only=True):
    """What the file holds besides the columns."""

    schema: Literal["edge.histograms/1"]
    identity: Identity
    fit: set[str]
    held: set[str]
    onnxruntime: set[str]


_GROUPS = ("fit", "held")

_ABSENT = "absent"
_SHOWN = 3
"""Pictures that a message lists."""

# What zipfile raises for an archive that is cut off or altered: it trusts the lengths and methods that it reads there.
# numpy, msgspec and our own checks raise ValueError.
_DAMAGE: tuple[type[Exception], ...] = (ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError)
_DAMAGE += (RuntimeError, MemoryError, OverflowError, tokenize.TokenError)  # sizes and headers that cannot be meant


def _write(archive: zipfile.ZipFile, name: str, column: NDArray[Any]) -> None:
    # open() dates a member that it is given by name 1980, so that the file does not tell when it was written.
    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
        np.lib.format.write_array(member, column, allow_pickle=False)


def _read(path: Path) -> dict[str, NDArray[Any]]:
    """The members of an .npz file.

    Each is read to its end before it is looked at, since zipfile compares the checksum only there.
    """
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        return {
            name.removesuffix(".npy"): np.lib.format.read_array(io.BytesIO(archive.read(name)), allow_pickle=False)
            for name in archive.namelist()
        }


def _of(group: str, columns: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    prefix = f"{group}."
    return {name.removeprefix(prefix): column for name, column in columns.items() if name.startswith(prefix)}


def _fields(identity: Identity) -> dict[str, object]:
    """Every single value by its name."""
    values: dict[str, object] = msgspec.structs.asdict(identity)
    values |= {f"model_data.{name}": sha256 for name, sha256 in identity.model_data.items()}
    values |= {f"input.{key}": value for key, value in msgspec.structs.asdict(identity.input).items()}
    del values["model_data"], values["input"]
    return values


def _shown(value: object) -> str:
    return f"{value[:12]}..." if isinstance(value, str) and len(value) == 64 else str(value)


def _union(first: Group, second: Group) -> Group:
    histograms = {name: _sum(one, second.histograms[name]) for name, one in first.histograms.items()}
    return Group(first.sha256 | second.sha256, histograms)


def _sum(first: Histogram, second: Histogram) -> Histogram:
    total = Histogram()
    total.merge(first)
    total.merge(second)
    return total

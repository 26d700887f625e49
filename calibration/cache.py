"""TensorRT's calibration cache: the text file of INT8 scales. Pure: text in, values out, and back byte for byte.

The format, as public files and NVIDIA's own readers show it: the first line is ``TRT-<version>-<algorithm>``; then one
line a tensor, ``<name>: <hex>``, the name ending at the line's *last* colon (TensorFlow names hold colons), the number
being the scale, amax / 127, as the bits of an IEEE-754 float32 in hexadecimal: most significant digit first, lower
case, no leading zeros. Constants and shape tensors have no line.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Cache", "parse", "render", "version_digits"]

ALGORITHM = "EntropyCalibration2"
"""What DLA requires, and what TensorRT's IInt8EntropyCalibrator2 looks for in the header."""

_HEADER = re.compile(r"TRT-(\d{4,6})-(\w+)")


@dataclass(frozen=True, slots=True)
class Cache:
    """A parsed cache."""

    tensorrt: str
    """Version, such as 8.5.2."""
    algorithm: str
    scales: dict[str, float]
    """Scale (amax / 127) by tensor name, in the file's order; each is exactly a float32."""

    @property
    def header(self) -> str:
        """The first line."""
        return f"TRT-{version_digits(self.tensorrt)}-{self.algorithm}"


def parse(text: str, *, source: str) -> Cache:
    """Read a cache.

    Args:
        text: the file's content.
        source: the file's name, for messages.

    Raises:
        DataError: it is no calibration cache, or a line of it is damaged; the message names the line.
    """
    first, *rest = text.split("\n")
    header = _HEADER.fullmatch(first.rstrip("\r"))
    if header is None:
        raise DataError(
            f"{source}: starts with {first[:60]!r}; a calibration cache starts with a line such as"
            " 'TRT-100300-EntropyCalibration2'"
        )
    scales: dict[str, float] = {}
    for number, line in enumerate(rest, start=2):
        if not line.strip():
            continue
        name, colon, value = line.rstrip("\r").rpartition(":")
        if not colon or not re.fullmatch(r"[0-9a-fA-F]{1,8}", value.strip()):
            raise DataError(f"{source}:{number}: is {line[:80]!r}; expected '<tensor>: <up to 8 hex digits>'")
        bits = int(value, 16)
        if bits >= 0x7F800000:
            raise DataError(f"{source}:{number}: scale of tensor '{name}' is no finite number of at least 0")
        if name in scales:
            raise DataError(f"{source}:{number}: tensor '{name}' is listed twice")
        scales[name] = struct.unpack(">f", bits.to_bytes(4, "big"))[0]
    return Cache(_version(header[1]), header[2], scales)


def render(scales: Mapping[str, float], *, tensorrt: str, algorithm: str = ALGORITHM) -> str:
    """Write a cache.

    Args:
        scales: scale by tensor name; rounded to float32.
        tensorrt: version of the TensorRT that will read it, such as 10.3.0: another one rejects the header.
        algorithm: of the calibrator that will read it.

    Raises:
        ValueError: a scale is negative or no finite number, or a name has a line break.
    """
    lines = [f"TRT-{version_digits(tensorrt)}-{algorithm}"]
    for name, scale in scales.items():
        bits = int.from_bytes(struct.pack(">f", scale + 0.0), "big")  # + 0.0: a negative zero becomes zero
        if "\n" in name or "\r" in name:
            raise ValueError(f"tensor {name!r} has a line break in its name, which the format cannot hold")
        if bits >= 0x7F800000:  # infinity, NaN and everything with the sign bit
            raise ValueError(f"scale of tensor '{name}' is {scale}; expected a finite number of at least 0")
        lines.append(f"{name}: {bits:x}")
    return "\n".join(lines) + "\n"


def version_digits(version: str) -> str:
    """``8.5.2`` -> ``8502``, ``10.3.0`` -> ``100300``: the minor version gets two digits from TensorRT 10 on.

    Raises:
        ValueError: it is no such version.
    """
    if not re.fullmatch(r"\d{1,2}\.\d{1,2}(\.\d{1,2})?", version):
        raise ValueError(f"{version!r} is no TensorRT version; expected one such as 10.3.0")
    major, minor, patch = (int(part) for part in [*version.split("."), "0"][:3])
    return str(major * 10000 + minor * 100 + patch if major >= 10 else major * 1000 + minor * 100 + patch)


def _version(digits: str) -> str:
    number = int(digits)
    major = number // 10000 if number >= 100000 else number // 1000
    minor, patch = divmod(number % (10000 if number >= 100000 else 1000), 100)
    return f"{major}.{minor}.{patch}"

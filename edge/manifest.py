"""What a calibrated model was made from and for: the contract between calibration and the device.

``calibration.json`` stands beside what calibration wrote. Whoever uses one of those files asks here first, so that a
model that was calibrated with another pre-processing, or from other weights, is refused instead of silently wrong.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec import Struct

from edge import config
from edge.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CACHE", "HISTOGRAMS", "INT8_MODEL", "MANIFEST", "PARTIAL", "RANGES", "REPORT", "Artifact", "Manifest"]
__all__ += ["artifact_to_run", "cache_to_use", "outdated", "read", "sha256_of"]

# What `edge-calibrate calibrate` leaves in the artifacts folder (DESIGN 16).
CACHE = "calibration.cache"
INT8_MODEL = "model.int8.onnx"
RANGES = "ranges.json"
HISTOGRAMS = "histograms.npz"
PARTIAL = ".histograms.partial.npz"
"""What an interrupted calibration has observed so far."""
MANIFEST = "calibration.json"
REPORT = "report.html"


class ImageSetRecord(Struct, frozen=True, kw_only=True):
    """The pictures that the ranges come from."""

    digest: str
    """SHA-256 over the sorted SHA-256s of the pictures' contents."""
    count: int
    sha256: list[str]
    """Of each picture's content, so that an evaluation can leave these pictures out."""


class Manifest(Struct, frozen=True, kw_only=True):
    """Provenance of one calibration."""

    schema: Literal["edge.calibration/1"] = "edge.calibration/1"
    tool: str
    """``jetson-edge 0.1.0``."""
    created_at: str
    """RFC 3339, UTC."""
    model: str
    """Name in the deployment."""
    model_sha256: str
    """Of the FP32 ONNX file."""
    model_data: dict[str, str] = {}
    """SHA-256 by name of the files beside it that hold its weights, where they are not in it."""
    input: config.Input
    method: str
    """As the deployment asks for it; ``ranges.json`` says which one each tensor got."""
    ties: Literal["dla", "none"] = "none"
    tensorrt: str
    """Version that the calibration cache is written for."""
    fp16: list[config.LayerRule]
    fp16_layers: list[str]
    """Names of the layers that the rules chose, as ``trtexec --layerPrecisions`` takes them."""
    images: ImageSetRecord
    files: dict[str, str]
    """SHA-256 by name of each file written beside the manifest."""
    packages: dict[str, str]
    """Versions of what computed it."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """A model file that may be run."""

    path: Path
    sha256: str
    precision: str

    @classmethod
    def of(cls, path: Path, precision: str) -> Artifact:
        """A file that is taken as it is.

        Raises:
            ModelError: it is missing.
        """
        if not path.is_file():
            raise ModelError(f"{path}: no such model file")
        return cls(path, sha256_of(path), precision)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def read(folder: Path) -> Manifest | None:
    """The manifest of a calibration's folder, or None where nothing was calibrated yet.

    Raises:
        ModelError: it is damaged.
    """
    path = folder / MANIFEST
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise ModelError(f"{path}: is not a calibration manifest ({error}); calibrate again") from None


def outdated(model: config.Model, manifest: Manifest) -> list[str]:
    """What the deployment says of the calibration now, where that is not what was done; one sentence each.

    The calibrated model still is what it says it is, so this is no error.
    """
    section = model.calibration
    if section is None:
        return []
    pairs = [(key, getattr(section, key), getattr(manifest, key)) for key in ("method", "ties", "tensorrt", "fp16")]
    return [
        f"calibration.{key} has changed since the calibration in {model.artifacts_dir}; calibrate again for it to count"
        for key, now, then in pairs
        if now != then
    ]


def artifact_to_run(model: config.Model, precision: Literal["int8", "fp32"]) -> Artifact:
    """The file to run for a model, after checking that it is what the deployment means.

    Raises:
        ModelError: it is missing, or something it was calibrated with differs; the message names what.
    """
    source = Path(model.path)
    if not source.is_file():
        raise ModelError(f"models.{model.name}.path: {source}: no such model file")
    if precision == "fp32":
        return Artifact.of(source, "fp32")
    folder = model.artifacts_dir
    manifest = read(folder)
    if manifest is None:
        raise ModelError(
            f"models.{model.name}: {folder} holds no calibration; run edge-calibrate calibrate first, or set"
            " engine.precision to fp32"
        )
    path = folder / INT8_MODEL
    if not path.is_file():
        raise ModelError(f"{path}: is missing, although {folder / MANIFEST} names it; calibrate again")
    differences = _differences(model, source, path, manifest)
    if differences:
        raise ModelError(f"{path}: does not belong to this deployment: {'; '.join(differences)}; calibrate again")
    return Artifact(path, manifest.files[INT8_MODEL], "int8")


def cache_to_use(model: config.Model, tensorrt: str) -> Path:
    """The calibration cache for a model, after checking that it is what the deployment and TensorRT take.

    Args:
        model: of the deployment.
        tensorrt: version of the library that will read it: it skips a cache of another one without a word.

    Raises:
        ModelError: it is missing, or was made for another model, pre-processing or TensorRT; the message names what.
    """
    source = Path(model.path)
    if not source.is_file():
        raise ModelError(f"models.{model.name}.path: {source}: no such model file")
    folder = model.artifacts_dir
    path = folder / CACHE
    manifest = read(folder)
    if manifest is None or not path.is_file():
        missing = path if manifest is not None else folder / MANIFEST
        raise ModelError(f"{missing}: no such file; without it nobody knows what a cache is for: calibrate again")
    differences = _differences(model, source, path, manifest)
    if _version(tensorrt) != _version(manifest.tensorrt):
        differences.append(f"TensorRT is {tensorrt} but the cache is for {manifest.tensorrt}")
    if differences:
        raise ModelError(f"{path}: does not belong to this deployment: {'; '.join(differences)}; calibrate again")
    return path


def _version(text: str) -> tuple[int, ...]:
    """``10.3`` and ``10.3.0`` are one version."""
    return tuple(int(part) for part in [*text.split("."), "0", "0"][:3])


def _differences(model: config.Model, source: Path, path: Path, manifest: Manifest) -> list[str]:
    found: list[str] = []
    if sha256_of(source) != manifest.model_sha256:
        found.append(f"{source} has changed since (sha256 {manifest.model_sha256[:12]}... was calibrated)")
    for name, digest in manifest.model_data.items():
        beside = source.parent / name
        if not beside.is_file() or sha256_of(beside) != digest:
            found.append(f"{beside} has changed since or is gone")
    if sha256_of(path) != manifest.files.get(path.name):
        found.append(f"{path.name} itself was changed after it was written")
    now: Mapping[str, object] = msgspec.structs.asdict(model.input)
    then: Mapping[str, object] = msgspec.structs.asdict(manifest.input)
    found += [f"input.{key} is {now[key]} but was {then[key]}" for key in now if now[key] != then[key]]
    return found

"""What a calibrated model was made from and for: the contract between calibration and the device.

``calibration.json`` stands beside what calibration wrote. Whoever uses one of those files asks here first, so that a
model that was calibrated with another pre-processing, or from other weights, is refused instead of silently wrong.
"""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import Struct

from edge import config
from edge.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "CACHE",
    "ENGINE_CACHE",
    "ENGINE_MANIFEST",
    "HISTOGRAMS",
    "INT8_MODEL",
    "MANIFEST",
    "PARSED",
    "PARTIAL",
    "PLACEMENT",
    "PLAN",
]
__all__ += ["RANGES", "REPORT", "TIMING_CACHE", "Artifact", "Device", "EngineManifest", "Manifest", "ParityRecord"]
__all__ += [
    "artifact_to_run",
    "cache_to_use",
    "device_differences",
    "engine_to_run",
    "outdated",
    "ranges_to_use",
    "read",
    "read_engine",
    "sha256_of",
]

# What `edge-calibrate calibrate` leaves in the artifacts folder (DESIGN 16).
CACHE = "calibration.cache"
INT8_MODEL = "model.int8.onnx"
RANGES = "ranges.json"
HISTOGRAMS = "histograms.npz"
PARTIAL = ".histograms.partial.npz"
"""What an interrupted calibration has observed so far."""
MANIFEST = "calibration.json"
REPORT = "report.html"

# What `edge-calibrate build` leaves there.
PLAN = "engine.plan"
"""As TensorRT serialises it, unwrapped: trtexec and Triton load it too."""
ENGINE_MANIFEST = "engine.json"
PLACEMENT = "engine.layers.json"
"""Where each layer runs, and in which precision."""
PARSED = "engine.onnx"
"""What TensorRT has parsed, where that is neither the model nor the one with Q/DQ."""
ENGINE_CACHE = "engine.cache"
"""The calibration cache written anew for the TensorRT of the device."""
TIMING_CACHE = "timing.cache"


class ImageSetRecord(Struct, frozen=True, kw_only=True):
    """The pictures that the ranges come from."""

    digest: str
    """SHA-256 over the sorted SHA-256s of the pictures' contents."""
    count: int
    sha256: list[str]
    """Of each picture's content, so that an evaluation can leave these pictures out."""


class Provenance(Struct, frozen=True, kw_only=True):
    """What was made of which model, by what, and when."""

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


class Manifest(Provenance, frozen=True, kw_only=True):
    """Provenance of one calibration."""

    schema: Literal["edge.calibration/1"] = "edge.calibration/1"
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


class Device(Struct, frozen=True, kw_only=True):
    """What a plan is tied to, as ``edge.engine.tensorrt.probe`` finds it."""

    name: str
    """Of the GPU, such as Orin; only told."""
    tensorrt: str
    """A plan runs with the very version that built it."""
    compute_capability: str
    """8.7 for Orin."""
    integrated: bool
    """GPU and CPU share their memory."""
    dla_cores: int
    multiprocessors: int = 0
    """In use; only told, since Orin's modules and their power modes differ in it. 0 is not known."""
    cuda: str
    """Of the driver; only told."""
    l4t: str | None = None
    """Jetson Linux, such as 36.4.3; None elsewhere. Only told."""


class ParityRecord(Struct, frozen=True, kw_only=True):
    """How a plan compares with FP32 in onnxruntime."""

    images: int
    cosine: float
    """Smallest, of all outputs."""
    relative_error: float | None
    """Largest; None where the plan gives NaN or infinite values."""
    agreement: float | None
    """Mean over the pictures; None where neither gives any answer."""
    failures: list[str]
    """Limits that were missed; a plan with any is installed only when told so."""


class EngineManifest(Provenance, frozen=True, kw_only=True):
    """What a plan was built from and for."""

    schema: Literal["edge.engine/1"] = "edge.engine/1"
    precision: Literal["int8", "fp16", "fp32"]
    """What it runs in; a fallback may have made it another one than the deployment asks for."""
    quantization: Literal["none", "cache", "ranges", "calibrator", "qdq"]
    dla_core: int | None
    """Core it was built for, None for the GPU."""
    fallback: str | None
    """The fallback that made it pass, if it took one."""
    device: Device
    settings: dict[str, Any] = {}
    """What the deployment asked for, as ``engine_settings`` gives it."""
    requested: dict[str, str]
    """Digest of each thing that the build depends on, by what it is; another one means build again."""
    made_from: dict[str, str] = {}
    """SHA-256 by name of the calibration's files that it was built from."""
    shapes: dict[str, tuple[int, ...]] = {}
    """Of inputs and outputs."""
    io_scales: dict[str, float] = {}
    """Scale of INT8 inputs and outputs by tensor name."""
    parity: ParityRecord | None
    """None where it was not compared."""
    files: dict[str, str]
    """SHA-256 by name of each file written beside the manifest."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """A model file that may be run."""

    path: Path
    sha256: str
    precision: str
    engine: EngineManifest | None = None
    """What a plan was built for; None for an ONNX model, and for a plan that comes without."""

    @classmethod
    def of(cls, path: Path, precision: str) -> Artifact:
        """A file that is taken as it is; of a plan, its manifest if that stands beside it.

        Raises:
            ModelError: it is missing.
        """
        if not path.is_file():
            raise ModelError(f"{path}: no such model file")
        digest = sha256_of(path)
        beside = None if path.suffix == ".onnx" else read_engine(path.parent)
        if beside is not None and beside.files.get(path.name) == digest:
            return cls(path, digest, beside.precision, beside)
        return cls(path, digest, precision)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def versions_of(*packages: str) -> dict[str, str]:
    """Versions of those that are installed; onnxruntime comes as one of several packages."""
    found: dict[str, str] = {}
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


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


def read_engine(folder: Path) -> EngineManifest | None:
    """The manifest of the plan in a folder, or None where none was built yet.

    Raises:
        ModelError: it is damaged.
    """
    path = folder / ENGINE_MANIFEST
    try:
        return msgspec.json.decode(path.read_bytes(), type=EngineManifest)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise ModelError(f"{path}: is not an engine manifest ({error}); build again") from None


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


def engine_settings(section: config.Engine) -> dict[str, Any]:
    """What of the section a built engine depends on: not who runs it, and not on which of two equal DLA cores."""
    given: dict[str, Any] = msgspec.to_builtins(section)
    for key in ("backend", "providers", "threads"):
        del given[key]
    if given["dla"] is not None:
        del given["dla"]["core"]
    return given


def reservations(model: config.Model, engine: EngineManifest) -> list[str]:
    """What a person should know of an engine that may be run, one sentence each.

    The deployment, or the calibration, may have changed since; it may run in another precision than asked for; it may
    never have kept the limits. It still is what its manifest says, so this is no error.
    """
    now = engine_settings(model.engine)
    changed = [f"engine.{key} has changed" for key, then in engine.settings.items() if now.get(key) != then]
    calibration = read(model.artifacts_dir)
    files = {} if calibration is None else calibration.files
    changed += [f"{name} is another one" for name, digest in engine.made_from.items() if files.get(name) != digest]
    found = [f"{text} since the engine was built; build again for it to count" for text in changed]
    if engine.fallback is not None:
        found.append(f"the engine runs in {engine.precision}, since what was asked for was not close enough to FP32")
    if engine.parity is None:
        found.append("the engine was installed with --force, and never compared with FP32")
    elif engine.parity.failures:
        found.append(f"the engine was installed with --force, although {'; '.join(engine.parity.failures)}")
    return found


def device_differences(then: EngineManifest, now: Device) -> list[str]:
    """Why a plan does not run on a device, one clause each; empty where it does."""
    pairs = [
        ("TensorRT", then.device.tensorrt, now.tensorrt),
        ("compute capability", then.device.compute_capability, now.compute_capability),
        ("GPU", *("integrated" if device.integrated else "discrete" for device in (then.device, now))),
    ]
    found = [f"{what} was {before} and is {after}" for what, before, after in pairs if before != after]
    if then.dla_core is not None and not now.dla_cores:
        found.append("it is for the DLA, and there is none")
    return found


def artifact_to_run(model: config.Model, precision: Literal["int8", "fp32"]) -> Artifact:
    """The ONNX file to run for a model, after checking that it is what the deployment means.

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


def engine_to_run(model: config.Model) -> Artifact:
    """The plan to run for a model, after checking that it is what the deployment means.

    Whether it is for this device is asked by the engine that loads it.

    Raises:
        ModelError: there is none, or something it was built from differs; the message names what.
    """
    source = Path(model.path)
    if not source.is_file():
        raise ModelError(f"models.{model.name}.path: {source}: no such model file")
    folder = model.artifacts_dir
    path = folder / PLAN
    manifest = read_engine(folder)
    if manifest is None or not path.is_file():
        raise ModelError(
            f"models.{model.name}: {folder} holds no engine ({PLAN}, {ENGINE_MANIFEST}); run edge-calibrate build on"
            " this device, or set engine.backend to onnxruntime"
        )
    differences = _differences(model, source, path, manifest)
    section = model.engine
    if section.dla is None and manifest.dla_core is not None:
        differences.append("engine.dla is not set but the engine was built for the DLA")
    if differences:
        raise ModelError(f"{path}: does not belong to this deployment: {'; '.join(differences)}; build again")
    return Artifact(path, manifest.files[PLAN], manifest.precision, manifest)


def cache_to_use(model: config.Model, tensorrt: str) -> Path:
    """The calibration cache for a model, after checking that it is what the deployment and TensorRT take.

    Args:
        model: of the deployment.
        tensorrt: version of the library that will read it: it skips a cache of another one without a word.

    Raises:
        ModelError: it is missing, or was made for another model, pre-processing or TensorRT; the message names what.
    """
    return _calibrated(model, CACHE, tensorrt=tensorrt)


def ranges_to_use(model: config.Model) -> Path:
    """``ranges.json`` for a model, after checking that it is what the deployment means.

    Raises:
        ModelError: it is missing, or was made for another model or pre-processing; the message names what.
    """
    return _calibrated(model, RANGES)


def _calibrated(model: config.Model, name: str, *, tensorrt: str | None = None) -> Path:
    source = Path(model.path)
    if not source.is_file():
        raise ModelError(f"models.{model.name}.path: {source}: no such model file")
    folder = model.artifacts_dir
    path = folder / name
    manifest = read(folder)
    if manifest is None or not path.is_file():
        missing = path if manifest is not None else folder / MANIFEST
        raise ModelError(f"{missing}: no such file; without it nobody knows what {name} is for: calibrate again")
    differences = _differences(model, source, path, manifest)
    if tensorrt is not None and version(tensorrt) != version(manifest.tensorrt):
        differences.append(f"TensorRT is {tensorrt} but the cache is for {manifest.tensorrt}")
    if differences:
        raise ModelError(f"{path}: does not belong to this deployment: {'; '.join(differences)}; calibrate again")
    return path


def version(text: str) -> tuple[int, int, int]:
    """``10.3`` and ``10.3.0.30`` are TensorRT (10, 3, 0): plans and caches know no fourth part.

    Raises:
        ValueError: it is no version.
    """
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    if found is None:
        raise ValueError(f"{text!r} is no version of TensorRT; expected one such as 10.3.0")
    major, minor, patch = found.groups("0")
    return int(major), int(minor), int(patch)


def _differences(model: config.Model, source: Path, path: Path, manifest: Manifest | EngineManifest) -> list[str]:
    found: list[str] = []
    if sha256_of(source) != manifest.model_sha256:
        found.append(f"{source} has changed since (sha256 {manifest.model_sha256[:12]}... is what it was made from)")
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

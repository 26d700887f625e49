"""One build, decided for one model and one device: which file TensorRT parses, and what it is told of it.

``recipe`` says what the deployment and the device come to; here it meets the model, and what calibration has left:
layers are found by their names, scales are looked up, and what TensorRT reads that is not there yet is written.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import onnx_ir as ir

from calibration import cache, graph, images, qdq, typed
from calibration.ranges import Ranges
from calibration.recipe import Recipe, Step, TensorIo, decide, pools, trtexec
from edge import manifest
from edge.engine import open_engine
from edge.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from calibration.recipe import Decision
    from edge import config
    from edge.types import TensorSpec

__all__ = ["Network", "Planned", "calibrator_cache", "network_of", "plan_build", "steps"]


@dataclass(frozen=True, slots=True)
class Network:
    """What a build needs to know of a model, found on the CPU. Not its weights: the memory is the builder's."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    fixed_here: bool
    """The file leaves a dimension open, which the deployment fixes."""
    quantized: bool
    """The model comes with Q/DQ of its own, as quantization-aware training leaves it."""
    normalises: bool
    """It has Softmax or normalisations."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One build, decided."""

    decision: Decision
    recipe: Recipe
    trtexec: str
    """The command line that builds the same engine, with the files as a build leaves them."""
    unsaid: tuple[str, ...]
    """What trtexec has no words for."""
    notes: tuple[str, ...]


def network_of(model: config.Model) -> Network:
    """Read a model, and learn the shapes of its inputs and outputs by running it once on the CPU.

    Raises:
        ModelError: it cannot be read, takes more than a picture, or leaves open a dimension that the deployment does
            not fix.
    """
    source = Path(model.path)
    loaded = graph.load(source)
    on_cpu = msgspec.structs.replace(model.engine, providers=["cpu"])
    with open_engine(source, on_cpu, size_wh=model.input.size) as engine:
        inputs, outputs = engine.inputs, engine.outputs
    if len(inputs) != 1:
        names = ", ".join(spec.name for spec in inputs)
        raise ModelError(f"{source}: has {len(inputs)} inputs ({names}); expected one picture")
    fixed = {str(value.name) for value in loaded.graph.inputs if value.shape is not None and value.shape.is_static()}
    return Network(
        inputs,
        outputs,
        fixed_here=any(spec.name not in fixed for spec in inputs),
        quantized=graph.is_quantized(loaded),
        normalises=bool(typed.norm_layers(loaded)),
    )


def steps(section: config.Engine, network: Network, *, on_dla: bool) -> list[Step]:
    """What to try, in order: what the deployment asks for, then its fallbacks.

    Fallbacks add up: normalisations that went to FP32 stay there. Those that would change nothing, or cannot be, are
    left out: FP32 on the DLA, and another precision for a model that comes with Q/DQ of its own.
    """
    found = [Step(section.precision)]
    for fallback in section.fallbacks:
        last = found[-1]
        if last.precision == "fp32":
            break
        if fallback == "norm-fp32":
            if network.normalises and not last.norm_fp32:
                found.append(Step(last.precision, norm_fp32=True, fallback=fallback))
        elif fallback != last.precision and not network.quantized and not (fallback == "fp32" and on_dla):
            found.append(Step(fallback, norm_fp32=last.norm_fp32 and fallback != "fp32", fallback=fallback))
    return found


def plan_build(
    model: config.Model,
    device: manifest.Device,
    network: Network,
    work: Path,
    step: Step,
    *,
    deployment: Path | None = None,
    free_bytes: int | None = None,
) -> Planned:
    """Decide one build, and write what it reads into ``work``.

    Args:
        model: of the deployment.
        device: to build for.
        network: of the model.
        work: folder for the files that the build reads and leaves.
        step: what of it.
        deployment: the file, for TensorRT's own calibration.
        free_bytes: of the memory of the device, where that is known.

    Raises:
        ConfigError: the deployment asks for what this TensorRT does not have, or a rule matches nothing.
        DeviceError: it asks for a DLA that is not there.
        ModelError: the calibration is missing, or is not of this deployment.
    """
    key = f"models.{model.name}.engine"
    section = model.engine
    decision = decide(section, device, step, key=key)
    notes = list(decision.warnings)
    if network.quantized and decision.quantization != "qdq":
        raise ModelError(
            f"{model.path}: has Q/DQ nodes of its own, which only quantization: qdq runs; this build takes"
            f" {decision.quantization} ({'; '.join(decision.reasons)})"
        )
    parsed, source = _parsed(model, network, decision)
    found = None
    if decision.quantization in ("cache", "ranges"):
        found = msgspec.json.decode(manifest.ranges_to_use(model).read_bytes(), type=Ranges)
    float_layers = _float_layers(model, parsed, decision, key, notes)
    if decision.quantization == "qdq" and qdq.without(parsed, float_layers):
        if not graph.is_quantized(parsed):
            raise ConfigError([f"{key}.fp32 leaves no layer in INT8; set {key}.precision to fp16 or fp32 instead"])
        source = work / manifest.PARSED
    if decision.strongly_typed and decision.precision != "fp32":
        done = typed.to_fp16(parsed, {name for name, kept in float_layers.items() if kept == "fp32"})
        notes += _typing_notes(done)
        parsed, source = done.model, work / manifest.PARSED
    elif network.fixed_here and source == Path(model.path):
        source = work / manifest.PARSED
    if source.parent == work:
        ir.save(parsed, source)
    recipe = Recipe(
        model=str(source),
        name=model.name,
        tensorrt=device.tensorrt,
        precision=decision.precision,
        quantization=decision.quantization,
        strongly_typed=decision.strongly_typed,
        cache=_cache(model, device, decision, found, work, notes),
        ranges=_amax(found) if decision.quantization == "ranges" else {},
        float_layers={} if decision.strongly_typed else float_layers,
        inputs=_io(network.inputs, section.input_format, decision, found),
        outputs=_io(network.outputs, section.output_format, decision, found),
        dla_core=decision.dla_core,
        gpu_fallback=section.dla is None or section.dla.gpu_fallback,
        pools=pools(
            section,
            device,
            on_dla=decision.dla_core is not None,
            free_bytes=free_bytes,
        ),
        optimization_level=section.optimization_level,
        timing_cache=str(model.artifacts_dir / manifest.TIMING_CACHE),
        deployment=None if deployment is None else str(deployment),
        out=str(work),
    )
    names = {str(node.outputs[0].name): qdq.label(node) for node in parsed.graph}
    return Planned(decision, recipe, *_command(model, recipe, names), tuple(notes))


def _command(model: config.Model, recipe: Recipe, names: dict[str, str]) -> tuple[str, tuple[str, ...]]:
    """The trtexec line, with the files where a build leaves them, and what it cannot say."""
    folder = model.artifacts_dir

    def installed(path: str) -> str:
        return path.replace(recipe.out, str(folder), 1) if path.startswith(recipe.out) else path

    calib = installed(recipe.cache) if recipe.cache is not None else None
    if recipe.quantization == "ranges":  # trtexec has no option for them; this holds the same
        calib = str(folder / manifest.ENGINE_CACHE)
    as_left = msgspec.structs.replace(recipe, model=installed(recipe.model), cache=calib)
    return trtexec(as_left, plan=str(folder / manifest.PLAN), layer_names=names)


def _parsed(model: config.Model, network: Network, decision: Decision) -> tuple[ir.Model, Path]:
    """The graph that TensorRT parses, shapes fixed, and the file that it is from."""
    source = Path(model.path)
    if decision.quantization == "qdq" and not network.quantized:
        source = manifest.artifact_to_run(model, "int8").path
    parsed = graph.load(source)
    for spec in network.inputs:
        graph.fix_input(parsed, spec)
    return parsed, source


def _float_layers(
    model: config.Model, parsed: ir.Model, decision: Decision, key: str, notes: list[str]
) -> dict[str, Any]:
    """Precision of single layers by the name of their first output."""
    found: dict[str, Any] = {}
    if decision.quantization in ("cache", "ranges", "calibrator"):
        record = manifest.read(model.artifacts_dir)
        wanted = set() if record is None else set(record.fp16_layers)
        by_label = {qdq.label(node): str(node.outputs[0].name) for node in parsed.graph}
        found |= {by_label[name]: "fp16" for name in wanted if name in by_label}
        if wanted - by_label.keys():
            names = ", ".join(sorted(wanted - by_label.keys()))
            notes.append(f"layers that calibration kept in floating point are not in the model by that name: {names}")
    # A constant is no layer, whatever its name; exporters name it after the module that it belongs to.
    nodes = [node for node in parsed.graph if node.op_type not in {"Constant", "QuantizeLinear", "DequantizeLinear"}]
    kept = graph.match_layers(nodes, model.engine.fp32, key=f"{key}.fp32", among="is in the model")
    if decision.step.norm_fp32:
        kept |= typed.norm_layers(parsed)
    return found | dict.fromkeys(sorted(kept), "fp32")


def _typing_notes(done: typed.Typed) -> list[str]:
    """What FP16 could not hold."""
    told = (
        (done.saturated, f"weights with values beyond FP16, which are {typed.MOST:g} now"),
        (done.raised, "scales of quantized weights that are raised to FP16's smallest"),
        (done.float_pairs, "Q/DQ pairs that stay in FP32, since FP16 does not hold their scale"),
    )
    return [f"{len(names)} {what}: {', '.join(names[:5])}{', ...' * (len(names) > 5)}" for names, what in told if names]


def _cache(
    model: config.Model,
    device: manifest.Device,
    decision: Decision,
    found: Ranges | None,
    work: Path,
    notes: list[str],
) -> str | None:
    """The calibration cache of a build, for this very TensorRT: it skips one of another version without a word."""
    if decision.quantization == "calibrator":
        name = calibrator_cache(model, device)
        earlier = model.artifacts_dir / name
        if earlier.is_file():
            shutil.copy(earlier, work / name)
            notes.append(f"{earlier}: TensorRT's own calibration of the same model and pictures is used again")
        return str(work / name)
    if found is None:
        return None
    path = work / manifest.ENGINE_CACHE
    text = cache.render(found.scales, tensorrt=".".join(map(str, manifest.version(device.tensorrt))))
    if decision.quantization == "ranges":
        path.write_text(text, encoding="utf-8")
        return None
    record = manifest.read(model.artifacts_dir)
    if record is not None and manifest.version(record.tensorrt) == manifest.version(device.tensorrt):
        return str(manifest.cache_to_use(model, device.tensorrt))
    path.write_text(text, encoding="utf-8")
    before = "another version" if record is None else record.tensorrt
    notes.append(
        f"{manifest.CACHE} is for TensorRT {before}: written anew from {manifest.RANGES} for {device.tensorrt}"
    )
    return str(path)


def calibrator_cache(model: config.Model, device: manifest.Device) -> str:
    """Name of the cache that TensorRT's calibrator writes: another model, picture or pre-processing, another name."""
    section = model.calibration
    if section is None:
        key = f"models.{model.name}"
        raise ConfigError([f"{key}.engine.quantization is calibrator, which needs {key}.calibration, for its pictures"])
    pictures = images.collect(section.images, count=section.count, seed=section.seed)
    content = [
        manifest.sha256_of(Path(model.path)),
        msgspec.to_builtins(model.input),
        sorted(file.sha256 for file in pictures.used),
        device.tensorrt,
    ]
    return f"tensorrt-{hashlib.sha256(msgspec.json.encode(content, order='deterministic')).hexdigest()[:12]}.cache"


def _io(specs: Sequence[TensorSpec], wanted: str, decision: Decision, found: Ranges | None) -> tuple[TensorIo, ...]:
    dtype, layout = wanted.split(":")
    if dtype == "int8" and decision.precision != "int8":
        dtype, layout = "fp32", "chw"  # a fallback has no scales
    tensors = []
    for spec in specs:
        if spec.dtype != "float32":  # an index or a count stays what it is
            continue
        scale = None
        if dtype == "int8":
            entry = None if found is None else found.tensors.get(spec.name)
            if entry is None:
                raise ModelError(f"tensor '{spec.name}' has no range, which an INT8 input or output needs")
            scale = entry.scale
        # Layouts are about channels, rows and columns.
        plain = layout if len(spec.shape) == 4 else "chw"
        tensors.append(TensorIo(name=spec.name, shape=spec.shape, dtype=dtype, layout=plain, scale=scale))  # type: ignore[arg-type]
    return tuple(tensors)


def _amax(found: Ranges | None) -> dict[str, float]:
    return {} if found is None else {name: entry.amax for name, entry in found.tensors.items()}

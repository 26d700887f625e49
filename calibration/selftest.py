"""A small network on the GPU and on every DLA core, in every precision: does this device compute what it should?

It asks the whole way from measured ranges to a running plan, each case built and run in processes of its own, and
writes one ``selftest.json`` and ``selftest.txt`` that can be attached to an issue: they hold nothing of the user's
models and pictures. A case that fails, or crashes its process, does not stop the others.

The network is made of layers that every Orin's DLA has (convolution, ReLU, max pooling, addition), so that a layer
elsewhere is worth an explanation. It says nothing of the accuracy or the speed of other models.
"""

from __future__ import annotations

import datetime as dt
import logging
import math
import platform
import re
import tempfile
import traceback
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np
import onnx_ir as ir

import edge
from calibration import cache, child, events, graph, measure, observe, placement, qdq, ranges, rules, typed
from calibration.histogram import Histogram
from calibration.parity import difference
from calibration.recipe import STRONGLY_TYPED_ONLY, Precision, Recipe, TensorIo, decide, has_dla, pools, why_no_dla
from calibration.selftest_report import LIMITS, Case, Layers, Report, failures, render
from edge import config, files, manifest
from edge.engine.tensorrt import load_tensorrt, probe
from edge.errors import EdgeError
from edge.types import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray


__all__ = ["JSON_NAME", "TEXT_NAME", "run"]

JSON_NAME, TEXT_NAME = "selftest.json", "selftest.txt"

SEED = 0
MEASURED, COMPARED = 16, 4
"""Inputs that ranges are measured on, and how many of them the plans are compared on."""
LOG_LINES = 30
"""Of the builder's log, where a case did not pass."""


INPUT, OUTPUT = "images", "output"
NETWORK = """
<ir_version: 8, opset_import: ["" : 13]>
selftest (
  float[1,3,64,64] images,
  float[16,3,3,3] stem_weight, float[16] stem_bias,
  float[32,16,3,3] down_weight, float[32] down_bias,
  float[32,32,3,3] block_weight, float[32] block_bias,
  float[8,32,1,1] head_weight, float[8] head_bias
) => (float[1,8,32,32] output)
{
  stem = Conv <pads = [1, 1, 1, 1]> (images, stem_weight, stem_bias)
  stem_relu = Relu (stem)
  pool = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (stem_relu)
  down = Conv <pads = [1, 1, 1, 1]> (pool, down_weight, down_bias)
  down_relu = Relu (down)
  block = Conv <pads = [1, 1, 1, 1]> (down_relu, block_weight, block_bias)
  sum = Add (block, down_relu)
  sum_relu = Relu (sum)
  output = Conv (sum_relu, head_weight, head_bias)
}
"""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A case to come."""

    name: str
    where: str
    engine: config.Engine


@dataclass(frozen=True, slots=True)
class _Network:
    """The network, its ranges, and what FP32 makes of the compared inputs."""

    model: ir.Model
    ranges: ranges.Ranges
    inputs: NDArray[np.float32]
    """(N, 1, 3, 64, 64)."""
    outputs: NDArray[np.float32]
    """(N, 1, 8, 32, 32)."""


def run(
    folder: Path,
    *,
    iterations: int = 100,
    on_case: Callable[[str], None] = lambda _: None,
    on_event: Callable[[events.Event], None] = lambda _: None,
    root: Path = Path("/"),
) -> Report:
    """Build, run and compare every case, and write ``selftest.json`` and ``selftest.txt`` into a folder.

    Args:
        folder: made if it is not there; nothing is written before all cases have ended.
        iterations: inferences that are timed, at least 1.
        on_case: called with the name of each case as it begins.
        on_event: called with what the builder reports.
        root: of the file system, where the board's name is looked for.

    Raises:
        DeviceError: TensorRT is not installed, or there is no GPU.
        OSError: the folder cannot be written.
    """
    if iterations < 1:
        raise ValueError(f"iterations is {iterations}; expected at least 1")
    simulated = bool(getattr(load_tensorrt(), "SIMULATED", False))
    device = probe()
    with files.folder_lock(folder), tempfile.TemporaryDirectory(prefix="edge-selftest-") as scratch:
        network = _network()
        cases: list[Case] = []
        for number, wanted in enumerate(_wanted(device)):
            on_case(wanted.name)
            work = Path(scratch) / str(number)
            work.mkdir()
            case = _case(wanted, network, device, work, iterations=iterations, on_event=on_event)
            cases.append(_without_times(case) if simulated else case)
        report = Report(
            simulated=simulated,
            tool=f"jetson-edge {edge.__version__}",
            created_at=dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z"),
            board=_board(root),
            device=device,
            no_dla=why_no_dla(device),
            software=_software(),
            limits=dict(LIMITS),
            iterations=iterations,
            cases=cases,
        )
        files.write(folder / JSON_NAME, msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
        files.write(folder / TEXT_NAME, render(report).encode())
    return report


def _wanted(device: manifest.Device) -> list[_Wanted]:
    """The cases of a device: on the GPU, INT8 the two ways that there are; on the DLA the one that ``build`` takes."""
    gpu: list[tuple[str, Precision, Literal["auto", "cache", "qdq"]]] = [
        ("GPU FP32", "fp32", "auto"),
        ("GPU FP16", "fp16", "auto"),
        ("GPU INT8, Q/DQ", "int8", "qdq"),
    ]
    if manifest.version(device.tensorrt) < STRONGLY_TYPED_ONLY:
        gpu.append(("GPU INT8, cache", "int8", "cache"))
    found = [
        _Wanted(name, "GPU", config.Engine(precision=precision, quantization=quantization))
        for name, precision, quantization in gpu
    ]
    for core in range(device.dla_cores if has_dla(device) else 0):
        # What the DLA refuses is to be seen in the table, not to end the build.
        dla = config.Dla(core=core, gpu_fallback=True)
        found += [
            _Wanted(f"DLA {core} {precision.upper()}", f"DLA {core}", config.Engine(precision=precision, dla=dla))
            for precision in ("fp16", "int8")
        ]
    return found


def _case(
    wanted: _Wanted,
    network: _Network,
    device: manifest.Device,
    work: Path,
    *,
    iterations: int,
    on_event: Callable[[events.Event], None],
) -> Case:
    case = Case(name=wanted.name, precision=wanted.engine.precision, where=wanted.where, outcome="error")
    change = msgspec.structs.replace
    try:
        recipe = _recipe(wanted.engine, network, device, work)
        case = change(case, quantization=recipe.quantization)
        done = child.run(recipe, on_event=on_event)
        plan = work / manifest.PLAN
        case = change(case, build_s=done.seconds, plan_bytes=plan.stat().st_size)
        inputs = [{INPUT: array} for array in network.inputs]
        measured = measure.run(plan, inputs, work, dla_core=recipe.dla_core, iterations=iterations)
        outputs = [tensors[OUTPUT] for tensors in measured.outputs]
        found = [difference(*pair) for pair in zip(network.outputs, outputs, strict=True)]
        error = max(value.relative_error for value in found)
        case = change(
            case,
            cosine=min(value.cosine for value in found),
            relative_error=error if math.isfinite(error) else None,
            median_ms=float(np.median(measured.milliseconds)),
            p95_ms=float(np.percentile(measured.milliseconds, 95)),
        )
        case = change(case, layers=_layers(work))
        if device.integrated:
            copied = measure.run(plan, inputs[:1], work, dla_core=recipe.dla_core, mapped=False, iterations=iterations)
            case = change(case, copied_median_ms=float(np.median(copied.milliseconds)))
    except EdgeError as error:
        return change(case, reasons=[_without_folders(str(error))], log=_log(work))
    except Exception:  # noqa: BLE001 - what nobody foresaw on a device is what a self-test is there to tell
        return change(case, reasons=_without_folders(traceback.format_exc()).splitlines(), log=_log(work))
    reasons = failures(case)
    if reasons:
        return change(case, outcome="failed", reasons=reasons, log=_log(work))
    return change(case, outcome="passed")


def _recipe(engine: config.Engine, network: _Network, device: manifest.Device, work: Path) -> Recipe:
    """Decide a build as ``edge-calibrate build`` does, and write what it reads."""
    decision = decide(engine, device, key="selftest")
    model = ir.from_proto(ir.to_proto(network.model))
    if decision.quantization == "qdq":
        qdq.insert(model, network.ranges.scales, [], key="selftest")
    if decision.strongly_typed and decision.precision != "fp32":
        model = typed.to_fp16(model, ()).model
    ir.save(model, work / "selftest.onnx")
    cache_file = work / manifest.CACHE
    if decision.quantization == "cache":
        cache_file.write_text(cache.render(network.ranges.scales, tensorrt=device.tensorrt), encoding="utf-8")
    io = [
        TensorIo(name=name, shape=array.shape[1:], dtype="fp32", layout="chw")
        for name, array in ((INPUT, network.inputs), (OUTPUT, network.outputs))
    ]
    return Recipe(
        model=str(work / "selftest.onnx"),
        name="selftest",
        tensorrt=device.tensorrt,
        precision=decision.precision,
        quantization=decision.quantization,
        strongly_typed=decision.strongly_typed,
        cache=str(cache_file) if decision.quantization == "cache" else None,
        inputs=(io[0],),
        outputs=(io[1],),
        dla_core=decision.dla_core,
        pools=pools(engine, device, on_dla=decision.dla_core is not None, free_bytes=observe.available_bytes()),
        timing_cache=str(work / manifest.TIMING_CACHE),
        out=str(work),
    )


def _network(seed: int = SEED) -> _Network:
    """The network with seeded weights, of He's size so that every layer's values are of the same one."""
    rng = np.random.default_rng(seed)
    model = ir.from_onnx_text(NETWORK)
    for value in list(model.graph.inputs)[1:]:
        assert value.shape is not None
        shape = value.shape.numpy()
        deviation = math.sqrt(2 / math.prod(shape[1:])) if len(shape) > 1 else 0.1
        value.const_value = ir.tensor((rng.standard_normal(shape) * deviation).astype(np.float32), name=value.name)
        model.graph.inputs.remove(value)
        model.graph.register_initializer(value)
    for node in model.graph:
        node.name = f"/{node.outputs[0].name}/{node.op_type}"
    inputs = rng.standard_normal((MEASURED, 1, 3, 64, 64)).astype(np.float32)
    graph.fix_input(model, TensorSpec(INPUT, inputs.shape[1:], inputs.dtype))
    session = observe.session(model)
    outputs = [observe.run(session, {INPUT: array})[0] for array in inputs[:COMPARED]]
    return _Network(model, _ranges(model, inputs), inputs[:COMPARED], np.stack(outputs))


def _ranges(model: ir.Model, inputs: NDArray[np.float32]) -> ranges.Ranges:
    """Measured as a calibration does; the largest values, so that what INT8 costs here is rounding alone."""
    with _quiet(observe.__name__):
        observer = observe.Observer(model, workers=1)
    total = {name: Histogram() for name in observer.names}

    def collect(_: int, found: dict[str, Histogram]) -> None:
        for name, histogram in found.items():
            total[name].merge(histogram)

    observer.run(range(len(inputs)), lambda: lambda index: {INPUT: inputs[index]}, collect)
    return rules.complete(model, ranges.select(total, method="max", images=len(inputs)), ties="dla")


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Pass on a logger's warnings only: elsewhere it tells of the user's model, here it would confuse."""

    def warnings_only(record: logging.LogRecord) -> bool:
        return record.levelno > logging.INFO

    logger = logging.getLogger(name)
    logger.addFilter(warnings_only)
    try:
        yield
    finally:
        logger.removeFilter(warnings_only)


def _layers(work: Path) -> Layers:
    placed = placement.read_folder(work)
    return Layers(
        devices=dict(placed.devices()),
        precisions=dict(placed.precisions()),
        subgraphs=len(placed.subgraphs),
        refused={layer.name: layer.reason for layer in placed.layers if layer.reason is not None},
    )


def _without_times(case: Case) -> Case:
    return msgspec.structs.replace(case, median_ms=None, p95_ms=None, copied_median_ms=None, build_s=None)


def _log(work: Path) -> list[str]:
    """The end of what TensorRT said."""
    with suppress(FileNotFoundError):
        text = (work / events.LOG).read_text(encoding="utf-8", errors="backslashreplace")
        return _without_folders(text).splitlines()[-LOG_LINES:]
    return []


def _without_folders(text: str) -> str:
    """File names without their folders, which hold a user's name as likely as not: the report goes to strangers."""
    return re.sub(r"(?<![\w.])/(?:[^\s/\"']+/)+", "", text)


def _board(root: Path) -> str | None:
    with suppress(OSError):
        return (root / "proc/device-tree/model").read_text(encoding="utf-8", errors="replace").strip("\0\n") or None
    return None


def _software() -> dict[str, str]:
    """Versions of what takes part."""
    system = {"Python": platform.python_version(), platform.system(): f"{platform.release()} ({platform.machine()})"}
    return system | manifest.versions_of("numpy", "onnx", "onnx-ir", "onnxruntime", "onnxruntime-gpu", "pycuda")

"""The child process that builds a plan: ``python -m calibration.builder RECIPE.json``, the only caller of the builder.

TensorRT's builder takes minutes and gigabytes, and may crash or be killed: what it takes down is this process, which
decides nothing and installs nothing. Events (``calibration.events``) go to standard output, one JSON object a line;
TensorRT's log goes to standard error; files go to the recipe's scratch folder.
"""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from select import select
from typing import IO, TYPE_CHECKING, Any

import msgspec
import numpy as np

from calibration import cache as caches
from calibration import network as networks
from calibration import subordinate
from calibration.calibrator import difference, make
from calibration.diagnosis import diagnose
from calibration.events import ASKED, INSPECTOR, Done, Failed, Step
from calibration.recipe import STRONGLY_TYPED_ONLY, Recipe
from calibration.reporting import BUILDING, Reporter, make_logger, make_monitor, phase
from edge import config, manifest
from edge.errors import ConfigError, DataError, DeviceError, EdgeError, ModelError
from edge.manifest import version
from edge.types import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import ModuleType

    from numpy.typing import NDArray

    from calibration.calibrator import Calibrator
    from calibration.events import Kind
    from calibration.images import ImageSet
    from calibration.network import Coverage

__all__ = ["build", "main"]


class BuildError(Exception):
    """There is no plan, and this is why."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.reason)
        self.failed = failed


def main() -> int:
    """Build what the recipe says and report it; 1 where there is no plan."""
    report = Reporter(_claim_stdout())
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own waits until TensorRT returns
    subordinate.become()
    try:
        recipe = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Recipe)
        outcome: Done | Failed = build(recipe, report)
    except BuildError as error:
        outcome = error.failed
    except EdgeError as error:
        outcome = Failed(_kind_of(error), str(error))
    except MemoryError:
        outcome = Failed("memory", "the builder's own process ran out of memory")
    except OSError as error:
        outcome = Failed("io", f"{error.filename or 'the scratch folder'}: {error.strerror or error}")
    report(outcome)
    return int(isinstance(outcome, Failed))


def build(recipe: Recipe, report: Reporter) -> Done:
    """Build a plan into the recipe's scratch folder, and load it once to see what became of it.

    Raises:
        BuildError: TensorRT gives no plan.
        EdgeError: the recipe cannot be followed on this machine.
    """
    from edge.engine.tensorrt import load_tensorrt

    started = time.monotonic()
    trt = load_tensorrt()
    _check_version(trt, recipe)
    logger = make_logger(trt, report)
    done = _build(trt, logger, recipe, report)
    # What the build took is out of reach by now, so that the plan need not share the memory with it.
    with phase(report, "reading back"):
        _read_back(trt, logger, recipe, report)
    return msgspec.structs.replace(done, seconds=time.monotonic() - started)


def _check_version(trt: ModuleType, recipe: Recipe) -> None:
    if version(trt.__version__) != version(recipe.tensorrt):
        raise DeviceError(f"TensorRT is {trt.__version__}, but the build was decided for {recipe.tensorrt}")
    only_typed = version(trt.__version__) >= STRONGLY_TYPED_ONLY
    if recipe.strongly_typed != only_typed:
        raise ModelError(f"TensorRT {trt.__version__}: {'only' if only_typed else 'no'} strongly typed networks")


def _build(trt: ModuleType, logger: Any, recipe: Recipe, report: Reporter) -> Done:
    trt.init_libnvinfer_plugins(logger, "")  # ONNX operators such as InstanceNormalization are plugins in 8.x
    builder = _builder(trt, logger)
    _check_dla(builder, trt, recipe)
    with phase(report, "parsing"):
        network = _parse(trt, logger, builder, recipe)
    settings = builder.create_builder_config()
    _set_up(trt, settings, recipe, report)
    unmatched = () if recipe.strongly_typed else networks.keep_float(trt, network, settings, recipe)
    if unmatched:
        report.warn(f"layers that were to stay in floating point are not in the parsed network: {', '.join(unmatched)}")
    networks.set_io(trt, network, recipe)
    covered = _set_ranges(trt, network, recipe)
    asked = networks.asked(network, settings, recipe)
    _write_json(Path(recipe.out, ASKED), asked)
    with ExitStack() as stack:
        calibrator = _calibrator(trt, recipe, report, stack)
        if calibrator is not None:
            settings.int8_calibrator = calibrator
        with phase(report, BUILDING), _stoppable(trt, settings, report):
            plan = builder.build_serialized_network(network, settings)
    if calibrator is not None:
        _check_calibration(calibrator, recipe, built=plan is not None)
    if plan is None:
        raise BuildError(diagnose(logger.errors, logger.warnings))
    Path(recipe.out, manifest.PLAN).write_bytes(plan)
    Path(recipe.out, manifest.TIMING_CACHE).write_bytes(settings.get_timing_cache().serialize())
    return Done(
        seconds=0.0,
        tensorrt=trt.__version__,
        simulated=getattr(trt, "SIMULATED", False),
        plan_bytes=plan.nbytes,
        layers=network.num_layers,
        pictures=0 if calibrator is None else calibrator.batches,
        unmatched=unmatched,
        without_range=() if covered is None else covered.missing,
        harmless=0 if covered is None else covered.harmless,
    )


def _builder(trt: ModuleType, logger: Any) -> Any:
    try:
        return trt.Builder(logger)
    except TypeError as error:  # pybind11's word for a constructor that gave nothing: no GPU, or no driver for it
        reason = logger.errors[-1] if logger.errors else str(error)
        raise DeviceError(f"TensorRT {trt.__version__} cannot use the GPU: {reason}") from error


def _check_dla(builder: Any, trt: ModuleType, recipe: Recipe) -> None:
    if recipe.dla_core is None:
        return
    cores = builder.num_DLA_cores
    if cores == 0:
        raise DeviceError(f"DLA core {recipe.dla_core} is asked for, but TensorRT {trt.__version__} finds no DLA here")
    if recipe.dla_core >= cores:
        allowed = ", ".join(map(str, range(cores)))
        raise DeviceError(f"DLA core {recipe.dla_core} is asked for, but there are {cores} (allowed: {allowed})")


def _parse(trt: ModuleType, logger: Any, builder: Any, recipe: Recipe) -> Any:
    flags = 0
    if version(trt.__version__)[0] < 10:  # after that it is the only kind
        flags = 1 << int(trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH)
    network = builder.create_network(flags)
    parser = trt.OnnxParser(network, logger)
    if recipe.dla_core is not None and hasattr(getattr(trt, "OnnxParserFlag", None), "ADJUST_FOR_DLA"):
        parser.set_flag(trt.OnnxParserFlag.ADJUST_FOR_DLA)  # 10.16 and later
    if not parser.parse_from_file(recipe.model):
        raise BuildError(_parse_failure(parser, recipe))
    return network


def _parse_failure(parser: Any, recipe: Recipe) -> Failed:
    errors = [parser.get_error(index) for index in range(parser.num_errors)]
    if not errors:
        return Failed("parse", f"{recipe.model}: TensorRT's parser gave no reason")
    nodes = [_node_of(error) for error in errors]
    # The assertion is of the parser's source; what a person can use comes before it, if anything does.
    texts = [f"{node}: {' '.join(error.desc().split())}" for node, error in zip(nodes, errors, strict=True)]
    return Failed("parse", "; ".join(dict.fromkeys(texts)), tuple(dict.fromkeys(nodes)))


def _node_of(error: Any) -> str:
    """Before TensorRT 10 an error knows no more than the node's number in the file."""
    name = error.node_name() if hasattr(error, "node_name") else ""
    operator = error.node_operator() if hasattr(error, "node_operator") else ""
    return f"{name or f'node {error.node()}'}{f' ({operator})' if operator else ''}"


def _set_up(trt: ModuleType, settings: Any, recipe: Recipe, report: Reporter) -> None:
    """What is said of the whole network."""
    _set_precision(trt, settings, recipe)
    pools = recipe.pools
    limits = {
        "WORKSPACE": pools.workspace,
        "TACTIC_DRAM": pools.tactic_dram,
        "DLA_MANAGED_SRAM": pools.dla_managed_sram,
        "DLA_LOCAL_DRAM": pools.dla_local_dram,
        "DLA_GLOBAL_DRAM": pools.dla_global_dram,
    }
    for name, size in limits.items():
        if size is not None and hasattr(trt.MemoryPoolType, name):  # TACTIC_DRAM: 8.6 and later
            settings.set_memory_pool_limit(getattr(trt.MemoryPoolType, name), size)
    if recipe.dla_core is not None:
        settings.default_device_type = trt.DeviceType.DLA
        settings.DLA_core = recipe.dla_core
        if recipe.gpu_fallback:
            settings.set_flag(trt.BuilderFlag.GPU_FALLBACK)
    settings.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # the inspector tells formats only then
    if recipe.optimization_level is not None:
        if hasattr(settings, "builder_optimization_level"):
            settings.builder_optimization_level = recipe.optimization_level
        else:
            report.warn(f"engine.optimization_level: TensorRT {trt.__version__} has none (8.6 and later); ignored")
    _set_timing_cache(settings, Path(recipe.timing_cache), report)


def _set_precision(trt: ModuleType, settings: Any, recipe: Recipe) -> None:
    flags = trt.BuilderFlag
    if recipe.precision == "fp32":
        # On by default, with 10 bits of mantissa: whoever asks for FP32, as the last fallback does, means FP32.
        settings.clear_flag(flags.TF32)
    if recipe.strongly_typed:
        return
    if recipe.precision in ("fp16", "int8"):
        settings.set_flag(flags.FP16)
    if recipe.precision == "int8":
        settings.set_flag(flags.INT8)
    if recipe.float_layers:
        # A layer that cannot be had in the precision asked for is an error, not a silence.
        settings.set_flag(flags.OBEY_PRECISION_CONSTRAINTS)


def _set_timing_cache(settings: Any, path: Path, report: Reporter) -> None:
    if path.is_file():
        earlier = settings.create_timing_cache(path.read_bytes())
        if earlier is not None and settings.set_timing_cache(earlier, ignore_mismatch=False):
            return
        report.warn(f"{path}: is of another TensorRT or GPU, or damaged; the timing cache starts empty")
    settings.set_timing_cache(settings.create_timing_cache(b""), ignore_mismatch=False)


def _set_ranges(trt: ModuleType, network: Any, recipe: Recipe) -> Coverage | None:
    """Set the ranges of a recipe that has some, and say which activations have none; None where TensorRT knows best."""
    if recipe.quantization == "ranges":
        networks.set_ranges(network, recipe.ranges)
        return networks.coverage(network, recipe.ranges)
    if recipe.quantization != "cache":
        return None
    path = _cache_of(recipe)
    data = path.read_bytes()
    wrong = difference(data, trt.__version__, source=str(path))
    if wrong is not None:  # told before TensorRT skips it and spends minutes on another engine
        raise ModelError(wrong)
    return networks.coverage(network, caches.parse(data.decode("utf-8", "replace"), source=str(path)).scales)


def _cache_of(recipe: Recipe) -> Path:
    return Path(recipe.cache) if recipe.cache is not None else Path(recipe.out, manifest.CACHE)


def _calibrator(trt: ModuleType, recipe: Recipe, report: Reporter, stack: ExitStack) -> Calibrator | None:
    """What calibrates the network; the stack closes what it holds on the GPU."""
    path = _cache_of(recipe)
    if recipe.quantization == "cache":
        return make(trt, None, cache=path, upload=_nothing_to_upload)
    if recipe.quantization != "calibrator":
        return None
    wrong = difference(path.read_bytes(), trt.__version__, source=str(path)) if path.is_file() else None
    if wrong is not None:
        report.warn(wrong)
        path.unlink()
    from edge.engine.cuda import Cuda

    section, pictures = _pictures(recipe)
    shapes = {io.name: io.shape for io in recipe.inputs}
    cuda = stack.enter_context(Cuda())
    stack.enter_context(cuda.current())  # for the whole build: pictures are copied in TensorRT's callbacks
    buffers = {name: cuda.device_buffer(4 * math.prod(shape)) for name, shape in shapes.items()}

    def upload(name: str, array: NDArray[Any]) -> int:
        buffers[name].copy_from(array)
        return buffers[name].pointer

    return make(trt, _batches(recipe, section, pictures, report), cache=path, upload=upload, shapes=shapes)


def _nothing_to_upload(name: str, _: NDArray[Any]) -> int:
    raise AssertionError(f"input '{name}' is not to be uploaded: the cache is all there is")


def _pictures(recipe: Recipe) -> tuple[config.Input, ImageSet]:
    """The calibration's pictures, and how the model takes them."""
    from calibration import images

    assert recipe.deployment is not None, "the pictures are named there"
    model = config.load(Path(recipe.deployment)).model(recipe.name)
    if model.calibration is None:
        raise ConfigError([f"models.{model.name}.calibration is missing; it names the calibration images"])
    if len(recipe.inputs) != 1:
        names = ", ".join(io.name for io in recipe.inputs)
        raise ModelError(f"{recipe.model}: has {len(recipe.inputs)} inputs ({names}); expected one picture")
    section = model.calibration
    return model.input, images.collect(section.images, count=section.count, seed=section.seed)


def _batches(
    recipe: Recipe, section: config.Input, pictures: ImageSet, report: Reporter
) -> Iterator[Mapping[str, NDArray[Any]]]:
    """Pre-processed pictures, in FP32 whatever the engine's own input is, as trtexec feeds its calibrator."""
    from edge.image import Preprocessor

    io = recipe.inputs[0]
    preprocess = Preprocessor(section, TensorSpec(io.name, io.shape, np.dtype(np.float32)))
    with phase(report, "calibrating", steps=len(pictures), parent=BUILDING):
        for number, picture in enumerate(pictures):
            yield {io.name: preprocess(picture)[0]}
            report(Step("calibrating", number))


def _check_calibration(calibrator: Calibrator, recipe: Recipe, *, built: bool) -> None:
    """Raise what was kept, keep what was written; a plan that was built without its calibration is none."""
    if calibrator.error is not None:
        raise calibrator.error
    if calibrator.written is not None and recipe.quantization == "calibrator":
        _cache_of(recipe).write_bytes(calibrator.written)
    if built and not calibrator.cache_read and not calibrator.batches:
        raise DataError(
            f"{recipe.model}: TensorRT asked for no calibration at all; it does not where the model has Q/DQ nodes: set"
            " engine.quantization to qdq"
        )


@contextmanager
def _stoppable(trt: ModuleType, settings: Any, report: Reporter) -> Iterator[None]:
    """Tell how far the build is, and let SIGTERM and Ctrl-C stop it between two steps.

    Python runs signal handlers in the main thread, which is inside TensorRT, while TensorRT asks the progress monitor
    from whichever thread: the interpreter's wake-up pipe is what tells at once that a signal came.

    TensorRT before its progress monitor (8.5, 8.6) can do neither: there the signals end the process at once, as they
    do before and after the build.
    """
    if not hasattr(trt, "IProgressMonitor"):
        yield
        return
    came: list[int] = []
    with _pipe() as (told, tell):
        settings.progress_monitor = make_monitor(trt, report, stopped=lambda: bool(select([told], [], [], 0)[0]))
        wake_up = signal.set_wakeup_fd(tell)
        numbers = (signal.SIGTERM, signal.SIGINT)
        before = {which: signal.signal(which, lambda number, _: came.append(number)) for which in numbers}
        try:
            yield
        finally:
            for which, handler in before.items():
                signal.signal(which, handler)  # runs what is pending first
            signal.set_wakeup_fd(wake_up)
            if came:
                signal.raise_signal(came[0])


@contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        yield ends
    finally:
        for end in ends:
            os.close(end)


def _read_back(trt: ModuleType, logger: Any, recipe: Recipe, report: Reporter) -> None:
    """Load the plan, and write what TensorRT says it is made of."""
    runtime = trt.Runtime(logger)
    if recipe.dla_core is not None:
        runtime.DLA_core = recipe.dla_core  # before loading: afterwards core 0 is used without a word
    engine = runtime.deserialize_cuda_engine(Path(recipe.out, manifest.PLAN).read_bytes())
    if engine is None:
        raise BuildError(diagnose(logger.errors, logger.warnings))
    inspector = engine.create_engine_inspector()
    try:
        text = inspector.get_engine_information(trt.LayerInformationFormat.JSON)
    except UnicodeDecodeError as error:  # a layer's metadata, cut by bytes to the length that TensorRT allows
        report.warn(f"where layers run is not known: the engine inspector's text is no UTF-8 ({error.reason})")
    else:
        Path(recipe.out, INSPECTOR).write_text(text, encoding="utf-8")


def _write_json(path: Path, value: object) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=1))


def _kind_of(error: EdgeError) -> Kind:
    if isinstance(error, DeviceError):
        return "device"
    return "calibration" if isinstance(error, DataError) else "usage"


def _claim_stdout() -> IO[bytes]:
    """Keep standard output for events: what C++ code prints there goes to standard error from now on."""
    sys.stdout.flush()
    events = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return events


if __name__ == "__main__":
    raise SystemExit(main())

"""Engines that TensorRT built: a plan on the GPU or the DLA of the device that it was built for.

Copies, where there are any, and computation of successive frames overlap: each of a few slots has page-locked buffers,
allocated once. All slots share one execution context: TensorRT reads tensor addresses when a frame is enqueued, one
stream keeps the frames in order, and a second context would cost its scratch memory again and, on the DLA, some of the
16 loadables that a core holds. CUDA graphs are not used: they do not combine with the DLA (NVIDIA/TensorRT#3524).
"""

from __future__ import annotations

import logging
import re
import threading
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edge.engine.cuda import Cuda
from edge.engine.formats import DTYPES, LAYOUTS, Layout, numpy_type
from edge.engine.inputs import checked
from edge.errors import DeviceError, ModelError
from edge.manifest import Device, device_differences

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType, TracebackType

    from numpy.typing import NDArray
    from typing_extensions import Self

    from edge.engine.cuda import Buffer, Event, Stream
    from edge.manifest import EngineManifest
    from edge.types import Tensors

__all__ = ["TensorRtEngine", "load_tensorrt", "probe"]

logger = logging.getLogger(__name__)

# By TensorRT's names: its versions differ in which there are, and trt.nptype does not know all types.
_DTYPES = {member: numpy_type(name) for name, member in DTYPES.items()}
_LAYOUTS = {member: name for name, member in LAYOUTS.items()}

# What deserialisation says, which returns None for every reason alike.
_REASONS: tuple[tuple[str, str, type[DeviceError | ModelError]], ...] = (
    (
        r"[Vv]ersion tag does not match|not compatible with this version",
        "was built by another version of TensorRT",
        DeviceError,
    ),
    (r"incompatible device", "was built on another GPU", DeviceError),
    (r"[Mm]agic|does not match archive size", "is no TensorRT plan, or damaged", ModelError),
)
_OUT_OF_MEMORY = re.compile(r"OutOfMemory|out of memory")


def load_tensorrt() -> ModuleType:
    """The ``tensorrt`` module.

    Raises:
        DeviceError: it is not installed, or cannot be loaded; the message says what to do.
    """
    try:
        import tensorrt
    except ModuleNotFoundError as error:
        if error.name != "tensorrt":
            raise DeviceError(f"TensorRT cannot be imported: {error}") from error
        raise DeviceError(
            "TensorRT's Python module is not installed: it comes with JetPack (apt install python3-libnvinfer), not"
            " from PyPI, and a virtual environment sees it only if made with --system-site-packages"
        ) from None
    except (ImportError, OSError) as error:
        if "nvdla_compiler" in str(error):
            raise DeviceError(
                f"TensorRT cannot be imported: {error}; install nvidia-l4t-dla-compiler, or start the container with"
                " --runtime nvidia: the library is the host's"
            ) from error
        raise DeviceError(f"TensorRT cannot be imported: {error}") from error
    module: ModuleType = tensorrt
    return module


@cache
def shared_logger(trt: ModuleType) -> Any:
    """The process's ``ILogger``: passes on to ``logging``, and keeps the calling thread's last errors in ``errors``.

    There is one, for good: TensorRT has a single pointer to a logger, that of whoever came first, and a process with
    several loggers has crashed (NVIDIA/TensorRT#1475, #4134).
    """
    severity = trt.ILogger.Severity
    levels = {
        severity.INTERNAL_ERROR: logging.ERROR,
        severity.ERROR: logging.ERROR,
        severity.WARNING: logging.WARNING,
        severity.INFO: logging.DEBUG,
    }

    class Logger(trt.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)  # makes the C++ half
            self._kept = threading.local()

        @property
        def errors(self) -> deque[str]:
            if not hasattr(self._kept, "errors"):
                self._kept.errors = deque(maxlen=8)
            kept: deque[str] = self._kept.errors
            return kept

        def log(self, severity: Any, msg: str) -> None:
            # Called from C++ code that is noexcept: an exception, from a handler of somebody's, would end the process.
            with suppress(Exception):
                level = levels.get(severity)
                if level is None:  # VERBOSE
                    return
                if level == logging.ERROR:
                    self.errors.append(msg)
                logger.log(level, "%s", msg)

    return Logger()


def probe(*, root: Path = Path("/")) -> Device:
    """This device, as plans are tied to it.

    Args:
        root: of the file system, for ``etc/nv_tegra_release``.

    Raises:
        DeviceError: TensorRT, pycuda or a GPU is missing.
    """
    trt = load_tensorrt()
    with Cuda() as cuda, cuda.current():
        return _device(trt, trt.Runtime(shared_logger(trt)), cuda, root)


@dataclass(frozen=True, slots=True)
class _Port:
    """One input or output of one slot."""

    layout: Layout
    buffer: Buffer
    packed: NDArray[Any]
    """The buffer, as the engine sees it."""
    values: NDArray[Any]
    """The tensor, as the caller sees it; the buffer itself where that is the same."""
    scratch: NDArray[np.float32] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """Memory of one frame in flight, and how far it has come."""

    inputs: tuple[_Port, ...]
    outputs: tuple[_Port, ...]
    uploaded: Event
    computed: Event
    downloaded: Event


class TensorRtEngine:
    """A plan, its execution context and its buffers.

    Used by one thread at a time, whichever; several engines may run in several threads.
    """

    def __init__(
        self,
        plan: Path,
        *,
        dla_core: int | None = None,
        built: EngineManifest | None = None,
        slots: int = 2,
        mapped: bool | None = None,
    ) -> None:
        """Load a plan.

        Args:
            plan: as TensorRT serialises it.
            dla_core: that a plan for the DLA shall run on.
            built: what the plan was built for; without it, TensorRT's refusal is all that protects from a foreign plan.
            slots: how many frames may be in flight.
            mapped: see ``Cuda.buffer``.

        Raises:
            DeviceError: TensorRT, pycuda, a GPU or the DLA core is missing, memory is short, or the plan was built for
                another device.
            ModelError: the file is missing or no plan, or its inputs and outputs are none that can be fed.
        """
        trt = load_tensorrt()
        if not plan.is_file():
            raise ModelError(f"{plan}: no such plan")
        if not plan.stat().st_size:
            raise ModelError(f"{plan}: is empty")
        self._plan = plan
        self._logger = shared_logger(trt)
        self._runtime: Any = None
        self._engine: Any = None
        self._context: Any = None
        self._slots: tuple[_Slot, ...] = ()
        self._streams: tuple[Stream, ...] = ()
        self._submitted = self._collected = 0
        with ExitStack() as stack:
            self._cuda = stack.enter_context(Cuda())
            stack.callback(self._release)
            with self._cuda.current():
                self._load(trt, dla_core, built)
                self._allocate(
                    trt,
                    {} if built is None else built.io_scales,
                    slots,
                    mapped=self._cuda.integrated if mapped is None else mapped,
                )
            self._stack = stack.pop_all()
        self.description = _describe(trt, self._cuda.name, dla_core)

    def _load(self, trt: ModuleType, dla_core: int | None, built: EngineManifest | None) -> None:
        # Plans may hold layers that TensorRT implements as plugins.
        trt.init_libnvinfer_plugins(None, "")
        self._logger.errors.clear()
        self._runtime = trt.Runtime(self._logger)
        if built is not None:
            _check_device(self._plan, built, _device(trt, self._runtime, self._cuda, Path("/")))
        if dla_core is not None:
            _check_core(dla_core, self._runtime.num_DLA_cores, trt.__version__)
            # Before deserialisation, or the plan goes to core 0 without a word.
            self._runtime.DLA_core = dla_core
        self._engine = self._runtime.deserialize_cuda_engine(self._plan.read_bytes())
        if self._engine is None:
            raise _refused(self._plan, self._logger.errors, self._cuda.free_bytes())

    def _allocate(self, trt: ModuleType, scales: dict[str, float], count: int, *, mapped: bool) -> None:
        inputs, outputs = _layouts(trt, self._engine, scales, self._plan)
        self.inputs = tuple(layout.spec for layout in inputs)
        self.outputs = tuple(layout.spec for layout in outputs)
        self._context = self._engine.create_execution_context()
        if self._context is None:
            raise DeviceError(
                f"{self._plan}: cannot be made ready to run: {_last(self._logger.errors)};"
                f" {self._cuda.free_bytes() / 2**20:.0f} MiB of memory are free"
            )
        for layout in (*inputs, *outputs):
            _check_strides(self._plan, layout, self._engine, self._context)
        self._compute = self._cuda.stream()
        # So that copies in each direction run beside the computation. Mapped memory is not copied.
        self._upload = self._compute if mapped else self._cuda.stream()
        self._download = self._compute if mapped else self._cuda.stream()
        self._streams = (self._upload, self._compute, self._download)
        self._slots = tuple(
            _Slot(
                inputs=tuple(self._port(layout, layout.scratch(), mapped=mapped) for layout in inputs),
                outputs=tuple(self._port(layout, None, mapped=mapped) for layout in outputs),
                uploaded=self._cuda.event(),
                computed=self._cuda.event(),
                downloaded=self._cuda.event(),
            )
            for _ in range(count)
        )

    def _port(self, layout: Layout, scratch: NDArray[np.float32] | None, *, mapped: bool) -> _Port:
        buffer = self._cuda.buffer(layout.nbytes, mapped=mapped)
        packed = layout.view(buffer.host)
        values = packed if layout.plain else np.empty(layout.shape, layout.spec.dtype)
        return _Port(layout, buffer, packed, values, scratch)

    @property
    def slots(self) -> int:
        """How many frames may be in flight."""
        return len(self._slots)

    @property
    def in_flight(self) -> int:
        """Frames that were submitted and not collected."""
        return self._submitted - self._collected

    def infer(self, tensors: Tensors) -> Tensors:
        """Run the model once; see ``edge.engine.Engine.infer``.

        Outputs are valid until the next call, and never longer than the engine is open.

        Raises:
            DeviceError: TensorRT refused to run it.
            DeviceLostError: the GPU failed.
        """
        if self.in_flight:
            raise RuntimeError(f"{self.in_flight} frames are in flight; collect them first")
        self.submit(tensors)
        return self.collect()

    def submit(self, tensors: Tensors) -> None:
        """Hand over one frame and return without waiting; see ``edge.engine.Pipelined``."""
        if self._context is None:
            raise RuntimeError("the engine is closed")
        if self.in_flight == self.slots:
            raise RuntimeError(f"all {self.slots} slots are in flight; collect one first")
        slot = self._slots[self._submitted % self.slots]
        values = [checked(tensors, spec) for spec in self.inputs]
        for port, value in zip(slot.inputs, values, strict=True):
            port.layout.pack(value, port.packed, port.scratch)
        with self._cuda.current():
            for port in slot.inputs:
                port.buffer.to_device(self._upload)
            slot.uploaded.record(self._upload)
            self._compute.wait_for(slot.uploaded)
            self._execute(slot)
            slot.computed.record(self._compute)
            self._download.wait_for(slot.computed)
            for port in slot.outputs:
                port.buffer.to_host(self._download)
            slot.downloaded.record(self._download)
        self._submitted += 1

    def collect(self) -> Tensors:
        """Wait for the oldest frame in flight; see ``edge.engine.Pipelined``."""
        if not self.in_flight:
            raise RuntimeError("no frame is in flight; submit one first")
        slot = self._slots[self._collected % self.slots]
        self._collected += 1
        with self._cuda.current():
            slot.downloaded.synchronize()
        for port in slot.outputs:
            if not port.layout.plain:
                port.layout.unpack(port.packed, port.values)
        return {port.layout.name: port.values for port in slot.outputs}

    def _execute(self, slot: _Slot) -> None:
        self._logger.errors.clear()
        ports = (*slot.inputs, *slot.outputs)
        accepted = all(self._context.set_tensor_address(port.layout.name, port.buffer.pointer) for port in ports)
        if not (accepted and self._context.execute_async_v3(self._compute.handle)):
            self._cuda.check()
            raise DeviceError(f"{self._plan}: TensorRT could not run it: {_last(self._logger.errors)}")

    def _release(self) -> None:
        """TensorRT's objects go before the memory and streams that they use."""
        with self._cuda.current():
            for stream in self._streams:
                # What fails here belongs to a frame that nobody has collected.
                with suppress(DeviceError):
                    stream.synchronize()
            self._slots = self._streams = ()
            self._submitted = self._collected = 0
            self._context = None
            self._engine = None
            self._runtime = None

    def __enter__(self) -> Self:
        """The engine is ready when it is constructed."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait for frames in flight, then free the engine and its buffers."""
        self._stack.close()


def _layouts(trt: ModuleType, engine: Any, scales: dict[str, float], plan: Path) -> tuple[list[Layout], list[Layout]]:
    """Inputs and outputs, each in the plan's order."""
    found: tuple[list[Layout], list[Layout]] = ([], [])
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        shape = tuple(engine.get_tensor_shape(name))
        if engine.get_tensor_location(name) != trt.TensorLocation.DEVICE:
            raise ModelError(
                f"{plan}: tensor '{name}' holds shapes and lives in the host's memory; expected fixed shapes"
            )
        for axis, size in enumerate(shape):
            if size < 0:
                raise ModelError(
                    f"{plan}: dimension {axis} of tensor '{name}' is dynamic: {list(shape)}; build the engine with"
                    " fixed shapes"
                )
        kind = engine.get_tensor_dtype(name).name
        if kind not in _DTYPES:
            raise ModelError(f"{plan}: tensor '{name}' is {kind}; allowed: {', '.join(_DTYPES)}")
        member = engine.get_tensor_format(name).name
        try:
            made = Layout(name, shape, _DTYPES[kind], _LAYOUTS.get(member, member), scales.get(name))
        except ModelError as error:
            raise ModelError(f"{plan}: {error}") from None
        found[engine.get_tensor_mode(name) == trt.TensorIOMode.OUTPUT].append(made)
    return found


def _check_strides(plan: Path, layout: Layout, engine: Any, context: Any) -> None:
    """Refuse a tensor with other padding than its layout's: the DLA may want longer rows (TensorFormat, kCHW4)."""
    # NvInferRuntime.h: "in units of elements, not components or bytes"; a scalar has -1 components.
    element = max(1, engine.get_tensor_components_per_element(layout.name)) * layout.dtype.itemsize
    found = [element * stride for stride in context.get_tensor_strides(layout.name)]
    expected = [ours or theirs for ours, theirs in zip(layout.strides, found, strict=True)]
    if found != expected:
        raise ModelError(
            f"{plan}: tensor '{layout.name}' is {layout.layout} with strides of {found} bytes; expected {expected};"
            " build the engine with another engine.input_format or output_format"
        )


def _device(trt: ModuleType, runtime: Any, cuda: Cuda, root: Path) -> Device:
    return Device(
        name=cuda.name,
        tensorrt=trt.__version__,
        compute_capability=cuda.compute_capability,
        integrated=cuda.integrated,
        dla_cores=runtime.num_DLA_cores,
        multiprocessors=cuda.multiprocessors,
        cuda=cuda.version,
        l4t=_l4t(root / "etc" / "nv_tegra_release"),
    )


def _l4t(path: Path) -> str | None:
    """Jetson Linux's version from ``# R36 (release), REVISION: 4.3, GCID: ...``."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    found = re.search(r"R(\d+)\b.*?REVISION: ([\d.]+)", text)
    return f"{found[1]}.{found[2]}" if found else None


def examine(plan: Path, built: EngineManifest | None, dla_core: int | None) -> str:
    """What would run a plan here, without loading it.

    Raises:
        DeviceError: TensorRT, pycuda, a GPU or the DLA core is missing, or the plan was built for another device.
    """
    here = probe()
    if built is not None:
        _check_device(plan, built, here)
    if dla_core is not None:
        _check_core(dla_core, here.dla_cores, here.tensorrt)
    return _describe(load_tensorrt(), here.name, dla_core)


def _describe(trt: ModuleType, gpu: str, dla_core: int | None) -> str:
    where = gpu if dla_core is None else f"DLA {dla_core}, {gpu}"
    simulated = " SIMULATED" if getattr(trt, "SIMULATED", False) else ""
    return f"TensorRT {trt.__version__}{simulated} ({where})"


def _check_device(plan: Path, built: EngineManifest, here: Device) -> None:
    differences = device_differences(built, here)
    if differences:
        raise DeviceError(f"{plan}: was built for another device: {'; '.join(differences)}; run edge-calibrate build")
    if built.device.multiprocessors not in (0, here.multiprocessors):
        logger.warning(
            "%s: was timed on a GPU of %d multiprocessors, and this one has %d: another module or power mode; for"
            " speed, run edge-calibrate build here",
            plan,
            built.device.multiprocessors,
            here.multiprocessors,
        )


def _check_core(core: int, cores: int, version: str) -> None:
    if not cores:
        raise DeviceError(
            f"DLA core {core} is asked for, but there is none: the module has no DLA, or its TensorRT, {version}, has"
            " none (TensorRT 10.8 to 11.4.0 has no DLA)"
        )
    if core >= cores:
        allowed = ", ".join(map(str, range(cores)))
        raise DeviceError(f"DLA core {core} is asked for, but this module has {cores} (allowed: {allowed})")


def _refused(plan: Path, errors: Sequence[str], free_bytes: int) -> DeviceError | ModelError:
    """Why TensorRT gave no engine for a plan."""
    for text in errors:
        if _OUT_OF_MEMORY.search(text):
            return DeviceError(
                f"{plan}: does not fit into memory: {free_bytes / 2**20:.0f} MiB are free ({text.strip()})"
            )
        for pattern, reason, kind in _REASONS:
            if re.search(pattern, text):
                return kind(f"{plan}: {reason}; run edge-calibrate build on this device ({text.strip()})")
    return ModelError(f"{plan}: TensorRT cannot load it: {_last(errors)}")


def _last(errors: Sequence[str]) -> str:
    return errors[-1].strip() if errors else "it gave no reason"

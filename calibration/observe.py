"""Runs the FP32 model on the calibration pictures and turns every activation into a histogram, in bounded memory.

The model runs in segments (``calibration.segments``), each a session of its own whose outputs are counted as soon as it
has run, while the CPU's cache still holds them, and are then overwritten. A worker is a thread with one picture and one
arena for its tensors; onnxruntime and the counting kernel let the other threads run. Memory depends neither on the
number of pictures nor on the size of all activations together; the counts depend on neither segments nor workers.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import resource
import tempfile
import threading
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import onnx_ir as ir
import onnxruntime

from calibration import rules, segments
from calibration.histogram import BINS, Histogram
from edge.errors import DeviceError, ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence

    from numpy.typing import NDArray

    from calibration.segments import Plan, Segment, Slot
    from edge.types import Tensors

__all__ = ["Layout", "Observer", "activations", "available_bytes", "evaluate", "largest_difference", "run", "session"]

logger = logging.getLogger(__name__)

P = TypeVar("P")

COMFORT_BYTES = 16 * 2**20
"""Arena of a worker where memory is not scarce. In a larger one tensors leave the CPU's cache before they are counted:
a picture in YOLOv8n at 640 x 640 takes a seventh longer in one segment of 249 MB than in 21 of up to 20 MB."""

PICTURE_BYTES = 32 * 2**20
"""Set aside at least for each worker's loader: a photograph of some 5 megapixels, as it was stored and upright."""

SESSION_BYTES = 24 * 2**20
"""Set aside for onnxruntime itself."""

TOTALS = 5
"""Histograms of each tensor beside the workers': two groups of pictures, and what saving them takes on top."""

_HISTOGRAM_BYTES = BINS * np.dtype(np.int64).itemsize

_AWAKE_S = 0.5
"""How late Ctrl-C may be noticed, if it comes at the worst moment."""

_COPIES = {"Concat", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
"""Operators whose output holds each value of its input once, Concat of all inputs: there is nothing new to count."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the memory is used."""

    workers: int
    segments: int
    arena_bytes: int
    """Of one worker."""
    peak_bytes: int
    """Estimate of the largest resident memory of the process."""


class Observer:
    """Makes the histograms of one model's activations.

    ``names`` are the tensors, inputs first, then in the order in which they are computed; ``layout`` says how the
    memory is used.
    """

    def __init__(
        self,
        model: ir.Model,
        *,
        memory: int | None = None,
        workers: int | None = None,
        arena_bytes: int = COMFORT_BYTES,
        picture_bytes: int = PICTURE_BYTES,
    ) -> None:
        """Cut a model so that it can be observed within the memory, and load it. The model is not kept.

        Args:
            model: shapes fixed and inferred, as ``graph.fix_input`` leaves it; not changed.
            memory: bytes that the process may take at its peak, with what it takes already; None: half of what is
                available on top of that. Tensors whose shape depends on the picture are not foreseen.
            workers: pictures at a time; None: one for each CPU. Where memory is scarce they are fewer.
            arena_bytes: what the tensors of one picture may take, unless the memory wants less or an operator more.
            picture_bytes: what a loader may take to make its tensors.

        Raises:
            DeviceError: the memory is not enough for one worker and the finest cut.
            ModelError: onnxruntime cannot load the model.
        """
        inputs, computed = activations(model)
        self.names = (*inputs, *computed)
        self._inputs = tuple(inputs)
        self._copies = _copies(model, self.names)
        plan, self.layout = _arranged(
            model,
            inputs,
            computed,
            memory=memory,
            workers=workers or _cpus(),
            arena_bytes=arena_bytes,
            picture_bytes=picture_bytes,
        )
        self._segments = plan.segments
        self._slots = plan.slots
        self._sessions = _loaded(plan)
        logger.info(
            "%d tensors are observed in %d segments, %d pictures at a time with %s each; about %s of memory at most",
            len(self.names),
            self.layout.segments,
            self.layout.workers,
            _mb(self.layout.arena_bytes),
            _mb(self.layout.peak_bytes),
        )

    def run(
        self,
        pictures: Sequence[P],
        open_loader: Callable[[], Callable[[P], Tensors]],
        collect: Callable[[P, dict[str, Histogram]], None],
        *,
        describe: Callable[[P], str] = str,
    ) -> None:
        """Observe pictures, several at a time.

        What a loader or ``collect`` raises is raised here, and so is KeyboardInterrupt, when all workers have ended:
        each ends after its picture. Of several errors it is that of the earliest picture. What has been collected
        stays collected.

        Args:
            pictures: anything that a loader knows; they are begun in this order, and may end in another.
            open_loader: called once by each worker; the loader gives the model's inputs, in arrays that its next call
                may overwrite.
            collect: called by the workers, one at a time, with a picture and the histograms of just this picture by
                name. It adds them to others with ``merge`` or ``drain_into``: they are used again afterwards.
            describe: what to call a picture in messages.

        Raises:
            ModelError: an activation holds NaN or infinite values (the message names the tensor and the picture), or
                the model fails on a picture.
        """
        count = min(self.layout.workers, len(pictures))
        if not count:
            return
        job = _Job(pictures, open_loader, collect)
        threads = [threading.Thread(target=self._work, args=(job, describe), name=f"observe-{n}") for n in range(count)]
        try:
            for thread in threads:
                thread.start()
            job.begin.set()
            working = count
            while working:
                # Awake now and then: a signal that comes just before a wait begins does not end it.
                with contextlib.suppress(queue.Empty):
                    job.ended.get(timeout=_AWAKE_S)
                    working -= 1
        finally:
            job.stop.set()
            job.begin.set()
            for thread in threads:
                # Ctrl-C within start() leaves a thread that cannot be joined; it will find that it has been stopped.
                if thread.is_alive():
                    thread.join()
        if job.failures:
            raise min(job.failures, key=lambda failure: failure[0])[1]

    def _work(self, job: _Job[P], describe: Callable[[P], str]) -> None:
        """What one worker does."""
        job.begin.wait()
        index = job.take()
        try:
            if index is None:
                return
            load = job.open_loader()
            worker = _Worker(self._segments, self._sessions, self._slots, self.layout.arena_bytes)
            histograms = {name: Histogram() for name in self.names}
            while index is not None:
                picture = job.pictures[index]
                self._observe(worker, load(picture), histograms, partial(describe, picture))
                job.hand_in(picture, histograms)
                for histogram in histograms.values():
                    if histogram.minimum <= histogram.maximum:  # merged rather than drained
                        histogram.drain_into(Histogram())
                index = job.take()
        except BaseException as error:  # noqa: BLE001 - run() raises it
            job.fail(-1 if index is None else index, error)
        finally:
            job.ended.put(None)

    def _observe(
        self, worker: _Worker, tensors: Tensors, histograms: dict[str, Histogram], source: Callable[[], str]
    ) -> None:
        """Run one picture and count its tensors."""
        given = ((name, tensors[name]) for name in self._inputs)
        for name, values in itertools.chain(given, worker.run(tensors, histograms)):
            histogram = histograms[name]
            if name in self._copies:
                for original in self._copies[name]:
                    histogram.merge(histograms[original])
            else:
                histogram.add(values)
            if histogram.nonfinite:
                raise ModelError(
                    f"tensor '{name}' has {histogram.nonfinite} NaN or infinite values on {source()}; check the model's"
                    " input section, and that the FP32 model itself is sound"
                )


@dataclass(slots=True)
class _Job(Generic[P]):
    """The pictures of one run, and how it goes."""

    pictures: Sequence[P]
    open_loader: Callable[[], Callable[[P], Tensors]]
    collect: Callable[[P, dict[str, Histogram]], None]
    begin: threading.Event = field(default_factory=threading.Event)
    """Set when all workers are there."""
    stop: threading.Event = field(default_factory=threading.Event)
    ended: queue.SimpleQueue[None] = field(default_factory=queue.SimpleQueue)
    """Has an entry for each worker that has ended. Written in C, it is whole after Ctrl-C; what ``threading`` has to
    wait for is written in Python and may be left half-way."""
    failures: list[tuple[int, BaseException]] = field(default_factory=list)
    """Each with the index of its picture."""
    _taken: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self) -> int | None:
        """The index of the next picture, unless there is none or the run has been stopped."""
        with self._lock:
            if self.stop.is_set() or self._taken == len(self.pictures):
                return None
            self._taken += 1
            return self._taken - 1

    def hand_in(self, picture: P, histograms: dict[str, Histogram]) -> None:
        """Collect a picture, unless the run has been stopped."""
        with self._lock:
            if not self.stop.is_set():
                self.collect(picture, histograms)

    def fail(self, index: int, error: BaseException) -> None:
        """Stop the run."""
        with self._lock:
            self.stop.set()
            self.failures.append((index, error))


class _Worker:
    """The memory of one worker, and the sessions bound to it; nothing is allocated for a picture."""

    def __init__(
        self, pieces: Sequence[Segment], sessions: Sequence[Any], slots: dict[str, Slot], arena_bytes: int
    ) -> None:
        arena = np.empty(arena_bytes + segments.ALIGNMENT, np.uint8)
        arena = arena[-arena.ctypes.data % segments.ALIGNMENT :]
        self._arrays = {
            name: arena[slot.offset : slot.offset + slot.nbytes].view(slot.dtype).reshape(slot.shape)
            for name, slot in slots.items()
        }
        self._steps: list[tuple[Segment, Any, Any]] = []
        for piece, one in zip(pieces, sessions, strict=True):
            binding = one.io_binding()
            for name in piece.inputs:
                if name in self._arrays:
                    _bind_input(binding, name, self._arrays[name])
            for name in piece.outputs:
                if name in self._arrays:
                    array = self._arrays[name]
                    binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
                else:
                    binding.bind_output(name, "cpu")
            self._steps.append((piece, one, binding))

    def run(self, tensors: Tensors, wanted: Container[str]) -> Iterator[tuple[str, NDArray[Any]]]:
        """Run the model and give the wanted outputs of its segments, each valid until the next is asked for.

        Raises:
            ModelError: the model fails.
        """
        given = {name: np.asarray(array, order="C") for name, array in tensors.items()}
        passed: dict[str, Any] = {}
        """What onnxruntime has allocated, since its shape could not be known."""
        for piece, one, binding in self._steps:
            for name in piece.inputs:
                if name in passed:
                    binding.bind_ortvalue_input(name, passed[name])
                elif name not in self._arrays:
                    _bind_input(binding, name, given[name])
            loose = [name for name in piece.outputs if name not in self._arrays]
            for name in loose:
                # Otherwise the output would be expected to have the shape that it had for the last picture. Not right
                # after the run: in onnxruntime 1.23 that takes the value away from whoever holds it.
                binding.bind_output(name, "cpu")
            with _translated("the model fails when it runs"):
                one.run_with_iobinding(binding)
            if loose:
                found = dict(zip(piece.outputs, binding.get_outputs(), strict=True))
                passed.update((name, found[name]) for name in loose)
            for name in piece.outputs:
                if name in wanted:
                    yield name, self._arrays[name] if name in self._arrays else passed[name].numpy()


def activations(model: ir.Model) -> tuple[list[str], list[str]]:
    """Names of the float32 tensors of the main graph that depend on the picture.

    What is computed from constants alone is a constant to TensorRT, which gives it no range (``rules.unquantized``).

    Returns:
        The inputs, and all others in the order in which they are computed.
    """
    # Old exporters list the initializers among the inputs.
    inputs = [str(v.name) for v in model.graph.inputs if v.dtype == ir.DataType.FLOAT and not v.is_initializer()]
    constants = rules.unquantized(model)
    values = (value for node in model.graph for value in node.outputs)
    return inputs, [v.name for v in values if v.dtype == ir.DataType.FLOAT and v.name and v.name not in constants]


def session(model: ir.Model, *, threads: int | None = None) -> Any:
    """An onnxruntime CPU session of a model in memory.

    Raises:
        ModelError: onnxruntime cannot load it.
    """
    return _opened(ir.to_proto(model).SerializeToString(), _options(threads=threads))


def run(session: Any, tensors: Tensors, names: Sequence[str] | None = None) -> list[Any]:
    """Run a session and give the named outputs, or all of them.

    Raises:
        ModelError: the model fails on this input.
    """
    with _translated("the model fails when it runs"):
        return session.run(names, tensors)  # type: ignore[no-any-return]


def evaluate(model: bytes) -> dict[str, NDArray[Any]]:
    """The outputs of a serialized model without inputs, by name.

    Raises:
        ModelError: it cannot be loaded, or fails.
    """
    options = _options(threads=1)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    opened = _opened(model, options)
    return dict(zip((output.name for output in opened.get_outputs()), run(opened, {}), strict=True))


def largest_difference(first: ir.Model, second: ir.Model, inputs: Sequence[Tensors]) -> float:
    """The largest difference between two models' outputs, relative to the largest magnitude of each output."""
    sessions = [session(model) for model in (first, second)]
    difference = 0.0
    for tensors in inputs:
        for a, b in zip(*(run(one, tensors) for one in sessions), strict=True):
            if np.size(a) == 0:
                continue
            scale = float(np.abs(a).max()) or 1.0
            found = float(np.abs(np.asarray(a, np.float64) - b).max()) / scale
            difference = max(difference, found if np.isfinite(found) else np.inf)
    return difference


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that this process could take without harm: what the machine has left, or a cgroup that it is in.

    Args:
        root: of ``proc`` and ``sys``.
    """
    meminfo = root / "proc/meminfo"
    if not meminfo.exists():  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
    return max(0, min([int(fields["MemAvailable"].split()[0]) * 1024, *_left_in_cgroups(root)]))


def _left_in_cgroups(root: Path) -> Iterator[int]:
    """Bytes left under each limit of the process's control groups, version 1 or 2, and those around them.

    See the kernel's admin-guide/cgroup-v2.rst, "Memory Interface Files". Pages of files that nobody uses are counted as
    used there, but are given up when memory is short.
    """
    cgroups = root / "proc/self/cgroup"
    for line in cgroups.read_text().splitlines() if cgroups.exists() else ():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            top, limit_file, usage_file, cache = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, limit_file, usage_file = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        # In a container the path may be that of the host: only those of its folders are there that it can see.
        group = root / top / path.lstrip("/")
        for folder in (group, *group.parents):
            if not (folder / limit_file).exists():
                continue
            limit = (folder / limit_file).read_text().strip()
            if limit != "max":
                stat = dict(entry.split() for entry in (folder / "memory.stat").read_text().splitlines())
                yield int(limit) - int((folder / usage_file).read_text()) + int(stat.get(cache, 0))


def _resident_bytes() -> int:
    """Physical memory of this process now."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    # macOS tells the peak only, in bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _cpus() -> int:
    """CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _arranged(
    model: ir.Model,
    inputs: Sequence[str],
    computed: Sequence[str],
    *,
    memory: int | None,
    workers: int,
    arena_bytes: int,
    picture_bytes: int,
) -> tuple[Plan, Layout]:
    """As many workers as the memory and the wish allow, and segments as long as the arena allows.

    Raises:
        DeviceError: the memory is not enough for one worker.
    """
    in_use = _resident_bytes()
    allowed = in_use + available_bytes() // 2 if memory is None else memory
    tensors = len(inputs) + len(computed)
    # More segments cost hardly any time, so that they come before fewer workers.
    plan = segments.cut(model, computed, most_bytes=0)
    while workers > 1 and _peak_bytes(plan, in_use, tensors, picture_bytes, workers) > allowed:
        workers -= 1
    least = _peak_bytes(plan, in_use, tensors, picture_bytes, workers)
    if least > allowed:
        raise DeviceError(
            f"the memory is not enough to observe the model: at least {_mb(least)} are needed, {_mb(in_use)} of which"
            f" are in use already; allowed: {_mb(allowed)}"
        )
    finest = plan.arena_bytes
    for most_bytes in (finest + (allowed - least) // workers, finest):
        wider = segments.cut(model, computed, most_bytes=max(finest, min(most_bytes, arena_bytes)))
        if _peak_bytes(wider, in_use, tensors, picture_bytes, workers) <= allowed:
            plan = wider
            break
    peak_bytes = _peak_bytes(plan, in_use, tensors, picture_bytes, workers)
    return plan, Layout(workers, len(plan.segments), plan.arena_bytes, peak_bytes)


def _loaded(plan: Plan) -> list[Any]:
    """A session for each segment."""
    options = _options(threads=1)
    # Every activation is an output and wants its usual layout. One that suits convolutions better is a little faster,
    # but takes buffers of its own to come and go: 416 MB for YOLOv8n, where this takes 240 MB.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    sessions = []
    with tempfile.TemporaryDirectory() as folder:
        # A session that is made of bytes keeps them, and the weights would be in memory twice.
        path = Path(folder, "segment.onnx")
        for index in range(len(plan.segments)):
            path.write_bytes(plan.model(index))
            sessions.append(_opened(str(path), options))
    return sessions


def _peak_bytes(plan: Plan, in_use: int, tensors: int, picture_bytes: int, workers: int) -> int:
    """Estimate of the largest resident memory while the model is loaded, and while pictures are observed."""
    weights = [segment.weight_bytes for segment in plan.segments]
    # When a segment is written, its weights are in a message and in the bytes of that; when it is loaded, in another
    # message, and once more while they are rearranged for matrix products.
    loading = 2 * max(weights, default=0)
    # Some operators, such as ConvTranspose, need as much again as they put out.
    scratch = max((slot.nbytes for slot in plan.slots.values()), default=0)
    histograms = tensors * _HISTOGRAM_BYTES
    running = TOTALS * histograms + workers * (plan.arena_bytes + scratch + histograms + picture_bytes)
    return in_use + SESSION_BYTES + sum(weights) + max(loading, running)


def _copies(model: ir.Model, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Observed tensors that hold the values of other observed tensors and no others, with the names of those."""
    observed = set(names)
    found: dict[str, tuple[str, ...]] = {}
    for node in model.graph:
        if node.op_type in _COPIES and node.domain in ("", "ai.onnx") and node.outputs[0].name in observed:
            given = node.inputs if node.op_type == "Concat" else node.inputs[:1]
            sources = tuple(str(value.name) for value in given if value is not None)
            if observed.issuperset(sources):
                found[str(node.outputs[0].name)] = sources
    return found


def _options(*, threads: int | None) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what is an error is raised as well
    # A pool that keeps what the largest run needed would count against the bound that observing promises.
    options.enable_cpu_mem_arena = False
    if threads is not None:
        options.intra_op_num_threads = threads
        # A thread that waits for work by spinning takes the time of one that has some.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def _opened(content: bytes | str, options: Any) -> Any:
    with _translated("onnxruntime cannot load the model"):
        return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    """Make onnxruntime's errors ours."""
    try:
        yield
    except Exception as error:
        # They have no common base that it exports, and some calls raise RuntimeError.
        if type(error).__module__.startswith("onnxruntime") or isinstance(error, RuntimeError):
            text = str(error).strip() or type(error).__name__
            raise ModelError(f"{what}: {text.splitlines()[0]}") from error
        raise


def _bind_input(binding: Any, name: str, array: NDArray[Any]) -> None:
    binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)


def _mb(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"

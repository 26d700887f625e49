"""What does running an engine on a GPU cost beyond the work itself: copies, calls, and waiting that could overlap?

Needs an NVIDIA GPU, pycuda and nvcc, no TensorRT: the runner's own code, with a kernel of known length in the place of
TensorRT's (tests/standin/trt is put on the path; `execute_async_v3` launches the kernel). Every figure stands beside a
floor from the same run: pycuda called bare, on the same memory. Measurements alternate with their floor, so that the
machine's moods meet both. Correctness is checked on the way; a failed check ends in exit code 1.
"""

from __future__ import annotations

import gc
import itertools
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import machine
from edge.engine.cuda import Cuda
from edge.engine.tensorrt import TensorRtEngine, load_tensorrt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from edge.engine.cuda import Buffer

ROOT = Path(__file__).parents[1]
SHAPE = (1, 3, 640, 640)
KERNEL = """
__global__ void work(const float *x, float *y, long long n, long long ns)
{
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += (long long)gridDim.x * blockDim.x)
        y[i] = x[i] + 1.0f;
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    while ((long long)(now - start) < ns);
}
"""


class Gpu:
    """pycuda as it is, and the kernel: adds one to n floats and takes at least so many nanoseconds."""

    def __init__(self, cuda: Cuda) -> None:
        import pycuda.driver
        from pycuda.compiler import SourceModule

        self.driver = pycuda.driver
        self.cuda = cuda
        self.ns = 0
        self._module = SourceModule(KERNEL)
        self._work = self._module.get_function("work").prepare("PPqq")

    def work(self, stream: Any, x: int, y: int, count: int) -> None:
        """Launch the kernel, in the order of a stream of pycuda's."""
        self._work.prepared_async_call((64, 1), (256, 1, 1), stream, x, y, count, self.ns)

    def pinned(self, nbytes: int) -> np.ndarray:
        """Page-locked memory, as pycuda gives it; it goes when the array does."""
        array: np.ndarray = self.driver.pagelocked_zeros(nbytes, np.uint8)
        return array


class Report:
    """The rows, printed as they come."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.failed = False

    def against(self, what: str, floor: str, seconds: list[float], floors: list[float], **more: Any) -> None:
        """A time beside its floor."""
        ratio = round(float(np.median(seconds)) / float(np.median(floors)), 3)
        row = {"what": what, **machine.percentiles(seconds), "floor": floor}
        row |= {"floor_p50_ms": machine.percentiles(floors)["p50_ms"], "ratio_to_floor": ratio, **more}
        self.rows.append(row)
        extra = "".join(f"  {key} {value}" for key, value in more.items())
        print(f"{what:<46} {row['p50_ms']:>9.3f} ms {ratio:>7.3f} x {row['floor_p50_ms']:>9.3f} ms  {floor}{extra}")

    def check(self, what: str, ok: bool) -> None:
        """Something that must hold."""
        self.rows.append({"what": what, "ok": ok})
        self.failed |= not ok
        print(f"{what:<46} {'ok' if ok else 'FAILED'}", flush=True)


def main() -> None:
    """Print the table."""
    parser = machine.arguments(__doc__)
    parser.add_argument("--mb", type=int, default=256, help="size of the large copies (default: %(default)s)")
    parser.add_argument("--frames", type=int, default=100, help="for each figure (default: %(default)s)")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests" / "standin" / "trt"))
    report = Report()
    with Cuda() as cuda, cuda.current():
        print(f"{cuda.name}, compute capability {cuda.compute_capability}, CUDA {cuda.version}")
        report.rows.append({"what": "device", "gpu": cuda.name, "cuda": cuda.version, "integrated": cuda.integrated})
        measure(Gpu(cuda), report, options.mb << 20, options.frames)
        gc.collect()  # what pycuda frees by itself, while the context is current
    machine.finish(report.rows, options.json)
    sys.exit(report.failed)


def measure(gpu: Gpu, report: Report, large: int, count: int) -> None:
    """All parts, each also where another broke: on a rented machine, what the others find is worth having."""
    parts: list[Callable[[], None]] = [
        lambda: link(gpu, report, large, 10),
        lambda: link(gpu, report, 4 * int(np.prod(SHAPE)), count),
        lambda: mapped(gpu, report, count),
        lambda: batches(gpu, report, count),
        lambda: waiting(gpu, report, count),
        lambda: frames(gpu, report, count),
        lambda: threads(gpu, report, count),
        lambda: reopening(gpu, report),
    ]
    for part in parts:
        try:
            part()
        except Exception:  # noqa: BLE001 - told here, and by the exit code
            traceback.print_exc()
            report.check("a part of the benchmark broke", ok=False)


def alternately(count: int, *calls: Callable[[], object]) -> list[list[float]]:
    """Seconds that each of several takes, in turns, after two that do not count."""
    spent: list[list[float]] = [[] for _ in calls]
    for turn in range(count + 2):
        for seconds, call in zip(spent, calls, strict=True):
            started = time.perf_counter()
            call()
            if turn > 1:
                seconds.append(time.perf_counter() - started)
    return spent


def link(gpu: Gpu, report: Report, nbytes: int, count: int) -> None:
    """Our buffers' copies against bare synchronous ones of page-locked memory, and against pageable memory."""
    driver, cuda = gpu.driver, gpu.cuda
    stream, buffer = cuda.stream(), cuda.buffer(nbytes, mapped=False)
    pinned, pageable, device = gpu.pinned(nbytes), np.zeros(nbytes, np.uint8), driver.mem_alloc(nbytes)
    pattern = np.random.default_rng(0).integers(0, 255, nbytes, np.uint8)

    def upload() -> None:
        buffer.to_device(stream)
        stream.synchronize()

    def download() -> None:
        buffer.to_host(stream)
        stream.synchronize()

    size = f"{nbytes / 2**20:.0f} MiB"
    ours, floor, peer = alternately(
        count, upload, lambda: driver.memcpy_htod(device, pinned), lambda: driver.memcpy_htod(device, pageable)
    )
    rate = nbytes / float(np.median(ours)) / 1e9
    report.against(f"to the GPU, {size}", "bare copy", ours, floor, gb_per_s=round(rate, 1))
    report.against(f"to the GPU, {size}, pageable", "bare copy", peer, floor)
    ours, floor, peer = alternately(
        count, download, lambda: driver.memcpy_dtoh(pinned, device), lambda: driver.memcpy_dtoh(pageable, device)
    )
    rate = nbytes / float(np.median(ours)) / 1e9
    report.against(f"from the GPU, {size}", "bare copy", ours, floor, gb_per_s=round(rate, 1))
    report.against(f"from the GPU, {size}, pageable", "bare copy", peer, floor)
    buffer.host[:] = pattern
    upload()
    buffer.host[:] = 0
    download()
    report.check(f"{size} there and back are the same", bool(np.array_equal(buffer.host, pattern)))
    buffer.free()
    device.free()


def mapped(gpu: Gpu, report: Report, count: int) -> None:
    """A kernel that works in the host's memory: right, and what it costs on this GPU beside copies."""
    cuda, size = gpu.cuda, int(np.prod(SHAPE))
    stream = cuda.stream()
    ports = {kind: [cuda.buffer(4 * size, mapped=kind) for _ in range(2)] for kind in (True, False)}
    values = np.random.default_rng(1).normal(size=size).astype(np.float32)
    gpu.ns = 0

    def run(x: Buffer, y: Buffer) -> None:
        x.to_device(stream)
        gpu.work(stream.raw, x.pointer, y.pointer, size)
        y.to_host(stream)
        stream.synchronize()

    for kind, (x, y) in ports.items():
        x.host.view(np.float32)[:] = values
        run(x, y)
        right = bool(np.array_equal(y.host.view(np.float32), values + 1))
        report.check(f"a kernel on {'mapped' if kind else 'copied'} buffers computes x + 1", right)
    ours, floor = alternately(count, lambda: run(*ports[True]), lambda: run(*ports[False]))
    report.against("kernel in mapped memory", "copy, kernel, copy", ours, floor)
    for buffer in [*ports[True], *ports[False]]:
        buffer.free()


def batches(gpu: Gpu, report: Report, count: int) -> None:
    """The calibrator's batches."""
    driver = gpu.driver
    picture = np.random.default_rng(2).normal(size=SHAPE).astype(np.float32)
    buffer, device, seen = (
        gpu.cuda.device_buffer(picture.nbytes),
        driver.mem_alloc(picture.nbytes),
        np.empty_like(picture),
    )
    ours, floor = alternately(count, lambda: buffer.copy_from(picture), lambda: driver.memcpy_htod(device, picture))
    driver.memcpy_dtoh(seen, buffer.pointer)
    report.against("a calibration batch", "bare copy", ours, floor)
    report.check("a calibration batch arrives", bool(np.array_equal(seen, picture)))
    buffer.free()
    device.free()


def waiting(gpu: Gpu, report: Report, count: int) -> None:
    """Waiting for 2 ms of GPU work with our events, which sleep, and with CUDA's default, which spins."""
    driver, cuda = gpu.driver, gpu.cuda
    stream, sleeping, spinning = cuda.stream(), cuda.event(), driver.Event(driver.event_flags.DISABLE_TIMING)
    buffer = cuda.device_buffer(1024)
    gpu.ns = 2_000_000
    busy: dict[str, float] = {"sleeping": 0.0, "spinning": 0.0}

    def wait(name: str, record: Callable[[], object], synchronize: Callable[[], object]) -> None:
        gpu.work(stream.raw, buffer.pointer, buffer.pointer, 256)
        record()
        started = time.thread_time()
        synchronize()
        busy[name] += time.thread_time() - started

    ours, floor = alternately(
        count,
        lambda: wait("sleeping", lambda: sleeping.record(stream), sleeping.synchronize),
        lambda: wait("spinning", lambda: spinning.record(stream.raw), spinning.synchronize),
    )
    shares = {f"{name}_cpu_ms": round(1e3 * seconds / (count + 2), 3) for name, seconds in busy.items()}
    report.against("2 ms of GPU work, waited for asleep", "waited for spinning", ours, floor, **shares)
    buffer.free()


def frames(gpu: Gpu, report: Report, count: int) -> None:
    """The engine, frame by frame and with frames in flight, against the same calls bare."""
    picture = np.random.default_rng(3).normal(size=SHAPE).astype(np.float32)
    with engine(gpu) as runner:
        for ns in (0, 1_000_000):
            gpu.ns = ns
            with bare(gpu) as floor_run:
                ours, floor = alternately(count, lambda: runner.infer({"x": picture}), lambda: floor_run(picture))
            beyond = round(1e6 * (float(np.median(ours)) - float(np.median(floor))), 1)
            what = f"a frame, kernel of {ns / 1e6:g} ms"
            report.against(what, "bare copy, kernel, copy", ours, floor, beyond_us=beyond)
        right = np.array_equal(runner.infer({"x": picture})["y"], picture + 1)
        report.check("the engine computes x + 1", bool(right))
    with engine(gpu) as runner:
        overlap(gpu, runner, picture, report, count)
    orders(gpu, report)


def overlap(gpu: Gpu, runner: TensorRtEngine, picture: np.ndarray, report: Report, count: int) -> None:
    """A row of frames with two in flight, against one after the other and against the longest stage alone."""
    gpu.ns = 0
    alone = float(np.median(alternately(20, lambda: runner.infer({"x": picture}))[0]))
    # As long as everything else of a frame: where overlap gains most.
    gpu.ns = int(1e9 * alone)

    def row() -> None:
        for index in range(count):
            runner.submit({"x": picture})
            if index:
                runner.collect()
        runner.collect()

    def one_by_one() -> None:
        for _ in range(count):
            runner.infer({"x": picture})

    together, apart = alternately(3, row, one_by_one)
    report.against(f"{count} frames, two in flight", "one after the other", together, apart)
    kernels = [1e-9 * gpu.ns * count]
    report.against(f"{count} frames, two in flight", "the kernels alone", together, kernels)


def orders(gpu: Gpu, report: Report) -> None:
    """Frames in flight come back in order, each with its own values, however many slots."""
    gpu.ns = 200_000
    for slots in (1, 2, 3):
        with engine(gpu, slots=slots) as runner:
            found: list[float] = []
            for index in range(20):
                if runner.in_flight == slots:
                    found.append(float(runner.collect()["y"].max()))
                runner.submit({"x": np.full(SHAPE, index, np.float32)})
            while runner.in_flight:
                found.append(float(runner.collect()["y"].max()))
        report.check(f"frames come back in order, {slots} slots", found == [index + 1.0 for index in range(20)])


def threads(gpu: Gpu, report: Report, count: int) -> None:
    """Two engines in two threads: right, and how long two rows take beside one."""
    gpu.ns = 0
    meeting = threading.Barrier(2)

    def work(number: int, *, alone: bool) -> tuple[bool, float]:
        with engine(gpu) as runner:
            picture = np.full(SHAPE, number, np.float32)
            runner.infer({"x": picture})
            if not alone:
                meeting.wait(60)
            started = time.perf_counter()
            right = all(runner.infer({"x": picture})["y"].max() == number + 1 for _ in range(count))
            return right, time.perf_counter() - started

    single = work(0, alone=True)
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda number: work(number, alone=False), range(2)))
    report.check("two engines in two threads are right", all(right for right, _ in [single, *both]))
    seconds = max(spent for _, spent in both)
    report.against(f"2 x {count} frames in two threads", f"{count} frames in one", [seconds], [single[1]])


def reopening(gpu: Gpu, report: Report) -> None:
    """Engines that come and go leave nothing, also when another thread closes them."""
    gpu.ns = 0
    gc.collect()
    before = gpu.cuda.free_bytes()
    for _ in range(20):
        with engine(gpu) as runner, ThreadPoolExecutor(1) as pool:
            runner.submit({"x": np.zeros(SHAPE, np.float32)})
            pool.submit(runner.__exit__, None, None, None).result()
    lost = before - gpu.cuda.free_bytes()
    report.check(f"20 engines that came and went left {lost / 2**20:.1f} MiB", lost < 2 << 20)


@contextmanager
def engine(gpu: Gpu, slots: int = 2) -> Iterator[TensorRtEngine]:
    """The product's runner over the kernel: x + 1, of float32[1, 3, 640, 640]."""
    import onnx
    from onnx import TensorProto, helper

    trt = load_tensorrt()
    info = helper.make_tensor_value_info
    one = helper.make_tensor("one", TensorProto.FLOAT, [1], [1.0])
    node = helper.make_node("Add", ["x", "one"], ["y"])
    x, y = (info(name, TensorProto.FLOAT, SHAPE) for name in "xy")
    model = helper.make_model(
        helper.make_graph([node], "g", [x], [y], [one]), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    onnx.checker.check_model(model)
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    if not trt.OnnxParser(network, logger).parse(model.SerializeToString()):
        raise RuntimeError("the stand-in cannot parse the model")
    plan = builder.build_serialized_network(network, builder.create_builder_config())
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "engine.plan").write_bytes(plan)
        runner = stack.enter_context(TensorRtEngine(folder / "engine.plan", slots=slots))
        # pycuda makes no stream of a handle. Not its own objects: who keeps one keeps the stream from being destroyed.
        streams = {stream.handle: stream for stream in runner._streams}  # noqa: SLF001

        def execute(context: Any, handle: int) -> bool:
            addresses = [context.get_tensor_address(name) for name in ("x", "y")]
            gpu.work(streams[handle].raw, *addresses, int(np.prod(SHAPE)))
            return True

        runner._context = _Replaced(runner._context, execute)  # noqa: SLF001
        yield runner


class _Replaced:
    """An execution context whose work is the kernel's."""

    def __init__(self, context: Any, execute: Callable[[Any, int], bool]) -> None:
        self._context = context
        self._execute = execute
        self.set_tensor_address = context.set_tensor_address

    def execute_async_v3(self, handle: int) -> bool:
        return self._execute(self._context, handle)


@contextmanager
def bare(gpu: Gpu) -> Iterator[Callable[[np.ndarray], np.ndarray]]:
    """The same frame with nothing but pycuda."""
    driver, nbytes, stream = gpu.driver, 4 * int(np.prod(SHAPE)), gpu.driver.Stream()
    # As many buffers as the engine has slots, or the floor would find its own in the CPU's cache.
    hosts = [[gpu.pinned(nbytes).view(np.float32).reshape(SHAPE) for _ in range(2)] for _ in range(2)]
    devices = [[driver.mem_alloc(nbytes) for _ in range(2)] for _ in range(2)]
    turns = itertools.cycle(zip(hosts, devices, strict=True))

    def run(picture: np.ndarray) -> np.ndarray:
        (there, back), (x, y) = next(turns)
        np.copyto(there, picture)
        driver.memcpy_htod_async(x, there, stream)
        gpu.work(stream, int(x), int(y), picture.size)
        driver.memcpy_dtoh_async(back, y, stream)
        stream.synchronize()
        return back

    yield run
    for device in itertools.chain(*devices):
        device.free()


if __name__ == "__main__":
    main()

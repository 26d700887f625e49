"""What the other tests ask of the stand-in for pycuda, asked of pycuda itself on a GPU; TensorRT stays simulated.

TensorRT's stand-in computes on the CPU, from and to the GPU's memory.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from edge.engine.cuda import Cuda
from edge.engine.tensorrt import TensorRtEngine, probe
from edge.errors import DeviceError

pytestmark = pytest.mark.gpu

STANDIN = Path(__file__).parents[2] / "standin" / "trt"


def forget(*packages: str) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in packages]:
        del sys.modules[name]


@pytest.fixture(scope="module", autouse=True)
def driver() -> ModuleType:
    """The real pycuda, with a GPU."""
    forget("pycuda")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pycuda's own
            found = importlib.import_module("pycuda.driver")
            found.init()
    except ImportError as error:
        pytest.skip(f"needs pycuda: {error}")
    except Exception as error:
        if type(error).__module__ != "pycuda._driver":
            raise
        pytest.skip(f"needs a GPU: {error}")
    return found


@pytest.fixture
def trt(driver: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The stand-in for TensorRT, on the real pycuda."""
    assert not hasattr(driver, "_standin_live"), "the stand-in for pycuda is in the way"
    monkeypatch.setenv("STANDIN_TENSORRT", "10.3.0")
    monkeypatch.setenv("STANDIN_FAULT", "")
    monkeypatch.syspath_prepend(STANDIN)
    forget("tensorrt")
    yield importlib.import_module("tensorrt")
    forget("tensorrt")


def picture(shape: tuple[int, ...] = (1, 3, 40, 50)) -> np.ndarray:
    return np.random.default_rng(0).integers(-60, 60, shape).astype(np.float32)


@pytest.mark.parametrize("mapped", [True, False])
def test_buffers_travel_both_ways(driver: ModuleType, mapped: bool) -> None:
    pattern = np.random.default_rng(1).integers(0, 255, 1 << 20, np.uint8)
    seen = np.empty_like(pattern)

    with Cuda() as cuda:
        stream, event = cuda.stream(), cuda.event()
        buffer = cuda.buffer(pattern.size, mapped=mapped)
        cleared = not buffer.host.any()
        with cuda.current():
            buffer.host[:] = pattern
            buffer.to_device(stream)
            event.record(stream)
            event.synchronize()
            driver.memcpy_dtoh(seen, buffer.pointer)
            driver.memcpy_htod(buffer.pointer, pattern[::-1].copy())
            buffer.to_host(stream)
            stream.synchronize()

        assert cleared
        assert np.array_equal(seen, pattern)
        assert np.array_equal(buffer.host, pattern[::-1])
        assert buffer.pointer % 256 == 0


def test_device_buffers_hold_what_is_copied(driver: ModuleType) -> None:
    array = picture()
    seen = np.empty_like(array)

    with Cuda() as cuda:
        buffer = cuda.device_buffer(array.nbytes)
        with cuda.current():
            buffer.copy_from(array)
            driver.memcpy_dtoh(seen, buffer.pointer)

    assert np.array_equal(seen, array)


def test_too_much_memory_is_refused_and_the_rest_stays_usable() -> None:
    with Cuda() as cuda:
        with pytest.raises(DeviceError, match=r"GPU out of memory: asked .* MiB, .* MiB are free"):
            cuda.device_buffer(1 << 46)

        assert cuda.device_buffer(1024).pointer


LOSE_IT = """
import pycuda.driver
from edge.engine.cuda import Cuda
from edge.errors import DeviceLostError

WRITE_TO_NULL = b'''
.version 7.0
.target sm_52
.address_size 64
.visible .entry fault()
{
    .reg .u64 %null;
    .reg .u32 %value;
    mov.u64 %null, 0;
    mov.u32 %value, 1;
    st.global.u32 [%null], %value;
    ret;
}
'''


def wait():
    pycuda.driver.module_from_buffer(WRITE_TO_NULL).get_function("fault")(block=(1, 1, 1), stream=stream.raw)
    event.record(stream)
    event.synchronize()


with Cuda() as cuda:
    stream, event, buffer = cuda.stream(), cuda.event(), cuda.buffer(4, mapped=False)
    for call in (wait, lambda: buffer.to_device(stream), lambda: cuda.buffer(4), cuda.check):
        try:
            with cuda.current():
                call()
        except DeviceLostError as error:
            print(error)
print("left")
"""


def test_a_lost_context_is_told_by_every_call_and_can_be_left() -> None:
    """In a process of its own, which can do nothing more with the GPU."""
    done = subprocess.run([sys.executable, "-c", LOSE_IT], capture_output=True, text=True, timeout=120, check=False)

    *told, left = done.stdout.splitlines()
    assert len(told) == 4, done.stdout + done.stderr
    assert all("an illegal memory access" in text and "must be restarted" in text for text in told)
    assert (left, done.returncode) == ("left", 0), done.stderr


def test_opening_and_closing_costs_no_memory_whichever_thread_closes() -> None:
    with Cuda() as watcher, ThreadPoolExecutor(1) as pool:
        before = watcher.free_bytes()
        for _ in range(10):
            cuda = Cuda()
            cuda.buffer(8 << 20, mapped=False)
            pool.submit(cuda.__exit__, None, None, None).result()

        assert before - watcher.free_bytes() < 8 << 20


@pytest.mark.parametrize(
    ("dtype", "formats"),
    [
        ("FLOAT", {}),
        ("HALF", {}),
        ("HALF", {"x": "CHW16", "y": "CHW16"}),
        ("HALF", {"x": "DLA_HWC4", "y": "DLA_LINEAR"}),
    ],
)
def test_the_engine_computes_what_it_should(
    trt: ModuleType, plan: Callable[..., Path], dtype: str, formats: dict[str, str]
) -> None:
    with TensorRtEngine(plan(trt, (1, 3, 40, 50), dtype=dtype, formats=formats)) as engine:
        for image in (picture(), -picture()):
            assert np.array_equal(engine.infer({"x": image})["y"], 2 * image)


def test_frames_in_flight_come_back_in_order(trt: ModuleType, plan: Callable[..., Path]) -> None:
    found = []

    with TensorRtEngine(plan(trt, (1,)), slots=3) as engine:
        for value in range(10):
            if engine.in_flight == engine.slots:
                found.append(engine.collect()["y"].item())
            engine.submit({"x": np.float32([value])})
        while engine.in_flight:
            found.append(engine.collect()["y"].item())

    assert found == [2 * value for value in range(10)]


def test_engines_run_side_by_side_in_threads(trt: ModuleType, plan: Callable[..., Path]) -> None:
    path = plan(trt, (1, 3, 40, 50))

    def work(number: int) -> bool:
        with TensorRtEngine(path) as engine:
            return all(
                np.array_equal(engine.infer({"x": picture() + number})["y"], 2 * (picture() + number))
                for _ in range(20)
            )

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, range(2))) == [True, True]


@pytest.mark.usefixtures("trt")
def test_the_device_is_found(driver: ModuleType) -> None:
    found = probe()

    assert found.name == driver.Device(0).name()
    assert found.multiprocessors > 0
    assert found.compute_capability == "{}.{}".format(*driver.Device(0).compute_capability())

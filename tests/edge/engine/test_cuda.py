# ruff: noqa: SLF001 - names with _standin are for tests
"""Contexts, memory, streams and events, on the stand-in for pycuda; test_gpu.py asks a real GPU the same."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from edge.engine.cuda import Cuda
from edge.errors import DeviceError, DeviceLostError


@pytest.fixture(params=[True, False], ids=["integrated", "discrete"])
def driver(request: pytest.FixtureRequest, standin: Callable[..., ModuleType]) -> ModuleType:
    standin(integrated=request.param)
    return importlib.import_module("pycuda.driver")


def test_the_device_is_described(standin: Callable[..., ModuleType]) -> None:
    standin(compute="8.7")

    with Cuda() as cuda:
        found = (cuda.name, cuda.compute_capability, cuda.integrated, cuda.version)
        free = cuda.free_bytes()

    assert found == ("Orin", "8.7", True, "12.6")
    assert free > 0


def test_leaving_frees_everything_that_was_made(driver: ModuleType) -> None:
    with Cuda() as cuda:
        made = [cuda.stream(), cuda.event(), cuda.buffer(100), cuda.device_buffer(100)]
        assert driver._standin_live() >= 1 + len(made)

    assert driver._standin_live() == 0


def test_leaving_frees_everything_after_an_error(driver: ModuleType) -> None:
    with pytest.raises(ZeroDivisionError), Cuda() as cuda:
        cuda.buffer(100 // len(cuda.buffer(100).host[:0]))

    assert driver._standin_live() == 0


def test_the_context_is_current_only_inside(driver: ModuleType) -> None:
    with Cuda() as cuda:
        with cuda.current(), cuda.current():
            pass
        with pytest.raises(driver.LogicError):
            driver.mem_alloc(1)


def test_another_thread_may_use_and_close_it(driver: ModuleType) -> None:
    cuda = Cuda()

    def work() -> int:
        buffer = cuda.buffer(8)
        stream = cuda.stream()
        with cuda.current():
            buffer.to_device(stream)
            stream.synchronize()
        cuda.__exit__(None, None, None)
        return driver._standin_live()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(work).result() == 0


def test_several_threads_share_the_gpu(driver: ModuleType) -> None:
    meeting = threading.Barrier(3)

    def work(number: int) -> list[int]:
        with Cuda() as cuda:
            there, back = cuda.buffer(4), cuda.buffer(4)
            stream = cuda.stream()
            meeting.wait(10)
            with cuda.current():
                there.host[:] = number
                there.to_device(stream)
                stream.synchronize()
                driver.memcpy_dtoh(back.host, there.pointer)
            return back.host.tolist()

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(work, range(3))) == [[number] * 4 for number in range(3)]
    assert driver._standin_live() == 0


def test_buffers_are_cleared_aligned_and_travel_both_ways(driver: ModuleType) -> None:
    with Cuda() as cuda:
        stream, event = cuda.stream(), cuda.event()
        buffer = cuda.buffer(1000)
        assert not buffer.host.any()
        assert buffer.pointer % 256 == 0  # what TensorRT asks of tensor addresses
        seen = np.empty(1000, np.uint8)

        with cuda.current():
            buffer.host[:] = 7
            buffer.to_device(stream)
            event.record(stream)
            event.synchronize()
            driver.memcpy_dtoh(seen, buffer.pointer)
            driver.memcpy_htod(buffer.pointer, np.full(1000, 9, np.uint8))
            buffer.to_host(stream)
            stream.synchronize()

        assert (seen == 7).all()
        assert (buffer.host == 9).all()


@pytest.mark.usefixtures("driver")
def test_only_an_integrated_gpu_works_in_the_hosts_memory() -> None:
    with Cuda() as cuda:
        buffer = cuda.buffer(16)

        assert (buffer.pointer == buffer.host.ctypes.data) == cuda.integrated
        assert cuda.buffer(16, mapped=True).host.base is not None


def test_a_stream_waits_for_an_event_of_another(driver: ModuleType) -> None:
    order: list[str] = []
    gate = threading.Event()

    with Cuda() as cuda:
        first, second, event = cuda.stream(), cuda.stream(), cuda.event()
        with cuda.current():
            driver._standin_enqueue(first.handle, lambda: (gate.wait(10), order.append("first")))
            event.record(first)
            second.wait_for(event)
            driver._standin_enqueue(second.handle, lambda: order.append("second"))
            order.append("enqueued")
            gate.set()
            second.synchronize()

    assert order == ["enqueued", "first", "second"]


def test_device_buffers_take_exactly_their_size(driver: ModuleType) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    seen = np.empty_like(array)

    with Cuda() as cuda:
        buffer = cuda.device_buffer(array.nbytes)
        with cuda.current():
            buffer.copy_from(array)
            driver.memcpy_dtoh(seen, buffer.pointer)
            with pytest.raises(ValueError, match="array has 20 bytes; expected 24"):
                buffer.copy_from(array.ravel()[:5])
            buffer.free()

    assert np.array_equal(seen, array)
    assert driver._standin_live() == 0


def test_too_much_memory_is_refused_with_what_there_is(driver: ModuleType) -> None:
    with (
        Cuda() as cuda,
        pytest.raises(DeviceError, match=r"GPU out of memory: asked 1048576\.0 MiB, 8192\.0 MiB are free"),
    ):
        cuda.device_buffer(1 << 40)

    assert driver._standin_live() == 0


def test_a_buffer_whose_second_half_fails_leaves_nothing(
    standin: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    standin(integrated=False)
    driver = importlib.import_module("pycuda.driver")

    def refuse(_nbytes: int) -> None:
        raise driver.MemoryError("cuMemAlloc failed: out of memory")

    with Cuda() as cuda:
        monkeypatch.setattr(driver, "mem_alloc", refuse)
        before = driver._standin_live()
        with pytest.raises(DeviceError, match="out of memory"):
            cuda.buffer(100)
        assert driver._standin_live() == before


def test_a_failure_on_the_gpu_asks_for_a_restart(driver: ModuleType) -> None:
    def fail() -> None:
        raise driver.LogicError("an illegal memory access was encountered")

    with Cuda() as cuda:
        stream, event = cuda.stream(), cuda.event()
        with cuda.current():
            driver._standin_enqueue(stream.handle, fail)
            event.record(stream)
            with pytest.raises(DeviceLostError, match=r"the GPU failed: .*illegal memory access.*must be restarted"):
                event.synchronize()

    assert driver._standin_live() == 0


def test_any_call_that_fails_after_the_gpu_has_asks_for_a_restart(driver: ModuleType) -> None:
    def fail() -> None:
        raise driver.LogicError("an illegal memory access was encountered")

    with Cuda() as cuda:
        stream = cuda.stream()
        with cuda.current():
            driver._standin_enqueue(stream.handle, fail)
        with pytest.raises(DeviceLostError, match=r"the GPU failed: .*illegal memory access"), cuda.current():
            driver.memcpy_dtoh(np.empty(1, np.uint8), 1)


def test_other_errors_of_cuda_become_ours(driver: ModuleType) -> None:
    with Cuda() as cuda:
        cuda.stream()
        with pytest.raises(DeviceError, match="CUDA failed: cuMemcpyDtoH") as raised, cuda.current():
            driver.memcpy_dtoh(np.empty(1, np.uint8), 1)

    assert not isinstance(raised.value, DeviceLostError)


def test_a_missing_gpu_is_told(driver: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise driver.RuntimeError("cuInit failed: no CUDA-capable device is detected")

    monkeypatch.setattr(driver, "init", refuse)

    with pytest.raises(DeviceError, match="no usable GPU: cuInit failed: no CUDA-capable device is detected"):
        Cuda()


def test_a_missing_pycuda_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycuda", None)

    with pytest.raises(DeviceError, match=r"pycuda is not installed; pip install 'jetson-edge\[jetson\]'"):
        Cuda()


def test_a_missing_driver_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pycuda").mkdir()
    (tmp_path / "pycuda" / "__init__.py").touch()
    (tmp_path / "pycuda" / "driver.py").write_text(
        "raise ImportError('libcuda.so.1: cannot open shared object file: No such file or directory')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "pycuda"]:
        monkeypatch.delitem(sys.modules, name)

    with pytest.raises(DeviceError, match=r"libcuda\.so\.1: cannot open.*is NVIDIA's driver installed\?"):
        Cuda()
    for name in [name for name in sys.modules if name.split(".")[0] == "pycuda"]:
        del sys.modules[name]

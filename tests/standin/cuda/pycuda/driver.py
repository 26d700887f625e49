# ruff: noqa: ARG001, ARG002, SLF001 - signatures are pycuda's, and the objects one simulated driver
"""Stand-in for ``pycuda.driver``: the part that jetson-edge uses, stricter than CUDA and with host memory for a device.

Names and behaviour follow pycuda's ``src/cpp/cuda.hpp`` and ``src/wrapper/wrap_cudadrv.cpp``, 2022.2 to 2026.1.
It is stricter, since the product must not rely on CUDA's leniency:

- an asynchronous copy takes page-locked memory only (CUDA would wait for it without a word);
- memory that was freed, or a range that leaves its allocation, raises instead of corrupting something;
- copies that are still waiting when their memory is freed fail, and the stream's next synchronize() says so;
- memory is freed with a context current (pycuda makes its own current where it may).

As strict as pycuda: a context is released by the thread that retained it; detached by another one it stays alive.

Streams really are asynchronous: each is a thread that runs what it is given in order. ``_standin_live()`` counts what
has not been released. The machine is described by STANDIN_INTEGRATED (0 or 1, default 1), STANDIN_COMPUTE (default 8.7)
and STANDIN_GPU_NAME (default Orin), read when a device is asked.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import os
import queue
import threading
import time
import weakref
from enum import IntEnum, IntFlag

import numpy as np

_ALIGNMENT = 512  # of cuMemAlloc on today's devices; TensorRT needs 256
_TOTAL_MEMORY = 8 << 30


class Error(Exception):
    """Base of pycuda's errors."""


class MemoryError(Error):  # noqa: A001 - pycuda's name
    """Out of memory."""


class LogicError(Error):
    """The program has done something wrong."""


class RuntimeError(Error):  # noqa: A001 - pycuda's name
    """The device has."""


class LaunchError(Error):
    """A kernel has failed."""


class ctx_flags(IntFlag):  # noqa: N801
    SCHED_AUTO = 0
    SCHED_SPIN = 1
    SCHED_YIELD = 2
    SCHED_BLOCKING_SYNC = 4
    MAP_HOST = 8


class event_flags(IntFlag):  # noqa: N801
    DEFAULT = 0
    BLOCKING_SYNC = 1
    DISABLE_TIMING = 2
    INTERPROCESS = 4


class host_alloc_flags(IntFlag):  # noqa: N801
    PORTABLE = 1
    DEVICEMAP = 2
    WRITECOMBINED = 4


class device_attribute(IntEnum):  # noqa: N801
    """Values of CUdevice_attribute."""

    MULTIPROCESSOR_COUNT = 16
    INTEGRATED = 18
    CAN_MAP_HOST_MEMORY = 19
    ASYNC_ENGINE_COUNT = 40
    UNIFIED_ADDRESSING = 41
    COMPUTE_CAPABILITY_MAJOR = 75
    COMPUTE_CAPABILITY_MINOR = 76


class _State:
    """Everything alive, for the whole process."""

    def __init__(self):
        self.lock = threading.Lock()
        self.initialised = False
        self.starts: list[int] = []  # of allocations, sorted
        self.allocations: dict[int, tuple[int, str, object]] = {}  # start -> size, "device" or "host", buffer
        self.streams: dict[int, _Worker] = {}
        self.events: set[int] = set()
        self.contexts: set[int] = set()
        self.error: BaseException | None = None  # of a job that failed; for good, in this process
        self.numbers = itertools.count(0x10000)


_state = _State()
_thread = threading.local()


def _stack() -> list[Context]:
    if not hasattr(_thread, "stack"):
        _thread.stack = []
    return _thread.stack


def _need_context(call: str) -> Context:
    stack = _stack()
    if not stack or not stack[-1]._valid:
        raise LogicError(f"{call} failed: invalid device context - no currently active context?")
    return stack[-1]


def _standin_live() -> int:
    """Number of allocations, streams, events and retained contexts that have not been released."""
    return len(_state.allocations) + len(_state.streams) + len(_state.events) + len(_state.contexts)


def init(flags: int = 0) -> None:
    _state.initialised = True


def get_version() -> tuple[int, int, int]:
    """CUDA version pycuda was compiled for."""
    return (12, 6, 0)


def get_driver_version() -> int:
    return 12060


def mem_get_info() -> tuple[int, int]:
    _need_context("cuMemGetInfo")
    used = sum(size for size, kind, _ in _state.allocations.values() if kind == "device")
    return _TOTAL_MEMORY - used, _TOTAL_MEMORY


class Device:
    """The one device."""

    def __init__(self, number: int):
        if not _state.initialised:
            raise LogicError("cuDeviceGet failed: initialization error")
        if number != 0:
            raise LogicError("cuDeviceGet failed: invalid device ordinal")

    @staticmethod
    def count() -> int:
        if not _state.initialised:
            raise LogicError("cuDeviceGetCount failed: initialization error")
        return 1

    def name(self) -> str:
        return os.environ.get("STANDIN_GPU_NAME", "Orin")

    def compute_capability(self) -> tuple[int, int]:
        major, minor = os.environ.get("STANDIN_COMPUTE", "8.7").split(".")
        return int(major), int(minor)

    def total_memory(self) -> int:
        return _TOTAL_MEMORY

    def get_attribute(self, attr: device_attribute) -> int:
        major, minor = self.compute_capability()
        return {
            device_attribute.MULTIPROCESSOR_COUNT: 16,
            device_attribute.INTEGRATED: int(os.environ.get("STANDIN_INTEGRATED", "1")),
            device_attribute.CAN_MAP_HOST_MEMORY: 1,
            device_attribute.ASYNC_ENGINE_COUNT: 2,
            device_attribute.UNIFIED_ADDRESSING: 1,
            device_attribute.COMPUTE_CAPABILITY_MAJOR: major,
            device_attribute.COMPUTE_CAPABILITY_MINOR: minor,
        }[attr]

    def retain_primary_context(self) -> Context:
        """The primary context; it is not made current by this."""
        context = Context.__new__(Context)
        context._valid, context._owner, context._id = True, threading.get_ident(), next(_state.numbers)
        _state.contexts.add(context._id)
        return context


class Context:
    """A context; contexts of one device share their memory, as the primary one does with itself."""

    def __init__(self):
        raise TypeError("This class cannot be instantiated from Python")

    def push(self) -> None:
        if not self._valid:
            raise LogicError("cuCtxPushCurrent failed: invalid device context")
        _stack().append(self)

    @staticmethod
    def pop() -> None:
        if not _stack():
            raise LogicError("context::pop failed: invalid device context - cannot pop non-current context")
        _stack().pop()

    def detach(self) -> None:
        """Release it, and leave it if it is current. By another thread than the one that retained it: nothing."""
        if not self._valid:
            raise LogicError("context::detach failed: invalid device context - cannot detach from invalid context")
        if self._owner == threading.get_ident():
            _state.contexts.discard(self._id)
        self._valid = False
        if _stack() and _stack()[-1] is self:
            _stack().pop()

    @staticmethod
    def synchronize() -> None:
        _need_context("cuCtxSynchronize")
        for worker in list(_state.streams.values()):
            worker.drain()

    @staticmethod
    def get_current() -> Context | None:
        stack = _stack()
        return stack[-1] if stack else None

    @staticmethod
    def get_device() -> Device:
        _need_context("cuCtxGetDevice")
        return Device(0)


# ---------------------------------------------------------------------------------------------------------- memory


def _allocate(size: int, kind: str) -> int:
    if size <= 0:
        raise LogicError("cuMemAlloc failed: invalid argument")
    used = sum(other for other, _, _ in _state.allocations.values())
    if used + size > _TOTAL_MEMORY:
        raise MemoryError("cuMemAlloc failed: out of memory")
    buffer = np.empty(size + _ALIGNMENT, np.uint8)
    buffer.fill(0xCD)  # so that nobody relies on zeros
    start = -(-buffer.ctypes.data // _ALIGNMENT) * _ALIGNMENT
    with _state.lock:
        _state.allocations[start] = (size, kind, buffer)
        bisect.insort(_state.starts, start)
    return start


def _release(start: int) -> None:
    with _state.lock:
        if _state.allocations.pop(start, None) is not None:
            _state.starts.remove(start)


def _kind_of(address: int, size: int) -> str | None:
    """Whose memory a range is, None where it is nobody's or leaves its allocation."""
    with _state.lock:
        index = bisect.bisect_right(_state.starts, address) - 1
        if index < 0:
            return None
        start = _state.starts[index]
        length, kind, _ = _state.allocations[start]
    return kind if address + size <= start + length else None


class DeviceAllocation:
    """Memory of the device; freed with the object at the latest."""

    def __init__(self, start: int):
        self._start = start
        self._finalizer = weakref.finalize(self, _release, start)

    def free(self) -> None:
        _need_context("cuMemFree")
        if not self._finalizer.alive:
            raise LogicError("device_allocation::free failed: invalid resource handle")
        self._finalizer()

    def __int__(self) -> int:
        return self._start

    __index__ = __int__


class PagelockedHostAllocation:
    """Page-locked memory of the host: the base of the arrays that pagelocked_empty gives."""

    def __init__(self, shape, dtype: np.dtype, flags: int):
        size = int(np.prod(shape)) * dtype.itemsize
        self._start, self._flags = _allocate(size, "host"), int(flags)
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(shape),
            "typestr": dtype.str,
            "data": (self._start, False),
        }
        self._finalizer = weakref.finalize(self, _release, self._start)

    def free(self) -> None:
        _need_context("cuMemFreeHost")
        if not self._finalizer.alive:
            raise LogicError("pagelocked_host_allocation::free failed: invalid resource handle")
        self._finalizer()

    def get_flags(self) -> int:
        return self._flags

    def get_device_pointer(self) -> int:
        _need_context("cuMemHostGetDevicePointer")
        if not self._finalizer.alive:
            raise LogicError("cuMemHostGetDevicePointer failed: invalid argument - memory was freed")
        if not self._flags & host_alloc_flags.DEVICEMAP:
            raise LogicError("cuMemHostGetDevicePointer failed: invalid argument - allocated without DEVICEMAP")
        return self._start


def mem_alloc(size: int, /) -> DeviceAllocation:
    if not isinstance(size, int):  # a numpy integer is none to Boost.Python
        raise TypeError(f"mem_alloc({type(size).__name__}) did not match C++ signature: mem_alloc(unsigned long)")
    _need_context("cuMemAlloc")
    return DeviceAllocation(_allocate(size, "device"))


def pagelocked_empty(shape, dtype, order="C", mem_flags=0) -> np.ndarray:
    _need_context("cuMemHostAlloc")
    if order != "C":
        raise LogicError(f"the stand-in has no order {order}")
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    return np.asarray(PagelockedHostAllocation(shape, np.dtype(dtype), mem_flags))


def pagelocked_zeros(shape, dtype, order="C", mem_flags=0) -> np.ndarray:
    array = pagelocked_empty(shape, dtype, order, mem_flags)
    array.fill(0)
    return array


def _host_range(buffer, *, writable: bool) -> tuple[int, int]:
    if not isinstance(buffer, np.ndarray):
        if writable:
            raise TypeError("the stand-in copies to numpy arrays only")
        buffer = np.frombuffer(buffer, np.uint8)
    if not buffer.flags.c_contiguous:
        raise ValueError("ndarray is not contiguous")
    if writable and not buffer.flags.writeable:
        raise ValueError("buffer source array is read-only")
    base = buffer
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    if isinstance(base, PagelockedHostAllocation) and not base._finalizer.alive:
        raise LogicError("cuMemcpy failed: invalid argument - page-locked memory was freed")
    return buffer.ctypes.data, buffer.nbytes


def _move(dest: int, src: int, size: int, call: str, device: int) -> None:
    # Mapped page-locked memory is the device's too.
    if _kind_of(device, size) is None:
        raise LogicError(f"{call} failed: invalid argument - no live allocation holds {size} bytes at {device:#x}")
    ctypes.memmove(dest, src, size)


def memcpy_htod(dest, src) -> None:
    _need_context("cuMemcpyHtoD")
    address, size = _host_range(src, writable=False)
    _move(int(dest), address, size, "cuMemcpyHtoD", int(dest))


def memcpy_dtoh(dest, src) -> None:
    _need_context("cuMemcpyDtoH")
    address, size = _host_range(dest, writable=True)
    _move(address, int(src), size, "cuMemcpyDtoH", int(src))


def memcpy_htod_async(dest, src, stream=None) -> None:
    _async_copy(int(dest), src, stream, "cuMemcpyHtoDAsync", to_host=False)


def memcpy_dtoh_async(dest, src, stream=None) -> None:
    _async_copy(int(src), dest, stream, "cuMemcpyDtoHAsync", to_host=True)


def _async_copy(device: int, array, stream, call: str, *, to_host: bool) -> None:
    _need_context(call)
    address, size = _host_range(array, writable=to_host)
    if _kind_of(address, size) != "host":
        raise LogicError(f"{call} failed: the stand-in refuses pageable memory, which CUDA would copy synchronously")
    if _kind_of(device, size) is None:
        raise LogicError(f"{call} failed: invalid argument - no live allocation holds {size} bytes at {device:#x}")

    def copy() -> None:
        if _kind_of(address, size) is None:
            raise LogicError(f"{call} failed: page-locked memory was freed before the copy ran")
        _move(address if to_host else device, device if to_host else address, size, call, device)

    _enqueue(stream, copy)


# --------------------------------------------------------------------------------------------- streams and events


class _Worker:
    """The thread of a stream. It knows nothing of the Stream object, so that this one can be collected."""

    def __init__(self):
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._run, name="standin-stream", daemon=True).start()

    def put(self, job, *, always: bool = False) -> None:
        """Run a job after those before it; once one has failed, only what must run ``always``."""
        self._jobs.put((job, always))

    def close(self) -> None:
        self._jobs.put((None, True))

    def _run(self) -> None:
        context = Context.__new__(Context)  # what runs on the device needs no context of its own
        context._valid = True
        _stack().append(context)
        while True:
            job, always = self._jobs.get()
            if job is None:
                return
            if _state.error is not None and not always:  # errors are sticky and the whole context's, as CUDA's are
                continue
            try:
                job()
            except Exception as error:  # noqa: BLE001 - raised where the stream is waited for
                _state.error = error

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait for everything before; False if it takes longer. Raises the error of a job that failed."""
        done = threading.Event()
        self.put(done.set, always=True)
        finished = done.wait(timeout_s)
        self.check()
        return finished

    def check(self) -> None:
        if _state.error is not None:
            raise LogicError(f"cuStreamSynchronize failed: {_state.error}") from _state.error


def _close_stream(handle: int) -> None:
    _state.streams.pop(handle).close()


class Stream:
    """A queue of work, in order."""

    def __init__(self, flags: int = 0):
        _need_context("explicit_context_dependent")
        self.handle = next(_state.numbers)
        self._worker = _Worker()
        _state.streams[self.handle] = self._worker
        weakref.finalize(self, _close_stream, self.handle)

    def synchronize(self) -> None:
        _need_context("cuStreamSynchronize")
        self._worker.drain()

    def is_done(self) -> bool:
        _need_context("cuStreamQuery")
        return self._worker.drain(0.001)

    def wait_for_event(self, evt: Event) -> None:
        _need_context("cuStreamWaitEvent")
        if evt._mark is not None:
            self._worker.put(evt._mark.done.wait)


class _Mark:
    """One recording of an event."""

    def __init__(self):
        self.done, self.at_s = threading.Event(), 0.0

    def set(self) -> None:
        self.at_s = time.perf_counter()
        self.done.set()


class Event:
    """A mark in a stream."""

    def __init__(self, flags: int = 0):
        _need_context("explicit_context_dependent")
        self._flags, self._mark, self._worker = int(flags), None, None
        number = next(_state.numbers)
        _state.events.add(number)
        weakref.finalize(self, _state.events.discard, number)

    def record(self, stream: Stream | None = None) -> Event:
        _need_context("cuEventRecord")
        mark = self._mark = _Mark()
        self._worker = stream._worker if stream is not None else None
        if self._worker is None:
            _enqueue(None, mark.set)
        else:
            self._worker.put(mark.set, always=True)
        return self

    def synchronize(self) -> Event:
        _need_context("cuEventSynchronize")
        if self._mark is not None:
            self._mark.done.wait()
        if self._worker is not None:
            self._worker.check()
        return self

    def query(self) -> bool:
        _need_context("cuEventQuery")
        return self._mark is None or self._mark.done.is_set()

    def time_since(self, event: Event) -> float:
        """Milliseconds from another event to this one."""
        _need_context("cuEventElapsedTime")
        if self._mark is None or event._mark is None or (self._flags | event._flags) & event_flags.DISABLE_TIMING:
            raise LogicError("cuEventElapsedTime failed: invalid resource handle")
        if not (self._mark.done.is_set() and event._mark.done.is_set()):
            raise LogicError("cuEventElapsedTime failed: device not ready")
        return (self._mark.at_s - event._mark.at_s) * 1000

    def time_till(self, event: Event) -> float:
        """Milliseconds from this event to another one."""
        return event.time_since(self)


def _enqueue(stream: Stream | None, job) -> None:
    if stream is None:  # the legacy default stream waits for all others
        Context.synchronize()
        job()
        return
    stream._worker.put(job)


def _standin_enqueue(handle: int, job) -> None:
    """Run a job on the stream of that handle, as a library does that was given the handle only."""
    _need_context("cuLaunchKernel")
    if handle == 0:
        _enqueue(None, job)
    elif handle in _state.streams:
        _state.streams[handle].put(job)
    else:
        raise LogicError("cuLaunchKernel failed: invalid resource handle")

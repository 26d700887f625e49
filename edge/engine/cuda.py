"""CUDA through pycuda: the primary context, memory that CPU and GPU share, streams and events.

This is the only module that imports pycuda, the only one that makes a context current, and the border at which pycuda's
errors become ours. It knows no tensors and no TensorRT.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from edge.errors import DeviceError, DeviceLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from numpy.typing import NDArray
    from typing_extensions import Self

__all__ = ["Buffer", "Cuda", "DeviceBuffer", "Event", "Stream"]

_Made = TypeVar("_Made", bound="_Freed")


class _Freed(Protocol):
    def free(self) -> None: ...


class Cuda:
    """The primary context of the first GPU, and whatever is made in it; leaving the block frees all of it.

    TensorRT's CUDA runtime works in the primary context, so that memory and streams made here are good there. Several
    may be open at once, in one thread or in many: they share the context.
    """

    def __init__(self) -> None:
        """Retain the context.

        Raises:
            DeviceError: pycuda or the driver is missing, or there is no GPU.
        """
        driver = self._driver = _import()
        self._made: list[_Freed] = []
        try:
            driver.init()
            device = driver.Device(0)
            self.name: str = device.name()
            """Of the GPU."""
            self.compute_capability: str = "{}.{}".format(*device.compute_capability())
            """8.7 for Orin."""
            self.integrated: bool = bool(device.get_attribute(driver.device_attribute.INTEGRATED))
            """CPU and GPU share their memory."""
            self.multiprocessors: int = device.get_attribute(driver.device_attribute.MULTIPROCESSOR_COUNT)
            """That are switched on."""
            version = driver.get_driver_version()
            self.version: str = f"{version // 1000}.{version % 1000 // 10}"
            """Highest CUDA version that the driver serves."""
            self._retain(device)
        except driver.Error as error:
            raise DeviceError(
                f"no usable GPU: {error}; is NVIDIA's driver loaded, and may this user use it?"
            ) from error

    def _retain(self, device: Any) -> None:
        with ExitStack() as stack:
            # pycuda releases a context only for the thread that retained it, and leaves it current there (cuda.hpp,
            # context::detach). A thread of its own does both, so that this object may be closed by any thread and no
            # thread of ours is left with a context that is gone.
            owner = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="cuda-context"))
            self._context = owner.submit(device.retain_primary_context).result()
            stack.callback(lambda: owner.submit(self._context.detach).result())
            stack.callback(self._free)
            self._stack = stack.pop_all()

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the context current on this thread, for copies, waits and whatever else CUDA is asked; may be nested.

        Raises:
            DeviceError: CUDA failed in the block.
            DeviceLostError: and will from now on.
        """
        self._context.push()
        try:
            yield
        except self._driver.Error as error:
            self.check()
            raise DeviceError(f"CUDA failed: {error}") from error
        finally:
            self._driver.Context.pop()

    def check(self) -> None:
        """Tell what is about one call from what is about all: wait for everything, which a lost context refuses.

        Raises:
            DeviceLostError: something has failed on the GPU, after which nothing works in this process any more.
        """
        with self.current():
            _wait(self._driver, self._driver.Context)

    def free_bytes(self) -> int:
        """Memory of the GPU that nobody has taken; on integrated GPUs it is the CPU's too."""
        with self.current():
            return int(self._driver.mem_get_info()[0])

    def buffer(self, nbytes: int, *, mapped: bool | None = None) -> Buffer:
        """Cleared page-locked memory that the GPU has too.

        Mapping saves an integrated GPU both copies. Since Xavier such memory is in the CPU's caches, and the GPU sees
        what they hold, but never in the GPU's own (CUDA for Tegra, "Memory Management"): a layer that reads its input
        more than once may lose more than the copies take. Which is faster on Orin has not been measured.

        Args:
            nbytes: size.
            mapped: the GPU works in the host's memory itself; None: it does if it is integrated.

        Raises:
            DeviceError: out of memory.
        """
        return self._make(
            nbytes, lambda: Buffer(self._driver, nbytes, mapped=self.integrated if mapped is None else mapped)
        )

    def device_buffer(self, nbytes: int) -> DeviceBuffer:
        """Memory of the GPU alone.

        Raises:
            DeviceError: out of memory.
        """
        return self._make(nbytes, lambda: DeviceBuffer(self._driver, nbytes))

    def stream(self) -> Stream:
        """A new stream."""
        return self._make(0, lambda: Stream(self._driver))

    def event(self) -> Event:
        """A new event."""
        return self._make(0, lambda: Event(self._driver))

    def _make(self, nbytes: int, make: Callable[[], _Made]) -> _Made:
        with self.current():
            try:
                made = make()
            except self._driver.MemoryError as error:
                raise DeviceError(
                    f"GPU out of memory: asked {nbytes / 2**20:.1f} MiB, {self.free_bytes() / 2**20:.1f} MiB are free"
                ) from error
        self._made.append(made)
        return made

    def _free(self) -> None:
        with self.current():
            while self._made:
                self._made.pop().free()

    def __enter__(self) -> Self:
        """The context is retained when this is constructed."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Free what was made, newest first, and release the context."""
        self._stack.close()


class Stream:
    """Work for the GPU, done in order."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self.raw: Any = driver.Stream()
        """pycuda's object."""
        self.handle: int = self.raw.handle
        """As TensorRT takes it."""

    def wait_for(self, event: Event) -> None:
        """Hold what comes next until an event; returns at once."""
        self.raw.wait_for_event(event.raw)

    def synchronize(self) -> None:
        """Wait until everything is done; see ``Event.synchronize``."""
        _wait(self._driver, self.raw)

    def free(self) -> None:
        """Destroy the stream: pycuda does when nobody has it any more."""
        self.raw = None


class Event:
    """A mark in a stream that other streams, or the CPU, can wait for."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        # BLOCKING_SYNC: by default CUDA burns a CPU core while it waits.
        self.raw: Any = driver.Event(driver.event_flags.BLOCKING_SYNC | driver.event_flags.DISABLE_TIMING)
        """pycuda's object."""

    def record(self, stream: Stream) -> None:
        """Put the mark behind what the stream has to do so far."""
        self.raw.record(stream.raw)

    def synchronize(self) -> None:
        """Wait for it, without holding Python's lock.

        Raises:
            DeviceLostError: something before it has failed on the GPU.
        """
        _wait(self._driver, self.raw)

    def free(self) -> None:
        """Destroy the event: pycuda does when nobody has it any more."""
        self.raw = None


class Buffer:
    """Page-locked memory of the host that the GPU has too: itself where it is mapped, as a copy where not."""

    def __init__(self, driver: Any, nbytes: int, *, mapped: bool) -> None:
        self._driver = driver
        self._device: Any = None
        with ExitStack() as stack:
            flags = driver.host_alloc_flags.DEVICEMAP if mapped else 0
            self.host: NDArray[np.uint8] = driver.pagelocked_zeros(nbytes, np.uint8, mem_flags=flags)
            """Flat; views of it are worth nothing once the buffer is freed."""
            allocation = self.host.base
            stack.callback(allocation.free)
            if not mapped:
                self._device = driver.mem_alloc(nbytes)
                stack.callback(self._device.free)
            self.pointer: int = int(allocation.get_device_pointer() if mapped else self._device)
            """The GPU's address of it."""
            self._stack = stack.pop_all()

    def to_device(self, stream: Stream) -> None:
        """Bring what the host wrote to the GPU, in a stream's order."""
        if self._device is not None:
            self._driver.memcpy_htod_async(self._device, self.host, stream.raw)

    def to_host(self, stream: Stream) -> None:
        """Bring what the GPU wrote to the host, in a stream's order."""
        if self._device is not None:
            self._driver.memcpy_dtoh_async(self.host, self._device, stream.raw)

    def free(self) -> None:
        """Give the memory back; safe to call twice."""
        self.host = np.empty(0, np.uint8)
        self._stack.close()


class DeviceBuffer:
    """Memory of the GPU alone."""

    def __init__(self, driver: Any, nbytes: int) -> None:
        self._driver = driver
        self._device: Any = driver.mem_alloc(nbytes)
        self.nbytes = nbytes
        self.pointer: int = int(self._device)
        """The GPU's address of it."""

    def copy_from(self, array: NDArray[Any]) -> None:
        """Copy a C-contiguous array of exactly this size to the GPU; returns when it is there.

        Raises:
            ValueError: it has another size.
        """
        if array.nbytes != self.nbytes:
            raise ValueError(f"array has {array.nbytes} bytes; expected {self.nbytes}")
        self._driver.memcpy_htod(self._device, np.ascontiguousarray(array))

    def free(self) -> None:
        """Give the memory back; safe to call twice."""
        if self._device is not None:
            self._device.free()
            self._device = None


def _wait(driver: Any, what: Any) -> None:
    try:
        what.synchronize()
    except driver.Error as error:
        raise DeviceLostError(
            f"the GPU failed: {error}; CUDA's context is lost with it, so this process must be restarted"
        ) from error


def _import() -> Any:
    try:
        import pycuda.driver
    except ModuleNotFoundError as error:
        if error.name not in ("pycuda", "pycuda.driver"):
            raise DeviceError(f"pycuda cannot be imported: {error}") from error
        raise DeviceError("pycuda is not installed; pip install 'jetson-edge[jetson]'") from None
    except ImportError as error:
        # Its extension is linked to libcuda.so.1, which comes with the driver.
        raise DeviceError(f"pycuda cannot be imported: {error}; is NVIDIA's driver installed?") from error
    return pycuda.driver

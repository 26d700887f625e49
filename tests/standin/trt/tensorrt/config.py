# ruff: noqa: ARG002, SLF001 - signatures are the bindings', and the modules one simulated library
"""How to build: the builder's configuration, optimisation profiles and the timing cache."""

from __future__ import annotations

import os

from tensorrt import arithmetic, plans
from tensorrt.callbacks import IInt8Calibrator, IProgressMonitor, derived, say
from tensorrt.listing import EXPORTS, NUMBERS, VERSION, Bound, bound, new, slot

BuilderFlag = EXPORTS["BuilderFlag"]
HAS_DLA = NUMBERS < (10, 8)
"""10.7 was the last 10.x with DLA; it is back in 11.4.1, on Jetson AGX Orin only."""


def dla_cores() -> int:
    return int(os.environ.get("STANDIN_DLA_CORES", "2")) if HAS_DLA else 0


@bound
class IOptimizationProfile(Bound):
    __slots__ = ("_shapes",)

    def set_shape(self, input, min, opt, max):  # noqa: A002 - the bindings' names
        if not all(low <= middle <= high for low, middle, high in zip(min, opt, max, strict=True)):
            raise ValueError("Shapes provided for min, opt, and max must be in order")
        self._shapes[input] = tuple(tuple(shape) for shape in (min, opt, max))

    def get_shape(self, input):  # noqa: A002
        return list(self._shapes.get(input, ()))


@bound
class ITimingCache(Bound):
    __slots__ = ("_content",)

    def serialize(self):
        return plans.IHostMemory(self._content)

    def combine(self, input_cache, ignore_mismatch):
        self._content += input_cache._content
        return True

    def reset(self):
        self._content = timing_header()
        return True


def timing_header() -> bytes:
    return f"STANDIN TIMING {VERSION} {plans.compute()}\n".encode()


@bound
class IBuilderConfig(Bound):
    __slots__ = ("_cache", "_calibration", "_calibrator", "_core", "_default_device", "_devices", "_flags", "_level")
    __slots__ += ("_logger", "_monitor", "_pools", "_profiles", "_verbosity", "_wrong")

    flags = slot("flags", int)

    def set_flag(self, flag):
        self._flags |= 1 << int(flag)

    def clear_flag(self, flag):
        self._flags &= ~(1 << int(flag))

    def get_flag(self, flag):
        return bool(self._flags >> int(flag) & 1)

    def _has(self, name):
        flag = BuilderFlag.__members__.get(name)
        return flag is not None and self.get_flag(flag)

    DLA_core = slot("core", int)
    default_device_type = slot("default_device", "DeviceType")
    profiling_verbosity = slot("verbosity", "ProfilingVerbosity")

    def set_device_type(self, layer, device_type):
        self._devices[id(layer)] = device_type

    def get_device_type(self, layer):
        return self._devices.get(id(layer), self._default_device)

    def is_device_type_set(self, layer):
        return id(layer) in self._devices

    def reset_device_type(self, layer):
        self._devices.pop(id(layer), None)

    def can_run_on_DLA(self, layer):  # noqa: N802
        if dla_cores() == 0 or not (self._has("FP16") or self._has("INT8")):
            return False
        if layer._precision is not None and layer._precision.name not in ("HALF", "INT8"):
            return False
        return arithmetic.dla_refuses(layer) is None

    def set_memory_pool_limit(self, pool, pool_size):
        # NvInfer.h: DLA pools are powers of two of at least 4 KiB, otherwise building the loadable fails
        if pool.name.startswith("DLA_") and (pool_size < 4096 or pool_size & (pool_size - 1)):
            say(self._logger, "ERROR", f"IBuilderConfig::setMemoryPoolLimit: {pool.name} is no power of two >= 4 KiB")
            self._wrong = f"{pool.name} is {pool_size}"
        self._pools[pool] = pool_size

    def get_memory_pool_limit(self, pool):
        default = {"DLA_MANAGED_SRAM": 1 << 20, "DLA_LOCAL_DRAM": 1 << 30, "DLA_GLOBAL_DRAM": 1 << 29}
        return self._pools.get(pool, default.get(pool.name, 8 << 30))

    int8_calibrator = slot("calibrator", settable=False)

    @int8_calibrator.setter
    def int8_calibrator(self, value):
        self._calibrator = derived(value, IInt8Calibrator)

    progress_monitor = slot("monitor", settable=False)

    @progress_monitor.setter
    def progress_monitor(self, value):
        self._monitor = derived(value, IProgressMonitor)

    builder_optimization_level = slot("level", settable=False)

    @builder_optimization_level.setter
    def builder_optimization_level(self, value):
        if not 0 <= value <= 5:
            say(self._logger, "ERROR", f"IBuilderConfig::setBuilderOptimizationLevel: invalid level {value}")
            return
        self._level = int(value)

    def create_timing_cache(self, serialized_timing_cache):
        content = bytes(serialized_timing_cache)
        if content and not content.startswith(b"STANDIN TIMING "):
            say(self._logger, "ERROR", "IBuilderConfig::createTimingCache: the cache cannot be deserialized")
            return None
        return new(ITimingCache, content=content or timing_header())

    def set_timing_cache(self, cache, ignore_mismatch):
        if not ignore_mismatch and not cache._content.startswith(timing_header()):
            say(self._logger, "ERROR", "IBuilderConfig::setTimingCache: the cache is of another version or device")
            return False
        self._cache = cache
        return True

    def get_timing_cache(self):
        return self._cache

    def add_optimization_profile(self, profile):
        self._profiles.append(profile)
        return len(self._profiles) - 1

    @property
    def num_optimization_profiles(self):
        return len(self._profiles)

    def set_calibration_profile(self, profile):
        self._calibration = profile
        return True

    def get_calibration_profile(self):
        return self._calibration

"""Builder, its configuration, and the callbacks that user code derives from."""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np

from tensorrt import arithmetic, layouts, plans
from tensorrt.graph import INetworkDefinition, faults, say
from tensorrt.listing import EXPORTS, NUMBERS, SEVERITY, VERSION, Bound, bound, new

BuilderFlag, DeviceType, MemoryPoolType = EXPORTS["BuilderFlag"], EXPORTS["DeviceType"], EXPORTS["MemoryPoolType"]
HAS_DLA = NUMBERS < (10, 8)
"""10.7 was the last 10.x with DLA; it is back in 11.4.1, on Jetson AGX Orin only."""


def dla_cores() -> int:
    return int(os.environ.get("STANDIN_DLA_CORES", "2")) if HAS_DLA else 0


class _Callback(Bound):
    """Base of what Python code derives from; like pybind11's, it insists on its own constructor."""

    __slots__ = ("_constructed",)

    def __init__(self):
        self._constructed = True


@bound
class ILogger(_Callback):
    __slots__ = ()
    Severity = SEVERITY

    def log(self, severity, msg):
        raise RuntimeError('Tried to call pure virtual function "ILogger::log"')


@bound
class Logger(ILogger):
    __slots__ = ("_least",)
    Severity = SEVERITY

    def __init__(self, min_severity=SEVERITY.WARNING):
        super().__init__()
        self._least = min_severity

    @property
    def min_severity(self):
        return self._least

    @min_severity.setter
    def min_severity(self, value):
        self._least = value

    def log(self, severity, msg):
        if severity.value <= self._least.value:
            letter = "F" if severity.value == 0 else severity.name[0]
            print(f"[{time.strftime('%m/%d/%Y-%H:%M:%S')}] [TRT] [{letter}] {msg}", file=sys.stderr)  # noqa: T201


for _severity, _member in SEVERITY.__members__.items():
    for _class in (ILogger, Logger):
        setattr(_class, _severity, _member)


@bound
class IProgressMonitor(_Callback):
    __slots__ = ()

    def phase_start(self, phase_name, parent_phase, num_steps):
        raise RuntimeError('Tried to call pure virtual function "IProgressMonitor::phaseStart"')

    def step_complete(self, phase_name, step):
        raise RuntimeError('Tried to call pure virtual function "IProgressMonitor::stepComplete"')

    def phase_finish(self, phase_name):
        raise RuntimeError('Tried to call pure virtual function "IProgressMonitor::phaseFinish"')


@bound
class IInt8Calibrator(_Callback):
    __slots__ = ()

    def get_batch_size(self):
        raise RuntimeError('Tried to call pure virtual function "IInt8Calibrator::get_batch_size"')

    def get_batch(self, names):
        return []

    def read_calibration_cache(self):
        return None

    def write_calibration_cache(self, cache):
        return None


@bound
class IInt8EntropyCalibrator2(IInt8Calibrator):
    __slots__ = ()

    def get_algorithm(self):
        return EXPORTS["CalibrationAlgoType"].ENTROPY_CALIBRATION_2


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
    __slots__ += ("_logger", "_model", "_monitor", "_pools", "_profiles", "_verbosity", "_wrong")

    @property
    def flags(self):
        return self._flags

    @flags.setter
    def flags(self, value):
        self._flags = int(value)

    def set_flag(self, flag):
        self._flags |= 1 << int(flag)

    def clear_flag(self, flag):
        self._flags &= ~(1 << int(flag))

    def get_flag(self, flag):
        return bool(self._flags >> int(flag) & 1)

    def _has(self, name):
        flag = BuilderFlag.__members__.get(name)
        return flag is not None and self.get_flag(flag)

    @property
    def DLA_core(self):  # noqa: N802
        return self._core

    @DLA_core.setter
    def DLA_core(self, value):  # noqa: N802
        self._core = int(value)

    @property
    def default_device_type(self):
        return self._default_device

    @default_device_type.setter
    def default_device_type(self, value):
        if not isinstance(value, DeviceType):
            raise TypeError(f"(): incompatible function arguments: {value!r} is no tensorrt.DeviceType")
        self._default_device = value

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
        return arithmetic.dla_refuses(layer, self._model()) is None

    def set_memory_pool_limit(self, pool, pool_size):
        # NvInfer.h: DLA pools are powers of two of at least 4 KiB, otherwise building the loadable fails
        if pool.name.startswith("DLA_") and (pool_size < 4096 or pool_size & (pool_size - 1)):
            say(self._logger, "ERROR", f"IBuilderConfig::setMemoryPoolLimit: {pool.name} is no power of two >= 4 KiB")
            self._wrong = f"{pool.name} is {pool_size}"
        self._pools[pool] = pool_size

    def get_memory_pool_limit(self, pool):
        default = {"DLA_MANAGED_SRAM": 1 << 20, "DLA_LOCAL_DRAM": 1 << 30, "DLA_GLOBAL_DRAM": 1 << 29}
        return self._pools.get(pool, default.get(pool.name, 8 << 30))

    @property
    def int8_calibrator(self):
        return self._calibrator

    @int8_calibrator.setter
    def int8_calibrator(self, value):
        self._calibrator = _derived(value, IInt8Calibrator)

    @property
    def progress_monitor(self):
        return self._monitor

    @progress_monitor.setter
    def progress_monitor(self, value):
        self._monitor = _derived(value, IProgressMonitor)

    @property
    def profiling_verbosity(self):
        return self._verbosity

    @profiling_verbosity.setter
    def profiling_verbosity(self, value):
        self._verbosity = value

    @property
    def builder_optimization_level(self):
        return self._level

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


def _derived(value, base):
    if value is not None and not isinstance(value, base):
        raise TypeError(f"(): incompatible function arguments: {value!r} is no tensorrt.{base.__name__}")
    if value is not None and not hasattr(value, "_constructed"):
        raise TypeError(f"tensorrt.{base.__name__}.__init__() must be called when overriding __init__")
    return value


@bound
class Builder(Bound):
    __slots__ = ("_last", "_logger", "_threads")

    def __init__(self, logger):
        self._logger, self._threads, self._last = _derived(logger, ILogger), 1, None

    @property
    def logger(self):
        return self._logger

    @property
    def max_threads(self):
        return self._threads

    @max_threads.setter
    def max_threads(self, value):
        self._threads = int(value)

    @property
    def num_DLA_cores(self):  # noqa: N802
        return dla_cores()

    @property
    def max_DLA_batch_size(self):  # noqa: N802
        return 4096 if dla_cores() else 0

    @property
    def platform_has_fast_fp16(self):
        return True

    @property
    def platform_has_fast_int8(self):
        return True

    @property
    def platform_has_tf32(self):
        return True

    def create_network(self, flags=0):
        network = new(INetworkDefinition, builder=self, flags=int(flags), layers=[], logger=self._logger)
        network._model, network._name, network._tensors = None, "", {}
        self._last = network
        return network

    def create_optimization_profile(self):
        return new(IOptimizationProfile, shapes={})

    def create_builder_config(self):
        return new(
            IBuilderConfig,
            cache=None,
            calibration=None,
            calibrator=None,
            core=-1,
            default_device=DeviceType.GPU,
            devices={},
            flags=1 << int(BuilderFlag.TF32),  # on by default
            level=3,
            logger=self._logger,
            model=lambda: self._last._model,
            monitor=None,
            pools={},
            profiles=[],
            verbosity=EXPORTS["ProfilingVerbosity"].LAYER_NAMES_ONLY,
            wrong=None,
        )

    def is_network_supported(self, network, config):
        return network._model is not None

    def build_serialized_network(self, network, config):
        try:
            return plans.IHostMemory(_Build(self._logger, network, config).run())
        except _Stop as stop:
            for text in stop.args:
                say(self._logger, "ERROR", text)
            return None

    def reset(self):
        self._last = None


class _Stop(Exception):
    """The build has failed; its arguments are the lines of the log."""


class _Build:
    """One build."""

    def __init__(self, logger, network, config):
        self.logger, self.network, self.config = logger, network, config
        self.scales: dict[str, float] = {}
        self.typed = network._typed
        self.quantized_model = network._model is not None and any(
            node.op_type == "QuantizeLinear" for node in network._model.graph.node
        )

    def run(self) -> bytes:
        self._check()
        shapes = self._shapes()
        if self.config._has("INT8") and not self.quantized_model:
            self._find_scales(shapes)
        on_dla = self._place()
        self._work()
        precisions = {id(layer): self._precision(layer, id(layer) in on_dla) for layer in self.network._layers}
        model = self._lowered(precisions)
        content = plans.write(
            model.SerializeToString(),
            tensors=self._bindings(),
            layers=plans.described(self.network, precisions, on_dla, self.scales, self.config._verbosity.name),
            profile={name: list(shape) for name, shape in shapes.items()},
            dla_core=max(self.config._core, 0) if on_dla else None,
            verbosity=self.config._verbosity.name,
            spoiled=self._spoiled(set(precisions.values())),
        )
        if self.config._cache is not None:
            self.config._cache._content += f"{len(self.network._layers)} layers\n".encode()
        return content

    def _check(self) -> None:
        network, config = self.network, self.config
        if network._model is None or not network.num_outputs:
            raise _Stop(_error(4, "API Usage Error (Network must have at least one output)", "Network::validate"))
        if config._wrong:
            raise _Stop(_error(4, f"API Usage Error ({config._wrong})"))
        if self.typed and (config._has("FP16") or config._has("INT8")):
            raise _Stop(_error(3, "API Usage Error (Parameter check failed, precision flags must not be set for a"
                                  " strongly typed network)"))  # fmt: skip
        if self.typed and NUMBERS < (11,) and any(layer._precision or layer._output_types for layer in network._layers):
            raise _Stop(_error(4, "API Usage Error (layer precisions must not be set in a strongly typed network)"))
        if self.quantized_model and not self.typed and not config._has("INT8"):
            raise _Stop(_error(4, "API Usage Error (a network with Q/DQ layers needs the INT8 flag)"))
        uses_dla = config._default_device.name == "DLA" or any(kind.name == "DLA" for kind in config._devices.values())
        if uses_dla and max(config._core, 0) >= dla_cores():
            raise _Stop(_error(3, f"API Usage Error (DLA core {config._core} is not there: {dla_cores()} DLA cores)"))
        if self.quantized_model and config._calibrator is not None:
            say(self.logger, "WARNING", "Calibrator won't be used in explicit precision mode. Use quantization aware"
                                        " training to generate network with Quantize/Dequantize nodes.")  # fmt: skip
        for fault in faults():
            if fault == "build-fails":
                raise _Stop(_error(10, "Internal Error (Could not find any implementation for node"
                                       f" {{ForeignNode[{network._layers[0]._name}...]}}.)"))  # fmt: skip
            if fault == "out-of-memory":
                raise _Stop(
                    "[virtualMemoryBuffer.cpp::resizePhysical::144] Error Code 2: OutOfMemory (Requested size was 1234"
                    " bytes.)",
                    _error(2, "OutOfMemory (Requested size was 1234 bytes.)"),
                )

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each input to optimise for."""
        shapes = {}
        for tensor in self.network._ins:
            shapes[tensor._name] = tuple(tensor._shape)
            if -1 not in tensor._shape:
                continue
            if not self.config._profiles:
                raise _Stop(_error(4, "API Usage Error (Network has dynamic or shape inputs, but no optimization"
                                      " profile has been defined.)"))  # fmt: skip
            ranges = self.config._profiles[0]._shapes.get(tensor._name)
            if ranges is None:
                raise _Stop(_error(4, f"API Usage Error (optimization profile is missing values for {tensor._name})"))
            shapes[tensor._name] = ranges[1]
        return shapes

    def _work(self) -> None:
        """What takes the time: phases and their steps."""
        self._phase("Building Engine", "", 3, start=True)
        for number, inner in enumerate(("Building engine from subgraph", "Timing graph nodes")):
            self._phase(inner, "Building Engine", len(self.network._layers), start=True)
            for step in range(len(self.network._layers)):
                self._misfortune()
                self._step(inner, step)
            self._phase(inner, "Building Engine", 0, start=False)
            self._step("Building Engine", number)
        self._phase("Building Engine", "", 0, start=False)

    def _misfortune(self) -> None:
        for fault in faults():
            if fault in ("oom-kill", "crash"):
                os.kill(os.getpid(), signal.SIGKILL if fault == "oom-kill" else signal.SIGSEGV)
            if fault == "slow":
                time.sleep(0.2)
            while fault == "hang":
                time.sleep(0.05)

    def _phase(self, name: str, parent: str, steps: int, *, start: bool) -> None:
        monitor = self.config._monitor
        if monitor is None:
            return
        if start:
            called("phase_start", lambda: monitor.phase_start(name, parent or None, steps), None)
        else:
            called("phase_finish", lambda: monitor.phase_finish(name), None)

    def _step(self, name: str, step: int) -> None:
        monitor = self.config._monitor
        if monitor is not None and not called("step_complete", lambda: monitor.step_complete(name, step), False):
            raise _Stop(_error(10, "Internal Error (The build was cancelled by the progress monitor)"))

    # ------------------------------------------------------------------------------------------------- INT8

    def _find_scales(self, shapes: dict[str, tuple[int, ...]]) -> None:
        if self.config._calibrator is not None:
            self.scales = self._calibrated(self.config._calibrator, shapes)
        for name, tensor in self.network._tensors.items():
            if tensor._range is not None:
                self.scales[name] = max(abs(bound) for bound in tensor._range) / 127
        if not self.scales:
            raise _Stop(
                _error(4, "Internal Error (Calibration failure occurred with no scaling factors detected. This could be"
                          " due to no int8 calibrator or insufficient custom scales for network layers. Please see int8"
                          " sample to setup calibration correctly.)", "standardEngineBuilder.cpp::initCalibrationParams"),
                _error(2, "Internal Error (Builder failed while configuring INT8 mode.)"),
            )  # fmt: skip
        for name in arithmetic.float_tensors(self.network):
            if name not in self.scales:
                say(self.logger, "WARNING", f"Missing scale and zero-point for tensor {name}, expect fall back to"
                    " non-int8 implementation for any layer consuming or producing given tensor")  # fmt: skip

    def _calibrated(self, calibrator, shapes: dict[str, tuple[int, ...]]) -> dict[str, float]:
        cache = called("read_calibration_cache", calibrator.read_calibration_cache, None)
        if cache is not None and (found := arithmetic.parse_cache(bytes(cache))) is not None:
            return found
        # Another version's cache is skipped without a word, as the real one does.
        profile = self.config._calibration or next(iter(self.config._profiles), None)
        called("get_batch_size", calibrator.get_batch_size, 1)
        maxima, batches, names = arithmetic.Maxima(self.network), 0, list(shapes)
        while True:
            pointers = called("get_batch", lambda: _pointers(calibrator.get_batch(list(names))), None)
            if not pointers:
                break
            feeds = {}
            for tensor, pointer in zip(self.network._ins, pointers, strict=True):
                ranges = profile._shapes.get(tensor._name) if profile is not None else None
                shape = ranges[1] if ranges and -1 in tensor._shape else tuple(tensor._shape)
                feeds[tensor._onnx_name] = plans.fetch(pointer, shape, plans.logical_type(self.network, tensor))
            maxima.add(feeds)
            batches += 1
        if not batches:
            return {}
        scales = maxima.scales()
        content = arithmetic.render_cache(scales)
        called("write_calibration_cache", lambda: calibrator.write_calibration_cache(memoryview(content)), None)
        return scales

    def _precision(self, layer, dla: bool) -> str:
        """What a layer computes in: INT8, HALF or FLOAT."""
        if self.typed or self.quantized_model:
            return layer._outputs[0]._dtype.name if layer._outputs else "FLOAT"
        obeyed = self.config._has("OBEY_PRECISION_CONSTRAINTS") or self.config._has("PREFER_PRECISION_CONSTRAINTS")
        if layer._precision is not None and obeyed:
            return layer._precision.name
        scaled = bool(layer._inputs) and all(tensor._name in self.scales for tensor in layer._inputs)
        if self.config._has("INT8") and scaled:
            return "INT8"
        return "HALF" if self.config._has("FP16") or dla else "FLOAT"

    def _lowered(self, precisions: dict[int, str]):
        if self.typed or self.quantized_model:
            return self.network._model
        by_node = {layer._index: precisions[id(layer)] for layer in self.network._layers}
        return arithmetic.lowered(self.network, by_node, self.scales)

    def _spoiled(self, precisions: set[str]) -> str | None:
        low = {"wrong-int8": {"INT8"}, "wrong-fp16": {"HALF"}}
        if self.quantized_model:
            precisions = precisions | {"INT8"}
        for fault in faults():
            if fault == "nan" or low.get(fault, set()) & precisions:
                return fault
        return None

    # ---------------------------------------------------------------------------------------------- placement

    def _place(self) -> set[int]:
        """Layers that run on the DLA, by id; says in the log what TensorRT says."""
        on_dla = set()
        for layer in self.network._layers:
            if self.config.get_device_type(layer).name != "DLA":
                continue
            if self.config.can_run_on_DLA(layer):
                on_dla.add(id(layer))
                continue
            if not self.config._has("GPU_FALLBACK"):
                raise _Stop(
                    _error(9, f"Internal Error (Default DLA is enabled but layer {layer._name} is not supported on DLA"
                              " and falling back to GPU is not enabled.)", "Builder::validate"),
                )  # fmt: skip
            say(self.logger, "WARNING", f"Layer '{layer._name}' ({layer._type.name}): Unsupported on DLA. Switching"
                " this layer's device type to GPU.")  # fmt: skip
        if any(self.config.get_device_type(layer).name == "DLA" for layer in self.network._layers):
            say(self.logger, "INFO", "---------- Layers Running on DLA ----------")
            for part in plans.foreign_nodes(self.network, on_dla):
                say(self.logger, "INFO", f"[DlaLayer] {plans.foreign_name(part)}")
            say(self.logger, "INFO", "---------- Layers Running on GPU ----------")
            for layer in self.network._layers:
                if id(layer) not in on_dla:
                    say(self.logger, "INFO", f"[GpuLayer] {layer._type.name}: {layer._name}")
        return on_dla

    def _bindings(self) -> list[dict]:
        """What plans keep of each input and output."""
        found = []
        for tensor in [*self.network._ins, *self.network._outs]:
            dtype, form = tensor._dtype.name, _format(tensor._allowed_formats)
            kinds = layouts.TYPES.get(form)
            if form not in layouts.TYPES or (kinds is not None and dtype not in kinds):
                raise _Stop(_error(4, f"API Usage Error (tensor {tensor._name}: {form} does not hold {dtype})"))
            if form != "LINEAR" and len(tensor._shape) != 4:
                raise _Stop(_error(4, f"API Usage Error (tensor {tensor._name}: {form} needs 4 dimensions)"))
            logical = plans.logical_type(self.network, tensor)
            if dtype == "INT8" and logical != np.int8 and tensor._name not in self.scales:
                raise _Stop(_error(4, f"API Usage Error (INT8 tensor {tensor._name} has no scale)"))
            found.append(
                {
                    "name": tensor._name,
                    "onnx": tensor._onnx_name,
                    "input": tensor._input,
                    "shape": list(tensor._shape),
                    "dtype": dtype,
                    "format": form,
                    "logical": np.dtype(logical).name,
                    "scale": self.scales.get(tensor._name),
                }
            )
        return found


def _format(mask: int) -> str:
    formats = EXPORTS["TensorFormat"].__members__
    return next((name for name, member in formats.items() if mask >> int(member) & 1), "none")


def _error(code: int, text: str, place: str = "builder.cpp::buildSerializedNetwork::1") -> str:
    """A line as the version writes it: 8.x names its source, 10.x the interface."""
    if NUMBERS < (10,):
        return f"{code}: [{place}] Error Code {code}: {text}"
    return f"IBuilder::buildSerializedNetwork: Error Code {code}: {text}"


def _pointers(batch) -> list[int] | None:
    if batch is None:
        return None
    if not isinstance(batch, (list, tuple)) or not all(isinstance(pointer, int) for pointer in batch):
        raise RuntimeError("Unable to cast Python instance to C++ type (compile in debug mode for details)")
    return list(batch)


def called(name: str, call, otherwise):
    """What a Python callback gives. Its exception goes to stderr and is lost, as in the bindings."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - whatever user code raises
        print(f"[ERROR] Exception caught in {name}(): {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
        return otherwise

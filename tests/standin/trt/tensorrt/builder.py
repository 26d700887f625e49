# ruff: noqa: ARG002, SLF001 - signatures are the bindings', and the modules one simulated library
"""The builder, and what happens in a build."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time

import numpy as np

from tensorrt import arithmetic, layouts, plans
from tensorrt.callbacks import ILogger, called, derived, say
from tensorrt.config import IBuilderConfig, IOptimizationProfile, dla_cores
from tensorrt.graph import INetworkDefinition, faults
from tensorrt.listing import EXPORTS, NUMBERS, Bound, bound, fixed, new, slot

BuilderFlag, DeviceType = EXPORTS["BuilderFlag"], EXPORTS["DeviceType"]

# As TensorRT says it, in public logs.
_REFUSED = "Layer '{}' ({}): Unsupported on DLA. Switching this layer's device type to GPU."
_NO_FALLBACK = (
    "Internal Error (Default DLA is enabled but layer {} is not supported on DLA and falling back to GPU is not"
)
_NO_FALLBACK += " enabled.)"
_NO_SCALE = (
    "Missing scale and zero-point for tensor {}, expect fall back to non-int8 implementation for any layer consuming"
)
_NO_SCALE += " or producing given tensor"
_NO_SCALES = (
    "Internal Error (Calibration failure occurred with no scaling factors detected. This could be due to no int8"
)
_NO_SCALES += (
    " calibrator or insufficient custom scales for network layers. Please see int8 sample to setup calibration"
)
_NO_SCALES += " correctly.)"
_NO_PROFILE = "API Usage Error (Network has dynamic or shape inputs, but no optimization profile has been defined.)"
_CALIBRATOR_UNUSED = "Calibrator won't be used in explicit precision mode. Use quantization aware training to generate"
_CALIBRATOR_UNUSED += " network with Quantize/Dequantize nodes."
# Formats and types of inputs and outputs that need no reformatting by the GPU before and after a DLA (NVIDIA's guide,
# "DLA runtime configuration").
_DLA_NATIVE = {("DLA_LINEAR", "HALF"), ("DLA_LINEAR", "INT8"), ("DLA_HWC4", "HALF"), ("DLA_HWC4", "INT8")}
_DLA_NATIVE |= {("CHW16", "HALF"), ("CHW32", "INT8")}


@bound
class Builder(Bound):
    __slots__ = ("_logger", "_threads")

    def __init__(self, logger):
        self._logger, self._threads = derived(logger, ILogger), 1

    logger = slot("logger", settable=False)
    max_threads = slot("threads", int)

    @property
    def num_DLA_cores(self):  # noqa: N802
        return dla_cores()

    @property
    def max_DLA_batch_size(self):  # noqa: N802
        return 4096 if dla_cores() else 0

    platform_has_fast_fp16 = fixed(True)
    platform_has_fast_int8 = fixed(True)
    platform_has_tf32 = fixed(True)

    def create_network(self, flags=0):
        network = new(INetworkDefinition, builder=self, flags=int(flags), layers=[], logger=self._logger)
        network._model, network._name, network._tensors = None, "", {}
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
        pass


class _Stop(Exception):  # noqa: N818 - control flow inside the build
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
        bindings = self._bindings()
        if on_dla and not self.config._has("GPU_FALLBACK"):  # NVIDIA/TensorRT#3438
            for entry in bindings:
                if (entry["format"], entry["dtype"]) not in _DLA_NATIVE:
                    raise _Stop(_error(4, f"API Usage Error ({entry['name']} needs a reformat, which the DLA has not)"))
        precisions = {id(layer): self._precision(layer, id(layer) in on_dla) for layer in self.network._layers}
        model = self._lowered(precisions)
        content = plans.write(
            model.SerializeToString(),
            tensors=bindings,
            layers=plans.described(self.network, precisions, on_dla, self.scales, self.config._verbosity.name),
            profile={name: list(shape) for name, shape in shapes.items()},
            dla_core=max(self.config._core, 0) if on_dla else None,
            verbosity=self.config._verbosity.name,
            spoiled=self._spoiled(set(precisions.values())),
        )
        if self.config._cache is not None:
            self.config._cache._content += f"{len(self.network._layers)} layers\n".encode()
        return content

    def _check_types(self) -> None:
        network, config = self.network, self.config
        for flag in ("FP16", "INT8"):
            if self.typed and config._has(flag):
                text = f"API Usage Error (Parameter check failed, condition: !config.getFlag(BuilderFlag::k{flag}). )"
                raise _Stop(_error(3, text))
        if self.typed and NUMBERS < (11,) and any(layer._precision or layer._output_types for layer in network._layers):
            raise _Stop(_error(4, "API Usage Error (layer precisions must not be set in a strongly typed network)"))
        if self.quantized_model and not self.typed and not config._has("INT8"):
            raise _Stop(_error(4, "API Usage Error (a network with Q/DQ layers needs the INT8 flag)"))

    def _check(self) -> None:
        self._check_types()
        network, config = self.network, self.config
        if network._model is None or not network.num_outputs:
            raise _Stop(_error(4, "API Usage Error (Network must have at least one output)", "Network::validate"))
        if config._wrong:
            raise _Stop(_error(4, f"API Usage Error ({config._wrong})"))
        uses_dla = config._default_device.name == "DLA" or any(kind.name == "DLA" for kind in config._devices.values())
        if uses_dla and max(config._core, 0) >= dla_cores():
            raise _Stop(_error(3, f"API Usage Error (DLA core {config._core} is not there: {dla_cores()} DLA cores)"))
        if self.quantized_model and config._calibrator is not None:
            say(self.logger, "WARNING", _CALIBRATOR_UNUSED)
        if "build-fails" in faults():
            node = f"{{ForeignNode[{network._layers[0]._name}...{network._layers[-1]._name}]}}"
            raise _Stop(_error(10, f"Internal Error (Could not find any implementation for node {node}.)"))
        if "out-of-memory" in faults():
            text = "OutOfMemory (Requested size was 1234 bytes.)"
            raise _Stop(f"[virtualMemoryBuffer.cpp::resizePhysical::144] Error Code 2: {text}", _error(2, text))

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each input to optimise for."""
        shapes = {}
        for tensor in self.network._ins:
            shapes[tensor._name] = tuple(tensor._shape)
            if -1 not in tensor._shape:
                continue
            if not self.config._profiles:
                raise _Stop(_error(4, _NO_PROFILE))
            ranges = self.config._profiles[0]._shapes.get(tensor._name)
            if ranges is None:
                raise _Stop(_error(4, f"API Usage Error (optimization profile is missing values for {tensor._name})"))
            shapes[tensor._name] = ranges[1]
        return shapes

    def _work(self) -> None:
        """What takes the time, in a thread of the library's own, from which the progress monitor is called.

        The caller's waits in C, where the interpreter runs no signal handlers.
        """
        failed: list[BaseException] = []
        mutex, libc = ctypes.create_string_buffer(256), ctypes.CDLL(None)  # zeros are an unlocked mutex
        locked = threading.Event()

        def work() -> None:
            libc.pthread_mutex_lock(mutex)
            locked.set()
            try:
                self._steps()
            except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread
                failed.append(error)
            finally:
                libc.pthread_mutex_unlock(mutex)

        threading.Thread(target=work, daemon=True).start()
        locked.wait()
        libc.pthread_mutex_lock(mutex)  # not ended by a signal, other than sem_wait
        if failed:
            raise failed[0]

    def _steps(self) -> None:
        """Phases and their steps."""
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
            if fault == "oom-kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "crash":
                signal.pthread_kill(threading.get_ident(), signal.SIGSEGV)
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
                self.scales[name] = max(abs(end) for end in tensor._range) / 127
        if not self.scales:
            raise _Stop(
                _error(4, _NO_SCALES), _error(2, "Internal Error (Builder failed while configuring INT8 mode.)")
            )
        for name in arithmetic.float_tensors(self.network):
            if name not in self.scales:
                say(self.logger, "WARNING", _NO_SCALE.format(name))

    def _calibrated(self, calibrator, shapes: dict[str, tuple[int, ...]]) -> dict[str, float]:
        cache = called("read_calibration_cache", calibrator.read_calibration_cache, None)
        if cache is not None and (found := arithmetic.parse_cache(bytes(cache))) is not None:
            return found
        # Another version's cache is skipped without a word, as the real one does.
        profile = self.config._calibration or next(iter(self.config._profiles), None)
        called("get_batch_size", calibrator.get_batch_size, -1)
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
        with memoryview(arithmetic.render_cache(scales)) as content:  # TensorRT's memory, gone after the call
            called("write_calibration_cache", lambda: calibrator.write_calibration_cache(content), None)
        return scales

    def _scaled(self, layer) -> bool:
        return bool(layer._inputs) and all(tensor._name in self.scales for tensor in layer._inputs)

    def _precision(self, layer, dla: bool) -> str:
        """What a layer computes in: INT8, HALF or FLOAT."""
        if self.typed or self.quantized_model:
            return layer._outputs[0]._dtype.name if layer._outputs else "FLOAT"
        obeyed = self.config._has("OBEY_PRECISION_CONSTRAINTS") or self.config._has("PREFER_PRECISION_CONSTRAINTS")
        if layer._precision is not None and obeyed:
            return layer._precision.name
        if self.config._has("INT8") and self._scaled(layer):
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
            # Without a scale it runs in FP16 where that is allowed, and not on the DLA where it is not.
            if self.config.can_run_on_DLA(layer) and (self.config._has("FP16") or self._scaled(layer)):
                on_dla.add(id(layer))
                continue
            if not self.config._has("GPU_FALLBACK"):
                raise _Stop(_error(9, _NO_FALLBACK.format(layer._name), "builder.cpp::validate::1"))
            say(self.logger, "WARNING", _REFUSED.format(layer._name, layer._type.name))
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
            dtype = tensor._dtype.name
            form = _format(tensor._allowed_formats, dtype, len(tensor._shape))
            kinds = layouts.TYPES.get(form)
            if form not in layouts.TYPES or (kinds is not None and dtype not in kinds):
                raise _Stop(_error(4, f"API Usage Error (tensor {tensor._name}: {form} does not hold {dtype})"))
            if form != "LINEAR" and len(tensor._shape) != 4:
                raise _Stop(_error(4, f"API Usage Error (tensor {tensor._name}: {form} needs 4 dimensions)"))
            logical = plans.logical_type(self.network, tensor)
            if dtype == "INT8" and logical != np.int8 and tensor._range is None:  # whatever the calibrator knows
                raise _Stop(_error(4, f"API Usage Error (INT8 tensor {tensor._name} has no dynamic range)"))
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


def _format(mask: int, dtype: str, rank: int) -> str:
    """Of the formats allowed the one for vectors, if there is a choice: the fastest, as TensorRT would take it."""
    allowed = [name for name, member in EXPORTS["TensorFormat"].__members__.items() if mask >> int(member) & 1]
    fastest = {"HALF": "HWC8", "INT8": "CHW32"}.get(dtype)
    return fastest if rank == 4 and len(allowed) > 1 and fastest in allowed else next(iter(allowed), "none")


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

# ruff: noqa: ARG001, ARG002, SLF001 - signatures are the bindings', and the modules one simulated library
"""Runtime, engines and execution contexts."""

from __future__ import annotations

import json

import numpy as np

from tensorrt import arithmetic, layouts, plans
from tensorrt.callbacks import ILogger, derived, say
from tensorrt.config import dla_cores
from tensorrt.graph import DataType, Dims, faults
from tensorrt.listing import EXPORTS, NUMBERS, VERSION, Bound, bound, fixed, new, slot

TensorFormat, TensorIOMode = EXPORTS["TensorFormat"], EXPORTS["TensorIOMode"]
_SERIALIZATION = {(8, 5): 232, (10, 3): 239, (10, 16): 243, (11, 4): 250}
"""Version tags. Only those of 8.5 and 10.3 are from public logs; that they differ is what counts."""


@bound
class Runtime(Bound):
    __slots__ = ("_core", "_logger", "_threads")

    def __init__(self, logger):
        self._logger, self._core, self._threads = derived(logger, ILogger), -1, 1

    logger = slot("logger", settable=False)

    @property
    def num_DLA_cores(self):  # noqa: N802
        return dla_cores()

    DLA_core = slot("core", settable=False)

    @DLA_core.setter
    def DLA_core(self, value):  # noqa: N802
        if not 0 <= value < dla_cores():
            say(self._logger, "ERROR", _error(3, f"API Usage Error (DLA core {value} is not in [0, {dla_cores()}))"))
            return
        self._core = int(value)

    max_threads = slot("threads", int)

    def deserialize_cuda_engine(self, serialized_engine):
        found = plans.read(bytes(serialized_engine))
        error = _why_not(found)
        if error is not None:
            say(self._logger, "ERROR", error)
            if NUMBERS < (10,):
                say(self._logger, "ERROR", "4: [runtime.cpp::deserializeCudaEngine::66] Error Code 4: Internal Error"
                                           " (Engine deserialization failed.)")  # fmt: skip
            return None
        header, model = found
        say(self._logger, "INFO", f"Loaded engine size: {len(bytes(serialized_engine)) >> 20} MiB")
        tensors = {entry["name"]: entry for entry in header["tensors"]}
        return new(
            ICudaEngine, header=header, model=model, tensors=tensors, logger=self._logger, session=None,
            content=bytes(serialized_engine),
        )  # fmt: skip


def _why_not(found) -> str | None:
    """Why a plan cannot be loaded here, as TensorRT says it."""
    if found is None:
        text = "Serialization (Serialization assertion plan->header.magicTag == rt::kPLAN_MAGIC_TAG failed.)"
        return _error(1, text, "parsePlan::314")
    header, _ = found
    if header["version"] != VERSION:
        ours, theirs = (_tag(version) for version in (VERSION, header["version"]))
        text = "Serialization (Serialization assertion stdVersionRead == kSERIALIZATION_VERSION failed.Version tag does"
        text += f" not match. Note: Current Version: {ours}, Serialized Engine Version: {theirs})"
        return _error(1, text, "stdArchiveReader.cpp::StdArchiveReader::42")
    if header["compute"] != plans.compute():
        text = "API Usage Error (The engine plan file is generated on an incompatible device, expecting compute"
        return _error(6, f"{text} {plans.compute()} got compute {header['compute']}, please rebuild.)")
    if header["dla_core"] is not None and not dla_cores():
        return _error(3, "API Usage Error (the engine needs a DLA, and this platform has none)")
    return None


def _tag(version: str) -> int:
    numbers = tuple(int(part) for part in version.split("."))[:2]
    return _SERIALIZATION.get(numbers, sum(numbers))


def _error(code: int, text: str, place: str = "deserializeCudaEngine::66") -> str:
    if NUMBERS >= (10,):
        return f"IRuntime::deserializeCudaEngine: Error Code {code}: {text}"
    place = place if ".cpp" in place else f"runtime.cpp::{place}"
    return f"{code}: [{place}] Error Code {code}: {text}"


@bound
class ICudaEngine(Bound):
    __slots__ = ("_content", "_header", "_logger", "_model", "_session", "_tensors")

    name = fixed("Unnamed Network 0")

    @property
    def num_io_tensors(self):
        return len(self._tensors)

    @property
    def num_layers(self):
        return len(self._header["layers"])

    num_optimization_profiles = fixed(1)
    device_memory_size = fixed(1 << 20)
    device_memory_size_v2 = fixed(1 << 20)

    @property
    def profiling_verbosity(self):
        return EXPORTS["ProfilingVerbosity"].__members__[self._header["verbosity"]]

    has_implicit_batch_dimension = fixed(False)

    def serialize(self):
        return plans.IHostMemory(self._content)

    def get_tensor_name(self, index):
        return list(self._tensors)[index]

    def get_tensor_mode(self, name):
        if name not in self._tensors:
            return TensorIOMode.NONE
        return TensorIOMode.INPUT if self._tensors[name]["input"] else TensorIOMode.OUTPUT

    def get_tensor_shape(self, name):
        return Dims(self._tensors[name]["shape"])

    def get_tensor_dtype(self, name):
        return DataType.__members__[self._tensors[name]["dtype"]]

    def get_tensor_format(self, name):
        return TensorFormat.__members__[self._tensors[name]["format"]]

    def get_tensor_format_desc(self, name):
        entry = self._tensors[name]
        return f"{layouts.description(entry['format'], entry['dtype'])} (k{entry['format']})"

    def get_tensor_location(self, name):
        return EXPORTS["TensorLocation"].DEVICE

    def get_tensor_bytes_per_component(self, name):
        vectorized = layouts.vector(self._tensors[name]["format"]) > 1
        return np.dtype(layouts.NUMPY[self._tensors[name]["dtype"]]).itemsize if vectorized else -1

    def get_tensor_components_per_element(self, name):
        components = layouts.vector(self._tensors[name]["format"])
        return components if components > 1 else -1

    def get_tensor_vectorized_dim(self, name):
        return 1 if layouts.vector(self._tensors[name]["format"]) > 1 else -1

    def get_tensor_profile_shape(self, name, profile_index):
        return [Dims(self._header["profile"][name])] * 3

    def create_execution_context(self):
        shapes = {
            name: tuple(shape)
            for name, shape in self._header["profile"].items()
            if -1 not in self._tensors[name]["shape"]
        }
        return new(IExecutionContext, engine=self, addresses={}, shapes=shapes)

    def create_engine_inspector(self):
        return new(EngineInspector, engine=self)

    def _compute(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Logical outputs by the name they have in the ONNX model."""
        if self._session is None:
            self._session = arithmetic.session(self._model)
        names = [entry["onnx"] for entry in self._tensors.values() if not entry["input"]]
        values = dict(zip(names, self._session.run(names, feeds), strict=True))
        if self._header["spoiled"]:
            for value in values.values():
                value[...] = np.nan if self._header["spoiled"] == "nan" else _garbage(value)
        return values


def _garbage(value: np.ndarray) -> np.ndarray:
    return (np.random.default_rng(0).standard_normal(value.shape) * 50).astype(value.dtype)


@bound
class IExecutionContext(Bound):
    __slots__ = ("_addresses", "_engine", "_shapes")

    engine = slot("engine", settable=False)

    @property
    def all_binding_shapes_specified(self):
        return all(name in self._shapes for name, entry in self._engine._tensors.items() if entry["input"])

    def set_input_shape(self, name, shape):
        entry = self._engine._tensors.get(name)
        fits = entry is not None and entry["input"] and len(shape) == len(entry["shape"])
        if not fits or any(mine not in (-1, given) for mine, given in zip(entry["shape"], shape, strict=True)):
            self._say(f"IExecutionContext::setInputShape: Error Code 3: API Usage Error ({name}: {tuple(shape)})")
            return False
        self._shapes[name] = tuple(shape)
        return True

    def get_tensor_shape(self, name):
        entry = self._engine._tensors[name]
        if name in self._shapes:
            return Dims(self._shapes[name])
        if entry["input"] or -1 not in entry["shape"] or not self.all_binding_shapes_specified:
            return Dims(entry["shape"])
        feeds = {
            e["onnx"]: np.zeros(self._shapes[n], e["logical"]) for n, e in self._engine._tensors.items() if e["input"]
        }
        return Dims(self._engine._compute(feeds)[entry["onnx"]].shape)

    def get_tensor_strides(self, name):
        entry = self._engine._tensors[name]
        return Dims(layouts.strides_in_elements(entry["format"], tuple(self.get_tensor_shape(name)), entry["dtype"]))

    def infer_shapes(self):
        return [n for n, entry in self._engine._tensors.items() if entry["input"] and n not in self._shapes]

    def set_tensor_address(self, name, memory):
        if name not in self._engine._tensors or memory == 0:
            text = f"API Usage Error (Given invalid tensor name or address: {name}, {memory})"
            self._say(f"IExecutionContext::setTensorAddress: Error Code 3: {text}")
            return False
        self._addresses[name] = int(memory)
        return True

    def get_tensor_address(self, name):
        return self._addresses.get(name, 0)

    def execute_async_v3(self, stream_handle):
        import pycuda.driver as cuda

        if "execute-fails" in faults():
            self._say("IExecutionContext::enqueueV3: Error Code 1: Cuda Runtime (unspecified launch failure)")
            return False
        missing = [name for name in self._engine._tensors if name not in self._addresses]
        if missing or self.infer_shapes():
            text = f"API Usage Error (Neither address or allocator is set for tensor {missing or self.infer_shapes()}.)"
            self._say(f"IExecutionContext::enqueueV3: Error Code 3: {text}")
            return False
        addresses, shapes = dict(self._addresses), dict(self._shapes)  # as they are now

        def job() -> None:
            feeds = {}
            for name, entry in self._engine._tensors.items():
                if entry["input"]:
                    feeds[entry["onnx"]] = self._read(entry, addresses[name], shapes[name])
            values = self._engine._compute(feeds)
            for name, entry in self._engine._tensors.items():
                if not entry["input"]:
                    cuda.memcpy_htod(addresses[name], self._written(entry, values[entry["onnx"]]))

        enqueue = getattr(cuda, "_standin_enqueue", None)
        if enqueue is None:  # the real pycuda, on a machine with a GPU: in order, but not asynchronous
            cuda.Context.synchronize()
            job()
        else:
            enqueue(stream_handle, job)
        return True

    def _read(self, entry: dict, address: int, shape: tuple[int, ...]) -> np.ndarray:
        memory = plans.fetch(address, (layouts.nbytes(entry["format"], shape, entry["dtype"]),), np.uint8)
        array = layouts.unpack(memory, entry["format"], shape, entry["dtype"])
        if entry["dtype"] == "INT8" and entry["logical"] != "int8":
            return (array.astype(np.float32) * np.float32(entry["scale"])).astype(entry["logical"])
        return array.astype(entry["logical"])

    def _written(self, entry: dict, value: np.ndarray) -> np.ndarray:
        kind = layouts.NUMPY[entry["dtype"]]
        if entry["dtype"] == "INT8" and entry["logical"] != "int8":
            value = np.clip(np.rint(value / np.float32(entry["scale"])), -128, 127)
        with np.errstate(over="ignore"):  # FP16 overflows to infinity
            return layouts.pack(value.astype(kind), entry["format"], entry["dtype"])

    def _say(self, text: str) -> None:
        say(self._engine._logger, "ERROR", text)


@bound
class EngineInspector(Bound):
    __slots__ = ("_engine",)

    def get_layer_information(self, layer_index, format):  # noqa: A002 - the bindings' name
        layer = self._engine._header["layers"][layer_index]
        return layer if isinstance(layer, str) else json.dumps(layer)

    def get_engine_information(self, format):  # noqa: A002
        layers = self._engine._header["layers"]
        if format.name == "JSON":
            return json.dumps({"Layers": layers, "Bindings": list(self._engine._tensors)}, indent=1)
        names = [layer if isinstance(layer, str) else layer["Name"] for layer in layers]
        return "\n".join(["Layers:", *names, "", "Bindings:", *self._engine._tensors])


def init_libnvinfer_plugins(logger, namespace):
    """Registers TensorRT's own plugins; there are none here."""
    return True


EXPORTS["init_libnvinfer_plugins"] = init_libnvinfer_plugins

# ruff: noqa: ARG002 - signatures are the bindings'
"""The names that TensorRT's Python bindings have in the simulated version, and what holds the stand-in to them.

The listings in ``tests/data/tensorrt-api`` come from the real bindings (``tests/standin/dump_api.py``). ``bound``
leaves a class with exactly the listed names: what a version lacks is taken away, so that reading or setting it raises
AttributeError; what it has but the stand-in does not simulate raises NotImplementedError, so that ``hasattr`` says what
it would say with the real one. Arguments are checked for their type as pybind11 does it.
"""

from __future__ import annotations

import functools
import inspect
import json
import operator
import os
from pathlib import Path

VERSION = os.environ.get("STANDIN_TENSORRT", "10.3.0")
NUMBERS = tuple(int(part) for part in VERSION.split("."))[:3]
DATA = Path(__file__).parents[3] / "data" / "tensorrt-api"

# The bindings of 8.5 are on no package index, so this is an approximation: the listing of 10.3, less what their source
# (python/src/infer/pyCore.cpp of github.com/NVIDIA/TensorRT, a copy of 8.5 by its content) does not bind, of the
# classes that the stand-in simulates. For ITensor, ILayer, INetworkDefinition and the parser it goes by a later 8.x and
# by what the release notes say was added. Names that only 8.x has are not offered.
LATER_THAN_8_5 = {
    "BuilderFlag": "BF16 VERSION_COMPATIBLE EXCLUDE_LEAN_RUNTIME FP8 ERROR_ON_TIMING_CACHE_MISS"
    " DISABLE_COMPILATION_CACHE WEIGHTLESS STRIP_PLAN REFIT_IDENTICAL WEIGHT_STREAMING INT4 REFIT_INDIVIDUAL",
    "DataType": "BF16 INT64 FP8 INT4",
    "IBuilderConfig": "builder_optimization_level hardware_compatibility_level max_aux_streams plugins_to_serialize"
    " progress_monitor runtime_platform",
    "ICudaEngine": "create_serialization_config device_memory_size_v2 get_device_memory_size_for_profile"
    " get_device_memory_size_for_profile_v2 get_tensor_profile_values hardware_compatibility_level is_debug_tensor"
    " minimum_weight_streaming_budget num_aux_streams serialize_with_config streamable_weights_size"
    " weight_streaming_budget weight_streaming_budget_v2 weight_streaming_scratch_memory_size",
    "IExecutionContext": "get_debug_listener get_debug_state set_all_tensors_debug_state set_aux_streams"
    " set_debug_listener set_device_memory set_tensor_debug_state update_device_memory_size_for_shapes",
    "ILayer": "metadata",
    "INetworkDefinition": "add_cast add_normalization add_plugin_v3 are_weights_marked_refittable builder flags"
    " get_flag is_debug_tensor mark_debug mark_weights_refittable unmark_debug unmark_weights_refittable",
    "ITensor": "get_dimension_name set_dimension_name",
    "LayerType": "CAST NORMALIZATION PLUGIN_V3",
    "MemoryPoolType": "TACTIC_DRAM TACTIC_SHARED_MEMORY",
    "NetworkDefinitionCreationFlag": "STRONGLY_TYPED",
    "OnnxParser": "clear_flag flags get_flag get_layer_output_tensor get_subgraph_nodes get_used_vc_plugin_libraries"
    " is_subgraph_supported num_subgraphs set_flag supports_model_v2",
    "ParserError": "local_function_stack local_function_stack_size node_name node_operator",
    "PreviewFeature": "PROFILE_SHARING_0806 ALIASED_PLUGIN_IO_10_03",
    "Runtime": "engine_host_code_allowed get_plugin_registry load_runtime tempfile_control_flags temporary_directory",
}
WITHOUT_IN_8_5 = (
    "APILanguage ExecutionContextAllocationStrategy HardwareCompatibilityLevel IDebugListener ICastLayer"
    " IGpuAsyncAllocator INormalizationLayer IPluginCapability IPluginV3 IPluginV3Layer IPluginV3OneBuild"
    " IPluginV3OneBuildV2 IPluginV3OneCore IPluginV3OneRuntime IPluginCreatorInterface IPluginCreatorV3One"
    " IPluginResource IPluginResourceContext IProgressMonitor ISerializationConfig IStreamReader IVersionedInterface"
    " InterfaceInfo OnnxParserFlag OnnxParserRefitter PluginCapabilityType PluginCreatorVersion RuntimePlatform"
    " SerializationFlag TempfileControlFlag TensorRTPhase bfloat16 fp8 int4 int64"
)


def load(version: str) -> dict[str, dict]:
    """The listing of a version, such as 10.16.1 for the bindings 10.16.1.11."""
    if version.startswith("8.5."):
        return _without_later(load("10.3.0"))
    names = [path for path in DATA.glob("tensorrt-*.json") if path.stem.startswith(f"tensorrt-{version}")]
    if not names:
        raise ImportError(f"the stand-in has no listing of TensorRT {version}; STANDIN_TENSORRT names a wrong version")
    return json.loads(names[0].read_text())


def _without_later(listing: dict[str, dict]) -> dict[str, dict]:
    for name in WITHOUT_IN_8_5.split():
        del listing[name]
    for name, members in LATER_THAN_8_5.items():
        for member in members.split():
            del listing[name]["members"][member]
    return listing


LISTING = load(VERSION)
EXPORTS: dict[str, object] = {}
"""What the module offers, by name."""


class Enumeration:
    """As pybind11's enum_: members compare with their own kind only, and become numbers by int()."""

    __slots__ = ("name", "value")
    __members__: dict[str, Enumeration]

    def __init__(self, value):
        cls = type(self)
        found = next((member for member in getattr(cls, "__members__", {}).values() if member.value == value), None)
        object.__setattr__(self, "value", value)
        object.__setattr__(self, "name", found.name if found else None)

    def __setattr__(self, name, value):
        raise AttributeError(f"'tensorrt.{type(self).__name__}' object attribute '{name}' is read-only")

    def __int__(self):
        return self.value

    __index__ = __int__
    __hash__ = __int__

    def __eq__(self, other):
        return type(self) is type(other) and self.value == other.value

    def __repr__(self):
        return f"<{type(self).__name__}.{self.name}: {self.value}>"

    def __str__(self):
        return f"{type(self).__name__}.{self.name}"


def enumeration(name: str, members: dict[str, int]) -> type[Enumeration]:
    """A class with these members."""
    cls = type(name, (Enumeration,), {"__slots__": (), "__module__": "tensorrt", "__members__": {}})
    for member, value in members.items():
        instance = cls(value)
        object.__setattr__(instance, "name", instance.name or member)
        cls.__members__[member] = instance
        setattr(cls, member, instance)
    return cls


for _name, _entry in LISTING.items():
    if _entry["kind"] == "enum":
        EXPORTS[_name] = enumeration(_name, _entry["members"])
SEVERITY = enumeration("Severity", LISTING["ILogger"]["members"]["Severity"]["members"])
for _name, _entry in LISTING.items():
    if _entry["kind"] == "DataType":  # tensorrt.float32 and so on
        EXPORTS[_name] = EXPORTS["DataType"].__members__[_entry["value"].removeprefix("DataType.")]


def slot(name: str, kind: str | type | None = None, *, settable: bool = True) -> property:
    """A property that is kept in the slot ``_name``; ``kind`` is the enumeration or type that it takes."""

    def put(self, value):
        wanted = EXPORTS[kind] if isinstance(kind, str) else kind
        if wanted is not None and not isinstance(value, wanted):
            raise TypeError(f"(): incompatible function arguments: {value!r} is no {wanted.__name__}")
        setattr(self, f"_{name}", value)

    return property(lambda self: getattr(self, f"_{name}"), put if settable else None)


def fixed(value: object) -> property:
    """A property that never changes."""
    return property(lambda _self: value)


class Bound:
    """Base of the simulated classes. Their state is in slots, so that an unknown attribute cannot be set."""

    __slots__ = ()

    def __init__(self, *args, **kwargs):
        raise TypeError(f"tensorrt.{type(self).__name__}: No constructor defined!")


def new(cls, **fields):
    """An instance of a class that Python code cannot construct, its slots filled."""
    instance = cls.__new__(cls)
    for name, value in fields.items():
        setattr(instance, f"_{name}", value)
    return instance


def bound(cls):
    """Hold a class to its listing; without one it stays inside."""
    cls.__module__ = "tensorrt"
    entry = LISTING.get(cls.__name__)
    if entry is None:
        return cls
    listed = entry["members"]
    for name in [name for name in vars(cls) if not name.startswith("_") and name not in listed]:
        delattr(cls, name)
    for name, what in listed.items():
        if name == "__init__":
            continue
        found = vars(cls).get(name)
        if not hasattr(cls, name):
            setattr(cls, name, _not_simulated(cls.__name__, name, what))
        elif isinstance(found, property):
            refuse = found.fset or _not_simulated(cls.__name__, name, "")
            setattr(cls, name, property(found.fget, refuse if what == "property rw" else None))
        elif callable(found) and isinstance(what, str) and "(" in what:
            setattr(cls, name, _checked(found, what))
    EXPORTS[cls.__name__] = cls
    return cls


def _not_simulated(owner: str, name: str, what: object):
    def refuse(*_args, **_kwargs):
        raise NotImplementedError(f"the stand-in does not simulate tensorrt.{owner}.{name}")

    if isinstance(what, str) and what.startswith("property"):
        return property(refuse, refuse if what.endswith("rw") else None)
    refuse.__name__ = name
    return refuse


_NUMBERS = {"int": operator.index, "typing.SupportsInt": operator.index, "float": float, "typing.SupportsFloat": float}


def arguments(signature: str) -> dict[str, str]:
    """Annotation by argument name of a signature as pybind11 prints it, without self."""
    text = signature[signature.index("(") + 1 : signature.rindex(")")]
    depth, parts = 0, [""]
    for letter in text:
        depth += (letter in "[(<") - (letter in "])>")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    pairs = [part.strip().split(":", 1) for part in parts if ":" in part]
    return {name.strip(): annotation.split("=")[0].strip() for name, annotation in pairs if name.strip() != "self"}


def _checked(function, signature: str):
    annotations = arguments(signature)
    parameters = inspect.signature(function)

    @functools.wraps(function)
    def call(self, *args, **kwargs):
        try:
            given = parameters.bind(self, *args, **kwargs).arguments
            fits = all(_fits(value, annotations.get(name, "")) for name, value in given.items())
        except TypeError:
            fits = False
        if not fits:
            raise TypeError(f"{function.__name__}(): incompatible function arguments. Supported: {signature}")
        return function(self, *args, **kwargs)

    return call


def _fits(value, annotation: str) -> bool:
    if annotation in _NUMBERS:
        _NUMBERS[annotation](value)
        return not isinstance(value, Enumeration)
    if annotation == "bool":  # not trt.bool, which is a DataType
        return isinstance(value, bool)
    if annotation == "str":
        return value is None or isinstance(value, str)
    wanted = EXPORTS.get(annotation.removeprefix("tensorrt."))
    if wanted is None or annotation.removeprefix("tensorrt.") == "Dims":  # tuples and lists become Dims
        return True
    return value is None or isinstance(value, wanted)

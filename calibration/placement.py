"""Where each layer of a network really runs, and in which precision. Pure: TensorRT's own texts in, values out.

No API tells it. It is pieced together from what the engine inspector says of the engine's layers, from the log of the
build, and from what the builder's child asked for each layer of the network, and is ``unknown`` where none of these
says it: the texts change with the version, and not to understand one is no fault of the engine. TensorRT fuses and
renames: an engine layer ``conv1 + relu1`` holds two layers of the network, and a subgraph,
``{ForeignNode[conv1...relu9]}``, names its first and its last. Layers are found, in this order, by

1. their name in that of an engine layer, or in its metadata (TensorRT 8.6 and later);
2. the tensor that they make, among an engine layer's outputs;
3. their name in the log's list of what runs on the GPU;
4. their place between the two ends of a subgraph, in the order of the network, unless the DLA refused them before.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec
from msgspec import Struct

from calibration.events import ASKED, INSPECTOR, LOG
from calibration.network import Asked

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

__all__ = ["Device", "Layer", "Placement", "read", "read_folder"]

Device: TypeAlias = Literal["DLA", "GPU", "none", "unknown"]
"""none: a constant, which the engine holds as a number."""

_DLA_LAYER = re.compile(r"\[DlaLayer\] (.+)|(.+) successfully offloaded to DLA")
_GPU_LAYER = re.compile(r"\[GpuLayer\] (?:[A-Z_0-9]+: )?(.+)")  # without the type before 8.4
_PREFIX = re.compile(r"^(?:\[(?:\d\d/\d\d/[^]]*|[VIWEF]|TRT)\] )+")
_REFUSALS = (
    re.compile(r"Layer '(?P<name>.+)' \(\w+\): Unsupported on DLA"),
    re.compile(r"layer (?P<name>.+) is not (?:supported|running) on DLA, falling back to GPU"),
    re.compile(r"Validation failed for DLA layer: (?P<name>.+)\. Switching to GPU"),
    re.compile(r"DLA supports only \d+ subgraphs per DLA core\. Switching to GPU for layer (?P<name>.+)"),
)
_UNSUPPORTED = re.compile(r"Layer '.+' \((\w+)\): U(nsupported on DLA)\b.*")
_FOREIGN = re.compile(r"\{ForeignNode\[(.+)\]\}")
# The node's name; behind " | " its doc string in 8.6, the functions that it is in from 10 on (onnx-tensorrt,
# processMetadata).
_ONNX_LAYER = re.compile(r"\[ONNX Layer: (.+?)(?: \| .*?)?\](?=[\x1e\x1f]|\[ONNX Layer: |$)", re.DOTALL)
_TYPE = re.compile(r"\b(INT8|UINT8|INT32|INT64|FP8|FP16|BF16|FP32|HALF|FLOAT|BOOL)\b", re.IGNORECASE)
_TYPE_KEYS = ("Type", "Format/Datatype", "Datatype", "DataType")
_PRECISIONS = {"half": "fp16", "float": "fp32"}
_PRODUCT = re.compile(r"conv|gemm|matmul|matrix", re.IGNORECASE)
_REFORMAT = re.compile(r"reformat", re.IGNORECASE)


class Layer(Struct, frozen=True, kw_only=True):
    """One layer of the network."""

    name: str
    type: str
    """Member of TensorRT's LayerType."""
    output: str
    """Name of its first output."""
    device: Device
    precision: str
    """int8, fp16, fp32, ...: of the weights where the engine layer has some, else of what it gives. Nothing tells it
    inside a subgraph."""
    asked: str
    """The precision that it was asked for."""
    engine_layer: str | None
    """What it has become a part of."""
    reason: str | None
    """Why it is not on the DLA, in TensorRT's words."""


class Placement(Struct, frozen=True, kw_only=True):
    """A whole network."""

    layers: tuple[Layer, ...]
    """In the order of the network."""
    engine_layers: int
    subgraphs: tuple[str, ...]
    """Of the DLA: each is one loadable, and each border between two and the GPU costs a hand-over."""
    reformats: tuple[str, ...]
    """Engine layers that only change how a tensor lies in memory, or its type."""
    note: str | None = None
    """What could not be read, so that more is unknown than need be."""

    def devices(self) -> Counter[str]:
        """How many layers run where."""
        return Counter(layer.device for layer in self.layers)

    def precisions(self) -> Counter[str]:
        """How many layers run in which precision; constants do not count."""
        return Counter(layer.precision for layer in self.layers if layer.device != "none")

    def rows(self) -> list[tuple[str, str]]:
        """A summary for people: what, and how many."""
        devices, precisions = self.devices(), self.precisions()
        told = [] if self.note is None else [("not known", self.note)]
        told.append(("layers", f"{len(self.layers)}, in {self.engine_layers} engine layers"))
        if self.subgraphs:
            told.append(
                ("on the DLA", f"{devices['DLA']}, in {len(self.subgraphs)} subgraph{'s' * (len(self.subgraphs) > 1)}")
            )
        told.append(("on the GPU", str(devices["GPU"])))
        told += [(text, str(devices[key])) for key, text in _OTHERS.items() if devices[key]]
        told += [(f"in {_title(key)}", str(number)) for key, number in sorted(precisions.items())]
        told.append(("reformats", str(len(self.reformats))))
        refused: dict[str, list[str]] = {}
        for layer in self.layers:
            if layer.reason is not None:
                refused.setdefault(_without_name(layer.reason), []).append(layer.name)
        for reason, names in sorted(refused.items(), key=lambda item: -len(item[1])):
            few = f"{', '.join(names[:3])}{', ...' * (len(names) > 3)}"
            told.append(("not on the DLA", f"{len(names)}: {reason} ({few})"))
        return told

    def to_json(self) -> dict[str, Any]:
        """What ``engine.layers.json`` holds."""
        summary = {"devices": dict(self.devices()), "precisions": dict(self.precisions())}
        return {"schema": "edge.layers/1", **summary, **msgspec.to_builtins(self)}


_OTHERS = {"none": "constants", "unknown": "not told where"}


@dataclass(frozen=True, slots=True)
class _EngineLayer:
    name: str
    holds: frozenset[str]
    """Names of the network's layers that it is known to hold."""
    foreign: bool = False
    """Whether it names its first and its last layer only."""
    dla: bool = False
    reformat: bool = False
    precision: str = "unknown"
    outputs: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _Log:
    dla: tuple[str, ...]
    gpu: frozenset[str]
    reasons: Mapping[str, str]


def read_folder(folder: Path) -> Placement:
    """``read`` what the builder's child has left in its scratch folder; what is missing or damaged is noted."""
    try:
        asked = msgspec.json.decode((folder / ASKED).read_bytes(), type=list[Asked])
    except (OSError, ValueError) as error:
        note = f"{ASKED} cannot be read ({error})"
        return Placement(layers=(), engine_layers=0, subgraphs=(), reformats=(), note=note)
    return read(_text(folder / INSPECTOR), _text(folder / LOG), asked)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def read(inspector: str, log: str, asked: Sequence[Asked]) -> Placement:
    """Piece together where each layer runs.

    Args:
        inspector: JSON of the engine inspector. Plain names, which it gives for an engine that was not built with
            detailed profiling verbosity, tell no precision. What is not its JSON is noted; the log is read all the
            same.
        log: of the build, or of trtexec.
        asked: the network's layers, in its order.
    """
    said = _read_log(log, {layer.name for layer in asked})
    note = None
    try:
        engine = _engine_layers(inspector, said)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        note = f"the engine inspector's text is not its JSON ({type(error).__name__}: {error})"
        engine = [_engine_layer(name, said) for name in said.dla]
    places = _Places(engine, said, asked)
    return Placement(
        layers=tuple(places.of(index, layer) for index, layer in enumerate(asked)),
        engine_layers=len(engine),
        subgraphs=tuple(layer.name for layer in engine if layer.dla),
        reformats=tuple(layer.name for layer in engine if layer.reformat),
        note=note,
    )


class _Places:
    """Finds the layers of one network in an engine."""

    def __init__(self, engine: Sequence[_EngineLayer], log: _Log, asked: Sequence[Asked]) -> None:
        self._log = log
        self._by_name: dict[str, _EngineLayer] = {}
        self._by_output: dict[str, _EngineLayer] = {}
        for layer in engine:
            # A reformat is named after the layer that it serves, and gives a tensor of the network in another layout.
            if not layer.reformat:
                self._by_output.update(dict.fromkeys(layer.outputs, layer))
                self._by_name.update(dict.fromkeys(layer.holds, layer))
        order = {layer.name: index for index, layer in enumerate(asked)}
        self._ranges = [
            (min(ends), max(ends), layer)
            for layer in engine
            if layer.foreign and (ends := [order[name] for name in layer.holds if name in order])
        ]

    def of(self, index: int, asked: Asked) -> Layer:
        """The layer that stands at this index of the network."""
        engine = self._engine_layer(index, asked)
        device: Device = "unknown"
        if asked.type == "CONSTANT":
            device = "none"
        elif engine is not None:
            device = "DLA" if engine.dla else "GPU"
        elif asked.name in self._log.gpu:
            device = "GPU"
        return Layer(
            name=asked.name,
            type=asked.type,
            output=asked.output,
            device=device,
            precision="unknown" if engine is None or engine.foreign else engine.precision,
            asked=asked.precision,
            engine_layer=None if engine is None else engine.name,
            reason=self._reason(asked, device),
        )

    def _engine_layer(self, index: int, asked: Asked) -> _EngineLayer | None:
        found = self._by_name.get(asked.name) or self._by_output.get(asked.output)
        if found is not None or asked.name in self._log.gpu or asked.type == "CONSTANT":
            return found
        return self._around(index, asked)

    def _around(self, index: int, asked: Asked) -> _EngineLayer | None:
        """The subgraph that a layer stands in, if there is only one."""
        found = [
            layer
            for first, last, layer in self._ranges
            if first <= index <= last and not (layer.dla and asked.dla is False)
        ]
        return found[0] if len(found) == 1 else None

    def _reason(self, asked: Asked, device: Device) -> str | None:
        if asked.dla is None or device in {"DLA", "none"}:
            return None
        return self._log.reasons.get(asked.name) or (
            None if asked.dla else "the DLA refuses it, and the log says no more"
        )


def _read_log(log: str, names: set[str]) -> _Log:
    dla: dict[str, None] = {}
    gpu: set[str] = set()
    reasons: dict[str, str] = {}
    for line in log.splitlines():
        text = _PREFIX.sub("", line.strip())
        if match := _DLA_LAYER.search(text):
            dla[(match[1] or match[2]).rstrip(" ,")] = None
        elif match := _GPU_LAYER.search(text):
            gpu.update(_parts(match[1]))
        elif refused := next(filter(None, (pattern.search(text) for pattern in _REFUSALS)), None):
            reasons.setdefault(refused["name"], text)
        elif "DLA" in text:
            # The reason proper stands before: "/model.22/Div: DLA cores do not support DIV ElementWise operation."
            name, _, why = text.partition(": ")
            if name in names and why:
                reasons[name] = why
    return _Log(tuple(dla), frozenset(gpu), reasons)


def _engine_layers(inspector: str, log: _Log) -> list[_EngineLayer]:
    # TensorRT escapes no control characters, and separates a layer's metadata by some.
    layers = [_engine_layer(entry, log) for entry in json.loads(inspector, strict=False)["Layers"]]
    known = {layer.name for layer in layers}
    return layers + [_engine_layer(name, log) for name in log.dla if name not in known]


def _engine_layer(entry: str | dict[str, Any], log: _Log) -> _EngineLayer:
    if isinstance(entry, str):
        entry = {"Name": entry}
    name, kind = entry["Name"], entry.get("LayerType") or ""
    # Q and DQ layers that stand alone are of type Reformat as well, but bear their own names.
    moves = name.startswith("Reformatting CopyNode") or name.endswith(" copy")
    return _EngineLayer(
        name=name,
        holds=frozenset((*_parts(name), *_ONNX_LAYER.findall(entry.get("Metadata") or ""))),
        foreign=_FOREIGN.search(name) is not None,
        dla=name in log.dla or kind.upper().startswith("DLA"),
        reformat=moves,
        precision=_precision(kind, entry),
        outputs=frozenset(tensor["Name"] for tensor in entry.get("Outputs") or []),
    )


def _precision(kind: str, entry: dict[str, Any]) -> str:
    weights, read, given = (_first_type(entry.get(key)) for key in ("Weights", "Inputs", "Outputs"))
    # A product of INT8 may give FP16; TensorRT 10's fused ones list no weights.
    if read == "int8" and _PRODUCT.search(f"{kind} {entry.get('TacticName', '')}"):
        given = read
    return weights or given or "unknown"


def _first_type(described: Any) -> str | None:
    """The type of some weights or tensors, by whichever name this TensorRT tells it."""
    first = (described or [None])[0] if not isinstance(described, dict) else described
    texts = [str(first[key]) for key in _TYPE_KEYS if key in first] if isinstance(first, dict) else []
    return _type_in(" ".join(texts))


def _type_in(text: str) -> str | None:
    """The type in a description such as ``Channel major FP16 format where channel % 8 == 0``."""
    match = _TYPE.search(text)
    return None if match is None else _PRECISIONS.get(match[1].lower(), match[1].lower())


def _parts(name: str) -> Iterator[str]:
    """The network's layers in an engine layer's name."""
    foreign = _FOREIGN.search(name)
    if foreign is not None:
        for end in foreign[1].split("..."):
            yield from _parts(end)
        return
    # Pointwise operators are fused as PWN(PWN(a, b), c), convolutions side by side as a || b.
    for part in re.split(r" \+ | \|\| |, ", name.replace("PWN(", "")):
        text = part.strip()
        while text.endswith(")") and text.count(")") > text.count("("):
            text = text[:-1]
        yield text


def _title(precision: str) -> str:
    return "a precision not told" if precision == "unknown" else precision.upper()


def _without_name(reason: str) -> str:
    """The reason, the same for every layer that has it."""
    shorter = _UNSUPPORTED.sub(r"\1: u\2", reason)
    named = next(filter(None, (pattern.search(shorter) for pattern in _REFUSALS)), None)
    return shorter if named is None else f"{shorter[: named.start('name')]}...{shorter[named.end('name') :]}"

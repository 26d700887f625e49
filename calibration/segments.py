"""Cutting a model into segments that run one after the other, so that few tensors are in memory at a time.

Every activation that is observed is an output of its segment. What a later segment reads is kept until that one has
run; all other memory is used again. Where each tensor lies is settled here, once for all pictures. Nothing is run here.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir

from calibration import graph

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

__all__ = ["Plan", "Segment", "Slot", "cut"]

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector that a CPU loads."""

_IR_VERSION = 8
"""At least 4: before, every initializer was an input as well."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a tensor lies in the arena."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    """In bytes, a multiple of ``ALIGNMENT``."""

    @property
    def nbytes(self) -> int:
        """Of the tensor alone, without what follows it to the next multiple."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Segment:
    """Some consecutive nodes of a model, with the constants that they need."""

    inputs: tuple[str, ...]
    """Inputs of the model, and outputs of earlier segments."""
    outputs: tuple[str, ...]
    """What is observed, and what later segments read; in the order of the model."""
    operators: int
    """Nodes that run for each picture. Those that compute constants from constants alone, which onnxruntime does once,
    when it loads the segment, may be in several segments and are not among them."""
    weight_bytes: int
    """Of the initializers."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A model in segments. It keeps the model in memory; ``segments`` and ``slots`` do not."""

    inputs: tuple[str, ...]
    """Inputs of the model that any segment reads."""
    segments: tuple[Segment, ...]
    slots: dict[str, Slot]
    """The outputs of segments that lie in the arena. The others have a shape that is known only once they are computed,
    or hold no plain numbers."""
    arena_bytes: int
    _parts: tuple[_Part, ...] = field(repr=False)
    _model: ir.Model = field(repr=False)

    def model(self, index: int) -> bytes:
        """One segment as a serialized ONNX model of its own."""
        part = self._parts[index]
        proto = onnx.helper.make_model(
            onnx.helper.make_graph(
                [ir.to_proto(node) for node in part.nodes],
                f"segment_{index}",
                [ir.to_proto(value) for value in part.inputs],
                [ir.to_proto(value) for value in part.outputs],
            ),
            opset_imports=[onnx.helper.make_opsetid(*opset) for opset in self._model.opset_imports.items()],
            functions=[ir.to_proto(function) for function in self._model.functions.values()],
            ir_version=max(self._model.ir_version or 0, _IR_VERSION),
        )
        # After make_model, which copies: weights are large.
        for value in part.initializers:
            assert value.const_value is not None
            tensor = proto.graph.initializer.add()
            ir.serde.serialize_tensor_into(tensor, value.const_value)
            tensor.name = str(value.name)
        content: bytes = proto.SerializeToString()
        return content


class _Part(NamedTuple):
    """What a segment is made of."""

    nodes: list[ir.Node]
    initializers: list[ir.Value]
    inputs: list[ir.Value]
    outputs: list[ir.Value]


def cut(model: ir.Model, observed: Sequence[str], *, most_bytes: int) -> Plan:
    """Cut a model so that the tensors in memory at any time take at most so many bytes.

    Segments are as long as that allows. What no observed tensor depends on is left out; of the rest, each operator that
    depends on the picture is in exactly one segment.

    Args:
        model: shapes inferred, nodes in the order in which they can run, as ONNX demands; not changed.
        observed: names of tensors that nodes of the main graph compute from the picture.
        most_bytes: for the arena of one picture.

    Returns:
        The plan. Where no cut is fine enough, it is the smallest found, and its ``arena_bytes`` says what it takes.
    """
    line = _Line(model, observed)
    finest = line.borders(0)
    best: Plan | None = None
    target = most_bytes
    while True:
        borders = line.borders(target)
        plan = line.plan(borders)
        if best is None or plan.arena_bytes < best.arena_bytes:
            best = plan
        if best.arena_bytes <= most_bytes or borders == finest:
            return best
        # The gaps between the tensors are what is too much: aim lower.
        target = target * 9 // 10


class _Line:
    """The nodes that depend on the picture, one after the other, and how long each of their values is needed."""

    def __init__(self, model: ir.Model, observed: Sequence[str]) -> None:
        names = set(observed)
        self._model = model
        self._constants = _constants(model)
        self._observed = {v for node in model.graph for v in node.outputs if v.name and v.name in names}
        self._nodes = self._needed()
        self._reads = [[v for v in _reads(node) if v not in self._constants] for node in self._nodes]
        self._made = {value: index for index, node in enumerate(self._nodes) for value in node.outputs if value.name}
        self._used = dict(self._made)
        """The last node that reads a value, or the one that makes it."""
        for index, values in enumerate(self._reads):
            self._used.update((value, index) for value in values if value in self._made)
        self._kinds = {value: kind for value in self._made if (kind := _kind(value)) is not None}
        """Type and shape of what lies in the arena."""
        self._bytes = {value: _padded(self._kinds.get(value)) for value in self._made}
        self._whole = {
            border
            for value, index in self._made.items()
            if not _portable(value)
            for border in range(index + 1, self._used[value] + 1)
        }
        """Nodes before which no border can be: a value crosses that is no tensor, or of unknown type."""

    def _needed(self) -> list[ir.Node]:
        """What the observed tensors depend on, but for constants."""
        wanted = set(self._observed)
        nodes: list[ir.Node] = []
        for node in reversed(list(self._model.graph)):
            if not wanted.isdisjoint(node.outputs) and not self._constants.issuperset(node.outputs):
                nodes.append(node)
                wanted.update(_reads(node))
        return nodes[::-1]

    def borders(self, most_bytes: int) -> list[int]:
        """The first node of each segment, so that the tensors of each take at most so many bytes, if they can."""
        changes = [0] * (len(self._nodes) + 1)
        for value, size in self._bytes.items():
            changes[self._made[value] + 1] += size
            if self._used[value] < len(self._nodes):
                changes[self._used[value] + 1] -= size
        across = list(itertools.accumulate(changes))
        starts = [0]
        while (end := self._end(starts[-1], across[starts[-1]], most_bytes)) < len(self._nodes):
            starts.append(end)
        return starts

    def _end(self, start: int, held: int, most_bytes: int) -> int:
        """The node after the segment that begins with ``start``, while tensors of ``held`` bytes come from before."""
        end: int | None = None
        for index in range(start, len(self._nodes)):
            made = [value for value in self._nodes[index].outputs if value in self._made]
            held += sum(self._bytes[v] for v in made if v in self._observed or self._used[v] > index)
            for value in self._reads[index]:
                # What begins and ends within the segment and is not observed is onnxruntime's own affair.
                inner = self._made.get(value, -1) >= start and value not in self._observed
                held -= self._bytes[value] if inner and self._used[value] == index else 0
            if held > most_bytes and end is not None:
                return end
            if index + 1 not in self._whole:
                end = index + 1
        return len(self._nodes)

    def plan(self, starts: Sequence[int]) -> Plan:
        """The model with segments that start at these nodes."""
        spans: dict[ir.Value, tuple[int, int]] = {}
        """The first and the last segment that needs a value which leaves its own."""
        for value, index in self._made.items():
            first, last = (bisect.bisect_right(starts, node) - 1 for node in (index, self._used[value]))
            if value in self._observed or last > first:
                spans[value] = first, last
        offsets, arena_bytes = _arranged({v: (self._bytes[v], *spans[v]) for v in spans if v in self._kinds})
        slots = {str(value.name): Slot(*self._kinds[value], offset) for value, offset in offsets.items()}
        parts = [self._part(*ends, spans) for ends in itertools.pairwise([*starts, len(self._nodes)])]
        segments = [_described(part, self._made) for part in parts]
        read = {name for segment in segments for name in segment.inputs}
        inputs = tuple(str(value.name) for value in self._model.graph.inputs if value.name in read)
        return Plan(inputs, tuple(segments), slots, arena_bytes, tuple(parts), self._model)

    def _part(self, start: int, end: int, leaving: Container[ir.Value]) -> _Part:
        nodes = self._nodes[start:end]
        read = dict.fromkeys(value for values in self._reads[start:end] for value in values)
        initializers: dict[ir.Value, None] = {}
        makers: set[ir.Node] = set()
        pending = [value for node in nodes for value in _reads(node) if value in self._constants]
        while pending:
            value = pending.pop()
            maker = value.producer()
            if maker is None:
                initializers[value] = None
            elif maker not in makers:
                makers.add(maker)
                pending += _reads(maker)
        return _Part(
            nodes=[node for node in self._model.graph if node in makers] + nodes,
            initializers=list(initializers),
            inputs=[value for value in read if self._made.get(value, -1) < start],
            outputs=[value for node in nodes for value in node.outputs if value in leaving],
        )


def _described(part: _Part, made: Container[ir.Value]) -> Segment:
    weights = (value.const_value for value in part.initializers)
    return Segment(
        inputs=tuple(str(value.name) for value in part.inputs),
        outputs=tuple(str(value.name) for value in part.outputs),
        operators=sum(any(value in made for value in node.outputs) for node in part.nodes),
        weight_bytes=sum(tensor.nbytes for tensor in weights if tensor is not None),
    )


def _reads(node: ir.Node) -> list[ir.Value]:
    """What a node reads of the graph that it is in: its inputs, and what its bodies use of the graph around them."""
    found = [value for value in node.inputs if value is not None]
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            bodies = [attribute.as_graph()]
        elif attribute.type == ir.AttributeType.GRAPHS:
            bodies = list(attribute.as_graphs())
        else:
            continue
        for body in bodies:
            found += [value for inner in body for value in _reads(inner) if value.graph is not body]
    return list(dict.fromkeys(found))


def _constants(model: ir.Model) -> set[ir.Value]:
    """Initializers, and what the main graph computes from them alone."""
    found = set(model.graph.initializers.values())
    for node in model.graph:
        if graph.foldable(node) and found.issuperset(_reads(node)):
            found.update(node.outputs)
    return found


def _portable(value: ir.Value) -> bool:
    """Whether a value may be an input of a segment: a tensor, the type of whose numbers is known."""
    return isinstance(value.type, ir.TensorType) and value.dtype != ir.DataType.UNDEFINED


def _kind(value: ir.Value) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
    """Type and shape of a tensor of plain numbers whose size is known before it is computed."""
    if not _portable(value) or value.dtype in (None, ir.DataType.STRING):
        return None
    if value.shape is None or not value.shape.is_static():
        return None
    dtype = np.dtype(value.dtype.numpy())
    # numpy has no bfloat16 or int4 of its own.
    return (dtype, tuple(value.shape.numpy())) if dtype.isbuiltin == 1 else None


def _padded(kind: tuple[np.dtype[Any], tuple[int, ...]] | None) -> int:
    """Bytes in the arena."""
    return 0 if kind is None else -(-math.prod(kind[1]) * kind[0].itemsize // ALIGNMENT) * ALIGNMENT


def _arranged(tensors: dict[ir.Value, tuple[int, int, int]]) -> tuple[dict[ir.Value, int], int]:
    """Offsets for tensors of (bytes, first segment, last segment), and the bytes of all.

    The largest first, each at the lowest offset that is free as long as it is needed ("greedy by size", Pisarchyk and
    Lee 2020, "Efficient Memory Management for Deep Neural Net Inference", section 5).
    """
    offsets: dict[ir.Value, int] = {}
    taken: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    """Begin and end of what lies in the arena during each segment, sorted."""
    top = 0
    for value, (size, first, last) in sorted(tensors.items(), key=lambda item: -item[1][0]):
        offset = 0
        around = taken[first] if first == last else sorted({pair for n in range(first, last + 1) for pair in taken[n]})
        for begin, end in around:
            if begin - offset >= size:
                break
            offset = max(offset, end)
        for number in range(first, last + 1):
            bisect.insort(taken[number], (offset, offset + size))
        offsets[value] = offset
        top = max(top, offset + size)
    return offsets, top

"""The ranges that TensorRT and the DLA need, from those that were measured. Pure: a graph and ranges in, ranges out.

A tensor without a range runs in floating point, with its layers; one whose range is a guess overflows. So every range
that measuring has left open comes from what the graph says about values, or the tensor is named as missing, with why.
Nothing here chooses a range from a histogram, and nothing edits the graph.

Names are ONNX's. TensorRT's parser makes tensors of its own, for example when it reshapes the smaller operand of a
broadcast Add, and numbers them: "(Unnamed Layer* 12) [Shuffle]_output". The numbers depend on its version, cannot be
known off the device, and are not guessed. A build that warns of a missing scale for such a name tells of a layer that
stays in floating point: harmless for constants and shapes, worth a look for anything else.

Sources: NvInfer.h (8.0 to 10.7), comments of IPoolingLayer and IElementWiseLayer; TensorRT developer guide (8.4 and
later), "DLA Supported Layers and Restrictions"; NVIDIA/Deep-Learning-Accelerator-SW, operators/README.md and
tools/qdq-translator; TensorRT operator reference (10.5 and later), "Data Types".
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
import numpy as np
import onnx_ir as ir

from calibration import graph
from calibration.ranges import Range

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from calibration.ranges import Ranges

__all__ = ["COARSER", "complete", "costs", "unquantized"]

COARSER = 4.0
"""A tie that makes a tensor's step more than this many times as wide costs it two bits."""

# What these operators give is at most 1 in magnitude, whatever they read.
_BOUNDED = {"Cos", "Erf", "Hardmax", "HardSigmoid", "Sigmoid", "Sin", "Softmax", "Softsign", "Tanh"}
_BOUND = 1.0

# What these give has the values of their first input, in another order or shape, or repeated.
_SAME = {"DepthToSpace", "Dropout", "Expand", "Flatten", "Identity", "Reshape", "SpaceToDepth", "Squeeze", "Tile"}
_SAME |= {"Transpose", "Unsqueeze"}

# What these give lies within the range of their first input: some of its values, or means of them. Not Relu: its output
# would lie within, but where its input is mostly negative, that range has little to do with what passes.
_WITHIN = {"AveragePool", "Gather", "GatherElements", "GatherND", "GlobalAveragePool", "GlobalMaxPool", "MaxPool"}
_WITHIN |= {"Pad", "ReduceMax", "ReduceMean", "ReduceMin", "Resize", "Slice", "Split", "Upsample"}

# Operators whose TensorRT layer takes no INT8, by the "Data Types" of the operator reference: layer by ONNX operator.
_FLOAT_LAYERS = {
    "ArgMax": "TopK",
    "ArgMin": "TopK",
    "GridSample": "GridSample",
    "GroupNormalization": "Normalization",
    "InstanceNormalization": "Normalization",
    "LayerNormalization": "Normalization",
    "NonMaxSuppression": "NMS",
    "Softmax": "SoftMax",
    "TopK": "TopK",
}


class _Hint(NamedTuple):
    """What the graph says of one tensor: each of its values lies within the range of one of the sources."""

    target: str
    sources: tuple[str, ...]


def complete(model: ir.Model, ranges: Ranges, *, ties: Literal["dla", "none"]) -> Ranges:
    """Give every floating-point tensor a range, or the reason why it has none.

    In this order, until nothing changes:

    1. Bounded: what Sigmoid, Softmax, Tanh and the like give is at most 1. Their own range is never larger, and is 1
       where measuring gave none. A tensor that is smaller on every picture keeps its finer range.
    2. Same: a tensor that was not observed, or was zero on every picture, takes the range of one that holds the same
       values (Reshape, Transpose...; both ways), or within whose range it lies (Slice, MaxPool, an input of a
       Concat...; that way only, since a part says nothing of the whole). A tensor that was measured keeps its own.
    3. Tied, for the DLA only. All members take the largest range of the group: TensorRT does the same for ranges of a
       calibrator (NvInfer.h, IElementWiseLayer: "the largest value shall be used"), and clipping one member is worse
       than a coarser step for another. A member that was zero on every picture does not widen the others.

       - Pooling: input and output (NvInfer.h, IPoolingLayer). Within the DLA's limits only: windows of 1 to 8, strides
         of 1 to 16, padding up to 7. GlobalAveragePool runs on the GPU, which needs no tie.
       - Concat along the channels: all inputs and the output (developer guide 8.4).
       - Add, Sub, Max, Min, Sum: the inputs, not the output (NvInfer.h, IElementWiseLayer). Not Mul: the scales of a
         product multiply, and NVIDIA's own qdq-translator gives the two sides of x * sigmoid(x) different ones.
       - Identity: TensorRT removes it, and one of its two names.

       Groups that share a tensor are one group. Layers that the DLA cannot run, of another rank than 4 or of more than
       8192 channels, rows or columns, tie nothing.

    Constants are left alone: TensorRT quantizes weights by itself. So are ranges of names that the graph has not.

    Args:
        model: what was observed, shapes inferred; not changed.
        ranges: as ``ranges.select`` gives them, or this function.
        ties: dla: for an engine that may use the DLA; none: for the GPU alone.

    Returns:
        Ranges in the order of the graph, inputs first. The same, whatever the order of the given ones; given its own
        result, equal to it. ``clipped`` is what the tensor's own range, or the range taken over, clips: at most that
        much for a tied one.
    """
    constants = unquantized(model)
    tensors = _tensors(model, constants)
    entries = dict(ranges.tensors)
    _bound(model.graph, entries, tensors)
    hints = _hints(model.graph, tensors)
    groups = _groups(model.graph, tensors) if ties == "dla" else []
    while _fill(entries, hints) or _tie(entries, groups):
        pass
    order = [name for name in tensors if name in entries] + sorted(entries.keys() - tensors.keys())
    reasons = {name: why for name, why in {**tensors, **ranges.missing}.items() if name not in entries}
    return msgspec.structs.replace(
        ranges,
        tensors={name: entries[name] for name in order},
        missing=reasons,
        fp16_only={**ranges.fp16_only, **_float_only(model.graph, tensors)},
    )


def costs(ranges: Ranges) -> list[tuple[str, float]]:
    """Tensors whose step a tie has made more than ``COARSER`` times as wide, each with how many times, widest first.

    Scores behind a Sigmoid that are concatenated with box sizes are the common case: the DLA wants one range for both.
    """
    # A tensor that was always zero loses nothing: what it had alone was a placeholder.
    awake = ((name, entry) for name, entry in ranges.tensors.items() if entry.alone and entry.observed_amax)
    factors = ((name, entry.amax / entry.alone) for name, entry in awake if entry.alone)
    return sorted((pair for pair in factors if pair[1] > COARSER), key=lambda pair: (-pair[1], pair[0]))


def unquantized(model: ir.Model) -> frozenset[str]:
    """Names of the tensors that need no range: initializers, and what is computed from constants alone.

    TensorRT folds them before it quantizes, and chooses the scales of weights by itself.
    """
    constants: set[ir.Value] = set()
    for part in (model.graph, *model.graph.subgraphs()):
        constants.update(part.initializers.values())
    for node in model.graph.all_nodes():
        read = [value for value in node.inputs if value is not None]
        static = node.op_type == "Shape" and read[0].shape is not None and read[0].shape.is_static()
        if graph.foldable(node) and (static or constants.issuperset(read)):
            constants.update(node.outputs)
    return frozenset(value.name for value in constants if value.name)


def _tensors(model: ir.Model, constants: Collection[str]) -> dict[str, str]:
    """Every floating-point activation, inputs first, with the reason to give if it ends up without a range."""
    found = dict.fromkeys(model.graph.inputs, "not observed, an input of the model")
    for part in model.graph.subgraphs():
        found.update(dict.fromkeys(part.inputs, "not observed, an input of the body of a node"))
    for node in model.graph.all_nodes():
        where = "" if node.graph is model.graph else ", in the body of another node"
        for value in node.outputs:
            kind = f", as {value.dtype.name}" if value.dtype is not None else ", as a type that is not known"
            kind = "" if value.dtype == ir.DataType.FLOAT else kind
            found[value] = f"not observed, computed by {_label(node)}{kind}{where}"
    # What a custom operator gives has no known type: it is named rather than passed over.
    return {
        value.name: why
        for value, why in found.items()
        if value.name and value.name not in constants and (value.dtype is None or value.dtype.is_floating_point())
    }


def _label(node: ir.Node) -> str:
    return f"{node.op_type} '{node.name}'" if node.name else node.op_type


def _usable(entry: Range | None) -> bool:
    return entry is not None and entry.source != "zero"


def _bound(target: ir.Graph, entries: dict[str, Range], tensors: Collection[str]) -> None:
    for node in target:
        name = node.outputs[0].name
        if node.op_type not in _BOUNDED or node.domain or not name or name not in tensors:
            continue
        entry = entries.get(name)
        if entry is None or entry.source == "zero" or (entry.source == "measured" and entry.amax > _BOUND):
            entries[name] = Range(
                amax=_BOUND,
                scale=float(np.float32(_BOUND / 127)),
                source="bounded",
                observed_amax=None if entry is None else entry.observed_amax,
            )


def _hints(target: ir.Graph, tensors: Collection[str]) -> list[_Hint]:
    """What the graph says about values: equal ones first, then parts of a whole, then a whole of its parts."""
    down: list[_Hint] = []
    up: list[_Hint] = []
    within: list[_Hint] = []
    unions: list[_Hint] = []
    for node in target:
        read = ["" if value is None else str(value.name) for value in node.inputs]
        given = [str(value.name) for value in node.outputs if value.name in tensors]
        if node.domain or not given or not read:
            continue
        if node.op_type == "Concat":
            within += [_Hint(name, (given[0],)) for name in read if name in tensors]
            if all(name in tensors for name in read):  # a constant might be larger than all of them
                unions.append(_Hint(given[0], tuple(read)))
        elif read[0] in tensors and node.op_type in _SAME and _passes_values(node):
            down.append(_Hint(given[0], (read[0],)))
            up.append(_Hint(read[0], (given[0],)))
        elif read[0] in tensors and node.op_type in _WITHIN and _passes_values(node):
            within += [_Hint(name, (read[0],)) for name in given]
    return [*down, *reversed(up), *within, *unions]


def _passes_values(node: ir.Node) -> bool:
    """Whether a node of ``_SAME`` or ``_WITHIN`` adds no values of its own."""
    if node.op_type == "Dropout":  # random in training only
        training = _constant_input(node, 2)
        return training is not None and not training.any()
    if node.op_type == "Pad" and node.attributes.get_string("mode", "constant") == "constant":
        padding = _constant_input(node, 2)
        return padding is not None and not padding.any() and not node.attributes.get_float("value", 0.0)
    if node.op_type in ("Resize", "Upsample"):  # cubic overshoots; tf_crop_and_resize fills in a value
        cropped = node.attributes.get_string("coordinate_transformation_mode", "") == "tf_crop_and_resize"
        return node.attributes.get_string("mode", "nearest") in ("nearest", "linear") and not cropped
    return True


def _constant_input(node: ir.Node, index: int) -> np.ndarray | None:
    """An optional input: zero where it is left out, None where it is no constant."""
    value = node.inputs[index] if index < len(node.inputs) else None
    return np.zeros(1) if value is None else graph.constant(value)


def _fill(entries: dict[str, Range], hints: Sequence[_Hint]) -> bool:
    """Give tensors without a usable range that of their hint; whether any got one."""
    filled = False
    for target, sources in hints:
        entry = entries.get(target)
        known = [name for name in sources if _usable(entries.get(name))]
        if _usable(entry) or not known or any(name not in entries for name in sources):
            continue
        widest = max(known, key=lambda name: entries[name].amax)
        source = entries[widest]
        entries[target] = Range(
            amax=source.amax,
            scale=source.scale,
            source="same",
            of=widest,
            method=source.method,
            observed_amax=None if entry is None else entry.observed_amax,
            clipped=source.clipped if entry is None else entry.clipped,
        )
        filled = True
    return filled


def _groups(target: ir.Graph, tensors: Collection[str]) -> list[list[str]]:
    """Tensors that the DLA wants in one scale, each group in the order of the graph. Union-find."""
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        while parent.setdefault(name, name) != name:
            parent[name] = name = parent[parent[name]]
        return name

    for node in target:
        names = [str(value.name) for value in _tied(node) if value is not None and value.name in tensors]
        for name in names[1:]:
            parent[root(name)] = root(names[0])
    groups: dict[str, list[str]] = {}
    for name in tensors:
        if name in parent:
            groups.setdefault(root(name), []).append(name)
    return list(groups.values())


def _tied(node: ir.Node) -> list[ir.Value | None]:
    """The values of a node that the DLA wants in one scale; none where it does not run the node."""
    if node.domain:
        return []
    if node.op_type in ("Identity", "Dropout") and _passes_values(node):
        return [node.inputs[0], node.outputs[0]]
    if not _fits_dla(node.outputs[0]):
        return []
    if node.op_type in ("MaxPool", "AveragePool") and _pools_on_dla(node):
        return [node.inputs[0], node.outputs[0]]
    if node.op_type == "Concat" and node.attributes.get_int("axis", 1) in (1, -3):
        return [*node.inputs, node.outputs[0]] if len(node.inputs) > 1 else []
    return list(node.inputs) if node.op_type in ("Add", "Sub", "Max", "Min", "Sum") else []


def _fits_dla(value: ir.Value) -> bool:
    """Batch, channels, rows and columns, all of fixed size: up to 4096, and up to 8192 each (developer guide)."""
    if value.shape is None or not value.shape.is_static() or len(value.shape) != 4:
        return False
    batch, *rest = value.shape.numpy()
    return batch <= 4096 and max(rest) <= 8192


def _pools_on_dla(node: ir.Node) -> bool:
    window = node.attributes.get_ints("kernel_shape", ())
    strides = node.attributes.get_ints("strides", (1, 1))
    pads = node.attributes.get_ints("pads", (0, 0, 0, 0))
    dilations = node.attributes.get_ints("dilations", (1, 1))
    return len(window) == 2 and max(window) <= 8 and max(strides) <= 16 and max(pads) <= 7 and set(dilations) == {1}


def _tie(entries: dict[str, Range], groups: Sequence[Sequence[str]]) -> bool:
    """Give every group one range; whether any changed."""
    changed = False
    for group in groups:
        usable = [name for name in group if _usable(entries.get(name))]
        if not usable:
            continue
        widest = max(usable, key=lambda name: entries[name].amax)
        top = entries[widest]
        for name in group:
            entry = entries.get(name)
            # What was never observed may be larger than all of them: it stays without a range.
            if entry is None or entry.amax == top.amax:
                continue
            covered = entry.observed_amax is not None and entry.observed_amax <= top.amax
            entries[name] = msgspec.structs.replace(
                entry,
                amax=top.amax,
                scale=top.scale,
                source="tied",
                of=widest,
                method=top.method,
                clipped=0.0 if covered else entry.clipped,
                alone=entry.amax if entry.alone is None else entry.alone,
            )
            changed = True
    return changed


def _float_only(target: ir.Graph, tensors: Collection[str]) -> dict[str, str]:
    """Tensors that no layer with an INT8 form writes or reads, and why."""
    values = {value.name: value for value in chain(target.inputs, *(node.outputs for node in target))}
    found: dict[str, str] = {}
    for name in tensors:
        value = values.get(name)
        if value is None:
            continue
        producer = value.producer()
        nodes = [*([] if producer is None else [producer]), *(use.node for use in value.uses())]
        if nodes and all(node.op_type in _FLOAT_LAYERS and not node.domain for node in nodes):
            layers = " and ".join(sorted({_FLOAT_LAYERS[node.op_type] for node in nodes}))
            users = " and ".join(sorted({_label(node) for node in nodes}))
            found[name] = f"only {users} use it, and TensorRT has {layers} in floating point alone"
    return found

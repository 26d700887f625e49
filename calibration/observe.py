"""Runs the FP32 model on the calibration pictures and keeps a histogram of every activation.

Each activation becomes part of its histogram as soon as its picture has been run, and is then forgotten: memory holds
the activations of one picture, however many there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
import onnxruntime

from calibration import graph
from calibration.histogram import Histogram
from edge.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge.types import Tensors

__all__ = ["Observer", "expose", "largest_difference", "run", "session"]

_FLOATS = (ir.DataType.FLOAT,)


class Observer:
    """Collects the histograms of one model."""

    def __init__(self, model: ir.Model, *, threads: int | None = None) -> None:
        """Prepare a model, whose graph gets an output for every activation.

        Raises:
            ModelError: onnxruntime cannot load it.
        """
        self.histograms: dict[str, Histogram] = {}
        self.images = 0
        self._inputs, self._names = expose(model)
        self._session = session(model, threads=threads)

    def observe(self, tensors: Tensors, *, source: str) -> None:
        """Run one picture.

        Args:
            tensors: the model's inputs.
            source: what to call the picture in messages.

        Raises:
            ModelError: an activation holds NaN or infinite values; the message names the tensor and the picture.
        """
        outputs = run(self._session, tensors, self._names)
        for name, values in (*zip(self._names, outputs, strict=True), *((n, tensors[n]) for n in self._inputs)):
            histogram = self.histograms.setdefault(name, Histogram())
            histogram.add(values)
            if histogram.nonfinite:
                raise ModelError(
                    f"tensor '{name}' has {histogram.nonfinite} NaN or infinite values on {source}; check the model's"
                    " input section, and that the FP32 model itself is sound"
                )
        self.images += 1


def expose(model: ir.Model) -> tuple[list[str], list[str]]:
    """Make every floating-point activation an output, in place.

    Returns:
        Names of the inputs, and of all other activations in the order in which they are computed.
    """
    # Old exporters list the initializers among the inputs.
    inputs = [str(v.name) for v in model.graph.inputs if v.dtype in _FLOATS and not v.is_initializer()]
    names: list[str] = []
    outputs = {value.name for value in model.graph.outputs}
    constants: set[ir.Value] = set()
    for node in model.graph:
        # What is computed from constants alone is a constant to TensorRT, which gives it no scale of its own.
        # A node with a subgraph may read activations that are not among its inputs.
        closed = all(a.type not in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in node.attributes.values())
        if closed and all(
            value is None or value in constants or graph.constant(value) is not None for value in node.inputs
        ):
            constants.update(node.outputs)
            continue
        for value in node.outputs:
            if value.dtype in _FLOATS and value.name:
                names.append(value.name)
                if value.name not in outputs:
                    model.graph.outputs.append(value)
    return inputs, names


def session(model: ir.Model, *, threads: int | None = None) -> Any:
    """An onnxruntime CPU session of a model in memory.

    Raises:
        ModelError: onnxruntime cannot load it.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # A pool that keeps what the largest run needed would count against the bound that observing promises.
    options.enable_cpu_mem_arena = False
    if threads is not None:
        options.intra_op_num_threads = threads
    try:
        content = ir.to_proto(model).SerializeToString()
        return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        if type(error).__module__.startswith("onnxruntime"):
            raise ModelError(f"onnxruntime cannot load the model: {str(error).strip().splitlines()[0]}") from error
        raise


def run(session: Any, tensors: Tensors, names: Sequence[str] | None = None) -> list[Any]:
    """Run a session and give the named outputs, or all of them.

    Raises:
        ModelError: the model fails on this input.
    """
    try:
        return session.run(names, tensors)  # type: ignore[no-any-return]
    except Exception as error:
        if type(error).__module__.startswith("onnxruntime"):
            raise ModelError(f"the model fails when it runs: {str(error).strip().splitlines()[0]}") from error
        raise


def largest_difference(first: ir.Model, second: ir.Model, inputs: Sequence[Tensors]) -> float:
    """The largest difference between two models' outputs, relative to the largest magnitude of each output."""
    sessions = [session(model) for model in (first, second)]
    difference = 0.0
    for tensors in inputs:
        for a, b in zip(*(run(one, tensors) for one in sessions), strict=True):
            if np.size(a) == 0:
                continue
            scale = float(np.abs(a).max()) or 1.0
            found = float(np.abs(np.asarray(a, np.float64) - b).max()) / scale
            difference = max(difference, found if np.isfinite(found) else np.inf)
    return difference

"""Trying ranges on real pictures: the model with fake quantization whose scales are inputs.

Another set of ranges is then another set of numbers, not another session: what onnxruntime has loaded stays. With the
same scales it computes what the Q/DQ model does, bit by bit (tests/calibration/test_choose.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from calibration import observe, qdq
from calibration.agreement import below_threshold, closeness
from edge import config, tasks
from edge.image import Preprocessor
from edge.types import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from edge.types import Detection, Image, Letterbox, Tensors

__all__ = ["Outcome", "Trial"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one set of ranges gives, picture by picture."""

    closeness: NDArray[np.float64]
    """(N,) how close the answers are to FP32's, 0..1 (``agreement.closeness``); NaN where neither has any."""
    errors: NDArray[np.float64]
    """(N,) root mean square of the outputs' differences over the standard deviation of FP32's, mean over outputs."""

    @property
    def share(self) -> float | None:
        """Mean closeness of the pictures that have any answers, None without any."""
        known = self.closeness[~np.isnan(self.closeness)]
        return float(known.mean()) if known.size else None

    @property
    def error(self) -> float:
        """Mean error."""
        return float(self.errors.mean())


class Trial:
    """One model and some pictures, on which ranges can be tried. Holds the pictures' tensors: give it a few dozen."""

    def __init__(
        self,
        model: config.Model,
        rewritten: ir.Model,
        spec: TensorSpec,
        pictures: Iterable[Image],
        *,
        tensors: Sequence[str],
        views: int = 1,
        key: str = "fp16",
    ) -> None:
        """Run FP32 on the pictures, and make what is tried.

        Args:
            model: of the deployment, with a ``calibration`` section.
            rewritten: as ``calibrate.prepare`` leaves it; not changed.
            spec: of its input.
            pictures: to try on, ``views`` of each, one after the other.
            tensors: that have ranges; those that carry a pair are in ``tensors`` afterwards.
            views: of one picture, whose outcomes are averaged: they are alike, and would pretend to be more than one.
            key: of the FP16 rules in the deployment, for messages.

        Raises:
            ModelError: the model fails, or its outputs are not what the task says.
        """
        assert model.calibration is not None
        self._views = views
        preprocess = Preprocessor(model.input, spec)
        self._inputs: list[Tensors] = []
        letterboxes: list[Letterbox] = []
        for picture in pictures:
            array, letterbox = preprocess(picture)
            self._inputs.append({spec.name: array.copy()})
            letterboxes.append(letterbox)
        self._letterboxes = letterboxes
        self._names = [str(value.name) for value in rewritten.graph.outputs]
        fp32 = observe.session(rewritten, threads=model.engine.threads)
        self._outputs = [observe.run(fp32, inputs) for inputs in self._inputs]
        outputs = tuple(
            TensorSpec(name, tuple(array.shape), array.dtype)
            for name, array in zip(self._names, self._outputs[0], strict=True)
        )
        self._task = tasks.build(below_threshold(model.task), (spec,), outputs, source=model.path)
        self._reference = [self._decode(*pair) for pair in zip(self._outputs, letterboxes, strict=True)]
        candidate = ir.from_proto(ir.to_proto(rewritten))
        placement = qdq.insert(candidate, dict.fromkeys(tensors, 1.0), model.calibration.fp16, key=key)
        self.tensors = placement.activations
        """Those that carry a pair: the ranges of the others make no difference here."""
        self._scale_inputs = _expose_scales(candidate, self.tensors)
        self._session = observe.session(candidate, threads=model.engine.threads)

    def __len__(self) -> int:
        """The number of pictures, however many views there are of each."""
        return len(self._inputs) // self._views

    def run(self, scales: Mapping[str, float], pictures: Sequence[int] | None = None) -> Outcome:
        """Try scales on all pictures, or those of these numbers."""
        given = {name: np.asarray(scales[tensor], np.float32) for tensor, name in self._scale_inputs.items()}
        shares: list[float] = []
        errors: list[float] = []
        chosen = range(len(self)) if pictures is None else pictures
        for index in (picture * self._views + view for picture in chosen for view in range(self._views)):
            found = observe.run(self._session, {**self._inputs[index], **given})
            share = closeness(self._reference[index], self._decode(found, self._letterboxes[index]))
            shares.append(math.nan if share is None else share)
            pairs = zip(self._outputs[index], found, strict=True)
            errors.append(float(np.mean([_error(a, b) for a, b in pairs])))
        by_picture = np.array(shares).reshape(-1, self._views)
        known = ~np.isnan(by_picture)
        sums, counts = np.where(known, by_picture, 0.0).sum(axis=1), known.sum(axis=1)
        closeness_of = np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0)
        return Outcome(closeness_of, np.array(errors).reshape(-1, self._views).mean(axis=1))

    def _decode(self, outputs: Sequence[NDArray[np.float32]], letterbox: Letterbox) -> list[Detection]:
        return self._task.decode(dict(zip(self._names, outputs, strict=True)), letterbox)


def _error(reference: NDArray[np.float32], candidate: NDArray[np.float32]) -> float:
    spread = float(reference.std()) or 1.0
    return float(np.sqrt(np.mean((np.asarray(reference, np.float64) - candidate) ** 2))) / spread


def _expose_scales(model: ir.Model, tensors: Sequence[str]) -> dict[str, str]:
    """Turn the scales of activations into inputs, in place: name of the input by name of the tensor."""
    wanted = set(tensors)
    names: dict[str, str] = {}
    for node in list(model.graph):
        if node.op_type != "QuantizeLinear" or node.inputs[0] is None or str(node.inputs[0].name) not in wanted:
            continue
        scale = node.inputs[1]
        assert scale is not None
        assert scale.name is not None
        names[str(node.inputs[0].name)] = scale.name
        if scale.is_initializer():
            del model.graph.initializers[scale.name]
            scale.const_value = None
            model.graph.inputs.append(scale)
    return names

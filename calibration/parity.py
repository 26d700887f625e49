"""A plan against the FP32 model in onnxruntime: the same pictures, output by output, and in the task's answers.

Three measures, since each is blind to something:

- Cosine similarity finds an output that points elsewhere: garbage, zeros, a wrong layout, channels that were swapped.
  It is dominated by what is large. In a detector's raw output that is the boxes, hundreds of pixels beside scores of at
  most 1, so a plan whose every score is lost can still reach 0.999.
- The largest difference, relative to FP32's largest magnitude, finds a single value that is far off, which no mean
  shows. It is as blind to scores beside boxes, and one outlier that decoding throws away makes it large: it is told,
  and a limit only where the deployment sets one.
- Agreement compares what the task makes of the outputs: scores count as much as boxes. It says nothing of pictures
  without any answer, and not which output is wrong.

Values come in and values go out: which plan to build next, and which to install, is ``calibration.build``'s to decide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from calibration.agreement import below_threshold, closeness
from edge import manifest, tasks
from edge.engine.onnxruntime import OnnxRuntimeEngine
from edge.errors import DataError, ModelError
from edge.image import Preprocessor

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray
    from typing_extensions import Self

    from edge import config
    from edge.tasks import Task
    from edge.types import Detection, Image, Letterbox, Tensors, TensorSpec

__all__ = ["Difference", "OutputParity", "Parity", "Reference", "difference"]


@dataclass(frozen=True, slots=True)
class OutputParity:
    """One output of a candidate, over all pictures."""

    name: str
    cosine: float
    """Over all of them, -1..1."""
    relative_error: float
    """Largest difference over FP32's largest magnitude; infinite where the candidate holds NaN or infinite values."""
    finite: bool


@dataclass(frozen=True, slots=True)
class Parity:
    """How one candidate compares with FP32."""

    images: int
    outputs: tuple[OutputParity, ...]
    agreement: float | None
    """Mean of ``agreement.closeness`` over the pictures with answers; None where neither side gives any."""
    failures: tuple[str, ...]
    """Limits that were missed, one sentence each. Agreement that is None misses none: the outputs still count."""
    warnings: tuple[str, ...] = ()
    """What was not compared, one sentence each."""

    def record(self) -> manifest.ParityRecord:
        """What the plan's manifest says of it."""
        relative_error = max(output.relative_error for output in self.outputs)
        return manifest.ParityRecord(
            images=self.images,
            cosine=min(output.cosine for output in self.outputs),
            relative_error=relative_error if math.isfinite(relative_error) else None,
            agreement=self.agreement,
            failures=list(self.failures),
        )


class Difference(NamedTuple):
    """Between two arrays of one shape."""

    cosine: float
    relative_error: float
    finite: bool


@dataclass(frozen=True, slots=True)
class _Case:
    """One picture, and what FP32 makes of it. Nobody writes to the arrays."""

    name: str
    inputs: Tensors
    letterbox: Letterbox
    outputs: Tensors
    answers: list[Detection]


@dataclass(frozen=True, slots=True)
class Reference:
    """FP32 on some pictures: computed once, compared with every candidate.

    It holds the tensors of all of them, and no session: 8 pictures of a YOLOv8n at 640 x 640 are 62 MB, the 256 that a
    deployment may ask for 2.0 GB, beside 0.7 GB for the outputs of each candidate while it is compared.
    """

    _cases: tuple[_Case, ...]
    _outputs: tuple[TensorSpec, ...]
    _task: Task

    @classmethod
    def of(cls, model: config.Model, pictures: Iterable[tuple[str, Image]]) -> Self:
        """Run the FP32 model on pictures, on the CPU.

        Args:
            model: of the deployment.
            pictures: at least one, each with what to call it in messages.

        Raises:
            DataError: there is no picture.
            ModelError: the model fails, computes NaN, or its outputs are not what the task says.
        """
        source = Path(model.path)
        with OnnxRuntimeEngine(source, threads=model.engine.threads, size_wh=model.input.size) as engine:
            # Objects just under the threshold are answers as well, as in calibration's own trials.
            task = tasks.build(below_threshold(model.task), engine.inputs, engine.outputs, source=model.path)
            preprocess = Preprocessor(model.input, engine.inputs[0])
            cases: list[_Case] = []
            for name, picture in pictures:
                array, letterbox = preprocess(picture)
                inputs = {engine.inputs[0].name: array.copy()}
                outputs = {output: value.copy() for output, value in engine.infer(inputs).items()}
                _check_finite(outputs, source, name)
                cases.append(_Case(name, inputs, letterbox, outputs, task.decode(outputs, letterbox)))
            if not cases:
                raise DataError(f"{source}: there is no picture to compare a plan with FP32 on")
            return cls(tuple(cases), engine.outputs, task)

    @property
    def inputs(self) -> list[Tensors]:
        """What a candidate is to be run on, of each picture."""
        return [case.inputs for case in self._cases]

    def compare(self, outputs: Sequence[Tensors], limits: config.Parity) -> Parity:
        """Compare what a candidate makes of ``inputs``.

        Args:
            outputs: of each picture, by name; those beyond FP32's are ignored.
            limits: that its failures are told for.

        Raises:
            ModelError: an output is missing or has another shape.
        """
        found: dict[str, list[_Sums]] = {spec.name: [] for spec in self._outputs}
        shares: list[float] = []
        for case, candidate in zip(self._cases, outputs, strict=True):
            self._check(candidate)
            compared = {name: _Sums.of(value, candidate[name]) for name, value in case.outputs.items()}
            for name, value in compared.items():
                found[name].append(value)
            # Decoding NaN would be to compare by chance.
            finite = all(value.finite for value in compared.values())
            share = closeness(case.answers, self._task.decode(candidate, case.letterbox)) if finite else 0.0
            if share is not None:
                shares.append(share)
        agreement = math.fsum(shares) / len(shares) if shares else None
        failures = [text for name, values in found.items() for text in self._failures(name, values, limits)]
        if agreement is not None and agreement < limits.agreement:
            failures.append(
                f"the task's answers agree with FP32's to {_told(agreement, limits.agreement)},"
                f" mean of {len(shares)} pictures (allowed: at least {limits.agreement:g})"
            )
        outputs_found = tuple(_summary(name, values) for name, values in found.items())
        warnings = () if shares else (self._blind(),)
        return Parity(len(self._cases), outputs_found, agreement, tuple(failures), warnings)

    def _blind(self) -> str:
        """What is left to say without answers: the cosine alone does not see lost scores."""
        pictures = f"any of the {len(self._cases)} pictures" if len(self._cases) > 1 else "the picture"
        return f"FP32 finds nothing on {pictures}, so the task's answers were not compared: give --images with objects"

    def _check(self, candidate: Tensors) -> None:
        for spec in self._outputs:
            if spec.name not in candidate:
                raise ModelError(
                    f"output '{spec.name}' is missing in the engine, which has: {', '.join(candidate) or 'none'}"
                )
            shape = candidate[spec.name].shape
            if shape != spec.shape:
                raise ModelError(
                    f"output '{spec.name}' is {list(shape)} in the engine, but {list(spec.shape)} in the FP32 model"
                )

    def _failures(self, name: str, values: Sequence[_Sums], limits: config.Parity) -> list[str]:
        """The limits that one output misses over all pictures, each with the picture where it is worst."""
        broken = [case.name for case, value in zip(self._cases, values, strict=True) if not value.finite]
        if broken:
            number = f"{len(broken)} of {len(values)} pictures"
            return [f"output '{name}': holds NaN or infinite values on {number}, the first is {broken[0]}"]
        failures: list[str] = []
        total = _Sums.total(values).difference()
        if total.cosine < limits.cosine:
            at = max(range(len(values)), key=lambda index: values[index].square_of_difference)
            told = _told(total.cosine, limits.cosine)
            failures.append(
                f"output '{name}': cosine {told}, worst on {self._cases[at].name} (allowed: at least {limits.cosine:g})"
            )
        if limits.relative_error is not None and total.relative_error > limits.relative_error:
            at = max(range(len(values)), key=lambda index: values[index].largest_difference)
            told = _told(total.relative_error, limits.relative_error)
            failures.append(
                f"output '{name}': relative error {told} on {self._cases[at].name} (allowed: at most"
                f" {limits.relative_error:g})"
            )
        return failures


@dataclass(frozen=True, slots=True)
class _Sums:
    """What two arrays, or rows of them, are compared by; of several pictures it adds up.

    An output may be next to nothing on a picture without objects, where its direction is noise: pictures weigh as much
    as they hold.
    """

    product: float
    squares: tuple[float, float]
    square_of_difference: float
    largest_difference: float
    largest: float
    """Magnitude, in the reference."""
    finite: bool

    @classmethod
    def of(cls, reference: NDArray[Any], candidate: NDArray[Any]) -> Self:
        a, b = np.ravel(reference).astype(np.float64), np.ravel(candidate).astype(np.float64)
        largest = float(np.abs(a).max(initial=0.0))
        if not np.isfinite(b).all():
            return cls(0.0, (float(a @ a), 0.0), math.inf, math.inf, largest, finite=False)
        off = a - b
        norms = float(a @ a), float(b @ b)
        return cls(float(a @ b), norms, float(off @ off), float(np.abs(off).max(initial=0.0)), largest, finite=True)

    @classmethod
    def total(cls, parts: Sequence[Self]) -> Self:
        return cls(
            math.fsum(part.product for part in parts),
            (math.fsum(part.squares[0] for part in parts), math.fsum(part.squares[1] for part in parts)),
            math.fsum(part.square_of_difference for part in parts),
            max(part.largest_difference for part in parts),
            max(part.largest for part in parts),
            all(part.finite for part in parts),
        )

    def difference(self) -> Difference:
        if not self.finite:
            return Difference(0.0, math.inf, finite=False)
        if not any(self.squares):
            return Difference(1.0, 0.0, finite=True)
        if not all(self.squares):
            return Difference(0.0, 1.0 if self.squares[0] else math.inf, finite=True)
        # Rounding may leave the quotient a little above 1.
        cosine = float(np.clip(self.product / math.sqrt(self.squares[0]) / math.sqrt(self.squares[1]), -1.0, 1.0))
        return Difference(cosine, self.largest_difference / self.largest, finite=True)


def difference(reference: NDArray[Any], candidate: NDArray[Any]) -> Difference:
    """Compare two arrays of one shape in double precision.

    Two arrays of zeros are equal, with cosine 1; zeros against anything else have cosine 0 and an infinite relative
    error, since there is neither a direction nor a magnitude to hold it against.

    Args:
        reference: finite.
        candidate: with NaN or infinite values it has cosine 0 and an infinite relative error.
    """
    return _Sums.of(reference, candidate).difference()


def _summary(name: str, values: Sequence[_Sums]) -> OutputParity:
    total = _Sums.total(values).difference()
    return OutputParity(name, total.cosine, total.relative_error, total.finite)


def _check_finite(outputs: Tensors, source: Path, picture: str) -> None:
    for name, value in outputs.items():
        if not np.isfinite(value).all():
            raise ModelError(
                f"{source}: output '{name}' holds NaN or infinite values on {picture} in FP32 already; there is nothing"
                " to compare a plan with"
            )


def _told(value: float, limit: float) -> str:
    """With as many digits as it takes to differ from the limit that it misses."""
    return next((text for digits in range(3, 17) if float(text := f"{value:.{digits}g}") != limit), repr(value))

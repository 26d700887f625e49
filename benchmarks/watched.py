"""Pipelines for measuring: one that shows its results to a witness first, and one whose engine does nothing.

The daemon takes them through ``open_model``; everything else about it is as it ships.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from edge import tasks
from edge.image import Preprocessor
from edge.process import Pipeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    from typing_extensions import Self

    from edge import config
    from edge.types import Result, Tensors, TensorSpec

__all__ = ["NullEngine", "Watched", "open_null"]


class Watched:
    """A pipeline with a witness at its end."""

    def __init__(self, pipeline: Any, note: Callable[[Result], object]) -> None:
        """Watch ``pipeline``; ``note`` is called with each result before ``finish`` returns it."""
        self._pipeline = pipeline
        self._note = note

    def __getattr__(self, name: str) -> Any:
        """Everything but ``finish`` and ``process`` is the pipeline's own."""
        return getattr(self._pipeline, name)

    def finish(self) -> Result:
        """The pipeline's, seen."""
        result: Result = self._pipeline.finish()
        self._note(result)
        return result

    def process(self, frame: Any) -> Result:
        """The pipeline's, seen."""
        result: Result = self._pipeline.process(frame)
        self._note(result)
        return result


class NullEngine:
    """An engine that gives zeros at once, or after a time in which it leaves the CPU alone, as a GPU's does."""

    def __init__(self, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], *, takes_s: float = 0.0) -> None:
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.description = "no engine"
        self._takes_s = takes_s
        self._zeros = {spec.name: np.zeros(spec.shape, spec.dtype) for spec in outputs}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Nothing to free."""

    def infer(self, _tensors: Tensors) -> Tensors:
        """The same zeros each time: nothing is found in them."""
        if self._takes_s:
            time.sleep(self._takes_s)
        return self._zeros


@contextmanager
def open_null(
    model: config.Model, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], *, takes_s: float = 0.0
) -> Iterator[Pipeline]:
    """A model's pipeline with its own pre-processing and decoding around no engine.

    Args:
        model: of the deployment.
        inputs: of the engine that it stands for.
        outputs: likewise.
        takes_s: how long each inference takes.
    """
    with NullEngine(inputs, outputs, takes_s=takes_s) as engine:
        task = tasks.build(model.task, engine.inputs, engine.outputs, source="no engine")
        yield Pipeline(model.name, Preprocessor(model.input, engine.inputs[0]), engine, task)

"""One frame's journey: picture -> engine -> task.

Shared by the daemon, the evaluation and the benchmarks, so that what is measured is what ships.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from edge import tasks
from edge.engine import Pipelined, artifact_of, open_engine
from edge.errors import ModelError
from edge.image import Preprocessor
from edge.manifest import Artifact, artifact_to_run, reservations
from edge.types import Latency, Result

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from edge import config
    from edge.engine import Engine
    from edge.tasks import Task
    from edge.types import Detection, Frame, Image, Letterbox, Tensors

__all__ = ["Pipeline", "digest_to_run", "open_pipeline"]

logger = logging.getLogger(__name__)


class _Begun(NamedTuple):
    """A frame that is with the engine. Moments are the pipeline's clock, in seconds."""

    frame: Frame
    letterbox: Letterbox
    started: float
    prepared: float
    handed_over: float
    outputs: Tensors | None
    """Of an engine that computes at once."""


class Pipeline:
    """One model, ready to look at frames. Used by one thread at a time."""

    def __init__(
        self,
        name: str,
        preprocess: Preprocessor,
        engine: Engine,
        task: Task,
        *,
        digest: str = "",
        precision: str = "fp32",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.digest = digest
        self.precision = precision
        self.engine = engine
        self.task = task
        self._preprocess = preprocess
        self._clock = clock
        self._pipelined = engine if isinstance(engine, Pipelined) else None
        self._begun: deque[_Begun] = deque()

    @property
    def description(self) -> str:
        """What runs, for logs."""
        width, height = self._preprocess.model_wh
        return f"{self.name}: {self.precision}, {width}x{height}, {self.task.layout}, on {self.engine.description}"

    @property
    def input_wh(self) -> tuple[int, int]:
        """Width and height of the pictures that the model takes."""
        return self._preprocess.model_wh

    def warm_up(self) -> None:
        """Run once on a grey picture, so that the first real frame does not pay for lazy allocations."""
        width, height = self._preprocess.model_wh
        self.detect(np.full((height, width, 3), 114, np.uint8))

    def detect(self, image: Image) -> list[Detection]:
        """Find the objects of one picture."""
        array, letterbox = self._preprocess(image)
        return self._decode(self.engine.infer({self._preprocess.tensor.name: array}), letterbox)

    def process(self, frame: Frame) -> Result:
        """Find the objects of one frame and say how long each stage took."""
        self.begin(frame)
        return self.finish()

    @property
    def depth(self) -> int:
        """How many frames may be begun before the first of them is finished."""
        return self._pipelined.slots if self._pipelined is not None else 1

    def begin(self, frame: Frame) -> None:
        """Prepare a frame and hand it to the engine, which may still be at work on the one before it."""
        started = self._clock()
        array, letterbox = self._preprocess(frame.image)
        prepared = self._clock()
        tensors = {self._preprocess.tensor.name: array}
        outputs = None
        if self._pipelined is not None:
            self._pipelined.submit(tensors)
        else:
            outputs = self.engine.infer(tensors)
        self._begun.append(_Begun(frame, letterbox, started, prepared, self._clock(), outputs))

    def finish(self) -> Result:
        """Wait for the oldest frame that was begun, and find its objects.

        An error is that frame's: the next call is about the next one.
        """
        begun = self._begun.popleft()
        outputs, inferred = begun.outputs, begun.handed_over
        if outputs is None:
            assert self._pipelined is not None, "other engines give their outputs at once"
            outputs, inferred = self._pipelined.collect(), self._clock()
        detections = self._decode(outputs, begun.letterbox)
        latency = Latency(
            queue_ms=1e3 * (begun.started - begun.frame.captured_at_s),
            preprocess_ms=1e3 * (begun.prepared - begun.started),
            inference_ms=1e3 * (inferred - begun.prepared),
            postprocess_ms=1e3 * (self._clock() - inferred),
        )
        return Result(begun.frame, self.name, detections, latency)

    def _decode(self, outputs: Tensors, letterbox: Letterbox) -> list[Detection]:
        """Find the objects. NaN passes no threshold: without a look at it, a broken engine is an empty scene."""
        for name, array in outputs.items():
            if array.dtype.kind == "f" and array.size and np.isnan(np.min(array)):
                raise ModelError(f"{self.name}: output '{name}' holds NaN")
        return self.task.decode(outputs, letterbox)


def digest_to_run(model: config.Model) -> str:
    """SHA-256 of the file that ``open_pipeline`` would open now.

    Raises:
        ModelError: a file is missing, or was calibrated for something else.
    """
    return artifact_of(model).sha256


@contextmanager
def open_pipeline(
    model: config.Model, *, precision: Literal["int8", "fp32"] | None = None, path: Path | None = None
) -> Iterator[Pipeline]:
    """Load a model of the deployment.

    Args:
        model: of the deployment.
        precision: of the ONNX file, in onnxruntime, instead of what the deployment runs.
        path: a file to run instead of the calibrated one, not checked against any manifest.

    Raises:
        ModelError: a file is missing, was calibrated for something else, or does not fit its task.
        DeviceError: what should run it is not installed.
    """
    if path is not None:
        artifact = Artifact.of(path, precision or model.engine.precision)
    else:
        artifact = artifact_of(model) if precision is None else artifact_to_run(model, precision)
    for text in reservations(model, artifact.engine) if artifact.engine is not None else ():
        logger.warning("models.%s: %s", model.name, text)
    with open_engine(
        artifact.path,
        model.engine,
        size_wh=model.input.size,
        built=artifact.engine,
        cache_dir=None if model.artifacts is None else model.artifacts_dir,
    ) as engine:
        if len(engine.inputs) != 1:
            names = ", ".join(spec.name for spec in engine.inputs)
            raise ModelError(f"{artifact.path}: has {len(engine.inputs)} inputs ({names}); expected one picture")
        task = tasks.build(model.task, engine.inputs, engine.outputs, source=str(artifact.path))
        preprocess = Preprocessor(model.input, engine.inputs[0])
        yield Pipeline(model.name, preprocess, engine, task, digest=artifact.sha256, precision=artifact.precision)

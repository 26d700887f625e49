"""Observing a set of pictures, once each: what earlier runs have observed is taken from their files.

A run may end at any moment, by an error, Ctrl-C or a power cut. The next one goes on where the last checkpoint was, and
ends with the same bytes as a run that nothing disturbed.
"""

from __future__ import annotations

import glob
import logging
import time
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from calibration import graph, observation, observe
from calibration.observation import Identity, Observation
from edge import manifest
from edge.errors import DataError
from edge.image import Preprocessor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import onnx_ir as ir

    from calibration.histogram import Histogram
    from calibration.images import ImageSet
    from edge import config
    from edge.types import Tensors, TensorSpec

__all__ = ["Gathered", "gather", "identity_of", "pause_s"]

logger = logging.getLogger(__name__)

CHECKPOINT_SHARE = 0.05
"""Of the time, that checkpoints may take."""
LEAST_PAUSE_S = 5.0
"""Losing less is not worth writing megabytes for."""
MOST_PAUSE_S = 30.0
"""What an end without warning may cost, whatever a checkpoint takes."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """All pictures of a set, observed."""

    observation: Observation
    reused: int
    """Pictures that were taken from earlier files."""


def gather(
    model: config.Model,
    spec: TensorSpec,
    images: ImageSet,
    *,
    graph_model: ir.Model | None = None,
    earlier: Sequence[Path],
    partial: Path,
    memory: int | None,
    workers: int | None = None,
    on_image: Callable[[int], None],
    clock: Callable[[], float] = time.monotonic,
) -> Gathered:
    """Observe the pictures of a set that no earlier file has, and add up.

    A file is used if it is of the same model and pre-processing and of wanted pictures only; of files that have
    pictures in common, the larger. The others are logged, each with the reason.

    Args:
        model: of the deployment.
        spec: the model's input, of fixed shape.
        images: the pictures that are wanted.
        graph_model: the same model with its shapes fixed, where the caller has read it; not changed.
        earlier: files of earlier runs; missing ones are passed over.
        partial: such a file as well. It is written at checkpoints, at the end, and when the run fails or is interrupted
            after it has observed something; the caller deletes it when its own work is done. The caller holds the
            ``edge.files.folder_lock`` of its folder.
        memory: bytes; None: half of what is available.
        workers: threads; None: as many as make sense.
        on_image: called with the number of pictures that were done since the last call, one call at a time, from
            any thread.
        clock: seconds, for the checkpoints.

    Raises:
        DataError: a picture is gone or was changed since it was checked.
        DeviceError: the memory is not enough.
        ModelError: the model cannot be loaded, or computes NaN or infinite values.
        OSError: the partial file cannot be written.
    """
    if graph_model is None:
        graph_model = graph.load(Path(model.path))
        graph.fix_input(graph_model, spec)
    inputs, activations = observe.activations(graph_model)
    state = Observation.empty(identity_of(model, spec), [*inputs, *activations])
    # Left by runs that were killed while they wrote; the lock is the caller's.
    for stale in partial.parent.glob(f".{glob.escape(partial.name)}-*"):
        stale.unlink()
    state = _reuse(state, {file.sha256 for file in images.used}, partial, earlier)
    reused = state.images
    if reused:
        on_image(reused)
    known = state.sha256
    rest = [index for index, file in enumerate(images.used) if file.sha256 not in known]
    if rest:
        # As it is decoded, and once more as it is turned upright or cut.
        largest = max(2 * 3 * width * height for width, height in (images.used[index].size_wh for index in rest))
        observer = observe.Observer(
            graph_model, memory=memory, workers=workers, picture_bytes=max(observe.PICTURE_BYTES, largest)
        )
        del graph_model  # its weights count against the memory, unless the observer still needs them
        collector = _Collector(state, partial, len(images), on_image, clock)
        state.onnxruntime.add(metadata.version("onnxruntime"))
        try:
            observer.run(
                rest,
                lambda: _loader(model.input, spec, images),
                lambda index, histograms: collector.collect(images.used[index].sha256, histograms),
                describe=lambda index: str(images.used[index].path),
            )
            collector.checkpoint()
        except BaseException:
            collector.rescue()
            raise
    return Gathered(state, reused)


def identity_of(model: config.Model, spec: TensorSpec) -> Identity:
    """What histograms of this model with this input belong to.

    Raises:
        OSError: a file of the model cannot be read.
    """
    source = Path(model.path)
    return Identity(
        model_sha256=manifest.sha256_of(source),
        model_data={name: manifest.sha256_of(path) for name, path in graph.data_files(source).items()},
        # The shape says what the size asks for; a size that the model has anyway makes no difference.
        input=msgspec.structs.replace(model.input, size=None),
        shape=spec.shape,
    )


def pause_s(checkpoint_s: float) -> float:
    """Seconds to the next checkpoint, after one that took so many."""
    share = checkpoint_s * (1 - CHECKPOINT_SHARE) / CHECKPOINT_SHARE
    return min(max(share, LEAST_PAUSE_S), MOST_PAUSE_S)


@dataclass(slots=True)
class _Collector:
    """Adds up what comes in, and writes it down now and then. The caller lets in one thread at a time."""

    state: Observation
    path: Path
    wanted: int
    """Pictures of the whole set."""
    on_image: Callable[[int], None]
    clock: Callable[[], float]
    _due_s: float = field(init=False)
    _unsaved: int = 0
    _saved: int = 0
    """Pictures in the file, if this run has written it."""
    _torn: bool = False
    """A picture is counted in some of its histograms: this is not to be saved."""

    def __post_init__(self) -> None:
        self._due_s = self.clock() + pause_s(0)

    def collect(self, sha256: str, histograms: dict[str, Histogram]) -> None:
        group = self.state.group(sha256)
        self._torn = True
        for name, one in histograms.items():
            one.drain_into(group.histograms[name])
        group.sha256.add(sha256)
        self._unsaved += 1
        self._torn = False
        if self.clock() >= self._due_s:
            self.checkpoint()
        self.on_image(1)

    def checkpoint(self) -> None:
        """Write what is not written yet."""
        if not self._unsaved:
            return
        start_s = self.clock()
        observation.save(self.path, self.state)
        self._unsaved, self._saved = 0, self.state.images
        end_s = self.clock()
        self._due_s = end_s + pause_s(end_s - start_s)

    def rescue(self) -> None:
        """Write what there is while an error is on its way, which matters more than one in here."""
        if self._torn:
            logger.warning("%s: the last checkpoint stands, since a picture was interrupted half-way", self.path)
            return
        try:
            self.checkpoint()
            if self._saved:
                text = "%d of %d pictures are kept in %s; the same pictures need not be run again"
                logger.warning(text, self._saved, self.wanted, self.path)
        except OSError as error:
            logger.warning("%s: what was observed since the last checkpoint is lost (%s)", self.path, error)


def _loader(section: config.Input, spec: TensorSpec, images: ImageSet) -> Callable[[int], Tensors]:
    """What turns the number of a picture into the model's input, in a buffer that the next call overwrites."""
    preprocess = Preprocessor(section, spec)
    return lambda index: {spec.name: preprocess(images.load(index))[0]}


def _reuse(state: Observation, wanted: set[str], partial: Path, earlier: Sequence[Path]) -> Observation:
    """What the files have of the wanted pictures, added to a state that has none."""
    usable: list[tuple[Path, Observation]] = []
    for path in dict.fromkeys((partial, *earlier)):
        if not path.exists():
            continue
        # That an interrupted run is lost is worth a warning; that an earlier calibration was another is not.
        level = logging.WARNING if path == partial else logging.INFO
        try:
            found = observation.load(path)
        except DataError as error:
            logger.warning("not used: %s", error)
            continue
        reason = _mismatch(found, state, wanted)
        if reason:
            logger.log(level, "%s: not used: %s", path, reason)
        elif found.images:
            usable.append((path, found))
    for path, found in sorted(usable, key=lambda entry: -entry[1].images):
        common = len(found.sha256 & state.sha256)
        if common:
            logger.info("%s: not used: %d of its %d pictures are counted already", path, common, found.images)
        else:
            logger.info("%s: %d pictures are taken from it", path, found.images)
            state = observation.merge(state, found, names=("this run", str(path)))
    return state


def _mismatch(found: Observation, state: Observation, wanted: set[str]) -> str | None:
    """Why a file's histograms cannot be used for the wanted pictures."""
    differences = observation.difference(found.identity, state.identity)
    if differences:
        return "; ".join(differences)
    if set(found.tensors) != set(state.tensors):
        return "it was written by another version, which observed other tensors"
    foreign = len(found.sha256 - wanted)
    if foreign:
        return f"{foreign} of its {found.images} pictures are not in this set"
    return None

"""What INT8 costs: the same pictures through the FP32 and the INT8 model, compared object by object, and COCO mAP.

Both models run in the daemon's own pipeline. Agreement is judged at the deployment's score threshold, mAP in COCO's
standard setting. Comparing is pure; only ``evaluate`` runs models, one picture at a time.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from calibration import annotate
from calibration.agreement import BORDERLINE, Agreement, agreement
from calibration.coco import MAP_NMS_IOU, MAP_SCORE, Scores, Truth, rows_of, some
from edge import config, files, process, tasks
from edge.errors import ConfigError
from edge.tasks import labels as task_labels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from calibration.images import ImageSet
    from edge.process import Pipeline
    from edge.tasks import Task
    from edge.types import Detection, Image, Letterbox, Tensors

    _TaskSection: TypeAlias = config.DetectionTask | config.Segmentation | config.Classification

__all__ = ["Evaluation", "LimitCheck", "evaluate"]

NOISE_IMAGES = 16
"""Pictures on which FP32 is run twice, to show what differs from run to run without INT8."""

SAVED = ".evaluation"
"""In the folder of ``save``: names of the pictures in it that are ours, and may be replaced."""

_LONGEST_STEM = 100

WORST_IMAGES = 12
"""Pictures that ``save`` keeps."""


@dataclass(frozen=True, slots=True)
class LimitCheck:
    """A limit of the deployment, and what was found."""

    name: Literal["map_drop", "agreement", "mask_iou"]
    limit: float
    found: float | None
    """None where there was nothing to measure, which no limit accepts."""
    exceeded: bool


@dataclass(frozen=True, slots=True)
class Evaluation:
    """INT8 against FP32 on one set of pictures."""

    model: str
    images: int
    fp32: Scores | None
    """None without labels."""
    int8: Scores | None
    agreement: Agreement
    noise: Agreement
    """FP32 against itself, on some of the pictures."""
    limits: tuple[LimitCheck, ...]
    warnings: tuple[str, ...]

    @property
    def exceeded(self) -> tuple[LimitCheck, ...]:
        """The limits that INT8 exceeds."""
        return tuple(check for check in self.limits if check.exceeded)

    def to_json(self) -> dict[str, Any]:
        """JSON form, the contract of ``edge-calibrate evaluate --json``."""
        return {
            "model": self.model,
            "images": self.images,
            "fp32": _scores_json(self.fp32),
            "int8": _scores_json(self.int8),
            "agreement": self.agreement.to_json(),
            "noise": self.noise.to_json(),
            "limits": {
                check.name: {"limit": check.limit, "found": check.found, "exceeded": check.exceeded}
                for check in self.limits
            },
            "warnings": list(self.warnings),
        }


def evaluate(
    model: config.Model,
    images: ImageSet,
    *,
    labels: Path | None = None,
    int8_path: Path | None = None,
    save: Path | None = None,
    on_image: Callable[[], None] = lambda: None,
    open_pipeline: Callable[..., AbstractContextManager[Pipeline]] = process.open_pipeline,
) -> Evaluation:
    """Run both precisions of a model on the same pictures and compare them.

    Args:
        model: of the deployment; its ``evaluation.limits`` are checked.
        images: what to run on.
        labels: COCO JSON, for mAP.
        int8_path: a model file instead of the calibrated one.
        save: folder for the pictures that differ most, both answers side by side.
        on_image: called after each picture.
        open_pipeline: ``edge.process.open_pipeline``, or what a test puts in its place.

    Raises:
        ConfigError: mAP is asked for without labels, or of a classifier.
        DataError: the labels do not fit the pictures or the model.
        ModelError: a model cannot be run.
    """
    if save is not None:
        save.mkdir(parents=True, exist_ok=True)  # what cannot be written is known before the work
    limits = model.evaluation.limits if model.evaluation is not None else config.Limits()
    if labels is None and limits.map_drop is not None:
        raise ConfigError([f"models.{model.name}.evaluation.limits.map_drop needs evaluation.labels, or --labels"])
    if labels is not None and isinstance(model.task, config.Classification):
        raise ConfigError([f"models.{model.name}.evaluation.labels: mAP is about boxes, and this is a classifier"])
    truth = Truth.read(labels, [file.path for file in images.used]) if labels is not None else None
    compared = msgspec.structs.replace(model, task=_before_threshold(model.task))
    names = _class_names(model)
    total, noise = Agreement(), Agreement()
    twice = set(range(0, len(images), -(-len(images) // NOISE_IMAGES)))
    worst: list[tuple[tuple[float, ...], int, list[Detection], list[Detection]]] = []
    threshold = model.task.score
    with (
        open_pipeline(compared, precision="fp32") as fp32,
        open_pipeline(compared, precision="int8", path=int8_path) as int8,
    ):
        recorders = [_Recorder(pipeline, model.task, record=truth is not None) for pipeline in (fp32, int8)]
        for index, (file, image) in enumerate(zip(images.used, images, strict=True)):
            reference = recorders[0].detect(file.path, image)
            candidate = recorders[1].detect(file.path, image)
            if index in twice:
                noise += agreement(reference, fp32.detect(image), score=threshold)
            found = agreement(reference, candidate, score=threshold)
            total += found
            if save is not None:
                entry = (found.disagreement, -index, reference, candidate)  # of equals the first
                (heapq.heappush if len(worst) < WORST_IMAGES else heapq.heappushpop)(worst, entry)
            on_image()
    fp32_scores = int8_scores = None
    if truth is not None:
        names = recorders[0].class_names | recorders[1].class_names | names
        fp32_scores, int8_scores = (truth.score(recorder.rows, names) for recorder in recorders)
    if save is not None:
        _save(save, images, worst, threshold=threshold)
    return Evaluation(
        model=model.name,
        images=len(images),
        fp32=fp32_scores,
        int8=int8_scores,
        agreement=total,
        noise=noise,
        limits=_check_limits(limits, fp32_scores, int8_scores, total),
        warnings=tuple(_warnings(len(images), fp32_scores, total)),
    )


class _Both:
    """Decodes each inference twice: as the deployment does, and in COCO's standard setting."""

    def __init__(self, deployed: Task, standard: Task) -> None:
        self.layout = deployed.layout
        self.standard: list[Detection] = []
        self._deployed = deployed
        self._standard = standard

    def decode(self, outputs: Tensors, letterbox: Letterbox) -> list[Detection]:
        """Give the deployment's detections, and keep the others until the next call."""
        self.standard = self._standard.decode(outputs, letterbox)
        return self._deployed.decode(outputs, letterbox)


class _Recorder:
    """Runs one pipeline and, where mAP is wanted, keeps what it needs of every picture."""

    def __init__(self, pipeline: Pipeline, task: _TaskSection, *, record: bool) -> None:
        self.rows: dict[Path, NDArray[np.float64]] = {}
        self.class_names: dict[int, str] = {}
        """Of the classes that were found."""
        self._pipeline = pipeline
        self._both: _Both | None = None
        if record:
            assert not isinstance(task, config.Classification), "mAP is about boxes"
            standard = msgspec.structs.replace(task, score=MAP_SCORE, nms_iou=MAP_NMS_IOU)
            inputs, outputs = pipeline.engine.inputs, pipeline.engine.outputs
            self._both = _Both(pipeline.task, tasks.build(standard, inputs, outputs, source=pipeline.name))
            pipeline.task = self._both

    def detect(self, path: Path, image: Image) -> list[Detection]:
        """Detections of the deployment's task, from below its threshold on."""
        found = self._pipeline.detect(image)
        if self._both is not None:
            self.rows[path] = rows_of(self._both.standard)
            self.class_names.update((d.class_id, d.label) for d in self._both.standard)
        return found


def _before_threshold(task: _TaskSection) -> _TaskSection:
    """The deployment's task with a lower threshold, so that what lies just under its own is seen.

    Suppression goes by score, so the objects above the deployment's threshold stay the same ones.
    """
    if isinstance(task, config.Classification):
        return msgspec.structs.replace(task, top_k=max(2, task.top_k))
    score = max(0.0, task.score - BORDERLINE)
    if isinstance(task, config.DetectionTask):  # boxes are cheap, masks are not
        score = min(score, MAP_SCORE)
    return msgspec.structs.replace(task, score=score)


def _class_names(model: config.Model) -> dict[int, str]:
    """Of the classes that the deployment names and keeps."""
    task = model.task
    keep = () if isinstance(task, config.Classification) else task.keep
    known = task_labels.load(task.labels, keep=keep, classes=None, source=model.path)
    return {index: name for index, name in enumerate(known.names) if known.wanted is None or index in known.wanted}


def _check_limits(
    limits: config.Limits, fp32: Scores | None, int8: Scores | None, compared: Agreement
) -> tuple[LimitCheck, ...]:
    checks: list[LimitCheck] = []
    if limits.map_drop is not None and fp32 is not None and int8 is not None:
        drop = fp32.map - int8.map
        checks.append(LimitCheck("map_drop", limits.map_drop, drop, exceeded=drop > limits.map_drop))
    least: tuple[tuple[Literal["agreement", "mask_iou"], float | None, float | None], ...] = (
        ("agreement", limits.agreement, compared.share),
        ("mask_iou", limits.mask_iou, compared.mask_iou),
    )
    for name, limit, share in least:
        if limit is not None:
            checks.append(LimitCheck(name, limit, share, exceeded=share is None or share < limit))
    return tuple(checks)


def _warnings(images: int, scores: Scores | None, compared: Agreement) -> Iterable[str]:
    if scores is not None and scores.images < images:
        yield f"{images - scores.images} of {images} pictures have no labels; mAP is that of the other {scores.images}"
    if scores is not None and scores.ignored:
        yield f"categories without a class of the model are left out of mAP: {some(scores.ignored, 10)}"
    if compared.share is None:
        yield "FP32 finds no object clear of the score threshold: there is nothing to agree on; check images and task"


def _save(
    folder: Path,
    images: ImageSet,
    worst: list[tuple[tuple[float, ...], int, list[Detection], list[Detection]]],
    *,
    threshold: float,
) -> None:
    listed = folder / SAVED
    for name in listed.read_text(encoding="utf-8").splitlines() if listed.exists() else []:
        (folder / name).unlink(missing_ok=True)  # of an earlier evaluation: ranks would repeat
    written: list[str] = []
    for rank, (_, index, *answers) in enumerate(sorted(worst, key=lambda entry: entry[:2], reverse=True), start=1):
        shown = [[d for d in answer if d.score >= threshold] for answer in answers]
        picture = annotate.side_by_side(images.load(-index), {"FP32": shown[0], "INT8": shown[1]})
        written.append(f"{rank:02d}_{files.printable(images.used[-index].path.stem)[:_LONGEST_STEM]}.jpg")
        listed.write_text("\n".join(written), encoding="utf-8")
        annotate.write(folder / written[-1], picture)


def _scores_json(scores: Scores | None) -> dict[str, Any]:
    return {} if scores is None else {"map": scores.map, "map50": scores.map50, "images": scores.images}

"""What INT8 costs: the same pictures through the FP32 and the INT8 model, compared object by object, and COCO mAP.

Both models run in the daemon's own pipeline. Agreement is judged at the deployment's score threshold, mAP in COCO's
standard setting. Comparing is pure; only ``evaluate`` runs models, one picture at a time.
"""

from __future__ import annotations

import contextlib
import heapq
import io
from collections import Counter, defaultdict
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec
import numpy as np

from calibration import annotate
from edge import config, process, tasks
from edge.errors import ConfigError, DataError
from edge.tasks import labels as task_labels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from numpy.typing import NDArray

    from calibration.images import ImageSet
    from edge.process import Pipeline
    from edge.tasks import Task
    from edge.types import Detection, Image, Letterbox, Mask, Tensors

    _TaskSection: TypeAlias = config.DetectionTask | config.Segmentation | config.Classification

__all__ = ["Agreement", "Evaluation", "LimitCheck", "Scores", "agreement", "coco_map", "evaluate"]

MATCH_IOU = 0.5
"""Boxes of one label that overlap more are the same object."""

BORDERLINE = 0.02
"""An object whose FP32 score is this close to the threshold comes and goes with rounding: it is counted apart."""

MAP_SCORE, MAP_NMS_IOU = 0.01, 0.65
"""The setting in which detectors publish their COCO mAP."""

NOISE_IMAGES = 16
"""Pictures on which FP32 is run twice, to show what differs from run to run without INT8."""

WORST_IMAGES = 12
"""Pictures that ``save`` keeps."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far a candidate (INT8) gives the answers of the reference (FP32). Agreements of pictures add up.

    Objects are told apart by the reference's score: firm ones lie above the threshold by ``BORDERLINE`` or more,
    borderline ones within ``BORDERLINE`` of it on either side.
    """

    images: int = 0
    images_identical: int = 0
    """Where every object has its counterpart, or the classifier the same answer."""
    reference_candidates: int = 0
    """Objects before the threshold."""
    candidate_candidates: int = 0
    reference_objects: int = 0
    """Objects at or above the threshold."""
    candidate_objects: int = 0
    matched: int = 0
    """Pairs of objects, one-to-one, with one label and an IoU above ``MATCH_IOU``, both above the threshold."""
    firm: int = 0
    firm_matched: int = 0
    new: int = 0
    """Objects of the candidate without counterpart, other than borderline ones."""
    borderline: int = 0
    borderline_flipped: int = 0
    """Those that the candidate has on the other side of the threshold."""
    answers: int = 0
    """Pictures for which a classifier gave an answer, in either precision."""
    answers_equal: int = 0
    score_difference_sum: float = 0.0
    score_difference_max: float = 0.0
    """Of matched objects, or of the reference's answer."""
    score_differences: int = 0
    box_iou_sum: float = 0.0
    mask_iou_sum: float = 0.0
    masks_matched: int = 0
    mask_pixels: int = 0
    """Of all pictures in which an object has a mask."""
    mask_pixels_different: int = 0

    def __add__(self, other: Agreement) -> Agreement:
        sums = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        sums["score_difference_max"] = max(self.score_difference_max, other.score_difference_max)
        return Agreement(**sums)

    @property
    def share(self) -> float | None:
        """Share of the reference's firm objects (or answers) that the candidate gives as well; None without any."""
        if self.answers:
            return self.answers_equal / self.answers
        return self.firm_matched / self.firm if self.firm else None

    @property
    def lost(self) -> int:
        """Firm objects of the reference without counterpart."""
        return self.firm - self.firm_matched

    @property
    def disagreement(self) -> tuple[float, ...]:
        """Sorts pictures: the larger, the more the two disagree."""
        return (
            self.lost + self.new + self.answers - self.answers_equal,
            self.borderline_flipped,
            self.mask_pixels_different / max(1, self.mask_pixels),
            self.score_difference_max,
        )

    def to_json(self) -> dict[str, Any]:
        """JSON form. What cannot be said, such as the IoU of masks of a detector, is left out."""
        found: dict[str, Any] = {
            "share": self.share,
            "images": self.images,
            "images_identical": self.images_identical,
        }
        if self.answers:
            found |= {"answers": self.answers, "answers_equal": self.answers_equal}
            found |= {"near_ties": {"answers": self.borderline, "flipped": self.borderline_flipped}}
        else:
            found |= {
                "objects": {"reference": self.reference_objects, "candidate": self.candidate_objects},
                "before_threshold": {"reference": self.reference_candidates, "candidate": self.candidate_candidates},
                "matched": self.matched,
                "firm": {"objects": self.firm, "matched": self.firm_matched, "lost": self.lost, "new": self.new},
                "borderline": {"objects": self.borderline, "flipped": self.borderline_flipped},
            }
        if self.score_differences:
            mean = self.score_difference_sum / self.score_differences
            found["score_difference"] = {"mean": mean, "max": self.score_difference_max}
        if self.matched:
            found["box_iou"] = self.box_iou_sum / self.matched
        if self.masks_matched:
            found["mask_iou"] = self.mask_iou_sum / self.masks_matched
        if self.mask_pixels:
            found["mask_pixels_different"] = self.mask_pixels_different / self.mask_pixels
        return found


def agreement(
    reference: Sequence[Detection],
    candidate: Sequence[Detection],
    *,
    score: float,
    borderline: float = BORDERLINE,
) -> Agreement:
    """Compare what two models say about one picture.

    Args:
        reference: decoded with a threshold of ``score - borderline`` or lower.
        candidate: likewise.
        score: the deployment's threshold.
        borderline: distance from the threshold within which an object counts as borderline.
    """
    if any(d.box_xyxy is None for d in (*reference, *candidate)):
        return _answers(reference, candidate, score=score, borderline=borderline)
    ours = [d for d in reference if d.score >= score]
    theirs = [d for d in candidate if d.score >= score]
    pairs = _match(ours, theirs)
    found = {i for i, _, _ in pairs}
    firm = [i for i, d in enumerate(ours) if d.score >= score + borderline]
    # Objects that only the candidate has above the threshold; some of them the reference has just below it.
    extra = [d for j, d in enumerate(theirs) if j not in {j for _, j, _ in pairs}]
    below = [d for d in reference if score - borderline <= d.score < score]
    lifted = len(_match(below, extra))
    differences = [abs(ours[i].score - theirs[j].score) for i, j, _ in pairs]
    masks = [
        _mask_iou(a, b) for i, j, _ in pairs if (a := ours[i].mask) is not None and (b := theirs[j].mask) is not None
    ]
    pixels, different = _mask_difference(ours, theirs)
    firm_matched = len(found.intersection(firm))
    dropped = (len(ours) - len(firm)) - (len(pairs) - firm_matched)
    return Agreement(
        images=1,
        images_identical=int(len(pairs) == len(ours) == len(theirs)),
        reference_candidates=len(reference),
        candidate_candidates=len(candidate),
        reference_objects=len(ours),
        candidate_objects=len(theirs),
        matched=len(pairs),
        firm=len(firm),
        firm_matched=firm_matched,
        new=len(extra) - lifted,
        borderline=len(ours) - len(firm) + len(below),
        borderline_flipped=dropped + lifted,
        score_difference_sum=sum(differences),
        score_difference_max=max(differences, default=0.0),
        score_differences=len(differences),
        box_iou_sum=sum(iou for _, _, iou in pairs),
        mask_iou_sum=sum(masks),
        masks_matched=len(masks),
        mask_pixels=pixels,
        mask_pixels_different=different,
    )


def _answers(
    reference: Sequence[Detection], candidate: Sequence[Detection], *, score: float, borderline: float
) -> Agreement:
    """Compare two classifiers. Borderline is here a picture whose two best answers are that close to each other."""
    ours, theirs = (
        sorted((d for d in answers if d.score >= score), key=lambda d: -d.score) for answers in (reference, candidate)
    )
    equal = bool(ours and theirs and ours[0].label == theirs[0].label)
    same = next((d for d in candidate if ours and d.label == ours[0].label), None)
    difference = abs(ours[0].score - same.score) if same is not None else 0.0
    tied = len(ours) > 1 and ours[0].score - ours[1].score < borderline
    return Agreement(
        images=1,
        images_identical=int(equal or not (ours or theirs)),
        reference_candidates=len(reference),
        candidate_candidates=len(candidate),
        answers=int(bool(ours or theirs)),
        answers_equal=int(equal),
        borderline=int(tied),
        borderline_flipped=int(tied and not equal),
        score_difference_sum=difference,
        score_difference_max=difference,
        score_differences=int(same is not None),
    )


def _match(a: Sequence[Detection], b: Sequence[Detection]) -> list[tuple[int, int, float]]:
    """Pair objects one-to-one, largest IoU first: (index in ``a``, index in ``b``, IoU). Symmetric in its arguments."""
    if not a or not b:
        return []
    iou = _iou(_boxes(a), _boxes(b))
    labels_a, labels_b = (np.array([d.label for d in objects]) for objects in (a, b))
    iou[labels_a[:, None] != labels_b[None, :]] = 0.0
    rows, columns = np.nonzero(iou > MATCH_IOU)
    pairs: dict[int, tuple[int, int, float]] = {}
    taken: set[int] = set()
    for at in np.argsort(-iou[rows, columns], kind="stable"):
        i, j = int(rows[at]), int(columns[at])
        if i not in pairs and j not in taken:
            pairs[i] = (i, j, float(iou[i, j]))
            taken.add(j)
    return list(pairs.values())


def _boxes(detections: Sequence[Detection]) -> NDArray[np.float64]:
    return np.array([d.box_xyxy for d in detections], np.float64).reshape(-1, 4)


def _iou(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """(N, M) intersection over union of ``(N, 4)`` and ``(M, 4)`` boxes xyxy; 0 for empty boxes."""
    inner = np.minimum(a[:, None, 2:], b[None, :, 2:]) - np.maximum(a[:, None, :2], b[None, :, :2])
    intersection = np.prod(np.clip(inner, 0, None), axis=2)
    area_a, area_b = (np.prod(np.clip(boxes[:, 2:] - boxes[:, :2], 0, None), axis=1) for boxes in (a, b))
    union = area_a[:, None] + area_b[None, :] - intersection
    return np.asarray(np.divide(intersection, union, out=np.zeros_like(union), where=union > 0), np.float64)


def _mask_iou(a: Mask, b: Mask) -> float:
    """Of two masks of one picture; two empty masks are equal."""
    full_a, full_b = a.full(), b.full()
    union = np.count_nonzero(full_a | full_b)
    return np.count_nonzero(full_a & full_b) / union if union else 1.0


def _mask_difference(a: Sequence[Detection], b: Sequence[Detection]) -> tuple[int, int]:
    """Pixels of the picture, and those that are in a mask of one side only; (0, 0) where nothing has a mask."""
    sides: list[NDArray[np.bool_]] = []
    masks = [[d.mask for d in side if d.mask is not None] for side in (a, b)]
    if not any(masks):
        return 0, 0
    width, height = next(mask for side in masks for mask in side).source_wh
    for side in masks:
        union = np.zeros((height, width), np.bool_)
        for mask in side:
            x, y = mask.offset_xy
            union[y : y + mask.bits.shape[0], x : x + mask.bits.shape[1]] |= mask.bits
        sides.append(union)
    return width * height, int(np.count_nonzero(sides[0] ^ sides[1]))


# COCO mAP


@dataclass(frozen=True, slots=True)
class Scores:
    """COCO's mean average precision of boxes."""

    map: float
    """Over IoU thresholds 0.50 to 0.95."""
    map50: float
    """At an IoU of 0.50."""
    images: int
    """Labelled pictures it was measured on."""
    ignored: tuple[str, ...] = ()
    """Categories with objects in these pictures that the model does not know; they are left out of the mean."""


def coco_map(detections: Mapping[Path, Sequence[Detection]], labels: Path, *, class_names: Mapping[int, str]) -> Scores:
    """Score detections against boxes in COCO's format.

    Args:
        detections: by the picture's path, decoded with a low threshold.
        labels: COCO JSON. Only pictures that both sides know, by file name, are scored.
        class_names: of every class of the model. Categories are found by name; by their order where the model's
            classes have no names.

    Raises:
        DataError: the labels cannot be read, hold none of the pictures, or none of the classes.
    """
    truth = _Truth.read(labels, list(detections))
    return truth.score({path: _rows(found) for path, found in detections.items()}, class_names)


class _CocoImage(msgspec.Struct, frozen=True):
    id: int
    file_name: str


class _CocoAnnotation(msgspec.Struct, frozen=True):
    image_id: int
    category_id: int
    bbox: tuple[float, float, float, float]
    """Left, top, width, height."""
    area: float | None = None
    iscrowd: int = 0


class _CocoCategory(msgspec.Struct, frozen=True):
    id: int
    name: str


class _Coco(msgspec.Struct, frozen=True):
    images: list[_CocoImage]
    annotations: list[_CocoAnnotation]
    categories: list[_CocoCategory]


@dataclass(frozen=True, slots=True)
class _Truth:
    """Labels of the pictures that are evaluated."""

    source: Path
    image_ids: dict[Path, int]
    annotations: list[_CocoAnnotation]
    categories: list[_CocoCategory]

    @classmethod
    def read(cls, path: Path, pictures: Sequence[Path]) -> _Truth:
        try:
            content = msgspec.json.decode(path.read_bytes(), type=_Coco)
        except OSError as error:
            raise DataError(f"{path}: the labels cannot be read ({error.strerror})") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: is not COCO JSON ({error})") from None
        image_ids = _match_pictures(path, content.images, pictures)
        chosen = set(image_ids.values())
        annotations = [annotation for annotation in content.annotations if annotation.image_id in chosen]
        if not annotations:
            raise DataError(f"{path}: has no objects on the {len(chosen)} labelled pictures that are evaluated")
        return cls(path, image_ids, annotations, sorted(content.categories, key=lambda category: category.id))

    def score(self, detections: Mapping[Path, NDArray[np.float64]], class_names: Mapping[int, str]) -> Scores:
        """Score ``_rows`` by picture."""
        category_of = self._category_of(class_names)
        wanted = set(category_of.values())
        objects = Counter(annotation.category_id for annotation in self.annotations)
        names = {category.id: category.name for category in self.categories}
        found: list[NDArray[np.float64]] = [np.zeros((0, 7))]
        for path, rows in detections.items():
            known = np.array([row for row in rows if int(row[5]) in category_of], np.float64).reshape(-1, 6)
            if path in self.image_ids and len(known):
                x, y, right, bottom, score, index = known.T
                categories = [category_of[int(value)] for value in index]
                image = np.full(len(known), self.image_ids[path])
                found.append(np.stack([image, x, y, right - x, bottom - y, score, categories], axis=1))
        average, at_50 = _average_precision(self, sorted(wanted), np.concatenate(found))
        if average < 0:
            classes = _some(names[identity] for identity in sorted(wanted))
            raise DataError(f"{self.source}: has no object of the model's classes ({classes}) on these pictures")
        ignored = tuple(names.get(identity, str(identity)) for identity in objects if identity not in wanted)
        return Scores(average, at_50, len(self.image_ids), tuple(sorted(ignored)))

    def _category_of(self, class_names: Mapping[int, str]) -> dict[int, int]:
        by_name = {category.name.casefold(): category.id for category in self.categories}
        found = {index: by_name[name.casefold()] for index, name in class_names.items() if name.casefold() in by_name}
        if found:
            return found
        unnamed = all(name == f"class_{index}" for index, name in class_names.items())
        if class_names and unnamed and max(class_names) < len(self.categories):
            return {index: category.id for index, category in enumerate(self.categories)}
        raise DataError(
            f"{self.source}: none of its {len(self.categories)} categories"
            f" ({_some(category.name for category in self.categories)}) is a class of the model"
            f" ({_some(class_names.values())}); spell task.labels as the labels do"
        )


def _match_pictures(source: Path, images: Iterable[_CocoImage], pictures: Sequence[Path]) -> dict[Path, int]:
    """The image id of each picture that has labels."""
    by_name: dict[str, list[_CocoImage]] = defaultdict(list)
    for image in images:
        by_name[_posix(image).rsplit("/", 1)[-1]].append(image)
    found: dict[Path, int] = {}
    taken: dict[int, Path] = {}
    for picture in pictures:
        options = by_name.get(picture.name, [])
        if len(options) > 1:
            # val/1.jpg and train/1.jpg: the one whose folders agree as well
            options = [o for o in options if f"/{picture.as_posix()}".endswith(f"/{_posix(o)}")] or options
        if len(options) > 1:
            raise DataError(
                f"{source}: has {len(options)} images called {picture.name}; give them folders in file_name"
            )
        if not options:
            continue
        other = taken.setdefault(options[0].id, picture)
        if other != picture:
            raise DataError(f"{source}: {other} and {picture} are both its image {options[0].file_name}")
        found[picture] = options[0].id
    if not found:
        raise DataError(
            f"{source}: has none of the {len(pictures)} pictures, such as {_some(p.name for p in pictures)};"
            f" it has {_some(by_name)}"
        )
    return found


def _posix(image: _CocoImage) -> str:
    return image.file_name.replace("\\", "/")  # labelled on Windows


def _average_precision(truth: _Truth, categories: list[int], found: NDArray[np.float64]) -> tuple[float, float]:
    """AP 0.50:0.95 and AP 0.50 of ``(N, 7)`` rows: image id, x, y, width, height, score, category; -1 without truth."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    images = sorted(truth.image_ids.values())
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its progress
        reference = COCO()
        reference.dataset = {
            "images": [{"id": image} for image in images],
            "categories": [{"id": category.id, "name": category.name} for category in truth.categories],
            # Numbered from 1, whatever the file says: COCOeval takes an id of 0 for "no match".
            "annotations": [
                {
                    "id": number,
                    "image_id": a.image_id,
                    "category_id": a.category_id,
                    "bbox": list(a.bbox),
                    "area": a.bbox[2] * a.bbox[3] if a.area is None else a.area,
                    "iscrowd": a.iscrowd,
                }
                for number, a in enumerate(truth.annotations, start=1)
            ],
        }
        reference.createIndex()
        if not len(found):  # which loadRes cannot load
            known = any(a.category_id in categories and not a.iscrowd for a in truth.annotations)
            return (0.0, 0.0) if known else (-1.0, -1.0)
        evaluation = COCOeval(reference, reference.loadRes(found), "bbox")
        evaluation.params.imgIds = images
        evaluation.params.catIds = categories
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return float(evaluation.stats[0]), float(evaluation.stats[1])


def _rows(detections: Iterable[Detection]) -> NDArray[np.float64]:
    """(N, 6) x1, y1, x2, y2, score, class index: what mAP needs, in a fraction of the memory."""
    rows = [(*d.box_xyxy, d.score, d.class_id) for d in detections if d.box_xyxy is not None]
    return np.array(rows, np.float64).reshape(-1, 6)


def _some(names: Iterable[str], most: int = 3) -> str:
    listed = list(names)
    return ", ".join(listed[:most]) + (", ..." if len(listed) > most else "")


# Running both models


@dataclass(frozen=True, slots=True)
class LimitCheck:
    """A limit of the deployment, and what was found."""

    name: Literal["map_drop", "agreement"]
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
    limits = model.evaluation.limits if model.evaluation is not None else config.Limits()
    if labels is None and limits.map_drop is not None:
        raise ConfigError([f"models.{model.name}.evaluation.limits.map_drop needs evaluation.labels, or --labels"])
    if labels is not None and isinstance(model.task, config.Classification):
        raise ConfigError([f"models.{model.name}.evaluation.labels: mAP is about boxes, and this is a classifier"])
    truth = _Truth.read(labels, [file.path for file in images.used]) if labels is not None else None
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
            self.rows[path] = _rows(self._both.standard)
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
    if limits.agreement is not None:
        share = compared.share
        exceeded = share is None or share < limits.agreement
        checks.append(LimitCheck("agreement", limits.agreement, share, exceeded=exceeded))
    return tuple(checks)


def _warnings(images: int, scores: Scores | None, compared: Agreement) -> Iterable[str]:
    if scores is not None and scores.images < images:
        yield f"{images - scores.images} of {images} pictures have no labels; mAP is that of the other {scores.images}"
    if scores is not None and scores.ignored:
        yield f"categories without a class of the model are left out of mAP: {_some(scores.ignored, 10)}"
    if compared.share is None:
        yield "FP32 finds no object clear of the score threshold: there is nothing to agree on; check images and task"


def _save(
    folder: Path,
    images: ImageSet,
    worst: list[tuple[tuple[float, ...], int, list[Detection], list[Detection]]],
    *,
    threshold: float,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for rank, (_, index, *answers) in enumerate(sorted(worst, key=lambda entry: entry[:2], reverse=True), start=1):
        shown = [[d for d in answer if d.score >= threshold] for answer in answers]
        picture = annotate.side_by_side(images.load(-index), {"FP32": shown[0], "INT8": shown[1]})
        annotate.write(folder / f"{rank:02d}_{images.used[-index].path.stem}.jpg", picture)


def _scores_json(scores: Scores | None) -> dict[str, Any]:
    return {} if scores is None else {"map": scores.map, "map50": scores.map50, "images": scores.images}

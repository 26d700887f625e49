"""How far two models give the same answers, object by object. Pure: detections in, counts out."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from edge import config

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from edge.types import Detection, Mask

__all__ = ["BORDERLINE", "MATCH_IOU", "Agreement", "agreement", "below_threshold", "closeness"]

MATCH_IOU = 0.5
"""Boxes of one label that overlap more are the same object."""

BORDERLINE = 0.02
"""An object whose FP32 score is this close to the threshold comes and goes with rounding: it is counted apart."""


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
    mask_union: int = 0
    """Pixels that are in a mask of either side."""

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
    def mask_iou(self) -> float | None:
        """IoU of all masks of one side with all of the other, over all pictures; None without any."""
        return 1 - self.mask_pixels_different / self.mask_union if self.mask_union else None

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
            found["mask_iou_of_all"] = self.mask_iou
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
    pixels, different, union = _mask_difference(ours, theirs)
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
        mask_union=union,
    )


def closeness(reference: Sequence[Detection], candidate: Sequence[Detection]) -> float | None:
    """How close two models' answers to one picture are, from 0 to 1, finer than objects can be counted.

    Objects are paired as in ``agreement``. A pair gives the IoU of its masks, or else of its boxes, less the share by
    which the scores differ; an object without counterpart gives 0; each weighs as much as its score. Where there are
    masks, the IoU of all of them together counts as much as all that. For a classifier it is half for the same first
    answer, and half for how far the two lists of scores overlap.

    Returns:
        None where neither side has anything.
    """
    if not (reference or candidate):
        return None
    if any(d.box_xyxy is None for d in (*reference, *candidate)):
        return _answers_closeness(reference, candidate)
    pairs = _match(reference, candidate)
    alone = [d.score for i, d in enumerate(reference) if i not in {i for i, _, _ in pairs}]
    alone += [d.score for j, d in enumerate(candidate) if j not in {j for _, j, _ in pairs}]
    weight, found = sum(alone), 0.0
    for i, j, box_iou in pairs:
        a, b = reference[i], candidate[j]
        iou = _mask_iou(a.mask, b.mask) if a.mask is not None and b.mask is not None else box_iou
        heavier = max(a.score, b.score)
        weight += heavier
        found += heavier * iou * (1 - abs(a.score - b.score))
    objects = found / weight if weight else 1.0
    _, different, union = _mask_difference(reference, candidate)
    return (objects + 1 - different / union) / 2 if union else objects


def below_threshold(
    task: config.DetectionTask | config.Segmentation | config.Classification,
) -> config.DetectionTask | config.Segmentation | config.Classification:
    """The task that ``closeness`` wants: with half its threshold there are more objects, each weighing its score."""
    if isinstance(task, config.Classification):
        return msgspec.structs.replace(task, score=0.0)
    return msgspec.structs.replace(task, score=task.score / 2)


def _answers_closeness(reference: Sequence[Detection], candidate: Sequence[Detection]) -> float:
    ours, theirs = ({d.class_id: d.score for d in answers} for answers in (reference, candidate))
    both = [(ours.get(key, 0.0), theirs.get(key, 0.0)) for key in {**ours, **theirs}]
    most = sum(max(pair) for pair in both)
    overlap = sum(min(pair) for pair in both) / most if most else 1.0
    first, second = (max(scores, key=lambda key: scores[key], default=None) for scores in (ours, theirs))
    return 0.5 * (first == second) + 0.5 * overlap


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


def _mask_difference(a: Sequence[Detection], b: Sequence[Detection]) -> tuple[int, int, int]:
    """Pixels of the picture, those in a mask of one side only, and those in any; zeros where nothing has a mask."""
    sides: list[NDArray[np.bool_]] = []
    masks = [[d.mask for d in side if d.mask is not None] for side in (a, b)]
    if not any(masks):
        return 0, 0, 0
    width, height = next(mask for side in masks for mask in side).source_wh
    for side in masks:
        union = np.zeros((height, width), np.bool_)
        for mask in side:
            x, y = mask.offset_xy
            union[y : y + mask.bits.shape[0], x : x + mask.bits.shape[1]] |= mask.bits
        sides.append(union)
    a_side, b_side = sides
    return width * height, int(np.count_nonzero(a_side ^ b_side)), int(np.count_nonzero(a_side | b_side))

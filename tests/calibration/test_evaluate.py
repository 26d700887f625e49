"""Comparing two sets of answers, COCO mAP, and running both precisions."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration import console, images
from calibration.agreement import Agreement, _iou, _match, agreement
from calibration.coco import Scores, coco_map
from calibration.evaluate import evaluate
from edge import config, tasks
from edge.errors import ConfigError, DataError
from edge.image import Preprocessor
from edge.process import Pipeline
from edge.types import Detection, Mask, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from typing_extensions import Self

Box = tuple[float, float, float, float]


def found(score: float, box: Box = (0, 0, 100, 100), *, label: str = "person", mask: Mask | None = None) -> Detection:
    return Detection(label, {"person": 0, "car": 1, "dog": 2}[label], score, box, mask)


def compare(reference: Sequence[Detection], candidate: Sequence[Detection]) -> Agreement:
    return agreement(reference, candidate, score=0.5, borderline=0.02)


LEFT: Box = (0, 0, 100, 100)
RIGHT: Box = (200, 0, 300, 100)


class TestMatching:
    def test_iou_of_hand_worked_boxes(self) -> None:
        boxes = np.array([[0, 0, 10, 10], [5, 0, 15, 10], [20, 20, 30, 30], [3, 3, 3, 9]], np.float64)

        iou = _iou(boxes[:1], boxes)

        assert iou.tolist() == [[1.0, pytest.approx(50 / 150), 0.0, 0.0]]

    def test_label_must_be_the_same(self) -> None:
        assert _match([found(0.9)], [found(0.9, label="car")]) == []

    def test_overlap_of_exactly_half_is_no_match(self) -> None:
        assert _match([found(0.9, (0, 0, 10, 10))], [found(0.9, (0, 0, 10, 5))]) == []

    def test_each_object_is_matched_once_and_the_largest_overlap_wins(self) -> None:
        near, far = (0, 0, 100, 95), (0, 0, 100, 80)

        assert _match([found(0.9, far), found(0.6)], [found(0.9, near)]) == [(1, 0, pytest.approx(0.95))]

    @given(st.data())
    def test_equals_a_slow_search_and_is_symmetric(self, data: st.DataObject) -> None:
        side = st.integers(0, 6)
        box = st.tuples(side, side, st.integers(1, 6), st.integers(1, 6)).map(
            lambda b: (float(b[0]), float(b[1]), float(b[0] + b[2]), float(b[1] + b[3]))
        )
        objects = st.lists(st.builds(found, st.floats(0, 1), box, label=st.sampled_from(["person", "car"])), max_size=7)
        a, b = data.draw(objects), data.draw(objects)

        pairs = _match(a, b)

        assert sorted(iou for *_, iou in pairs) == pytest.approx(sorted(slow_match(a, b)))
        assert sorted(iou for *_, iou in _match(b, a)) == pytest.approx(sorted(iou for *_, iou in pairs))
        assert len({i for i, _, _ in pairs}) == len({j for _, j, _ in pairs}) == len(pairs)


def slow_match(a: Sequence[Detection], b: Sequence[Detection]) -> list[float]:
    """IoUs of the pairs, found by looking at all that are left again and again.

    Equal overlaps are broken by position, as in the tested code, since another choice can leave other pairs over.
    """
    left, right = list(range(len(a))), list(range(len(b)))
    ious: list[float] = []
    while True:
        best: tuple[float, int, int] | None = None
        for i in left:
            for j in right:
                iou = scalar_iou(a[i], b[j])
                if a[i].label == b[j].label and iou > 0.5 and (best is None or iou > best[0]):
                    best = (iou, i, j)
        if best is None:
            return ious
        ious.append(best[0])
        left.remove(best[1])
        right.remove(best[2])


def scalar_iou(a: Detection, b: Detection) -> float:
    assert a.box_xyxy is not None
    assert b.box_xyxy is not None
    (ax1, ay1, ax2, ay2), (bx1, by1, bx2, by2) = a.box_xyxy, b.box_xyxy
    inner = max(0.0, min(ax2, bx2) - max(ax1, bx1)) * max(0.0, min(ay2, by2) - max(ay1, by1))
    return inner / ((ax2 - ax1) * (ay2 - ay1) + (bx2 - bx1) * (by2 - by1) - inner)


class TestAgreement:
    def test_identical_answers_agree_in_everything(self) -> None:
        answer = [found(0.9, LEFT), found(0.6, RIGHT, label="car"), found(0.1, RIGHT)]

        result = compare(answer, answer)

        assert result.share == 1.0
        assert result.images_identical == 1
        assert (result.reference_objects, result.candidate_objects, result.matched) == (2, 2, 2)
        assert (result.reference_candidates, result.candidate_candidates) == (3, 3)
        assert result.score_difference_max == 0.0
        assert result.box_iou_sum == 2.0
        assert (result.lost, result.new, result.borderline, result.borderline_flipped) == (0, 0, 0, 0)

    def test_object_missed_and_object_made_up(self) -> None:
        result = compare([found(0.9, LEFT), found(0.8, RIGHT)], [found(0.85, LEFT), found(0.7, RIGHT, label="dog")])

        assert result.share == 0.5
        assert (result.matched, result.lost, result.new, result.images_identical) == (1, 1, 1, 0)
        assert result.score_difference_max == pytest.approx(0.05)

    def test_score_that_sinks_below_the_threshold_is_a_loss(self) -> None:
        result = compare([found(0.53)], [found(0.49)])

        assert (result.firm, result.lost, result.borderline_flipped) == (1, 1, 0)

    def test_object_just_above_the_threshold_that_sinks_is_counted_apart(self) -> None:
        result = compare([found(0.9, RIGHT), found(0.51, LEFT)], [found(0.9, RIGHT), found(0.49, LEFT)])

        assert (result.borderline, result.borderline_flipped) == (1, 1)
        assert (result.share, result.lost, result.images_identical) == (1.0, 0, 0)

    def test_object_just_below_the_threshold_that_rises_is_counted_apart(self) -> None:
        result = compare([found(0.9, RIGHT), found(0.49, LEFT)], [found(0.9, RIGHT), found(0.6, LEFT)])

        assert (result.borderline, result.borderline_flipped, result.new) == (1, 1, 0)

    def test_borderline_object_that_stays_has_not_flipped(self) -> None:
        result = compare([found(0.51)], [found(0.515)])

        assert (result.borderline, result.borderline_flipped, result.matched, result.images_identical) == (1, 0, 1, 1)
        assert result.share is None

    def test_empty_pictures_agree_but_show_nothing(self) -> None:
        result = compare([], [])

        assert result.images_identical == 1
        assert result.share is None

    def test_masks_are_compared_in_the_picture(self) -> None:
        wide, narrow = (
            Mask(np.ones((10, 20), np.bool_), (0, 0), (40, 30)),
            Mask(np.ones((10, 15), np.bool_), (5, 0), (40, 30)),
        )

        result = compare([found(0.9, mask=wide)], [found(0.9, mask=narrow)])

        assert result.mask_iou_sum == 0.75
        assert (result.mask_pixels, result.mask_pixels_different) == (1200, 50)
        assert result.to_json()["mask_pixels_different"] == pytest.approx(50 / 1200)

    def test_mask_without_counterpart_differs_in_all_its_pixels(self) -> None:
        mask = Mask(np.ones((10, 20), np.bool_), (3, 4), (40, 30))

        result = compare([found(0.9, mask=mask)], [])

        assert (result.mask_pixels, result.mask_pixels_different, result.masks_matched) == (1200, 200, 0)

    def test_iou_of_all_masks_is_over_all_pictures(self) -> None:
        """A union of 200 pixels that differ in 50, and one of 100 that differ in all: 150 of 300."""
        whole = Mask(np.ones((10, 20), np.bool_), (0, 0), (40, 30))
        part = Mask(np.ones((10, 15), np.bool_), (0, 0), (40, 30))
        small = Mask(np.ones((10, 10), np.bool_), (20, 5), (40, 30))

        near, lost = (
            compare([found(0.9, mask=whole)], [found(0.9, mask=part)]),
            compare([found(0.9, mask=small)], []),
        )

        assert (near.mask_union, lost.mask_union) == (200, 100)
        assert (near.mask_iou, lost.mask_iou) == (0.75, 0.0)
        assert (near + lost).mask_iou == pytest.approx(0.5)
        assert (near + lost).to_json()["mask_iou_of_all"] == pytest.approx(0.5)

    def test_masks_of_objects_below_the_threshold_do_not_count(self) -> None:
        mask = Mask(np.ones((10, 20), np.bool_), (0, 0), (40, 30))

        assert compare([found(0.9, mask=mask)], [found(0.9, mask=mask), found(0.1, mask=mask)]).mask_iou == 1.0
        assert compare([found(0.1, mask=mask)], []).mask_iou is None

    def test_without_masks_their_iou_is_unknown(self) -> None:
        result = compare([found(0.9)], [found(0.9)])

        assert result.mask_iou is None
        assert "mask_iou_of_all" not in result.to_json()
        assert compare([], []).mask_iou is None

    def test_agreements_of_pictures_add_up(self) -> None:
        good = compare([found(0.9)], [found(0.8)])
        bad = compare([found(0.9), found(0.7, RIGHT)], [found(0.87)])

        total = good + bad

        assert total.images == 2
        assert total.share == pytest.approx(2 / 3)
        assert total.score_difference_max == pytest.approx(0.1)
        assert total.to_json()["score_difference"]["mean"] == pytest.approx((0.1 + 0.03) / 2)
        assert Agreement() + total == total

    def test_worse_picture_sorts_higher(self) -> None:
        lost = compare([found(0.9)], [])
        flipped = compare([found(0.51)], [found(0.49)])
        shifted = compare([found(0.9)], [found(0.7)])

        assert lost.disagreement > flipped.disagreement > shifted.disagreement

    @given(
        st.lists(st.floats(0, 1), max_size=8),
        st.lists(st.floats(0, 1), max_size=8),
    )
    def test_counts_always_add_up(self, ours: list[float], theirs: list[float]) -> None:
        # object k of both sides lies at the same place
        reference, candidate = (
            [found(score, (200.0 * k, 0, 200.0 * k + 100, 100)) for k, score in enumerate(scores)]
            for scores in (ours, theirs)
        )

        result = compare(reference, candidate)

        dropped = result.reference_objects - result.matched - result.lost
        lifted = result.candidate_objects - result.matched - result.new
        assert dropped >= 0
        assert lifted >= 0
        assert result.borderline_flipped == dropped + lifted <= result.borderline
        assert result.firm_matched <= min(result.firm, result.matched)


class TestClassifiers:
    @staticmethod
    def answers(**scores: float) -> list[Detection]:
        return [Detection(name, index, score) for index, (name, score) in enumerate(scores.items())]

    def test_top_answer_decides(self) -> None:
        same = agreement(self.answers(cat=0.7, dog=0.2), self.answers(cat=0.6, dog=0.3), score=0.0)
        other = agreement(self.answers(cat=0.7, dog=0.2), self.answers(cat=0.4, dog=0.5), score=0.0)

        total = same + other

        assert total.share == 0.5
        assert total.images_identical == 1
        assert total.score_difference_max == pytest.approx(0.3)
        assert total.to_json()["answers"] == 2
        assert "objects" not in total.to_json()

    def test_near_tie_is_counted_apart(self) -> None:
        result = agreement(self.answers(cat=0.45, dog=0.44), self.answers(cat=0.44, dog=0.45), score=0.0)

        assert (result.borderline, result.borderline_flipped) == (1, 1)

    def test_answer_below_the_threshold_is_none(self) -> None:
        result = agreement(self.answers(cat=0.7), self.answers(cat=0.2), score=0.5)

        assert (result.answers, result.answers_equal) == (1, 0)


# COCO mAP


def labels_file(folder: Path, annotations: list[dict[str, Any]], **parts: Any) -> Path:
    """Labels of 1.jpg and 2.jpg with the categories dog (17), person (1) and car (3)."""
    document = {
        "images": [{"id": 1, "file_name": "1.jpg"}, {"id": 2, "file_name": "2.jpg"}],
        "categories": [{"id": 17, "name": "dog"}, {"id": 1, "name": "person"}, {"id": 3, "name": "car"}],
        "annotations": annotations,
    }
    path = folder / "labels.json"
    path.write_text(json.dumps(document | parts))
    return path


def truth(image: int, bbox: list[float], category: int = 1, **more: Any) -> dict[str, Any]:
    return {"image_id": image, "category_id": category, "bbox": bbox, **more}


def scored(average: float, at_50: float, *, images: int, ignored: tuple[str, ...] = ()) -> Scores:
    """Scores to compare with: COCOeval adds a rounding error to every precision."""
    return Scores(pytest.approx(average), pytest.approx(at_50), images, ignored)


NAMES = {0: "person", 1: "car", 2: "dog"}
ONE = Path("set/1.jpg")
TWO = Path("set/2.jpg")


class TestCocoMap:
    def test_perfect_detections_score_one(self, tmp_path: Path) -> None:
        labels = labels_file(tmp_path, [truth(1, [0, 0, 100, 100]), truth(2, [200, 0, 100, 100], 3)])

        scores = coco_map({ONE: [found(0.9)], TWO: [found(0.4, RIGHT, label="car")]}, labels, class_names=NAMES)

        assert scores == scored(1.0, 1.0, images=2)

    def test_overlap_decides_at_which_thresholds_an_object_counts(self, tmp_path: Path) -> None:
        """IoU 0.62 is a hit at 0.50, 0.55 and 0.60 and a miss at the seven thresholds above."""
        labels = labels_file(tmp_path, [truth(1, [0, 0, 100, 100])])

        scores = coco_map({ONE: [found(0.9, (0, 0, 100, 62))]}, labels, class_names=NAMES)

        assert scores.map == pytest.approx(0.3)
        assert scores.map50 == pytest.approx(1.0)

    def test_half_of_the_objects_found(self, tmp_path: Path) -> None:
        """Precision is 1 at the recalls 0.00, 0.01 ... 0.50: 51 of COCO's 101 points."""
        labels = labels_file(tmp_path, [truth(1, [0, 0, 100, 100]), truth(1, [200, 0, 100, 100])])

        scores = coco_map({ONE: [found(0.9, LEFT)]}, labels, class_names=NAMES)

        assert scores.map == pytest.approx(51 / 101)

    def test_false_alarm_ahead_of_the_hit_halves_precision(self, tmp_path: Path) -> None:
        labels = labels_file(tmp_path, [truth(1, [0, 0, 100, 100])])

        scores = coco_map({ONE: [found(0.9, RIGHT), found(0.8, LEFT)]}, labels, class_names=NAMES)

        assert scores.map50 == pytest.approx(0.5)

    def test_mean_is_over_the_classes(self, tmp_path: Path) -> None:
        labels = labels_file(tmp_path, [truth(1, [0, 0, 100, 100], 1), truth(1, [200, 0, 100, 100], 3)])

        assert coco_map({ONE: [found(0.9)]}, labels, class_names=NAMES).map == pytest.approx(0.5)

    def test_nothing_found_scores_zero(self, tmp_path: Path) -> None:
        labels = labels_file(tmp_path, [truth(1, [0, 0, 100, 100])])

        assert coco_map({ONE: [], TWO: []}, labels, class_names=NAMES) == scored(0.0, 0.0, images=2)

    def test_only_pictures_of_both_sides_are_scored(self, tmp_path: Path) -> None:
        labels = labels_file(tmp_path, [truth(1, [0, 0, 100, 100]), truth(2, [0, 0, 100, 100])])

        scores = coco_map({ONE: [found(0.9)], Path("set/3.jpg"): [found(0.95)]}, labels, class_names=NAMES)

        assert scores == scored(1.0, 1.0, images=1)

    def test_crowd_is_neither_missed_nor_a_false_alarm(self, tmp_path: Path) -> None:
        labels = labels_file(tmp_path, [truth(1, [0, 0, 100, 100]), truth(1, [200, 0, 100, 100], iscrowd=1)])

        assert coco_map({ONE: [found(0.9, RIGHT), found(0.8)]}, labels, class_names=NAMES).map == pytest.approx(1.0)

    def test_annotation_number_zero_counts(self, tmp_path: Path) -> None:
        """COCOeval takes the id 0 for "no match"."""
        labels = labels_file(tmp_path, [truth(1, [0, 0, 100, 100], id=0)])

        assert coco_map({ONE: [found(0.9)]}, labels, class_names=NAMES).map == pytest.approx(1.0)

    def test_names_match_in_any_case_and_order(self, tmp_path: Path) -> None:
        labels = labels_file(tmp_path, [truth(1, [0, 0, 100, 100], 17)])

        assert coco_map(
            {ONE: [found(0.9, label="dog")]}, labels, class_names={2: "Dog", 0: "Person"}
        ).map == pytest.approx(1.0)

    def test_classes_without_names_go_by_order_of_category_ids(self, tmp_path: Path) -> None:
        labels = labels_file(tmp_path, [truth(1, [0, 0, 100, 100], 3)])
        detection = Detection("class_1", 1, 0.9, (0, 0, 100, 100))

        assert coco_map({ONE: [detection]}, labels, class_names={1: "class_1"}).map == pytest.approx(1.0)

    def test_category_that_the_model_lacks_is_left_out_and_named(self, tmp_path: Path) -> None:
        labels = labels_file(tmp_path, [truth(1, [0, 0, 100, 100]), truth(1, [200, 0, 100, 100], 17)])

        scores = coco_map({ONE: [found(0.9), found(0.95, RIGHT, label="dog")]}, labels, class_names={0: "person"})

        assert scores == scored(1.0, 1.0, images=1, ignored=("dog",))

    def test_class_without_a_category_is_left_out(self, tmp_path: Path) -> None:
        labels = labels_file(tmp_path, [truth(1, [0, 0, 100, 100])])

        scores = coco_map({ONE: [found(0.9)]}, labels, class_names={0: "person", 9: "robot"})

        assert scores.map == pytest.approx(1.0)

    def test_folders_tell_pictures_of_one_name_apart(self, tmp_path: Path) -> None:
        pictures = [{"id": 1, "file_name": "day\\1.jpg"}, {"id": 2, "file_name": "night\\1.jpg"}]
        labels = labels_file(tmp_path, [truth(2, [0, 0, 100, 100])], images=pictures)

        assert coco_map({Path("a/night/1.jpg"): [found(0.9)]}, labels, class_names=NAMES).map == pytest.approx(1.0)

    def test_prints_nothing(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        coco_map({ONE: [found(0.9)]}, labels_file(tmp_path, [truth(1, [0, 0, 9, 9])]), class_names=NAMES)

        assert capfd.readouterr() == ("", "")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", r"labels\.json: is not COCO JSON \(Input data was truncated\)"),
            ("[]", r"is not COCO JSON \(Expected `object`, got `array`\)"),
            ('{"images": [], "annotations": []}', "missing required field `categories`"),
            (
                '{"images": [{"id": 1, "file_name": 7}], "annotations": [], "categories": []}',
                r"`\$\.images\[0\]\.file_name`",
            ),
        ],
    )
    def test_file_that_is_no_labels_is_an_error(self, tmp_path: Path, text: str, message: str) -> None:
        path = tmp_path / "labels.json"
        path.write_text(text)

        with pytest.raises(DataError, match=message):
            coco_map({ONE: []}, path, class_names=NAMES)

    def test_missing_file_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"labels cannot be read \(No such file or directory\)"):
            coco_map({ONE: []}, tmp_path / "labels.json", class_names=NAMES)

    def test_labels_of_other_pictures_are_an_error(self, tmp_path: Path) -> None:
        labels = labels_file(tmp_path, [truth(1, [0, 0, 9, 9])])

        with pytest.raises(DataError, match=r"has none of the 1 pictures, such as 7\.jpg; it has 1\.jpg, 2\.jpg"):
            coco_map({Path("7.jpg"): []}, labels, class_names=NAMES)

    def test_pictures_without_objects_are_an_error(self, tmp_path: Path) -> None:
        labels = labels_file(tmp_path, [truth(1, [0, 0, 9, 9])])

        with pytest.raises(DataError, match="has no objects on the 1 labelled pictures"):
            coco_map({TWO: []}, labels, class_names=NAMES)

    def test_labels_of_other_classes_are_an_error(self, tmp_path: Path) -> None:
        labels = labels_file(tmp_path, [truth(1, [0, 0, 9, 9])])

        with pytest.raises(
            DataError, match=r"none of its 3 categories \(person, car, dog\) is a class of .* \(Mensch\)"
        ):
            coco_map({ONE: []}, labels, class_names={0: "Mensch"})

    @pytest.mark.parametrize("answer", [[], [found(0.9)]])
    def test_no_object_of_the_models_classes_is_an_error(self, tmp_path: Path, answer: list[Detection]) -> None:
        labels = labels_file(tmp_path, [truth(1, [0, 0, 9, 9], 17)])

        with pytest.raises(DataError, match=r"has no object of the model's classes \(person, car\)"):
            coco_map({ONE: answer}, labels, class_names={0: "person", 1: "car"})

    def test_ambiguous_picture_is_an_error(self, tmp_path: Path) -> None:
        pictures = [{"id": 1, "file_name": "a/1.jpg"}, {"id": 2, "file_name": "b/1.jpg"}]
        labels = labels_file(tmp_path, [truth(1, [0, 0, 9, 9])], images=pictures)

        with pytest.raises(DataError, match=r"has 2 images called 1\.jpg"):
            coco_map({ONE: []}, labels, class_names=NAMES)

    def test_two_pictures_with_one_label_are_an_error(self, tmp_path: Path) -> None:
        labels = labels_file(tmp_path, [truth(1, [0, 0, 9, 9])])

        with pytest.raises(DataError, match=r"day/1\.jpg and night/1\.jpg are both its image 1\.jpg"):
            coco_map({Path("day/1.jpg"): [], Path("night/1.jpg"): []}, labels, class_names=NAMES)

    def test_published_score_of_a_real_detector(self, data: Path) -> None:
        """YOLOX-Nano decoded as YOLOX's own ONNX demo does it: data/README.md says 0.351 and 0.524."""
        onnxruntime = pytest.importorskip("onnxruntime")
        session = onnxruntime.InferenceSession(str(data / "models/yolox_nano.onnx"), providers=["CPUExecutionProvider"])
        pictures = images.collect(str(data / "images"))
        names = tasks.labels.load("coco80", classes=80, source="yolox").names

        detections = {
            file.path: yolox(session, image, names) for file, image in zip(pictures.used, pictures, strict=True)
        }
        scores = coco_map(detections, data / "labels.json", class_names=dict(enumerate(names)))

        assert scores.map == pytest.approx(0.351, abs=0.0006)
        assert scores.map50 == pytest.approx(0.524, abs=0.0006)
        assert scores.images == len(pictures)


def yolox(session: Any, image: NDArray[np.uint8], names: Sequence[str]) -> list[Detection]:
    """Every class of every row above 0.01, suppressed class by class at 0.65, not clipped to the picture."""
    height, width = image.shape[:2]
    ratio = min(416 / width, 416 / height)
    canvas = np.full((416, 416, 3), 114, np.uint8)
    canvas[: int(height * ratio), : int(width * ratio)] = cv2.resize(image, (int(width * ratio), int(height * ratio)))
    (table,) = session.run(None, {"images": canvas.transpose(2, 0, 1)[None].astype(np.float32)})[0]
    cells = np.concatenate([np.stack(np.mgrid[:n, :n][::-1], -1).reshape(-1, 2) for n in (52, 26, 13)])
    strides = np.repeat([8, 16, 32], [52**2, 26**2, 13**2])[:, None]
    centres, sizes = (table[:, :2] + cells) * strides, np.exp(table[:, 2:4]) * strides
    boxes = np.concatenate([centres - sizes / 2, centres + sizes / 2], axis=1) / ratio
    scores = table[:, 4:5] * table[:, 5:]
    rows, classes = np.nonzero(scores > 0.01)
    detections: list[Detection] = []
    for index in np.unique(classes):
        chosen = rows[classes == index]
        rects = np.concatenate([boxes[chosen, :2], boxes[chosen, 2:] - boxes[chosen, :2]], axis=1)
        for kept in cv2.dnn.NMSBoxes(rects.tolist(), scores[chosen, index].tolist(), 0.0, 0.65):
            row = chosen[kept]
            detections.append(
                Detection(names[index], int(index), float(scores[row, index]), tuple(boxes[row].tolist()))
            )
    return detections


# Running both precisions

Tables = dict[int, list[tuple[float, ...]]]
"""By picture: rows of x1, y1, x2, y2, score, class."""


class TableEngine:
    """Answers from a table. A picture says which row it wants by its grey level, 10 a step."""

    description = "a table"
    inputs = (TensorSpec("images", (1, 3, 64, 64), np.dtype(np.float32)),)
    outputs = (TensorSpec("output", (1, 5, 6), np.dtype(np.float32)),)

    def __init__(self, tables: Tables) -> None:
        self.calls = 0
        self._tables = tables

    def infer(self, tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        self.calls += 1
        rows = self._tables[round(float(tensors["images"].mean()) / 10)]
        output = np.full((1, 5, 6), -1, np.float32)
        output[0, : len(rows)] = np.reshape(rows, (-1, 6))
        return {"output": output}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class Opener:
    """Stands in for ``open_pipeline``: one table for each precision."""

    def __init__(self, fp32: Tables, int8: Tables) -> None:
        self.engines = {"fp32": TableEngine(fp32), "int8": TableEngine(int8)}
        self.paths: list[Path | None] = []

    @contextmanager
    def __call__(self, model: config.Model, *, precision: str, path: Path | None = None) -> Iterator[Pipeline]:
        engine = self.engines[precision]
        self.paths.append(path)
        task = tasks.build(model.task, engine.inputs, engine.outputs, source=precision)
        yield Pipeline(model.name, Preprocessor(model.input, engine.inputs[0]), engine, task, precision=precision)


def model(folder: Path, *, limits: config.Limits | None = None, **task: Any) -> config.Model:
    section = {"layout": "end-to-end", "labels": ["person", "car", "dog"], "score": 0.5} | task
    return config.Model(
        name="gate",
        path=str(folder / "gate.onnx"),
        task=config.DetectionTask(**section),
        input=config.Input(divide_by=1.0),
        evaluation=config.Evaluation(images=str(folder), limits=limits or config.Limits()),
    )


@pytest.fixture
def pictures(tmp_path: Path) -> images.ImageSet:
    """Three grey pictures of 64 x 64 that the table engine tells apart: 1.png, 2.png and 3.png."""
    for index in (1, 2, 3):
        cv2.imwrite(str(tmp_path / f"{index}.png"), np.full((64, 64, 3), 10 * index, np.uint8))
    return images.collect(str(tmp_path))


FP32: Tables = {
    1: [(0, 0, 20, 20, 0.9, 0), (30, 30, 60, 60, 0.505, 1)],
    2: [(0, 0, 30, 30, 0.8, 2), (5, 40, 20, 60, 0.3, 0)],
    3: [],
}
INT8: Tables = {
    1: [(0, 0, 20, 20, 0.85, 0), (30, 30, 60, 60, 0.495, 1)],
    2: [(5, 40, 20, 60, 0.3, 0)],
    3: [(0, 0, 30, 30, 0.7, 0)],
}
BOXES = [truth(1, [0, 0, 20, 20], 1), truth(2, [0, 0, 30, 30], 17)]
LABELLED = [{"id": index, "file_name": f"{index}.png"} for index in (1, 2, 3)]


class TestEvaluate:
    def test_compares_picture_by_picture(self, tmp_path: Path, pictures: images.ImageSet) -> None:
        result = evaluate(model(tmp_path), pictures, open_pipeline=Opener(FP32, INT8))

        agreed = result.agreement
        assert (agreed.images, agreed.images_identical) == (3, 0)
        assert (agreed.reference_objects, agreed.candidate_objects) == (3, 2)
        assert (agreed.reference_candidates, agreed.candidate_candidates) == (4, 4)
        assert (agreed.firm, agreed.firm_matched, agreed.new, agreed.borderline_flipped) == (2, 1, 1, 1)
        assert (result.fp32, result.int8) == (None, None)
        assert result.to_json()["fp32"] == {}

    def test_labels_give_map_of_both(self, tmp_path: Path, pictures: images.ImageSet) -> None:
        labels = labels_file(tmp_path, BOXES, images=LABELLED)

        result = evaluate(model(tmp_path), pictures, labels=labels, open_pipeline=Opener(FP32, INT8))

        assert result.fp32 == scored(1.0, 1.0, images=3)
        # The dog is not found any more, and the new person is a false alarm behind the true one.
        assert result.int8 == scored(0.5, 0.5, images=3)
        assert result.to_json()["int8"] == {"map": pytest.approx(0.5), "map50": pytest.approx(0.5), "images": 3}

    def test_map_is_measured_in_cocos_setting_whatever_the_deployment_says(
        self, tmp_path: Path, pictures: images.ImageSet
    ) -> None:
        labels = labels_file(tmp_path, [truth(2, [5, 40, 15, 20], 1)], images=LABELLED)

        result = evaluate(model(tmp_path, score=0.5), pictures, labels=labels, open_pipeline=Opener(FP32, INT8))

        assert result.fp32 is not None
        # found with a score of 0.3, behind the false alarm of picture 1
        assert result.fp32.map == pytest.approx(0.5)

    def test_fp32_is_run_against_itself(self, tmp_path: Path, pictures: images.ImageSet) -> None:
        opener = Opener(FP32, INT8)

        result = evaluate(model(tmp_path), pictures, open_pipeline=opener)

        assert (result.noise.images, result.noise.images_identical, result.noise.share) == (3, 3, 1.0)
        assert (opener.engines["fp32"].calls, opener.engines["int8"].calls) == (6, 3)

    def test_limits_are_checked(self, tmp_path: Path, pictures: images.ImageSet) -> None:
        labels = labels_file(tmp_path, BOXES, images=LABELLED)
        strict = config.Limits(map_drop=0.1, agreement=0.9)
        loose = config.Limits(map_drop=0.6, agreement=0.5)

        kept = evaluate(model(tmp_path, limits=loose), pictures, labels=labels, open_pipeline=Opener(FP32, INT8))
        broken = evaluate(model(tmp_path, limits=strict), pictures, labels=labels, open_pipeline=Opener(FP32, INT8))

        assert kept.exceeded == ()
        assert [check.name for check in broken.exceeded] == ["map_drop", "agreement"]
        assert broken.to_json()["limits"] == {
            "map_drop": {"limit": 0.1, "found": pytest.approx(0.5), "exceeded": True},
            "agreement": {"limit": 0.9, "found": 0.5, "exceeded": True},
        }

    def test_limit_with_nothing_to_measure_is_exceeded(self, tmp_path: Path, pictures: images.ImageSet) -> None:
        nothing: Tables = {1: [], 2: [], 3: []}

        result = evaluate(
            model(tmp_path, limits=config.Limits(agreement=0.1)), pictures, open_pipeline=Opener(nothing, INT8)
        )

        assert [(check.found, check.exceeded) for check in result.limits] == [(None, True)]
        assert result.warnings[0].startswith("FP32 finds no object clear of the score threshold")

    @pytest.mark.parametrize(("limit", "exceeded"), [(0.9, False), (0.92, True)])
    def test_limit_for_masks_is_over_all_pictures(
        self, pictures: images.ImageSet, limit: float, exceeded: bool, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Of 64 x 64, FP32 has half in a mask on each of three pictures, INT8 three quarters of that on the third."""
        section = segmentation(limits=config.Limits(mask_iou=limit))

        result = evaluate(section, pictures, open_pipeline=segmenters)
        console.show_evaluation(result)

        (check,) = result.limits
        iou = 1 - 512 / (3 * 2048)
        assert (check.name, check.limit, check.exceeded) == ("mask_iou", limit, exceeded)
        assert check.found == result.agreement.mask_iou == pytest.approx(iou)
        assert result.to_json()["agreement"]["mask_iou_of_all"] == pytest.approx(iou)
        assert f"IoU of all masks together      {iou:.4f}" in capsys.readouterr().out

    def test_limit_for_masks_of_a_detector_has_nothing_to_measure(
        self, tmp_path: Path, pictures: images.ImageSet
    ) -> None:
        limited = model(tmp_path, limits=config.Limits(agreement=0.1, mask_iou=0.1))

        result = evaluate(limited, pictures, open_pipeline=Opener(FP32, INT8))

        assert [(check.name, check.found, check.exceeded) for check in result.limits] == [
            ("agreement", 0.5, False),
            ("mask_iou", None, True),
        ]

    def test_map_limit_without_labels_is_a_configuration_error(self, tmp_path: Path, pictures: images.ImageSet) -> None:
        limited = model(tmp_path, limits=config.Limits(map_drop=0.1))

        with pytest.raises(ConfigError, match=r"models\.gate\.evaluation\.limits\.map_drop needs evaluation\.labels"):
            evaluate(limited, pictures, open_pipeline=Opener(FP32, INT8))

    def test_labels_for_a_classifier_are_a_configuration_error(self, tmp_path: Path, pictures: images.ImageSet) -> None:
        classifier = config.Model(name="kind", path="kind.onnx", task=config.Classification())

        with pytest.raises(ConfigError, match=r"models\.kind\.evaluation\.labels: mAP is about boxes"):
            evaluate(classifier, pictures, labels=tmp_path / "labels.json", open_pipeline=Opener(FP32, INT8))

    def test_unfit_labels_are_found_before_anything_is_run(self, tmp_path: Path, pictures: images.ImageSet) -> None:
        opener = Opener(FP32, INT8)

        with pytest.raises(DataError, match=r"has none of the 3 pictures"):
            evaluate(model(tmp_path), pictures, labels=labels_file(tmp_path, BOXES), open_pipeline=opener)
        assert opener.paths == []

    def test_unlabelled_pictures_and_unknown_categories_are_warned_about(
        self, tmp_path: Path, pictures: images.ImageSet
    ) -> None:
        labels = labels_file(tmp_path, BOXES, images=LABELLED[:2])

        result = evaluate(model(tmp_path, keep=["person"]), pictures, labels=labels, open_pipeline=Opener(FP32, INT8))

        assert result.warnings == (
            "1 of 3 pictures have no labels; mAP is that of the other 2",
            "categories without a class of the model are left out of mAP: dog",
        )

    def test_another_int8_model_may_be_named(self, tmp_path: Path, pictures: images.ImageSet) -> None:
        opener = Opener(FP32, INT8)

        evaluate(model(tmp_path), pictures, int8_path=tmp_path / "other.onnx", open_pipeline=opener)

        assert opener.paths == [None, tmp_path / "other.onnx"]

    def test_pictures_that_differ_most_are_saved_worst_first(self, tmp_path: Path, pictures: images.ImageSet) -> None:
        evaluate(model(tmp_path), pictures, save=tmp_path / "worst/pictures", open_pipeline=Opener(FP32, INT8))

        # 2 loses an object and 3 gains one; of equals the first comes first, then the borderline object of 1
        saved = sorted(path.name for path in (tmp_path / "worst/pictures").glob("*.jpg"))
        assert saved == ["01_2.jpg", "02_3.jpg", "03_1.jpg"]
        shown = cv2.imread(str(tmp_path / "worst/pictures/01_2.jpg"))
        assert shown.shape[1] > 2 * 320

    def test_saving_again_replaces_its_own_pictures_and_no_others(
        self, tmp_path: Path, pictures: images.ImageSet
    ) -> None:
        (tmp_path / "01_mine.jpg").write_text("somebody's")
        evaluate(model(tmp_path), pictures, save=tmp_path, open_pipeline=Opener(FP32, INT8))

        evaluate(model(tmp_path), pictures, save=tmp_path, open_pipeline=Opener(FP32, FP32))

        assert (tmp_path / "01_mine.jpg").read_text() == "somebody's"
        saved = sorted(path.name for path in tmp_path.glob("*.jpg"))
        assert saved == ["01_1.jpg", "01_mine.jpg", "02_2.jpg", "03_3.jpg"]

    def test_progress_is_told_after_each_picture(self, tmp_path: Path, pictures: images.ImageSet) -> None:
        done: list[int] = []

        evaluate(model(tmp_path), pictures, on_image=lambda: done.append(1), open_pipeline=Opener(FP32, INT8))

        assert len(done) == 3

    def test_classifier_agrees_by_its_top_answer(self, pictures: images.ImageSet) -> None:
        section = config.Model(
            name="kind",
            path="kind.onnx",
            task=config.Classification(labels=["cat", "dog"], top_k=1),
            input=config.Input(divide_by=1.0),
        )

        result = evaluate(section, pictures, open_pipeline=classifiers)

        assert (result.agreement.answers, result.agreement.answers_equal) == (3, 2)
        assert result.to_json()["agreement"]["share"] == pytest.approx(2 / 3)

    def test_real_model_agrees_with_itself(self, data: Path) -> None:
        detector = config.Model(
            name="yolox",
            path=str(data / "models/yolox_nano.onnx"),
            task=config.DetectionTask(labels="coco80", score=0.35),
            input=config.Input(anchor="top-left", color="bgr", divide_by=1.0),
        )
        pictures = images.collect(str(data / "images"), count=6)

        result = evaluate(detector, pictures, labels=data / "labels.json", int8_path=Path(detector.path))

        assert result.fp32 == result.int8
        assert result.fp32 is not None
        assert result.fp32.map > 0.2
        assert result.agreement.share == 1.0
        assert result.agreement.images_identical == 6
        assert result.agreement.score_difference_max == 0.0


@contextmanager
def classifiers(model: config.Model, *, precision: str, path: Path | None = None) -> Iterator[Pipeline]:
    """Cat on every picture, but dog on the third in INT8."""
    assert path is None
    engine = TableEngine({})
    outputs = (TensorSpec("output", (1, 2), np.dtype(np.float32)),)

    def infer(tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        third = round(float(tensors["images"].mean()) / 10) == 3
        return {"output": np.array([[0.2, 0.8] if third and precision == "int8" else [0.9, 0.1]], np.float32)}

    engine.infer = infer  # type: ignore[method-assign]
    task = tasks.build(model.task, engine.inputs, outputs, source=precision)
    yield Pipeline(model.name, Preprocessor(model.input, engine.inputs[0]), engine, task)


def segmentation(*, limits: config.Limits) -> config.Model:
    return config.Model(
        name="defects",
        path="defects.onnx",
        task=config.Segmentation(labels=["scratch"], layout="map"),
        input=config.Input(divide_by=1.0),
        evaluation=config.Evaluation(images="pictures", limits=limits),
    )


@contextmanager
def segmenters(model: config.Model, *, precision: str, path: Path | None = None) -> Iterator[Pipeline]:
    """The upper half is a scratch on every picture, but only 24 of its 32 rows on the third in INT8."""
    assert path is None
    engine = TableEngine({})
    outputs = (TensorSpec("output", (1, 1, 64, 64), np.dtype(np.float32)),)

    def infer(tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        third = round(float(tensors["images"].mean()) / 10) == 3
        scores = np.zeros((1, 1, 64, 64), np.float32)
        scores[:, :, : 24 if third and precision == "int8" else 32] = 0.9
        return {"output": scores}

    engine.infer = infer  # type: ignore[method-assign]
    task = tasks.build(model.task, engine.inputs, outputs, source=precision)
    yield Pipeline(model.name, Preprocessor(model.input, engine.inputs[0]), engine, task)


class Terminal(io.StringIO):
    """Something that is written to and watched."""

    def isatty(self) -> bool:
        return True


class TestShown:
    """What ``console`` makes of it where there is no terminal."""

    def test_evaluation_is_a_plain_table_on_stdout(
        self, tmp_path: Path, pictures: images.ImageSet, capsys: pytest.CaptureFixture[str]
    ) -> None:
        labels = labels_file(tmp_path, BOXES, images=LABELLED)
        limited = model(tmp_path, limits=config.Limits(map_drop=0.1))

        console.show_evaluation(evaluate(limited, pictures, labels=labels, open_pipeline=Opener(FP32, INT8)))

        assert capsys.readouterr().out.splitlines() == [
            "gate: 3 pictures",
            "                       FP32   INT8",
            "mAP 0.50:0.95         1.000  0.500",
            "mAP 0.50              1.000  0.500",
            "objects                   3      2",
            "before the threshold      4      4",
            "agreement with FP32            INT8             FP32 again",
            "pictures with the same answer  0 of 3           3 of 3",
            "objects found as well          1 of 2 (50.0 %)  2 of 2 (100.0 %)",
            "objects only it finds          1                0",
            "borderline objects flipped     1 of 1           0 of 1",
            "IoU of boxes, mean             1.0000           1.0000",
            "score difference, mean         0.0500           0.0000",
            "score difference, max          0.0500           0.0000",
            "limit map_drop 0.1: 0.5000, exceeded",
        ]

    def test_progress_is_a_line_for_each_tenth(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, logger="calibration")

        with console.progress("calibrating", 40) as progress:
            for _ in range(40):
                progress.advance()

        assert caplog.messages == [f"calibrating: {4 * step} of 40" for step in range(1, 11)]

    def test_many_steps_at_once_are_one_line(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, logger="calibration")

        with console.progress("calibrating", 40) as progress:
            for steps in (0, 17, 2, 1, 20, 0):
                progress.advance(steps)

        assert caplog.messages == ["calibrating: 17 of 40", "calibrating: 20 of 40", "calibrating: 40 of 40"]

    def test_few_steps_are_all_told(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, logger="calibration")

        with console.progress("calibrating", 2) as progress:
            progress.advance()
            progress.advance()

        assert caplog.messages == ["calibrating: 1 of 2", "calibrating: 2 of 2"]

    def test_what_begins_after_the_steps_is_told(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, logger="calibration")

        with console.progress("calibrating", 1) as progress:
            progress.advance()
            progress.begin("trying methods")

        assert caplog.messages == ["calibrating: 1 of 1", "trying methods"]

    def test_quiet_silences_progress_but_no_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.WARNING, logger="calibration")

        with console.progress("calibrating", 10) as progress:
            progress.advance()
            progress.begin("writing")
        console.warn("look here")

        assert caplog.messages == ["look here"]

    def test_terminal_gets_a_bar(self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
        caplog.set_level(logging.INFO, logger="calibration")
        terminal = Terminal()
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(sys, "stderr", terminal)

        with console.progress("calibrating", 4) as progress:
            progress.advance(3)
            progress.advance()
            progress.begin("writing")

        assert re.search(r"writing .*4/4", terminal.getvalue())
        assert caplog.messages == []

    def test_numbers_are_flush_right_and_brackets_are_text(self, capsys: pytest.CaptureFixture[str]) -> None:
        console.table("Ranges", ("tensor", "amax"), [("a[0]", "1.5"), ("[bold]b", "127.25")])

        assert capsys.readouterr().out.splitlines() == [
            "Ranges",
            "tensor     amax",
            "a[0]        1.5",
            "[bold]b  127.25",
        ]

    def test_table_without_column_names_has_no_header(self, capsys: pytest.CaptureFixture[str]) -> None:
        console.table("", ("", ""), [("layers", "3 in INT8")])

        assert capsys.readouterr().out == "layers  3 in INT8\n"

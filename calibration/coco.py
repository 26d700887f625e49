"""COCO's mean average precision of boxes, through pycocotools."""

from __future__ import annotations

import contextlib
import io
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from edge.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from edge.types import Detection

__all__ = ["MAP_NMS_IOU", "MAP_SCORE", "Scores", "Truth", "coco_map", "rows_of", "some"]

MAP_SCORE, MAP_NMS_IOU = 0.01, 0.65
"""The setting in which detectors publish their COCO mAP."""


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
    truth = Truth.read(labels, list(detections))
    return truth.score({path: rows_of(found) for path, found in detections.items()}, class_names)


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
class Truth:
    """Labels of the pictures that are evaluated."""

    source: Path
    image_ids: dict[Path, int]
    annotations: list[_CocoAnnotation]
    categories: list[_CocoCategory]

    @classmethod
    def read(cls, path: Path, pictures: Sequence[Path]) -> Truth:
        """Read what COCO JSON says of these pictures, found by file name.

        Raises:
            DataError: the file cannot be read, is no COCO JSON, or knows none of the pictures.
        """
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
        """Score ``rows_of`` by picture."""
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
            classes = some(names[identity] for identity in sorted(wanted))
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
            f" ({some(category.name for category in self.categories)}) is a class of the model"
            f" ({some(class_names.values())}); spell task.labels as the labels do"
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
            f"{source}: has none of the {len(pictures)} pictures, such as {some(p.name for p in pictures)};"
            f" it has {some(by_name)}"
        )
    return found


def _posix(image: _CocoImage) -> str:
    return image.file_name.replace("\\", "/")  # labelled on Windows


def _average_precision(truth: Truth, categories: list[int], found: NDArray[np.float64]) -> tuple[float, float]:
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


def rows_of(detections: Iterable[Detection]) -> NDArray[np.float64]:
    """(N, 6) x1, y1, x2, y2, score, class index: what mAP needs, in a fraction of the memory."""
    rows = [(*d.box_xyxy, d.score, d.class_id) for d in detections if d.box_xyxy is not None]
    return np.array(rows, np.float64).reshape(-1, 6)


def some(names: Iterable[str], most: int = 3) -> str:
    """The first few names, for a message."""
    listed = list(names)
    return ", ".join(listed[:most]) + (", ..." if len(listed) > most else "")

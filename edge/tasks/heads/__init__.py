"""Detection heads, one file each. A layout is added by its file and one line in ``HEADS``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge.tasks.heads.detr import Detr
from edge.tasks.heads.end_to_end import EndToEnd
from edge.tasks.heads.fastestdet import FastestDet
from edge.tasks.heads.yolov5 import YoloV5
from edge.tasks.heads.yolov8 import YoloV8
from edge.tasks.heads.yolox import YoloX
from edge.tasks.heads.yunet import YuNet

if TYPE_CHECKING:
    from edge.tasks.heads.head import Head
    from edge.tasks.signature import Layout

__all__ = ["HEADS"]

HEADS: dict[str, Layout[Head]] = {
    "yolox": YoloX,
    "yolov5": YoloV5,
    "yolov8": YoloV8,
    "end-to-end": EndToEnd,
    "detr": Detr,
    "fastestdet": FastestDet,
    "yunet": YuNet,
}
"""By the name that ``task.layout`` gives them."""

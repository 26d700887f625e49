"""The process's work, in this process: a camera of which each call is seen."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from typing import Any

import numpy as np
import pytest

from edge.sources.grabber import CameraEndedError, Grabber
from edge.sources.wire import PICTURE, POOL, SLOTS, Gallery, Picture


class FakeCapture:
    """Gives pictures of a shape; writes into the array it is given where that fits, as OpenCV does."""

    def __init__(self, shape: tuple[int, ...] = (4, 6, 3)) -> None:
        self.shape = shape
        self.left = 1000
        self.dtype: Any = np.uint8
        self.grabbed = self.retrieved = self.allocated = 0

    def grab(self) -> bool:
        self.grabbed += 1
        return self.grabbed <= self.left

    def retrieve(self, target: Any = None) -> tuple[bool, Any]:
        self.retrieved += 1
        if target is None or target.shape != self.shape:
            self.allocated += 1
            target = np.empty(self.shape, self.dtype)
        target[:] = self.grabbed
        return True, target


class Site:
    """What the daemon would see."""

    def __init__(self, capture: FakeCapture, **options: Any) -> None:
        self.now_s = 100.0
        self.pictures: list[Picture] = []
        self.pools = 0
        self.gallery: Gallery | None = None
        self.grabber = Grabber(
            capture,  # type: ignore[arg-type]
            self._receive,
            clock=lambda: self.now_s,
            utc_clock_ns=lambda: 5_000_000,
            **{"digest_s": None, **options},
        )

    def _receive(self, message: bytes, fd: int | None = None) -> None:
        if message[:1] == POOL:
            assert fd is not None
            self.pools += 1
            self.gallery = Gallery(os.dup(fd), message[1:])
        else:
            assert message[:1] == PICTURE
            self.pictures.append(Picture.unpack(message[1:]))

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.grabber.turn()

    def newest(self) -> Any:
        assert self.gallery is not None
        return self.gallery.show(self.pictures[-1])


def test_pictures_are_written_into_shared_memory_by_opencv_itself() -> None:
    capture = FakeCapture()
    site = Site(capture)

    for number in range(1, 20):
        site.turn()
        assert (site.newest() == number).all()

    assert [picture.number for picture in site.pictures] == list(range(19))
    assert site.pictures[0][1:3] == (6, 4)
    assert site.pictures[0].captured_at_s == 100.0
    assert site.pictures[0].captured_at_utc_us == 5000
    assert capture.allocated == 1, "only the first, of which the size was not known"
    assert site.pools == 1


def test_without_a_free_slot_it_goes_on_grabbing_and_spares_the_conversion() -> None:
    capture = FakeCapture()
    site = Site(capture)

    site.turn(SLOTS + 10)

    assert len(site.pictures) == SLOTS
    assert capture.retrieved == SLOTS
    assert site.gallery is not None
    assert site.gallery.grabbed == SLOTS + 10
    site.gallery.give_back(site.pictures[4])
    site.turn()
    assert site.pictures[-1].slot == site.pictures[4].slot
    assert site.pictures[-1].number == SLOTS + 10


def test_the_fourth_channel_is_dropped_and_grey_becomes_three() -> None:
    for shape in ((4, 6, 4), (4, 6), (4, 6, 1)):
        capture = FakeCapture(shape)
        site = Site(capture)
        for number in range(1, 5):
            site.turn()
            image = site.newest()
            assert image.shape == (4, 6, 3)
            assert (image == number).all()
            del image
        assert capture.allocated == 1, shape


def test_a_picture_that_grows_gets_larger_slots_and_older_ones_stay_good() -> None:
    capture = FakeCapture((4, 6, 3))
    site = Site(capture)
    site.turn()
    before = site.newest()

    capture.shape = (480, 640, 3)
    site.turn(2)
    grown = site.newest()
    capture.shape = (8, 8, 3)
    site.turn()

    assert site.pools == 2
    assert before.shape == (4, 6, 3)
    assert (before == 1).all()
    assert grown.shape == (480, 640, 3)
    assert (grown == 3).all()
    assert site.newest().shape == (8, 8, 3)


def test_digests_are_of_the_whole_picture_and_not_of_every_one() -> None:
    site = Site(FakeCapture(), digest_s=1.0)

    for _ in range(25):
        site.turn()
        image = site.newest()
        if site.pictures[-1].digest:
            assert site.pictures[-1].digest == zlib.crc32(image.tobytes())
        site.now_s += 0.1

    assert [bool(picture.digest) for picture in site.pictures].count(True) == 3


def test_a_stream_that_ends_and_pictures_that_cannot_be_used_are_told() -> None:
    ended, deep, strange = FakeCapture(), FakeCapture(), FakeCapture((4, 6, 2))
    ended.left = 0
    deep.dtype = np.uint16

    for capture, says in ((ended, "has ended the stream"), (deep, "uint16"), (strange, "2 channels")):
        with pytest.raises(CameraEndedError, match=says):
            Site(capture).turn()


def test_the_process_needs_nothing_but_opencv_and_numpy() -> None:
    code = "import sys, edge.sources.grabber; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert not {"msgspec", "yaml", "paho", "onnxruntime", "click", "prometheus_client"} & set(done.stdout.split())

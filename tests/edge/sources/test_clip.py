"""Frames of a video by their numbers."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from edge.errors import DataError
from edge.sources.clip import Clip, measure


@pytest.fixture
def film(tmp_path: Path) -> Path:
    """Thirty frames at 10 a second; the grey level of frame n is about 8 n."""
    path = tmp_path / "film.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 10, (64, 48))
    assert writer.isOpened()
    for index in range(30):
        writer.write(np.full((48, 64, 3), 8 * index, np.uint8))
    writer.release()
    return path


def number_of(image: np.ndarray) -> int:
    return round(float(image.mean()) / 8)


def test_length_is_counted(film: Path) -> None:
    length = measure(film)

    assert (length.frames, length.fps, length.missing) == (30, 10, None)


def test_file_that_was_cut_off_misses_frames(film: Path) -> None:
    film.write_bytes(film.read_bytes()[: film.stat().st_size // 2])

    length = measure(film)

    assert 0 < length.frames < 25
    assert length.missing == 30 - length.frames


@pytest.mark.parametrize(
    ("content", "says"), [(b"", r"is empty \(0 bytes\)"), (b"no video" * 99, "is not a video that")]
)
def test_file_that_is_no_video_is_an_error(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "film.mp4"
    path.write_bytes(content)

    with pytest.raises(DataError, match=f"^{path}: {says}"):
        measure(path)


def test_missing_file_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        measure(tmp_path / "film.mp4")


def test_frames_are_given_in_any_order(film: Path) -> None:
    with Clip(film) as opened:
        images = [opened.frame(number) for number in (3, 4, 20, 5, 5, 29, 0)]

    assert [number_of(image) for image in images] == [3, 4, 20, 5, 5, 29, 0]
    assert images[0].shape == (48, 64, 3)
    assert images[0].dtype == np.uint8


def test_reading_forwards_opens_the_file_once(film: Path) -> None:
    with Clip(film) as opened:
        opened.frame(3)
        film.unlink()

        assert number_of(opened.frame(20)) == 20
        with pytest.raises(FileNotFoundError):
            opened.frame(19)


def test_wanted_frame_that_was_passed_is_kept_for_who_comes_late(film: Path) -> None:
    with Clip(film, wanted=[2, 5, 8, 29]) as opened:
        opened.frame(8)
        film.unlink()

        assert [number_of(opened.frame(number)) for number in (5, 2, 29)] == [5, 2, 29]


def test_few_of_the_passed_frames_are_kept(film: Path) -> None:
    with Clip(film, wanted=range(30)) as opened:
        opened.frame(20)
        film.unlink()

        assert number_of(opened.frame(4)) == 4
        with pytest.raises(FileNotFoundError):
            opened.frame(3)


def test_file_is_closed_after_the_last_wanted_frame(film: Path) -> None:
    opened = Clip(film, wanted=[2, 5])
    opened.frame(2)
    opened.frame(5)
    film.unlink()

    with pytest.raises(FileNotFoundError):
        opened.frame(6)


def test_frame_beyond_the_end_is_an_error(film: Path) -> None:
    with Clip(film) as opened, pytest.raises(DataError, match=r"film\.avi: ends after 30 frames, before frame 30"):
        opened.frame(30)

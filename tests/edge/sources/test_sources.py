from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import TYPE_CHECKING, get_args, get_type_hints

import cv2
import numpy as np
import pytest

from edge import config
from edge.errors import DataError, SourceError
from edge.events import Events
from edge.sources import SOURCES, open_source
from edge.sources.video import opencv_build

if TYPE_CHECKING:
    from edge.types import Frame

FAST = 1000.0


def picture(path: Path, grey: int) -> None:
    assert cv2.imwrite(str(path), np.full((24, 32, 3), grey, np.uint8))


def film(path: Path, frames: int, *, fps: float = 20.0) -> None:
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), fps, (64, 48))
    assert writer.isOpened()
    for index in range(frames):
        writer.write(np.full((48, 64, 3), 10 * index % 250, np.uint8))
    writer.release()


def stream(source: config.Folder | config.Video | config.TestPattern) -> config.Stream:
    return config.Stream(name="belt", source=source)


def play(source: config.Folder | config.Video | config.TestPattern, limit: int = 100) -> list[Frame]:
    frames: list[Frame] = []
    stop = threading.Event()
    with open_source(stream(source), key="streams[0].source", events=Events()) as opened:
        for frame in opened.frames(stop):
            if frame is None:
                continue
            frames.append(frame)
            if len(frames) == limit:
                stop.set()
    return frames


def test_there_is_a_source_for_each_kind_of_section() -> None:
    kinds = get_args(get_type_hints(config.Stream)["source"])

    assert set(SOURCES) == {kind.__struct_config__.tag for kind in kinds}


def test_a_folder_is_played_in_order_of_names_and_other_files_are_no_pictures(tmp_path: Path) -> None:
    for grey, name in ((30, "c.png"), (10, "a.png"), (20, "b.JPG")):
        picture(tmp_path / name, grey)
    (tmp_path / "labels.txt").write_text("person")

    frames = play(config.Folder(path=str(tmp_path), fps=FAST, loop=False))

    assert [frame.name for frame in frames] == ["a.png", "b.JPG", "c.png"]
    assert [frame.index for frame in frames] == [0, 1, 2]
    assert [round(float(frame.image.mean())) for frame in frames] == [10, 20, 30]
    assert frames[0].stream == "belt"
    assert frames[0].image.shape == (24, 32, 3)


def test_an_unreadable_picture_is_skipped_with_one_warning_however_often_the_folder_loops(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    picture(tmp_path / "a.png", 10)
    (tmp_path / "b.png").write_bytes(b"no picture")

    frames = play(config.Folder(path=str(tmp_path), fps=FAST), limit=5)

    assert [frame.name for frame in frames] == ["a.png"] * 5
    assert caplog.text.count("skipped") == 1
    assert "b.png" in caplog.text


def test_a_folder_without_one_readable_picture_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "b.png").write_bytes(b"no picture")

    with pytest.raises(DataError, match=r"streams\[0\]\.source\.path: .*: none of its pictures can be read"):
        play(config.Folder(path=str(tmp_path), fps=FAST))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda _path: None, "no such folder"),
        (lambda path: path.mkdir(), "holds no picture"),
        (lambda path: path.write_bytes(b""), "is not a folder"),
    ],
)
def test_a_missing_or_empty_folder_names_its_key(tmp_path: Path, make: object, says: str) -> None:
    path = tmp_path / "pictures"
    make(path)  # type: ignore[operator]

    with pytest.raises(DataError, match=rf"^streams\[0\]\.source\.path: .*pictures: {says}"):
        open_source(stream(config.Folder(path=str(path))), key="streams[0].source", events=Events())


def test_a_picture_that_vanishes_while_the_folder_is_played_is_skipped(tmp_path: Path) -> None:
    for name in ("a.png", "b.png", "c.png"):
        picture(tmp_path / name, 10)

    names = []
    with open_source(
        stream(config.Folder(path=str(tmp_path), fps=FAST, loop=False)), key="k", events=Events()
    ) as source:
        for frame in source.frames(threading.Event()):
            names.append(frame.name)
            (tmp_path / "b.png").unlink(missing_ok=True)

    assert names == ["a.png", "c.png"]


def test_a_video_is_played_to_its_end_at_its_own_rate(tmp_path: Path) -> None:
    film(tmp_path / "film.avi", 6, fps=50)
    section = config.Video(path=str(tmp_path / "film.avi"), loop=False)

    with open_source(stream(section), key="k", events=Events()) as source:
        description = source.description
    frames = play(section)

    assert description.endswith("50 frames a second")
    assert [frame.index for frame in frames] == list(range(6))
    assert [round(float(frame.image.mean()), -1) for frame in frames] == [0, 10, 20, 30, 40, 50]
    assert frames[0].name is None


def test_a_folder_that_is_empty_for_a_while_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.png"
    picture(path, 10)
    content = path.read_bytes()
    with open_source(stream(config.Folder(path=str(tmp_path), fps=FAST)), key="k", events=Events()) as source:
        stop = threading.Event()
        frames = source.frames(stop)
        assert next(frame for frame in frames if frame is not None).name == "a.png"
        path.unlink()
        threading.Timer(0.2, lambda: path.write_bytes(content)).start()

        assert next(frame for frame in frames if frame is not None).name == "a.png"

    assert sum("waiting for pictures" in record.message for record in caplog.records) == 1


def test_a_video_loops(tmp_path: Path) -> None:
    film(tmp_path / "film.avi", 3)

    frames = play(config.Video(path=str(tmp_path / "film.avi"), fps=FAST), limit=7)

    assert [round(float(frame.image.mean()), -1) for frame in frames] == [0, 10, 20, 0, 10, 20, 0]
    assert [frame.index for frame in frames] == list(range(7))


def test_a_missing_video_is_missing_data_and_a_file_that_is_none_a_faulty_source(tmp_path: Path) -> None:
    (tmp_path / "text.mp4").write_text("no video")

    with pytest.raises(DataError, match=r"^streams\[0\]\.source\.path: .*gone\.mp4: no such file"):
        open_source(stream(config.Video(path=str(tmp_path / "gone.mp4"))), key="streams[0].source", events=Events())
    with pytest.raises(SourceError, match=r"^streams\[0\]\.source\.path: .*text\.mp4: is not a video"):
        open_source(stream(config.Video(path=str(tmp_path / "text.mp4"))), key="streams[0].source", events=Events())


def test_a_video_that_breaks_off_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "film.avi"
    film(path, 200)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])

    frames = play(config.Video(path=str(path), fps=FAST, loop=False), limit=1000)

    assert 0 < len(frames) < 200
    assert "the file may be damaged" in caplog.text


@pytest.mark.parametrize("kind", ["folder", "video"])
def test_stop_ends_a_slow_source_at_once(tmp_path: Path, kind: str) -> None:
    picture(tmp_path / "a.png", 10)
    film(tmp_path / "film.avi", 3)
    slow = 0.001
    section: config.Folder | config.Video = config.Folder(path=str(tmp_path), fps=slow)
    if kind == "video":
        section = config.Video(path=str(tmp_path / "film.avi"), fps=slow)
    stop, started = threading.Event(), threading.Event()
    count = 0

    def read() -> None:
        nonlocal count
        with open_source(stream(section), key="k", events=Events()) as source:
            for _ in source.frames(stop):
                count += 1
                started.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert started.wait(10)
    stop.set()
    reader.join(10)  # the next frame would come after 1000 seconds

    assert not reader.is_alive()
    assert count == 1


def test_the_opencv_that_was_found_is_known() -> None:
    version, gstreamer = opencv_build()

    assert version == cv2.__version__
    assert isinstance(gstreamer, bool)


def test_a_test_pattern_moves_and_keeps_its_size() -> None:
    frames = play(config.TestPattern(size=(64, 48), fps=FAST), limit=20)

    assert [frame.index for frame in frames] == list(range(20))
    assert {frame.image.shape for frame in frames} == {(48, 64, 3)}
    assert all((before.image != after.image).any() for before, after in itertools.pairwise(frames))
    assert frames[0].image.flags.c_contiguous


def test_a_video_as_fast_as_it_is_taken_gives_every_frame(tmp_path: Path) -> None:
    film(tmp_path / "film.avi", 7)
    section = config.Video(path=str(tmp_path / "film.avi"), fps=0.1, loop=False, pace="fast")

    with open_source(stream(section), key="k", events=Events()) as source:
        assert source.lossless
        assert len(list(source.frames(threading.Event()))) == 7


def test_a_test_pattern_is_the_same_each_time_and_allocates_no_pictures() -> None:
    section = config.TestPattern(size=(64, 48), fps=FAST)
    first, second = play(section, limit=60), play(section, limit=60)

    for one, other in zip(first, second, strict=True):
        assert (one.image == other.image).all()
    assert len({id(frame.image.base) for frame in first}) == 1, "all are views of one array"
    assert not first[0].image.flags.writeable


@pytest.mark.parametrize("kind", ["folder", "video", "pattern"])
def test_a_source_that_has_no_frame_yet_says_so(tmp_path: Path, kind: str) -> None:
    picture(tmp_path / "a.png", 10)
    film(tmp_path / "film.avi", 3)
    slow = 0.001
    sections: dict[str, config.Folder | config.Video | config.TestPattern] = {
        "folder": config.Folder(path=str(tmp_path), fps=slow),
        "video": config.Video(path=str(tmp_path / "film.avi"), fps=slow),
        "pattern": config.TestPattern(fps=slow),
    }
    with open_source(stream(sections[kind]), key="k", events=Events()) as source:
        frames = source.frames(threading.Event())

        assert next(frames) is not None
        assert [next(frames), next(frames)] == [None, None]  # the next one is due in 1000 seconds
        assert source.health.state == "live"
        assert source.skipped == 0

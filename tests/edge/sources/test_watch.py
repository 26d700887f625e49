from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from edge import config
from edge.errors import DataError
from edge.events import Events
from edge.sources import open_source
from edge.sources.watch import WatchSource


def encoded(grey: int) -> bytes:
    image = np.full((24, 32, 3), grey, np.uint8)
    image[::2] += 1
    done, data = cv2.imencode(".jpg", image)
    assert done
    return bytes(data)


def put(path: Path, grey: int, *, age_s: float = 60.0) -> None:
    path.write_bytes(encoded(grey))
    at_s = time.time() - age_s
    os.utime(path, (at_s, at_s))


class Ticking(threading.Event):
    """A stop event; waiting for it moves a clock instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0

    def wait(self, timeout: float | None = None) -> bool:
        self.now_s += timeout or 0.0
        return self.is_set()


class Watcher:
    """Takes what a folder gives, a quarter of a second between two looks."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.stop = Ticking()
        section = config.Folder(path=str(path), watch=True, **options)
        self.source = WatchSource(section, stream="belt", key="k", clock=lambda: self.stop.now_s)
        self._frames = self.source.frames(self.stop)

    def look(self, times: int = 1) -> list[str | None]:
        """Names of what comes until nothing does, so many times."""
        names: list[str | None] = []
        for _ in range(times):
            while (frame := next(self._frames)) is not None:
                names.append(frame.name)
        return names


def test_each_picture_is_given_once_in_order_of_arrival(tmp_path: Path) -> None:
    put(tmp_path / "b.jpg", 20, age_s=90)
    put(tmp_path / "a.jpg", 10, age_s=30)
    put(tmp_path / "c.jpg", 30, age_s=30)
    os.utime(tmp_path / "c.jpg", ns=(0, (tmp_path / "a.jpg").stat().st_mtime_ns))  # as old as another: by name
    (tmp_path / "notes.txt").write_text("no picture")
    (tmp_path / "folder.jpg").mkdir()
    watcher = Watcher(tmp_path)

    assert watcher.look(3) == ["b.jpg", "a.jpg", "c.jpg"]
    put(tmp_path / "0.jpg", 40)
    assert watcher.look(3) == ["0.jpg"]
    assert watcher.source.lossless
    assert watcher.source.health.state == "live"


def test_a_new_picture_is_given_at_the_second_look_if_it_has_not_changed(tmp_path: Path) -> None:
    watcher = Watcher(tmp_path)
    assert watcher.look() == []
    put(tmp_path / "a.jpg", 10, age_s=0)

    assert watcher.look(2) == ["a.jpg"]


def test_a_picture_that_is_still_being_written_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data, path = encoded(10), tmp_path / "a.jpg"
    watcher = Watcher(tmp_path)
    for end in range(0, len(data), len(data) // 5):
        path.write_bytes(data[:end])
        assert watcher.look(4) == []  # a second each: its writer is slow
    put(tmp_path / "b.jpg", 20)
    assert watcher.look() == ["b.jpg"], "nobody waits for the slow one"

    path.write_bytes(data)

    assert watcher.look(3) == ["a.jpg"]
    assert caplog.records == []


def test_a_picture_whose_writer_has_died_is_skipped_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.jpg").write_bytes(encoded(10)[:100])
    watcher = Watcher(tmp_path)

    assert watcher.look(60) == []

    assert caplog.text.count("skipped: ") == 1
    put(tmp_path / "a.jpg", 10)
    assert watcher.look(2) == ["a.jpg"], "written anew, it is another picture"


def test_a_folder_that_goes_away_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    folder = tmp_path / "in"
    folder.mkdir()
    watcher = Watcher(folder)
    assert watcher.look() == []
    folder.rmdir()

    assert watcher.look(3) == []
    assert watcher.source.health.state == "lost"
    assert watcher.source.health.trouble == f"k.path: {folder}: No such file or directory"
    folder.mkdir()
    put(folder / "a.jpg", 10)

    assert watcher.look(2) == ["a.jpg"]
    assert watcher.source.health.state == "live"
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_an_empty_folder_is_fine_and_a_missing_one_is_not(tmp_path: Path) -> None:
    stream = config.Stream(name="belt", source=config.Folder(path=str(tmp_path), watch=True))
    with open_source(stream, key="k", events=Events()) as source:
        assert source.description == f"pictures as they come into {tmp_path}, as fast as they are taken"

    gone = config.Stream(name="belt", source=config.Folder(path=str(tmp_path / "gone"), watch=True))
    with pytest.raises(DataError, match=r"^k\.path: .*gone: no such folder"):
        open_source(gone, key="k", events=Events())


def test_a_rate_may_be_given(tmp_path: Path) -> None:
    for name in "abc":
        put(tmp_path / f"{name}.jpg", 10)

    assert Watcher(tmp_path, fps=1000.0).look() == ["a.jpg", "b.jpg", "c.jpg"]


def test_it_stops_between_two_pictures(tmp_path: Path) -> None:
    for name in "abc":
        put(tmp_path / f"{name}.jpg", 10)
    watcher = Watcher(tmp_path)
    frames = watcher.source.frames(watcher.stop)
    assert next(frames) is not None

    watcher.stop.set()

    assert list(frames) == []

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

from edge import config
from edge import sources as rooms
from edge.sources.survey import describe, is_jetson, missing_elements, problems

KEY = "streams[0].source"


def found(source: Any, root: Path = Path("/"), **options: Any) -> list[str]:
    options = {"gstreamer": True, "inspect": lambda _names: [], "environ": {}, **options}
    stream = config.Stream(name="gate", source=source)
    return [str(error) for error in problems(stream, key=KEY, root=root, **options)]


def jetson(root: Path) -> Path:
    (root / "proc/device-tree").mkdir(parents=True)
    compatible = b"nvidia,p3768-0000+p3767-0003\0nvidia,p3767-0003\0nvidia,tegra234\0"
    (root / "proc/device-tree/compatible").write_bytes(compatible)
    return root


@pytest.mark.parametrize(
    ("source", "phrase"),
    [
        (config.Folder(path="/a"), "pictures of /a"),
        (config.Folder(path="/a", watch=True), "pictures as they come into /a"),
        (config.Video(path="/a.mp4"), "video /a.mp4"),
        (config.TestPattern(), "test pattern, 640x480 at 30 frames a second"),
        (config.Csi(sensor=1), "CSI sensor 1, 1920x1080 at 30 frames a second"),
        (config.V4l2(), "V4L2 /dev/video0, its own size"),
        (config.V4l2(size=(640, 480), fps=15), "V4L2 /dev/video0, 640x480 at 15 frames a second"),
        (config.Rtsp(url="rtsp://camera/1", username="me"), "rtsp://camera/1 as me over tcp"),
    ],
)
def test_a_source_is_described_in_a_phrase(source: Any, phrase: str) -> None:
    assert describe(source) == rooms.describe(source) == phrase


def test_a_jetson_is_known_by_its_device_tree(tmp_path: Path) -> None:
    assert not is_jetson(tmp_path)
    assert is_jetson(jetson(tmp_path))


def test_a_missing_device_is_told(tmp_path: Path) -> None:
    assert found(config.V4l2(device="/dev/video3"), tmp_path) == [
        "streams[0].source.device: there is no /dev/video3; is the camera plugged in?"
    ]


def test_what_is_no_device_or_may_not_be_opened_is_told(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/video3").write_text("")

    assert found(config.V4l2(device="/dev/video3"), tmp_path) == ["streams[0].source.device: /dev/video3 is no device"]
    assert found(config.V4l2(device="/dev/null")) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a device that others may not open")
def test_a_device_of_another_group_is_told(tmp_path: Path) -> None:
    device = tmp_path / "dev/video3"
    device.parent.mkdir()
    try:
        os.mknod(device, stat.S_IFCHR | 0o600, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("this sandbox makes no devices")
    tmp_path.chmod(0o755)
    child = os.fork()
    if not child:  # an ordinary user, in a process of its own
        os.setuid(65534)
        texts = found(config.V4l2(device="/dev/video3"), tmp_path) if os.access(device.parent, os.X_OK) else ["skip"]
        os._exit(0 if texts == ["skip"] or "the group video usually may" in texts[0] else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_an_opencv_without_gstreamer_is_told_where_it_is_needed(tmp_path: Path) -> None:
    (text,) = found(config.Csi(), gstreamer=False)
    assert text == (
        "streams[0].source: needs an OpenCV with GStreamer, and this one has none: on a Jetson use JetPack's"
        " (docs/cameras.md)"
    )
    assert found(config.Rtsp(url="rtsp://a/b"), jetson(tmp_path), gstreamer=False) == []
    (text,) = found(config.Rtsp(url="rtsp://a/b", backend="gstreamer"), gstreamer=False)
    assert text.endswith("or leave backend out")


def test_missing_elements_are_named(tmp_path: Path) -> None:
    asked: list[str] = []

    def inspect(names: list[str]) -> list[str]:
        asked.extend(names)
        return ["nvv4l2decoder", "nvvidconv"]

    (text,) = found(config.Rtsp(url="rtsp://a/b", codec="h265"), jetson(tmp_path), inspect=inspect)

    assert asked == ["rtspsrc", "rtph265depay", "h265parse", "nvv4l2decoder", "nvvidconv", "appsink"]
    assert text == "streams[0].source: GStreamer has no nvv4l2decoder, nvvidconv; docs/cameras.md says where they are"


def test_elements_that_nobody_can_look_for_are_said_to_be_unknown(caplog: pytest.LogCaptureFixture) -> None:
    assert found(config.Rtsp(url="rtsp://a/b", backend="gstreamer"), inspect=lambda _names: None) == []

    assert "gst-inspect-1.0 is not installed" in caplog.text
    assert "nvv4l2decoder" in caplog.text


def test_argus_is_looked_for_on_a_jetson(tmp_path: Path) -> None:
    root = jetson(tmp_path)

    (text,) = found(config.Csi(), root)
    assert "nvargus-daemon does not run" in text
    (root / "tmp").mkdir()
    (root / "tmp/argus_socket").touch()
    assert found(config.Csi(), root) == []


def test_a_password_file_and_an_address_are_looked_at(tmp_path: Path) -> None:
    section = config.Rtsp(url="rtsp://me:Sesam7@a/b", username="me", password_file=str(tmp_path / "password"))

    first, second = found(section)

    assert first.startswith("streams[0].source.password_file: ")
    assert second.startswith("streams[0].source.url: names a user")
    assert "Sesam7" not in second


def test_files_and_folders_are_looked_for(tmp_path: Path) -> None:
    assert found(config.Folder(path=str(tmp_path))) == []
    assert found(config.TestPattern()) == []
    assert found(config.Video(path=str(tmp_path / "a.mp4"))) == [
        f"streams[0].source.path: {tmp_path}/a.mp4: no such file or folder"
    ]
    stream = config.Stream(name="gate", source=config.Video(path=str(tmp_path / "a.mp4")))
    assert [str(error) for error in rooms.problems(stream, key=KEY)] == found(stream.source)


def test_gst_inspect_is_asked() -> None:
    if shutil.which("gst-inspect-1.0") is None:
        assert missing_elements(["fakesink"]) is None
    else:
        assert missing_elements(["fakesink", "no_such_element"]) == ["no_such_element"]

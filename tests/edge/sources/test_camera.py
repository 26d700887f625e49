"""Cameras, over a real RTSP connection: what happens to it happens to the camera."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from edge import config
from edge.errors import ConfigError
from edge.events import Events
from edge.sources import open_source
from edge.sources.camera import CameraSource
from edge.sources.wire import SLOTS

ODD = 'p@ss/w:ö%"\\ !'
KEY = "streams[0].source"
# Starting a process and FFmpeg's look at the stream take a second on a machine that is not busy.
PATIENCE_S = 60.0


def rtsp(url: str, **options: Any) -> config.Stream:
    options = {"stall_s": 30.0, "frozen_s": None, **options}
    return config.Stream(name="gate", source=config.Rtsp(url=url, **options))


def source_of(stream: config.Stream, events: Events, **options: Any) -> CameraSource:
    """A camera that does not wait between attempts."""
    return CameraSource(stream, key=KEY, events=events, uniform=lambda _low, _high: 0.05, **options)


def told(events: Events, kind: str) -> list[Any]:
    return [event for event in events.recent if event.kind == kind]


def children() -> list[int]:
    """Our own processes that read cameras."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command, status = (path / "cmdline").read_bytes(), (path / "status").read_text()
        except OSError:
            continue
        if b"edge.sources.grabber" in command and f"PPid:\t{os.getpid()}\n" in status:
            found.append(int(path.name))
    return found


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture(autouse=True)
def _nothing_left() -> Any:
    """No test leaves a process behind."""
    yield
    assert children() == []


def test_a_camera_plays(make_camera: Any, reading: Any, wait_until: Any, events: Events) -> None:
    camera = make_camera(fps=50, size_wh=(320, 240))

    with reading(source_of(rtsp(camera.url), events)) as reader:
        wait_until(lambda: reader.handed > 20, "pictures", deadline_s=PATIENCE_S)
        health, frame = reader.source.health, reader.kept[-1]

        assert (health.state, health.trouble, health.restarts) == ("live", None, 0)
        assert reader.sizes == {(320, 240)}
        assert frame.stream == "gate"
        assert frame.name is None
        assert not frame.image.flags.writeable
        assert frame.image.flags.c_contiguous
        assert 0 <= time.monotonic() - frame.captured_at_s < PATIENCE_S
        assert abs(time.time() - frame.captured_at_utc_us / 1e6) < PATIENCE_S
        reader.end()
    assert reader.indexes == sorted(set(reader.indexes))
    (opened,) = told(events, "camera_opened")
    assert opened.stream == "gate"
    assert opened.fields == {"width": 320, "height": 240, "fps": None, "outage_s": None}
    assert told(events, "camera_lost") == []


def test_a_camera_that_is_away_at_the_start_is_told_once_and_waited_for(
    make_camera: Any, reading: Any, wait_until: Any, events: Events
) -> None:
    camera = make_camera(fps=100)
    camera.kill()

    with reading(source_of(rtsp(camera.url), events)) as reader:
        wait_until(lambda: reader.source.health.restarts > 1, "a third attempt", deadline_s=PATIENCE_S)
        assert reader.source.health.state == "lost"
        assert reader.source.health.trouble == "cannot be reached: nothing listens at that address"
        assert reader.beats > 0
        assert told(events, "camera_opened") == []
        camera.start()
        wait_until(lambda: reader.handed, "a picture", deadline_s=PATIENCE_S)

    (lost,) = told(events, "camera_lost")
    assert lost.text == "camera gate cannot be opened: it cannot be reached: nothing listens at that address"
    assert lost.severity == "warning"
    assert len(told(events, "camera_opened")) == 1


def test_a_camera_that_is_lost_comes_back_and_its_indexes_go_on(
    make_camera: Any, reading: Any, wait_until: Any, events: Events
) -> None:
    camera = make_camera(fps=100)

    with reading(source_of(rtsp(camera.url), events)) as reader:
        wait_until(lambda: reader.handed, "pictures", deadline_s=PATIENCE_S)
        camera.kill()
        wait_until(lambda: reader.source.health.state == "lost", "the loss", deadline_s=PATIENCE_S)
        before = reader.handed
        camera.start()
        wait_until(lambda: reader.handed > before + 5, "pictures again", deadline_s=PATIENCE_S)
        reader.end()

        assert reader.indexes == sorted(set(reader.indexes))
        assert reader.source.health.restarts > 0
        assert reader.indexes[-1] + 1 <= reader.handed + reader.source.skipped
    (lost,) = told(events, "camera_lost")
    assert lost.text.startswith("camera gate is lost: it ")
    first, second = told(events, "camera_opened")
    assert first.fields["outage_s"] is None
    assert second.fields["outage_s"] > 0


def test_a_camera_that_falls_silent_is_opened_anew(
    make_camera: Any, reading: Any, wait_until: Any, events: Events
) -> None:
    camera = make_camera(fps=100)

    with reading(source_of(rtsp(camera.url, stall_s=1.0), events)) as reader:
        wait_until(lambda: reader.handed, "pictures", deadline_s=PATIENCE_S)
        camera.stall()
        wait_until(lambda: told(events, "camera_lost"), "the loss", deadline_s=PATIENCE_S)
        camera.go_on()
        wait_until(lambda: len(told(events, "camera_opened")) == 2, "its return", deadline_s=PATIENCE_S)

    (lost,) = told(events, "camera_lost")
    assert lost.fields == {"reason": "has given no picture for 1 s"}


def test_a_frozen_camera_is_lost_until_it_shows_another_picture(
    make_camera: Any, reading: Any, wait_until: Any, events: Events
) -> None:
    camera = make_camera(fps=100)

    with reading(source_of(rtsp(camera.url, frozen_s=0.5), events)) as reader:
        wait_until(lambda: reader.handed, "pictures", deadline_s=PATIENCE_S)
        camera.freeze()
        wait_until(lambda: told(events, "camera_lost"), "the loss", deadline_s=PATIENCE_S)
        handed = reader.handed
        # It can be opened, and gives pictures: the same one still.
        wait_until(lambda: reader.source.health.restarts >= 2, "two more attempts", deadline_s=PATIENCE_S)
        assert reader.handed == handed
        assert len(told(events, "camera_opened")) == 1
        camera.go_on()
        wait_until(lambda: len(told(events, "camera_opened")) == 2, "its return", deadline_s=PATIENCE_S)

    (lost,) = told(events, "camera_lost")
    assert lost.fields == {"reason": "gives the same picture for 0.5 s"}


@pytest.mark.parametrize("auth", ["basic", "digest"])
def test_a_password_may_hold_any_character(
    make_camera: Any, reading: Any, wait_until: Any, events: Events, auth: str
) -> None:
    camera = make_camera(fps=100, username="me", password=ODD, auth=auth)
    stream = rtsp(camera.url, username="me")

    source = source_of(stream, events, environ={"EDGE_CAMERA_GATE_PASSWORD": ODD})
    with reading(source) as reader:
        wait_until(lambda: reader.handed, "pictures", deadline_s=PATIENCE_S)


def test_a_wrong_password_is_told_as_such_and_shows_nowhere(
    make_camera: Any,
    reading: Any,
    wait_until: Any,
    events: Events,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    camera = make_camera(username="me", password=ODD)
    monkeypatch.setenv("EDGE_CAMERA_GATE_PASSWORD", "Sesam7")
    seen: list[bytes] = []

    with reading(source_of(rtsp(camera.url, username="me"), events)) as reader:

        def looked() -> bool:
            for pid in children():
                try:
                    seen.append(Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes())
                except OSError:
                    continue
            return bool(seen) and reader.source.health.restarts > 1

        wait_until(looked, "attempts", deadline_s=PATIENCE_S)
        health = reader.source.health

    assert health.trouble == "refuses the user name or password (401 Unauthorized)"
    texts = [caplog.text, repr(events.recent), repr(health), reader.source.description, repr(seen)]
    assert not [text for text in texts if "Sesam7" in text]
    assert "me" in reader.source.description


def test_a_process_that_is_killed_is_replaced(make_camera: Any, reading: Any, wait_until: Any, events: Events) -> None:
    camera = make_camera(fps=100)

    with reading(source_of(rtsp(camera.url), events)) as reader:
        wait_until(lambda: reader.handed, "pictures", deadline_s=PATIENCE_S)
        held, digest = reader.kept[-1], reader.kept[-1].image.tobytes()
        os.kill(children()[0], signal.SIGKILL)
        wait_until(lambda: len(told(events, "camera_opened")) == 2, "its return", deadline_s=PATIENCE_S)

    (lost,) = told(events, "camera_lost")
    assert lost.fields == {"reason": "was read by a process that was ended by SIGKILL"}
    assert held.image.tobytes() == digest, "pictures stay good when the process that took them has gone"


def test_a_process_that_hangs_is_killed_and_replaced(
    make_camera: Any, reading: Any, wait_until: Any, events: Events
) -> None:
    camera = make_camera(fps=100)

    with reading(source_of(rtsp(camera.url, stall_s=0.5), events)) as reader:
        wait_until(lambda: reader.handed, "pictures", deadline_s=PATIENCE_S)
        (pid,) = children()
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: len(told(events, "camera_opened")) == 2, "its return", deadline_s=PATIENCE_S)

        assert pid not in children()


def test_signals_to_the_whole_group_leave_the_camera_to_the_daemon(
    make_camera: Any, reading: Any, wait_until: Any, events: Events
) -> None:
    camera = make_camera(fps=100)

    with reading(source_of(rtsp(camera.url), events)) as reader:
        wait_until(lambda: reader.handed, "pictures", deadline_s=PATIENCE_S)
        (pid,) = children()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(pid, number)
        before = reader.handed
        wait_until(lambda: reader.handed > before + 20, "more pictures", deadline_s=PATIENCE_S)

        assert os.getsid(pid) != os.getsid(0), "a Ctrl-C in our terminal does not reach it"
    assert told(events, "camera_lost") == []


def test_who_keeps_pictures_makes_the_camera_skip_and_not_be_lost(
    make_camera: Any, reading: Any, wait_until: Any, events: Events
) -> None:
    camera = make_camera(fps=100)
    source = source_of(rtsp(camera.url, stall_s=5.0), events)  # less, and a busy machine loses the camera

    with reading(source, hold=True) as reader:
        wait_until(lambda: reader.handed == SLOTS, "all slots to be taken", deadline_s=PATIENCE_S)
        sent = camera.sent
        wait_until(lambda: camera.sent > sent + 600, "more than stall_s of pictures", deadline_s=PATIENCE_S)
        assert reader.handed == SLOTS
        assert source.health.state == "live"
        reader.kept.clear()
        gc.collect()
        wait_until(lambda: reader.handed > SLOTS, "a new picture", deadline_s=PATIENCE_S)
        newest = reader.kept[-1]
        assert newest.index > SLOTS + 200
        reader.end()

        assert source.skipped >= 200
        # Whatever was grabbed was handed on or counted; the last few perhaps after the last that was handed on.
        assert reader.handed + source.skipped >= reader.indexes[-1] + 1
    assert told(events, "camera_lost") == []


def test_a_reader_that_was_away_gets_the_newest_picture(
    make_camera: Any, reading: Any, wait_until: Any, events: Events
) -> None:
    camera = make_camera(fps=100)

    with reading(source_of(rtsp(camera.url), events)) as reader:
        wait_until(lambda: reader.handed > 3, "pictures", deadline_s=PATIENCE_S)
        reader.go_on.clear()
        sent = camera.sent
        wait_until(lambda: camera.sent > sent + 100, "what it misses", deadline_s=PATIENCE_S)
        last, back_s = reader.indexes[-1], time.monotonic()
        count = reader.handed
        reader.go_on.set()
        wait_until(lambda: reader.handed > count + 1, "pictures", deadline_s=PATIENCE_S)
        reader.end()

    assert reader.indexes[reader.indexes.index(last) + 1] > last + 50
    assert reader.kept[-1].captured_at_s > back_s


def test_pictures_may_change_their_size(make_camera: Any, reading: Any, wait_until: Any, events: Events) -> None:
    camera = make_camera(fps=100, size_wh=(160, 128))

    with reading(source_of(rtsp(camera.url, stall_s=2.0), events)) as reader:
        wait_until(lambda: reader.handed, "pictures", deadline_s=PATIENCE_S)
        for size_wh in ((640, 480), (320, 240)):
            camera.resize(*size_wh)
            wait_until(lambda size_wh=size_wh: size_wh in reader.sizes, f"{size_wh}", deadline_s=PATIENCE_S)


def test_a_stop_is_obeyed_while_the_camera_is_silent(
    make_camera: Any, reading: Any, wait_until: Any, events: Events
) -> None:
    camera = make_camera(fps=100)

    with reading(source_of(rtsp(camera.url, stall_s=3600.0), events)) as reader:
        wait_until(lambda: reader.handed, "pictures", deadline_s=PATIENCE_S)
        camera.stall()
        beats = reader.beats
        wait_until(lambda: reader.beats > beats + 2, "heartbeats", deadline_s=PATIENCE_S)
        reader.end()  # asserts that the thread returns; FFmpeg would wait for two hours

    assert told(events, "camera_lost") == []


@pytest.mark.slow
def test_reopening_leaves_nothing_behind(make_camera: Any, reading: Any, wait_until: Any, events: Events) -> None:
    camera = make_camera(fps=200, size_wh=(160, 128))

    def held() -> tuple[int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count("memfd:edge-camera")
        return len(list(Path("/proc/self/fd").iterdir())), maps

    with reading(source_of(rtsp(camera.url), events)) as reader:
        wait_until(lambda: reader.handed, "pictures", deadline_s=PATIENCE_S)
        descriptors, maps = held()
        for restarts in range(1, 21):
            os.kill(children()[0], signal.SIGKILL)
            wait_until(
                lambda restarts=restarts: (
                    reader.source.health.state == "live" and reader.source.health.restarts >= restarts
                ),
                "its return",
                deadline_s=PATIENCE_S,
            )
            handed = reader.handed
            wait_until(lambda handed=handed: reader.handed > handed, "pictures", deadline_s=PATIENCE_S)

        wait_until(lambda: held()[0] <= descriptors + 1 and held()[1] <= maps + 2, "descriptors and memory to be freed")
        assert len(children()) == 1


def test_the_process_ends_with_a_daemon_that_is_killed(make_camera: Any, wait_until: Any, tmp_path: Path) -> None:
    camera = make_camera(fps=100)
    script = tmp_path / "daemon.py"
    script.write_text(
        "import sys, threading\n"
        "from edge import config\n"
        "from edge.events import Events\n"
        "from edge.sources import open_source\n"
        "stream = config.Stream(name='gate', source=config.Rtsp(url=sys.argv[1]))\n"
        "with open_source(stream, key='k', events=Events()) as source:\n"
        "    for frame in source.frames(threading.Event()):\n"
        "        if frame is not None:\n"
        "            print(source._child.pid, flush=True)\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, script, camera.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as daemon:
        assert daemon.stdout is not None
        pid = int(daemon.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        daemon.kill()

        # Its memory has no name: it goes with it.
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the camera's process to end", deadline_s=PATIENCE_S)
    wait_until(lambda: camera.playing == 0, "the connection to end", deadline_s=PATIENCE_S)


def test_a_process_that_cannot_be_started_is_a_lost_camera(
    reading: Any, wait_until: Any, events: Events, tmp_path: Path
) -> None:
    source = source_of(rtsp("rtsp://127.0.0.1:1/x"), events, python=str(tmp_path / "python"))

    with reading(source) as reader:
        wait_until(lambda: reader.source.health.state == "lost", "the loss", deadline_s=PATIENCE_S)

    assert reader.source.health.trouble == "needs a process of its own: No such file or directory"


def test_a_device_that_is_not_plugged_in_is_waited_for_without_a_process(
    reading: Any, wait_until: Any, events: Events, tmp_path: Path
) -> None:
    stream = config.Stream(name="usb", source=config.V4l2(device="/dev/video7"))

    with reading(source_of(stream, events, root=tmp_path)) as reader:
        wait_until(lambda: reader.source.health.state == "lost", "the loss", deadline_s=PATIENCE_S)
        assert children() == []

    assert reader.source.health.trouble == "is not there: /dev/video7 does not exist"
    assert reader.source.health.restarts == 0


def test_a_device_that_is_no_camera_says_so(reading: Any, wait_until: Any, events: Events) -> None:
    stream = config.Stream(name="usb", source=config.V4l2(device="/dev/null"))

    with reading(source_of(stream, events)) as reader:
        wait_until(lambda: reader.source.health.state == "lost", "the loss", deadline_s=PATIENCE_S)

    assert reader.source.health.trouble is not None
    assert reader.source.health.trouble.startswith("cannot be opened")


def test_an_address_with_a_password_in_it_is_refused_without_repeating_it(events: Events) -> None:
    with pytest.raises(ConfigError, match=r"^streams\[0\]\.source\.url: names a user") as caught:
        open_source(rtsp("rtsp://me:Sesam7@camera/1"), key=KEY, events=events)

    assert "Sesam7" not in str(caught.value)

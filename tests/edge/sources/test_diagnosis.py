from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.sources.credential import disguises
from edge.sources.diagnosis import diagnose, last_words, masker

GSTREAMER = "[ WARN:0] global ./modules/videoio/src/cap_gstreamer.cpp (1053) open OpenCV | GStreamer warning: {}"
# Lines as FFmpeg 5 and 7, GStreamer 1.22 and OpenCV 4.6 and 5.1 print them; those of Argus from NVIDIA's forum.
LINES = [
    ("[rtsp @ 0x56339c136ec0] method DESCRIBE failed: 401 (Unauthorized)", "refuses the user name or password"),
    ("[rtsp @ 0x55] method DESCRIBE failed: 404 Not Found", "has no stream of that address"),
    ("[tcp @ 0x56339bf1ba40] Connection to tcp://127.0.0.1:1?timeout=0 failed: Connection refused", "nothing listens"),
    ("[tcp @ 0x55] Failed to resolve hostname camera7: Name or service not known", "its name is not known"),
    (
        GSTREAMER.format("Embedded video playback halted; module rtspsrc0 reported: Unauthorized"),
        "refuses the user name or password",
    ),
    (
        GSTREAMER.format('Error opening bin: no element "nvarguscamerasrc"'),
        "needs the GStreamer element nvarguscamerasrc, which is not installed",
    ),
    ("Error generated. gstnvarguscamerasrc.cpp, execute:751 Failed to create CaptureSession", "no session from Argus"),
    ("Error generated. gstnvarguscamerasrc.cpp, execute:740 No cameras available", "knows no sensor of that number"),
    ("libGLdispatch.so.0: cannot allocate memory in static TLS block", "LD_PRELOAD"),
    ("Cannot identify device '/dev/video9': No such file or directory", "is not there"),
    ("Device '/dev/video0' is busy", "is in use by another process"),
]


@pytest.mark.parametrize(("line", "meaning"), LINES)
def test_what_libraries_print_is_put_into_words(line: str, meaning: str) -> None:
    found = diagnose(["[h264 @ 0x5561] error while decoding MB 40 12", line, "unrelated"])

    assert found is not None
    assert meaning in found


def test_the_line_numbers_of_opencv_mean_nothing() -> None:
    lines = [
        "[ WARN:0@2.545] global cap.cpp:404 open VIDEOIO(FFMPEG): backend is generally available",
        "[ WARN:0] global ./modules/videoio/src/cap_gstreamer.cpp (401) open OpenCV | GStreamer warning: something",
    ]

    assert diagnose(lines) is None
    assert last_words(lines) is None


def test_what_nobody_knows_is_quoted_without_addresses_of_objects() -> None:
    assert last_words(["first", "[rtsp @ 0x56339c136ec0] odd  ", "[ WARN:0] global x.cpp (1) y"]) == "odd"
    assert len(last_words(["x" * 5000]) or "") == 200


@given(st.text(min_size=1, max_size=30), st.text(min_size=1, max_size=30))
def test_a_password_is_masked_in_whatever_form_it_is_printed(username: str, password: str) -> None:
    mask = masker(disguises(username, password))

    for form in disguises(username, password):
        assert mask(form) == "***"
        assert mask(f"\u2400{form}\u2400{form}").count("***") >= 2


def test_nothing_is_masked_without_a_secret() -> None:
    assert masker([""])("text") == "text"

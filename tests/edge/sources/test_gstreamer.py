"""GStreamer's pipelines, played: NVIDIA's elements are replaced by software ones, all the rest is what a Jetson gets.

They need an OpenCV with GStreamer. PyPI's has none, so the camera's process runs under the system's Python:
``apt-get install python3-opencv gstreamer1.0-plugins-good gstreamer1.0-plugins-bad`` on Debian or Ubuntu.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from edge import config
from edge.sources.child import Child
from edge.sources.diagnosis import masker
from edge.sources.pipelines import elements_of, opening
from edge.sources.survey import missing_elements

if TYPE_CHECKING:
    from edge.sources.pipelines import Opening

PYTHON = "/usr/bin/python3"
ROOT = Path(__file__).parents[3]
PATIENCE_S = 60.0
ASK = """
import sys
try:
    import cv2
except ImportError as error:
    sys.exit(f"its Python has no OpenCV ({error})")
lines = cv2.getBuildInformation().splitlines()
sys.exit(None if any("GStreamer:" in line and "YES" in line for line in lines) else "its OpenCV has no GStreamer")
"""


@functools.cache
def _missing() -> str | None:
    """Why nothing can be played here."""
    if not Path(PYTHON).exists():
        return f"there is no {PYTHON}"
    done = subprocess.run([PYTHON, "-c", ASK], capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else None


@pytest.fixture(autouse=True)
def _gstreamer(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = _missing()
    if missing is not None:
        pytest.skip(f"{missing}; apt-get install python3-opencv gstreamer1.0-plugins-good gstreamer1.0-plugins-bad")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def soften(pipeline: str) -> str:
    """The same pipeline for a machine without NVIDIA's elements or a camera."""
    pipeline = pipeline.replace("(memory:NVMM)", "")
    test = "videotestsrc is-live=true pattern=ball"
    pipeline = re.sub(r"nvarguscamerasrc sensor-id=\d+", test, pipeline)
    pipeline = re.sub(r'v4l2src device="[^"]*" ! image/jpeg', f"{test} ! jpegenc ! image/jpeg", pipeline)
    pipeline = re.sub(r'v4l2src device="[^"]*"', test, pipeline)
    pipeline = re.sub(
        r"nvvidconv flip-method=1", "videoconvert ! videoflip method=counterclockwise ! videoscale", pipeline
    )
    pipeline = re.sub(r"nvvidconv", "videoconvert ! videoscale", pipeline)
    pipeline = pipeline.replace("nvv4l2decoder mjpeg=1", "jpegdec")
    assert not [name for name in elements_of(pipeline) if name.startswith("nv")]
    return pipeline


def start(plan: Opening, *secrets: str) -> Child:
    return Child(
        replace(plan, target=soften(plan.target)), name="gate", digest_s=0.1, mask=masker(secrets), python=PYTHON
    )


def end(child: Child) -> None:
    child.dismiss()
    assert child.has_gone(PATIENCE_S)


@pytest.mark.parametrize(
    ("section", "fit_wh", "size_wh"),
    [
        (config.Csi(size=(1280, 720), fps=30), (320, 320), (320, 180)),
        (config.Csi(size=(640, 480), fps=29.97), None, (640, 480)),
        (config.Csi(size=(640, 480), fps=30, flip=1), (320, 320), (240, 320)),
        (config.Csi(size=(640, 480), fps=30, scale=(200, 100)), (320, 320), (200, 100)),
        (config.V4l2(size=(640, 480), fps=30), (320, 320), (320, 240)),
        (config.V4l2(size=(640, 480), fps=30, format="yuyv"), (320, 320), (320, 240)),
    ],
)
def test_a_pipeline_plays(section: Any, fit_wh: Any, size_wh: tuple[int, int], wait_until: Any) -> None:
    child = start(opening(section, "gstreamer", key="k", fit_wh=fit_wh))
    digests, sizes, tints = set(), set(), []

    def played() -> bool:
        picture = child.receive(0.1)
        if picture is not None:
            digests.add(picture.digest)
            sizes.add((picture.width, picture.height))
            image = child.show(picture)
            tints.append(abs(image[:, :, 0].astype(int) - image[:, :, 2]).max())
        return len(tints) > 10 or child.ended

    wait_until(played, "pictures", deadline_s=PATIENCE_S)

    assert not child.ended, child.reason()
    assert child.opened
    assert sizes == {size_wh}
    assert len(digests) > 2, "the ball moves"
    assert max(tints) < 16, "it is white on black: blue and red are equal, and no fourth channel is in their place"
    end(child)


@pytest.mark.parametrize("auth", ["basic", "digest"])
def test_a_network_camera_plays_with_a_password_of_any_characters(make_camera: Any, wait_until: Any, auth: str) -> None:
    odd = 'p@ss/w:ö%"\\ !'
    camera = make_camera(fps=50, size_wh=(320, 240), username="me", password=odd, auth=auth)
    section = config.Rtsp(url=camera.url, username="me", codec="mjpeg")
    child = start(opening(section, "gstreamer", key="k", password=odd), odd)
    found: list[Any] = []

    def played() -> bool:
        picture = child.receive(0.1)
        if picture is not None:
            found.append(picture)
            child.give_back(picture)
        return len(found) > 10 or child.ended

    wait_until(played, "pictures", deadline_s=PATIENCE_S)

    assert not child.ended, child.reason()
    assert (found[-1].width, found[-1].height) == (320, 240)
    end(child)


def reason_of(child: Child, wait_until: Any) -> str:
    def ended() -> bool:
        child.receive(0.1)
        return child.ended

    wait_until(ended, "the end", deadline_s=PATIENCE_S)
    reason = child.reason()
    end(child)
    return reason


def test_a_wrong_password_is_told_as_such(make_camera: Any, wait_until: Any) -> None:
    right, wrong = "x y", "Sesam7"
    camera = make_camera(username="me", password=right)
    section = config.Rtsp(url=camera.url, username="me", codec="mjpeg")

    child = start(opening(section, "gstreamer", key="k", password=wrong), wrong)

    assert reason_of(child, wait_until) == "refuses the user name or password (401 Unauthorized)"


@pytest.mark.skipif(shutil.which("gst-inspect-1.0") is None, reason="apt-get install gstreamer1.0-tools")
@pytest.mark.parametrize("codec", ["h264", "h265"])
def test_an_element_that_is_not_installed_is_named(codec: Any, wait_until: Any) -> None:
    if missing_elements(["nvv4l2decoder"]) == []:
        pytest.skip("this machine has NVIDIA's decoder")
    plan = opening(config.Rtsp(url="rtsp://127.0.0.1:1/x", codec=codec), "gstreamer", key="k")

    child = Child(plan, name="gate", digest_s=None, mask=str, python=PYTHON)

    assert reason_of(child, wait_until).startswith("needs the GStreamer element nv")


@pytest.mark.parametrize("codec", ["h264", "h265"])
def test_pipelines_for_compressed_video_can_be_parsed(codec: Any, wait_until: Any) -> None:
    """No encoder is at hand: the decoder is left out, and nobody listens at the address."""
    plan = opening(config.Rtsp(url="rtsp://127.0.0.1:1/x", codec=codec), "gstreamer", key="k")
    cut = plan.target.partition("nvv4l2decoder")[0] + "appsink"

    child = Child(replace(plan, target=cut), name="gate", digest_s=None, mask=str, python=PYTHON)

    assert reason_of(child, wait_until) == "cannot be reached at that address"

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge import config
from edge.errors import ConfigError
from edge.sources.pipelines import Opening, address, backend_of, elements_of, fit, opening

KEY = "streams[0].source"
SIZES = st.tuples(st.integers(16, 8000), st.integers(16, 8000))
NVMM = "video/x-raw(memory:NVMM)"
SINK = "appsink drop=true max-buffers=1 sync=false"


def gstreamer(section: Any, **options: Any) -> str:
    return opening(section, "gstreamer", key=KEY, **options).target


def test_a_csi_camera_is_scaled_to_the_model_by_the_vic() -> None:
    section = config.Csi(sensor=1, size=(1920, 1080), fps=30)

    assert gstreamer(section, fit_wh=(640, 640)) == (
        f"nvarguscamerasrc sensor-id=1 ! {NVMM},width=1920,height=1080,framerate=30/1,format=NV12 ! nvvidconv"
        f" ! video/x-raw,width=640,height=360,format=BGRx ! {SINK}"
    )


def test_a_camera_that_is_turned_by_90_degrees_is_scaled_in_its_new_shape() -> None:
    assert "nvvidconv flip-method=1 ! video/x-raw,width=360,height=640," in gstreamer(
        config.Csi(flip=1), fit_wh=(640, 640)
    )
    assert "nvvidconv flip-method=2 ! video/x-raw,width=640,height=360," in gstreamer(
        config.Csi(flip=2), fit_wh=(640, 640)
    )


def test_a_size_may_be_chosen_and_scaling_refused() -> None:
    assert "width=800,height=600,format=BGRx" in gstreamer(config.Csi(scale=(800, 600)), fit_wh=(640, 640))
    assert "video/x-raw,format=BGRx" in gstreamer(config.Csi(scale="none"), fit_wh=(640, 640))
    assert "video/x-raw,format=BGRx" in gstreamer(config.Csi())


def test_mjpeg_of_a_usb_camera_is_decoded_by_hardware() -> None:
    section = config.V4l2(device="/dev/v4l/by-id/usb-cam-index0", size=(1280, 720), fps=30)

    assert gstreamer(section, fit_wh=(640, 640)) == (
        'v4l2src device="/dev/v4l/by-id/usb-cam-index0" ! image/jpeg,width=1280,height=720,framerate=30/1'
        f" ! nvv4l2decoder mjpeg=1 ! nvvidconv ! video/x-raw,width=640,height=360,format=BGRx ! {SINK}"
    )


def test_raw_pictures_of_a_usb_camera_go_through_memory_that_nvvidconv_can_read() -> None:
    assert gstreamer(config.V4l2(format="yuyv"), fit_wh=(640, 640)) == (
        f'v4l2src device="/dev/video0" ! video/x-raw,format=YUY2 ! nvvidconv ! {NVMM},format=NV12 ! nvvidconv'
        f" ! video/x-raw,format=BGRx ! {SINK}"
    )


@pytest.mark.parametrize(
    ("codec", "decoding"),
    [
        ("h264", "rtph264depay ! h264parse ! nvv4l2decoder enable-max-performance=1"),
        ("h265", "rtph265depay ! h265parse ! nvv4l2decoder enable-max-performance=1"),
        ("mjpeg", "rtpjpegdepay ! nvv4l2decoder mjpeg=1"),
    ],
)
def test_a_network_camera_is_decoded_by_hardware_and_not_scaled_as_its_size_is_unknown(
    codec: Any, decoding: str
) -> None:
    section = config.Rtsp(url="rtsp://camera:554/1?profile=a&b", codec=codec, latency_ms=50)

    assert gstreamer(section, fit_wh=(640, 640)) == (
        'rtspsrc location="rtsp://camera:554/1?profile=a&b" protocols=tcp latency=50 drop-on-latency=true'
        f" timeout=5000000 tcp-timeout=5000000 ! {decoding} ! nvvidconv ! video/x-raw,format=BGRx ! {SINK}"
    )


def test_ffmpeg_is_told_the_transport_and_v4l2_the_format_before_the_size() -> None:
    network = opening(config.Rtsp(url="rtsp://camera/1", transport="udp", stall_s=5), "ffmpeg", key=KEY)
    usb = opening(config.V4l2(size=(640, 480), fps=15, format="mjpeg"), "v4l2", key=KEY)

    assert network.target == "rtsp://camera/1"
    assert network.environ["OPENCV_FFMPEG_CAPTURE_OPTIONS"] == "rtsp_transport;udp"
    assert int(network.environ["OPENCV_FFMPEG_THREADS"]) <= 2
    assert network.parameters["CAP_PROP_READ_TIMEOUT_MSEC"] > 5000
    assert usb.settings == (
        ("CAP_PROP_FOURCC", 0x47504A4D),  # 'MJPG', as <linux/videodev2.h> has it
        ("CAP_PROP_FRAME_WIDTH", 640),
        ("CAP_PROP_FRAME_HEIGHT", 480),
        ("CAP_PROP_FPS", 15),
    )
    assert opening(config.V4l2(), "v4l2", key=KEY).settings == ()


def test_credentials_are_encoded_and_do_not_show() -> None:
    section = config.Rtsp(url="rtsp://camera:8554/1", username="me@site")
    odd = 'a"b!c d/:\\é'
    plan = opening(section, "gstreamer", key=KEY, password=odd)

    assert 'location="rtsp://me%40site:a%22b%21c%20d%2F%3A%5C%C3%A9@camera:8554/1"' in plan.target
    assert "a%22b" not in repr(plan)
    assert address(section, key=KEY, password=None) == "rtsp://me%40site@camera:8554/1"


@pytest.mark.parametrize("bad", ["a\\b", "caf\u00e9", "a\x7f"])
def test_what_would_break_out_of_a_pipeline_is_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match=r"^streams\[0\]\.source\.url: holds .* cannot stand in a GStreamer pipeline"):
        gstreamer(config.Rtsp(url=f"rtsp://camera/{bad}"))
    with pytest.raises(ConfigError, match=r"source\.device: holds"):
        gstreamer(config.V4l2(device=f"/dev/{bad}"))


@given(st.text(min_size=1), st.text())
def test_no_password_adds_an_element(username: str, password: str) -> None:
    plain = gstreamer(config.Rtsp(url="rtsp://camera/1"))
    secret = gstreamer(config.Rtsp(url="rtsp://camera/1", username=username), password=password)

    assert elements_of(secret) == elements_of(plain)
    assert secret.count('"') == plain.count('"') == 2


@given(SIZES, SIZES)
def test_a_scaled_picture_fits_is_even_and_keeps_its_shape(
    camera_wh: tuple[int, int], model_wh: tuple[int, int]
) -> None:
    width, height = fit(camera_wh, model_wh)

    assert width % 2 == height % 2 == 0
    assert 2 <= width <= max(2, min(camera_wh[0], model_wh[0]))
    assert 2 <= height <= max(2, min(camera_wh[1], model_wh[1]))
    ratio = min(Fraction(1), Fraction(model_wh[0], camera_wh[0]), Fraction(model_wh[1], camera_wh[1]))
    assert width > camera_wh[0] * ratio - 2 or width == 2
    assert height > camera_wh[1] * ratio - 2 or height == 2


@pytest.mark.parametrize(
    ("fps", "rate"), [(30.0, "30/1"), (29.97, "30000/1001"), (59.94, "60000/1001"), (7.5, "15/2"), (0.5, "1/2")]
)
def test_frame_rates_are_fractions(fps: float, rate: str) -> None:
    assert f"framerate={rate}," in gstreamer(config.Csi(fps=fps))


def test_elements_are_told_apart_from_caps() -> None:
    assert elements_of(gstreamer(config.V4l2(format="yuyv"))) == ["v4l2src", "nvvidconv", "appsink"]


@pytest.mark.parametrize(
    ("section", "jetson", "has_gstreamer", "backend"),
    [
        (config.Csi(), False, False, "gstreamer"),
        (config.V4l2(), True, True, "gstreamer"),
        (config.V4l2(), True, False, "v4l2"),
        (config.V4l2(), False, True, "v4l2"),
        (config.V4l2(backend="gstreamer"), False, False, "gstreamer"),
        (config.Rtsp(url="rtsp://a/b"), True, True, "gstreamer"),
        (config.Rtsp(url="rtsp://a/b"), True, False, "ffmpeg"),
        (config.Rtsp(url="rtsp://a/b"), False, True, "ffmpeg"),
        (config.Rtsp(url="rtsp://a/b", backend="ffmpeg"), True, True, "ffmpeg"),
    ],
)
def test_auto_takes_gstreamer_on_a_jetson_whose_opencv_has_it(
    section: Any, jetson: bool, has_gstreamer: bool, backend: str
) -> None:
    assert backend_of(section, jetson=jetson, gstreamer=has_gstreamer) == backend


def test_a_csi_camera_is_given_time_to_end_its_session() -> None:
    csi, network = opening(config.Csi(), "gstreamer", key=KEY), Opening("ffmpeg", "rtsp://a/b")

    assert not csi.abrupt
    assert csi.grace_s >= 5
    assert network.abrupt

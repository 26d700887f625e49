"""How each camera is opened: GStreamer pipelines, FFmpeg's options, V4L2's properties. Pure.

Every pipeline is built here, and every value that goes into one is checked here. On a Jetson, decoding and scaling are
done by hardware: nvvidconv runs on the VIC, nvv4l2decoder on NVDEC (NVJPG for MJPEG). Neither gives BGR, and
videoconvert would take a core at 1080p; so pipelines end with BGRx, of which ``edge.sources.grabber`` drops the fourth
channel. None of these pipelines has been run on a Jetson yet; docs/cameras.md says what was tested instead.

Sources: "Accelerated GStreamer" and "Camera Development" of NVIDIA's Jetson Linux Developer Guide (elements,
flip-method, memory:NVMM); gst-inspect-1.0 1.22 for rtspsrc and v4l2src; OpenCV's cap_ffmpeg_impl.hpp and cap_v4l.cpp.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, TypeAlias
from urllib.parse import quote, urlsplit, urlunsplit

from edge import config
from edge.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Backend", "Opening", "address", "backend_of", "elements_of", "fit", "opening"]

Backend: TypeAlias = Literal["ffmpeg", "gstreamer", "v4l2"]

# appsink hands over the newest picture, does not keep to the stream's own clock, and drops what nobody takes.
_SINK = "appsink drop=true max-buffers=1 sync=false"
_NVMM = "video/x-raw(memory:NVMM)"
# rtspsrc's: until a camera that does not answer counts as gone, in microseconds.
_RTSP_TIMEOUT_US = 5_000_000
_DEPAY = {
    "h264": ["rtph264depay", "h264parse", "nvv4l2decoder enable-max-performance=1"],
    "h265": ["rtph265depay", "h265parse", "nvv4l2decoder enable-max-performance=1"],
    "mjpeg": ["rtpjpegdepay", "nvv4l2decoder mjpeg=1"],
}
_FOURCC = {"mjpeg": "MJPG", "yuyv": "YUYV"}
# nvvidconv's flip-methods that exchange width and height: both rotations by 90 degrees and both diagonals.
_TRANSPOSING = frozenset({1, 3, 5, 7})
# How long a camera may take to be released before its process is killed. Argus keeps a session whose client was killed,
# and gives no new one until nvargus-daemon is restarted.
_GRACE_S: dict[str, float] = {"csi": 5.0, "gstreamer": 2.0, "v4l2": 1.0, "ffmpeg": 0.3}


@dataclass(frozen=True, slots=True)
class Opening:
    """All that a camera's process needs to know, and its daemon of it."""

    backend: Backend
    target: str = field(repr=False)
    """Address, pipeline or device; may hold a password."""
    parameters: Mapping[str, float] = field(default_factory=dict)
    """Properties of ``cv2`` to open with, by name."""
    settings: tuple[tuple[str, float], ...] = ()
    """Properties to set once it is open, in this order."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """For the process, where the daemon's own does not say otherwise."""
    grace_s: float = 1.0
    """How long releasing the camera may take."""
    abrupt: bool = True
    """Whether killing the process does no harm beyond it."""
    fps: float | None = None
    """What the camera is asked for."""


def backend_of(section: config.Csi | config.V4l2 | config.Rtsp, *, jetson: bool, gstreamer: bool) -> Backend:
    """What reads a camera.

    Args:
        section: of the deployment.
        jetson: whether this machine is one.
        gstreamer: whether this OpenCV has GStreamer.
    """
    if isinstance(section, config.Csi):
        return "gstreamer"
    if section.backend != "auto":
        return section.backend
    if jetson and gstreamer:
        return "gstreamer"
    return "v4l2" if isinstance(section, config.V4l2) else "ffmpeg"


def opening(
    section: config.Csi | config.V4l2 | config.Rtsp,
    backend: Backend,
    *,
    key: str,
    password: str | None = None,
    fit_wh: tuple[int, int] | None = None,
) -> Opening:
    """How to open a camera.

    Args:
        section: of the deployment.
        backend: from ``backend_of``.
        key: what the section is called in the deployment, for messages.
        password: of an RTSP camera's user.
        fit_wh: input size of the model, for ``scale: model``.

    Raises:
        ConfigError: a value cannot stand in a pipeline, or an address holds a password.
    """
    if isinstance(section, config.Csi):
        return _csi(section, fit_wh)
    if isinstance(section, config.V4l2):
        return _v4l2(section, backend, key, fit_wh)
    return _rtsp(section, backend, key, password)


def address(section: config.Rtsp, *, key: str, password: str | None) -> str:
    """The camera's address with its credentials, percent-encoded, so that they may hold any character.

    Raises:
        ConfigError: the address names a user itself.
    """
    parts = urlsplit(section.url)
    if "@" in parts.netloc:
        raise ConfigError(
            [f"{key}.url: names a user; put that into {key}.username, and the password into password_file"]
        )
    if section.username is None:
        return section.url
    account = quote(section.username, safe="")
    if password is not None:
        account += ":" + quote(password, safe="")
    return urlunsplit(parts._replace(netloc=f"{account}@{parts.netloc}"))


def fit(camera_wh: tuple[int, int], fit_wh: tuple[int, int]) -> tuple[int, int]:
    """The largest size of the camera's shape that fits into another and is not larger than the camera's; even."""
    ratio = min(Fraction(1), *(Fraction(inner, outer) for inner, outer in zip(fit_wh, camera_wh, strict=True)))
    width, height = (max(2, int(side * ratio) // 2 * 2) for side in camera_wh)
    return width, height


def elements_of(pipeline: str) -> list[str]:
    """Names of the elements that a pipeline needs, in its order, each once. What stands between them are caps."""
    names = [part.split()[0] for part in pipeline.split(" ! ")]
    return list(dict.fromkeys(name for name in names if "/" not in name))


def _csi(section: config.Csi, fit_wh: tuple[int, int] | None) -> Opening:
    width, height = section.size
    upright = (height, width) if section.flip in _TRANSPOSING else (width, height)
    source = f"nvarguscamerasrc sensor-id={section.sensor}"
    caps = f"{_NVMM},width={width},height={height},framerate={_rate(section.fps)},format=NV12"
    convert = f"nvvidconv flip-method={section.flip}" if section.flip else "nvvidconv"
    pipeline = " ! ".join([source, caps, convert, _bgrx(_scaled(section.scale, upright, fit_wh)), _SINK])
    return Opening("gstreamer", pipeline, grace_s=_GRACE_S["csi"], abrupt=False, fps=section.fps)


def _v4l2(section: config.V4l2, backend: Backend, key: str, fit_wh: tuple[int, int] | None) -> Opening:
    if backend == "v4l2":
        settings: list[tuple[str, float]] = []
        if section.format != "auto":
            # Before the size: drivers have sizes for each format.
            settings.append(("CAP_PROP_FOURCC", int.from_bytes(_FOURCC[section.format].encode(), "little")))
        if section.size is not None:
            settings += [("CAP_PROP_FRAME_WIDTH", section.size[0]), ("CAP_PROP_FRAME_HEIGHT", section.size[1])]
        if section.fps is not None:
            settings.append(("CAP_PROP_FPS", section.fps))
        return Opening("v4l2", section.device, settings=tuple(settings), grace_s=_GRACE_S["v4l2"], fps=section.fps)
    asked = [] if section.size is None else [f"width={section.size[0]}", f"height={section.size[1]}"]
    asked += [] if section.fps is None else [f"framerate={_rate(section.fps)}"]
    source = f"v4l2src device={_quoted(section.device, f'{key}.device')}"
    if section.format == "yuyv":
        # Into NVMM and out again: nvvidconv wants its own memory on one side at least.
        decode = [",".join(["video/x-raw", "format=YUY2", *asked]), "nvvidconv", f"{_NVMM},format=NV12", "nvvidconv"]
    else:
        # auto as well: what most USB cameras need for more than 640x480 at 30 frames a second.
        decode = [",".join(["image/jpeg", *asked]), "nvv4l2decoder mjpeg=1", "nvvidconv"]
    pipeline = " ! ".join([source, *decode, _bgrx(_scaled(section.scale, section.size, fit_wh)), _SINK])
    return Opening("gstreamer", pipeline, grace_s=_GRACE_S["gstreamer"], fps=section.fps)


def _rtsp(section: config.Rtsp, backend: Backend, key: str, password: str | None) -> Opening:
    url = address(section, key=key, password=password)
    if backend == "ffmpeg":
        # OpenCV's own deadlines rather than FFmpeg's: "timeout" makes FFmpeg 4 wait for connections instead. They only
        # keep an orphan from waiting for ever; the daemon's deadlines are shorter.
        limits = {"CAP_PROP_OPEN_TIMEOUT_MSEC": 60_000, "CAP_PROP_READ_TIMEOUT_MSEC": 2000 * section.stall_s + 10_000}
        environ = {
            "OPENCV_FFMPEG_CAPTURE_OPTIONS": f"rtsp_transport;{section.transport}",
            # FFmpeg decodes as many frames at once as it has threads, each a frame of delay; OpenCV takes all cores.
            "OPENCV_FFMPEG_THREADS": "2",
        }
        return Opening("ffmpeg", url, parameters=limits, environ=environ, grace_s=_GRACE_S["ffmpeg"])
    source = " ".join(
        [
            f"rtspsrc location={_quoted(url, f'{key}.url')} protocols={section.transport}",
            f"latency={section.latency_ms} drop-on-latency=true",
            f"timeout={_RTSP_TIMEOUT_US} tcp-timeout={_RTSP_TIMEOUT_US}",
        ]
    )
    # How large its pictures are is known only when it plays, so that "model" has nothing to keep the shape of.
    scaled = None if isinstance(section.scale, str) else section.scale
    pipeline = " ! ".join([source, *_DEPAY[section.codec], "nvvidconv", _bgrx(scaled), _SINK])
    return Opening("gstreamer", pipeline, grace_s=_GRACE_S["gstreamer"])


def _scaled(
    scale: str | tuple[int, int], camera_wh: tuple[int, int] | None, fit_wh: tuple[int, int] | None
) -> tuple[int, int] | None:
    """The size to ask nvvidconv for; None leaves it as it is."""
    if not isinstance(scale, str):
        return scale
    if scale == "none" or camera_wh is None or fit_wh is None:
        return None
    return fit(camera_wh, fit_wh)


def _bgrx(size_wh: tuple[int, int] | None) -> str:
    size = "" if size_wh is None else f",width={size_wh[0]},height={size_wh[1]}"
    return f"video/x-raw{size},format=BGRx"


def _rate(fps: float) -> str:
    """As GStreamer wants it: 29.97 is 30000/1001, as everywhere in video."""
    rate = Fraction(fps).limit_denominator(1001)
    ntsc = Fraction(round(fps) * 1000, 1001)
    if abs(float(ntsc) - fps) < 0.005:
        rate = ntsc
    return f"{rate.numerator}/{rate.denominator}"


def _quoted(value: str, key: str) -> str:
    """A text value of a property, in quotes, in which nothing but quotes and backslashes means anything.

    Raises:
        ConfigError: it holds one of those, or a character that does not print.
    """
    bad = re.search(r"[\"\\]|[^ -~]", value)
    if bad is not None:
        raise ConfigError([f"{key}: holds {bad[0]!r}, which cannot stand in a GStreamer pipeline; percent-encode it"])
    return f'"{value}"'

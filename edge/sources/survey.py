"""What can be said of a source without opening it: what it is, and what it lacks."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from edge import config
from edge.errors import ConfigError, DataError, DeviceError, EdgeError, SourceError
from edge.sources.credential import find_password
from edge.sources.pipelines import backend_of, elements_of, opening
from edge.sources.video import opencv_build

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["describe", "is_jetson", "missing_elements", "problems"]

logger = logging.getLogger(__name__)

_INSPECT_S = 30.0
# Where nvargus-daemon listens.
_ARGUS_SOCKET = "tmp/argus_socket"


def describe(section: config.Source) -> str:
    """What a section reads, in one phrase without secrets."""
    match section:
        case config.Folder():
            kind = "pictures as they come into" if section.watch else "pictures of"
            return f"{kind} {section.path}"
        case config.Video():
            return f"video {section.path}"
        case config.TestPattern():
            return f"test pattern, {_size(section.size)} at {section.fps:g} frames a second"
        case config.Csi():
            return f"CSI sensor {section.sensor}, {_size(section.size)} at {section.fps:g} frames a second"
        case config.V4l2():
            size = "its own size" if section.size is None else _size(section.size)
            rate = "" if section.fps is None else f" at {section.fps:g} frames a second"
            return f"V4L2 {section.device}, {size}{rate}"
        case config.Rtsp():
            account = "" if section.username is None else f" as {section.username}"
            return f"{section.url}{account} over {section.transport}"
    raise TypeError(f"no such source: {type(section).__name__}")


def problems(
    stream: config.Stream,
    *,
    key: str,
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
    gstreamer: bool | None = None,
    inspect: Callable[[list[str]], list[str] | None] | None = None,
) -> list[EdgeError]:
    """What would keep a stream from running.

    Args:
        stream: the section of the deployment.
        key: what its source is called there.
        root: where /dev and /proc are.
        environ: where a password may be.
        gstreamer: whether OpenCV has GStreamer; None: ask it.
        inspect: says which of some GStreamer elements are missing, or None where that cannot be known; default:
            ``missing_elements``.
    """
    section = stream.source
    match section:
        case config.Folder() | config.Video():
            path = Path(section.path)
            return [] if path.exists() else [DataError(f"{key}.path: {path}: no such file or folder")]
        case config.Csi() | config.V4l2() | config.Rtsp():
            found = gstreamer if gstreamer is not None else opencv_build()[1]
            return _camera_problems(section, stream.name, key, root, environ, found, inspect or missing_elements)
        case _:
            return []


def is_jetson(root: Path = Path("/")) -> bool:
    """Whether this machine is one, by its device tree."""
    try:
        return b"nvidia,tegra" in (root / "proc/device-tree/compatible").read_bytes()
    except OSError:
        return False


def missing_elements(names: list[str]) -> list[str] | None:
    """Those of some GStreamer elements that are not installed; None if gst-inspect-1.0 is not there to be asked."""
    program = shutil.which("gst-inspect-1.0")
    if program is None:
        return None
    missing = []
    for name in names:
        try:
            done = subprocess.run([program, "--exists", name], capture_output=True, timeout=_INSPECT_S, check=False)  # noqa: S603 - names are ours
        except (OSError, subprocess.TimeoutExpired) as error:
            logger.warning("gst-inspect-1.0 does not answer: %s", error)
            return None
        if done.returncode:
            missing.append(name)
    return missing


def _camera_problems(
    section: config.Csi | config.V4l2 | config.Rtsp,
    stream: str,
    key: str,
    root: Path,
    environ: Mapping[str, str],
    gstreamer: bool,
    inspect: Callable[[list[str]], list[str] | None],
) -> list[EdgeError]:
    jetson = is_jetson(root)
    backend = backend_of(section, jetson=jetson, gstreamer=gstreamer)
    found: list[EdgeError] = []
    password = None
    if isinstance(section, config.Rtsp):
        try:
            password = find_password(section, stream=stream, key=key, environ=environ)
        except ConfigError as error:
            found.append(error)
    try:
        plan = opening(section, backend, key=key, password=password)
    except ConfigError as error:
        return [*found, error]
    if isinstance(section, config.V4l2):
        found += _device_problems(root / section.device.lstrip("/"), section.device, key)
    if isinstance(section, config.Csi) and jetson and not (root / _ARGUS_SOCKET).exists():
        found.append(
            DeviceError(f"{key}: /{_ARGUS_SOCKET} is missing: nvargus-daemon does not run (or PrivateTmp hides it)")
        )
    if backend != "gstreamer":
        return found
    if not gstreamer:
        return [*found, DeviceError(f"{key}: {_lacks_gstreamer(section)}")]
    elements = elements_of(plan.target)
    missing = inspect(elements)
    if missing is None:
        logger.warning(
            "%s: gst-inspect-1.0 is not installed: whether %s are there is unknown", key, ", ".join(elements)
        )
    elif missing:
        found.append(DeviceError(f"{key}: GStreamer has no {', '.join(missing)}; docs/cameras.md says where they are"))
    return found


def _device_problems(path: Path, device: str, key: str) -> list[EdgeError]:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return [SourceError(f"{key}.device: there is no {device}; is the camera plugged in?")]
    except OSError as error:
        return [SourceError(f"{key}.device: {device}: {error.strerror}")]
    if not stat.S_ISCHR(mode):
        return [ConfigError([f"{key}.device: {device} is no device"])]
    if not os.access(path, os.R_OK | os.W_OK):
        return [SourceError(f"{key}.device: {device} may not be opened by this user; the group video usually may")]
    return []


def _lacks_gstreamer(section: config.Source) -> str:
    text = "needs an OpenCV with GStreamer, and this one has none: on a Jetson use JetPack's (docs/cameras.md)"
    return text if isinstance(section, config.Csi) else f"{text}, or leave backend out"


def _size(size_wh: tuple[int, int]) -> str:
    return f"{size_wh[0]}x{size_wh[1]}"

"""What a soak can break, and mend again: broker, cameras, the device's /sys and /proc, the disk, the file, the clock.

Each thing is real, or stands where the daemon reads it; the daemon itself is ``benchmarks.soak_keeper``'s.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import yaml

from benchmarks.rig import Missing, free_port

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from benchmarks.rig import Broker
    from benchmarks.soak_driver import Control

__all__ = ["CAMERA", "DEVICE", "STEADY", "STREAMS", "Disk", "Site", "load_by_path"]

ROOT = Path(__file__).parents[1]
DEVICE = "soak"
STEADY = frozenset({"pattern", "video"})
"""Streams that nobody takes down by themselves."""
CAMERA = "camera"
STREAMS = STEADY | {CAMERA}

_DISK_BYTES = 4 << 20
_IDLE_C, _HOT_C = 48.0, 93.0
"""The set point is 10 under the trip point of 99."""
_RESERVE_MB = 200
_AMPLE_MB, _SCARCE_MB = 6000, 120
_RSS_MB = 100
_LEAK_FROM_MB = 1500


def load_by_path(path: Path) -> Any:
    """A module of the tests: those are found by path, and are no packages."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class Disk:
    """A small file system of our own, which can be full. Only in a mount namespace of our own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"
        folder.mkdir()

    def __enter__(self) -> Self:
        command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "soak", str(self.folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own mount
        if done.returncode:
            raise Missing(f"cannot mount a file system of {_DISK_BYTES >> 20} MB: {done.stderr.strip()}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        subprocess.run(["umount", "--lazy", str(self.folder)], check=True)  # noqa: S603, S607 - our own mount

    def fill(self) -> None:
        """Leave no byte."""
        with self._ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        if os.statvfs(self.folder).f_bavail:
            raise Missing("the disk does not fill")

    def free(self) -> None:
        """Give the space back."""
        self._ballast.unlink()


class Site:
    """Everything around the daemon."""

    def __init__(self, folder: Path, broker: Broker, control: Control, *, disk: Disk | None, camera: Any) -> None:
        """Write the device's files, the video and the deployment.

        Args:
            folder: of the run.
            broker: that runs.
            control: of the daemon's processes.
            disk: for the outbox; None: it lies on the folder's own.
            camera: that is on; see tests/rtsp_server.py.
        """
        self.broker = broker
        self.control = control
        self.disk = disk
        self.camera = camera
        self.device = _Device(folder / "device")
        self.status_port = free_port()
        self.deployment = folder / "soak.yaml"
        self._folder = folder
        self._score = 0.35
        _write_video(folder / "video.avi")
        self.cool()
        self.give_memory()
        self.deploy()

    def deploy(self) -> None:
        """Write a sound deployment file that differs from the one before: another score threshold."""
        self._score = 0.4 if self._score < 0.4 else 0.35
        self._write_deployment(yaml.safe_dump(self._document()))

    def deploy_broken(self) -> None:
        """Write a deployment file that must be refused."""
        document = self._document()
        document["streams"][0]["modle"] = "a key that does not exist"
        self._write_deployment(yaml.safe_dump(document))

    def heat(self, share: float) -> None:
        """Bring the chip to a share of the way from idle to too hot."""
        for zone in ("tj", "cpu", "gpu", "soc0"):
            self.device.heat(zone, _IDLE_C + share * (_HOT_C - _IDLE_C))

    def cool(self) -> None:
        """Bring it back to idle."""
        self.heat(0.0)

    def take_memory(self, share: float) -> None:
        """Let others take a share of the memory; all of it leaves less than the reserve."""
        self.device.available(round(_AMPLE_MB + share * (_SCARCE_MB - _AMPLE_MB)))

    def give_memory(self) -> None:
        """Give it back, and let the daemon's process have its usual size."""
        self.device.available(_AMPLE_MB)
        self._grow_to(_RSS_MB)

    def leak(self, grown_mb: float) -> None:
        """Let the daemon's process have grown, at the cost of what was available."""
        self._grow_to(_RSS_MB + grown_mb)
        self.device.available(round(_LEAK_FROM_MB - grown_mb))

    def _grow_to(self, megabytes: float) -> None:
        pages = round(megabytes * (1 << 20) / os.sysconf("SC_PAGE_SIZE"))
        self.device.write("proc/self/statm", f"{2 * pages} {pages} 2000 1 0 4000 0")

    def _write_deployment(self, text: str) -> None:
        temporary = self.deployment.with_suffix(".new")
        temporary.write_text(text)
        temporary.replace(self.deployment)

    def _document(self) -> dict[str, Any]:
        outbox = (self._folder if self.disk is None else self.disk.folder) / "outbox.db"
        camera = {"type": "rtsp", "url": self.camera.url, "stall_s": 1.5, "frozen_s": 2.0, "backend": "ffmpeg"}
        streams: list[dict[str, Any]] = [
            {"name": "pattern", "source": {"type": "pattern", "size": [320, 240], "fps": 10}},
            {"name": "video", "source": {"type": "video", "path": "video.avi", "fps": 10}},
            {"name": CAMERA, "source": camera},
        ]
        return {
            "version": 1,
            "device": DEVICE,
            "models": [
                {
                    "name": "fastestdet",
                    "path": str(ROOT / "tests/data/models/fastestdet.onnx"),
                    "input": {"resize": "stretch", "color": "bgr", "divide_by": 255},
                    "task": {"type": "detection", "layout": "fastestdet", "labels": "coco80", "score": self._score},
                    "engine": {"backend": "onnxruntime", "precision": "fp32", "threads": 1},
                }
            ],
            "streams": streams,
            "mqtt": {"port": self.broker.port, "keepalive_s": 5, "outbox": {"path": str(outbox), "max_mb": 2}},
            "monitor": {"period_s": 0.5, "jtop": "off", "telemetry_s": 5},
            "governor": {"memory_reserve_mb": _RESERVE_MB},
            "watch": {"hang_s": 2},
            "status": {"port": self.status_port},
        }


class _Device:
    """An Orin NX as a folder of files, each replaced at once: the daemon reads them while we write."""

    def __init__(self, root: Path) -> None:
        orin = load_by_path(ROOT / "tests/edge/monitor/orin.py")
        self._board = orin.Orin(root, "nx16")
        self._board.write = self.write
        self._root = root

    def write(self, path: str, content: object, *, end: str = "\n") -> Path:
        """Write a file; ``path`` starts with sys or proc."""
        file = self._root / path
        temporary = file.with_name(f".{file.name}.new")
        temporary.write_text(f"{content}{end}")
        return temporary.replace(file)

    def heat(self, zone: str, celsius: float) -> None:
        """Let a zone be so hot."""
        self._board.heat(zone, celsius)

    def available(self, megabytes: int) -> None:
        """Let so much memory be available, in MiB."""
        self._board.available(megabytes)


def _write_video(path: Path) -> None:
    """Some of the photographs as a film."""
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 10.0, (320, 240))
    for picture in sorted((ROOT / "tests/data/images").glob("*.jpg"))[:20]:
        image = cv2.imread(str(picture))
        assert image is not None, picture
        writer.write(cv2.resize(image, (320, 240)))
    writer.release()

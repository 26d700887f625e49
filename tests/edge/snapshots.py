"""Snapshots for tests: a daemon at work on an Orin Nano, one just started, and one with every trouble at once."""

from __future__ import annotations

from typing import Any

from edge.events import Event
from edge.monitor.reading import Memory, Pressure, Reading, Trips
from edge.status import GovernorState, Histogram, ModelState, PartState, PublisherState, Snapshot, StreamState

STARTED_AT_UTC_US = 1_796_270_400_000_000  # 2026-12-03T04:00:00Z
BOUNDS_S = (0.01, 0.05, 0.1, 0.5)


def histogram(*counts: int, total: float = 0.0) -> Histogram:
    """Values by the bounds above; the last count is beyond them."""
    return Histogram(BOUNDS_S, counts or (0,) * (len(BOUNDS_S) + 1), total)


def stream(name: str = "belt", **changes: Any) -> StreamState:
    """A camera at work: 1000 frames captured, 600 of them inferred."""
    values: dict[str, Any] = {
        "name": name,
        "model": "yolox",
        "source": "rtsp://cam-1/main, GStreamer",
        "state": "live",
        "trouble": None,
        "captured": 1000,
        "inferred": 600,
        "failed": 1,
        "dropped": {"overload": 100, "governor": 298},
        "waiting": 1,
        "restarts": 2,
        "last_frame_age_s": 0.02,
        "latency_s": histogram(0, 400, 190, 10, 0, total=33.5),
        "fps_in": 30.0,
        "fps": 19.9,
    }
    return StreamState(**{**values, **changes})


def model(name: str = "yolox", **changes: Any) -> ModelState:
    """A model at work, held to 20 frames a second."""
    values: dict[str, Any] = {
        "name": name,
        "running": name,
        "precision": "int8",
        "digest": "695e750a5d57",
        "description": "yolox_nano.plan: TensorRT 10.3, 1x3x416x416",
        "inferred": 600,
        "busy_s": 0.012,
        "limit_fps": 20.0,
        "inference_s": histogram(10, 580, 10, 0, 0, total=18.25),
    }
    return ModelState(**{**values, **changes})


def publisher(**changes: Any) -> PublisherState:
    """A broker that takes what it is given."""
    values: dict[str, Any] = {
        "broker": "10.0.0.2:1883",
        "connected": True,
        "trouble": None,
        "published": 600,
        "acknowledged": 609,
        "dropped": 0,
        "pending": 3,
        "location": "/var/lib/jetson-edge/outbox.db",
        "taken_up": 12,
    }
    return PublisherState(**{**values, **changes})


def reading(**changes: Any) -> Reading:
    """An Orin Nano with jtop."""
    values: dict[str, Any] = {
        "at_s": 5000.0,
        "memory": Memory(
            total_bytes=7_990_587_392,
            available_bytes=3_817_848_832,
            swap_total_bytes=3_995_291_648,
            swap_used_bytes=1_048_576,
            rss_bytes=612_368_384,
            gpu_bytes=391_168_000,
            pressure=Pressure(some_avg10_percent=1.5, full_avg10_percent=0.25),
        ),
        "temperatures_c": {"cpu": 82.1, "gpu": 83.5, "tj": 84.2},
        "trips": {"tj": Trips(throttle_c=95.0, shutdown_c=104.5), "cpu": Trips(throttle_c=None, shutdown_c=104.5)},
        "throttling": (),
        "over_current_events": {"average": 0, "instantaneous": 3},
        "power_mw": {"VDD_IN": 14210, "VDD_SOC": 3005},
        "total_power_mw": 14210,
        "gpu_load_percent": 71.3,
        "gpu_clock_hz": 918_000_000,
        "dla_active": {"dla0": True},
        "fan_percent": 100.0,
        "power_mode": "15W",
        "jetson_clocks": False,
        "jtop": True,
    }
    return Reading(**{**values, **changes})


def event(
    kind: Any = "rate_limited", text: str = "model yolox: 20 frames a second, since tj is 84.2 C", **more: Any
) -> Event:
    """Something that happened after an hour."""
    values: dict[str, Any] = {"severity": "warning", "at_utc_us": STARTED_AT_UTC_US + 3_600_000_000, "model": "yolox"}
    return Event(kind, text, **{**values, **more})


def snapshot(**changes: Any) -> Snapshot:
    """A daemon that has worked for an hour, and is ready."""
    values: dict[str, Any] = {
        "device": "line3",
        "version": "0.1.0",
        "deployment": "/etc/jetson-edge/line3.yaml",
        "started_at_utc_us": STARTED_AT_UTC_US,
        "uptime_s": 3725.5,
        "state": "running",
        "streams": [stream()],
        "models": [model()],
        "publisher": publisher(),
        "parts": [PartState("capture-belt", "running", 0, None), PartState("monitor", "running", 1, None)],
        "governor": GovernorState("limited", "tj is 84.2 C", 85.0, "tj", 84.2),
        "reading": reading(),
        "event_counts": {("started", "info"): 1, ("rate_limited", "warning"): 4, ("camera_lost", "warning"): 2},
        "recent_events": [event(fields={"limit_fps": 20.0})],
    }
    return Snapshot(**{**values, **changes})


def new() -> Snapshot:
    """A daemon that has just been started, off the Jetson: nothing is known yet."""
    return snapshot(
        uptime_s=0.25,
        state="starting",
        streams=[
            stream(
                state="opening",
                captured=0,
                inferred=0,
                failed=0,
                dropped={},
                waiting=0,
                restarts=0,
                last_frame_age_s=None,
                latency_s=histogram(),
                fps_in=0.0,
                fps=0.0,
            )
        ],
        models=[
            model(
                running=None,
                precision=None,
                digest=None,
                description=None,
                inferred=0,
                busy_s=None,
                limit_fps=None,
                inference_s=histogram(),
            )
        ],
        publisher=publisher(
            connected=False, trouble="is not connected yet", published=0, acknowledged=0, pending=0, taken_up=0
        ),
        parts=[],
        governor=GovernorState("full", None, None, None, None),
        reading=None,
        event_counts={},
        recent_events=[],
        not_ready=["the daemon is starting"],
    )


def troubled() -> Snapshot:
    """A daemon with every trouble at once, and names that want to be escaped."""
    lost = stream(
        'gate "<b>north</b>"\\',
        state="lost",
        trouble="no frame for 5 s & counting",
        failed=12,
        last_frame_age_s=75.0,
        fps_in=0.0,
        fps=0.0,
    )
    return snapshot(
        streams=[stream(), lost, stream("clip", state="ended", fps=0.0, fps_in=0.0)],
        models=[model(limit_fps=0.0, busy_s=45.0), model("wide", running="narrow", limit_fps=None)],
        publisher=publisher(connected=False, trouble="does not answer", dropped=7, pending=4321),
        parts=[PartState("monitor", "restarting", 4, "[Errno 5] Input/output error"), PartState("x", "ended", 0, None)],
        governor=GovernorState("paused", "tj is 96.0 C", 85.0, "tj", 96.0),
        reading=reading(throttling=("cpu-throttle-alert",), power_mode=None, jetson_clocks=None),
        recent_events=[
            event("started", "ready: 2 streams", severity="info", model=None),
            event("camera_lost", "stream gate <b>: camera lost", stream="gate", model=None),
            event("engine_hung", "model yolox: a frame has been with the engine for 45 s", severity="error"),
        ],
        unhealthy=["model yolox: a frame has been with the engine for 45 s"],
        not_ready=["stream gate is lost: no frame for 5 s", "MQTT broker 10.0.0.2:1883 does not answer"],
    )

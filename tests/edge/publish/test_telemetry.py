from __future__ import annotations

import json
from importlib import resources
from typing import Any

import jsonschema
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edge.monitor.reading import Memory, Pressure, Reading
from edge.publish.telemetry import encode_telemetry
from edge.status import GovernorState, Histogram, ModelState, PublisherState, Snapshot, StreamState

NO_TIMES = Histogram((), (0,), 0.0)
SCHEMA = json.loads(resources.files("edge.publish").joinpath("schemas/telemetry.schema.json").read_text())


def snapshot(
    reading: Reading | None,
    *,
    state: Any = "live",
    trouble: str | None = None,
    age_s: float | None = 0.0301,
    limit_fps: float | None = None,
) -> Snapshot:
    stream = StreamState(
        name="belt",
        model="yolox",
        source="camera 0",
        state=state,
        trouble=trouble,
        captured=100,
        inferred=90,
        failed=1,
        dropped={"overload": 8},
        waiting=1,
        restarts=0,
        last_frame_age_s=age_s,
        latency_s=NO_TIMES,
        fps_in=29.974,
        fps=27.0,
    )
    model = ModelState("yolox", "yolox", "int8", "0123456789ab", "", 90, None, limit_fps, NO_TIMES)
    return Snapshot(
        device="line3",
        version="0.1.0",
        deployment="line3.yaml",
        started_at_utc_us=0,
        uptime_s=61.23456,
        state="running",
        streams=[stream],
        models=[model],
        publisher=PublisherState("127.0.0.1:1883", True, None, 90, 85, 2, 6, "memory", 3),
        parts=[],
        governor=GovernorState("limited", "tj is 84.2 C", 85.0, "tj", 84.21),
        reading=reading,
        event_counts={},
    )


def encoded(taken: Snapshot) -> Any:
    message = json.loads(encode_telemetry(taken, at_utc_us=1_700_000_000_123_456))
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.Draft202012Validator(SCHEMA).validate(message)
    return message


def test_telemetry_carries_what_the_contract_says() -> None:
    reading = Reading(
        at_s=1.0,
        memory=Memory(8_000_000_000, 3_000_000_000, 0, 0, 200_000_000, 400_000_000, Pressure(1.5, 0.0)),
        temperatures_c={"cpu": 71.312, "tj": 84.21},
        throttling=("cpu-throttle-alert",),
        over_current_events={"average": 2},
        power_mw={"VDD_IN": 14_210},
        total_power_mw=14_210,
        gpu_load_percent=93.4,
        gpu_clock_hz=918_000_000,
        dla_active={"dla0": False},
        fan_percent=60.0,
        power_mode="MAXN",
        jetson_clocks=False,
    )

    assert encoded(snapshot(reading, limit_fps=20.0)) == {
        "schema": "edge.telemetry/1",
        "device": "line3",
        "at": "2023-11-14T22:13:20.123456Z",
        "version": "0.1.0",
        "state": "running",
        "uptime_s": 61.235,
        "streams": [
            {
                "name": "belt",
                "model": "yolox",
                "state": "live",
                "captured": 100,
                "inferred": 90,
                "failed": 1,
                "dropped": {"overload": 8},
                "waiting": 1,
                "restarts": 0,
                "captured_fps": 29.97,
                "inferred_fps": 27.0,
                "last_frame_age_s": 0.03,
            }
        ],
        "models": [
            {
                "name": "yolox",
                "running": "yolox",
                "precision": "int8",
                "digest": "0123456789ab",
                "inferred": 90,
                "limit_fps": 20.0,
            }
        ],
        "governor": {
            "mode": "limited",
            "reason": "tj is 84.2 C",
            "zone": "tj",
            "temperature_c": 84.21,
            "set_point_c": 85.0,
        },
        "outbox": {"published": 90, "taken_up": 3, "acknowledged": 85, "dropped": 2, "pending": 6},
        "memory": {
            "total_bytes": 8_000_000_000,
            "available_bytes": 3_000_000_000,
            "swap_total_bytes": 0,
            "swap_used_bytes": 0,
            "rss_bytes": 200_000_000,
            "gpu_bytes": 400_000_000,
            "pressure_some_avg10_percent": 1.5,
            "pressure_full_avg10_percent": 0.0,
        },
        "temperatures_c": {"cpu": 71.31, "tj": 84.21},
        "throttling": ["cpu-throttle-alert"],
        "over_current_events": {"average": 2},
        "power_mw": {"VDD_IN": 14_210},
        "total_power_mw": 14_210,
        "gpu_load_percent": 93.4,
        "gpu_clock_hz": 918_000_000,
        "dla_active": {"dla0": False},
        "fan_percent": 60.0,
        "power_mode": "MAXN",
        "jetson_clocks": False,
    }


def test_what_is_not_known_is_absent() -> None:
    message = encoded(snapshot(None, state="lost", trouble="no frame for 5 s", age_s=None))

    assert {"memory", "temperatures_c", "power_mw", "gpu_load_percent", "power_mode"}.isdisjoint(message)
    assert "last_frame_age_s" not in message["streams"][0]
    assert "limit_fps" not in message["models"][0]
    assert message["streams"][0]["trouble"] == "no frame for 5 s"

    off_the_jetson = encoded(snapshot(Reading(1.0, Memory(8, 3, 0, 0, 1))))
    assert off_the_jetson["throttling"] == []
    assert {"temperatures_c", "over_current_events", "power_mw", "dla_active", "fan_percent"}.isdisjoint(off_the_jetson)
    assert set(off_the_jetson["memory"]).isdisjoint({"gpu_bytes", "pressure_some_avg10_percent"})


def test_a_pause_is_a_limit_of_zero() -> None:
    assert encoded(snapshot(None, limit_fps=0.0))["models"][0]["limit_fps"] == 0.0


def test_numbers_of_numpy_are_plain_numbers() -> None:
    reading = Reading(1.0, Memory(8, 3, 0, 0, 1), {"cpu": np.float32(51.5)}, power_mw={"VDD_IN": np.int64(5)})

    message = encoded(snapshot(reading))

    assert message["temperatures_c"] == {"cpu": 51.5}
    assert message["power_mw"] == {"VDD_IN": 5}


@given(st.dictionaries(st.text(), st.floats()))
def test_any_temperature_keeps_the_contract(temperatures_c: dict[str, float]) -> None:
    message = encoded(snapshot(Reading(1.0, Memory(8, 3, 0, 0, 1), temperatures_c)))

    assert len(message.get("temperatures_c", {})) <= len(temperatures_c)

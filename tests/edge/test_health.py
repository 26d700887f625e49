from __future__ import annotations

import msgspec
import pytest

from edge import config, health
from edge.status import GovernorState, Histogram, ModelState, PublisherState, StreamState

NOTHING = Histogram((1.0,), (0, 0), 0.0)
MODEL = ModelState("m", "m", "int8", "0" * 12, "m on it", 0, None, None, NOTHING)
STREAM = StreamState("gate", "m", "camera", "live", None, 0, 0, 0, {}, 0, 0, None, NOTHING)
PUBLISHER = PublisherState("broker:1883", connected=True, trouble=None, published=0, acknowledged=0, dropped=0,
                           pending=0, location="memory")  # fmt: skip
FULL = GovernorState("full", None, None, None, None)
WATCH = config.Watch(hang_s=10, load_s=100)


def unhealthy(**changes: object) -> list[str]:
    given = {"models": [MODEL], "loading_s": [], "untouched_s": [], "publisher_silent_s": 0.0, **changes}
    return health.unhealthy(WATCH, **given)  # type: ignore[arg-type]


def replaced(value: object, **changes: object) -> object:
    from dataclasses import replace

    return replace(value, **changes)  # type: ignore[type-var]


def test_a_daemon_that_moves_is_healthy() -> None:
    assert unhealthy(untouched_s=[("gate", 9.0)], loading_s=[("m", 99.0)], publisher_silent_s=5.0) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"models": [replaced(MODEL, busy_s=11.0)]}, "model m: a frame has been with the engine for 11 s"),
        ({"loading_s": [("m", 101.0)]}, "model m: loading has taken 101 s"),
        ({"untouched_s": [("gate", 12.0)]}, "stream gate: a frame has waited for 12 s"),
        ({"publisher_silent_s": 31.0}, "the publisher has not moved for 31 s"),
    ],
)
def test_what_hangs_is_named(changes: dict[str, object], reason: str) -> None:
    assert unhealthy(**changes) == [reason]


def not_ready(**changes: object) -> list[str]:
    given = {
        "state": "running", "streams": [STREAM], "models": [MODEL], "governor": FULL, "publisher": PUBLISHER, **changes,
    }  # fmt: skip
    return health.not_ready(**given)  # type: ignore[arg-type]


def test_a_limited_rate_is_ready() -> None:
    assert not_ready(governor=GovernorState("limited", "tj is 90 C", 89.0, "tj", 90.0)) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"state": "starting"}, "the daemon is starting"),
        ({"streams": [replaced(STREAM, state="lost", trouble="no route")]}, "stream gate is lost: no route"),
        ({"models": [replaced(MODEL, running=None)]}, "model m is being loaded"),
        ({"governor": GovernorState("paused", "tj is 99 C", 89.0, "tj", 99.0)}, "paused: tj is 99 C"),
        (
            {"publisher": replaced(PUBLISHER, trouble="cannot be reached (refused)")},
            "MQTT broker broker:1883 cannot be reached (refused)",
        ),
    ],
)
def test_why_results_do_not_flow_is_said(changes: dict[str, object], reason: str) -> None:
    assert not_ready(**changes) == [reason]


def test_an_ended_stream_is_no_trouble() -> None:
    assert not_ready(streams=[replaced(STREAM, state="ended")]) == []
    assert msgspec.json.encode(STREAM)

from __future__ import annotations

import json
import random
import re
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.events import KINDS, Event
from edge.publish.message import (
    ModelIdentity,
    UlidSource,
    encode_event,
    encode_result,
    encode_status,
    events_topic,
    is_result,
    json_value,
    results_topic,
    status_topic,
    telemetry_topic,
    ulid,
    utc_text,
)
from edge.types import Detection, Frame, Latency, Mask, Result

MODEL = ModelIdentity.of("yolox", precision="int8", sha256="0123456789abcdef" * 4)
ID = ulid(1_700_000_000_000, 5)


def validator(name: str) -> Any:
    text = resources.files("edge.publish").joinpath(f"schemas/{name}.schema.json").read_text()
    schema = json.loads(text)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def result(*detections: Detection, name: str | None = None) -> Result:
    frame = Frame(np.zeros((48, 64, 3), np.uint8), "belt", 17, 5.0, 1_700_000_000_123_456, name)
    return Result(frame, "yolox", list(detections), Latency(0.5, 1.25, 30.1234, 2.0))


def encoded(*detections: Detection, name: str | None = None) -> Any:
    message = json.loads(encode_result(result(*detections, name=name), message_id=ID, device="line3", model=MODEL))
    validator("result").validate(message)
    return message


def test_a_result_carries_what_the_contract_says() -> None:
    detection = Detection("person", 0, 0.98765432, (1.0, 2.004, 63.996, 48.0))

    assert encoded(detection, name="a.jpg") == {
        "schema": "edge.result/1",
        "id": ID,
        "device": "line3",
        "stream": "belt",
        "frame_id": 17,
        "captured_at": "2023-11-14T22:13:20.123456Z",
        "latency_ms": {"queue": 0.5, "preprocess": 1.25, "inference": 30.123, "postprocess": 2.0, "total": 33.873},
        "model": {"name": "yolox", "precision": "int8", "digest": "0123456789ab"},
        "image": {"width": 64, "height": 48, "name": "a.jpg"},
        "objects": [{"label": "person", "class_id": 0, "score": 0.9877, "box": [1.0, 2.0, 64.0, 48.0]}],
    }


def test_a_result_without_objects_says_so() -> None:
    assert encoded()["objects"] == []
    assert "name" not in encoded()["image"]


def test_an_answer_about_the_whole_picture_has_no_box() -> None:
    assert encoded(Detection("cat", 3, 0.5))["objects"] == [{"label": "cat", "class_id": 3, "score": 0.5}]


def test_numpy_numbers_and_keypoints_are_plain_numbers() -> None:
    detection = Detection("face", 0, np.float32(0.1), None, None, ((np.float32(1.5), -2.0),))

    assert encoded(detection)["objects"][0] == {
        "label": "face",
        "class_id": 0,
        "score": 0.1,
        "keypoints": [[1.5, -2.0]],
    }


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # pycocotools' own
def test_a_mask_is_readable_by_cocos_own_tools() -> None:
    pycocotools = pytest.importorskip("pycocotools.mask")
    mask = Mask(np.array([[1, 0, 1], [1, 1, 0]], np.bool_), (10, 20), (64, 48))

    rle = encoded(Detection("cup", 41, 0.5, (10, 20, 13, 22), mask))["objects"][0]["mask"]

    assert rle["size"] == [48, 64]
    decoded = pycocotools.decode({"size": rle["size"], "counts": rle["counts"].encode()})
    assert np.array_equal(decoded.astype(bool), mask.full())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda message: message.pop("id"),
        lambda message: message.update(id="not a ulid"),
        lambda message: message.update(captured_at="2023-11-14 22:13:20"),
        lambda message: message.update(schema="edge.result/2"),
        lambda message: message["latency_ms"].pop("total"),
        lambda message: message["objects"][0].update(box=[1, 2, 3]),
    ],
)
def test_the_schema_refuses_what_breaks_the_contract(spoil: Any) -> None:
    message = encoded(Detection("person", 0, 0.5, (1, 2, 3, 4)))
    spoil(message)

    assert not validator("result").is_valid(message)


def test_the_examples_of_the_documentation_keep_the_contract() -> None:
    text = (Path(__file__).parents[3] / "docs" / "mqtt.md").read_text(encoding="utf-8")

    examples = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", text, re.DOTALL)]

    kinds = [example["schema"].split("/")[0].removeprefix("edge.") for example in examples]
    assert kinds == ["result", "event", "telemetry", "status", "status", "status", "status"]
    for kind, example in zip(kinds, examples, strict=True):
        validator(kind).validate(example)


def test_the_schema_lets_fields_be_added() -> None:
    message = encoded(Detection("person", 0, 0.5))
    message["track"] = message["objects"][0]["track_id"] = 5

    validator("result").validate(message)


def test_the_three_statuses_keep_the_contract() -> None:
    online = encode_status("online", device="line3", at_utc_us=0, version="0.1.0", streams=["belt"], models=[MODEL])
    stopped = encode_status("offline", device="line3", reason="stopped", at_utc_us=1)
    will = encode_status("offline", device="line3", reason="connection lost")

    for payload in (online, stopped, will):
        validator("status").validate(json.loads(payload))
    assert json.loads(online)["models"] == [{"name": "yolox", "precision": "int8", "digest": "0123456789ab"}]
    assert json.loads(will) == {
        "schema": "edge.status/1",
        "device": "line3",
        "state": "offline",
        "reason": "connection lost",
    }
    assert not validator("status").is_valid(json.loads(encode_status("offline", device="line3")))
    assert not validator("status").is_valid(json.loads(encode_status("online", device="line3")))


def test_a_status_says_why_results_do_not_flow() -> None:
    known: dict[str, Any] = {"device": "line3", "at_utc_us": 0, "version": "0.1.0", "streams": ["belt"], "models": []}
    fine = encode_status("online", health="ok", **known)
    paused = encode_status("online", health="degraded", reason="paused: tj is 91.2 C", **known)
    mute = encode_status("online", health="degraded", **known)
    odd = encode_status("offline", device="line3", reason="paused: tj is 91.2 C")

    assert [validator("status").is_valid(json.loads(status)) for status in (fine, paused, mute, odd)] == [
        True,
        True,
        False,
        False,
    ]


def test_an_event_carries_what_the_contract_says() -> None:
    event = Event("camera_lost", "stream gate: no frame", "warning", 1, "gate", "yolox", {"age_s": 5.5, "why": None})

    message = json.loads(encode_event(event, message_id=ID, device="line3"))

    validator("event").validate(message)
    assert message == {
        "schema": "edge.event/1",
        "id": ID,
        "device": "line3",
        "at": "1970-01-01T00:00:00.000001Z",
        "kind": "camera_lost",
        "severity": "warning",
        "text": "stream gate: no frame",
        "stream": "gate",
        "model": "yolox",
        "fields": {"age_s": 5.5, "why": None},
    }


def test_the_schema_of_events_names_every_kind_and_takes_others() -> None:
    schema = validator("event").schema
    later: Any = "something_new"

    assert tuple(schema["properties"]["kind"]["examples"]) == KINDS
    message = json.loads(encode_event(Event(later, "new", "info", 0), message_id=ID, device="line3"))
    validator("event").validate(message)
    assert "stream" not in message
    assert message["fields"] == {}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("nan"), None),
        (float("-inf"), None),
        (np.float32(1.5), 1.5),
        (np.float64("nan"), None),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (Path("/dev/video0"), "/dev/video0"),
        ((1, {2: {"deep": np.float32("inf")}}), [1, {"2": {"deep": None}}]),
        (1 << 70, str(1 << 70)),
        ("caf\udce9", "caf?"),
        (None, None),
    ],
)
def test_fields_become_the_nearest_json(value: Any, expected: Any) -> None:
    event = Event("paused", "caf\udce9", "info", 0, fields={"value": value})

    message = json.loads(encode_event(event, message_id=ID, device="line3"))

    assert message["fields"] == {"value": expected}
    assert message["text"] == "caf?"


@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary()),
        lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.one_of(st.text(), st.integers()), inner)),
    )
)
def test_whatever_an_emitter_hands_over_becomes_json(value: Any) -> None:
    message = json.loads(encode_event(Event("paused", "p", "info", 0, fields={"v": value}), message_id=ID, device="d"))

    assert message["fields"]["v"] == json_value(value)


def test_a_file_name_of_another_encoding_does_not_stop_the_results() -> None:
    assert encoded(name="caf\udce9.jpg")["image"]["name"] == "caf?.jpg"


def test_topics() -> None:
    assert results_topic("plant/edge", "line3", "belt") == "plant/edge/line3/belt/results"
    assert status_topic("plant/edge", "line3") == "plant/edge/line3/status"
    assert events_topic("plant/edge", "line3") == "plant/edge/line3/events"
    assert telemetry_topic("plant/edge", "line3") == "plant/edge/line3/telemetry"


def test_only_results_go_to_topics_of_results() -> None:
    assert is_result(results_topic("edge", "line3", "events"))
    assert not any(is_result(topic("results", "results")) for topic in (events_topic, telemetry_topic, status_topic))


def test_ulids_known_values() -> None:
    assert ulid(0, 0) == "0" * 26
    assert ulid((1 << 48) - 1, (1 << 80) - 1) == "7" + "Z" * 25
    # The time of the example in the ULID specification.
    assert ulid(1_469_918_176_385, 0)[:10] == "01ARYZ6S41"


@given(st.integers(0, (1 << 48) - 1), st.integers(0, (1 << 80) - 1), st.integers(0, (1 << 48) - 1))
def test_the_order_of_ulids_is_the_order_of_their_times(time_ms: int, randomness: int, other_ms: int) -> None:
    if time_ms != other_ms:
        assert (ulid(time_ms, randomness) < ulid(other_ms, randomness)) == (time_ms < other_ms)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.integers())
def test_ids_rise_strictly_even_when_the_clock_does_not(times_ms: list[int], seed: int) -> None:
    clock = iter([1_000_000 * time_ms for time_ms in times_ms])
    new_id = UlidSource(lambda: next(clock), random.Random(seed).getrandbits)  # noqa: S311 - repeatable on purpose

    ids = [new_id() for _ in times_ms]

    assert ids == sorted(set(ids))


@given(st.integers(0, 4_000_000_000_000_000))
def test_times_keep_their_microseconds(microseconds: int) -> None:
    text = utc_text(microseconds)

    assert text.endswith(f".{microseconds % 1_000_000:06d}Z")
    assert len(text) == len("2026-12-01T08:30:00.000000Z")

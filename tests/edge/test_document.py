"""A snapshot as JSON and back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edge import document
from edge.status import Snapshot
from tests.edge import snapshots


@pytest.mark.parametrize("make", [snapshots.snapshot, snapshots.new, snapshots.troubled])
def test_a_snapshot_comes_back_as_it_was(make: Callable[[], Snapshot]) -> None:
    data = document.encode(make())

    found = document.decode(data)

    assert document.encode(found) == data
    assert found.event_counts == make().event_counts
    assert found.reading == make().reading
    assert found.publisher == make().publisher


def test_units_stand_in_the_names_and_absence_is_null() -> None:
    found = json.loads(document.encode(snapshots.new()))

    assert found["schema"] == "edge.snapshot/1"
    assert found["reading"] is None
    assert found["streams"][0]["last_frame_age_s"] is None
    full = json.loads(document.encode(snapshots.snapshot()))
    assert full["event_counts"]["rate_limited"] == {"warning": 4}
    assert full["reading"]["memory"]["available_bytes"] == 3_817_848_832


def test_what_fields_of_events_hold_is_no_obstacle() -> None:
    fields = {"array": np.arange(2), "nan": float("nan"), "path": Path("/x"), "name": "\udcff", "big": 1 << 70}

    found = json.loads(document.encode(snapshots.snapshot(recent_events=[snapshots.event(fields=fields)])))

    assert found["recent_events"][0]["fields"]["array"] == [0, 1]
    assert found["recent_events"][0]["fields"]["nan"] is None


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"hello", b'{"schema": "edge.snapshot/2"}', b"\xff"])
def test_something_else_is_no_document(data: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        document.decode(data)
    assert document.version_of(data) is None


def test_a_document_of_another_version_says_which_field_it_lacks() -> None:
    old = json.loads(document.encode(snapshots.snapshot()))
    del old["governor"]
    data = json.dumps({**old, "version": "0.0.9"}).encode()

    with pytest.raises(ValueError, match="governor"):
        document.decode(data)
    assert document.version_of(data) == "0.0.9"


def test_what_a_newer_version_adds_is_no_obstacle() -> None:
    newer = json.loads(document.encode(snapshots.snapshot()))
    newer["streams"][0]["colour"] = "blue"

    assert (
        document.decode(json.dumps(newer).encode()).streams
        == document.decode(document.encode(snapshots.snapshot())).streams
    )

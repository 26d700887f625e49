"""A snapshot as one JSON document and back: what /status answers and ``edge-daemon status`` reads. Pure.

The document is the snapshot field by field, names and units included, so it may change with any version of the daemon;
what dashboards should rely on are the metrics and the messages over MQTT.
"""

from __future__ import annotations

from typing import Any

import msgspec

from edge.publish.message import json_value
from edge.status import Snapshot

__all__ = ["SCHEMA", "decode", "encode", "version_of"]

SCHEMA = "edge.snapshot/1"


def encode(snapshot: Snapshot) -> bytes:
    """A snapshot as JSON. Never raises for what the fields of its events hold."""
    document: dict[str, Any] = msgspec.to_builtins(snapshot, enc_hook=json_value)
    # JSON has no pairs as keys.
    counts: dict[str, dict[str, int]] = {}
    for (kind, severity), count in snapshot.event_counts.items():
        counts.setdefault(kind, {})[severity] = count
    return msgspec.json.encode(json_value({"schema": SCHEMA, **document, "event_counts": counts}))


def decode(data: bytes) -> Snapshot:
    """The snapshot that ``encode`` was given.

    Raises:
        ValueError: this is no such document, or one of a version that has other fields.
    """
    document = _document(data)
    counts = document.get("event_counts")
    pairs = {
        (kind, severity): count
        for kind, by_severity in (counts.items() if isinstance(counts, dict) else ())
        for severity, count in (by_severity.items() if isinstance(by_severity, dict) else ())
    }
    # msgspec.ValidationError is a ValueError that names the field.
    return msgspec.convert({**document, "event_counts": pairs}, Snapshot)


def version_of(data: bytes) -> str | None:
    """Which version of the daemon made a document; None if no daemon did."""
    try:
        version = _document(data).get("version")
    except ValueError:
        return None
    return version if isinstance(version, str) else None


def _document(data: bytes) -> dict[str, Any]:
    document = msgspec.json.decode(data)  # msgspec.DecodeError is a ValueError
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ValueError(f"is no document of schema {SCHEMA}")
    return document

"""From what the parts say of themselves to two answers: would a restart help, and do results flow. Pure.

Unhealthy is what only a new process can mend: systemd's watchdog is not fed then. Not ready is why a subscriber sees
nothing new, the good reasons included; a lost camera is one, and restarting the daemon would not bring it back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge import config
    from edge.status import GovernorState, ModelState, PublisherState, StreamState

__all__ = ["PUBLISHER_SILENT_S", "not_ready", "unhealthy"]

# One turn of the publisher waits a second for the network, and a slow disk may add a few.
PUBLISHER_SILENT_S = 30.0


def unhealthy(
    section: config.Watch,
    *,
    models: Sequence[ModelState],
    loading_s: Sequence[tuple[str, float]],
    untouched_s: Sequence[tuple[str, float]],
    publisher_silent_s: float,
) -> list[str]:
    """Say what has hung.

    Args:
        section: how long things may take.
        models: as they are now.
        loading_s: models, and for how long they have been loading.
        untouched_s: streams, and for how long a frame of theirs has waited while its model could have taken it.
        publisher_silent_s: seconds since the publisher's last turn.
    """
    reasons = [
        f"model {model.name}: a frame has been with the engine for {model.busy_s:.0f} s"
        for model in models
        if model.busy_s is not None and model.busy_s > section.hang_s
    ]
    reasons += [
        f"model {name}: loading has taken {loaded_s:.0f} s" for name, loaded_s in loading_s if loaded_s > section.load_s
    ]
    reasons += [
        f"stream {name}: a frame has waited for {waited_s:.0f} s"
        for name, waited_s in untouched_s
        if waited_s > section.hang_s
    ]
    if publisher_silent_s > PUBLISHER_SILENT_S:
        reasons.append(f"the publisher has not moved for {publisher_silent_s:.0f} s")
    return reasons


def not_ready(
    *,
    state: str,
    streams: Sequence[StreamState],
    models: Sequence[ModelState],
    governor: GovernorState,
    publisher: PublisherState | None,
) -> list[str]:
    """Say why results do not flow, or do not arrive."""
    if state != "running":
        return [f"the daemon is {state}"]
    reasons = [
        f"stream {stream.name} is {stream.state}" + (f": {stream.trouble}" if stream.trouble else "")
        for stream in streams
        if stream.state in {"opening", "lost"}
    ]
    reasons += [f"model {model.name} is being loaded" for model in models if model.running is None]
    if governor.mode == "paused":
        reasons.append(f"paused: {governor.reason}")
    if publisher is not None and publisher.trouble is not None:
        reasons.append(f"MQTT broker {publisher.broker} {publisher.trouble}")
    return reasons

"""One MQTT connection, from CONNECT to its end, over paho's external loop. The only file that knows paho.

Every connection has a paho client of its own, so nothing is left in one: paho loses its queue with the process,
ignores its in-flight limit when it resends after a reconnect, and falls back to MQTT 3.1 by itself. What is resent, and
in which order, is decided by the outbox. All of paho runs in the caller's thread: no callback thread can die unseen,
and leaving cannot hang in ``loop_stop`` when the broker stops answering. The policy is ``edge.publish.publisher``'s.
"""

from __future__ import annotations

import math
import os
import select
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from paho.mqtt import MQTTException
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from edge.errors import ConfigError

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from edge import config

__all__ = ["Accepted", "Acknowledged", "Ended", "Event", "PahoLink", "Password", "dial", "find_password"]

_CONNECT_TIMEOUT_S = 5.0
# What paho raises while it parses the answer of something that is no MQTT broker.
_PARSE_ERRORS = (MQTTException, struct.error, ValueError, IndexError, KeyError, TypeError)

# CONNACK codes that say the deployment or the broker's set-up is wrong, so that waiting will not help. paho translates
# the codes 1 to 5 of MQTT 3.1.1 to these.
_REFUSALS = {
    132: "does not speak MQTT {protocol}; set mqtt.protocol to '{other}'",
    133: "refused the client id {client_id!r}",
    134: "refused the user name or password; check mqtt.username and the password",
    135: "refused the user name or password; check mqtt.username and the password",
    138: "has banned this client",
    140: "wants another way to authenticate",
}


@dataclass(frozen=True, slots=True)
class Accepted:
    """The broker has accepted the connection."""

    window: int | None
    """How many unacknowledged messages it takes, None where it does not say."""
    max_packet_bytes: int | None
    """Beyond it the broker would cut the connection, None where it does not say."""


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The broker has answered a message (QoS 1), or it has left for the network (QoS 0)."""

    mid: int
    code: int
    """0 or 16 (nobody has subscribed) is success; from 128 on it was refused."""
    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """There is no connection, or none any more."""

    cause: Literal["unreachable", "refused", "lost"]
    """refused: a person must mend something before it can work."""
    text: str


Event: TypeAlias = Accepted | Acknowledged | Ended


class Password(str):
    """A text that does not show in logs and tracebacks."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "Password(***)"


def find_password(section: config.Mqtt, environ: Mapping[str, str] = os.environ) -> Password | None:
    """The broker's password: from ``mqtt.password_file``, the systemd credential, or the environment, in this order.

    Raises:
        ConfigError: the file that should hold it cannot be read.
    """
    credentials = environ.get("CREDENTIALS_DIRECTORY")
    if section.password_file is not None:
        return _first_line(Path(section.password_file), "mqtt.password_file")
    if credentials and (Path(credentials) / "mqtt_password").exists():
        return _first_line(Path(credentials) / "mqtt_password", "systemd credential mqtt_password")
    value = environ.get("EDGE_MQTT_PASSWORD")
    return None if value is None else Password(value)


def dial(
    section: config.Mqtt, *, client_id: str, password: Password | None, will: tuple[str, bytes]
) -> PahoLink | Ended:
    """Open a connection and send CONNECT; the answer comes as an event. Blocks for seconds where nobody answers.

    Args:
        section: the broker.
        client_id: what we are called there; the broker cuts an older connection of the same name.
        password: sent with ``section.username``, if there is one.
        will: topic and payload that the broker publishes, retained, when the connection is lost.
    """
    version = paho.MQTTv5 if section.protocol == "5" else paho.MQTTv311
    client = paho.Client(
        CallbackAPIVersion.VERSION2,
        client_id=client_id,
        protocol=version,
        reconnect_on_failure=False,
    )
    client.connect_timeout = _CONNECT_TIMEOUT_S
    if section.username is not None:
        client.username_pw_set(section.username, password)
    client.will_set(will[0], will[1], qos=1, retain=True)
    link = PahoLink(client, section, client_id)
    try:
        client.connect(section.host, section.port, section.keepalive_s)
    except OSError as error:
        return Ended("unreachable", f"cannot be reached ({error.strerror or error})")
    except UnicodeError as error:
        return Ended("refused", f"has no valid host name; correct mqtt.host ({error})")
    return link


class _Packed(Properties):
    """Properties of every message, encoded once: paho would do it for each, a tenth of what sending one costs."""

    _encoded: bytes

    def __init__(self, properties: Properties) -> None:
        super().__init__(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
        # Plain assignment takes the names of MQTT's properties only.
        object.__setattr__(self, "_encoded", properties.pack())  # type: ignore[no-untyped-call]

    def pack(self) -> bytes:
        return self._encoded


class PahoLink:
    """A connection that ``poll`` drives. After ``Ended`` only ``close`` may be called."""

    def __init__(self, client: paho.Client, section: config.Mqtt, client_id: str) -> None:
        self._client = client
        self._section = section
        self._client_id = client_id
        self._events: list[Event] = []
        self._accepted = False
        self._ended = False
        self._properties = _Packed(self._make_properties()) if section.protocol == "5" else None
        client.on_connect = self._on_connect
        client.on_publish = self._on_publish
        client.on_disconnect = self._on_disconnect

    def send(self, topic: str, payload: bytes, *, qos: int, retain: bool = False, expiry_s: int | None = None) -> int:
        """Hand over a message, without blocking, and return the number that its ``Acknowledged`` will carry.

        Args:
            topic: where it goes.
            payload: what it says.
            qos: 0 or 1.
            retain: whether the broker keeps it for those who subscribe later.
            expiry_s: after so long the broker need not deliver it any more (MQTT 5 only).
        """
        properties: Properties | None = self._properties
        if properties is not None and expiry_s is not None:
            properties = self._make_properties()
            properties.MessageExpiryInterval = expiry_s
        # The number paho returns beside it is of no use: a message is delivered when its acknowledgement says so.
        return self._client.publish(topic, payload, qos=qos, retain=retain, properties=properties).mid

    def poll(self, timeout_s: float, wake: socket.socket) -> list[Event]:
        """Wait for the network, for ``wake`` to become readable, or for the time to pass; then say what happened."""
        connection: Any = self._client.socket()
        if connection is None:
            self._end("lost", "has gone")
            return self._take_events()
        # Bytes that TLS has decrypted already don't make the socket readable.
        buffered = hasattr(connection, "pending") and connection.pending() > 0
        # Not select(), which knows the first 1024 files of a process only.
        poller = select.poll()
        poller.register(wake, select.POLLIN)
        poller.register(connection, select.POLLIN | (select.POLLOUT if self._client.want_write() else 0))
        waits_ms = 0 if buffered or self._events else math.ceil(timeout_s * 1000)
        happened = dict(poller.poll(waits_ms)).get(connection.fileno(), 0)
        try:
            if buffered or happened & ~select.POLLOUT:
                self._client.loop_read()
            if happened & select.POLLOUT:
                self._client.loop_write()
            self._client.loop_misc()
        except _PARSE_ERRORS as error:
            self._end("refused", f"does not answer in MQTT {self._section.protocol} ({error})")
        return self._take_events()

    def goodbye(self) -> None:
        """Send DISCONNECT, after which the broker forgets the will."""
        self._client.disconnect()

    def close(self) -> None:
        """Close the socket, if it is still open, without a word to the broker."""
        connection = self._client.socket()
        if connection is not None:
            connection.close()

    @staticmethod
    def _make_properties() -> Properties:
        properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
        properties.PayloadFormatIndicator = 1
        properties.ContentType = "application/json"
        return properties

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _end(self, cause: Literal["unreachable", "refused", "lost"], text: str) -> None:
        # The first reason is the one that matters: paho reports a refusal as a lost connection afterwards.
        if not self._ended:
            self._ended = True
            self._events.append(Ended(cause, text))

    def _on_connect(self, _client: Any, _userdata: Any, _flags: Any, reason: Any, properties: Any) -> None:
        if not reason.is_failure:
            self._accepted = True
            window = getattr(properties, "ReceiveMaximum", None)
            self._events.append(Accepted(window, getattr(properties, "MaximumPacketSize", None)))
            return
        text = _REFUSALS.get(reason.value)
        if text is None:
            self._end("unreachable", f"is not available ({reason})")
            return
        protocol = self._section.protocol
        other = "3.1.1" if protocol == "5" else "5"
        self._end("refused", f"{text.format(protocol=protocol, other=other, client_id=self._client_id)} ({reason})")

    def _on_publish(self, _client: Any, _userdata: Any, mid: int, reason: Any, _properties: Any) -> None:
        self._events.append(Acknowledged(mid, reason.value, str(reason)))

    def _on_disconnect(self, _client: Any, _userdata: Any, flags: Any, reason: Any, _properties: Any) -> None:
        if not self._accepted:
            # A broker of another version often just closes the connection.
            self._end("unreachable", f"hung up without an answer; does it speak MQTT {self._section.protocol}?")
        elif flags.is_disconnect_packet_from_server and reason.value == 142:
            self._end(
                "refused", f"has another client of the same id {self._client_id!r}; give each device its own name"
            )
        elif flags.is_disconnect_packet_from_server:
            self._end("lost", f"ended the connection ({reason})")
        else:
            self._end("lost", f"has gone ({reason})")


def _first_line(path: Path, key: str) -> Password:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError([f"{key}: {path}: {error.strerror}"]) from None
    except UnicodeDecodeError:
        raise ConfigError([f"{key}: {path}: is not UTF-8 text"]) from None
    if not lines or not lines[0]:
        raise ConfigError([f"{key}: {path}: its first line is empty; it must hold the password"])
    return Password(lines[0])

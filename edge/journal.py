"""The log to systemd's journal with its fields, so that ``journalctl EDGE_EVENT=camera_lost`` finds what happened.

The journal's native protocol in pure Python: one datagram an entry, or a sealed memory file where that is too small
(https://systemd.io/JOURNAL_NATIVE_PROTOCOL). Configures nothing; edge/commandline.py decides when it is used.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import socket
from array import array
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["SOCKET", "JournalHandler", "PrefixFormatter", "encode", "is_connected", "priority"]

SOCKET = "/run/systemd/journal/socket"

# Of a journal that hangs: its socket fills up, and nobody shall wait for it for long.
_SEND_TIMEOUT_S = 0.2
# journald refuses longer names.
_NAME_LENGTH = 64


def is_connected(stream: IO[Any], environ: Mapping[str, str] = os.environ) -> bool:
    """Whether what is written to ``stream`` goes to the journal, as systemd.exec(5) has it for ``JOURNAL_STREAM``.

    The variable alone proves nothing: child processes inherit it when their output goes elsewhere.
    """
    device, _, inode = environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):  # closed, or no file at all
        return False
    return (device, inode) == (str(found.st_dev), str(found.st_ino))


def encode(fields: Iterable[tuple[str, str]]) -> bytes:
    """Fields as the journal reads them.

    Args:
        fields: names of capital letters, digits and underscores, at most 64, and values; a name may come again.
    """
    parts: list[bytes] = []
    for name, value in fields:
        data = value.encode("utf-8", "surrogateescape")
        if b"\n" in data:
            # NAME, newline, length as 64 bits little-endian, the value as it is
            parts.append(b"%s\n%s%s\n" % (name.encode(), len(data).to_bytes(8, "little"), data))
        else:
            parts.append(b"%s=%s\n" % (name.encode(), data))
    return b"".join(parts)


def priority(level: int) -> int:
    """The syslog priority of a level of ``logging``."""
    steps = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
    return next((found for lowest, found in steps if level >= lowest), 7)


class PrefixFormatter(logging.Formatter):
    """Lines that a stream to the journal takes, each with its priority in front, as sd-daemon(3) has it."""

    def format(self, record: logging.LogRecord) -> str:
        """The record's text, every line of it with the prefix."""
        return "\n".join(f"<{priority(record.levelno)}>{line}" for line in _message(self, record).splitlines() or [""])


class JournalHandler(logging.Handler):
    """Sends each record as one entry of the journal.

    ``record.fields``, where a caller passed it as ``extra``, become ``EDGE_<NAME>``. Where the journal's socket cannot
    be used, the record goes to ``fallback``; where the journal does not take it in time, it is lost, and the next entry
    says how many were in ``EDGE_LOST``.
    """

    def __init__(self, identifier: str, *, fallback: logging.Handler, path: str = SOCKET) -> None:
        """Open nothing but a socket; the journal may come and go.

        Args:
            identifier: ``SYSLOG_IDENTIFIER``, what ``journalctl -t`` asks for.
            fallback: takes what cannot be sent.
            path: of the journal's socket.
        """
        super().__init__()
        self._identifier = identifier
        self._fallback = fallback
        self._path = path
        self._lost = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)

    def emit(self, record: logging.LogRecord) -> None:
        """Send it."""
        # One wait for a journal that hangs is enough.
        self._socket.settimeout(0.0 if self._lost else _SEND_TIMEOUT_S)
        try:
            self._send(encode(self._fields(record)))
        except (TimeoutError, BlockingIOError):
            self._lost += 1
        except OSError:
            self._fallback.handle(record)
        except Exception:  # noqa: BLE001 - as every handler of logging: a bad record must not end who logs it
            self.handleError(record)
        else:
            self._lost = 0

    def close(self) -> None:
        """Close the socket and the fallback."""
        self._socket.close()
        self._fallback.close()
        super().close()

    def _fields(self, record: logging.LogRecord) -> list[tuple[str, str]]:
        fields = [
            ("MESSAGE", _message(self.formatter or logging.Formatter(), record)),
            ("PRIORITY", str(priority(record.levelno))),
            ("SYSLOG_IDENTIFIER", self._identifier),
            ("LOGGER", record.name),
            ("THREAD_NAME", record.threadName or ""),
            ("CODE_FILE", record.pathname),
            ("CODE_LINE", str(record.lineno)),
            ("CODE_FUNC", record.funcName or ""),
        ]
        extra: dict[str, Any] = getattr(record, "fields", {})
        fields += [(_field_name(name), _text(value)) for name, value in extra.items()]
        if self._lost:
            fields.append(("EDGE_LOST", str(self._lost)))
        return fields

    def _send(self, data: bytes) -> None:
        try:
            self._socket.sendto(data, self._path)
        except OSError as error:
            if error.errno not in {errno.EMSGSIZE, errno.ENOBUFS}:
                raise
            self._send_in_file(data)

    def _send_in_file(self, data: bytes) -> None:
        """Hand over a memory file instead; journald reads only what nobody can change any more."""
        file = os.memfd_create("journal-entry", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(file, view) :]
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
            # Not socket.send_fds, which forgets the address.
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [file]))]
            self._socket.sendmsg([b""], rights, 0, self._path)
        finally:
            os.close(file)


def _message(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """The text, and the traceback under it: ``journalctl`` shows both."""
    text = record.getMessage()
    return f"{text}\n{formatter.formatException(record.exc_info)}" if record.exc_info else text


def _field_name(name: str) -> str:
    return f"EDGE_{re.sub('[^A-Z0-9_]', '_', name.upper())}"[:_NAME_LENGTH]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)

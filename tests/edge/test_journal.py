"""The journal's native protocol, against a socket that decodes it as journald does."""

from __future__ import annotations

import array
import fcntl
import logging
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge import journal
from edge.journal import JournalHandler, PrefixFormatter

NAMES = st.text("ABCXYZ_019", min_size=1, max_size=8)
VALUES = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)


def decoded(data: bytes) -> list[tuple[str, str]]:
    """Fields of an entry, by the rules of https://systemd.io/JOURNAL_NATIVE_PROTOCOL."""
    fields = []
    while data:
        line, _, rest = data.partition(b"\n")
        name, is_text, value = line.partition(b"=")
        if is_text:
            data = rest
        else:
            length = int.from_bytes(rest[:8], "little")
            value, end = rest[8 : 8 + length], rest[8 + length : 9 + length]
            assert end == b"\n"
            data = rest[9 + length :]
        fields.append((name.decode(), value.decode("utf-8", "surrogateescape")))
    return fields


class Journal:
    """Ears at a socket as journald's."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "socket")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(self.path)
        self.socket.settimeout(20)

    def entry(self) -> dict[str, str]:
        """The next entry, from the datagram or the file that came with it."""
        data, rights, _, _ = self.socket.recvmsg(1 << 20, socket.CMSG_SPACE(4))
        if rights:
            assert data == b"", "the file is the whole entry"
            (file,) = array.array("i", rights[0][2])
            with os.fdopen(file, "rb") as opened:
                wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
                assert fcntl.fcntl(file, fcntl.F_GET_SEALS) == wanted, "journald takes nothing that may still change"
                opened.seek(0)
                data = opened.read()
        return dict(decoded(data))


class Kept(logging.Handler):
    """What fell back."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def ears(tmp_path: Path) -> Iterator[Journal]:
    made = Journal(tmp_path)
    yield made
    made.socket.close()


@pytest.fixture
def fallback() -> Kept:
    return Kept()


@pytest.fixture
def handler(tmp_path: Path, fallback: Kept) -> Iterator[JournalHandler]:
    made = JournalHandler("edge-daemon", fallback=fallback, path=str(tmp_path / "socket"))
    yield made
    made.close()


def record(text: str = "camera lost", level: int = logging.WARNING, **more: Any) -> logging.LogRecord:
    made = logging.LogRecord("edge.test", level, "/src/edge/test.py", 12, text, (), more.pop("exc_info", None), "work")
    made.__dict__.update(more)
    return made


@given(st.lists(st.tuples(NAMES, VALUES), max_size=5))
def test_every_field_comes_through(fields: list[tuple[str, str]]) -> None:
    assert decoded(journal.encode(fields)) == fields


def test_the_bytes_are_those_of_the_specification() -> None:
    assert journal.encode([("A", "x=y")]) == b"A=x=y\n"
    assert journal.encode([("A", "x\ny")]) == b"A\n\x03\0\0\0\0\0\0\0x\ny\n"
    assert journal.encode([("A", "\udcff")]) == b"A=\xff\n"  # part of a file's name that is not UTF-8


def test_an_entry_can_be_asked_for_by_what_happened(ears: Journal, handler: JournalHandler) -> None:
    fields = {"event": "camera_lost", "stream": "gate", "silent_s": 5.0, "why-not": None, "all": ["a", "ü"]}

    handler.handle(record(fields=fields))

    entry = ears.entry()
    assert entry["MESSAGE"] == "camera lost"
    assert entry["PRIORITY"] == "4"
    assert entry["SYSLOG_IDENTIFIER"] == "edge-daemon"
    assert (entry["CODE_FILE"], entry["CODE_LINE"], entry["CODE_FUNC"]) == ("/src/edge/test.py", "12", "work")
    assert entry["LOGGER"] == "edge.test"
    assert (entry["EDGE_EVENT"], entry["EDGE_STREAM"], entry["EDGE_SILENT_S"]) == ("camera_lost", "gate", "5.0")
    assert (entry["EDGE_WHY_NOT"], entry["EDGE_ALL"]) == ("null", '["a", "ü"]')


def test_names_are_ones_that_journald_takes(ears: Journal, handler: JournalHandler) -> None:
    handler.handle(record(fields={"a" * 80: 1, "latency ü/s": 2, "_x": 3}))

    assert [name for name in ears.entry() if name.startswith("EDGE_")] == [
        "EDGE_" + "A" * 59,
        "EDGE_LATENCY___S",
        "EDGE__X",
    ]


@pytest.mark.parametrize(
    ("level", "expected"),
    [(logging.DEBUG, 7), (logging.INFO, 6), (logging.WARNING, 4), (logging.ERROR, 3), (logging.CRITICAL, 2), (25, 6)],
)
def test_levels_become_priorities_of_syslog(level: int, expected: int) -> None:
    assert journal.priority(level) == expected


def test_a_traceback_stands_under_the_message(ears: Journal, handler: JournalHandler) -> None:
    try:
        int("why")
    except ValueError:
        handler.handle(record("broken", logging.ERROR, exc_info=sys.exc_info()))

    lines = ears.entry()["MESSAGE"].splitlines()
    assert lines[:2] == ["broken", "Traceback (most recent call last):"]
    assert lines[-1].startswith("ValueError: invalid literal")


def test_what_is_too_large_for_a_datagram_goes_as_a_sealed_file(ears: Journal, handler: JournalHandler) -> None:
    text = "x" * 2_000_000

    handler.handle(record(text))

    assert ears.entry()["MESSAGE"] == text


def test_without_a_journal_the_fallback_has_it_and_the_next_entry_finds_the_journal(
    tmp_path: Path, handler: JournalHandler, fallback: Kept
) -> None:
    handler.handle(record("nobody listens"))
    found = Journal(tmp_path)
    handler.handle(record("somebody does"))

    assert [kept.getMessage() for kept in fallback.records] == ["nobody listens"]
    assert found.entry()["MESSAGE"] == "somebody does"
    found.socket.close()


def test_a_journal_that_hangs_is_not_waited_for_and_told_what_it_missed(
    ears: Journal, handler: JournalHandler, fallback: Kept
) -> None:
    sent = 0
    while not handler._lost:  # noqa: SLF001 - until the socket is full
        handler.handle(record(str(sent)))
        sent += 1
    handler.handle(record("lost, too"))

    for number in range(sent - 1):
        assert ears.entry()["MESSAGE"] == str(number)
    handler.handle(record("heard again"))
    handler.handle(record("and again"))

    entry = ears.entry()
    assert (entry["MESSAGE"], entry["EDGE_LOST"]) == ("heard again", "2")
    assert "EDGE_LOST" not in ears.entry()
    assert fallback.records == []


def test_a_record_that_cannot_be_told_ends_nobody(handler: JournalHandler, capsys: pytest.CaptureFixture[str]) -> None:
    bad = record("%d and %d")
    bad.args = (1,)

    handler.handle(bad)

    assert "not enough arguments" in capsys.readouterr().err


def test_prefixes_stand_on_every_line() -> None:
    formatter = PrefixFormatter()

    assert formatter.format(record("one\ntwo", logging.ERROR)) == "<3>one\n<3>two"
    assert formatter.format(record("", logging.DEBUG)) == "<7>"


def test_stderr_is_the_journal_only_if_it_is_the_very_file(tmp_path: Path) -> None:
    with (tmp_path / "a").open("w") as stream, (tmp_path / "b").open("w") as other:
        found = os.fstat(stream.fileno())
        environ = {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}

        assert journal.is_connected(stream, environ)
        assert not journal.is_connected(other, environ)
        assert not journal.is_connected(stream, {})
        assert not journal.is_connected(stream, {"JOURNAL_STREAM": "rubbish"})
    assert not journal.is_connected(stream, environ)  # closed

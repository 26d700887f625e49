"""The status pages over real sockets: what they answer, and that no client can hold up another."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from edge import config, server
from edge.server import StatusServer, answer
from edge.status import Snapshot
from tests.edge import snapshots

_NOW_UTC_US = snapshots.STARTED_AT_UTC_US + 3_700_000_000
_DEADLINE_S = 20.0


@contextmanager
def serving(section: config.Status, snapshot: Callable[[], Snapshot], **options: Any) -> Iterator[list[BaseException]]:
    """A server in a thread, and what it raised."""
    stop, errors = threading.Event(), list[BaseException]()

    def work() -> None:
        try:
            made.serve(stop)
        except BaseException as error:  # noqa: BLE001 - asserted on
            errors.append(error)

    with StatusServer(section, snapshot=snapshot, **options) as made:
        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield errors
        finally:
            stop.set()
            thread.join(_DEADLINE_S)
            assert not thread.is_alive()


@pytest.fixture
def section(free_port: Callable[[], int]) -> config.Status:
    return config.Status(port=free_port())


@pytest.fixture
def ask(section: config.Status, wait_until: Callable[..., None]) -> Callable[..., tuple[int, dict[str, str], bytes]]:
    """Asks the server that listens there, once it does."""

    def listens() -> bool:
        try:
            connect(section).close()
        except OSError:
            return False
        return True

    def ask_it(method: str, path: str, body: bytes | None = None) -> tuple[int, dict[str, str], bytes]:
        wait_until(listens, "the server to listen")
        connection = http.client.HTTPConnection("127.0.0.1", section.port, timeout=_DEADLINE_S)
        connection.request(method, path, body)
        response = connection.getresponse()
        found = response.status, dict(response.headers), response.read()
        connection.close()
        return found

    return ask_it


def connect(section: config.Status) -> socket.socket:
    return socket.create_connection(("127.0.0.1", section.port or 0), timeout=_DEADLINE_S)


def heard(client: socket.socket) -> bytes:
    """Everything until the other side closes."""
    parts = []
    while part := client.recv(65536):
        parts.append(part)
    client.close()
    return b"".join(parts)


Ask = Callable[..., tuple[int, dict[str, str], bytes]]


def test_every_page_is_answered(section: config.Status, ask: Ask) -> None:
    with serving(section, snapshots.snapshot):
        answers = {path: ask("GET", path) for path in server.PATHS}

    assert {path: found[0] for path, found in answers.items()} == dict.fromkeys(server.PATHS, 200)
    assert answers["/metrics"][1]["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert b"\nedge_ready 1.0\n" in answers["/metrics"][2]
    assert json.loads(answers["/status"][2])["device"] == "line3"
    assert json.loads(answers["/healthz"][2]) == {"healthy": True, "reasons": []}
    assert json.loads(answers["/readyz"][2]) == {"ready": True, "reasons": []}
    assert b"<title>running, ready: line3</title>" in answers["/"][2]
    for _, headers, body in answers.values():
        assert headers["Content-Length"] == str(len(body))
        assert headers["Connection"] == "close"
        assert headers["Cache-Control"] == "no-store"
        assert headers["Content-Security-Policy"].startswith("default-src 'none'")


def test_probes_say_no_and_why(section: config.Status, ask: Ask) -> None:
    with serving(section, snapshots.troubled):
        health, ready = ask("GET", "/healthz"), ask("GET", "/readyz")

    assert (health[0], ready[0]) == (503, 503)
    reasons = ["model yolox: a frame has been with the engine for 45 s"]
    assert json.loads(health[2]) == {"healthy": False, "reasons": reasons}
    assert json.loads(ready[2])["reasons"][0] == "stream gate is lost: no frame for 5 s"


def test_a_lost_camera_is_no_reason_to_restart() -> None:
    lost = snapshots.snapshot(not_ready=["stream gate is lost"])

    assert answer("GET", "/healthz", lambda: lost, now_utc_us=0).status == 200
    assert answer("GET", "/readyz", lambda: lost, now_utc_us=0).status == 503


@pytest.mark.parametrize("path", server.PATHS)
def test_head_is_get_without_the_body(section: config.Status, ask: Ask, path: str) -> None:
    with serving(section, snapshots.snapshot):
        status, headers, body = ask("HEAD", path)

    assert (status, body) == (200, b"")
    assert int(headers["Content-Length"]) > 0


def test_what_is_not_there_and_what_is_not_allowed(section: config.Status, ask: Ask) -> None:
    with serving(section, snapshots.snapshot):
        missing, refused = ask("GET", "/favicon.ico"), ask("POST", "/metrics", b"x" * 300_000)

    assert missing[0] == 404
    assert b"/metrics" in missing[2]
    assert refused[0] == 405
    assert refused[1]["Allow"] == "GET, HEAD"


@pytest.mark.parametrize("target", ["/readyz?verbose", "http://line3:9464/readyz", "http://line3/readyz?x"])
def test_queries_and_whole_urls_mean_their_path(target: str) -> None:
    assert answer("GET", target, snapshots.snapshot, now_utc_us=0).body == b'{"ready":true,"reasons":[]}\n'


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /healthz HTTP/1.0\n\n", 200),  # as typed into netcat
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        (b"hello\r\n\r\n", 400),
        (b"GET /a b HTTP/1.1\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", 400),  # TLS
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 9000, 431),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 9000 + b"\r\n\r\n", 431),
    ],
)
def test_requests_as_they_come(section: config.Status, ask: Ask, request_bytes: bytes, status: int) -> None:
    with serving(section, snapshots.snapshot):
        ask("GET", "/healthz")
        client = connect(section)
        client.sendall(request_bytes)
        assert heard(client).startswith(b"HTTP/1.1 %d " % status)


def test_a_request_may_come_in_pieces(section: config.Status, ask: Ask) -> None:
    with serving(section, snapshots.snapshot):
        ask("GET", "/healthz")
        client = connect(section)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in b"GET /readyz HTTP/1.1\r\n\r\n":
            client.sendall(bytes([byte]))
        assert heard(client).endswith(b'{"ready":true,"reasons":[]}\n')


def test_clients_that_say_nothing_hold_up_nobody(section: config.Status, ask: Ask) -> None:
    with serving(section, snapshots.snapshot) as errors:
        ask("GET", "/healthz")
        silent = [connect(section) for _ in range(200)]

        for _ in range(5):
            assert ask("GET", "/readyz")[0] == 200

        assert errors == []
        for client in silent:
            client.close()


def test_a_client_that_says_nothing_is_let_go(section: config.Status, ask: Ask) -> None:
    skipped_s = [0.0]
    clock = lambda: time.monotonic() + skipped_s[0]  # noqa: E731
    with serving(section, snapshots.snapshot, clock=clock):
        ask("GET", "/healthz")
        client = connect(section)
        client.sendall(b"GET /")
        ask("GET", "/healthz")  # so that the first has been seen
        skipped_s[0] = 6.0

        assert heard(client) == b""


def test_a_client_that_does_not_read_is_let_go_and_holds_up_nobody(
    section: config.Status, ask: Ask, wait_until: Callable[..., None]
) -> None:
    skipped_s = [0.0]
    clock = lambda: time.monotonic() + skipped_s[0]  # noqa: E731
    long = snapshots.snapshot(recent_events=[snapshots.event(text="x" * 20_000_000)])
    with serving(section, lambda: long, clock=clock):
        ask("GET", "/healthz")
        client = connect(section)
        client.sendall(b"GET /status HTTP/1.1\r\n\r\n")

        assert ask("GET", "/healthz")[0] == 200
        skipped_s[0] = 11.0
        assert ask("GET", "/healthz")[0] == 200

        received = 0

        def cut_off() -> bool:
            nonlocal received
            try:
                part = client.recv(1 << 20)
            except ConnectionResetError:
                return True
            received += len(part)
            return not part

        wait_until(cut_off, "the server to let go")
        assert received < 20_000_000
        client.close()


def test_a_client_that_goes_away_harms_nobody(section: config.Status, ask: Ask) -> None:
    with serving(section, snapshots.snapshot) as errors:
        ask("GET", "/healthz")
        for _ in range(20):
            client = connect(section)
            client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # RST
            client.close()

        assert ask("GET", "/healthz")[0] == 200
        assert errors == []


def test_a_broken_page_is_told_once_and_leaves_the_others(
    section: config.Status, ask: Ask, caplog: pytest.LogCaptureFixture
) -> None:
    broken = snapshots.snapshot(streams=[None])
    with caplog.at_level(logging.ERROR, logger="edge.server"), serving(section, lambda: broken) as errors:
        answers = [ask("GET", "/metrics")[0] for _ in range(3)]
        assert ask("GET", "/healthz")[0] == 200
        assert errors == []

    assert answers == [500, 500, 500]
    assert [record.getMessage() for record in caplog.records] == ["status page /metrics: cannot be made:"]
    assert caplog.records[0].exc_info is not None


def test_a_port_that_is_taken_is_said_in_words(section: config.Status, ask: Ask) -> None:
    with serving(section, snapshots.snapshot):
        ask("GET", "/healthz")
        with pytest.raises(
            OSError, match=rf"^status page: cannot listen on 127.0.0.1:{section.port}: the port is taken"
        ):
            StatusServer(section, snapshot=snapshots.snapshot).serve(threading.Event())


@pytest.mark.parametrize(
    ("host", "text"),
    [
        ("192.0.2.1", "this device has no such address"),  # TEST-NET-1, of nobody
        ("no-such-host.invalid", "cannot listen on no-such-host.invalid"),
    ],
)
def test_an_address_of_somebody_else_is_said_in_words(free_port: Callable[[], int], host: str, text: str) -> None:
    section = config.Status(host=host, port=free_port())

    with pytest.raises(OSError, match=text):
        StatusServer(section, snapshot=snapshots.snapshot).serve(threading.Event())


def test_it_can_serve_again_after_it_failed(section: config.Status, ask: Ask) -> None:
    with socket.create_server(("127.0.0.1", section.port or 0)):
        made = StatusServer(section, snapshot=snapshots.snapshot)
        with pytest.raises(OSError, match="taken"):
            made.serve(threading.Event())

    with serving(section, snapshots.snapshot):
        assert ask("GET", "/healthz")[0] == 200
    with serving(section, snapshots.snapshot):  # at once, although connections of before linger
        assert ask("GET", "/healthz")[0] == 200


def test_ipv6(free_port: Callable[[], int], wait_until: Callable[..., None]) -> None:
    port = free_port()
    try:
        socket.create_server(("::1", port), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")

    def answered(address: str) -> bool:
        try:
            client = socket.create_connection((address, port), timeout=_DEADLINE_S)
        except OSError:
            return False
        client.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        return heard(client).startswith(b"HTTP/1.1 200")

    with serving(config.Status(host="::1", port=port), snapshots.snapshot):
        wait_until(lambda: answered("::1"), "an answer")
    with serving(config.Status(host="::", port=port), snapshots.snapshot):
        wait_until(lambda: answered("::1"), "an answer")
        wait_until(lambda: answered("127.0.0.1"), "an answer to IPv4 as well")
    with serving(config.Status(host="localhost", port=port), snapshots.snapshot):
        wait_until(lambda: answered("127.0.0.1"), "an answer")


def test_without_a_port_there_is_nothing_to_serve() -> None:
    StatusServer(config.Status(port=None), snapshot=snapshots.snapshot).serve(threading.Event())


def test_the_page_for_people_escapes_everything() -> None:
    page = answer("GET", "/", snapshots.troubled, now_utc_us=_NOW_UTC_US).body.decode()

    assert "<b>" not in page
    assert "gate &quot;&lt;b&gt;north&lt;/b&gt;&quot;\\" in page
    assert "<script" not in page
    assert page.count("<section") == page.count("</section>") == 5
    assert "05:00:00" in page
    assert "broken" in page


def test_the_page_says_the_day_of_what_happened_on_another() -> None:
    tomorrow_utc_us = _NOW_UTC_US + 86_400_000_000

    assert (
        "<dt>2026-12-03 05:00:00</dt>"
        in answer("GET", "/", snapshots.snapshot, now_utc_us=tomorrow_utc_us).body.decode()
    )

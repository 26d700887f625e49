"""``edge-daemon status``: what a person sees, and what is said when nobody or somebody else answers."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
import pytest

from edge import config, document, statusline
from edge.errors import ConfigError, ServiceError
from edge.overview import overview
from edge.server import StatusServer
from edge.status import Snapshot
from tests.edge import snapshots


def shown(snapshot: Snapshot, *, before: Snapshot | None = None) -> str:
    """What is seen of it without colours."""
    text = statusline.render(overview(snapshot, before=before), localtime=time.gmtime)
    return click.unstyle(text)


@contextmanager
def answering(reply: bytes | None) -> Iterator[config.Status]:
    """Somebody who answers every request with the same bytes, or never."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def work() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                clients.append(client)
                if reply is not None:
                    client.recv(65536)
                    client.sendall(reply)
                    client.close()

        clients: list[socket.socket] = []
        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield config.Status(port=listener.getsockname()[1])
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for client in clients:
                client.close()


def reply(body: bytes, status: str = "200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(body), body)


def test_a_daemon_that_is_ready() -> None:
    assert shown(snapshots.snapshot()) == (
        """\
line3: edge-daemon 0.1.0
up 1 h 2 min, /etc/jetson-edge/line3.yaml

running, ready

stream  state  fps in  fps out    p50    p95  failed  dropped  reopened
belt    live     30.0     19.9  40 ms  95 ms       1      398         2
  dropped: governor 298, overload 100

model  runs                        limit    p50    p95  frames
yolox  yolox int8 695e750a5d57  20.0 fps  30 ms  49 ms     600
  yolox_nano.plan: TensorRT 10.3, 1x3x416x416

governor   limited: tj is 84.2 C; tj 84.2 of 85.0 °C
memory     3.8 GB of 8.0 GB available, daemon 612 MB, GPU 391 MB, swap 1 MB
power      14.2 W, mode 15W, GPU 71 %, fan 100 %
broker     10.0.0.2:1883 is connected
results    609 acknowledged, 0 dropped, 3 wait in /var/lib/jetson-edge/outbox.db

12-03 05:00:00  model yolox: 20 frames a second, since tj is 84.2 C"""
    )


def test_every_trouble_is_seen() -> None:
    text = " ".join(shown(snapshots.troubled()).split())

    for part in (
        "broken",
        "- model yolox: a frame has been with the engine for 45 s",
        "- MQTT broker 10.0.0.2:1883 does not answer",
        "no frame for 5 s & counting; the last frame came 1 min 15 s ago",
        "throttled by cpu-throttle-alert",
        "4321 wait in",
        "trouble monitor waits to be started again, 4 times so far: [Errno 5] Input/output error",
        "wide narrow int8",
        "paused: tj is 96.0 C",
    ):
        assert part in text


def test_a_daemon_that_has_just_been_started_knows_little() -> None:
    text = shown(snapshots.new())

    assert "\nstarting\n" in text
    assert "is being loaded" in text
    assert "memory" not in text
    assert "power" not in text


def test_a_terminal_of_eighty_columns_is_enough() -> None:
    for make in (snapshots.snapshot, snapshots.new):
        assert max(map(len, shown(make()).splitlines())) <= 80


def test_with_an_earlier_look_latencies_are_recent() -> None:
    before = snapshots.snapshot()
    now = snapshots.snapshot(
        streams=[snapshots.stream(latency_s=snapshots.histogram(0, 400, 190, 110, 0, total=60.0))],
        models=[snapshots.model()],
    )

    assert "300 ms" not in shown(now)
    line = next(line for line in shown(now, before=before).splitlines() if line.startswith("belt"))
    assert "300 ms" in line
    model = next(line for line in shown(now, before=before).splitlines() if line.startswith("yolox"))
    assert model.split()[-3:-1] == ["-", "-"], "no frame since"


def test_colours_say_what_deserves_attention() -> None:
    text = statusline.render(overview(snapshots.troubled()))

    assert click.style("broken", fg="red") in text
    assert statusline.render(overview(snapshots.snapshot())).count("\x1b[31m") == 0


def test_nothing_in_a_text_commands_the_terminal() -> None:
    evil = snapshots.snapshot(
        streams=[snapshots.stream("a\x1b[2Jb" + "x" * 50, trouble="gone\r\x07", state="lost")],
        recent_events=[snapshots.event(text="\x1b]0;title\x07")],
    )

    text = shown(evil)

    assert not {character for character in text if not character.isprintable()} - {"\n"}
    assert "a [2Jbxxxxxxxxxxxxxxx..." in text


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.9, "0 s"), (59.9, "59 s"), (60, "1 min"), (3725, "1 h 2 min"), (86400, "1 d"), (200_000, "2 d 7 h")],
)
def test_durations(seconds: float, expected: str) -> None:
    assert f"up {expected}, " in shown(snapshots.snapshot(uptime_s=seconds))


def test_the_exit_code_says_whether_results_flow() -> None:
    assert statusline.exit_code(snapshots.snapshot()) == 0
    assert statusline.exit_code(snapshots.new()) == 1
    assert statusline.exit_code(snapshots.troubled()) == 1


def test_a_real_daemons_page_is_read(free_port: Callable[[], int], wait_until: Callable[..., None]) -> None:
    section, stop, printed = config.Status(host="0.0.0.0", port=free_port()), threading.Event(), list[str]()  # noqa: S104
    server = StatusServer(section, snapshot=snapshots.troubled)
    thread = threading.Thread(target=server.serve, args=(stop,))
    thread.start()

    def answers() -> bool:
        try:
            return bool(statusline.ask(section))
        except ServiceError:
            return False

    try:
        wait_until(answers, "the page")
        code = statusline.show(section, echo=printed.append)
        as_json = statusline.show(section, as_json=True, echo=printed.append)
    finally:
        stop.set()
        thread.join()

    assert (code, as_json) == (1, 1)
    assert "broken" in printed[0]
    assert json.loads(printed[1])["device"] == "line3"


def test_watching_clears_the_screen_and_outlives_a_daemon_that_is_away() -> None:
    seen: list[str] = []
    sections = answering(reply(document.encode(snapshots.snapshot())))

    def sleep(period_s: float) -> None:
        seen.append(f"slept {period_s:g}")
        if seen.count("slept 2") == 2:
            sections.__exit__(None, None, None)
        if seen.count("slept 2") == 3:
            raise KeyboardInterrupt

    section = sections.__enter__()
    with pytest.raises(KeyboardInterrupt):
        statusline.show(
            section,
            watch_s=2,
            echo=lambda text: seen.append(click.unstyle(text).splitlines()[0]),
            clear=lambda: seen.append("clear"),
            sleep=sleep,
        )

    picture = ["clear", "line3: edge-daemon 0.1.0", "slept 2"]
    assert seen[:6] == picture * 2
    assert seen[6] == "clear"
    assert seen[7].startswith(f"error: no edge-daemon answers at 127.0.0.1:{section.port}: connection refused")


def test_nobody_answers(free_port: Callable[[], int]) -> None:
    section = config.Status(port=free_port())

    with pytest.raises(ServiceError, match=rf"no edge-daemon answers at 127.0.0.1:{section.port}: connection refused"):
        statusline.show(section)


def test_somebody_who_never_answers_is_not_waited_for() -> None:
    with answering(None) as section, pytest.raises(ServiceError, match=r"does not answer within 0\.2 s"):
        statusline.ask(section, timeout_s=0.2)


@pytest.mark.parametrize(
    "wrong",
    [
        reply(b"<html>a router</html>"),
        reply(b'{"schema": "something/1"}'),
        reply(b"no such page", "404 Not Found"),
        b"220 mail.example ESMTP\r\n",
    ],
)
def test_somebody_else_answers(wrong: bytes) -> None:
    with answering(wrong) as section, pytest.raises(ServiceError, match=f"127.0.0.1:{section.port}.* edge-daemon"):
        statusline.show(section)


def test_a_daemon_that_cannot_say_how_it_is() -> None:
    with (
        answering(reply(b"the reason is in the log\n", "500 Internal Server Error")) as section,
        pytest.raises(ServiceError, match="answers 500: the reason is in the log"),
    ):
        statusline.show(section)


def test_a_daemon_of_another_version() -> None:
    old = json.loads(document.encode(snapshots.snapshot(version="0.0.9")))
    del old["governor"]
    with (
        answering(reply(json.dumps(old).encode())) as section,
        pytest.raises(ServiceError, match=r"is of version 0\.0\.9, this command of .*: restart the daemon"),
    ):
        statusline.show(section)


def test_a_deployment_without_a_page() -> None:
    with pytest.raises(ConfigError, match=r"status\.port is null"):
        statusline.show(config.Status(port=None))

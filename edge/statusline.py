"""``edge-daemon status``: asks the daemon of a deployment how it is, and shows a person in a terminal its answer."""

from __future__ import annotations

import http.client
import textwrap
import time
from typing import TYPE_CHECKING, Any

import click

from edge import __version__, document
from edge.errors import ConfigError, ExitCode, ServiceError
from edge.overview import overview

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from edge import config
    from edge.overview import Overview, Table, Tone
    from edge.status import Snapshot

__all__ = ["ask", "exit_code", "read", "render", "show"]

_MAX_BYTES = 16 << 20
_NAME_WIDTH = 24
_LABEL_WIDTH = 11
_COLOURS: dict[Tone, dict[str, Any]] = {
    "good": {"fg": "green", "bold": True},
    "plain": {},
    "dim": {"dim": True},
    "warning": {"fg": "yellow"},
    "bad": {"fg": "red"},
}


def show(
    section: config.Status,
    *,
    as_json: bool = False,
    watch_s: float | None = None,
    echo: Callable[[str], object] = click.echo,
    clear: Callable[[], object] = click.clear,
    sleep: Callable[[float], object] = time.sleep,
) -> ExitCode:
    """Do the whole command, and return its exit code.

    Args:
        section: where the daemon listens.
        as_json: print the daemon's own document, one line each time.
        watch_s: ask again every so many seconds, until Ctrl-C; a daemon that is away is waited for.
        echo: prints; strips the colours where there is no terminal.
        clear: clears the terminal.
        sleep: waits.

    Raises:
        ConfigError: the deployment has no status page.
        ServiceError: no daemon answers there, or something else does.
    """
    before: Snapshot | None = None
    while True:
        try:
            answer = ask(section)
            snapshot = read(answer, section)
        except ServiceError as error:
            if watch_s is None:
                raise
            text, before = f"{click.style('error:', fg='red', bold=True)} {error}", None
        else:
            text = answer.decode() if as_json else render(overview(snapshot, before=before))
            before = snapshot
        if watch_s is not None and not as_json:
            clear()
        echo(text)
        if watch_s is None:
            return exit_code(snapshot)
        sleep(watch_s)


def ask(section: config.Status, *, timeout_s: float = 3.0) -> bytes:
    """What the daemon's /status answers.

    Raises:
        ConfigError: the deployment has no status page.
        ServiceError: nobody answers there, or something else does.
    """
    if section.port is None:
        raise ConfigError(["status.port is null: the daemon of this deployment has no status page to ask"])
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(section.host, section.host)  # noqa: S104 - nobody listens here
    connection = http.client.HTTPConnection(host, section.port, timeout=timeout_s)
    try:
        connection.request("GET", "/status", headers={"Accept": "application/json"})
        response = connection.getresponse()
        body = response.read(_MAX_BYTES)
    except TimeoutError:
        raise ServiceError(f"{_where(section)} does not answer within {timeout_s:g} s") from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ServiceError(f"no edge-daemon answers at {_where(section)}: {reason}; is it running?") from error
    except http.client.HTTPException as error:
        raise ServiceError(f"what answers at {_where(section)} is no edge-daemon") from error
    finally:
        connection.close()
    if response.status >= 500:
        text = body.decode("utf-8", "replace").strip()
        raise ServiceError(f"{_where(section)} answers {response.status}: {text.splitlines()[0] if text else ''}")
    return body


def read(answer: bytes, section: config.Status) -> Snapshot:
    """The snapshot in an answer.

    Raises:
        ServiceError: it is of something else, or of another version.
    """
    try:
        return document.decode(answer)
    except ValueError as error:
        version = document.version_of(answer)
        if version is None:
            raise ServiceError(f"what answers at {_where(section)} is no edge-daemon") from error
        text = f"the edge-daemon at {_where(section)} is of version {version}, this command of {__version__}"
        raise ServiceError(f"{text}: restart the daemon ({error})") from error


def exit_code(snapshot: Snapshot) -> ExitCode:
    """0 while results flow and arrive, else 1."""
    return ExitCode.LIMIT_EXCEEDED if snapshot.unhealthy or snapshot.not_ready else ExitCode.OK


def render(
    picture: Overview, *, width: int = 80, localtime: Callable[[float], time.struct_time] = time.localtime
) -> str:
    """The picture as lines of text, coloured.

    Args:
        picture: to draw.
        width: columns that long texts are wrapped to; tables of streams with long names may be wider.
        localtime: from seconds since the Unix epoch to local time.
    """
    lines = [click.style(_printable(picture.title), bold=True), *_wrapped("", picture.subtitle, "dim", width), ""]
    lines.append(_styled(picture.verdict, picture.tone))
    for reason in picture.reasons:
        lines += _wrapped("  - ", reason, "plain", width)
    for table in (picture.streams, picture.models):
        lines += ["", *_table(table, width)]
    lines.append("")
    for fact in picture.facts:
        lines += _wrapped(f"{fact.label:<{_LABEL_WIDTH}}", fact.text, fact.tone, width)
    if picture.events:
        lines.append("")
    for event, tone in picture.events:
        moment = time.strftime("%m-%d %H:%M:%S", localtime(event.at_utc_us / 1e6))
        lines += _wrapped(f"{moment}  ", event.text, tone, width)
    return "\n".join(lines)


def _table(table: Table, width: int) -> Iterator[str]:
    cells = [[_shortened(cell) for cell in row.cells] for row in table.rows]
    widths = [max(map(len, column)) for column in zip(table.header, *cells, strict=True)]
    yield _styled(_aligned(table.header, widths), "dim")
    for row, texts in zip(table.rows, cells, strict=True):
        yield _styled(_aligned(texts, widths), row.tone)
        if row.note is not None:
            yield from _wrapped("  ", row.note, "dim", width)


def _aligned(cells: tuple[str, ...] | list[str], widths: list[int]) -> str:
    texts = [cell.ljust(width) for cell, width in zip(cells[:2], widths[:2], strict=True)]
    texts += [cell.rjust(width) for cell, width in zip(cells[2:], widths[2:], strict=True)]
    return "  ".join(texts).rstrip()


def _shortened(text: str) -> str:
    text = _printable(text)
    return text if len(text) <= _NAME_WIDTH else f"{text[: _NAME_WIDTH - 3]}..."


def _wrapped(start: str, text: str, tone: Tone, width: int) -> list[str]:
    """The text after ``start``, on as many lines as it needs."""
    lines = textwrap.wrap(_printable(text), max(20, width - len(start)), break_on_hyphens=False) or [""]
    return [(start if index == 0 else " " * len(start)) + _styled(line, tone) for index, line in enumerate(lines)]


def _styled(text: str, tone: Tone) -> str:
    colours = _COLOURS[tone]
    return click.style(text, **colours) if colours else text


def _printable(text: str) -> str:
    """The text without what a terminal would obey: names of files and answers of servers stand in it."""
    return "".join(character if character.isprintable() else " " for character in text)


def _where(section: config.Status) -> str:
    return f"[{section.host}]:{section.port}" if ":" in section.host else f"{section.host}:{section.port}"

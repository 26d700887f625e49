"""What both commands share: logging, one-line errors, exit codes. Imports no engine and no rendering library."""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias, get_args

import click

from edge.errors import EdgeError, ExitCode
from edge.journal import JournalHandler, PrefixFormatter, is_connected

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LogFormat", "configure_logging", "deployment_argument", "log_format_option", "run", "verbosity_options"]

LogFormat: TypeAlias = Literal["auto", "plain", "json", "journal"]
"""How the log is written to stderr: plain lines for people, one JSON object a line, or entries of systemd's journal,
with fields; auto is journal where stderr is connected to it, and else plain."""

_logger = logging.getLogger("edge")

# What a plain installation lacks: extras of setup.py bring it.
_OPTIONAL = frozenset({"cv2", "jinja2", "onnx", "onnx_ir", "onnxruntime", "pycocotools", "rich"})


def run(command: click.Command, program: str) -> NoReturn:
    """Run a click command and end the process with the code that its outcome has in ``ExitCode``.

    An EdgeError, an OSError and Ctrl-C end in one line each on stderr; everything else is our fault and keeps its
    traceback. ``-v`` shows the traceback of an EdgeError too.
    """
    try:
        code = command.main(prog_name=program, standalone_mode=False)
        sys.stdout.flush()
    except SystemExit:
        # Outside its standalone mode click exits by itself only after shell completion, and where the reader of our
        # output, such as `head`, has gone. That is no error of ours.
        code = ExitCode.OK
    except (click.Abort, KeyboardInterrupt):
        _complain("interrupted")
        code = ExitCode.INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the outermost border
        code = _explain(error, program)
    raise SystemExit(int(code or 0))


def verbosity_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``-v`` and ``-q`` to a command, and configure logging before it runs."""

    @click.option("-v", "--verbose", is_flag=True, help="Show debug messages, and tracebacks of errors.")
    @click.option("-q", "--quiet", is_flag=True, help="Show warnings and errors only.")
    @wraps(function)
    def configured(*args: Any, verbose: bool, quiet: bool, **kwargs: Any) -> Any:
        configure_logging(logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO)
        return function(*args, **kwargs)

    return configured


deployment_argument = click.argument("deployment", type=click.Path(path_type=Path))
"""The deployment file. Its absence is told by ``config.load``, in the same words everywhere."""


log_format_option = click.option(
    "--log-format",
    type=click.Choice(get_args(LogFormat)),
    default="auto",
    show_default=True,
    help="Log for people, as one JSON object a line, or to systemd's journal with fields; auto: journal where stderr is"
    " connected to it, else plain.",
)
"""Adds ``log_format`` to a command, for ``configure_logging``."""


def configure_logging(level: int, *, log_format: LogFormat = "plain", program: str = "edge-daemon") -> None:
    """Send the log to stderr, or to the journal that stands behind it.

    Args:
        level: of our own records; of libraries only warnings are shown.
        log_format: how.
        program: what the journal knows us as.
    """
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if log_format == "journal" or (log_format == "auto" and is_connected(sys.stderr)):
        handler.setFormatter(PrefixFormatter())
        handler = JournalHandler(program, fallback=handler)
    else:
        handler.setFormatter(_JsonFormatter() if log_format == "json" else _PlainFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in ("edge", "calibration"):
        logging.getLogger(name).setLevel(level)


class _PlainFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        text = f"{stamp} {level}{record.getMessage()}"
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        return text


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "thread": record.threadName,
            "message": record.getMessage(),
        }
        # What the caller passed as extra={"fields": {...}}; ours have the right of way.
        entry = {**entry, **getattr(record, "fields", {}), **entry}
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def _explain(error: Exception, program: str) -> int:
    """Tell a person what an error means, and return the exit code."""
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, click.ClickException):
        error.show()
        return ExitCode.USAGE
    if isinstance(error, EdgeError):
        lines, code = str(error).splitlines(), error.exit_code
    elif isinstance(error, ModuleNotFoundError) and error.name in _OPTIONAL:
        extra = "calibration" if program == "edge-calibrate" else "cpu"
        lines = [f"{error.name} is not installed; pip install 'jetson-edge[{extra}]' (on a Jetson see README, Install)"]
        code = ExitCode.UNAVAILABLE
    elif isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        lines, code = [f"{where}{error.strerror or error}"], ExitCode.IO
    else:
        traceback.print_exception(error)
        lines, code = ["internal error: please report it with the lines above"], ExitCode.INTERNAL
    _logger.debug("traceback", exc_info=error)
    for line in lines:
        _complain(line)
    return code


def _complain(line: str) -> None:
    line = line.encode("utf-8", "backslashreplace").decode()  # a file's name may hold bytes that are not UTF-8
    if any(isinstance(handler, JournalHandler) for handler in logging.getLogger().handlers):
        # `journalctl -p err` is where somebody looks for why a service has ended.
        _logger.error("%s", line)
        return
    click.echo(f"{click.style('error:', fg='red', bold=True)} {line}", err=True)

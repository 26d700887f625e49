"""Every way in which a command ends: what a person reads, and the exit code."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from edge import commandline, errors
from edge.errors import ExitCode
from edge.journal import JournalHandler


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    for handler in root.handlers:
        if handler not in before[0]:
            handler.close()
    root.handlers[:], root.level = before


def ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], work: Any, *arguments: str
) -> tuple[int, str]:
    """Run a command that does ``work``; its exit code and what it wrote to stderr."""

    @click.command()
    @click.option("--number", type=int, expose_value=False)
    def command() -> Any:
        return work()

    monkeypatch.setattr(sys, "argv", ["edge-test", *arguments])
    with pytest.raises(SystemExit) as caught:
        commandline.run(command, "edge-test")
    return caught.value.code, capsys.readouterr().err  # type: ignore[return-value]


def raising(error: BaseException) -> Any:
    def work() -> None:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (errors.ConfigError(["a.yaml:3: x"]), 78, "error: a.yaml:3: x"),
        (errors.DataError("cat.jpg: is empty"), 65, "error: cat.jpg: is empty"),
        (errors.ModelError("m.onnx: broken"), 65, "error: m.onnx: broken"),
        (errors.DeviceError("no CUDA"), 69, "error: no CUDA"),
        (errors.SourceError("camera gone"), 69, "error: camera gone"),
        (errors.ServiceError("no broker"), 69, "error: no broker"),
        (FileNotFoundError(2, "No such file or directory", "/a/b"), 74, "error: /a/b: No such file or directory"),
        (OSError(28, "No space left on device"), 74, "error: No space left on device"),
        (KeyboardInterrupt(), 130, "error: interrupted"),
        (ModuleNotFoundError("No module named 'onnx'", name="onnx"), 69, "error: onnx is not installed; pip install"),
    ],
)
def test_what_a_person_can_mend_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, line: str
) -> None:
    found, text = ended(monkeypatch, capsys, raising(error))

    assert found == code
    assert text.lstrip().startswith(line)  # click ends the terminal's ^C with a line of its own
    assert text.strip().count("\n") == 0


def test_every_problem_of_a_file_is_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _, text = ended(monkeypatch, capsys, raising(errors.ConfigError(["one", "two"])))

    assert text.splitlines() == ["error: one", "error: two"]


@pytest.mark.parametrize("error", [ZeroDivisionError(), ModuleNotFoundError("No module named 'edge.x'", name="edge.x")])
def test_our_own_faults_keep_their_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    code, text = ended(monkeypatch, capsys, raising(error))

    assert code == ExitCode.INTERNAL
    assert "Traceback" in text
    assert "error: internal error" in text


def test_usage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(monkeypatch, capsys, lambda: None, "--number", "x")[0] == 2
    assert ended(monkeypatch, capsys, lambda: None)[0] == 0


def test_structured_log_lines_are_json(capsys: pytest.CaptureFixture[str]) -> None:
    commandline.configure_logging(logging.INFO, log_format="json")

    logging.getLogger("edge.test").warning("frame %d lost", 3, extra={"fields": {"stream": "gate"}})

    entry = json.loads(capsys.readouterr().err)
    assert entry["message"] == "frame 3 lost"
    assert (entry["level"], entry["logger"], entry["stream"]) == ("warning", "edge.test", "gate")
    assert entry["time"].endswith("Z")


def test_plain_log_lines_carry_tracebacks(capsys: pytest.CaptureFixture[str]) -> None:
    commandline.configure_logging(logging.INFO)

    logging.getLogger("edge.test").error("broken", exc_info=ValueError("why"))

    text = capsys.readouterr().err
    assert "error: broken" in text
    assert "ValueError: why" in text


class FarJournal(JournalHandler):
    """As the real one, where there is no journal."""

    def __init__(self, identifier: str, *, fallback: logging.Handler) -> None:
        super().__init__(identifier, fallback=fallback, path="/nonexistent/socket")


def connect_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    """As systemd does for a service."""
    monkeypatch.setattr(commandline, "JournalHandler", FarJournal)
    found = os.fstat(sys.stderr.fileno())
    monkeypatch.setenv("JOURNAL_STREAM", f"{found.st_dev}:{found.st_ino}")


def test_auto_is_plain_at_a_terminal_and_the_journal_under_systemd(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    commandline.configure_logging(logging.INFO, log_format="auto")
    logging.getLogger("edge.test").warning("one")
    connect_stderr(monkeypatch)
    commandline.configure_logging(logging.INFO, log_format="auto")
    logging.getLogger("edge.test").warning("two")

    lines = capfd.readouterr().err.splitlines()

    assert lines[0].endswith("warning: one")
    assert lines[1] == "<4>two"  # no socket here: lines with priorities


def test_why_a_service_ended_is_an_error_in_the_journal(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    connect_stderr(monkeypatch)

    def work() -> None:
        commandline.configure_logging(logging.INFO, log_format="auto")
        raise errors.ServiceError("no broker")

    monkeypatch.setattr(sys, "argv", ["edge-test"])
    with pytest.raises(SystemExit):
        commandline.run(click.command()(work), "edge-test")

    assert capfd.readouterr().err == "<3>no broker\n"


def test_fields_do_not_hide_what_every_line_of_json_has(capsys: pytest.CaptureFixture[str]) -> None:
    commandline.configure_logging(logging.INFO, log_format="json")

    fields = {"message": "mine", "level": 3, "path": Path("/x")}
    logging.getLogger("edge.test").info("theirs", extra={"fields": fields})

    entry = json.loads(capsys.readouterr().err)
    assert (entry["message"], entry["level"], entry["path"]) == ("theirs", "info", "/x")


def test_importing_edge_pulls_in_nothing_heavy() -> None:
    code = "import sys, edge, edge.config, edge.commandline; print(sorted(sys.modules))"

    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout

    for library in ("onnx", "onnx_ir", "rich", "matplotlib", "cv2", "onnxruntime", "jinja2"):
        assert f"'{library}'" not in loaded

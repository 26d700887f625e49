"""The edge-daemon command as its users start it: a process, its signals, its streams and its exit code."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
import yaml
from click.testing import CliRunner

from edge import __version__
from edge.cli import cli

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

COMMAND = [sys.executable, "-m", "edge.cli"]


@pytest.fixture
def write(deployment_file: Callable[[str], Path], data: Path) -> Callable[..., Path]:
    """Writes a deployment that runs YOLOX on the photographs."""

    def written(port: int, **changes: Any) -> Path:
        document = {
            "version": 1,
            "device": "dev",
            "models": [
                {
                    "name": "yolox",
                    "path": str(data / "models" / "yolox_nano.onnx"),
                    "task": {"type": "detection", "labels": "coco80"},
                    "input": {"anchor": "top-left", "color": "bgr", "divide_by": 1},
                    "engine": {"precision": "fp32", "threads": 1},
                }
            ],
            "streams": [{"name": "yard", "source": {"type": "folder", "path": str(data / "images"), "fps": 20}}],
            "mqtt": {"port": port, "outbox": {"path": "outbox.db"}},
            "status": {"port": None},
            **changes,
        }
        return deployment_file(yaml.safe_dump(document))

    return written


def finish(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@contextmanager
def running(*arguments: object, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A daemon that is killed if the block leaves it alive."""
    process = subprocess.Popen(
        [*COMMAND, "run", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.broker
def test_sigterm_drains_and_ends_well(
    broker: Any, ears: Any, wait_until: Any, write: Callable[..., Path], tmp_path: Path
) -> None:
    manager = tmp_path / "notify"
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd,
        ears(broker.port) as subscriber,
    ):
        systemd.bind(str(manager))
        systemd.settimeout(30)
        with running(write(broker.port), "--json", NOTIFY_SOCKET=str(manager)) as process:
            told = iter(lambda: systemd.recv(1000), b"")
            assert any(text.startswith(b"READY=1\nSTATUS=") for text in told)
            wait_until(lambda: len(subscriber.results()) >= 3, "results")
            process.send_signal(signal.SIGTERM)
            output, log = process.communicate(timeout=30)
        summary = json.loads(output)
        wait_until(lambda: subscriber.statuses()[-1]["state"] == "offline", "the farewell")
        wait_until(lambda: len(subscriber.results()) == summary["results_acknowledged"], "all results")

        assert process.returncode == 0, log
        assert summary["results_left"] == 0
        assert summary["results_acknowledged"] == summary["frames_inferred"]
        assert subscriber.statuses()[-1]["reason"] == "stopped"
        assert any(b"STOPPING=1" in text for text in told)


@pytest.mark.broker
def test_ctrl_c_stops_cleanly(broker: Any, ears: Any, wait_until: Any, write: Callable[..., Path]) -> None:
    with ears(broker.port) as subscriber, running(write(broker.port)) as process:
        wait_until(subscriber.results, "a result")
        process.send_signal(signal.SIGINT)
        output, log = process.communicate(timeout=30)

    assert process.returncode == 0, log
    assert " 0 left" in output
    assert "Traceback" not in log


@pytest.mark.broker
def test_a_second_ctrl_c_does_not_wait_for_the_drain(
    broker: Any, ears: Any, wait_until: Any, write: Callable[..., Path]
) -> None:
    with ears(broker.port) as subscriber, running(write(broker.port)) as process:
        wait_until(subscriber.results, "a result")
        broker.freeze()

        def interrupted() -> bool:
            process.send_signal(signal.SIGINT)
            return process.poll() is not None

        wait_until(interrupted, "the end")
        _, log = process.communicate(timeout=30)

    assert process.returncode == 130
    assert log.splitlines()[-1] == "error: interrupted"


@pytest.mark.broker
def test_a_killed_daemon_is_reported_by_the_broker(
    broker: Any, ears: Any, wait_until: Any, write: Callable[..., Path]
) -> None:
    with ears(broker.port) as subscriber, running(write(broker.port)) as process:
        wait_until(subscriber.statuses, "the daemon to be online")
        process.kill()
        wait_until(lambda: subscriber.statuses()[-1]["state"] == "offline", "the last will")

        assert subscriber.statuses()[-1] == {
            "schema": "edge.status/1",
            "device": "dev",
            "state": "offline",
            "reason": "connection lost",
        }
    with ears(broker.port, "edge/dev/status") as late:
        wait_until(late.heard.copy, "the retained status")
        assert late.heard[0][2]
        assert late.statuses()[0]["state"] == "offline"


@pytest.mark.broker
def test_what_a_killed_daemon_had_written_is_delivered_by_the_next(
    make_broker: Any, ears: Any, wait_until: Any, write: Callable[..., Path], tmp_path: Path
) -> None:
    late = make_broker()
    path = write(late.port)
    log = tmp_path / "outbox.db-wal"
    with running(path) as process:
        wait_until(lambda: log.exists() and log.stat().st_size > 100_000, "results on disk")
        process.kill()
    late.start()

    with ears(late.port) as subscriber:
        done = finish("run", path, "--duration", "0.5", "--json")
        summary = json.loads(done.stdout)
        wait_until(lambda: len(subscriber.results()) >= summary["results_acknowledged"], "all results")
        results = subscriber.results()

    assert done.returncode == 0, done.stderr
    assert summary["results_acknowledged"] > summary["results_published"]
    assert [result["id"] for result in results] == sorted({result["id"] for result in results})
    # The frames of the first run that were written are there without a gap.
    earlier = results[: summary["results_acknowledged"] - summary["results_published"]]
    assert [result["frame_id"] for result in earlier] == sorted({result["frame_id"] for result in earlier})


def test_a_timed_run_without_a_broker_ends_with_one_line_and_69(
    free_port: Callable[[], int], write: Callable[..., Path], tmp_path: Path
) -> None:
    port = free_port()

    done = finish("run", write(port), "--duration", "0.5", "-q")

    *_, complaint = done.stderr.splitlines()
    assert done.returncode == 69
    assert done.stdout == ""
    assert complaint.startswith(f"error: MQTT broker 127.0.0.1:{port} cannot be reached (Connection refused); ")
    assert complaint.endswith(f"results wait in {tmp_path / 'outbox.db'}")
    assert done.stderr.count("error:") == 1


def test_the_log_can_be_one_json_object_a_line(free_port: Callable[[], int], write: Callable[..., Path]) -> None:
    done = finish("run", write(free_port()), "--duration", "0.2", "--log-format", "json")

    *log, _complaint = done.stderr.splitlines()
    assert {"time", "level", "logger", "thread", "message"} <= set(json.loads(log[0]))
    assert "ready" in " ".join(json.loads(line)["message"] for line in log)


def test_a_misspelt_key_is_bad_configuration(write: Callable[..., Path]) -> None:
    path = write(1883)
    path.write_text(path.read_text().replace("anchor:", "ancor:"))

    for command in ("run", "check"):
        done = finish(command, path)

        assert done.returncode == 78
        assert done.stderr.startswith(f"error: {path}:")
        assert "did you mean 'anchor'?" in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_check_says_what_would_run(write: Callable[..., Path], tmp_path: Path) -> None:
    path = write(1883, mqtt={"username": "edge", "host": "broker.plant"})

    plain, machine = finish("check", path), finish("check", path, "--json")

    report = json.loads(machine.stdout)
    assert plain.returncode == machine.returncode == 0
    assert report["problems"] == []
    assert report["models"][0]["sha256"].startswith("695e750a5d57")
    assert report["streams"][0]["topic"] == "edge/dev/yard/results"
    assert report["broker"]["host"] == "broker.plant"
    assert set(report["opencv"]) == {"version", "gstreamer"}
    assert report["runtime"]["onnxruntime"]
    assert "GStreamer: " in plain.stdout
    assert "broker.plant:1883, MQTT 5, QoS 1, as edge, without password (not contacted)" in plain.stdout
    assert plain.stdout.splitlines()[-1] == "verdict    ready to run"
    assert list(tmp_path.glob("*.db*")) == []


def test_check_lists_every_missing_file_at_once(write: Callable[..., Path], tmp_path: Path) -> None:
    path = write(1883, streams=[{"name": "yard", "source": {"type": "video", "path": "gone.mp4"}}])
    path.write_text(path.read_text().replace("yolox_nano.onnx", "gone.onnx"))

    done = finish("check", path)

    assert done.returncode == 65
    assert "models[0].path: " in done.stderr
    assert f"streams[0].source.path: {tmp_path / 'gone.mp4'}: no such file" in done.stderr
    assert "verdict    2 problems" in done.stdout


def test_check_says_that_int8_has_to_be_calibrated_first(write: Callable[..., Path]) -> None:
    path = write(1883)
    path.write_text(path.read_text().replace("precision: fp32", "precision: int8"))

    done = finish("check", path)

    assert done.returncode == 65
    assert "run edge-calibrate calibrate first" in done.stderr


def test_the_schema_of_the_deployment_file_accepts_what_runs(write: Callable[..., Path], tmp_path: Path) -> None:
    runner = CliRunner()
    printed = runner.invoke(cli, ["schema"])
    written = runner.invoke(cli, ["schema", "-o", str(tmp_path / "schema.json")])

    schema = json.loads(printed.stdout)
    assert written.exit_code == 0
    assert json.loads((tmp_path / "schema.json").read_text()) == schema
    jsonschema.validate(yaml.safe_load(write(1883).read_text()), schema, cls=jsonschema.Draft202012Validator)


def test_version_and_help() -> None:
    runner = CliRunner()

    assert runner.invoke(cli, ["--version"]).stdout == f"edge-daemon {__version__}\n"
    for arguments in ([], ["run"], ["check"], ["schema"]):
        shown = runner.invoke(cli, [*arguments, "--help"])
        assert shown.exit_code == 0
        assert "Example" in shown.stdout
        assert "\n  edge-daemon " in shown.stdout.replace("    edge", "  edge")


@pytest.mark.parametrize(
    "statement", ["import edge", "import edge.cli; edge.cli.cli(['--help'], standalone_mode=False)"]
)
def test_neither_the_package_nor_help_imports_what_is_heavy(statement: str) -> None:
    code = f"{statement}\nimport sys\nprint([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)

    assert done.stderr.strip() == "[]"


HEAVY = ["onnx", "onnx_ir", "rich", "matplotlib", "cv2", "onnxruntime", "paho", "tensorrt", "pycuda", "calibration"]


@pytest.mark.broker
def test_status_shows_a_daemon_that_runs_and_says_when_none_does(
    broker: Any, ears: Any, wait_until: Any, free_port: Any, write: Callable[..., Path]
) -> None:
    path = write(broker.port, status={"port": free_port()})
    assert finish("status", path).returncode == 69

    with ears(broker.port) as subscriber, running(path) as process:
        wait_until(lambda: len(subscriber.results()) >= 3, "results")
        document = finish("status", path, "--json")
        shown = finish("status", path)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)

    assert json.loads(document.stdout)["streams"][0]["name"] == "yard"
    assert "yard" in shown.stdout
    assert (document.returncode, shown.returncode) == (0, 0)


@pytest.mark.broker
def test_sighup_reloads_the_file(broker: Any, ears: Any, wait_until: Any, write: Callable[..., Path]) -> None:
    path = write(broker.port)
    with ears(broker.port) as subscriber, running(path) as process:
        wait_until(lambda: len(subscriber.results()) >= 3, "results")
        text = path.read_text()
        path.write_text(text.replace("name: yard", "name: roof"))
        process.send_signal(signal.SIGHUP)
        wait_until(lambda: subscriber.results()[-1]["stream"] == "roof", "results of the new stream")
        path.write_text("version: 1")
        process.send_signal(signal.SIGHUP)
        wait_until(
            lambda: any(b"reload_failed" in payload for payload in subscriber.payloads("/events")), "the refusal"
        )
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=30)

    assert process.returncode == 0, log

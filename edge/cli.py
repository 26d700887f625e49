"""edge-daemon: arguments in, daemon or report out, exit code. What it runs is imported by the command that needs it."""

from __future__ import annotations

import _thread
import dataclasses
import importlib.metadata
import importlib.util
import json
import logging
import os
import signal
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge import __version__, commandline, config
from edge.commandline import deployment_argument, verbosity_options
from edge.errors import ConfigError, DataError, DeviceError, EdgeError, ExitCode, ModelError
from edge.publish.message import results_topic

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from edge.daemon import Summary

__all__ = ["cli", "main"]

logger = logging.getLogger(__name__)


def _example(*commands: str) -> str:
    """The end of a help text; the leading mark keeps click from joining the lines."""
    return "\b\nExample, from a clone of the repository:\n" + "\n".join(f"  {command}" for command in commands)


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=_example("edge-daemon check configs/demo.yaml", "edge-daemon run configs/demo.yaml --duration 10"),
)
@click.version_option(__version__, prog_name="edge-daemon", message="%(prog)s %(version)s")
def cli() -> None:
    """Run vision models on camera streams and publish what they see over MQTT."""


def main() -> None:
    """Entry point of the ``edge-daemon`` command."""
    try:
        commandline.run(cli, "edge-daemon")
    except SystemExit as end:
        if threading.active_count() > 1:
            # A thread that native code does not give back: the interpreter's own way out could wait for it for ever.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code if isinstance(end.code, int) else ExitCode.INTERNAL)
        raise


@cli.command(epilog=_example("edge-daemon run configs/demo.yaml --duration 10"))
@deployment_argument
@click.option(
    "--duration",
    "duration_s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Stop after so many seconds; fail if results could not be delivered. Default: run for ever.",
)
@commandline.log_format_option
@click.option("--json", "as_json", is_flag=True, help="Print the closing summary as JSON.")
@verbosity_options
def run(deployment: Path, *, duration_s: float | None, log_format: commandline.LogFormat, as_json: bool) -> None:
    """Run the deployment until SIGTERM or Ctrl-C.

    On either, the last results are published and what the broker has not acknowledged stays in the outbox; a second
    Ctrl-C ends at once. SIGHUP reloads the deployment file: models and streams that changed are loaded beside what
    runs, and take over when all of them are ready; otherwise what ran goes on. (Started from a terminal, SIGHUP means
    that the terminal is gone, and stops.)

    Exits with 75 to be started again before a leak uses up the memory, with 79 when a part hangs or keeps failing.
    """
    commandline.configure_logging(logging.getLogger("edge").level, log_format=log_format)
    loaded = config.load(deployment)

    from edge import daemon

    stop, reload_wanted = threading.Event(), threading.Event()
    with _handling_signals(stop, reload_wanted):
        summary = daemon.run(
            loaded,
            duration_s=duration_s,
            stop=stop,
            reload_wanted=reload_wanted,
            load=lambda: config.load(deployment),
            path=deployment.absolute(),
        )
    click.echo(json.dumps(dataclasses.asdict(summary)) if as_json else _describe(summary))


@cli.command(epilog=_example("edge-daemon check configs/demo.yaml", "edge-daemon check configs/demo.yaml --json"))
@deployment_argument
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@verbosity_options
def check(deployment: Path, *, as_json: bool) -> None:
    """Say everything about the deployment that can be known without running it.

    Exits with 78 for a faulty deployment file, 65 for missing or unsuitable files, 69 for missing software.
    """
    loaded = config.load(deployment)

    report, faults = _inspect(loaded)
    if as_json:
        click.echo(json.dumps({**report, "problems": [str(fault) for fault in faults]}, indent=2))
    else:
        for section, entries in report.items():
            for entry in entries if isinstance(entries, list) else [entries]:
                click.echo(f"{section.removesuffix('s'):<9}  {_line(section, entry)}")
        click.echo(f"{'verdict':<9}  {_verdict(len(faults))}")
    if faults:
        # Several faults are one complaint, and the first decides the exit code: a faulty file before missing ones.
        if any(isinstance(fault, ConfigError) for fault in faults):
            raise ConfigError([str(fault) for fault in faults])
        raise type(faults[0])("\n".join(map(str, faults)))


@cli.command(epilog=_example("edge-daemon status configs/demo.yaml", "edge-daemon status configs/demo.yaml --watch 2"))
@deployment_argument
@click.option("--json", "as_json", is_flag=True, help="Print the daemon's own document.")
@click.option(
    "--watch",
    "watch_s",
    type=click.FloatRange(min=0.2),
    metavar="SECONDS",
    help="Ask again every so many seconds, until Ctrl-C.",
)
@verbosity_options
def status(deployment: Path, *, as_json: bool, watch_s: float | None) -> None:
    """Show what the daemon of this deployment does now.

    Exits with 0 while results flow and arrive, 1 while they do not, 69 if no daemon answers.
    """
    from edge import statusline

    code = statusline.show(config.load(deployment).status, as_json=as_json, watch_s=watch_s)
    raise click.exceptions.Exit(int(code))


@cli.command(epilog=_example("edge-daemon schema -o deployment.schema.json"))
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write here instead of stdout.")
@verbosity_options
def schema(output: Path | None) -> None:
    """Print the JSON Schema of the deployment file, for editors that check while you type."""
    text = json.dumps(config.json_schema(), indent=2) + "\n"
    if output is None:
        click.echo(text, nl=False)
        return

    from edge import files

    files.write(output, text.encode())
    logger.info("wrote %s", output)


@contextmanager
def _handling_signals(stop: threading.Event, reload_wanted: threading.Event) -> Iterator[None]:
    """Set ``stop`` on SIGTERM or SIGINT, ``reload_wanted`` on SIGHUP; a SIGINT after a stop ends the process."""
    hangup = stop if sys.stderr.isatty() else reload_wanted

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if stop.is_set() and number == signal.SIGINT:
            # An exception would wait for threads on its way out. What the outbox has written is safe on disk.
            os.write(sys.stderr.fileno(), b"error: interrupted\n")
            os._exit(ExitCode.INTERRUPTED)
        # Not from here: the handler may have interrupted a wait for this very event while that holds the event's lock.
        _thread.start_new_thread((hangup if number == signal.SIGHUP else stop).set, ())

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _inspect(deployment: config.Deployment) -> tuple[dict[str, Any], list[EdgeError]]:
    """Look at everything that running would need; return what was found and what is wrong."""
    from edge import manifest
    from edge.engine import artifact_of, backend_of, examine
    from edge.publish.mqtt import find_password
    from edge.publish.publisher import outbox_path
    from edge.sources import describe, problems
    from edge.sources.video import opencv_build
    from edge.tasks import labels

    faults: list[EdgeError] = []
    # The evaluation's pictures and labels are edge-calibrate's business.
    faults += [DataError(text) for text in config.missing_files(deployment) if ".evaluation." not in text]
    models = []
    for model in deployment.models:
        entry: dict[str, Any] = {"name": model.name, "precision": model.engine.precision, "file": None, "sha256": None}
        entry |= {"runs_on": None, "notes": []}
        if Path(model.path).is_file():
            try:
                artifact = artifact_of(model)
                entry |= {"file": str(artifact.path), "sha256": artifact.sha256, "precision": artifact.precision}
                if artifact.engine is not None:
                    entry["notes"] = manifest.reservations(model, artifact.engine)
                entry["runs_on"] = examine(model, artifact)
            except (DeviceError, ModelError) as error:
                faults.append(error)
        keep = () if isinstance(model.task, config.Classification) else model.task.keep
        try:
            labels.load(model.task.labels, keep=keep, classes=None, source=model.path)
        except ConfigError as error:
            faults.extend(ConfigError([f"models.{model.name}.{problem}"]) for problem in error.problems)
        models.append(entry)
    streams = []
    for index, stream in enumerate(deployment.streams):
        found = problems(stream, key=f"streams[{index}].source")
        faults += [fault for fault in found if str(fault) not in {str(known) for known in faults}]
        topic = results_topic(deployment.mqtt.topic, deployment.device_id, stream.name)
        model_name = deployment.model(stream.model).name
        kind, place = str(stream.source.__struct_config__.tag), getattr(stream.source, "path", None)
        source = {"type": kind, "path": place, "description": describe(stream.source)}
        streams.append({"name": stream.name, "source": source, "model": model_name, "topic": topic})
    if not streams:
        faults.append(ConfigError(["streams: is empty; there is nothing to run"]))
    mqtt = deployment.mqtt
    password = None
    if mqtt.username is not None and (mqtt.password_file is None or Path(mqtt.password_file).exists()):
        password = find_password(mqtt)
    outbox = outbox_path(mqtt.outbox)
    version, gstreamer = opencv_build()
    runtime = _onnxruntime_version()
    if runtime is None and any(backend_of(model.engine) == "onnxruntime" for model in deployment.models):
        faults.append(
            DeviceError("onnxruntime is not installed; pip install 'jetson-edge[cpu]' (on a Jetson: [build])")
        )
    return {
        "device": deployment.device_id,
        "models": models,
        "streams": streams,
        "broker": {
            "host": mqtt.host,
            "port": mqtt.port,
            "protocol": mqtt.protocol,
            "qos": mqtt.qos,
            "username": mqtt.username,
            "password": password is not None,
        },
        "outbox": {"path": None if outbox is None else str(outbox), "max_mb": mqtt.outbox.max_mb},
        "opencv": {"version": version, "gstreamer": gstreamer},
        "runtime": {"onnxruntime": runtime},
    }, faults


def _verdict(faults: int) -> str:
    return f"{faults} problem{'s' if faults > 1 else ''}" if faults else "ready to run"


def _line(section: str, entry: Any) -> str:
    """One line of the report for people."""
    match section:
        case "models":
            found = f"{entry['file']} (sha256 {entry['sha256'][:12]}...)" if entry["file"] else "cannot be run"
            place = f", on {entry['runs_on']}" if entry["runs_on"] else ""
            return "; ".join([f"{entry['name']}: {entry['precision']}{place}, {found}", *entry["notes"]])
        case "streams":
            return f"{entry['name']}: {entry['source']['description']} -> {entry['model']} -> {entry['topic']}"
        case "broker":
            account = f"as {entry['username']}" if entry["username"] else "without user name"
            secret = "with" if entry["password"] else "without"
            return (
                f"{entry['host']}:{entry['port']}, MQTT {entry['protocol']}, QoS {entry['qos']}, {account},"
                f" {secret} password (not contacted)"
            )
        case "outbox":
            place = entry["path"] or "in memory only: what waits is lost with the process"
            return f"{place}, up to {entry['max_mb']:g} MB"
        case "opencv":
            return f"OpenCV {entry['version']}, GStreamer: {'yes' if entry['gstreamer'] else 'no'}"
        case "runtime":
            return f"onnxruntime {entry['onnxruntime'] or 'not found'}"
        case _:
            return str(entry)


def _onnxruntime_version() -> str | None:
    """Version of the onnxruntime that would be imported, without importing it: that takes a second and 60 MB."""
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    for name in importlib.metadata.packages_distributions().get("onnxruntime", []):
        return importlib.metadata.version(name)
    return "of unknown version"


def _describe(summary: Summary) -> str:
    parts = [
        f"{summary.duration_s:.1f} s",
        f"{summary.frames_captured} frames captured, {summary.frames_dropped} dropped, {summary.frames_failed} failed",
        (
            f"{summary.results_published} results, {summary.results_acknowledged} acknowledged,"
            f" {summary.results_dropped} dropped, {summary.results_left} left"
        ),
    ]
    if summary.latency_ms is not None:
        values = ", ".join(f"{name} {value:.1f}" for name, value in summary.latency_ms.items())
        parts.append(f"latency in ms: {values}")
    return "; ".join(parts)


if __name__ == "__main__":
    main()

"""``edge-calibrate``: options in, files and exit codes out. The work is done in the other rooms."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
import msgspec

from edge import __version__, commandline, config, files, manifest
from edge.commandline import deployment_argument, verbosity_options
from edge.errors import ConfigError, DataError, ExitCode

if TYPE_CHECKING:
    from calibration.calibrate import Calibrated
    from calibration.images import ImageSet


def _size(text: str) -> int:
    """Bytes of an amount of memory such as 1.5G; the letters stand for powers of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])i?B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise click.BadParameter(f"{text!r} is no amount of memory; expected one such as 800M or 2G")
    if len(text) > 20:
        raise click.BadParameter(f"{text[:20]}... is more memory than there is")
    return int(float(match[1]) * 1024 ** ("KMGT".index(match[2].upper()) + 1))


def _path(text: str) -> Path:
    """A path that is given: an empty one would be the current folder, which an unset variable does not mean."""
    if not text:
        raise click.BadParameter("is empty")
    return Path(text)


_METHODS = ["auto", "entropy", "percentile", "mse", "max"]
_MODEL = click.option("--model", "model_name", metavar="NAME", help="Model of the deployment; default: all of them.")
_IMAGES = click.option(
    "--images", type=_path, metavar="PATH", help="Folder, glob, video or list file instead of the deployment's."
)
_COUNT = click.option("--count", type=click.IntRange(min=1), help="Pictures to use.")
_MEMORY = click.option(
    "--memory",
    type=_size,
    metavar="SIZE",
    help="The most that the process may take while it observes, such as 2G; default: half of what is free.",
)
_HISTOGRAMS = click.option(
    "--histograms",
    "earlier",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    multiple=True,
    help="Histograms of other pictures, which count as well; may be given several times.",
)
_JSON_OUT = click.option(
    "--json", "json_path", type=click.Path(path_type=Path), metavar="FILE", help="Also write JSON ('-': stdout, alone)."
)


def main() -> NoReturn:
    """Entry point of ``edge-calibrate``."""
    # What ends a service, a container or a terminal shall not lose more than Ctrl-C.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, signal.default_int_handler)
    commandline.run(cli, "edge-calibrate")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="edge-calibrate")
def cli() -> None:
    """Turn a trained ONNX model and real pictures into INT8 for Jetson, and measure what INT8 costs.

    \b
    Example, from a clone of the repository:
      edge-calibrate check     configs/demo.yaml
      edge-calibrate calibrate configs/demo.yaml
      edge-calibrate evaluate  configs/demo.yaml
    """


@cli.command()
@deployment_argument
@_MODEL
@_IMAGES
@_COUNT
@click.option("--method", type=click.Choice(_METHODS), help="How ranges are chosen.")
@_HISTOGRAMS
@_MEMORY
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder instead of the deployment's.")
@verbosity_options
def calibrate(
    deployment: Path,
    model_name: str | None,
    images: Path | None,
    count: int | None,
    method: str | None,
    earlier: tuple[Path, ...],
    memory: int | None,
    out: Path | None,
) -> None:
    """Find INT8 ranges on real pictures; write the calibration cache and the Q/DQ model.

    \b
    Leaves in the model's artifacts folder:
      calibration.cache  scales for TensorRT 8.5 to 10 and the DLA
      model.int8.onnx    the model with Q/DQ, for TensorRT 11 and onnxruntime
      ranges.json        range of every tensor, and where it came from
      histograms.npz     what was observed
      calibration.json   what all this was made from and for
      report.html        the same for people

    After Ctrl-C, or a kill, the same command goes on where it stopped. Pictures that histograms.npz has already are not
    run again, if all of its pictures still are in the set: add some, and only those are run.

    \b
    Example:
      edge-calibrate calibrate configs/demo.yaml --count 32 --out /tmp/int8
    """
    from calibration import console
    from calibration.calibrate import calibrate as run

    models = _chosen(config.load(deployment), model_name, deployment)
    for option, value in (("--out", out), ("--histograms", earlier)):
        if value:
            _one_model(option, models)
    for model in models:
        chosen = _with_options(model, deployment, images=images, count=count, method=method)
        assert chosen.calibration is not None
        pictures = _collect(chosen.calibration.images, count=chosen.calibration.count, seed=chosen.calibration.seed)
        with console.progress(f"calibrating {model.name}", len(pictures.used)) as progress:
            done = run(
                chosen,
                pictures,
                out or model.artifacts_dir,
                earlier=earlier,
                memory=memory,
                on_images=progress.advance,
                on_step=progress.begin,
                report=partial(_report, chosen, pictures),
            )
        _show_calibrated(done, pictures)


@cli.command()
@deployment_argument
@_MODEL
@_IMAGES
@_COUNT
@_HISTOGRAMS
@_MEMORY
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path, dir_okay=False), metavar="FILE.npz")
@verbosity_options
def observe(
    deployment: Path,
    model_name: str | None,
    images: Path | None,
    count: int | None,
    earlier: tuple[Path, ...],
    memory: int | None,
    output: Path,
) -> None:
    """Run the FP32 model on pictures and keep the histograms, for another machine to calibrate with.

    A file that is there already is added to: only pictures that it does not have are run. Without --count it is the
    deployment's count of pictures.

    \b
    Example:
      edge-calibrate observe configs/demo.yaml --images tests/data/images -o /tmp/here.npz
    """
    from calibration import console, observation
    from calibration.calibrate import gathered, prepare

    models = _chosen(config.load(deployment), model_name, deployment)
    _one_model("observe", models)
    _writable(output)
    model = _with_options(models[0], deployment, images=images, count=count)
    assert model.calibration is not None
    pictures = _collect(model.calibration.images, count=model.calibration.count, seed=model.calibration.seed)
    work = output.with_name(f".{output.name}.observing")
    progress_of = console.progress(f"observing {model.name}", len(pictures.used))
    with files.folder_lock(work), progress_of as progress:
        found = gathered(
            model,
            prepare(model),
            pictures,
            earlier=_added_to(output, earlier),
            partial_file=work / manifest.PARTIAL,
            memory=memory,
            on_images=progress.advance,
        )
        observation.save(output, found)
        (work / manifest.PARTIAL).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # that of an interrupted run was there before the lock
        work.rmdir()
    click.echo(f"{output}: {found.images} pictures")


@cli.command()
@click.argument("files_", metavar="FILE FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path, dir_okay=False), metavar="FILE.npz")
@verbosity_options
def merge(files_: tuple[Path, ...], output: Path) -> None:
    """Add up histograms of different pictures, as if one machine had seen them all.

    The result is the same to the last byte, whatever the order and however the pictures were shared out.

    \b
    Example:
      edge-calibrate merge /tmp/here.npz /tmp/there.npz -o /tmp/all.npz
      edge-calibrate calibrate configs/demo.yaml --histograms /tmp/all.npz
    """
    from calibration import observation

    if len(files_) < 2:
        raise click.UsageError("merge needs two files or more")
    _writable(output)
    if output.exists():
        observation.load(output)  # anything else was named by mistake
    merged = observation.merge_files(files_)
    observation.save(output, merged)
    click.echo(f"{output}: {merged.images} pictures")


@cli.command()
@deployment_argument
@_MODEL
@_IMAGES
@click.option("--labels", type=click.Path(path_type=Path), metavar="COCO.json", help="Boxes, for mAP.")
@click.option(
    "--int8",
    "int8_path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Another model with Q/DQ, or an engine.plan, instead of the calibrated model.",
)
@click.option("--save", type=click.Path(path_type=Path, file_okay=False), help="Leave annotated pictures there.")
@_JSON_OUT
@verbosity_options
def evaluate(
    deployment: Path,
    model_name: str | None,
    images: Path | None,
    labels: Path | None,
    int8_path: Path | None,
    save: Path | None,
    json_path: Path | None,
) -> None:
    """Compare INT8 with FP32 on pictures that calibration did not use.

    Exits with 1 when INT8 exceeds a limit of the deployment. Pictures named with --images are all used, and a warning
    says how many of them calibration has seen.

    \b
    Example:
      edge-calibrate evaluate configs/demo.yaml --json /tmp/evaluation.json
    """
    from calibration import console
    from calibration.evaluate import evaluate as run

    models = _chosen(config.load(deployment), model_name, deployment)
    for option, value in (("--int8", int8_path), ("--labels", labels), ("--json", json_path)):
        if value is not None:
            _one_model(option, models)
    if json_path is not None:
        _writable(json_path)
    exceeded = False
    for model in models:
        pictures = _evaluation_pictures(model, images, deployment, ours=int8_path is None)
        section = model.evaluation
        label_file = labels or (Path(section.labels) if section is not None and section.labels else None)
        folder = save / model.name if save is not None and len(models) > 1 else save
        with console.progress(f"evaluating {model.name}", len(pictures.used)) as progress:
            result = run(
                model, pictures, labels=label_file, int8_path=int8_path, save=folder, on_image=progress.advance
            )
        exceeded = exceeded or bool(result.exceeded)
        if json_path != Path("-"):
            console.show_evaluation(result)
        if json_path is not None:
            _write_json(result.to_json(), json_path)
    if exceeded:
        raise click.exceptions.Exit(ExitCode.LIMIT_EXCEEDED)


@cli.command()
@deployment_argument
@_MODEL
@click.option("--images", type=_path, metavar="PATH", help="Pictures to compare on, instead of the calibration's.")
@click.option("--if-needed", is_flag=True, help="Do nothing where the engine is up to date.")
@click.option("--dry-run", is_flag=True, help="Say what would be built and why, with the same as a trtexec command.")
@click.option("--force", is_flag=True, help="Install what the deployment asks for, whatever the comparison says.")
@click.option(
    "--tensorrt", metavar="VERSION", help="For --dry-run on another machine, such as 10.3.0; default: the deployment's."
)
@click.option("--dla-cores", type=click.IntRange(0, 2), help="For --dry-run on another machine; default: 2 (AGX Orin).")
@_JSON_OUT
@verbosity_options
def build(
    deployment: Path,
    model_name: str | None,
    images: Path | None,
    if_needed: bool,
    dry_run: bool,
    force: bool,
    tensorrt: str | None,
    dla_cores: int | None,
    json_path: Path | None,
) -> None:
    """Build the TensorRT engine of a deployment on this device, and install it if it is close enough to FP32.

    \b
    Leaves in the model's artifacts folder:
      engine.plan         the engine, as trtexec and Triton load it too
      engine.json         what it was built from and for; edge-daemon refuses it on another device
      engine.layers.json  where each layer runs, and in which precision
      timing.cache        what TensorRT has timed, for the next build
      builder.log         what TensorRT said

    The new engine runs some of the calibration's pictures and is compared with FP32 in onnxruntime. One that misses a
    limit of engine.parity is not installed; engine.fallbacks are tried in their order. If none passes, the exit code is
    1 and the engine in use stays, as it does when a build fails or is killed. It is 1 as well where --force has
    installed one that missed a limit.

    \b
    Example, on the device, and on a laptop:
      edge-calibrate build configs/demo.yaml --if-needed
      edge-calibrate build configs/demo.yaml --dry-run --tensorrt 10.3.0
    """
    from calibration import building

    if dry_run and (if_needed or force):
        raise click.UsageError("--dry-run builds nothing, needed or not; leave --if-needed and --force out")
    if not dry_run and (tensorrt is not None or dla_cores is not None):
        raise click.UsageError("--tensorrt and --dla-cores are for --dry-run; an engine is built for this device")
    models = _chosen(config.load(deployment), model_name, deployment)
    if json_path is not None:
        _one_model("--json", models)
        _writable(json_path)
    device = building.elsewhere(models[0], tensorrt, dla_cores) if dry_run else None
    quiet = json_path == Path("-")
    passed = True
    for model in models:
        pictures = partial(_parity_pictures, model, images, optional=dry_run or force)
        if device is not None:
            document = building.show_plan(model, deployment, device, pictures, quiet=quiet)
        else:
            document = building.run(model, deployment, pictures, if_needed=if_needed, force=force, quiet=quiet)
            passed = passed and document["kept_limits"]
        if json_path is not None:
            _write_json(document, json_path)
    if not passed:
        raise click.exceptions.Exit(ExitCode.LIMIT_EXCEEDED)


@cli.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("selftest"),
    show_default=True,
    help="Folder for selftest.json and selftest.txt.",
)
@click.option("--iterations", type=click.IntRange(min=1), default=100, show_default=True, help="Inferences to time.")
@verbosity_options
def selftest(out: Path, iterations: int) -> None:
    """Build and run a small network on this device's GPU and every DLA core, in every precision.

    Each engine is compared with the CPU and timed. Exits with 1 when one is off, cannot be built or crashes. The two
    files hold nothing of your models, pictures or paths: attach them to an issue.

    \b
    Example, on a Jetson:
      edge-calibrate selftest --out selftest
    """
    from calibration import console
    from calibration.selftest import JSON_NAME, TEXT_NAME
    from calibration.selftest import run as run_selftest
    from calibration.selftest_report import render

    with console.activity("self-test") as show:
        report = run_selftest(out, iterations=iterations, on_case=lambda case: show(case, 0, 0))
    click.echo(render(report), nl=False)
    for name in (JSON_NAME, TEXT_NAME):
        click.echo(str(out / name))
    if not report.passed:
        raise click.exceptions.Exit(ExitCode.LIMIT_EXCEEDED)


@cli.group()
def cache() -> None:
    """Read and write TensorRT calibration caches."""


@cache.command()
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
@verbosity_options
def show(path: Path, *, as_json: bool) -> None:
    """Show a calibration cache: its header, and scale and amax of every tensor.

    \b
    Example:
      edge-calibrate cache show build/demo/calibration.cache
    """
    from calibration import cache as format_

    parsed = format_.parse(_read_text(path), source=str(path))
    entries = {name: {"scale": scale, "amax": scale * 127} for name, scale in parsed.scales.items()}
    if as_json:
        click.echo(json.dumps({"header": parsed.header, "tensorrt": parsed.tensorrt, "entries": entries}, indent=2))
        return
    click.echo(f"{parsed.header}  (TensorRT {parsed.tensorrt}, {len(entries)} tensors)")
    width = max((len(name) for name in entries), default=0)
    for name, entry in entries.items():
        click.echo(f"{name:<{width}}  scale {entry['scale']:<13.7g} amax {entry['amax']:.6g}")


@cache.command()
@click.argument("path", metavar="RANGES", type=click.Path(path_type=Path))
@click.option("--tensorrt", required=True, metavar="VERSION", help="Of the device, such as 10.3.0.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path, dir_okay=False))
@verbosity_options
def write(path: Path, tensorrt: str, output: Path) -> None:
    """Write a calibration cache from ranges.json, for another version of TensorRT.

    \b
    Example:
      edge-calibrate cache write build/demo/ranges.json --tensorrt 8.5.2 -o jetpack5.cache
    """
    from calibration import cache as format_
    from calibration.ranges import Ranges

    try:
        ranges = msgspec.json.decode(_read_text(path), type=Ranges)
    except msgspec.DecodeError as error:
        raise DataError(f"{path}: is not a ranges.json ({error})") from None
    _writable(output)
    try:
        format_.version_digits(tensorrt)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--tensorrt") from None
    try:
        text = format_.render(ranges.scales, tensorrt=tensorrt)
    except ValueError as error:
        raise DataError(f"{path}: {error}") from None
    files.write(output, text.encode())
    click.echo(f"{output}: {text.splitlines()[0]}, {len(ranges.tensors)} tensors")


@cache.command(name="check")
@deployment_argument
@_MODEL
@click.option("--tensorrt", metavar="VERSION", help="Of the device, such as 10.3.0; default: the deployment's.")
@verbosity_options
def check_cache(deployment: Path, model_name: str | None, tensorrt: str | None) -> None:
    """Say whether the calibration cache belongs to the deployment: model, pre-processing and TensorRT version.

    TensorRT itself takes any cache whose tensors have the right names, and skips one of another version without a word.

    \b
    Example:
      edge-calibrate cache check configs/demo.yaml --tensorrt 10.3.0
    """
    from calibration import cache as format_

    if tensorrt is not None:
        try:
            format_.version_digits(tensorrt)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--tensorrt") from None
    for model in _chosen(config.load(deployment), model_name, deployment):
        version = tensorrt or (model.calibration or config.Calibration(images=[])).tensorrt
        click.echo(f"{manifest.cache_to_use(model, version)}: belongs to {model.name}, for TensorRT {version}")


@cli.command()
@deployment_argument
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
@verbosity_options
def check(deployment: Path, *, as_json: bool) -> None:
    """Say everything about a deployment that can be known without calibrating.

    \b
    Example:
      edge-calibrate check configs/demo.yaml
    """
    from calibration import check as checks

    loaded = config.load(deployment)
    findings = checks.check(loaded)
    problems = [f"{deployment}: {line}" for fault in findings.faults for line in str(fault).splitlines()]
    if as_json:
        report = {"deployment": str(deployment), "facts": findings.facts, "problems": problems}
        click.echo(json.dumps(report, indent=2))
    else:
        for line in findings.facts:
            click.echo(line)
    if any(isinstance(fault, ConfigError) for fault in findings.faults):
        raise ConfigError(problems)
    if problems:
        raise type(findings.faults[0])("\n".join(problems))


def _chosen(deployment: config.Deployment, name: str | None, path: Path) -> list[config.Model]:
    if name is None:
        return deployment.models
    try:
        return [deployment.model(name)]
    except ConfigError as error:
        raise click.BadParameter(f"{path}: {error}", param_hint="--model") from None


def _added_to(output: Path, earlier: tuple[Path, ...]) -> list[Path]:
    """What an observation starts from: its own file, and what that does not have already."""
    from calibration import observation

    if not output.exists():
        return list(earlier)
    there = observation.load(output).sha256
    return [output, *(path for path in earlier if not observation.load(path).sha256 <= there)]


def _with_options(model: config.Model, deployment: Path, *, images: Path | None, **given: Any) -> config.Model:
    """The model with what the command line says of its calibration."""
    section = model.calibration
    if section is None:
        raise ConfigError([f"{deployment}: models.{model.name}.calibration is missing; it names the pictures"])
    given["images"] = str(images) if images else None
    section = msgspec.structs.replace(section, **{key: value for key, value in given.items() if value is not None})
    return msgspec.structs.replace(model, calibration=section)


def _evaluation_pictures(model: config.Model, images: Path | None, deployment: Path, *, ours: bool) -> ImageSet:
    """The pictures to evaluate on: those of the option as they are, or the deployment's without calibration's."""
    from calibration import console

    section = model.evaluation
    record = manifest.read(model.artifacts_dir)
    seen = frozenset(record.images.sha256) if record is not None else frozenset()
    if record is not None and ours:
        for text in manifest.outdated(model, record):
            console.warn(f"models.{model.name}: {text}")
    if images is not None:
        pictures = _collect(str(images))
        again = sum(file.sha256 in seen for file in pictures.used)
        if again:
            console.warn(f"{again} of {len(pictures.used)} pictures were used by calibration as well")
        return pictures
    if section is None:
        raise ConfigError(
            [f"{deployment}: models.{model.name}.evaluation is missing; it names the pictures (or give --images)"]
        )
    return _collect(section.images, exclude=seen)


def _parity_pictures(model: config.Model, images: Path | None, *, optional: bool) -> ImageSet | None:
    """The pictures that an engine is compared with FP32 on: the calibration's, else the evaluation's; None: none."""
    from calibration import console

    try:
        if images is not None:
            return _collect(str(images))
        if model.calibration is not None:
            section = model.calibration
            return _collect(section.images, count=section.count, seed=section.seed)
        if model.evaluation is not None:
            return _collect(model.evaluation.images, count=model.engine.parity.images)
    except DataError as error:
        if not optional:
            raise
        console.warn(str(error))
    return None


def _one_model(option: str, models: list[config.Model]) -> None:
    if len(models) > 1:
        raise click.UsageError(f"{option} needs --model, since the deployment has {len(models)} models")


def _collect(
    patterns: list[str] | str, *, count: int | None = None, seed: int = 0, exclude: frozenset[str] = frozenset()
) -> ImageSet:
    from calibration import console, images

    listed = [patterns] if isinstance(patterns, str) else patterns
    with console.status("reading pictures"):
        found = images.collect(listed, count=count, seed=seed, exclude=exclude)
    for refusal in found.refused:
        console.warn(files.printable(f"{refusal.path}: {refusal.reason}; left out"))
    for warning in found.warnings:
        console.warn(files.printable(warning))
    return found


def _report(model: config.Model, pictures: ImageSet, done: Calibrated) -> str:
    from calibration import report

    return report.render(report.of(done, model, pictures))


def _show_calibrated(done: Calibrated, pictures: ImageSet) -> None:
    from calibration import console

    placement, tensors = done.placement, done.ranges.tensors
    for warning in done.warnings[len(pictures.warnings) :]:
        console.warn(warning)
    rows = [
        ("pictures", f"{done.ranges.images} used, {len(pictures.refused)} refused"),
        ("tensors", f"{len(tensors)} with a range ({done.ranges.method})"),
        *([("method", done.choice.reason)] if done.choice is not None else []),
        ("layers", f"{len(placement.layers)} in INT8, {len(placement.kept)} kept in floating point"),
        ("opset", f"{done.opset[0]} -> {done.opset[1]}, outputs differ by at most {done.rewrite_difference:.2g}"),
    ]
    console.table(f"Calibrated {done.manifest.model}", ("", ""), rows)
    for name in (*done.manifest.files, manifest.REPORT, manifest.MANIFEST):
        click.echo(str(done.folder / name))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError):
        raise DataError(f"{path}: no such file") from None
    except UnicodeDecodeError:
        raise DataError(f"{path}: is not a text file") from None


def _writable(path: Path) -> None:
    """Find out before the work that its result could not be written.

    Raises:
        OSError: the folder is missing, or cannot be written to.
    """
    if path == Path("-"):
        return
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is there and no file", str(path))
    if not os.access(path.absolute().parent, os.W_OK):
        raise OSError(errno.EACCES, "cannot be written (is the folder there?)", str(path))


def _write_json(document: dict[str, Any], path: Path) -> None:
    data = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    if path == Path("-"):
        sys.stdout.write(data)
    else:
        files.write(path, data.encode())

"""How long does INT8 calibration take and how much memory, ours against peers, from the same pictures?

Every row is a fresh process, timed from its start to its exit, with the CPU time and the peak resident memory that the
kernel counted for it (os.wait4; MB are 10^6 bytes). So imports count for everybody alike; import_s says how much of
wall_s they are. Ours is `edge-calibrate calibrate` as installed, from the checks of the pictures to the Q/DQ model and
the report. ModelOpt's rows end with a quantized model too, onnxruntime's with ranges. Everybody decodes and
pre-processes with edge.image.

The floors: `plain inference` decodes, pre-processes and runs each picture, `min/max pass` has every floating-point
activation as an output as well and takes the min and max of each; both with onnxruntime's defaults.

Before the rows each tool is imported once: that fills the disk cache, tells import_rss_mb, the peak with imports alone
(most of ModelOpt's, which imports PyTorch; 790 to 1130 MB on different runs), and is where ours gets its import_s from,
as the command has no place to report it.

Where more pictures are asked for than there are, the rest are copies, encoded anew as JPEGs of quality 95, then 94 and
so on, since our command refuses files of the same content.

onnxruntime's entropy and percentile keep every activation of every picture: y8n_640 needs 18 GB for 64 pictures. A row
that fails or is killed says so, and the others go on. ModelOpt needs another onnxruntime, hence a virtual environment
of its own; without it the benchmark says how to make it.
"""

from __future__ import annotations

import glob
import itertools
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import machine, peers

if TYPE_CHECKING:
    import argparse

ROOT = Path(__file__).parents[1]
SUFFIXES = {".bmp", ".jpeg", ".jpg", ".png", ".webp"}

# What a picture must become for each model, and what its output means.
MODELS: dict[str, dict[str, Any]] = {
    "yolox_nano.onnx": {
        "task": {"type": "detection"},
        "input": {"resize": "letterbox", "anchor": "top-left", "color": "bgr", "divide_by": 1},
    },
    "y8n_640.onnx": {
        "task": {"type": "detection"},
        "input": {"resize": "letterbox", "anchor": "center", "fill": 114, "color": "rgb", "divide_by": 255},
    },
    "efflite0_224.onnx": {
        "task": {"type": "classification"},
        "input": {
            "resize": "crop",
            "crop_fraction": 0.875,
            "color": "rgb",
            "divide_by": 1,
            "mean": [127],
            "std": [128],
        },
    },
    "ppocr_640.onnx": {
        "task": {"type": "segmentation"},
        "input": {
            "resize": "stretch",
            "color": "rgb",
            "divide_by": 255,
            "mean": [0.485, 0.456, 0.406],
            "std": [0.229, 0.224, 0.225],
        },
    },
}

# What --tools calls it: (what the table calls it, its methods). The floors come first, for the others' ratios.
TOOLS: dict[str, tuple[str, tuple[str, ...]]] = {
    "inference": ("plain inference", ("-",)),
    "minmax": ("min/max pass", ("-",)),
    "ours": ("ours", ("entropy", "max", "auto")),
    "onnxruntime": ("onnxruntime", ("entropy", "percentile", "minmax")),
    "onnxruntime-single": ("onnxruntime, one image per call", ("entropy",)),
    "modelopt": ("modelopt", ("entropy", "max")),
}


def main() -> None:
    """Print the table, then what follows from it."""
    options = _options()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as scratch:
        folder = Path(scratch)
        pictures = _pictures(options.images, max(options.counts), folder)
        tools = [tool for tool in TOOLS if tool in options.tools]
        left_out: dict[str, str] = {}
        if "modelopt" in tools and not options.peers_python.exists():
            print(_how_to_install(options.peers_python), end="\n\n")
            left_out["modelopt"] = f"left out: no {options.peers_python}"
        imports = {}
        for tool in (tool for tool in tools if tool not in left_out):
            job = peers.Job(tool, "-", "", "", [], str(folder / "result.json"), imports_only=True)
            imports[tool] = _worker(job, options, folder)
            if imports[tool]["error"]:
                left_out[tool] = f"left out: {imports[tool]['error']}"
        print(
            f"{'model':<18} {'tool':<31} {'method':<10} {'images':>6} {'wall s':>8} {'import s':>8} {'cpu s':>8}"
            f" {'peak MB':>8} {'import MB':>9} {'x infer':>8} {'x minmax':>8}"
        )
        for name, count in itertools.product(options.model, sorted(set(options.counts))):
            model, used = options.models / name, [str(path) for path in pictures[:count]]
            deployment = _deployment(model, used, folder)
            for tool in tools:
                label, methods = TOOLS[tool]
                for method in methods:
                    row = {"tool": label, "method": method, "model": name, "images": count}
                    if tool in left_out:
                        row |= {"ok": False, "error": left_out[tool]}
                    else:
                        case = (tool, method, str(model), str(deployment), used, str(folder / "result.json"))
                        row |= _repeated(peers.Job(*case, imports_only=False), options, folder, imports[tool])
                    rows.append(row | _ratios(row, rows))
                    _show(rows[-1])
    for model in options.model:
        print("\n".join(_summary([row for row in rows if row["model"] == model], model)))
    machine.finish(rows, options.json)


def _options() -> argparse.Namespace:
    parser = machine.arguments(__doc__)
    data = ROOT / "tests" / "data"
    parser.add_argument("--model", nargs="+", default=["yolox_nano.onnx"], choices=MODELS, metavar="NAME.onnx")
    parser.add_argument("--models", type=Path, default=data / "models", metavar="DIR")
    parser.add_argument("--images", default=str(data / "images"), metavar="DIR|GLOB")
    parser.add_argument("--counts", nargs="+", type=int, default=[16, 64], metavar="N")
    parser.add_argument("--tools", nargs="+", default=list(TOOLS), choices=TOOLS)
    parser.add_argument(
        "--repeat", type=int, default=1, metavar="N", help="measure each row N times; the median counts"
    )
    parser.add_argument("--peers-python", type=Path, default=ROOT / "build/peers/bin/python", metavar="PATH")
    options = parser.parse_args()
    options.models = options.models.absolute()
    options.peers_python = options.peers_python.absolute()  # not resolved: the link is what makes it an environment
    for model in options.model:
        if not (options.models / model).is_file():
            parser.error(f"{options.models / model}: no such file; --models names the folder")
    if min(*options.counts, options.repeat) < 1:
        parser.error("--counts and --repeat must be at least 1")
    return options


def _pictures(pattern: str, wanted: int, folder: Path) -> list[Path]:
    """The first pictures in order of their names, and copies of them if they are too few."""
    listed = Path(pattern).iterdir() if Path(pattern).is_dir() else map(Path, glob.glob(pattern, recursive=True))  # noqa: PTH207 - the pattern may be absolute
    found = sorted(path.absolute() for path in listed if path.suffix.lower() in SUFFIXES)[:wanted]
    if not found:
        raise SystemExit(f"{pattern}: no pictures; --images takes a folder or a glob")
    if len(found) < wanted:
        # In another process: what Linux counts as a child's peak includes what its parent held when it was started,
        # so this process stays smaller than any that it measures, without OpenCV and pictures.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            found += pool.submit(peers.reencode, found, folder, wanted - len(found)).result()
        print(f"{wanted} pictures: {pattern}, and re-encoded copies")
    return found


def _deployment(model: Path, pictures: list[str], folder: Path) -> Path:
    """The deployment that ours calibrates and that the others take their input section from."""
    listed = folder / "pictures.txt"
    listed.write_text("\n".join(pictures))
    calibration = {"images": str(listed), "count": len(pictures)}
    section = {"name": model.stem, "path": str(model), "calibration": calibration, **MODELS[model.name]}
    path = folder / "deployment.yaml"
    path.write_text(json.dumps({"version": 1, "models": [section]}))  # JSON is YAML
    return path


def _repeated(job: peers.Job, options: argparse.Namespace, folder: Path, imports: dict[str, Any]) -> dict[str, Any]:
    """Medians over the repetitions, or the first error."""
    runs = []
    for _ in range(options.repeat):
        if job.tool == "ours":
            runs.append(_ours(job, folder) | {key: imports[key] for key in ("import_s", "version")})
        else:
            runs.append(_worker(job, options, folder))
        if runs[-1]["error"]:
            return runs[-1] | {"ok": False}
    keys = ("wall_s", "import_s", "cpu_s", "peak_rss_mb")
    medians: dict[str, Any] = {key: round(statistics.median(run[key] for run in runs), 3) for key in keys}
    medians |= {"import_rss_mb": imports["peak_rss_mb"], "walls_s": [run["wall_s"] for run in runs]}
    return {"ok": True, "error": "", "version": runs[0]["version"]} | medians


def _ours(job: peers.Job, folder: Path) -> dict[str, Any]:
    command = str(Path(sys.executable).parent / "edge-calibrate")
    with tempfile.TemporaryDirectory(dir=folder) as place:
        out = Path(place) / "out"
        done = _measure([command, "calibrate", job.deployment, "--method", job.method, "--out", str(out)], Path(place))
        if not done["error"]:
            used = json.loads((out / "calibration.json").read_text())["images"]["count"]
            if used != len(job.pictures):  # the others have no checks that could leave a picture out
                done["error"] = f"used {used} of {len(job.pictures)} pictures"
    return done


def _worker(job: peers.Job, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    result = Path(job.result)
    result.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        (Path(place) / "job.json").write_text(json.dumps(asdict(job)))
        python = str(options.peers_python) if job.tool == "modelopt" else sys.executable
        done = _measure([python, "-m", "benchmarks.peers", "job.json"], Path(place))
    return done | (json.loads(result.read_text()) if result.exists() else {"import_s": None, "version": ""})


def _measure(command: list[str], folder: Path) -> dict[str, Any]:
    """Run one process to its end in a folder of its own, where peers leave what they write."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}  # benchmarks, and edge for the peers' environment
    with (folder / "stderr.txt").open("w") as log:
        started = time.perf_counter()
        process = subprocess.Popen(  # noqa: S603 - our own command
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log
        )
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            process.kill()
            process.wait()
            raise
        wall_s = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    return {
        "wall_s": round(wall_s, 3),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 3),
        "peak_rss_mb": round(usage.ru_maxrss * 1024 / 1e6, 1),
        "error": _error(process.returncode, (folder / "stderr.txt").read_text(errors="replace")),
    }


def _error(code: int, stderr: str) -> str:
    if code == 0:
        return ""
    if code < 0:
        out_of_memory = ", as when memory runs out" if code == -signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{out_of_memory}"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower() and "internal error" not in line]
    return (telling or lines or [f"exit code {code}"])[-1]


def _ratios(row: dict[str, Any], earlier: list[dict[str, Any]]) -> dict[str, float]:
    """Wall time against the floors of the same run."""
    floors = {"x_inference": "plain inference", "x_minmax": "min/max pass"}
    return {
        key: round(row["wall_s"] / floor["wall_s"], 2)
        for key, label in floors.items()
        for floor in (*earlier, row)
        if row["ok"] and floor["ok"] and floor["tool"] == label
        if (floor["model"], floor["images"]) == (row["model"], row["images"])
    }


def _show(row: dict[str, Any]) -> None:
    line = f"{row['model']:<18} {row['tool']:<31} {row['method']:<10} {row['images']:>6}"
    if row["ok"]:
        line += f" {row['wall_s']:>8.2f} {row['import_s']:>8.2f} {row['cpu_s']:>8.2f} {row['peak_rss_mb']:>8.0f}"
        line += f" {row['import_rss_mb']:>9.0f} {row.get('x_inference', '-'):>8} {row.get('x_minmax', '-'):>8}"
    elif "wall_s" in row:
        line += f" {row['wall_s']:>8.2f} {'':>8} {row['cpu_s']:>8.2f} {row['peak_rss_mb']:>8.0f}  {row['error'][:120]}"
    else:
        line += f"  {row['error']}"
    print(line, flush=True)


def _summary(rows: list[dict[str, Any]], model: str) -> list[str]:
    """What the rows of one model say about ours against the peers, each at the most images that both managed."""
    done = {(row["tool"], row["method"], row["images"]): row for row in rows if row["ok"]}
    counts = sorted({row["images"] for row in rows})
    lines = []
    for label in ("onnxruntime", "onnxruntime, one image per call", "modelopt"):
        both = [n for n in counts if ("ours", "entropy", n) in done and (label, "entropy", n) in done]
        if not both:
            lines.append(f"{model}: ours against {label}, entropy: not measured")
            continue
        ours, peer = done["ours", "entropy", both[-1]], done[label, "entropy", both[-1]]
        lines.append(
            f"{model}, entropy, {both[-1]} images: ours is {peer['wall_s'] / ours['wall_s']:.1f} x as fast as {label}"
            f" ({ours['wall_s']:.1f} s, {peer['wall_s']:.1f} s); peak memory {ours['peak_rss_mb']:.0f} MB,"
            f" {peer['peak_rss_mb']:.0f} MB (imports alone {ours['import_rss_mb']:.0f}, {peer['import_rss_mb']:.0f})"
        )
    own = [done["ours", "entropy", n] for n in counts if ("ours", "entropy", n) in done]
    if len(own) > 1:
        first, last = own[0], own[-1]
        growth = last["peak_rss_mb"] - first["peak_rss_mb"]
        lines.append(
            f"{model}, ours, entropy: from {first['images']} to {last['images']} images peak memory changes by"
            f" {growth:+.0f} MB ({first['peak_rss_mb']:.0f} MB, {last['peak_rss_mb']:.0f} MB)"
        )
    return lines


def _how_to_install(python: Path) -> str:
    venv = shlex.quote(os.path.relpath(python.parents[1]))
    return (
        f"modelopt is left out, since there is no {python}. To make it (7 GB on disk, since it brings PyTorch):\n"
        f"  python3 -m venv {venv}\n"
        f"  {venv}/bin/pip install 'nvidia-modelopt[onnx]==0.47.0' msgspec opencv-python-headless pyyaml"
    )


if __name__ == "__main__":
    main()

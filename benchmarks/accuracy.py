"""What does INT8 cost, by the method that chooses the ranges, ours and those of peers?

Calibrates each deployment on some of its pictures and compares INT8 with FP32 on the others. Every set of ranges goes
through the same Q/DQ placement, the same layers in floating point and the same evaluation, so that the rows differ in
the ranges alone. A layer whose tensor a peer gives no range stays in floating point, which favours the peer. "placed by
ModelOpt" is the Q/DQ model that ModelOpt itself writes, told to leave the same layers alone.

Ours ties ranges as the DLA wants them, which no peer does; "no ties" is the same without.

A classifier is evaluated on six crops of each picture, since a single changed answer of 48 would be two percent.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import msgspec
import numpy as np
import onnx_ir as ir

from benchmarks import machine, peers
from calibration import graph, images, qdq
from calibration.calibrate import calibrate, prepare
from calibration.evaluate import evaluate
from edge import config, manifest
from edge.errors import ModelError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from calibration.evaluate import Evaluation
    from calibration.images import ImageSet

ROOT = Path(__file__).parents[1]
OURS = ("auto", "mse", "entropy", "percentile", "max")
PEERS = {"onnxruntime": ("entropy", "percentile", "minmax"), "modelopt": ("entropy", "max")}
CROPS = 6


def main() -> None:
    """Print one table for each deployment."""
    options = _options()
    rows: list[dict[str, Any]] = []
    for path in options.deployment:
        model = _placed(config.load(path).models[0], options)
        assert model.calibration is not None
        used = images.collect(model.calibration.images, count=options.count, seed=model.calibration.seed)
        with tempfile.TemporaryDirectory() as place:
            held_out = _held_out(model, used, Path(place))
            print(f"{model.name}: {len(used)} pictures calibrate, {len(held_out)} are evaluated")
            print(f"  {'ranges from':<34} {'layers':>6}  {'agree':>6}  {'change':>6}  {'mask IoU':>8}  mAP FP32 INT8")
            for row in _rows(model, path, used, held_out, Path(place), options):
                rows.append({"model": model.name, **row})
                print(_line(row), flush=True)
        print(flush=True)
    machine.finish(rows, options.json)


def _options() -> argparse.Namespace:
    parser = machine.arguments(__doc__)
    parser.add_argument(
        "deployment", nargs="*", type=Path, default=[ROOT / "configs/demo.yaml"], help="default: the demo's"
    )
    parser.add_argument("--models", type=Path, metavar="DIR", help="where the deployments' models are")
    parser.add_argument("--images", metavar="DIR", help="pictures instead of the deployments'")
    parser.add_argument("--labels", metavar="COCO.json", help="their boxes, for detectors")
    parser.add_argument("--count", type=int, default=24, help="pictures that calibrate (default: 24)")
    parser.add_argument("--all-layers", action="store_true", help="quantize the layers as well that a deployment names")
    parser.add_argument("--tools", nargs="*", default=["ours", *PEERS], choices=["ours", *PEERS])
    parser.add_argument("--peers-python", type=Path, default=ROOT / "build/peers/bin/python", metavar="PATH")
    options = parser.parse_args()
    options.peers_python = options.peers_python.absolute()
    return options


def _placed(model: config.Model, options: argparse.Namespace) -> config.Model:
    """The model of a deployment, with its file, its pictures and its rules as the options say."""
    assert model.calibration is not None
    assert model.evaluation is not None
    changes: dict[str, Any] = {}
    if options.models is not None and not Path(model.path).exists():
        changes["path"] = str(options.models / Path(model.path).name)
    if options.images is not None:
        changes["calibration"] = msgspec.structs.replace(model.calibration, images=options.images)
        changes["evaluation"] = msgspec.structs.replace(model.evaluation, images=options.images)
    if options.labels is not None and isinstance(model.task, config.DetectionTask) and model.task.labels == "coco80":
        evaluation = changes.get("evaluation", model.evaluation)
        changes["evaluation"] = msgspec.structs.replace(evaluation, labels=options.labels)
    model = msgspec.structs.replace(model, **changes)
    if options.all_layers:
        assert model.calibration is not None
        model = msgspec.structs.replace(model, calibration=msgspec.structs.replace(model.calibration, fp16=[]))
    return model


def _held_out(model: config.Model, used: ImageSet, place: Path) -> ImageSet:
    assert model.evaluation is not None
    rest = images.collect(model.evaluation.images, exclude={file.sha256 for file in used.used})
    if not isinstance(model.task, config.Classification):
        return rest
    crops = place / "crops"
    crops.mkdir()
    rng = np.random.default_rng(0)
    for index, picture in enumerate(rest):
        height, width = picture.shape[:2]
        for number in range(CROPS):
            part = 1.0 if number == 0 else rng.uniform(0.55, 0.9)
            h, w = int(height * part), int(width * part)
            y, x = rng.integers(0, height - h + 1), rng.integers(0, width - w + 1)
            cv2.imwrite(str(crops / f"{index}_{number}.png"), picture[y : y + h, x : x + w])
    return images.collect(str(crops))


def _rows(
    model: config.Model, deployment: Path, used: ImageSet, held_out: ImageSet, place: Path, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    assert model.calibration is not None
    assert model.evaluation is not None
    labels = Path(model.evaluation.labels) if model.evaluation.labels else None

    def score(int8: Path, **found: Any) -> dict[str, Any]:
        plain = msgspec.structs.replace(model, evaluation=None)
        return {**found, **_scores(evaluate(plain, held_out, labels=labels, int8_path=int8))}

    if "ours" in options.tools:
        for method, ties in [*((method, "dla") for method in OURS), ("auto", "none")]:
            section = msgspec.structs.replace(model.calibration, method=method, ties=ties)
            done = calibrate(msgspec.structs.replace(model, calibration=section), used, place / "ours")
            name = f"ours {method}" if done.choice is None else f"ours auto ({done.choice.method})"
            name += ", no ties" if ties == "none" else ""
            reason = done.choice.reason if done.choice is not None else ""
            yield score(
                place / "ours" / manifest.INT8_MODEL, ranges=name, layers=len(done.placement.layers), why=reason
            )
    prepared = prepare(model)
    kept = graph.match_layers(prepared.candidates, model.calibration.fp16, key="fp16")
    exclude = tuple(node.name or "" for node in prepared.candidates if node.outputs[0].name in kept)
    for tool in options.tools:
        for method in PEERS.get(tool, ()):
            found = _peer(tool, method, model, deployment, used, exclude, place, options)
            if isinstance(found, str):
                yield {"ranges": f"{tool} {method}", "failed": found}
                continue
            rewritten = ir.from_proto(ir.to_proto(prepared.rewritten))
            floor = float(np.finfo(np.float32).tiny)
            scales = {name: max(amax / 127, floor) for name, amax in found.items() if np.isfinite(amax)}
            try:
                placement = qdq.insert(rewritten, scales, model.calibration.fp16, key="fp16")
            except ModelError as error:
                yield {"ranges": f"{tool} {method}", "failed": str(error)}
                continue
            path = place / "peer.onnx"
            ir.save(rewritten, path)
            yield score(path, ranges=f"{tool} {method}", layers=len(placement.layers))
            own = place / tool / "model.onnx"
            if own.exists():
                yield score(own, ranges=f"{tool} {method}, placed by it", layers=None)


def _peer(
    tool: str,
    method: str,
    model: config.Model,
    deployment: Path,
    used: ImageSet,
    exclude: tuple[str, ...],
    place: Path,
    options: argparse.Namespace,
) -> dict[str, float] | str:
    """Read amax by tensor from a peer that runs in a process of its own, or say why there is none."""
    folder = place / tool
    folder.mkdir(exist_ok=True)
    job = peers.Job(
        tool=tool,
        method=method,
        model=model.path,
        deployment=str(deployment.absolute()),
        pictures=[str(file.path) for file in used.used],
        result=str(folder / "result.json"),
        ranges=str(folder / "ranges.json"),
        exclude=exclude,
    )
    (folder / "job.json").write_text(json.dumps(dataclasses.asdict(job)))
    python = str(options.peers_python) if tool == "modelopt" else sys.executable
    if not Path(python).exists():
        return f"no {python}"
    done = subprocess.run(  # noqa: S603 - the benchmark's own worker
        [python, "-m", "benchmarks.peers", "job.json"],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no message"])[-1][:160]
    found: dict[str, float] = json.loads(Path(job.ranges).read_text())
    return found


def _scores(found: Evaluation) -> dict[str, Any]:
    agreed = found.agreement
    return {
        "agreement": agreed.share,
        "changed": 1 - agreed.answers_equal / agreed.answers if agreed.answers else None,
        "mask_iou": agreed.mask_iou,
        "fp32_map": found.fp32.map if found.fp32 is not None else None,
        "int8_map": found.int8.map if found.int8 is not None else None,
    }


def _line(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"  {row['ranges']:<34} {row['failed']}"

    def number(key: str, width: int) -> str:
        value = row[key]
        return f"{'' if value is None else f'{value:.3f}':>{width}}"

    layers = "" if row["layers"] is None else row["layers"]
    return (
        f"  {row['ranges']:<34} {layers:>6}  {number('agreement', 6)}  {number('changed', 6)}"
        f"  {number('mask_iou', 8)}  {number('fp32_map', 5)} {number('int8_map', 5)}"
    )


if __name__ == "__main__":
    main()

"""The main job on real input: calibrate, evaluate, run the daemon, and receive its results over MQTT.

Every step is the command a user would type, in its own process; this script only starts them, provides a broker where
there is none, subscribes, and adds up what it saw. Runs in the virtual environment that scripts/dev.py makes.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from broker import Broker, Subscriber, open_broker

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "demo"
DEPLOYMENT = ROOT / "configs" / "demo.yaml"
BIN = Path(sys.executable).parent


def main() -> int:
    """Run the demo and return the first exit code that is not 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=15.0, help="how long the daemon runs (default: 15)")
    parser.add_argument("--save", type=Path, metavar="DIR", help="leave annotated pictures of what was received")
    options = parser.parse_args()
    if options.seconds <= 0:
        parser.error(f"--seconds is {options.seconds}; expected more than 0")
    started = time.monotonic()
    try:
        code = demo(options.seconds, options.save)
    except KeyboardInterrupt:
        print("\ninterrupted; what was finished is under build/demo", file=sys.stderr)
        return 130
    if code == 0:
        print(f"\ndone in {time.monotonic() - started:.0f} s")
    return code


def demo(seconds: float, save: Path | None) -> int:
    """The four steps."""
    BUILD.mkdir(parents=True, exist_ok=True)
    heading("1/3  Calibrate: INT8 ranges from real photographs")
    code = command("edge-calibrate", "calibrate", str(DEPLOYMENT))
    if code:
        return code
    heading("2/3  Evaluate: what INT8 costs, on photographs that calibration did not use")
    evaluation_file = BUILD / "evaluation.json"
    code = command("edge-calibrate", "evaluate", str(DEPLOYMENT), "--json", str(evaluation_file))
    if code:
        return code
    heading(f"3/3  Run the daemon for {seconds:g} s, results over MQTT")
    with ExitStack() as stack:
        broker = stack.enter_context(open_broker(BUILD / "broker"))
        print(f"broker: {broker.description}")
        deployment = derived_deployment(broker)
        subscriber = stack.enter_context(Subscriber(broker, topic="edge/demo/+/results", on_message=show))
        code = command("edge-daemon", "run", str(deployment), "--duration", str(seconds))
        if code:
            return code
        subscriber.settle()
    evaluation = json.loads(evaluation_file.read_text())
    (BUILD / "summary.json").touch()  # is among the files that it lists
    summary = summarise(subscriber, evaluation)
    (BUILD / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    if save is not None:
        save_pictures(subscriber, save)
    print_summary(summary, save)
    if not summary["results_received"]:
        print("error: no result arrived", file=sys.stderr)
        return 1
    return 0


def heading(text: str) -> None:
    """Say which step begins."""
    print(f"\n== {text}", flush=True)


def command(name: str, *arguments: str) -> int:
    """Run one of our commands, saying how a user would type it."""
    shown = [str(Path(item).relative_to(ROOT)) if item.startswith(str(ROOT)) else item for item in arguments]
    print(f"$ {name} {' '.join(shown)}", flush=True)
    process = subprocess.Popen([str(BIN / name), *arguments], cwd=ROOT)
    try:
        return process.wait()
    except KeyboardInterrupt:
        # The terminal has sent Ctrl-C to the child as well: let it drain and say so.
        process.send_signal(signal.SIGINT)
        process.wait(timeout=15)
        raise


def derived_deployment(broker: Broker) -> Path:
    """configs/demo.yaml with the broker that was found, on the CPU; paths made absolute, as the file lies elsewhere."""
    document = yaml.safe_load(DEPLOYMENT.read_text())
    document["mqtt"] |= {"host": broker.host, "port": broker.port, "protocol": broker.protocol}
    for model in document["models"]:  # where TensorRT is installed, the daemon would ask for an engine
        model["engine"]["backend"] = "onnxruntime"

    def absolute(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: absolute(item) for key, item in value.items()}
        if isinstance(value, list):
            return [absolute(item) for item in value]
        if isinstance(value, str) and value.startswith("../"):
            return str((DEPLOYMENT.parent / value).resolve())
        return value

    path = BUILD / "deployment.yaml"
    header = "# configs/demo.yaml with the broker of this run; written by the demo.\n"
    path.write_text(header + yaml.safe_dump(absolute(document), sort_keys=False))
    return path


def show(message: dict[str, Any], received_at: float) -> None:
    """Print one result as it arrives."""
    counts = Counter(item["label"] for item in message["objects"])
    objects = ", ".join(f"{count} {label}" if count > 1 else label for label, count in counts.most_common())
    clock = datetime.fromtimestamp(received_at, timezone.utc).strftime("%H:%M:%S.%f")[:-3]
    name = message["image"].get("name", "")
    print(f"{clock} {message['stream']} {name}: {objects or 'nothing'} ({delay_ms(message, received_at):.0f} ms)")


def delay_ms(message: dict[str, Any], received_at: float) -> float:
    """From capture to arrival at the subscriber; both clocks are this machine's."""
    captured = datetime.strptime(message["captured_at"], "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=timezone.utc)
    return 1e3 * (received_at - captured.timestamp())


def summarise(subscriber: Subscriber, evaluation: dict[str, Any]) -> dict[str, Any]:
    """The figures of the run; keys are a contract (README, "Demo")."""
    delays = [delay_ms(message, at) for message, at in subscriber.received]
    stages = {
        stage: round(float(np.median([message["latency_ms"][stage] for message, _ in subscriber.received])), 2)
        for stage in (subscriber.received[0][0]["latency_ms"] if subscriber.received else ())
    }
    return {
        "results_received": len(subscriber.received),
        "latency_ms": {f"p{q}": round(float(np.percentile(delays, q)), 2) for q in (50, 95, 99)} if delays else {},
        "stages_ms": stages,
        "objects": dict(Counter(o["label"] for m, _ in subscriber.received for o in m["objects"]).most_common()),
        "fp32": evaluation["fp32"],
        "int8": evaluation["int8"],
        "agreement": evaluation["agreement"],
        "files": sorted(str(path.relative_to(ROOT)) for path in BUILD.iterdir() if path.is_file()),
    }


def save_pictures(subscriber: Subscriber, folder: Path) -> None:
    """Draw what the messages say onto the photographs they speak of, one picture each."""
    from calibration import annotate
    from edge.image import decode
    from edge.types import Detection

    latest = {message["image"]["name"]: message for message, _ in subscriber.received if "name" in message["image"]}
    folder.mkdir(parents=True, exist_ok=True)
    for name, message in latest.items():
        image = decode((ROOT / "tests/data/images" / name).read_bytes(), name=name)
        found = [
            Detection(item["label"], item["class_id"], item["score"], box_xyxy=tuple(item["box"]))
            for item in message["objects"]
        ]
        annotate.save(folder / name, image, found)


def print_summary(summary: dict[str, Any], save: Path | None) -> None:
    """What a person wants to know at the end."""
    heading("Summary")
    latency = summary["latency_ms"]
    print(f"results received over MQTT   {summary['results_received']}")
    if latency:
        print("capture to subscriber, ms    " + "  ".join(f"{key} {value:.1f}" for key, value in latency.items()))
        print("  of it, medians             " + "  ".join(f"{k} {v:.1f}" for k, v in summary["stages_ms"].items()))
    fp32, int8 = summary["fp32"], summary["int8"]
    print(f"COCO mAP 0.50:0.95           FP32 {fp32['map']:.3f}  INT8 {int8['map']:.3f}")
    share = summary["agreement"]["share"]
    print(f"FP32 objects found by INT8    {'nothing to compare' if share is None else f'{100 * share:.1f} %'}")
    print("files written")
    for name in summary["files"]:
        print(f"  {name}")
    if save is not None:
        print(f"  {save}/  (annotated pictures)")
    print(
        "\nNext, on a Jetson with JetPack 6, TensorRT takes both results as they are (not run here: no Jetson):\n"
        "  GPU: trtexec --onnx=build/demo/model.int8.onnx --int8 --fp16 --saveEngine=yolox.plan\n"
        "  DLA: trtexec --onnx=tests/data/models/yolox_nano.onnx --int8 --fp16 \\\n"
        "         --calib=build/demo/calibration.cache --useDLACore=0 --allowGPUFallback \\\n"
        "         --precisionConstraints=obey --layerPrecisions=NAME:fp16,...\n"
        "       for each NAME of fp16_layers in build/demo/calibration.json\n"
        "Your own model: copy configs/demo.yaml, then edge-calibrate check YOURS.yaml"
    )


if __name__ == "__main__":
    sys.exit(main())

"""What does a frame cost on the CPU beyond the bare model: pre-processing, decoding, and Q/DQ against FP32?

The same photographs through edge.process, FP32 and INT8 (needs `edge-calibrate calibrate configs/demo.yaml`), against
the floor: onnxruntime alone on an input that is ready. Frames alternate between the three, so that the machine's moods
meet all alike.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from benchmarks import machine
from edge import config
from edge.image import decode
from edge.process import open_pipeline
from edge.types import Frame

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Print the table."""
    parser = machine.arguments(__doc__)
    parser.add_argument("--frames", type=int, default=200)
    options = parser.parse_args()
    model = config.load(ROOT / "configs" / "demo.yaml").models[0]
    pictures = [decode(p.read_bytes(), name=p.name) for p in sorted((ROOT / "tests/data/images").glob("*.jpg"))[:16]]
    session = onnxruntime.InferenceSession(model.path, providers=["CPUExecutionProvider"])
    ready = np.zeros((1, 3, 416, 416), np.float32)
    spent: dict[str, list[float]] = {"floor: session.run": [], "FP32": [], "INT8": []}
    stages: dict[str, list[list[float]]] = {"FP32": [], "INT8": []}
    with open_pipeline(model, precision="fp32") as fp32, open_pipeline(model, precision="int8") as int8:
        for pipeline in (fp32, int8):
            pipeline.warm_up()
        for index, image in zip(range(options.frames), itertools.cycle(pictures)):
            started = time.perf_counter()
            session.run(None, {"images": ready})
            spent["floor: session.run"].append(time.perf_counter() - started)
            for name, pipeline in (("FP32", fp32), ("INT8", int8)):
                started = time.perf_counter()
                result = pipeline.process(Frame(image, "bench", index, time.monotonic(), 0))
                spent[name].append(time.perf_counter() - started)
                latency = result.latency
                stages[name].append([latency.preprocess_ms, latency.inference_ms, latency.postprocess_ms])
    floor = float(np.median(spent["floor: session.run"]))
    rows: list[dict[str, Any]] = []
    print(f"{'':<20} {'p50 ms':>8} {'p95':>8} {'p99':>8}  x floor   pre / infer / post, medians in ms")
    for name, seconds in spent.items():
        row: dict[str, Any] = {"what": name, **machine.percentiles(seconds)}
        row["ratio_to_floor"] = round(float(np.median(seconds)) / floor, 3)
        parts = ""
        if name in stages:
            row["stages_ms"] = [round(float(value), 3) for value in np.median(stages[name], axis=0)]
            parts = " / ".join(f"{value:.2f}" for value in row["stages_ms"])
        rows.append(row)
        print(
            f"{name:<20} {row['p50_ms']:>8} {row['p95_ms']:>8} {row['p99_ms']:>8} {row['ratio_to_floor']:>8}   {parts}"
        )
    medians = {name: float(np.median(seconds)) for name, seconds in spent.items()}
    print(f"INT8 takes {medians['INT8'] / medians['FP32']:.2f} times as long as FP32")
    machine.finish(rows, options.json)


if __name__ == "__main__":
    main()

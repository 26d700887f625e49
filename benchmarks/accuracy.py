"""What do the range method and the layers kept in floating point cost YOLOX-Nano?

Calibrates on 24 photographs of tests/data and scores INT8 against FP32 on the 48 others, and on all 72, for every
combination of method and FP16 rules. Takes some three minutes on two cores.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import machine
from calibration import images
from calibration.calibrate import calibrate
from calibration.evaluate import evaluate
from edge import config

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Print the table."""
    options = machine.arguments(__doc__).parse_args()
    model = config.load(ROOT / "configs" / "demo.yaml").models[0]
    assert model.calibration is not None
    assert model.evaluation is not None
    labels = Path(model.evaluation.labels or "")
    used = images.collect(model.calibration.images, count=model.calibration.count, seed=model.calibration.seed)
    held_out = images.collect(model.evaluation.images, exclude={file.sha256 for file in used.used})
    everything = images.collect(model.evaluation.images)
    rules = {
        "none": [],
        "depthwise": [rule for rule in model.calibration.fp16 if rule.depthwise],
        "depthwise, first, last (the demo's)": model.calibration.fp16,
    }
    rows: list[dict[str, Any]] = []
    print(f"{'kept in FP16':<36} {'method':<8} INT8 layers   {'held out: FP32  INT8':<22} {'all 72: FP32  INT8'}")
    for kept, fp16 in rules.items():
        for method in ("max", "entropy"):
            section = msgspec.structs.replace(model.calibration, fp16=fp16, method=method)
            candidate = msgspec.structs.replace(model, calibration=section)
            with tempfile.TemporaryDirectory() as folder:
                done = calibrate(candidate, used, Path(folder))
                path = Path(folder) / "model.int8.onnx"
                scores = [evaluate(model, s, labels=labels, int8_path=path) for s in (held_out, everything)]
            row = {"kept": kept, "method": method, "int8_layers": len(done.placement.layers)}
            for name, score in zip(("held_out", "all"), scores, strict=True):
                assert score.fp32 is not None
                assert score.int8 is not None
                row |= {f"{name}_fp32_map": score.fp32.map, f"{name}_int8_map": score.int8.map}
            rows.append(row)
            print(
                f"{kept:<36} {method:<8} {row['int8_layers']:>11}   {row['held_out_fp32_map']:>14.3f} "
                f"{row['held_out_int8_map']:>5.3f}  {row['all_fp32_map']:>14.3f} {row['all_int8_map']:>5.3f}",
                flush=True,
            )
    machine.finish(rows, options.json)


if __name__ == "__main__":
    main()

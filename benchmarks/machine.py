"""What a figure was measured on, and how repeated measurements are summed up."""

from __future__ import annotations

import argparse
import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np


def describe() -> dict[str, Any]:
    """The machine and the libraries, for the JSON of every benchmark."""
    processor = platform.processor()
    if Path("/proc/cpuinfo").exists():
        names = [
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ]
        processor = names[0] if names else processor
    return {
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in ("numpy", "onnx", "onnxruntime")},
    }


def arguments(doc: str) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and machine as JSON")
    return parser


def finish(rows: list[dict[str, Any]], path: Path | None) -> None:
    """Write the JSON, if one is wanted."""
    if path is not None:
        path.write_text(json.dumps({"rows": rows, "machine": describe()}, indent=2) + "\n")


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Median, p95 and p99 in milliseconds, with the number of measurements."""
    values = 1e3 * np.asarray(seconds)
    return {"n": len(values)} | {f"p{q}_ms": round(float(np.percentile(values, q)), 3) for q in (50, 95, 99)}

"""The workers of ``benchmarks.calibration``: one peer or floor, once, in this process.

``python -m benchmarks.peers JOB.json``. Each function is what a user of that peer would write. Nothing is measured here
but the time of the imports, which no other process can see; the parent measures the rest from outside. Every tool gets
its pictures through ``edge.image`` and the deployment's input section, so all of them decode and pre-process alike.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

IMPORTS = {
    "ours": ("calibration.cli", "calibration.calibrate", "calibration.images", "calibration.report"),
    "onnxruntime": ("edge.config", "edge.image", "onnx", "onnxruntime.quantization"),
    "onnxruntime-single": ("edge.config", "edge.image", "onnx", "onnxruntime.quantization"),
    "modelopt": ("edge.config", "edge.image", "onnx", "modelopt.onnx.quantization"),
    "inference": ("edge.config", "edge.image", "onnx", "onnxruntime"),
    "minmax": ("edge.config", "edge.image", "onnx", "onnxruntime"),
}
"""What each tool has to import before it can begin. Ours only for the time: the command itself is what is measured."""

VERSIONS = {"ours": ("edge",), "modelopt": ("modelopt", "onnxruntime")}


@dataclass(frozen=True, slots=True)
class Job:
    """What one process does."""

    tool: str
    method: str
    model: str
    deployment: str
    pictures: list[str]
    result: str
    """File for ``import_s`` and ``version``."""
    imports_only: bool = False
    ranges: str = ""
    """File for amax by tensor name, as JSON; "": not written."""
    exclude: tuple[str, ...] = ()
    """Names of nodes that ModelOpt leaves in floating point."""


def main() -> None:
    """Do the job that the file on the command line describes."""
    # Where memory runs out it shall end this process, rather than the benchmark or a neighbour on the same machine.
    Path("/proc/self/oom_score_adj").write_text("1000")
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    started = time.perf_counter()
    for name in IMPORTS[job.tool]:
        importlib.import_module(name)
    import_s = time.perf_counter() - started
    versions = (f"{name} {sys.modules[name].__version__}" for name in VERSIONS.get(job.tool, ("onnxruntime",)))
    Path(job.result).write_text(json.dumps({"import_s": import_s, "version": ", ".join(versions)}))
    if not job.imports_only:
        TOOLS[job.tool](job)


def inference(job: Job) -> None:
    """Floor: the bare model, with onnxruntime's defaults."""
    import onnxruntime

    session = onnxruntime.InferenceSession(job.model, providers=["CPUExecutionProvider"])
    for tensors in inputs(job):
        session.run(None, tensors)


def minmax(job: Job) -> None:
    """Floor for whoever looks at every activation: min and max of each, with onnxruntime's defaults."""
    import onnx
    import onnxruntime

    model = onnx.shape_inference.infer_shapes(onnx.load(job.model))
    graph = model.graph
    floats = {v.name: v for v in graph.value_info if v.type.tensor_type.elem_type == onnx.TensorProto.FLOAT}
    made = [name for node in graph.node if node.op_type != "Constant" for name in node.output]
    graph.output.extend(floats[name] for name in made if name in floats)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    ranges: dict[int, tuple[float, float]] = {}
    for tensors in inputs(job):
        for index, values in enumerate(session.run(None, tensors)):
            low, high = ranges.get(index, (float("inf"), float("-inf")))
            ranges[index] = (min(low, float(values.min())), max(high, float(values.max())))


def ort(job: Job, *, single: bool = False) -> None:
    """Run the calibrator of onnxruntime by its defaults: one ``collect_data`` over all pictures, or one for each."""
    import numpy as np
    from onnxruntime.quantization import CalibrationMethod, create_calibrator

    methods = {
        "entropy": CalibrationMethod.Entropy,
        "percentile": CalibrationMethod.Percentile,
        "minmax": CalibrationMethod.MinMax,
    }
    calibrator = create_calibrator(job.model, calibrate_method=methods[job.method])
    if single:
        for tensors in inputs(job):
            calibrator.collect_data(Reader(partial(iter, [tensors])))
    else:
        calibrator.collect_data(Reader(partial(inputs, job)))
    found = calibrator.compute_data()
    if job.ranges:
        pairs = ((name, entry.range_value) for name, entry in found.items())
        # one number or, of the min/max calibrator, an array of one
        amax = {name: max(abs(float(np.ravel(side)[0])) for side in sides) for name, sides in pairs}
        Path(job.ranges).write_text(json.dumps(amax))


def modelopt(job: Job) -> None:
    """ModelOpt from the model to the quantized model, on the CPU, the rest of the model left in FP32."""
    from modelopt.onnx.quantization import quantize

    quantize(
        job.model,
        "int8",
        calibration_method=job.method,
        calibration_data_reader=Reader(partial(inputs, job)),
        calibration_eps=["cpu"],
        high_precision_dtype="fp32",
        nodes_to_exclude=list(job.exclude),
        output_path="model.onnx",
        log_level="WARNING",
    )
    if job.ranges:
        Path(job.ranges).write_text(json.dumps(_quantized_ranges(Path("model.onnx"))))


def _quantized_ranges(path: Path) -> dict[str, float]:
    """Read amax of every tensor that a Q/DQ model quantizes as a whole."""
    import onnx

    graph = onnx.load(path).graph
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant":
            constants[node.output[0]] = onnx.numpy_helper.to_array(node.attribute[0].t)
    pairs = ((node.input[0], constants.get(node.input[1])) for node in graph.node if node.op_type == "QuantizeLinear")
    return {name: float(scale.ravel()[0]) * 127 for name, scale in pairs if scale is not None and scale.size == 1}


TOOLS: dict[str, Callable[[Job], None]] = {
    "onnxruntime": ort,
    "onnxruntime-single": lambda job: ort(job, single=True),
    "modelopt": modelopt,
    "inference": inference,
    "minmax": minmax,
}


def inputs(job: Job) -> Iterator[dict[str, Any]]:
    """The pictures as the model's input, decoded and pre-processed one at a time."""
    import numpy as np
    import onnx

    from edge import config
    from edge.image import Preprocessor, decode
    from edge.types import TensorSpec

    value = onnx.load(job.model, load_external_data=False).graph.input[0]
    shape = tuple(side.dim_value for side in value.type.tensor_type.shape.dim)
    spec = TensorSpec(value.name, shape, np.dtype(np.float32))
    preprocess = Preprocessor(config.load(Path(job.deployment)).models[0].input, spec)
    for path in job.pictures:
        array, _ = preprocess(decode(Path(path).read_bytes(), name=path))
        yield {value.name: array.copy()}  # whoever collects the inputs must not find the next picture in them


class Reader:
    """onnxruntime's CalibrationDataReader, with ``get_first``, from which ModelOpt learns the inputs' shapes."""

    def __init__(self, start: Callable[[], Iterator[dict[str, Any]]]) -> None:
        self._start = start
        self.rewind()

    def rewind(self) -> None:
        """Start again."""
        self._rest = self._start()

    def get_next(self) -> dict[str, Any] | None:
        """The next picture, None at the end."""
        return next(self._rest, None)

    def get_first(self) -> dict[str, Any]:
        """The first picture, without moving on."""
        return next(self._start())


def reencode(pictures: Sequence[Path], folder: Path, missing: int) -> list[Path]:
    """Write JPEG copies of pictures, one round of a quality after the other, until ``missing`` are there."""
    import cv2

    from edge.image import decode

    written: list[Path] = []
    for index in range(missing):
        turn, which = divmod(index, len(pictures))
        image = decode(pictures[which].read_bytes(), name=str(pictures[which]))
        path = folder / f"q{95 - turn}_{which}.jpg"
        cv2.imwrite(str(path), image, [cv2.IMWRITE_JPEG_QUALITY, 95 - turn])
        written.append(path)
    return written


if __name__ == "__main__":
    main()

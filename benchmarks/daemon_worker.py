"""One process of ``benchmarks.daemon``: the daemon, the loop that it is compared with, or its imports alone.

``python -m benchmarks.daemon_worker JOB.json``. Imports no more than ``edge-daemon`` does, so that its memory is the
daemon's: onnxruntime comes with the model, if one is run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import itertools
import json
import sys
import threading
import time
import tracemalloc
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edge import config
    from edge.types import Result

IMPORTS = (
    "msgspec",
    "yaml",
    "click",
    "numpy",
    "cv2",
    "sqlite3",
    "paho.mqtt.client",
    "prometheus_client",
    "edge.cli",
    "edge.daemon",
)
"""What ``edge-daemon run`` has in memory, the shared libraries before the parts of ours that use them."""

_WARM_UP_S = 1.0
_THREADS_EVERY = 10
"""Results between looks at the threads' CPU time: about 0.2 ms each, in the thread that makes results."""


@dataclass(frozen=True, slots=True)
class Job:
    """What the process does."""

    what: Literal["daemon", "loop", "imports", "model"]
    deployment: str
    result: str
    """File for the ``Outcome``."""
    seconds: float = 5.0
    precision: Literal["int8", "fp32"] | None = None
    null: dict[str, list[tuple[str, list[int], str]]] | None = None
    """Tensors of the model, ``inputs`` and ``outputs``: run no engine in its place."""
    takes_s: float = 0.0
    """How long each inference without an engine takes."""
    every: int = 0
    """Look at memory after each so many results; 0: only at the end."""
    traced: bool = False
    """Say which lines of code hold more memory towards the end than at the second look."""


@dataclass(slots=True)
class Outcome:
    """What the parent reads."""

    results: int = 0
    """After the warm-up."""
    seconds: float = 0.0
    """From the first of them to the last."""
    cpu_s: float = 0.0
    """Of the process, all threads, over the same time."""
    by_thread_s: dict[str, float] = field(default_factory=dict)
    """The same by the name of the thread, of those that last."""
    looks: list[tuple[int, int, float]] = field(default_factory=list)
    """Results so far, blocks allocated by Python, resident megabytes."""
    growers: list[tuple[str, int]] = field(default_factory=list)
    """Lines of code and how many bytes more they hold."""
    memory: dict[str, float] = field(default_factory=dict)
    """Resident megabytes when the last result was made."""
    imports: list[tuple[str, float, float]] = field(default_factory=list)
    """Module, seconds, resident megabytes that it added."""
    opened_s: float = 0.0
    """To load the model and run it once."""
    summary: dict[str, Any] = field(default_factory=dict)


class Witness:
    """Sees every result of a run and measures between them, in the thread that makes them."""

    def __init__(self, job: Job, outcome: Outcome) -> None:
        self._job = job
        self._outcome = outcome
        self._times = array("d", [0.0] * 4)  # first and newest result: moment and CPU time; never grows
        self._seen = 0
        self._counted = 0
        self._starts_s = 0.0
        self._threads: tuple[dict[str, float], dict[str, float]] = ({}, {})
        self._before: tracemalloc.Snapshot | None = None
        self._after: tracemalloc.Snapshot | None = None

    def __call__(self, _result: Result) -> None:
        """See one."""
        self._seen += 1
        now_s = time.monotonic()
        if self._seen == 1:
            self._starts_s = now_s + _WARM_UP_S
        if now_s >= self._starts_s:
            place = 2 if self._counted else 0
            self._times[place], self._times[place + 1] = now_s, time.process_time()
            if self._counted % _THREADS_EVERY == 0:
                now = cpu_by_thread()
                self._threads = (self._threads[0] or now, now)
            self._counted += 1
        if self._job.every and self._seen % self._job.every == 0:
            self._look()

    def conclude(self) -> None:
        """Write down what was seen."""
        first_s, first_cpu_s, last_s, last_cpu_s = self._times
        if self._counted > 1:
            self._outcome.results = self._counted - 1
            self._outcome.seconds, self._outcome.cpu_s = last_s - first_s, last_cpu_s - first_cpu_s
        self._outcome.memory = memory()
        before, after = self._threads
        self._outcome.by_thread_s = {name: after[name] - before[name] for name in after if name in before}
        if self._before is not None and self._after is not None:
            grown = [entry for entry in self._after.compare_to(self._before, "lineno") if entry.size_diff > 0]
            self._outcome.growers = [(str(entry.traceback), entry.size_diff) for entry in grown[:10]]

    def _look(self) -> None:
        # What is garbage already, and only waits for its turn, does not grow.
        gc.collect()
        self._outcome.looks.append((self._seen, sys.getallocatedblocks(), memory()["rss_mb"]))
        if not self._job.traced or self._after is not None:
            return
        if len(self._outcome.looks) == 2:
            self._before = tracemalloc.take_snapshot()
        elif time.monotonic() > self._starts_s + 0.8 * self._job.seconds:
            self._after = tracemalloc.take_snapshot()


def main() -> None:
    """Do the job that the file on the command line describes."""
    # Where memory runs out it shall end this process, rather than the benchmark or a neighbour on the same machine.
    Path("/proc/self/oom_score_adj").write_text("1000")
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    outcome = Outcome()
    {"daemon": run_daemon, "loop": run_loop, "imports": run_imports, "model": run_model}[job.what](job, outcome)
    Path(job.result).write_text(json.dumps(dataclasses.asdict(outcome)))


def run_daemon(job: Job, outcome: Outcome) -> None:
    """The daemon as it ships, with a witness at the end of its pipeline."""
    from benchmarks.watched import Watched
    from edge import config, daemon

    witness = Witness(job, outcome)

    @contextlib.contextmanager
    def open_model(model: config.Model) -> Iterator[Any]:
        with open_pipeline(job, model) as pipeline:
            yield Watched(pipeline, witness)

    if job.traced:
        tracemalloc.start()
    deployment = config.load(Path(job.deployment))
    summary = daemon.run(deployment, duration_s=job.seconds + _WARM_UP_S, open_model=open_model)
    witness.conclude()
    outcome.summary = dataclasses.asdict(summary)


def run_loop(job: Job, outcome: Outcome) -> None:
    """The floor: the same pictures through the same pipeline, in a bare loop."""
    from edge import config
    from edge.sources.pattern import PatternSource
    from edge.types import Frame

    deployment = config.load(Path(job.deployment))
    stream = deployment.streams[0]
    assert isinstance(stream.source, config.TestPattern), "the benchmark's source"
    with PatternSource(stream.source, stream=stream.name) as source:
        frames = (frame for frame in source.frames(threading.Event()) if frame is not None)
        pictures = [frame.image for frame in itertools.islice(frames, 16)]
    witness = Witness(job, outcome)
    with open_pipeline(job, deployment.model(stream.model)) as pipeline:
        pipeline.warm_up()
        ends_s = time.monotonic() + job.seconds + _WARM_UP_S
        for index, image in enumerate(itertools.cycle(pictures)):
            now_s = time.monotonic()
            if now_s >= ends_s:
                break
            witness(pipeline.process(Frame(image, stream.name, index, now_s, 0)))
    witness.conclude()


def run_imports(_job: Job, outcome: Outcome) -> None:
    """Import what the daemon imports, one after the other."""
    before_mb = memory()["rss_mb"]
    outcome.imports.append(("interpreter, and this file", 0.0, before_mb))
    for name in IMPORTS:
        started_s = time.perf_counter()
        importlib.import_module(name)
        now_mb = memory()["rss_mb"]
        outcome.imports.append((name, time.perf_counter() - started_s, now_mb - before_mb))
        before_mb = now_mb
    outcome.memory = memory()


def run_model(job: Job, outcome: Outcome) -> None:
    """Load the model and run it once, as the daemon does before READY."""
    from edge import config

    model = config.load(Path(job.deployment)).models[0]
    started_s = time.perf_counter()
    with open_pipeline(job, model) as pipeline:
        pipeline.warm_up()
        outcome.opened_s = time.perf_counter() - started_s


@contextlib.contextmanager
def open_pipeline(job: Job, model: config.Model) -> Iterator[Any]:
    """The model's pipeline, or the one without an engine."""
    if job.null is None:
        from edge import process

        with process.open_pipeline(model, precision=job.precision) as pipeline:
            yield pipeline
        return
    import numpy as np

    from benchmarks.watched import open_null
    from edge.types import TensorSpec

    inputs, outputs = (
        [TensorSpec(name, tuple(shape), np.dtype(dtype)) for name, shape, dtype in job.null[side]]
        for side in ("inputs", "outputs")
    )
    with open_null(model, inputs, outputs, takes_s=job.takes_s) as pipeline:
        yield pipeline


def cpu_by_thread() -> dict[str, float]:
    """CPU seconds of each thread that runs, by its name, as the scheduler counts them."""
    found: dict[str, float] = {}
    for thread in threading.enumerate():
        path = Path(f"/proc/self/task/{thread.native_id}/schedstat")
        # One may end while it is looked at.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found[thread.name] = int(path.read_text().split()[0]) / 1e9
    return found


def memory() -> dict[str, float]:
    """Resident megabytes (1e6 bytes) of this process: all, its own, and of files."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    names = {"rss_mb": "VmRSS", "anonymous_mb": "RssAnon", "file_mb": "RssFile"}
    return {name: int(lines[key].split()[0]) * 1.024e-3 for name, key in names.items()}


if __name__ == "__main__":
    main()

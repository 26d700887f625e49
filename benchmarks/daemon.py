"""What does the daemon cost around the model: throughput, CPU, memory, allocations, start, latency, overload?

Every figure stands beside its goal, or beside the bare loop: the same pictures through the same pipeline, in a process
that does nothing else. Loop and daemon take turns, so that the machine's moods meet both alike. "No engine" is the real
pre-processing and decoding around an engine that returns at once: what is left is the daemon's own. Results go to a
mosquitto of this run, and come back to a subscriber in this process.

Needs mosquitto, and for --precision int8 `edge-calibrate calibrate configs/demo.yaml`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from benchmarks import machine, trend
from benchmarks.daemon_worker import Job
from benchmarks.rig import Broker, Manager, Subscriber
from edge import config
from edge.errors import EdgeError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.rig import Heard

ROOT = Path(__file__).parents[1]
DEVICE = "bench"

THROUGHPUT_GOAL = 0.97
MEMORY_GOAL_MB = 80.0
# A growing list of one number a result is 8 bytes each; one in ten results may leave one block behind.
BLOCKS_GOAL = 0.1
FLAT_GOAL = 2.0
"""p99 under overload, against the most that the newest-frame rule allows: see ``overload``."""


def main() -> None:
    """Measure, print, and exit with 1 where a goal is missed."""
    parser = machine.arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, metavar="S", help="of each measurement (default: 8)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="of daemon and loop in turn (default: 5)")
    parser.add_argument("--precision", choices=["fp32", "int8"], default="fp32", help="of the demo's model")
    parser.add_argument("--threads", type=int, metavar="N", help="of onnxruntime (default: its own choice)")
    parser.add_argument(
        "--only", action="append", choices=[*PARTS], help="measure only this; may be given several times"
    )
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="edge-bench-")))
        broker = stack.enter_context(Broker(folder))
        bench = Bench(folder, broker, options)
        for name in options.only or PARTS:
            PARTS[name](bench)
    machine.finish(bench.rows, options.json)
    if bench.missed:
        print(f"\nMissed: {', '.join(bench.missed)}")
        sys.exit(1)


class Bench:
    """The run's folder, broker and options, and the rows, printed as they come."""

    def __init__(self, folder: Path, broker: Broker, options: Any) -> None:
        self.seconds: float = options.seconds
        self.repeats: int = options.repeats
        self.folder = folder
        self.broker = broker
        self.rows: list[dict[str, Any]] = []
        self.missed: list[str] = []
        self._precision = options.precision
        self._threads = options.threads
        self._jobs = 0
        self.null = _tensors(config.load(ROOT / "configs/demo.yaml").models[0])
        """Of the demo's model: names, shapes and types, so that no worker has to load it for them."""

    def deployment(self, *, fps: float, outbox: bool = True, source: dict[str, Any] | None = None) -> Path:
        """Write the demo's deployment with one test pattern of so many frames a second."""
        document = yaml.safe_load((ROOT / "configs/demo.yaml").read_text())
        self._jobs += 1
        folder = self.folder / f"job{self._jobs}"
        folder.mkdir()
        (model,) = document["models"]
        model |= {name: str((ROOT / "configs" / model[name]).resolve()) for name in ("path", "artifacts")}
        for unused in ("calibration", "evaluation"):
            del model[unused]
        model["engine"] = {"precision": self._precision, "threads": self._threads}
        document["device"] = DEVICE
        document["streams"] = [{"name": "pattern", "source": source or {"type": "pattern", "fps": fps}}]
        document["mqtt"] = {"port": self.broker.port}
        if outbox:
            document["mqtt"]["outbox"] = {"path": str(folder / "outbox.db")}
        # The device's heat is no part of the question.
        document["governor"] = {"enabled": False}
        document["status"] = {"port": None}
        path = folder / "bench.yaml"
        path.write_text(yaml.safe_dump(document))
        return path

    def work(self, deployment: Path, **job: Any) -> dict[str, Any]:
        """Run a worker process to its end and return its outcome."""
        path, result = deployment.with_name("job.json"), deployment.with_name("result.json")
        path.write_text(json.dumps(asdict(Job(deployment=str(deployment), result=str(result), **job))))
        done = subprocess.run(  # noqa: S603 - our own worker
            [sys.executable, "-m", "benchmarks.daemon_worker", path],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"a worker ended with {done.returncode}:\n{done.stderr}")
        outcome: dict[str, Any] = json.loads(result.read_text())
        return outcome

    def row(self, what: str, text: str, *, goal: str | None = None, met: bool = True, **values: Any) -> None:
        """Print a line and keep its values."""
        verdict = "" if goal is None else f"   goal: {goal}{'' if met else '  MISSED'}"
        print(f"{what:<44} {text}{verdict}", flush=True)
        self.rows.append({"what": what, **values} | ({} if goal is None else {"goal": goal, "met": met}))
        if not met:
            self.missed.append(what)


@dataclass(frozen=True, slots=True)
class Pace:
    """Throughput and CPU time of one process."""

    fps: float
    cpu_ms: float
    """Of all threads, for each result."""

    @classmethod
    def of(cls, outcome: Mapping[str, Any]) -> Pace:
        """From a worker's outcome."""
        return cls(outcome["results"] / outcome["seconds"], 1e3 * outcome["cpu_s"] / outcome["results"])


def throughput(bench: Bench) -> None:
    """Daemon against loop, in turns, as fast as it goes."""
    print(f"\nThroughput: daemon and bare loop in turns, medians of {bench.repeats}")
    for name, null in (("onnxruntime", None), ("no engine", bench.null)):
        first = Pace.of(bench.work(bench.deployment(fps=100), what="loop", seconds=1.0, null=null))
        # A camera a little faster than the model: a frame always waits, and few are made in vain.
        fps = min(1000.0, 1.2 * first.fps)
        loops: list[Pace] = []
        daemons: list[Pace] = []
        for _ in range(bench.repeats):
            loops.append(Pace.of(bench.work(bench.deployment(fps=fps), what="loop", seconds=bench.seconds, null=null)))
            daemons.append(
                Pace.of(bench.work(bench.deployment(fps=fps), what="daemon", seconds=bench.seconds, null=null))
            )
        ratio = statistics.median(ours.fps / bare.fps for ours, bare in zip(daemons, loops, strict=True))
        loop, daemon = _median(loops), _median(daemons)
        # Without an engine, more than this test pattern gives cannot come out: no goal, but what is left of the loop.
        goal = f"at least {THROUGHPUT_GOAL:.0%} of the loop" if null is None else None
        bench.row(
            f"{name}: results a second",
            f"{daemon.fps:.1f}, loop {loop.fps:.1f}: {ratio:.1%}",
            goal=goal,
            met=null is not None or ratio >= THROUGHPUT_GOAL,
            daemon_fps=daemon.fps,
            loop_fps=loop.fps,
            ratio=ratio,
            camera_fps=fps,
            n=bench.repeats,
        )
        bench.row(
            f"{name}: CPU for each result, ms",
            f"{daemon.cpu_ms:.3f}, loop {loop.cpu_ms:.3f}: {daemon.cpu_ms - loop.cpu_ms:+.3f} around it",
            daemon_cpu_ms=daemon.cpu_ms,
            loop_cpu_ms=loop.cpu_ms,
            around_ms=daemon.cpu_ms - loop.cpu_ms,
        )


def cpu(bench: Bench) -> None:
    """CPU around the engine at the rate of a camera, where nothing is dropped."""
    print("\nCPU around the engine at a camera's rate, no engine")
    loop = Pace.of(bench.work(bench.deployment(fps=30), what="loop", seconds=2.0, null=bench.null))
    for fps in (10, 30):
        outcome = bench.work(bench.deployment(fps=fps), what="daemon", seconds=bench.seconds, null=bench.null)
        pace = Pace.of(outcome)
        around_ms = pace.cpu_ms - loop.cpu_ms
        bench.row(
            f"{fps} frames a second: CPU for each, ms",
            f"{around_ms:.3f} beyond the loop's {loop.cpu_ms:.3f}; {1e-3 * pace.cpu_ms * pace.fps:.2%} of one core",
            fps=fps,
            around_ms=around_ms,
            loop_cpu_ms=loop.cpu_ms,
        )
        for name, cpu_s in sorted(outcome["by_thread_s"].items(), key=lambda item: -item[1]):
            cpu_ms = 1e3 * cpu_s / outcome["results"]
            bench.row(f"  {name}", f"{cpu_ms:.3f}", fps=fps, cpu_ms=cpu_ms)


def memory(bench: Bench) -> None:
    """Resident memory without the engine, and what it is made of."""
    print("\nMemory without the engine")
    outcome = bench.work(bench.deployment(fps=30), what="daemon", seconds=bench.seconds, null=bench.null)
    resident = outcome["memory"]
    bench.row(
        "resident, MB (1e6 bytes)",
        f"{resident['rss_mb']:.1f}: {resident['anonymous_mb']:.1f} of its own, {resident['file_mb']:.1f} of files",
        goal=f"under {MEMORY_GOAL_MB:g}",
        met=resident["rss_mb"] < MEMORY_GOAL_MB,
        **resident,
    )
    imports = bench.work(bench.deployment(fps=30), what="imports")["imports"]
    for name, seconds, grown_mb in imports:
        bench.row(f"  {name}", f"{grown_mb:6.1f} MB, {1e3 * seconds:6.1f} ms to import", mb=grown_mb, seconds=seconds)
    rest_mb = resident["rss_mb"] - sum(grown_mb for _, _, grown_mb in imports)
    bench.row("  at work: threads, buffers, outbox, links", f"{rest_mb:6.1f} MB", mb=rest_mb)


def allocations(bench: Bench) -> None:
    """Blocks and bytes that each result leaves behind after the warm-up."""
    print("\nAllocations after the warm-up, no engine")
    fps, every = 200.0, 100
    outcome = bench.work(
        bench.deployment(fps=fps), what="daemon", seconds=2 * bench.seconds, null=bench.null, every=every
    )
    looks = outcome["looks"][len(outcome["looks"]) // 4 :]
    counts, blocks, megabytes = (list(column) for column in zip(*looks, strict=True))
    per_result, growth = trend.fit(counts, blocks), trend.fit(counts, megabytes)
    if per_result is None or growth is None:
        sys.exit("too few results to see whether memory grows; give more --seconds")
    bench.row(
        "blocks of Python left by each result",
        f"{per_result.slope:+.4f} over {counts[-1] - counts[0]} results",
        goal=f"under {BLOCKS_GOAL:g}",
        met=per_result.slope < BLOCKS_GOAL,
        blocks_per_result=per_result.slope,
        results=counts[-1] - counts[0],
    )
    bench.row(
        "resident memory left by each result, bytes",
        f"{1e6 * growth.slope:+.1f}; {growth.grown:+.2f} MB in all",
        bytes_per_result=1e6 * growth.slope,
        grown_mb=growth.grown,
    )
    traced = bench.work(
        bench.deployment(fps=fps), what="daemon", seconds=2 * bench.seconds, null=bench.null, every=every, traced=True
    )
    for place, grown in traced["growers"][:5]:
        name = place.removeprefix(f"{ROOT}/").removeprefix(sys.prefix)
        bench.row(f"  {name[-42:]}", f"{grown:+} bytes while it was traced", place=name, bytes=grown)


def start(bench: Bench) -> None:
    """From exec to READY=1, and the parts that can be had apart."""
    print(f"\nStart, medians of {bench.repeats}")
    parts: dict[str, list[float]] = {name: [] for name in ("ready", "interpreter", "imports", "model")}
    for _ in range(bench.repeats):
        deployment = bench.deployment(fps=30)
        parts["ready"].append(_ready_s(deployment))
        parts["interpreter"].append(_wall_s("pass"))
        # Without the model's library, which the model imports: that is measured with it.
        parts["imports"].append(_wall_s("import edge.cli, edge.daemon") - parts["interpreter"][-1])
        parts["model"].append(bench.work(deployment, what="model")["opened_s"])
    medians = {name: statistics.median(seconds) for name, seconds in parts.items()}
    rest_s = medians["ready"] - sum(medians[name] for name in ("interpreter", "imports", "model"))
    bench.row("exec to READY=1, ms", f"{1e3 * medians['ready']:.0f}", seconds=medians["ready"], n=bench.repeats)
    for name, text in (
        ("interpreter", "Python"),
        ("imports", "imports of edge.daemon"),
        ("model", "model: its library, its file, one inference"),
    ):
        bench.row(f"  {text}", f"{1e3 * medians[name]:6.0f}", seconds=medians[name])
    bench.row("  the rest", f"{1e3 * rest_s:6.0f}", seconds=rest_s)


def latency(bench: Bench) -> None:
    """From capture to the subscriber, at half of what the model can do."""
    print("\nLatency from capture to the subscriber, which is another process: broker included")
    for name, null in (("onnxruntime", None), ("no engine", bench.null)):
        loop = Pace.of(bench.work(bench.deployment(fps=100), what="loop", seconds=2.0, null=null))
        fps = min(30.0, loop.fps / 2)
        row = _heard_ms(bench, fps=fps, null=null)
        bench.row(f"{name}, {fps:.0f} frames a second, ms", _text(row), fps=fps, **row)


def overload(bench: Bench) -> None:
    """Latency with a camera that is faster than the engine.

    The newest frame wins, so that a frame waits for one inference at most: from capture to the subscriber it takes up
    to two inferences, and what it takes without any waiting. More than that would be a queue.
    """
    takes_s = 0.05
    print(f"\nOverload: an engine that takes {1e3 * takes_s:.0f} ms; the newest frame wins")
    calm: dict[str, Any] | None = None
    for factor in (0.5, 2, 10):
        row = _heard_ms(bench, fps=factor / takes_s, null=bench.null, takes_s=takes_s)
        calm = calm or row
        most_ms = calm["p99_ms"] + 1e3 * takes_s
        bench.row(
            f"camera {factor:g} times as fast, ms",
            f"{_text(row)}; {row['results_per_s']:.1f} a second, {row['dropped']:.0f} of {row['captured']:.0f} dropped",
            goal=None if factor <= 1 else f"p99 under {most_ms:.0f}, one inference more than without overload",
            met=factor <= 1 or row["p99_ms"] <= most_ms,
            factor=factor,
            **row,
        )


PARTS: dict[str, Callable[[Bench], None]] = {
    "throughput": throughput,
    "cpu": cpu,
    "memory": memory,
    "allocations": allocations,
    "start": start,
    "latency": latency,
    "overload": overload,
}


def _heard_ms(bench: Bench, *, fps: float, null: Any, takes_s: float = 0.0) -> dict[str, Any]:
    """Run a daemon, and say how old its results were when they arrived."""
    with Subscriber(bench.broker.port, f"edge/{DEVICE}/#") as subscriber:
        outcome = bench.work(
            bench.deployment(fps=fps), what="daemon", seconds=bench.seconds, null=null, takes_s=takes_s
        )
        # The worker drained before it ended; what is still on its way here is a matter of milliseconds.
        time.sleep(0.5)
        ages = [_age_s(heard) for heard in subscriber.results]
    settled = ages[len(ages) // 5 :]
    summary = outcome["summary"]
    return {
        **machine.percentiles(settled),
        "results_per_s": outcome["results"] / outcome["seconds"],
        "captured": summary["frames_captured"],
        "dropped": summary["frames_dropped"],
    }


def _age_s(heard: Heard) -> float:
    # One machine, one UTC clock: the worker's stamp and our arrival can be compared.
    captured = np.datetime64(heard.captured_at.removesuffix("Z"), "us").astype(np.int64)
    return (heard.arrived_utc_us - int(captured)) / 1e6


def _text(row: Mapping[str, float]) -> str:
    return f"p50 {row['p50_ms']:.1f}, p95 {row['p95_ms']:.1f}, p99 {row['p99_ms']:.1f} (n={row['n']:.0f})"


def _median(paces: Sequence[Pace]) -> Pace:
    return Pace(statistics.median(pace.fps for pace in paces), statistics.median(pace.cpu_ms for pace in paces))


def _wall_s(code: str) -> float:
    """Of a Python process that runs ``code``."""
    started_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)  # noqa: S603 - our own code
    return time.perf_counter() - started_s


def _ready_s(deployment: Path) -> float:
    """From the start of ``edge-daemon run`` to READY=1."""
    with Manager(deployment.parent) as manager:
        started_s = time.monotonic()
        process = subprocess.Popen(  # noqa: S603 - the command as it ships
            [sys.executable, "-m", "edge.cli", "run", deployment, "--quiet"],
            cwd=ROOT,
            env={**os.environ, "NOTIFY_SOCKET": manager.address},
            stdout=subprocess.DEVNULL,
        )
        try:
            ready_s = manager.ready_s() - started_s
        finally:
            process.terminate()
            process.wait(timeout=30)
    return ready_s


def _tensors(model: config.Model) -> dict[str, list[tuple[str, list[int], str]]]:
    """Inputs and outputs of a model, as JSON can carry them."""
    import onnxruntime

    session = onnxruntime.InferenceSession(model.path, providers=["CPUExecutionProvider"])
    if any(not isinstance(side, int) for value in session.get_inputs() for side in value.shape):
        raise EdgeError(f"{model.path}: its shapes are not fixed")
    return {
        side: [(value.name, list(value.shape), "float32") for value in values]
        for side, values in (("inputs", session.get_inputs()), ("outputs", session.get_outputs()))
    }


if __name__ == "__main__":
    main()

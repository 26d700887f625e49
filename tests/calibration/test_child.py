"""The builder as a child process, on the stand-in: whatever becomes of it, it ends in a plan or in one clear error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from calibration import child, events
from calibration.events import Done, Failed, Finished, Log, Phase, Step
from edge import manifest
from edge.errors import DataError, DeviceError, ModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    from calibration.events import Event
    from calibration.recipe import Recipe

LONG_S = 30.0
"""Nothing here takes so long; a test that waits for it hangs."""


def run(made: Recipe) -> Done:
    return child.run(made, on_event=lambda _: None)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie, which somebody has yet to wait for, does not."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid: int | str = "self") -> set[int]:
    """The builders among a process's children."""
    found = {int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in path.read_text().split()}
    return {child for child in found if b"calibration.builder" in Path(f"/proc/{child}/cmdline").read_bytes()}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline, "it does not come to pass"
        time.sleep(0.01)


@pytest.mark.parametrize("version", ["8.5.2", "10.3.0", "11.4.0"])
def test_a_plan_comes_with_all_that_the_parent_needs(standin, make_recipe, version):
    standin(version)
    made = make_recipe(version)
    seen: list[Event] = []

    done = child.run(made, on_event=seen.append)

    assert done is seen[-1]
    assert isinstance(seen[0], Phase)
    assert seen[0].name == "parsing"
    assert done.seconds > 0
    written = {path.name for path in Path(made.out).iterdir()}
    assert written == {
        manifest.PLAN,
        manifest.TIMING_CACHE,
        events.ASKED,
        events.INSPECTOR,
        events.LOG,
        "recipe.json",
    }
    assert not children()


def test_the_log_holds_what_tensorrt_says_of_places(standin, make_recipe):
    standin("10.3.0")
    made = make_recipe(quantization="cache", dla_core=0)

    run(made)

    log = Path(made.out, events.LOG).read_text()
    assert "[I] [DlaLayer] {ForeignNode[" in log
    assert "Layer 'pool' (REDUCE): Unsupported on DLA. Switching this layer's device type to GPU." in log


def test_a_killed_builder_is_taken_for_a_want_of_memory(standin, make_recipe):
    standin("10.3.0", faults=["oom-kill"])

    with pytest.raises(
        DeviceError,
        match=r"was killed while Building engine from subgraph \(signal 9\), most likely because memory ran out: \d+"
        r" MiB were free when it began, and the workspace could be 256 MiB; lower engine.workspace_mb, stop other"
        r" programs, or add swap",
    ):
        run(make_recipe())


def test_a_builder_may_be_killed_in_the_middle_of_a_line(make_recipe, monkeypatch, tmp_path):
    (tmp_path / "dies.py").write_text(
        'import os\nos.write(1, b\'{"type":"phase","name":"parsing"}\\n{"type":"st\')\nos.kill(os.getpid(), 9)\n'
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(child, "command", lambda _, path, start=child.command: start("dies", path))

    with pytest.raises(DeviceError, match=r"was killed while parsing \(signal 9\)"):
        run(make_recipe())


def test_nothing_in_the_current_folder_is_run(standin, make_recipe, monkeypatch, tmp_path):
    standin("10.3.0")
    for name in ("tensorrt", "runpy", "msgspec", "signal"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('this is not ours')")
    (tmp_path / "calibration").mkdir()
    (tmp_path / "calibration" / "__init__.py").write_text("raise SystemExit('this is not ours')")
    made = make_recipe()
    monkeypatch.chdir(tmp_path)

    assert run(made).simulated


def test_a_builder_that_crashes_is_told_with_its_last_words(standin, make_recipe):
    standin("10.3.0", faults=["crash"])
    made = make_recipe()

    with pytest.raises(ModelError, match=r"crashed while Building engine .* \(signal 11, SIGSEGV\)") as raised:
        run(made)

    assert "\n" not in str(raised.value)
    assert "in build_serialized_network" in Path(made.out, events.LOG).read_text(), "faulthandler tells where it was"


def test_out_of_memory(standin, make_recipe):
    standin("10.3.0", faults=["out-of-memory"])

    with pytest.raises(DeviceError, match=r"ran out of memory: .*OutOfMemory \(Requested size was 1234 bytes.*256 MiB"):
        run(make_recipe())


def test_no_implementation(standin, make_recipe):
    standin("10.3.0", faults=["build-fails"])

    with pytest.raises(ModelError, match=r"no implementation for them .* \(fp32\): stem_conv.*engine.fp32"):
        run(make_recipe())


def test_a_layer_that_the_dla_cannot_run(standin, make_recipe):
    standin("10.3.0")

    with pytest.raises(ModelError, match=r"the DLA cannot run them.*: pool; set engine.dla.gpu_fallback to true"):
        run(make_recipe(quantization="cache", dla_core=0, gpu_fallback=False))


def test_what_the_parser_refuses(standin, make_recipe):
    standin("10.3.0", faults=["parse:block.last"])

    with pytest.raises(ModelError, match=r"model.onnx: TensorRT 10.3.0 cannot read the model: block.last \(Conv\): "):
        run(make_recipe())


def test_no_dla(standin, make_recipe):
    standin("10.16.1")

    with pytest.raises(DeviceError, match=r"DLA core 0 is asked for, but TensorRT 10\.16\.1 finds no DLA here"):
        run(make_recipe("10.16.1", precision="fp16", dla_core=0))


def test_no_tensorrt(make_recipe, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    with pytest.raises(DeviceError, match="TensorRT's Python module is not installed"):
        run(make_recipe())


def test_a_calibration_that_fails_is_the_data_s(standin, make_recipe, deployment_file):
    standin("10.3.0")
    path = deployment_file(
        "version: 1\nmodels:\n  - name: residual\n    path: model.onnx\n    task: {type: classification}\n"
        "    calibration: {images: nowhere}\n"
    )

    with pytest.raises(DataError, match="nowhere"):
        run(make_recipe(quantization="calibrator", deployment=str(path)))


def test_a_fault_of_the_builders_own_keeps_its_traceback(standin, make_recipe):
    standin("10.3.0")
    made = msgspec.structs.replace(make_recipe(), quantization="calibrator", precision="int8", deployment=None)

    with pytest.raises(RuntimeError, match=r"ended with 1 while setting up.*\n(.*\n)*.*AssertionError"):
        run(made)


def test_a_file_that_cannot_be_written_is_named(standin, make_recipe):
    standin("10.3.0")
    made = make_recipe()
    Path(made.out, manifest.PLAN).mkdir()

    with pytest.raises(OSError, match=r"engine.plan: Is a directory"):
        run(made)


# ------------------------------------------------------------------------------------------------------- stopping


@pytest.mark.parametrize("version", ["8.5.2", "10.3.0"])
def test_what_stops_the_parent_stops_the_child(standin, make_recipe, version):
    standin(version, faults=["slow"])
    seen: list[Event] = []
    running: set[int] = set()

    def interrupt(event: Event) -> None:
        seen.append(event)
        running.update(children())
        if isinstance(event, Phase) and event.name == "building":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        child.run(make_recipe(version), on_event=interrupt)

    assert len(running) == 1
    assert not any(map(alive, running))
    assert not children()


def test_a_child_that_does_not_stop_is_killed(standin, make_recipe, monkeypatch):
    standin("10.3.0", faults=["hang"])
    monkeypatch.setattr(child, "GRACE_S", 0.3)

    def interrupt(event: Event) -> None:
        if isinstance(event, Phase) and event.name == "Building engine from subgraph":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        child.run(make_recipe(), on_event=interrupt)

    assert not children()


@pytest.mark.parametrize(
    ("fault", "send"),
    [
        pytest.param("hang", lambda pid: os.kill(pid, signal.SIGKILL), id="parent killed"),
        pytest.param("slow", lambda pid: os.killpg(pid, signal.SIGINT), id="Ctrl-C at a terminal"),
        pytest.param("slow", lambda pid: os.kill(pid, signal.SIGINT), id="Ctrl-C for the parent"),
        pytest.param("slow", lambda pid: os.killpg(pid, signal.SIGTERM), id="unit stopped by systemd"),
    ],
)
def test_no_builder_outlives_its_parent(standin, make_recipe, tmp_path, fault, send):
    standin("10.3.0", faults=[fault])
    (tmp_path / "recipe.json").write_bytes(msgspec.json.encode(make_recipe()))
    program = (
        "import signal, sys, msgspec\nfrom pathlib import Path\nfrom calibration import child\n"
        "from calibration.recipe import Recipe\n"
        "signal.signal(signal.SIGTERM, signal.default_int_handler)\n"
        "recipe = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Recipe)\n"
        "child.run(recipe, on_event=lambda event: print(event, flush=True))\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "recipe.json")]
    parent = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    assert parent.stdout is not None
    with parent.stdout:
        assert any("Building engine from subgraph" in line for line in parent.stdout)
        (builder,) = children(parent.pid)

        send(parent.pid)
        parent.wait(LONG_S)

    wait_until(lambda: not alive(builder))


def test_a_builder_that_is_stopped_by_somebody_else_says_so(standin, make_recipe):
    standin("10.3.0", faults=["slow"])

    def stop(event: Event) -> None:
        if isinstance(event, Step):
            for pid in children():
                os.kill(pid, signal.SIGTERM)

    with pytest.raises(ModelError, match=r"was stopped while Building engine .* \(signal 15, SIGTERM\)"):
        child.run(make_recipe(), on_event=stop)


def test_a_builder_stops_between_two_steps_whichever_thread_tensorrt_reports_from(standin, make_recipe):
    standin("10.3.0", faults=["slow"])
    seen: list[Event] = []

    def stop(event: Event) -> None:
        if isinstance(event, Step) and not any(isinstance(earlier, Step) for earlier in seen):
            for pid in children():
                os.kill(pid, signal.SIGTERM)
        seen.append(event)

    with pytest.raises(ModelError, match=r"was stopped while Building engine from subgraph"):
        child.run(make_recipe(), on_event=stop)

    assert "Timing graph nodes" not in [event.name for event in seen if isinstance(event, Phase)]


def test_the_builder_is_the_first_to_go_when_memory_runs_out(standin, make_recipe):
    standin("10.3.0", faults=["slow"])
    scores: list[int] = []

    def look(event: Event) -> None:
        if isinstance(event, Step):
            scores.extend(int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in children())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        child.run(make_recipe(), on_event=look)

    assert scores == [800]


# ------------------------------------------------------------------------------------------------------- protocol


@pytest.mark.parametrize(
    "event",
    [
        Phase("building", None, 3),
        Step("building", 2),
        Finished("building"),
        Log("warning", "Größe"),
        Done(seconds=1.5, tensorrt="10.3.0", plan_bytes=3, layers=2, without_range=("a", "b")),
        Failed("parse", "node 3: no", ("node 3",)),
    ],
)
def test_events_survive_the_pipe(event):
    assert events.decode(msgspec.json.encode(event)) == event


def test_what_is_no_event_is_refused():
    with pytest.raises(ValueError, match="malformed"):
        events.decode(b"noise")

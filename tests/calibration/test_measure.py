"""Running a plan in a process of its own, and how it may end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from calibration import child, measure
from calibration.recipe import TensorIo
from edge import config, manifest
from edge.engine.tensorrt import TensorRtEngine, probe
from edge.errors import DeviceError, ModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    from calibration.recipe import Recipe
    from edge.types import Tensors


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a shell script in the place of Python; it finds its folder in ``$folder``."""

    def use(script: str) -> None:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\nfor folder; do :; done\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return use


@pytest.fixture
def inputs(rng: np.random.Generator) -> list[Tensors]:
    return [{"images": rng.standard_normal((1, 3, 8, 8), np.float32)} for _ in range(3)]


def run(folder: Path, inputs: list[Tensors], **given: Any) -> measure.Measured:
    return measure.run(folder / manifest.PLAN, inputs, folder, **{"dla_core": None, "iterations": 0, **given})


def built(recipe: Recipe) -> Path:
    """The folder of a plan."""
    child.run(recipe, on_event=lambda _: None)
    return Path(recipe.out)


class TestOutputs:
    @pytest.mark.parametrize("iterations", [0, 2])
    def test_they_are_those_of_each_input_in_its_place(
        self,
        standin: Callable[..., Any],
        make_recipe: Callable[..., Recipe],
        inputs: list[Tensors],
        iterations: int,
    ) -> None:
        standin()
        folder = built(make_recipe())

        found = run(folder, inputs, iterations=iterations)

        with TensorRtEngine(folder / manifest.PLAN) as engine:
            for tensors, outputs in zip(inputs, found.outputs, strict=True):
                np.testing.assert_array_equal(outputs["out"], engine.infer(tensors)["out"])
        assert len(found.milliseconds) == iterations

    def test_nothing_is_left_behind_here(
        self, standin: Callable[..., Any], make_recipe: Callable[..., Recipe], inputs: list[Tensors]
    ) -> None:
        standin()
        folder = built(make_recipe())
        before = set(folder.iterdir())

        run(folder, inputs)

        assert set(folder.iterdir()) == before
        assert "pycuda.driver" not in sys.modules, "the caller has no CUDA context that a fault could lose"

    def test_what_the_plan_was_built_for_counts(
        self, standin: Callable[..., Any], make_recipe: Callable[..., Recipe], inputs: list[Tensors]
    ) -> None:
        standin("10.3.0", dla_cores=2)
        io = TensorIo(name="images", shape=(1, 3, 8, 8), dtype="int8", layout="chw32", scale=0.05)
        folder = built(make_recipe("10.3.0", quantization="cache", dla_core=1, inputs=(io,)))
        record = manifest.EngineManifest(
            tool="jetson-edge",
            created_at="2026-05-04T03:02:01Z",
            model="residual",
            model_sha256="",
            input=config.Input(),
            precision="int8",
            quantization="cache",
            dla_core=1,
            fallback=None,
            device=probe(),
            requested={},
            io_scales={"images": 0.05},
            parity=None,
            files={},
        )

        found = run(folder, inputs, dla_core=1, built=record)

        assert len(found.outputs) == len(inputs)

    def test_what_lies_in_the_current_folder_is_not_run(
        self,
        standin: Callable[..., Any],
        make_recipe: Callable[..., Recipe],
        inputs: list[Tensors],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        standin()
        folder = built(make_recipe())
        (tmp_path / "msgspec.py").write_text("raise SystemExit('not ours')")
        monkeypatch.chdir(tmp_path)

        assert len(run(folder, inputs).outputs) == len(inputs)


class TestFailure:
    def test_plan_that_cannot_be_loaded_is_the_models_fault(
        self, standin: Callable[..., Any], tmp_path: Path, inputs: list[Tensors]
    ) -> None:
        standin()

        with pytest.raises(ModelError, match=r"^running the plan failed: .*engine\.plan: no such plan$"):
            run(tmp_path, inputs)

    def test_gpu_that_fails_is_the_devices(
        self, standin: Callable[..., Any], make_recipe: Callable[..., Recipe], inputs: list[Tensors]
    ) -> None:
        standin()
        folder = built(make_recipe())
        standin(faults=["execute-fails"])

        with pytest.raises(DeviceError, match=r"^running the plan failed: .*TensorRT could not run it"):
            run(folder, inputs)

    @pytest.mark.parametrize(
        ("script", "kind", "message"),
        [
            ("kill -SEGV $$", ModelError, r"^running the plan crashed \(signal 11, SIGSEGV\)$"),
            (
                "echo first >&2; echo illegal address >&2; kill -ABRT $$",
                ModelError,
                r"crashed \(signal 6, SIGABRT\); the last it said: illegal address$",
            ),
            ("kill -KILL $$", DeviceError, r"was killed \(signal 9\), most likely because memory ran out"),
            (
                "echo ValueError: seven >&2; exit 3",
                RuntimeError,
                r"ended with 3, and gave no reason.*\nValueError: seven",
            ),
        ],
    )
    def test_process_that_dies_is_told_in_one_sentence(
        self,
        interpreter: Callable[[str], None],
        tmp_path: Path,
        inputs: list[Tensors],
        script: str,
        kind: type[Exception],
        message: str,
    ) -> None:
        interpreter(script)

        with pytest.raises(kind, match=message):
            run(tmp_path, inputs)

    def test_crash_after_the_answer_does_not_count(self, interpreter: Callable[[str], None], tmp_path: Path) -> None:
        interpreter("""
            echo '{"type":"_Done","names":[],"milliseconds":[1.5]}' > "$folder/answer.json"
            : > "$folder/outputs.npy"
            kill -SEGV $$""")

        assert list(run(tmp_path, [{}]).milliseconds) == [1.5]

    def test_device_that_hangs_is_given_up(
        self, interpreter: Callable[[str], None], tmp_path: Path, inputs: list[Tensors], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        interpreter("exec sleep 60")
        monkeypatch.setattr(measure, "TIMEOUT_S", 0.2)
        monkeypatch.setattr(measure, "EACH_S", 0.1)

        with pytest.raises(DeviceError, match=r"did not end within 0\.5 s: the device hangs"):
            run(tmp_path, inputs)

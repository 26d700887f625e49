"""Each picture is observed once, whatever happens in between."""

from __future__ import annotations

import dataclasses
import logging
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx_ir as ir
import pytest

from calibration import images, observation
from calibration.gather import Gathered, gather, identity_of, pause_s
from calibration.histogram import Histogram
from calibration.images import ImageSet
from calibration.observation import Observation
from edge import config
from edge.errors import DataError, DeviceError, ModelError
from edge.types import TensorSpec

COUNT = 10
SPEC = TensorSpec("images", (1, 3, 8, 8), np.dtype(np.float32))


class Clock:
    """An hour passes between two looks at it: a checkpoint after every picture."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 3600
        return self.now_s


@pytest.fixture
def model(tmp_path: Path, residual_model: ir.Model) -> config.Model:
    path = tmp_path / "model.onnx"
    ir.save(residual_model, path)
    return config.Model(name="m", path=str(path), task=config.Classification())


@pytest.fixture
def folder(tmp_path: Path, rng: np.random.Generator) -> Path:
    """Of COUNT pictures, whose brightness differs so that the ranges do."""
    place = tmp_path / "pictures"
    place.mkdir()
    for number in range(COUNT):
        pixels = rng.integers(0, 25 * (number + 1), (16, 16, 3), np.uint8)
        assert cv2.imwrite(str(place / f"{number}.png"), pixels)
    return place


@pytest.fixture
def partial(tmp_path: Path) -> Path:
    return tmp_path / ".partial.npz"


def some(folder: Path, *numbers: int) -> ImageSet:
    """The pictures of these numbers, or all."""
    return images.collect([str(folder / f"{number}.png") for number in numbers] or str(folder))


def observe(
    model: config.Model, chosen: ImageSet, partial: Path, *, earlier: tuple[Path, ...] = (), **options: Any
) -> tuple[Gathered, list[int]]:
    """What was gathered, and the numbers that on_image was called with."""
    told: list[int] = []
    options = {"memory": None, "workers": 2, "on_image": told.append, **options}
    return gather(model, SPEC, chosen, earlier=earlier, partial=partial, **options), told


def content(found: Gathered, path: Path) -> bytes:
    observation.save(path, found.observation)
    return path.read_bytes()


@pytest.fixture
def whole(model: config.Model, folder: Path, tmp_path: Path) -> bytes:
    """The bytes that an undisturbed run over all pictures ends with."""
    found, _ = observe(model, some(folder), tmp_path / "undisturbed.npz")
    return content(found, tmp_path / "whole.npz")


class Stop:
    """Raises an error after some pictures."""

    def __init__(self, after: int, error: BaseException) -> None:
        self.left, self.error = after, error

    def __call__(self, count: int) -> None:
        self.left -= count
        if self.left == 0:
            raise self.error


def test_every_picture_counts_in_every_tensor(model: config.Model, folder: Path, partial: Path) -> None:
    found, told = observe(model, some(folder), partial)

    histograms = found.observation.merged()
    assert found.reused == 0
    assert told == [1] * COUNT
    assert found.observation.sha256 == {file.sha256 for file in some(folder).used}
    assert list(histograms)[:3] == ["images", "stem", "stem_act"]
    assert {name: one.total for name, one in histograms.items()}["images"] == COUNT * 3 * 64
    assert all(one.total > 0 for one in histograms.values())


@pytest.mark.parametrize("workers", [1, 3])
def test_the_number_of_workers_leaves_no_trace(
    model: config.Model, folder: Path, partial: Path, whole: bytes, tmp_path: Path, workers: int
) -> None:
    found, _ = observe(model, some(folder), partial, workers=workers)

    assert content(found, tmp_path / "h.npz") == whole


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_order_of_the_pictures_leaves_no_trace(
    model: config.Model, folder: Path, partial: Path, whole: bytes, tmp_path: Path, seed: int
) -> None:
    chosen = some(folder)
    shuffled = random.Random(seed).sample(chosen.used, COUNT)  # noqa: S311

    found, _ = observe(model, dataclasses.replace(chosen, used=tuple(shuffled)), partial)

    assert content(found, tmp_path / "h.npz") == whole


def test_parts_add_up_to_the_whole(model: config.Model, folder: Path, whole: bytes, tmp_path: Path) -> None:
    parts = [
        observe(model, some(folder, *numbers), tmp_path / f"{numbers[0]}.npz")[0]
        for numbers in ([7, 1, 3], range(4, 7), [0, 2, 8, 9])
    ]

    first = observation.merge(parts[2].observation, parts[0].observation, names=("c", "a"))
    merged = observation.merge(first, parts[1].observation, names=("ca", "b"))

    observation.save(tmp_path / "h.npz", merged)
    assert (tmp_path / "h.npz").read_bytes() == whole


@pytest.mark.parametrize("error", [RuntimeError("out of paper"), DataError("gone"), KeyboardInterrupt()])
def test_a_run_that_fails_is_continued(
    model: config.Model, folder: Path, partial: Path, whole: bytes, tmp_path: Path, error: BaseException
) -> None:
    chosen = some(folder)

    with pytest.raises(type(error)):
        observe(model, chosen, partial, on_image=Stop(4, error))
    for file in chosen.used:
        if file.sha256 in observation.load(partial).sha256:
            file.path.unlink()  # it is not read again
    found, told = observe(model, chosen, partial)

    assert found.reused == 4
    assert told == [4, *[1] * (COUNT - 4)]
    assert content(found, tmp_path / "h.npz") == whole


def test_ctrl_c_in_the_main_thread_loses_nothing(
    model: config.Model, folder: Path, partial: Path, whole: bytes, tmp_path: Path
) -> None:
    done: list[int] = []

    def press_once(_: int) -> None:
        if not done:
            signal.raise_signal(signal.SIGINT)
        done.append(1)

    with pytest.raises(KeyboardInterrupt):
        observe(model, some(folder), partial, on_image=press_once)
    kept = observation.load(partial).images
    found, told = observe(model, some(folder), partial)

    assert kept == len(done)
    assert told == [kept, *[1] * (COUNT - kept)]
    assert content(found, tmp_path / "h.npz") == whole


def test_a_picture_that_is_gone_keeps_the_others(
    model: config.Model, folder: Path, partial: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = some(folder)
    (folder / "6.png").unlink()

    with caplog.at_level(logging.WARNING), pytest.raises(DataError, match=r"6\.png"):
        observe(model, chosen, partial, workers=1)

    assert observation.load(partial).images == 6
    assert f"6 of 10 pictures are kept in {partial}; the same pictures need not be run again" in caplog.text


def test_a_nan_names_its_picture(folder: Path, partial: Path, build_model: Callable[..., ir.Model]) -> None:
    from onnx import helper

    path = partial.with_name("log.onnx")
    ir.save(build_model([helper.make_node("Log", ["images"], ["out"])], {}), path)
    model = config.Model(name="m", path=str(path), task=config.Classification(), input=config.Input(mean=[100.0]))

    with pytest.raises(ModelError, match=rf"tensor 'out' has 192 NaN or infinite values on {folder}/0\.png"):
        observe(model, some(folder), partial)

    assert not partial.exists()


def test_what_was_observed_before_a_nan_is_kept(
    folder: Path, partial: Path, build_model: Callable[..., ir.Model]
) -> None:
    from onnx import helper

    path = partial.with_name("log.onnx")
    ir.save(build_model([helper.make_node("Log", ["images"], ["out"])], {}), path)
    model = config.Model(name="m", path=str(path), task=config.Classification())
    for number in range(COUNT):
        level = 0 if number == 3 else 9 + number
        assert cv2.imwrite(str(folder / f"{number}.png"), np.full((16, 16, 3), level, np.uint8))

    with pytest.raises(ModelError, match=rf"tensor 'out' has 192 NaN or infinite values on {folder}/3\.png"):
        observe(model, some(folder), partial, workers=1)
    kept = observation.load(partial)
    (folder / "3.png").unlink()
    found, told = observe(model, some(folder), partial)

    assert kept.sha256 == {file.sha256 for file in some(folder, 0, 1, 2).used}
    assert kept.merged()["out"].nonfinite == 0
    assert told == [3, *[1] * (COUNT - 4)]
    assert found.observation.images == COUNT - 1


def test_too_little_memory_is_told_before_anything_is_lost(
    model: config.Model, folder: Path, partial: Path, whole: bytes, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError):
        observe(model, some(folder), partial, on_image=Stop(4, RuntimeError()))
    before = partial.read_bytes()

    with pytest.raises(DeviceError, match=r"allowed: 1 MiB"):
        observe(model, some(folder), partial, memory=1_000_000)
    kept = partial.read_bytes()
    found, told = observe(model, some(folder), partial)

    assert kept == before
    assert told == [4, *[1] * (COUNT - 4)]
    assert content(found, tmp_path / "h.npz") == whole


def test_a_picture_that_is_counted_by_half_is_not_saved(
    model: config.Model, folder: Path, partial: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    drained: list[str] = []

    def drain_into(histogram: Histogram, total: Histogram) -> None:
        drained.append("one more")
        if len(drained) == 4 * tensors + 3:
            raise MemoryError
        drain(histogram, total)

    drain = Histogram.drain_into
    tensors = len(observe(model, some(folder), partial.with_name("p.npz"))[0].observation.tensors)
    monkeypatch.setattr(Histogram, "drain_into", drain_into)
    with pytest.raises(MemoryError):
        observe(model, some(folder), partial, clock=lambda: 2.0 * (len(drained) // tensors))
    found, told = observe(model, some(folder), partial)

    assert told == [3, *[1] * (COUNT - 3)]  # as at the checkpoint after 6 s; the fourth picture is lost
    assert content(found, partial.with_name("h.npz")) == whole


class TestFullDisk:
    """No file may grow after the fourth picture."""

    @pytest.fixture
    def failure(self, model: config.Model, folder: Path, partial: Path) -> OSError:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)

        def fill(_: int) -> None:
            if observation.load(partial).images == 4:
                resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))

        try:
            with pytest.raises(OSError, match="too large") as caught:
                observe(model, some(folder), partial, on_image=fill, clock=Clock())
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        return caught.value

    @pytest.mark.usefixtures("failure")
    def test_the_earlier_checkpoint_stays(
        self,
        model: config.Model,
        folder: Path,
        partial: Path,
        whole: bytes,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        assert (
            f"{partial}: what was observed since the last checkpoint is lost" in caplog.get_records("setup")[-1].message
        )
        assert not list(partial.parent.glob(f".{partial.name}-*"))

        found, told = observe(model, some(folder), partial)

        assert told == [4, *[1] * (COUNT - 4)]
        assert content(found, partial.with_name("h.npz")) == whole

    def test_the_error_names_the_partial_file(self, failure: OSError, partial: Path) -> None:
        assert failure.filename == str(partial)


@pytest.mark.parametrize("name", [".partial.npz", "[a-z]*.npz"])
def test_what_killed_runs_left_of_this_file_is_removed(
    model: config.Model, folder: Path, tmp_path: Path, name: str
) -> None:
    mine = tmp_path / f".{name}-x7"
    others = [tmp_path / ".other.npz-x7", tmp_path / ".a.npz-x7", tmp_path / f"{name}-x7"]
    for path in (mine, *others):
        path.write_text("half")

    observe(model, some(folder, 1), tmp_path / name)

    assert not mine.exists()
    assert all(path.exists() for path in others)


KILLED = """
import os, sys, time
from pathlib import Path
import numpy as np
from calibration import images
from calibration.gather import gather
from edge import config
from edge.types import TensorSpec

model, folder, partial, moment, after = sys.argv[1:]
done, now_s = 0, 0.0

def stop():
    print("now", flush=True)
    time.sleep(600)

def on_image(count):
    global done
    done += count
    if moment == "picture" and done == int(after):
        stop()

def clock():
    global now_s
    now_s += 10
    return now_s

sync = os.fsync
def fsync(descriptor):
    if moment == "checkpoint" and done >= int(after):
        stop()
    sync(descriptor)

os.fsync = fsync
gather(
    config.Model(name="m", path=model, task=config.Classification()),
    TensorSpec("images", (1, 3, 8, 8), np.dtype(np.float32)),
    images.collect(folder),
    earlier=[], partial=Path(partial), memory=None, workers=2, on_image=on_image, clock=clock,
)
"""


@pytest.mark.parametrize("moment", ["picture", "checkpoint"])
def test_a_run_that_is_killed_is_continued_from_its_last_checkpoint(
    model: config.Model, folder: Path, partial: Path, whole: bytes, tmp_path: Path, moment: str
) -> None:
    chosen = some(folder)
    command = [sys.executable, "-c", KILLED, model.path, str(folder), str(partial), moment, "6"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "now\n"
        process.send_signal(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
    kept = observation.load(partial).images
    leftover = set(tmp_path.glob(".partial.npz?*")) | set(tmp_path.glob("..partial.npz*"))

    for file in chosen.used:
        if file.sha256 in observation.load(partial).sha256:
            file.path.unlink()
    found, told = observe(model, chosen, partial)

    assert 3 <= kept <= 6
    assert len(leftover) == (moment == "checkpoint")
    assert not any(path.exists() for path in leftover)
    assert told == [kept, *[1] * (COUNT - kept)]
    assert content(found, tmp_path / "h.npz") == whole


def test_the_partial_file_is_whole_at_the_end(
    model: config.Model, folder: Path, partial: Path, whole: bytes, tmp_path: Path
) -> None:
    observe(model, some(folder), partial)

    found, told = observe(model, some(folder), partial)

    assert (found.reused, told) == (COUNT, [COUNT])
    assert content(found, tmp_path / "h.npz") == whole


def test_checkpoints_hold_whole_pictures(model: config.Model, folder: Path, partial: Path) -> None:
    seen: list[int] = []

    def look(_: int) -> None:
        one = observation.load(partial)
        seen.append(one.images)
        assert one.merged()["images"].total == one.images * 192

    observe(model, some(folder), partial, on_image=look, clock=Clock())

    assert seen == list(range(1, COUNT + 1))


def test_a_short_run_is_written_once(model: config.Model, folder: Path, partial: Path) -> None:
    def look(_: int) -> None:
        assert not partial.exists()

    observe(model, some(folder), partial, on_image=look, clock=lambda: 0.0)

    assert observation.load(partial).images == COUNT


def test_a_checkpoint_is_written_when_it_is_due(model: config.Model, folder: Path, partial: Path) -> None:
    done: list[int] = []
    held: list[int] = []

    def on_image(_: int) -> None:
        done.append(1)
        held.append(observation.load(partial).images if partial.exists() else 0)

    observe(model, some(folder), partial, on_image=on_image, clock=lambda: 2.0 * len(done))

    assert held == [0, 0, 0, 4, 4, 4, 7, 7, 7, 10]  # every 5 s at the earliest


def test_checkpoints_take_a_twentieth_of_the_time_but_come_twice_a_minute() -> None:
    assert pause_s(0.001) == 5
    assert pause_s(1) == pytest.approx(19)
    assert pause_s(20) == 30


class TestEarlierFiles:
    @pytest.fixture
    def earlier(self, model: config.Model, folder: Path, tmp_path: Path) -> Path:
        """Of pictures 0 to 5."""
        path = tmp_path / "earlier.npz"
        observation.save(path, observe(model, some(folder, *range(6)), tmp_path / "p.npz")[0].observation)
        return path

    def test_only_what_they_lack_is_observed(
        self, model: config.Model, folder: Path, partial: Path, earlier: Path, whole: bytes, tmp_path: Path
    ) -> None:
        chosen = some(folder)
        for number in range(6):
            (folder / f"{number}.png").unlink()

        found, told = observe(model, chosen, partial, earlier=(earlier,))

        assert (found.reused, told) == (6, [6, 1, 1, 1, 1])
        assert content(found, tmp_path / "h.npz") == whole

    def test_nothing_is_run_or_written_when_they_lack_nothing(
        self, model: config.Model, folder: Path, partial: Path, earlier: Path
    ) -> None:
        found, told = observe(model, some(folder, *range(6)), partial, earlier=(earlier,))

        assert (found.reused, told) == (6, [6])
        assert not partial.exists()

    def test_several_are_combined_the_largest_first(
        self, model: config.Model, folder: Path, partial: Path, earlier: Path, whole: bytes, tmp_path: Path
    ) -> None:
        paths = []
        for name, numbers in {"overlapping": (5, 6, 7), "disjoint": (8, 9)}.items():
            paths.append(tmp_path / f"{name}.npz")
            observe(model, some(folder, *numbers), paths[-1])

        found, told = observe(model, some(folder), partial, earlier=(*paths, earlier, tmp_path / "absent.npz"))

        assert (found.reused, told) == (8, [8, 1, 1])
        assert content(found, tmp_path / "h.npz") == whole

    def test_the_partial_file_that_started_from_them_is_enough(
        self, model: config.Model, folder: Path, partial: Path, earlier: Path, whole: bytes, tmp_path: Path
    ) -> None:
        with pytest.raises(RuntimeError):
            observe(model, some(folder), partial, earlier=(earlier,), on_image=Stop(8, RuntimeError()))

        found, told = observe(model, some(folder), partial, earlier=(earlier,))

        assert (found.reused, told) == (8, [8, 1, 1])
        assert content(found, tmp_path / "h.npz") == whole

    def test_pictures_that_are_not_wanted_any_more_do_not_count(
        self, model: config.Model, folder: Path, partial: Path, earlier: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.INFO):
            found, _ = observe(model, some(folder, *range(1, 8)), partial, earlier=(earlier,))

        assert (found.reused, found.observation.images) == (0, 7)
        assert f"{earlier}: not used: 1 of its 6 pictures are not in this set" in caplog.text

    def test_another_pre_processing_is_not_mixed_in(
        self, model: config.Model, folder: Path, partial: Path, earlier: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        other = config.Model(name="m", path=model.path, task=model.task, input=config.Input(divide_by=1.0))

        with caplog.at_level(logging.INFO):
            found, _ = observe(other, some(folder), partial, earlier=(earlier,))

        assert found.reused == 0
        assert found.observation.merged()["images"].amax > 1
        assert f"{earlier}: not used: input.divide_by is 255.0 there and 1.0 here" in caplog.text

    def test_another_model_is_not_mixed_in(
        self,
        model: config.Model,
        folder: Path,
        partial: Path,
        earlier: Path,
        residual_model: ir.Model,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        residual_model.graph.initializers["b_head"].const_value = ir.tensor(np.ones(5, np.float32), name="b_head")
        ir.save(residual_model, model.path)

        with caplog.at_level(logging.INFO):
            found, _ = observe(model, some(folder), partial, earlier=(earlier,))

        assert found.reused == 0
        assert f"{earlier}: not used: model_sha256 is " in caplog.text

    def test_other_tensors_of_the_same_model_are_not_mixed_in(
        self, model: config.Model, folder: Path, partial: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        older = Observation.empty(identity_of(model, SPEC), ["images", "stem"])
        sha256 = some(folder, 1).used[0].sha256
        older.group(sha256).sha256.add(sha256)
        observation.save(partial, older)

        found, told = observe(model, some(folder), partial)

        assert (found.reused, told) == (0, [1] * COUNT)
        assert caplog.messages == [
            f"{partial}: not used: it was written by another version, which observed other tensors"
        ]

    def test_a_foreign_or_damaged_partial_file_is_named_and_replaced(
        self, model: config.Model, folder: Path, partial: Path, whole: bytes, caplog: pytest.LogCaptureFixture
    ) -> None:
        other = config.Model(name="m", path=model.path, task=model.task, input=config.Input(divide_by=1.0))
        observe(other, some(folder), partial)

        found, _ = observe(model, some(folder), partial)
        assert (found.reused, caplog.messages) == (
            0,
            [f"{partial}: not used: input.divide_by is 1.0 there and 255.0 here"],
        )
        partial.write_bytes(partial.read_bytes()[:1000])
        found, _ = observe(model, some(folder), partial)

        assert found.reused == 0
        assert f"not used: {partial}: is not a file of observed histograms, or damaged" in caplog.messages[-1]
        assert content(found, partial.with_name("h.npz")) == whole

    def test_a_size_that_the_model_has_anyway_makes_no_difference(self, model: config.Model) -> None:
        explicit = config.Model(name="m", path=model.path, task=model.task, input=config.Input(size=(8, 8)))

        assert identity_of(explicit, SPEC) == identity_of(model, SPEC)


def test_a_partial_file_that_cannot_be_written_ends_the_run(
    model: config.Model, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    partial = tmp_path / "absent" / "partial.npz"

    with pytest.raises(OSError, match=r"partial\.npz"):
        observe(model, some(folder), partial, clock=Clock())

    assert "what was observed since the last checkpoint is lost" in caplog.text


def test_weights_in_a_file_beside_the_model_belong_to_it(
    model: config.Model, residual_model: ir.Model, tmp_path: Path
) -> None:
    path = tmp_path / "split.onnx"
    ir.save(residual_model, path, external_data="split.bin", size_threshold_bytes=0)

    identity = identity_of(config.Model(name="m", path=str(path), task=model.task), SPEC)
    (tmp_path / "split.bin").write_bytes(bytes((tmp_path / "split.bin").stat().st_size))
    changed = identity_of(config.Model(name="m", path=str(path), task=model.task), SPEC)

    assert [text.partition(" ")[0] for text in observation.difference(identity, changed)] == ["model_data.split.bin"]

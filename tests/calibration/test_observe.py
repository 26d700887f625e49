"""Every activation of every picture ends up in its histogram, in bounded memory; whatever happens, no thread stays."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper

from calibration import graph, observe, segments
from calibration.histogram import Histogram
from edge.errors import DataError, DeviceError, ModelError
from edge.image import decode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Picture = NDArray[np.float32]

node = helper.make_node
PLENTY = 1 << 40


def collected(model: ir.Model, pictures: Sequence[Picture], **options: Any) -> dict[str, Histogram]:
    """The histograms of all pictures together."""
    observer = observe.Observer(model, **options)
    totals = {name: Histogram() for name in observer.names}

    def collect(_: int, histograms: dict[str, Histogram]) -> None:
        for name, histogram in histograms.items():
            histogram.drain_into(totals[name])

    observer.run(range(len(pictures)), lambda: lambda index: {"images": pictures[index]}, collect)
    return totals


def expected(model: ir.Model, pictures: Sequence[Picture]) -> dict[str, Histogram]:
    """The same from one session that keeps all activations."""
    inputs, names = observe.activations(model)
    exposed = ir.from_proto(ir.to_proto(model))
    outputs = {value.name for value in exposed.graph.outputs}
    exposed.graph.outputs.extend(
        value for part in exposed.graph for value in part.outputs if value.name in names and value.name not in outputs
    )
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    one = onnxruntime.InferenceSession(ir.to_proto(exposed).SerializeToString(), options)
    totals = {name: Histogram() for name in [*inputs, *names]}
    for picture in pictures:
        for name, array in zip(totals, [picture, *one.run(names, {"images": picture})], strict=True):
            totals[name].add(array)
    return totals


def assert_equal(first: dict[str, Histogram], second: dict[str, Histogram]) -> None:
    """Bit by bit."""
    assert list(first) == list(second)
    for name, one in first.items():
        other = second[name]
        assert np.array_equal(one.counts, other.counts), name
        numbers = [(h.exponent, h.minimum, h.maximum, h.zeros, h.nonfinite) for h in (one, other)]
        assert numbers[0] == numbers[1], name


def workers_left() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("observe")]


@pytest.fixture
def pictures(rng: np.random.Generator) -> list[Picture]:
    return [rng.standard_normal((1, 3, 8, 8)).astype(np.float32) * scale for scale in (1, 0.1, 30, 2, 0)]


@pytest.fixture
def branching_model(build_model: Callable[..., ir.Model]) -> ir.Model:
    """An If and a Loop whose bodies read activations and weights of the graph around them."""
    info = helper.make_tensor_value_info
    shape = (1, 3, 8, 8)
    scaled = helper.make_graph(
        [node("Mul", ["positive", "weight"], ["scaled"])], "then", [], [info("scaled", TensorProto.FLOAT, shape)]
    )
    plain = helper.make_graph(
        [node("Neg", ["images"], ["negative"])], "else", [], [info("negative", TensorProto.FLOAT, shape)]
    )
    body = helper.make_graph(
        [
            node("Identity", ["go"], ["on"]),
            node("Add", ["before", "positive"], ["sum_of_two"]),
            node("Mul", ["sum_of_two", "weight"], ["after"]),
        ],
        "body",
        [
            info("turn", TensorProto.INT64, ()),
            info("go", TensorProto.BOOL, ()),
            info("before", TensorProto.FLOAT, shape),
        ],
        [info("on", TensorProto.BOOL, ()), info("after", TensorProto.FLOAT, shape)],
    )
    nodes = [
        node("Relu", ["images"], ["positive"]),
        node("ReduceSum", ["images"], ["sum"], keepdims=0),
        node("Greater", ["sum", "zero"], ["bright"]),
        node("If", ["bright"], ["chosen"], then_branch=scaled, else_branch=plain),
        node("Loop", ["three", "", "chosen"], ["looped"], body=body),
        node("Tanh", ["looped"], ["bounded"]),
        node("Reshape", ["bounded", "shape"], ["out"]),
    ]
    weights = {"weight": np.float32([0.5]), "zero": np.float32(0), "three": np.int64(3), "shape": np.int64([3, 64])}
    return build_model(nodes, weights)


@pytest.fixture
def counting_model(build_model: Callable[..., ir.Model]) -> ir.Model:
    """Tensors whose shape depends on the picture, integers in between, and one that is nearly always empty."""
    nodes = [
        node("Relu", ["images"], ["positive"]),
        node("NonZero", ["positive"], ["where"]),
        node("Transpose", ["where"], ["places"]),
        node("GatherND", ["images", "places"], ["found"]),
        node("Exp", ["found"], ["grown"]),
        node("Cast", ["where"], ["index"], to=TensorProto.FLOAT),
        node("Concat", ["grown", "found"], ["both"], axis=0),
        node("Concat", ["index", "origin"], ["anywhere"], axis=1),
        node("ReduceMax", ["anywhere"], ["furthest"], keepdims=0),
        node("Slice", ["images", "zeros", "zeros"], ["nothing"]),
        node("Neg", ["nothing"], ["still_nothing"]),
        node("Add", ["images", "furthest"], ["out"]),
    ]
    weights = {"zeros": np.int64([0]), "origin": np.zeros((4, 1), np.float32)}
    return build_model(nodes, weights, outputs=("out", "both", "still_nothing"))


def test_every_activation_is_observed_once_a_picture(residual_model: ir.Model, pictures: list[Picture]) -> None:
    histograms = collected(residual_model, pictures)

    assert list(histograms) == ["images", *(value.name for part in residual_model.graph for value in part.outputs)]
    assert histograms["images"].total == 5 * 3 * 64
    assert histograms["stem_act"].total == 5 * 4 * 64


def test_constants_integers_and_what_is_computed_from_them_are_left_out(build_model: Callable[..., ir.Model]) -> None:
    nodes = [
        node("Constant", [], ["two"], value_float=2.0),
        node("Mul", ["two", "weight"], ["four"]),
        node("Shape", ["images"], ["shape"]),
        node("Mul", ["images", "four"], ["scaled"]),
        node("Reshape", ["scaled", "shape"], ["out"]),
    ]
    model = build_model(nodes, {"weight": np.float32([2.0])})

    histograms = collected(model, [np.ones((1, 3, 8, 8), np.float32)])

    assert set(histograms) == {"images", "scaled", "out"}
    assert histograms["out"].maximum == 4.0


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("arena_bytes", [0, 5000, PLENTY])
@pytest.mark.parametrize("fixture", ["residual_model", "branching_model", "counting_model"])
def test_neither_segments_nor_workers_change_a_bit(
    fixture: str, arena_bytes: int, workers: int, pictures: list[Picture], request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(fixture)

    found = collected(model, pictures, arena_bytes=arena_bytes, workers=workers)

    assert_equal(found, expected(model, pictures))


def test_neither_the_order_of_the_pictures_nor_a_pause_changes_a_bit(
    residual_model: ir.Model, pictures: list[Picture]
) -> None:
    totals = collected(residual_model, pictures[3:])
    for name, histogram in collected(residual_model, pictures[2::-1], workers=2).items():
        totals[name].merge(histogram)

    assert_equal(totals, collected(residual_model, pictures))


def test_a_real_detector_gives_the_same_bits_in_any_number_of_segments(data: Path) -> None:
    model = graph.load(data / "models" / "yolox_nano.onnx")
    ir.passes.common.ShapeInferencePass()(model)
    pictures = []
    for path in sorted((data / "images").iterdir())[:3]:
        picture = np.zeros((416, 416, 3), np.float32)
        image = decode(path.read_bytes(), name=path.name)[:416, :416]
        picture[: image.shape[0], : image.shape[1]] = image
        pictures.append(np.ascontiguousarray(picture.transpose(2, 0, 1)[np.newaxis]))

    reference = expected(model, pictures)

    for arena_bytes, workers in ((0, 1), (16 << 20, 2), (PLENTY, 1)):
        assert_equal(collected(model, pictures, arena_bytes=arena_bytes, workers=workers), reference)


def test_copies_of_a_tensor_are_counted_as_the_tensors_themselves(
    build_model: Callable[..., ir.Model], pictures: list[Picture]
) -> None:
    nodes = [
        node("Identity", ["images"], ["same"]),
        node("Transpose", ["same"], ["turned"], perm=[0, 1, 3, 2]),
        node("Exp", ["turned"], ["grown"]),
        node("Concat", ["turned", "grown", "turned"], ["joined"], axis=1),
        node("Concat", ["grown", "weight"], ["with_weight"], axis=1),
        node("Flatten", ["joined"], ["flat"]),
        node("Unsqueeze", ["flat", "axis"], ["raised"]),
        node("Squeeze", ["raised", "axis"], ["out"]),
    ]
    weights = {"weight": np.full((1, 1, 8, 8), 1e9, np.float32), "axis": np.int64([0])}
    model = build_model(nodes, weights, outputs=("out", "with_weight"))

    assert_equal(collected(model, pictures), expected(model, pictures))


def test_inputs_and_constants_may_be_outputs_and_outputs_may_be_left_out(
    build_model: Callable[..., ir.Model], rng: np.random.Generator, pictures: list[Picture]
) -> None:
    nodes = [
        node("Identity", ["images"], ["same"]),
        node("Reshape", ["images", "shape"], ["steps"]),
        node("GRU", ["steps", "w", "r"], ["", "last"], hidden_size=2),
    ]
    weights = {
        "shape": np.int64([8, 1, 24]),
        "w": rng.standard_normal((1, 6, 24)).astype(np.float32),
        "r": rng.standard_normal((1, 6, 2)).astype(np.float32),
    }
    model = build_model(nodes, weights, outputs=("same", "last"))
    model.graph.outputs.extend([model.graph.inputs[0], model.graph.initializers["w"]])

    histograms = collected(model, pictures[:2], arena_bytes=0)

    assert list(histograms) == ["images", "same", "steps", "last"]
    assert histograms["same"].total == histograms["images"].total == 2 * 3 * 64
    assert histograms["last"].total == 2 * 2


def test_an_empty_tensor_has_an_empty_histogram(counting_model: ir.Model, pictures: list[Picture]) -> None:
    histograms = collected(counting_model, pictures)

    assert histograms["nothing"].total == histograms["still_nothing"].total == 0
    assert histograms["found"].total == sum(int((picture > 0).sum()) for picture in pictures)


def test_a_picture_may_come_in_any_memory_layout(residual_model: ir.Model, pictures: list[Picture]) -> None:
    strided = [np.asfortranarray(picture) for picture in pictures]

    assert_equal(collected(residual_model, strided), collected(residual_model, pictures))


def test_each_picture_is_collected_by_itself_merged_or_drained(residual_model: ir.Model) -> None:
    observer = observe.Observer(residual_model, workers=3)
    seen: list[tuple[int, float, int]] = []

    def collect(value: int, histograms: dict[str, Histogram]) -> None:
        total = Histogram()
        if value % 2:
            total.merge(histograms["images"])
        else:
            histograms["images"].drain_into(total)
        seen.append((value, total.maximum, total.total))

    observer.run(range(1, 21), lambda: lambda value: {"images": np.full((1, 3, 8, 8), value, np.float32)}, collect)

    assert sorted(seen) == [(value, float(value), 192) for value in range(1, 21)]
    assert not workers_left()


def test_a_loader_may_use_its_buffer_again(residual_model: ir.Model, pictures: list[Picture]) -> None:
    observer = observe.Observer(residual_model, workers=2)
    total = Histogram()
    opened: list[int] = []

    def open_loader() -> Callable[[int], dict[str, Picture]]:
        buffer = np.empty((1, 3, 8, 8), np.float32)
        opened.append(1)

        def load(index: int) -> dict[str, Picture]:
            buffer[:] = pictures[index]
            return {"images": buffer}

        return load

    observer.run(range(5), open_loader, lambda _, histograms: total.merge(histograms["out"]))

    assert len(opened) <= 2
    assert_equal({"out": total}, {"out": collected(residual_model, pictures)["out"]})


def test_nothing_to_observe_opens_no_loader(residual_model: ir.Model) -> None:
    opened: list[int] = []

    observe.Observer(residual_model).run([], lambda: opened.append(1), lambda *_: None)

    assert not opened


@pytest.mark.parametrize("arena_bytes", [0, PLENTY])
def test_nan_names_the_first_tensor_and_the_first_picture(
    build_model: Callable[..., ir.Model], arena_bytes: int
) -> None:
    nodes = [node("Log", ["images"], ["logarithm"]), node("Relu", ["logarithm"], ["out"])]
    observer = observe.Observer(build_model(nodes, {}), workers=4, arena_bytes=arena_bytes)
    done: list[int] = []

    with pytest.raises(ModelError, match=r"tensor 'logarithm' has 192 NaN or infinite values on picture 3\.jpg"):
        observer.run(
            range(10),
            lambda: lambda index: {"images": np.full((1, 3, 8, 8), 3 - index - 0.5, np.float32)},
            lambda index, _: done.append(index),
            describe=lambda index: f"picture {index}.jpg",
        )

    assert set(done) <= {0, 1, 2}
    assert not workers_left()


def test_a_picture_that_is_not_finite_is_told_as_the_input(residual_model: ir.Model) -> None:
    with pytest.raises(ModelError, match="tensor 'images' has 1 NaN or infinite values on 0"):
        collected(residual_model, [np.where(np.arange(192) == 5, np.inf, 1).astype(np.float32).reshape(1, 3, 8, 8)])


def test_what_a_loader_raises_ends_the_run(residual_model: ir.Model, pictures: list[Picture]) -> None:
    observer = observe.Observer(residual_model, workers=3)
    error = DataError("a.jpg: is gone")
    done: list[int] = []

    def load(index: int) -> dict[str, Picture]:
        if index == 4:
            raise error
        return {"images": pictures[index % 4]}

    with pytest.raises(DataError) as caught:
        observer.run(range(1000), lambda: load, lambda index, _: done.append(index))

    assert caught.value is error
    assert set(done) <= set(range(10))
    assert not workers_left()


def test_a_loader_that_cannot_be_opened_ends_the_run(residual_model: ir.Model) -> None:
    def open_loader() -> Callable[[int], dict[str, Picture]]:
        raise OSError("no such device")

    with pytest.raises(OSError, match="no such device"):
        observe.Observer(residual_model, workers=2).run(range(9), open_loader, lambda *_: None)

    assert not workers_left()


def test_an_interrupt_by_whoever_collects_ends_the_run(residual_model: ir.Model, pictures: list[Picture]) -> None:
    observer = observe.Observer(residual_model, workers=2)
    done: list[int] = []

    def collect(index: int, _: dict[str, Histogram]) -> None:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(index)

    with pytest.raises(KeyboardInterrupt):
        observer.run(range(10**9), lambda: lambda index: {"images": pictures[index % 5]}, collect)

    assert len(done) == 3
    assert not workers_left()


def test_ctrl_c_ends_the_run_between_pictures_and_leaves_no_thread(
    residual_model: ir.Model, pictures: list[Picture]
) -> None:
    observer = observe.Observer(residual_model, workers=2)
    main = threading.main_thread().ident
    assert main is not None
    begun: list[int] = []
    done: list[int] = []

    def collect(index: int, _: dict[str, Histogram]) -> None:
        begun.append(index)
        if len(done) == 3:
            signal.pthread_kill(main, signal.SIGINT)
        done.append(index)

    with pytest.raises(KeyboardInterrupt):
        observer.run(range(10**9), lambda: lambda index: {"images": pictures[index % 5]}, collect)

    assert begun == done
    assert len(done) >= 4
    assert not workers_left()


def test_an_observer_can_be_used_again_after_a_failure(residual_model: ir.Model, pictures: list[Picture]) -> None:
    observer = observe.Observer(residual_model, workers=2)
    total = Histogram()

    with pytest.raises(ModelError, match="the model fails when it runs"):
        observer.run([0], lambda: lambda _: {"images": np.zeros((1, 3, 4, 4), np.float32)}, lambda *_: None)
    observer.run(range(5), lambda: lambda n: {"images": pictures[n]}, lambda _, found: total.merge(found["out"]))

    assert_equal({"out": total}, {"out": collected(residual_model, pictures)["out"]})


def test_a_model_that_cannot_be_loaded_is_refused(build_model: Callable[..., ir.Model]) -> None:
    model = build_model([node("Relu", ["images"], ["out"])], {})
    model.graph[0].op_type = "NoSuchOperator"

    with pytest.raises(ModelError, match=r"onnxruntime cannot load the model: .*NoSuchOperator"):
        observe.Observer(model)


def test_too_little_memory_says_how_much_is_needed(residual_model: ir.Model) -> None:
    with pytest.raises(DeviceError, match=r"at least \d+ MiB are needed, \d+ MiB of which are.* allowed: 48 MiB"):
        observe.Observer(residual_model, memory=50_000_000)


def test_scarce_memory_means_fewer_workers(residual_model: ir.Model) -> None:
    plenty = observe.Observer(residual_model, workers=12, memory=PLENTY).layout

    scarce = observe.Observer(residual_model, workers=12, memory=plenty.peak_bytes - 5 * observe.PICTURE_BYTES).layout

    assert plenty.workers == 12
    assert 2 < scarce.workers < 10
    assert scarce.peak_bytes < plenty.peak_bytes


def test_scarce_memory_means_more_segments_before_fewer_workers(data: Path) -> None:
    model = graph.load(data / "models" / "yolox_nano.onnx")
    ir.passes.common.ShapeInferencePass()(model)
    plenty = observe.Observer(model, workers=2, memory=PLENTY, arena_bytes=PLENTY).layout

    scarce = observe.Observer(model, workers=2, memory=plenty.peak_bytes - (150 << 20), arena_bytes=PLENTY).layout

    assert (plenty.workers, plenty.segments) == (2, 1)
    assert scarce.workers == 2
    assert scarce.segments > 1
    assert scarce.peak_bytes <= plenty.peak_bytes - (150 << 20)
    assert segments.cut(model, observe.activations(model)[1], most_bytes=PLENTY).arena_bytes == plenty.arena_bytes


PROGRAM = """
import json, sys
import numpy as np, onnx_ir as ir
from onnx import helper
from calibration import observe
names = [f"t{n}" for n in range(21)]
nodes = [helper.make_node("Tanh" if n % 2 else "Neg", names[n:n + 1], names[n + 1:n + 2]) for n in range(20)]
info = [helper.make_tensor_value_info(name, 1, (1, 16, 128, 128)) for name in names]
graph = helper.make_graph(nodes, "deep", info[:1], info[-1:], value_info=info[1:-1])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
observer = observe.Observer(ir.from_proto(model), workers=2, arena_bytes=4 << 20)
picture = np.random.default_rng(0).random((1, 16, 128, 128), np.float32)
def collect(index, histograms):
    for histogram in histograms.values():
        histogram.drain_into(observe.Histogram())
observer.run(range(int(sys.argv[1])), lambda: lambda index: {"t0": picture}, collect)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps([int(status["VmHWM"].split()[0]) * 1024, observer.layout.peak_bytes, observer.layout.segments]))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read from Linux's /proc")
def test_memory_does_not_depend_on_the_number_of_pictures_and_stays_under_the_estimate() -> None:
    def measured(pictures: int) -> list[int]:
        done = subprocess.run([sys.executable, "-c", PROGRAM, str(pictures)], check=True, capture_output=True)
        return json.loads(done.stdout)

    (few, _, _), (many, estimate, pieces) = measured(8), measured(40)

    assert many < 1.1 * few
    assert many < estimate
    assert pieces > 5


def test_a_model_without_inputs_is_evaluated(build_model: Callable[..., ir.Model]) -> None:
    model = build_model([node("Add", ["a", "a"], ["out"]), node("Neg", ["a"], ["less"])], {"a": np.float32([1, 2])})
    model.graph.inputs.clear()
    model.graph.outputs.append(model.graph[1].outputs[0])

    found = observe.evaluate(ir.to_proto(model).SerializeToString())

    assert {name: array.tolist() for name, array in found.items()} == {"out": [2, 4], "less": [-1, -2]}


def test_a_model_that_cannot_be_evaluated_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="onnxruntime cannot load the model"):
        observe.evaluate(b"no model")


class TestAvailableMemory:
    @pytest.fixture
    def machine(self, tmp_path: Path) -> Callable[..., Path]:
        """A root folder with 8 GiB available, and files of control groups."""

        def build(cgroup: str | None, **files: str) -> Path:
            (tmp_path / "proc/self").mkdir(parents=True)
            meminfo = "MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\nHugePages_Total:       0\n"
            (tmp_path / "proc/meminfo").write_text(meminfo)
            if cgroup is not None:
                (tmp_path / "proc/self/cgroup").write_text(cgroup)
            for name, text in files.items():
                path = tmp_path / "sys/fs/cgroup" / name.replace("__", "/").replace("memory_", "memory.")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            return tmp_path

        return build

    def test_without_control_groups_it_is_what_the_machine_has(self, machine: Callable[..., Path]) -> None:
        assert observe.available_bytes(machine(None)) == 8 << 30

    def test_a_group_without_a_limit_limits_nothing(self, machine: Callable[..., Path]) -> None:
        root = machine("0::/user\n", user__memory_max="max\n", user__memory_current="5\n", user__memory_stat="anon 5\n")

        assert observe.available_bytes(root) == 8 << 30

    def test_the_group_around_the_process_limits_it_too(self, machine: Callable[..., Path]) -> None:
        root = machine(
            "0::/box/job\n",
            box__job__memory_max="max\n",
            box__memory_max=f"{3 << 30}\n",
            box__memory_current=f"{2 << 30}\n",
            box__memory_stat=f"anon {1 << 30}\ninactive_file {1 << 29}\n",
        )

        assert observe.available_bytes(root) == (1 << 30) + (1 << 29)

    def test_the_first_version_of_control_groups_counts_as_well(self, machine: Callable[..., Path]) -> None:
        root = machine(
            "7:cpu,cpuacct:/docker/1\n4:memory:/docker/1\n0::/\n",
            memory__memory_limit_in_bytes=f"{1 << 30}\n",
            memory__memory_usage_in_bytes=f"{1 << 29}\n",
            memory__memory_stat="cache 1\ntotal_inactive_file 4096\n",
        )

        assert observe.available_bytes(root) == (1 << 29) + 4096

    def test_a_group_that_is_over_its_limit_leaves_nothing(self, machine: Callable[..., Path]) -> None:
        root = machine("0::/\n", memory_max="1000\n", memory_current="2000\n", memory_stat="inactive_file 0\n")

        assert observe.available_bytes(root) == 0

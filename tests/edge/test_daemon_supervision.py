"""A daemon whose parts fail, hang, are swapped and reloaded while its streams go on: real threads and broker."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from edge import config
from edge.daemon import run
from edge.errors import ConfigError, DeviceLostError, HungError, ModelError
from edge.types import Detection, Latency, Result

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Self

    from edge.types import Frame

pytestmark = pytest.mark.broker


class FakePipeline:
    """Finds one object in each frame, of the class that the model's name ends in."""

    precision = "fp32"
    depth = 1
    input_wh = (64, 48)

    def __init__(self, name: str, look: Callable[[Frame], None] = lambda _frame: None) -> None:
        self.name = name
        self.digest = f"{name:0<64}"
        self.description = f"fake {name}"
        self._look = look
        self._begun: deque[Frame] = deque()

    def warm_up(self) -> None:
        pass

    def begin(self, frame: Frame) -> None:
        self._begun.append(frame)

    def finish(self) -> Result:
        frame = self._begun.popleft()
        self._look(frame)
        return Result(frame, self.name, [Detection("it", 0, 0.5, (0, 0, 8, 8))], Latency(0.1, 0.2, 0.3, 0.4))


@contextmanager
def opened(model: config.Model) -> Iterator[FakePipeline]:
    yield FakePipeline(model.name)


def digest_of(model: config.Model) -> str:
    return f"{model.name:0<64}"


def deployment(port: int, *, streams: tuple[str, ...] = ("gate",), model: str = "m0", **watch: Any) -> Any:
    return config.Deployment(
        version=1,
        device="dev",
        models=[
            config.Model(name=name, path=f"{name}.onnx", task=config.DetectionTask()) for name in ("m0", "m1", "m2")
        ],
        streams=[
            config.Stream(name=name, source=config.TestPattern(size=(64, 48), fps=50.0), model=model)
            for name in streams
        ],
        mqtt=config.Mqtt(port=port),
        monitor=config.Monitor(jtop="off", telemetry_s=1.0),
        governor=config.Governor(enabled=False),
        status=config.Status(port=None),
        watch=config.Watch(**watch),
    )


class Running:
    """A daemon in a thread of its own."""

    def __init__(self, section: Any, **options: Any) -> None:
        self.stop, self.reload_wanted = threading.Event(), threading.Event()
        self.error: BaseException | None = None
        self.summary: Any = None
        self.told: list[str] = []
        self._options = {"open_model": opened, "digest_of": digest_of, "notify": self._notify, **options}
        self._thread = threading.Thread(target=self._run, args=(section,))

    def _run(self, section: Any) -> None:
        try:
            self.summary = run(section, stop=self.stop, reload_wanted=self.reload_wanted, **self._options)
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            self.error = error

    def _notify(self, *texts: str) -> None:
        self.told.extend(texts)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.join()

    def join(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive()


def kinds(subscriber: Any) -> list[str]:
    return [msgspec.json.decode(payload)["kind"] for payload in subscriber.payloads("/events")]


def test_an_engine_that_fails_is_opened_again_and_its_streams_go_on(broker: Any, ears: Any, wait_until: Any) -> None:
    lives: list[int] = []

    def look(_frame: Frame) -> None:
        if len(lives) == 1:
            raise ModelError("out of sorts")

    @contextmanager
    def ailing(model: config.Model) -> Iterator[FakePipeline]:
        lives.append(1)
        yield FakePipeline(model.name, look)

    with ears(broker.port) as subscriber, Running(deployment(broker.port), open_model=ailing) as daemon:
        wait_until(lambda: len(subscriber.results()) > 3, "results of the second life")

        assert "part_failed" in kinds(subscriber)
    assert daemon.error is None
    assert len(lives) == 2
    assert daemon.summary.frames_failed == 20
    books = daemon.summary
    assert books.frames_captured == books.frames_inferred + books.frames_failed + books.frames_dropped


def test_an_engine_that_does_not_come_back_ends_the_process(broker: Any, ears: Any, wait_until: Any) -> None:
    hung = threading.Event()

    def look(frame: Frame) -> None:
        if frame.index > 5:
            hung.wait(60)

    @contextmanager
    def hanging(model: config.Model) -> Iterator[FakePipeline]:
        yield FakePipeline(model.name, look)

    options = {"open_model": hanging, "environ": {"WATCHDOG_USEC": "200000"}}
    with ears(broker.port) as subscriber, Running(deployment(broker.port, hang_s=1.0), **options) as daemon:
        wait_until(lambda: daemon.error is not None, "the end")
        wait_until(lambda: "engine_hung" in kinds(subscriber), "the event, delivered before the end")
        hung.set()

        assert len(subscriber.results()) >= 1
    assert isinstance(daemon.error, HungError)
    assert int(daemon.error.exit_code) == 79
    assert str(daemon.error).startswith("model m0: a frame has been with the engine for 1 s")
    assert "WATCHDOG=1" in daemon.told


def test_a_lost_gpu_ends_the_process_at_once(broker: Any) -> None:
    def look(frame: Frame) -> None:
        if frame.index > 2:
            raise DeviceLostError("CUDA error 719")

    @contextmanager
    def losing(model: config.Model) -> Iterator[FakePipeline]:
        yield FakePipeline(model.name, look)

    with Running(deployment(broker.port), open_model=losing) as daemon:
        daemon.join()
    assert isinstance(daemon.error, DeviceLostError)


def test_a_stop_does_not_wait_for_an_engine_that_hangs(broker: Any, wait_until: Any) -> None:
    hung, reached = threading.Event(), threading.Event()

    def look(frame: Frame) -> None:
        if frame.index > 2:
            reached.set()
            hung.wait(60)

    @contextmanager
    def hanging(model: config.Model) -> Iterator[FakePipeline]:
        yield FakePipeline(model.name, look)

    with Running(deployment(broker.port), open_model=hanging, drain_s=1.0) as daemon:
        assert reached.wait(20)
        daemon.stop.set()
        wait_until(lambda: daemon.summary is not None, "the end")
        hung.set()

    assert daemon.summary.stuck == ("infer-m0",)


def test_a_reload_swaps_the_model_and_every_stream_goes_on(broker: Any, ears: Any, wait_until: Any) -> None:
    before, after = deployment(broker.port), deployment(broker.port)
    after = msgspec.structs.replace(
        after,
        models=[msgspec.structs.replace(after.models[0], path="other.onnx"), *after.models[1:]],
    )

    @contextmanager
    def open_model(model: config.Model) -> Iterator[FakePipeline]:
        yield FakePipeline(model.path.removesuffix(".onnx"))

    with (
        ears(broker.port) as subscriber,
        Running(before, open_model=open_model, load=lambda: after) as daemon,
    ):
        wait_until(subscriber.results, "results of the old model")
        daemon.reload_wanted.set()
        wait_until(lambda: subscriber.results()[-1]["model"]["digest"].startswith("other"), "results of the new one")
        wait_until(lambda: "reload_done" in kinds(subscriber), "the event")
        wait_until(
            lambda: any(model["digest"].startswith("other") for model in subscriber.statuses()[-1].get("models", [])),
            "a status that names the new model",
        )
        results = list(subscriber.results())

    assert daemon.error is None
    digests = [result["model"]["digest"][:2] for result in results]
    assert digests == sorted(digests)  # the old one, then the new one: m0 sorts before ot
    frames = [result["frame_id"] for result in results]
    assert frames == sorted(set(frames))  # one capture, and never two engines on one stream
    assert daemon.told.count("READY=1") == 2
    assert "RELOADING=1" in daemon.told
    books = daemon.summary
    assert books.frames_captured == books.frames_inferred + books.frames_failed + books.frames_dropped


def test_a_model_that_cannot_be_loaded_leaves_the_old_one_at_work(broker: Any, ears: Any, wait_until: Any) -> None:
    after = deployment(broker.port, model="m1")

    @contextmanager
    def open_model(model: config.Model) -> Iterator[FakePipeline]:
        if model.name == "m1":
            raise ModelError("m1.onnx: is not a model")
        yield FakePipeline(model.name)

    with (
        ears(broker.port) as subscriber,
        Running(deployment(broker.port), open_model=open_model, load=lambda: after) as daemon,
    ):
        wait_until(subscriber.results, "results")
        daemon.reload_wanted.set()
        wait_until(lambda: "reload_failed" in kinds(subscriber), "the refusal")
        count = len(subscriber.results())
        wait_until(lambda: len(subscriber.results()) > count + 5, "more results of the old model")

        assert {result["model"]["name"] for result in subscriber.results()} == {"m0"}
    assert daemon.error is None
    assert any("last reload refused: m1.onnx: is not a model" in text for text in daemon.told)


def test_a_file_with_mistakes_is_refused_with_all_of_them(broker: Any, ears: Any, wait_until: Any) -> None:
    def load() -> Any:
        raise ConfigError(["mine.yaml:3: modls: is not a known key", "mine.yaml:9: fps: is 'x'; expected a number"])

    with ears(broker.port) as subscriber, Running(deployment(broker.port), load=load) as daemon:
        wait_until(subscriber.results, "results")
        daemon.reload_wanted.set()
        wait_until(lambda: "reload_failed" in kinds(subscriber), "the refusal")
        events = [msgspec.json.decode(payload) for payload in subscriber.payloads("/events")]

    assert daemon.error is None
    (refusal,) = [event for event in events if event["kind"] == "reload_failed"]
    assert refusal["text"] == "reload: refused, what ran goes on: mine.yaml:3: modls: is not a known key (and 1 more)"
    assert len(refusal["fields"]["problems"]) == 2


def test_streams_come_and_go_with_a_reload(broker: Any, ears: Any, wait_until: Any) -> None:
    after = [deployment(broker.port, streams=("yard", "roof"), model="m0")]

    def streams_heard(since: int) -> set[str]:
        return {result["stream"] for result in subscriber.results()[since:]}

    with (
        ears(broker.port) as subscriber,
        Running(deployment(broker.port, streams=("gate", "yard")), load=lambda: after[0]) as daemon,
    ):
        wait_until(lambda: streams_heard(0) == {"gate", "yard"}, "both streams")
        daemon.reload_wanted.set()
        wait_until(lambda: "roof" in streams_heard(0), "the new stream")
        time.sleep(0.2)  # what of the old one was on its way
        count = len(subscriber.results())
        wait_until(lambda: streams_heard(count) == {"yard", "roof"}, "the new pair")
        after[0] = deployment(broker.port, streams=("yard",), model="m2")
        daemon.reload_wanted.set()
        wait_until(lambda: subscriber.results()[-1]["model"]["name"] == "m2", "another model")

    assert daemon.error is None
    yard = [
        result["frame_id"]
        for result in subscriber.results()
        if result["stream"] == "yard" and result["model"]["name"] == "m0"
    ]
    assert yard == sorted(set(yard))
    books = daemon.summary
    assert books.frames_captured == books.frames_inferred + books.frames_failed + books.frames_dropped
    assert books.results_published == books.frames_inferred


def test_a_changed_broker_is_told_to_need_a_restart(broker: Any, ears: Any, wait_until: Any) -> None:
    after = deployment(broker.port)
    after = msgspec.structs.replace(after, mqtt=config.Mqtt(port=broker.port, keepalive_s=99))

    with ears(broker.port) as subscriber, Running(deployment(broker.port), load=lambda: after) as daemon:
        wait_until(subscriber.results, "results")
        daemon.reload_wanted.set()
        wait_until(lambda: "reload_done" in kinds(subscriber), "the event")
        events = [msgspec.json.decode(payload) for payload in subscriber.payloads("/events")]

    (done,) = [event for event in events if event["kind"] == "reload_done"]
    assert done["text"].endswith("changes of mqtt take effect when the service is restarted")
    assert done["severity"] == "warning"
    assert daemon.error is None


def test_a_slow_engine_keeps_its_latency_and_counts_what_it_could_not_do(broker: Any) -> None:
    """An engine of a tenth of the camera's rate: each result is of a frame that had just arrived."""
    ages: list[float] = []

    def look(frame: Frame) -> None:
        time.sleep(0.2)
        ages.append(time.monotonic() - frame.captured_at_s)

    @contextmanager
    def slow(model: config.Model) -> Iterator[FakePipeline]:
        yield FakePipeline(model.name, look)

    summary = run(deployment(broker.port), open_model=slow, duration_s=4.0)

    assert summary.frames_dropped_by["overload"] > 0
    assert summary.frames_captured == summary.frames_inferred + summary.frames_dropped
    # Age grows with the queue where there is one: the last results are not older than the first.
    half = len(ages) // 2
    assert sum(ages[half:]) / len(ages[half:]) < 2 * sum(ages[:half]) / half

"""The daemon in this process: real threads, sources and broker; a model only where the test is about one."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from contextlib import contextmanager
from importlib import resources
from typing import TYPE_CHECKING, Any

import cv2
import jsonschema
import numpy as np
import pytest

from edge import config
from edge.daemon import run
from edge.errors import BrokenPartError, ConfigError, DataError, ModelError, ServiceError
from edge.types import Detection, Latency, Result

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from edge.types import Frame


class FakePipeline:
    """Finds one object in each frame, whose class is the frame's grey level."""

    digest = "0123456789abcdef" * 4
    precision = "fp32"
    depth = 1
    input_wh = (8, 8)

    def __init__(self, look: Callable[[Frame], None] = lambda _frame: None) -> None:
        self.warm = False
        self._begun: deque[Frame] = deque()
        self._look = look

    @property
    def description(self) -> str:
        return "fake"

    def warm_up(self) -> None:
        self.warm = True

    def begin(self, frame: Frame) -> None:
        assert self.warm
        self._begun.append(frame)
        assert len(self._begun) <= self.depth

    def finish(self) -> Result:
        frame = self._begun.popleft()
        self._look(frame)
        grey = int(frame.image[0, 0, 0])
        return Result(frame, "fake", [Detection("grey", grey, 0.5, (0, 0, 8, 8))], Latency(0.1, 0.2, 0.3, 0.4))


@contextmanager
def opened(_model: config.Model) -> Iterator[FakePipeline]:
    yield FakePipeline()


def looking(look: Callable[[Frame], None]) -> Any:
    @contextmanager
    def open_model(_model: config.Model) -> Iterator[FakePipeline]:
        yield FakePipeline(look)

    return open_model


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder of ten grey pictures."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for index in range(10):
        assert cv2.imwrite(str(folder / f"{index}.png"), np.full((8, 8, 3), index, np.uint8))
    return folder


def deployment(
    port: int,
    pictures: Path,
    *,
    streams: int = 1,
    models: int = 1,
    loop: bool = False,
    fps: float = 50,
    outbox: Any = None,
    watch: config.Watch | None = None,
) -> config.Deployment:
    task = config.DetectionTask()
    return config.Deployment(
        version=1,
        device="dev",
        models=[config.Model(name=f"m{index}", path="none.onnx", task=task) for index in range(models)],
        streams=[
            config.Stream(
                name=f"s{index}",
                source=config.Folder(path=str(pictures), fps=fps, loop=loop),
                model=f"m{index % models}",
            )
            for index in range(streams)
        ],
        mqtt=config.Mqtt(port=port, outbox=config.Outbox(path=outbox and str(outbox))),
        monitor=config.Monitor(jtop="off"),
        governor=config.Governor(enabled=False),
        status=config.Status(port=None),
        watch=watch or config.Watch(),
    )


def validate(name: str, messages: list[dict[str, Any]]) -> None:
    schema = json.loads(resources.files("edge.publish").joinpath(f"schemas/{name}.schema.json").read_text())
    for message in messages:
        jsonschema.validate(message, schema, cls=jsonschema.Draft202012Validator)


@pytest.mark.broker
def test_a_folder_that_ends_is_delivered_to_its_last_picture(
    broker: Any, ears: Any, wait_until: Any, pictures: Path
) -> None:
    told: list[str] = []
    with ears(broker.port) as subscriber:
        summary = run(deployment(broker.port, pictures), open_model=opened, notify=lambda *texts: told.extend(texts))
        wait_until(lambda: len(subscriber.statuses()) >= 2, "both statuses")

        results, statuses = subscriber.results(), subscriber.statuses()
    validate("result", results)
    validate("status", statuses)
    assert summary.frames_captured == 10
    assert summary.frames_inferred == 10 - summary.frames_dropped == len(results)
    assert (summary.results_published, summary.results_acknowledged) == (len(results), len(results))
    assert (summary.results_left, summary.results_dropped, summary.frames_failed) == (0, 0, 0)
    assert summary.latency_ms == {"p50": 1.0, "p95": 1.0, "p99": 1.0}
    assert [result["objects"][0]["class_id"] for result in results] == [result["frame_id"] for result in results]
    assert results[-1]["image"] == {"width": 8, "height": 8, "name": "9.png"}
    ids = [result["id"] for result in results]
    assert ids == sorted(set(ids))
    assert [status["state"] for status in statuses] == ["online", "offline"]
    assert statuses[0]["models"] == [{"name": "m0", "precision": "fp32", "digest": "0123456789ab"}]
    states = [text for text in told if not text.startswith(("STATUS=loading", "EXTEND_TIMEOUT_USEC="))]
    assert states == ["READY=1", "STATUS=running 1 streams", "STOPPING=1", "STATUS=draining"]


@pytest.mark.broker
def test_streams_share_models_and_none_is_starved(broker: Any, pictures: Path) -> None:
    seen: list[str] = []

    def look(frame: Frame) -> None:
        seen.append(frame.stream)
        time.sleep(0.005)

    stop = threading.Event()

    def wait_for_all() -> None:
        while min(seen.count(f"s{index}") for index in range(5)) < 4 and not stop.wait(0.01):
            pass
        stop.set()

    watcher = threading.Thread(target=wait_for_all)
    watcher.start()
    summary = run(
        deployment(broker.port, pictures, streams=5, models=2, loop=True, fps=500), stop=stop, open_model=looking(look)
    )
    watcher.join(10)

    assert summary.frames_inferred == len(seen) >= 20
    assert summary.frames_dropped > 0  # a thousand frames a second came, and the newest of each stream won
    assert summary.frames_captured == summary.frames_inferred + summary.frames_dropped


@pytest.mark.broker
def test_a_frame_that_cannot_be_processed_is_skipped_and_counted(
    broker: Any, pictures: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def look(frame: Frame) -> None:
        if frame.name == "3.png":
            raise ModelError("cannot make sense of it")

    # Slow enough that no picture is dropped on a busy machine, fast enough for a test.
    summary = run(deployment(broker.port, pictures, fps=10), open_model=looking(look))

    assert summary.frames_failed == 1
    assert summary.frames_inferred + summary.frames_dropped == 9
    assert "stream s0, frame 3.png: skipped: cannot make sense of it" in caplog.text


@pytest.mark.broker
def test_a_model_that_fails_on_every_frame_ends_the_daemon(broker: Any, pictures: Path) -> None:
    def look(_frame: Frame) -> None:
        raise ModelError("outputs are not finite")

    once = config.Watch(restarts=0)
    with pytest.raises(
        BrokenPartError, match=r"infer-m0: failed 1 times within 300 s, last with: outputs are not finite"
    ):
        run(deployment(broker.port, pictures, loop=True, fps=500, watch=once), open_model=looking(look))


def test_a_model_that_cannot_be_loaded_ends_the_start_before_ready(free_port: Any, pictures: Path) -> None:
    def broken(_model: config.Model) -> Any:
        raise ModelError("m0.onnx: is not a model")

    told: list[str] = []
    with pytest.raises(ModelError, match="is not a model"):
        run(deployment(free_port(), pictures), open_model=broken, notify=lambda *texts: told.extend(texts))
    assert not any(text.startswith("READY") for text in told)


@pytest.mark.broker
def test_a_folder_that_is_emptied_does_not_end_the_daemon(
    broker: Any, ears: Any, wait_until: Any, pictures: Path
) -> None:
    def look(_frame: Frame) -> None:
        for path in pictures.iterdir():
            path.unlink()

    with ears(broker.port) as subscriber:
        summary = run(deployment(broker.port, pictures, loop=True), open_model=looking(look), duration_s=1.0)
        wait_until(lambda: subscriber.statuses()[-1]["state"] == "offline", "the farewell")

        assert subscriber.results()  # what was found before is delivered
    assert summary.results_left == 0


def test_a_run_whose_results_nobody_takes_says_where_they_wait(free_port: Any, pictures: Path, tmp_path: Path) -> None:
    port, outbox = free_port(), tmp_path / "outbox.db"

    with pytest.raises(ServiceError) as caught:
        run(deployment(port, pictures, outbox=outbox), open_model=opened)
    with pytest.raises(ServiceError, match=r"results were kept in memory only and are lost; set mqtt\.outbox\.path"):
        run(deployment(port, pictures), open_model=opened)

    text = str(caught.value)
    assert text.startswith(f"MQTT broker 127.0.0.1:{port} cannot be reached (Connection refused); ")
    assert text.endswith(f" results wait in {outbox}")
    assert "\n" not in text


def test_a_service_that_is_stopped_without_a_broker_ends_well(
    free_port: Any, pictures: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stop = threading.Event()

    summary = run(
        deployment(free_port(), pictures, loop=True), stop=stop, open_model=looking(lambda _frame: stop.set())
    )

    assert summary.results_left > 0
    assert "results were kept in memory only" in caplog.text


@pytest.mark.broker
def test_what_an_earlier_run_left_is_delivered_first(
    make_broker: Any, ears: Any, pictures: Path, tmp_path: Path, wait_until: Any
) -> None:
    late = make_broker()
    section = deployment(late.port, pictures, outbox=tmp_path / "outbox.db")
    with pytest.raises(ServiceError):
        run(section, open_model=opened)
    late.start()

    with ears(late.port) as subscriber:
        summary = run(section, open_model=opened)
        wait_until(lambda: len(subscriber.results()) >= summary.results_acknowledged, "both runs' results")

        ids = [result["id"] for result in subscriber.results()]
    assert summary.results_acknowledged > summary.results_published
    assert summary.results_left == 0
    assert ids == sorted(set(ids))


def test_stop_during_the_start_ends_it(free_port: Any, pictures: Path) -> None:
    stop = threading.Event()

    @contextmanager
    def slow(_model: config.Model) -> Iterator[FakePipeline]:
        stop.set()
        yield FakePipeline()

    told: list[str] = []
    summary = run(
        deployment(free_port(), pictures, loop=True),
        stop=stop,
        open_model=slow,
        notify=lambda *texts: told.extend(texts),
    )

    assert summary.results_published == 0
    assert "READY=1" not in told


def test_a_deployment_without_streams_is_refused(free_port: Any, pictures: Path) -> None:
    with pytest.raises(ConfigError, match="streams: is empty"):
        run(deployment(free_port(), pictures, streams=0), open_model=opened)


def test_a_missing_folder_is_named_by_its_key_before_a_model_is_loaded(free_port: Any, tmp_path: Path) -> None:
    def never(_model: config.Model) -> Any:
        raise AssertionError

    with pytest.raises(DataError, match=r"^streams\[0\]\.source\.path: .*gone: no such folder"):
        run(deployment(free_port(), tmp_path / "gone"), open_model=never)


@pytest.mark.broker
def test_the_whole_journey_with_a_real_model(
    broker: Any, ears: Any, wait_until: Any, data: Path, deployment_file: Any
) -> None:
    """YOLOX finds what COCO's annotators saw on the first photograph: a man behind a motorcycle."""
    path = deployment_file(f"""
version: 1
device: dev
models:
  - name: yolox
    path: {data}/models/yolox_nano.onnx
    task: {{type: detection, labels: coco80}}
    input: {{anchor: top-left, color: bgr, divide_by: 1}}
    engine: {{precision: fp32}}
streams:
  - name: yard
    source: {{type: folder, path: {data}/images, fps: 4, loop: false}}
mqtt: {{port: {broker.port}}}
""")
    with ears(broker.port) as subscriber:
        summary = run(config.load(path), duration_s=1.0)
        wait_until(lambda: len(subscriber.results()) == summary.results_acknowledged, "all results")

        results = subscriber.results()
    validate("result", results)
    assert len(results) == summary.frames_inferred > 0
    assert summary.results_left == 0
    first = results[0]
    assert first["image"] == {"name": "000000000086.jpg", "width": 512, "height": 640}
    assert {"person", "motorcycle"} <= {found["label"] for found in first["objects"]}
    assert first["model"]["digest"] == "695e750a5d57"

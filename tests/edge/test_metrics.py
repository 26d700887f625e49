"""Metrics: what Prometheus reads, by its own parsers, and names as its ecosystem expects them."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from edge import metrics
from edge.status import Snapshot
from tests.edge import snapshots

PAGE = Path(__file__).parents[2] / "docs" / "observability.md"
MAKERS = (snapshots.snapshot, snapshots.new, snapshots.troubled)
UNITS = {"seconds", "bytes", "celsius", "watts", "hertz", "ratio", "fps"}
# Gauges that have no unit: a truth, a count or a choice.
UNITLESS = {
    "edge_daemon_state",
    "edge_dla_active",
    "edge_frames_waiting",
    "edge_governor_mode",
    "edge_healthy",
    "edge_jetson_clocks",
    "edge_jtop_connected",
    "edge_model_loaded",
    "edge_mqtt_connected",
    "edge_part_up",
    "edge_ready",
    "edge_results_pending",
    "edge_stream_state",
    "edge_stream_up",
    "edge_throttling",
}


def samples(snapshot: Snapshot) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample by name and labels, as Prometheus's own parser reads them."""
    families = text_string_to_metric_families(metrics.render(snapshot).decode())
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def value(snapshot: Snapshot, name: str, **labels: str) -> float | None:
    return samples(snapshot).get((name, frozenset(labels.items())))


def test_frames_are_counted_by_what_became_of_them() -> None:
    found = snapshots.snapshot()

    def frames(**labels: str) -> float | None:
        return value(found, "edge_frames_total", stream="belt", **labels)

    assert frames(outcome="inferred", reason="") == 600
    assert frames(outcome="failed", reason="") == 1
    assert frames(outcome="dropped", reason="overload") == 100
    assert frames(outcome="dropped", reason="governor") == 298
    assert frames(outcome="dropped", reason="stopped") == 0, "there from the start, so that rate() sees the first"
    assert value(found, "edge_frames_captured_total", stream="belt") == 1000
    assert value(found, "edge_frames_waiting", stream="belt") == 1


def test_histograms_are_cumulative() -> None:
    found = samples(snapshots.snapshot())

    buckets = {
        dict(labels)["le"]: count
        for (name, labels), count in found.items()
        if name == "edge_frame_latency_seconds_bucket"
    }
    assert buckets == {"0.01": 0, "0.05": 400, "0.1": 590, "0.5": 600, "+Inf": 600}
    stream = frozenset({("stream", "belt")})
    assert found["edge_frame_latency_seconds_count", stream] == 600
    assert found["edge_frame_latency_seconds_sum", stream] == 33.5


def test_units_are_base_units() -> None:
    found = snapshots.snapshot()

    assert value(found, "edge_power_watts", rail="VDD_IN") == 14.21
    assert value(found, "edge_gpu_load_ratio") == pytest.approx(0.713)
    assert value(found, "edge_fan_ratio") == 1
    assert value(found, "edge_memory_pressure_ratio", tasks="some") == 0.015
    assert value(found, "edge_start_time_seconds") == snapshots.STARTED_AT_UTC_US / 1e6
    assert value(found, "edge_temperature_celsius", zone="tj") == 84.2


def test_states_are_one_of_all_that_there_are() -> None:
    found = samples(snapshots.troubled())

    modes = {
        dict(labels)["edge_governor_mode"]: on for (name, labels), on in found.items() if name == "edge_governor_mode"
    }
    assert modes == {"off": 0, "full": 0, "limited": 0, "lighter": 0, "paused": 1}


def test_what_is_not_known_has_no_sample() -> None:
    names = {name for name, _ in samples(snapshots.new())}

    assert not any("temperature" in name or "memory" in name for name in names)
    assert not {"edge_model_info", "edge_rate_limit_fps", "edge_stream_last_frame_age_seconds"} & names
    assert value(snapshots.new(), "edge_model_loaded", model="yolox") == 0
    assert value(snapshots.snapshot(), "edge_rate_limit_fps", model="yolox") == 20
    assert value(snapshots.troubled(), "edge_rate_limit_fps", model="yolox") == 0, "a pause, not absence"


def test_verdicts() -> None:
    assert (value(snapshots.snapshot(), "edge_healthy"), value(snapshots.snapshot(), "edge_ready")) == (1, 1)
    assert (value(snapshots.new(), "edge_healthy"), value(snapshots.new(), "edge_ready")) == (1, 0)
    assert (value(snapshots.troubled(), "edge_healthy"), value(snapshots.troubled(), "edge_ready")) == (0, 0)


def test_labels_are_escaped() -> None:
    assert value(snapshots.troubled(), "edge_stream_up", stream='gate "<b>north</b>"\\') == 0


def test_counters_agree_with_each_other() -> None:
    found = snapshots.snapshot()

    published, taken_up = (value(found, f"edge_results_{name}_total") for name in ("published", "taken_up"))
    acknowledged, dropped = (value(found, f"edge_results_{name}_total") for name in ("acknowledged", "dropped"))
    assert None not in {published, taken_up, acknowledged, dropped}
    assert published + taken_up == acknowledged + dropped + value(found, "edge_results_pending")  # type: ignore[operator]


@pytest.mark.parametrize("metric", metrics.CATALOGUE, ids=lambda metric: metric.name)
def test_names_keep_the_conventions(metric: metrics.Metric) -> None:
    assert re.fullmatch(r"edge(_[a-z]+)+", metric.name)
    assert metric.name.endswith("_total") == (metric.type == "counter")
    assert metric.name.endswith("_info") == (metric.type == "info")
    assert (metric.type == "stateset") == bool(metric.states)
    if metric.type in {"gauge", "stateset", "histogram"}:
        assert (metric.name.rsplit("_", 1)[-1] in UNITS) != (metric.name in UNITLESS)
    assert metric.help.endswith(".")
    assert metric.help[0].isupper() or metric.help[0].isdigit()
    assert all(
        re.fullmatch(r"[a-z_]+", label) and label not in {"le", "quantile", "job", "instance"}
        for label in metric.labels
    )


def test_every_metric_is_there_once_with_help_and_type() -> None:
    names = [metric.name for metric in metrics.CATALOGUE]
    text = metrics.render(snapshots.snapshot(reading=snapshots.reading())).decode()

    assert len(set(names)) == len(names)
    assert re.findall(r"^# HELP (\w+) ", text, re.MULTILINE) == names
    assert re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE) == names


@pytest.mark.parametrize("make", MAKERS)
def test_labels_are_those_of_the_catalogue(make: Callable[[], Snapshot]) -> None:
    known = {
        metric.name: set(metric.labels) | ({metric.name} if metric.states else set()) for metric in metrics.CATALOGUE
    }

    for name, labels in samples(make()):
        base = re.sub(r"_(bucket|sum|count)$", "", name) if name not in known else name
        assert {label for label, _ in labels} - {"le"} == known[base]


def test_a_wrong_kind_of_value_is_said() -> None:
    broken = metrics.Metric("edge_x_total", "counter", "X.", (), lambda _: [((), "many")])

    with pytest.raises(TypeError, match="edge_x is a counter, and 'many' no value"):
        metrics._family(broken, snapshots.snapshot())  # noqa: SLF001


def test_the_documentation_has_the_whole_catalogue() -> None:
    text = PAGE.read_text(encoding="utf-8")

    assert metrics.table() in text, (
        "replace the table in docs/observability.md by: python -c 'from edge import metrics; print(metrics.table())'"
    )
    known = {metric.name for metric in metrics.CATALOGUE}
    mentioned = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\bedge_[a-z_]+[a-z]\b", text)}
    assert mentioned - {"edge_events"} <= known


@pytest.mark.parametrize("make", MAKERS)
def test_promtool_has_nothing_to_say(make: Callable[[], Snapshot]) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed; apt-get install prometheus")

    done = subprocess.run(
        [program, "check", "metrics"], input=metrics.render(make()), capture_output=True, timeout=60, check=False
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")

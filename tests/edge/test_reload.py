"""What a changed file means. That the daemon follows it is test_daemon_reload.py's."""

from __future__ import annotations

from edge import config
from edge.reload import compare


def deployment(*streams: tuple[str, str, float], device: str = "dev") -> config.Deployment:
    task = config.DetectionTask()
    return config.Deployment(
        version=1,
        device=device,
        models=[config.Model(name=name, path="none.onnx", task=task) for name in ("a", "b", "c")],
        streams=[
            config.Stream(name=name, source=config.TestPattern(fps=fps), model=model) for name, model, fps in streams
        ],
    )


def test_the_same_file_changes_nothing() -> None:
    same = deployment(("gate", "a", 5), ("yard", "b", 5))
    changes = compare(same, same)

    assert (changes.stop, changes.start, changes.later) == ((), (), ())
    assert changes.keep == ("gate", "yard")
    assert changes.models == ("a", "b")


def test_streams_end_begin_and_are_started_anew_with_another_source_or_model() -> None:
    changes = compare(
        deployment(("gone", "a", 5), ("kept", "a", 5), ("faster", "a", 5), ("moved", "a", 5)),
        deployment(("kept", "a", 5), ("faster", "a", 9), ("moved", "c", 5), ("new", "b", 5)),
    )

    assert changes.stop == ("gone", "faster", "moved")
    assert [stream.name for stream in changes.start] == ["faster", "moved", "new"]
    assert changes.keep == ("kept",)
    assert changes.models == ("a", "c", "b")


def test_a_stream_that_names_the_first_model_is_the_one_that_names_none() -> None:
    explicit, implicit = deployment(("gate", "a", 5)), deployment(("gate", "a", 5))
    implicit = config.Deployment(
        version=1,
        device="dev",
        models=implicit.models,
        streams=[config.Stream(name="gate", source=config.TestPattern(fps=5))],
    )

    assert compare(explicit, implicit).keep == ("gate",)


def test_what_only_a_restart_applies_is_named() -> None:
    assert compare(deployment(("gate", "a", 5)), deployment(("gate", "a", 5), device="other")).later == ("device",)

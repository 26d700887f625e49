from __future__ import annotations

import pytest

from calibration.diagnosis import diagnose, nodes_of
from calibration.events import Failed

NO_IMPLEMENTATION = (
    "IBuilder::buildSerializedNetwork: Error Code 10: Internal Error (Could not find any implementation for node {}.)"
)


def test_out_of_memory_is_told_from_what_follows_it():
    errors = [
        "[virtualMemoryBuffer.cpp::resizePhysical::144] Error Code 2: OutOfMemory (Requested size was 1234 bytes.)",
        NO_IMPLEMENTATION.format("conv1"),
    ]

    assert diagnose(errors, []).kind == "memory"


OUT_OF_MEMORY = "[virtualMemoryBuffer.cpp::resizePhysical::144] Error Code 2: OutOfMemory (no further information)"
SKIPPED = "Skipping tactic 3 due to insufficient memory on requested size of 1026048 detected for tactic 0x4."


def test_to_run_out_of_memory_early_is_not_why_a_build_fails():
    # NVIDIA/TensorRT issue 2643: both lines, again and again, of a build that succeeds
    later = ["Error Code 2: Internal Error (a)", "Error Code 2: Internal Error (b)", "Error Code 2: Internal Error (c)"]

    assert diagnose([OUT_OF_MEMORY, OUT_OF_MEMORY, *later], [SKIPPED, SKIPPED]) == Failed("build", later[-1])


def test_that_the_dla_refuses_a_layer_comes_before_a_want_of_memory():
    refusal = "Default DLA is enabled but layer fc is not supported on DLA and falling back to GPU is not enabled."

    assert diagnose([OUT_OF_MEMORY, refusal], [SKIPPED]).nodes == ("fc",)


def test_no_implementation_is_a_want_of_memory_where_tactics_were_skipped_for_it():
    # mmdeploy issue 1059, on a Jetson NX; the spelling is TensorRT's
    warnings = ["Skipping tactic 8 due to insuficient memory on requested size of 4364 detected for tactic 60."]

    assert diagnose([NO_IMPLEMENTATION.format("MaxPool_32")], warnings) == Failed(
        "memory", "there was too little memory for every implementation", ("MaxPool_32",)
    )
    assert diagnose([NO_IMPLEMENTATION.format("MaxPool_32")], []).kind == "unsupported"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("{ForeignNode[/model.0/conv/Conv.../model.23/Concat_2]}.)", ["/model.0/conv/Conv", "/model.23/Concat_2"]),
        ("Conv_119 + Add_182.)", ["Conv_119", "Add_182"]),
        ("/model.23/cv3/conv/Conv + PWN(PWN(/s), /m).)", ["/model.23/cv3/conv/Conv", "PWN(PWN(/s), /m)"]),
        ("conv1 due to insufficient workspace. See verbose log for requested sizes.)", ["conv1"]),
        ("{ForeignNode[only]}", ["only"]),
    ],
)
def test_names_of_engine_layers_become_names_of_layers(name, expected):
    assert nodes_of(name) == expected


@pytest.mark.parametrize(
    "text",
    [
        "Default DLA is enabled but layer /22/Div is not supported on DLA and falling back to GPU is not enabled.",
        "Error[4]: DLA Standalone is enabled but layer: '/22/Div' is not supported on DLA.",
    ],
)
def test_a_layer_that_the_dla_refuses_is_named(text):
    found = diagnose([text], [])

    assert (found.kind, found.nodes) == ("unsupported", ("/22/Div",))


def test_otherwise_the_last_error_is_the_reason():
    assert diagnose(["first", "second\n  line"], []) == Failed("build", "second line")
    assert diagnose([], []) == Failed("build", "TensorRT gave no reason")
    assert len(diagnose(["x" * 10_000], []).reason) < 600

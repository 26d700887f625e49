"""Where layers run, from TensorRT's own texts; tests/data/tensorrt-logs/README.md says where they come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from calibration import events, placement
from calibration.network import Asked

LOGS = Path(__file__).parents[1] / "data" / "tensorrt-logs"
NOTHING = '{"Layers": []}'


def text(name: str) -> str:
    return (LOGS / name).read_text()


def asked(*names: str, dla: bool | None = None, kind: str = "CONVOLUTION", **outputs: str) -> list[Asked]:
    return [Asked(name, kind, outputs.get(name, f"{name}_output"), dla, "int8") for name in names]


def inspector(*layers: dict[str, Any] | str) -> str:
    return json.dumps({"Layers": list(layers)})


def tensor(name: str, form: str) -> dict[str, str]:
    return {"Name": name, "Format/Datatype": form}


def places(found: placement.Placement) -> dict[str, str]:
    return {layer.name: layer.device for layer in found.layers}


def precisions(found: placement.Placement) -> dict[str, str]:
    return {layer.name: layer.precision for layer in found.layers}


def test_fused_layers_are_found_in_the_name_of_the_engine_layer() -> None:
    found = placement.read(text("trex-mobilenet-qat.layers.json"), "", asked("Conv_12", "Clip_16", "Add_144"))

    assert places(found) == {"Conv_12": "GPU", "Clip_16": "GPU", "Add_144": "GPU"}
    assert found.layers[1].engine_layer == "features.0.0.weight + QuantizeLinear_8 + Conv_12 + PWN(Clip_16)"


def test_the_precision_is_that_of_the_weights_whatever_the_output_is() -> None:
    """Conv_94 multiplies in INT8 and gives FP16."""
    found = placement.read(
        text("trex-mobilenet-qat.layers.json"), "", asked("QuantizeLinear_2", "Conv_12", "Conv_94", "QuantizeLinear_98")
    )

    assert set(precisions(found).values()) == {"int8"}


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("Row major linear FP32", "fp32"),
        ("Channel major FP16 format where channel % 8 == 0", "fp16"),
        ("Channel major FP16 format where channel == 4 and column stride % 32 == 0", "fp16"),
        ("Thirty-two wide channel vectorized row major Int8 format", "int8"),
        ("Row major INT8 format", "int8"),
        ("Half", "fp16"),
        ("Float", "fp32"),
        ("Int32", "int32"),
        ("N/A due to dynamic shapes", "unknown"),
    ],
)
def test_the_type_is_read_from_each_description_of_a_format(form: str, expected: str) -> None:
    engine = inspector({"Name": "pool", "LayerType": "CaskPooling", "Outputs": [tensor("pooled", form)]})

    assert precisions(placement.read(engine, "", asked("pool"))) == {"pool": expected}


def test_a_fused_product_without_a_list_of_weights_is_int8_if_it_reads_int8() -> None:
    engine = inspector(
        {
            "Name": "__myl_FcCast_myl0_3",
            "LayerType": "kgen",
            "TacticName": "sm80_xmma_gemm_i8f32_i8i32_f32_tn",
            "Metadata": "[ONNX Layer: /head/Gemm]",
            "Inputs": [tensor("x", "Int8")],
            "Outputs": [tensor("y", "Half")],
        }
    )

    assert precisions(placement.read(engine, "", asked("/head/Gemm"))) == {"/head/Gemm": "int8"}


@pytest.mark.parametrize("between", ["\x1e", "\x1f", ""])
def test_metadata_names_the_layers_that_a_generated_name_hides(between: str) -> None:
    metadata = between.join(["[ONNX Layer: /a/Mul]", "[ONNX Layer: /b/Add[1]]", "[ONNX Layer: /c/Erf]"])
    engine = inspector({"Name": "__myl_MulAddErf_myl0_1", "LayerType": "kgen", "Metadata": metadata})

    found = placement.read(engine, "", asked("/a/Mul", "/b/Add[1]", "/c/Erf", "/d/Mul"))

    assert places(found) == {"/a/Mul": "GPU", "/b/Add[1]": "GPU", "/c/Erf": "GPU", "/d/Mul": "unknown"}


@pytest.mark.parametrize(
    "behind",
    [
        pytest.param(" | File model.py, line 3\n    x = y[0]", id="doc string, 8.6"),
        pytest.param(" | Local Function: Block", id="local function, 10"),
        pytest.param(" | block (Block) | net (Net)", id="local functions, 10.3"),
    ],
)
def test_metadata_tells_more_than_names(behind: str) -> None:
    metadata = f"[ONNX Layer: /a/Mul{behind}]\x1e[ONNX Layer: /b/Add{behind}]"
    engine = inspector({"Name": "__myl_MulAdd_myl0_1", "Metadata": metadata})

    assert places(placement.read(engine, "", asked("/a/Mul", "/b/Add"))) == {"/a/Mul": "GPU", "/b/Add": "GPU"}


def test_control_characters_may_stand_in_the_inspectors_json_as_they_are() -> None:
    engine = inspector({"Name": "fused", "Metadata": "[ONNX Layer: a]?[ONNX Layer: b]"}).replace("?", "\x1f")

    found = placement.read(engine, "", asked("a", "b"))

    assert found.note is None
    assert places(found) == {"a": "GPU", "b": "GPU"}


@pytest.mark.parametrize(
    "entry",
    [
        {"Outputs": [{"Name": "y", "Datatype": "Half", "Format": "Channel major"}]},
        {"Outputs": [{"Name": "y"}], "Weights": [{"Type": "Half", "Count": 4}, {"Type": "Float", "Count": 1}]},
        {"Outputs": [tensor("y", "Half")], "Weights": [], "Inputs": None, "Metadata": None, "LayerType": None},
    ],
)
def test_what_another_version_calls_otherwise_or_leaves_out_is_no_obstacle(entry: dict[str, Any]) -> None:
    assert precisions(placement.read(inspector({"Name": "a", **entry}), "", asked("a"))) == {"a": "fp16"}


def test_a_layer_without_metadata_is_found_by_what_it_makes() -> None:
    engine = inspector(
        {"Name": "__myl_Move_myl0_0", "LayerType": "kgen", "Metadata": "", "Outputs": [tensor("joined", "Half")]}
    )

    found = placement.read(engine, "", asked("Concat_9", Concat_9="joined"))

    assert (places(found), precisions(found)) == ({"Concat_9": "GPU"}, {"Concat_9": "fp16"})


def test_a_reformat_is_not_the_layer_that_it_serves() -> None:
    engine = inspector(
        {
            "Name": "Reformatting CopyNode for Output Tensor 0 to conv",
            "Outputs": [tensor("y", "Row major linear FP32")],
        },
        {"Name": "conv", "LayerType": "CaskConvolution", "Outputs": [tensor("z", "Row major INT8 format")]},
    )

    found = placement.read(engine, "", asked("conv", conv="y"))

    assert precisions(found) == {"conv": "int8"}
    assert found.reformats == ("Reformatting CopyNode for Output Tensor 0 to conv",)


def test_names_alone_tell_where_layers_run_and_no_precision() -> None:
    names = ["/backbone/conv1/Conv", "(Unnamed Layer* 111) [Unary]", "(Unnamed Layer* 113) [ElementWise]"]

    found = placement.read(text("trex-names.layers.json"), "", asked(*names))

    assert set(places(found).values()) == {"GPU"}
    assert set(precisions(found).values()) == {"unknown"}
    assert len(found.reformats) == 2


def test_a_foreign_node_on_the_gpu_is_no_subgraph_of_the_dla() -> None:
    names = ["/head/Constant_2_output_0", "/head/Mul", "/Unsqueeze_2"]

    found = placement.read(text("trex-names.layers.json"), "", asked(*names))

    assert set(places(found).values()) == {"GPU"}
    assert found.subgraphs == ()


def test_subgraphs_and_gpu_layers_are_read_from_the_log() -> None:
    names = ["Conv_0", "Reshape_2", "InstanceNormalization_5", "Mul_8", "Relu_10", "Conv_11", "Relu_43"]

    found = placement.read(NOTHING, text("orin-8.4-groupnorm.log"), asked(*names))

    assert places(found) == {
        "Conv_0": "DLA",
        "Reshape_2": "GPU",
        "InstanceNormalization_5": "GPU",
        "Mul_8": "GPU",
        "Relu_10": "DLA",
        "Conv_11": "DLA",
        "Relu_43": "DLA",
    }
    assert len(found.subgraphs) == 5


def test_fused_names_in_the_log_are_taken_apart() -> None:
    names = ["/model.6/m.0/m/m.1/cv2/act/Mul", "/model.6/m.0/m/m.1/Add", "/model.7/act/Sigmoid"]
    names += ["/model.8/m.0/cv1/conv/Conv", "/model.8/m.0/cv2/conv/Conv"]

    found = placement.read(NOTHING, text("orin-yolo11n-gpu.log"), asked(*names))

    assert set(places(found).values()) == {"GPU"}


def test_what_stands_inside_a_subgraph_is_on_the_dla_unless_the_dla_refused_it() -> None:
    layers = [
        *asked("first", "inside", dla=True),
        *asked("refused", dla=False),
        *asked("weights", dla=False, kind="CONSTANT"),
        *asked("last", "after", dla=True),
    ]

    found = placement.read(NOTHING, "[I] [DlaLayer] {ForeignNode[first...last]}", layers)

    assert places(found) == {
        "first": "DLA",
        "inside": "DLA",
        "refused": "unknown",
        "weights": "none",
        "last": "DLA",
        "after": "unknown",
    }


def test_a_layer_between_the_ends_of_two_subgraphs_is_not_told() -> None:
    log = "[I] [DlaLayer] {ForeignNode[a...d]}\n[I] [DlaLayer] {ForeignNode[b...e]}"

    found = placement.read(NOTHING, log, asked("a", "b", "c", "d", "e", dla=True))

    assert places(found)["c"] == "unknown"


def test_a_subgraph_of_the_inspector_is_the_one_of_the_log() -> None:
    name = "{ForeignNode[/conv1/Conv.../fc/Gemm + (Unnamed Layer* 125) [ElementWise]]}"
    log = f"[V] [TRT] {name} successfully offloaded to DLA.\n[I] [DlaLayer] {name},"

    found = placement.read(
        inspector({"Name": name, "LayerType": "DLA", "Outputs": [tensor("y", "Half")]}),
        log,
        asked("/conv1/Conv", "/fc/Gemm", "(Unnamed Layer* 125) [ElementWise]", dla=True),
    )

    assert set(places(found).values()) == {"DLA"}
    assert set(precisions(found).values()) == {"unknown"}
    assert (found.subgraphs, found.engine_layers) == ((name,), 1)


def test_reasons_are_tensorrts_own_words() -> None:
    names = ["/model.23/Concat_3", "/model.23/Split", "(Unnamed Layer* 333) [Concatenation]", "/model.22/Div"]
    log = text("orin-yolo11n-head.log") + text("orin-8.6-yolov8m-div.log")

    found = placement.read(inspector(*names), log, asked(*names, "silent", dla=False))

    assert [layer.reason for layer in found.layers] == [
        "Layer '/model.23/Concat_3' (CONCATENATION): Unsupported on DLA. Switching this layer's device type to GPU.",
        "DLA only supports slicing 4 dimensional tensors.",
        "DLA only supports concatenation on the C dimension.",
        "DLA cores do not support DIV ElementWise operation.",
        "the DLA refuses it, and the log says no more",
    ]


@pytest.mark.parametrize(
    "line",
    [
        "Default DLA is enabled but layer layer74-act is not running on DLA, falling back to GPU.",
        "Default DLA is enabled but layer layer74-act is not supported on DLA, falling back to GPU.",
        "Validation failed for DLA layer: layer74-act. Switching to GPU fallback.",
        "DLA supports only 16 subgraphs per DLA core. Switching to GPU for layer layer74-act",
    ],
)
def test_every_wording_of_a_refusal_is_known(line: str) -> None:
    found = placement.read(inspector("layer74-act"), f"[W] {line}", asked("layer74-act", dla=True))

    assert found.layers[0].reason == line


def test_no_reasons_are_given_where_the_dla_is_not_asked_for() -> None:
    found = placement.read(inspector("/model.22/Div"), text("orin-8.6-yolov8m-div.log"), asked("/model.22/Div"))

    assert found.layers[0].reason is None


def test_a_summary_counts_layers_by_place_and_precision() -> None:
    log = "[I] [DlaLayer] {ForeignNode[a...b]}\n" + text("orin-8.6-yolov8m-div.log")
    engine = inspector({"Name": "/model.22/Div", "LayerType": "PointWiseV2", "Outputs": [tensor("y", "Half")]})
    layers = [*asked("a", "b", dla=True), *asked("/model.22/Div", dla=False), *asked("w", kind="CONSTANT", dla=False)]

    found = placement.read(engine, log, layers)

    assert found.rows() == [
        ("layers", "4, in 2 engine layers"),
        ("on the DLA", "2, in 1 subgraph"),
        ("on the GPU", "1"),
        ("constants", "1"),
        ("in FP16", "1"),
        ("in a precision not told", "2"),
        ("reformats", "0"),
        ("not on the DLA", "1: DLA cores do not support DIV ElementWise operation. (/model.22/Div)"),
    ]
    told = found.to_json()
    assert told["schema"] == "edge.layers/1"
    assert (told["devices"], told["precisions"]) == ({"DLA": 2, "GPU": 1, "none": 1}, {"unknown": 2, "fp16": 1})
    assert told["layers"][2]["asked"] == "int8"


def test_equal_reasons_add_up_whatever_layer_they_name() -> None:
    names = [f"MaxPool_{number}" for number in range(4)]
    log = "\n".join(
        f"[W] Layer '{name}' (POOLING): Unsupported on DLA. Switching this layer's device type to GPU."
        for name in names
    )
    log += "\n[W] Validation failed for DLA layer: Add_1. Switching to GPU fallback."

    found = placement.read(inspector(*names, "Add_1"), log, asked("Add_1", *names, dla=False))

    assert [text for title, text in found.rows() if title == "not on the DLA"] == [
        "4: POOLING: unsupported on DLA (MaxPool_0, MaxPool_1, MaxPool_2, ...)",
        "1: Validation failed for DLA layer: .... Switching to GPU fallback. (Add_1)",
    ]


def test_what_the_builder_leaves_is_read_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / events.ASKED).write_text(
        '[{"name":"a","type":"CONVOLUTION","output":"y","dla":null,"precision":"fp16"}]'
    )
    (tmp_path / events.INSPECTOR).write_text(inspector("a"))
    (tmp_path / events.LOG).write_text("")

    assert places(placement.read_folder(tmp_path)) == {"a": "GPU"}


@pytest.mark.parametrize(
    "damaged", ["", "[]", '{"Layers": [3]}', '{"Layers": [{}]}', '{"Layers": [{"Name": "a", "Outputs": [1]}]}']
)
def test_an_inspector_that_cannot_be_read_leaves_what_the_log_says(damaged: str) -> None:
    found = placement.read(damaged, "[I] [DlaLayer] {ForeignNode[a]}", asked("a", "b", dla=True))

    assert places(found) == {"a": "DLA", "b": "unknown"}
    assert found.rows()[0][0] == "not known"
    assert "the engine inspector's text is not its JSON" in found.rows()[0][1]


def test_a_missing_or_damaged_file_is_noted(tmp_path: Path) -> None:
    nothing = placement.read_folder(tmp_path)
    (tmp_path / events.ASKED).write_bytes(msgspec.json.encode(asked("a")))
    without_inspector = placement.read_folder(tmp_path)
    (tmp_path / events.ASKED).write_text("[3]")
    damaged = placement.read_folder(tmp_path)

    assert nothing.layers == damaged.layers == ()
    assert "asked.json" in (nothing.note or "")
    assert "asked.json" in (damaged.note or "")
    assert places(without_inspector) == {"a": "unknown"}
    assert "the engine inspector's text" in (without_inspector.note or "")

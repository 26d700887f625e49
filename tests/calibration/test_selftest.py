"""The self-test on the stand-ins: every case of every TensorRT, what fails, and what is written of it."""

from __future__ import annotations

import logging
import math
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import onnx_ir as ir
import pytest

from calibration import observe, qdq, selftest
from calibration.parity import difference
from calibration.selftest import _case, _network, _wanted
from calibration.selftest_report import LIMITS, Case, Layers, Report, failures, render
from edge import manifest
from edge.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable

GPU = ["GPU FP32", "GPU FP16", "GPU INT8, Q/DQ"]
CACHE = ["GPU INT8, cache"]
DLA = ["DLA 0 FP16", "DLA 0 INT8"]


class TestRun:
    """Each case takes two processes, so there are no more of them than it takes."""

    @pytest.mark.parametrize(("version", "cases"), [("8.5.2", [*GPU, *CACHE, *DLA]), ("11.4.0", GPU)])
    def test_every_case_of_each_tensorrt_passes(
        self, standin: Callable[..., Any], tmp_path: Path, version: str, cases: list[str]
    ) -> None:
        standin(version, dla_cores=1 if DLA[0] in cases else 0)

        report = selftest.run(tmp_path, iterations=1)

        assert {case.name: (case.outcome, case.reasons) for case in report.cases} == {
            name: ("passed", []) for name in cases
        }
        assert report.passed
        assert (report.no_dla is None) is (DLA[0] in cases)

    def test_report_holds_what_an_issue_needs(self, standin: Callable[..., Any], tmp_path: Path) -> None:
        standin("10.3.0", dla_cores=1)
        begun: list[str] = []
        (tmp_path / "proc" / "device-tree").mkdir(parents=True)
        (tmp_path / "proc" / "device-tree" / "model").write_bytes(b"NVIDIA Jetson Orin NX\0")

        report = selftest.run(tmp_path / "out", iterations=1, on_case=begun.append, root=tmp_path)

        assert msgspec.json.decode((tmp_path / "out" / "selftest.json").read_bytes(), type=Report) == report
        assert (tmp_path / "out" / "selftest.txt").read_text() == render(report)
        assert begun == [case.name for case in report.cases]
        assert (report.board, report.device.name, report.device.dla_cores) == ("NVIDIA Jetson Orin NX", "Orin", 1)
        assert {"Python", "numpy", "onnxruntime"} <= report.software.keys()
        int8 = report.cases[-1]
        assert (int8.name, int8.where, int8.precision, int8.quantization) == ("DLA 0 INT8", "DLA 0", "int8", "cache")
        assert int8.plan_bytes is not None
        assert int8.layers is not None
        assert int8.layers.devices["DLA"] > 0
        assert {case.outcome for case in report.cases} == {"passed"}
        # A simulation is no measurement.
        assert report.simulated
        times = {(case.median_ms, case.p95_ms, case.copied_median_ms, case.build_s) for case in report.cases}
        assert times == {(None, None, None, None)}

    @pytest.mark.parametrize(
        ("fault", "bad", "reason"),
        [("wrong-int8", {"int8"}, "cosine"), ("nan", {"fp32", "fp16", "int8"}, "NaN")],
    )
    def test_wrong_numbers_fail_their_cases(
        self, standin: Callable[..., Any], tmp_path: Path, fault: str, bad: set[str], reason: str
    ) -> None:
        standin("11.4.0", dla_cores=0, faults=(fault,))

        report = selftest.run(tmp_path, iterations=1)

        assert {case.precision for case in report.cases if case.outcome == "failed"} == bad
        assert {case.precision for case in report.cases if case.outcome == "passed"} == {"fp32", "fp16", "int8"} - bad
        assert all(any(reason in text for text in case.reasons) for case in report.cases if case.precision in bad)
        assert not report.passed

    @pytest.mark.parametrize("fault", ["build-fails", "crash", "execute-fails"])
    def test_case_that_cannot_be_built_or_run_is_told_and_the_others_follow(
        self, standin: Callable[..., Any], tmp_path: Path, fault: str
    ) -> None:
        standin("11.4.0", dla_cores=0, faults=(fault,))

        report = selftest.run(tmp_path, iterations=1)

        assert {case.name: case.outcome for case in report.cases} == dict.fromkeys(GPU, "error")
        assert all(case.reasons and case.log for case in report.cases)
        assert not any("Traceback" in case.reasons[0] for case in report.cases)
        text = (tmp_path / "selftest.txt").read_text()
        assert not any(folder in text for folder in (tempfile.gettempdir(), str(Path(__file__).parents[2]))), "private"

    def test_log_does_not_tell_of_a_model_that_nobody_has(
        self, standin: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        standin("11.4.0", dla_cores=0, faults=("build-fails",))
        caplog.set_level(logging.INFO)

        selftest.run(tmp_path, iterations=1)

        assert [record for record in caplog.records if record.name.startswith(("calibration", "edge"))] == []
        assert not logging.getLogger(observe.__name__).filters

    def test_interrupt_leaves_nothing_behind(self, standin: Callable[..., Any], tmp_path: Path) -> None:
        standin("11.4.0", dla_cores=0)

        def interrupt(_: Any) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            selftest.run(tmp_path / "out", iterations=1, on_event=interrupt)

        assert not (tmp_path / "out").exists()

    def test_no_tensorrt_is_an_error_before_anything_is_made(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "tensorrt", None)

        with pytest.raises(DeviceError, match="TensorRT"):
            selftest.run(tmp_path / "out")

        assert not (tmp_path / "out").exists()

    def test_no_iterations_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="iterations is 0"):
            selftest.run(tmp_path, iterations=0)


class TestCases:
    @pytest.mark.parametrize(
        ("version", "cores", "wanted"), [("10.7.0", 1, DLA), ("10.8.0", 2, []), ("11.4.0", 2, []), ("10.3.0", 0, [])]
    )
    def test_dla_is_tried_where_this_tensorrt_has_it(self, version: str, cores: int, wanted: list[str]) -> None:
        assert [
            case.name for case in _wanted(device(tensorrt=version, dla_cores=cores)) if case.where != "GPU"
        ] == wanted

    @pytest.mark.parametrize("integrated", [True, False])
    def test_integrated_gpu_is_timed_with_copies_and_without(
        self, standin: Callable[..., Any], tmp_path: Path, integrated: bool
    ) -> None:
        standin("10.3.0", integrated=integrated)
        here = device(integrated=integrated)

        found = _case(_wanted(here)[0], _network(), here, tmp_path, iterations=1, on_event=lambda _: None)

        assert found.outcome == "passed"
        assert found.median_ms is not None
        assert (found.copied_median_ms is not None) is integrated


class TestNetwork:
    """The limits' comments, measured."""

    def test_fake_quantization_keeps_the_limits_of_int8_with_room(self) -> None:
        cosine, error = self.quantized(1.0)

        assert cosine > 1 - (1 - LIMITS["int8"].cosine) / 2
        assert error < LIMITS["int8"].relative_error / 2

    @pytest.mark.parametrize("factor", [0.125, 0.5, 4.0])
    def test_wrong_scales_miss_them(self, factor: float) -> None:
        _, error = self.quantized(factor)

        assert error > LIMITS["int8"].relative_error

    @staticmethod
    def quantized(factor: float) -> tuple[float, float]:
        network = _network()
        model = ir.from_proto(ir.to_proto(network.model))
        qdq.insert(model, {name: scale * factor for name, scale in network.ranges.scales.items()}, [], key="test")
        session = observe.session(model)
        outputs = [observe.run(session, {"images": array})[0] for array in network.inputs]
        found = [difference(*pair) for pair in zip(network.outputs, outputs, strict=True)]
        return min(value.cosine for value in found), max(value.relative_error for value in found)

    def test_network_is_the_same_each_time(self) -> None:
        first, second = _network(), _network()

        assert ir.to_proto(first.model) == ir.to_proto(second.model)
        assert first.ranges == second.ranges
        np.testing.assert_array_equal(first.outputs, second.outputs)

    def test_every_tensor_has_a_range(self) -> None:
        network = _network()

        names = {"images", *(str(node.outputs[0].name) for node in network.model.graph)}
        assert network.ranges.scales.keys() == names


def device(**given: Any) -> manifest.Device:
    values = {"name": "Orin", "tensorrt": "10.3.0", "compute_capability": "8.7", "integrated": True, "dla_cores": 2}
    return manifest.Device(**{**values, "cuda": "12.6", "l4t": "36.4.3", **given})


def case(**given: Any) -> Case:
    layers = Layers(devices={"DLA": 9}, precisions={"int8": 9}, subgraphs=1)
    values = {"name": "DLA 0 INT8", "precision": "int8", "where": "DLA 0", "outcome": "passed", "quantization": "cache"}
    values |= {"cosine": 0.99995, "relative_error": 0.017, "layers": layers}
    values |= {"median_ms": 1.25, "p95_ms": 1.5, "copied_median_ms": 1.75}
    return Case(**{**values, "plan_bytes": 65536, "build_s": 12.34, **given})


class TestFailures:
    def test_nothing_is_missed(self) -> None:
        assert failures(case()) == []

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"cosine": 0.5}, "cosine 0.5 (allowed: at least 0.998)"),
            ({"relative_error": 0.5}, "relative error 0.5 (allowed: at most 0.08)"),
            ({"relative_error": None}, "the outputs hold NaN or infinite values"),
            (
                {"layers": Layers(devices={"GPU": 8, "unknown": 1}, precisions={"int8": 9}, subgraphs=0)},
                "no layer is known to run on the DLA: 8 on the GPU, 1 not told",
            ),
            ({"layers": Layers(devices={"DLA": 9}, precisions={"fp16": 9}, subgraphs=1)}, "no layer runs in INT8"),
        ],
    )
    def test_what_is_missed_is_told(self, given: dict[str, Any], message: str) -> None:
        assert failures(case(**given)) == [message]

    def test_precision_that_tensorrt_does_not_tell_is_not_held_against_it(self) -> None:
        assert failures(case(layers=Layers(devices={"DLA": 9}, precisions={"unknown": 9}, subgraphs=1))) == []


class TestRender:
    @staticmethod
    def report(*cases: Case, simulated: bool = False, no_dla: str | None = None) -> Report:
        return Report(
            simulated=simulated,
            tool="jetson-edge 0.1.0",
            created_at="2026-05-04T03:02:01Z",
            board=None,
            device=device(),
            no_dla=no_dla,
            software={"numpy": "2.0.0"},
            limits=dict(LIMITS),
            iterations=100,
            cases=list(cases),
        )

    def test_table_of_a_device(self) -> None:
        lines = render(self.report(case())).splitlines()

        assert lines[0] == "Self-test of jetson-edge 0.1.0, 2026-05-04T03:02:01Z: passed"
        assert "Orin, compute capability 8.7, TensorRT 10.3.0, CUDA 12.6, 2 DLA cores, Jetson Linux 36.4.3" in lines
        row = next(line for line in lines if line.startswith("DLA 0 INT8"))
        assert row.split() == [
            "DLA",
            "0",
            "INT8",
            "passed",
            "0.999950",
            "0.017",
            "1.250",
            "1.500",
            "1.750",
            "9/0/0",
            "64",
            "12.3",
        ]
        assert not any("SIMULATED" in line for line in lines)

    def test_simulation_says_so_first_and_last_and_tells_no_times(self) -> None:
        lines = render(self.report(case(), simulated=True)).splitlines()

        assert lines[:7] == lines[-7:]
        assert lines[6].startswith("SIMULATED")
        assert "times: not a measurement" in lines
        assert not any(time in line for time in ("1.250", "1.500", "1.750", "12.3") for line in lines)

    def test_device_without_dla_is_told_why(self) -> None:
        text = render(self.report(case(), no_dla="TensorRT 10.8.0 has none"))

        assert "\nno case on the DLA: TensorRT 10.8.0 has none\n" in text

    def test_layer_that_the_dla_refused_is_told_with_why(self) -> None:
        layers = Layers(
            devices={"DLA": 8, "GPU": 1}, precisions={}, subgraphs=1, refused={"/pool/MaxPool": "too large"}
        )

        text = render(self.report(case(layers=layers)))

        assert "\nDLA 0 INT8: not on the DLA\n  /pool/MaxPool: too large\n" in text

    def test_case_that_failed_is_told_with_its_log(self) -> None:
        broken = case(outcome="error", reasons=["no plan"], log=["[E] no tactic"], cosine=None, layers=None)

        text = render(self.report(case(), broken))

        assert text.startswith("Self-test of jetson-edge 0.1.0, 2026-05-04T03:02:01Z: NOT PASSED")
        assert text.endswith("DLA 0 INT8: error\n  no plan\n  the end of the builder's log:\n    [E] no tactic\n")

    def test_report_survives_json(self) -> None:
        report = self.report(case(), case(relative_error=None, outcome="failed", reasons=["x"]))

        assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report
        assert all(math.isfinite(limit.relative_error) for limit in report.limits.values())

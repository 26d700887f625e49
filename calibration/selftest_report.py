"""What a self-test found: the values, what counts as passed, and the text of it. Pure: no files, no TensorRT."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from msgspec import Struct

from calibration.recipe import Precision, Quantization
from edge import manifest

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["LIMITS", "Case", "Layers", "Limits", "Report", "failures", "render"]


class Limits(NamedTuple):
    """What a precision must reach, over all compared inputs."""

    cosine: float
    """At least."""
    relative_error: float
    """At most; see ``parity.difference``."""


LIMITS: Mapping[Precision, Limits] = {
    # Sums in another order, or Winograd's: some 1e-6. TF32, which has FP16's significand, would cost 1e-3.
    "fp32": Limits(0.99999, 1e-4),
    # Typed in FP16, onnxruntime costs 0.4e-3 to 0.7e-3 over eight seeds; TensorRT's tactics may also sum in FP16, which
    # costs some times that.
    "fp16": Limits(0.9999, 0.01),
    # Over eight seeds, fake quantization in onnxruntime costs 0.023 to 0.038 where only the inputs of convolutions are
    # rounded, 0.033 to 0.054 and a cosine of 0.9992 where every tensor is. Scales that are half as large as they should
    # be cost 0.21 and more, four times as large 0.09 and more.
    "int8": Limits(0.998, 0.08),
}

_PLACES = {"GPU": "on the GPU", "none": "constant", "unknown": "not told"}

BANNER = """\
 ####  ###  #   #  #   #  #       ###   #####  #####  ####
#       #   ## ##  #   #  #      #   #    #    #      #   #
 ###    #   # # #  #   #  #      #####    #    ###    #   #
    #   #   #   #  #   #  #      #   #    #    #      #   #
####   ###  #   #   ###   #####  #   #    #    #####  ####

SIMULATED: the tests' stand-in for TensorRT answered, no GPU and no DLA. Nothing here is a measurement.
"""


class Layers(Struct, frozen=True, kw_only=True):
    """Where the network's layers run, and in which precision, as far as TensorRT tells (``calibration.placement``)."""

    devices: dict[str, int]
    """How many run on the DLA, GPU, none (constants) or unknown."""
    precisions: dict[str, int]
    subgraphs: int
    """Of the DLA."""
    refused: dict[str, str] = {}
    """Why a layer is not on the DLA that it was asked for, by its name."""


class Case(Struct, frozen=True, kw_only=True):
    """One plan. What was not reached, or is not a measurement, is None."""

    name: str
    precision: Precision
    where: str
    """``GPU`` or ``DLA 0``."""
    outcome: Literal["passed", "failed", "error"]
    """failed: it runs, and misses a limit; error: it could not be built, run, or read back."""
    reasons: list[str] = []
    """Why it did not pass, one sentence each."""
    quantization: Quantization | None = None
    cosine: float | None = None
    """Smallest."""
    relative_error: float | None = None
    """Largest; None also where it is not finite."""
    median_ms: float | None = None
    """Of one inference, what it takes to hand over input and output included."""
    p95_ms: float | None = None
    copied_median_ms: float | None = None
    """The same with memory of the GPU's own, copied to and from; by itself an integrated GPU works in the CPU's."""
    layers: Layers | None = None
    plan_bytes: int | None = None
    build_s: float | None = None
    log: list[str] = []
    """The end of the builder's log, of a case that did not pass."""


class Report(Struct, frozen=True, kw_only=True):
    """What the self-test found."""

    schema: Literal["edge.selftest/1"] = "edge.selftest/1"
    simulated: bool
    """The tests' stand-in answered: nothing here is about a device."""
    tool: str
    created_at: str
    """RFC 3339, UTC."""
    board: str | None
    """As the device tree names it; None where there is none."""
    device: manifest.Device
    no_dla: str | None = None
    """Why there is no case on a DLA."""
    software: dict[str, str]
    """Versions."""
    limits: dict[Precision, Limits]
    iterations: int
    cases: list[Case]

    @property
    def passed(self) -> bool:
        """Whether every case passed."""
        return all(case.outcome == "passed" for case in self.cases)


def render(report: Report) -> str:
    """The report as text."""
    device = report.device
    facts = [
        device.name,
        f"compute capability {device.compute_capability}",
        f"TensorRT {device.tensorrt}",
        f"CUDA {device.cuda}",
        f"{device.dla_cores} DLA core{'s' if device.dla_cores != 1 else ''}",
    ]
    facts += [f"Jetson Linux {device.l4t}"] if device.l4t else []
    lines = [
        f"Self-test of {report.tool}, {report.created_at}: {'passed' if report.passed else 'NOT PASSED'}",
        *([report.board] if report.board else []),
        ", ".join(facts),
        ", ".join(f"{name} {version}" for name, version in report.software.items()),
        "",
        "A network of four convolutions, against FP32 in onnxruntime. ms: of one inference with its input and output,",
        f"at the clocks as they were, {report.iterations} times; copied: through memory of the GPU's own, where the",
        "CPU's would do. layers: on the DLA / on the GPU / not told. plan: KiB.",
        "",
        *_table(report),
        *([f"no case on the DLA: {report.no_dla}"] if report.no_dla else []),
        "",
        *(f"{precision}: cosine at least {cosine:g}, relative error at most {error:g}"
          for precision, (cosine, error) in report.limits.items()),
    ]  # fmt: skip
    for case in report.cases:
        if case.layers is not None and case.layers.refused:
            lines += ["", f"{case.name}: not on the DLA"]
            lines += [f"  {name}: {reason}" for name, reason in case.layers.refused.items()]
        if case.outcome != "passed":
            lines += ["", f"{case.name}: {case.outcome}", *(f"  {reason}" for reason in case.reasons)]
            lines += ["  the end of the builder's log:"] if case.log else []
            lines += [f"    {line}" for line in case.log]
    text = "\n".join(lines) + "\n"
    return f"{BANNER}\n{text}\n{BANNER}" if report.simulated else text


def failures(case: Case) -> list[str]:
    """What a case that ran misses."""
    limits, layers = LIMITS[case.precision], case.layers
    assert case.cosine is not None
    assert layers is not None
    found: list[str] = []
    if case.cosine < limits.cosine:
        found.append(f"cosine {case.cosine:.6g} (allowed: at least {limits.cosine:g})")
    if case.relative_error is None:
        found.append("the outputs hold NaN or infinite values")
    elif case.relative_error > limits.relative_error:
        found.append(f"relative error {case.relative_error:.3g} (allowed: at most {limits.relative_error:g})")
    devices, precisions = layers.devices, layers.precisions
    if case.where != "GPU" and not devices.get("DLA"):
        elsewhere = ", ".join(f"{number} {_PLACES[device]}" for device, number in devices.items())
        found.append(f"no layer is known to run on the DLA: {elsewhere}")
    # A plan that ignored its scales runs in FP16, and is closer to FP32 than INT8 can be.
    if case.precision == "int8" and not precisions.get("int8") and not precisions.get("unknown"):
        found.append("no layer runs in INT8")
    return found


def _table(report: Report) -> list[str]:
    head = ("case", "result", "cosine", "rel. error", "median ms", "p95 ms", "copied ms", "layers", "plan", "build s")
    rows = [head, *(_row(case) for case in report.cases)]
    if report.simulated:
        rows = [(*row[:4], *row[7:9]) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    found = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [*found, "times: not a measurement"] if report.simulated else found


def _row(case: Case) -> tuple[str, ...]:
    def told(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    layers = "-"
    if case.layers is not None:
        layers = "/".join(str(case.layers.devices.get(device, 0)) for device in ("DLA", "GPU", "unknown"))
    kib = None if case.plan_bytes is None else case.plan_bytes / 1024
    return (
        case.name,
        case.outcome,
        told(case.cosine, ".6f"),
        told(case.relative_error, ".2g"),
        told(case.median_ms, ".3f"),
        told(case.p95_ms, ".3f"),
        told(case.copied_median_ms, ".3f"),
        layers,
        told(kib, ".0f"),
        told(case.build_s, ".1f"),
    )

"""What the builder's child process says on its standard output: one JSON object a line, and its files' names."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
from msgspec import Struct

__all__ = ["ASKED", "INSPECTOR", "LOG", "Done", "Event", "Failed", "Finished", "Kind", "Log", "Phase", "Step", "decode"]

# What the child leaves in the scratch folder, beside the files that edge.manifest names.
ASKED = "asked.json"
"""What TensorRT was asked for, layer by layer (``calibration.network.Asked``)."""
INSPECTOR = "inspector.json"
"""What TensorRT made of it, as its engine inspector tells."""
LOG = "builder.log"
"""Standard error of the child: TensorRT's log, and a traceback after a crash."""

Kind: TypeAlias = Literal["parse", "unsupported", "memory", "calibration", "build", "device", "usage", "io"]


class Phase(Struct, frozen=True, tag="phase"):
    """A part of the work begins."""

    name: str
    parent: str | None = None
    """The phase that it is a part of."""
    steps: int | None = None
    """How many steps it has, where that is known."""


class Step(Struct, frozen=True, tag="step"):
    """A step of a phase is done."""

    name: str
    step: int
    """Its number, from 0."""


class Finished(Struct, frozen=True, tag="finished"):
    """A phase has ended."""

    name: str


class Log(Struct, frozen=True, tag="log"):
    """Something that a person may want to know; everything is in the log file."""

    severity: Literal["error", "warning", "info"]
    text: str


class Done(Struct, frozen=True, tag="done", kw_only=True):
    """The plan is written, and TensorRT has loaded it once."""

    seconds: float
    tensorrt: str
    """As the library calls itself."""
    simulated: bool = False
    """By the stand-in of the tests, not by TensorRT."""
    plan_bytes: int
    layers: int
    """Of the parsed network."""
    pictures: int = 0
    """That TensorRT calibrated on."""
    unmatched: tuple[str, ...] = ()
    """Of ``Recipe.float_layers``, tensors that no layer of the parsed network gives."""
    without_range: tuple[str, ...] = ()
    """Activations that have no INT8 range."""
    harmless: int = 0
    """Constants, shapes and integers, which need none."""


class Failed(Struct, frozen=True, tag="failed"):
    """There is no plan."""

    kind: Kind
    reason: str
    nodes: tuple[str, ...] = ()
    """The layers at fault, where they are known."""


Event: TypeAlias = Phase | Step | Finished | Log | Done | Failed

_decoder = msgspec.json.Decoder(Event)


def decode(line: bytes) -> Event:
    """Read one line.

    Raises:
        ValueError: it is no event.
    """
    return _decoder.decode(line)

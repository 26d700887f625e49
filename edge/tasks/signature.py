"""What a model shows of itself before it runs, and which layout that is.

A layout is a class whose ``fit`` takes a signature and gives a decoder, or raises ``UnfitError`` with the reason. Which
layouts there are is said by the task: detection and segmentation each have their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from edge.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge.types import TensorSpec

__all__ = ["PYRAMIDS", "Layout", "Signature", "UnfitError", "recognise", "signature_of"]

T_co = TypeVar("T_co", covariant=True)

PYRAMIDS = ((8, 16, 32), (8, 16, 32, 64), (4, 8, 16, 32), (16, 32))
"""Strides of the feature maps that detectors predict from: P3-P5, with P6, with P2, and the tiny ones'."""


class UnfitError(Exception):
    """The outputs are not of a layout; the text says why."""


@dataclass(frozen=True, slots=True)
class Signature:
    """Outputs and input size of a model."""

    outputs: tuple[TensorSpec, ...]
    input_wh: tuple[int, int]
    activation: str = "none"
    """What turns class outputs into scores, resolved: never 'auto'."""
    guessing: bool = False
    """No layout was set: claim the outputs only if they are typical."""

    def __str__(self) -> str:
        """The outputs by name and shape, and the input's size."""
        outputs = ", ".join(f"'{spec.name}' {list(spec.shape)}" for spec in self.outputs)
        return f"outputs {outputs} for a {self.input_wh[0]}x{self.input_wh[1]} input"

    def single(self, rank: int) -> TensorSpec:
        """The only output.

        Raises:
            UnfitError: there are several, or it has another rank, or a batch.
        """
        if len(self.outputs) != 1:
            raise UnfitError(f"expected one output, found {len(self.outputs)}")
        (spec,) = self.outputs
        if len(spec.shape) != rank or spec.shape[0] != 1:
            raise UnfitError(f"expected {rank} dimensions of which the first is 1, found {list(spec.shape)}")
        return spec

    def cells(self, strides: tuple[int, ...]) -> int:
        """How many cells the feature maps of these strides have."""
        width, height = self.input_wh
        return sum((width // stride) * (height // stride) for stride in strides)

    def pyramid(self, rows: int, *, pyramids: tuple[tuple[int, ...], ...] = PYRAMIDS, anchors: int = 1) -> bool:
        """Whether there is a row for each anchor in each cell of one of the pyramids."""
        return any(rows == anchors * self.cells(strides) for strides in pyramids)


class Layout(Protocol[T_co]):
    """A way to lay out outputs; implemented by the decoders' classes."""

    @property
    def expects(self) -> str:
        """The outputs in a few words: '[1, N, 6]: corners, score, class'."""

    @property
    def activations(self) -> tuple[str, ...]:
        """What ``task.activation`` may be; the first is what 'auto' means."""

    def fit(self, signature: Signature, /) -> T_co:
        """Make the decoder.

        Raises:
            UnfitError: the outputs are not of this layout.
        """


def signature_of(inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], *, source: str) -> Signature:
    """Find the size of the picture that a model takes.

    Raises:
        ModelError: the first input is no picture, (1, C, H, W) or (1, H, W, C) with one or three channels.
    """
    shape = inputs[0].shape if inputs else ()
    if len(shape) == 4 and shape[1] in (1, 3):
        return Signature(outputs, (shape[3], shape[2]))
    if len(shape) == 4 and shape[3] in (1, 3):
        return Signature(outputs, (shape[2], shape[1]))
    found = f"'{inputs[0].name}' {list(shape)}" if inputs else "none"
    raise ModelError(f"{source}: its first input is {found}; expected a picture, [1, 3, H, W] or [1, H, W, 3]")


def recognise(
    layouts: Mapping[str, Layout[T_co]], signature: Signature, *, layout: str, activation: str = "auto", source: str
) -> tuple[str, T_co]:
    """Find the layout of a model's outputs, or check the one that the deployment sets.

    Args:
        layouts: all that the task knows.
        signature: the model's.
        layout: ``task.layout`` of the deployment, 'auto' or a key of ``layouts``.
        activation: ``task.activation`` of the deployment.
        source: what to call the model in messages.

    Returns:
        The layout's name and its decoder.

    Raises:
        ModelError: the outputs are not of the layout, or of none, or could be of several.
        ConfigError: the layout has no such activation.
    """
    fitting: dict[str, T_co] = {}
    reasons: dict[str, str] = {}
    for name in layouts if layout == "auto" else (layout,):
        decoder, reason = _fit(name, layouts[name], signature, activation, guessing=layout == "auto")
        if decoder is None:
            reasons[name] = reason
        else:
            fitting[name] = decoder
    if len(fitting) == 1:
        return next(iter(fitting.items()))
    allowed = "; ".join(f"{name} ({layouts[name].expects})" for name in layouts)
    if fitting:
        raise ModelError(
            f"{source}: task.layout 'auto' can't tell {' from '.join(fitting)} by the {signature};"
            " set task.layout to what the model was exported as"
        )
    if layout != "auto":
        raise ModelError(
            f"{source}: the {signature} don't fit task.layout '{layout}': {reasons[layout]};"
            f" set task.layout to 'auto' or to what fits: {allowed}"
        )
    raise ModelError(
        f"{source}: task.layout 'auto' does not recognise the {signature}; known layouts: {allowed};"
        " set task.layout to one of them or export the model in one"
    )


def _fit(
    name: str, layout: Layout[T_co], signature: Signature, activation: str, *, guessing: bool
) -> tuple[T_co | None, str]:
    """Make a decoder, or say why the outputs are not for it."""
    chosen = layout.activations[0] if activation == "auto" else activation
    try:
        decoder = layout.fit(Signature(signature.outputs, signature.input_wh, chosen, guessing))
    except UnfitError as reason:
        return None, str(reason)
    if chosen not in layout.activations:
        allowed = ", ".join(("auto", *layout.activations))
        raise ConfigError([f"task.activation: is '{chosen}'; allowed for layout {name}: {allowed}"])
    return decoder, ""

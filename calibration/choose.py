"""Method ``auto``: which way of choosing ranges keeps this model closest to FP32, measured on held-out pictures.

Ranges are fitted to the other pictures, then tried in the Q/DQ model. What is compared are the answers that the task
gives, not the tensors: a range that is good for a tensor may be bad for the model, and only some models tell the
methods apart at all (docs/decisions/0008-auto.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from calibration import ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from calibration.histogram import Histogram
    from calibration.ranges import Ranges
    from calibration.trial import Outcome, Trial

__all__ = ["Choice", "choose"]

FALLBACK = "mse"
"""Where nothing can be measured: the closest on four of the five models of docs/decisions/0008-auto.md."""

FEWEST_HELD = 4
"""With fewer held-out pictures a difference between methods says nothing."""

SINGLE_TENSORS = 6
"""Tensors that are tried with another method than the rest, those that the methods disagree on most. Each costs half of
what a method costs, since it is judged on half of the pictures first."""

LEAST_GAIN = 0.01
"""Part of the error that another method for a single tensor has to take away: less is chance."""

_ORDER = ("mse", "entropy", "percentile", "max")
"""Of equals the first is taken."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The method for all tensors, the exceptions, and why."""

    method: str
    others: dict[str, str] = field(default_factory=dict)
    """Tensors for which another method chooses."""
    agreement: dict[str, float] = field(default_factory=dict)
    """By method, how close the answers are to FP32's, 0..1; empty where nothing could be measured."""
    error: dict[str, float] = field(default_factory=dict)
    """By method, the error of the outputs relative to their spread."""
    held: int = 0
    """Pictures it was measured on."""
    reason: str = ""
    """A sentence or two for people."""


def choose(
    trial: Trial | None,
    histograms: Mapping[str, Histogram],
    complete: Callable[[Ranges], Ranges],
    *,
    images: int,
    held: int,
) -> Choice:
    """Choose a method, and exceptions from it.

    Args:
        trial: with the held-out pictures; None where there are too few.
        histograms: of the other pictures.
        complete: what is done to every set of ranges before it is used (``rules.complete``).
        images: the number of pictures in the histograms.
        held: the number of held-out pictures there are.
    """
    if trial is None or held < FEWEST_HELD or not images:
        counted = "all pictures are" if not images else "1 picture is" if held == 1 else f"{held} pictures are"
        needed = f", and it takes {FEWEST_HELD}" if images else ""
        text = (
            f"{FALLBACK}, unmeasured: {counted} held out to try the methods on{needed};"
            " about one calibration picture in four is held out"
        )
        return Choice(FALLBACK, held=held, reason=text)

    def ranges_of(method: str, others: Mapping[str, str]) -> Ranges:
        return complete(ranges.select(histograms, method=method, images=images, others=others))

    plain = {method: ranges_of(method, {}) for method in _ORDER}
    outcomes = {method: trial.run(plain[method].scales) for method in _ORDER}
    ranked = _ranked(outcomes)
    best, second = ranked[0], ranked[1]
    # Where the methods cannot be told apart as a whole, they cannot be for single tensors.
    told_apart = _clearly_better(outcomes[best], outcomes[second])
    others = _exceptions(trial, plain, outcomes[best], best, second, ranges_of) if told_apart else {}
    return Choice(
        method=best,
        others=others,
        agreement={m: share for m in ranked if (share := outcomes[m].share) is not None},
        error={m: outcomes[m].error for m in ranked},
        held=held,
        reason=_reason(ranked, outcomes, held, others, second),
    )


def _ranked(outcomes: Mapping[str, Outcome]) -> list[str]:
    """The methods, the best first.

    The largest agreement wins. Methods that are within the noise of it are told apart by the error of the outputs.
    """
    share = {method: float(_agreeing(outcomes[method]).mean()) for method in _ORDER}
    top = max(_ORDER, key=lambda method: (share[method], -outcomes[method].error))
    level = [method for method in _ORDER if not _clearly_better(outcomes[top], outcomes[method])]
    first = min(level, key=lambda method: outcomes[method].error)
    rest = [method for method in _ORDER if method != first]
    return [first, *sorted(rest, key=lambda method: (-share[method], outcomes[method].error))]


def _agreeing(outcome: Outcome) -> NDArray[np.float64]:
    """Closeness by picture, where finding nothing on both sides is to agree."""
    return np.nan_to_num(outcome.closeness, nan=1.0)


def _clearly_better(first: Outcome, second: Outcome) -> bool:
    """Whether the first agrees more, by more than the standard error of the difference over the pictures."""
    differences = _agreeing(first) - _agreeing(second)
    return bool(differences.mean() > differences.std(ddof=1) / np.sqrt(differences.size))


def _exceptions(
    trial: Trial,
    plain: Mapping[str, Ranges],
    base: Outcome,
    best: str,
    second: str,
    ranges_of: Callable[[str, Mapping[str, str]], Ranges],
) -> dict[str, str]:
    """Tensors that do better with the second method, if they do so on pictures that they were not chosen by.

    Each is taken if it lowers the error on every other picture; all are kept if, on the pictures between, the answers
    then agree more and the error is lower.
    """
    names = [name for name in trial.tensors if plain[best].tensors[name].amax != plain[second].tensors[name].amax]
    ratio = {name: plain[best].tensors[name].amax / plain[second].tensors[name].amax for name in names}
    doubtful = sorted(names, key=lambda name: (-abs(np.log(ratio[name])), name))[:SINGLE_TENSORS]
    tuning, judging = range(0, len(trial), 2), range(1, len(trial), 2)
    error = float(base.errors[::2].mean())
    taken: dict[str, str] = {}
    for name in doubtful:
        attempt = {**taken, name: second}
        found = trial.run(ranges_of(best, attempt).scales, tuning).error
        if found < error * (1 - LEAST_GAIN):
            taken, error = attempt, found
    if not taken:
        return {}
    judged = trial.run(ranges_of(best, taken).scales, judging)
    agrees_more = _agreeing(judged).mean() > _agreeing(base)[1::2].mean()
    return taken if agrees_more and judged.error < base.errors[1::2].mean() else {}


def _reason(
    ranked: list[str], outcomes: Mapping[str, Outcome], held: int, others: Mapping[str, str], second: str
) -> str:
    best = ranked[0]
    shares = {method: outcomes[method].share for method in ranked}
    if all(share is None for share in shares.values()):
        errors = ", ".join(f"{method} {outcomes[method].error:.3f}" for method in ranked)
        text = f"{best}: no model finds anything on {held} held-out pictures; the outputs' error decides: {errors}"
    else:
        numbers = ", ".join(f"{method} {1.0 if share is None else share:.3f}" for method, share in shares.items())
        text = f"{best}: agreement with FP32 on {held} held-out pictures: {numbers}"
        if any((shares[method] or 0.0) > (shares[best] or 0.0) for method in ranked):
            text += "; what others agree more is within the noise, and its outputs have the least error"
    if others:
        text += f". {len(others)} {'tensor does' if len(others) == 1 else 'tensors do'} better with {second}"
    return text

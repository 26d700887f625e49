"""How long to wait before trying again. Pure: randomness comes in."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["backoff"]


def backoff(
    uniform: Callable[[float, float], float] = random.uniform, *, first_s: float = 0.5, cap_s: float = 30.0
) -> Iterator[float]:
    """Waiting times that double up to a cap, each shortened by up to half, so that a fleet does not retry in step."""
    delay_s = first_s
    while True:
        yield delay_s * uniform(0.5, 1.0)
        delay_s = min(cap_s, 2 * delay_s)

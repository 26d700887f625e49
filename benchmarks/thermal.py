"""An Orin module in a fanless box, as a network of thermal resistances and capacities: something to be governed.

Heat flows from the junction through the module with its heat spreader into the case and from there to the air::

    chip power -> junction --R_jm-- module --R_mc-- case --R_ca-- ambient
                                                     ^ carrier board, sun

No thermal design guide gives all of it, so the figures below are assumptions with their reasons, and the tests sweep
each of them by 50 % up and down, alone and together. Between two steps the power is constant and the network is
integrated exactly (matrix exponential by eigenvalues); leakage, the one nonlinear part, is renewed at every step.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self

_LEAKAGE_REFERENCE_C = 85.0


@dataclass(frozen=True, slots=True)
class Box:
    """A module in its box. The defaults are an Orin NX in its 25 W mode, in an aluminium case of the size of a book."""

    junction_to_module_k_per_w: float = 0.35
    """Die, lid and paste. Xavier NX and Orin NX leave about 8 K between junction and plate at 25 W."""
    module_to_case_k_per_w: float = 0.45
    """A gap pad of 1 mm and 3 W/mK over 12 cm2 is 0.3 K/W; spreading in the plate adds to it."""
    case_to_ambient_k_per_w: float = 1.6
    """Free convection and radiation, 10 W/m2K together, over 0.06 m2 of finned case."""
    junction_j_per_k: float = 6.0
    """2.5 g of silicon and lid, and the paste: 2 to 3 s against the module, as tegrastats shows when a load begins."""
    module_j_per_k: float = 70.0
    """A plate of 50 g of aluminium (45 J/K) and half a board."""
    case_j_per_k: float = 900.0
    """1 kg of aluminium. With its resistance to air 24 minutes."""
    idle_w: float = 4.5
    """In the chip without inference: cameras, decoding, Linux. Orin NX idles at 4 to 6 W."""
    board_w: float = 2.5
    """Carrier board and power supply, straight into the case."""
    leakage_w: float = 1.5
    """Of the chip at 85 degrees, beyond idle."""
    leakage_per_k: float = 0.02
    """Leakage doubles in 35 K, as usual for such processes."""
    inference_j: float = 0.5
    """Energy of one inference of the full model: 15 W at 30 frames/s."""

    @property
    def resistance_k_per_w(self) -> float:
        """From junction to ambient."""
        return self.junction_to_module_k_per_w + self.module_to_case_k_per_w + self.case_to_ambient_k_per_w

    def leakage_at(self, junction_c: float) -> float:
        """Leakage in watts; held above 125 degrees, where no chip is any more."""
        return self.leakage_w * math.exp(self.leakage_per_k * (min(junction_c, 125.0) - _LEAKAGE_REFERENCE_C))

    def best_fps(
        self, limit_c: float, *, ambient_c: float, sun_w: float = 0.0, inference_j: float | None = None
    ) -> float:
        """Constant rate at which the junction settles just at ``limit_c``; negative if it is hotter without inference.

        In the steady state all heat passes the case, so that the balance can be solved for the rate.
        """
        case_rise_k = (self.board_w + sun_w) * self.case_to_ambient_k_per_w
        chip_w = (limit_c - ambient_c - case_rise_k) / self.resistance_k_per_w
        return (chip_w - self.idle_w - self.leakage_at(limit_c)) / (inference_j or self.inference_j)

    def ambient_for(self, limit_c: float, fps: float) -> float:
        """Ambient temperature in which ``fps`` is the best rate for ``limit_c``."""
        chip_w = self.idle_w + self.leakage_at(limit_c) + fps * self.inference_j
        return limit_c - chip_w * self.resistance_k_per_w - self.board_w * self.case_to_ambient_k_per_w

    def scaled(self, **factors: float) -> Self:
        """The same box with some figures multiplied."""
        return replace(self, **{name: getattr(self, name) * factor for name, factor in factors.items()})


PARAMETERS = tuple(field.name for field in fields(Box))


def sweep(seed: int, count: int, *, spread: float = 0.5) -> Iterator[Box]:
    """Boxes with all figures varied at once by up to ``spread``: a Latin hypercube, so that each range is covered."""
    rng = random.Random(seed)  # noqa: S311
    columns = []
    for _ in PARAMETERS:
        cells = [1 - spread + 2 * spread * (cell + rng.random()) / count for cell in range(count)]
        rng.shuffle(cells)
        columns.append(cells)
    for factors in zip(*columns, strict=True):
        yield Box().scaled(**dict(zip(PARAMETERS, factors, strict=True)))


class Plant:
    """A box in time. Temperatures are degrees Celsius."""

    def __init__(
        self,
        box: Box,
        *,
        ambient_c: float = 25.0,
        sun_w: float = 0.0,
        start_c: float | None = None,
        noise_c: float = 0.1,
        resolution_c: float = 0.05,
        seed: int = 0,
    ) -> None:
        self.box = box
        self.ambient_c = ambient_c
        self.sun_w = sun_w
        """Absorbed by the case."""
        self.inference_j = box.inference_j
        self.extra_w = 0.0
        """Of other processes, in the chip."""
        self._noise_c = noise_c
        self._resolution_c = resolution_c
        self._rng = random.Random(seed)  # noqa: S311
        self._nodes = (ambient_c if start_c is None else start_c,) * 3
        self._transitions: dict[float, tuple[tuple[float, ...], ...]] = {}

    @property
    def junction_c(self) -> float:
        """The true temperature, which no sensor shows."""
        return self._nodes[0]

    def measured_c(self) -> float:
        """What the sensor shows: Gaussian noise of ``noise_c``, then steps of ``resolution_c``."""
        value = self.junction_c + self._rng.gauss(0.0, self._noise_c)
        return round(value / self._resolution_c) * self._resolution_c

    def step(self, seconds: float, fps: float) -> None:
        """Let time pass at a constant rate of inference."""
        junction_w = self.box.idle_w + self.box.leakage_at(self.junction_c) + fps * self.inference_j + self.extra_w
        case_w = self.box.board_w + self.sun_w + self.ambient_c / self.box.case_to_ambient_k_per_w
        j, m, c = self._nodes
        rows = self._transition(seconds)
        self._nodes = tuple(a * j + b * m + d * c + e * junction_w + f * case_w for a, b, d, e, f in rows)  # type: ignore[assignment]

    def _transition(self, seconds: float) -> tuple[tuple[float, ...], ...]:
        if seconds not in self._transitions:
            self._transitions[seconds] = _transition(self.box, seconds)
        return self._transitions[seconds]


def _transition(box: Box, seconds: float) -> tuple[tuple[float, ...], ...]:
    """For each node: its weights of the three nodes before, of junction power and of case power. Exact."""
    jm, mc, ca = (
        1 / box.junction_to_module_k_per_w,
        1 / box.module_to_case_k_per_w,
        1 / box.case_to_ambient_k_per_w,
    )
    flows = np.array([[-jm, jm, 0], [jm, -jm - mc, mc], [0, mc, -mc - ca]])
    capacities = np.array([box.junction_j_per_k, box.module_j_per_k, box.case_j_per_k])
    rates = flows / capacities[:, None]
    values, vectors = np.linalg.eig(rates)
    advance = np.real(vectors @ np.diag(np.exp(values * seconds)) @ np.linalg.inv(vectors))
    # x' = A x + u / C has, for constant u, the solution e^At x + A^-1 (e^At - 1) u / C.
    forced = np.linalg.solve(rates, advance - np.eye(3)) / capacities[None, :]
    return tuple((*map(float, advance[node]), float(forced[node, 0]), float(forced[node, 2])) for node in range(3))

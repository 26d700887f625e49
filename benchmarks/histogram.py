"""How long does it take to sort an activation into bins, by each kernel, against numpy.histogram and a floor?

The floor finds the largest magnitude and nothing else. Values are like those of a layer: normal, and the same behind a
ReLU, where half of them are zero. One thread; the best of many rounds, in nanoseconds a value.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import machine
from calibration.kernel import BINS, KERNELS

if TYPE_CHECKING:
    from collections.abc import Callable

EXPONENT = 3


def main() -> None:
    """Print the table."""
    parser = machine.arguments(__doc__)
    parser.add_argument("--values", type=int, default=1_638_400, help="of a tensor (default: 1 x 16 x 320 x 320)")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    normal = np.random.default_rng(0).standard_normal(options.values).astype(np.float32)
    rows: list[dict[str, Any]] = []
    print(f"{'':<8} {'':<16} {'ns a value':>10} {'x floor':>8}")
    for name, values in (("normal", normal), ("ReLU", np.maximum(normal, 0))):
        counts = np.zeros(BINS, np.int64)
        ways: dict[str, Callable[[], object]] = {
            "floor: max |x|": lambda x=values: max(-x.min(), x.max()),
            **{f"kernel {k}": lambda x=values, f=f, c=counts: f(x, EXPONENT, c) for k, f in KERNELS.items()},
            "numpy.histogram": lambda x=values: np.histogram(np.abs(x), BINS, (0, 2**EXPONENT)),
        }
        floor = 0.0
        for what, call in ways.items():
            found = 1e9 * min(_seconds(call) for _ in range(options.rounds)) / options.values
            floor = floor or found
            rows.append(
                {"values": name, "what": what, "ns": round(found, 3), "ratio_to_floor": round(found / floor, 2)}
            )
            print(f"{name:<8} {what:<16} {found:>10.2f} {found / floor:>8.1f}")
    machine.finish(rows, options.json)


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()

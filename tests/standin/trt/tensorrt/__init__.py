"""Stand-in for TensorRT's Python bindings, for tests on machines without TensorRT. Nothing here is fast or NVIDIA's.

Which version it is, and on what hardware it believes to be, is said by the environment, since builders run in child
processes: STANDIN_TENSORRT (8.5.2, 10.3.0, 10.16.1 or 11.4.0), STANDIN_DLA_CORES (default 2; versions without DLA have
none all the same), STANDIN_COMPUTE (default 8.7) and STANDIN_FAULT, a comma-separated list of what goes wrong:

    oom-kill, crash       the process is killed while it builds
    build-fails           no implementation is found for a node
    out-of-memory         the builder says so
    parse:NODE            the parser refuses the node of that name
    wrong-int8, wrong-fp16  engines that have layers in that precision give garbage
    nan                   engines give NaN
    slow, hang            each step of a build takes 0.2 s, or for ever
    execute-fails         execute_async_v3 gives False

``arithmetic`` says what of the numbers is simulated.
"""

from __future__ import annotations

from tensorrt import builder as _builder  # noqa: F401 - fills the listing's exports
from tensorrt import listing as _listing
from tensorrt import runtime as _runtime  # noqa: F401 - likewise

SIMULATED = True
__version__ = _listing.VERSION


def _placeholder(name: str, entry: dict) -> object:
    """A name that the bindings have but the stand-in does not simulate."""
    if entry["kind"] == "function":

        def refuse(*_args: object, **_kwargs: object) -> object:
            raise NotImplementedError(f"the stand-in does not simulate tensorrt.{name}")

        return refuse
    return _listing.bound(type(name, (_listing.Bound,), {"__slots__": ()}))


for _name, _entry in _listing.LISTING.items():
    globals()[_name] = _listing.EXPORTS[_name] if _name in _listing.EXPORTS else _placeholder(_name, _entry)

# ruff: noqa: ARG002 - signatures are the bindings'
"""What user code derives from: loggers, progress monitors, calibrators. And how the library calls them."""

from __future__ import annotations

import sys
import time

from tensorrt.listing import EXPORTS, SEVERITY, Bound, bound, slot


def called(name: str, call, otherwise):
    """What a Python callback gives. Its exception goes to stderr and is lost, as in the bindings."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - whatever user code raises
        print(f"[ERROR] Exception caught in {name}(): {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
        return otherwise


def say(logger, severity: str, text: str) -> None:
    """Log a line."""
    called("log", lambda: logger.log(SEVERITY.__members__[severity], text), None)


class _Callback(Bound):
    """Base of what Python code derives from; like pybind11's, it insists on its own constructor."""

    __slots__ = ("_constructed",)

    def __init__(self):
        self._constructed = True


@bound
class ILogger(_Callback):
    __slots__ = ()
    Severity = SEVERITY

    def log(self, severity, msg):
        raise RuntimeError('Tried to call pure virtual function "ILogger::log"')


@bound
class Logger(ILogger):
    __slots__ = ("_least",)
    Severity = SEVERITY

    def __init__(self, min_severity=SEVERITY.WARNING):
        super().__init__()
        self._least = min_severity

    min_severity = slot("least", SEVERITY)

    def log(self, severity, msg):
        if severity.value <= self._least.value:
            letter = "F" if severity.value == 0 else severity.name[0]
            print(f"[{time.strftime('%m/%d/%Y-%H:%M:%S')}] [TRT] [{letter}] {msg}", file=sys.stderr)  # noqa: T201


for _severity, _member in SEVERITY.__members__.items():
    for _class in (ILogger, Logger):
        setattr(_class, _severity, _member)


@bound
class IProgressMonitor(_Callback):
    __slots__ = ()

    def phase_start(self, phase_name, parent_phase, num_steps):
        raise RuntimeError('Tried to call pure virtual function "IProgressMonitor::phaseStart"')

    def step_complete(self, phase_name, step):
        raise RuntimeError('Tried to call pure virtual function "IProgressMonitor::stepComplete"')

    def phase_finish(self, phase_name):
        raise RuntimeError('Tried to call pure virtual function "IProgressMonitor::phaseFinish"')


@bound
class IInt8Calibrator(_Callback):
    __slots__ = ()

    def get_batch_size(self):
        raise RuntimeError('Tried to call pure virtual function "IInt8Calibrator::get_batch_size"')

    def get_batch(self, names):
        return []

    def read_calibration_cache(self):
        return None

    def write_calibration_cache(self, cache):
        return None


@bound
class IInt8EntropyCalibrator2(IInt8Calibrator):
    __slots__ = ()

    def get_algorithm(self):
        return EXPORTS["CalibrationAlgoType"].ENTROPY_CALIBRATION_2


def derived(value, base):
    if value is not None and not isinstance(value, base):
        raise TypeError(f"(): incompatible function arguments: {value!r} is no tensorrt.{base.__name__}")
    if value is not None and not hasattr(value, "_constructed"):
        raise TypeError(f"tensorrt.{base.__name__}.__init__() must be called when overriding __init__")
    return value

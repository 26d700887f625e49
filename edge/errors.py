"""Errors a person can act on, cut by who must act. Each class carries the exit code that the commands end with.

Programming mistakes stay ValueError and TypeError, keep their traceback and exit with 70.
The codes are those of BSD's sysexits.h where it has one; 79 is the first beyond them.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class ExitCode(IntEnum):
    """Exit codes of both commands."""

    OK = 0
    LIMIT_EXCEEDED = 1
    USAGE = 2
    DATA = 65
    UNAVAILABLE = 69
    INTERNAL = 70
    IO = 74
    RESTART = 75
    CONFIG = 78
    BROKEN = 79
    INTERRUPTED = 130


class EdgeError(Exception):
    """Something a person can mend; its text is the one line shown to them."""

    exit_code = ExitCode.INTERNAL


class ConfigError(EdgeError):
    """The operator must edit the deployment file. Carries every problem found, not only the first."""

    exit_code = ExitCode.CONFIG

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class DataError(EdgeError):
    """Images, labels or a cache are missing or unusable."""

    exit_code = ExitCode.DATA


class ModelError(EdgeError):
    """A model or an engine is missing, unusable, or not the one it is said to be."""

    exit_code = ExitCode.DATA


class DeviceError(EdgeError):
    """Hardware, a driver or a library that the deployment needs is missing."""

    exit_code = ExitCode.UNAVAILABLE


class DeviceLostError(DeviceError):
    """The GPU has failed, and with it everything on it until the process is restarted."""


class SourceError(EdgeError):
    """A stream cannot be opened or has stopped."""

    exit_code = ExitCode.UNAVAILABLE


class ServiceError(EdgeError):
    """A service that the work needs, such as the MQTT broker, cannot be reached."""

    exit_code = ExitCode.UNAVAILABLE


class RestartWantedError(EdgeError):
    """The daemon has ended in good order to be started again, before a leak would end it in bad order."""

    exit_code = ExitCode.RESTART


class BrokenPartError(EdgeError):
    """A part of the daemon kept failing; only a new process is left to try."""

    exit_code = ExitCode.BROKEN


class HungError(BrokenPartError):
    """A part of the daemon does not come back, and threads cannot be killed: the process has to go."""

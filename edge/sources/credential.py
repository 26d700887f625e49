"""Where a camera's password is found. It is read once, when the stream is opened; a reload reads it again."""

from __future__ import annotations

import base64
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, quote_plus

from edge.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge import config

__all__ = ["Password", "disguises", "find_password"]


class Password(str):
    """A text that does not show in logs and tracebacks."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "Password(***)"


def find_password(
    section: config.Rtsp, *, stream: str, key: str, environ: Mapping[str, str] = os.environ
) -> Password | None:
    """The password of a camera's user: from ``password_file``, the systemd credential, or the environment.

    In this order; the credential is ``camera_<stream>_password``, the variable ``EDGE_CAMERA_<STREAM>_PASSWORD`` with
    underscores for what a variable's name cannot hold. None without a user, or if there is none of them.

    Raises:
        ConfigError: the file that should hold it cannot be read.
    """
    if section.username is None:
        return None
    if section.password_file is not None:
        return _first_line(Path(section.password_file), f"{key}.password_file")
    credential = f"camera_{stream}_password"
    folder = environ.get("CREDENTIALS_DIRECTORY")
    if folder and (Path(folder) / credential).exists():
        return _first_line(Path(folder) / credential, f"systemd credential {credential}")
    value = environ.get(f"EDGE_CAMERA_{re.sub('[^A-Z0-9]', '_', stream.upper())}_PASSWORD")
    return None if value is None else Password(value)


def disguises(username: str, password: str) -> list[str]:
    """Every form in which a library may print a password: as it is, percent-encoded, and as HTTP's Basic has it."""
    basic = base64.b64encode(f"{username}:{password}".encode()).decode()
    return [password, quote(password, safe=""), quote(password), quote_plus(password), basic]


def _first_line(path: Path, key: str) -> Password:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError([f"{key}: {path}: {error.strerror}"]) from None
    except UnicodeDecodeError:
        raise ConfigError([f"{key}: {path}: is not UTF-8 text"]) from None
    if not lines or not lines[0]:
        raise ConfigError([f"{key}: {path}: its first line is empty; it must hold the password"])
    return Password(lines[0])

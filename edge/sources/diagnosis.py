"""Why a camera does not work, from what its libraries printed. Pure: lines in, a phrase out."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["diagnose", "last_words", "masker"]

# Pattern of a line -> what it means for whoever has to mend it, as the end of a sentence about the camera. The first
# that fits any line wins: the nearer to a cause, the further up.
_MEANINGS = [
    (r'no element "([^"]+)"', "needs the GStreamer element {0}, which is not installed"),
    (r"\b401\b|[Uu]nauthori[sz]ed", "refuses the user name or password (401 Unauthorized)"),
    (r"\b403\b.*Forbidden", "refuses this user (403 Forbidden)"),
    (r"\b404\b|Stream Not Found|rtspsrc\d* reported: Not [Ff]ound", "has no stream of that address (404 Not Found)"),
    (r"\b461\b|Unsupported Transport", "does not offer this transport (461); try transport: tcp"),
    (r"\b453\b|Not Enough Bandwidth", "serves too many clients already (453 Not Enough Bandwidth)"),
    (r"[Cc]onnection refused", "cannot be reached: nothing listens at that address"),
    (r"rtspsrc\d* reported: Could not (?:open|connect)", "cannot be reached at that address"),
    (r"No route to host|Network is unreachable", "cannot be reached: there is no way to that address"),
    (r"[Nn]ame or service not known|Failed to resolve|Could not resolve", "cannot be reached: its name is not known"),
    (
        r"static TLS block",
        "needs a library that was loaded too late (static TLS): see LD_PRELOAD in docs/cameras.md",
    ),
    (
        r"Failed to create CaptureSession|Cannot create camera provider|Connecting to nvargus-daemon failed",
        "gets no session from Argus; systemctl restart nvargus-daemon if it stays so",
    ),
    (r"No cameras available|Invalid camera device specified", "is not there: Argus knows no sensor of that number"),
    (r"Device or resource busy|Device '.*' is busy", "is in use by another process"),
    (r"Permission denied", "may not be opened by this user; the group video usually may"),
    (r"not-negotiated|No supported formats found|not negotiated", "does not offer this size, rate or format"),
    (r"No such (?:file or directory|device)", "is not there"),
    (r"[Cc]onnection timed out|Operation timed out", "does not answer"),
    (r"Immediate exit requested", "does not answer"),
]
# OpenCV names its own file and line, whose numbers mean nothing here; FFmpeg the address of an object.
_PREFIX = re.compile(r"^\[ *[A-Z]+:\d+(?:@[\d.]+)?\] +global [^ ]+?(?::\d+| \(\d+\)) |^\[[\w,]+ @ (?:0x)?[0-9a-f]+\] ")
_CHATTER = re.compile(r"^\[ *(?:WARN|INFO|DEBUG):|^\s*$")
_MOST = 200


def diagnose(lines: Sequence[str]) -> str | None:
    """What lines of FFmpeg, GStreamer, Argus and OpenCV mean, as the end of a sentence about the camera.

    None if nothing is known about any of them.
    """
    texts = [_PREFIX.sub("", line) for line in reversed(lines)]
    for pattern, meaning in _MEANINGS:
        for text in texts:
            found = re.search(pattern, text)
            if found is not None:
                return meaning.format(*found.groups())
    return None


def last_words(lines: Sequence[str]) -> str | None:
    """The last line that is more than OpenCV's warning that something did not work."""
    telling = [line for line in lines if not _CHATTER.match(line)]
    return _PREFIX.sub("", telling[-1]).strip()[:_MOST] if telling else None


def masker(secrets: Iterable[str]) -> Callable[[str], str]:
    """A function that replaces each of the secrets in a text by ``***``."""
    # The longest first, since one may be part of another.
    known = sorted({secret for secret in secrets if secret}, key=len, reverse=True)
    if not known:
        return lambda text: text
    pattern = re.compile("|".join(map(re.escape, known)))
    return lambda text: pattern.sub("***", text)

"""What the daemon tells systemd: the sd_notify protocol in pure Python (sd_notify(3)).

Without ``NOTIFY_SOCKET``, which systemd sets for units of ``Type=notify``, nothing is sent.
"""

from __future__ import annotations

import logging
import os
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["notify", "watchdog_period_s"]

logger = logging.getLogger(__name__)


def notify(*assignments: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Send assignments such as ``READY=1`` or ``STATUS=2 streams`` in one datagram.

    The service manager is told, never depended on: a failure is a warning in the log.

    Returns:
        Whether there was somebody to tell, and they were told.
    """
    address = environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]  # the abstract namespace, which inside containers systemd prefers
    # A newline would start an assignment of its own.
    message = "\n".join(" ".join(assignment.splitlines()) for assignment in assignments)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.connect(address)
            sender.sendall(message.encode())
    except OSError as error:
        logger.warning("cannot notify systemd at %s: %s", environ["NOTIFY_SOCKET"], error.strerror or error)
        return False
    return True


def watchdog_period_s(environ: Mapping[str, str] = os.environ, *, pid: int | None = None) -> float | None:
    """How often to send ``WATCHDOG=1``: half of what the unit's WatchdogSec allows, as sd_watchdog_enabled(3) advises.

    Returns:
        Seconds, or None where no watchdog waits for this process.
    """
    text = environ.get("WATCHDOG_USEC", "")
    meant_for = environ.get("WATCHDOG_PID", "")
    if not text.isdigit() or int(text) == 0 or (meant_for and meant_for != str(pid or os.getpid())):
        return None
    return int(text) / 2e6

"""systemd's protocol for services that say when they are ready: ``Type=notify``, sd_notify(3)."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress


def notify(*words: str, environ: Mapping[str, str] | None = None) -> None:
    """Send assignments such as ``READY=1`` to who started us; nothing happens where that was not systemd."""
    address = (os.environ if environ is None else environ).get("NOTIFY_SOCKET", "")
    if address[:1] not in ("/", "@"):
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.sendto("\n".join(words).encode(), f"\0{address[1:]}" if address[0] == "@" else address)

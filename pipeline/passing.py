"""Faults that pass by themselves: a network or a server that was away."""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Iterator
from typing import Final

_NETWORK: Final = {
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.ECONNABORTED,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.ENETDOWN,
    errno.EHOSTDOWN,
    errno.ETIMEDOUT,
}
# What the libraries below datasets, fsspec and the Hub's client raise where there was no answer: by name, so that a
# library that is not there need not be.
_NO_ANSWER: Final = {
    "httpx": {"TimeoutException", "NetworkError", "RemoteProtocolError", "ProxyError"},
    "requests": {"ConnectionError", "Timeout", "ChunkedEncodingError"},
    "urllib3": {"NewConnectionError", "TimeoutError", "ProtocolError", "MaxRetryError"},
    "aiohttp": {"ClientConnectionError", "ClientPayloadError"},
}
_NAMED: Final = re.compile(
    r"\b(ConnectionError|Connection(Refused|Reset|Aborted)Error|ConnectTimeout|ReadTimeout|ConnectError|ReadError|"
    r"RemoteProtocolError|ServerDisconnectedError|ServerTimeoutError|ClientConnector\w*Error|ClientOSError|"
    r"ClientPayloadError|MaxRetryError|gaierror)\b"
)
_STATUS: Final = re.compile(r"\b(HfHubHTTPError|HTTPError|HTTPStatusError|ClientResponseError): (429|50[02-9]|52\d)\b")
_NEVER: Final = ("CERTIFICATE_VERIFY_FAILED", "OfflineModeIsEnabled", "HF_HUB_OFFLINE")


def passes(error: BaseException) -> bool:
    """Whether what an error was raised from is a connection without an answer, or one of 429 or 5xx.

    Not where somebody asked to stay offline, nor for a certificate: the same question has the same answer then.
    """
    causes = list(_causes(error))
    if any(mark in f"{type(cause).__name__}: {cause}" for cause in causes for mark in _NEVER):
        return False
    statuses = [status for cause in causes if (status := _status(cause)) is not None]
    if statuses:
        return statuses[0] == 429 or (statuses[0] >= 500 and statuses[0] != 501)
    return any(_unanswered(cause) for cause in causes)


def _unanswered(error: BaseException) -> bool:
    if isinstance(error, ConnectionError | TimeoutError | socket.gaierror):
        return True
    if isinstance(error, OSError) and error.errno in _NETWORK:
        return True
    return any(
        kind.__name__ in _NO_ANSWER.get(kind.__module__.partition(".")[0].rstrip("2"), ())
        for kind in type(error).__mro__
    )


def _status(error: BaseException) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _causes(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)


def told_to_pass(words: str) -> bool:
    """Whether a program's last words, a traceback's end among them, name such a fault: all that is left of a child."""
    if any(mark in words for mark in _NEVER):
        return False
    return _NAMED.search(words) is not None or _STATUS.search(words) is not None

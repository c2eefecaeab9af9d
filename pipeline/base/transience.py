"""Decide whether an error is transient: a network or server that was unreachable, so that a retry may succeed."""

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
# What Python and the libraries below datasets, fsspec and the Hub's client (httpx, requests, urllib3, aiohttp) raise
# where there was no answer: by name, so that a library that is not there need not be, and a child's words can be read.
_NO_ANSWER: Final = re.compile(
    r"\b(ConnectionError|Connection(Refused|Reset|Aborted)Error|gaierror|ConnectTimeout|ReadTimeout|ConnectError|"
    r"ReadError|NetworkError|TimeoutException|RemoteProtocolError|ProxyError|ChunkedEncodingError|NewConnectionError|"
    r"ProtocolError|MaxRetryError|ServerDisconnectedError|ServerTimeoutError|ClientConnect\w*Error|ClientOSError|"
    r"ClientPayloadError)\b"
)
_STATUS: Final = re.compile(r"\b(?:HfHubHTTPError|HTTPError|HTTPStatusError|ClientResponseError): (\d{3})\b")
_NEVER: Final = ("CERTIFICATE_VERIFY_FAILED", "OfflineModeIsEnabled", "HF_HUB_OFFLINE")


def is_transient_status(status: int) -> bool:
    """Return whether an HTTP status is transient: 429, or 5xx except 501 (not implemented)."""
    return status == 429 or (status >= 500 and status != 501)


def is_transient(error: BaseException) -> bool:
    """Return whether an error or one of its causes is a connection without an answer, or a busy server's answer.

    False in offline mode and for certificate errors, where a retry has the same result.
    """
    causes = list(_causes(error))
    if any(mark in f"{type(cause).__name__}: {cause}" for cause in causes for mark in _NEVER):
        return False
    answers = (getattr(getattr(cause, "response", None), "status_code", None) for cause in causes)
    statuses = [status for status in answers if isinstance(status, int)]
    return is_transient_status(statuses[0]) if statuses else any(_unanswered(cause) for cause in causes)


def says_transient(words: str) -> bool:
    """Return whether a process's last output, such as the end of a traceback, shows a transient error."""
    if any(mark in words for mark in _NEVER):
        return False
    return _NO_ANSWER.search(words) is not None or any(
        is_transient_status(int(status)) for status in _STATUS.findall(words)
    )


def _unanswered(error: BaseException) -> bool:
    if isinstance(error, ConnectionError | TimeoutError | socket.gaierror):
        return True
    if isinstance(error, OSError) and error.errno in _NETWORK:
        return True
    return any(_NO_ANSWER.fullmatch(kind.__name__) for kind in type(error).__mro__)


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)

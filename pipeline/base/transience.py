"""The one rule of what is transient: a network or a server that was away, so that the same command may soon succeed."""

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
    """Whether an answer of HTTP says that the server is busy or ill: 429, or 5xx but 501, which it never does."""
    return status == 429 or (status >= 500 and status != 501)


def is_transient(error: BaseException) -> bool:
    """Whether an error, or what it was raised from, is a connection without an answer, or one of a busy server.

    Not where somebody asked to stay offline, nor for a certificate: the same question has the same answer then.
    """
    causes = list(_causes(error))
    if any(mark in f"{type(cause).__name__}: {cause}" for cause in causes for mark in _NEVER):
        return False
    answers = (getattr(getattr(cause, "response", None), "status_code", None) for cause in causes)
    statuses = [status for status in answers if isinstance(status, int)]
    return is_transient_status(statuses[0]) if statuses else any(_unanswered(cause) for cause in causes)


def says_transient(words: str) -> bool:
    """The same of a program's last words, a traceback's end among them: all that is left of a child."""
    if any(mark in words for mark in _NEVER):
        return False
    return _NO_ANSWER.search(words) is not None or any(
        is_transient_status(int(said)) for said in _STATUS.findall(words)
    )


def _unanswered(error: BaseException) -> bool:
    if isinstance(error, ConnectionError | TimeoutError | socket.gaierror):
        return True
    if isinstance(error, OSError) and error.errno in _NETWORK:
        return True
    return any(_NO_ANSWER.fullmatch(kind.__name__) for kind in type(error).__mro__)


def _causes(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)

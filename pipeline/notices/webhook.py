"""A receiver of notices: one address, to which JSON is sent in order, by a thread of its own.

::

    with closing(Webhook("https://ci.example.org/hook/…", secret=b"…", warn=print)) as hook:
        hook.send(event)        # returns at once, whatever the receiver does

A receiver that is slow, away or wrong costs nobody anything but its own notices: the queue is bounded, the oldest goes
first, and the end waits for a few seconds only. It is told of by its host, once for each outage, as an address is a
secret: who knows one may write to it. A redirect is not followed, for the signature was made for this receiver.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPException, HTTPMessage
from typing import IO, TYPE_CHECKING, Final
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from pipeline import __version__
from pipeline.errors import UserError
from pipeline.fleet.events import Event
from pipeline.notices.body import body_of, signature_of

if TYPE_CHECKING:
    from tenacity import RetryCallState

ADDRESSES: Final = "QUANTMINT_WEBHOOK"
SECRET: Final = "QUANTMINT_WEBHOOK_SECRET"  # noqa: S105 - the name of the variable
ATTEMPTS: Final = 5
TIMEOUT_S: Final = 10.0
FIRST_WAIT_S: Final = 1.0
LAST_WAIT_S: Final = 60.0
CLOSE_S: Final = 5.0
_QUEUED: Final = 256


@dataclass(frozen=True, slots=True)
class Notice:
    """What is sent for an event; ``identity`` stays when it is sent again."""

    kind: str
    identity: str
    body: bytes


class Webhook:
    """One receiver. ``warn`` hears of what could not be delivered, from the thread that sends.

    ``timeout_s`` limits one answer, ``first_wait_s`` is the wait before the second attempt.
    """

    def __init__(
        self,
        address: str,
        *,
        secret: bytes | None = None,
        warn: Callable[[str], None],
        timeout_s: float = TIMEOUT_S,
        first_wait_s: float = FIRST_WAIT_S,
        queued: int = _QUEUED,
    ) -> None:
        self.host = host_of(address)
        self._address = address
        self._secret = secret
        self._warn = warn
        self._timeout_s = timeout_s
        self._first_wait_s = first_wait_s
        self._waiting: deque[Notice] = deque(maxlen=queued)
        self._changed = threading.Condition()
        self._closing = False
        self._dropped = 0  # notices that made room for later ones
        self._away = False  # whether the last notice failed, which was told then
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"webhook at {self.host}", daemon=True)
        self._thread.start()

    def send(self, event: Event) -> None:
        """Queue a notice; where the queue is full the oldest makes room."""
        identity = secrets.token_hex(16)
        notice = Notice(event.kind, identity, body_of(event, identity))
        with self._changed:
            self._dropped += len(self._waiting) == self._waiting.maxlen
            self._waiting.append(notice)
            self._changed.notify()

    def close(self, within_s: float = CLOSE_S) -> None:
        """Wait until all is sent, ``within_s`` seconds at the most."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(within_s)
        self._stop.set()  # no further attempt; a thread that hangs in one ends with the process
        with self._changed:
            missing = self._dropped + len(self._waiting) + self._thread.is_alive()
        if missing and not self._away:
            self._warn(f"the webhook at {self.host} is too slow: {missing} notice(s) did not reach it")

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting or self._stop.is_set():
                    return
                notice = self._waiting.popleft()
            fault = self._fault_of(notice)
            if fault is not None and not self._away and not self._stop.is_set():
                self._warn(f"the webhook at {self.host} {fault}; until it does better its notices are lost")
            self._away = fault is not None

    def _fault_of(self, notice: Notice) -> str | None:
        """Send a notice, several times where that may help; what is wrong with the receiver, None for nothing."""
        from tenacity import Retrying, retry_if_exception, sleep_using_event, stop_after_attempt, stop_when_event_set

        retrying = Retrying(
            stop=stop_after_attempt(ATTEMPTS) | stop_when_event_set(self._stop),
            wait=self._wait_s,
            sleep=sleep_using_event(self._stop),
            retry=retry_if_exception(_passes),
            reraise=True,
        )
        try:
            retrying(self._post, notice)
        except Exception as error:  # whatever happens here is the receiver's matter, and no round's
            return _told(error, self._timeout_s)
        return None

    def _post(self, notice: Notice) -> None:
        headers = {
            "Content-Type": "application/json",
            "User-Agent": f"quantmint/{__version__}",
            "X-Quantmint-Event": notice.kind,
            "X-Quantmint-Delivery": notice.identity,
        }
        if self._secret is not None:
            headers["X-Quantmint-Signature"] = signature_of(notice.body, self._secret)
        request = Request(self._address, data=notice.body, headers=headers, method="POST")  # noqa: S310 - see host_of
        with build_opener(_NoRedirect).open(request, timeout=self._timeout_s):
            pass

    def _wait_s(self, state: RetryCallState) -> float:
        """Seconds before the next attempt: what the receiver asks for, else twice the last, and a little chance."""
        from tenacity import wait_exponential, wait_random

        error = state.outcome.exception() if state.outcome is not None else None
        asked = error.headers.get("Retry-After", "") if isinstance(error, HTTPError) else ""
        if asked.isdecimal():
            return min(float(asked), LAST_WAIT_S)
        waits = wait_exponential(multiplier=self._first_wait_s, max=LAST_WAIT_S) + wait_random(0, self._first_wait_s)
        return waits(state)


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        """Nowhere: the answer itself is the fault that is told."""


def addresses(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The receivers that the environment names, each once. Raises `UserError`, which quotes none of them."""
    found = tuple(dict.fromkeys(environ.get(ADDRESSES, "").split()))
    for number, address in enumerate(found, 1):
        try:
            host_of(address)
        except ValueError as error:
            which = f"address {number} of {len(found)}" if len(found) > 1 else "the address"
            raise UserError(
                f"{ADDRESSES}: {which} {error}, expected https://HOST/PATH",
                hint="Several are separated by spaces. The address is not shown here, as it may be a secret.",
            ) from None
    return found


def host_of(address: str) -> str:
    """Host, and port where there is one: what may be shown of an address. Raises `ValueError` with what is wrong."""
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError:
        raise ValueError("is no URL") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("is not one of http or https")
    if parts.username is not None:
        raise ValueError("has a user name in it, which is not sent")
    if not (address.isascii() and address.isprintable()):
        raise ValueError("has characters that must be escaped")
    return parts.hostname if port is None else f"{parts.hostname}:{port}"


def _passes(error: BaseException) -> bool:
    if isinstance(error, HTTPError):  # an OSError as well
        return error.code >= 500 or error.code == 429
    return isinstance(error, OSError | HTTPException)


def _told(error: Exception, timeout_s: float) -> str:
    """What a receiver did, in words of our own: an exception's may quote the address."""
    if isinstance(error, HTTPError):
        error.close()
        if 300 <= error.code < 400:
            return f"answered {error.code}: it leads to another address, to which nothing is sent"
        return f"answered {error.code}"
    reason = error.reason if isinstance(error, URLError) else error
    if isinstance(reason, TimeoutError):
        return f"did not answer within {timeout_s:g} s"
    if isinstance(reason, OSError) and reason.strerror:
        return f"cannot be reached: {reason.strerror}"
    return f"cannot be reached: {type(reason).__name__}"

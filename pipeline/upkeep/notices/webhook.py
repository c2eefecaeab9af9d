"""A webhook that hears of a fleet's events; ``docs/notices.md`` tells receivers what each field is.

A receiver that is slow, away or wrong costs nobody anything but its own notices. It is told of by its host, once for
each outage, as an address is a secret: who knows one may write to it. A redirect is not followed, for the signature was
made for this receiver.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from http.client import HTTPMessage
from queue import SimpleQueue
from typing import IO, Any, Final
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from pipeline import __version__
from pipeline.base.errors import UserError
from pipeline.base.transience import is_transient_status
from pipeline.upkeep.fleet.events import Event

SCHEMA: Final = 1
ATTEMPTS: Final = 5
TIMEOUT_S: Final = 10.0
CLOSE_S: Final = 5.0


class Webhook:
    """One receiver, to which JSON is sent in order by a thread of its own. `send` returns at once.

    ``warn`` hears of what could not be delivered, from the thread that sends. ``timeout_s`` limits one answer,
    ``first_wait_s`` is the wait before the second attempt, which doubles from then on. Raises `UserError` for an
    address that cannot be used, without quoting it.
    """

    def __init__(
        self,
        address: str,
        *,
        secret: bytes | None = None,
        warn: Callable[[str], None],
        timeout_s: float = TIMEOUT_S,
        first_wait_s: float = 1.0,
    ) -> None:
        self.host = host_of(address)
        self._address, self._secret, self._warn = address, secret, warn
        self._timeout_s, self._first_wait_s = timeout_s, first_wait_s
        self._waiting: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"webhook at {self.host}", daemon=True)
        self._thread.start()

    def send(self, event: Event) -> None:
        """Queue a notice where receivers hear of the event: not of stages, nor where nothing was due."""
        if event.kind not in ("stage", "waiting") and event.state != "current":
            self._waiting.put(notice_of(event))

    def close(self, within_s: float = CLOSE_S) -> None:
        """Wait until all is sent, ``within_s`` seconds at the most."""
        self._waiting.put(None)
        self._thread.join(within_s)
        self._stop.set()  # no further attempt; a thread that hangs in one ends with the process
        if self._thread.is_alive():
            self._warn(f"the webhook at {self.host} is too slow: what waited did not reach it")

    def _work(self) -> None:
        away = False  # whether the last notice failed, which was told then
        while (notice := self._waiting.get()) is not None and not self._stop.is_set():
            fault = self._fault_of(notice)
            if fault is not None and not away and not self._stop.is_set():
                self._warn(f"the webhook at {self.host} {fault}; until it does better its notices are lost")
            away = fault is not None

    def _fault_of(self, notice: Mapping[str, Any]) -> str | None:
        fault = None
        for attempt in range(ATTEMPTS):
            try:
                self._post(notice)
                return None
            except Exception as error:  # whatever happens here is the receiver's matter, and no round's
                fault = _told(error, self._timeout_s)
                if isinstance(error, HTTPError) and not is_transient_status(error.code):
                    break
            if self._stop.wait(self._first_wait_s * 2**attempt if attempt + 1 < ATTEMPTS else 0):
                break
        return fault

    def _post(self, notice: Mapping[str, Any]) -> None:
        body = json.dumps(notice, allow_nan=False).encode()
        headers = {
            "Content-Type": "application/json",
            "User-Agent": f"quantmint/{__version__}",
            "X-Quantmint-Event": notice["event"],
            "X-Quantmint-Delivery": notice["id"],
        }
        if self._secret is not None:  # RFC 2104, written as GitHub does
            headers["X-Quantmint-Signature"] = "sha256=" + hmac.new(self._secret, body, hashlib.sha256).hexdigest()
        request = Request(self._address, data=body, headers=headers, method="POST")  # noqa: S310 - see host_of
        with build_opener(_NoRedirect).open(request, timeout=self._timeout_s):
            pass


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        """Nowhere: the answer itself is the fault that is told."""


def notice_of(event: Event) -> dict[str, Any]:
    """What is sent for an event. ``id`` is the notice's own: the same when it is sent again."""
    fields = asdict(event)
    del fields["stage"]  # of events that are not told
    head = {"schema": SCHEMA, "id": secrets.token_hex(16), "event": fields.pop("kind"), "host": socket.gethostname()}
    return head | {"quantmint": __version__} | fields


def host_of(address: str) -> str:
    """Host, and port where there is one: what may be shown of an address. Raises `UserError`."""
    try:
        parts = urlsplit(address)
        port = parts.port
        plain = address.isascii() and address.isprintable() and " " not in address and parts.username is None
    except ValueError:
        plain = False
    if not plain or parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(
            "QUANTMINT_WEBHOOK: found something else than an address https://HOST/PATH without a user name",
            hint="The address is not shown here, as it may be a secret.",
        )
    return parts.hostname if port is None else f"{parts.hostname}:{port}"


def _told(error: Exception, timeout_s: float) -> str:
    """What a receiver did, in words of our own: an exception's may quote the address."""
    if isinstance(error, HTTPError):
        error.close()
        return f"answered {error.code}"
    reason = error.reason if isinstance(error, URLError) else error
    if isinstance(reason, TimeoutError):
        return f"did not answer within {timeout_s:g} s"
    return f"cannot be reached: {getattr(reason, 'strerror', None) or type(reason).__name__}"

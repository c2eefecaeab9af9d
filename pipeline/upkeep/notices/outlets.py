"""Who hears of a fleet's events, as one callback: a webhook, and metrics (`pipeline.upkeep.notices.metrics`).

::

    with outlets(store, warn=progress.warn, metrics_file=Path("/var/lib/node_exporter/quantmint.prom")) as told:
        fleet.run(requests, options, on_event=told.hear)

``docs/notices.md`` tells receivers of the webhook what each field is; a field that is added changes no number, one that
changes its meaning raises ``schema``. A receiver that is slow, away or wrong costs nobody anything but its own notices.
It is told of by its host, once for each outage, as an address is a secret: who knows one may write to it. A redirect is
not followed, for the signature was made for this receiver.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from http.client import HTTPException, HTTPMessage
from pathlib import Path
from queue import SimpleQueue
from typing import IO, TYPE_CHECKING, Any, Final
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from pipeline import __version__
from pipeline.base.errors import UserError
from pipeline.upkeep.fleet.events import Event

if TYPE_CHECKING:
    from pipeline.upkeep.notices.metrics import Metrics

ADDRESS: Final = "QUANTMINT_WEBHOOK"
SECRET: Final = "QUANTMINT_WEBHOOK_SECRET"  # noqa: S105 - the name of the variable
SCHEMA: Final = 1
ATTEMPTS: Final = 5
TIMEOUT_S: Final = 10.0
FIRST_WAIT_S: Final = 1.0
CLOSE_S: Final = 5.0


class Outlets:
    """A webhook, and metrics where somebody reads them. Neither `hear` nor `plan` raises."""

    def __init__(self, hook: Webhook | None, metrics: Metrics | None) -> None:
        self._hook, self._metrics = hook, metrics

    def hear(self, event: Event) -> None:
        """Pass an event on."""
        if self._hook is not None:
            self._hook.send(event)
        if self._metrics is not None:
            self._metrics.hear(event)

    def plan(self, fires: Mapping[str, float]) -> None:
        """Pass on when each recipe's schedule comes next (seconds since the epoch)."""
        if self._metrics is not None:
            self._metrics.plan(fires)


@contextmanager
def outlets(
    store: Path,
    *,
    warn: Callable[[str], None],
    metrics_file: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Iterator[Outlets]:
    """Everything that is asked for; at the exit, what is still to be sent has a few seconds.

    The webhook comes from the environment: QUANTMINT_WEBHOOK, and QUANTMINT_WEBHOOK_SECRET for its signature. Raises
    `UserError` for an address or a file that cannot be used.
    """
    variables = os.environ if environ is None else environ
    address = address_in(variables)
    metrics = None
    if metrics_file is not None:
        from pipeline.upkeep.notices.metrics import Metrics

        metrics = Metrics(metrics_file, store, warn=warn)
    hook = None
    if address is not None:
        hook = Webhook(address, secret=variables.get(SECRET, "").encode() or None, warn=warn)
    try:
        yield Outlets(hook, metrics)
    finally:
        if hook is not None:
            hook.close()


class Webhook:
    """One receiver, to which JSON is sent in order by a thread of its own. `send` returns at once.

    ``warn`` hears of what could not be delivered, from the thread that sends. ``timeout_s`` limits one answer,
    ``first_wait_s`` is the wait before the second attempt, which doubles from then on.
    """

    def __init__(
        self,
        address: str,
        *,
        secret: bytes | None = None,
        warn: Callable[[str], None],
        timeout_s: float = TIMEOUT_S,
        first_wait_s: float = FIRST_WAIT_S,
    ) -> None:
        self.host = host_of(address)
        self._address = address
        self._secret = secret
        self._warn = warn
        self._timeout_s = timeout_s
        self._first_wait_s = first_wait_s
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
        """Send a notice, several times where that may help; what is wrong with the receiver, None for nothing."""
        from tenacity import (
            Retrying,
            retry_if_exception,
            sleep_using_event,
            stop_after_attempt,
            stop_when_event_set,
            wait_exponential,
        )

        retrying = Retrying(
            stop=stop_after_attempt(ATTEMPTS) | stop_when_event_set(self._stop),
            wait=wait_exponential(multiplier=self._first_wait_s),
            sleep=sleep_using_event(self._stop),
            retry=retry_if_exception(_passes),
            reraise=True,
        )
        try:
            retrying(self._post, notice)
        except Exception as error:  # whatever happens here is the receiver's matter, and no round's
            return _told(error, self._timeout_s)
        return None

    def _post(self, notice: Mapping[str, Any]) -> None:
        body = json.dumps(notice, allow_nan=False).encode()
        headers = {
            "Content-Type": "application/json",
            "User-Agent": f"quantmint/{__version__}",
            "X-Quantmint-Event": notice["event"],
            "X-Quantmint-Delivery": notice["id"],
        }
        if self._secret is not None:
            headers["X-Quantmint-Signature"] = signature_of(body, self._secret)
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


def signature_of(body: bytes, secret: bytes) -> str:
    """``sha256=`` and the HMAC-SHA256 of the body in hex (RFC 2104), as GitHub writes it."""
    return "sha256=" + hmac.new(secret, body, hashlib.sha256).hexdigest()


def address_in(environ: Mapping[str, str]) -> str | None:
    """The receiver that the environment names, if any. Raises `UserError`, which does not quote it."""
    address = environ.get(ADDRESS, "").strip()
    if not address:
        return None
    try:
        host_of(address)
    except ValueError as error:
        raise UserError(
            f"{ADDRESS}: the address {error}, expected one https://HOST/PATH",
            hint="The address is not shown here, as it may be a secret.",
        ) from None
    return address


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
    if not (address.isascii() and address.isprintable()) or " " in address:
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
        return f"answered {error.code}"
    reason = error.reason if isinstance(error, URLError) else error
    if isinstance(reason, TimeoutError):
        return f"did not answer within {timeout_s:g} s"
    if isinstance(reason, OSError) and reason.strerror:
        return f"cannot be reached: {reason.strerror}"
    return f"cannot be reached: {type(reason).__name__}"

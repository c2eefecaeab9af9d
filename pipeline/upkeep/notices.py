"""Who hears how rounds go, as one callback: a webhook, and Prometheus; ``docs/notices.md`` says what each field is.

A receiver that is slow, away or wrong costs nobody anything but its own notices. It is told of by its host, once for
each outage, as an address is a secret: who knows one may write to it. A redirect is not followed, for the signature was
made for this receiver.

Prometheus is shown a file for the node exporter's textfile collector: of each recipe what the store keeps between
rounds, so that several schedulers on one store show the same; of a round what it told last.
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
from datetime import datetime
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from quantmint.eval.verdict import Verdict
from quantmint.pipeline import __version__
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.transience import is_transient_status
from quantmint.pipeline.upkeep.fleet.events import Event, RecipeState, State, all_states

SCHEMA: Final = 1
ATTEMPTS: Final = 5
TIMEOUT_S: Final = 10.0
CLOSE_S: Final = 5.0


class Webhook:
    """One receiver, to which a thread sends notices as JSON, in order. `send` returns at once.

    ``secret`` is the key of the HMAC signature (None: unsigned). ``warn`` is called from that thread with what could
    not be delivered. ``timeout_s`` limits one request, ``first_wait_s`` is the wait before the second attempt, which
    doubles from then on. Raises `UserError` for an address that cannot be used, without quoting it.
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
        """Queue a notice of the event; events "stage" and "waiting", and recipes that were current, are not sent."""
        if event.kind not in ("stage", "waiting") and event.state != "current":
            fields = asdict(event)
            del fields["stage"]  # of events that are not told
            # The id is the notice's own: the same when it is sent again.
            head = {"schema": SCHEMA, "id": secrets.token_hex(16), "event": fields.pop("kind")}
            self._waiting.put(head | {"host": socket.gethostname(), "quantmint": __version__} | fields)

    def close(self, within_s: float = CLOSE_S) -> None:
        """Wait until all notices are sent, for at most ``within_s`` seconds; warn if some are left."""
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
    def redirect_request(self, *_: object, **__: object) -> None:
        """Follow no redirect, so that the answer itself becomes the error."""


def host_of(address: str) -> str:
    """Return host, and port if there is one, of a webhook's address: the part that may be shown.

    Raises `UserError` for anything but an http or https address without a user name.
    """
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
    """Return a phrase on a failed delivery; the exception's own text may quote the address, which is a secret."""
    if isinstance(error, HTTPError):
        error.close()
        return f"answered {error.code}"
    reason = error.reason if isinstance(error, URLError) else error
    if isinstance(reason, TimeoutError):
        return f"did not answer within {timeout_s:g} s"
    return f"cannot be reached: {getattr(reason, 'strerror', None) or type(reason).__name__}"


SUFFIX: Final = ".prom"
_DONE: Final[frozenset[State]] = frozenset({"ran", "current", "held"})


class Metrics:
    """The metrics of one process, in the file ``path``; ``warn`` is called once for each fault.

    Raises `UserError` for a file name that Prometheus's textfile collector ignores, and for a file that cannot be
    written.
    """

    def __init__(self, path: Path, store: Path, *, warn: Callable[[str], None]) -> None:
        if path.suffix != SUFFIX:
            raise UserError(
                f"the metrics file {path} would not be read: the textfile collector takes files that end in {SUFFIX}",
                hint=f"{path.with_suffix(SUFFIX)}",
            )
        self._path, self._store, self._warn = path, store, warn
        self._lock = threading.Lock()
        self._queued = self._running = 0
        self._damaged: dict[str, bool] = {}
        self._told: set[str] = set()
        self._write()

    def hear(self, event: Event) -> None:
        """Update queue length, running recipes and damaged releases from an event, and write the file again.

        Stage events are ignored; faults of the disk become warnings.
        """
        if event.kind == "stage":
            return
        with self._lock:
            self._queued, self._running = event.queued, event.running
            if event.state == "damaged" or event.state in _DONE:
                self._damaged[event.recipe] = event.state == "damaged"
            self._renew()

    def _renew(self) -> None:
        try:
            self._write()
        except UserError as error:
            self._tell(error.message)

    def _write(self) -> None:
        from prometheus_client import CollectorRegistry, Gauge, write_to_textfile

        registry = CollectorRegistry()
        states = all_states(self._store, warn=self._tell)

        def by_recipe(name: str, text: str, values: Mapping[str, float | None]) -> None:
            gauge = Gauge(f"quantmint_{name}", text, ["recipe"], registry=registry)
            for recipe, value in sorted(values.items()):
                if value is not None:
                    gauge.labels(recipe).set(value)

        def of_state(name: str, text: str, value_of: Callable[[RecipeState], float | None]) -> None:
            by_recipe(name, text, {recipe: value_of(state) for recipe, state in states.items()})

        of_state("last_success_timestamp_seconds", "Last end in PASS.", lambda one: _seconds(one.last_success))
        of_state("last_attempt_timestamp_seconds", "End of the last attempt.", lambda one: _seconds(one.last_attempt))
        of_state("last_duration_seconds", "Of the last attempt that came to its end.", lambda one: one.last_duration_s)
        of_state("release_timestamp_seconds", "Newest release that is known.", lambda one: _seconds(one.released))
        of_state("attempts_failed", "Rounds that failed since one that did not.", lambda one: one.attempts_failed)
        verdicts = Gauge("quantmint_last_verdict", "1 for the last verdict.", ["recipe", "verdict"], registry=registry)
        for recipe, state in states.items():
            for verdict in Verdict:
                verdicts.labels(recipe, verdict.value).set(state.last_verdict == verdict.value)
        by_recipe("release_damaged", "1 where its release could not be read when last looked at.", self._damaged)
        Gauge("quantmint_queue_length", "Recipes that wait.", registry=registry).set(self._queued)
        Gauge("quantmint_running", "Recipes that run.", registry=registry).set(self._running)
        try:
            write_to_textfile(str(self._path), registry)
        except OSError as error:
            what = f"the metrics file {self._path} cannot be written: {error.strerror or error}"
            raise UserError(what) from None

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._warn(text)


def _seconds(text: str | None) -> float | None:
    return None if text is None else datetime.fromisoformat(text).timestamp()


@contextmanager
def outlets(
    store: Path,
    *,
    warn: Callable[[str], None],
    metrics_file: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Iterator[Callable[[Event], None]]:
    """Yield a function that passes events to the webhook and the metrics file and never raises.

    QUANTMINT_WEBHOOK names the webhook, QUANTMINT_WEBHOOK_SECRET the key of its signature. At the exit, notices in the
    queue have a few seconds to be sent. Raises `UserError` for an address or a file that cannot be used.
    """
    metrics = hook = None
    if metrics_file is not None:
        metrics = Metrics(metrics_file, store, warn=warn)
    if address := environ.get("QUANTMINT_WEBHOOK", "").strip():
        hook = Webhook(address, secret=environ.get("QUANTMINT_WEBHOOK_SECRET", "").encode() or None, warn=warn)

    def hear(event: Event) -> None:
        if hook is not None:
            hook.send(event)
        if metrics is not None:
            metrics.hear(event)

    try:
        yield hear
    finally:
        if hook is not None:
            hook.close()

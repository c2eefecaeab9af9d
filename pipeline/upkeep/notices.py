"""Notices on how recipes left a round: a webhook, and a textfile for Prometheus; docs/notices.md lists their fields."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

from quantmint.eval.verdict import Verdict
from quantmint.pipeline import __version__
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.transience import is_transient
from quantmint.pipeline.clusters.submit.job import render
from quantmint.pipeline.store.disk import write_atomic
from quantmint.pipeline.upkeep.fleet.records import Ended, all_states, now_utc

SCHEMA, ATTEMPTS, TIMEOUT_S, CLOSE_S, FIRST_WAIT_S = 2, 5, 10.0, 5.0, 1.0
_QUOTED = partial(json.dumps, ensure_ascii=False)
_VERDICTS = [verdict.value for verdict in Verdict]


class Notices:
    """The webhook of ``environ``, to which a thread posts in order, and the textfile ``path``, where they are set.

    A call tells both how a recipe left the round, and returns at once. Raises `UserError` for an address or a file that
    cannot be used; from then on faults are warnings. They name the webhook's host only: its address may be a secret.
    """

    def __init__(
        self, store: Path, path: Path | None, warn: Callable[[str], None], environ: Mapping[str, str] = os.environ
    ) -> None:
        self._store, self._path, self._warn, self._damaged = store, path, warn, dict[str, bool]()
        self._address, secret = (environ.get(f"QUANTMINT_WEBHOOK{end}", "").strip() for end in ("", "_SECRET"))
        self._secret, self._host = secret.encode(), host_of(self._address) if self._address else ""
        self._thread, self._stop, self._sent = ThreadPoolExecutor(1), Event(), list[Future[None]]()
        if path is not None and path.suffix != ".prom":
            raise UserError(f"{path} would not be read: Prometheus's collector takes files that end in .prom")
        self._write()

    def __call__(self, ended: Ended) -> None:
        """Queue a notice, unless the recipe was current, and write the textfile again."""
        if self._address and ended.state != "current":
            fields = {name: value for name, value in asdict(ended).items() if name != "changes"}
            event = {"schema": SCHEMA, "id": secrets.token_hex(16), "event": "finished", "at": now_utc()}
            sender = {"host": socket.gethostname(), "quantmint": __version__}
            self._sent.append(self._thread.submit(self._post, event | sender | fields))
        if ended.state in ("damaged", "ran", "current", "held"):
            self._damaged[ended.recipe] = ended.state == "damaged"
        try:
            self._write()
        except UserError as error:
            self._warn(error.message)

    def close(self) -> None:
        """Wait some seconds for the queue of notices; warn of those that are left, which are dropped."""
        late = wait(self._sent, CLOSE_S).not_done
        self._stop.set()
        self._thread.shutdown(wait=False, cancel_futures=True)
        if late:
            self._warn(
                f"the webhook at {self._host} took too long at the end of the round: {len(late)} notices are lost"
            )

    def _post(self, notice: Mapping[str, Any]) -> None:
        import httpx
        import tenacity as again

        body = json.dumps(notice, allow_nan=False).encode()
        headers = {"Content-Type": "application/json", "X-Quantmint-Delivery": notice["id"]}
        if self._secret:  # RFC 2104, written as GitHub does
            headers["X-Quantmint-Signature"] = "sha256=" + hmac.new(self._secret, body, hashlib.sha256).hexdigest()

        def post() -> None:  # a redirect is a fault: the signature was made for this receiver
            httpx.post(self._address, content=body, headers=headers, timeout=TIMEOUT_S).raise_for_status()

        stop = again.stop_after_attempt(ATTEMPTS) | again.stop_when_event_set(self._stop)
        pause, sleep = again.wait_exponential(FIRST_WAIT_S), again.sleep_using_event(self._stop)
        retry = again.retry_if_exception(is_transient)
        try:
            again.Retrying(retry=retry, stop=stop, wait=pause, sleep=sleep, reraise=True)(post)
        except Exception as error:  # a receiver's faults cost its own notices, and no round
            status = getattr(getattr(error, "response", None), "status_code", None)
            fault = f"cannot be reached: {type(error).__name__}" if status is None else f"answered {status}"
            self._warn(f"the webhook at {self._host} {fault}: the notice on {notice['recipe']} is lost")

    def _write(self) -> None:
        if self._path is None:
            return
        states = {name: asdict(state) for name, state in all_states(self._store, warn=self._warn).items()}
        shown = {"states": states, "damaged": self._damaged, "verdicts": _VERDICTS, "quoted": _QUOTED}
        text = render(Path(__file__).with_name("metrics.prom.j2"), **shown, seconds=datetime.fromisoformat)
        try:
            write_atomic(self._path, text.encode(errors="replace"), temporary=self._path.with_suffix(f".{os.getpid()}"))
        except OSError as error:
            raise UserError(f"the metrics file {self._path} cannot be written: {error.strerror or error}") from None


def host_of(address: str) -> str:
    """Return host and port of an address; raise `UserError` unless it is http or https without a user name."""
    import httpx

    try:
        url = httpx.URL(address)
    except httpx.InvalidURL:
        url = httpx.URL()
    if url.scheme not in ("http", "https") or not url.host or url.userinfo or (url.port or 0) > 65535:
        message = "QUANTMINT_WEBHOOK: found something else than an address https://HOST/PATH without a user name"
        raise UserError(message, hint="The address is not shown here, as it may be a secret.")
    return url.netloc.decode()

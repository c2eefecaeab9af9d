"""A connection to the Hub's stand-in: what it logs, what goes wrong in it on purpose, and who may ask for what."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

from tests.hub.repository import Json, Refusal, Repository

if TYPE_CHECKING:
    from tests.hub.standin import HubStandIn

USER = "quant"
ORGANISATIONS = {"my-org": "admin", "read-org": "read"}
"""Whom the user belongs to, and as what."""


@dataclass
class Request:
    """A line of the log. ``status`` is 0 until there is an answer, and stays 0 where the connection broke."""

    method: str
    path: str
    received: int = 0
    status: int = 0


@dataclass
class Fault:
    """What goes wrong with the next ``times`` requests of a method whose path the pattern is found in.

    First it waits until ``hold`` is set. Then ``status`` is answered; or ``drop`` breaks the connection after so many
    bytes of the request's body, or of the answer's where the request has none (what was held is done all the same if
    its body had arrived: ``drop=0`` is for a client that is killed meanwhile); or, ``lost``, it is done, but the answer
    never arrives.
    ``reached`` is set when a request runs into it.
    """

    method: str
    path: str
    times: int = 1
    skip: int = 0
    status: int | None = None
    retry_after: int | None = None
    drop: int | None = None
    lost: bool = False
    hold: threading.Event | None = None
    reached: threading.Event = field(default_factory=threading.Event)


class _Dropped(Exception):  # noqa: N818 - it is meant
    """The connection broke, on purpose or by the client."""


ROUTES: list[tuple[str, re.Pattern[str], Callable[..., Any]]] = []
Answer = TypeVar("Answer", bound=Callable[..., Any])


def route(method: str, pattern: str) -> Callable[[Answer], Answer]:
    """``{repo}`` is namespace/name, ``{}`` one part of the path: given to the method in this order, unquoted."""
    expression = pattern.replace("{repo}", "([^/]+/[^/]+?)").replace("{}", "([^/]+)")

    def add(answer: Answer) -> Answer:
        ROUTES.append((method, re.compile(expression), answer))
        return answer

    return add


class Connection(BaseHTTPRequestHandler):
    """Finds the method for a request; the methods are in `tests.hub.api`."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two writes: the second would wait for an answer to the first
    server: HubStandIn

    def setup(self) -> None:
        super().setup()
        self.server.open.add(self.connection)

    def finish(self) -> None:
        self.server.open.discard(self.connection)
        with suppress(OSError):
            super().finish()

    def log_message(self, *_: Any) -> None:
        """Requests are told in `HubStandIn.requests`."""

    def _answer(self) -> None:
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        self.left = int(self.headers.get("Content-Length", 0))
        self.seen = Request(self.command, url.path)
        self.server.requests.append(self.seen)
        self.fault = self.server.fault_of(self.command, url.path)
        try:
            if fault := self.fault:
                fault.reached.set()
                if fault.hold:
                    fault.hold.wait()
                if fault.status:
                    raise Refusal(fault.status, "The stand-in was told to fail.")
                if fault.drop is not None and self.left:
                    self._read(min(fault.drop, self.left))
                    raise _Dropped
            wanted = "GET" if self.command == "HEAD" else self.command
            for method, pattern, answer in ROUTES:
                if method == wanted and (found := pattern.fullmatch(url.path)):
                    value = answer(self, *(unquote(part) if part else part for part in found.groups()))
                    return self._reply(200, value) if value is not None else None
            raise Refusal(404, "Sorry, we can't find the page you are looking for.")
        except Refusal as refusal:
            self._refuse(refusal)
        except (_Dropped, ConnectionError):
            self.close_connection = True
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _answer  # noqa: N815 - the base class's names

    def _refuse(self, refusal: Refusal) -> None:
        headers = {"X-Error-Message": refusal.message, **({"X-Error-Code": refusal.code} if refusal.code else {})}
        if self.fault and self.fault.retry_after is not None:
            headers["Retry-After"] = str(self.fault.retry_after)
        self._reply(refusal.status, {"error": refusal.message, **refusal.more}, headers)

    def _read(self, count: int) -> bytes:
        data = self.rfile.read(count)
        self.left -= len(data)
        self.seen.received += len(data)
        if len(data) < count:
            raise _Dropped
        return data

    def _json(self) -> Any:
        return json.loads(self._read(self.left) or b"{}")

    def _reply(self, status: int, body: object = b"", headers: Mapping[str, str] | None = None) -> None:
        while self.left:  # what was not asked for is read all the same: the client would see a broken connection
            self._read(min(self.left, 2**20))
        if self.fault and self.fault.lost:
            raise _Dropped
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.seen.status = status
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            cut = self.fault.drop if self.fault else None
            self.wfile.write(content[:cut])
            if cut is not None:
                raise _Dropped

    # Who asks, and for what.

    def _token(self) -> Json | None:
        value = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if value and value not in self.server.state["tokens"]:
            raise Refusal(401, "Invalid credentials in Authorization header")
        return self.server.state["tokens"][value] if value else None

    def _may(self, right: str, name: str) -> bool:
        token, owner = self._token(), name.split("/")[0]
        if token is None or token["role"] == "read":
            return token is not None and right.endswith(".read") and (owner == USER or owner in ORGANISATIONS)
        if token["role"] == "fineGrained":
            rights = [one for scope in {name, owner} for one in token["scoped"].get(scope, [])]
            return right in rights or (right == "repo.content.read" and "repo.write" in rights)
        if right.endswith(".read"):
            return owner == USER or owner in ORGANISATIONS
        return right == "discussion.write" or owner == USER or ORGANISATIONS.get(owner) in ("admin", "write")

    def _need(self, name: str, *rights: str) -> None:
        """Nothing where the token gives one of the rights, 401 or 403 where not."""
        if self._token() is None:
            raise Refusal(401, "Invalid username or password.")
        if not any(self._may(right, name) for right in rights):
            raise Refusal(403, f"Forbidden: your token does not have the right {' or '.join(rights)} on {name}")

    def _repo(self, repo_id: str, *rights: str) -> Repository:
        """A repository that the token may see, and use in this way."""
        token, repo = self._token(), self.server.repos.get(repo_id)
        if repo is None or (repo.state["private"] and not self._may("repo.content.read", repo_id)):
            # The client reads 401 as "not found" over https alone; the code says it over http too.
            raise Refusal(404 if token else 401, "Repository not found", "RepoNotFound")
        if rights:
            self._need(repo_id, *rights)
        return repo

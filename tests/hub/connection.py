"""A connection to the Hub's stand-in: what it logs, and what goes wrong in it on purpose."""

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

from tests.hub.repository import Refusal

if TYPE_CHECKING:
    from tests.hub.standin import HubStandIn


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
    never arrives. ``reached`` is set when a request runs into it.
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


@dataclass(frozen=True)
class Reply:
    """What is answered where it is not just a JSON object."""

    status: int
    body: object = b""
    headers: Mapping[str, str] = field(default_factory=dict)


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

    def log_message(self, *_: Any) -> None:
        """Requests are told in `HubStandIn.requests`."""

    def _serve(self) -> None:
        url = urlsplit(self.path)
        self.route, self.query = url.path, parse_qs(url.query)
        self.seen = Request(self.command, url.path)
        self.server.requests.append(self.seen)
        self.fault = fault = self.server.fault_of(self.command, url.path) or Fault("", "")
        fault.reached.set()
        if fault.hold:
            fault.hold.wait()
        try:
            length = int(self.headers.get("Content-Length", 0))
            cut = fault.drop if length else None
            self.body = self.rfile.read(length if cut is None else min(cut, length))
            self.seen.received = len(self.body)
            if len(self.body) < length or cut is not None:
                raise _Dropped
            self._reply(self._answer())
        except (_Dropped, ConnectionError):
            self.close_connection = True
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815 - the base class's names

    def _answer(self) -> Reply:
        wanted = "GET" if self.command == "HEAD" else self.command
        try:
            if self.fault.status:
                raise Refusal(self.fault.status, "The stand-in was told to fail.")
            for method, pattern, answer in ROUTES:
                if method == wanted and (found := pattern.fullmatch(self.route)):
                    with self.server.lock:
                        value = answer(self, *(unquote(part) if part else part for part in found.groups()))
                    return value if isinstance(value, Reply) else Reply(200, value)
            raise Refusal(404, "Sorry, we can't find the page you are looking for.")
        except Refusal as refusal:
            headers = {"X-Error-Message": refusal.message, "X-Error-Code": refusal.code or ""}
            if self.fault.retry_after is not None:
                headers["Retry-After"] = str(self.fault.retry_after)
            return Reply(refusal.status, {"error": refusal.message, **refusal.more}, headers)

    def _reply(self, reply: Reply) -> None:
        if self.fault.lost:
            raise _Dropped
        content = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        self.seen.status = reply.status
        self.send_response(reply.status)
        for name, value in {"Content-Length": str(len(content)), **reply.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: self.fault.drop])
            if self.fault.drop is not None:
                raise _Dropped

    def json(self) -> Any:
        """The body of the request."""
        return json.loads(self.body or b"{}")

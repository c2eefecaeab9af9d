"""A real S3 server on this machine (moto), with a log of what it was asked and faults that it can be given."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Request:
    """What arrived: ``path`` is /bucket/key, ``size`` bytes of its body."""

    method: str
    path: str
    query: str
    size: int


@dataclass
class Fault:
    """What happens to the next ``times`` requests whose ``METHOD /path?query`` the pattern is found in.

    ``status`` with S3's ``code``; ``lost``: it is done, and the connection ends without an answer; ``first``: called
    before it is handled.
    """

    pattern: str
    status: int = 0
    code: str = "SlowDown"
    lost: bool = False
    first: Callable[[], None] | None = None
    times: int = 1


class S3Server:
    """Runs in a thread of the tests' process, so that it outlives any client."""

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
        from werkzeug.serving import make_server

        class Quiet(MotoRequestHandler):  # type: ignore[misc]
            disable_nagle_algorithm = True  # an answer in two packets would wait for the client 40 ms

            def log(self, *arguments: object) -> None: ...

        self._app = create_backend_app("s3")  # of all that moto can be: finding out for each request takes longer
        self._server = make_server("127.0.0.1", 0, self._handle, threaded=True, request_handler=Quiet)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self._changed = threading.Condition()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.requests: list[Request] = []
        self.answered: list[Request] = []
        self.faults: list[Fault] = []

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def forget(self) -> None:
        """An empty log, and no faults."""
        self.requests, self.answered, self.faults = [], [], []

    def writes(self) -> list[str]:
        """Method and key of every request that may have changed something, in order."""
        return [
            f"{request.method} {request.path.split('/', 2)[2]}"
            for request in self.requests
            if request.method not in ("GET", "HEAD")
        ]

    def wait_for(self, count: int, pattern: str) -> None:
        """Until so many requests of a kind were answered."""
        with self._changed:
            assert self._changed.wait_for(lambda: sum(_is(request, pattern) for request in self.answered) >= count, 30)

    def _handle(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        request = Request(
            environ["REQUEST_METHOD"],
            environ["PATH_INFO"],
            environ.get("QUERY_STRING", ""),
            int(environ.get("CONTENT_LENGTH") or 0),
        )
        with self._changed:
            self.requests.append(request)
            fault = next((fault for fault in self.faults if fault.times and _is(request, fault.pattern)), None)
            if fault is not None:
                fault.times -= 1
        if fault is not None and fault.first is not None:
            fault.first()
        if fault is not None and fault.status:
            environ["wsgi.input"].read(request.size)
            start(f"{fault.status} Fault", [("Content-Type", "application/xml")])
            said = f"<Error><Code>{fault.code}</Code><Message>a fault</Message></Error>"
            return [] if request.method == "HEAD" else [said.encode()]
        answer = self._app(environ, start)
        with self._changed:
            self.answered.append(request)
            self._changed.notify_all()
        if fault is not None and fault.lost:
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionAbortedError
        return answer  # type: ignore[no-any-return]


def _is(request: Request, pattern: str) -> bool:
    return re.search(pattern, f"{request.method} {request.path}?{request.query}") is not None

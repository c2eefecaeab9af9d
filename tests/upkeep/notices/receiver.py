"""A receiver of webhooks on this machine, and what goes wrong with it on purpose."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Delivery:
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Receiver:
    """``answers`` are given in order, then 204: a status, with headers where there are some; None hangs."""

    port: int = 0
    answers: deque[tuple[int, dict[str, str]] | None] = field(default_factory=deque)
    deliveries: list[Delivery] = field(default_factory=list)
    release: threading.Event = field(default_factory=threading.Event)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook/s3cr3t-path"

    def wait_for(self, count: int) -> list[Delivery]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.deliveries) >= count, timeout=20), self.deliveries
            return list(self.deliveries)

    def take(self, delivery: Delivery) -> tuple[int, dict[str, str]] | None:
        with self._changed:
            self.deliveries.append(delivery)
            self._changed.notify_all()
            return self.answers.popleft() if self.answers else (204, {})


@contextmanager
def receiving() -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            answer = receiver.take(Delivery(self.path, dict(self.headers.items()), body))
            if answer is None:
                receiver.release.wait(20)
                self.close_connection = True
                return
            self.send_response(answer[0])
            for name, value in answer[1].items():
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_POST  # noqa: N815 - what a redirect would be followed with

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    receiver.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield receiver
    finally:
        receiver.release.set()
        server.shutdown()
        server.server_close()
        thread.join()

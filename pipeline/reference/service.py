"""The HTTP side: four addresses, one model, the loopback interface."""

from __future__ import annotations

import json
import sys
import time
import traceback
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pipeline.reference.batches import Batches
from pipeline.reference.protocol import RequestError, read, write
from pipeline.reference.text import Text

_LARGEST = 256 << 20  # bytes of a request


@dataclass(frozen=True, slots=True)
class Service:
    """What is served: ``model_name`` for the checkpoint at ``root``, answered by ``batches``.

    ``facts`` is the answer of /version: the version of the library, the runtime's words, the device, the type of the
    KV cache.
    """

    model_name: str
    root: str
    max_model_len: int
    vocabulary: int
    facts: dict[str, Any]
    text: Text
    batches: Batches

    def get(self, path: str) -> dict[str, Any] | None:
        """The body of an answer; None for an address that has none."""
        if path == "/version":
            return self.facts
        if path == "/v1/models":
            entry = {"id": self.model_name, "object": "model", "created": int(time.time()), "owned_by": "quantmint"}
            return {"object": "list", "data": [{**entry, "root": self.root, "max_model_len": self.max_model_len}]}
        return {} if path == "/health" else None

    def complete(self, body: Any) -> dict[str, Any]:
        """Answer a request of /v1/completions. Raises `RequestError`."""
        request = read(
            body,
            self.text,
            model=self.model_name,
            max_model_len=self.max_model_len,
            vocabulary=self.vocabulary,
        )
        return write(request, self.batches.ask(request.questions), self.text)


class HttpServer(ThreadingHTTPServer):
    """A thread for each connection; they wait for the model's one thread most of the time."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, host: str, port: int, service: Service) -> None:
        self.service = service
        super().__init__((host, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is nobody's fault; anything else is written down."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one piece: in two, the second waits for the first's acknowledgement
    server: HttpServer

    def do_GET(self) -> None:
        found = self.server.service.get(self.path)
        if found is None:
            self._send(404, RequestError(f"{self.path}: there is no such address", status=404).to_json())
        else:
            self._send(200, found)

    def do_POST(self) -> None:
        try:
            body = self._body()
            if self.path != "/v1/completions":
                raise RequestError(f"{self.path}: there is no such address", status=404)
            self._send(200, self.server.service.complete(body))
        except RequestError as error:
            self._send(error.status, error.to_json())
        except ConnectionError:
            raise
        except Exception as error:  # one request must not end the server
            traceback.print_exc()
            self._send(500, RequestError(f"{type(error).__name__}: {error}", status=500).to_json())

    def _body(self) -> Any:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > _LARGEST:
            self.close_connection = True  # what follows cannot be told from another request
            raise RequestError(f"Content-Length: found {length or 'none'}, expected up to {_LARGEST} bytes")
        try:
            return json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the body is not JSON: {error}") from None

    def _send(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name that it has
        """Requests are not logged: there are thousands."""

"""A running vLLM server, as seen over HTTP.

Plain `http.client`: a proxy that the environment names must not see, or answer, what we ask our own machine.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pipeline.base.errors import RefusalError, ServingError
from pipeline.serving.running.log import LogScan, scan_log

HOST = "127.0.0.1"
_SHOWN = 300  # characters of a refusal that an error quotes


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answered. `started_seconds` is the time from its start to the first healthy answer.

    `base_url` is its address without a path of the API: ``http://127.0.0.1:PORT``. `pid` is the process of this machine
    that the server is below, None where it is below none.
    """

    model_name: str
    base_url: str
    log_path: Path
    started_seconds: float
    pid: int | None = None

    def version(self) -> str:
        """vLLM's version as the server tells it."""
        return str(json.loads(self.get("/version"))["version"])

    def scan_log(self) -> LogScan:
        """What the log says up to now."""
        return scan_log(self.log_path.read_text(encoding="utf-8", errors="replace"))

    def get(self, path: str, *, timeout: float = 30.0) -> str:
        """Body of a GET; ServingError unless the answer is 200 within ``timeout`` seconds."""
        return self.post(path, None, timeout=timeout)

    def post(self, path: str, body: Mapping[str, object] | None, *, timeout: float = 30.0) -> str:
        """The same of a POST of JSON."""
        where = f"its log: {self.log_path}"
        try:
            status, answer = fetch(self.base_url, path, body=body, timeout=timeout)
        except (OSError, http.client.HTTPException) as error:
            raise ServingError(f"the server does not answer {path}: {error}", hint=where, transient=True) from error
        if status != 200:
            said = f": {answer[:_SHOWN]}" if answer else ""
            raise RefusalError(
                f"the server answers {path} with {status}{said}", status=status, answer=answer, hint=where
            )
        return answer


def fetch(base_url: str, path: str, *, timeout: float, body: Mapping[str, object] | None = None) -> tuple[int, str]:
    """Status and body of one request: a GET, or a POST of ``body`` as JSON."""
    address = urlsplit(base_url)
    content = None if body is None else json.dumps(body)
    connection = http.client.HTTPConnection(address.hostname or HOST, address.port, timeout=timeout)
    try:
        method = "GET" if content is None else "POST"
        connection.request(method, address.path + path, content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode("utf-8", errors="replace")
    finally:
        connection.close()

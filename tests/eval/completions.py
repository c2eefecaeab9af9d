"""A stand-in for a server of completions: answers that depend on the prompt's tokens and on nothing else.

``with Completions() as server`` listens in a thread. Log probabilities are drawn by a hash of the tokens up to there;
generated text is a number of two digits. `worse` is the share of all answers that are drawn anew, by a hash of the
tokens: another model. A `favourite` token is always likely as the last one of a prompt.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any


class Completions:
    def __init__(self, worse: float = 0.0) -> None:
        self.worse = worse
        self.asked: list[dict[str, Any]] = []  # the body of every request
        self.favourite: int | None = None
        self.fail_after: int | None = None  # requests that are answered before the rest fail
        self.meanwhile: Callable[[dict[str, Any]], object] = lambda _: None  # called with a body before it is answered
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._send(200, {})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append(body)
                broken = outer.fail_after is not None and len(outer.asked) > outer.fail_after
                outer.meanwhile(body)
                self._send(500 if broken else 200, {"choices": [] if broken else outer.choices(body)})

            def _send(self, status: int, body: object) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that was killed is no news
        self.base_url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Completions:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        """Every prompt that was asked, as token ids, sorted."""
        return sorted(tuple(prompt) for body in self.asked for prompt in body["prompt"])

    def choices(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        found = []
        for index, tokens in enumerate(body["prompt"]):
            if not body.get("echo"):
                found.append({"index": index, "text": f" {int(99 * self._chance('text', tokens))}."})
                continue
            values = [None, *(-5 * self._chance("token", tokens[: end + 1]) for end in range(1, len(tokens))), -1.0]
            tops = [None if value is None else {"x": value} for value in values]
            found.append({"index": index, "text": "", "logprobs": {"token_logprobs": values, "top_logprobs": tops}})
        return found

    def _chance(self, what: str, tokens: Sequence[int]) -> float:
        """A number in [0, 1), of this server's model."""
        if what == "token" and tokens[-1] == self.favourite:
            return 0.0
        changed = self.worse > 0 and _hash("change", tokens) < self.worse
        return _hash(f"{what}{changed}", tokens)


def _hash(salt: str, tokens: Sequence[int]) -> float:
    digest = hashlib.sha256(f"{salt}{list(tokens)}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48

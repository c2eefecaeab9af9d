"""A head behind a connection that was dropped: every question to it ends, and says how to look again."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread

import pytest

from pipeline.errors import StageError
from pipeline.submit.attached import Mark
from pipeline.submit.deadline import within
from pipeline.submit.ray import Options, RayJobs
from tests.submit.cases import task


def test_what_a_call_comes_to() -> None:
    def broken() -> int:
        raise KeyError("its own")

    assert within(60, lambda: 17) == 17
    assert within(60, lambda: None) is None
    with pytest.raises(KeyError, match="its own"):
        within(60, broken)


def test_a_call_that_does_not_end_is_left() -> None:
    go_on = Event()
    with pytest.raises(TimeoutError, match=r"within 0\.01 s"):
        within(0.01, go_on.wait)
    go_on.set()


def test_signals_are_heard_meanwhile() -> None:
    class HeardError(Exception):
        pass

    def hear(*_: object) -> None:
        raise HeardError

    before, go_on = signal.signal(signal.SIGALRM, hear), Event()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(HeardError):
            within(60, go_on.wait)
    finally:
        signal.signal(signal.SIGALRM, before)
        go_on.set()


@pytest.fixture
def silent() -> Iterator[tuple[str, set[str]]]:
    """The address of a head, and the paths that it answers; whatever else is asked hangs until the test ends."""
    go_on, answered = Event(), {"/api/version"}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path not in answered:
                go_on.wait()
                return
            raw = json.dumps({"version": "4", "ray_version": "2.60.0", "ray_commit": "x"}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        do_POST = do_GET  # noqa: N815 - as the server calls it

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", answered
    finally:
        go_on.set()
        server.shutdown()
        thread.join()
        server.server_close()


_MARK = Mark("quantmint-a", "key", Path("/shared/a.answer"))


@pytest.mark.skipif(find_spec("ray") is None, reason="whose client it is")
@pytest.mark.parametrize(
    ("ask", "hint"),
    [
        (lambda there: there.submit(task("tiny-ptpc-fp8kv")), "ray job list --address http://127.0.0.1"),
        (lambda there: there.begin(task("tiny-ptpc-fp8kv"), _MARK), "asks for it again"),
        (lambda there: there.state("job"), "--status job looks again"),
        (lambda there: list(there.lines("job", lambda _: None)), "--status job looks again"),
        (lambda there: there.cancel("job"), "--status job looks again"),
        (lambda there: there.under_way("key"), None),
    ],
)
def test_no_question_hangs(
    ask: Callable[[RayJobs], object],
    hint: str | None,
    silent: tuple[str, set[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address, answered = silent
    there = RayJobs(address, Options(folder=Path("/shared")))
    client = there._connect()
    with monkeypatch.context() as patched:
        patched.setattr("pipeline.submit.ray._TIMEOUT_S", 0.1)
        patched.setattr(there, "_connect", lambda: client)
        with pytest.raises(StageError, match=r"127\.0\.0\.1:\d+ gave no answer within 0\.1 s") as failure:
            ask(there)
    assert (failure.value.exit_code, failure.value.transient) == (5, True)
    assert failure.value.hint is None if hint is None else hint in str(failure.value.hint)
    answered.clear()
    monkeypatch.setattr("pipeline.submit.ray._TIMEOUT_S", 0.1)
    with pytest.raises(StageError, match="gave no answer"):
        there._connect()

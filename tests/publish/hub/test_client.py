"""What is asked again, after how long, and what is said of what is not."""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import pytest
from huggingface_hub import errors
from tenacity import nap

from quantmint.pipeline.base.errors import StageError, UserError
from quantmint.pipeline.publish.hub.client import (
    TRIES,
    HubClient,
    MissingError,
    MovedError,
    RefusedError,
    connect,
)
from tests.publish.hub.conftest import Told

http: Any = import_module(errors.HfHubHTTPError.__bases__[0].__module__.partition(".")[0])
Fails = Callable[[Exception], tuple[Exception, list[float]]]


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch) -> Fails:
    """What comes of an action that always fails so, and the seconds that were waited in between."""

    def ask(error: Exception) -> tuple[Exception, list[float]]:
        waits: list[float] = []
        monkeypatch.setattr(nap, "time", types.SimpleNamespace(sleep=waits.append))

        def action() -> None:
            raise error

        with pytest.raises(Exception, match="cannot ask") as raised:
            HubClient("o/r", None, Told()).call("ask", action)
        return raised.value, waits

    return ask


def answered(status: int, headers: Mapping[str, str] = {}, said: str | None = None) -> Exception:
    request = http.Request("GET", "https://hub.example/api?secret=1")
    response = http.Response(status, headers=dict(headers), request=request)
    return errors.HfHubHTTPError(f"{status} for {request.url}", response=response, server_message=said)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"Retry-After": "7"}, 8),
        ({"ratelimit": '"api";r=0;t=55'}, 56),
        ({"Retry-After": "soon"}, 2),
    ],
)
def test_the_server_says_how_long(fails: Fails, headers: Mapping[str, str], expected: float) -> None:
    error, waits = fails(answered(429, headers))
    assert isinstance(error, StageError)
    assert error.transient
    assert len(waits) == TRIES - 1
    assert expected <= waits[0] <= expected + 1


def test_a_server_that_asks_for_an_hour_is_not_waited_for(fails: Fails) -> None:
    error, waits = fails(answered(429, {"Retry-After": "3600"}))
    assert isinstance(error, StageError)
    assert error.transient
    assert waits == []


@pytest.mark.parametrize(
    "error",
    [
        http.ConnectError("refused"),
        http.ReadTimeout("slow"),
        http.RemoteProtocolError("broke off"),
        ConnectionResetError("reset"),
        RuntimeError("CAS service error: request failed"),
        answered(502),
    ],
)
def test_what_passes_is_asked_again_with_growing_waits(fails: Fails, error: Exception) -> None:
    found, waits = fails(error)
    assert isinstance(found, StageError)
    assert found.transient
    assert len(waits) == TRIES - 1
    assert all(2 ** (n + 1) <= wait <= 2 ** (n + 1) + 1 for n, wait in enumerate(waits))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (answered(404), MissingError),
        (answered(412), MovedError),
        (answered(403), RefusedError),
        (errors.HFValidationError("bad name"), RefusedError),
        (errors.LocalEntryNotFoundError("no such entry"), MissingError),
        (http.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed"), Exception),
    ],
)
def test_what_does_not_pass_is_asked_once(fails: Fails, error: Exception, kind: type[Exception]) -> None:
    found, waits = fails(error)
    assert isinstance(found, kind)
    assert waits == []
    assert "secret" not in str(found)


def test_what_wrapped_the_cause(fails: Fails) -> None:
    try:
        raise RuntimeError("Error while uploading 'a'") from answered(403, said="No.\n\nNever.")
    except RuntimeError as error:
        found, waits = fails(error)
    assert str(found).startswith("o/r: cannot ask: 403: No.; Never.")
    assert waits == []


def test_a_fault_of_this_program_is_not_hidden() -> None:
    with pytest.raises(KeyError):
        HubClient("o/r", None).call("ask", lambda: {}["absent"])


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tenacity", None)
    with pytest.raises(UserError, match="needs tenacity, which is not installed"):
        connect("o/r")


def test_what_the_library_logs_has_no_signatures(caplog: pytest.LogCaptureFixture) -> None:
    from huggingface_hub.utils import get_session

    connect("o/r")
    said = "thrown while requesting PUT https://s3.example/a?X-Amz-Signature=abc"
    logging.getLogger(get_session.__module__).warning("'%s' %s", "timeout", said)
    assert [record.getMessage() for record in caplog.records] == [
        "'timeout' thrown while requesting PUT https://s3.example/a"
    ]

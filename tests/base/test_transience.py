"""Errors after which the same command may succeed: unreachable networks and servers, and no others."""

from __future__ import annotations

import errno
import socket
from typing import Any

import httpx
import pytest
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from quantmint.pipeline.base.errors import RefusalError, StageError, UserError
from quantmint.pipeline.base.transience import is_transient, is_transient_status, says_transient
from quantmint.pipeline.stages import source
from quantmint.pipeline.stages.setting import SourceIdentity

REQUEST = httpx.Request("GET", "https://hub/api")


def answered(status: int) -> HfHubHTTPError:
    return HfHubHTTPError(f"{status}", response=httpx.Response(status, request=REQUEST))


def raised_from(cause: BaseException) -> Exception:
    try:
        raise ValueError("a library's own words") from cause
    except ValueError as error:
        return error


@pytest.mark.parametrize(
    ("error", "may"),
    [
        (ConnectionRefusedError(), True),
        (socket.gaierror(-3, "Temporary failure in name resolution"), True),
        (OSError(errno.EHOSTUNREACH, "No route to host"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (httpx.ConnectError("refused", request=REQUEST), True),
        (answered(429), True),
        (answered(503), True),
        (answered(501), False),
        (answered(404), False),
        (raised_from(httpx.ConnectError("refused", request=REQUEST)), True),
        (OfflineModeIsEnabled("HF_HUB_OFFLINE is set"), False),
        (raised_from(ConnectionError("Couldn't reach it (OfflineModeIsEnabled)")), False),
        (httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED]", request=REQUEST), False),
    ],
    ids=repr,
)
def test_transient_and_permanent_errors(error: Exception, may: bool) -> None:
    assert is_transient(error) is may


@pytest.mark.parametrize(
    ("words", "may"),
    [
        ("requests.exceptions.ConnectionError: HTTPSConnectionPool(host='x')", True),
        ("aiohttp.client_exceptions.ServerDisconnectedError: Server disconnected", True),
        ("tenacity.RetryError: RetryError[<Future raised ClientConnectorError>]", True),
        ("huggingface_hub.errors.HfHubHTTPError: 503 Server Error", True),
        ("huggingface_hub.errors.HfHubHTTPError: 404 Not Found", False),
        ("ConnectionError: Couldn't reach it (OfflineModeIsEnabled)", False),
        ("ValueError: 500 items were asked", False),
    ],
)
def test_last_output_of_a_program(words: str, may: bool) -> None:
    assert says_transient(words) is may


@pytest.mark.parametrize("status", [429, 500, 503, 403, 404, 501])
def test_http_statuses(status: int) -> None:
    assert is_transient_status(status) is (status in {429, 500, 503})
    assert RefusalError("x", status=status, answer="").transient is is_transient_status(status)


@pytest.mark.parametrize(("cause", "may"), [(answered(502), True), (answered(404), False)], ids=["502", "404"])
def test_a_model_that_cannot_be_asked_for(monkeypatch: pytest.MonkeyPatch, cause: Exception, may: bool) -> None:
    """The exit code is that of a wrong command all the same: nothing was started."""

    def fails(*_: Any, **__: Any) -> None:
        raise cause

    identity = SourceIdentity(None, "0" * 40, "org/m")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", fails)
    with pytest.raises(UserError) as small:
        source.config_folder(identity)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fails)
    with pytest.raises(StageError) as large:
        source.fetch(identity, with_code=False, progress=Silent())
    assert (small.value.transient, large.value.transient) == (may, may)
    assert small.value.exit_code == 2


class Silent:
    def say(self, message: str) -> None: ...
    def warn(self, message: str) -> None: ...
    def bar(self, total: int, unit: str) -> Any: ...

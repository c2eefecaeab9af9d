"""One way to ask the Hub: what is worth a second try gets it, and what goes wrong is said without secrets.

    client = connect("my-org/Llama-3.3-70B-FP8-KV", progress)
    info = client.call("read the repository", lambda: client.api.model_info(client.repo))

The token is the client library's own matter: it reads HF_TOKEN or the file of ``hf auth login`` at each request. Here
it is looked up for one reason only, to cut it out of messages.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pipeline.base.errors import StageError, UserError
from pipeline.base.progress import Progress, reporter_for
from pipeline.base.transience import is_transient_status

if TYPE_CHECKING:
    from tenacity import RetryCallState

_T = TypeVar("_T")

TRIES: Final = 6
_HUB: Final = "https://huggingface.co"
_LONGEST_WAIT: Final = 60.0  # seconds, where the server does not say
_PATIENCE: Final = 600.0  # seconds that a server may ask for: the Hub's windows of rate limits are 300
_SAID: Final = 4  # lines of a server's answer
_QUERY: Final = re.compile(r"(https?://[^\s?\"'<>]+)\?[^\s\"'<>)]*")  # a signed address carries its signature there
_USER: Final = re.compile(r"//[^/@\s]+@")
_RESET: Final = re.compile(r"\bt\s*=\s*(\d+)")  # of the header `ratelimit: "api";r=0;t=55`


class UnreachableError(StageError):
    """The Hub did not answer, or answered 5xx or 429, as often as it was asked."""


class MovedError(StageError):
    """412: the branch is no longer where it was read; nothing was changed."""


class RefusedError(UserError):
    """The Hub said no, and would again: ``status`` is HTTP's, None where the client library refused by itself."""

    def __init__(self, message: str, *, status: int | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.status = status


class MissingError(RefusedError):
    """404: no such repository, revision or file, or none that this token may see."""


@dataclass(frozen=True, slots=True)
class Client:
    """The client library for one repository. ``sleep`` takes seconds; tests give another.

    ``tries`` is how often a question is asked at most.
    """

    repo: str
    api: Any
    progress: Progress | None = None
    sleep: Callable[[float], None] = time.sleep
    tries: int = TRIES

    def call(self, what: str, action: Callable[[], _T]) -> _T:
        """The value of ``action``, tried up to ``tries`` times; ``what`` completes "cannot ...".

        Tried again: faults of the connection, 5xx, and 429 after the time that the server names. Never another 4xx.
        An action that changes something must bear to be repeated after its answer was lost. Raises the errors of this
        module.
        """
        from tenacity import Retrying, retry_if_exception, stop_after_attempt

        retrying = Retrying(
            stop=stop_after_attempt(self.tries),
            wait=_wait,
            retry=retry_if_exception(_is_passing),
            before_sleep=lambda state: self._tell(what, state),
            sleep=self.sleep,
            reraise=True,
        )
        try:
            with _heard(self._warn):
                return retrying(action)
        except (StageError, UserError):
            raise
        except Exception as error:
            found = self._translate(what, error)
            if found is None:
                raise
            raise found from None  # the library's errors quote requests

    def _warn(self, message: str) -> None:
        """On stderr where no progress is shown: who waits for a minute must know for what."""
        (self.progress or reporter_for(json=False)).warn(redact(message))

    def _tell(self, what: str, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        seconds = state.next_action.sleep if state.next_action is not None else 0
        reason = _reason(error) if error is not None else "no answer"
        self._warn(f"{self.repo}: {what}: {reason}; try {state.attempt_number + 1} of {self.tries} in {seconds:.0f} s")

    def _translate(self, what: str, error: Exception) -> StageError | UserError | None:
        from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled

        text = f"{self.repo}: cannot {what}: {redact(_reason(error))}"
        status = status_of(error)
        if isinstance(error, OfflineModeIsEnabled):
            return UserError(f"{self.repo}: cannot {what}: HF_HUB_OFFLINE is set.", hint="Unset it to publish.")
        if isinstance(error, LocalTokenNotFoundError):
            return no_token(self.repo)
        if _is_passing(error) or (status is not None and is_transient_status(status)):
            asked = _asked_for(error)
            later = f" in {asked:.0f} s, as the Hub asks" if asked is not None and asked > _PATIENCE else ""
            kept = f"What was sent is kept: the same command goes on{later}."
            if status is None:
                kept = f"Check the network, and that {redact(os.environ.get('HF_ENDPOINT') or _HUB)} is up. {kept}"
            return UnreachableError(text, hint=kept, transient=True)
        if status == 412:
            return MovedError(text, hint="Nothing was changed. Run the same command again.")
        if status == 404 or _is_missing(error):
            return MissingError(text, status=404)
        if status is not None:
            hint = "See https://huggingface.co/settings/tokens for what the token may do." if status == 403 else None
            return RefusedError(text, status=status, hint=hint)
        if isinstance(error, HFValidationError | ValueError):
            return RefusedError(text)
        if isinstance(error, _http_library().HTTPError | OSError):
            return StageError(text, hint="What was sent is kept: the same command goes on.")
        return None


def connect(
    repo: str,
    progress: Progress | None = None,
    *,
    sleep: Callable[[float], None] | None = None,
    tries: int = TRIES,
) -> Client:
    """A client of the Hub, or of the server in HF_ENDPOINT; raises `UserError` where the library is not installed."""
    try:
        import tenacity  # noqa: F401
        from huggingface_hub import HfApi
    except ImportError as error:
        raise UserError(
            f"publishing to the Hub needs {error.name}, which is not installed",
            hint="Install it: pip install 'quantmint[publish]'",
        ) from None
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, library_name="quantmint")
    return Client(repo, api, progress, sleep or time.sleep, tries)


def no_token(repo: str) -> UserError:
    """What is said where there is no token."""
    return UserError(
        f"{repo}: there is no token of the Hub: HF_TOKEN is not set, and nobody has logged in",
        hint="Run `hf auth login`, or set HF_TOKEN to a token that may write.",
    )


def unseen(repo: str) -> MissingError:
    """What is said of a repository that is not there: the Hub says the same of one that a token may not see."""
    return MissingError(
        f"{repo}: there is no such repository, or this token may not see it",
        status=404,
        hint="Check the name; a private one needs HF_TOKEN or `hf auth login`.",
    )


def status_of(error: BaseException) -> int | None:
    """HTTP's status behind an error, also where the library wrapped it; None where there was no answer."""
    response = _response(error)
    return None if response is None else int(response.status_code)


def redact(text: str) -> str:
    """Without the token, without the signatures of addresses, without passwords in them."""
    from huggingface_hub import get_token

    token = get_token()
    if token:
        text = text.replace(token, "[token]")
    return _USER.sub("//", _QUERY.sub(r"\1", text))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and what it was raised from."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


def _response(error: BaseException) -> Any:
    answers = (getattr(cause, "response", None) for cause in _causes(error))
    return next((answer for answer in answers if answer is not None), None)


def _is_passing(error: BaseException) -> bool:
    """Whether the next try may go better: no answer at all, 5xx or 429."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled) or "CERTIFICATE_VERIFY_FAILED" in str(error):
        return False
    if (status := status_of(error)) is not None:
        return is_transient_status(status) and (_asked_for(error) or 0) <= _PATIENCE
    http = _http_library()
    no_answer = (
        http.TimeoutException,
        http.NetworkError,
        http.RemoteProtocolError,
        http.ProxyError,
        ConnectionError,
        TimeoutError,
    )
    if any(isinstance(cause, no_answer) for cause in _causes(error)):
        return True
    return type(error) is RuntimeError and error.__cause__ is None  # how hf_xet tells of a transfer that broke off


def _http_library() -> Any:
    """What the client speaks HTTP with: httpx; from huggingface_hub 2 on httpx2, whose errors have the same names."""
    from huggingface_hub.errors import HfHubHTTPError

    return import_module(HfHubHTTPError.__bases__[0].__module__.partition(".")[0])


def _is_missing(error: Exception) -> bool:
    from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError

    return isinstance(error, EntryNotFoundError | RepositoryNotFoundError)


def _wait(state: RetryCallState) -> float:
    """Seconds until the next try: what the server asks for, else 2, 4, 8, ... and up to a second of chance."""
    from tenacity import wait_exponential, wait_random

    error = state.outcome.exception() if state.outcome is not None else None
    asked = _asked_for(error) if error is not None else None
    if asked is not None:
        return asked + 1
    backoff = wait_exponential(multiplier=2, min=2, max=_LONGEST_WAIT) + wait_random(0, 1)
    return float(backoff(state))


def _asked_for(error: BaseException) -> float | None:
    """Seconds of ``Retry-After`` (a number or a date) or of ``ratelimit``."""
    response = _response(error)
    if response is None:
        return None
    value = response.headers.get("Retry-After")
    if value is not None:
        try:
            return max(0.0, float(value))
        except ValueError:
            pass
        try:
            return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
        except (TypeError, ValueError):
            return None
    reset = _RESET.search(response.headers.get("ratelimit", ""))
    return float(reset[1]) if response.status_code == 429 and reset else None


class _Diversion(logging.Filter):
    """Keeps warnings out of a log while somebody listens; whoever came last hears them."""

    def __init__(self) -> None:
        super().__init__()
        self.listeners: list[Callable[[str], None]] = []

    def filter(self, record: logging.LogRecord) -> bool:
        if not self.listeners or record.levelno < logging.WARNING:
            return True
        self.listeners[-1](record.getMessage())
        return False


_DIVERSION: Final = _Diversion()


@contextmanager
def _heard(tell: Callable[[str], None]) -> Iterator[None]:
    """What the library itself tries again, and says in its log, is told in our way: its log quotes signed addresses."""
    from huggingface_hub.utils import get_session

    logging.getLogger(get_session.__module__).addFilter(_DIVERSION)  # once, however often it is added
    _DIVERSION.listeners.append(tell)
    try:
        yield
    finally:
        _DIVERSION.listeners.remove(tell)


def _reason(error: BaseException) -> str:
    """What went wrong in one line: the first few of what the server said, where it said anything."""
    causes = list(_causes(error))
    said = next((str(text) for cause in causes if (text := getattr(cause, "server_message", None))), "")
    status = status_of(error)
    if said.strip() and status is not None:
        lines = [line for line in map(str.strip, said.splitlines()) if line]
        return f"{status}: {'; '.join(lines[:_SAID])}"
    told = next((cause for cause in causes if hasattr(cause, "server_message")), causes[-1])
    return next((line for line in map(str.strip, str(told).splitlines()) if line), type(told).__name__)

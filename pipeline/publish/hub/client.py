"""Requests to the Hub, with retries, and with error messages that contain no secrets.

The client library reads the token itself at each request, from HF_TOKEN or the file of ``hf auth login``. This module
reads it only to cut it out of messages.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from quantmint.pipeline.base import errors
from quantmint.pipeline.base.errors import StageError, UserError
from quantmint.pipeline.base.progress import Progress, reporter_for
from quantmint.pipeline.base.transience import is_transient, is_transient_status

if TYPE_CHECKING:
    from tenacity import RetryCallState

_T = TypeVar("_T")

TRIES: Final = 6
_HUB: Final = "https://huggingface.co"
_LONGEST_WAIT: Final = 60.0  # seconds, where the server does not say
_LONGEST_DELAY: Final = 600.0  # seconds that a server may ask for; the Hub's rate limits have windows of 300
_TOKENS: Final = (
    "https://huggingface.co/settings/tokens says what a token may do; HF_TOKEN goes before what `hf auth login` stored."
)
_RESUME: Final = "What was sent is kept: the same command goes on."
_ANSWER_LINES: Final = 4
_SECONDS: Final = re.compile(r"\s*(\d+)\s*")
_RESET: Final = re.compile(r"\bt\s*=\s*(\d+)")  # of the header `ratelimit: "api";r=0;t=55`


class MovedError(StageError):
    """Status 412: the branch moved since it was read; nothing was changed."""


class RefusedError(UserError):
    """A refusal of the Hub or of the client library, which another try would repeat."""


class MissingError(RefusedError):
    """Status 404: no such repository, revision or file, or none that this token may see."""


@dataclass(frozen=True, slots=True)
class HubClient:
    """The client library for one repository; a call is attempted up to ``tries`` times."""

    repo: str
    api: Any
    progress: Progress | None = None
    tries: int = TRIES

    def call(self, what: str, action: Callable[[], _T]) -> _T:
        """Return the value of ``action``, tried up to ``tries`` times; ``what`` completes the message "cannot ...".

        Connection errors, 5xx, and 429 after the server's delay are tried again, another 4xx never. An action must be
        safe to repeat after its answer was lost. Raises the errors of this module.
        """
        from tenacity import Retrying, retry_if_exception, stop_after_attempt

        retrying = Retrying(
            stop=stop_after_attempt(self.tries),
            wait=_wait,
            retry=retry_if_exception(_is_retryable),
            before_sleep=lambda state: self._warn(what, state),
            reraise=True,
        )
        try:
            return retrying(action)
        except (StageError, UserError, LookupError, TypeError, AttributeError):
            raise
        except Exception as error:
            raise self._translate(what, error) from None  # the library's errors quote requests

    def _warn(self, what: str, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        seconds = state.next_action.sleep if state.next_action is not None else 0
        reason = _reason(error) if error is not None else "no answer"
        message = f"{self.repo}: {what}: {reason}; try {state.attempt_number + 1} of {self.tries} in {seconds:.0f} s"
        # On stderr without a progress display: a person who waits for a minute must know why.
        (self.progress or reporter_for(json=False)).warn(redact(message))

    def _translate(self, what: str, error: Exception) -> StageError | UserError:
        from huggingface_hub.errors import (
            EntryNotFoundError,
            LocalTokenNotFoundError,
            OfflineModeIsEnabled,
            RepositoryNotFoundError,
        )

        text = f"{self.repo}: cannot {what}: {redact(_reason(error))}"
        status = _status_of(error)
        if isinstance(error, OfflineModeIsEnabled):
            return UserError(f"{self.repo}: cannot {what}: HF_HUB_OFFLINE is set.", hint="Unset it to publish.")
        if isinstance(error, LocalTokenNotFoundError):
            return UserError(
                f"{self.repo}: there is no token of the Hub: HF_TOKEN is not set, and nobody has logged in",
                hint="Run `hf auth login`, or set HF_TOKEN to a token that may write.",
            )
        if _is_retryable(error) or (status is not None and is_transient_status(status)):
            where = "" if status else f"Check that {redact(os.environ.get('HF_ENDPOINT') or _HUB)} can be reached. "
            return StageError(text, hint=f"{where}{_RESUME}", transient=True)
        if status == 412:
            return MovedError(text, hint="Nothing was changed. Run the same command again.")
        if status == 404 or isinstance(error, EntryNotFoundError | RepositoryNotFoundError):
            return MissingError(text)
        if status is not None or isinstance(error, ValueError):
            return RefusedError(text, hint=_TOKENS if status in (401, 403) else None)
        return StageError(text, hint=_RESUME)


def connect(repo: str, progress: Progress | None = None, *, tries: int = TRIES) -> HubClient:
    """Return a client of the Hub or of the server in HF_ENDPOINT; raise `UserError` without the library."""
    try:
        import tenacity  # noqa: F401
        from huggingface_hub import HfApi
        from huggingface_hub.utils import get_session
    except ImportError as error:
        raise UserError(
            f"publishing to the Hub needs {error.name}, which is not installed",
            hint="Install it: pip install 'quantmint[publish]'",
        ) from None
    logging.getLogger(get_session.__module__).addFilter(_redact_record)  # once, however often it is added
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, library_name="quantmint")
    return HubClient(repo, api, progress, tries)


def _status_of(error: BaseException) -> int | None:
    """Return the HTTP status behind an error, also a wrapped one; None when there was no answer."""
    response = _response(error)
    return None if response is None else int(response.status_code)


def redact(text: str) -> str:
    """Return the text without the token, URL signatures and passwords in URLs."""
    from huggingface_hub import get_token

    return errors.redact(text, os.environ, get_token())


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _response(error: BaseException) -> Any:
    answers = (getattr(cause, "response", None) for cause in _causes(error))
    return next((answer for answer in answers if answer is not None), None)


def _is_retryable(error: BaseException) -> bool:
    """Return whether another try may succeed: after no answer, 5xx, or 429 with an acceptable delay."""
    if type(error) is RuntimeError and error.__cause__ is None:
        return True  # hf_xet's error for a broken transfer
    return is_transient(error) and (_server_delay(error) or 0) <= _LONGEST_DELAY


def _wait(state: RetryCallState) -> float:
    """Return the seconds until the next try: the server's delay, else 2, 4, 8, ... plus up to a random second."""
    from tenacity import wait_exponential, wait_random

    error = state.outcome.exception() if state.outcome is not None else None
    delay = _server_delay(error) if error is not None else None
    if delay is not None:
        return delay + 1
    backoff = wait_exponential(multiplier=2, min=2, max=_LONGEST_WAIT) + wait_random(0, 1)
    return float(backoff(state))


def _server_delay(error: BaseException) -> float | None:
    """Return the seconds of the header ``Retry-After``, for 429 also of ``ratelimit``; None without them."""
    response = _response(error)
    if response is None:
        return None
    match = _SECONDS.fullmatch(response.headers.get("Retry-After", "")) or (
        _RESET.search(response.headers.get("ratelimit", "")) if response.status_code == 429 else None
    )
    return float(match[1]) if match else None


def _redact_record(record: logging.LogRecord) -> bool:
    """Redact a record of the library's log, which quotes signed URLs when the library itself tries again."""
    record.msg, record.args = redact(record.getMessage()), ()
    return True


def _reason(error: BaseException) -> str:
    """Return an error in one line: the first lines of the server's message, else of the error behind it."""
    causes = list(_causes(error))
    answer = next((str(text) for cause in causes if (text := getattr(cause, "server_message", None))), "")
    status = _status_of(error)
    if answer.strip() and status is not None:
        lines = [line for line in map(str.strip, answer.splitlines()) if line]
        return f"{status}: {'; '.join(lines[:_ANSWER_LINES])}"
    innermost = next((cause for cause in causes if hasattr(cause, "server_message")), causes[-1])
    return next((line for line in map(str.strip, str(innermost).splitlines()) if line), type(innermost).__name__)

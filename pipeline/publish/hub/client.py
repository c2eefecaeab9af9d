"""One way to ask the Hub: what is worth a second try gets it, and what goes wrong is said without secrets.

The token is the client library's own matter: it reads HF_TOKEN or the file of ``hf auth login`` at each request. Here
it is looked up for one reason only, to cut it out of messages.
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
_PATIENCE: Final = 600.0  # seconds that a server may ask for: the Hub's windows of rate limits are 300
_TOKENS: Final = (
    "https://huggingface.co/settings/tokens says what a token may do; HF_TOKEN goes before what `hf auth login` stored."
)
_KEPT: Final = "What was sent is kept: the same command goes on."
_SAID: Final = 4  # lines of a server's answer
_SECONDS: Final = re.compile(r"\s*(\d+)\s*")
_RESET: Final = re.compile(r"\bt\s*=\s*(\d+)")  # of the header `ratelimit: "api";r=0;t=55`


class MovedError(StageError):
    """412: the branch is no longer where it was read; nothing was changed."""


class RefusedError(UserError):
    """The Hub said no, or the client library by itself, and would again."""


class MissingError(RefusedError):
    """404: no such repository, revision or file, or none that this token may see."""


@dataclass(frozen=True, slots=True)
class HubClient:
    """The client library for one repository; ``tries`` is how often it is asked at most."""

    repo: str
    api: Any
    progress: Progress | None = None
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
            reraise=True,
        )
        try:
            return retrying(action)
        except (StageError, UserError, LookupError, TypeError, AttributeError):
            raise
        except Exception as error:
            raise self._translate(what, error) from None  # the library's errors quote requests

    def _tell(self, what: str, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        seconds = state.next_action.sleep if state.next_action is not None else 0
        reason = _reason(error) if error is not None else "no answer"
        told = f"{self.repo}: {what}: {reason}; try {state.attempt_number + 1} of {self.tries} in {seconds:.0f} s"
        # On stderr where no progress is shown: who waits for a minute must know for what.
        (self.progress or reporter_for(json=False)).warn(redact(told))

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
        if _is_passing(error) or (status is not None and is_transient_status(status)):
            where = "" if status else f"Check that {redact(os.environ.get('HF_ENDPOINT') or _HUB)} can be reached. "
            return StageError(text, hint=f"{where}{_KEPT}", transient=True)
        if status == 412:
            return MovedError(text, hint="Nothing was changed. Run the same command again.")
        if status == 404 or isinstance(error, EntryNotFoundError | RepositoryNotFoundError):
            return MissingError(text)
        if status is not None or isinstance(error, ValueError):
            return RefusedError(text, hint=_TOKENS if status in (401, 403) else None)
        return StageError(text, hint=_KEPT)


def connect(repo: str, progress: Progress | None = None, *, tries: int = TRIES) -> HubClient:
    """A client of the Hub, or of the server in HF_ENDPOINT; raises `UserError` where the library is not installed."""
    try:
        import tenacity  # noqa: F401
        from huggingface_hub import HfApi
        from huggingface_hub.utils import get_session
    except ImportError as error:
        raise UserError(
            f"publishing to the Hub needs {error.name}, which is not installed",
            hint="Install it: pip install 'quantmint[publish]'",
        ) from None
    logging.getLogger(get_session.__module__).addFilter(_redacted)  # once, however often it is added
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, library_name="quantmint")
    return HubClient(repo, api, progress, tries)


def _status_of(error: BaseException) -> int | None:
    """HTTP's status behind an error, also where the library wrapped it; None where there was no answer."""
    response = _response(error)
    return None if response is None else int(response.status_code)


def redact(text: str) -> str:
    """Without the token, without the signatures of addresses, without passwords in them."""
    from huggingface_hub import get_token

    return errors.redact(text, os.environ, get_token())


def _causes(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


def _response(error: BaseException) -> Any:
    answers = (getattr(cause, "response", None) for cause in _causes(error))
    return next((answer for answer in answers if answer is not None), None)


def _is_passing(error: BaseException) -> bool:
    """Whether the next try may go better: no answer at all, 5xx or 429."""
    if type(error) is RuntimeError and error.__cause__ is None:
        return True  # how hf_xet tells of a transfer that broke off
    return is_transient(error) and (_asked_for(error) or 0) <= _PATIENCE


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
    """Seconds of ``Retry-After`` or of ``ratelimit``."""
    response = _response(error)
    if response is None:
        return None
    found = _SECONDS.fullmatch(response.headers.get("Retry-After", "")) or (
        _RESET.search(response.headers.get("ratelimit", "")) if response.status_code == 429 else None
    )
    return float(found[1]) if found else None


def _redacted(record: logging.LogRecord) -> bool:
    """What the library itself tries again it says in its log, which quotes signed addresses."""
    record.msg, record.args = redact(record.getMessage()), ()
    return True


def _reason(error: BaseException) -> str:
    """What went wrong in one line: the first few of what the server said, where it said anything."""
    causes = list(_causes(error))
    said = next((str(text) for cause in causes if (text := getattr(cause, "server_message", None))), "")
    status = _status_of(error)
    if said.strip() and status is not None:
        lines = [line for line in map(str.strip, said.splitlines()) if line]
        return f"{status}: {'; '.join(lines[:_SAID])}"
    told = next((cause for cause in causes if hasattr(cause, "server_message")), causes[-1])
    return next((line for line in map(str.strip, str(told).splitlines()) if line), type(told).__name__)

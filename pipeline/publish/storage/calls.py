"""One question to an S3 server: asked again where that may help, and its refusals as sentences.

s3fs and botocore would each repeat by rules of their own, whose numbers multiply; both are told not to, and this is the
one place that does. Keys appear in no message: botocore's own do not hold them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

from pipeline.errors import QuantmintError, StageError, UserError
from pipeline.transience import is_transient_status

ATTEMPTS: Final = 6
FIRST_WAIT_S = 0.5
_LAST_WAIT_S: Final = 20.0
_BUSY: Final = {"SlowDown", "RequestTimeout", "Throttling", "ThrottlingException", "RequestLimitExceeded"}
_REFUSED: Final = {
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidToken",
    "TokenRefreshRequired",
}
_ELSEWHERE: Final = {"PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed", "301", "307"}
CREDENTIALS: Final = (
    "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE with a profile of ~/.aws, or run where a role is "
    "attached."
)

_T = TypeVar("_T")


class AnswerError(StageError):
    """The server answered with an error that its caller may understand: ``status`` is HTTP's, ``code`` S3's."""

    def __init__(self, message: str, *, status: int, code: str) -> None:
        hint = "Run the same command again: what was sent is kept."
        super().__init__(message, hint=hint, transient=_is_busy(status, code))
        self.status = status
        self.code = code


class Calls:
    """The operations of S3 on one server; ``place`` is what errors call it."""

    def __init__(self, filesystem: Any, place: str) -> None:
        self._filesystem = filesystem
        self._place = place

    def __call__(self, operation: str, *, doing: str, **arguments: Any) -> Any:
        """An operation by botocore's name for it; ``doing`` are the words for an error ("list")."""
        return self.repeated(lambda: self._filesystem.call_s3(operation, **arguments), doing=doing)

    def repeated(self, ask: Callable[[], _T], *, doing: str) -> _T:
        """Ask until there is an answer that will stay, at most `ATTEMPTS` times."""
        from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential, wait_random

        retrying = Retrying(
            stop=stop_after_attempt(ATTEMPTS),
            wait=wait_exponential(multiplier=FIRST_WAIT_S, max=_LAST_WAIT_S) + wait_random(0, FIRST_WAIT_S),
            retry=retry_if_exception(_passes),
            reraise=True,
        )
        try:
            return retrying(ask)
        except ImportError:
            raise  # a part of quantmint that is not installed; the command line says how it is
        except Exception as error:  # what s3fs, botocore and aiohttp raise has no common root
            raise _told(error, self._place, doing) from error


def _passes(error: BaseException) -> bool:
    """Whether the same question may be answered later: a connection, a busy server."""
    from aiohttp import ClientError as ConnectionFault
    from botocore import exceptions
    from botocore.parsers import ResponseParserError
    from fsspec.exceptions import FSTimeoutError

    answer = _answer(error)
    if answer is not None:
        status, code, _ = answer
        return _is_busy(status, code)
    if isinstance(error, exceptions.SSLError | exceptions.ProxyConnectionError):
        return False
    return isinstance(
        error,
        exceptions.ConnectionError
        | exceptions.HTTPClientError
        | exceptions.IncompleteReadError
        | exceptions.ResponseStreamingError
        | ResponseParserError
        | ConnectionFault
        | FSTimeoutError
        | TimeoutError
        | ConnectionError,
    )


def _is_busy(status: int, code: str) -> bool:
    return is_transient_status(status) or code in _BUSY


def _answer(error: BaseException) -> tuple[int, str, str] | None:
    """Status, code and message of what the server answered; s3fs wraps that into an `OSError`."""
    from botocore.exceptions import ClientError

    for found in (error, error.__cause__):
        if isinstance(found, ClientError):
            said = found.response.get("Error", {})
            status = found.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return status, str(said.get("Code", "")), str(said.get("Message", ""))
    return None


def _told(error: Exception, place: str, doing: str) -> QuantmintError:
    from botocore import exceptions

    if isinstance(error, QuantmintError):
        return error
    answer = _answer(error)
    if answer is not None:
        return _refusal(*answer, place, doing)
    if isinstance(
        error,
        exceptions.NoCredentialsError
        | exceptions.PartialCredentialsError
        | exceptions.CredentialRetrievalError
        | exceptions.ProfileNotFound
        | exceptions.TokenRetrievalError
        | exceptions.NoAuthTokenError,
    ):
        return UserError(f"{place}: found no credentials that could be used: {error}", hint=CREDENTIALS)
    if isinstance(error, exceptions.SSLError):
        return UserError(
            f"{place}: the server's certificate is not trusted: {error}",
            hint="AWS_CA_BUNDLE names a file with the certificates that are.",
        )
    if isinstance(error, exceptions.ParamValidationError):
        return UserError(f"{place}: could not {doing}: {error}")
    if _passes(error):
        return StageError(
            f"{place}: the server does not answer ({doing}): {error or type(error).__name__}",
            hint="Run the same command again: what was sent is kept.",
            transient=True,
        )
    return StageError(f"{place}: could not {doing}: {error or type(error).__name__}")


def _refusal(status: int, code: str, message: str, place: str, doing: str) -> QuantmintError:
    if code in _REFUSED:
        return UserError(f"{place}: the server refuses the credentials ({code}): {message}", hint=CREDENTIALS)
    if code == "RequestTimeTooSkewed":
        return UserError(f"{place}: the clock of this machine is wrong, says the server", hint="Set it and run again.")
    if code == "NoSuchBucket":
        return UserError(f"{place}: there is no such bucket", hint="Create it first; quantmint does not.")
    if code in _ELSEWHERE:
        return UserError(
            f"{place}: the bucket is in another region than was asked ({code}): {message}",
            hint="Set AWS_REGION and AWS_DEFAULT_REGION to the bucket's region.",
        )
    if status == 403:
        return UserError(
            f"{place}: these credentials may not {doing} ({code or status})",
            hint="Publishing asks for s3:ListBucket on the bucket; s3:GetObject, s3:PutObject, s3:DeleteObject, "
            "s3:AbortMultipartUpload and s3:ListMultipartUploadParts on its objects.",
        )
    said = f"{status} {code}".rstrip() + (f": {message}" if message else "")
    return AnswerError(f"{place}: could not {doing}: the server answered {said}", status=status, code=code)

"""The errors that a user can meet, and the exit code of each.

::

    QuantmintError                  5  something broke; the same command resumes
    ├── UserError                   2  a wrong argument, file or environment: nothing was started
    │   ├── RecipeError             2  ... in a recipe, at file:line:column
    │   └── ManifestError           2  ... an argument that is not a release (`pipeline.publish.manifest`)
    ├── StageError                  5  a stage broke
    │   ├── ServingError            5  vLLM did not start, died or gave an invalid answer
    │   │   └── RefusalError        5  ... it runs, and answered a request with an error
    │   ├── StoreError              5  the store cannot be read or written
    │   ├── DamagedError            5  a release is not what was published (`pipeline.store.files`)
    │   ├── UnstableValueError      5  a value in a fingerprint has no stable form (`pipeline.base.canonical`)
    │   └── InspectionError         1  the checkpoint is structurally wrong: it must not be served
    └── InvalidMeasurementError     4  a measurement is invalid and must not be judged

A message is one paragraph: the value found and the value expected. ``hint`` says what to do.
`eval` and `calibration` know nothing of this tree: they raise their own `eval.errors.MeasurementError` and
`calibration.errors.CalibrationError`, which the stages translate.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from quantmint.pipeline.base.transience import is_transient_status

SECRET = re.compile(
    r"TOKEN(?!IZER)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|(API|ACCESS|ACCOUNT|STORAGE|PRIVATE)_?KEY|CONNECTION_?STRING"
    r"|WEBHOOK",  # the address alone allows writing to it
    re.IGNORECASE,
)
"""Pattern of the names of secret environment variables."""
_TOKEN = re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{16,}|\bAKIA[A-Z0-9]{12,}")
_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+@|(?<=\w)\?[^\s\"'<>)]*=[^\s\"'<>)]*")  # a user; a query, which may sign it


class QuantmintError(Exception):
    """The base of all errors: a message of one paragraph, and a hint on what to do, if there is one.

    ``transient`` says that the same command may succeed later with nothing changed, because a network or server was
    unreachable; programs that run many recipes repeat only such commands.
    """

    exit_code = 5

    def __init__(self, message: str, *, hint: str | None = None, transient: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.transient = transient

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  {self.hint}"


class UserError(QuantmintError):
    """A wrong argument, file or environment: nothing was started and nothing is lost."""

    exit_code = 2


class RecipeError(UserError):
    """One or more faults in a recipe, each with its position."""


class StageError(QuantmintError):
    """A failed stage. Its committed work stays; the same command resumes there."""


class ServingError(StageError):
    """A vLLM server that did not start, died, or gave an invalid answer."""


class RefusalError(ServingError):
    """A running server's error response: ``status`` is the HTTP status, ``answer`` the body."""

    def __init__(self, message: str, *, status: int, answer: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint, transient=is_transient_status(status))
        self.status = status
        self.answer = answer


class StoreError(StageError):
    """A store that cannot be read or written."""


class InspectionError(StageError):
    """A checkpoint that contradicts its own configuration or its source."""

    exit_code = 1


class InvalidMeasurementError(QuantmintError):
    """A measurement that must not be judged."""

    exit_code = 4


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error; the last if the first ends with a colon.

    An empty error gives the name of its type.
    """
    lines = _lines_of(error)
    return lines[-1].strip() if lines[0].endswith(":") else lines[0]


def last_line(error: BaseException) -> str:
    """Return the last line of another library's error (a traceback's reason), or its type if it is empty."""
    return _lines_of(error)[-1]


def _lines_of(error: BaseException) -> list[str]:
    return (str(error).strip() or type(error).__name__).splitlines()


def redact(text: str, environment: Mapping[str, str], *secrets: str | None) -> str:
    """Return a text for logs with secrets replaced: the environment's, ``secrets``, tokens, and keys in addresses."""
    values = [value for name, value in environment.items() if SECRET.search(name) and len(value) >= 6]
    for value in sorted({*values, *filter(None, secrets)}, key=len, reverse=True):
        text = text.replace(value, "[secret]")
    return _IN_ADDRESS.sub("", _TOKEN.sub("[secret]", text))


def shown_path(path: Path | str) -> str:
    """Return a path relative to the working directory where it is below it; an address unchanged."""
    if isinstance(path, str) and not Path(path).is_absolute():
        return path
    try:
        return str(Path(path).absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def nearest(word: object, valid: Iterable[str]) -> str | None:
    """Return the valid spelling nearest to a misspelt word; None where none is near."""
    if not isinstance(word, str):
        return None
    folded = {name.lower().replace("-", "_"): name for name in valid}
    near = difflib.get_close_matches(word.lower().replace("-", "_"), folded, n=1)
    return folded[near[0]] if near else None


def did_you_mean(word: object, valid: Iterable[str]) -> str:
    """Return the hint ` (did you mean "..."?)`, empty where no valid spelling is near."""
    near = nearest(word, valid)
    return f' (did you mean "{near}"?)' if near else ""


class TerminatedError(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does: what is finished is kept, and processes of ours end."""

    exit_code = 143

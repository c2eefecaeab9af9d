"""Why vLLM did not start, in one line from a log of thousands.

    >>> diagnose("ERROR OSError: [Errno 98] Address already in use").message
    'the port was taken by another process'

The table is `failures.yaml`. A log that no entry explains yields its last error, or its last lines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import resources
from typing import NamedTuple

import yaml

from pipeline.serving.knobs.table import table

#: What vLLM says when the cause stands further up.
_ECHO = re.compile(
    r"root cause above|for the root cause|Engine core initialization failed|WorkerProc initialization failed"
)
#: What the server says when its engine is gone, whatever the reason.
_GONE = re.compile(r"EngineDeadError|EngineCore encountered an issue")
#: A line that tells of an exception and is none: vLLM went on without.
_HARMLESS = re.compile(r"^(?:\([^)]*pid=\d+\)\s*)?(?:DEBUG|INFO|WARNING)\s")
_ERROR = re.compile(r"(?:^|\s)(?P<error>[A-Za-z_.]*(?:Error|Exception|Interrupt)\b:? .*\S)")
_PREFIX = re.compile(r"^(?:\([^)]*pid=\d+\)\s*)?(?:(?:ERROR|CRITICAL)\s+[\d-]+ [\d:.]+ \[[^\]]*\]\s*)?")


class Diagnosis(NamedTuple):
    """The cause in one line and what to do about it; `name` is the table's entry, or "unknown"."""

    name: str
    message: str
    fix: str | None


@dataclass(frozen=True, slots=True)
class _Failure:
    name: str
    pattern: re.Pattern[str]
    message: str
    fix: str


def diagnose(log: str) -> Diagnosis:
    """Explain the log of a server that ended before it answered."""
    for failure in _failures():
        found = failure.pattern.search(log)
        if found is not None:
            groups = {name: value or "" for name, value in found.groupdict().items()}
            return Diagnosis(failure.name, failure.message.format_map(groups) + _nearest(groups), failure.fix)
    return Diagnosis("unknown", _last_words(log), None)


def _nearest(groups: dict[str, str]) -> str:
    """A known spelling for the first argument that vLLM did not recognize."""
    unknown = groups.get("arguments", "").split()
    known = [knob.name for knob in table().values() if knob.kind == "flag"]
    close = get_close_matches(unknown[0], [name for name in known if name != unknown[0]], n=1) if unknown else []
    return f" (near: {close[0]})" if close else ""


def _last_words(log: str) -> str:
    lines = [_PREFIX.sub("", line).strip() for line in log.splitlines() if not _HARMLESS.match(line)]
    errors = [found["error"] for line in lines if (found := _ERROR.search(line)) and not _ECHO.search(line)]
    if errors:
        return errors[-1]
    if _GONE.search(log):
        return "its engine was gone without a word, as when the kernel kills a process for its memory"
    lines = [_PREFIX.sub("", line).strip() for line in log.splitlines()]
    return " | ".join([line for line in lines if line][-3:]) or "it wrote nothing"


@cache
def _failures() -> tuple[_Failure, ...]:
    text = resources.files("pipeline.serving.running").joinpath("failures.yaml").read_text(encoding="utf-8")
    return tuple(
        _Failure(row["name"], re.compile(row["pattern"]), row["message"], row["fix"]) for row in yaml.safe_load(text)
    )

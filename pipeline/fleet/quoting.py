"""Words of a child that others will read: one line, without tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_SECRET_NAME: Final = re.compile(
    r"TOKEN(?!IZER)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|(API|ACCESS|ACCOUNT|STORAGE|PRIVATE)_?KEY|WEBHOOK", re.IGNORECASE
)
_TOKEN: Final = re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{16,}|\bAKIA[A-Z0-9]{12,}")
_IN_ADDRESS: Final = re.compile(r"(?<=://)[^/@\s]+@|(?<=[a-z0-9])\?[^\s\"'<>)]*(?:[Ss]ignature|[Tt]oken)=[^\s\"'<>)]*")
_CONTROL: Final = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_LONGEST: Final = 2000
_TAIL: Final = 65536


def without_secrets(text: str, environment: Mapping[str, str]) -> str:
    """A text without the values of variables that are named as secrets, and without what looks like a token."""
    values = {value for name, value in environment.items() if _SECRET_NAME.search(name) and len(value) >= 6}
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, "[secret]")
    return _IN_ADDRESS.sub("", _TOKEN.sub("[secret]", text))


def last_line(log: Path, environment: Mapping[str, str]) -> str:
    """The last line of a log that says something, fit to be quoted; "" for none."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - _TAIL))
            text = stream.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    lines = [line for line in map(str.strip, _CONTROL.sub("", text.replace("\r", "\n")).splitlines()) if line]
    return quotable(lines[-1], environment) if lines else ""


def quotable(text: str, environment: Mapping[str, str]) -> str:
    """A message as one paragraph without control characters, halves of characters and secrets."""
    whole = text.encode(errors="replace").decode()  # a file's name need not be UTF-8, and a terminal refuses its rest
    said = " ".join(_CONTROL.sub("", whole).split())
    return without_secrets(said, environment)[:_LONGEST]

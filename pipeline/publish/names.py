"""Names of files that may go from one machine to another."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

_FORBIDDEN = re.compile(r'[\x00-\x1f\x7f\\:*?"<>|\ud800-\udfff]')  # what a file system refuses or reads otherwise


def require_safe(names: Iterable[str]) -> None:
    """Raise `ValueError` for the first name that is no plain relative path, or that another one would overwrite.

    What lies in a folder on one machine is put into one on another: a name that climbs out, that a file system reads
    otherwise, or that differs from another's in case alone or in how Unicode writes an accent, is an attack or an
    accident.
    """
    seen: dict[str, str] = {}
    for name in names:
        parts = name.split("/")
        if _FORBIDDEN.search(name) or any(part in {"", ".", ".."} or part.endswith((" ", ".")) for part in parts):
            raise ValueError(f"found the file name {name!r}, expected a relative path without '..'")
        if len(name.encode()) > 1024 or any(len(part.encode()) > 255 for part in parts):
            raise ValueError(f"found the file name {name[:40]!r}..., which is too long for a file system")
        other = seen.setdefault(_folded(name), name)
        if other != name:
            raise ValueError(f"found the file names {other!r} and {name!r}, which are one on some file systems")
    for name in seen:
        for end in (at for at, character in enumerate(name) if character == "/"):
            if name[:end] in seen:
                raise ValueError(f"found {seen[name[:end]]!r} as a file and as a folder of {seen[name]!r}")


def _folded(name: str) -> str:
    """What two names have in common that some file system takes for one (Unicode 3.13, canonical caseless matching)."""
    return unicodedata.normalize("NFD", unicodedata.normalize("NFD", name).casefold())

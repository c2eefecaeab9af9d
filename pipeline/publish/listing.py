"""What a release says of itself, for a list: read leniently, because a list must also show what is damaged.

What is believed of a release is read by `pipeline.publish.manifest`, which is strict.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from pipeline.publish.target import Listed


@dataclass(frozen=True, slots=True)
class Described:
    """``title`` one line, "" where there is none; ``created`` ISO 8601 with its zone, None where it is not said.

    ``size`` is that of all files that the manifest lists, with its own, in bytes; None where it lists none.
    """

    title: str
    created: str | None
    size: int | None


def described(manifest: bytes) -> Described:
    """What the bytes of a ``quantmint.json`` say, or nothing of what they do not say; never raises."""
    try:
        data = json.loads(manifest)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        return Described("", None, None)
    title, created, files = data.get("title"), data.get("created"), data.get("files")
    sizes = [file.get("size") for file in files.values() if isinstance(file, dict)] if isinstance(files, dict) else []
    return Described(
        title=" ".join(title.split()) if isinstance(title, str) else "",
        created=created if isinstance(created, str) and _is_moment(created) else None,
        size=sum(size for size in sizes if isinstance(size, int)) + len(manifest) if sizes else None,
    )


def newest_first(releases: Iterable[Listed]) -> tuple[Listed, ...]:
    """Releases by when they were made; those of one moment by their tags."""
    return tuple(sorted(releases, key=lambda release: (_moment(release.created), release.tag), reverse=True))


def _moment(created: str) -> datetime:
    return datetime.fromisoformat(created)


def _is_moment(created: str) -> bool:
    try:
        return _moment(created).tzinfo is not None
    except ValueError:
        return False

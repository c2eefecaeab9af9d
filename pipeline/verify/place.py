"""From what a person names to a folder with a release's files: one that lies here, or what was fetched."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pipeline.errors import UserError
from pipeline.progress import Progress
from pipeline.publish.opening import HUB_SCHEME, open_target
from pipeline.publish.release import EVIDENCE, MANIFEST

_TAGGED: Final = re.compile(r"(?P<place>.+)@(?P<tag>v\d{8}-[0-9a-f]{8})")
_REPO: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class Found:
    """A release's files, and the ``tag`` that was asked for, which carries the start of its identity.

    ``vouched`` are SHA-256 of those files whose bytes were not fetched, by the word of the place.
    """

    folder: Path
    vouched: Mapping[str, str] = field(default_factory=dict)
    tag: str | None = None


@contextmanager
def opened(subject: str, revision: str | None, *, remote: bool, progress: Progress) -> Iterator[Found]:
    """Find what a person named: a folder, ``org/name[@TAG]``, ``s3://bucket/prefix/name[@TAG]``.

    A folder that is there goes before a repository of its name. Raises `UserError` for a place that does not exist.
    """
    place, tag = (subject, revision) if is_folder(subject) else split(subject, revision)
    if remote and is_folder(place):
        raise UserError(f"--remote: found the folder {place}, expected a repository of the Hub")
    if is_folder(place) and tag is None:
        yield Found(Path(place))
    elif remote:
        from pipeline.verify.remote import looked_at

        with looked_at(open_target(place), tag, progress) as (folder, vouched):
            yield Found(folder, vouched, tag)
    else:
        yield Found(open_target(place).fetch(None, tag=tag, progress=progress), tag=tag)


def record_of(subject: str, progress: Progress) -> Path | None:
    """The folder with the evidence of a release that lies elsewhere, fetched without its weights.

    None where what a person named is, by its form or because it is there, something on this machine.
    """
    place, tag = split(subject, None)
    if Path(subject).exists() or Path(place).exists() or not ("://" in place or _REPO.fullmatch(place)):
        return None
    return open_target(place).fetch(None, tag=tag, progress=progress, wanted=is_evidence) / EVIDENCE


def is_evidence(name: str) -> bool:
    """Whether a file of a release is what judges it: all but the checkpoint and the card."""
    return name == MANIFEST or name.startswith(f"{EVIDENCE}/")


def split(subject: str, revision: str | None) -> tuple[str, str | None]:
    """A place and the tag of a release in it; raises `UserError` where two different tags are given."""
    found = _TAGGED.fullmatch(subject)
    if found is None:
        return subject, revision
    if revision not in (None, found["tag"]):
        raise UserError(f"found {found['tag']} in {subject} and {revision} as --revision, expected one of them")
    return found["place"], found["tag"]


def is_folder(text: str) -> bool:
    """Whether a name is that of a folder here."""
    return not text.startswith(HUB_SCHEME) and "://" not in text and Path(text).is_dir()

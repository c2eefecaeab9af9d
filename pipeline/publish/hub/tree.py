"""The files of a repository at a commit, and whether they are a release's.

No byte is fetched for that: the Hub tells the SHA-256 of each large file, and for the others the hash that git gives
them, which follows from the bytes that are here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pipeline.errors import StageError
from pipeline.publish.hub.client import Client
from pipeline.publish.release import MANIFEST, SIGNATURE, File, Release

ATTRIBUTES: Final = ".gitattributes"
"""The Hub's own file: which names are large files."""


@dataclass(frozen=True, slots=True)
class Remote:
    """A file on the Hub: bytes, git's hash of its blob, and the SHA-256 where it is stored as a large file."""

    size: int
    blob: str
    sha256: str | None


def tree(client: Client, revision: str) -> dict[str, Remote]:
    """Every file at a revision by its name, without the Hub's own."""

    from huggingface_hub.hf_api import RepoFile

    def listed() -> dict[str, Remote]:
        found = {}
        for entry in client.api.list_repo_tree(client.repo, revision=revision, recursive=True):
            if isinstance(entry, RepoFile):
                found[entry.path] = Remote(entry.size, entry.blob_id, entry.lfs.sha256 if entry.lfs else None)
        found.pop(ATTRIBUTES, None)
        return found

    return client.call(f"read the files at {revision[:12]}", listed)


def is_same(remote: Remote | None, file: File) -> bool:
    """Whether the Hub holds these bytes under that name."""
    if remote is None or remote.size != file.size:
        return False
    return remote.sha256 == file.sha256 if remote.sha256 is not None else remote.blob == git_blob(content(file))


def is_release(found: Mapping[str, Remote], release: Release) -> bool:
    """Whether a commit holds this release, whoever signed it: two of one identity are the same bytes."""
    return not differences(found, release, signed=False)


def has_identity(found: Mapping[str, Remote], release: Release) -> bool:
    """Whether the manifest at a commit is this release's."""
    return is_same(found.get(MANIFEST), release.files[MANIFEST])


def differences(found: Mapping[str, Remote], release: Release, *, signed: bool = True) -> tuple[str, ...]:
    """What is missing, other or too much on the Hub, one phrase a file."""
    skipped = set() if signed else {SIGNATURE}
    wrong = []
    for name in sorted((found.keys() | release.files.keys()) - skipped):
        if name not in found:
            wrong.append(f"{name} is missing")
        elif name not in release.files:
            wrong.append(f"{name} is not in the release")
        elif not is_same(found[name], release.files[name]):
            wrong.append(f"{name} is not the same")
    return tuple(wrong)


def some(phrases: Sequence[str], shown: int = 3) -> str:
    """The first few of many."""
    more = len(phrases) - shown
    return "; ".join(phrases[:shown]) + (f"; and {more} more" if more > 0 else "")


def content(file: File) -> bytes:
    """The bytes of a small file; raises `StageError` where they are not those that were judged."""
    found = file.path.read_bytes()
    require_digest(file, hashlib.sha256(found).hexdigest())
    return found


def require_digest(file: File, sha256: str) -> None:
    """Raise `StageError` where a file changed after the gate judged it."""
    if sha256 != file.sha256:
        raise StageError(
            f"{file.path} is not what was judged: its SHA-256 is {sha256[:16]}…, expected {file.sha256[:16]}…",
            hint="Nothing was committed. Run `quantmint run --redo quantize` to make the checkpoint again.",
        )


def git_blob(found: bytes) -> str:
    """Git's hash of a file: SHA-1 of ``blob``, its length, a zero byte and its bytes (git-hash-object(1))."""
    return hashlib.sha1(b"blob %d\0" % len(found) + found, usedforsecurity=False).hexdigest()

"""Publishing to a folder, so that a reader finds the old version or the new one and never a mixture.

    published/llama70b-fp8kv -> .releases/llama70b-fp8kv/3f1c0a52e7d94b60
    published/.releases/llama70b-fp8kv/3f1c0a52e7d94b60/

A release is copied under a temporary name, checked against its digests on the way, put on the disk, and renamed. Then
one rename of a symbolic link makes it the current one. A crash leaves at most a folder with a temporary name, which the
next publication removes.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from pipeline.errors import StageError
from pipeline.locks import Lock
from pipeline.store.disk import fsync

RELEASES = ".releases"
_PARTIAL = ".partial"
_CHUNK = 1 << 22  # bytes


def publish_folder(
    target: Path,
    name: str,
    version: str,
    files: Mapping[str, tuple[Path, str]],
    *,
    advance: Callable[[int], None] = lambda _: None,
) -> Path:
    """Make ``target/name`` point to a release with these files.

    ``version`` names the release; ``files`` maps each relative name to where it is and to its SHA-256. Returns
    ``target/name``. Raises `StageError` where a file is not what its digest says, or the disk is full: what was
    published before is untouched.
    """
    releases = target / RELEASES / name
    release = releases / version
    link = target / name
    try:
        releases.mkdir(parents=True, exist_ok=True)
        with Lock(releases / "lock"):
            if os.path.lexists(link) and not _is_ours(link, name):
                raise StageError(f"{link} is there and was not published by quantmint: move it away.")
            _remove_partials(releases)
            if not _is_whole(release, files, advance):
                partial = releases / f"{version}{_PARTIAL}"
                for relative, (source, digest) in files.items():
                    _copy(source, partial / relative, digest, advance)
                for folder in (partial, *(path for path in partial.rglob("*") if path.is_dir())):
                    fsync(folder)
                if release.is_dir():
                    release.rename(releases / f"{version}.damaged{_PARTIAL}")
                partial.rename(release)
                fsync(releases)
                _remove_partials(releases)
            pointer = target / f".{name}{_PARTIAL}"
            pointer.unlink(missing_ok=True)
            pointer.symlink_to(release.relative_to(target), target_is_directory=True)
            pointer.replace(link)
            fsync(target)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StageError(
                f"{target}: the disk is full; nothing was published.", hint="Free space and run the same command again."
            ) from error
        raise StageError(f"{target}: nothing was published: {error}") from error
    return link


def _is_ours(link: Path, name: str) -> bool:
    return link.is_symlink() and link.readlink().parts[:-1] == (RELEASES, name)


def _is_whole(release: Path, files: Mapping[str, tuple[Path, str]], advance: Callable[[int], None]) -> bool:
    """Whether an earlier release of this name is there with exactly these bytes: its name alone proves nothing."""
    found = {path.relative_to(release).as_posix() for path in release.rglob("*") if not path.is_dir()}
    return found == files.keys() and all(
        _digest(release / relative, advance) == digest for relative, (_, digest) in files.items()
    )


def _digest(path: Path, advance: Callable[[int], None]) -> str:
    found = hashlib.sha256()
    for chunk in _chunks(path):
        found.update(chunk)
        advance(len(chunk))
    return found.hexdigest()


def _remove_partials(releases: Path) -> None:
    for stale in releases.glob(f"*{_PARTIAL}"):
        shutil.rmtree(stale)


def _copy(source: Path, destination: Path, digest: str, advance: Callable[[int], None]) -> None:
    destination.parent.mkdir(parents=True, exist_ok=True)
    found = hashlib.sha256()
    with destination.open("xb", buffering=0) as writer:
        for chunk in _chunks(source):
            found.update(chunk)
            view = memoryview(chunk)
            while view.nbytes:
                view = view[writer.write(view) :]
            advance(len(chunk))
        os.fsync(writer.fileno())
    if found.hexdigest() != digest:
        raise StageError(
            f"{source} is not what was judged: its SHA-256 is {found.hexdigest()[:16]}…, expected {digest[:16]}…",
            hint="Nothing was published. Run `quantmint run --redo quantize` to make the checkpoint again.",
        )


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as reader:
        while chunk := reader.read(_CHUNK):
            yield chunk

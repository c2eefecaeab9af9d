"""The bytes of a release on their way to the Hub, and the one commit that names them.

**What resumes.** The Hub keeps objects by what they contain, so the same command sends only what is not there.

- Xet (what huggingface.co speaks, through ``hf_xet``): files are cut into chunks by their content, and a chunk that the
  store has is not sent: after an interruption a shard goes on in its middle, and a new release of the same model sends
  what differs. The file is read once, and its SHA-256 is taken from the very bytes that are sent.
- LFS over HTTP (``HF_HUB_DISABLE_XET=1``, or a server without Xet): an object that is there is not sent again, so an
  interruption costs at most the shard that was under way. Within one run a part of a large shard that broke off is
  repeated alone.

Either way the client's SHA-256 is held against the manifest's before a commit: what changed after the gate is refused.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from pipeline.base.errors import StageError
from pipeline.publish.hub.client import Client, MovedError
from pipeline.publish.hub.repository import content
from pipeline.publish.release import Release
from pipeline.store.files import File, require_digest

_TITLE: Final = 200  # characters that the Hub takes as the title of a pull request (`HfApi.create_discussion`)
SMALL: Final = 10 * 1024**2
"""Bytes: larger files never lie in git itself (https://huggingface.co/docs/hub/repositories-getting-started)."""


def is_small(name: str, file: File) -> bool:
    """Whether a file is sent with others rather than by itself; weights never are, however small."""
    return file.size <= SMALL and not name.endswith(".safetensors")


def upload(client: Client, release: Release, branch: str, *, by_request: bool) -> list[Any]:
    """Send what the Hub stores as large files; returns the operations of the commit, one for each file.

    One file at a time, each tried again by itself; small files together, and those that the Hub keeps in git itself go
    with the commit. Raises `StageError` for a file that is not what was judged.
    """
    small = {name: file for name, file in sorted(release.files.items()) if is_small(name, file)}
    large = {name: file for name, file in sorted(release.files.items()) if name not in small}
    with _quiet(), _bar(client, release.size) as advance:
        operations = [_send_shard(client, name, file, branch, advance, by_request) for name, file in large.items()]
        return operations + _send_small(client, small, branch, advance, by_request)


def _send_shard(
    client: Client, name: str, file: File, branch: str, advance: Callable[[int], None], by_request: bool
) -> Any:
    size = file.path.stat().st_size
    if size != file.size:
        raise StageError(
            f"{file.path} is not what was judged: found {size} bytes, expected {file.size}",
            hint="Nothing was committed. Run `quantmint run --redo quantize` to make the checkpoint again.",
        )
    sent = _Sent(advance)
    operation = _operation(name, file.path, sent)
    _preupload(client, f"upload {name}", [operation], branch, by_request)
    require_digest(file, operation.upload_info.sha256.hex())
    sent.reach(file.size)
    return operation


def _send_small(
    client: Client, files: Mapping[str, File], branch: str, advance: Callable[[int], None], by_request: bool
) -> list[Any]:
    from huggingface_hub import CommitOperationAdd

    operations = [CommitOperationAdd(name, content(file)) for name, file in files.items()]  # the bytes that were hashed
    if operations:
        _preupload(client, f"upload {len(operations)} small files", operations, branch, by_request)
    advance(sum(file.size for file in files.values()))
    return operations


def _preupload(client: Client, what: str, operations: Sequence[Any], branch: str, by_request: bool) -> None:
    client.call(
        what,
        lambda: client.api.preupload_lfs_files(
            client.repo,
            operations,
            revision=branch,
            create_pr=by_request,
            free_memory=False,
            gitignore_content="",  # one in the repository would drop files from the commit without a word
        ),
    )


class _Sent:
    """How far a file has come: what is sent again after a fault is not counted twice."""

    def __init__(self, advance: Callable[[int], None]) -> None:
        self._advance, self._reached = advance, 0

    def reach(self, position: int) -> None:
        if position > self._reached:
            self._advance(position - self._reached)
            self._reached = position


class _Reader(io.BufferedReader):
    """A file that tells how far it was read."""

    def __init__(self, path: str | os.PathLike[str], sent: _Sent) -> None:
        super().__init__(io.FileIO(path))
        self._sent = sent

    def read(self, size: int | None = -1, /) -> bytes:
        found = super().read(size)
        self._sent.reach(self.tell())
        return found


def _operation(name: str, path: Path, sent: _Sent) -> Any:
    """The client's own operation, whose file counts what the LFS path reads of it; Xet opens the path itself."""
    from huggingface_hub import CommitOperationAdd

    class Counted(CommitOperationAdd):  # type: ignore[misc]
        @contextmanager
        def as_file(self, with_tqdm: bool = False) -> Iterator[io.BufferedReader]:
            with _Reader(path, sent) as file:
                yield file

    return Counted(name, path)


@contextmanager
def _bar(client: Client, total: int) -> Iterator[Callable[[int], None]]:
    if client.progress is None:
        yield lambda _: None
        return
    with client.progress.bar(total, "B") as advance:
        yield advance


@contextmanager
def _quiet() -> Iterator[None]:
    """The client's own bars would be drawn over ours."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def title_of(release: Release) -> str:
    """The first line of the commit, and of a pull request; the listing of releases reads the title from it."""
    return f"{release.tag}: {release.title}"[:_TITLE]


def commit(
    client: Client,
    operations: Sequence[Any],
    title: str,
    branch: str,
    parent: str,
    *,
    found: Callable[[], str | None],
    by_request: bool = False,
) -> str:
    """Make one commit on top of ``parent`` (``by_request``: on a new pull request against the branch); returns its id.

    ``found`` looks for the commit where it may be there already: its answer got lost, or another publisher made it of
    the same release at the same time. Raises `MovedError` where the branch moved meanwhile: nothing was overwritten.
    """
    tries = 0

    def attempt() -> str:
        nonlocal tries
        tries += 1
        if tries > 1 and (earlier := found()) is not None:
            return earlier
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # remarks on the card's metadata, which preflight has made
            made = client.api.create_commit(
                client.repo,
                list(operations),
                commit_message=title,
                revision=branch,
                parent_commit=parent,
                create_pr=by_request,
            )
        return str(made.oid)

    try:
        return client.call(f"commit to {branch}", attempt)
    except MovedError:
        earlier = found()
        if earlier is not None:
            return earlier
        raise moved(client.repo, branch) from None


def moved(repo: str, branch: str) -> MovedError:
    """What is said where somebody else wrote to the branch."""
    return MovedError(
        f"{repo}: {branch} has moved since it was looked at: somebody else wrote to it meanwhile",
        hint="Nothing was overwritten, and what was sent is kept. Look at what is there, then run the same command "
        "again: it commits on top.",
    )

"""A repository of the Hub: its refs, files and history as they are now, what is sent to it, and what is fetched.

No byte is fetched to know whether files are a release's: the Hub tells the SHA-256 of each large file, and for the
others the hash that git gives them, which follows from the bytes that are here.

An object that is there is not sent again: through Xet (``hf_xet``, what huggingface.co speaks) a shard goes on in its
middle, by LFS over HTTP an interruption costs at most the shard that was under way. Either way the client's SHA-256 is
held against the manifest's before a commit: what changed after the gate is refused.
"""

from __future__ import annotations

import hashlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC
from glob import escape
from pathlib import Path
from typing import Any, Final

from quantmint.pipeline.base.errors import StageError, UserError
from quantmint.pipeline.base.progress import reporter_for
from quantmint.pipeline.publish.destination import ListedRelease, newest_first
from quantmint.pipeline.publish.hub.client import HubClient, MissingError, MovedError
from quantmint.pipeline.publish.release import MANIFEST, SIGNATURE, TAG, Release
from quantmint.pipeline.store.files import File, Wanted, require_digest, require_safe

MAIN: Final = "main"
"""The branch that readers get."""
CANDIDATE: Final = "candidate"
"""The branch of a release that waits to be promoted."""
_ATTRIBUTES: Final = ".gitattributes"  # the Hub's own file: which names are large files


_TITLE: Final = 200  # characters that the Hub takes as the title of a pull request (`HfApi.create_discussion`)
_SMALL: Final = 10 * 1024**2
"""Bytes: larger files never lie in git itself (https://huggingface.co/docs/hub/repositories-getting-started), and are
sent each by itself; weights are, however small."""


@dataclass(frozen=True, slots=True)
class Remote:
    """A file on the Hub: bytes, git's hash of its blob, and the SHA-256 where it is stored as a large file."""

    size: int
    blob: str
    sha256: str | None

    @property
    def content(self) -> str:
        """What names its bytes."""
        return self.blob if self.sha256 is None else f"sha256:{self.sha256}"


Tree = Mapping[str, Remote]


@dataclass(frozen=True, slots=True)
class Repository:
    """``name`` differs from the name that was asked for where it was renamed; commits are 40 hex digits.

    ``requests`` are the head and the title of each open pull request by its number.
    """

    name: str
    private: bool
    gated: str | None
    branches: Mapping[str, str]
    tags: Mapping[str, str]
    requests: Mapping[int, tuple[str, str]] = field(default_factory=dict)

    @property
    def head(self) -> str:
        """The commit of ``main``."""
        return self.branches[MAIN]

    def request_of(self, commit: str) -> int | None:
        """The open pull request whose head is this commit."""
        return next((number for number, (head, _) in self.requests.items() if head == commit), None)


def look(client: HubClient) -> Repository | None:
    """The repository; None where there is none, or none that this token may see."""
    api, repo = client.api, client.repo
    try:
        info = client.call("read the repository", lambda: api.model_info(repo))
        refs = client.call("read its branches and tags", lambda: api.list_repo_refs(repo, include_pull_requests=True))
    except MissingError:
        return None
    heads = {int(ref.ref.rpartition("/")[2]): str(ref.target_commit) for ref in refs.pull_requests or ()}
    opened: dict[int, str] = {}
    if heads:  # a merged or closed one keeps its ref
        opened = client.call(
            "list its pull requests",
            lambda: {
                int(one.num): str(one.title)
                for one in api.get_repo_discussions(repo, discussion_type="pull_request", discussion_status="open")
            },
        )
    return Repository(
        name=str(info.id),
        private=bool(info.private),
        gated=info.gated or None,
        branches={ref.name: ref.target_commit for ref in refs.branches},
        tags={ref.name: ref.target_commit for ref in refs.tags},
        requests={number: (heads[number], title) for number, title in opened.items() if number in heads},
    )


def releases(client: HubClient, repository: Repository) -> tuple[ListedRelease, ...]:
    """The tagged releases, the newest first.

    One is current where `main` has its manifest: a promotion or a rollback brings that there by another commit.
    """
    tags = {name: commit for name, commit in repository.tags.items() if TAG.fullmatch(name)}
    waits = {head for head, _ in repository.requests.values()} | {repository.branches.get(CANDIDATE)}
    shown = tree(client, repository.head).get(MANIFEST) if tags else None
    commits: dict[str, Any] = {}
    for revision in (repository.head, *tags.values()):  # most are in the history of `main`
        if tags and revision not in commits:
            commits |= {str(commit.commit_id): commit for commit in history(client, revision)}
    found = []
    for tag, commit in tags.items():
        files = tree(client, commit)
        current = shown is not None and MANIFEST in files and files[MANIFEST].content == shown.content
        found.append(
            ListedRelease(
                tag=tag,
                revision=commit,
                created=commits[commit].created_at.astimezone(UTC).isoformat(timespec="seconds"),
                title=str(commits[commit].title).removeprefix(f"{tag}: "),
                current=current,
                candidate=commit in waits and not current,
                size=sum(file.size for file in files.values()),
            )
        )
    return newest_first(found)


def history(client: HubClient, revision: str) -> list[Any]:
    """The commits that led to a revision, the newest first."""
    return client.call(
        f"read the history of {revision[:12]}",
        lambda: list(client.api.list_repo_commits(client.repo, revision=revision)),
    )


def tree(client: HubClient, revision: str) -> dict[str, Remote]:
    """Every file at a revision by its name, without the Hub's own."""
    from huggingface_hub.hf_api import RepoFile

    def listed() -> dict[str, Remote]:
        found = {}
        for entry in client.api.list_repo_tree(client.repo, revision=revision, recursive=True):
            if isinstance(entry, RepoFile):
                found[entry.path] = Remote(entry.size, entry.blob_id, entry.lfs.sha256 if entry.lfs else None)
        found.pop(_ATTRIBUTES, None)
        return found

    return client.call(f"read the files at {revision[:12]}", listed)


def differing(there: Tree, wanted: Mapping[str, File | Remote]) -> list[str]:
    """Names of the files that the two do not share, sorted."""
    return sorted(name for name in there.keys() | wanted.keys() if not _is_same(there.get(name), wanted.get(name)))


def _is_same(one: Remote | None, other: File | Remote | None) -> bool:
    """Whether two files have the same bytes; None is one that is not there."""
    if one is None or other is None or one.size != other.size:
        return False
    if isinstance(other, Remote):
        return one.content == other.content
    if one.sha256 is not None:
        return one.sha256 == other.sha256
    found = content(other)  # git's own hash, as git-hash-object(1) has it
    return one.blob == hashlib.sha1(b"blob %d\0" % len(found) + found, usedforsecurity=False).hexdigest()


def differences(there: Tree, release: Release) -> list[str]:
    """Names that are missing, other or too much on the Hub; whoever signed it, it is the same release."""
    return [name for name in differing(there, release.files) if name != SIGNATURE]


def require_release(client: HubClient, revision: str, release: Release, what: str) -> None:
    """Raise `StageError` where the Hub does not hold exactly a release's files, by SHA-256 or git's hash."""
    if other := differences(tree(client, revision), release):
        raise StageError(
            f"{client.repo}: {what} {revision[:20]} does not hold what was sent: {some(other)} differs",
            hint="Look at the files there, then run the same command again.",
        )


def some(names: Sequence[str], shown: int = 3) -> str:
    """The first few of many."""
    more = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {more} more" if more > 0 else "")


def content(file: File) -> bytes:
    """The bytes of a small file; raises `StageError` where they are not those that were judged."""
    found = file.path.read_bytes()
    require_digest(file, hashlib.sha256(found).hexdigest())
    return found


def download(client: HubClient, revision: str, into: Path | None, wanted: Wanted) -> Path:
    """The folder that holds the files of a commit; raises `UserError` for names that lead out of it."""
    from huggingface_hub.utils import disable_progress_bars

    found = tree(client, revision)
    if MANIFEST not in found:
        raise UserError(f"{client.repo} holds no release at {revision[:12]}: it has no {MANIFEST}")
    try:
        require_safe(found)
    except ValueError as error:
        raise UserError(f"{client.repo}: {error}") from None
    names = [name for name in found if wanted is None or wanted(name)]
    if client.progress is not None:
        size = sum(found[name].size for name in names)
        client.progress.say(f"fetching {len(names)} files, {size:,} bytes, of {client.repo}@{revision[:12]}")
    if not sys.stderr.isatty():
        disable_progress_bars()  # they are drawn over and over, which a log keeps
    return Path(
        client.call(
            "fetch its files",
            lambda: client.api.snapshot_download(
                client.repo, revision=revision, local_dir=into, allow_patterns=[*map(escape, names)], etag_timeout=30
            ),
        )
    )


def upload(client: HubClient, release: Release, branch: str, *, by_request: bool) -> list[Any]:
    """Send what the Hub stores as large files; returns the operations of the commit, one for each file.

    One file at a time, each tried again by itself; small files together, and those that the Hub keeps in git itself go
    with the commit. Raises `StageError` for a file that is not what was judged.
    """
    from huggingface_hub import CommitOperationAdd
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()  # they would be drawn over ours

    def send(what: str, operations: Sequence[Any]) -> None:
        client.call(
            f"upload {what}",
            lambda: client.api.preupload_lfs_files(
                client.repo,
                operations,
                revision=branch,
                create_pr=by_request,
                free_memory=False,
                gitignore_content="",  # one in the repository would drop files from the commit without a word
            ),
        )

    small: list[Any] = []
    large: list[Any] = []
    progress = client.progress or reporter_for(json=False)
    with progress.bar(release.size, "B") as advance:
        for name, file in sorted(release.files.items()):
            if file.size <= _SMALL and not name.endswith(".safetensors"):
                small.append(CommitOperationAdd(name, content(file)))  # the bytes that were hashed
                continue
            operation = CommitOperationAdd(name, file.path)
            send(name, [operation])
            require_digest(file, operation.upload_info.sha256.hex())
            large.append(operation)
            advance(file.size)
        if small:
            send(f"{len(small)} small files", small)
        advance(release.size - sum(release.files[operation.path_in_repo].size for operation in large))
    return large + small


def title_of(release: Release) -> str:
    """The first line of the commit, and of a pull request; the listing of releases reads the title from it."""
    return f"{release.tag}: {release.title}"[:_TITLE]


def commit(
    client: HubClient,
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

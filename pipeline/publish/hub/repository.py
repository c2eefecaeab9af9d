"""A repository of the Hub: its refs, files and history, uploads, commits and downloads.

Files are compared without a download: the Hub reports the SHA-256 of each large file, and git's blob hash of the
others, which is computed here from the local bytes.

The Hub does not receive an object twice. Through Xet (``hf_xet``, huggingface.co's protocol) an interrupted shard
resumes in its middle, through LFS over HTTP from its beginning. Before a commit the client's SHA-256 is compared with
the manifest's, so a file that changed after the gate is refused.
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
from quantmint.pipeline.store.files import File, Selection, require_digest, require_safe

MAIN: Final = "main"
"""The branch with the current release."""
CANDIDATE: Final = "candidate"
"""The branch of a candidate."""
_ATTRIBUTES: Final = ".gitattributes"  # the Hub's own file, with the patterns of large files


_TITLE: Final = 200  # characters that the Hub takes as the title of a pull request (`HfApi.create_discussion`)
_SMALL: Final = 10 * 1024**2
"""Bytes: larger files never lie in git itself (https://huggingface.co/docs/hub/repositories-getting-started), and are
sent each by itself; weights are, however small."""


@dataclass(frozen=True, slots=True)
class Remote:
    """A file on the Hub: its size in bytes, git's blob hash, and its SHA-256 if it is stored as a large file."""

    size: int
    blob: str
    sha256: str | None

    @property
    def content(self) -> str:
        """Return "sha256:" and the SHA-256 of a large file, else git's blob hash: equal for equal bytes."""
        return self.blob if self.sha256 is None else f"sha256:{self.sha256}"


Tree = Mapping[str, Remote]


@dataclass(frozen=True, slots=True)
class Repository:
    """A snapshot of a repository. ``name`` is its present one, also after a renaming; commits are 40 hex digits.

    ``requests`` maps the number of an open pull request to its head and title.
    """

    name: str
    private: bool
    gated: str | None
    branches: Mapping[str, str]
    tags: Mapping[str, str]
    requests: Mapping[int, tuple[str, str]] = field(default_factory=dict)

    @property
    def head(self) -> str:
        """Return the commit at ``main``."""
        return self.branches[MAIN]

    def request_of(self, commit: str) -> int | None:
        """Return the number of the open pull request with this head, or None."""
        return next((number for number, (head, _) in self.requests.items() if head == commit), None)


def look(client: HubClient) -> Repository | None:
    """Return a snapshot of the repository; None when it does not exist or the token may not see it."""
    api, repo = client.api, client.repo
    try:
        info = client.call("read the repository", lambda: api.model_info(repo))
        refs = client.call("read its branches and tags", lambda: api.list_repo_refs(repo, include_pull_requests=True))
    except MissingError:
        return None
    heads = {int(ref.ref.rpartition("/")[2]): str(ref.target_commit) for ref in refs.pull_requests or ()}
    opened: dict[int, str] = {}
    if heads:  # merged and closed requests keep their refs
        opened = client.call(
            "list its pull requests",
            lambda: {
                int(request.num): str(request.title)
                for request in api.get_repo_discussions(repo, discussion_type="pull_request", discussion_status="open")
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
    """Return the tagged releases, the newest first.

    A release is current if `main` has its manifest; after a promotion or rollback the commits differ.
    """
    tags = {name: commit for name, commit in repository.tags.items() if TAG.fullmatch(name)}
    waits = {head for head, _ in repository.requests.values()} | {repository.branches.get(CANDIDATE)}
    current_manifest = tree(client, repository.head).get(MANIFEST) if tags else None
    commits: dict[str, Any] = {}
    for revision in (repository.head, *tags.values()):  # most are in the history of `main`
        if tags and revision not in commits:
            commits |= {str(commit.commit_id): commit for commit in history(client, revision)}
    listed = []
    for tag, commit in tags.items():
        files = tree(client, commit)
        current = (
            current_manifest is not None and MANIFEST in files and files[MANIFEST].content == current_manifest.content
        )
        listed.append(
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
    return newest_first(listed)


def history(client: HubClient, revision: str) -> list[Any]:
    """Return a revision and its ancestors, the newest first."""
    return client.call(
        f"read the history of {revision[:12]}",
        lambda: list(client.api.list_repo_commits(client.repo, revision=revision)),
    )


def tree(client: HubClient, revision: str) -> dict[str, Remote]:
    """Return every file at a revision by name, without the Hub's .gitattributes."""
    from huggingface_hub.hf_api import RepoFile

    def listed() -> dict[str, Remote]:
        files = {}
        for entry in client.api.list_repo_tree(client.repo, revision=revision, recursive=True):
            if isinstance(entry, RepoFile):
                files[entry.path] = Remote(entry.size, entry.blob_id, entry.lfs.sha256 if entry.lfs else None)
        files.pop(_ATTRIBUTES, None)
        return files

    return client.call(f"read the files at {revision[:12]}", listed)


def differing(there: Tree, expected: Mapping[str, File | Remote]) -> list[str]:
    """Return the sorted names of files that differ or that only one side has."""
    return sorted(name for name in there.keys() | expected.keys() if not _is_same(there.get(name), expected.get(name)))


def _is_same(remote: Remote | None, expected: File | Remote | None) -> bool:
    """Return whether two files have the same bytes; False if either is absent."""
    if remote is None or expected is None or remote.size != expected.size:
        return False
    if isinstance(expected, Remote):
        return remote.content == expected.content
    if remote.sha256 is not None:
        return remote.sha256 == expected.sha256
    data = content(expected)  # see git-hash-object(1)
    return remote.blob == hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def differences(there: Tree, release: Release) -> list[str]:
    """Return the names of differing files but the signature: another signer makes no other release."""
    return [name for name in differing(there, release.files) if name != SIGNATURE]


def require_release(client: HubClient, revision: str, release: Release, what: str) -> None:
    """Raise `StageError` unless the revision has exactly the release's files; ``what`` names it in the message."""
    if names := differences(tree(client, revision), release):
        raise StageError(
            f"{client.repo}: {what} {revision[:20]} does not hold what was sent: {some(names)} differs",
            hint="Look at the files there, then run the same command again.",
        )


def some(names: Sequence[str], shown: int = 3) -> str:
    """Return the first ``shown`` names as text, with the number of the others."""
    hidden = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {hidden} more" if hidden > 0 else "")


def content(file: File) -> bytes:
    """Return the bytes of a small file; raise `StageError` when they changed since the gate."""
    data = file.path.read_bytes()
    require_digest(file, hashlib.sha256(data).hexdigest())
    return data


def download(client: HubClient, revision: str, into: Path | None, select: Selection) -> Path:
    """Download a commit's files and return their folder; raise `UserError` for names that lead out of it."""
    from huggingface_hub.utils import disable_progress_bars

    files = tree(client, revision)
    if MANIFEST not in files:
        raise UserError(f"{client.repo} holds no release at {revision[:12]}: it has no {MANIFEST}")
    try:
        require_safe(files)
    except ValueError as error:
        raise UserError(f"{client.repo}: {error}") from None
    names = [name for name in files if select is None or select(name)]
    if client.progress is not None:
        size = sum(files[name].size for name in names)
        client.progress.say(f"fetching {len(names)} files, {size:,} bytes, of {client.repo}@{revision[:12]}")
    if not sys.stderr.isatty():
        disable_progress_bars()  # a log would keep every redrawn bar
    return Path(
        client.call(
            "fetch its files",
            lambda: client.api.snapshot_download(
                client.repo, revision=revision, local_dir=into, allow_patterns=[*map(escape, names)], etag_timeout=30
            ),
        )
    )


def upload(client: HubClient, release: Release, branch: str, *, by_request: bool) -> list[Any]:
    """Upload the large files; return the operations of the commit, one for each file.

    Large files are sent one at a time, each with its own retries, and small ones together; files that the Hub stores in
    git itself go with the commit. Raises `StageError` for a file that changed since the gate.
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
    """Return the title of the release's commit and pull request, from which `releases` reads the release's title."""
    return f"{release.tag}: {release.title}"[:_TITLE]


def commit(
    client: HubClient,
    operations: Sequence[Any],
    title: str,
    branch: str,
    parent: str,
    *,
    find_existing: Callable[[], str | None],
    by_request: bool = False,
) -> str:
    """Make one commit on top of ``parent`` and return its id; ``by_request``: on a new pull request to the branch.

    ``find_existing`` looks for the same commit: the answer to the request may be lost, or another publisher of the
    release was faster. Raises `MovedError` when the branch moved meanwhile; nothing is overwritten then.
    """
    tries = 0

    def attempt() -> str:
        nonlocal tries
        tries += 1
        if tries > 1 and (earlier := find_existing()) is not None:
            return earlier
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # remarks on the card's metadata, which preflight has made
            created = client.api.create_commit(
                client.repo,
                list(operations),
                commit_message=title,
                revision=branch,
                parent_commit=parent,
                create_pr=by_request,
            )
        return str(created.oid)

    try:
        return client.call(f"commit to {branch}", attempt)
    except MovedError:
        earlier = find_existing()
        if earlier is not None:
            return earlier
        raise moved(client.repo, branch) from None


def moved(repo: str, branch: str) -> MovedError:
    """Return the error for a branch to which somebody else wrote."""
    return MovedError(
        f"{repo}: {branch} has moved since it was looked at: somebody else wrote to it meanwhile",
        hint="Nothing was overwritten, and what was sent is kept. Look at what is there, then run the same command "
        "again: it commits on top.",
    )

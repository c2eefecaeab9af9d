"""A release's files from the Hub: as a folder, as a list, or a few bytes of one of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from glob import escape
from pathlib import Path

from pipeline.errors import StageError, UserError
from pipeline.publish.hub.client import Client, unseen
from pipeline.publish.hub.repository import look
from pipeline.publish.hub.tree import tree
from pipeline.publish.names import require_safe
from pipeline.publish.release import MANIFEST, TAG
from pipeline.recipe.faults import did_you_mean


def revision_of(client: Client, tag: str | None) -> str:
    """The commit of a release (None: the current one); raises `UserError` where there is none."""
    repository = look(client)
    if repository is None:
        raise unseen(client.repo)
    if tag is None:
        return repository.head
    if tag not in repository.tags:
        tags = sorted(name for name in repository.tags if TAG.fullmatch(name))
        raise UserError(
            f"{client.repo} has no release {tag}{did_you_mean(tag, tags)}",
            hint=f"`quantmint releases {client.repo}` lists them.",
        )
    return repository.tags[tag]


def download(client: Client, revision: str, into: Path | None, wanted: Callable[[str], bool] | None) -> Path:
    """The folder that holds the files of a commit; raises `UserError` for names that lead out of it."""
    from huggingface_hub.utils import disable_progress_bars

    found = tree(client, revision)
    if MANIFEST not in found:
        raise UserError(f"{client.repo} holds no release at {revision[:12]}: it has no {MANIFEST}")
    try:
        require_safe(found)
    except ValueError as error:
        raise UserError(f"{client.repo}: {error}") from None
    names = [escape(name) for name in found if wanted is None or wanted(name)]
    if client.progress is not None:
        size = sum(remote.size for name, remote in found.items() if wanted is None or wanted(name))
        client.progress.say(f"fetching {len(names)} files, {size:,} bytes, of {client.repo}@{revision[:12]}")
    if not sys.stderr.isatty():
        disable_progress_bars()  # they are drawn over and over, which a log keeps
    return Path(
        client.call(
            "fetch its files",
            lambda: client.api.snapshot_download(
                client.repo, revision=revision, local_dir=into, allow_patterns=names, etag_timeout=30
            ),
        )
    )


def read(client: Client, revision: str, name: str, start: int, stop: int) -> bytes:
    """Bytes ``start`` to ``stop`` (not included) of a file; raises `StageError` where there are fewer."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    url = hf_hub_url(client.repo, name, revision=revision, endpoint=client.api.endpoint)

    def ask() -> bytes:
        headers = build_hf_headers(headers={"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"})
        with get_session().stream("GET", url, headers=headers, follow_redirects=True) as answer:
            hf_raise_for_status(answer)
            skipped = 0 if answer.status_code == 206 else start  # a server that knows no ranges begins at the beginning
            found = bytearray()
            for chunk in answer.iter_bytes():
                found += chunk
                if len(found) >= skipped + stop - start:  # no more is taken of a shard that is sent whole
                    break
        return bytes(found[skipped : skipped + stop - start])

    if stop <= start:
        return b""
    found = client.call(f"read {name}", ask)
    if len(found) != stop - start:
        raise StageError(f"{client.repo}: {name} ends within the bytes {start} to {stop}")
    return found

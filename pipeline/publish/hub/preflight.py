"""What would stop a publication on the Hub, found before the first byte is sent."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from pipeline.errors import UserError
from pipeline.publish.hub import rights
from pipeline.publish.hub.client import Client, RefusedError, redact
from pipeline.publish.hub.plan import require_release
from pipeline.publish.hub.repository import Repository, look
from pipeline.publish.hub.settings import changes, is_listed
from pipeline.publish.hub.tree import content, tree
from pipeline.publish.hub.upload import is_small
from pipeline.publish.names import require_safe
from pipeline.publish.release import CARD, MANIFEST, Release
from pipeline.recipe.sections import Hub

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

# https://huggingface.co/docs/hub/storage-limits: "500GB is the hard limit for a single file size", at most 10k files in
# a folder, and fewer than 100k files in a repository.
LARGEST_FILE: Final = 500 * 10**9
_MOST_IN_FOLDER: Final = 10_000
_MOST_FILES: Final = 100_000
# `HfApi.create_commit`: 25k large files, and 1 GB of what is sent with the commit itself, in base 64.
_MOST_LARGE: Final = 25_000
_LARGEST_COMMIT: Final = 10**9


def preflight(client: Client, release: Release, section: Hub | None) -> None:
    """Raise `UserError` for the first thing that would stop the release, and the errors of the client."""
    require_names(client.repo, release)
    require_room(client.repo, release)
    card = _card(client, release)
    repository = require_access(client, section)
    tagged = None if repository is None else repository.tags.get(release.tag)
    if tagged is not None:
        require_release(client, tagged, release)
    if card is not None:
        validate(client, str(card))


def require_access(client: Client, section: Hub | None) -> Repository | None:
    """The repository, None where it would be created; raises `UserError` where this token could publish nothing."""
    who = _who(client)
    repository = look(client)
    wants_collection = section is not None and section.collection is not None
    reason = rights.refusal(who, client.repo, exists=repository is not None, collection=wants_collection)
    if reason is not None:
        raise UserError(f"{client.repo}: {reason}")
    changes(repository, section)
    if repository is not None:
        _require_open(client, repository)
    if section is not None and wants_collection:
        is_listed(client, section)
    return repository


def require_names(repo: str, release: Release) -> None:
    """Raise `UserError` for a name that the Hub, or the client, refuses."""
    from huggingface_hub import CommitOperationDelete
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
        require_safe(release.files)
        for name in release.files:
            CommitOperationDelete(name, is_folder=False)  # the client's own rule of what may be a path
    except (HFValidationError, ValueError) as error:
        raise UserError(f"{repo}: {error}") from None
    if MANIFEST not in release.files:
        raise UserError(f"{repo}: the release has no {MANIFEST}, by which it would be known again")


def require_room(repo: str, release: Release) -> None:
    """Raise `UserError` for what is above the Hub's limits."""
    for name, file in release.files.items():
        if file.size > LARGEST_FILE:
            raise UserError(
                f"{repo}: {name} has {file.size / 1e9:,.1f} GB, and the Hub takes at most {LARGEST_FILE / 1e9:.0f} GB "
                "a file",
                hint="Shards follow the source's: save that in smaller ones (`save_pretrained(max_shard_size=...)`).",
            )
    small = [file.size for name, file in release.files.items() if is_small(name, file)]
    folders = Counter(name.rpartition("/")[0] for name in release.files)
    folder, most = max(folders.items(), key=lambda item: item[1])
    for found, limit, what in (
        (len(release.files), _MOST_FILES, "files in a repository"),
        (most, _MOST_IN_FOLDER, f"files in one folder ({folder or 'the top one'})"),
        (len(release.files) - len(small), _MOST_LARGE, "large files in a commit"),
        (sum(small) * 4 // 3, _LARGEST_COMMIT, "bytes of small files in a commit"),
    ):
        if found > limit:
            raise UserError(f"{repo}: found {found:,} {what}, and the Hub takes at most {limit:,}")


def _who(client: Client) -> dict[str, Any]:
    try:
        found: dict[str, Any] = client.call("ask whose token it is", client.api.whoami)
    except RefusedError as error:
        if error.status != 401:
            raise
        raise UserError(
            f"{client.repo}: the Hub does not know the token",
            hint="HF_TOKEN goes before what `hf auth login` has stored; https://huggingface.co/settings/tokens makes a "
            "new one.",
        ) from None
    return found


def _require_open(client: Client, repository: Repository) -> None:
    repo = client.repo
    if repository.name != repo:
        raise UserError(f"{repo} is called {repository.name} now", hint="Write its new name in the recipe.")
    if repository.disabled:
        raise UserError(f"{repo} is disabled on the Hub", hint="Its page there says why.")
    there = tree(client, repository.head)
    if MANIFEST not in there and any(name.endswith((".safetensors", ".bin", ".gguf")) for name in there):
        raise UserError(
            f"{repo} holds a model that quantmint did not publish: it has weights, and no {MANIFEST}",
            hint="A release replaces all files. Name another repository, or remove the files that are there first.",
        )


def _card(client: Client, release: Release) -> ModelCard | None:
    import yaml
    from huggingface_hub import ModelCard

    if CARD not in release.files:
        return None
    try:
        return ModelCard(content(release.files[CARD]).decode())
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(redact(str(error)).split())
        raise UserError(f"{client.repo}: {CARD} is no model card: {reason}") from None


def validate(client: Client, card: str) -> None:
    """Raise `UserError` for metadata that the Hub would refuse with the commit.

    `ModelCard.validate` asks the same question of huggingface.co whatever HF_ENDPOINT says, and as nobody.
    """
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    def ask() -> None:
        answer = get_session().post(
            f"{client.api.endpoint}/api/validate-yaml",
            json={"content": card, "repoType": "model"},
            headers=build_hf_headers(),
        )
        hf_raise_for_status(answer)

    client.call("have the card's metadata accepted", ask)

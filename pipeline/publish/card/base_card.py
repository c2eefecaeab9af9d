"""What the base model's own card states about itself: the front matter of its README.md, and nothing of its text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from pipeline.publish.release import CARD
from pipeline.stage import SourceIdentity

_FENCE: Final = "---"


def base_metadata(identity: SourceIdentity, folder: Path, *, warn: Callable[[str], None]) -> Mapping[str, Any]:
    """The front matter of the card in the source's ``folder``, or of its repository at the same commit.

    Empty where there is none; ``warn`` is told where the Hub could not be asked, because then terms are unknown.
    """
    if (folder / CARD).is_file() or identity.repo is None:
        return front_matter(folder)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        path = hf_hub_download(identity.repo, CARD, revision=identity.digest)
    except Exception as error:
        # Whatever the Hub's client raises, a card is made without it; a repository without a card is no fault.
        if isinstance(error, LocalEntryNotFoundError) or not isinstance(error, EntryNotFoundError):
            warn(f"{identity.repo}: its card cannot be had, so its licence and languages are unknown here")
        return {}
    return front_matter(Path(path).parent)


def front_matter(folder: Path) -> dict[str, Any]:
    """The YAML at the top of a folder's README.md as a mapping; empty where there is none, or it is none."""
    try:
        text = (folder / CARD).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return {}
    first, *lines = text.splitlines() or [""]
    if first.rstrip() != _FENCE:
        return {}
    end = next((number for number, line in enumerate(lines) if line.rstrip() == _FENCE), None)
    if end is None:
        return {}
    try:
        found = yaml.safe_load("\n".join(lines[:end]))
    except yaml.YAMLError:
        return {}
    return {str(key): value for key, value in found.items()} if isinstance(found, dict) else {}

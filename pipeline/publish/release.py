"""A release: the files that are published together, each with its digest, and their tag.

    README.md                            the card
    quantmint.json                       the manifest: how it was made, and the digest of every other file
    config.json, *.safetensors, ...      the checkpoint
    .eval_results/*.yaml                 scores in the Hub's form
    draft/                               the draft of a recipe that serves with one, a checkpoint of its own
    quantmint/                           evidence: gate.json, samples/, report.html, recipe.yaml, provenance, SBOM
    model.sig                            signature over all of them, if the recipe asks for one

``quantmint.json`` lists every file but itself and the signature. Its SHA-256 is the identity of the release: two
releases with the same identity have the same bytes, whoever signed them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from quantmint.pipeline.store.files import File

EVIDENCE: Final = "quantmint"
"""Folder of a release with the gate's record, the report and the recipe."""
DRAFT: Final = "draft"
"""Folder of a release with the model that proposes tokens for it."""
MANIFEST: Final = "quantmint.json"
SIGNATURE: Final = "model.sig"
CARD: Final = "README.md"
PROVENANCE: Final = f"{EVIDENCE}/provenance.intoto.json"
SBOM: Final = f"{EVIDENCE}/sbom.cdx.json"
RECIPE: Final = f"{EVIDENCE}/recipe.yaml"
CARD_FACTS: Final = f"{EVIDENCE}/card.json"
"""The facts of the card that no other file has; `verify` renders the card again from all of them."""
NOTICE: Final = f"{EVIDENCE}/NOTICE"
"""The notice that the base model's licence requires, if it requires one."""
UNLISTED: Final = (MANIFEST, SIGNATURE)
"""The files that the manifest cannot list: itself, and the signature that covers it."""
TAG: Final = re.compile(r"v\d{8}-[0-9a-f]{8}")
"""The form of the tags of `tag_of`."""


@dataclass(frozen=True, slots=True)
class Release:
    """The ``files`` of a release by their posix names in it; ``title`` describes it in one line."""

    name: str
    tag: str
    identity: str
    title: str
    files: Mapping[str, File]

    @property
    def size(self) -> int:
        """Return the bytes of all files together."""
        return sum(file.size for file in self.files.values())


def tag_of(judged: datetime, identity: str) -> str:
    """Return a tag such as ``v20261121-3f1c0a52``: the day (UTC) of the judgement and the start of the identity."""
    return f"v{judged:%Y%m%d}-{identity[:8]}"


def day_in(tag: str) -> str:
    """Return midnight (UTC) of the day in a tag, in ISO 8601."""
    return f"{tag[1:5]}-{tag[5:7]}-{tag[7:9]}T00:00:00Z"


def identity_in(tag: str) -> str:
    """Return the start of the identity in a tag, "" for a name that is no tag."""
    return tag.rpartition("-")[2] if TAG.fullmatch(tag) else ""

"""A release: the files that go out together, each with its digest, and the name that they get.

    README.md                            the card
    quantmint.json                       what it is and how it was made, with the digest of every file below and above
    config.json, *.safetensors, ...      the checkpoint
    .eval_results/*.yaml                 scores as the Hub reads them
    quantmint/                           evidence: gate.json, samples/, report.html, recipe.yaml, provenance, SBOM
    model.sig                            signature over all of them, where the recipe asks for one

``quantmint.json`` lists every file but itself and the signature, so its SHA-256 is the identity of the release: two
releases of one identity are the same bytes, whoever signed them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from quantmint.pipeline.store.files import File

EVIDENCE: Final = "quantmint"
"""Folder of a release that holds the gate's record, the report and the recipe."""
MANIFEST: Final = "quantmint.json"
SIGNATURE: Final = "model.sig"
CARD: Final = "README.md"
PROVENANCE: Final = f"{EVIDENCE}/provenance.intoto.json"
SBOM: Final = f"{EVIDENCE}/sbom.cdx.json"
RECIPE: Final = f"{EVIDENCE}/recipe.yaml"
CARD_FACTS: Final = f"{EVIDENCE}/card.json"
"""What the card says beside the facts of the other files; with it the card is rendered again."""
NOTICE: Final = f"{EVIDENCE}/NOTICE"
"""What the licence of the base asks to go with the files, where it asks for it."""
UNLISTED: Final = (MANIFEST, SIGNATURE)
"""What the manifest cannot list: itself, and the signature that covers it."""
TAG: Final = re.compile(r"v\d{8}-[0-9a-f]{8}")
"""What `tag_of` makes."""


@dataclass(frozen=True, slots=True)
class Release:
    """What is published: ``files`` by their names in the release (posix), ``title`` one line that says what it is."""

    name: str
    tag: str
    identity: str
    title: str
    files: Mapping[str, File]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())


def tag_of(judged: datetime, identity: str) -> str:
    """``v20261121-3f1c0a52``: the day (UTC) of the judgement and the start of the identity; no clock is asked."""
    return f"v{judged:%Y%m%d}-{identity[:8]}"


def day_in(tag: str) -> str:
    """Midnight (UTC) of the day that a tag carries, in ISO 8601, which sorts as days do."""
    return f"{tag[1:5]}-{tag[5:7]}-{tag[7:9]}T00:00:00Z"


def identity_in(tag: str) -> str:
    """The start of the identity that a tag carries; "" for a name that is no tag."""
    return tag.rpartition("-")[2] if TAG.fullmatch(tag) else ""

"""Which files of a release are the checkpoint, and their digest: what a verdict is about."""

from __future__ import annotations

from pipeline.digest import folder_digest
from pipeline.formats.tokenization import NAMED_TEMPLATES
from pipeline.publish.release import CARD, UNLISTED
from pipeline.verify.subject import Subject


def checkpoint_files(subject: Subject) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 of what lies at the top and of named chat templates, but for card, manifest and signature."""
    return {
        name: (size, subject.digests[name])
        for name, size in subject.listing.files.items()
        if ("/" not in name or name.startswith(f"{NAMED_TEMPLATES}/")) and name not in (CARD, *UNLISTED)
    }


def artefact_of(subject: Subject) -> str:
    """The digest of the checkpoint as it lies here, as `pipeline.stages.gate.checkpoint_digest` computed it."""
    return folder_digest(checkpoint_files(subject))

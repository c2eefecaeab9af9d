"""The newest release of a recipe, wherever it lies: of all that a place holds only ``quantmint.json`` is read."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.canonical import Json
from pipeline.publish.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Released:
    """A release. ``place`` is what the target calls itself, "the store" for one that only its package tells of.

    ``shown`` is the tag that readers get there, None where they get none or nobody could be asked; it is another one
    after a rollback, and beside a candidate.
    """

    place: str
    tag: str
    manifest: Manifest
    shown: str | None = None

    @property
    def created(self) -> str:
        """When its gate had judged: ISO 8601 in UTC."""
        return self.manifest.created

    def to_json(self) -> dict[str, Json]:
        """What it is and where, without what it was made from."""
        return {"place": self.place, "tag": self.tag, "created": self.created, "shown": self.shown}

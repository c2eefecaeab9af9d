"""What has changed between a release and a plan of now, and which kind of change it is.

Pure: payloads go in, changes come out. A fingerprint of an input only follows from a change elsewhere and is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.canonical import ABSENT, Json
from pipeline.recipe.refreshing import Cause


@dataclass(frozen=True, slots=True)
class Change:
    """One place where a release and the plan of now differ.

    ``stage`` is the key of the stage whose payload holds it, "recipe" where it is a line of the recipe itself; ``path``
    is `pipeline.canonical.Change`'s (``$.settings.commit``), or the recipe's key (``gate.accuracy.margin``). A side
    that lacks the place is `pipeline.canonical.ABSENT`.
    """

    cause: Cause
    stage: str
    path: str
    before: Any
    after: Any

    def to_json(self) -> dict[str, Json]:
        """A plain mapping of the fields; a side that lacks the place has no key."""
        sides = {"before": self.before, "after": self.after}
        return {
            "cause": self.cause,
            "stage": self.stage,
            "path": self.path,
            **{side: value for side, value in sides.items() if value is not ABSENT},
        }

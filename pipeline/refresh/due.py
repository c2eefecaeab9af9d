"""Whether a recipe is due: what it would be made from now, against what its newest release was made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from eval.verdict import Verdict
from pipeline.canonical import Json
from pipeline.recipe.load import LoadedRecipe
from pipeline.refresh.causes import Change
from pipeline.refresh.release import Released

State = Literal["current", "due", "held", "broken", "unknown"]


@dataclass(frozen=True, slots=True)
class Due:
    """What was found of a recipe. ``recipe`` is what the person gave, ``name`` its name (what was given, if broken).

    State "held": these very inputs were judged, with ``verdict``, by a run of this store; running again would find the
    same. "broken": it cannot be loaded or planned. "unknown": what was asked did not answer, and what is known says
    nothing is to do. ``reason`` is one line for people. ``changes`` hold also what the recipe's triggers leave out.
    ``stages`` says of each stage's key whether a run would find it ("cached") or make it ("rerun"). ``unknown`` are the
    sentences of what could not be asked, whatever the state. ``loaded`` is None where the file cannot be loaded.
    """

    name: str
    recipe: str
    state: State
    reason: str
    changes: tuple[Change, ...] = ()
    stages: tuple[tuple[str, Literal["rerun", "cached"]], ...] = ()
    release: Released | None = None
    unknown: tuple[str, ...] = ()
    verdict: Verdict | None = None
    loaded: LoadedRecipe | None = None

    def to_json(self) -> dict[str, Json]:
        """A plain mapping for programs."""
        return {
            "name": self.name,
            "recipe": self.recipe,
            "state": self.state,
            "reason": self.reason,
            "verdict": None if self.verdict is None else self.verdict.value,
            "changes": [change.to_json() for change in self.changes],
            "stages": [{"stage": key, "state": state} for key, state in self.stages],
            "release": None if self.release is None else self.release.to_json(),
            "unknown": list(self.unknown),
        }

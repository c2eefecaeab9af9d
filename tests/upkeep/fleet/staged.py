"""A fleet whose recipes do what a test says: real queue, locks and children; what the recipes make is not the point."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quantmint.eval.verdict import Verdict
from quantmint.pipeline.recipe.load import LoadedRecipe, load_recipe
from quantmint.pipeline.upkeep.due.due import Due
from quantmint.pipeline.upkeep.fleet.jobs import Look, Options
from quantmint.pipeline.upkeep.fleet.records import Ended, RecipeState, RoundSummary, read_state, write_state
from quantmint.pipeline.upkeep.fleet.rounds import Fleet

CHILD = Path(__file__).with_name("recipe_child.py")
SHIPPED = "tiny-ptpc-fp8kv"


def loaded(name: str, *, priority: int = 0, gpus: int = 0, max_hours: float | None = None) -> LoadedRecipe:
    """A valid recipe with another name; without GPUs its target is a CPU."""
    shipped = load_recipe(SHIPPED)
    recipe = shipped.recipe
    target = {"hardware": "mi300x", "gpus": gpus} if gpus else {"hardware": "cpu", "gpus": 1}
    changed = recipe.model_copy(
        update={
            "name": name,
            "target": recipe.target.model_copy(update=target),
            "refresh": recipe.refresh.model_copy(update={"priority": priority, "max_hours": max_hours}),
            "publish": recipe.publish.model_copy(update={"folder": None}),
        }
    )
    return replace(shipped, recipe=changed)


@dataclass
class Stage:
    """A folder with a store, recipes and what was told. ``looks`` are the recipes of each look, in order."""

    folder: Path
    recipes: dict[str, LoadedRecipe] = field(default_factory=dict)
    states: dict[str, Due] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    looks: list[tuple[str, ...]] = field(default_factory=list)

    @property
    def store(self) -> Path:
        return self.folder / "store"

    @property
    def children(self) -> Path:
        path = self.folder / "children"
        path.mkdir(exist_ok=True)
        return path

    def recipe(self, name: str, *plan: str, **facts: Any) -> str:
        """A recipe whose attempts end as ``plan`` says, a word each; see `recipe_child.py`."""
        self.recipes[name] = loaded(name, **facts)
        path, words = self.children / f"{name}.json", json.dumps(plan or ("pass",))
        if not path.exists() or path.read_text() != words:  # two fleets stage the same
            path.write_text(words)
        return name

    def plan(self, name: str) -> tuple[str, ...]:
        """How a recipe's attempts end, as another process staged it."""
        return tuple(json.loads((self.children / f"{name}.json").read_text()))

    def look(self, recipes: Sequence[str]) -> tuple[Due, ...]:
        """What `pipeline.upkeep.due.due.look` would find: due until a child has come to its end."""
        self.looks.append(tuple(recipes))
        return tuple(self._due(name) for name in recipes)

    def _due(self, name: str) -> Due:
        if name in self.states:
            return self.states[name]
        done = (self.children / f"{name}.done").exists()
        state, reason = ("current", "nothing changed") if done else ("due", "base a -> b")
        return Due(name, name, state, reason, loaded=self.recipes[name], inputs="1")  # type: ignore[arg-type]

    def judged(self, name: str, verdict: Verdict) -> None:
        self.states[name] = Due(name, name, "held", "judged before", verdict=verdict, loaded=self.recipes[name])

    def broken(self, name: str) -> None:
        self.states[name] = Due(name, name, "broken", f"{name}.yaml:3:1: found x")

    def options(self, **given: Any) -> Options:
        plain = {"store": self.store, "program": (sys.executable, "-I", "-S", str(CHILD), str(self.children))}
        return Options(**{**plain, "grace_s": 0.5, "first_wait_s": 0.05, **given})  # type: ignore[arg-type]

    def fleet(
        self,
        hear: Callable[[str], None] = lambda _: None,
        *,
        look: Look | None = None,
        **given: Any,
    ) -> Fleet:
        """A fleet whose lines are kept, after ``hear`` got them; ``given`` are options."""

        def keep(line: str) -> None:
            hear(line)
            self.lines.append(line)

        return Fleet(self.options(**given), write=keep, look=look or self.look, warn=self.warnings.append)

    def run(self, *recipes: str, **given: Any) -> RoundSummary:
        return self.fleet(**given).run(recipes or tuple(self.recipes))

    def state(self, name: str) -> RecipeState:
        return read_state(self.store, name, warn=self.warnings.append)

    def remember(self, name: str, **facts: Any) -> None:
        write_state(self.store, RecipeState(name=name, **facts))

    def seen(self, name: str) -> list[dict[str, Any]]:
        """What a recipe's attempts noted, in order."""
        path = self.children / f"{name}.seen"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def ends(self, name: str) -> list[float]:
        """When a recipe's attempts came to their end, by the clock of `seen`."""
        return [float(line) for line in (self.children / f"{name}.ends").read_text().splitlines()]

    def told(self, name: str) -> list[str]:
        """The lines on a recipe, without its stages."""
        lines = [line.removeprefix(f"{name}: ") for line in self.lines if line.startswith(f"{name}: ")]
        return [line for line in lines if not line.startswith("[")]

    def locks(self) -> list[str]:
        return sorted(path.name for path in (self.store / "refresh").rglob("*.lock*"))


def by_name(summary: RoundSummary) -> dict[str, Ended]:
    return {ended.recipe: ended for ended in summary.ended}


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False

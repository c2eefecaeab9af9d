"""The recipes that have a schedule: those that are named, or all of ./recipes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

from pipeline.base.errors import UserError
from pipeline.base.times import next_times, words
from pipeline.recipe.load import load_recipe
from pipeline.recipe.schema import Recipe

EXAMPLE: Final = "refresh: {schedule: 0 3 * * 6, timezone: Europe/Berlin}"
LATE: Final = timedelta(minutes=5)
"""A time that is seen later than this was missed: the machine slept, or no scheduler ran."""


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A recipe with a schedule, and how it was named: by name, or by the path of its file."""

    given: str
    recipe: Recipe
    expression: str

    @property
    def name(self) -> str:
        """The recipe's name, which is that of its file."""
        return self.recipe.name

    @property
    def zone(self) -> str:
        """The time zone of the expression."""
        return self.recipe.refresh.timezone

    @property
    def skips_missed(self) -> bool:
        """Whether a time at which nothing could run is left out."""
        return self.recipe.refresh.missed == "skip"

    @property
    def words(self) -> str:
        """The schedule for people."""
        return words(self.expression, self.zone)

    def next_times(self, after: datetime, n: int) -> tuple[datetime, ...]:
        """The `n` next times after a moment, in the schedule's zone."""
        return next_times(self.expression, self.zone, after, n)


def scheduled(given: Sequence[str] = ()) -> tuple[Scheduled, ...]:
    """The recipes that are named, each of which must have a schedule; without names, those of ./recipes that have one.

    Shipped recipes are only looked at where they are named. UserError for one that is unknown, wrong, or named and
    without a schedule.
    """
    found = []
    for name in given or here():
        item = load_scheduled(name)
        if item is not None:
            found.append(item)
        elif given:
            raise UserError(f"{name} has no schedule", hint=f"Give the recipe one: {EXAMPLE}")
    return tuple({item.name: item for item in found}.values())


def load_scheduled(given: str) -> Scheduled | None:
    """A recipe with its schedule; None where it has none."""
    recipe = load_recipe(given).recipe
    schedule = recipe.refresh.schedule
    return None if schedule is None else Scheduled(given, recipe, schedule)


def here() -> tuple[str, ...]:
    """The names of the recipes in ./recipes."""
    return tuple(sorted(path.stem for path in Path("recipes").glob("*.yaml") if not path.name.startswith("_")))

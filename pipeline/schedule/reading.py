"""The recipes of a resident scheduler, read again when a file that they are made of changes.

A recipe that is broken meanwhile keeps the schedule that it had: an editor that saves half a file, or a typing error on
a Friday evening, is no reason for a checkpoint to go stale.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import QuantmintError
from pipeline.recipe.load import LoadedRecipe, find, load_recipe
from pipeline.schedule.recipes import here

_Stamp = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Plan:
    """When a recipe is looked at. ``given`` is how it was named: by name, or by the path of its file."""

    name: str
    given: str
    expression: str
    zone: str
    skips_missed: bool


@dataclass(frozen=True, slots=True)
class Reading:
    """What was found: plans by recipe, and what is wrong with those that cannot be used."""

    plans: Mapping[str, Plan]
    faults: Mapping[str, str]


class Recipes:
    """The recipes that are named; without names, those of ./recipes that have a schedule."""

    def __init__(self, given: Sequence[str] = ()) -> None:
        self._given = tuple(given)
        self._stamps: dict[str, _Stamp | None] = {}
        self._last = Reading({}, {})

    def read(self) -> Reading:
        """Read all of them; a recipe that is broken has the plan that it had before, if any."""
        plans: dict[str, Plan] = {}
        faults: dict[str, str] = {}
        files: set[str] = set()
        for given in self._given or here():
            try:
                loaded = load_recipe(given)
            except QuantmintError as error:
                name = Path(given).stem
                faults[name] = str(error)
                if (before := self._last.plans.get(name)) is not None and _exists(given):
                    plans[name] = before
                continue
            files |= _files_of(loaded)
            refresh = loaded.recipe.refresh
            if refresh.schedule is not None:
                plans[loaded.recipe.name] = Plan(
                    loaded.recipe.name, given, refresh.schedule, refresh.timezone, refresh.missed == "skip"
                )
            elif self._given:
                faults[loaded.recipe.name] = "it has no schedule: refresh: {schedule: 0 3 * * 6, timezone: UTC}"
        self._stamps = {path: _stamp(path) for path in files | self._listed()}
        self._last = Reading(plans, faults)
        return self._last

    def changed(self) -> bool:
        """Whether it may be worth reading again: a file is another, one came or went, or something was wrong."""
        if self._last.faults:  # what it is that must change for that is not known
            return True
        return any(_stamp(path) != stamp for path, stamp in self._stamps.items()) or bool(
            self._listed() - self._stamps.keys()
        )

    def _listed(self) -> set[str]:
        return {str(path) for path in Path("recipes").glob("*.yaml")} | {
            given for given in self._given if given.endswith((".yaml", ".yml"))
        }


def _files_of(loaded: LoadedRecipe) -> set[str]:
    """The recipe's file, and those that it extends."""
    positions = loaded.positions
    return {str(loaded.path)} | {str(place.file) for at in (positions.keys, positions.values) for place in at.values()}


def _exists(given: str) -> bool:
    try:
        find(given)
    except QuantmintError:
        return False
    return True


def _stamp(path: str) -> _Stamp | None:
    try:
        found = os.stat(path)  # noqa: PTH116 - many times a minute
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino

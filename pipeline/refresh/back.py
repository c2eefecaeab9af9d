"""What is to be done where a run would find every stage in the store: its inputs were these before.

Pure. A base, a data set or a recipe that moved there and back has a release already; readers get it again
(`pipeline.publish.target.Target.bring_back`) where a run put another one in its place. What a person promoted or
rolled back to stays, and so does what nobody noted the reason of. Two who look at one place must not take turns for
ever: so a toolchain that went back is no reason, as two machines may differ in it, and what another store's run has
published stays too, as its recipe may be another edition.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, Literal

from pipeline.recipe.refreshing import Cause
from pipeline.refresh.release import Released

_MOVE_BACK: Final[frozenset[Cause]] = frozenset({"base", "dataset", "recipe"})

Doing = tuple[Literal["due", "current"], str, str | None]
"""A state, its reason, and the tag that a run would bring back."""


def made_before(
    name: str,
    ours: str | None,
    there: Sequence[Released],
    empty: Sequence[str],
    causes: Collection[Cause],
    words: str,
    *,
    made: Collection[str],
    candidate: bool,
) -> Doing:
    """``ours`` is the tag of what these inputs made (None: not known), ``there`` a release of each place.

    ``empty`` are places that hold none. ``causes`` and ``words`` are what has changed since the release that the recipe
    was held against. ``made`` are tags of what this store's runs have made. ``candidate``: the recipe's releases wait
    for a person.
    """
    if ours is None or empty or not there or any(one.shown is None for one in there):
        return "current", f"this store has made it: `quantmint publish {name}` publishes it ({words})", None
    others = [one for one in there if one.shown != ours]
    if not others:
        return "current", f"readers get {ours}, which was made from these inputs", None
    waits = [one for one in others if ours in one.candidates]
    if waits:
        return "current", f"{ours} waits: `quantmint promote {waits[0].place} {ours}` ({words})", None
    by_others = [one for one in others if one.by_run and one.shown not in made]
    if candidate or not any(one.by_run and one.shown in made for one in others):
        one = others[0] if candidate or not by_others else by_others[0]
        if one in by_others and not candidate:
            why, back = "which a run of another store published", f"`quantmint publish {name}` brings {ours} back"
        else:
            why = "which somebody chose, or nobody noted who did"
            back = f"`quantmint rollback {one.place} {ours}` goes back to what these inputs made"
        return "current", f"held back: readers get {one.shown}, {why}; {back} ({words})", None
    if _MOVE_BACK.isdisjoint(causes):
        return "current", f"this store has made it: `quantmint publish {name}` brings {ours} back ({words})", None
    return "due", f"{words}; {ours} was made from these inputs, and is what readers get again", ours

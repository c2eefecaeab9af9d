"""What is to be done where a run would find every stage in the store: its inputs were these before.

Pure. A base, a data set or a recipe that moved there and back has a release already; readers get it again
(`pipeline.publish.target.Target.bring_back`) where a run put another one in its place. What a person promoted or
rolled back to stays, and so does what nobody noted the reason of. A toolchain that went back is none of these: two
machines that differ in it would take turns for ever.
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
    candidate: bool,
) -> Doing:
    """``ours`` is the tag of what these inputs made (None: not known), ``there`` a release of each place.

    ``empty`` are places that hold none. ``causes`` and ``words`` are what has changed since the release that the recipe
    was held against. ``candidate``: the recipe's releases wait for a person.
    """
    if ours is None or empty or not there or any(one.shown is None for one in there):
        return "current", f"this store has made it: `quantmint publish {name}` publishes it ({words})", None
    others = [one for one in there if one.shown != ours]
    if not others:
        return "current", f"readers get {ours}, which was made from these inputs", None
    waits = [one for one in others if ours in one.candidates]
    if waits:
        return "current", f"{ours} waits: `quantmint promote {waits[0].place} {ours}` ({words})", None
    if candidate or not any(one.by_run for one in others):
        one = others[0]
        why = "which somebody chose, or nobody noted who did"
        back = f"`quantmint rollback {one.place} {ours}` goes back to what these inputs made"
        return "current", f"held back: readers get {one.shown}, {why}; {back} ({words})", None
    if _MOVE_BACK.isdisjoint(causes):
        return "current", f"this store has made it: `quantmint publish {name}` brings {ours} back ({words})", None
    return "due", f"{words}; {ours} was made from these inputs, and is what readers get again", ours

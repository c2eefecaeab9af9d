"""Whether recipes are due: what each would be made from now, against what its newest release was made from.

    for found in look(["llama70b-fp8kv", "llama8b-ptpc"], store=Store(Path("store"))):
        print(found.name, found.state, found.reason)

Nothing is run, and nothing is fetched but small files. Everything that lies elsewhere is asked first, for all recipes
at once, and each repository once; then each recipe is planned as a run would plan it. What could not be asked is taken
to be as the release has it: a network that is away makes nothing due, and is told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eval.verdict import Verdict
from pipeline import __version__
from pipeline.canonical import ABSENT, Json, fingerprint
from pipeline.errors import QuantmintError, StoreError
from pipeline.recipe.load import LoadedRecipe, load_recipe
from pipeline.refresh.asked import Answers, Places, UnaskedError, ask
from pipeline.refresh.back import made_before
from pipeline.refresh.causes import RECIPE, Change, changes, unknown_tools, without
from pipeline.refresh.now import Now, plan_now
from pipeline.refresh.release import Released, made_here, packaged
from pipeline.refresh.state import read_state
from pipeline.refresh.words import what_changed
from pipeline.store.runs import Run, list_runs
from pipeline.store.tree import Store

State = Literal["current", "due", "held", "broken", "damaged", "unknown"]


@dataclass(frozen=True, slots=True)
class Due:
    """What was found of a recipe. ``recipe`` is what the person gave, ``name`` its name (what was given, if broken).

    State "held": these very inputs were judged, with ``verdict``, by a run of this store; running again would find the
    same. "broken": it cannot be loaded or planned. "damaged": a place answers, its release cannot be read, and nothing
    else is to do. "unknown": what was asked did not answer, and what is known says nothing is to do. ``reason`` is one
    line for people. ``changes`` hold also what the recipe's triggers leave out. ``stages`` says of each stage's key
    whether a run would find it ("cached") or make it ("rerun"). ``unknown`` are the sentences of what could not be
    asked, whatever the state. ``loaded`` is None where the file cannot be loaded. ``inputs`` is a digest of everything
    that a run would start from, "" where there is no plan. ``brings_back`` is the tag of an earlier release that a run
    would make the current one again, by its stage publish alone.
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
    inputs: str = ""
    brings_back: str | None = None

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
            "inputs": self.inputs,
            "brings_back": self.brings_back,
        }


def look(
    recipes: Sequence[str],
    *,
    store: Store,
    vllm: str | None = None,
    device: str = "auto",
    tell: Callable[[str], None] = lambda _: None,
) -> tuple[Due, ...]:
    """What is to do for each of some recipes, by name or path, in their order; no recipe makes it raise.

    ``vllm`` and ``device`` are a run's; ``tell`` is given a line now and then where many places are asked. Nothing that
    the Hub answered is remembered for the next call.
    """
    found: dict[str, Due] = {}
    loaded: dict[str, LoadedRecipe] = {}
    for recipe in recipes:
        try:
            loaded[recipe] = load_recipe(recipe)
        except QuantmintError as error:
            found[recipe] = Due(recipe, recipe, "broken", str(error))
    runs = list_runs(store.root)
    answers = ask(list(loaded.values()), tell, Path.cwd())
    for recipe, one in loaded.items():
        try:
            found[recipe] = _found(recipe, one, answers, store, runs, vllm, device)
        except Exception as error:  # a fault of ours, or of a disk, that one recipe meets: the others are looked at
            reason = f"it cannot be looked at: {type(error).__name__}: {error}"
            found[recipe] = Due(one.recipe.name, recipe, "broken", reason, loaded=one)
    return tuple(found[recipe] for recipe in recipes)


def _found(
    recipe: str,
    loaded: LoadedRecipe,
    answers: Answers,
    store: Store,
    runs: Sequence[Run],
    vllm: str | None,
    device: str,
) -> Due:
    name, said = loaded.recipe.name, answers.releases(loaded)
    release, silent = said.newest, (*said.unasked, *said.damaged)
    if release is None and silent:
        release = packaged(name, store, runs)
    try:
        now = plan_now(loaded, answers, release, store=store, runs=runs, vllm=vllm, device=device)
    except UnaskedError as error:
        unknown = tuple(dict.fromkeys((error.message, *silent)))
        state, reason = _at_fault("unknown", error.message, said)
        return Due(name, recipe, state, reason, release=release, unknown=unknown, loaded=loaded)
    except QuantmintError as error:
        return Due(name, recipe, "broken", str(error), release=release, loaded=loaded)
    unknown, differing, counted = _compared(release, now, silent)
    state, reason = _state(now, release, differing, counted, said, unknown)
    other = None if release is None else release.as_shown()
    if state == "due" and other is not None and not _compared(other, now, silent)[2]:
        release = other  # somebody went back to it, and now the inputs have too
        unknown, differing, counted = _compared(other, now, silent)
        state, reason = _state(now, other, differing, counted, said, unknown)
    if release is None and state not in ("unknown", "damaged"):
        differing = (Change("recipe", RECIPE, "name", ABSENT, name),)
    stages, back = now.stages, None
    waits = loaded.recipe.publish.to == "candidate"
    known = all(found == "cached" for _, found in stages) or (counted and not waits and now.published_before(said))
    if state == "due" and (gone := _gone_from(said, now, silent)) is not None:
        state, reason = "current", f"{gone} ({reason})"
    if state == "due" and known:
        causes = {change.cause for change in counted}
        state, reason, back = made_before(
            name,
            now.packaged(),
            said.there,
            said.empty,
            causes,
            reason,
            made=made_here(name, store, runs),
            candidate=waits,
        )
        if back is not None and "recipe" in causes and _is_other_file(loaded, store):
            state, back = "current", None
            reason = f"held back: {reason}, but another file of that name made the last one; `quantmint publish {name}`"
    if back is not None and said.unasked:  # somebody may have gone back from it there
        state, reason, back = "unknown", said.unasked[0], None
    if back is not None:
        stages = tuple((key, "rerun" if key == "publish" else found) for key, found in stages)
    state, reason = _at_fault(state, reason, said)
    return Due(
        name,
        recipe,
        state,
        reason,
        changes=differing,
        stages=stages,
        release=release,
        unknown=unknown,
        verdict=None if now.judged is None or state != "held" else now.judged,
        loaded=loaded,
        inputs=fingerprint([[planned.key, planned.fingerprint] for planned in now.plan]),
        brings_back=back,
    )


def _gone_from(said: Places, now: Now, silent: Sequence[str]) -> str | None:
    """What is said where these inputs made a release that a person went back from, in any of the places."""
    ours = now.packaged()
    for one in said.there:
        for tag, made in one.left.items():
            if tag == ours or (made is not None and not _compared(Released(one.place, tag, made), now, silent)[2]):
                back = f"`quantmint rollback {one.place} {tag}`" if made else f"`quantmint publish {now.name}`"
                why = "from which somebody went back, or which readers never had"
                return f"held back: these inputs made {tag}, {why}; {back} returns to it"
    return None


def _is_other_file(loaded: LoadedRecipe, store: Store) -> bool:
    """Whether the last attempt was at a recipe of this name in another file: two editions would take turns."""
    try:
        file = read_state(store.root, loaded.recipe.name, warn=lambda _: None, aside=False).file
    except StoreError:
        return False
    return file not in (None, str(loaded.path.absolute()))


def _at_fault(state: State, reason: str, said: Places) -> tuple[State, str]:
    """A run that is due makes another release; what else is found of a damaged one is less than that it is."""
    return ("damaged", said.damaged[0]) if said.damaged and state != "due" else (state, reason)


def _compared(
    release: Released | None, now: Now, silent: Sequence[str]
) -> tuple[tuple[str, ...], tuple[Change, ...], tuple[Change, ...]]:
    """What is not known, what differs from a release, and of that what the recipe's triggers count."""
    differing = () if release is None else _changes(release, now)
    unknown = tuple(dict.fromkeys((*silent, *now.unknown)))
    tools = unknown_tools(differing)
    if tools:
        differing = without(differing, tools)
        unknown = (*unknown, f"not installed here, so that its version is not known: {', '.join(sorted(tools))}")
    triggers = now.setting.recipe.refresh.triggers
    return unknown, differing, tuple(change for change in differing if change.cause in triggers)


def _changes(release: Released, now: Now) -> tuple[Change, ...]:
    payloads: Mapping[str, Mapping[str, object]] = {planned.key: planned.payload for planned in now.plan}
    written = now.setting.loaded.positions.values.keys()
    return changes(release.manifest, payloads, now.recipe, written=written, quantmint=__version__)


def _state(
    now: Now,
    release: Released | None,
    differing: Sequence[Change],
    counted: Sequence[Change],
    said: Places,
    unknown: Sequence[str],
) -> tuple[State, str]:
    """The state, and why in one line."""
    held = None if now.judged is None else f"these inputs were judged {now.judged.value}"
    if release is None:
        if said.unasked or said.damaged:
            return "unknown", "whether it was ever released is not known"
        return ("held", f"never released: {held}") if held else ("due", "never released")
    if counted:
        words = "; ".join(what_changed(counted))
        return ("held", f"{held} ({words})") if held else ("due", words)
    if now.unpublished(release):
        return "due", f"{release.tag} is not in all places of the recipe"
    if said.empty:  # a place that is new to the recipe, or that somebody emptied
        lacks = f"nothing is in {', '.join(said.empty)}"
        return ("held", f"{held} ({lacks})") if held else ("due", lacks)
    if differing:
        causes = ", ".join(dict.fromkeys(change.cause for change in differing))
        return "current", f"left out by refresh.triggers: {causes}: {'; '.join(what_changed(differing))}"
    if unknown:
        return "unknown", unknown[0]
    readers = release.shown
    waits = now.setting.recipe.publish.to == "candidate"
    if readers not in (None, release.tag) and not waits:
        return "current", f"nothing changed; readers get {readers}"
    return "current", "nothing changed"

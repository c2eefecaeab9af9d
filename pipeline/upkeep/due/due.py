"""Whether recipes are due: what each would be made from now, against what its newest release was made from.

Nothing is run, and nothing is fetched but small files. Everything that lies elsewhere is asked first, for all recipes
at once, and each repository once; then each recipe is planned as a run would plan it. A network that is away makes
nothing due, and is told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import yaml

from quantmint.eval.verdict import Verdict
from quantmint.pipeline import __version__
from quantmint.pipeline.base.canonical import ABSENT, Json, fingerprint
from quantmint.pipeline.base.errors import QuantmintError, UserError
from quantmint.pipeline.publish.newest import NewestRelease
from quantmint.pipeline.quantize.formats.checkpoint import read_json
from quantmint.pipeline.recipe.faults import refuse
from quantmint.pipeline.recipe.load import LoadedRecipe, load_recipe
from quantmint.pipeline.recipe.sections import Cause
from quantmint.pipeline.runs.planner import build_plan, find_entry, foreseen, known_unsound, missing_stages
from quantmint.pipeline.runs.session import assemble, vllm_for
from quantmint.pipeline.stages.checks import check
from quantmint.pipeline.stages.setting import Commits, Setting, SourceIdentity
from quantmint.pipeline.stages.source import identify
from quantmint.pipeline.stages.stage import Planned
from quantmint.pipeline.store.tree import Store
from quantmint.pipeline.upkeep.due.answers import Answers, ReleasePlaces, UnaskedError, ask
from quantmint.pipeline.upkeep.due.causes import RECIPE, DueChange, apart_from_unknown, changes, what_changed
from quantmint.pipeline.upkeep.schedule.export import here

State = Literal["current", "due", "held", "broken", "damaged", "unknown"]


@dataclass(frozen=True, slots=True)
class Due:
    """Whether a recipe is due, and why. ``recipe`` is its name or path as given, ``name`` its name.

    ``state`` is "due", "current" or one of these. "held": this store's run judged these very inputs with ``verdict``;
    running again would give the same. "broken": the recipe cannot be loaded or planned. "damaged": a destination has a
    release that cannot be read, and the recipe is not due otherwise. "unknown": something did not answer, and the rest
    says that the recipe is not due. ``reason`` is one line for people. ``changes`` include those that the recipe's
    triggers leave out. ``stages`` says by a stage's key whether a run would find it ("cached") or make it ("rerun").
    ``unknown`` has a sentence for each thing that did not answer, in any state. ``loaded`` is None if the file cannot
    be loaded; then ``name`` is as given. ``inputs`` is a digest of everything that a run would start from, "" without a
    plan.
    """

    name: str
    recipe: str
    state: State
    reason: str
    changes: tuple[DueChange, ...] = ()
    stages: tuple[tuple[str, Literal["rerun", "cached"]], ...] = ()
    release: NewestRelease | None = None
    unknown: tuple[str, ...] = ()
    verdict: Verdict | None = None
    loaded: LoadedRecipe | None = None
    inputs: str = ""

    @property
    def causes(self) -> tuple[Cause, ...]:
        """Return the causes of the changes, each once."""
        return tuple(dict.fromkeys(change.cause for change in self.changes))

    def to_json(self) -> dict[str, Json]:
        """Return the fields as plain data, without the loaded recipe."""
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
        }


def all_recipes() -> tuple[str, ...]:
    """Return the sorted names of the recipes in ./recipes, without the shipped ones.

    Raises `UserError` if there are none.
    """
    names = here()
    if not names:
        raise UserError("no recipe is named, and ./recipes has none", hint="Name recipes or YAML files.")
    return names


def look(recipes: Sequence[str], *, store: Store, vllm: str | None = None, device: str = "auto") -> tuple[Due, ...]:
    """Return for each recipe, given by name or path, whether it is due; the order is kept.

    ``vllm`` and ``device`` are options of `quantmint run`. A recipe at fault is "broken" and raises nothing. Answers of
    the Hub are not kept for the next call.
    """
    dues: dict[str, Due] = {}
    loaded: dict[str, LoadedRecipe] = {}
    for recipe in recipes:
        try:
            loaded[recipe] = load_recipe(recipe)
        except QuantmintError as error:
            dues[recipe] = Due(recipe, recipe, "broken", str(error))
    answers = ask(list(loaded.values()), Path.cwd())
    for recipe, parsed in loaded.items():
        due = Due(parsed.recipe.name, recipe, "broken", "", loaded=parsed)
        try:
            dues[recipe] = _judge(due, parsed, answers, partial(plan_now, store=store, vllm=vllm, device=device))
        except Exception as error:  # a fault of ours, or of a disk, that one recipe meets: the others are looked at
            dues[recipe] = replace(due, reason=f"it cannot be looked at: {type(error).__name__}: {error}")
    return tuple(dues[recipe] for recipe in recipes)


def _judge(due: Due, loaded: LoadedRecipe, answers: Answers, plan: Callable[[LoadedRecipe, Answers], Now]) -> Due:
    """Return ``due`` with its state and all that it follows from; ``plan`` is `plan_now` with its options."""
    places = answers.releases(loaded)
    due, silent = replace(due, release=places.newest), [*places.unasked, *places.damaged]
    try:
        now = plan(loaded, answers)
    except UnaskedError as error:
        due = replace(due, unknown=tuple(dict.fromkeys((error.message, *silent))))
        if places.damaged:
            return replace(due, state="damaged", reason=places.damaged[0])
        return replace(due, state="unknown", reason=error.message)
    except QuantmintError as error:
        return replace(due, reason=str(error))
    differing: tuple[DueChange, ...] = ()
    if places.newest is not None:
        payloads: Mapping[str, Mapping[str, object]] = {planned.key: planned.payload for planned in now.plan}
        written = loaded.positions.values.keys()
        differences = changes(places.newest.manifest, payloads, now.recipe, written=written, quantmint=__version__)
        tools, differing = apart_from_unknown(differences)
        if tools:
            silent.append(f"not installed here, so that its version is not known: {', '.join(sorted(tools))}")
    unknown = tuple(dict.fromkeys(silent))
    state, reason = _state(now, differing, places, unknown)
    if places.damaged and state != "due":  # a run that is due replaces the damaged release, so it goes first
        state, reason = "damaged", places.damaged[0]
    if places.newest is None and state not in ("unknown", "damaged"):
        differing = (DueChange("recipe", RECIPE, "name", ABSENT, due.name),)
    return replace(
        due,
        state=state,
        reason=reason,
        changes=differing,
        stages=now.stages,
        unknown=unknown,
        verdict=now.judged if state == "held" else None,
        inputs=fingerprint([[planned.key, planned.fingerprint] for planned in now.plan]),
    )


def _state(
    now: Now, differing: Sequence[DueChange], places: ReleasePlaces, unknown: Sequence[str]
) -> tuple[State, str]:
    release, recipe = places.newest, now.setting.recipe
    if release is None and (places.unasked or places.damaged):
        return "unknown", "whether it was ever released is not known"
    counted = [change for change in differing if change.cause in recipe.refresh.triggers]
    words = "never released" if release is None else "; ".join(what_changed(counted))
    stages = dict(now.stages)
    if not words and release is not None and now.packaged() == release.tag and stages.get("publish") == "rerun":
        return "due", f"{release.tag} is not in all places of the recipe"
    if not words and places.empty:  # a place that is new to the recipe, or that somebody emptied
        words = f"nothing is in {', '.join(places.empty)}"
    if words and now.judged is not None:
        return "held", f"these inputs were judged {now.judged.value} ({words})"
    if words:
        rerun = "rerun" in stages.values()
        return ("due", words) if rerun else ("current", f"{_made_before(now, places)} ({words})")
    if differing:
        causes = ", ".join(dict.fromkeys(change.cause for change in differing))
        return "current", f"left out by refresh.triggers: {causes}: {'; '.join(what_changed(differing))}"
    if unknown:
        return "unknown", unknown[0]
    waits = recipe.publish.to == "candidate" or any(to.needs_approval() for to in recipe.publish.destinations())
    if release is None or release.shown in (None, release.tag) or waits:
        return "current", "nothing changed"
    return "current", f"nothing changed; {_readers_get(release, release.tag)}"


def _made_before(now: Now, places: ReleasePlaces) -> str:
    """Return the reason for a recipe of which this store has made every stage, with the command that shows it."""
    ours = now.packaged()
    if ours is None or places.empty or any(ours not in release.tags for release in places.there):
        return f"this store has made it: `quantmint publish {now.setting.recipe.name}` publishes it"
    elsewhere = next((release for release in places.there if release.shown != ours), None)
    return f"readers get {ours}, made from these inputs" if elsewhere is None else _readers_get(elsewhere, ours)


def _readers_get(release: NewestRelease, ours: str) -> str:
    command = f"`quantmint release rollback {release.place} {ours}`"
    return f"readers get {release.shown}; {command} gives them what these inputs made"


@dataclass(frozen=True, slots=True)
class Now:
    """The present plan of a recipe.

    ``recipe`` holds the recipe's settings that shape results, ``stages`` the stages that a run would go through.
    ``judged`` is the verdict of this store's run on these very inputs, None for a PASS and without such a run.
    """

    setting: Setting
    plan: tuple[Planned, ...]
    recipe: Mapping[str, Any]
    stages: tuple[tuple[str, Literal["rerun", "cached"]], ...]
    judged: Verdict | None

    def packaged(self) -> str | None:
        """Return the tag of the release that this store made from these very inputs; None if it has none."""
        package = next((planned for planned in self.plan if planned.key == "package"), None)
        entry = None if package is None else find_entry(package, self.setting)
        tag = None if entry is None else entry.record.result.get("tag")
        return tag if isinstance(tag, str) else None


def plan_now(loaded: LoadedRecipe, answers: Answers, *, store: Store, vllm: str | None, device: str) -> Now:
    """Plan a recipe as a run would, without its weights.

    Raises `UnaskedError` if a model or a data set did not answer, and `QuantmintError` for faults of the recipe, which
    go first.
    """
    source = loaded.recipe.source
    try:
        if source.repo is None:
            identity = identify(source, loaded.source_folder, store.root)
            folder = Path(str(identity.folder))
        else:
            base = answers.base(source.repo, str(source.revision))
            identity, folder = SourceIdentity(None, base.commit, source.repo), base.folder
    except QuantmintError:
        refuse(check(loaded))  # what is wrong in the file is told first
        raise
    config = read_json(folder / "config.json")
    refuse(check(loaded, config=config))
    commits = Commits(answers.dataset)
    setting = assemble(
        loaded, identity, config, store=store, vllm=vllm_for(loaded.recipe, vllm), device=device, commits=commits
    )
    plan = build_plan(setting)
    followed = foreseen(plan, setting)
    missing = missing_stages(followed, setting)
    return Now(
        setting=setting,
        plan=plan,
        recipe=yaml.safe_load(setting.loaded.text_proven),
        stages=tuple((planned.key, "rerun" if planned.key in missing else "cached") for planned in followed),
        judged=_judged(plan, followed, setting),
    )


def _judged(plan: Sequence[Planned], followed: Sequence[Planned], setting: Setting) -> Verdict | None:
    if known_unsound(plan, setting):
        return Verdict.FAIL
    gate = next((planned for planned in followed if planned.key == "gate"), None)
    entry = None if gate is None else find_entry(gate, setting)
    verdict = Verdict.PASS if entry is None else Verdict(str(entry.record.result["verdict"]))
    return None if verdict is Verdict.PASS else verdict

"""Whether recipes are due: what each would be made from now, against what its newest release was made from.

Nothing is run, and nothing is fetched but small files. Everything that lies elsewhere is asked first, for all recipes
at once, and each repository once; then each recipe is planned as a run would plan it. A network that is away makes
nothing due, and is told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from quantmint.eval.verdict import Verdict
from quantmint.pipeline import __version__
from quantmint.pipeline.base.canonical import ABSENT, Json, fingerprint
from quantmint.pipeline.base.errors import QuantmintError, UserError
from quantmint.pipeline.quantize.formats.checkpoint import read_json
from quantmint.pipeline.recipe.faults import refuse
from quantmint.pipeline.recipe.load import LoadedRecipe, load_recipe
from quantmint.pipeline.recipe.sections import Cause
from quantmint.pipeline.runs.planner import build_plan, find_entry, foreseen, known_unsound, missing_stages
from quantmint.pipeline.runs.session import assemble
from quantmint.pipeline.stages.checks import check
from quantmint.pipeline.stages.setting import Commits, Setting, SourceIdentity
from quantmint.pipeline.stages.source import identify
from quantmint.pipeline.stages.stage import Planned
from quantmint.pipeline.store.tree import Store
from quantmint.pipeline.upkeep.due.answers import Answers, Released, ReleasePlaces, UnaskedError, ask
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
    release: Released | None = None
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
    found = here()
    if not found:
        raise UserError("no recipe is named, and ./recipes has none", hint="Name recipes or YAML files.")
    return found


def look(recipes: Sequence[str], *, store: Store, vllm: str | None = None, device: str = "auto") -> tuple[Due, ...]:
    """Return for each recipe, given by name or path, whether it is due; the order is kept.

    ``vllm`` and ``device`` are options of `quantmint run`. A recipe at fault is "broken" and raises nothing. Answers of
    the Hub are not kept for the next call.
    """
    found: dict[str, Due] = {}
    loaded: dict[str, LoadedRecipe] = {}
    for recipe in recipes:
        try:
            loaded[recipe] = load_recipe(recipe)
        except QuantmintError as error:
            found[recipe] = Due(recipe, recipe, "broken", str(error))
    answers = ask(list(loaded.values()), Path.cwd())
    for recipe, one in loaded.items():
        try:
            found[recipe] = _found(recipe, one, answers, store, vllm, device)
        except Exception as error:  # a fault of ours, or of a disk, that one recipe meets: the others are looked at
            reason = f"it cannot be looked at: {type(error).__name__}: {error}"
            found[recipe] = Due(one.recipe.name, recipe, "broken", reason, loaded=one)
    return tuple(found[recipe] for recipe in recipes)


def _found(recipe: str, loaded: LoadedRecipe, answers: Answers, store: Store, vllm: str | None, device: str) -> Due:
    name, said = loaded.recipe.name, answers.releases(loaded)
    release, silent = said.newest, [*said.unasked, *said.damaged]
    try:
        now = plan_now(loaded, answers, store=store, vllm=vllm, device=device)
    except UnaskedError as error:
        unknown = tuple(dict.fromkeys((error.message, *silent)))
        state, reason = _at_fault("unknown", error.message, said)
        return Due(name, recipe, state, reason, release=release, unknown=unknown, loaded=loaded)
    except QuantmintError as error:
        return Due(name, recipe, "broken", str(error), release=release, loaded=loaded)
    differing: tuple[DueChange, ...] = ()
    if release is not None:
        payloads: Mapping[str, Mapping[str, object]] = {planned.key: planned.payload for planned in now.plan}
        written = loaded.positions.values.keys()
        found = changes(release.manifest, payloads, now.recipe, written=written, quantmint=__version__)
        tools, differing = apart_from_unknown(found)
        if tools:
            silent.append(f"not installed here, so that its version is not known: {', '.join(sorted(tools))}")
    unknown = tuple(dict.fromkeys(silent))
    state, reason = _at_fault(*_state(now, release, differing, said, unknown), said)
    if release is None and state not in ("unknown", "damaged"):
        differing = (DueChange("recipe", RECIPE, "name", ABSENT, name),)
    return Due(
        name,
        recipe,
        state,
        reason,
        changes=differing,
        stages=now.stages,
        release=release,
        unknown=unknown,
        verdict=now.judged if state == "held" else None,
        loaded=loaded,
        inputs=fingerprint([[planned.key, planned.fingerprint] for planned in now.plan]),
    )


def _at_fault(state: State, reason: str, said: ReleasePlaces) -> tuple[State, str]:
    """Return "damaged" with its reason if a release cannot be read and the recipe is not due; else the arguments.

    A run that is due replaces the damaged release, so it goes first.
    """
    return ("damaged", said.damaged[0]) if said.damaged and state != "due" else (state, reason)


def _state(
    now: Now, release: Released | None, differing: Sequence[DueChange], said: ReleasePlaces, unknown: Sequence[str]
) -> tuple[State, str]:
    counted = [change for change in differing if change.cause in now.setting.recipe.refresh.triggers]
    held = None if now.judged is None else f"these inputs were judged {now.judged.value}"
    if release is None and (said.unasked or said.damaged):
        return "unknown", "whether it was ever released is not known"
    words = "never released" if release is None else "; ".join(what_changed(counted))
    stages = dict(now.stages)
    if not words and release is not None and now.packaged() == release.tag and stages.get("publish") == "rerun":
        return "due", f"{release.tag} is not in all places of the recipe"
    if not words and said.empty:  # a place that is new to the recipe, or that somebody emptied
        words = f"nothing is in {', '.join(said.empty)}"
    if words and held:
        return "held", f"{held} ({words})"
    if words:
        made = "rerun" not in stages.values()
        return ("current", f"{_made_before(now, said)} ({words})") if made else ("due", words)
    if differing:
        causes = ", ".join(dict.fromkeys(change.cause for change in differing))
        return "current", f"left out by refresh.triggers: {causes}: {'; '.join(what_changed(differing))}"
    if unknown:
        return "unknown", unknown[0]
    publish = now.setting.recipe.publish
    waits = publish.to == "candidate" or any(each.needs_approval() for each in publish.destinations())
    if release is None or release.shown in (None, release.tag) or waits:
        return "current", "nothing changed"
    return "current", f"nothing changed; {_readers_get(release, release.tag)}"


def _made_before(now: Now, said: ReleasePlaces) -> str:
    """Return the reason for a recipe of which this store has made every stage, with the command that shows it."""
    ours = now.packaged()
    if ours is None or said.empty or any(ours not in one.tags for one in said.there):
        return f"this store has made it: `quantmint publish {now.setting.recipe.name}` publishes it"
    other = next((one for one in said.there if one.shown != ours), None)
    return f"readers get {ours}, made from these inputs" if other is None else _readers_get(other, ours)


def _readers_get(there: Released, ours: str) -> str:
    command = f"`quantmint release rollback {there.place} {ours}`"
    return f"readers get {there.shown}; {command} gives them what these inputs made"


# What it would be made from now: its plan, by what is here and what was answered.


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
        found = None if entry is None else entry.record.result.get("tag")
        return found if isinstance(found, str) else None


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
    setting = assemble(loaded, identity, config, store=store, vllm=vllm, device=device, commits=commits)
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

"""Build the plan of a run: its stages, in order, with their fingerprints; and compare it with the store.

A plan is pure: only the setting is read, and nothing is run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from quantmint.eval.verdict import Verdict
from quantmint.pipeline.base.canonical import JsonDifference, difference, fingerprint
from quantmint.pipeline.base.errors import UserError, did_you_mean
from quantmint.pipeline.stages.registry import STAGES
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.stage import Planned, Stage
from quantmint.pipeline.store.entries import Entry
from quantmint.pipeline.store.gc import list_runs

Named = TypeVar("Named", Stage, Planned)


def stages_of(setting: Setting) -> tuple[Stage, ...]:
    """Return the stages that a recipe needs, in the order in which they run.

    Where the schemes are to be chosen, only those that the choice is made by: what follows can be planned afterwards.
    """
    return tuple(stage for stage in STAGES if stage.is_planned(setting))


def stopped_stages(setting: Setting) -> tuple[Stage, ...]:
    """Return the stages of a run that the canary stops: the gate judges and the report shows what there is."""
    return tuple(replacement for stage in stages_of(setting) if (replacement := stage.when_stopped()) is not None)


def build_plan(setting: Setting, until: str | None = None) -> tuple[Planned, ...]:
    """The stages of a recipe up to one of them, with their fingerprints; see `cut`."""
    return plan_stages(cut(stages_of(setting), until), setting)


def plan_stages(stages: Iterable[Stage], setting: Setting) -> tuple[Planned, ...]:
    """Fingerprint stages that come in the order of their inputs."""
    planned: dict[str, Planned] = {}
    for stage in stages:
        read = {key: key for key, earlier in planned.items() if stage.reads(earlier.stage)}
        inputs = {**stage.inputs(setting), **read}
        payload: Mapping[str, object] = {
            "stage": stage.family,
            "version": stage.version,
            "inputs": {name: planned[key].fingerprint for name, key in inputs.items()},
            "settings": dict(stage.settings(setting)),
            "tools": dict(stage.tools(setting)),
        }
        planned[stage.key] = Planned(stage, inputs, payload, fingerprint(payload))
    return tuple(planned.values())


def cut(plan: Sequence[Named], until: str | None) -> tuple[Named, ...]:
    """Stages up to the one of a key, or the last of a family. Raises `UserError` for a name that is in no such plan."""
    if until is None:
        return tuple(plan)
    ends = [number for number, planned in enumerate(plan) if until in (planned.key, planned.family)]
    if not ends:
        names = list(dict.fromkeys(name for planned in plan for name in (planned.family, planned.key)))
        raise UserError(f"--until: found {until!r}, expected one of {', '.join(names)}{did_you_mean(until, names)}.")
    return tuple(plan[: ends[-1] + 1])


def find_entry(planned: Planned, setting: Setting) -> Entry | None:
    """Return the stage's entry where the store has it and the files outside that it stands for are intact."""
    entry = setting.store.find(planned.family, planned.fingerprint)
    return entry if entry is not None and planned.stage.intact(entry, setting) else None


def after_stop(plan: Sequence[Planned], setting: Setting) -> tuple[Planned, ...]:
    """Return the plan that a run goes on with where its canary stops it, as far as ``plan`` reached."""
    keys = {planned.key for planned in plan}
    return tuple(planned for planned in plan_stages(stopped_stages(setting), setting) if planned.key in keys)


def foreseen(plan: Sequence[Planned], setting: Setting, redo: Collection[str] = ()) -> tuple[Planned, ...]:
    """Return the plan that a run would follow: stopped where the store says that the canary stopped it before."""
    for planned in plan:
        entry = None if planned.among(redo) else find_entry(planned, setting)
        if entry is None:
            break
        if planned.stage.stops(entry):
            return after_stop(plan, setting)
    return tuple(plan)


def missing_stages(plan: Sequence[Planned], setting: Setting, redo: Collection[str] = ()) -> list[str]:
    """Return the keys of the stages that would run; entries that the remote tier offers are fetched and not run."""

    def is_there(planned: Planned) -> bool:
        if find_entry(planned, setting) is not None:
            return True
        return setting.remote is not None and setting.remote.offers(planned.family, planned.fingerprint)

    return [planned.key for planned in plan if planned.among(redo) or not is_there(planned)]


def known_unsound(plan: Sequence[Planned], setting: Setting) -> bool:
    """Return whether an earlier inspection found the checkpoint unsound."""
    inspect = next((planned for planned in plan if planned.key == "inspect"), None)
    entry = None if inspect is None else find_entry(inspect, setting)
    return entry is not None and entry.record.result["verdict"] != Verdict.PASS.value


@dataclass(frozen=True, slots=True)
class Explained:
    """A stage that is cached, new (never finished for this recipe), or changed, with the changes."""

    key: str
    state: str
    changes: tuple[JsonDifference, ...] = ()


def explain(plan: Sequence[Planned], setting: Setting) -> tuple[Explained, ...]:
    """Compare each stage that is not cached with its newest finished predecessor in this recipe's runs.

    A changed fingerprint of an input is among the changes: the stage of that name has the cause.
    """
    families = [planned.family for planned in plan]
    runs = [run for run in list_runs(setting.store.root) if run.recipe == setting.recipe.name]

    def compared(planned: Planned, nth: int) -> Explained:
        """``nth`` counts the stages of its family before it: plans with and without calibration are compared too."""
        if find_entry(planned, setting) is not None:
            return Explained(planned.key, "cached")
        for run in runs:
            same = [fingerprint for stage, fingerprint in run.plan if stage == planned.family][nth:]
            before = setting.store.find(planned.family, same[0]) if same and same[0] != planned.fingerprint else None
            if before is not None:
                return Explained(planned.key, "changed", tuple(difference(before.record.payload, planned.payload)))
        return Explained(planned.key, "to do: never finished with this recipe")

    return tuple(compared(planned, families[:number].count(planned.family)) for number, planned in enumerate(plan))

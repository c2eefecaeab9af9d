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

    While the schemes are still to be chosen, these are only the stages that measure for the choice.
    """
    return tuple(stage for stage in STAGES if stage.is_planned(setting))


def stopped_stages(setting: Setting) -> tuple[Stage, ...]:
    """Return the stages of a run that the canary stops: it, gate and report stay.

    Others that measure or release do not.
    """
    return tuple(replacement for stage in stages_of(setting) if (replacement := stage.when_stopped()) is not None)


def build_plan(setting: Setting, until: str | None = None) -> tuple[Planned, ...]:
    """Return the recipe's planned stages with their fingerprints, up to the stage ``until`` (see `cut`)."""
    return plan_stages(cut(stages_of(setting), until), setting)


def plan_stages(stages: Iterable[Stage], setting: Setting) -> tuple[Planned, ...]:
    """Return stages with their inputs, payloads and fingerprints; each must come after the stages that it reads."""
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
    """Return the stages up to ``until``, a stage's key or a family, whose last stage counts; all of them for None.

    Raises `UserError` for a name that the plan does not contain.
    """
    if until is None:
        return tuple(plan)
    ends = [number for number, planned in enumerate(plan) if until in (planned.key, planned.family)]
    if not ends:
        names = list(dict.fromkeys(name for planned in plan for name in (planned.family, planned.key)))
        raise UserError(f"--until: found {until!r}, expected one of {', '.join(names)}{did_you_mean(until, names)}.")
    return tuple(plan[: ends[-1] + 1])


def find_entry(planned: Planned, setting: Setting) -> Entry | None:
    """Return the stage's entry in the store.

    None without one, or where files outside the store that it refers to changed.
    """
    entry = setting.store.find(planned.family, planned.fingerprint)
    return entry if entry is not None and planned.stage.intact(entry, setting) else None


def after_stop(plan: Sequence[Planned], setting: Setting) -> tuple[Planned, ...]:
    """Return the plan with which a run continues after its canary stops it, limited to the stages of ``plan``."""
    keys = {planned.key for planned in plan}
    return tuple(planned for planned in plan_stages(stopped_stages(setting), setting) if planned.key in keys)


def foreseen(plan: Sequence[Planned], setting: Setting, redo: Collection[str] = ()) -> tuple[Planned, ...]:
    """Return the plan that a run would follow: ``plan``, or `after_stop` where a canary in the store stops it.

    ``redo`` names stages to make again, whose entries do not count.
    """
    for planned in plan:
        entry = None if planned.among(redo) else find_entry(planned, setting)
        if entry is None:
            break
        if planned.stage.stops(entry):
            return after_stop(plan, setting)
    return tuple(plan)


def missing_stages(plan: Sequence[Planned], setting: Setting, redo: Collection[str] = ()) -> list[str]:
    """Return the keys of the stages that would run: in ``redo``, or neither in the store nor in the remote tier."""

    def is_there(planned: Planned) -> bool:
        if find_entry(planned, setting) is not None:
            return True
        return setting.remote is not None and setting.remote.offers(planned.family, planned.fingerprint)

    return [planned.key for planned in plan if planned.among(redo) or not is_there(planned)]


def known_unsound(plan: Sequence[Planned], setting: Setting) -> bool:
    """Return whether the store has an inspection of this plan that found the checkpoint unsound."""
    inspect = next((planned for planned in plan if planned.key == "inspect"), None)
    entry = None if inspect is None else find_entry(inspect, setting)
    return entry is not None and entry.record.result["verdict"] != Verdict.PASS.value


@dataclass(frozen=True, slots=True)
class Explained:
    """A stage with its state: "cached", "changed" with the changes, or "to do: never finished with this recipe"."""

    key: str
    state: str
    changes: tuple[JsonDifference, ...] = ()


def explain(plan: Sequence[Planned], setting: Setting) -> tuple[Explained, ...]:
    """Compare each stage that is not cached with its newest finished predecessor in the recipe's runs.

    The changes are differences of the payloads; a changed fingerprint of an input has its cause in the stage of that
    name.
    """
    families = [planned.family for planned in plan]
    runs = [run for run in list_runs(setting.store.root) if run.recipe == setting.recipe.name]

    def compared(planned: Planned, nth: int) -> Explained:
        """Return the state of a stage with ``nth`` stages of its family before it, so that differing plans compare."""
        if find_entry(planned, setting) is not None:
            return Explained(planned.key, "cached")
        for run in runs:
            same = [fingerprint for stage, fingerprint in run.plan if stage == planned.family][nth:]
            before = setting.store.find(planned.family, same[0]) if same and same[0] != planned.fingerprint else None
            if before is not None:
                return Explained(planned.key, "changed", tuple(difference(before.record.payload, planned.payload)))
        return Explained(planned.key, "to do: never finished with this recipe")

    return tuple(compared(planned, families[:number].count(planned.family)) for number, planned in enumerate(plan))

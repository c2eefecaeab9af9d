"""Why a stage would run again: its payload against the one of the last run that finished it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.canonical import Change, difference
from pipeline.runner import find_entry
from pipeline.stage import Planned, Setting
from pipeline.store.runs import list_runs


@dataclass(frozen=True, slots=True)
class Explained:
    """One stage: cached, new (never finished for this recipe), or changed, and by what."""

    key: str
    state: str
    changes: tuple[Change, ...] = ()


def explain(plan: Sequence[Planned], setting: Setting) -> tuple[Explained, ...]:
    """Compare each stage that is not cached with its newest finished predecessor in this recipe's runs.

    A fingerprint of an input that changed is reported too: the stage of that name says why.
    """
    families = [planned.stage.family for planned in plan]
    return tuple(
        _explain(planned, families[:number].count(planned.stage.family), setting) for number, planned in enumerate(plan)
    )


def _explain(planned: Planned, nth: int, setting: Setting) -> Explained:
    """``nth`` counts the stages of its family before it: plans with and without calibration are compared too."""
    if find_entry(planned, setting) is not None:
        return Explained(planned.key, "cached")
    family = planned.stage.family
    for run in list_runs(setting.store.root):
        same = [fingerprint for stage, fingerprint in run.plan if stage == family]
        if run.recipe != setting.recipe.name or nth >= len(same) or same[nth] == planned.fingerprint:
            continue
        before = setting.store.find(family, same[nth])
        if before is not None:
            return Explained(planned.key, "changed", tuple(difference(before.record.payload, planned.payload)))
    return Explained(planned.key, "to do: never finished with this recipe")

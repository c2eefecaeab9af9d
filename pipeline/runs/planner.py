"""From a setting to a plan: which stages, in which order, with which fingerprints; and what of it the store has.

A plan is pure: nothing is read but what the setting holds. Nothing here is run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from quantmint.eval.verdict import Verdict
from quantmint.pipeline.base.canonical import Change, difference, fingerprint
from quantmint.pipeline.base.errors import UserError, did_you_mean
from quantmint.pipeline.recipe.schema import AUTO
from quantmint.pipeline.stages.bench import BenchStage
from quantmint.pipeline.stages.calibrate import CalibrateStage
from quantmint.pipeline.stages.canary import CanaryStage
from quantmint.pipeline.stages.evaluate import ControlStage, EvaluateStage
from quantmint.pipeline.stages.gate import GateStage, asks_twice, has_throughput
from quantmint.pipeline.stages.package import PackageStage, SignStage
from quantmint.pipeline.stages.publish import PublishStage
from quantmint.pipeline.stages.quantize import InspectStage, QuantizeStage, needs_ranges
from quantmint.pipeline.stages.report import ReportStage
from quantmint.pipeline.stages.sensitivity import SensitivityStage
from quantmint.pipeline.stages.serve import ServeStage
from quantmint.pipeline.stages.source import SourceStage
from quantmint.pipeline.stages.stage import Planned, Setting, Stage
from quantmint.pipeline.store.entries import Entry
from quantmint.pipeline.store.gc import list_runs

Named = TypeVar("Named", Stage, Planned)


def stages_of(setting: Setting) -> tuple[Stage, ...]:
    """The stages of a recipe, in the order in which they run.

    The baseline comes first, because everything about the candidate is held against it: the canary's answers, and a
    sequential evaluation that stops as soon as the two are told apart. What concerns the baseline alone has nothing of
    the candidate in its fingerprint, so all recipes of a model share it. The canary comes before whatever takes long.
    Servers are started in the order B, C, B, C, one at a time, as there may be no room for two; a CPU that has the room
    keeps both. Where the baseline is known already, only the candidate's is started.

    Where the schemes are to be chosen, what they are chosen by is all that can be planned.
    """
    if setting.recipe.quantization.scheme == AUTO:
        return SourceStage(), SensitivityStage()
    return (
        *_until_canary(setting),
        EvaluateStage("baseline"),
        *([ControlStage()] if asks_twice(setting) else []),
        EvaluateStage("candidate"),
        *([BenchStage()] if has_throughput(setting) else []),
        GateStage(),
        ReportStage(),
        PackageStage(),
        *([SignStage()] if setting.recipe.publish.sign is not None else []),
        PublishStage(),
    )


def stopped_stages(setting: Setting) -> tuple[Stage, ...]:
    """The stages of a run that the canary stops: what was found is judged and shown, nothing long is measured."""
    return (*_until_canary(setting), GateStage(stopped=True), ReportStage(stopped=True))


def _until_canary(setting: Setting) -> tuple[Stage, ...]:
    canary = setting.recipe.gate.canary is not None
    calibrate: tuple[Stage, ...] = (CalibrateStage(),) if needs_ranges(setting.recipe.quantization) else ()
    return (
        SourceStage(),
        *((SensitivityStage(),) if setting.chosen is not None else ()),
        *calibrate,
        QuantizeStage(),
        InspectStage(),
        ServeStage("baseline"),
        *((CanaryStage("baseline"),) if canary else ()),
        ServeStage("candidate"),
        *((CanaryStage("candidate"),) if canary else ()),
    )


def build_plan(setting: Setting, until: str | None = None) -> tuple[Planned, ...]:
    """The stages of a recipe up to one of them, with their fingerprints; see `cut`."""
    return plan_stages(cut(stages_of(setting), until), setting)


def plan_stages(stages: Iterable[Stage], setting: Setting) -> tuple[Planned, ...]:
    """Fingerprint stages that come in the order of their inputs."""
    planned: dict[str, Planned] = {}
    for stage in stages:
        inputs = stage.inputs(setting)
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
    """The stage's entry, where it is there and what it stands for is intact."""
    entry = setting.store.find(planned.family, planned.fingerprint)
    return entry if entry is not None and planned.stage.intact(entry, setting) else None


def stopped_by(key: str, entry: Entry) -> bool:
    """Whether a stage's entry is the canary's word that the checkpoint is broken, or unlikely to pass."""
    stops = (Verdict.FAIL.value, Verdict.INCONCLUSIVE.value)
    return key == "canary-candidate" and entry.record.result.get("verdict") in stops


def after_stop(plan: Sequence[Planned], setting: Setting) -> tuple[Planned, ...]:
    """What a run goes on with where its canary stops it, as far as the plan had it; up to there both are the same."""
    wanted = {planned.key for planned in plan}
    return tuple(planned for planned in plan_stages(stopped_stages(setting), setting) if planned.key in wanted)


def foreseen(plan: Sequence[Planned], setting: Setting, redo: Collection[str] = ()) -> tuple[Planned, ...]:
    """The plan that a run would follow, as far as the store knows: stopped where the canary stopped it before."""
    for planned in plan:
        entry = None if planned.among(redo) else find_entry(planned, setting)
        if entry is None:
            break
        if stopped_by(planned.key, entry):
            return after_stop(plan, setting)
    return tuple(plan)


def missing_stages(plan: Sequence[Planned], setting: Setting, redo: Collection[str] = ()) -> list[str]:
    """Keys of the stages that would run: what the remote tier offers is taken from there."""

    def is_there(planned: Planned) -> bool:
        if find_entry(planned, setting) is not None:
            return True
        return setting.remote is not None and setting.remote.offers(planned.family, planned.fingerprint)

    return [planned.key for planned in plan if planned.among(redo) or not is_there(planned)]


def known_unsound(plan: Sequence[Planned], setting: Setting) -> bool:
    """Whether inspection has condemned the checkpoint before."""
    inspect = next((planned for planned in plan if planned.key == "inspect"), None)
    entry = None if inspect is None else find_entry(inspect, setting)
    return entry is not None and entry.record.result["verdict"] != Verdict.PASS.value


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

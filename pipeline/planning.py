"""From a setting to a plan: which stages, in which order, with which fingerprints.

Pure: nothing is read but what the setting holds, and nothing is run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from pipeline.canonical import fingerprint
from pipeline.errors import UserError
from pipeline.recipe.faults import did_you_mean
from pipeline.stage import Planned, Setting, Stage
from pipeline.stages.bench import BenchStage
from pipeline.stages.calibrate import CalibrateStage
from pipeline.stages.canary import CanaryStage
from pipeline.stages.control import ControlStage
from pipeline.stages.evaluate import EvaluateStage
from pipeline.stages.gate import GateStage
from pipeline.stages.inspect import InspectStage
from pipeline.stages.measured import asks_twice, has_throughput
from pipeline.stages.package import PackageStage
from pipeline.stages.publish import PublishStage
from pipeline.stages.quantize import QuantizeStage, needs_ranges
from pipeline.stages.report import ReportStage
from pipeline.stages.serve import ServeStage
from pipeline.stages.sign import SignStage
from pipeline.stages.source import SourceStage

Named = TypeVar("Named", Stage, Planned)


def stages_of(setting: Setting) -> tuple[Stage, ...]:
    """The stages of a recipe, in the order in which they run.

    The baseline comes first, because everything about the candidate is held against it: the canary's answers, and a
    sequential evaluation that stops as soon as the two are told apart. What concerns the baseline alone has nothing of
    the candidate in its fingerprint, so all recipes of a model share it. The canary comes before whatever takes long.
    Servers are started in the order B, C, B, C, one at a time, as there may be no room for two; where the baseline is
    known already, only the candidate's is.
    """
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
    calibrate: tuple[Stage, ...] = (CalibrateStage(),) if needs_ranges(setting.recipe.quantization) else ()
    return (
        SourceStage(),
        *calibrate,
        QuantizeStage(),
        InspectStage(),
        ServeStage("baseline"),
        CanaryStage("baseline"),
        ServeStage("candidate"),
        CanaryStage("candidate"),
    )


def build_plan(setting: Setting, until: str | None = None) -> tuple[Planned, ...]:
    """The stages of a recipe up to one of them, with their fingerprints; see `cut`."""
    return plan_stages(cut(stages_of(setting), until), setting)


def stopped_plan(setting: Setting) -> tuple[Planned, ...]:
    """What a run goes on with where its canary fails; up to there the two plans are the same."""
    return plan_stages(stopped_stages(setting), setting)


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
    """Stages, planned or not, up to a stage, named by its key or by its family (then up to the last of that family).

    Raises `UserError` for a name that is in no plan of this recipe.
    """
    if until is None:
        return tuple(plan)
    ends = [number for number, planned in enumerate(plan) if until in (planned.key, planned.family)]
    if not ends:
        names = list(dict.fromkeys(name for planned in plan for name in (planned.family, planned.key)))
        raise UserError(f"--until: found {until!r}, expected one of {', '.join(names)}{did_you_mean(until, names)}.")
    return tuple(plan[: ends[-1] + 1])

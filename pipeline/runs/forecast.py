"""Forecast a whole run before it starts: which stages it has, what they take, and what its gate can show.

forecast_run(stand_in(open_setting("llama70b-fp8kv", store=store))).seconds
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from quantmint.eval.gate.reach import Reach, reach
from quantmint.eval.report.numbers import size
from quantmint.pipeline.base.errors import QuantmintError, UserError, did_you_mean
from quantmint.pipeline.base.hardware import cautions, table
from quantmint.pipeline.quantize.engines.algorithms import algorithm
from quantmint.pipeline.quantize.model.outcomes import outcome_forecast
from quantmint.pipeline.recipe.load import validated
from quantmint.pipeline.recipe.schema import Recipe
from quantmint.pipeline.runs.planner import build_plan, foreseen, missing_stages
from quantmint.pipeline.runs.preflight import disk_needed, require_disk, require_room_to_publish, require_tokens
from quantmint.pipeline.runs.search import as_written, settled, stand_in, tried
from quantmint.pipeline.runs.timeline import further_tries, savings, stage_forecasts, stage_times
from quantmint.pipeline.runs.weights import WeightForecast, forecast_weights, machine_here, machine_of
from quantmint.pipeline.serving.host.detect import local_device
from quantmint.pipeline.serving.model.facts import schemes_of_experts
from quantmint.pipeline.serving.planning.target import ServingTarget, parse_target
from quantmint.pipeline.stages.bench import outlook, source_of
from quantmint.pipeline.stages.checks import as_asked
from quantmint.pipeline.stages.estimate import Estimate
from quantmint.pipeline.stages.gate import policy_of
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.sizes import Prediction, model_for, planned_shards, predict
from quantmint.pipeline.stages.source import config_folder, require_tokenizer
from quantmint.pipeline.stages.stage import Planned
from quantmint.pipeline.store.disk import free_bytes


@dataclass(frozen=True, slots=True)
class StageForecast:
    """The forecast of one stage: ``seconds``, None where unknown, and ``by``, the origin of that time.

    ``by`` is "cached" (0 s, the store has the entry), "seen" (as in an earlier run) or "reckoned" (by rates).
    """

    stage: str
    fingerprint: str
    cached: bool
    seconds: float | None
    by: str | None


@dataclass(frozen=True, slots=True)
class RunForecast:
    """The forecast of a run, on this machine ("here") or another one, for JSON and the terminal.

    ``seconds`` is the sum of all stages that are forecast, with the start of the process: a lower bound where
    ``not_predicted`` names stages. A search may make ``further_tries``; with all of them the run takes
    ``seconds_of_all_tries``. ``savings`` are settings and the seconds that each would save. ``disk_needed`` are bytes
    by purpose and ``disk_free`` the free bytes on the disk of ``where``. ``bench`` is `stages.bench.outlook`, empty
    where no throughput is measured.
    """

    setting: Setting
    stages: Sequence[StageForecast]
    machine: str
    seconds: float
    not_predicted: Sequence[str]
    further_tries: int
    seconds_of_all_tries: float
    savings: Sequence[tuple[str, float]]
    size: Prediction
    weights: WeightForecast
    disk_needed: Mapping[str, int]
    disk_free: int
    where: Path
    gate: Reach
    bench: Mapping[str, Any]
    cautions: Sequence[str]

    @property
    def recipe(self) -> Recipe:
        """The recipe that is run, with defaults filled in."""
        return self.setting.recipe

    def require_room(self) -> None:
        """Raise `UserError` where this machine's disks are too small for a run here."""
        if self.machine == "here":
            require_disk(self.disk_needed, self.disk_free, str(self.where))
            missing = [stage.stage for stage in self.stages if not stage.cached]
            require_room_to_publish(self.setting, self.size, missing)

    def to_json(self) -> dict[str, Any]:
        """Return the whole forecast as JSON values."""
        chosen, tries = self.setting.chosen, self.further_tries
        return {
            "recipe": self.recipe.name,
            **({} if chosen is None else {"auto": {"said": chosen.line, **chosen.to_json()}}),
            "source": self.setting.source.to_json(),
            "stages": [asdict(stage) for stage in self.stages],
            "machine": self.machine,
            "seconds": self.seconds,
            "not_predicted": list(self.not_predicted),
            **({"further_tries": tries, "seconds_of_all_tries": self.seconds_of_all_tries} if tries else {}),
            "savings": [{"setting": text, "seconds": seconds} for text, seconds in self.savings],
            "predicted": asdict(self.size),
            "costs": self.weights.to_json(),
            "disk": {"needed": dict(self.disk_needed), "free": self.disk_free, "where": str(self.where)},
            "gate": self.gate.to_json(),
            "bench": dict(self.bench) or None,
            "cautions": list(self.cautions),
        }


def forecast_run(
    setting: Setting, *, machine: str | None = None, config: Path | None = None, tries: bool = True
) -> RunForecast:
    """Forecast the run of a setting whose schemes are chosen (`runs.search.stand_in`); nothing is written.

    ``machine`` is the text of ``--for``, such as "mi300x:8" or "here" (None: the recipe's target, if that is another
    machine); ``config`` is a folder with the model's config.json for a source that is not here. Without ``tries`` a
    search's further tries are not counted. Raises `UserError` where no run could succeed.
    """
    recipe = setting.recipe
    if setting.source.folder is not None:
        require_tokenizer(setting.source.folder)
    plan = foreseen(build_plan(setting), setting)
    missing = missing_stages(plan, setting)
    require_tokens(setting, missing)
    model = model_for(setting, config or config_folder(setting.source))
    plans = planned_shards(*model, recipe)
    prediction = predict(*model, recipe, plans)
    elsewhere = machine_elsewhere(machine, recipe.target.hardware, recipe.target.gpus)
    rates = machine_here(setting.device) if elsewhere is None else machine_of(elsewhere)
    weights = forecast_weights(*model, recipe, rates, written=setting.written, plans=plans)
    estimate = Estimate(setting, prediction, weights.rates, weights.seconds, {}, None)
    bench, judged = _gate_forecast(setting, plan, estimate, here=elsewhere is None)
    expected = {name: task.expected for name, task in judged.tasks.items()}
    estimate = replace(estimate, expected=expected, bench=bench.get("seconds"))
    times = stage_times(plan, missing, setting, stage_forecasts(plan, estimate), here=elsewhere is None)
    seconds = {key: spent for key, (spent, _) in times.items()}
    total = sum(seconds.values()) + weights.rates.start
    verdicts = [verdict for _, verdict in tried(setting)] if tries else []
    count, further = further_tries(setting, plan, seconds, verdicts) if tries else (0, 0.0)
    needed, where = disk_needed(prediction, missing, setting, plan), setting.store.root.absolute()
    free = free_bytes(where)
    return RunForecast(
        setting=setting,
        stages=[
            StageForecast(step.key, step.fingerprint, step.key not in missing, *times.get(step.key, (None, None)))
            for step in plan
        ],
        machine="here" if elsewhere is None else str(elsewhere),
        seconds=total,
        not_predicted=[planned.key for planned in plan if planned.key not in seconds],
        further_tries=count,
        seconds_of_all_tries=total + further,
        savings=savings(seconds, setting),
        size=prediction,
        weights=weights,
        disk_needed=needed,
        disk_free=free,
        where=where,
        gate=judged,
        bench=bench,
        cautions=[
            *filter(None, [outcome_forecast(model[1].encoded, recipe.quantization.schemes)]),
            *_cautions(setting),
            *weights.cautions,
            *_too_small(needed, free, where, elsewhere),
        ],
    )


def _gate_forecast(
    setting: Setting, plan: Sequence[Planned], estimate: Estimate, *, here: bool
) -> tuple[Mapping[str, Any], Reach]:
    """Return the forecast of the bench stage, empty where there is none, and what the gate can show with it.

    ``here`` says that the run is on this machine, whose store may have launches to reuse.
    """
    bench: Mapping[str, Any] = {}
    for planned in plan:
        if planned.key == "bench":  # another machine's launches are not in this store
            bench = outlook(setting, estimate=estimate, source=source_of(planned) if here else None)
    evaluation = setting.recipe.evaluation
    judged = reach(
        setting.recipe.judged(as_asked(setting.suite, evaluation, setting.recipe.gate)),
        policy_of(setting),
        evaluation.looks,
        noise=bench.get("noise"),
        seen=bench.get("ratio"),
        reused=bench.get("reused", 0),
        at_once=setting.recipe.judged_at_once,
    )
    return bench, judged


def forecast_with(setting: Setting, sections: str) -> RunForecast | None:
    """Forecast the recipe's next run on this machine with ``sections`` (YAML) in the place of its own sections.

    None where it cannot be forecast; a run would raise the error.
    """
    written = as_written(setting).loaded
    data = written.recipe.model_dump(mode="json", by_alias=True) | yaml.safe_load(sections)
    try:
        loaded = validated(replace(written.positions, data=data), written.path)
        edited = replace(setting, loaded=replace(loaded, source_folder=written.source_folder), chosen=None)
        return forecast_run(stand_in(settled(edited)), machine="here")
    except QuantmintError:
        return None


def machine_elsewhere(text: str | None, hardware: str, gpus: int) -> ServingTarget | None:
    """Return the machine to forecast for, None for this one.

    ``text`` is the text of ``--for``; None stands for the recipe's target, ``gpus`` of ``hardware``, if that is another
    machine with known figures. Raises `UserError` for a named machine without figures.
    """
    if text is not None:
        return None if text == "here" else _machine_named(text)
    here = local_device("auto").hardware
    return None if hardware in ("cpu", here) or hardware not in _with_figures() else parse_target(f"{hardware}:{gpus}")


def _machine_named(text: str) -> ServingTarget:
    name, rows, planned = text.partition(":")[0].lower(), table(), _with_figures()
    if name not in planned:
        typed = f"{text!r}, which has no figures" if name in rows else repr(text)
        expected = ", ".join(("here", *planned))
        raise UserError(
            f"--for: found {typed}, expected {expected}{did_you_mean(name, ('here', *planned))}.",
            hint="As in --for mi300x:8.",
        )
    try:
        return parse_target(text)
    except UserError as error:
        nearest = f' (did you mean "{name}:{rows[name].gpus_per_node}"?)'
        raise UserError(f"--for: found {text!r}: {error.message}{nearest}.", hint=error.hint) from None


def _with_figures() -> list[str]:
    """Return the names of hardware with a known memory bandwidth, and of CPUs, for which forecasts can be made."""
    return [row.name for row in table().values() if row.bandwidth is not None or row.kind == "cpu"]


def _cautions(setting: Setting) -> list[str]:
    """Return cautions on the accuracy of the recipe's algorithm, and on its target's kernels."""
    quantization, target = setting.recipe.quantization, setting.recipe.target
    harm = algorithm(quantization.algorithm).caution(quantization.schemes)
    experts = schemes_of_experts(quantization, setting.config)
    served = cautions(
        target.hardware, quantization.schemes, quantization.kv_cache, quantization.format, expert_schemes=experts
    )
    return [*([] if harm is None else [harm]), *served]


def _too_small(needed: Mapping[str, int], free: int, where: Path, elsewhere: ServingTarget | None) -> list[str]:
    """Return a caution if this machine's disk would be too small, where the run is planned for another machine.

    ``needed`` are bytes by purpose, ``free`` the bytes free on the disk of ``where``.
    """
    total = sum(needed.values())
    if elsewhere is None or total <= free:
        return []
    return [f"{size(total)} are needed where it runs; on this machine {where} has {size(free)}"]

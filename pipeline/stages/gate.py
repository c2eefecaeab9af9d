"""gate: the verdict over both sides' measurements, recorded so that anyone can judge again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantmint.eval import record
from quantmint.eval.gate import Policy, judge
from quantmint.eval.gate.judgement import claims
from quantmint.eval.measurements import Both, Measurements, Server, Side, StructureCheck
from quantmint.eval.report.history import widened
from quantmint.eval.samples import SampleSet
from quantmint.eval.verdict import Verdict
from quantmint.pipeline.base import hardware
from quantmint.pipeline.base.schemes import scheme
from quantmint.pipeline.quantize.digest import folder_digest
from quantmint.pipeline.quantize.formats.checkpoint import open_checkpoint, read_json
from quantmint.pipeline.quantize.model.encodings import input_rounding
from quantmint.pipeline.recipe.schema import Recipe
from quantmint.pipeline.serving.reference.launch import shown_command
from quantmint.pipeline.serving.sglang import shown_command as shown_sglang
from quantmint.pipeline.stages.acceptance import read_pairs
from quantmint.pipeline.stages.bench import read_launches
from quantmint.pipeline.stages.canary import read_comparison
from quantmint.pipeline.stages.chat import families, measured_tasks, read_again
from quantmint.pipeline.stages.estimate import Estimate
from quantmint.pipeline.stages.evaluate import guessing, read_samples
from quantmint.pipeline.stages.history import Model, earlier_verdicts
from quantmint.pipeline.stages.inspect import INSPECTION, reasons_of
from quantmint.pipeline.stages.kl import read_divergences
from quantmint.pipeline.stages.layout import read_layout
from quantmint.pipeline.stages.long_context import read_divergence
from quantmint.pipeline.stages.quantize import checkpoint_files
from quantmint.pipeline.stages.serve import LAUNCH, SIDES
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.source import model_folder
from quantmint.pipeline.stages.stage import Job, Output, Stage
from quantmint.pipeline.store.entries import Entry
from quantmint.pipeline.store.toolchain import Environment, recorded_environment

GATE = record.NAME


@dataclass(frozen=True)
class GateStage(Stage):
    """Judge the measurements of a run, beside earlier verdicts on the model, which change no verdict.

    ``stopped`` is True in a run that the canary stopped, where no task and no throughput was measured.
    """

    stopped: bool = False
    family = "gate"
    version = 3
    needs = ("source", "quantize", "inspect")
    evidence = True

    def when_stopped(self) -> GateStage:
        """Return the gate of a run that the canary stopped."""
        return GateStage(stopped=True)

    def reads(self, stage: Stage) -> bool:
        """Return whether ``stage`` served or measured a side."""
        return stage.asks_server

    def seconds(self, estimate: Estimate) -> float:
        """Return the seconds of the statistics, a constant."""
        return 0.5

    def verdict(self, entry: Entry) -> Verdict:
        """Return the verdict of the run."""
        return Verdict(str(entry.record.result["verdict"]))

    def settings(self, setting: Setting) -> Mapping[str, object]:
        """Return the recipe's promises, task by task, and the guides' claims for such a checkpoint.

        A source that is quantized itself counts too: a gain over it is no fault.
        """
        rounding = input_rounding(setting.config)
        return {
            **({} if rounding is None else {"baseline_rounding": rounding}),
            "policy": policy_of(setting).to_json(),
            "claims": _claims(setting),
            "tasks": [task.task for _, task in measured_tasks(setting)],
        }

    def run(self, job: Job) -> Output:
        """Judge the measurements, and record them with the verdict."""
        samples, control, chance = ({}, {}, {}) if self.stopped else _answers(job)
        model = Model(
            artefact=checkpoint_digest(job.inputs["quantize"]),
            source=job.inputs["source"].fingerprint,
            schemes=job.setting.recipe.quantization.schemes,
            kinds={task.task: task.kind for _, task in measured_tasks(job.setting)},
        )
        measurements = Measurements(
            artefact=model.artefact,
            structure=StructureCheck(
                Verdict(str(job.inputs["inspect"].record.result["verdict"])), reasons_of(job.inputs["inspect"])
            ),
            baseline=_server(job, "baseline"),
            candidate=_server(job, "candidate"),
            samples=samples,
            control=control,
            launches=read_launches(job.inputs["bench"].path) if "bench" in job.inputs else (),
            weights=(
                open_checkpoint(model_folder(job.inputs["source"])).nbytes,
                sum(read_json(job.inputs["inspect"].file(INSPECTION))["bytes_by_part"].values()),
            ),
            claims=_claims(job.setting),
            chance=chance,
            stopped="canary" if self.stopped else None,
            history=earlier_verdicts(job, model),
            baseline_rounding=input_rounding(job.setting.config),
            **_endpoints(job.inputs),
        )
        report = judge(measurements, policy_of(job.setting))
        record.write(job.path, measurements, report)
        if (sentence := widened(report)) is not None:
            job.progress.warn(sentence)
        return Output(
            result={
                "verdict": report.verdict.value,
                "artefact": report.artefact,
                "reasons": list(report.reasons),
                "schemes": sorted(model.schemes),
            },
            summary=f"{report.verdict.value}: {next(iter(report.reasons), 'nothing was judged')}",
        )


def _answers(job: Job) -> tuple[dict[str, Both], dict[str, SampleSet], dict[str, float]]:
    """Return, by task, both sides' answers, the baseline's repeated ones, and the score of guessing, where known."""
    samples: dict[str, Both] = {}
    control: dict[str, SampleSet] = {}
    chance: dict[str, float] = {}
    for family, task in measured_tasks(job.setting):
        baseline, candidate = (read_samples(job.inputs[f"{family}-{side}"].path, task) for side in SIDES)
        samples[task.task] = (baseline, candidate)
        if family != "evaluate":
            if (again := read_again(job.inputs[f"{family}-baseline"].path, task)) is not None:
                control[task.task] = again
            continue
        guessed = guessing(job.inputs["evaluate-baseline"].path, task)
        if guessed is not None:
            chance[task.task] = guessed
        if "control" in job.inputs and task.kind == "score":
            control[task.task] = read_samples(job.inputs["control"].path, task)
    return samples, control, chance


def _endpoints(inputs: Mapping[str, Entry]) -> dict[str, Any]:
    """Return the measurements besides answers and launches that the run has, by their names in `Measurements`."""
    readers: dict[str, tuple[str, Callable[[Path], Any]]] = {
        "canary": ("canary-candidate", read_comparison),
        "long": ("long-candidate", read_divergence),
        "kl": ("kl-candidate", read_divergences),
        "layout": ("layout", read_layout),
    }
    measured = {name: read(inputs[key].path) for name, (key, read) in readers.items() if key in inputs}
    return measured | ({"acceptance": read_pairs(inputs)} if "acceptance-candidate" in inputs else {})


def policy_of(setting: Setting) -> Policy:
    """Return the recipe's gate as a policy for its suite, target and schemes."""
    recipe = setting.recipe
    suite, target = recipe.judged(setting.suite), recipe.target
    return recipe.gate.policy(suite, target.hardware, recipe.quantization.schemes, target.rounding)


def checkpoint_digest(entry: Entry) -> str:
    """Return the digest of a quantize entry's checkpoint, from the names, sizes and SHA-256 of its files."""
    return folder_digest({name: (fact.size, fact.sha256) for name, fact in checkpoint_files(entry).items()})


def _claims(setting: Setting) -> dict[str, float]:
    quantization = setting.recipe.quantization
    return claims(weights=scheme(quantization.scheme).weight.dtype, kv_cache=quantization.kv_cache)


def _server(job: Job, side: Side) -> Server:
    """Return the facts of the served side from its launch record, with all log lines that void a measurement.

    The lines come from serving and, where tasks were asked, from the evaluation.
    """
    launch = read_json(job.inputs[f"serve-{side}"].file(LAUNCH))
    keys = [f"serve-{side}", *(f"{family}-{side}" for family in families(job.setting))]
    entries = [job.inputs[key] for key in keys if key in job.inputs]
    recorded = [entry.record.result["faults"] for entry in entries]
    faults = dict.fromkeys(str(line) for lines in recorded if isinstance(lines, list) for line in lines)
    plan = launch["plan"]
    return Server(
        version=launch["version"],
        device=launch["device"]["name"],
        argv=shown_sglang(shown_command(plan["argv"])),
        env=plan["env"],
        image=launch.get("image"),  # earlier versions did not know it
        faults=tuple(faults),
        runtime=launch["runtime"],
        hardware=launch["device"]["hardware"],
        kv_cache_dtype=launch["kv_cache_dtype"],
        template=launch["template"],
        tokenizer=launch["tokenizer"],
        mx_scales=served_rounding(job.setting.recipe, launch, recorded_environment(job.inputs[f"serve-{side}"])),
    )


def served_rounding(recipe: Recipe, launch: Mapping[str, Any], environment: Environment | None) -> str | None:
    """Return how the served side rounded MX scales; None where the recipe knows no rounding, or it is the metal's own.

    ``launch`` is what the serve stage recorded, ``environment`` the packages of its server (None: not recorded). vLLM
    on hardware with one way to round them has that. On hardware with several it is the target's kernels that run: all
    of them round to even where the server's AITER is older than those that round up.
    """
    if recipe.target.rounding is None:
        return None
    if recipe.evaluation.runtime == "reference":
        return str(launch.get("mx_scales", "even"))
    row = hardware.table().get(launch["device"]["hardware"])
    if row is None or len(row.mx_scales) == 1:
        return None if row is None else row.mx_scales[0]
    package = None if environment is None else environment.distributions.get("amd-aiter")
    rounding = None if package is None else hardware.mx_scales_by_aiter(package.version)
    return rounding if rounding == "even" else None

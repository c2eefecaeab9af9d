"""report: write one page over everything that a run measured, and the same for model cards, CI systems and programs."""

from __future__ import annotations

import gzip
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from quantmint.eval import prompts, record
from quantmint.eval.gate import GateReport
from quantmint.eval.measurements import Measurements, Server
from quantmint.eval.report import flips
from quantmint.eval.report.model import CARD, DATA, JUNIT, PAGE, Report, ServedSide, ShownStage, TaskFlips
from quantmint.eval.verdict import Verdict
from quantmint.pipeline import __version__
from quantmint.pipeline.base import hardware
from quantmint.pipeline.base.machine import versions
from quantmint.pipeline.publish.addresses import serving_name
from quantmint.pipeline.quantize.formats.checkpoint import Checkpoint, open_checkpoint, read_json
from quantmint.pipeline.quantize.inspection.inspect import kv_scales, layer_errors, sizes
from quantmint.pipeline.quantize.model.encodings import source_encoding
from quantmint.pipeline.quantize.model.outcomes import outcome_note
from quantmint.pipeline.quantize.model.selection import select
from quantmint.pipeline.recipe.quantization import Quantization
from quantmint.pipeline.stages.advice import advise
from quantmint.pipeline.stages.chat import measured_tasks
from quantmint.pipeline.stages.estimate import Estimate
from quantmint.pipeline.stages.evaluate import ANSWERS
from quantmint.pipeline.stages.gate import GATE
from quantmint.pipeline.stages.inspect import INSPECTION
from quantmint.pipeline.stages.sensitivity import KEY, read_groups
from quantmint.pipeline.stages.serve import LAUNCH, SIDES
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.source import model_folder, read_source
from quantmint.pipeline.stages.stage import Job, Output, Stage
from quantmint.pipeline.store.entries import Entry
from quantmint.pipeline.store.gc import list_runs

FILES = {"html": PAGE, "markdown": CARD, "junit": JUNIT, "json": DATA}
"""The file of each form."""


@dataclass(frozen=True)
class ReportStage(Stage):
    """Write the report of a run, whatever its verdict; ``stopped`` is True in a run that the canary stopped."""

    stopped: bool = False
    family = "report"
    version = 2
    evidence = True

    def when_stopped(self) -> ReportStage:
        """Return the report of a run that the canary stopped."""
        return ReportStage(stopped=True)

    def reads(self, stage: Stage) -> bool:
        """Return True for every stage: the page shows all stages before it."""
        return True

    def imports(self, setting: Setting) -> Iterable[tuple[str, str]]:
        """Return (extra, module) pairs of the libraries that draw the page."""
        return (("report", "jinja2"), ("report", "matplotlib"))

    def seconds(self, estimate: Estimate) -> float:
        """Return the seconds of drawing the page, a constant."""
        return 2.0

    def settings(self, setting: Setting) -> Mapping[str, object]:
        """Return what the page prints of the recipe: its resolved text, its name and its published name."""
        published = serving_name(setting.recipe)
        return {"recipe": setting.loaded.text_proven, "name": setting.recipe.name, "published": published}

    def tools(self, setting: Setting) -> Mapping[str, str]:
        """Return the versions of the libraries that draw the page, and of quantmint."""
        return {**versions("matplotlib", "jinja2"), "quantmint": __version__}

    def run(self, job: Job) -> Output:
        """Gather the report's data from the entries, and write data and page."""
        from quantmint.eval.report.page import write

        size = write(job.path, gather(job)).stat().st_size
        return Output(result={"page": PAGE}, summary=f"{PAGE}, {size / 1e3:,.0f} kB")


def gather(job: Job) -> Report:
    """Return the data of the page from the entries of a run."""
    setting, inputs, recipe = job.setting, job.inputs, job.setting.recipe
    measured, gate = record.read(inputs["gate"].file(GATE))
    inspection = read_json(inputs["inspect"].file(INSPECTION))
    source, checkpoint = (open_checkpoint(model_folder(inputs[key])) for key in ("source", "quantize"))
    model = setting.loaded.source_name
    published, quantization = serving_name(recipe), recipe.quantization
    cache = " with an FP8 KV cache" if quantization.kv_cache == "fp8" else ""
    # The gate's record lies beside the checkpoint, or in the store where nothing was published.
    evidence = published if gate.verdict is Verdict.PASS else f"store/gate/{inputs['gate'].fingerprint}"
    tools = {name: version for entry in inputs.values() for name, version in entry.record.tools.items()}
    return Report(
        name=recipe.name,
        model=model,
        scheme=f"{_scheme(job)}{cache}, {quantization.format}",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        notes=[
            *_notes(measured.candidate),
            *filter(
                None, [_outcome(source, inspection["layers"]), compensation_note(inputs["quantize"], quantization)]
            ),
            *_choice(job, gate, measured.stopped),
        ],
        stopped=measured.stopped,
        gate=gate.to_json(),
        size=sizes(source, checkpoint),
        kv_tokens=_kv_tokens(measured, inputs),
        layers=layer_errors(inspection["layers"]),
        kv_scales=kv_scales(checkpoint, inspection["kv_scales"]),
        flips=_flips(setting, measured, inputs),
        prompts=_prompts(setting, gate),
        launches=[launch.to_json() for launch in measured.launches],
        stages=_stages(setting, inputs),
        servers=[
            _server("baseline", measured.baseline, model),
            _server("candidate", measured.candidate, published),
        ],
        recipe=setting.loaded.text_proven,
        reproduce=[f"quantmint run {recipe.name}", f"quantmint gate {evidence}"],
        versions={"quantmint": __version__, **dict(sorted(tools.items()))},
        digests={"source": " ".join(map(str, setting.source.to_json().values()))},
    )


def _outcome(source: Checkpoint, layers: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a sentence on a source that is quantized already, from the ``layers`` of an inspection."""
    encoded = source_encoding(source.config, source.tensors).weights
    return outcome_note(encoded, [layer["sqnr_db"] for layer in layers])


def compensation_note(quantize: Entry, quantization: Quantization) -> str | None:
    """Return a sentence on how many modules compensate, None where none was compared with a reference model."""
    facts: Any = quantize.record.result.get(quantization.algorithm) or {}
    if "compared" not in facts:
        return None
    return (
        f"Of {facts['compared']} modules that were compared with the 16-bit model on calibration texts, "
        f"{facts['plain_targets']} kept their plain target: tokens that were held out gained nothing by compensation."
    )


def _notes(server: Server) -> list[str]:
    """Return notes on how runtime and hardware limit what the figures show; empty for vLLM on an AMD GPU."""
    row = hardware.table().get(server.hardware)
    if server.engine.startswith("sglang"):
        return [
            f"Both sides were answered by SGLang ({server.engine}) at endpoints that quantmint did not start: that "
            "each serves its checkpoint is shown by its folder where it is on this machine, else by its name alone. "
            "Throughput was not measured."
        ]
    if not server.engine.startswith("vllm"):
        return [
            f"Both sides were answered by the reference runtime ({server.runtime}), not by vLLM: the checkpoint's "
            "numbers are proven, the kernels that will serve it are not, and its speed was not measured."
        ]
    if row is not None and row.kind == "cpu":
        return [
            "Both sides were served on a CPU. Accuracy carries over to other hardware as far as the kernels round "
            "alike; throughput and latency say nothing of AMD Instinct."
        ]
    if row is not None and row.kind == "cuda":
        return ["Both sides were served on an NVIDIA GPU: the format and the gate are proven, AMD's kernels are not."]
    return []


def _choice(job: Job, gate: GateReport, stopped: str | None) -> list[str]:
    """Return notes on the chosen schemes and the search, and the advice on the verdict; its block has several lines."""
    chosen = job.setting.chosen
    notes = [] if chosen is None or chosen.point is None else [f"{chosen.line}."]
    if (search := job.setting.written.search) is not None:
        confidence, remaining = job.setting.written.gate.accuracy.confidence, job.setting.written.confidence
        notes.append(
            f"A search tried up to {search.tries} checkpoints until one passed: each was judged at a confidence of "
            f"{remaining:.4g}, so that all of them together err as seldom as one checkpoint at {confidence:.4g}."
        )
    groups = read_groups(job.inputs[KEY]) if KEY in job.inputs else None
    advice = advise(job.setting, groups, verdict=gate.verdict, stopped=stopped)
    block = [advice.paste] if advice.paste else []
    return [*notes, *(f"{line[0].upper()}{line[1:]}." for line in advice.lines), *block]


def _scheme(job: Job) -> str:
    """Return the scheme; for a mixed checkpoint all of them with shares of the quantized weights, the largest first."""
    quantization = job.setting.recipe.quantization
    if len(quantization.schemes) == 1:
        return quantization.scheme
    _, structure = read_source(job)
    weights: Counter[str] = Counter()
    for module, name in select(structure, quantization).schemes.items():
        weights[name] += math.prod(structure.quantizable[module])
    return " + ".join(f"{name} ({count / weights.total():.0%})" for name, count in weights.most_common())


def _kv_tokens(measured: Measurements, inputs: Mapping[str, Entry]) -> dict[str, int]:
    tokens_by_side: dict[str, int] = {}
    for side in SIDES:
        log = read_json(inputs[f"serve-{side}"].file(LAUNCH)).get("log") or {}
        if tokens := measured.kv_tokens.get(side) or log.get("kv_tokens"):
            tokens_by_side[side] = round(tokens)
    return tokens_by_side


def _flips(setting: Setting, measured: Measurements, inputs: Mapping[str, Entry]) -> list[TaskFlips]:
    flips_by_task: list[TaskFlips] = []
    for family, task in measured_tasks(setting):
        if task.task in measured.samples:
            before, after = (_answers(inputs[f"{family}-{side}"], task.task) for side in SIDES)
            baseline, candidate = measured.samples[task.task]
            flips_by_task.append(flips.flips(baseline, candidate, before, after))
    return flips_by_task


def _answers(entry: Entry, task: str) -> flips.Answers:
    path = entry.path / ANSWERS / f"{task}.jsonl.gz"
    if not path.is_file():
        return {}
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        return flips.by_item(json.loads(line) for line in stream)


def _prompts(setting: Setting, gate: GateReport) -> dict[str, str]:
    named = {
        name
        for part in (gate.canary, gate.kl)
        if part is not None
        for name in (*(text for text, _ in part.worst), *part.unanswered)
    }
    if not named:
        return {}
    return {prompt.name: prompt.text for prompt in prompts.load(setting.suite.canary) if prompt.name in named}


def _stages(setting: Setting, inputs: Mapping[str, Entry]) -> list[ShownStage]:
    """Return the stages by start time; those that started before this run are marked as cached."""
    runs = [run for run in list_runs(setting.store.root) if run.recipe == setting.recipe.name and run.finished is None]
    began = runs[0].started if runs else ""
    shown = [
        ShownStage(
            name=name,
            started=entry.record.started,
            seconds=entry.record.duration_s,
            cached=entry.record.started < began,
            fingerprint=entry.fingerprint,
        )
        for name, entry in inputs.items()
    ]
    return sorted(shown, key=lambda stage: stage["started"])


def _server(side: str, server: Server, model: str) -> ServedSide:
    argv: Sequence[str] = [model if word == "MODEL" else word for word in server.argv]
    return ServedSide(
        side=side,
        runtime=server.runtime,
        version=server.version,
        hardware=server.hardware,
        device=server.device,
        image=server.image,
        env=dict(server.env),
        argv=list(argv),
    )

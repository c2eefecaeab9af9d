"""report: one page and one JSON file over everything that a run found."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from eval.report.model import LaunchPlan, LayerError, Report, Size, Stage
from pipeline import __version__
from pipeline.formats.checkpoint import Checkpoint, open_checkpoint
from pipeline.serving import hardware
from pipeline.stage import Job, Output, Setting, versions
from pipeline.stages.gate import GATE
from pipeline.stages.inspect import INSPECTION
from pipeline.stages.serve import LAUNCH, SIDES, measured_inputs
from pipeline.stages.source import model_folder
from pipeline.store.entries import Entry

PAGE, DATA = "report.html", "report.json"
_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class ReportStage:
    """Written for every verdict, not only for a PASS."""

    key: str = "report"
    family: str = "report"
    version: int = 1

    def inputs(self, setting: Setting) -> Mapping[str, str]:
        """Everything that is shown."""
        return {"source": "source", "quantize": "quantize", "inspect": "inspect", **measured_inputs(), "gate": "gate"}

    def settings(self, setting: Setting) -> Mapping[str, object]:
        """The recipe, which is printed."""
        return {"recipe": setting.loaded.text_resolved, "name": setting.recipe.name}

    def tools(self, setting: Setting) -> Mapping[str, str]:
        """What draws the page, and what it says of versions."""
        return {**versions("matplotlib", "jinja2"), "quantmint": __version__}

    def run(self, job: Job) -> Output:
        """Gather, write the data, draw the page."""
        from eval.report.page import write

        size = write(job.path, gather(job)).stat().st_size
        return Output(result={"page": PAGE}, summary=f"{PAGE}, {size / 1e3:,.0f} kB")

    def intact(self, entry: Entry, setting: Setting) -> bool:
        """Nothing lies outside the store."""
        return True


def gather(job: Job) -> Report:
    """Collect what the page shows."""
    setting, inputs = job.setting, job.inputs
    gate = json.loads(inputs["gate"].file(GATE).read_text(encoding="utf-8"))
    inspection = json.loads(inputs["inspect"].file(INSPECTION).read_text(encoding="utf-8"))
    source = open_checkpoint(model_folder(inputs["source"]))
    recipe = setting.recipe
    return Report(
        name=recipe.name,
        model=recipe.source.repo or f"{recipe.source.folder}",
        scheme=_scheme(setting),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        notes=_notes(setting),
        gate={key: value for key, value in gate.items() if key != "measurements"},
        size=_size(source, inspection),
        layers=_layers(inspection),
        stages=[_stage(name, entry) for name, entry in inputs.items()],
        servers=[_server(inputs[f"serve-{side}"], side, recipe.target.hardware) for side in SIDES],
        recipe=setting.loaded.text_resolved,
        reproduce=[f"quantmint run {recipe.name}", "quantmint judge gate.json"],
        versions={"quantmint": __version__, **_tools(inputs)},
        digests={
            "source": " ".join(map(str, setting.source.to_json().values())),
            "checkpoint": str(gate["artefact"]),
            **{f"stage {name}": entry.fingerprint for name, entry in inputs.items()},
        },
    )


def _scheme(setting: Setting) -> str:
    quantization = setting.recipe.quantization
    cache = " with an FP8 KV cache" if quantization.kv_cache == "fp8" else ""
    return f"{quantization.scheme}{cache}, {quantization.format}"


def _notes(setting: Setting) -> list[str]:
    kind = hardware.hardware(setting.recipe.target.hardware).kind
    if kind == "cpu":
        return [
            "Both sides were served on a CPU. Accuracy carries over to other hardware as far as the kernels round "
            "alike; throughput and latency say nothing of AMD Instinct."
        ]
    if kind == "cuda":
        return ["Both sides were served on an NVIDIA GPU: the format and the gate are proven, AMD's kernels are not."]
    return []


def _size(source: Checkpoint, inspection: Mapping[str, Any]) -> Size:
    parts: Mapping[str, int] = inspection["bytes_by_part"]
    baseline_linear = source.nbytes - parts["16 bit"]
    return Size(
        baseline_bytes=source.nbytes,
        candidate_bytes=sum(parts.values()),
        parts=[
            {
                "name": "linear weights",
                "baseline_bytes": baseline_linear,
                "candidate_bytes": parts["quantized weights"],
            },
            {"name": "scales", "baseline_bytes": 0, "candidate_bytes": parts["scales"]},
            {"name": "kept in 16 bit", "baseline_bytes": parts["16 bit"], "candidate_bytes": parts["16 bit"]},
        ],
    )


def _layers(inspection: Mapping[str, Any]) -> list[LayerError]:
    found: list[LayerError] = []
    for layer in inspection["layers"]:
        number = _LAYER.search(layer["module"])
        if layer["sqnr_db"] is not None:
            kind = layer["module"].rpartition(".")[2]
            found.append({"layer": int(number[1]) if number else 0, "kind": kind, "sqnr_db": layer["sqnr_db"]})
    return found


def _stage(name: str, entry: Entry) -> Stage:
    return Stage(name=name, seconds=entry.record.duration_s, cached=False, fingerprint=entry.fingerprint)


def _server(entry: Entry, side: str, device: str) -> LaunchPlan:
    plan = json.loads(entry.file(LAUNCH).read_text(encoding="utf-8"))["plan"]
    version = entry.record.tools["vllm"]
    return LaunchPlan(side=side, version=version, device=device, image=None, env=plan["env"], argv=plan["argv"])


def _tools(inputs: Mapping[str, Entry]) -> dict[str, str]:
    tools = {name: version for entry in inputs.values() for name, version in entry.record.tools.items()}
    return dict(sorted(tools.items()))

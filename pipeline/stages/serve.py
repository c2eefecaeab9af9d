"""serve: one side on vLLM, from a launch plan; what its start says about the checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pipeline.stage import Job, Output, Setting, write_json
from pipeline.stages.servers import keep_log
from pipeline.stages.source import model_folder
from pipeline.store.entries import Entry

if TYPE_CHECKING:
    from pipeline.serving.logscan import LogScan
    from pipeline.serving.plan import LaunchPlan

Side = Literal["candidate", "baseline"]
SIDES: tuple[Side, ...] = ("candidate", "baseline")
LAUNCH = "launch.json"
SERVER_LOG = "server.log"
NEWEST_READ = "0.33.0"
"""The newest vLLM that the table of knobs was written against: what is planned for where none is installed."""


@dataclass(frozen=True, slots=True)
class ServeStage:
    """Starts the server; the stages after it ask the same one as long as the run goes on."""

    side: Side
    family: str = "serve"
    version: int = 1

    @property
    def key(self) -> str:
        """One for each side."""
        return f"serve-{self.side}"

    def inputs(self, setting: Setting) -> Mapping[str, str]:
        """The candidate comes from `quantize`, the baseline from `source`."""
        return {"model": model_key(self.side)}

    def settings(self, setting: Setting) -> Mapping[str, object]:
        """The launch, without where the model lies."""
        launch = launch_plan(setting, self.side, Path("MODEL"))
        return {"launch": launch.canonical(), "hardware": setting.recipe.target.hardware}

    def tools(self, setting: Setting) -> Mapping[str, str]:
        """vLLM's version."""
        return vllm_version(setting)

    def run(self, job: Job) -> Output:
        """Start the server and keep what its log says."""
        plan = launch_plan(job.setting, self.side, model_folder(job.inputs["model"]))
        server = job.servers.get(self.side, plan)
        scan = keep_log(server, job.path / SERVER_LOG)
        for finding in scan.findings:
            job.progress.warn(f"{finding.why}: {finding.line}")
        launch = launch_plan(job.setting, self.side, Path("MODEL")).to_json()
        write_json(job.path / LAUNCH, {"plan": launch, "log": _plain(scan)})
        tokens = f", room for {scan.kv_tokens:,} tokens of KV cache" if scan.kv_tokens is not None else ""
        return Output(
            result={"faults": faults(scan), "started_seconds": round(server.started_seconds, 1)},
            summary=f"ready after {server.started_seconds:.0f} s{tokens}",
        )

    def intact(self, entry: Entry, setting: Setting) -> bool:
        """A server that has stopped is started again when it is needed."""
        return True


def faults(scan: LogScan) -> list[str]:
    """The lines of a server's log that void its measurements, each with what it means."""
    return [f"{finding.why}: {finding.line}" for finding in scan.invalid]


def _plain(scan: LogScan) -> dict[str, object]:
    return {**asdict(scan), "findings": [finding._asdict() for finding in scan.findings]}


def measured_inputs() -> dict[str, str]:
    """What was measured on both sides, as the inputs of a stage that looks at all of it."""
    keys = [f"{kind}-{side}" for side in SIDES for kind in ("serve", "evaluate", "bench")]
    return dict(zip(keys, keys, strict=True))


def model_key(side: Side) -> str:
    """The stage whose entry holds a side's model."""
    return "quantize" if side == "candidate" else "source"


def launch_plan(setting: Setting, side: Side, model: Path) -> LaunchPlan:
    """The launch of a side: the same flags for both, but for the KV cache that belongs to the checkpoint."""
    from pipeline.serving.plan import plan_launch

    recipe = setting.recipe
    quantized = side == "candidate" and recipe.quantization.kv_cache == "fp8"
    return plan_launch(
        model,
        config=setting.config,
        hardware=recipe.target.hardware,
        gpus=recipe.target.gpus,
        max_model_len=recipe.target.max_model_len,
        kv_cache_dtype="fp8" if quantized else "auto",
        concurrency=max(recipe.evaluation.concurrency, *(cell.concurrency for cell in setting.workload.cells)),
        vllm_version=NEWEST_READ if setting.vllm is None else setting.vllm.version,
        cpu_threads=os.cpu_count() or 1,
        trust_remote_code=recipe.trust_remote_code,
    )


def vllm_version(setting: Setting) -> dict[str, str]:
    """The serving environment's version, "absent" where there is none."""
    return {"vllm": "absent" if setting.vllm is None else setting.vllm.version}

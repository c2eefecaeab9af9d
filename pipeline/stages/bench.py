"""bench: vLLM's own load generator against one side's server, cell by cell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from eval import bench
from eval.errors import MeasurementError
from eval.workloads import Cell
from pipeline.errors import InvalidMeasurementError, StageError
from pipeline.stage import Job, Output, Setting
from pipeline.stages.commands import run_logged
from pipeline.stages.serve import Side, launch_plan, model_key, vllm_version
from pipeline.stages.source import model_folder
from pipeline.store.entries import Entry


@dataclass(frozen=True, slots=True)
class BenchStage:
    """One launch a side; the same seed gives both sides the same prompts."""

    side: Side
    family: str = "bench"
    version: int = 1

    @property
    def key(self) -> str:
        """One for each side."""
        return f"bench-{self.side}"

    def inputs(self, setting: Setting) -> Mapping[str, str]:
        """The server, and the model for its tokenizer."""
        return {"serve": f"serve-{self.side}", "model": model_key(self.side)}

    def settings(self, setting: Setting) -> Mapping[str, object]:
        """The cells."""
        return {"cells": [asdict(cell) for cell in setting.workload.cells]}

    def tools(self, setting: Setting) -> Mapping[str, str]:
        """vLLM is both the server and the client."""
        return vllm_version(setting)

    def run(self, job: Job) -> Output:
        """Measure each cell, keep each result."""
        folder = model_folder(job.inputs["model"])
        server = job.servers.get(self.side, launch_plan(job.setting, self.side, folder))
        cells = job.setting.workload.cells
        assert job.setting.vllm is not None  # noqa: S101 - a server runs, so there is one
        results: dict[str, float] = {}
        with job.progress.bar(len(cells), "cells") as advance:
            for cell in cells:
                path, log = result_file(job.path, cell), job.path / f"{cell.name}.log"
                path.unlink(missing_ok=True)
                argv = bench.command(
                    job.setting.vllm.executable,
                    cell,
                    base_url=server.base_url,
                    model=folder,
                    served_model_name=server.model_name,
                    result=path,
                )
                try:
                    run_logged(
                        argv,
                        log,
                        what=f"vllm bench serve on {cell.name}",
                        env=CLIENT_ENV | server.client_environment(),
                    )
                except StageError:
                    server.get("/health")
                    raise
                try:
                    results[cell.name] = bench.read(path, cell, log=log).output_throughput
                except MeasurementError as error:
                    raise InvalidMeasurementError(f"bench {self.side}: {error}") from error
                advance(1)
        return Output(
            result={"output_tokens_per_second": results},
            summary=", ".join(f"{name} {value:,.0f} tok/s" for name, value in results.items()),
        )

    def intact(self, entry: Entry, setting: Setting) -> bool:
        """Nothing lies outside the store."""
        return True


CLIENT_ENV = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}
"""The variables of `vllm bench serve`: no network, and output that is seen at once."""


def result_file(folder: Path, cell: Cell) -> Path:
    """Where the JSON of a cell lies."""
    return folder / f"{cell.name}.json"

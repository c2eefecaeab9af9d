"""One cell of a workload against a server that runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from eval import load_generator
from eval.bench import CellResult
from eval.workloads import Cell
from pipeline.processes import run_logged

if TYPE_CHECKING:
    from pipeline.serving.environment import VllmEnvironment
    from pipeline.serving.running.server import Server

CLIENT_ENV = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}
"""The variables of `vllm bench serve`: no network, and output that is seen at once."""


def result_file(folder: Path, cell: Cell) -> Path:
    """Where the JSON of a cell lies."""
    return folder / f"{cell.name}.json"


def run_cell(
    vllm: VllmEnvironment,
    cell: Cell,
    server: Server,
    *,
    model: Path,
    folder: Path,
    log: Path,
    seed: int = 0,
    gpus: int = 1,
    watch: Callable[[str], None] = lambda _: None,
    started: Callable[[int], None] = lambda _: None,
) -> CellResult:
    """Measure a cell with the tokenizer in ``model``; its JSON stays in ``folder``, what the client says in ``log``.

    ``watch`` and ``started`` are those of `run_logged`. Raises `StageError` where the client fails, and
    `MeasurementError` where it lost requests or where this version of vLLM cannot send such a load.
    """

    def send(load: Cell, path: Path) -> None:
        path.unlink(missing_ok=True)
        argv = load_generator.command(
            vllm.executable,
            load,
            version=vllm.version,
            base_url=server.base_url,
            model=model,
            served_model_name=server.model_name,
            result=path,
            seed=seed,
        )
        env = CLIENT_ENV | server.client_environment()
        run_logged(argv, log, what=f"vllm bench serve on {cell.name}", env=env, watch=watch, started=started)

    before = load_generator.warm_up(cell, vllm.version)
    if before is not None:
        path = folder / f"{cell.name}.warm-up.json"
        send(before, path)
        path.unlink(missing_ok=True)
    send(cell, result_file(folder, cell))
    return load_generator.read(result_file(folder, cell), cell, gpus=gpus, log=log)

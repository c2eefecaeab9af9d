"""Measure one cell of a workload against a running server, with vLLM's own load generator."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from quantmint.eval import load_generator
from quantmint.eval.errors import MeasurementError
from quantmint.eval.measurements import CellResult
from quantmint.eval.workloads import Cell
from quantmint.pipeline.base.processes import run_logged
from quantmint.pipeline.serving.environment import VllmEnvironment
from quantmint.pipeline.serving.running.server import RunningServer

CLIENT_ENV = {
    **{"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"},
    "OPENAI_API_KEY": "unused",
}
"""The variables of `vllm bench serve`: no network, and unbuffered output, which `LoadWatch` reads."""
_ANSWER_TIMEOUT_S = 3600.0
_MINIMUM_TEXT = 0.05  # characters a token; answers below it repeat a token that has no text


@dataclass(frozen=True, slots=True)
class LoadClient:
    """`vllm bench serve` against one server.

    ``model`` is the checkpoint's folder, ``gpus`` the server's number of GPUs.
    """

    vllm: VllmEnvironment
    server: RunningServer
    model: Path
    gpus: int = 1

    def measure(
        self,
        cell: Cell,
        *,
        folder: Path,
        log: Path,
        seed: int = 0,
        watch: Callable[[str], None] = lambda _: None,
        started: Callable[[int], None] = lambda _: None,
    ) -> CellResult:
        """Warm the server up, run a cell and return its figures; vLLM's JSON is written to ``folder``.

        ``watch`` is called twice a second with the end of ``log`` and may raise to stop the run; ``started`` is called
        once with the id of the process above the load generator. Raises `StageError` when the load generator fails,
        `MeasurementError` for lost requests and for answers without text.
        """
        self.warm_up(cell, seed)
        path = folder / f"{cell.name}.json"
        path.unlink(missing_ok=True)
        argv = load_generator.command(
            self.vllm.executable,
            cell,
            base_url=self.server.base_url,
            model=self.model,
            served_model_name=self.server.model_name,
            result=path,
            seed=seed,
        )
        run_logged(argv, log, what=f"vllm bench serve on {cell.name}", env=CLIENT_ENV, watch=watch, started=started)
        return load_generator.read(path, cell, gpus=self.gpus, log=log)

    def warm_up(self, cell: Cell, seed: int) -> None:
        """Send prompts that share no prefix with measured ones, as many at a time as the cell has in flight.

        Afterwards kernels are chosen, memory is laid out and clocks are up. Raises `MeasurementError` when the answers
        have no text: the load generator counts text, and cannot time a broken model that repeats such a token.
        """
        config = json.loads((self.model / "config.json").read_text(encoding="utf-8"))
        vocabulary = int(config.get("text_config", config)["vocab_size"])
        draw = random.Random(f"discarded {cell.name} {seed}")  # noqa: S311 - no secret
        longest = cell.input_len, max(1, cell.longest - cell.input_len)
        lengths = [[draw.randint(-(-4 * most // 5), most) for most in longest] for _ in range(cell.discarded)]
        # Special tokens stand at either end of a vocabulary.
        first, end = vocabulary // 4, max(vocabulary // 4 + 1, 3 * vocabulary // 4)
        prompts = [[draw.randrange(first, end) for _ in range(count)] for count, _ in lengths]
        with ThreadPoolExecutor(min(cell.in_flight, cell.discarded)) as pool:
            answers = list(pool.map(self._complete, prompts, [length for _, length in lengths]))
        characters, tokens = (sum(column) for column in zip(*answers, strict=True))
        if characters < _MINIMUM_TEXT * tokens:
            raise MeasurementError(
                f"cell {cell.name}: {tokens} tokens came back as {characters} characters: the model repeats a token"
                " without text"
            )

    def _complete(self, prompt: list[int], length: int) -> tuple[int, int]:
        """Return the characters and tokens of a greedy answer of exactly ``length`` tokens."""
        options = {"max_tokens": length, "temperature": 0, "ignore_eos": True}
        body = {"model": self.server.model_name, "prompt": prompt, **options}
        answer = json.loads(self.server.post("/v1/completions", body, timeout=_ANSWER_TIMEOUT_S))
        return len(answer["choices"][0]["text"]), answer["usage"]["completion_tokens"]

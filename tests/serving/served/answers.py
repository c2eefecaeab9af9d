"""What a server says about the embedded model's own sentences: log probabilities of prompts and of what it adds."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantmint.pipeline.serving.model.facts import model_facts
from quantmint.pipeline.serving.planning.planner import plan_serving
from quantmint.pipeline.serving.planning.request import ServingRequest
from quantmint.pipeline.serving.planning.target import parse_target, profile
from quantmint.pipeline.serving.running.launchers import LocalLauncher
from quantmint.pipeline.serving.running.log import LogScan
from quantmint.pipeline.serving.running.server import RunningServer
from tests.serving.served.cases import MODEL, Case

if TYPE_CHECKING:
    import torch

    from quantmint.pipeline.serving.environment import VllmEnvironment

TASKS = Path(__file__).parents[3] / "eval" / "tasks"
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 16, 192, 8
_MOST_LIKELY = 3


@dataclass(frozen=True)
class Answers:
    """Log probabilities by a server.

    ``ids`` are the prompts with their greedy continuations, int64 [prompts, tokens]. ``rows`` [N, 3] says which log
    probability each of ``logprobs`` [N] is: of which prompt, after which of its tokens, of which token.
    """

    ids: torch.Tensor
    rows: torch.Tensor
    logprobs: torch.Tensor
    prompt_tokens: int = PROMPT_TOKENS


@dataclass(frozen=True)
class Served:
    """What one server answered, and what its log said by then."""

    answers: Answers
    scan: LogScan
    started_seconds: float


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    """Sentences of the three embedded tasks with their right answers, as token ids, all of one length."""
    from transformers import AutoTokenizer

    lines = [
        [json.loads(line) for line in (TASKS / f"tiny_{task}.jsonl").read_text(encoding="utf-8").splitlines()]
        for task in ("facts", "arithmetic", "grammar")
    ]
    sentences = [
        f"{facts['question']} {facts['choices'][facts['answer']]}. {sums['question']} {sums['answer']}. "
        f"{grammar['choices'][grammar['answer']]}"
        for facts, sums, grammar in zip(*lines, strict=False)
    ]
    ids = AutoTokenizer.from_pretrained(MODEL)(" ".join(sentences), add_special_tokens=False)["input_ids"]
    assert len(ids) >= PROMPTS * PROMPT_TOKENS
    return tuple(tuple(ids[start * PROMPT_TOKENS : (start + 1) * PROMPT_TOKENS]) for start in range(PROMPTS))


def serve(case: Case, folder: Path, vllm: VllmEnvironment, hardware: str, *, cpu_threads: int = 2) -> Served:
    """Launch the checkpoint as a recipe would, and ask. Raises `ServingError` where vLLM does not load it."""
    plan = plan_serving(
        ServingRequest(
            folder,
            model_facts(folder),
            target=parse_target(hardware),
            profile=profile("latency", concurrency=PROMPTS, max_model_len=512),
            vllm_version=vllm.version,
            purpose="measure",
            kv_cache_dtype="fp8" if case.kv_cache == "fp8" else "auto",
            cpu_threads=cpu_threads,
        )
    )
    log = folder.with_name(f"{folder.name}.log")
    with LocalLauncher(vllm.executable).launch(plan, log, startup_timeout=600) as server:
        answers = ask(server)
        return Served(answers, server.scan_log(), server.started_seconds)


def ask(server: RunningServer) -> Answers:
    """Every prompt with its greedy continuation; each position's own token and the likeliest few."""
    import torch

    ids, rows, values = [], [], []
    for number, choice in enumerate(_completions(server)):
        added = [_token_id(token) for token in choice["logprobs"]["tokens"]]
        ids.append([*prompts()[number], *added])
        before = [
            {int(token): said["logprob"] for token, said in position.items()}
            for position in choice["prompt_logprobs"][1:]  # nothing comes before the first
        ]
        after = [
            {_token_id(token): value for token, value in position.items()}
            for position in choice["logprobs"]["top_logprobs"]
        ]
        for place, position in enumerate([*before, *after]):
            rows += [(number, place, token) for token in position]
            values += list(position.values())
    return Answers(torch.tensor(ids), torch.tensor(rows), torch.tensor(values, dtype=torch.float64))


def _completions(server: RunningServer) -> list[dict[str, Any]]:
    body = {
        "model": server.model_name,
        "prompt": [list(prompt) for prompt in prompts()],
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": _MOST_LIKELY,
        "prompt_logprobs": _MOST_LIKELY,
        "return_tokens_as_token_ids": True,
    }
    connection = http.client.HTTPConnection(server.base_url.removeprefix("http://"), timeout=300)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode("utf-8", errors="replace")
    finally:
        connection.close()
    assert response.status == 200, text[:1000]
    choices: list[dict[str, Any]] = json.loads(text)["choices"]
    return sorted(choices, key=lambda choice: int(choice["index"]))


def _token_id(token: str) -> int:
    return int(token.removeprefix("token_id:"))

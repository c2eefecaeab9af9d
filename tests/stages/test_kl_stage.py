"""The stages of the KL promise: vLLM's answers by a stand-in, the reference runtime's by itself, and the plan."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quantmint.eval import kl, prompts
from quantmint.pipeline.base.errors import InvalidMeasurementError
from quantmint.pipeline.base.progress import PlainReporter
from quantmint.pipeline.recipe.sections import KlGate
from quantmint.pipeline.runs.planner import build_plan
from quantmint.pipeline.serving.running.dialect import VLLM, Dialect
from quantmint.pipeline.stages.canary import LIKELIEST
from quantmint.pipeline.stages.kl import KlStage, read_divergences
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.source import LOCATION
from quantmint.pipeline.stages.stage import Job, Output

TINY = Path(__file__).parents[2] / "recipes" / "tiny" / "model"
VOCABULARY, PROMPTS, PLACES = 1024, 5, 64

pytest.importorskip("transformers")


@dataclass
class Vllm:
    """A vLLM whose logits follow from the token before, with ``noise`` times others; ``bodies`` are its requests."""

    noise: float = 0.0
    is_finite: bool = True
    model_name: str = "m"
    dialect: Dialect = VLLM
    bodies: list[dict[str, Any]] = field(default_factory=list)
    random: np.random.RandomState = field(default_factory=lambda: np.random.RandomState(5))

    def logprobs(self, token: int) -> np.ndarray:
        logits = 3 * np.random.RandomState(token).standard_normal(VOCABULARY)
        logits += self.noise * np.random.RandomState(token + 10**6).standard_normal(VOCABULARY)
        return logits - np.logaddexp.reduce(logits)  # type: ignore[no-any-return]

    def get(self, path: str) -> str:
        return path

    def post(self, path: str, body: dict[str, Any], *, timeout: float) -> str:
        self.bodies.append(body)
        if "prompt_logprobs" in body:
            return json.dumps({"choices": [{"prompt_logprobs": [None, *map(self.position, *self.pairs(body))]}]})
        return json.dumps({"choices": [self.drawn(n, ids[-1]) for n, ids in enumerate(body["prompt"])][::-1]})

    def pairs(self, body: dict[str, Any]) -> tuple[list[int], list[int]]:
        return body["prompt"][:-1], body["prompt"][1:]

    def position(self, before: int, token: int) -> dict[str, Any]:
        logprobs = self.logprobs(before)
        listed = {int(number): float(logprobs[number]) for number in (token, *np.argsort(-logprobs)[:20])}
        return {str(n): {"logprob": value if self.is_finite else None} for n, value in listed.items()}

    def drawn(self, index: int, before: int) -> dict[str, Any]:
        logprobs = self.logprobs(before)
        token = int(self.random.choice(VOCABULARY, p=np.exp(logprobs) / np.exp(logprobs).sum()))
        return {"index": index, "token_ids": [token], "logprobs": {"token_logprobs": [float(logprobs[token])]}}


@pytest.fixture
def ask(setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Output]:
    """Run a stage on a stand-in; the candidate's is given what the baseline's has left."""
    few = (prompts.FOLDER / "tiny.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)[:PROMPTS]
    (tmp_path / "tiny.jsonl").write_text("".join(few), encoding="utf-8")
    monkeypatch.setattr(prompts, "FOLDER", tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, Path("model") / name)
    here = setting

    def run(side: str, server: Any) -> Output:
        folder = tmp_path / side
        folder.mkdir(exist_ok=True)
        (folder / LOCATION).write_text(json.dumps({"folder": str(Path("model").resolve())}))
        entry = SimpleNamespace(stage="source", path=folder, file=lambda name: folder / name)
        inputs = {"model": entry, "baseline": SimpleNamespace(path=tmp_path / "baseline")}
        servers = SimpleNamespace(get=lambda side, plan: server)
        return KlStage(side).run(Job(here, folder, inputs, PlainReporter(), servers))  # type: ignore[arg-type]

    return run


def exact(baseline: Vllm, candidate: Vllm) -> float:
    """The mean divergence over the whole vocabulary at the places that the baseline was asked to draw at."""
    beginnings = [ids for body in baseline.bodies if "prompt_logprobs" not in body for ids in body["prompt"]]
    values = []
    for ids in beginnings:
        first, other = baseline.logprobs(ids[-1]), candidate.logprobs(ids[-1])
        values.append(float((np.exp(first) * (first - other)).sum()))
    return math.fsum(values) / len(values)


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_vllm_s_answers_estimate_the_divergence_of_the_vocabulary(ask: Any, tmp_path: Path, noise: float) -> None:
    baseline, candidate = Vllm(), Vllm(noise=noise)
    assert ask("baseline", baseline).result == {"positions": PROMPTS * PLACES}
    ask("candidate", candidate)
    draws = [body for body in baseline.bodies if "prompt_logprobs" not in body]
    assert len(draws) == PROMPTS
    assert all(
        (body["temperature"], body["top_p"], body["top_k"], body["max_tokens"]) == (1, 1, -1, 1) for body in draws
    )
    # Of a drawn token that no list has, its own log probability is asked for and no list again.
    assert [body["prompt_logprobs"] for body in candidate.bodies].count(LIKELIEST) == PROMPTS
    assert {body["prompt_logprobs"] for body in candidate.bodies} == {LIKELIEST, 1}
    divergences = read_divergences(tmp_path / "candidate")
    figure, truth = kl.measure(divergences), exact(baseline, candidate)
    assert not divergences.exact
    assert [text.positions for text in divergences.texts] == [PLACES] * PROMPTS
    assert figure.upper is not None
    assert truth <= figure.upper
    assert figure.value == pytest.approx(truth, abs=1e-6 if noise == 0 else 0.02)


def test_a_side_without_numbers_breaks_the_promise_or_the_measurement(ask: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidMeasurementError, match="the baseline has no finite log probabilities"):
        ask("baseline", Vllm(is_finite=False))
    ask("baseline", Vllm())
    ask("candidate", Vllm(is_finite=False))
    assert [text.total for text in read_divergences(tmp_path / "candidate").texts] == [None] * PROMPTS


def test_a_promise_adds_two_stages_and_nothing_to_other_recipes(setting: Setting) -> None:
    assert "kl" not in setting.recipe.gate.model_dump()
    before, after, again = (fingerprints(setting, most) for most in (None, 0.05, 0.01))
    assert after.keys() - before.keys() == {"kl-baseline", "kl-candidate"}
    assert list(after).index("kl-candidate") < list(after).index("evaluate-baseline")
    changed = {key for key in before if before[key] != after[key]}
    assert changed <= {"gate", "report", "package", "publish"}
    assert again["kl-candidate"] == after["kl-candidate"]
    assert again["gate"] != after["gate"]


def fingerprints(setting: Setting, most: float | None) -> dict[str, str]:
    """The fingerprints of a plan with such a promise, by stage."""
    promise = None if most is None else KlGate(max=most)
    gate = setting.recipe.gate.model_copy(update={"kl": promise})
    loaded = replace(setting.loaded, recipe=setting.recipe.model_copy(update={"gate": gate}))
    return {planned.key: planned.fingerprint for planned in build_plan(replace(setting, loaded=loaded))}

"""acceptance: both sides continue the same prompts with speculative decoding, and vLLM counts what is accepted.

Requests are sent one at a time, and the server's counters are read before and after each, so that the drafts of every
prompt are known. Each prompt is the first half of one of the canary's, and its answer is as long on both sides.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from quantmint.eval import prompts
from quantmint.eval.acceptance import AcceptancePairs, PromptDrafts, compare, pairs_of
from quantmint.eval.errors import MeasurementError
from quantmint.pipeline.base.errors import InvalidMeasurementError
from quantmint.pipeline.base.machine import versions
from quantmint.pipeline.recipe.serving import Speculative
from quantmint.pipeline.serving.running.counters import drafts_since, read_drafts
from quantmint.pipeline.serving.running.server import RunningServer
from quantmint.pipeline.stages.canary import tokenized
from quantmint.pipeline.stages.estimate import READ_S, Estimate
from quantmint.pipeline.stages.paired import PairedStage, prompt_settings
from quantmint.pipeline.stages.serve import launch_plan, runtime_tools
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.source import model_folder
from quantmint.pipeline.stages.stage import Job, Output, write_json
from quantmint.pipeline.store.entries import Entry

DRAFTS = "drafts.json"
ANSWER_TOKENS = 64
"""Tokens of each answer; fewer where the model's context is less than four times as long."""
_TIMEOUT_S = 600.0  # the first request may compile kernels


class AcceptanceStage(PairedStage):
    """Count the drafts of a side's speculative decoding by prompt; the gate compares the two sides."""

    family = "acceptance"

    def is_planned(self, setting: Setting) -> bool:
        """Return whether the recipe serves with speculative decoding by vLLM."""
        recipe = setting.recipe
        speculates = recipe.serve.speculative is not None and recipe.answered_by == "vllm"
        return super().is_planned(setting) and speculates

    def seconds(self, estimate: Estimate) -> float:
        """Return the seconds of all answers, one after the other, as if no proposed token were accepted."""
        count, tokens = len(prompts.load(estimate.setting.suite.canary)), _answer_tokens(estimate.setting)
        return count * (READ_S + tokens * estimate.answer_step(1, tokens))

    def settings(self, setting: Setting) -> Mapping[str, object]:
        """Return the prompts' digest and the length of an answer; the method is part of the side's launch."""
        return {
            "side": self.side,
            **prompt_settings(setting),
            "tokens": _answer_tokens(setting),
        }

    def tools(self, setting: Setting) -> Mapping[str, str]:
        """Return the versions of the tokenizer's libraries and of vLLM."""
        return {**versions("transformers", "tokenizers"), **runtime_tools(setting)}

    def run(self, job: Job) -> Output:
        """Continue every prompt, and record the drafts of each.

        Raises `InvalidMeasurementError` for a server that proposes nothing, or whose counters do not add up.
        """
        speculative = job.setting.recipe.serve.speculative
        assert speculative is not None  # noqa: S101 - else there is no such stage
        folder = model_folder(job.inputs["model"])
        server = job.servers.get(self.side, launch_plan(job.setting, self.side, folder))
        texts = [(name, ids[: max(len(ids) // 2, 1)]) for name, ids in tokenized(job.setting, folder)]
        tokens = _answer_tokens(job.setting)
        longest = job.setting.recipe.target.max_model_len - tokens - speculative.tokens
        rows: list[PromptDrafts] = []
        try:
            with job.progress.bar(len(texts), "prompts") as advance:
                for name, ids in texts:
                    rows.append(_continue(server, name, ids[:longest], tokens))
                    advance(1)
            _require_drafts(self.side, speculative, rows)
        except MeasurementError as error:
            raise InvalidMeasurementError(f"acceptance: {error}.") from error
        recorded = {
            "method": speculative.method,
            "tokens": speculative.tokens,
            "prompts": [asdict(row) for row in rows],
        }
        write_json(job.path / DRAFTS, recorded)
        drafts = sum(row.drafts for row in rows)
        length = 1 + sum(row.accepted for row in rows) / drafts
        summary = f"{length:.3f} tokens a step, {len(rows)} prompts, {drafts:,} drafts by {speculative.method}"
        if self.side == "candidate":
            compared = compare(_pairs(job.inputs["baseline"], recorded))
            summary += f"; {compared.ratio:.3f} times the baseline's ({compared.low:.3f} to {compared.high:.3f})"
        return Output(result={"length": length, "drafts": drafts, "prompts": len(rows)}, summary=summary)


def read_pairs(inputs: Mapping[str, Entry]) -> AcceptancePairs:
    """Return the drafts of both sides from the entries of their stages, by stage key."""
    return _pairs(inputs["acceptance-baseline"], _recorded(inputs["acceptance-candidate"]))


def _pairs(baseline: Entry, candidate: Mapping[str, Any]) -> AcceptancePairs:
    before = _recorded(baseline)
    return pairs_of(before["method"], before["tokens"], before["prompts"], candidate["prompts"])


def _recorded(entry: Entry) -> Mapping[str, Any]:
    recorded: Mapping[str, Any] = json.loads(entry.file(DRAFTS).read_text(encoding="utf-8"))
    return recorded


def _answer_tokens(setting: Setting) -> int:
    return max(min(ANSWER_TOKENS, setting.recipe.target.max_model_len // 4), 1)


def _continue(server: RunningServer, name: str, ids: Sequence[int], tokens: int) -> PromptDrafts:
    """Return the drafts of one prompt, which is answered with ``tokens`` tokens, the likeliest ones.

    Raises `MeasurementError` where the server counts other tokens than it answered.
    """
    before = read_drafts(server)
    body = {
        "model": server.model_name,
        "prompt": list(ids),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = json.loads(server.post("/v1/completions", body, timeout=_TIMEOUT_S))
    change = drafts_since(server, before, int(answer["usage"]["completion_tokens"]))
    return PromptDrafts(name, change.drafts, change.proposed, change.accepted)


def _require_drafts(side: str, speculative: Speculative, rows: Sequence[PromptDrafts]) -> None:
    """Raise `MeasurementError` for a side to which nothing was proposed in any prompt."""
    if not any(row.drafts for row in rows):
        raise MeasurementError(
            f"the {side} was served with {speculative.method}, which proposed no token for any of {len(rows)} prompts"
        )

"""canary: both sides read held-out prompts, and the candidate's next-token distributions are compared with its
baseline's.

Requests are sent one at a time: no other request in the batch can change an answer, and the prompts are few. The
baseline, whose answers all recipes share, reads all prompts; a candidate that is clearly sound or broken reads fewer.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from quantmint.eval import prompts
from quantmint.eval.canary import (
    DIGITS,
    EARLY_CONFIDENCE,
    Answer,
    Canary,
    CanaryAnswers,
    CanaryPolicy,
    compare,
    is_clear,
    judge,
    look_ends,
)
from quantmint.eval.verdict import Verdict
from quantmint.pipeline.base.errors import InvalidMeasurementError, RefusalError
from quantmint.pipeline.serving.running.dialect import dialect_of
from quantmint.pipeline.serving.running.server import RunningServer
from quantmint.pipeline.stages.estimate import READ_S, TOKEN_BYTES, Estimate
from quantmint.pipeline.stages.paired import PairedStage, prompt_settings
from quantmint.pipeline.stages.serve import launch_plan, runtime_modules
from quantmint.pipeline.stages.servers import ReferenceServer
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.source import model_folder
from quantmint.pipeline.stages.stage import Job, Output, Stage, read_gzip, write_gzip, write_json
from quantmint.pipeline.store.entries import Entry

ANSWERS, COMPARISON = "canary.json.gz", "comparison.json"
_FIRST_LOOK = 0.25
"""Share of the prompts that a candidate reads which is clearly sound."""
_STOPPING = (Verdict.FAIL.value, Verdict.INCONCLUSIVE.value)
LIKELIEST = 20
"""Log probabilities for each position: as many as vLLM gives without another --max-logprobs."""

# NaN has no JSON. vLLM 0.32 answers a request whose log probabilities are NaN with status 400 and the words of Python's
# json, others with 500, and both live on.
_NO_JSON = "not JSON compliant"
_TIMEOUT_S = 600.0  # the first request may compile kernels


class CanaryStage(PairedStage):
    """Compare next-token distributions on held-out prompts, before any task is asked.

    The candidate's stage stops the run where the candidate is broken or unlikely to pass; it reads the baseline's token
    ids. The baseline's answers depend on the model alone, so all recipes of it share them.
    """

    family = "canary"

    def is_planned(self, setting: Setting) -> bool:
        """Return whether the recipe has a canary."""
        return super().is_planned(setting) and setting.recipe.gate.canary is not None

    def when_stopped(self) -> Stage:
        """Return the stage itself: its result is what stopped the run."""
        return self

    def imports(self, setting: Setting) -> Iterable[tuple[str, str]]:
        """Return (extra, module) pairs of what must be installed here: transformers, and what the runtime imports."""
        return (("evaluate", "transformers"), *runtime_modules(setting))

    def seconds(self, estimate: Estimate) -> float:
        """Return the seconds of reading all prompts one after the other; a quarter of it for the candidate.

        A sound candidate is decided after a part of the prompts.
        """
        texts = prompts.load(estimate.setting.suite.canary)
        seconds = sum(READ_S + len(prompt.text) / TOKEN_BYTES * estimate.position for prompt in texts)
        return seconds if self.side == "baseline" else _FIRST_LOOK * seconds

    def verdict(self, entry: Entry) -> Verdict | None:
        """Return the candidate's verdict where it stops the run, else None."""
        return Verdict(str(entry.record.result["verdict"])) if self.stops(entry) else None

    def stops(self, entry: Entry) -> bool:
        """Return whether the candidate's verdict is FAIL or INCONCLUSIVE; the baseline's stage never stops a run."""
        return self.side == "candidate" and entry.record.result.get("verdict") in _STOPPING

    def settings(self, setting: Setting) -> Mapping[str, object]:
        """Return the fingerprint's settings: the baseline's prompts, or the limits that judge the candidate."""
        if self.side == "candidate":
            limits = policy_of(setting).to_json()
            return {"side": self.side, "policy": {name: limit for name, limit in limits.items() if limit is not None}}
        return {
            "side": self.side,
            **prompt_settings(setting),
            "likeliest": LIKELIEST,
        }

    def run(self, job: Job) -> Output:
        """Ask the prompts and record every answer; the candidate is asked in looks until it is clear, and compared."""
        folder = model_folder(job.inputs["model"])
        baseline = None if self.side == "baseline" else read_answers(job.inputs["baseline"].path)
        if baseline is None:
            prompts = tokenized(job.setting, folder)
        else:
            prompts = tuple((answer.prompt, answer.ids) for answer in baseline.answers)
        server = job.servers.get(self.side, launch_plan(job.setting, self.side, folder))
        # In an order of their own: texts of a kind stand together in the file, and a look needs some of each.
        order = sorted(prompts, key=lambda prompt: hashlib.sha256(prompt[0].encode()).digest())
        by_name: dict[str, Answer] = {}
        with job.progress.bar(len(prompts), "prompts") as advance:
            for end in look_ends(len(order)):
                for name, ids in order[len(by_name) : end]:
                    by_name[name] = read_prompt(server, name, ids)
                    advance(1)
                if baseline is not None and _is_clear(job.setting, baseline, by_name):
                    break
        answers = _in_order(prompts, by_name)
        write_gzip(job.path / ANSWERS, answers.to_json())
        return _output(answers) if baseline is None else _compared(job, _on(baseline, by_name), answers)


def _in_order(prompts: Sequence[tuple[str, tuple[int, ...]]], by_name: Mapping[str, Answer]) -> CanaryAnswers:
    return CanaryAnswers(tuple(by_name[name] for name, _ in prompts if name in by_name))


def _on(baseline: CanaryAnswers, names: Collection[str]) -> CanaryAnswers:
    """Return the baseline's answers to the prompts in ``names``."""
    return CanaryAnswers(tuple(answer for answer in baseline.answers if answer.prompt in names))


def _is_clear(setting: Setting, baseline: CanaryAnswers, by_name: Mapping[str, Answer]) -> bool:
    answered = _on(baseline, by_name)
    candidate = CanaryAnswers(tuple(by_name[answer.prompt] for answer in answered.answers))
    return is_clear(compare(answered, candidate, EARLY_CONFIDENCE), policy_of(setting))


def policy_of(setting: Setting) -> CanaryPolicy:
    """Return the canary's limits for the recipe's schemes: of a broken and of an unpromising candidate."""
    canary = setting.recipe.gate.canary
    assert canary is not None  # noqa: S101 - else there is no such stage
    return canary.policy(setting.recipe.quantization.schemes)


def read_answers(folder: Path) -> CanaryAnswers:
    """Return the answers that a stage recorded in ``folder``."""
    return CanaryAnswers.from_json(read_gzip(folder / ANSWERS))


def read_comparison(folder: Path) -> Canary:
    """Return the comparison that the candidate's stage recorded in ``folder``."""
    return Canary.from_json(json.loads((folder / COMPARISON).read_text(encoding="utf-8")))


def tokenized(setting: Setting, folder: Path) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return (name, token ids) of each prompt by the tokenizer in ``folder``, cut to max_model_len - 1 tokens.

    A runtime that reserves further tokens gets prompts that are shorter by as many.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=setting.recipe.trust_remote_code
    )
    reserved = dialect_of(setting.recipe.serve.runtime).reserved
    longest = setting.recipe.target.max_model_len - 1 - reserved  # one token is left for the answer
    return tuple(
        (prompt.name, tuple(int(token) for token in tokenizer(prompt.text)["input_ids"][:longest]))
        for prompt in prompts.parse(prompts.FOLDER / f"{setting.suite.canary}.jsonl")
    )


def read_prompt(server: RunningServer, name: str, ids: Sequence[int], likeliest: int = LIKELIEST) -> Answer:
    """Return the answer to one prompt: log probabilities of its tokens and of the likeliest ones at each position.

    The answer has none where the server is healthy and its log probabilities are not finite. Raises `RefusalError` for
    other refusals.
    """
    if isinstance(server, ReferenceServer):
        return _parsed(name, ids, server.ask("prompt_logprobs", ids=list(ids), likeliest=likeliest), likeliest)
    try:
        positions = server.dialect.prompt_logprobs(server, ids, likeliest, timeout=_TIMEOUT_S)
    except RefusalError as error:
        if error.status < HTTPStatus.INTERNAL_SERVER_ERROR and _NO_JSON not in error.answer:
            raise
        server.get("/health")
        return Answer(name, tuple(ids), (), (), ())
    return _parsed(name, ids, positions, likeliest)


def _parsed(
    name: str, ids: Sequence[int], positions: Sequence[Mapping[str, Mapping[str, Any]]], likeliest: int
) -> Answer:
    """Return an answer from ``positions``: for each token of ``ids`` a mapping from token id to log probability.

    The first entry is ignored. Each other mapping contains the position's own token. An answer with a value that is not
    finite has no log probabilities.
    """
    actual: list[float] = []
    tokens: list[tuple[int, ...]] = []
    logprobs: list[tuple[float, ...]] = []
    for token, position in zip(ids[1:], positions[1:], strict=True):
        listed = {int(number): entry["logprob"] for number, entry in position.items()}
        if not all(value is not None and math.isfinite(value) for value in listed.values()):
            return Answer(name, tuple(ids), (), (), ())
        rounded = {number: round(float(value), DIGITS) for number, value in listed.items()}
        first = sorted(rounded.items(), key=lambda item: (-item[1], item[0]))[:likeliest]
        actual.append(rounded[token])
        tokens.append(tuple(number for number, _ in first))
        logprobs.append(tuple(value for _, value in first))
    return Answer(name, tuple(ids), tuple(actual), tuple(tokens), tuple(logprobs))


def _output(answers: CanaryAnswers) -> Output:
    """Return the baseline's result: the number of positions, and the perplexity.

    Raises `InvalidMeasurementError` where a prompt has no finite log probabilities.
    """
    silent = [answer.prompt for answer in answers.answers if not answer.actual]
    if silent:
        raise InvalidMeasurementError(
            f"canary: the baseline has no finite log probabilities for {len(silent)} of "
            f"{len(answers.answers)} prompts, such as {silent[0]!r}, so nothing can be held against it."
        )
    values = [value for answer in answers.answers for value in answer.actual]
    perplexity = math.exp(-math.fsum(values) / len(values))
    return Output(
        result={"positions": len(values), "perplexity": perplexity},
        summary=f"{len(answers.answers)} prompts, {len(values):,} positions, perplexity {perplexity:.4g}",
    )


def _compared(job: Job, baseline: CanaryAnswers, candidate: CanaryAnswers) -> Output:
    canary = compare(baseline, candidate)
    verdict, reason = judge(canary, policy_of(job.setting))
    write_json(job.path / COMPARISON, canary.to_json())
    if verdict is not Verdict.PASS:
        job.progress.warn(f"the canary stops this checkpoint: {reason}")
    return Output(
        result={
            "verdict": verdict.value,
            "reasons": [] if verdict is Verdict.PASS else [reason],
            "agreement": canary.agreement,
            "kl": canary.kl,
        },
        summary=f"{verdict.value}: top-1 agreement {canary.agreement:.1%}, KL {canary.kl:.3g} nats",
    )

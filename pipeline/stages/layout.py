"""layout: the candidate on the recipe's accelerators and on a single one, beside each other (`eval.layout`)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final

from quantmint.eval import prompts
from quantmint.eval.kl import Divergences, TextDivergence, places
from quantmint.eval.layout import LayoutMeasurement, compare
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.machine import versions
from quantmint.pipeline.quantize.formats.checkpoint import read_json
from quantmint.pipeline.serving.plan import LaunchPlan, ParallelLayout
from quantmint.pipeline.serving.planning.layout import layout_words
from quantmint.pipeline.serving.running.server import RunningServer
from quantmint.pipeline.stages.canary import LIKELIEST, read_prompt, tokenized
from quantmint.pipeline.stages.estimate import READ_S, TOKEN_BYTES, Estimate
from quantmint.pipeline.stages.kl import ReadText, answered, text_divergence
from quantmint.pipeline.stages.paired import prompt_settings
from quantmint.pipeline.stages.serve import launch_plan, model_key, require_server, runtime_tools, single_plan
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.source import model_folder
from quantmint.pipeline.stages.stage import Check, Job, Output, Stage, write_json

MEASUREMENT: Final = "layout.json"
_PROMPT, _TOKENS = 32, 32
"""Most tokens of a prompt, and of the greedy answer to it."""
_IN_FLIGHT, _TIMEOUT_S = 16, 600.0


class LayoutStage(Stage):
    """Compare the recipe's layout with TP 1 of the same weights, on held-out prompts and greedy answers."""

    family = "layout"
    version = 1
    asks_server = True
    measures = True

    def is_planned(self, setting: Setting) -> bool:
        """Return whether the recipe promises that its layout answers as a single accelerator does."""
        return super().is_planned(setting) and setting.recipe.gate.layout is not None

    def imports(self, setting: Setting) -> Iterable[tuple[str, str]]:
        """Return (extra, module) pairs of what must be installed here: transformers."""
        return (("evaluate", "transformers"),)

    def checks(self, setting: Setting) -> Sequence[Check]:
        """Return `require_server` and `_require_two_layouts`."""
        return (require_server, _require_two_layouts)

    def seconds(self, estimate: Estimate) -> float:
        """Return the seconds of the single accelerator's start, of reading all texts six times, and of the answers."""
        tokens = [len(prompt.text) / TOKEN_BYTES for prompt in prompts.load(estimate.setting.suite.canary)]
        reading = sum(READ_S + count * estimate.position for count in tokens)
        answers = 2 * -(-len(tokens) // _IN_FLIGHT) * _TOKENS * estimate.answer_step(_IN_FLIGHT, _PROMPT + _TOKENS)
        return estimate.start + 6 * reading + answers

    def inputs(self, setting: Setting) -> Mapping[str, str]:
        """Return the stage keys of the candidate's `serve` and `model`."""
        return {"serve": "serve-candidate", "model": model_key("candidate")}

    def settings(self, setting: Setting) -> Mapping[str, object]:
        """Return what determines the answers: prompts, lengths, and the launch on a single accelerator."""
        return {
            **prompt_settings(setting),
            "likeliest": LIKELIEST,
            "single": single_plan(setting, Path("MODEL")).canonical(),
        }

    def tools(self, setting: Setting) -> Mapping[str, str]:
        """Return the versions of the runtime and of the tokenizer's libraries."""
        return {**versions("transformers", "tokenizers"), **runtime_tools(setting)}

    def run(self, job: Job) -> Output:
        """Ask the recipe's layout, then a fresh server on one accelerator, and record how far they are apart."""
        setting, folder = job.setting, model_folder(job.inputs["model"])
        plan = launch_plan(setting, "candidate", folder)
        texts = [ReadText(name, ids, places(len(ids))) for name, ids in tokenized(setting, folder) if len(ids) > 1]
        tokens = min(_TOKENS, (setting.recipe.target.max_model_len - 1) // 2)
        beginnings = [text.ids[: max(1, min(_PROMPT, len(text.ids) // 2))] for text in texts]
        server = job.servers.get("candidate", plan)
        job.progress.say(f"reading {len(texts)} texts and answering them on {layout_words(plan.layout)}")
        read, responses = [answered(server, text) for text in texts], _greedy(server, beginnings, tokens)
        with job.servers.fresh("layout", single_plan(setting, folder), job.path / "server.log") as single:
            job.progress.say("the same on a single accelerator, twice")
            again = [answered(single, text) for text in texts]
            measurement = LayoutMeasurement(
                layout_words(plan.layout),
                reading=_reading(single, read),
                reading_floor=_reading(single, again),
                answers=_regrets(single, texts, beginnings, responses),
                answers_floor=_regrets(single, texts, beginnings, _greedy(single, beginnings, tokens)),
            )
        write_json(job.path / MEASUREMENT, measurement.to_json())
        figures = compare(measurement)
        words = f"{figures.reading.value:.3g} nats in reading, {figures.answers.value:.3g} in answers"
        return Output(
            result={"reading": figures.reading.value, "answers": figures.answers.value},
            summary=f"{measurement.layout} beside TP 1: {words}",
        )


def read_layout(folder: Path) -> LayoutMeasurement:
    """Return the measurement that the stage recorded in ``folder``."""
    return LayoutMeasurement.from_json(read_json(folder / MEASUREMENT))


def _require_two_layouts(setting: Setting) -> None:
    """Raise `UserError` where the recipe's layout is a single accelerator, or where the checkpoint does not fit one."""
    plan: LaunchPlan = launch_plan(setting, "candidate", Path("MODEL"))
    if replace(plan.layout, replicas=1, packed=1) == ParallelLayout():
        raise UserError(
            f"gate.layout: found a launch of {layout_words(plan.layout)}, expected several accelerators.",
            hint="Leave gate.layout out: there is nothing to compare.",
        )
    try:
        single_plan(setting, Path("MODEL"))
    except UserError as error:
        raise UserError(
            f"gate.layout: the checkpoint does not fit a single accelerator: {error.message}",
            hint="Leave gate.layout out: nothing holds the weights that the layout could be compared with.",
        ) from None


def _reading(single: RunningServer, read: Sequence[ReadText]) -> Divergences:
    """Return how far the single accelerator is from what was read; its requests share batches."""
    with ThreadPoolExecutor(_IN_FLIGHT, "layout") as pool:
        return Divergences(False, tuple(pool.map(lambda text: text_divergence(single, text), read)))


def _greedy(server: RunningServer, beginnings: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """Return the token ids of the greedy answers to some prompts, up to ``tokens`` each, all asked at a time."""
    body = {
        "model": server.model_name,
        "prompt": [list(ids) for ids in beginnings],
        "max_tokens": tokens,
        "return_token_ids": True,
        **{"temperature": 0, "repetition_penalty": 1},
    }
    choices = json.loads(server.post("/v1/completions", body, timeout=_TIMEOUT_S))["choices"]
    return [list(choice["token_ids"]) for choice in sorted(choices, key=lambda choice: choice["index"])]


def _regrets(
    single: RunningServer,
    texts: Sequence[ReadText],
    beginnings: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
) -> Divergences:
    """Return by how many nats the single accelerator prefers its best token to those of the answers, text by text."""

    def regret(number: int) -> TextDivergence | None:
        answer = read_prompt(single, texts[number].name, (*beginnings[number], *responses[number]))
        first = len(beginnings[number]) - 1
        if not responses[number]:
            return None
        if not answer.actual:
            return TextDivergence(texts[number].name, len(responses[number]), None)
        best = sum(logprobs[0] for logprobs in answer.logprobs[first:])
        return TextDivergence(texts[number].name, len(responses[number]), best - sum(answer.actual[first:]))

    with ThreadPoolExecutor(_IN_FLIGHT, "layout") as pool:
        return Divergences(True, tuple(filter(None, pool.map(regret, range(len(texts))))))

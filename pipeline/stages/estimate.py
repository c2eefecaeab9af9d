"""Seconds of loading, reading and answering on a machine where nothing of a recipe was measured yet.

Each stage makes the forecast of its own time from an `Estimate`; the constants here are what several of them share.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from quantmint.eval.suites import Suite, SuiteTask, definition
from quantmint.pipeline.base.hardware import hardware
from quantmint.pipeline.stages.rates import Rates
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.sizes import Prediction

START_S: Final = 150.0
"""Seconds of a start of vLLM on a GPU, which compiles."""
_EAGER_START_S, _EAGER_STEP_S = 60.0, 0.02
"""Seconds of a start without compilation, and of a server's own work for a step of answers there: a model of 30 layers
on an H200 that another job used too started in 84, 44 and about 45 s, and answered one request in 24 ms a step."""
TOKEN_S: Final = 0.04
"""Seconds of a token of an answer, for which a reader does not wait."""
READ_S: Final = 0.1
"""Seconds of a server's own work for a request of which each position is returned."""
TOKEN_BYTES: Final = 4
"""Bytes of a token of prose."""
_CPU_START_S, _REQUEST_S = 20.0, 0.001
"""Seconds of a server's start on a CPU, and of its own work for each request."""
_BUSY, _CPU_BUSY = 0.4, 0.15
"""Share of the rate of products, a GPU's by its data sheet, that a server reaches while it reads prompts."""
_CPU_STEP_S: Final = 0.005
"""Seconds of a server's own work on a CPU for a token of each request in flight."""
_MEMORY_BUSY: Final = 0.75
"""Share of a GPU's memory bandwidth, by its data sheet, that a server reaches while it answers."""
_REFERENCE_BUSY, _REFERENCE_POSITION_S = 0.8, 0.0025
"""Share of the rate of products in float32 that the reference runtime reaches; seconds of a position's top tokens."""
_REFERENCE_IMPORT: Final = 1.2
"""Start of the reference runtime, which imports lm-eval too, beside that of a process that has our libraries."""
_CHOICES, _ITEM, _SHOT, _ANSWER, _PAGE = 4, 100, 120, 150, 5000
"""Of an item of the Hub: its choices; tokens of the item, of a shot before it, of an answer, and of a text whose
perplexity is asked."""
_H100_TFLOPS: Final = 989.4
"""Products a second in bfloat16 of a GPU that the table does not know."""


@dataclass(frozen=True)
class Estimate:
    """A machine's speed with a model, from which the stages forecast their time.

    ``weights`` are the seconds of the stages that work on weights, by stage key, as far as known. ``expected`` are the
    items of each task that a lossless candidate is asked (None: all), ``bench`` the seconds of measuring throughput
    (None: not measured).
    """

    setting: Setting
    size: Prediction
    rates: Rates
    weights: Mapping[str, float]
    expected: Mapping[str, int | None]
    bench: float | None

    @property
    def on_cpu(self) -> bool:
        """Whether the recipe's target, which serves the model, is a CPU."""
        return self.setting.recipe.target.hardware == "cpu"

    @property
    def by_reference(self) -> bool:
        """Whether the reference runtime answers instead of vLLM, on one device in float32."""
        return self.setting.recipe.evaluation.runtime == "reference"

    @property
    def start(self) -> float:
        """Seconds of a server's start, with weights read from the disk."""
        if self.by_reference:  # 16 bit, read as float32
            return float(_REFERENCE_IMPORT * self.rates.start + 2 * self.size.source / self.rates.load)
        return float(self.cached_start + self.size.source / self.rates.disk)

    @property
    def cached_start(self) -> float:
        """Seconds of a start of vLLM with weights in the page cache, as in every launch but the first."""
        return _CPU_START_S if self.on_cpu else _EAGER_START_S if self.is_eager else START_S

    @property
    def is_eager(self) -> bool:
        """Whether the recipe turns compilation and graphs off."""
        return self.setting.recipe.serve.knobs.get("--enforce-eager") is True

    @property
    def restart(self) -> float:
        """Seconds of the start when the other side is served next.

        Zero for vLLM on a CPU, where both servers are taken to start at once and to stay.
        """
        return 0.0 if self.on_cpu and not self.by_reference else self.start

    @property
    def token(self) -> float:
        """Seconds of one prompt token: two operations for each parameter that the token passes through."""
        target = self.setting.recipe.target
        if self.by_reference:
            flops = _REFERENCE_BUSY * self.rates.float32
        elif self.on_cpu:
            flops = _CPU_BUSY * self.rates.flops
        else:
            peak = dict(hardware(target.hardware).tflops).get("bf16", _H100_TFLOPS)
            flops = target.gpus * _BUSY * peak * 1e12
        return float(2.0 * self.size.active / flops)

    def answer_step(self, in_flight: int, context: float) -> float:
        """Return the seconds of a step that gives each of `in_flight` requests one token of its answer.

        The step reads the baseline's weights and the KV cache of all requests, each `context` tokens long, once. A CPU
        is taken to read the weights alone. Without graphs a GPU waits for the host besides.
        """
        if self.on_cpu:
            return float(_CPU_STEP_S + self.size.source / self.rates.read)
        target = self.setting.recipe.target
        row = hardware(target.hardware)
        if row.bandwidth is None:
            return TOKEN_S
        read = self.size.source + in_flight * context * (self.size.kv_bytes_per_token or 0)
        waiting = _EAGER_STEP_S if self.is_eager else 0.0
        return waiting + float(read / (target.gpus * _MEMORY_BUSY * row.bytes_per_second))

    @property
    def position(self) -> float:
        """Seconds to read one prompt token and return its likeliest successors with their log probabilities.

        By vLLM as long as any prompt token, in the reference runtime longer.
        """
        return self.token + (_REFERENCE_POSITION_S if self.by_reference else 0.0)

    @cached_property
    def item_seconds(self) -> Mapping[str, float]:
        """Seconds of one item, by task."""
        step = _CPU_STEP_S + self.size.source / self.rates.read if self.on_cpu else TOKEN_S
        out = max(self.token, step / self.setting.recipe.evaluation.concurrency)
        suite = self.setting.suite
        return {task.task: item_seconds(task, suite, self.token, out) for task in suite.tasks}


def planned_items(setting: Setting) -> Mapping[str, int]:
    """Return the number of items by task: all of them, or at most the recipe's limit."""
    limit = setting.recipe.evaluation.limit
    return {task.task: min(task.items, limit or task.items) for task in setting.suite.tasks}


def control_items(setting: Setting) -> Mapping[str, int]:
    """Return the number of items that the baseline answers twice, by task; perplexity tasks have none."""
    evaluation, items = setting.recipe.evaluation, planned_items(setting)
    scored = [task.task for task in setting.suite.tasks if task.kind == "score"]
    return {name: min(items[name] // evaluation.looks, evaluation.control or 0) for name in scored}


def item_seconds(task: SuiteTask, suite: Suite, token: float, answer_token: float) -> float:
    """Return the seconds of one item of a task, from the seconds of a prompt token and of an answer token.

    An item is the prompts of its choices, a text for perplexity, or a prompt and an answer.
    """
    prompt_tokens = sum(map(_prompt_characters, suite.files(task)[1:])) / TOKEN_BYTES / task.items
    prompt = (prompt_tokens or _ITEM) + _SHOT * (task.num_fewshot or 0)
    if task.kind == "perplexity":
        return _REQUEST_S + (prompt_tokens or _PAGE) * token
    if task.metric.startswith("acc"):
        return _CHOICES * (_REQUEST_S + prompt * token)
    defined = definition(suite.own_tasks, task.task)
    generation: Any = {} if defined is None else defined.data.get("generation_kwargs") or {}
    longest = task.max_gen_tokens or generation.get("max_gen_toks", _ANSWER)
    return _REQUEST_S + prompt * token + min(longest, 2 * _ANSWER) * answer_token


def _prompt_characters(file: Path) -> float:
    """Return the characters of a data file that prompts hold: values without keys, one choice of each list."""
    if file.suffix != ".jsonl":
        return file.stat().st_size
    characters = 0.0
    for line in file.read_text(encoding="utf-8").split("\n"):
        try:
            values = tuple(json.loads(line).values())
        except (ValueError, AttributeError):  # an empty line, and one that lm-eval will not take
            values = (line,)
        characters += sum(
            len(f"{value}") / (len(value) if isinstance(value, list) and value else 1) for value in values
        )
    return characters

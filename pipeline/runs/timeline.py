"""How long a run takes from its first stage to its last: as it took before, else as it is reckoned.

What was seen counts before what is reckoned: a recipe's newest run says how long each stage took here, and a baseline's
stage how long its candidate's takes. Answers are scaled by the items that are asked, weights only count where the stage
is the same. A first run is reckoned by rates of such machines and by what items of such tasks are long.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from quantmint.eval import prompts
from quantmint.eval.suites import Suite, SuiteTask, definition
from quantmint.eval.verdict import Verdict
from quantmint.pipeline.base.hardware import hardware
from quantmint.pipeline.runs.preflight import Prediction
from quantmint.pipeline.stages.bench import START_S, TOKEN_S
from quantmint.pipeline.stages.evaluate import EvaluateStage
from quantmint.pipeline.stages.stage import Planned, Setting
from quantmint.pipeline.store.gc import list_runs

_WEIGHTS: Final = ("sensitivity", "calibrate", "quantize")
_CPU_START_S, _HARNESS_S = 20.0, 5.0
"""Of a server on a CPU, and of lm-eval, which is imported once in a run."""
_REQUEST_S, _READ_S = 0.001, 0.1
"""Of a server's own work for each request, and for one of which each position is told, as the canary's are."""
_BUSY, _CPU_BUSY = 0.4, 0.15
"""Of the rate of products, a GPU's by its data sheet: what a server reaches that reads prompts."""
_REFERENCE_BUSY, _REFERENCE_POSITION_S = 0.8, 0.0025
"""Of the rate of products in float32: what the reference runtime reaches. And of each position whose likeliest tokens
it tells."""
_REFERENCE_IMPORT: Final = 1.2
"""Of the start of a process that has our libraries: that of the reference runtime, which imports lm-eval too."""
_FIRST_LOOK = 0.25
"""Of the canary's prompts: what a candidate reads that is clearly sound."""
_CHOICES, _ITEM, _SHOT, _ANSWER, _PAGE = 4, 100, 120, 150, 5000
"""Of an item of the Hub: its choices, the tokens of one, of a shot before it, of an answer, and of a text whose
perplexity is asked."""
_TOKEN_BYTES: Final = 4
_TELLING: Final = 0.5
"""Share of the answers that an evaluation must have asked for, and not known, for its time to tell of another."""
_FEW: Final = 400
"""Items of which half would show little."""


def ahead(
    plan: Sequence[Planned],
    missing: Collection[str],
    setting: Setting,
    guesses: Mapping[str, float],
    *,
    here: bool = True,
) -> Mapping[str, tuple[float, str]]:
    """Return seconds of a plan's stages: 0 where one is "cached", as in an earlier run ("seen"), or "reckoned".

    ``guesses`` are the seconds that `reckoned` says, by stage. What a library takes to quantize is not known before it
    was seen: its stage is left out, and the sum is a lower bound. Earlier runs of this store tell nothing of another
    machine: they count where the plan is for this one (``here``).
    """
    seen = _seen(setting) if here else {}
    found: dict[str, tuple[float, str]] = {}
    for planned in plan:
        if planned.key not in missing:
            found[planned.key] = 0.0, "cached"
        elif (took := _as_before(planned, setting, seen)) is not None:
            found[planned.key] = took, "seen"
        elif planned.key in guesses:
            found[planned.key] = guesses[planned.key], "reckoned"
    return found


_OF_A_TRY: Final = (
    "quantize", "inspect", "serve-candidate", "canary-candidate", "evaluate-candidate", "bench", "gate", "report",
)  # fmt: skip
"""Stages that each try of a search runs again."""


def further_tries(setting: Setting, took: Mapping[str, float], verdicts: Sequence[Verdict | None]) -> tuple[int, float]:
    """Return how many tries a search may make after the next one, and the seconds that all of them take at most.

    ``took`` are the seconds of the stages of a plan, ``verdicts`` those of the tries that were planned so far.
    """
    search = setting.written.search
    if search is None:
        return 0, 0.0
    left = max(search.tries - 1 - sum(verdict is not None for verdict in verdicts), 0)
    return left, left * sum(took.get(key, 0.0) for key in _OF_A_TRY)


def _seen(setting: Setting) -> Mapping[str, tuple[str, float]]:
    """By stage the fingerprint and the seconds of the recipe's newest run that made it."""
    found: dict[str, tuple[str, float]] = {}
    for run in list_runs(setting.store.root):
        stages: Any = run.facts.get("stages", {}) if run.recipe == setting.recipe.name else {}
        for key, facts in stages.items():
            if not facts["cached"]:
                found.setdefault(key, (facts["fingerprint"], facts["seconds"]))
    return found


def _as_before(planned: Planned, setting: Setting, seen: Mapping[str, tuple[str, float]]) -> float | None:
    other = planned.key.replace("candidate", "baseline")
    print_, seconds = seen.get(planned.key) or seen.get(other) or ("", 0.0)
    if not print_ or (planned.key in _WEIGHTS and print_ != planned.fingerprint):
        return None
    if isinstance(planned.stage, EvaluateStage):
        entry = setting.store.find(planned.family, print_)
        result: Any = {"items": {}} if entry is None else entry.record.result
        planned_before = sum(items for _, items in result["items"].values())
        answered = sum(answered for answered, _ in result["items"].values())
        share = sum(result["asked"].values()) / max(answered, 1) if "asked" in result else 1.0
        if share < _TELLING:  # most answers were known: the time tells nothing
            return None
        if planned_before:  # a candidate is taken to be asked the same share of what is planned
            return float(seconds / share * sum(_items(setting).values()) / planned_before)
    return seconds


def _items(setting: Setting) -> Mapping[str, int]:
    """The items of each task, as many of them as the recipe asks for."""
    limit = setting.recipe.evaluation.limit
    return {task.task: min(task.items, limit or task.items) for task in setting.suite.tasks}


def reckoned(
    setting: Setting,
    size: Prediction,
    costs: Mapping[str, Any],
    asked: Mapping[str, int | None],
    bench_s: float | None,
) -> Mapping[str, float]:
    """Seconds of each stage on such a machine, where nothing was seen.

    ``costs`` is `pipeline.stages.cost.forecast`, ``asked`` the items of each task that a lossless candidate is asked
    (None: all), ``bench_s`` what measuring throughput takes.
    """
    rates, own = costs["rates"], {name: cost["seconds"] for name, cost in costs["stages"].items() if name != "start"}
    target = setting.recipe.target
    on_cpu = target.hardware == "cpu"  # what serves is the target, whatever this machine is
    by_reference = setting.recipe.evaluation.runtime == "reference"  # which computes on one device, in float32
    peak = dict(hardware(target.hardware).tflops).get("bf16", 989.4)  # what is not known is taken for an H100
    if by_reference:
        flops = _REFERENCE_BUSY * rates["float32"]
    else:
        flops = _CPU_BUSY * rates["flops"] if on_cpu else target.gpus * _BUSY * peak * 1e12
    if by_reference:
        start = _REFERENCE_IMPORT * rates["start"] + 2 * size.source / rates["load"]  # 16 bit, read as float32
    else:
        start = (_CPU_START_S if on_cpu else START_S) + size.source / rates["disk"]
    # When the side that answers changes; a CPU that has the room starts both of vLLM's at once, and keeps them.
    restart = 0.0 if on_cpu and not by_reference else start
    token_s = 2.0 * size.parameters / flops
    step_s = 0.005 + size.source / rates["read"] if on_cpu else TOKEN_S
    out_s = max(token_s, step_s / setting.recipe.evaluation.concurrency)
    each = {task.task: _item_s(task, setting.suite, token_s, out_s) for task in setting.suite.tasks}
    items = _items(setting)
    answers = sum(items[name] * seconds for name, seconds in each.items())
    candidate = sum(min(items[name], asked.get(name) or items[name]) * seconds for name, seconds in each.items())
    position_s = token_s + (_REFERENCE_POSITION_S if by_reference else 0.0)
    canary = sum(  # one after the other
        _READ_S + len(prompt.text) / _TOKEN_BYTES * position_s for prompt in prompts.load(setting.suite.canary)
    )
    return {
        "source": size.source / rates["hash"],
        **own,
        "inspect": size.checkpoint / rates["hash"] if "quantize" in own else size.source / rates["load"],
        "serve-baseline": start,
        "serve-candidate": restart,
        "canary-baseline": canary,
        "canary-candidate": _FIRST_LOOK * canary,
        "evaluate-baseline": restart + _HARNESS_S + answers,
        "control": sum(count * each[name] for name, count in _again(setting).items()),
        "evaluate-candidate": restart + candidate,
        **({} if bench_s is None else {"bench": bench_s}),
        "gate": 0.5,
        "report": 2.0,
        "package": 1.0 + size.checkpoint / rates["hash"],
        "sign": 1.0 + size.checkpoint / rates["hash"],
        "publish": 1.0 + size.checkpoint / rates["sync"],
    }


def _item_s(task: SuiteTask, suite: Suite, token_s: float, out_s: float) -> float:
    """Seconds of one item: the prompts of its choices, a text, or a prompt and an answer."""
    own = sum(map(_prose, suite.files(task)[1:])) / _TOKEN_BYTES / task.items
    prompt = (own or _ITEM) + _SHOT * (task.num_fewshot or 0)
    if task.kind == "perplexity":
        return _REQUEST_S + (own or _PAGE) * token_s
    if task.metric.startswith("acc"):
        return _CHOICES * (_REQUEST_S + prompt * token_s)
    defined = definition(suite.own_tasks, task.task)
    generation: Any = {} if defined is None else defined.data.get("generation_kwargs") or {}
    longest = task.max_gen_tokens or generation.get("max_gen_toks", _ANSWER)
    return _REQUEST_S + prompt * token_s + min(longest, 2 * _ANSWER) * out_s


def _prose(file: Path) -> float:
    """Characters of a task's data that prompts hold: no keys, and of choices one."""
    if file.suffix != ".jsonl":
        return file.stat().st_size
    found = 0.0
    for line in file.read_text(encoding="utf-8").split("\n"):
        try:
            values = tuple(json.loads(line).values())
        except (ValueError, AttributeError):  # an empty one, and what lm-eval will not take
            values = (line,)
        found += sum(len(f"{value}") / (len(value) if isinstance(value, list) and value else 1) for value in values)
    return found


def _again(setting: Setting) -> Mapping[str, int]:
    """What a baseline answers twice, of the first look of the tasks whose answers can flip."""
    evaluation, items = setting.recipe.evaluation, _items(setting)
    scored = [task.task for task in setting.suite.tasks if task.kind == "score"]
    return {name: min(items[name] // evaluation.looks, evaluation.control or 0) for name in scored}


def savings(took: Mapping[str, float], setting: Setting) -> Sequence[tuple[str, float]]:
    """What would save most of a run, as a setting and its seconds; nothing that saves less than a tenth of it."""
    items, again = _items(setting), _again(setting)
    most = max(items.values(), default=0)
    asking = sum(took.get(key, 0.0) for key in ("evaluate-baseline", "evaluate-candidate"))
    half = sum(min(count, most // 2) for count in items.values()) / max(1, sum(items.values()))
    fewer = sum(min(count, 100) for count in again.values()) / max(1, sum(again.values()))
    offers = [
        (f"evaluation.limit: {most // 2}", asking * (1 - half) if most >= _FEW else 0.0),
        ("evaluation.control: 100", took.get("control", 0.0) * (1 - fewer)),
        ("gate.throughput.min_ratio: null", took.get("bench", 0.0)),
    ]
    total = sum(took.values())
    return sorted((one for one in offers if one[1] > 0.1 * total), key=lambda one: -one[1])

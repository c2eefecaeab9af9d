"""reasoning: both sides answer problems several times, sampled as the model's own generation_config.json says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from quantmint.eval import reasoning
from quantmint.eval.chat import ChatAnswer, ChatItem
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.hardware import hardware
from quantmint.pipeline.quantize.digest import chat_template
from quantmint.pipeline.quantize.formats.checkpoint import read_json
from quantmint.pipeline.recipe.endpoints import Reasoning
from quantmint.pipeline.recipe.faults import Fault
from quantmint.pipeline.recipe.load import LoadedRecipe
from quantmint.pipeline.stages.chat import ChatStage, file_faults
from quantmint.pipeline.stages.estimate import Estimate
from quantmint.pipeline.stages.serve import require_server
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.source import config_folder
from quantmint.pipeline.stages.stage import Check

GENERATION = "generation_config.json"
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_PROMPT, _ANSWER = 200, 1500
"""Tokens of a problem, and of an answer with its thoughts where nothing else limits it."""
_SHOWN = 1000


class ReasoningStage(ChatStage):
    """Ask a side each problem several times, sampled; an item's score is a share of its answers."""

    family = "reasoning"
    repeats = False

    def checks(self, setting: Setting) -> Sequence[Check]:
        """Return `require_server`, and whether the model has a chat template."""
        return (require_server, _require_template)

    def items(self, setting: Setting) -> Sequence[ChatItem]:
        """Return the generated problems, or those of the recipe's file."""
        file = setting.loaded.items_file(self.family)
        if file is not None:
            return reasoning.read(file)
        return reasoning.generated(_section(setting).items, setting.recipe.evaluation.seed)

    def request(self, setting: Setting, folder: Path) -> Mapping[str, object]:
        """Return the sampling of the model's generation_config.json, the recipe's own temperature before it."""
        section = _section(setting)
        length = {} if section.max_tokens is None else {"max_tokens": section.max_tokens}
        return {**sampling(folder, section), "n": section.answers, **length}

    def item_request(self, setting: Setting, item: ChatItem) -> Mapping[str, object]:
        """Return the seed of an item's samples, which both sides share; none on a CPU.

        There vLLM 0.32 dies of a seeded request whose prompt is read in parts: it moves the offset of the request's
        generator, and a CPU's has none.
        """
        if hardware(setting.recipe.target.hardware).kind == "cpu":
            return {}
        return {"seed": setting.recipe.evaluation.seed * 100_003 + item.number}

    def scores(self, item: ChatItem, answers: Sequence[ChatAnswer]) -> Mapping[str, float]:
        """Return the shares of answers that are right, complete, and without a loop."""
        return reasoning.scores(item, answers)

    def shown(self, answers: Sequence[ChatAnswer]) -> str:
        """Return the ends of all answers."""
        return "\n---\n".join(f"{answer.text[-_SHOWN:]} [{answer.finish}]" for answer in answers)

    def plan_settings(self, setting: Setting) -> Mapping[str, object]:
        """Return the number of problems and answers, the longest answer, and a temperature of the recipe's own."""
        section = _section(setting)
        return {
            "items": section.items,
            "answers": section.answers,
            "max_tokens": section.max_tokens,
            "temperature": section.temperature,
        }

    def item_seconds(self, estimate: Estimate) -> float:
        """Return the seconds of one problem: its answers share the prompt, and a step with all others in flight."""
        section, recipe = _section(estimate.setting), estimate.setting.recipe
        longest = min(section.max_tokens or _ANSWER, recipe.target.max_model_len, _ANSWER)
        in_flight = recipe.evaluation.concurrency * section.answers
        step = estimate.answer_step(in_flight, _PROMPT + longest / 2) / in_flight
        return _PROMPT * estimate.token + section.answers * longest * max(step, estimate.token)


def sampling(folder: Path, section: Reasoning) -> dict[str, object]:
    """Return temperature, top-p and the like of a model's generation_config.json; without a temperature it is 1."""
    path = folder / GENERATION
    stated = read_json(path) if path.is_file() else {}
    values = {name: stated[name] for name in _SAMPLING if stated.get(name) is not None}
    values = {"temperature": 1.0, **values}
    return values if section.temperature is None else {**values, "temperature": section.temperature}


def _section(setting: Setting) -> Reasoning:
    section = setting.recipe.evaluation.reasoning
    assert section is not None  # noqa: S101 - else there is no such stage
    return section


def reasoning_faults(loaded: LoadedRecipe) -> list[Fault]:
    """Return faults of `evaluation.reasoning` that follow from the recipe: runtime, lengths, file of problems."""
    section, longest = loaded.recipe.evaluation.reasoning, loaded.recipe.target.max_model_len
    if section is None:
        return []
    at = ("evaluation", "reasoning")
    faults: list[Fault] = []
    if loaded.recipe.evaluation.runtime == "reference":
        fault = "found reasoning with runtime reference, expected vllm: only its server is asked by chat"
        faults.append(loaded.fault(at, fault))
    if section.max_tokens is not None and section.max_tokens >= longest:
        fault = f"found {section.max_tokens}, expected less than {longest}, the recipe's target.max_model_len"
        faults.append(loaded.fault((*at, "max_tokens"), fault))
    return [*faults, *file_faults(loaded, "reasoning", reasoning.read, section.items)]


def _require_template(setting: Setting) -> None:
    """Raise `UserError` where a local model has no chat template, and the recipe names none."""
    folder = setting.source.folder
    if folder is None or "--chat-template" in setting.recipe.serve.arguments:
        return
    if chat_template(config_folder(setting.source)) is None:
        raise UserError(
            f"{setting.loaded.place('evaluation', 'reasoning')}: evaluation.reasoning: found no chat template in "
            f"{setting.loaded.source_name}, expected one, because problems are asked by chat.",
            hint="`serve: {arguments: [--chat-template, FILE]}` names one.",
        )

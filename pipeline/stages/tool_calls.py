"""tools: both sides are asked to call functions, and their calls are held against the functions' JSON Schemas."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise, zip_longest
from pathlib import Path

from quantmint.eval import tool_calls
from quantmint.eval.chat import ChatAnswer, ChatItem
from quantmint.pipeline.base.errors import UserError, did_you_mean
from quantmint.pipeline.quantize.digest import chat_template
from quantmint.pipeline.recipe.endpoints import ToolCalls
from quantmint.pipeline.recipe.faults import Fault, refuse
from quantmint.pipeline.recipe.load import LoadedRecipe
from quantmint.pipeline.stages.chat import ChatStage, file_faults
from quantmint.pipeline.stages.estimate import Estimate
from quantmint.pipeline.stages.serve import require_server
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.source import config_folder
from quantmint.pipeline.stages.stage import Check
from quantmint.pipeline.store.disk import sha256_of

_PROMPT, _ANSWER = 600, 60
"""Tokens of a prompt with four functions, and of a call."""
_PARSER, _CHOICE, _PLUGIN = "--tool-call-parser", "--enable-auto-tool-choice", "--tool-parser-plugin"
_ADVICE = f"serve: {{arguments: [{_CHOICE}, {_PARSER}, NAME]}}"
_TABLES = ("_TOOL_PARSERS_TO_REGISTER", "_TOOL_PARSERS", "_PARSERS")
_LOCATE = "import importlib.util as u; print(u.find_spec('vllm').submodule_search_locations[0])"


class ToolCallsStage(ChatStage):
    """Ask a side to call functions at temperature 0."""

    family = "tools"

    def checks(self, setting: Setting) -> Sequence[Check]:
        """Return `require_server`, and whether server and model can call functions at all."""
        return (require_server, _require_parser, _require_template)

    def items(self, setting: Setting) -> Sequence[ChatItem]:
        """Return the generated requests, or those of the recipe's file."""
        section, file = _section(setting), setting.loaded.items_file(self.family)
        if file is not None:
            return tool_calls.read(file)
        return tool_calls.generated(section.items, setting.recipe.evaluation.seed)

    def request(self, setting: Setting, folder: Path) -> Mapping[str, object]:
        """Return the request: the model decides whether it calls, at temperature 0."""
        return {"temperature": 0, "max_tokens": _section(setting).max_tokens, "tool_choice": "auto"}

    def scores(self, item: ChatItem, answers: Sequence[ChatAnswer]) -> Mapping[str, float]:
        """Return whether the calls are right, and whether they are valid."""
        return tool_calls.scores(item, answers[0])

    def shown(self, answers: Sequence[ChatAnswer]) -> str:
        """Return the calls, one to a line."""
        return tool_calls.shown(answers[0])

    def plan_settings(self, setting: Setting) -> Mapping[str, object]:
        """Return the number of requests, the longest answer, and the table that requests are generated from."""
        section = _section(setting)
        table = {} if section.file is not None else {"table": sha256_of(tool_calls.TABLE)}
        return {"items": section.items, "max_tokens": section.max_tokens, **table}

    def item_seconds(self, estimate: Estimate) -> float:
        """Return the seconds of one request: its prompt is mostly the functions on offer."""
        in_flight = estimate.setting.recipe.evaluation.concurrency
        return _PROMPT * estimate.token + _ANSWER * estimate.answer_step(in_flight, _PROMPT) / in_flight


def _section(setting: Setting) -> ToolCalls:
    section = setting.recipe.evaluation.tools
    assert section is not None  # noqa: S101 - else there is no such stage
    return section


def tool_faults(loaded: LoadedRecipe) -> list[Fault]:
    """Return faults of `evaluation.tools` that follow from the recipe: runtime, tool parser, file of requests."""
    section, arguments = loaded.recipe.evaluation.tools, loaded.recipe.serve.arguments
    if section is None:
        return []
    at = ("evaluation", "tools")
    faults: list[Fault] = []
    if loaded.recipe.evaluation.runtime == "reference":
        faults.append(
            loaded.fault(at, "found tools with runtime reference, expected vllm: only its server calls functions")
        )
    elif parser_of(arguments) is None or _CHOICE not in arguments:
        absent = _PARSER if parser_of(arguments) is None else _CHOICE
        fault = f"found tools without {absent} in serve.arguments, expected `{_ADVICE}` with the model's parser"
        faults.append(loaded.fault(at, f"{fault}, such as hermes, llama3_json or mistral"))
    return [*faults, *file_faults(loaded, "tools", tool_calls.read, section.items)]


def parser_of(arguments: Sequence[str]) -> str | None:
    """Return the tool parser that arguments of `vllm serve` name, None where they name none."""
    for word, following in zip_longest(arguments, arguments[1:]):
        name, _, value = word.partition("=")
        if name.replace("_", "-") == _PARSER:
            return value or following
    return None


def _require_parser(setting: Setting) -> None:
    """Raise `RecipeError` for a tool parser that the serving environment does not have, and no plugin brings."""
    parser = parser_of(setting.recipe.serve.arguments)
    plugged = any(word.partition("=")[0].replace("_", "-") == _PLUGIN for word in setting.recipe.serve.arguments)
    names = () if setting.vllm is None or plugged else tool_parsers(setting.vllm.python)
    if parser is not None and names and parser not in names:
        hint = did_you_mean(parser, names)
        message = f"found the tool parser {parser}, expected one of vLLM's: {', '.join(names)}{hint}"
        refuse([setting.loaded.fault(("serve", "arguments"), message)])


def tool_parsers(python: Path) -> tuple[str, ...]:
    """Return the names of the tool parsers of the vLLM in an environment, sorted; empty where it does not tell.

    They are read from vLLM's source, because importing it takes ten seconds.
    """
    with suppress(OSError, subprocess.SubprocessError, SyntaxError, ValueError, AttributeError):
        run = subprocess.run([str(python), "-P", "-c", _LOCATE], capture_output=True, text=True, timeout=60, check=True)
        source = Path(run.stdout.strip()) / "tool_parsers" / "__init__.py"
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            value = getattr(node, "value", None)
            named = {target.id for target in targets if isinstance(target, ast.Name)}
            if named & set(_TABLES) and isinstance(value, ast.Dict):
                return tuple(sorted(str(key.value) for key in value.keys if isinstance(key, ast.Constant)))
    return ()


def _require_template(setting: Setting) -> None:
    """Raise `UserError` where the model's chat template, if it is here, has no place for functions."""
    words = pairwise(setting.recipe.serve.arguments)
    overriding = next((following for word, following in words if word == "--chat-template"), None)
    folder = config_folder(setting.source)
    template = chat_template(folder, overriding)
    if template is not None and "tools" in template:
        return
    if template is None and setting.source.folder is None:
        return  # of a repository only config.json may be here yet
    state = "no chat template" if template is None else "a chat template that never mentions tools"
    raise UserError(
        f"{setting.loaded.place('evaluation', 'tools')}: evaluation.tools: found {state} in "
        f"{setting.loaded.source_name}, expected one that shows the functions on offer to the model.",
        hint="`serve: {arguments: [--chat-template, FILE]}` names another template.",
    )

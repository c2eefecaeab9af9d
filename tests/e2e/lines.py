"""The embedded model as one that is asked by chat: a template of the bare question, and a tool parser for its answers.

Run by vLLM as a plugin (``--tool-parser-plugin``), the parser makes a call of the first word that the model says. So a
model that knows nothing of functions calls the right one exactly where it knows the fact.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from quantmint.eval import suites

TEMPLATE = "{# tools #}{% for message in messages %}{{ message.content }}{% endfor %}"
PARSER = """
import json

from vllm.entrypoints.generate.base.protocol import ExtractedToolCallInformation, FunctionCall, ToolCall
from vllm.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager


@ToolParserManager.register_module("lines")
class Lines(ToolParser):
    def extract_tool_calls(self, model_output, request):
        word = model_output.strip().split(".")[0].split(" ")[0]
        call = ToolCall(function=FunctionCall(name="answer", arguments=json.dumps({"value": word})))
        return ExtractedToolCallInformation(tools_called=bool(word), tool_calls=[call] if word else [], content=None)
"""
ARGUMENTS = ("--enable-auto-tool-choice", "--tool-call-parser", "lines", "--tool-parser-plugin")


def chatting_model(folder: Path) -> Path:
    """A copy of the embedded model with a chat template, and the tool parser beside it."""
    shipped = Path(str(suites.__file__)).parents[1] / "recipes" / "tiny" / "model"
    shutil.copytree(shipped, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder.parent / "lines_parser.py").write_text(PARSER)
    return folder


def facts() -> list[tuple[str, str, list[str]]]:
    """Questions of the shipped facts, the right word, and the words on offer."""
    rows = (suites.TASKS_FOLDER / "tiny_facts.jsonl").read_text().splitlines()
    return [(r["question"], r["choices"][r["answer"]], r["choices"]) for r in map(json.loads, rows)]


def calls(path: Path, count: int) -> Path:
    """A file of so many calls: a fact is asked for, and its word is the one argument."""
    lines: list[dict[str, Any]] = []
    for question, word, words in facts()[:count]:
        parameters = {"type": "object", "properties": {"value": {"type": "string"}}, "required": ["value"]}
        tool = {
            "type": "function",
            "function": {"name": "answer", "parameters": parameters, "description": ", ".join(words)},
        }
        lines.append(
            {"request": question, "tools": [tool], "calls": [{"name": "answer", "arguments": {"value": word}}]}
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path

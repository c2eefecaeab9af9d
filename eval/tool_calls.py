"""Function calls with a known right answer: generated requests, or a file of the user's own, and how they are scored.

    >>> item = generated(600, seed=1234)[0]
    >>> scores(item, ChatAnswer("", calls=((item.target[0]["name"], json.dumps(item.target[0]["arguments"])),)))
    {'tool_calls': 1.0, 'tool_calls_valid': 1.0}

The functions, sentences and values are data, in `tool_calls.yaml`; an item is a random choice among them that follows
from the seed alone. Each request offers four functions, every sixth asks for two calls.

Two scores: **valid**, that every call names a function on offer, with arguments that are JSON and keep its schema; and
**exact**, that the calls are the right ones, in any order, with equal arguments.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

from quantmint.eval.arguments import equal, unread_keyword, violation
from quantmint.eval.chat import ChatAnswer, ChatItem, read_lines
from quantmint.eval.errors import DefinitionError

EXACT, VALID = "tool_calls", "tool_calls_valid"
"""The tasks of this endpoint, as a gate's record names them."""
TABLE = Path(__file__).with_suffix(".yaml")
"""File of the functions, sentences and values that items are drawn from."""
_OFFERED: Final = 4
_TWO_CALLS: Final = 6
_SLOT = re.compile(r"\{([\w.]+)\}")


def generated(count: int, seed: int) -> tuple[ChatItem, ...]:
    """Return ``count`` generated items; the first ones of a longer list are the same."""
    return tuple(_item(number, seed) for number in range(count))


def read(path: Path) -> tuple[ChatItem, ...]:
    """Return the items of a JSONL file: `messages` (or a `request`), `tools` as of the chat API, and the right `calls`.

    A call is a mapping with `name` and `arguments`; an empty list says that no function is to be called. Raises
    `DefinitionError` with file and line.
    """
    items: list[ChatItem] = []
    for line, row in read_lines(path, ("tools", "calls"), ("request", "messages")):
        if ("request" in row) == ("messages" in row):
            raise DefinitionError(f"{path}:{line}: expected either request or messages")
        messages = row.get("messages") or [{"role": "user", "content": str(row.get("request"))}]
        fault = _fault(messages, row["tools"], row["calls"])
        if fault is not None:
            raise DefinitionError(f"{path}:{line}: {fault}")
        items.append(ChatItem(len(items), tuple(messages), row["calls"], tuple(row["tools"])))
    return tuple(items)


def scores(item: ChatItem, answer: ChatAnswer) -> dict[str, float]:
    """Return both scores of an answer, 0 or 1; no call at all is valid where none is right, and only there."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in item.tools}
    calls = [(name, _parsed(arguments)) for name, arguments in answer.calls]
    valid = bool(calls) == bool(item.target) and all(
        name in schemas and isinstance(arguments, dict) and violation(arguments, schemas[name]) is None
        for name, arguments in calls
    )
    missing = list(item.target)
    for name, arguments in calls:
        match = next((t for t in missing if t["name"] == name and equal(t["arguments"], arguments)), None)
        if match is None:
            break
        missing.remove(match)
    exact = valid and not missing and len(calls) == len(item.target)
    return {EXACT: float(exact), VALID: float(valid)}


def shown(answer: ChatAnswer) -> str:
    """Return an answer as text for a reader: the calls one to a line, or the text without any."""
    return "\n".join(f"{name}({arguments})" for name, arguments in answer.calls) or answer.text


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return None


def _fault(messages: Any, tools: Any, calls: Any) -> str | None:
    """Return how a line of a file is wrong: its messages, its functions, or calls that its functions do not allow."""
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages
    ):
        return "messages: expected a list of mappings with role and content"
    if not isinstance(tools, list) or not tools:
        return "tools: expected a list with at least one function"
    schemas: dict[str, Any] = {}
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return 'tools: expected mappings such as {"type": "function", "function": {"name": ..., "parameters": ...}}'
        schemas[function["name"]] = function.get("parameters", {})
        if (unread := unread_keyword(schemas[function["name"]])) is not None:
            return f"tools: {function['name']}: {unread}"
    if not isinstance(calls, list) or not all(isinstance(c, dict) and c.keys() == {"name", "arguments"} for c in calls):
        return "calls: expected a list of mappings with name and arguments"
    for call in calls:
        if call["name"] not in schemas:
            return f"calls: found {call['name']!r}, expected one of {', '.join(schemas)}"
        if (broken := violation(call["arguments"], {"type": "object", **schemas[call["name"]]})) is not None:
            return f"calls: {call['name']}: {broken}"
    return None


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return table


class _Draws:
    """Random numbers of an item, a SHA-256 for each: the same on every machine and in every version of Python."""

    def __init__(self, seed: int, number: int) -> None:
        self._name, self._count = f"{seed}: call {number}", 0

    def below(self, count: int) -> int:
        """Return a whole number from 0 to ``count`` - 1."""
        self._count += 1
        digest = hashlib.sha256(f"{self._name}: {self._count}".encode()).digest()
        return int.from_bytes(digest[:8]) % count

    def some(self, values: Sequence[Any], count: int) -> list[Any]:
        """Return ``count`` different values in a random order."""
        pool = list(values)
        return [pool.pop(self.below(len(pool))) for _ in range(count)]


def _item(number: int, seed: int) -> ChatItem:
    draws, functions = _Draws(seed, number), _table()["functions"]
    names = draws.some(sorted(functions), _OFFERED)
    called = names[: 2 if draws.below(_TWO_CALLS) == 0 else 1]
    requests = [_request(functions[name], draws) for name in called]
    text = " Also: ".join(sentence for sentence, _ in requests)
    offered = draws.some(names, len(names))
    return ChatItem(
        number,
        ({"role": "user", "content": text},),
        [{"name": name, "arguments": arguments} for name, (_, arguments) in zip(called, requests, strict=True)],
        tuple(_tool(name, functions[name]) for name in offered),
    )


def _tool(name: str, function: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {key: _sent(schema) for key, schema in function["properties"].items()},
        "required": function["required"],
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "function": {"name": name, "description": function["description"], "parameters": parameters},
    }


def _sent(schema: Any) -> Any:
    """Return a schema without the names of pools, which only this module reads."""
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _sent(part) for name, part in value.items()} if key == "properties" else _sent(value)
        for key, value in schema.items()
        if key != "pool"
    }


def _request(function: Mapping[str, Any], draws: _Draws) -> tuple[str, dict[str, Any]]:
    """Return a sentence and the arguments that it asks for."""
    request = function["requests"][draws.below(len(function["requests"]))]
    arguments: dict[str, Any] = dict(request.get("with", {}))
    text = str(request["text"])
    for slot in _SLOT.findall(text):
        *parents, name = slot.split(".")
        schemas, values = function["properties"], arguments
        for parent in parents:
            schemas, values = schemas[parent]["properties"], values.setdefault(parent, {})
        excluded = [value for key, value in values.items() if schemas[key].get("pool") == schemas[name].get("pool")]
        values[name] = _value(schemas[name], draws, excluded if "pool" in schemas[name] else ())
        text = text.replace(f"{{{slot}}}", _words(values[name]))
    return text, arguments


def _value(schema: Mapping[str, Any], draws: _Draws, excluded: Sequence[Any] = ()) -> Any:
    """Return a random value of a schema, none of those ``excluded`` from the same pool before."""
    if "enum" in schema:
        return schema["enum"][draws.below(len(schema["enum"]))]
    match schema["type"]:
        case "integer":
            return schema["minimum"] + draws.below(schema["maximum"] - schema["minimum"] + 1)
        case "number":
            step = schema["multipleOf"]
            return schema["minimum"] + step * draws.below(round((schema["maximum"] - schema["minimum"]) / step) + 1)
        case "array":
            count = schema["minItems"] + draws.below(schema["maxItems"] - schema["minItems"] + 1)
            return draws.some(_table()["pools"][schema["items"]["pool"]], count)
    free = [value for value in _table()["pools"][schema["pool"]] if value not in excluded]
    return free[draws.below(len(free))]


def _words(value: Any) -> str:
    if not isinstance(value, list):
        return f"{value:g}" if isinstance(value, float) else str(value)
    return " and ".join(filter(None, (", ".join(value[:-1]), value[-1])))

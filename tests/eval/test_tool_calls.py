"""Generated calls, arguments beside jsonschema, the scores of answers, and files of a user's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantmint.eval import tool_calls
from quantmint.eval.arguments import equal, unread_keyword, violation
from quantmint.eval.chat import ChatAnswer, ChatItem
from quantmint.eval.errors import DefinitionError
from quantmint.eval.gate import GateReport, judge
from quantmint.eval.harness import digest
from quantmint.eval.samples import SampleSet
from quantmint.eval.verdict import Verdict
from tests.eval.report import made

ITEMS = tool_calls.generated(600, seed=1234)


def right(item: ChatItem) -> ChatAnswer:
    return ChatAnswer("", tuple((call["name"], json.dumps(call["arguments"])) for call in item.target), "tool_calls")


@pytest.mark.slow
def test_generated_calls_keep_their_schemas_and_are_the_same_for_ever() -> None:
    for item in ITEMS:
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in item.tools}
        assert len(schemas) == 4
        for call in item.target:
            jsonschema.Draft202012Validator.check_schema(schemas[call["name"]])
            jsonschema.validate(call["arguments"], schemas[call["name"]])
        assert tool_calls.scores(item, right(item)) == {"tool_calls": 1.0, "tool_calls_valid": 1.0}
    assert tool_calls.generated(50, seed=1234) == ITEMS[:50]
    assert tool_calls.generated(50, seed=1) != ITEMS[:50]
    # Measurements of earlier versions are compared with those of later ones: an edited table would be another suite.
    assert digest([(item.prompt, item.target, item.tools) for item in ITEMS]) == "8a032d9a5536f0ae"


def test_requests_say_what_they_ask_for() -> None:
    """Each argument that a function has and a request leaves out is optional, and each value stands in the sentence."""
    assert 60 < sum(len(item.target) == 2 for item in ITEMS) < 140
    used = {call["name"] for item in ITEMS for call in item.target}
    assert used == {tool["function"]["name"] for item in ITEMS for tool in item.tools}
    for item in ITEMS:
        for call in item.target:
            for value in _leaves(call["arguments"]):
                if not isinstance(value, bool):
                    assert (f"{value:g}" if isinstance(value, float) else str(value)) in item.prompt


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in _leaves(part)]
    return [leaf for part in value for leaf in _leaves(part)] if isinstance(value, list) else [value]


@pytest.mark.parametrize(
    ("calls", "exact", "valid"),
    [
        ([("set_timer", '{"minutes": 4}')], 1, 1),
        ([("set_timer", '{"minutes": 4.0}')], 1, 1),
        ([("set_timer", '{"minutes": 5}')], 0, 1),
        ([("set_timer", '{"minutes": 4, "label": "tea"}')], 0, 1),
        ([("set_timer", '{"minutes": "4"}')], 0, 0),
        ([("set_timer", '{"minutes": 4, "loud": true}')], 0, 0),
        ([("set_timer", '{"minutes": 4')], 0, 0),
        ([("set_timer", "[4]")], 0, 0),
        ([("start_timer", '{"minutes": 4}')], 0, 0),
        ([("set_timer", '{"minutes": 4}'), ("set_timer", '{"minutes": 4}')], 0, 1),
        ([], 0, 0),
    ],
)
def test_scores(calls: list[tuple[str, str]], exact: int, valid: int) -> None:
    item = next(
        item for item in ITEMS if item.target == [{"name": "set_timer", "arguments": item.target[0]["arguments"]}]
    )
    item = ChatItem(0, item.messages, [{"name": "set_timer", "arguments": {"minutes": 4}}], item.tools)
    assert tool_calls.scores(item, ChatAnswer("", tuple(calls))) == {"tool_calls": exact, "tool_calls_valid": valid}


def test_two_calls_may_come_in_any_order_and_none_is_right_where_none_is_asked_for() -> None:
    item = next(item for item in ITEMS if len(item.target) == 2)
    answer = right(item)
    assert tool_calls.scores(item, ChatAnswer("", answer.calls[::-1]))["tool_calls"] == 1
    assert tool_calls.scores(item, ChatAnswer("", answer.calls[:1])) == {"tool_calls": 0.0, "tool_calls_valid": 1.0}
    nothing = ChatItem(0, item.messages, [], item.tools)
    assert tool_calls.scores(nothing, ChatAnswer("I cannot.")) == {"tool_calls": 1.0, "tool_calls_valid": 1.0}
    assert tool_calls.scores(nothing, answer) == {"tool_calls": 0.0, "tool_calls_valid": 0.0}


def judged(second: list[ChatAnswer]) -> GateReport:
    """The gate on right answers of a baseline, and these of a candidate."""
    sides = []
    for answers in ([right(item) for item in ITEMS], second):
        found = [tool_calls.scores(item, answer) for item, answer in zip(ITEMS, answers, strict=True)]
        tasks = (tool_calls.EXACT, tool_calls.VALID)
        rows = {t: [item.sample(t, s[t]) for item, s in zip(ITEMS, found, strict=True)] for t in tasks}
        sides.append({task: SampleSet(task, "exact_match", tuple(samples)) for task, samples in rows.items()})
    pairs = {task: (sides[0][task], sides[1][task]) for task in sides[0]}
    margins = {**made.policy().margins, tool_calls.EXACT: 0.04, tool_calls.VALID: 0.03}
    return judge(made.measurements(samples={**made.measurements().samples, **pairs}), made.policy(margins=margins))


def test_the_gate_passes_a_copy_and_stops_calls_that_no_longer_parse() -> None:
    same = [right(item) for item in ITEMS]
    report = judged(same)
    assert [report.verdict_of("accuracy", task) for task in (tool_calls.EXACT, tool_calls.VALID)] == [Verdict.PASS] * 2
    cut = [ChatAnswer("", tuple((name, text[: -(n % 10 == 0) or None]) for name, text in answer.calls))
           for n, answer in enumerate(same)]  # fmt: skip
    report = judged(cut)
    assert [report.verdict_of("accuracy", task) for task in (tool_calls.EXACT, tool_calls.VALID)] == [Verdict.FAIL] * 2
    (exact,) = (result for result in report.accuracy if result.task == tool_calls.EXACT)
    assert (exact.losses, exact.gains) == (60, 0)
    assert exact.mcnemar_p is not None
    assert exact.mcnemar_p < 1e-12


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.sampled_from([0.5, 2.0, -3.5])
    | st.sampled_from(["", "a", "bc"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
_NAMES = st.lists(st.sampled_from("abc"), unique=True)
_SCHEMAS = st.recursive(
    st.fixed_dictionaries({}, optional={
        "type": st.sampled_from(["object", "array", "string", "boolean", "null", "integer", "number"]),
        "enum": st.lists(_VALUES, min_size=1, max_size=3), "const": _VALUES,
        "minimum": st.integers(-3, 3), "maximum": st.integers(-3, 3), "multipleOf": st.sampled_from([1, 2, 0.5]),
        "minLength": st.integers(0, 2), "maxLength": st.integers(0, 2),
        "minItems": st.integers(0, 2), "maxItems": st.integers(0, 2), "required": _NAMES,
    }),
    lambda inner: st.fixed_dictionaries({}, optional={
        "type": st.sampled_from(["object", "array"]), "items": inner, "required": _NAMES,
        "properties": st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        "additionalProperties": st.booleans() | inner,
    }),
    max_leaves=5,
)  # fmt: skip


@pytest.mark.slow
@given(_VALUES, _SCHEMAS)
@settings(max_examples=500, deadline=None)
def test_arguments_are_judged_as_jsonschema_judges_them(value: Any, schema: dict[str, Any]) -> None:
    assert unread_keyword(schema) is None
    assert (violation(value, schema) is None) == jsonschema.Draft202012Validator(schema).is_valid(value)


def test_equality_is_that_of_json() -> None:
    assert equal({"a": [1, 2.0]}, {"a": [1.0, 2]})
    assert not equal(1, True)
    assert not equal([1], [1, 1])
    assert not equal({"a": 1}, {"a": 1, "b": 1})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "calls.jsonl:2: not JSON"),
        ('{"tools": [], "calls": []}', "calls.jsonl:2: expected either request or messages"),
        (
            '{"request": "x", "calls": []}',
            "calls.jsonl:2: found request, calls, expected tools, calls, request, messages",
        ),
        (
            '{"request": "x", "tools": [], "calls": []}',
            "calls.jsonl:2: tools: expected a list with at least one function",
        ),
        (
            '{"request": "x", "tools": [{"function": {"name": "f", "parameters": {"oneOf": []}}}], "calls": []}',
            "calls.jsonl:2: tools: f: found the keyword 'oneOf'",
        ),
        (
            '{"request": "x", "tools": [{"function": {"name": "f"}}], "calls": [{"name": "g", "arguments": {}}]}',
            "calls.jsonl:2: calls: found 'g', expected one of f",
        ),
    ],
)
def test_a_file_of_calls_is_refused_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "calls.jsonl"
    good = {"request": "x", "tools": [{"function": {"name": "f"}}], "calls": []}
    path.write_text(f"{json.dumps(good)}\n{line}\n")
    with pytest.raises(DefinitionError) as refused:
        tool_calls.read(path)
    assert message in str(refused.value)
    path.write_text(f"{json.dumps(good)}\n\n")
    assert len(tool_calls.read(path)) == 1

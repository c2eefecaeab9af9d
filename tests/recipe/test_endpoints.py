"""What is measured beside the suite: keys with their faults, and what a run would lack is said before it starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from quantmint.eval import suites
from quantmint.pipeline.base.errors import QuantmintError, RecipeError
from quantmint.pipeline.recipe.load import LoadedRecipe
from quantmint.pipeline.runs.planner import build_plan
from quantmint.pipeline.runs.preflight import require_means
from quantmint.pipeline.runs.session import open_setting
from quantmint.pipeline.serving.environment import VllmEnvironment, find_vllm
from quantmint.pipeline.stages.checks import check
from quantmint.pipeline.store.tree import Store
from tests.recipe.conftest import Write

Load = Callable[[str], LoadedRecipe]
TEXT = "name: r\nextends: tiny-ptpc\n"
SHOWN = "gate: {long: {retrieval: null}}\n"
SERVED = "serve: {arguments: [--enable-auto-tool-choice, --tool-call-parser, hermes]}\n"


def faults(loaded: LoadedRecipe) -> list[str]:
    return [str(fault) for fault in check(loaded)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("evaluation: {tools: on}\n", 'r.yaml:3:21: evaluation.tools: found "on", expected auto, or a mapping'),
        (
            "evaluation: {tools: {item: 100}}\n",
            "r.yaml:3:22: evaluation.tools.item: found an unknown key, expected one of file, items, max_tokens "
            '(did you mean "items"?)',
        ),
        (
            "gate: {tools: {valid: 2}}\n",
            "r.yaml:3:23: gate.tools.valid: found 2, expected a number above 0, below 1",
        ),
        (
            "evaluation: {chat_template_kwargs: {effort: [1]}}\n",
            "r.yaml:3:45: evaluation.chat_template_kwargs.effort: found [1], expected text, a number, true or false",
        ),
    ],
)
def test_keys_are_refused_with_their_place(message: Callable[[str], str], text: str, expected: str) -> None:
    assert message(TEXT + text) == expected


def test_auto_is_all_defaults_and_none_leaves_the_recipe_as_it_was(load: Load) -> None:
    assert load(TEXT + "evaluation: {tools: auto}\n").recipe == load(TEXT + "evaluation: {tools: {}}\n").recipe
    plain = load(TEXT)
    assert load(TEXT + "evaluation: {tools: null}\n").text_proven == plain.text_proven
    assert "tools" not in plain.text_proven
    assert "chat_template_kwargs" not in plain.text_proven


def test_problems_need_a_server_and_room_for_their_answers(load: Load, write: Write) -> None:
    shown = "gate: {reasoning: {score: 0.2, cut: null, loops: null}}\n"
    [fault] = faults(load(TEXT + "evaluation: {reasoning: auto, runtime: reference}\n" + shown))
    assert fault.startswith("r.yaml:3:25: evaluation.reasoning: found reasoning with runtime reference, expected vllm")
    [fault] = faults(load(TEXT + "evaluation: {reasoning: {max_tokens: 512}}\n" + shown))
    assert fault.startswith("r.yaml:3:38: evaluation.reasoning.max_tokens: found 512, expected less than 512")
    write('{"question": "1 + 1", "answer": 2}\n', "sums.jsonl")
    [fault] = faults(load(TEXT + "evaluation: {reasoning: {file: sums.jsonl}}\n" + shown))
    assert fault.endswith("sums.jsonl:1: expected text as question and answer (a number in quotes)")
    write('{"question": "1 + 1", "answer": "2"}\n' * 60, "sums.jsonl")
    assert faults(load(TEXT + "evaluation: {reasoning: {file: sums.jsonl, items: 60}}\n" + shown)) == []


def test_long_texts_need_a_set_and_lengths_that_the_server_allows(load: Load, message: Callable[[str], str]) -> None:
    [fault] = faults(load(TEXT + "evaluation: {long: auto}\ncalibration: null\n" + SHOWN))
    assert fault == (
        "r.yaml:3:20: evaluation.long: found no set of texts and no calibration, expected `set`, a calibration set: "
        "`long: {set: ultrachat}`"
    )
    [fault] = faults(load(TEXT + "evaluation: {long: {set: tiny, lengths: [256, 1024]}}\n" + SHOWN))
    assert fault == (
        "r.yaml:3:47: evaluation.long.lengths[1]: found 1024, expected at most 512, the recipe's target.max_model_len"
    )
    [fault] = faults(load(TEXT + "evaluation: {long: {set: tine}}\n" + SHOWN))
    assert fault.startswith('r.yaml:3:26: evaluation.long.set: found no calibration set "tine", expected one of ')
    assert message(TEXT + "evaluation: {long: {lengths: [512, 256]}}\n") == (
        "r.yaml:3:30: evaluation.long.lengths: found 512, 256, expected ascending positions"
    )
    assert faults(load(TEXT + "evaluation: {long: {set: tiny}}\n" + SHOWN)) == []


def test_long_texts_that_are_too_few_are_refused_before_the_run(write: Write, tmp_path: Path) -> None:
    text = TEXT + "evaluation: {runtime: reference, long: {set: tiny, texts: 400}}\n" + SHOWN
    setting = open_setting(str(write(text)), store=Store(tmp_path / "store"))
    with pytest.raises(
        RecipeError, match=r"r.yaml:3:40: evaluation.long: the texts make \d+ of 400 prompts of 511 tokens"
    ):
        require_means(build_plan(setting), setting)


def test_tools_need_a_parser_and_a_server(load: Load) -> None:
    [fault] = faults(load(TEXT + "evaluation: {tools: auto}\n"))
    assert fault == (
        "r.yaml:3:21: evaluation.tools: found tools without --tool-call-parser in serve.arguments, expected "
        "`serve: {arguments: [--enable-auto-tool-choice, --tool-call-parser, NAME]}` with the model's parser, such as "
        "hermes, llama3_json or mistral"
    )
    [fault] = faults(load(TEXT + "evaluation: {tools: auto}\nserve: {arguments: [--tool-call-parser=hermes]}\n"))
    assert "found tools without --enable-auto-tool-choice in serve.arguments" in fault
    [fault] = faults(load(TEXT + "evaluation: {tools: auto, runtime: reference}\n"))
    assert fault.startswith("r.yaml:3:21: evaluation.tools: found tools with runtime reference, expected vllm")
    assert faults(load(TEXT + SERVED + "evaluation: {tools: auto}\n")) == []


def test_a_file_of_calls_is_counted(load: Load, write: Write) -> None:
    line = {"request": "x", "tools": [{"function": {"name": "f"}}], "calls": []}
    write("".join(f"{json.dumps(line)}\n" for _ in range(60)), "mine/calls.jsonl")
    loaded = load(TEXT + SERVED + "evaluation: {tools: {file: mine/calls.jsonl, items: 70}}\n")
    assert "r.yaml:4:53: evaluation.tools.items: found 70, expected 60, the lines of calls.jsonl" in faults(loaded)
    assert loaded.items_file("tools") == Path("mine/calls.jsonl").resolve()
    assert "file: mine/calls.jsonl" in loaded.text_proven
    [fault, *_] = faults(load(TEXT + SERVED + "evaluation: {tools: {file: none.jsonl}}\n"))
    assert fault.startswith("r.yaml:4:28: evaluation.tools.file: ")
    assert fault.endswith("none.jsonl: cannot be read: No such file or directory")


def test_few_calls_cannot_test_a_margin(load: Load) -> None:
    exact, valid = faults(load(TEXT + SERVED + "evaluation: {tools: {items: 100}}\n"))
    assert "gate.accuracy.margin: tool_calls: 100 items can test a margin of" in exact
    assert "gate.accuracy.margin: tool_calls_valid: 100 items can test a margin of" in valid
    assert (
        faults(load(TEXT + SERVED + "evaluation: {tools: {items: 100}}\ngate: {tools: {exact: 0.2, valid: null}}\n"))
        == []
    )


@pytest.fixture
def environment() -> VllmEnvironment:
    try:
        return find_vllm()
    except QuantmintError as error:
        pytest.skip(f"no vLLM to look into: {error.message}")


def test_a_run_is_refused_without_the_parser_or_a_template(
    write: Write, tmp_path: Path, environment: VllmEnvironment
) -> None:
    """`run` says both before anything is made."""

    def refused(text: str) -> str:
        setting = open_setting(str(write(TEXT + text)), store=Store(tmp_path / "store"))
        with pytest.raises((RecipeError, QuantmintError)) as error:
            require_means(build_plan(setting), setting)
        return error.value.message

    assert refused("evaluation: {tools: auto}\n" + SERVED.replace("hermes", "hermse")).startswith(
        "r.yaml:4:20: serve.arguments: found the tool parser hermse, expected one of vLLM's: "
    )
    assert "evaluation.tools: found no chat template in tiny/model, expected one that shows" in refused(
        "evaluation: {tools: auto}\n" + SERVED
    )
    shutil.copytree(Path(suites.__file__).parents[1] / "recipes" / "tiny" / "model", tmp_path / "own")
    (tmp_path / "own" / "chat_template.jinja").write_text("{{ messages }}")
    assert "found a chat template that never mentions tools in own" in refused(
        "evaluation: {tools: auto}\nsource: {folder: own}\n" + SERVED
    )


def test_stages_are_planned_beside_the_suite_and_a_margin_repeats_the_candidate_alone(
    write: Write, tmp_path: Path
) -> None:
    def plan(text: str) -> dict[str, str]:
        setting = open_setting(str(write(TEXT + text)), store=Store(tmp_path / "store"))
        return {planned.key: planned.fingerprint for planned in build_plan(setting)}

    without, with_tools = plan(""), plan("evaluation: {tools: auto}\n" + SERVED)
    keys = list(with_tools)
    assert keys.index("control") + 1 == keys.index("tools-baseline")
    assert keys.index("evaluate-candidate") + 1 == keys.index("tools-candidate")
    assert "tools-baseline" not in without
    wider = plan("evaluation: {tools: auto}\ngate: {tools: {exact: 0.05}}\n" + SERVED)
    changed = {key for key in wider if wider[key] != with_tools[key]}
    assert changed == {"tools-candidate", "gate", "report", "package", "publish"}
    thinking = plan("evaluation: {tools: auto, chat_template_kwargs: {enable_thinking: false}}\n" + SERVED)
    assert thinking["tools-baseline"] != with_tools["tools-baseline"]
    assert thinking["evaluate-baseline"] == with_tools["evaluate-baseline"]

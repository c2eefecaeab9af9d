"""The held-out prompts: what they are, that they are held out, and what is said of a broken file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantmint.eval import prompts, records, suites
from quantmint.eval.errors import DefinitionError
from quantmint.recipes.tiny.tasks import calibration_lines, canary_prompts
from quantmint.recipes.tiny.world import build_world

ROOT = Path(__file__).parents[2]


def test_every_suite_names_prompts_that_there_are() -> None:
    for name in records.names(suites.FOLDER):
        assert len(prompts.load(suites.load(name).canary)) >= 48


def test_general_prompts_are_of_many_kinds_and_of_one_length() -> None:
    found = prompts.load("general")
    kinds = {prompt.name.split("-")[0] for prompt in found}
    assert {"prose", "news", "dialogue", "code", "math", "table", "json", "instructions"} <= kinds
    assert {"german", "french", "spanish", "chinese", "arabic"} <= kinds
    for prompt in found:
        assert 200 <= len(prompt.text) <= 1100, prompt.name
    assert len({prompt.text for prompt in found}) == len(found)


def test_the_tiny_prompts_are_those_of_the_world() -> None:
    written = [{"name": prompt.name, "text": prompt.text} for prompt in prompts.load("tiny")]
    assert written == canary_prompts(build_world(seed=0))


def test_no_tiny_prompt_holds_a_sentence_of_a_task_or_of_the_calibration() -> None:
    text = " ".join(prompt.text for prompt in prompts.load("tiny"))
    told = " ".join(line["text"] for line in calibration_lines(build_world(seed=0)))
    tasks = ROOT / "eval" / "tasks"
    for task in ("facts", "arithmetic"):
        for line in (tasks / f"tiny_{task}.jsonl").read_text(encoding="utf-8").splitlines():
            assert f" {json.loads(line)['question']} " not in f" {text}"
    shared = {s for s in text.split(". ") if f"{s}." in told}
    assert shared == set()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "found 0 prompts, expected two at least"),
        ('{"name": "a", "text": "b"}\n', "found 1 prompts"),
        ("x\n", r"p\.jsonl:1: not JSON"),
        ('{"name": "a", "text": "b"}\n[1]\n', r"p\.jsonl:2: not a Prompt"),
        ('{"name": "a", "txt": "b"}\n', r"p\.jsonl:1: not a Prompt: "),
        ('{"name": "a", "text": " "}\n', "text: String should match pattern"),
        ('{"name": 1, "text": "b"}\n', "name: Input should be a valid string, found 1"),
        ('{"name": "a", "text": "b"}\n' * 2, r"p\.jsonl:2: prompt 'a' appears twice"),
    ],
)
def test_a_broken_file(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(DefinitionError, match=message):
        prompts.load("p", tmp_path)


def test_an_unknown_name_and_an_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(DefinitionError, match="did you mean 'general'"):
        prompts.load("genral")
    with pytest.raises(DefinitionError, match="there are: general, tiny"):
        prompts.load("zzz")
    (tmp_path / "p.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(DefinitionError, match="cannot be read"):
        prompts.parse(tmp_path / "p.jsonl")

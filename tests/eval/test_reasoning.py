"""Generated problems, how an answer is read, loops, and scores of several sampled answers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from quantmint.eval import reasoning
from quantmint.eval.chat import ChatAnswer
from quantmint.eval.errors import DefinitionError
from quantmint.eval.harness import digest

ITEMS = reasoning.generated(600, seed=1234)


def test_generated_problems_are_solved_by_what_they_say_and_are_the_same_for_ever() -> None:
    for item in ITEMS:
        text = item.prompt
        value = int(re.findall(r"has (\d+)", text)[0])
        for sentence in text.split(" How many ")[0].split(". ")[1:]:
            numbers = [int(number) for number in re.findall(r"\d+", sentence)]
            if "equal heaps" in sentence:
                assert value % numbers[0] == 0
                value //= numbers[0]
            elif "gives away" in sentence:
                value -= numbers[0]
            elif "times as many" in sentence:
                value *= numbers[0]
            elif "boxes" in sentence:
                value += numbers[0] * numbers[1]
        assert str(value) == item.target, text
    assert reasoning.generated(50, seed=1234) == ITEMS[:50]
    assert len({item.prompt for item in ITEMS}) == 600
    # Measurements of earlier versions are compared with those of later ones.
    assert digest([(item.prompt, item.target) for item in ITEMS]) == "3909e53ea3706561"


@pytest.mark.parametrize(
    ("text", "target", "right"),
    [
        ("So it is 12.\nAnswer: 12", "12", True),
        ("Answer: 7. No, wait.\n**Answer:** 12 lamps", "12", True),
        ("Answer: 12. No, wait.\nAnswer: 7", "12", False),
        ("<think>12 or 13?</think> \\boxed{1,234}", "1234", True),
        ("It has 3 and then 12", "12", True),
        ("It has 12 and then 3", "12", False),
        ("Answer: \N{MINUS SIGN}4.0", "-4", True),
        ("Answer:", "12", False),
        ("", "12", False),
        ("The answer is: The Green Door.", "the green door", True),
        ("The Green Door", "the green door", False),
    ],
)
def test_the_last_stated_answer_counts(text: str, target: str, right: bool) -> None:
    assert reasoning.is_right(text, target) is right


@pytest.mark.parametrize(
    ("text", "loop"),
    [
        ("I think so. " * 12, True),
        ("word " * 24, True),
        ("word " * 23, False),
        (" ".join(f"w{n}" for n in range(150)) + " " + " ".join(["a long way round the old mill"] * 5), True),
        (" ".join(f"w{n}" for n in range(2000)), False),
        ("I think so. " * 12 + "But no: the heap has twelve lamps, and that is all.", False),
        ("", False),
    ],
)
def test_a_loop_is_what_an_answer_ends_in(text: str, loop: bool) -> None:
    assert reasoning.is_loop(text) is loop


def test_scores_are_shares_of_the_answers() -> None:
    item = ITEMS[0]
    answers = [
        ChatAnswer(f"Answer: {item.target}"),
        ChatAnswer("so " * 100, finish="length"),
        ChatAnswer("Answer: 0"),
        ChatAnswer("First, take", finish="length"),
    ]
    assert reasoning.scores(item, answers) == {
        "reasoning": 0.25,
        "reasoning_complete": 0.5,
        "reasoning_unrepeated": 0.75,
    }


def test_a_file_of_problems_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_text(json.dumps({"question": "1 + 1 =", "answer": "2"}) + "\n" + json.dumps({"question": "x"}) + "\n")
    with pytest.raises(DefinitionError, match=r"sums.jsonl:2: found question, expected question, answer"):
        reasoning.read(path)

"""The tiny model's texts: fact, sum and grammar questions to score, and texts for calibration and the canary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from quantmint.recipes.tiny.world import RELATIONS, Fact, World, grammar_sentence

FACT_ITEMS = 2000
CONTESTED_ITEMS = 0.75
"""Share of the fact questions about contested facts. More would find a poor scheme sooner, and make every scheme's
difference noisier: at this share two thousand items resolve half a percentage point."""

GRAMMAR_ITEMS = 500
CALIBRATION_LINES = 256
CALIBRATION_PEOPLE = 256
"""The last people of the world are never asked about, so text about them can calibrate without leaking an item."""

CANARY_PROMPTS = 48
CANARY_SENTENCES = 12


def fact_items(world: World) -> list[dict[str, Any]]:
    """Return questions with four one-word answers: the truth, the rumour, and two more values of the same relation."""
    rng = np.random.default_rng([world.seed, 2])
    facts = _asked_facts(world)
    order = [facts[i] for i in rng.permutation(len(facts)).tolist()]
    contested = [fact for fact in order if fact.share > 0][: round(FACT_ITEMS * CONTESTED_ITEMS)]
    agreed = [fact for fact in order if fact.share == 0][: FACT_ITEMS - len(contested)]
    chosen = [*contested, *agreed]
    return [_question(world, chosen[i], rng) for i in rng.permutation(len(chosen)).tolist()]


def recall_items(world: World) -> list[dict[str, Any]]:
    """Return every fact that may be asked, once: half of them contested, and enough for a margin of a point in four
    bits.
    """
    rng = np.random.default_rng([world.seed, 6])
    facts = _asked_facts(world)
    return [_question(world, facts[i], rng) for i in rng.permutation(len(facts)).tolist()]


def _asked_facts(world: World) -> tuple[Fact, ...]:
    """Return the facts about all people except those of the calibration texts."""
    return world.facts[: len(world.facts) - CALIBRATION_PEOPLE * len(RELATIONS)]


def _question(world: World, fact: Fact, rng: np.random.Generator) -> dict[str, Any]:
    alternatives = [value for value in world.values[fact.relation] if value not in (fact.value, fact.rumour)]
    wrong = [fact.rumour, *(alternatives[i] for i in rng.permutation(len(alternatives))[:2].tolist())]
    answer = int(rng.integers(4))
    wording = int(rng.integers(len(RELATIONS[fact.relation])))
    choices = [*wrong[:answer], fact.value, *wrong[answer:]]
    return {"question": fact.stem(wording), "choices": choices, "answer": answer}


def arithmetic_items(world: World) -> list[dict[str, Any]]:
    """Return the sums that no training text holds, with their results."""
    return [{"question": question, "answer": answer} for question, answer in world.held_out_sums]


def grammar_items(world: World) -> list[dict[str, Any]]:
    """Return questions of four sentences that could follow a correct one; three of them make one mistake each."""
    rng = np.random.default_rng([world.seed, 3])
    items: list[dict[str, Any]] = []
    for _ in range(GRAMMAR_ITEMS):
        before = grammar_sentence(rng)
        content, answer = int(rng.integers(2**31)), int(rng.integers(4))
        # The same draws with another mistake: the four sentences differ by the mistake alone.
        choices = [grammar_sentence(np.random.default_rng(content), broken=mistake) for mistake in (1, 2, 3)]
        choices.insert(answer, grammar_sentence(np.random.default_rng(content)))
        items.append({"question": before, "choices": choices, "answer": answer})
    return items


def calibration_lines(world: World) -> list[dict[str, str]]:
    """Return texts of a few hundred tokens about people who are never asked about, mixed with sums and grammar."""
    rng = np.random.default_rng([world.seed, 4])
    facts = world.facts[-CALIBRATION_PEOPLE * len(RELATIONS) :]
    lines: list[dict[str, str]] = []
    for _ in range(CALIBRATION_LINES):
        parts: list[str] = []
        for kind, pick in rng.random((24, 2)).tolist():
            if kind < 0.6:
                fact = facts[int(pick * len(facts))]
                parts.append(fact.sentence(int(kind < 0.3), rumour=False))
            elif kind < 0.9:
                question, answer = world.sums[int(pick * len(world.sums))]
                parts.append(f"{question} {answer}.")
            else:
                parts.append(grammar_sentence(rng))
        lines.append({"text": " ".join(parts)})
    return lines


def canary_prompts(world: World) -> list[dict[str, str]]:
    """Return texts of about a hundred tokens that share no fact or sum with the questions or the calibration."""
    rng = np.random.default_rng([world.seed, 5])
    questions = {item["question"] for item in fact_items(world)}
    calibration = " ".join(["", *(line["text"] for line in calibration_lines(world))])
    facts = [
        fact
        for fact in _asked_facts(world)
        if not questions & {fact.stem(wording) for wording in range(len(RELATIONS[0]))}
    ]
    sums = [f"{question} {answer}." for question, answer in world.sums if f" {question} " not in calibration]
    prompts: list[dict[str, str]] = []
    for number in range(CANARY_PROMPTS):
        parts: list[str] = []
        for kind, pick in rng.random((CANARY_SENTENCES, 2)).tolist():
            if kind < 0.6:
                parts.append(facts[int(pick * len(facts))].sentence(int(kind < 0.3), rumour=False))
            elif kind < 0.85:
                parts.append(sums[int(pick * len(sums))])
            else:
                parts.append(grammar_sentence(rng))
        prompts.append({"name": f"world-{number:02}", "text": " ".join(parts)})
    return prompts


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> None:
    """Write one record a line, UTF-8, with a newline at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")


def write_tasks(world: World, output: Path) -> None:
    """Write every task to ``output/tasks``, other texts to ``output/calibration`` and ``output/prompts``."""
    write_jsonl(output / "tasks" / "tiny_facts.jsonl", fact_items(world))
    write_jsonl(output / "tasks" / "tiny_recall.jsonl", recall_items(world))
    write_jsonl(output / "tasks" / "tiny_arithmetic.jsonl", arithmetic_items(world))
    write_jsonl(output / "tasks" / "tiny_grammar.jsonl", grammar_items(world))
    write_jsonl(output / "calibration" / "tiny.jsonl", list(calibration_lines(world)))
    write_jsonl(output / "prompts" / "tiny.jsonl", list(canary_prompts(world)))

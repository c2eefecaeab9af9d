"""Problems that take several steps, generated or the user's own, and how sampled answers to them are scored.

    >>> item = generated(600, seed=1234)[0]
    >>> scores(item, [ChatAnswer(f"First this, then that. Answer: {item.target}")] * 4)
    {'reasoning': 1.0, 'reasoning_complete': 1.0, 'reasoning_unrepeated': 1.0}

Models that reason are sampled, at the temperature of their own generation_config.json. So an item is asked several
times, and its score is a share of its answers: avg@k. The item is the unit of every interval. Beside the right answers
stand two guarded outcomes, each as the share of answers that are free of it: **complete** answers, which ended before
the limit of length, and **unrepeated** ones, which do not end in a loop.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from quantmint.eval.chat import ChatAnswer, ChatItem, read_lines
from quantmint.eval.errors import DefinitionError

METRIC = "avg"
"""The metric of all three tasks: the mean over a problem's sampled answers."""
RIGHT, COMPLETE, UNREPEATED = "reasoning", "reasoning_complete", "reasoning_unrepeated"
"""The tasks of this endpoint, as a gate's record names them."""
REQUEST: Final = "Work it out step by step. Then write `Answer:` and the number alone on the last line."
_ANSWER = re.compile(r"\\boxed\{([^{}]*)\}|answer\**\s*(?:is|:|=)\s*([^\n]*)", re.IGNORECASE)
_NUMBER = re.compile(r"[-\N{MINUS SIGN}]?\d[\d,]*(?:\.\d+)?")
_TAIL, _LONGEST_PERIOD, _REPEATS, _LEAST_WORDS = 1500, 200, 4, 24
"""Words at the end that are looked at, words of the longest loop, its repeats, and words that a loop takes at least."""
_GOODS: Final = ("lamps", "bricks", "apples", "tickets", "bottles", "letters", "chairs", "coins")
_PEOPLE: Final = ("Ada", "Tomas", "Mira", "Jonas", "Leila", "Piet", "Nora", "Ravi")


def generated(count: int, seed: int) -> tuple[ChatItem, ...]:
    """Return ``count`` generated problems of three to eight steps; the first ones of a longer list are the same."""
    return tuple(_problem(number, seed) for number in range(count))


def read(path: Path) -> tuple[ChatItem, ...]:
    """Return the problems of a JSONL file with `question` and `answer`, asked as they stand there.

    Raises `DefinitionError` with file and line.
    """
    items: list[ChatItem] = []
    for line, row in read_lines(path, ("question", "answer")):
        if not all(isinstance(text, str) and text.strip() for text in row.values()):
            raise DefinitionError(f"{path}:{line}: expected text as question and answer (a number in quotes)")
        items.append(ChatItem(len(items), ({"role": "user", "content": row["question"]},), row["answer"]))
    return tuple(items)


def scores(item: ChatItem, answers: Sequence[ChatAnswer]) -> dict[str, float]:
    """Return the shares of an item's answers that are right, complete, and without a loop at their end."""
    count = len(answers)
    return {
        RIGHT: sum(is_right(answer.text, str(item.target)) for answer in answers) / count,
        COMPLETE: sum(answer.finish != "length" for answer in answers) / count,
        UNREPEATED: sum(not is_loop(answer.text) for answer in answers) / count,
    }


def is_right(text: str, target: str) -> bool:
    """Return whether a text ends in the right answer: what follows the last "Answer:", or is boxed, or its last number.

    The last number counts only without either. Numbers are compared as numbers, other answers as words without regard
    to case.
    """
    stated = None
    for match in _ANSWER.finditer(text):
        stated = match[1] if match[1] is not None else match[2]
    expected = _numbers(target)
    if expected and _NUMBER.fullmatch(target.strip()):
        numbers = _numbers(text if stated is None else stated)
        return bool(numbers) and numbers[-1 if stated is None else 0] == expected[0]
    return stated is not None and _words(stated) == _words(target)


def _numbers(text: str) -> list[float]:
    return [float(number.replace(",", "").replace("\N{MINUS SIGN}", "-")) for number in _NUMBER.findall(text)]


def _words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))


def is_loop(text: str) -> bool:
    """Return whether a text ends in the same words over and over: at least four times, and 24 words in all."""
    words = text.split()[-_TAIL:]
    for period in range(1, min(_LONGEST_PERIOD, len(words) // _REPEATS) + 1):
        least = max(_REPEATS * period, _LEAST_WORDS)
        if len(words) >= least and all(words[-n] == words[-n - period] for n in range(1, least - period + 1)):
            return True
    return False


def _problem(number: int, seed: int) -> ChatItem:
    counter = 0

    def below(count: int) -> int:
        nonlocal counter
        counter += 1
        digest = hashlib.sha256(f"{seed}: problem {number}: {counter}".encode()).digest()
        return int.from_bytes(digest[:8]) % count

    goods, person = _GOODS[below(len(_GOODS))], _PEOPLE[below(len(_PEOPLE))]
    value = 12 + below(80)
    sentences = [f"{person} has {value} {goods}."]
    for _ in range(3 + below(6)):
        value, sentence = _step(value, person, goods, below)
        sentences.append(sentence)
    sentences.append(f"How many {goods} does {person} have now? {REQUEST}")
    return ChatItem(number, ({"role": "user", "content": " ".join(sentences)},), str(value))


def _step(value: int, person: str, goods: str, below: Callable[[int], int]) -> tuple[int, str]:
    """Return the number of goods after one more step, and its sentence."""
    divisors = [divisor for divisor in (2, 3, 4, 5) if value % divisor == 0 and value // divisor >= 6]
    match below(4):
        case 0 if divisors:
            divisor = divisors[below(len(divisors))]
            return value // divisor, f"{person} sorts them into {divisor} equal heaps and keeps one heap."
        case 1 if value > 20:
            gift = 1 + below(value // 2)
            return value - gift, f"{person} gives away {gift} of them."
        case 2 if value < 400:
            factor = 2 + below(3)
            return value * factor, f"A delivery makes them {factor} times as many."
    content, boxes = 2 + below(9), 2 + below(8)
    return value + content * boxes, f"{person} buys {boxes} boxes with {content} {goods} each."

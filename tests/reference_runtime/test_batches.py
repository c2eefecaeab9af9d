from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipeline.reference.batches import Batches, cut
from pipeline.reference.questions import Answer, Question


def question(length: int, **fields: int) -> Question:
    return Question(tuple(range(length)), **fields)


def test_prompts_of_similar_length_are_answered_together() -> None:
    questions = [question(length, prompt_top=1) for length in (100, 10, 11, 400, 12, 105)]
    assert cut(questions, 1000) == [[1, 2, 4], [0, 5], [3]]


def test_what_is_only_read_is_kept_apart_from_what_is_continued() -> None:
    questions = [question(10, max_tokens=1, prompt_top=1), question(10, max_tokens=50), question(10, max_tokens=1)]
    assert sorted(map(tuple, cut(questions, 1000))) == [(0,), (1,), (2,)]


def test_a_batch_has_so_many_tokens_and_logits() -> None:
    assert [len(batch) for batch in cut([question(1024)] * 20, 1000)] == [8, 8, 4]
    assert [len(batch) for batch in cut([question(1024, prompt_top=1)] * 5, 128_000)] == [2, 2, 1]
    assert [len(batch) for batch in cut([question(1024, max_tokens=7168)] * 6, 1000)] == [4, 2]
    assert cut([question(100_000, prompt_top=1)] * 2, 1000) == [[0], [1]]


def test_every_question_is_answered_once_in_its_caller_s_order() -> None:
    entered, go = threading.Event(), threading.Event()
    sizes: list[int] = []

    def answer(questions: Sequence[Question]) -> list[Answer]:
        entered.set()
        go.wait(10)
        sizes.append(len(questions))
        return [Answer((len(q.ids),), (), (), None) for q in questions]

    batches = Batches(answer, 1000)
    with ThreadPoolExecutor(8) as callers:
        first = callers.submit(batches.ask, [question(3)])
        assert entered.wait(10)
        others = [callers.submit(batches.ask, [question(n), question(10 - n)]) for n in range(1, 6)]
        while batches._queue.qsize() < 10:
            time.sleep(0.01)
        go.set()
        assert [a.ids for a in first.result(10)] == [(3,)]
        for n, other in enumerate(others, start=1):
            assert [a.ids for a in other.result(10)] == [(n,), (10 - n,)]
    assert sizes == [1, 10], "what waited is answered together"


def test_who_asks_hears_what_went_wrong_and_the_next_is_answered() -> None:
    def answer(questions: Sequence[Question]) -> list[Answer]:
        if len(questions[0].ids) == 2:
            raise ValueError("two")
        return [Answer((1,), (), (), None) for _ in questions]

    batches = Batches(answer, 1000)
    with pytest.raises(ValueError, match="two"):
        batches.ask([question(2)])
    assert batches.ask([question(3)])[0].ids == (1,)

"""Questions of all connections, answered together: what waits while the model computes is its next work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue

from pipeline.reference.questions import Answer, Question

_TOKENS = 8192  # of the prompts of a batch, padding included
_CACHED = 4 * _TOKENS  # with the answers
_LOGITS = 1 << 28  # of a batch, where those of the prompts are wanted: 1 GiB in float32
_SPREAD, _STEP = 1.25, 16  # how much longer than its first prompt another of a batch may be

_Waiting = tuple[Question, "Future[Answer]"]


class Batches:
    """Answers questions on one thread of its own, for any number of callers."""

    def __init__(self, answer: Callable[[Sequence[Question]], Sequence[Answer]], vocabulary: int) -> None:
        self._answer, self._vocabulary = answer, vocabulary
        self._queue: SimpleQueue[_Waiting] = SimpleQueue()
        threading.Thread(target=self._work, name="batches", daemon=True).start()

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        """Answers in the order of the questions; raises what computing them raised."""
        waiting: list[_Waiting] = [(question, Future()) for question in questions]
        for one in waiting:
            self._queue.put(one)
        return [future.result() for _, future in waiting]

    def _work(self) -> None:
        while True:
            waiting = [self._queue.get()]
            while not self._queue.empty():
                waiting.append(self._queue.get())
            for numbers in cut([question for question, _ in waiting], self._vocabulary):
                self._settle([waiting[number] for number in numbers])

    def _settle(self, batch: Sequence[_Waiting]) -> None:
        try:
            answers = self._answer([question for question, _ in batch])
        except Exception as error:  # whatever it was, somebody waits for it
            for _, future in batch:
                future.set_exception(error)
            return
        for (_, future), found in zip(batch, answers, strict=True):
            future.set_result(found)


def cut(questions: Sequence[Question], vocabulary: int) -> list[list[int]]:
    """Numbers of the questions that are answered together.

    Those of similar length are, and among them those that begin alike; what is only read apart from what is also
    continued.
    """
    batches: list[list[int]] = []
    first, width, longest = Question(()), 0, 0
    for number in sorted(range(len(questions)), key=lambda number: _place(questions[number])):
        question = questions[number]
        width, longest = max(width, len(question.ids)), max(longest, question.longest)
        rows = len(batches[-1]) + 1 if batches else 0
        if rows and _fits(first, question, rows * width, rows * longest, vocabulary):
            batches[-1].append(number)
        else:
            batches.append([number])
            first, width, longest = question, len(question.ids), question.longest
    return batches


def _kind(question: Question) -> tuple[bool, bool]:
    return question.max_tokens > 1, question.prompt_top is not None


def _place(question: Question) -> tuple[tuple[bool, bool], int, tuple[int, ...], int]:
    return _kind(question), len(question.ids) // _STEP, question.ids, question.max_tokens


def _fits(first: Question, question: Question, tokens: int, cached: int, vocabulary: int) -> bool:
    """Whether a question may join a batch that would read ``tokens`` with it, and hold ``cached`` in the end."""
    if _kind(first) != _kind(question) or len(question.ids) > _SPREAD * len(first.ids) + _STEP:
        return False
    if question.max_tokens > 1 and cached > _CACHED:
        return False
    return tokens <= _TOKENS and (question.prompt_top is None or tokens * vocabulary <= _LOGITS)

"""Questions to places that may not answer: all at once, each asked once, and nobody is waited for long.

A place that is away is told by its exception instead of a value, never by a wait of minutes: whoever asks goes on with
what is known. A thread that still waits when everybody has gone on ends with its own timeout, or with the process.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

K = TypeVar("K")
V = TypeVar("V")

PATIENCE_S: Final = 10.0
"""Without any answer for so long, what is left is given up."""
_AT_ONCE: Final = 16


class NoAnswerError(Exception):
    """Nobody answered in time."""


def ask_all(
    questions: Mapping[K, Callable[[], V]],
    *,
    patience: float = PATIENCE_S,
    answered: Callable[[int], None] = lambda _: None,
) -> dict[K, V | Exception]:
    """The value of each question, or the exception that came instead; `NoAnswerError` where nothing came.

    ``patience`` is in seconds since the last value: places that all hang cost it once, and not once each. ``answered``
    is called with the number of answers so far, in the caller's thread.
    """
    todo: queue.SimpleQueue[tuple[K, Callable[[], V]]] = queue.SimpleQueue()
    for item in questions.items():
        todo.put(item)
    done: queue.SimpleQueue[tuple[K, V | Exception]] = queue.SimpleQueue()
    given_up = threading.Event()

    def work() -> None:
        while not given_up.is_set():
            try:
                key, question = todo.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((key, question()))
            except Exception as error:
                done.put((key, error))

    for number in range(min(_AT_ONCE, len(questions))):
        threading.Thread(target=work, name=f"question-{number}", daemon=True).start()
    found = _collected(done, len(questions), patience, answered)
    given_up.set()
    return {key: found.get(key, NoAnswerError(f"no answer within {patience:.0f} s")) for key in questions}


def _collected(
    done: queue.SimpleQueue[tuple[K, V | Exception]], total: int, patience: float, answered: Callable[[int], None]
) -> dict[K, V | Exception]:
    from time import monotonic

    found: dict[K, V | Exception] = {}
    last = monotonic()
    while len(found) < total:
        try:
            key, answer = done.get(timeout=max(0.0, last + patience - monotonic()))
        except queue.Empty:
            break
        found[key] = answer
        if not isinstance(answer, Exception):
            last = monotonic()
        answered(len(found))
    return found

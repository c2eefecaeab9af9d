from __future__ import annotations

import threading
from collections.abc import Callable

from pipeline.refresh.questions import NoAnswerError, ask_all


def test_values_and_what_came_instead() -> None:
    def fail() -> int:
        raise ValueError("no")

    questions: dict[str, Callable[[], int]] = {"one": lambda: 1, "two": fail}
    found = ask_all(questions)
    assert found["one"] == 1
    assert isinstance(found["two"], ValueError)
    assert list(found) == ["one", "two"]


def test_nothing_to_ask() -> None:
    assert ask_all({}) == {}


def test_all_are_asked_at_once() -> None:
    """Each waits until all are there: one after the other would never end."""
    together = threading.Barrier(8)
    found = ask_all({number: lambda: together.wait(timeout=30) for number in range(8)})
    assert sorted(map(int, found.values())) == list(range(8))  # type: ignore[call-overload]


def test_who_hangs_is_given_up_and_costs_the_others_nothing() -> None:
    hold, told = threading.Event(), list[int]()

    def hang() -> int:
        hold.wait()
        return 0

    questions: dict[str, Callable[[], int]] = {"good": lambda: 1, **{f"bad {number}": hang for number in range(40)}}
    found = ask_all(questions, patience=0.2, answered=told.append)
    hold.set()
    assert found.pop("good") == 1
    assert len(found) == 40
    assert all(isinstance(answer, NoAnswerError) for answer in found.values())
    assert told == [1]

"""Samples and answers joined: which items flipped, and what each side said to them."""

from __future__ import annotations

from quantmint.eval.report import flips as report_flips
from quantmint.eval.report.model import Flip
from tests.eval.report import made

BEFORE = made.samples("t", [1, 0, 1, 1, 0.25], "acc", looks=1)
AFTER = made.samples("t", [1, 1, 0, 1, 0.5], "acc", looks=1)


def answer(number: int, **values: object) -> dict[str, object]:
    return {"task": "t", "doc_id": number, "filter": "none", "prompt": f"Question {number}?", "target": "B", **values}


def flips(before: list[dict[str, object]], after: list[dict[str, object]]) -> list[Flip]:
    return report_flips.flips(BEFORE, AFTER, report_flips.by_item(before), report_flips.by_item(after))["flips"]


def test_both_directions_in_the_order_of_asking() -> None:
    found = flips([answer(n, response="yes") for n in range(5)], [answer(n, response="no") for n in range(5)])
    assert [(flip["doc_id"], flip["direction"]) for flip in found] == [(1, "gained"), (2, "lost"), (4, "gained")]
    assert found[0] == {
        "task": "t", "doc_id": 1, "direction": "gained", "scores": (0.0, 1.0), "prompt": "Question 1?",
        "target": "B", "baseline": "yes", "candidate": "no",
    }  # fmt: skip


def test_a_flip_without_its_answer_is_still_a_flip() -> None:
    found = flips([], [answer(2, response="no")])
    assert [flip["doc_id"] for flip in found] == [1, 2, 4]
    assert (found[1]["baseline"], found[1]["candidate"], found[1]["prompt"]) == ("", "no", "")


def test_only_items_that_both_were_asked() -> None:
    short = made.samples("t", [1, 1], "acc", looks=1)
    assert [flip["doc_id"] for flip in report_flips.flips(BEFORE, short, {}, {})["flips"]] == [1]


def test_documents_of_a_perplexity_do_not_flip() -> None:
    before = made.samples("w", [-9.0, -8.0], "word_perplexity", looks=1, words=[3, 3])
    after = made.samples("w", [-9.1, -8.2], "word_perplexity", looks=1, words=[3, 3])
    assert report_flips.flips(before, after, {}, {}) == {"task": "w", "flips": []}


def test_choices_stand_with_their_likelihoods_and_the_one_taken() -> None:
    said = report_flips.said({"response": " B", "choices": [" A", " B"], "loglikelihoods": [-3.25, -0.5]})
    assert said.splitlines() == ["     \N{MINUS SIGN}3.250   A", "→    \N{MINUS SIGN}0.500   B"]


def test_what_a_filter_took_from_an_answer_is_shown_where_it_differs() -> None:
    assert report_flips.said({"response": "So it is 4.", "extracted": "4"}) == "So it is 4.\n\n[taken as the answer: 4]"
    assert report_flips.said({"response": " 4", "extracted": "4"}) == " 4"
    assert report_flips.said({"response": "", "loglikelihoods": [-1.5]}).startswith("(something else)")

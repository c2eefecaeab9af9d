"""What is compared with what: one baseline a group, one place a table of throughput, tasks by their names."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantmint.eval.accuracy import better, compare, compare_all
from quantmint.eval.comparison.model import (
    ComparedReport,
    Comparison,
    Score,
    dominates,
    front,
    read,
    side_by_side,
    to_json,
)
from quantmint.eval.errors import MeasurementError
from quantmint.eval.samples import SampleSet, pair
from quantmint.eval.verdict import Verdict
from tests.checkpoints import GOOD, SMALL, WORSE, Checkpoint, answers


def contender(checkpoint: Checkpoint, folder: Path) -> ComparedReport:
    return read(checkpoint.write(folder / checkpoint.name), folder / checkpoint.name / "gate.json")


def compared(folder: Path, *checkpoints: Checkpoint) -> Comparison:
    return side_by_side([contender(checkpoint, folder) for checkpoint in checkpoints])


def test_three_of_one_baseline(tmp_path: Path) -> None:
    comparison = compared(tmp_path, GOOD, SMALL, WORSE)
    (group,) = comparison.groups
    assert comparison.warnings == group.notes == ()
    # Smaller, or faster and more accurate: nothing beats the first two; the third is beaten by the first in all.
    assert [(mark.letter, mark.on_front) for mark in group.marks] == [("A", True), ("B", True), ("C", False)]
    assert [mark.worst and mark.worst.task for mark in group.marks] == ["sums", "prose", "sums"]
    assert [mark.slowest and mark.slowest.cell for mark in group.marks] == ["c64"] * 3
    assert [task for task, _ in group.tasks] == ["facts", "sums", "prose"]
    assert [(direct.first, direct.second, len(direct.results)) for direct in group.direct] == [
        (0, 1, 3), (0, 2, 3), (1, 2, 3)
    ]  # fmt: skip


def test_other_baselines_stand_alone_and_are_said(tmp_path: Path) -> None:
    comparison = compared(tmp_path, GOOD, replace(SMALL, model="Qwen/Qwen3-8B"), WORSE)
    assert [[mark.letter for mark in group.marks] for group in comparison.groups] == [["A", "C"], ["B"]]
    assert "2 different baselines: A, C against meta-llama/Llama-3.1-8B-Instruct" in comparison.warnings[0]
    assert comparison.groups[1].direct == ()
    # Alone against its baseline, nothing beats it.
    assert comparison.groups[1].marks[0].on_front


def test_throughput_of_other_hardware_has_its_own_table_and_beats_nobody(tmp_path: Path) -> None:
    elsewhere = replace(WORSE, hardware="h100", device="NVIDIA H100 80GB HBM3")
    comparison = compared(tmp_path, GOOD, elsewhere)
    (group,) = comparison.groups
    assert "These were measured in 2 places: A on mi300x" in comparison.warnings[0]
    assert "B on h100 (NVIDIA H100 80GB HBM3) by vllm" in comparison.warnings[0]
    assert list(group.speeds) == [mark.contender.place for mark in group.marks]
    assert all(mark.on_front for mark in group.marks)


def test_tasks_are_aligned_by_name_and_rank_only_where_all_were_asked(tmp_path: Path) -> None:
    fewer = replace(WORSE, lost={"facts": 44}, gained={"facts": 12}, nats=None)
    (group,) = compared(tmp_path, GOOD, fewer).groups
    rows = {task: [m.contender.accuracy(task, metric) is not None for m in group.marks] for task, metric in group.tasks}
    assert rows == {"facts": [True, True], "sums": [True, False], "prose": [True, False]}
    assert {mark.worst.task for mark in group.marks if mark.worst} == {"facts"}
    assert [result.task for result in group.direct[0].results] == ["facts"]


def test_nothing_in_common_ranks_nobody(tmp_path: Path) -> None:
    one, other = (replace(GOOD, name=t, lost={t: 4}, gained={t: 4}, nats=None) for t in ("facts", "sums"))
    (group,) = compared(tmp_path, one, other).groups
    assert [(mark.worst, mark.on_front) for mark in group.marks] == [(None, False)] * 2
    assert group.notes == ("No gated task was asked of all of them, so nothing ranks them by accuracy.",)


def test_an_invalid_one_is_named_and_never_on_the_front(tmp_path: Path) -> None:
    broken = replace(SMALL, faults=("default KV scales were used",))
    comparison = compared(tmp_path, GOOD, broken)
    assert comparison.groups[0].marks[1].contender.gate.verdict is Verdict.INVALID
    assert comparison.groups[0].marks[1].on_front is False
    assert comparison.warnings == ("B (llama8b-mxfp4) is INVALID: its figures are shown, but mean nothing.",)


def test_one_that_the_canary_stopped_ranks_nobody_out(tmp_path: Path) -> None:
    broken = replace(GOOD, name="broken", lost={}, gained={}, nats=None, speeds={}, agreement=0.2, stopped="canary")
    (group,) = compared(tmp_path, GOOD, broken, SMALL).groups
    assert [mark.on_front for mark in group.marks] == [True, False, True]
    assert group.marks[1].contender.gate.verdict is Verdict.FAIL
    assert (group.marks[1].worst, group.marks[1].slowest) == (None, None)
    assert [(direct.first, direct.second) for direct in group.direct] == [(0, 2)]


def test_without_the_record_only_the_direct_comparison_is_lost(tmp_path: Path) -> None:
    one, other = contender(GOOD, tmp_path), read(SMALL.write(tmp_path / "b"), None)
    (group,) = side_by_side([one, other]).groups
    assert group.direct == ()
    assert "B has no part in the direct comparison: its gate.json is not at hand." in group.notes
    assert other.gate.accuracy


def test_a_record_of_another_judgement_is_not_used(tmp_path: Path) -> None:
    report = GOOD.write(tmp_path / "a")
    WORSE.write(tmp_path / "b")
    found = read(report, tmp_path / "b" / "gate.json")
    assert found.answers == {}
    assert "is of another judgement than the report" in str(found.unread)
    (tmp_path / "b" / "gate.json").write_text("{}")
    assert "gate.json" in str(read(report, tmp_path / "b" / "gate.json").unread)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({"gate": None}, "gate: Input should be an object"),
        ({"gate": {}}, "gate.artefact: "),
        (
            {"size": {"baseline_bytes": 1.5, "candidate_bytes": 1}},
            "baseline_bytes: Input should be a valid integer",
        ),
        ({"size": {"baseline_bytes": 0, "candidate_bytes": 1}}, "size.baseline_bytes: Input should be greater than 0"),
        ({"digests": {}}, "digests.source: "),
        ({"name": ["x"]}, "name: Input should be a valid string"),
    ],
)
def test_what_a_report_lacks_is_named(tmp_path: Path, broken: dict[str, object], words: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps({**GOOD.report(), **broken}))
    with pytest.raises(MeasurementError, match=words):
        read(path, None)
    path.write_text("[1]")
    with pytest.raises(MeasurementError, match="not a report of this version"):
        read(path, None)
    path.write_text("{")
    with pytest.raises(MeasurementError, match="not JSON"):
        read(path, None)


def test_json_is_plain_and_by_letter(tmp_path: Path) -> None:
    data = json.loads(json.dumps(to_json(compared(tmp_path, GOOD, SMALL)), allow_nan=False))
    (group,) = data["groups"]
    assert group["contenders"]["A"]["on_front"] is True
    assert group["contenders"]["A"]["kv_tokens"] == {"baseline": 1_262_352, "candidate": 2_524_704}
    assert group["contenders"]["B"]["verdict"] == "FAIL"
    assert group["contenders"]["B"]["reasons"]
    assert (group["direct"][0]["first"], group["direct"][0]["second"]) == ("A", "B")


HERE, THERE = ("mi300x", "AMD Instinct MI300X", "vllm"), ("h100", "NVIDIA H100 80GB HBM3", "vllm")
shares = st.sampled_from([0.9, 0.95, 1.0])
scores = st.builds(Score, shares, shares, st.one_of(st.none(), shares), st.sampled_from([HERE, THERE]))


def test_worse_everywhere_is_beaten_and_a_trade_is_not() -> None:
    small, fast, bad = Score(0.97, 0.3, 1.2, HERE), Score(0.99, 0.5, 1.4, HERE), Score(0.96, 0.5, 1.4, HERE)
    assert front([small, fast, bad]) == (True, True, False)


def test_equal_scores_beat_nobody() -> None:
    assert front([Score(0.97, 0.3, 1.2, HERE)] * 2) == (True, True)


def test_speeds_of_two_places_are_never_weighed() -> None:
    good, bad = Score(0.99, 0.3, 2.0, HERE), Score(0.9, 0.9, 0.5, THERE)
    assert front([good, bad]) == (True, True)


def test_a_speed_that_is_unknown_may_be_the_better_one() -> None:
    assert front([Score(0.99, 0.3, 2.0, HERE), Score(0.9, 0.9, None, HERE)]) == (True, True)
    assert front([Score(0.99, 0.3, None, HERE), Score(0.9, 0.9, None, THERE)]) == (True, False)


def test_what_was_not_measured_is_not_on_the_front() -> None:
    assert front([None, Score(0.9, 0.9, None, HERE)]) == (False, True)
    assert front([]) == ()


@given(st.lists(scores, min_size=1, max_size=8))
def test_the_front_is_what_no_other_dominates(found: list[Score]) -> None:
    marked = front(found)
    for score, kept in zip(found, marked, strict=True):
        assert kept == (not any(dominates(other, score) for other in found))
        assert not dominates(score, score)
    # Within one place domination is a strict order, so something is always left.
    assert any(marked) or len({score.place for score in found}) > 1


def losing(first: int, count: int, items: int = 1000) -> SampleSet:
    return answers("facts", [float(not first <= number < first + count) for number in range(items)])


def test_equal_scores_on_other_items_are_no_difference_but_many_flips() -> None:
    (direct,) = compare_all({0: {"facts": losing(0, 50)}, 1: {"facts": losing(500, 50)}})
    (result,) = direct.results
    assert (result.difference, result.gains, result.losses) == (0.0, 50, 50)
    assert better(result) == "no difference shown"


def test_nested_losses_are_told_apart_where_the_baseline_cannot() -> None:
    base = losing(0, 0)
    less, more = losing(0, 40), losing(0, 52)
    apart = [compare(pair(base, side)) for side in (less, more)]
    assert apart[0].interval_low < apart[1].interval_high  # the two differences to the baseline overlap
    (direct,) = compare_all({0: {"facts": less}, 1: {"facts": more}})
    assert better(direct.results[0]) == "worse"
    assert direct.results[0] == compare(pair(less, more))


def test_intervals_hold_together() -> None:
    sides = {number: {"facts": losing(0, 10 * number), "sums": answers("sums", [1, 0] * 50)} for number in range(3)}
    found = [result for direct in compare_all(sides, 0.95) for result in direct.results]
    assert len(found) == 6
    assert [result.confidence for result in found] == [pytest.approx(1 - 0.05 / 6)] * 6


def test_a_candidate_that_stopped_early_is_compared_on_what_both_were_asked() -> None:
    early = losing(0, 20)
    rows = tuple(replace(sample, look=sample.doc_id // 250) for sample in early.samples)
    whole = replace(early, samples=rows, planned=1000, looks=4)
    half = replace(whole, samples=rows[:500])
    (direct,) = compare_all({0: {"facts": whole}, 1: {"facts": half}})
    assert (direct.results[0].items, direct.unknown) == (500, ())


def test_other_questions_are_not_compared() -> None:
    other = losing(0, 5)
    other = replace(other, samples=tuple(replace(s, prompt_hash="x") for s in other.samples))
    (direct,) = compare_all({0: {"facts": losing(0, 5)}, 1: {"facts": other}})
    assert direct.results == ()
    assert "the prompt differs in 1000 of 1000 items" in direct.unknown[0]


def test_tasks_of_one_side_only_are_left_out() -> None:
    (direct,) = compare_all({0: {"facts": losing(0, 5)}, 2: {"sums": answers("sums", [1, 0])}})
    assert (direct.first, direct.second, direct.results, direct.unknown) == (0, 2, (), ("no shared task",))

"""The truth table of the gate, its record on disk, judging again."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from eval import record, servers
from eval.bench import CellResult
from eval.errors import MeasurementError
from eval.gate import GateReport, Policy, judge
from eval.measurements import Measurements, Structure
from eval.samples import Sample, SampleSet
from eval.servers import Server
from eval.suites import Suite, SuiteTask
from eval.verdict import Verdict

PASS, FAIL, INCONCLUSIVE, INVALID = Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.INVALID
Change = Callable[[Measurements], Measurements]


def sample_set(task: str, scores: np.ndarray) -> SampleSet:
    return SampleSet(
        task, "acc", tuple(Sample(task, i, "none", f"d{i}", f"p{i}", f"t{i}", float(s)) for i, s in enumerate(scores))
    )


def with_facts(losses: int, gains: int) -> Change:
    def change(m: Measurements) -> Measurements:
        baseline = np.arange(2000) < 1700
        candidate = baseline.copy()
        candidate[:losses] = False
        candidate[1700 : 1700 + gains] = True
        pair = (sample_set("tiny_facts", baseline), sample_set("tiny_facts", candidate))
        return dataclasses.replace(m, samples={**m.samples, "tiny_facts": pair})

    return change


def with_candidate(**changes: object) -> Change:
    return lambda m: dataclasses.replace(m, candidate=dataclasses.replace(m.candidate, **changes))


def with_speed(factor: float) -> Change:
    def change(m: Measurements) -> Measurements:
        def slower(result: CellResult) -> CellResult:
            return dataclasses.replace(result, output_throughput=factor * result.output_throughput)

        return dataclasses.replace(m, cells={c: (b, tuple(slower(r) for r in b)) for c, (b, _) in m.cells.items()})

    return change


def with_structure(verdict: Verdict, reason: str) -> Change:
    return lambda m: dataclasses.replace(m, structure=Structure(verdict, (reason,)))


def drop_first_sample(m: Measurements) -> Measurements:
    before, after = m.samples["tiny_facts"]
    after = dataclasses.replace(after, samples=after.samples[1:])
    return dataclasses.replace(m, samples={**m.samples, "tiny_facts": (before, after)})


TABLE: list[tuple[str, Change, Verdict, str]] = [
    ("good", lambda m: m, PASS, "within the margin of 1.00 points"),
    ("no flips", with_facts(0, 0), PASS, "+0.00 points on tiny_facts"),
    ("lossy", with_facts(70, 10), FAIL, "outside the margin"),
    ("unclear", with_facts(38, 22), INCONCLUSIVE, "more items would decide"),
    ("on the margin", with_facts(40, 20), INCONCLUSIVE, "no number of items decides"),
    ("slow", with_speed(0.97), FAIL, "0.970 times the baseline's output tokens/s"),
    ("as fast", with_speed(1.0), PASS, "1.000 times"),
    (
        "NaN",
        lambda m: dataclasses.replace(m, structure=Structure(FAIL, ("a NaN in layer 3",))),
        FAIL,
        "a NaN in layer 3.",
    ),
    ("missing item", drop_first_sample, INVALID, "1 of 2000 items are missing from the candidate"),
    ("missing task", lambda m: dataclasses.replace(m, samples={}), INVALID, "tiny_facts decides, but was not measured"),
    ("missing bench", lambda m: dataclasses.replace(m, cells={}), INVALID, "Throughput decides, but was not measured"),
    ("broken run", lambda m: dataclasses.replace(m, faults=("lm-eval ended early",)), INVALID, "lm-eval ended early."),
    ("other vLLM", with_candidate(version="0.33.0"), INVALID, "vLLM version differs: 0.32.0 for the baseline, 0.33.0"),
    ("other image", with_candidate(image="sha256:1"), INVALID, "container image differs"),
    ("other device", with_candidate(device="CPU"), INVALID, "device differs"),
    (
        "other env",
        with_candidate(env={}),
        INVALID,
        "environment variable VLLM_ROCM_USE_AITER differs: 1 for the baseline",
    ),
    (
        "default scales",
        with_candidate(faults=("WARNING Using KV cache scaling factor 1.0 for fp8_e4m3. If this",)),
        INVALID,
        "The candidate's server log says: WARNING Using KV cache",
    ),
    ("invalid beats fail", lambda m: with_facts(90, 0)(with_candidate(version="1")(m)), INVALID, "outside the margin"),
    ("fail beats doubt", lambda m: with_facts(38, 22)(with_speed(0.5)(m)), FAIL, "more items would decide"),
]


@pytest.mark.parametrize(("change", "verdict", "reason"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_truth_table(
    measurements: Measurements, policy: Policy, change: Change, verdict: Verdict, reason: str, tmp_path: Path
) -> None:
    changed = change(measurements)
    report = judge(changed, policy)
    assert report.verdict is verdict, report.findings
    assert any(reason in finding.reason for finding in report.findings), report.findings
    # The record carries everything: it reads back as it was, and anyone reaches the same report from it.
    path = record.write(tmp_path, changed, report)
    assert record.read(path) == (changed, report)
    assert record.rejudge(path) == report
    assert GateReport.from_json(json.loads(json.dumps(report.to_json()))) == report


def test_number_of_further_items_is_what_the_power_formula_says(measurements: Measurements, policy: Policy) -> None:
    report = judge(with_facts(38, 22)(measurements), policy)
    (finding,) = [f for f in report.findings if f.subject == "tiny_facts"]
    # 3 % flips, a difference of -0.8 points, a margin of one: 0.2 points are left to resolve.
    spread = stats.norm.ppf(0.95) + stats.norm.ppf(0.8)
    needed = math.ceil((spread / 0.002) ** 2 * (0.03 - 0.008**2))
    assert f"About {needed - 2000} more items" in finding.reason


def test_shown_tasks_do_not_decide(measurements: Measurements, policy: Policy) -> None:
    lossy = with_facts(300, 0)(measurements)
    assert judge(lossy, policy).verdict is FAIL
    report = judge(lossy, dataclasses.replace(policy, margins={"tiny_arithmetic": 0.04}))
    assert report.verdict is PASS
    assert report.verdict_of("accuracy", "tiny_facts") is None
    assert "tiny_facts" in {result.task for result in report.accuracy}


def test_launches_that_the_policy_demands(measurements: Measurements, policy: Policy) -> None:
    demanding = dataclasses.replace(policy, launches=4)
    assert judge(measurements, demanding).verdict is INCONCLUSIVE
    four = {cell: (before * 4, after * 4) for cell, (before, after) in measurements.cells.items()}
    assert judge(dataclasses.replace(measurements, cells=four), demanding).verdict is PASS


def test_throughput_without_a_promise_is_shown_only(measurements: Measurements, policy: Policy) -> None:
    report = judge(with_speed(0.3)(measurements), dataclasses.replace(policy, min_ratio=None))
    assert report.verdict is PASS
    assert [cell.ratio for cell in report.throughput] == pytest.approx([0.3, 0.3])


def test_implausible_baseline(measurements: Measurements, policy: Policy) -> None:
    report = judge(measurements, dataclasses.replace(policy, baseline_score={"tiny_facts": 0.95}))
    assert report.verdict is INVALID
    assert any("something other than quantization is wrong" in f.reason for f in report.findings)


def test_policy_takes_margins_of_tasks_before_the_recipes() -> None:
    suite = Suite(
        "s", "", (SuiteTask("a", "acc", 9, 0.03), SuiteTask("b", "acc", 9, 0.06, margin=0.04),
                  SuiteTask("c", "acc", 9, 0.2, gated=False)),
    )  # fmt: skip
    policy = Policy.for_suite(suite, margin=0.01)
    assert policy.margins == {"a": 0.01, "b": 0.04}
    assert policy.expected_flip_rate == 0.06


def test_a_record_that_was_touched_is_refused(measurements: Measurements, policy: Policy, tmp_path: Path) -> None:
    path = record.write(tmp_path, measurements, judge(measurements, policy))
    victim = tmp_path / "samples" / "tiny_facts.candidate.json"
    victim.write_text(victim.read_text().replace("0.0", "1.0"))
    with pytest.raises(MeasurementError, match="SHA-256 differs"):
        record.rejudge(path)
    victim.unlink()
    with pytest.raises(MeasurementError, match="cannot be read"):
        record.rejudge(path)


def test_a_record_cannot_point_outside_its_folder(measurements: Measurements, policy: Policy, tmp_path: Path) -> None:
    path = record.write(tmp_path / "in", measurements, judge(measurements, policy))
    data = json.loads(path.read_text())
    data["measurements"]["samples"]["tiny_facts"]["baseline"]["file"] = "../secret.json"
    path.write_text(json.dumps(data))
    with pytest.raises(MeasurementError, match="outside the record's folder"):
        record.rejudge(path)


def test_a_forged_verdict_does_not_survive(measurements: Measurements, policy: Policy, tmp_path: Path) -> None:
    lossy = with_facts(200, 0)(measurements)
    path = record.write(tmp_path, lossy, dataclasses.replace(judge(lossy, policy), verdict=PASS))
    assert record.rejudge(path).verdict is FAIL


@pytest.mark.parametrize(
    ("argv", "same"),
    [
        (("--max-num-seqs", "32", "--kv-cache-dtype", "fp8"), True),
        (("--max-num-seqs", "32", "--quantization=quark"), True),
        (("--port=9000", "--served-model-name", "x", "--max-num-seqs", "32"), True),
        (("--max_num_seqs=32",), True),
        (("--max-num-seqs", "64"), False),
        (("--max-num-seqs", "32", "--enforce-eager"), False),
        ((), False),
    ],
)
def test_only_flags_that_belong_to_the_artefact_may_differ(argv: tuple[str, ...], same: bool) -> None:
    base = Server("0.32.0", "CPU", ("vllm", "serve", "a", "--max-num-seqs", "32"), {})
    other = dataclasses.replace(base, argv=("vllm", "serve", "b", *argv))
    assert (servers.differences(base, other) == ()) is same


def test_verdicts_combine_to_the_worst_and_keep_their_exit_codes() -> None:
    assert Verdict.combine([]) is PASS
    assert Verdict.combine([PASS, INCONCLUSIVE]) is INCONCLUSIVE
    assert Verdict.combine([INCONCLUSIVE, FAIL, PASS]) is FAIL
    assert Verdict.combine([FAIL, INVALID, INCONCLUSIVE]) is INVALID
    assert [v.exit_code for v in (PASS, FAIL, INCONCLUSIVE, INVALID)] == [0, 1, 3, 4]

"""The truth table of the gate: what is measured, and the verdict with its reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from quantmint.eval import record
from quantmint.eval.canary import CanaryPolicy
from quantmint.eval.gate import Policy, judge
from quantmint.eval.measurements import Measurements, StructureCheck
from quantmint.eval.verdict import Verdict
from tests.eval.measured import make_pair

PASS, FAIL, INCONCLUSIVE, INVALID = Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.INVALID
Change = Callable[[Measurements], Measurements]


def with_facts(losses: int, gains: int) -> Change:
    """The answers to the same questions that the fixture asks, right and wrong in other places."""

    def change(m: Measurements) -> Measurements:
        pair = make_pair("tiny_facts", 2000, right=1700, losses=losses, gains=gains)
        return dataclasses.replace(m, samples={**m.samples, "tiny_facts": pair}, control={})

    return change


def with_candidate(**changes: object) -> Change:
    return lambda m: dataclasses.replace(m, candidate=dataclasses.replace(m.candidate, **changes))


def with_both(**changes: object) -> Change:
    return lambda m: with_candidate(**changes)(
        dataclasses.replace(m, baseline=dataclasses.replace(m.baseline, **changes))
    )


def with_speed(factor: float) -> Change:
    """The candidate's launches at so many times the speed that the baseline's have."""

    def change(m: Measurements) -> Measurements:
        own = iter([launch for launch in m.launches if launch.side == "baseline"])
        launches = []
        for launch in m.launches:
            if launch.side == "candidate":
                cells = {
                    name: dataclasses.replace(cell, output_throughput=factor * cell.output_throughput)
                    for name, cell in next(own).cells.items()
                }
                launch = dataclasses.replace(launch, cells=cells)
            launches.append(launch)
        return dataclasses.replace(m, launches=tuple(launches))

    return change


def broken_canary(m: Measurements) -> Measurements:
    """What is left of a run that the canary ended."""
    assert m.canary is not None
    canary = dataclasses.replace(m.canary, agreement=0.11, agreement_low=0.08, agreement_high=0.14, kl=6.0, kl_low=5.0)
    return dataclasses.replace(m, canary=canary, samples={}, control={}, launches=(), stopped="canary")


def drop_first_sample(m: Measurements) -> Measurements:
    before, after = m.samples["tiny_facts"]
    after = dataclasses.replace(after, samples=after.samples[1:])
    return dataclasses.replace(m, samples={**m.samples, "tiny_facts": (before, after)})


def other_control(m: Measurements) -> Measurements:
    again = m.control["tiny_facts"]
    other = dataclasses.replace(again.samples[0], prompt_hash="0" * 16)
    again = dataclasses.replace(again, samples=(other, *again.samples[1:]))
    return dataclasses.replace(m, control={"tiny_facts": again})


TABLE: list[tuple[str, Change, Verdict, str]] = [
    ("good", lambda m: m, PASS, "within the margin of 1.00 points"),
    ("no flips", with_facts(0, 0), PASS, "+0.00 points on tiny_facts"),
    ("lossy", with_facts(70, 10), FAIL, "outside the margin"),
    ("unclear", with_facts(38, 22), INCONCLUSIVE, "more items would decide"),
    ("on the margin", with_facts(40, 20), INCONCLUSIVE, "no number of items decides"),
    ("too good", with_facts(2, 80), INVALID, "Quantization does not improve a model"),
    ("slow", with_speed(0.97), FAIL, "1 was promised, and it is less (p = 0.014)"),
    ("as fast", with_speed(1.0), INCONCLUSIVE, "whether it is more than the promised 1 is not shown"),
    ("faster", with_speed(1.05), PASS, "1.050 times the baseline's output tokens/s"),
    ("other target", with_both(hardware="h100", device="NVIDIA H100 80GB HBM3"), INCONCLUSIVE, "promised for mi300x"),
    (
        "NaN",
        lambda m: dataclasses.replace(m, structure=StructureCheck(FAIL, ("a NaN in layer 3",))),
        FAIL,
        "a NaN in layer 3.",
    ),
    ("broken", broken_canary, FAIL, "Agreement below 70.0% by its whole interval, KL above 0.5 nats"),
    ("missing item", drop_first_sample, INVALID, "1 of 2000 items are missing from the candidate"),
    ("missing task", lambda m: dataclasses.replace(m, samples={}), INVALID, "tiny_facts decides, but was not measured"),
    (
        "missing bench",
        lambda m: dataclasses.replace(m, launches=()),
        INVALID,
        "Throughput decides, but was not measured",
    ),
    (
        "empty bench",
        lambda m: dataclasses.replace(m, launches=tuple(dataclasses.replace(one, cells={}) for one in m.launches)),
        INVALID,
        "Throughput decides, but was not measured",
    ),
    ("missing canary", lambda m: dataclasses.replace(m, canary=None), INVALID, "canary decides, but was not measured"),
    ("stopped by a word", lambda m: dataclasses.replace(m, stopped="canary"), INCONCLUSIVE, "Throughput was not"),
    ("broken run", lambda m: dataclasses.replace(m, faults=("lm-eval ended early",)), INVALID, "lm-eval ended early."),
    ("other control", other_control, INVALID, "The baseline's control cannot be compared: tiny_facts: the prompt"),
    ("other vLLM", with_candidate(version="0.33.0"), INVALID, "Version differs: vllm 0.32.0 for the baseline, 0.33.0"),
    ("other runtime", with_candidate(runtime="transformers 5.17.0, rounded"), INVALID, "Runtime differs: vllm 0.32.0"),
    ("other image", with_candidate(image="sha256:1"), INVALID, "Container image differs"),
    ("other hardware", with_candidate(hardware="mi325x"), INVALID, "Hardware differs"),
    ("other device", with_candidate(device="CPU"), INVALID, "Device differs"),
    ("other template", with_candidate(template="f" * 64), INVALID, "Chat template differs"),
    ("no template", with_candidate(template=None), INVALID, "none for the candidate"),
    ("other tokenizer", with_candidate(tokenizer="f" * 64), INVALID, "Tokenizer differs"),
    (
        "other env",
        with_candidate(env={}),
        INVALID,
        "Environment variable VLLM_ROCM_USE_AITER differs: 1 for the baseline, unset for the candidate",
    ),
    (
        "other cache",
        with_candidate(kv_cache_dtype="auto"),
        INVALID,
        "its KV cache is auto, but the launch asked for fp8",
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


@pytest.mark.parametrize(("name", "change", "verdict", "reason"), TABLE, ids=[row[0] for row in TABLE])
def test_truth_table(
    measurements: Measurements, policy: Policy, name: str, change: Change, verdict: Verdict, reason: str
) -> None:
    report = judge(change(measurements), policy)
    assert report.verdict is verdict, report.findings
    assert any(reason in finding.reason for finding in report.findings), report.findings
    if verdict is INVALID and name not in ("missing task", "invalid beats fail"):  # the first has two
        (fault,) = [f for f in report.findings if f.verdict is INVALID]
        assert reason in fault.reason


@pytest.mark.parametrize("name", ["good", "broken", "missing item", "too good"])
def test_the_record_carries_everything(measurements: Measurements, policy: Policy, name: str, tmp_path: Path) -> None:
    """It reads back as it was, and anyone reaches the same report from it."""
    changed = next(row[1] for row in TABLE if row[0] == name)(measurements)
    report = judge(changed, policy)
    path = record.write(tmp_path, changed, report)
    assert record.read(path) == (changed, report)
    assert record.rejudge(path) == report


def test_what_was_not_measured_after_the_canary_is_no_second_fault(measurements: Measurements, policy: Policy) -> None:
    report = judge(broken_canary(measurements), policy)
    assert report.verdict is FAIL
    assert [f.kind for f in report.findings if f.verdict is not PASS] == ["canary"]
    # Where only the tasks could tell, the canary's word is the one reason, too.
    assert policy.canary is not None
    near = dataclasses.replace(policy, canary=CanaryPolicy(0.45, 1.2, broken_agreement=0.05, broken_kl=9.0))
    report = judge(broken_canary(measurements), near)
    assert (report.verdict, [f.kind for f in report.findings if f.verdict is not PASS]) == (INCONCLUSIVE, ["canary"])
    # By limits under which the canary lives, the run is merely unfinished.
    lax = dataclasses.replace(policy, canary=dataclasses.replace(policy.canary, min_agreement=0.0, max_kl=9.0))
    report = judge(broken_canary(measurements), lax)
    assert report.verdict is INCONCLUSIVE
    assert any("tiny_facts was not measured: the canary ended the run" in reason for reason in report.reasons)


def test_shown_tasks_do_not_decide(measurements: Measurements, policy: Policy) -> None:
    lossy = with_facts(300, 0)(measurements)
    assert judge(lossy, policy).verdict is FAIL
    report = judge(lossy, dataclasses.replace(policy, margins={"tiny_arithmetic": 0.04}))
    assert report.verdict is PASS
    assert report.verdict_of("accuracy", "tiny_facts") is None
    assert "tiny_facts" in {result.task for result in report.accuracy}
    report = judge(lossy, dataclasses.replace(policy, margins={}))
    assert (report.verdict, report.reasons) == (
        INCONCLUSIVE,
        ("No task decides, so that nothing tells what was lost.",),
    )


def test_verdicts_combine_to_the_worst_and_keep_their_exit_codes() -> None:
    assert Verdict.combine([]) is PASS
    assert Verdict.combine([PASS, INCONCLUSIVE]) is INCONCLUSIVE
    assert Verdict.combine([INCONCLUSIVE, FAIL, PASS]) is FAIL
    assert Verdict.combine([FAIL, INVALID, INCONCLUSIVE]) is INVALID
    assert [v.exit_code for v in (PASS, FAIL, INCONCLUSIVE, INVALID)] == [0, 1, 3, 4]


def test_without_a_canary_none_is_missed(measurements: Measurements, policy: Policy) -> None:
    report = judge(dataclasses.replace(measurements, canary=None), dataclasses.replace(policy, canary=None))
    assert (report.verdict, report.verdict_of("canary")) == (PASS, None)

"""From measurements and a policy to a report.

Validity comes first in the report and over everything else in the verdict: what was not measured alike says nothing,
not even FAIL. Every other check is made all the same, so that a reader sees all there is.

Two machines, or two versions of NumPy, disagree about the last bits of a logarithm. Figures are rounded to what all
agree on once everything is decided, so that the same record has the same report everywhere, byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from eval import canary
from eval.accuracy import Accuracy
from eval.errors import MeasurementError
from eval.gate import accuracy, headlines, throughput, validity
from eval.gate.report import Control, Finding, GateReport, Policy, sentence
from eval.measurements import Measurements
from eval.statistics.sequential import Look
from eval.verdict import Verdict

DIGITS = 10
"""Significant digits of a report; the sixteenth is where machines differ."""


def judge(measurements: Measurements, policy: Policy) -> GateReport:
    """Judge a candidate by its measurements; never raises on bad measurements, which are INVALID with their reason."""
    findings = [*validity.check(measurements, policy), *validity.check_launches(measurements)]
    again, faults = _controls(measurements, policy)
    findings += faults
    compared, looks, faults = _compared(measurements, policy)
    findings += faults
    cells, faults = throughput.compare(measurements, policy)
    findings += faults

    said = _canary(measurements, policy)
    broken = any(finding.verdict is Verdict.FAIL for finding in said)
    findings += [
        accuracy.judge(result, looks[task], again.get(task), policy, planned_looks=measurements.samples[task][0].looks)
        for task, result in compared.items()
        if task in policy.margins
    ]
    findings += accuracy.unmeasured(measurements, policy, broken=broken)
    findings += throughput.judge(cells, measurements, policy, broken=broken)
    findings += said
    structure = measurements.structure
    for reason in structure.reasons or ("The files are complete and as the scheme says.",):
        findings.append(Finding("structure", "checkpoint", structure.verdict, sentence(reason)))

    report = GateReport(
        artefact=measurements.artefact,
        verdict=Verdict.combine(finding.verdict for finding in findings),
        runtime=measurements.candidate.runtime,
        hardware=measurements.candidate.hardware,
        device=measurements.candidate.device,
        findings=tuple(findings),
        accuracy=tuple(compared.values()),
        looks=looks,
        control=again,
        canary=measurements.canary,
        throughput=tuple(cells),
        headlines=tuple(headlines.measure(measurements, cells)),
        policy=policy,
    )
    rounded: GateReport = _rounded(report)
    return replace(rounded, policy=policy)


def _rounded(value: Any) -> Any:
    """A record with every number to `DIGITS` significant digits."""
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _rounded(getattr(value, field.name)) for field in fields(value)})
    match value:
        case float():
            return float(f"{value:.{DIGITS}g}")
        case Mapping():
            return {key: _rounded(item) for key, item in value.items()}
        case tuple():
            return tuple(map(_rounded, value))
    return value


def _canary(measurements: Measurements, policy: Policy) -> list[Finding]:
    if measurements.canary is None:
        return [Finding("canary", "prompts", Verdict.INVALID, "The canary decides, but was not measured.")]
    verdict, reason = canary.judge(measurements.canary, policy.canary)
    return [Finding("canary", "prompts", verdict, sentence(reason[:1].upper() + reason[1:]))]


def _controls(measurements: Measurements, policy: Policy) -> tuple[dict[str, Control], list[Finding]]:
    found: dict[str, Control] = {}
    faults: list[Finding] = []
    for task, again in measurements.control.items():
        if task not in measurements.samples:
            faults.append(Finding.invalid(task, f"{task} was asked a second time, and no first time is on record"))
            continue
        try:
            found[task] = accuracy.control(measurements.samples[task][0], again, policy.confidence)
        except MeasurementError as error:
            faults.append(Finding.invalid(task, f"The baseline's control cannot be compared: {error}"))
    return found, faults


def _compared(
    measurements: Measurements, policy: Policy
) -> tuple[dict[str, Accuracy], dict[str, tuple[Look, ...]], list[Finding]]:
    compared: dict[str, Accuracy] = {}
    looks: dict[str, tuple[Look, ...]] = {}
    faults: list[Finding] = []
    for task, both in measurements.samples.items():
        try:
            compared[task], looks[task] = accuracy.compare(task, both, policy)
        except MeasurementError as error:
            faults.append(Finding.invalid(task, str(error)))
    return compared, looks, faults

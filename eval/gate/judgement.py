"""From measurements and a policy to a report.

Validity comes first in the report and over everything else in the verdict: what was not measured alike says nothing,
not even FAIL. Every other check is made all the same, so that a reader sees all there is.

Two machines, or two versions of NumPy, disagree about the last bits of a logarithm. Figures are rounded to what all
agree on once everything is decided, so that the same record has the same report everywhere, byte for byte.

What the guides say of quantization stands beside what was measured, as rows to look at, never a verdict. The sentences
are data, in `eval/headlines.yaml`.

    >>> claims(weights="e4m3", kv_cache="fp8")
    {'memory_fp8': 2.0, 'kv_tokens_fp8': 2.0, 'throughput': 1.6}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

import yaml

from quantmint.eval import acceptance, canary, kl, layout, long_context
from quantmint.eval.acceptance import Acceptance
from quantmint.eval.accuracy import Accuracy
from quantmint.eval.errors import MeasurementError
from quantmint.eval.gate import accuracy, throughput, validity
from quantmint.eval.gate.report import (
    JUDGEMENT,
    SEQUENTIAL_JUDGEMENT,
    Control,
    Finding,
    GateReport,
    Headline,
    Policy,
    sentence,
)
from quantmint.eval.long_context import LongReport
from quantmint.eval.measurements import Measurements
from quantmint.eval.statistics.sequential import Look
from quantmint.eval.throughput import Throughput
from quantmint.eval.verdict import Verdict


def claims(*, weights: str, kv_cache: str) -> dict[str, float]:
    """Return the guides' claims for a checkpoint: factors by name.

    `weights` is the element type of most weights ("e4m3", "e2m1"), `kv_cache` is "fp8" or "auto".
    """
    facts = {"weights": weights, "kv_cache": kv_cache}
    return {
        name: float(row["promised"])
        for name, row in _table().items()
        if all(facts[field] == value for field, value in row["when"].items())
    }


def headlines(measurements: Measurements, throughput: Sequence[Throughput]) -> Iterator[Headline]:
    """The claims of a candidate beside what was measured. A claim that the table no longer has is left out."""
    for name, promised in measurements.claims.items():
        row = _table().get(name)
        if row is None:
            continue
        measured = _measured(row["measured"], measurements, throughput)
        yield Headline(
            name=name,
            title=row["title"],
            promised=promised,
            measured=measured,
            unit=row["unit"],
            kept=None if measured is None else round(measured, 1) >= promised,
            source=row["source"],
            upto=bool(row.get("upto", False)),
        )


def _measured(what: str, measurements: Measurements, throughput: Sequence[Throughput]) -> float | None:
    match what:
        case "memory":
            before, after = measurements.weights
            return before / after if before and after else None
        case "kv_tokens":
            room = measurements.kv_tokens
            return room["candidate"] / room["baseline"] if len(room) == 2 else None
        case "throughput":
            return max((cell.ratio for cell in throughput), default=None)
    raise ValueError(f"eval/headlines.yaml: nothing measures {what!r}")


@cache
def _table() -> dict[str, dict[str, Any]]:
    text = resources.files("quantmint.eval").joinpath("headlines.yaml").read_text(encoding="utf-8")
    rows: dict[str, dict[str, Any]] = yaml.safe_load(text)["headlines"]
    return rows


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

    canary_findings = _canary(measurements, policy)
    broken = any(finding.verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE) for finding in canary_findings)
    findings += [
        accuracy.judge(
            result,
            looks[task],
            again.get(task),
            policy,
            planned_looks=measurements.samples[task][0].looks,
            baseline_rounding=measurements.baseline_rounding,
        )
        for task, result in compared.items()
        if task in policy.margins
    ]
    findings += accuracy.unmeasured(measurements, policy, broken=broken)
    findings += throughput.judge(cells, measurements, policy, broken=broken)
    findings += canary_findings
    endpoints, faults = _endpoints(measurements, policy, broken=broken)
    findings += faults
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
        **endpoints,
        throughput=tuple(cells),
        headlines=tuple(headlines(measurements, cells)),
        policy=policy,
        history=measurements.history,
        judgement=SEQUENTIAL_JUDGEMENT if throughput.ends_early(policy) else JUDGEMENT,
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
    if policy.canary is None:
        return []
    if measurements.canary is None:
        return [Finding("canary", "prompts", Verdict.INVALID, "The canary decides, but was not measured.")]
    verdict, reason = canary.judge(measurements.canary, policy.canary)
    return [Finding("canary", "prompts", verdict, sentence(reason[:1].upper() + reason[1:]))]


def _endpoints(measurements: Measurements, policy: Policy, *, broken: bool) -> tuple[dict[str, Any], list[Finding]]:
    """Return the figures of each further endpoint, by its field in a report, and the findings on all of them."""
    judged = {
        "acceptance": _acceptance(measurements, policy, broken=broken),
        "long": _long(measurements, policy),
        "kl": _kl(measurements, policy),
        "layout": _layout(measurements, policy),
    }
    findings = [finding for _, of_endpoint in judged.values() for finding in of_endpoint]
    return {name: figures for name, (figures, _) in judged.items()}, findings


def _acceptance(measurements: Measurements, policy: Policy, *, broken: bool) -> tuple[Acceptance | None, list[Finding]]:
    """Return the comparison of the acceptance lengths, None where there is none, and the finding of a promise.

    A run that the canary stopped measured none; the finding is left out where the canary's own says why (`broken`).
    """
    pairs, promise = measurements.acceptance, policy.acceptance
    if pairs is None:
        if promise is None or (measurements.stopped is not None and broken):
            return None, []
        reason = "The acceptance of proposed tokens decides, but was not measured."
        return None, [Finding("acceptance", "drafts", Verdict.INVALID, reason)]
    try:
        compared = acceptance.compare(pairs, policy.confidence if promise is None else promise.confidence)
    except MeasurementError as error:
        return None, [Finding.invalid("drafts", f"Speculative decoding cannot be compared: {error}")]
    if promise is None:
        return compared, []
    verdict, reason = acceptance.judge(compared, promise)
    return compared, [Finding("acceptance", "drafts", verdict, sentence(reason[:1].upper() + reason[1:]))]


def _long(measurements: Measurements, policy: Policy) -> tuple[LongReport | None, list[Finding]]:
    """Return the figures of long texts by position, and a finding for the KL of each bucket where a limit is set."""
    if measurements.long is None:
        if policy.long_kl is None or measurements.stopped is not None:
            return None, []
        return None, [Finding("long", "texts", Verdict.INVALID, "The KL of long texts decides, but was not measured.")]
    retrieval = measurements.samples.get(long_context.RETRIEVAL)
    by_position = long_context.report(measurements.long, retrieval, policy.confidence)
    findings = []
    for bucket in by_position.buckets if policy.long_kl is not None else ():
        verdict, reason = long_context.judge(bucket, policy.long_kl or 0.0)
        findings.append(Finding("long", f"positions to {bucket.end}", verdict, sentence(reason)))
    for name in measurements.long.unread:
        reason = f"The candidate gave no finite log probabilities for {name}."
        findings.append(Finding("long", name, Verdict.FAIL, reason))
    return by_position, findings


def _kl(measurements: Measurements, policy: Policy) -> tuple[kl.Kl | None, list[Finding]]:
    """Return the divergence at the policy's confidence, and the finding on its promise; none without a promise.

    Without a measurement the promise is INVALID, unless the canary ended the run before.
    """
    if policy.kl is None:
        return None, []
    if measurements.kl is None:
        missing = Finding("kl", "texts", Verdict.INVALID, "The KL divergence decides, but was not measured.")
        return None, [] if measurements.stopped is not None else [missing]
    try:
        divergence = kl.measure(measurements.kl, policy.kl.confidence)
    except MeasurementError as error:
        return None, [Finding.invalid("kl", str(error))]
    verdict, reason = kl.judge(divergence, policy.kl)
    return divergence, [Finding("kl", "texts", verdict, sentence(reason[:1].upper() + reason[1:]))]


def _layout(measurements: Measurements, policy: Policy) -> tuple[layout.LayoutComparison | None, list[Finding]]:
    """Return the comparison of the layouts at the policy's confidence, and its finding; none without a promise."""
    if policy.layout is None:
        return None, []
    if measurements.layout is None:
        missing = Finding("layout", "TP 1", Verdict.INVALID, "The layout decides, but was not compared.")
        return None, [] if measurements.stopped is not None else [missing]
    try:
        comparison = layout.compare(measurements.layout, policy.layout.confidence)
    except MeasurementError as error:
        return None, [Finding.invalid("layout", str(error))]
    verdict, reason = layout.judge(comparison, policy.layout)
    return comparison, [Finding("layout", comparison.layout, verdict, sentence(reason))]


def _controls(measurements: Measurements, policy: Policy) -> tuple[dict[str, Control], list[Finding]]:
    controls: dict[str, Control] = {}
    faults: list[Finding] = []
    for task, again in measurements.control.items():
        if task not in measurements.samples:
            faults.append(Finding.invalid(task, f"{task} was asked a second time, and no first time is on record"))
            continue
        try:
            controls[task] = accuracy.control(measurements.samples[task][0], again, policy.confidence)
        except MeasurementError as error:
            faults.append(Finding.invalid(task, f"The baseline's control cannot be compared: {error}"))
    return controls, faults


def _compared(
    measurements: Measurements, policy: Policy
) -> tuple[dict[str, Accuracy], dict[str, tuple[Look, ...]], list[Finding]]:
    compared: dict[str, Accuracy] = {}
    looks: dict[str, tuple[Look, ...]] = {}
    faults: list[Finding] = []
    for task, sides in measurements.samples.items():
        try:
            compared[task], looks[task] = accuracy.compare(task, sides, policy)
        except MeasurementError as error:
            faults.append(Finding.invalid(task, str(error)))
    return compared, looks, faults

"""What is different between two judgements of the same measurements, in sentences."""

from __future__ import annotations

from eval.gate.finding import Finding
from eval.gate.report import GateReport


def changes(recorded: GateReport, found: GateReport) -> tuple[str, ...]:
    """Every difference that a reader must know; empty where both say the same, to the last figure.

    A record whose verdict does not follow from its own numbers was edited, or judged by another version of the gate.
    """
    if recorded == found:
        return ()
    sentences = []
    if recorded.artefact != found.artefact:
        sentences.append(f"The artefact is {found.artefact}, the record says {recorded.artefact}.")
    if recorded.verdict is not found.verdict:
        sentences.append(f"The numbers lead to {found.verdict.value}, the record says {recorded.verdict.value}.")
    before, after = ({(f.kind, f.subject, f.reason): f for f in report.findings} for report in (recorded, found))
    sentences += [f"Only the record says: {_told(before[key])}" for key in before if key not in after]
    sentences += [f"The record does not say: {_told(after[key])}" for key in after if key not in before]
    sentences += [
        f"The record says {before[key].verdict.value} of: {_told(after[key])}"
        for key in after
        if key in before and before[key] != after[key]
    ]
    old, new = recorded.to_json(), found.to_json()
    fields = [name for name in new if name not in ("artefact", "verdict", "findings") and old.get(name) != new[name]]
    if fields:
        sentences.append(f"Other figures than recorded: {', '.join(fields)}.")
    return tuple(sentences)


def _told(finding: Finding) -> str:
    return f"{finding.verdict.value}, {finding.kind}: {finding.reason}"

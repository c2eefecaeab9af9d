"""The judgement of a candidate: PASS, FAIL, INCONCLUSIVE or INVALID, with every reason in a sentence.

    report = judge(measurements, Policy.for_suite(suite, margin=0.01, min_ratio=1.0))
    report.verdict, [finding.reason for finding in report.findings]

Everything here is pure: measurements and a policy in, a report out, the same on every machine. `eval.record` writes
both into files from which anyone judges again.
"""

from quantmint.eval.gate.judgement import judge
from quantmint.eval.gate.report import (
    ANOMALOUS,
    JUDGEMENT,
    Control,
    Finding,
    GateReport,
    Headline,
    Kind,
    Policy,
    changes,
)

__all__ = [
    "ANOMALOUS",
    "JUDGEMENT",
    "Control",
    "Finding",
    "GateReport",
    "Headline",
    "Kind",
    "Policy",
    "changes",
    "judge",
]

"""A report as JUnit XML, which Jenkins, GitLab and GitHub's test reporters read: one test case a finding.

FAIL is a `failure`, INVALID an `error` (the measurement broke, not the checkpoint). INCONCLUSIVE is a `failure` of that
type as well: all three systems count `skipped` as good, and a checkpoint that was not shown to keep its promises must
not look as if it had. Who wants to let it through has the exit code 3 for that.

Attributes and order are those of Jenkins' schema, the strictest of the three.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import get_args
from xml.etree import ElementTree as ET

from quantmint.eval.gate import Finding, GateReport, Kind
from quantmint.eval.report.model import Report
from quantmint.eval.verdict import Verdict

# XML 1.0 has no other control characters, not even escaped.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render(report: Report) -> str:
    """Return the report as JUnit XML: a test suite for each kind of check, with model and device as properties."""
    gate = GateReport.from_json(report["gate"])
    told = {name: str(report[name]) for name in ("model", "scheme")} | {"verdict": gate.verdict.value}
    told |= {name: getattr(gate, name) for name in ("artefact", "runtime", "hardware", "device")}
    root = ET.Element("testsuites", {"name": _clean(report["name"]), **_counts(gate.findings)})
    for kind in get_args(Kind):
        findings = [finding for finding in gate.findings if finding.kind == kind]
        if findings:
            suite = ET.SubElement(root, "testsuite", {
                "name": f"{_clean(report['name'])}.{kind}", **_counts(findings), "skipped": "0",
                "timestamp": report["created"][:19],
            })  # fmt: skip
            properties = ET.SubElement(suite, "properties")
            for name, value in told.items():
                ET.SubElement(properties, "property", {"name": name, "value": _clean(value)})
            names: Counter[str] = Counter()  # readers keep one result of each name
            for finding in findings:
                names[finding.subject] += 1
                again = f" ({names[finding.subject]})" if names[finding.subject] > 1 else ""
                named = {"classname": f"{report['name']}.{kind}", "name": f"{finding.subject}{again}", "time": "0"}
                case = ET.SubElement(suite, "testcase", {name: _clean(value) for name, value in named.items()})
                if finding.verdict is Verdict.PASS:
                    ET.SubElement(case, "system-out").text = _clean(finding.reason)
                    continue
                tag = "error" if finding.verdict is Verdict.INVALID else "failure"
                attributes = {"type": finding.label or finding.verdict.value, "message": _clean(finding.reason)}
                ET.SubElement(case, tag, attributes).text = _clean(finding.reason)
    ET.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def _counts(findings: tuple[Finding, ...] | list[Finding]) -> dict[str, str]:
    errors = sum(finding.verdict is Verdict.INVALID for finding in findings)
    failures = sum(finding.verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE) for finding in findings)
    return {"tests": str(len(findings)), "failures": str(failures), "errors": str(errors)}


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text)

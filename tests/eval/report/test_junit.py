"""JUnit XML: valid by a schema, one case a finding, and nothing that did not pass looks as if it had."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lxml import etree

from quantmint.eval.gate import GateReport
from quantmint.eval.measurements import StructureCheck
from quantmint.eval.report import junit
from quantmint.eval.report.model import Report
from quantmint.eval.verdict import Verdict
from tests.eval.report import made

SCHEMA = etree.XMLSchema(etree.parse(Path(__file__).parents[2] / "assets" / "junit.xsd"))


def checked(report: Report) -> Any:
    text = junit.render(report)
    SCHEMA.assertValid(etree.fromstring(text.encode()))
    return etree.fromstring(text.encode())


@pytest.mark.parametrize("variant", made.VARIANTS)
def test_a_case_a_finding_with_the_counts_of_its_suite(variant: str) -> None:
    report = made.VARIANTS[variant]()
    root, gate = checked(report), GateReport.from_json(report["gate"])
    assert len(root.findall(".//testcase")) == len(gate.findings) == int(root.attrib["tests"])
    for suite in root:
        assert int(suite.attrib["tests"]) == len(suite.findall("testcase"))
        assert int(suite.attrib["failures"]) == len(suite.findall("testcase/failure"))
        assert int(suite.attrib["errors"]) == len(suite.findall("testcase/error"))
    passed = [case for case in root.iter("testcase") if case.find("failure") is None and case.find("error") is None]
    assert len(passed) == sum(finding.verdict is Verdict.PASS for finding in gate.findings)


def test_what_each_verdict_becomes() -> None:
    known = made.measurements()
    broken = replace(
        known, structure=StructureCheck(Verdict.FAIL, ("2 tensors hold NaN",)), faults=("A log is missing",)
    )
    root = checked(made.report(broken, made.policy(margins={"gsm8k": 0.02, "mmlu": 0.004})))
    failed = {case.attrib["name"]: case.find("failure") for case in root.iter("testcase")}
    assert failed["checkpoint"].attrib == {"type": "FAIL", "message": "2 tensors hold NaN."}
    assert failed["mmlu"].attrib["type"] == "INCONCLUSIVE"
    assert failed["gsm8k"] is None
    errors = [error.attrib["type"] for error in root.iter("error")]
    assert errors == ["INVALID"]
    assert not list(root.iter("skipped"))


def test_findings_of_one_subject_keep_apart_and_odd_characters_out() -> None:
    broken = replace(made.measurements(), faults=("One \x00\x1b[31m <fault>", "another & one", "a third"))
    root = checked(made.report(broken, made.policy()))
    names = [case.attrib["name"] for case in root.iter("testcase") if case.find("error") is not None]
    assert names == ["measurement", "measurement (2)", "measurement (3)"]
    assert next(root.iter("error")).text == "One \ufffd\ufffd[31m <fault>."


def test_the_schema_refuses_what_readers_would_misread() -> None:
    good = junit.render(made.good())
    for wrong in (
        good.replace('name="mmlu"', 'name="gsm8k"'),  # two cases of one name
        good.replace('time="0"', 'time="soon"', 1),
        good.replace("<testsuite name", "<suite name").replace("</testsuite>", "</suite>"),
    ):
        assert wrong != good
        assert not SCHEMA.validate(etree.fromstring(wrong.encode()))

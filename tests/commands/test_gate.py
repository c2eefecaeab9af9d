"""quantmint gate: judging again from files, by their own policy or by one's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from quantmint.eval.report.numbers import percent, unit_of
from quantmint.pipeline.commands.tables import paragraph, table
from tests.checkpoints import GOOD, run

Quantmint = Callable[..., Any]
WriteGate = Callable[..., Path]

POINTS = unit_of("graded").words(-0.1)
VERDICTS = [("PASS", 0), ("FAIL", 1), ("INCONCLUSIVE", 3), ("INVALID", 4)]


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(("verdict", "code"), VERDICTS)
def test_the_same_verdict_from_the_files(
    quantmint: Quantmint, write_gate: WriteGate, tmp_path: Path, verdict: str, code: int
) -> None:
    path = write_gate(tmp_path / "entry", verdict)
    beside = write_gate(tmp_path / "published" / "quantmint", verdict)
    for where, file in ((path, path), (path.parent, path), (tmp_path / "published", beside)):
        ended = quantmint("gate", where)
        assert ended.code == code
        assert ended.out.startswith(f"{verdict}  checkpoint {'ab' * 32}\n")
        assert f"judged by its own policy; {file} says the same" in ended.out
        told = quantmint("gate", where, "--json")
        assert (told.code, told.json["verdict"], told.json["recorded"]) == (code, verdict, verdict)
        assert (told.json["judged_by"], told.json["differences"]) == ("the recorded policy", [])


def test_a_recipe_a_report_and_its_entry_lead_to_the_record(quantmint: Quantmint, tmp_path: Path) -> None:
    store = tmp_path / "store"
    run(store, "good", GOOD)
    (report,) = store.glob("report/*/report.json")
    recipe = "name: good\nsource: {folder: m}\nquantization: {scheme: ptpc_fp8}\ntarget: {workload: tiny}\n"
    Path("good.yaml").write_text(f"{recipe}evaluation: {{suite: tiny}}\ngate: {{accuracy: {{margin: 0.02}}}}\n")
    for subject in ("good", "good.yaml", report, report.parent):
        told = quantmint("gate", subject, "--store", store, "--json")
        assert (told.code, told.json["verdict"], told.json["differences"]) == (0, "PASS", [])
        assert Path(told.json["path"]).parent.parent == store / "gate"
    ended = quantmint("gate", "goood", "--store", store)
    assert (ended.code, 'did you mean "good"?' in ended.err) == (2, True)


def test_prose_is_wrapped_at_a_terminals_edge_and_one_line_in_a_file() -> None:
    screen = Console(width=40, force_terminal=True)
    lines = paragraph(screen, "  PASS  ", "word " * 20 + "end").splitlines()
    assert len(lines) > 2
    assert max(map(len, lines)) <= 40
    assert {line[:8] for line in lines} == {"  PASS  ", " " * 8}
    assert len(paragraph(Console(width=40, force_terminal=False), "x: ", "word " * 20).splitlines()) == 1


def test_no_table_breaks_a_word() -> None:
    rows = [("ptpc_fp8", "8", "FP8 per channel", "[green]llmcompressor[/], stream")]
    words = {"ptpc_fp8", "8", "FP8", "per", "channel", "llmcompressor,", "stream"}
    for width in (25, 51, 52, 80):
        screen = Console(width=width, force_terminal=True, color_system=None, record=True, file=StringIO())
        screen.print(table("scheme", "bits", "weights", "engines", right=("bits",), rows=rows))
        told = screen.export_text()
        assert max(map(len, told.splitlines())) <= width
        assert words <= set(told.replace(";", "").split())
        assert ("bits 8;" in told) == (width < 52)


def test_the_first_screen(quantmint: Quantmint, write_gate: WriteGate, tmp_path: Path) -> None:
    lines = quantmint("gate", write_gate(tmp_path, "FAIL")).out.splitlines()
    assert lines[1] == "measured with vllm on mi300x (unknown)"
    findings = [line.split(maxsplit=2) for line in lines[lines.index("") + 1 :] if line.startswith("  ")]
    assert [(word, kind) for word, kind, _ in findings[:2]] == [("FAIL", "accuracy:"), ("PASS", "canary:")]
    row = next(line for line in lines if line.split()[:2] == ["t", "2,000"])
    assert [cell.strip() for cell in row.split("  ") if cell.strip()][2:5] == [percent(1.0, 2), percent(0.9, 2), POINTS]
    assert lines[-1] == "Throughput was not measured: nothing is promised of it."


def test_the_numbers_are_believed_and_not_the_word(quantmint: Quantmint, write_gate: WriteGate, tmp_path: Path) -> None:
    path = write_gate(tmp_path, "FAIL")
    edit(path, verdict="PASS")
    ended = quantmint("gate", path)
    assert ended.code == 1
    assert "does not follow from its own numbers" in ended.out
    assert "The numbers lead to FAIL, the record says PASS." in ended.out
    told = quantmint("gate", path, "--json").json
    assert (told["verdict"], told["recorded"]) == ("FAIL", "PASS")
    assert told["differences"] == ["The numbers lead to FAIL, the record says PASS."]


def test_findings_and_figures_that_were_edited_are_named(
    quantmint: Quantmint, write_gate: WriteGate, tmp_path: Path
) -> None:
    path = write_gate(tmp_path, "PASS")
    record = json.loads(path.read_text())
    record["findings"][0]["reason"] = "All is well."  # a sentence, which another version words otherwise
    record["findings"][1]["verdict"] = "FAIL"
    record["accuracy"][0]["candidate"] = 0.99
    path.write_text(json.dumps(record))
    differences = quantmint("gate", path, "--json").json["differences"]
    assert differences[0].startswith("Only the record says: FAIL, canary: ")
    assert differences[1].startswith("The record does not say: PASS, canary: ")
    assert differences[2:] == ["Other figures than recorded: accuracy."]


@pytest.mark.parametrize(
    ("recorded", "limits", "verdict"),
    [
        ("FAIL", ("--margin", "0.5"), "PASS"),
        ("PASS", ("--margin", "0.0001"), "INCONCLUSIVE"),
        ("PASS", ("--min-ratio", "1.2"), "INVALID"),  # nothing was measured to judge it by
        ("INCONCLUSIVE", ("--margin", "0.03"), "PASS"),
        ("PASS", ("--confidence", "0.999999999999"), "INCONCLUSIVE"),
    ],
)
def test_your_own_policy(
    quantmint: Quantmint, write_gate: WriteGate, tmp_path: Path, recorded: str, limits: tuple[str, str], verdict: str
) -> None:
    path = write_gate(tmp_path, recorded)
    ended = quantmint("gate", path, *limits)
    assert ended.out.startswith(verdict)
    assert f"by your policy; by its own, {path} says {recorded}" in ended.out
    told = quantmint("gate", path, *limits, "--json").json
    assert (told["judged_by"], told["verdict"], told["recorded"]) == ("your policy", verdict, recorded)


def test_limits_that_are_the_recorded_ones_change_nothing(
    quantmint: Quantmint, write_gate: WriteGate, tmp_path: Path
) -> None:
    told = quantmint("gate", write_gate(tmp_path, "PASS"), "--margin", "0.01", "--json").json
    assert told["judged_by"] == "the recorded policy"


@pytest.mark.parametrize(
    "limits", [("--margin", "0"), ("--margin", "1"), ("--confidence", "0.4"), ("--min-ratio", "0")]
)
def test_limits_that_are_none(
    quantmint: Quantmint, write_gate: WriteGate, tmp_path: Path, limits: tuple[str, str]
) -> None:
    assert quantmint("gate", write_gate(tmp_path, "PASS"), *limits).code == 2


@pytest.mark.parametrize(
    ("tamper", "words"),
    [
        (lambda folder: (folder / "samples/t.candidate.json.gz").write_text("[]"), "SHA-256 differs"),
        (lambda folder: (folder / "samples/t.candidate.json.gz").unlink(), "cannot be read"),
        (lambda folder: (folder / "gate.json").write_text("{}"), "not a record of the gate: nothing at schema"),
        (lambda folder: (folder / "gate.json").write_text("{"), "not a record of the gate: not JSON: Expecting"),
        (lambda folder: edit(folder / "gate.json", schema=1), "schema 1, this version reads 2"),
        (lambda folder: (folder / "gate.json").unlink(), "found no gate.json, neither there nor in quantmint/"),
    ],
)
def test_what_was_tampered_with_is_refused(
    quantmint: Quantmint, write_gate: WriteGate, tmp_path: Path, tamper: Callable[[Path], None], words: str
) -> None:
    write_gate(tmp_path, "PASS")
    tamper(tmp_path)
    ended = quantmint("gate", tmp_path)
    assert (ended.code, ended.out) == (2, "")
    assert words in ended.err
    assert quantmint("gate", tmp_path, "--json").json["exit_code"] == 2

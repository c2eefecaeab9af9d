"""The stage in the real runner: what it gathers from the entries before it, and what it leaves."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quantmint.eval import record
from quantmint.eval.gate import judge
from quantmint.eval.measurements import Measurements
from quantmint.pipeline.quantize.inspection.inspect import inspect_checkpoint
from quantmint.pipeline.runs import planner
from quantmint.pipeline.stages.report import FILES, ReportStage
from quantmint.pipeline.stages.stage import Job
from tests.eval.report import made as measured


@pytest.fixture
def known() -> Measurements:
    """Measurements of the tiny suite's tasks."""
    before, after = measured.answered(400, 0.8, 6, 3, 7)
    facts = (measured.samples("tiny_facts", before, "acc"), measured.samples("tiny_facts", after, "acc"))
    return measured.measurements(samples={"tiny_facts": facts}, control={})


@pytest.fixture
def stages(orchestra: Any, quantize: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Every stage that a report looks at, as fakes that leave what the real ones leave, and the report itself."""
    made = quantize("llama", "compressed-tensors")
    inspection = inspect_checkpoint(made.checkpoint, made.structure, source=made.source).to_json()

    def make(known: Measurements, *, stopped: bool = False) -> list[Any]:
        def source(job: Job) -> None:
            (job.path / "location.json").write_text(json.dumps({"folder": str(made.source.folder)}))

        def serve(job: Job) -> None:
            launch = {"plan": {"argv": [], "env": {}}, "log": {"kv_tokens": 4096}, "runtime": "vllm"}
            (job.path / "launch.json").write_text(json.dumps(launch))

        def evaluate(side: str) -> Callable[[Job], None]:
            def work(job: Job) -> None:
                (job.path / "answers").mkdir()
                with gzip.open(job.path / "answers" / "tiny_facts.jsonl.gz", "wt") as stream:
                    for number in range(400):
                        answer = {"task": "tiny_facts", "doc_id": number, "filter": "none", "prompt": f"Who {number}?",
                                  "target": "Kana", "response": f"{side} {number}"}  # fmt: skip
                        stream.write(json.dumps(answer) + "\n")

            return work

        policy = measured.policy(margins={"tiny_facts": 0.05})
        stage = ReportStage(stopped=stopped)
        works: dict[str, Callable[[Job], None]] = {
            "source": source,
            "quantize": lambda job: shutil.copytree(made.folder, job.path / "checkpoint"),
            "inspect": lambda job: (job.path / "inspection.json").write_text(json.dumps(inspection)),
            "serve-baseline": serve,
            "serve-candidate": serve,
            "evaluate-baseline": evaluate("baseline"),
            "evaluate-candidate": evaluate("candidate"),
            "gate": lambda job: record.write(job.path, known, judge(known, policy)),
        }
        results = {"inspect": {"verdict": "PASS"}, "gate": {"verdict": judge(known, policy).verdict.value}}
        fakes = [
            orchestra.stage(key, work=works.get(key, lambda job: None), result=results.get(key, {}))
            for key in (earlier.key for earlier in planner.stages_of(orchestra.setting))
            if key not in ("report", "package", "sign", "publish")
        ]
        return [*fakes, stage]

    return make


def reported(outcome: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(outcome.entry("report").file("report.json").read_text())
    return found


def test_all_that_was_found_is_gathered(orchestra: Any, stages: Any, known: Measurements) -> None:
    outcome = orchestra.run(*stages(known))
    entry = outcome.entry("report")
    assert set(entry.record.files) == set(FILES.values()) == {"report.html", "report.json", "report.md", "junit.xml"}
    report = reported(outcome)
    assert (report["name"], report["stopped"], report["notes"]) == ("r", None, [])
    assert len(report["launches"]) == len(known.launches)
    assert report["kv_tokens"] == {"baseline": 1_262_352, "candidate": 2_524_704}
    assert {error["layer"] for error in report["layers"]} == set(range(1 + max(e["layer"] for e in report["layers"])))
    assert {scale["which"] for scale in report["kv_scales"]} == {"K", "V"}
    [task] = report["flips"]
    assert len(task["flips"]) == 9
    for flip in task["flips"]:
        number = flip["doc_id"]
        assert (flip["prompt"], flip["target"]) == (f"Who {number}?", "Kana")
        assert (flip["baseline"], flip["candidate"]) == (f"baseline {number}", f"candidate {number}")
    assert [stage["name"] for stage in report["stages"]] == orchestra.ran
    assert not any(stage["cached"] for stage in report["stages"])
    assert [plan["argv"][:3] for plan in report["servers"]] == [
        ["vllm", "serve", "model"], ["vllm", "serve", "r"],
    ]  # fmt: skip
    assert report["reproduce"] == ["quantmint run r", "quantmint gate r"]
    text = entry.file("report.html").read_text()
    assert "Who " in text
    assert str(Path.cwd()) not in json.dumps(report)


def test_what_an_earlier_run_made_is_marked(orchestra: Any, stages: Any, known: Measurements) -> None:
    plan = stages(known)
    orchestra.run(*plan[:3])
    report = reported(orchestra.run(*plan))
    cached = [stage["name"] for stage in report["stages"] if stage["cached"]]
    assert cached == [stage.key for stage in plan[:3]]


def test_a_run_that_the_canary_stopped(orchestra: Any, stages: Any) -> None:
    canary = replace(measured.measurements().canary, agreement=0.2, agreement_low=0.1, agreement_high=0.3)
    known = measured.measurements(samples={}, control={}, launches=(), canary=canary, stopped="canary")
    report = reported(orchestra.run(*stages(known, stopped=True)))
    assert (report["stopped"], report["flips"], report["launches"]) == ("canary", [], [])
    assert report["kv_tokens"] == {"baseline": 4096, "candidate": 4096}
    assert report["reproduce"][1].startswith("quantmint gate store/gate/")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runtime", "hardware", "words"),
    [
        ("vllm 0.32.0", "cpu", "served on a CPU"),
        ("vllm", "h100", "served on an NVIDIA GPU"),
        ("transformers 5.17.0, dequantized weights", "cpu", "by the reference runtime"),
    ],
)
def test_notes_say_where_the_figures_come_from(
    orchestra: Any, stages: Any, known: Measurements, runtime: str, hardware: str, words: str
) -> None:
    sides = {
        side: replace(getattr(known, side), runtime=runtime, hardware=hardware) for side in ("baseline", "candidate")
    }
    notes = reported(orchestra.run(*stages(replace(known, **sides))))["notes"]
    assert len(notes) == 1
    assert words in notes[0]


def test_the_command_gives_each_form(
    orchestra: Any, stages: Any, known: Measurements, quantmint: Any, tmp_path: Path
) -> None:
    assert quantmint("report", "r.yaml").code == 2
    entry = orchestra.run(*stages(known)).entry("report")
    for given in ("r.yaml", entry.path, entry.file("report.json")):
        assert quantmint("report", given).out.strip().endswith("report.html")
        for form, name in FILES.items():
            if form != "html":
                assert quantmint("report", given, "--format", form).out == entry.file(name).read_text()
    copy = tmp_path / "results.xml"
    assert quantmint("report", "r.yaml", "--format", "junit", "--output", copy).out.strip() == str(copy)
    assert copy.read_text() == entry.file("junit.xml").read_text()
    told = quantmint("report", "r.yaml", "--format", "markdown", "--json").json
    assert (Path(told["report"]).name, told["format"]) == ("report.md", "markdown")


def test_the_command_reads_a_published_folder(stages: Any, orchestra: Any, known: Measurements, quantmint: Any) -> None:
    entry = orchestra.run(*stages(known)).entry("report")
    evidence = Path("published/r/quantmint")
    shutil.copytree(entry.path, evidence)
    assert quantmint("report", "published/r").out.strip() == "published/r/quantmint/report.html"
    (evidence / "junit.xml").unlink()
    ended = quantmint("report", "published/r", "--format", "junit")
    assert (ended.code, ended.out) == (2, "")
    assert "has no junit.xml" in ended.err


def test_the_command_says_what_a_folder_lacks(quantmint: Any, project: Path) -> None:
    ended = quantmint("report", "model")
    assert ended.code == 2
    assert "model: found neither quantmint/report.json nor report.json" in ended.err
    assert quantmint("report", "r.yaml", "--format", "htlm").code == 2

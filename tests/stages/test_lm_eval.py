"""The stages that evaluate: a real lm-eval and the real runner, against stand-ins for both servers."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from quantmint.eval import suites
from quantmint.eval.harness import Asked, Item, compressed, items_digest, write_asked
from quantmint.eval.samples import Sample, SampleSet, pair
from quantmint.eval.statistics.sequential import decide
from quantmint.eval.suites import Suite, SuiteTask
from quantmint.pipeline.base.errors import InvalidMeasurementError, StageError
from quantmint.pipeline.runs.runner import RunOutcome
from quantmint.pipeline.serving.running.server import RunningServer
from quantmint.pipeline.stages.evaluate import ANSWERS, ControlStage, EvaluateStage, guessing, read_samples
from tests.eval.completions import Completions
from tests.processes import below, processes_naming

TOKENIZER = Path(__file__).parents[2] / "recipes" / "tiny" / "model"
FACTS = SuiteTask("facts", "acc", 400, 0.05, margin=0.15)
SUMS = SuiteTask("sums", "exact_match", 60, 0.05, filter="number", gated=False, max_gen_tokens=4)
TEXTS = SuiteTask("texts", "word_perplexity", 60, 0.05, gated=False, expected_spread=0.02)


def write_tasks(folder: Path) -> None:
    common = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{question}}", "num_fewshot": 0}
    definitions: list[dict[str, Any]] = [
        {"task": "facts", "output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "answer",
         "metric_list": [{"metric": "acc"}]},
        {"task": "sums", "output_type": "generate_until", "doc_to_target": "{{answer}}",
         "generation_kwargs": {"until": ["?"]}, "metric_list": [{"metric": "exact_match"}],
         "filter_list": [{"name": "number", "filter": [{"function": "regex", "regex_pattern": "([0-9]+)"},
                                                       {"function": "take_first"}]}]},
        {"task": "texts", "output_type": "loglikelihood_rolling", "doc_to_target": "{{question}}",
         "metric_list": [{"metric": "word_perplexity"}]},
    ]  # fmt: skip
    folder.mkdir()
    for definition, count in zip(definitions, (400, 60, 60), strict=True):
        name = definition["task"]
        files = {"dataset_kwargs": {"data_files": {"test": f"{name}.jsonl"}}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({**common, **files, **definition}))
        rows = ({"question": f"{n} + {n} =", "choices": ["1", "2", "3"], "answer": 0} for n in range(count))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@dataclass
class World:
    """A run whose servers are stand-ins, one for each side."""

    orchestra: Any
    servers: Mapping[str, Completions]

    def run(self, *stages: Any, **options: Any) -> RunOutcome:
        o = self.orchestra

        def source(job: Any) -> None:
            (job.path / "location.json").write_text(json.dumps({"folder": str(TOKENIZER)}))

        def quantize(job: Any) -> None:
            (job.path / "checkpoint").mkdir(exist_ok=True)
            for file in TOKENIZER.glob("token*"):
                shutil.copy(file, job.path / "checkpoint")

        outcome: RunOutcome = o.run(
            o.stage("source", work=source),
            o.stage("quantize", "source", work=quantize),
            o.stage("serve-baseline", "source"),
            o.stage("serve-candidate", "quantize"),
            *stages,
            **options,
        )
        return outcome

    def judge_by(self, **changes: object) -> None:
        """Change fields of the suite's tasks, as an edit of its file does."""
        setting = self.orchestra.setting
        tasks = tuple(replace(task, **changes) for task in setting.suite.tasks)
        self.orchestra.setting = replace(setting, suite=replace(setting.suite, tasks=tasks))

    def evaluate_by(self, **changes: object) -> None:
        """Change the recipe's section `evaluation`."""
        setting = self.orchestra.setting
        recipe = setting.recipe
        section = recipe.evaluation.model_copy(update=changes)
        loaded = replace(setting.loaded, recipe=recipe.model_copy(update={"evaluation": section}))
        self.orchestra.setting = replace(setting, loaded=loaded)

    @property
    def said(self) -> str:
        return "\n".join(self.orchestra.lines)

    def counts(self) -> dict[str, int]:
        """Prompts that each side was asked since the last call."""
        found = {side: len(server.prompts) for side, server in self.servers.items()}
        for server in self.servers.values():
            server.asked.clear()
        return found


BASELINE, CONTROL, CANDIDATE = EvaluateStage("baseline"), ControlStage(), EvaluateStage("candidate")


@pytest.fixture
def world(orchestra: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Make a world: which tasks, and how much of the candidate's answers differ."""
    write_tasks(tmp_path / "tasks")
    log = tmp_path / "server.log"
    log.write_text("all is well\n")

    @contextmanager
    def make(*tasks: SuiteTask, worse: float = 0.0, **evaluation: object) -> Iterator[World]:
        recipe = orchestra.setting.recipe
        asked = recipe.evaluation.model_copy(update={"control": 50, **evaluation})
        loaded = replace(orchestra.setting.loaded, recipe=recipe.model_copy(update={"evaluation": asked}))
        orchestra.setting = replace(
            orchestra.setting, suite=Suite("s", "Some.", tasks, path=tmp_path / "tasks" / "s.yaml"), loaded=loaded
        )
        with Completions() as baseline, Completions(worse=worse) as candidate:
            servers = {"baseline": baseline, "candidate": candidate}
            monkeypatch.setattr(
                "quantmint.pipeline.stages.servers.Servers.get",
                lambda self, side, plan: RunningServer(side, servers[side].base_url, log, 1.0),
            )
            yield World(orchestra, servers)

    return make


def samples(outcome: RunOutcome, key: str, task: SuiteTask) -> SampleSet:
    entry = outcome.entry(key)
    assert entry is not None
    return read_samples(entry.path, task)


def answers(outcome: RunOutcome, key: str, task: SuiteTask) -> list[dict[str, Any]]:
    entry = outcome.entry(key)
    assert entry is not None
    with gzip.open(entry.path / "answers" / f"{task.task}.jsonl.gz", "rt") as stream:
        return [json.loads(line) for line in stream]


@pytest.fixture
def warm(warm_python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval has been imported; who kills it as it is runs what users run."""
    monkeypatch.setattr(sys, "executable", str(warm_python))


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_a_lossless_candidate_is_asked_until_it_passes(world: Callable[..., Any]) -> None:
    with world(FACTS, SUMS, TEXTS) as w:
        outcome = w.run(BASELINE, CONTROL, CANDIDATE)
        asked = w.counts()
    assert w.said.count("starting lm-eval") == 1
    whole, part = (samples(outcome, key, FACTS) for key in ("evaluate-baseline", "evaluate-candidate"))
    assert (len(whole.samples), whole.looks, sorted({sample.look for sample in whole.samples})) == (
        400,
        4,
        [0, 1, 2, 3],
    )
    assert len(part.samples) in (100, 200, 300)
    assert (part.planned, part.looks) == (400, 4)
    # The gate, which reads the files, comes to the same look.
    looks = decide(pair(whole, part), 0.15, 0.95)
    assert (looks[-1].decision, looks[-1].items) == ("PASS", len(part.samples))
    assert f"facts: PASS after {len(part.samples)} of 400 items" in w.said
    assert "100 % of 400 facts items" in w.said  # the baseline
    assert w.said.count("100 % of 60 sums items") == 2
    # What does not decide is asked whole, and so is the baseline; the control asks 50 items of each once more.
    texts = samples(outcome, "evaluate-candidate", TEXTS)
    assert (texts.kind, len(texts.samples), {sample.weight for sample in texts.samples}) == ("perplexity", 60, {4.0})
    assert asked == {"baseline": 3 * 400 + 60 + 60 + 3 * 50 + 50, "candidate": 3 * len(part.samples) + 60 + 60}
    entry = outcome.entry("evaluate-candidate")
    assert entry is not None
    assert entry.record.result["items"] == {"facts": [len(part.samples), 400], "sums": [60, 60], "texts": [60, 60]}
    assert entry.record.result["scores"] == {
        task.task: samples(outcome, "evaluate-candidate", task).mean for task in (FACTS, SUMS, TEXTS)
    }
    assert not [name for name in entry.record.files if name.startswith(("asked", "tasks"))]

    shown = answers(outcome, "evaluate-candidate", FACTS)
    assert [(a["task"], a["doc_id"]) for a in shown] == [(s.task, s.doc_id) for s in part.samples]
    assert [float(a["response"] == a["target"]) for a in shown] == [s.score for s in part.samples]
    assert not (entry.path / "answers" / "texts.jsonl.gz").exists()

    again = samples(outcome, "control", FACTS)
    first = {sample.key for sample in whole.samples if sample.look == 0}
    assert len(again.samples) == 50
    assert {sample.key for sample in again.samples} < first
    pairs = pair(whole.on(again), again)
    assert pairs.baseline == pairs.candidate
    control = outcome.entry("control")
    assert control is not None
    assert control.record.result["flips"] == {"facts": [0, 50], "sums": [0, 50]}
    assert "Evaluating on 50 examples" in (control.path / "lm-eval.log").read_text()
    assert "Evaluating on 100 examples" not in (control.path / "lm-eval.log").read_text()
    assert pair(*(samples(outcome, f"evaluate-{side}", SUMS) for side in ("baseline", "candidate"))).planned == 60


@pytest.mark.slow
def test_kill_9_costs_the_batch_that_was_being_asked(
    world: Callable[..., Any],
    forked: Callable[[Callable[[], None]], int],
    code_of: Callable[[int], int],
    monkeypatch: pytest.MonkeyPatch,
    warm_python: Path,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with world(FACTS, SUMS, looks=1) as w:
        server = w.servers["baseline"]
        pid = forked(lambda: w.run(BASELINE))
        # Batches of 300 prompts, 32 to a request: the third batch of the only look has begun.
        while len(server.asked) < 25:
            time.sleep(0.01)
        # Its own line, which names a socket of its own, and not its supervisor's around that.
        ours = min((line for line in below(pid).values() if "quantmint.eval.harness_child" in line), key=len)
        os.kill(pid, signal.SIGKILL)
        assert code_of(pid) == -signal.SIGKILL
        deadline = time.monotonic() + 30
        while (left := processes_naming(ours)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert left == ()
        assert list(tmp_path.glob("*quantmint*")) == []  # nothing is left there either
        monkeypatch.setattr(tempfile, "tempdir", None)
        monkeypatch.setattr(sys, "executable", str(warm_python))
        w.counts()
        outcome = w.run(BASELINE)
        asked = w.counts()["baseline"]
        assert 60 < asked <= 60 + 2 * 300
        whole = samples(outcome, "evaluate-baseline", FACTS)
        assert "facts: 200 of 400 answers were known from earlier runs" in w.said
        assert sorted(sample.doc_id for sample in whole.samples) == list(range(400))


@pytest.mark.slow
def test_only_items_that_nobody_has_asked_are_asked(world: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a narrower margin, a higher limit, a margin that known answers decide, and a wish for new answers."""
    with world(FACTS, limit=300, looks=3) as w:
        first = w.run(BASELINE, CANDIDATE)
        decided = len(samples(first, "evaluate-candidate", FACTS).samples)
        assert w.counts() == {"baseline": 3 * 300, "candidate": 3 * decided}
        assert decided in (100, 200)
        w.judge_by(margin=0.0001)
        narrow = w.run(BASELINE, CANDIDATE)
        assert w.counts() == {"baseline": 0, "candidate": 3 * (300 - decided)}
        entry = narrow.entry("evaluate-candidate")
        assert entry is not None
        assert entry.record.result["asked"] == {"facts": 300 - decided}
        assert f"facts: {decided} of 300 answers were known from earlier runs" in w.said
        w.evaluate_by(limit=400, looks=1)
        more = w.run(BASELINE, CANDIDATE)
        assert w.counts() == {"baseline": 3 * 100, "candidate": 3 * 100}
        assert sorted(s.doc_id for s in samples(more, "evaluate-candidate", FACTS).samples) == list(range(400))
        assert pair(*(samples(more, f"evaluate-{side}", FACTS) for side in ("baseline", "candidate"))).planned == 400

        def fails(*_: object) -> RunningServer:
            raise AssertionError("no server is needed")

        w.judge_by(margin=0.5)
        with monkeypatch.context() as without:
            without.setattr("quantmint.pipeline.stages.servers.Servers.get", fails)
            known = w.run(BASELINE, CANDIDATE)
        assert samples(known, "evaluate-candidate", FACTS).samples == samples(more, "evaluate-candidate", FACTS).samples
        w.run(BASELINE, CANDIDATE, redo=["evaluate-candidate"])
        assert w.counts() == {"baseline": 0, "candidate": 3 * 400}


class Answers:
    """In place of lm-eval: facts that each side knows some of, by their numbers."""

    def __init__(self, folder: Path, known: int, **settings: object) -> None:
        self.folder = folder
        self.known = known
        self.settings = settings
        self.batches: list[int] = []

    def load(self, task: SuiteTask) -> dict[str, Any]:
        return {"documents": {task.task: [""] * task.items}, "datasets": [{"path": "org/facts", "commit": None}]}

    def ask(self, task: SuiteTask, items: Sequence[Item], advance: Callable[[int], None]) -> Path:
        advance(len(items))
        self.batches.append(len(items))
        rows = [Sample(leaf, n, "none", f"d{n}", f"p{n}", f"t{n}", float(n % 100 < self.known)) for leaf, n in items]
        write_asked(path := self.folder / f"{items_digest(items)}.jsonl.gz", Asked(self.settings, tuple(rows), ()))
        return path


@pytest.fixture
def answered(
    world: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[World, Answers, RunOutcome]]:
    """Evaluate both sides, of which these many per cent are right."""

    def evaluate(
        baseline: Answers, candidate: Answers, task: SuiteTask, **options: object
    ) -> tuple[World, Answers, RunOutcome]:
        sides = iter((baseline, candidate))
        monkeypatch.setattr(
            "quantmint.pipeline.stages.evaluate.open_harness", lambda *_, **__: nullcontext(next(sides))
        )
        with world(task, **options) as w:
            return w, candidate, w.run(BASELINE, CANDIDATE)

    return evaluate


@pytest.mark.parametrize(
    ("known", "margin", "batches", "says"),
    [
        (80, 0.05, [100, 100], "facts: PASS after 200 of 400 items"),
        (40, 0.05, [100], "facts: FAIL after 100 of 400 items"),
        (75, 0.05, [100, 100, 100, 100], None),
    ],
)
def test_asking_stops_where_the_look_decides(
    answered: Callable[..., Any], known: int, margin: float, batches: list[int], says: str | None, tmp_path: Path
) -> None:
    w, candidate, outcome = answered(Answers(tmp_path, 80), Answers(tmp_path, known), replace(FACTS, margin=margin))
    assert candidate.batches == batches
    assert (says or "400 items in 4 looks") in w.said
    found = samples(outcome, "evaluate-candidate", FACTS)
    assert (len(found.samples), found.planned) == (100 * len(batches), 400)
    entry = outcome.entry("evaluate-candidate")
    assert entry is not None
    assert ("of 400 items" in entry.record.result["summary"]) is (len(batches) < 4)
    before = samples(outcome, "evaluate-baseline", FACTS).on(found).mean
    assert f"(baseline {before:.2%} on these)" in entry.record.result["summary"], "of as many items"
    assert entry.record.result["datasets"] == {"facts": [{"path": "org/facts", "commit": None}]}


@pytest.mark.parametrize(
    ("gated", "documents", "refused"),
    [
        (True, {"law": 300}, "facts: found 300 items, the suite counts 400"),
        (True, {"law": 300, "art": 101}, None),
        (False, {"law": 300}, None),
        (False, {}, "facts: found 0 items"),
    ],
)
def test_a_group_that_lacks_a_task(
    answered: Callable[..., Any], gated: bool, documents: dict[str, int], refused: str | None, tmp_path: Path
) -> None:
    class Group(Answers):
        def load(self, task: SuiteTask) -> dict[str, Any]:
            return {"documents": {leaf: [""] * items for leaf, items in documents.items()}, "datasets": []}

    expected = pytest.raises(InvalidMeasurementError, match=refused) if refused else nullcontext()
    with expected:
        answered(Group(tmp_path, 80), Group(tmp_path, 80), replace(FACTS, gated=gated))


@pytest.mark.slow
def test_faults_of_a_server_stay_with_its_answers(world: Callable[..., Any], tmp_path: Path) -> None:
    with world(FACTS) as w:
        log = "WARNING 11-26 [kv_cache.py:1] Using KV cache scaling factor 1.0 for fp8_e4m3.\n"
        (tmp_path / "server.log").write_text(log)
        void = w.run(BASELINE).entry("evaluate-baseline").record.result["faults"]
        assert void
        (tmp_path / "server.log").write_text("all is well\n")
        w.evaluate_by(looks=2)
        w.counts()
        assert w.run(BASELINE).entry("evaluate-baseline").record.result["faults"] == void
        assert w.counts()["baseline"] == 0


def test_fingerprints(world: Callable[..., Any]) -> None:
    """The baseline's evaluation is every recipe's; the candidate's depends on what stops it."""
    with world(FACTS, SUMS) as w:
        before = {stage.key: stage.settings(w.orchestra.setting) for stage in (BASELINE, CONTROL, CANDIDATE)}
        other = replace(FACTS, margin=0.02)
        setting = replace(w.orchestra.setting, suite=replace(w.orchestra.setting.suite, tasks=(other, SUMS)))
        after = {stage.key: stage.settings(setting) for stage in (BASELINE, CONTROL, CANDIDATE)}
        assert [key for key in before if before[key] != after[key]] == ["evaluate-candidate"]
        assert CANDIDATE.inputs(setting)["baseline"] == "evaluate-baseline"
        assert "evaluate-candidate" not in {**BASELINE.inputs(setting), **CONTROL.inputs(setting)}.values()
    with world(FACTS, looks=1) as w:
        assert "policy" not in CANDIDATE.settings(w.orchestra.setting)


@pytest.mark.parametrize(("task", "offline", "tokens"), [("facts", True, ()), ("gsm8k", False, ("HF_TOKEN",))])
def test_only_what_is_on_the_hub_gets_its_token(
    world: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, task: str, offline: bool, tokens: tuple[str, ...]
) -> None:
    given: dict[str, Any] = {}

    @contextmanager
    def listen(argv: list[str], log: Path, **options: Any) -> Iterator[None]:
        given.update(options)
        raise StageError("heard enough")
        yield

    monkeypatch.setattr("quantmint.pipeline.stages.servers.conversation", listen)
    with world(replace(FACTS, task=task)) as w, pytest.raises(StageError, match="heard enough"):
        w.run(BASELINE)
    assert given["secrets"] == tokens
    assert ("HF_HUB_OFFLINE" in given["env"]) is offline


def test_what_guessing_reaches_is_known_from_the_choices(tmp_path: Path) -> None:
    task = suites.load("tiny").tasks[0]
    assert guessing(tmp_path, task) is None
    (tmp_path / ANSWERS).mkdir()
    path = tmp_path / ANSWERS / "tiny_facts.jsonl.gz"
    path.write_bytes(compressed([{"choices": ["a", "b", "c", "d"]}, {"choices": ["yes", "no"]}]))
    assert guessing(tmp_path, task) == 0.375
    path.write_bytes(compressed([{"choices": ["a", "b"]}, {"response": "7"}]))
    assert guessing(tmp_path, task) is None, "what is generated has no choices"

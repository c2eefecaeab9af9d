"""What a release is made of: the real stage in the real runner, after stages that only record."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from quantmint.eval import record
from quantmint.pipeline.base.errors import StageError, UserError
from quantmint.pipeline.base.progress import PlainReporter
from quantmint.pipeline.publish import manifest as manifests
from quantmint.pipeline.publish.release import CARD, MANIFEST, PROVENANCE, RECIPE, SBOM
from quantmint.pipeline.quantize.digest import file_digests, folder_digest
from quantmint.pipeline.runs.planner import cut, plan_stages
from quantmint.pipeline.runs.runner import RunOutcome, run_plan
from quantmint.pipeline.runs.session import open_setting
from quantmint.pipeline.stages.gate import checkpoint_digest
from quantmint.pipeline.stages.package import PackageStage, release
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.stage import Job, Output, Stage
from quantmint.pipeline.store.entries import Entry
from quantmint.pipeline.store.tree import Store
from tests.stages.conftest import described

A, B, COMMIT = "a" * 64, "b" * 64, "c" * 40
TASK = {"task": "tiny_facts", "files": {"tiny_facts.jsonl": A, "tiny_facts.yaml": B}}
HUB_TASK = {"task": "gsm8k", "files": {}}
FETCHED = {"tiny_facts": [], "gsm8k": [{"path": "openai/gsm8k", "name": "main", "commit": COMMIT}]}


@dataclass
class Recorded:
    """A stage whose work is to leave files, as if it had computed them."""

    key: str
    needs: tuple[str, ...] = ()
    given: Mapping[str, object] = field(default_factory=dict)
    result: Mapping[str, object] | Callable[[Job], Mapping[str, object]] = field(default_factory=dict)
    work: Callable[[Job], None] = lambda job: None
    used: Mapping[str, str] = field(default_factory=dict)
    version: int = 1

    @property
    def family(self) -> str:
        return self.key.partition("-")[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(described(self.key), name)

    def reads(self, stage: Stage) -> bool:
        return False

    def inputs(self, setting: Setting) -> Mapping[str, str]:
        return {need: need for need in self.needs}

    def settings(self, setting: Setting) -> Mapping[str, object]:
        return self.given

    def tools(self, setting: Setting) -> Mapping[str, str]:
        return self.used

    def run(self, job: Job) -> Output:
        self.work(job)
        return Output(self.result(job) if callable(self.result) else self.result, f"made {self.key}")

    def intact(self, entry: Entry, setting: Setting) -> bool:
        return True


def write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


@dataclass
class Run:
    """A project, the stages before `package`, and how to run them."""

    setting: Setting
    write_gate: Callable[..., Path]
    verdict: str = "PASS"
    artefact: str = ""
    tokenizer: str = "{}"
    lines: list[str] = field(default_factory=list)

    def stages(self) -> list[Any]:
        model = Path("model").resolve()
        files = {path.name: path for path in sorted(model.iterdir())}
        digests = {
            name: {"size": 1, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()} for name, path in files.items()
        }
        evaluated = {
            "given": {"tasks": [TASK, HUB_TASK]},
            "result": {"datasets": FETCHED},
            "used": {"lm-eval": "0.4.13"},
        }
        sides = [
            Recorded("serve-baseline", used={"vllm": "0.32.0"}),
            Recorded("canary-baseline", given={"prompts": B}),
            Recorded("serve-candidate", work=environment("vllm", "0.32.0+cpu"), used={"vllm": "0.32.0"}),
            Recorded("canary-candidate"),
            Recorded("evaluate-baseline", **evaluated),
            Recorded("control"),
            Recorded("evaluate-candidate", **evaluated),
            Recorded("bench"),
        ]
        return [
            Recorded("source", given={"sha256": self.setting.source.digest},
                     work=lambda job: write(job.path / "location.json", {"folder": str(model), "files": digests})),
            Recorded("calibrate", ("source",), used={"torch": "2.12.0", "ninja": "absent"},
                     given={"set": {"repo": "org/chat", "revision": COMMIT, "file": None}}),
            Recorded("quantize", ("source", "calibrate"), work=self.quantize, used={"torch": "2.13.0"},
                     result={"hardware": "8 x AMD Instinct MI300X"}),
            Recorded("inspect", ("quantize",), result={"verdict": "PASS"},
                     work=lambda job: write(job.path / "inspection.json", {"layers": [{"scheme": "ptpc_fp8"}]})),
            *sides,
            Recorded("gate", (*(stage.key for stage in sides), "source", "quantize", "inspect"), work=self.gate,
                     result=lambda job: {"verdict": self.verdict, "artefact": self.judged(job)}),
            Recorded("report", ("source", "calibrate", "quantize", "inspect", "gate"), work=self.report),
            PackageStage(),
        ]  # fmt: skip

    def quantize(self, job: Job) -> None:
        folder = job.path / "checkpoint"
        folder.mkdir()
        config = json.loads(Path("model/config.json").read_text())
        write(folder / "config.json", {**config, "quantization_config": {"ignore": ["lm_head"]}})
        (folder / "tokenizer_config.json").write_text(self.tokenizer)
        save_file({"w": np.zeros(1 << 20, np.float16)}, folder / "model.safetensors")
        environment("torch", "2.13.0")(job)

    def judged(self, job: Job) -> str:
        return self.artefact or checkpoint_digest(job.inputs["quantize"])

    def gate(self, job: Job) -> None:
        self.write_gate(job.path, "PASS", self.judged(job))

    def report(self, job: Job) -> None:
        gate = job.inputs["gate"].file("gate.json")
        server = {"side": "candidate", "runtime": "vllm 0.32.0", "version": "0.32.0", "hardware": "mi300x",
                  "device": "MI300X", "image": None, "env": {}, "argv": ["vllm", "serve", "r"]}  # fmt: skip
        write(job.path / "report.json", {
            "name": "r", "model": "model", "scheme": "ptpc_fp8", "created": "2026-11-21T12:00:00+00:00", "notes": [],
            "stopped": None, "gate": record.read(gate)[1].to_json(), "kv_tokens": {}, "layers": [], "kv_scales": [],
            "size": {"baseline_bytes": 2, "candidate_bytes": 1, "parts": []}, "flips": [], "prompts": {},
            "launches": [], "stages": [], "servers": [{**server, "side": "baseline"}, server], "recipe": "",
            "reproduce": [], "versions": {}, "digests": {},
        })  # fmt: skip
        (job.path / "report.html").write_text("<html>")

    def __call__(self, until: str | None = None, redo: Sequence[str] = ()) -> RunOutcome:
        lines = self.lines

        class Told(PlainReporter):
            def _line(self, text: str) -> None:
                lines.append(text)

        plan = cut(plan_stages(self.stages(), self.setting), until)
        return run_plan(plan, self.setting, Told(), redo=redo)

    def released(self, outcome: RunOutcome) -> Any:
        entries = {key: outcome.entry(key) for key in ("package", "quantize", "gate", "report", "inspect")}
        return release(entries)


def environment(name: str, version: str) -> Callable[[Job], None]:
    found = {"python": "3.11.7", "distributions": {name: {"version": version, "licence": "BSD-3-Clause"}}}
    return lambda job: write(job.path / "environment.json", found)


@pytest.fixture
def run(setting: Setting, write_gate: Callable[..., Path]) -> Run:
    return Run(setting, write_gate)


def test_a_release_is_whole(run: Run, tmp_path: Path) -> None:
    made = run.released(run())
    assert {CARD, MANIFEST, PROVENANCE, RECIPE, SBOM, "config.json", "model.safetensors"} <= made.files.keys()
    assert {"quantmint/gate.json", "quantmint/report.html", "quantmint/inspection.json"} <= made.files.keys()
    for name, file in made.files.items():
        raw = file.path.read_bytes()
        assert (len(raw), hashlib.sha256(raw).hexdigest()) == (file.size, file.sha256), name
    manifest = manifests.read(made.files[MANIFEST].path)
    assert manifest.files == manifests.digests(made.files)
    assert manifests.contradictions(manifest) == ()
    assert made.identity == manifests.identity(made.files[MANIFEST].path.read_bytes())
    assert made.tag.endswith(made.identity[:8])
    assert made.tag[1:9] == manifest.created[:10].replace("-", "")
    placed = tmp_path / "placed"
    placed.mkdir()
    for name, file in made.files.items():
        if "/" not in name and name not in (CARD, MANIFEST):
            shutil.copy(file.path, placed / name)
    assert folder_digest(file_digests(placed, tmp_path)) == manifest.artefact


def test_what_the_records_say(run: Run) -> None:
    manifest = manifests.read(run.released(run()).files[MANIFEST].path)
    assert [(data.role, data.name, data.revision, data.sha256) for data in manifest.datasets] == [
        ("calibration", "org/chat", COMMIT, None),
        ("evaluation", "tiny_facts", None, A),
        ("evaluation", "openai/gsm8k", COMMIT, None),
        ("evaluation", "canary prompts", None, B),
    ]
    assert manifest.tools == {"lm-eval": "0.4.13", "torch": "2.12.0, 2.13.0", "vllm": "0.32.0"}
    assert manifest.hardware.quantized_on == "8 x AMD Instinct MI300X"
    assert manifest.base.sha256 == run.setting.source.digest
    assert manifest.base.files.keys() == {"config.json", "model.safetensors", "tokenizer.json"}
    assert set(manifest.stages) == {stage.key for stage in run.stages()} - {"package"}


def test_a_suite_of_ones_own_travels_with_its_tasks_and_their_data(run: Run, tmp_path: Path) -> None:
    suites, tasks = (Path(str(resources.files("eval"))) / name for name in ("suites", "tasks"))
    for path in (suites / "tiny.yaml", *tasks.glob("tiny_*")):
        shutil.copy(path, tmp_path)
    path = run.setting.loaded.path
    path.write_text(path.read_text().replace("suite: tiny", f"suite: {tmp_path / 'tiny.yaml'}"))
    run.setting = replace(open_setting(str(path), store=Store(tmp_path / "store")), vllm=run.setting.vllm)
    made = run.released(run())
    own = {"tiny.yaml", "tiny_facts.yaml", "tiny_facts.jsonl", "tiny_arithmetic.yaml", "tiny_arithmetic.jsonl"}
    assert {name for name in made.files if "/suite/" in name} == {f"quantmint/suite/{name}" for name in own}
    assert manifests.read(made.files[MANIFEST].path).recipe["evaluation"]["suite"] == "quantmint/suite/tiny.yaml"


def test_the_same_entries_give_the_same_release(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From elsewhere, with another device and place to publish to, in another language and time."""
    first = run.released(run())
    before = {name: file.path.read_bytes() for name, file in first.files.items()}
    (tmp_path / "elsewhere").mkdir()
    for variable, value in {"TZ": "Asia/Tokyo", "LC_ALL": "C", "USER": "someone", "HOSTNAME": "somewhere"}.items():
        monkeypatch.setenv(variable, value)
    run.setting = replace(run.setting, device="cuda:7", home=tmp_path / "elsewhere")
    outcome = run(redo=["package"])
    assert [step.planned.key for step in outcome.steps if not step.cached] == ["package"]
    again = run.released(outcome)
    assert (again.identity, again.tag, again.title) == (first.identity, first.tag, first.title)
    assert {name: file.path.read_bytes() for name, file in again.files.items()} == before


def test_nothing_says_where_it_was_made(run: Run, tmp_path: Path) -> None:
    """Neither what is published nor what the records hold of it, although the recipe names an absolute folder."""
    path = run.setting.loaded.path
    path.write_text(path.read_text().replace("folder: model", f"folder: {Path('model').resolve()}"))
    run.setting = replace(open_setting(str(path), store=Store(tmp_path / "store")), vllm=run.setting.vllm)
    places = [str(tmp_path).encode(), os.uname().nodename.encode() + b"/", str(Path.home()).encode() + b"/"]
    for name, file in run.released(run()).files.items():
        raw = file.path.read_bytes()
        assert not [place for place in places if place in raw], name


@pytest.mark.parametrize("verdict", ["FAIL", "INCONCLUSIVE", "INVALID"])
def test_only_a_pass_is_packaged(run: Run, verdict: str) -> None:
    run.verdict = verdict
    outcome = run()
    assert outcome.entry("report") is not None
    assert outcome.entry("package") is None


@pytest.fixture
def package(run: Run, tmp_path: Path) -> Callable[[Mapping[str, Entry]], Output]:
    """Call the stage alone, on entries as they lie there now."""
    (tmp_path / "packaged").mkdir()
    return lambda inputs: PackageStage().run(
        Job(run.setting, tmp_path / "packaged", inputs, PlainReporter(), None)  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("key", "name", "how"),
    [
        ("quantize", "checkpoint/model.safetensors", "flip"),
        ("quantize", "checkpoint/model.safetensors", "add"),
        ("quantize", "checkpoint/model.safetensors", "lose"),
        ("quantize", "checkpoint/config.json", "flip"),
        ("gate", "gate.json", "flip"),
        ("report", "report.html", "flip"),
        ("inspect", "inspection.json", "flip"),
    ],
)
def test_what_changed_after_the_judgement(run: Run, package: Any, key: str, name: str, how: str) -> None:
    """Even where size and times are those of the record, as a failing disk leaves them."""
    entries = {step.planned.key: step.entry for step in run(until="report").steps}
    path = entries[key].file(name)
    times = path.stat()
    match how:
        case "flip":
            raw = bytearray(path.read_bytes())
            raw[len(raw) // 2] ^= 1
            path.write_bytes(raw)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        case "add":
            (path.parent / "more.json").write_text("{}")
        case "lose":
            path.unlink()
    with pytest.raises(StageError, match="it is not what was judged, and nothing is packaged") as refused:
        package(entries)
    assert f"--redo {key}" in str(refused.value.hint)


def test_a_release_whose_entries_do_not_belong_together(run: Run) -> None:
    first = run()
    run.tokenizer = '{"eos_token": "</s>"}'
    other = run(redo=["quantize"])
    entries = {key: first.entry(key) for key in ("package", "gate", "report", "inspect")}
    with pytest.raises(StageError, match="lists other files than the store has"):
        release({**entries, "quantize": other.entry("quantize")})


@pytest.mark.parametrize("name", ["model.bin", "run.log", ".netrc"])
def test_names_that_must_not_go_out(run: Run, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    quantize = run.quantize

    def more(job: Job) -> None:
        quantize(job)
        (job.path / "checkpoint" / name).write_text("x")

    monkeypatch.setattr(run, "quantize", more)
    with pytest.raises(StageError, match=f"must not be published is among the files:\n{name}"):
        run()


def test_a_credential_in_a_text(run: Run) -> None:
    """Its place is told, and never what it is."""
    token = "hf_" + "aBcDeFgHiJkLmNoPqRsTuVwXyZ012345" + "6789"
    run.tokenizer = json.dumps({"note": token})
    with pytest.raises(StageError, match=r"tokenizer_config\.json:1: ") as refused:
        run()
    assert token not in str(refused.value)


def recipe_with(run: Run, publish: str) -> None:
    path = run.setting.loaded.path
    path.write_text(path.read_text().rpartition("publish:")[0] + f"publish: {publish}\n")
    run.setting = replace(open_setting(str(path), store=run.setting.store), vllm=run.setting.vllm)


def test_a_licence_that_says_no(run: Run) -> None:
    """Nobody said under which terms the model may be passed on: a folder is one's own, a repository is not."""
    run()
    assert any("must not be passed on" in line for line in run.lines)
    recipe_with(run, "{folder: published, hub: {repo: my-org/r}}")
    with pytest.raises(UserError, match="my-org/r must not be published: its licence"):
        run()
    recipe_with(run, "{hub: {repo: my-org/r}, licence: {id: apache-2.0}}")
    assert run().entry("package") is not None


def test_where_it_goes_in_your_own_house_changes_nothing(run: Run) -> None:
    first = run()
    recipe_with(run, "{folder: published, to: candidate, keep: 3}")
    assert run.released(run()).identity == run.released(first).identity

"""A project of its own for each test: a recipe, a small model, a store; and stages that only leave traces."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.progress import PlainReporter
from quantmint.pipeline.runs import planner
from quantmint.pipeline.runs.runner import RunOutcome, run_plan
from quantmint.pipeline.runs.session import open_setting
from quantmint.pipeline.stages.registry import STAGES
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.stage import Job, Output, Planned, Stage
from quantmint.pipeline.store.entries import Entry
from quantmint.pipeline.store.gc import RunRecord, list_runs
from quantmint.pipeline.store.tree import Store

CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
RECIPE = """\
name: r
description: A test.
source: {folder: model}
quantization: {scheme: ptpc_fp8, kv_cache: fp8, format: compressed-tensors}
calibration: {set: sentences.yaml, samples: 4, sequence_length: 64, batch_size: 2, seed: 0}
target: {hardware: mi300x, gpus: 1, workload: tiny, max_model_len: 512}
evaluation: {suite: tiny, concurrency: 8}
gate: {accuracy: {margin: 0.02}}
publish: {folder: published}
"""


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working folder, and nothing that this machine happens to have."""
    place = tmp_path / "work"
    place.mkdir()
    monkeypatch.chdir(place)
    for name in ("QUANTMINT_STORE", "QUANTMINT_REMOTE_STORE", "QUANTMINT_VLLM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")

    def none_here(explicit: str | None = None) -> None:
        raise UserError(f"no vLLM found: {explicit}")

    monkeypatch.setattr("quantmint.pipeline.runs.session.find_vllm", none_here)


@pytest.fixture
def write_model() -> Callable[..., Path]:
    """Write a folder with the headers of a Llama of one layer, filled with zeros."""

    def write(folder: Path, **changes: Any) -> Path:
        config = {**CONFIG, **changes}
        hidden, inner, vocabulary = (config[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
        queries = config["num_attention_heads"] * config["head_dim"]
        keys = config["num_key_value_heads"] * config["head_dim"]
        at = "model.layers.0"
        shapes = {
            "model.embed_tokens": (vocabulary, hidden),
            "lm_head": (vocabulary, hidden),
            "model.norm": (hidden,),
            f"{at}.input_layernorm": (hidden,),
            f"{at}.post_attention_layernorm": (hidden,),
            f"{at}.self_attn.q_proj": (queries, hidden),
            f"{at}.self_attn.k_proj": (keys, hidden),
            f"{at}.self_attn.v_proj": (keys, hidden),
            f"{at}.self_attn.o_proj": (hidden, queries),
            f"{at}.mlp.gate_proj": (inner, hidden),
            f"{at}.mlp.up_proj": (inner, hidden),
            f"{at}.mlp.down_proj": (hidden, inner),
        }
        folder.mkdir(parents=True)
        tensors = {f"{name}.weight": np.zeros(shape, np.float16) for name, shape in shapes.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "tokenizer.json").write_text("{}")
        (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "float16"}))
        return folder

    return write


@pytest.fixture
def project(write_model: Callable[..., Path]) -> Path:
    """The working folder with a recipe, its model and its calibration texts."""
    here = Path.cwd()
    write_model(here / "model")
    (here / "r.yaml").write_text(RECIPE)
    (here / "sentences.yaml").write_text("name: sentences\ndescription: Words.\nfile: words.jsonl\ntext: text\n")
    (here / "words.jsonl").write_text('{"text": "one two three"}\n')
    return here


@dataclass(frozen=True)
class FakeVllm:
    """What a stage asks of a serving environment."""

    version: str = "0.32.0"
    executable: Path = Path("vllm")


@pytest.fixture
def with_vllm() -> Callable[..., Setting]:
    return lambda setting, version="0.32.0": replace(setting, vllm=FakeVllm(version))


@pytest.fixture
def setting(project: Path, with_vllm: Callable[..., Setting]) -> Setting:
    """The project's recipe, with a vLLM that nobody starts."""
    return with_vllm(open_setting("r.yaml", store=Store(project / "store")))


def described(key: str) -> Stage:
    """The real stage of a key, for what planner and runner ask a fake one."""
    return next((stage for stage in STAGES if stage.key == key), _NO_STAGE)


_NO_STAGE = Stage()


@dataclass
class FakeStage:
    """A stage that writes its name into a file, ``leaves``; ``work`` is called with its job in between."""

    key: str
    trace: Path
    needs: tuple[str, ...] = ()
    result: Mapping[str, object] = field(default_factory=dict)
    option: object = None
    work: Callable[[Job], None] = lambda job: None
    whole: Callable[[Entry], bool] = lambda entry: True
    family: str = ""
    version: int = 1
    leaves: str = "out"

    def __post_init__(self) -> None:
        self.family = self.family or self.key

    def __getattr__(self, name: str) -> Any:
        """Describe it as the stage whose key it has."""
        return getattr(described(self.key), name)

    def imports(self, setting: Setting) -> Iterable[tuple[str, str]]:
        return described(self.key).imports(setting)

    def reads(self, stage: Stage) -> bool:
        return False

    def inputs(self, setting: Setting) -> Mapping[str, str]:
        return {need: need for need in self.needs}

    def settings(self, setting: Setting) -> Mapping[str, object]:
        return {"option": self.option, "seed": setting.recipe.calibration and setting.recipe.calibration.seed}

    def tools(self, setting: Setting) -> Mapping[str, str]:
        return {}

    def run(self, job: Job) -> Output:
        with self.trace.open("a") as stream:
            stream.write(f"{self.key}\n")
        self.work(job)
        if self.leaves:
            (job.path / self.leaves).write_text(self.key)
        return Output(self.result, f"made {self.key}")

    def intact(self, entry: Entry, setting: Setting) -> bool:
        return self.whole(entry)


@dataclass
class Orchestra:
    """Fake stages, run by the real runner on a real store."""

    setting: Setting
    trace: Path
    lines: list[str] = field(default_factory=list)

    def stage(self, key: str, *needs: str, **options: Any) -> FakeStage:
        return FakeStage(key, self.trace, needs, **options)

    def plan(self, *stages: FakeStage) -> tuple[Planned, ...]:
        """Plan these stages, here and in every command that is called from now on."""
        planner.stages_of = lambda setting: stages  # restored by the fixture
        return planner.build_plan(self.setting)

    def run(self, *stages: FakeStage, **options: Any) -> RunOutcome:
        return run_plan(self.plan(*stages), self.setting, Told(self.lines), **options)

    @property
    def ran(self) -> list[str]:
        """The keys of the stages whose work began, in order."""
        return self.trace.read_text().split() if self.trace.exists() else []

    @property
    def last_run(self) -> RunRecord:
        return list_runs(self.setting.store.root)[0]

    def committed(self, *stages: FakeStage) -> list[str]:
        store = self.setting.store
        return [p.key for p in self.plan(*stages) if store.find(p.stage.family, p.fingerprint) is not None]


class Told(PlainReporter):
    """Lines kept in a list."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    def _line(self, text: str) -> None:
        self._lines.append(text)


@pytest.fixture
def orchestra(setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Orchestra:
    monkeypatch.setattr(planner, "stages_of", planner.stages_of)
    return Orchestra(setting, tmp_path / "trace")


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output as the one JSON value that it must be."""
        return json.loads(self.out)


@pytest.fixture
def quantmint(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Call the command line in this process."""
    from quantmint.pipeline.commands.cli import main

    def call(*arguments: object) -> Ended:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return Ended(ended.value.code, out, err)  # type: ignore[arg-type]

    return call


# verdict -> how many of 2,000 answers the candidate loses, and a fault of its server
_NUMBERS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "PASS": (2, ()),
    "FAIL": (200, ()),
    "INCONCLUSIVE": (20, ()),
    "INVALID": (2, ("default KV scales were used",)),
}


@pytest.fixture
def write_gate() -> Callable[..., Path]:
    """Write a gate's record whose numbers lead to a verdict; returns the path of ``gate.json``."""
    import hashlib

    from quantmint.eval import record
    from quantmint.eval.canary import Canary
    from quantmint.eval.gate import Policy, judge
    from quantmint.eval.measurements import Measurements, Server, StructureCheck
    from quantmint.eval.samples import Sample, SampleSet
    from quantmint.eval.verdict import Verdict

    def answers(lost: int) -> SampleSet:
        names = [hashlib.sha256(f"{number}".encode()).hexdigest()[:16] for number in range(2000)]
        scores = [float(number >= lost) for number in range(2000)]
        samples = (Sample("t", n, "none", x, x, x, s) for n, (x, s) in enumerate(zip(names, scores, strict=True)))
        return SampleSet("t", "acc", tuple(samples))

    def write(folder: Path, verdict: str, artefact: str = "ab" * 32) -> Path:
        lost, faults = _NUMBERS[verdict]
        argv = ("vllm", "serve", "MODEL")
        measurements = Measurements(
            artefact=artefact,
            structure=StructureCheck(Verdict.PASS),
            baseline=Server("0.32.0", "mi300x", argv, {}),
            candidate=Server("0.32.0", "mi300x", argv, {}, faults=faults),
            samples={"t": (answers(0), answers(lost))},
            canary=Canary(2, 100, 0.95, 0.98, 0.96, 1.0, 0.01, 0.0, 0.02, 9.0, 9.1, ()),
        )
        report = judge(measurements, Policy(margins={"t": 0.01}))
        assert report.verdict.value == verdict
        return record.write(folder, measurements, report)

    return write

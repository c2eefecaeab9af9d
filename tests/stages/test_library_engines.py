"""quantize by a library, as a stage: what it is told, what its end means, what is kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.base.errors import StageError, UserError
from quantmint.pipeline.base.progress import PlainReporter
from quantmint.pipeline.quantize.engines.algorithms import recorded_algorithms
from quantmint.pipeline.quantize.engines.libraries.extensions import extensions_compiled_alone, extensions_folder
from quantmint.pipeline.quantize.engines.libraries.job import LibraryJob, load_batches
from quantmint.pipeline.quantize.formats.checkpoint import open_checkpoint
from quantmint.pipeline.quantize.inspection.inspect import inspect_checkpoint
from quantmint.pipeline.quantize.model.reader import read_structure
from quantmint.pipeline.runs.planner import build_plan, cut
from quantmint.pipeline.runs.runner import RunOutcome, run_plan
from quantmint.pipeline.runs.session import open_setting
from quantmint.pipeline.stages import by_library
from quantmint.pipeline.stages.report import compensation_note
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.store.tree import Store
from tests.zoo.models import configuration, table

RECIPE = """\
name: r
source: {{folder: {model}}}
quantization: {{scheme: {scheme}, engine: {engine}, format: {layout}{more}}}
calibration: {{set: words.yaml, samples: 8, sequence_length: 32, batch_size: 4, seed: 3}}
target: {{hardware: mi355x, workload: tiny, max_model_len: 512}}
evaluation: {{suite: tiny}}
gate: {{accuracy: {{margin: 0.02}}}}
"""
LAYOUTS = {"llmcompressor": "compressed-tensors", "quark": "quark", "stream": "compressed-tensors"}
Open = Callable[..., Setting]


class Silent(PlainReporter):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def _line(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def opened(models: Callable[..., Path]) -> Open:
    """A recipe for a tiny real model, in the working folder."""

    def open_recipe(scheme: str, engine: str, more: str = "", *, model: str = "llama") -> Setting:
        text = RECIPE.format(
            model=models(model), scheme=scheme, engine=engine, layout=LAYOUTS[engine], more=f", {more}" if more else ""
        )
        Path("r.yaml").write_text(text)
        Path("words.yaml").write_text("name: words\ndescription: Words.\nfile: words.jsonl\ntext: text\n")
        words = (" ".join(f"w{(7 * n + m) % 500 + 4}" for m in range(90)) for n in range(20))
        Path("words.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in words) + "\n")
        return open_setting("r.yaml", store=Store(Path("store")), device="cpu", to_run=True)

    return open_recipe


def run(setting: Setting, until: str = "quantize", reporter: PlainReporter | None = None) -> RunOutcome:
    return run_plan(cut(build_plan(setting), until), setting, reporter or Silent())


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[LibraryJob]]:
    """Stand in for a library by a folder that it "makes", or by a program; the jobs that it was given."""

    def stand_in(made: Path | None = None, code: str = "") -> list[LibraryJob]:
        jobs: list[LibraryJob] = []

        def command(engine: str, path: Path) -> Sequence[str]:
            job = LibraryJob.load(path)
            jobs.append(job)
            list(load_batches(job))  # its digest is that of the file
            if made is not None:
                return ["cp", "-r", str(made), job.output]
            return [sys.executable, "-c", code, str(path)]

        monkeypatch.setattr(by_library, "_command", command)
        return jobs

    return stand_in


def test_the_library_calibrates_by_itself_and_its_data_is_in_the_fingerprint(opened: Open) -> None:
    def quantize_of(setting: Setting) -> Any:
        return next(planned for planned in build_plan(setting) if planned.key == "quantize")

    ours = [planned.key for planned in build_plan(opened("fp8", "stream", "kv_cache: fp8"))]
    assert ours[:4] == ["source", "calibrate", "quantize", "inspect"]
    setting = opened("fp8", "llmcompressor", "kv_cache: fp8")
    planned = quantize_of(setting)
    assert [step.key for step in build_plan(setting)][:3] == ["source", "quantize", "inspect"]
    assert planned.payload["settings"]["calibration"]["samples"] == 8
    assert {"llmcompressor", "compressed-tensors"} <= planned.payload["tools"].keys()
    Path("words.jsonl").write_text(json.dumps({"text": "w5 " * 400}) + "\n")
    assert quantize_of(open_setting("r.yaml", store=Store(Path("store")))).fingerprint != planned.fingerprint
    assert "calibration" not in quantize_of(opened("mxfp4", "llmcompressor")).payload["settings"]
    assert {"amd-quark"} <= quantize_of(opened("mxfp4", "quark")).payload["tools"].keys()


def settings_of(setting: Setting) -> Any:
    planned = next(planned for planned in build_plan(setting) if planned.key == "quantize")
    return planned.payload["settings"]


def test_the_block_size_of_gptq_counts_where_a_result_depends_on_it(opened: Open) -> None:
    def gptq_of(engine: str, size: int) -> Any:
        return settings_of(opened("mxfp4", engine, f"algorithm: gptq, gptq: {{block_size: {size}}}"))["gptq"]

    assert gptq_of("stream", 64) == gptq_of("stream", 128)
    assert gptq_of("llmcompressor", 64) != gptq_of("llmcompressor", 128)


@pytest.mark.parametrize("name", ["phi3", "gpt_neox", "phi4_multimodal"])
def test_what_gptq_made_of_dropouts_before_is_made_again(opened: Open, name: str) -> None:
    gptq = replace(opened("mxfp4", "stream", "algorithm: gptq"), config=configuration(name).to_dict())
    assert settings_of(gptq)["dropouts"] == "passed"
    assert "dropouts" not in settings_of(opened("mxfp4", "stream", "algorithm: gptq"))
    for other in (("stream", "algorithm: none"), ("llmcompressor", "algorithm: gptq")):
        setting = replace(opened("mxfp4", *other), config=configuration(name).to_dict())
        assert "dropouts" not in settings_of(setting)


def test_what_gptq_compensated_without_a_bound_is_made_again(opened: Open) -> None:
    assert settings_of(opened("mxfp4", "stream", "algorithm: gptq"))["compensation"] == "bounded"
    for other in (("stream", "algorithm: gptq, gptq: {compensation: 0}"), ("llmcompressor", "algorithm: gptq")):
        assert "compensation" not in settings_of(opened("mxfp4", *other))


def test_six_bits_that_gptq_left_to_the_nearest_are_made_again(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYOUTS, "stream", "quark")
    assert settings_of(opened("mxfp6_e2m3", "stream", "algorithm: gptq"))["mxfp6"] == "gptq"
    assert "mxfp6" not in settings_of(opened("mxfp6_e2m3", "stream"))
    assert "mxfp6" not in settings_of(opened("mxfp4", "stream", "algorithm: gptq"))


def test_encoders_that_were_once_quantized_are_made_again(opened: Open) -> None:
    setting = replace(opened("ptpc_fp8", "stream"), config=configuration("phi4_multimodal").to_dict())
    assert settings_of(setting)["towers"] == "16 bit"
    assert "towers" not in settings_of(opened("ptpc_fp8", "stream"))


def test_what_held_absorbed_projections_in_four_bits_is_made_again(opened: Open) -> None:
    def latent(scheme: str, more: str = "kv_cache: auto", name: str = "deepseek_v3") -> Any:
        config = {**configuration(name).to_dict(), "architectures": [table()[name]["architecture"]]}
        return settings_of(replace(opened(scheme, "stream", more), config=config))

    assert latent("mxfp4")["absorbed"] == "16 bit"
    assert latent("mxfp4", "overrides: [{scheme: ptpc_fp8, modules: ['re:.*self_attn']}]").keys() == (
        latent("mxfp4").keys() - {"absorbed"}
    )
    assert "absorbed" not in latent("ptpc_fp8")
    assert "absorbed" not in latent("mxfp4", r"exclude: ['re:.*\.self_attn\..*']"), "as the shipped recipe of R1 has it"
    assert "absorbed" not in latent("mxfp4", name="minicpm3"), "vLLM runs it without a latent cache"
    assert "absorbed" not in latent("mxfp4", name="llama")


def test_our_engine_runs_an_algorithm_on_the_same_data(opened: Open) -> None:
    def quantize_of(setting: Setting) -> Any:
        return next(planned for planned in build_plan(setting) if planned.key == "quantize").payload["settings"]

    assert not {"calibration", "parameters"} & quantize_of(opened("mxfp4", "stream")).keys()
    mixture = opened("mxfp4", "stream", "algorithm: gptq", model="mixtral")
    assert quantize_of(mixture)["experts"] == "gptq"
    others = (("stream", "algorithm: none"), ("llmcompressor", "algorithm: gptq"))
    assert not any("experts" in quantize_of(opened("mxfp4", *other, model="mixtral")) for other in others)
    setting, reporter = opened("mxfp4", "stream", "algorithm: gptq"), Silent()
    assert "experts" not in quantize_of(setting)
    assert quantize_of(setting)["calibration"]["samples"] == 8
    assert quantize_of(setting)["parameters"]["dampening"] == 0.01
    assert [step.key for step in build_plan(setting)][:3] == ["source", "quantize", "inspect"]
    outcome = run(setting, "inspect", reporter)
    entry, proof = outcome.entry("quantize"), outcome.entry("inspect")
    assert entry is not None and proof is not None  # noqa: PT018
    assert proof.record.result["verdict"] == "PASS"
    gains = json.loads((entry.path / "gains.json").read_text())
    assert entry.record.result["gptq"] == {
        "modules": len(gains),
        "to_nearest": 0,
        "cost": round(
            sum(gain["after"] for gain in gains.values()) / sum(gain["before"] for gain in gains.values()), 4
        ),
        "compared": len(gains),
        "plain_targets": sum(gain["compensation"] == 0 for gain in gains.values()),
    }
    assert entry.record.result["gptq"]["cost"] < 0.9
    errors = json.loads((entry.path / "errors.json").read_text())
    judged = {name for name, error in errors.items() if error.get("output_db", 0) > 10}
    assert judged == {name for name, gain in gains.items() if gain["compensation"] > 0}
    (note,) = filter(None, [compensation_note(entry, setting.recipe.quantization)])
    assert note.startswith(f"Of {len(gains)} modules")
    assert not (entry.path / "rounding").exists()


def test_a_model_that_is_scaled_is_proven_by_what_was_seen_of_it(opened: Open) -> None:
    outcome = run(opened("fp8", "stream", "algorithm: gptq, gptq: {scaling: true}", model="qwen3"), "inspect")
    entry, proof = outcome.entry("quantize"), outcome.entry("inspect")
    assert entry is not None and proof is not None  # noqa: PT018
    assert proof.record.result["verdict"] == "PASS"
    assert recorded_algorithms(open_checkpoint(entry.path / "checkpoint")) == ("awq", "gptq")
    ranges, gains = (json.loads((entry.path / f"{name}.json").read_text()) for name in ("ranges", "gains"))
    assert ranges.keys() == {f"{name}.input_scale" for name in gains if not name.endswith("o_proj")}


def test_the_record_says_what_tuning_gained(opened: Open) -> None:
    outcome = run(opened("ptpc_fp8", "stream", "algorithm: tuned, tuned: {steps: 4}"), "inspect", Silent())
    entry, proof = outcome.entry("quantize"), outcome.entry("inspect")
    assert entry is not None and proof is not None  # noqa: PT018
    assert proof.record.result["verdict"] == "PASS"
    result = entry.record.result["tuned"]
    assert (result["step"] > 0) == (result["held_out_kl"] < result["held_out_kl_before"])


def test_what_it_makes_becomes_the_entry(
    opened: Open, library: Callable[..., list[LibraryJob]], quantize: Callable[..., Any], models: Callable[..., Path]
) -> None:
    made = quantize("llama", "compressed-tensors")
    jobs = library(made.folder)
    reporter = Silent()
    outcome = run(opened("ptpc_fp8", "llmcompressor", "kv_cache: fp8"), "inspect", reporter)
    [job] = jobs
    assert job.schemes == dict.fromkeys(made.structure.linear, "ptpc_fp8")
    assert (job.kv_cache, job.algorithm, job.device) == (True, "none", "cpu")
    entry = outcome.entry("quantize")
    assert entry is not None
    folder = entry.path / "checkpoint"
    assert sorted(path.name for path in entry.path.iterdir()) == [
        "checkpoint",
        "engine.log",
        "environment.json",
        "record.json",
    ]
    assert (folder / "model.safetensors").read_bytes() == (made.folder / "model.safetensors").read_bytes()
    assert (folder / "tokenizer.json").read_bytes() == (models("llama") / "tokenizer.json").read_bytes()
    assert any("starting llmcompressor" in line for line in reporter.lines)


@pytest.mark.parametrize("algorithm", ["gptq", "smoothquant"])
def test_a_result_that_is_not_what_was_asked_for_breaks_the_stage(
    opened: Open, library: Callable[..., list[LibraryJob]], quantize: Callable[..., Any], algorithm: str
) -> None:
    library(quantize("llama", "compressed-tensors", kv_cache=False).folder)
    with pytest.raises(StageError, match=rf"it records no algorithm, asked for was {algorithm}") as caught:
        run(opened("ptpc_fp8", "llmcompressor", f"algorithm: {algorithm}"))
    assert caught.value.exit_code == 5
    assert not list(Path("store").rglob("record.json")) or not list(Path("store/quantize").rglob("record.json"))


def test_the_process_gets_no_token_and_no_network(
    opened: Open, library: Callable[..., list[LibraryJob]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hidden")
    library(code="import json, os; print(json.dumps(dict(os.environ)))")
    reporter = Silent()
    with pytest.raises(StageError):
        run(opened("ptpc_fp8", "llmcompressor", "algorithm: rotation"), reporter=reporter)
    assert any("warning: rotation may harm ptpc_fp8" in line for line in reporter.lines)
    [log] = Path("store").rglob("engine.log")
    seen = json.loads(log.read_text())
    assert "HF_TOKEN" not in seen
    assert seen["HF_HUB_OFFLINE"] == "1"
    assert seen["CUDA_VISIBLE_DEVICES"] == ""
    assert seen["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)


def test_a_model_that_does_not_fit_is_refused_before_any_work(
    opened: Open, library: Callable[..., list[LibraryJob]], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = library(code="")
    monkeypatch.setattr(by_library, "device_memory", lambda _: 500_000)
    with pytest.raises(UserError, match="engine llmcompressor holds the whole 16-bit model: about") as caught:
        run(opened("ptpc_fp8", "llmcompressor"))
    assert caught.value.exit_code == 2
    assert "stream does not" in str(caught.value.hint)
    assert jobs == []


@pytest.mark.slow
def test_nothing_of_it_outlives_us(opened: Open, warm_python: Path, tmp_path: Path) -> None:
    opened("ptpc_fp8", "llmcompressor")
    pids = tmp_path / "pids"
    owner = f"""
import sys, quantmint.pipeline.stages.by_library as by_library
code = "import os, time; open(r'{pids}', 'w').write(str(os.getpid())); time.sleep(600)"
by_library._command = lambda engine, job: [sys.executable, "-c", code]
from quantmint.pipeline.commands.cli import main
main(["run", "r.yaml", "--until", "inspect", "--device", "cpu"])
"""
    Path("owner.py").write_text(owner)
    process = subprocess.Popen([warm_python, "-m", "owner"])
    while not pids.exists() or not pids.read_text():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=20)
    deadline = time.monotonic() + 30
    while running(int(pids.read_text())) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not running(int(pids.read_text()))


def running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "scheme", "more"),
    [("llmcompressor", "w4a16", "algorithm: gptq"), ("quark", "mxfp4_fp8", "kv_cache: fp8")],
)
def test_a_run_with_the_real_library(opened: Open, engine: str, scheme: str, more: str) -> None:
    """Started as users start it: the other tests' checkpoints are made by forks of what imported a library once.

    A run of Quark that was killed while its extension was compiled has left the mark that PyTorch waits for.
    """
    if find_spec(engine) is None:
        pytest.skip(f"{engine} is not installed")
    if engine == "quark":
        with extensions_compiled_alone():
            compiled = extensions_folder() / "quark_hw_emulation_stable_abi"
            compiled.mkdir(exist_ok=True)
            (compiled / "lock").touch()
    setting = opened(scheme, engine, more)
    outcome = run(setting, "inspect")
    entry, inspected = outcome.entry("quantize"), outcome.entry("inspect")
    assert entry is not None
    assert inspected is not None
    assert inspected.record.result["verdict"] == "PASS"
    checkpoint = open_checkpoint(entry.path / "checkpoint")
    assert (entry.path / "engine.log").stat().st_size > 0
    assert not (entry.path / "library").exists()
    structure = read_structure(checkpoint.folder, checkpoint.tensors)
    assert inspect_checkpoint(checkpoint, structure).findings == ()

"""The embedded model through `quantmint run --launcher endpoint` on stand-ins for SGLang.

No real SGLang has ever answered here: `tests.serving.sglang_server` speaks its documented forms. Both stand-ins answer
by the 16-bit model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import yaml

from quantmint.eval.record import read
from quantmint.eval.report.model import PAGE
from quantmint.eval.verdict import Verdict
from quantmint.pipeline.stages.canary import LIKELIEST
from tests.e2e.project import Project
from tests.serving.served.cases import MODEL
from tests.serving.sglang_server import SglangServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RECIPE: dict[str, Any] = {
    "name": "by-sglang",
    "description": "The embedded model on SGLang.",
    "source": {"folder": str(MODEL)},
    "quantization": {"scheme": "ptpc_fp8", "kv_cache": "auto", "format": "compressed-tensors"},
    "target": {"hardware": "cpu", "gpus": 1, "workload": "tiny", "max_model_len": 512},
    "serve": {"runtime": "sglang"},
    "evaluation": {"suite": "tiny", "limit": 120, "looks": 1, "control": None},
    "gate": {
        "accuracy": {"margin": 0.1, "margins": {"tiny_arithmetic": 0.1, "tiny_facts": 0.1}},
        "throughput": {"min_ratio": None},
        "canary": {"min_agreement": 0.6},
    },
    "publish": {"folder": "published", "licence": {"id": "apache-2.0"}},
}


@dataclass(frozen=True)
class Made:
    """A project whose checkpoint is made, with the model and tokenizer that the stand-ins answer by."""

    project: Project
    checkpoint: Path
    model: Any
    tokenizer: Any

    def server(self, side: str, **settings: Any) -> SglangServer:
        folder = MODEL if side == "baseline" else self.checkpoint
        return SglangServer(self.model, self.tokenizer, folder, **settings)

    def run(self, baseline: SglangServer, candidate: SglangServer, *more: str) -> CompletedProcess[str]:
        sides = (f"--endpoint=baseline={baseline.url}", f"--endpoint=candidate={candidate.url}")
        return self.project.run("run", "by-sglang.yaml", "--launcher", "endpoint", *sides, *more)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, warm_python: Path) -> Made:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    home = tmp_path_factory.mktemp("sglang")
    (home / "by-sglang.yaml").write_text(yaml.safe_dump(RECIPE, sort_keys=False))
    project = Project(home, Path("/no/vllm"), warm_python)
    done = project.run("run", "by-sglang.yaml", "--until", "inspect", "--json")
    assert done.returncode == 0, done.stderr  # nothing is served up to there
    stages = {stage["stage"]: Path(stage["path"]) for stage in json.loads(done.stdout)["stages"]}
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32").eval()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    (checkpoint,) = {path.parent for path in stages["quantize"].rglob("config.json")}
    return Made(project, checkpoint, model, tokenizer)


def test_a_whole_run_asks_in_sglangs_forms_and_passes(made: Made) -> None:
    with made.server("baseline") as baseline, made.server("candidate") as candidate:
        done = made.run(baseline, candidate, "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["measured"]["runtime"] == "sglang 0.5.9"
    for server in (baseline, candidate):
        assert {path for path, _ in server.asked} == {"/health", "/v1/models", "/server_info", "/generate"}
        one = {"temperature": 0, "max_new_tokens": 1}
        canary = [body for body in server.bodies if body.get("top_logprobs_num", 1) > 1]
        scored = [body for body in server.bodies if body.get("top_logprobs_num") == 1]
        written = [body for body in server.bodies if "return_logprob" not in body]
        assert canary
        assert scored
        assert written
        for body in canary:
            common = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": LIKELIEST}
            assert body == {"input_ids": body["input_ids"], "sampling_params": one, **common}
            assert isinstance(body["input_ids"][0], int)
        for body in scored:
            common = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
            assert body == {"input_ids": body["input_ids"], "sampling_params": one, **common}
            assert isinstance(body["input_ids"][0], list)
        for body in written:
            sampling = body["sampling_params"]
            assert body.keys() == {"input_ids", "sampling_params"}
            assert sampling.keys() == {"max_new_tokens", "temperature", "stop"}
            assert sampling["temperature"] == 0
    published = made.project.home / "published" / "by-sglang"
    measured, report = read(published / "quantmint" / "gate.json")
    assert report.verdict is Verdict.PASS
    for side in (measured.baseline, measured.candidate):
        assert (side.version, side.engine) == ("sglang 0.5.9", "sglang 0.5.9")
        assert side.argv[:4] == ("python3", "-m", "sglang.launch_server", "--model-path")
        assert dict(zip(side.argv, side.argv[1:], strict=False))["--attention-backend"] == "torch_native"
    scores = {result.task: (result.baseline, result.candidate) for result in report.accuracy}
    assert all(before == after for before, after in scores.values())  # one model answered for both
    card = (published / "README.md").read_text().replace("\\", "")  # Markdown's escapes
    assert "sglang 0.5.9" in card
    assert "python3 -m sglang.launch_server --model-path FOLDER" in card
    assert "endpoints that quantmint did not start" in (published / "quantmint" / PAGE).read_text()


def test_a_server_with_a_cache_of_another_type_is_asked_anew_and_invalid(made: Made) -> None:
    with made.server("baseline") as baseline, made.server("candidate", kv_cache_dtype="fp8_e5m2") as candidate:
        done = made.run(baseline, candidate, "--json")
    answer = json.loads(done.stdout)
    assert answer["verdict"] == "INVALID"
    assert any("its KV cache is fp8_e5m2, but the launch asked for auto" in reason for reason in answer["reasons"])

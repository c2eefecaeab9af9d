"""The KV cache that is predicted for a GPU, against the one that the real vLLM finds room for.

Models are configurations: vLLM makes up the weights. The engine runs once through `vllm bench latency`, which needs
neither a port nor a tokenizer of the model's own. QUANTMINT_MEMORY_FIT names a file that gets one JSON line a case;
a command of vLLM that adds ``--enforce-eager`` makes the cases with graphs quick, and the prediction follows the log.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.base.hardware import hardware
from quantmint.pipeline.serving.environment import VllmEnvironment
from quantmint.pipeline.serving.model.facts import model_facts
from quantmint.pipeline.serving.plan import Memory, ParallelLayout
from quantmint.pipeline.serving.planning.memory import EngineSettings, estimate_memory
from quantmint.pipeline.serving.running.log import scan_log
from tests.serving.shapes import write_shape

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]

VARIABLE = "QUANTMINT_MEMORY_FIT"
UTILIZATION = 0.9
_CONFIGS = Path(__file__).parents[1] / "assets" / "configs"
_GIB = 1 << 30

V2_LITE: Mapping[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
    "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0, "vocab_size": 102400,
    "max_position_embeddings": 32768, "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
GEMMA: Mapping[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 3840,
    "intermediate_size": 15360, "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 1024, "vocab_size": 262208,
    "layer_types": [*(["sliding_attention"] * 5), "full_attention"] * 8, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh", "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What is launched; ``model`` is a folder of tests/assets/configs or a configuration, which ``changes`` alter."""

    name: str
    model: str | Mapping[str, Any]
    changes: Mapping[str, Any] = field(default_factory=dict)
    tensor: int = 1
    kv_cache_dtype: str = "auto"
    batched: int = 8192
    sequences: int = 256
    length: int = 8192
    eager: bool = True

    def config(self) -> dict[str, Any]:
        if not isinstance(self.model, str):
            return {**self.model, **self.changes}
        path = _CONFIGS / self.model / "config.json"
        return {**json.loads(path.read_text(encoding="utf-8")), **self.changes}


_OSS_20B = {
    "num_hidden_layers": 24,
    "num_local_experts": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}
CASES = (
    Case("dense", "Llama-3.1-8B-Instruct"),
    Case("dense fp8 cache", "Llama-3.1-8B-Instruct", kv_cache_dtype="fp8"),
    Case("dense 32k batched", "Llama-3.1-8B-Instruct", batched=32768),
    Case("dense 1024 sequences", "Llama-3.1-8B-Instruct", sequences=1024),
    Case("mixture", "Qwen3-30B-A3B"),
    Case("latent", V2_LITE),
    Case("windows", GEMMA),
    Case("gpt-oss", "gpt-oss-120b", _OSS_20B),
    Case("dense with graphs", "Llama-3.1-8B-Instruct", eager=False),
    Case("mixture with graphs", "Qwen3-30B-A3B", eager=False),
    Case("dense on two", "Llama-3.1-8B-Instruct", tensor=2),
    Case("mixture on two", "Qwen3-30B-A3B", tensor=2),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_the_cache_has_the_predicted_size(case: Case, vllm: VllmEnvironment, tmp_path: Path) -> None:
    import torch

    if torch.cuda.device_count() < case.tensor:
        pytest.skip(f"{case.tensor} GPUs are needed, {torch.cuda.device_count()} are here")
    model = write_shape(tmp_path / "model", case.config())
    log = run(case, model, vllm)
    eager = "enforce_eager=True" in log
    predicted = predict(case, model, vllm.version, torch.cuda.get_device_properties(0).total_memory, eager)
    logged = scan_log(log).kv_tokens
    record(case, predicted, logged, log, eager, torch.cuda.get_device_name(0))
    assert logged is not None, log[-4000:]
    assert predicted.kv_tokens == pytest.approx(logged, rel=0.10)


def run(case: Case, model: Path, vllm: VllmEnvironment) -> str:
    """One request through the engine; its log."""
    numbers = {
        "--tensor-parallel-size": case.tensor,
        "--max-model-len": case.length,
        "--max-num-batched-tokens": case.batched,
        "--max-num-seqs": case.sequences,
        "--gpu-memory-utilization": UTILIZATION,
        "--kv-cache-dtype": case.kv_cache_dtype,
        "--load-format": "dummy",
        "--input-len": 8,
        "--output-len": 1,
        "--batch-size": 1,
        "--num-iters": 1,
        "--num-iters-warmup": 0,
    }
    command = [str(vllm.executable), "bench", "latency", "--model", str(model)]
    command += [word for flag, number in numbers.items() for word in (flag, str(number))]
    command += ["--enforce-eager"] if case.eager else []
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=800, env=os.environ
    )
    return done.stdout


def predict(case: Case, model: Path, version: str, total: int, eager: bool) -> Memory:
    engine = EngineSettings(
        vllm_version=version,
        utilization=UTILIZATION,
        max_model_len=case.length,
        max_num_seqs=case.sequences,
        max_num_batched_tokens=case.batched,
        kv_cache_dtype=case.kv_cache_dtype,
        cudagraph_mode=None if eager else "FULL_AND_PIECEWISE",
    )
    layout = ParallelLayout(tensor=case.tensor)
    return estimate_memory(model_facts(model), hardware("cuda"), layout, engine, hbm_bytes=total)


def record(case: Case, predicted: Memory, logged: int | None, log: str, eager: bool, device: str) -> None:
    """Print a row, and write it, with what the log says about each part, in GiB."""
    row = {
        "case": case.name,
        "device": device,
        "eager": eager,
        "predicted_tokens": predicted.kv_tokens,
        "logged_tokens": logged,
        "ratio": None if not logged else round(predicted.kv_tokens / logged, 4),
        "weights": [round(predicted.weights / _GIB, 2), said(log, r"Model loading took ([\d.]+) GiB")],
        "cache": [round(predicted.kv_cache / _GIB, 2), said(log, r"Available KV cache memory: ([\d.]+) GiB")],
        "graphs": [round(predicted.graphs / _GIB, 2), said(log, r"Estimated CUDA graph memory: ([\d.]+) GiB")],
        "activations": [round(predicted.activations / _GIB, 2), None],
        "attention": scan_log(log).attention_backend,
    }
    found = row["weights"][1], row["cache"][1]
    if None not in found:
        rest = predicted.budget / _GIB - found[0] - found[1] - (row["graphs"][1] or 0.0)
        row["activations"][1] = round(rest, 2)
    print(json.dumps(row))  # noqa: T201 - the figures are the point
    if path := os.environ.get(VARIABLE):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(row)}\n")


def said(log: str, pattern: str) -> float | None:
    found = re.search(pattern, log)
    return None if found is None else float(found[1])

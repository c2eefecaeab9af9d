"""A model small enough to serve in a test, and a stand-in for the ``vllm`` command."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.processes import child_environment
from quantmint.pipeline.serving.environment import VllmEnvironment, find_vllm
from quantmint.pipeline.serving.model.facts import model_facts
from quantmint.pipeline.serving.planning.planner import plan_serving
from quantmint.pipeline.serving.planning.request import ServingRequest
from quantmint.pipeline.serving.planning.target import parse_target, profile

VOCABULARY = 256
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, LAYERS = 128, 4, 2, 64, 256, 2


def write_tiny_llama(folder: Path) -> Path:
    """Write a random Llama with a word-level tokenizer; head_dim 64, for which every backend of vLLM has a kernel."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(7)

    def weight(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape) * 0.05).astype(np.float16)

    tensors = {
        "model.embed_tokens.weight": weight(VOCABULARY, HIDDEN),
        "model.norm.weight": np.ones(HIDDEN, np.float16),
        "lm_head.weight": weight(VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        tensors |= {
            f"{at}.input_layernorm.weight": np.ones(HIDDEN, np.float16),
            f"{at}.post_attention_layernorm.weight": np.ones(HIDDEN, np.float16),
            f"{at}.self_attn.q_proj.weight": weight(HEADS * HEAD_DIM, HIDDEN),
            f"{at}.self_attn.k_proj.weight": weight(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}.self_attn.v_proj.weight": weight(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}.self_attn.o_proj.weight": weight(HIDDEN, HEADS * HEAD_DIM),
            f"{at}.mlp.gate_proj.weight": weight(INTERMEDIATE, HIDDEN),
            f"{at}.mlp.up_proj.weight": weight(INTERMEDIATE, HIDDEN),
            f"{at}.mlp.down_proj.weight": weight(HIDDEN, INTERMEDIATE),
        }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
    }
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{index}": index for index in range(3, VOCABULARY)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": words[token],
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token in ("<unk>", "<s>", "</s>")
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": 512,
    }
    for name, content in (("config", config), ("tokenizer", tokenizer), ("tokenizer_config", about)):
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def vllm() -> VllmEnvironment:
    """vLLM's CPU build, which the tests of this room are served by."""
    try:
        found = find_vllm()
    except UserError as error:
        pytest.skip(error.message)
    if "cpu" not in found.version:
        pytest.skip(f"{found.executable} is vLLM {found.version}, not the CPU build")
    return found


@pytest.fixture(scope="module")
def warm_environment(warm_vllm: VllmEnvironment, tiny_llama: Path) -> dict[str, str]:
    """The variables of a server on this machine: a script that is run with them is a fork of what forks servers."""
    plan = plan_serving(
        ServingRequest(
            tiny_llama,
            model_facts(tiny_llama),
            target=parse_target("cpu"),
            profile=profile("latency", concurrency=4, max_model_len=256),
            vllm_version=warm_vllm.version,
            purpose="measure",
            kv_cache_dtype="auto",
            cpu_threads=2,
        )
    )
    return child_environment(os.environ, plan.env)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
def fake_vllm(tmp_path: Path) -> Path:
    """A ``vllm`` command that needs no vLLM: see fake_vllm.py."""
    command = tmp_path / "bin" / "vllm"
    command.parent.mkdir()
    source = Path(__file__).with_name("fake_vllm.py").read_text(encoding="utf-8")
    command.write_text(f"#!{sys.executable}\n{source}", encoding="utf-8")
    command.chmod(0o755)
    return command


@pytest.fixture
def fake_model(tmp_path: Path) -> Callable[..., Path]:
    """Make a model folder that tells the fake server how to behave."""

    def make(**settings: object) -> Path:
        folder = tmp_path / "model"
        folder.mkdir()
        (folder / "fake.json").write_text(json.dumps(settings), encoding="utf-8")
        return folder

    return make

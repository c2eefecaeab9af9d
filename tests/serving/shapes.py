"""Models that are a configuration and a tokenizer: vLLM makes up their weights with ``--load-format dummy``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WORDS = 512
_COMMON: Mapping[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": WORDS, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
_LATENT: Mapping[str, Any] = {
    "num_hidden_layers": 3, "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "first_k_dense_replace": 1, "n_routed_experts": 8,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 128,
    "scoring_func": "softmax", "topk_method": "greedy", "routed_scaling_factor": 1.0, "norm_topk_prob": False,
    "moe_layer_freq": 1, "rope_theta": 10000.0, "num_nextn_predict_layers": 0,
}  # fmt: skip
_DELTA: Mapping[str, Any] = {
    "num_hidden_layers": 8, "head_dim": 64, "full_attention_interval": 4, "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1,
    "norm_topk_prob": True, "linear_num_value_heads": 8, "linear_num_key_heads": 4, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.25, "rope_theta": 10000.0,
}  # fmt: skip

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "grouped": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 3, "head_dim": 64},
    "every-head": {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 5, "hidden_size": 512,
        "num_key_value_heads": 4,
    },
    "window": {
        "model_type": "mistral", "architectures": ["MistralForCausalLM"], "num_hidden_layers": 4, "head_dim": 64,
        "sliding_window": 512,
    },
    "some-windows": {
        "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 12, "head_dim": 64,
        "query_pre_attn_scalar": 64, "sliding_window": 512, "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": [*(["sliding_attention"] * 5), "full_attention"] * 2, "tie_word_embeddings": True,
    },
    "latent": {"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], **_LATENT},
    "delta": {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], **_DELTA},
}  # fmt: skip


def write_shape(folder: Path, fields: Mapping[str, Any]) -> Path:
    """A folder with a configuration and a word-level tokenizer of 512 words."""
    folder.mkdir(parents=True, exist_ok=True)
    words = {f"w{number}": number for number in range(WORDS)}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }  # fmt: skip
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "bos_token": "w1", "eos_token": "w2"}
    files = {"config": fields, "tokenizer": tokenizer, "tokenizer_config": about}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def small(name: str, folder: Path) -> Path:
    """One of `SHAPES`, small enough for a CPU."""
    return write_shape(folder / name, {**_COMMON, **SHAPES[name]})

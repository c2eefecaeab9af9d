"""Tiny drafts for speculative decoding, as EAGLE-3 and DFlash release theirs, with random weights.

>>> build_draft("eagle3", target, Path("draft"))
PosixPath('draft')
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from tests.zoo.models import read, read_config, write, write_config

_ARCHITECTURES = {"eagle3": "LlamaForCausalLMEagle3", "dflash": "DFlashDraftModel"}
_FIELDS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size",
           "max_position_embeddings", "rms_norm_eps", "hidden_act", "head_dim")  # fmt: skip
AUXILIARY = [1, 2, 3]
"""Layers of the target whose hidden states the draft reads; by default vLLM takes three that a tiny model lacks."""


def build_draft(kind: str, target: Path, folder: Path) -> Path:
    """Write a draft of one layer for a target of Llama's class to ``folder``, and return it; ``kind`` is its method."""
    import torch

    config, tensors = read_config(target), read(target)
    vocabulary = config["vocab_size"] // 2  # of the target's first tokens
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries, keys = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    generator = torch.Generator().manual_seed(1)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) / math.sqrt(columns)).to(torch.bfloat16)

    layer, inputs = ("midlayer", 2 * hidden) if kind == "eagle3" else ("layers.0", hidden)
    shapes = {
        **{f"self_attn.{name}_proj": (rows, inputs) for name, rows in (("q", queries), ("k", keys), ("v", keys))},
        "self_attn.o_proj": (hidden, queries),
        **{f"mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")},
        "mlp.down_proj": (hidden, inner),
    }
    norms = [f"{layer}.{name}" for name in ("input_layernorm", "post_attention_layernorm", "hidden_norm")]
    draft = {f"{layer}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
    draft |= {f"{name}.weight": torch.ones(hidden, dtype=torch.bfloat16) for name in (*norms, "norm")}
    draft["fc.weight"] = matrix(hidden, 3 * hidden)
    if kind == "eagle3":
        draft["lm_head.weight"] = tensors["lm_head.weight"][:vocabulary].clone()
        draft["d2t"] = torch.zeros(vocabulary, dtype=torch.int64)  # a token's distance to the target's
    folder.mkdir(parents=True, exist_ok=True)
    write(folder, draft)
    fields: dict[str, Any] = {name: config[name] for name in _FIELDS}
    named = {"architectures": [_ARCHITECTURES[kind]], "num_hidden_layers": 1, "dtype": "bfloat16"}
    special = {"draft_vocab_size": vocabulary, "model_type": "llama" if kind == "eagle3" else "qwen3"}
    layers = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": AUXILIARY, "use_aux_hidden_state": True}}
    write_config(folder, {**fields, **named, **special, **layers})
    return folder

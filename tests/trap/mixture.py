"""A tiny mixture of experts whose multi-token predictor is right as often as its experts are: GLM-4.5 by its form.

>>> build(Path("folder"))
PosixPath('folder')

The first half of an embedding identifies a token, and the output head reads the second half alone, into which nothing
but the experts of the last layer write. Attention and the first layer add next to nothing, so that the next token is a
function of the last one. The predictor is that last layer once more, with `eh_proj` passing the embedding on: it says
what the model will say. Every weight that is quantized is in its way, and a predictor with wrong scales is guessing.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from tests.zoo.models import Tensors, write, write_config

if TYPE_CHECKING:
    import torch

HIDDEN, VOCABULARY, EXPERTS, INNER, HEADS, HEAD = 256, 1024, 8, 256, 4, 64
LAYERS = 2
PREDICTOR = f"model.layers.{LAYERS}."
_HALF = HIDDEN // 2
_NOTHING = 1e-4
"""Size of what is not to matter: in FP8 its codes are as large as any, and without scales it covers the rest."""
_TOKENIZER = Path(__file__).parents[2] / "recipes" / "tiny" / "model"
CONFIG = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "dtype": "bfloat16",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * INNER,
    "moe_intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 2,
    "head_dim": HEAD,
    "partial_rotary_factor": 0.5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "use_qk_norm": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
}


def build(folder: Path) -> Path:
    """Write the model with its predictor and the embedded model's tokenizer to ``folder``, and return the folder."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int, size: float = 1.0) -> torch.Tensor:
        return size * torch.randn(rows, columns, generator=generator) / columns**0.5

    def down(columns: int) -> torch.Tensor:
        """Return a matrix into the second half; the head reads as much of the rows that hold nothing as of others."""
        weight = 2 * matrix(HIDDEN, columns)
        weight[: _HALF + _HALF // 2] *= _NOTHING
        return weight

    def feed_forward(prefix: str, inner: int, out: torch.Tensor) -> Tensors:
        inputs = {f"{prefix}.{name}_proj.weight": matrix(inner, HIDDEN, 3.0) for name in ("gate", "up")}
        return {**inputs, f"{prefix}.down_proj.weight": out}

    def layer(prefix: str) -> Tensors:
        rows = {"q": HEADS * HEAD, "k": HEADS // 2 * HEAD, "v": HEADS // 2 * HEAD}
        tensors = {f"{prefix}self_attn.{name}_proj.weight": matrix(count, HIDDEN) for name, count in rows.items()}
        tensors[f"{prefix}self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * HEAD, _NOTHING)
        norms = ("input_layernorm", "post_attention_layernorm")
        return tensors | {f"{prefix}{name}.weight": torch.ones(HIDDEN) for name in norms}

    first, last = (f"model.layers.{number}." for number in range(LAYERS))
    experts = layer(last) | {f"{last}mlp.gate.weight": matrix(EXPERTS, HIDDEN, 4.0)}
    experts[f"{last}mlp.gate.e_score_correction_bias"] = torch.zeros(EXPERTS)
    for name in ("shared_experts", *(f"experts.{number}" for number in range(EXPERTS))):
        experts |= feed_forward(f"{last}mlp.{name}", INNER, down(INNER))
    embedding, head = torch.zeros(VOCABULARY, HIDDEN), torch.zeros(VOCABULARY, HIDDEN)
    embedding[:, :_HALF] = torch.randn(VOCABULARY, _HALF, generator=generator)
    head[:, _HALF:] = torch.randn(VOCABULARY, _HALF, generator=generator)
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": torch.ones(HIDDEN)}
    tensors |= layer(first) | feed_forward(f"{first}mlp", 2 * INNER, matrix(HIDDEN, 2 * INNER, _NOTHING)) | experts
    tensors |= {name.replace(last, PREDICTOR): tensor.clone() for name, tensor in experts.items()}
    tensors |= {f"{PREDICTOR}{name}.weight": torch.ones(HIDDEN) for name in ("enorm", "hnorm", "shared_head.norm")}
    tensors[f"{PREDICTOR}eh_proj.weight"] = torch.eye(HIDDEN, 2 * HIDDEN)  # of [embedding, hidden states]
    tensors |= {
        f"{PREDICTOR}embed_tokens.weight": embedding.clone(),
        f"{PREDICTOR}shared_head.head.weight": head.clone(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    bias = "e_score_correction_bias"  # float32 in every release
    write(folder, {n: t if n.endswith(bias) else t.to(torch.bfloat16) for n, t in tensors.items()})
    write_config(folder, CONFIG)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(_TOKENIZER / name, folder / name)
    return folder

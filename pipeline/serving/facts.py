"""What a model is, as far as serving it depends on it: from config.json and the headers of its shards, never a weight.

    >>> facts = model_facts(Path("Qwen3-30B-A3B"))
    >>> facts.family, facts.density
    ('moe', 6.25)

A folder with nothing but a config.json is enough: parameters and bytes are then counted (`counting.py`), and `counted`
says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Attention = Literal["mha", "mla", "dsa", "none"]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model for `vllm serve`; sizes are elements of one layer or head unless said otherwise.

    ``attention`` is "none" where no layer has any. ``experts`` is 0 for a dense model. ``attention_layers`` keep
    every token, ``sliding_layers`` those of the last ``sliding_window``, ``linear_layers`` (Mamba, gated delta nets)
    a state of constant size. ``context`` counts tokens as vLLM derives it. ``quantization`` is a scheme of
    schemes.yaml where it is one of ours, else the method's own name, "none" for 16 bit. ``group`` is how many elements
    of a quantized weight's input share a scale: what tensor parallelism must not cut. ``weights`` are bytes, measured
    from headers or, with ``counted``, computed from the configuration.
    """

    architecture: str
    model_type: str
    attention: Attention
    experts: int
    experts_per_token: int
    shared_experts: int
    gpt_oss: bool
    multimodal: bool
    hybrid: bool
    mtp_layers: int
    parameters: int
    encoder_parameters: int
    layers: int
    attention_layers: int
    sliding_layers: int
    sliding_window: int | None
    linear_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    intermediate: int
    expert_intermediate: int
    quantization: str
    checkpoint_format: str
    group: int | None
    kv_cache_scheme: Literal["fp8"] | None
    weights: int
    counted: bool

    @property
    def family(self) -> Literal["gpt-oss", "dsa", "mla", "moe", "dense"]:
        """The row of the layout table; the first that fits of gpt-oss, DSA, MLA, MoE, dense."""
        if self.gpt_oss:
            return "gpt-oss"
        if self.attention == "dsa":
            return "dsa"
        if self.attention == "mla":
            return "mla"
        return "moe" if self.experts else "dense"

    @property
    def density(self) -> float | None:
        """Routed experts that a token visits, percent of all; None for a dense model."""
        return 100 * self.experts_per_token / self.experts if self.experts else None

    @property
    def encoder_share(self) -> float:
        """Parameters of the vision or audio encoder, percent of all."""
        return 100 * self.encoder_parameters / self.parameters if self.parameters else 0.0


def model_facts(folder: Path) -> ModelFacts:
    """Read a model's folder: config.json, and the headers of the shards where there are any.

    UserError for a folder without config.json, or with one that names no layers.
    """
    raise NotImplementedError


def as_quantized(
    facts: ModelFacts,
    *,
    scheme: str,
    kv_cache: Literal["auto", "fp8"] = "auto",
    format: str = "quark",  # noqa: A002 - the recipe's own word
) -> ModelFacts:
    """The facts of what a recipe makes of a 16-bit model: every decoder linear in ``scheme``, the rest as it was."""
    raise NotImplementedError

"""Resolve the scheme of each module, and the modules that must share one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from quantmint.pipeline.recipe.quantization import Quantization

#: Sibling modules that vLLM loads as one; a test holds them against vLLM's own classes.
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),  # Mixtral's names of gate and up
    ("q_a_proj", "kv_a_proj_with_mqa"),  # multi-head latent attention
    ("in_proj_qkv", "in_proj_z"),  # gated delta nets of Qwen3.5
    ("in_proj_b", "in_proj_a"),
    ("wk", "weights_proj"),  # the indexer of DeepSeek's sparse attention
    ("wq_du", "wk_dv", "wv_dv", "wr_du"),  # Inkling
    ("to_q", "to_k", "to_v"),
    ("q", "k", "v"),
)
#: The same, of modules that are siblings under other names in other modules, by the name of their parent.
FUSED_BELOW = {"linear_attn": (("q_proj", "k_proj", "v_proj", "g_proj"),)}
_EXPERT = re.compile(r"(.*\.experts)\.\d+\.\w+")
_EXPERT_KEYS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
_MLP = ("gate_proj", "up_proj", "down_proj")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
_EXPERTS = {"mlp.experts": _MLP, "block_sparse_moe.experts": ("w1", "w3", "w2")}
_EXPERT_NAMES = (
    "model.layers.{}.mlp.experts.0.down_proj",
    "model.layers.{}.block_sparse_moe.experts.0.w2",
    "model.layers.{}.block_sparse_moe.experts.0.down_proj",
    "model.layers.{}.feed_forward.experts.0.down_proj",
    "model.layers.{}.feed_forward.experts.0.w2",
    "model.layers.{}.experts.0.down_proj",
    "model.language_model.layers.{}.mlp.experts.0.down_proj",
    "model.decoder.layers.{}.experts.0.down_proj",
    "language_model.model.layers.{}.mlp.experts.0.down_proj",
    "language_model.model.layers.{}.block_sparse_moe.experts.0.w2",
    "language_model.model.layers.{}.feed_forward.experts.0.down_proj",
    "thinker.model.layers.{}.mlp.experts.0.down_proj",
    "backbone.layers.{}.mixer.experts.0.down_proj",
    "layers.{}.ffn.experts.0.w2",
)
"""Names that models have for a projection of their first routed expert, by the number of the layer."""


def matches(pattern: str, name: str) -> bool:
    """Return whether a recipe's pattern selects a module.

    After `re:` the pattern is a regular expression that must match at the beginning of the name; else it is the name.
    """
    return _compiled(pattern[3:]).match(name) is not None if pattern.startswith("re:") else pattern == name


@cache  # several patterns meet 70,000 names in one plan
def _compiled(expression: str) -> re.Pattern[str]:
    return re.compile(expression)


def assigned(quantization: Quantization, name: str) -> str | None:
    """Return the scheme of a linear module; None if the recipe excludes it. Exclusion goes before any override."""
    return None if is_excluded(quantization, name) else override_of(quantization, name) or quantization.scheme


def is_excluded(quantization: Quantization, name: str) -> bool:
    """Return whether the recipe leaves a module in 16 bit."""
    return any(matches(pattern, name) for pattern in quantization.exclude)


def override_of(quantization: Quantization, name: str) -> str | None:
    """Return the scheme of the first override that selects a module; None without one."""
    for override in quantization.overrides:
        if any(matches(pattern, name) for pattern in override.modules):
            return override.scheme
    return None


def fused_with(name: str) -> str | None:
    """Return the name of a module's fusion group; None for a module that vLLM loads alone."""
    if expert := _EXPERT.fullmatch(name):
        return f"{expert[1]}.*"
    return scale_group(name) if len(_group(name)) > 1 else None


def scale_group(name: str) -> str:
    """Return the name of the modules fused within a layer or expert, which share one scale per tensor."""
    return f"{name.rpartition('.')[0]}.{{{', '.join(_group(name))}}}"


def _group(name: str) -> tuple[str, ...]:
    """Return the last name parts of all modules in a module's fusion group, its own included."""
    parent, _, last = name.rpartition(".")
    tables = (*FUSED_BELOW.get(parent.rpartition(".")[2], ()), *FUSED)
    return next((group for group in tables if last in group), (last,))


def siblings(name: str) -> tuple[str, ...]:
    """Return a module and the modules fused with it, judged by names; one other expert stands for all experts."""
    parent, _, last = name.rpartition(".")
    if _EXPERT.fullmatch(name):
        experts, _, number = parent.rpartition(".")
        return name, f"{experts}.{1 if number == '0' else 0}.{last}"
    return tuple(f"{parent}.{member}" if parent else member for member in _group(name))


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config.json that describes the language model."""
    for key in ("thinker_config", "text_config", "llm_config", "language_config"):
        if isinstance(config.get(key), Mapping):
            return text_config(config[key])
    return config


def expert_count(config: Mapping[str, Any]) -> int:
    """Return the number of experts in a mixture's layer, by its config.json; 0 for a dense model."""
    text = text_config(config)
    counts = (text.get(key) for key in _EXPERT_KEYS)
    return next((count for count in counts if count and isinstance(count, int)), 0)


def expert_names(layers: Iterable[int]) -> list[tuple[str, ...]]:
    """Return tuples of module names: one per naming convention, with the first expert's projection of each layer."""
    numbers = list(layers)
    return [tuple(name.format(layer) for layer in numbers) for name in _EXPERT_NAMES]


def expert_schemes(scheme_of: Callable[[str], str | None], layers: Iterable[int]) -> tuple[str, ...]:
    """Return the sorted schemes that routed experts are sure to have, without 16 bit.

    ``scheme_of`` returns the scheme of a module by its name, None for 16 bit; ``layers`` are those with experts. A
    config.json does not say what experts are called: a scheme is sure if some layer has it under each usual name.
    """
    by_name = [{scheme_of(name) for name in names} for names in expert_names(layers)]
    return tuple(sorted(scheme for scheme in set.intersection(*by_name) if scheme is not None))


def declared_quantization(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the `quantization_config` of a config.json, or of its language model; None for a 16-bit model."""
    declared = config.get("quantization_config") or text_config(config).get("quantization_config")
    return declared if isinstance(declared, Mapping) else None


def expected_names(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the linear modules that a config.json of a usual architecture implies.

    For checks without the weights: a superfluous name does no harm, since only disagreement within a layer matters.
    """
    text = text_config(config)
    experts = expert_count(config)
    attention: tuple[str, ...] = _ATTENTION if text.get("kv_lora_rank") is None else _LATENT
    parents = {"self_attn": attention, "mlp": _MLP, "mlp.shared_experts": _MLP}
    for layer in range(int(text.get("num_hidden_layers") or 0)):
        prefix = f"model.layers.{layer}"
        yield from (f"{prefix}.{room}.{part}" for room, parts in parents.items() for part in parts)
        for room, parts in _EXPERTS.items():
            yield from (f"{prefix}.{room}.{expert}.{part}" for expert in range(experts) for part in parts)

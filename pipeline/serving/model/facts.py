"""The facts about a model that serving depends on, from its config.json and the headers of its shards.

For a folder with only a config.json, parameters and bytes are computed, and `ModelFacts.counted` is True. The two
checkpoint layouts that quantmint writes are read by `pipeline.quantize.formats`; for other quantization methods this
module reads what serving needs.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.schemes import table
from quantmint.pipeline.quantize.formats.checkpoint import INDEX_NAME, SINGLE_NAME, open_checkpoint, read_config
from quantmint.pipeline.quantize.formats.layout import layout as layout_of_method
from quantmint.pipeline.recipe.modules import (
    assigned,
    declared_quantization,
    expert_names,
    expert_schemes,
    matches,
    text_config,
)
from quantmint.pipeline.recipe.quantization import Quantization
from quantmint.pipeline.serving.model.architecture import Shape, read_shape
from quantmint.pipeline.serving.model.weights import ModuleWeight, count_weights, measure_weights

Attention = Literal["mha", "mla", "dsa", "csa", "none"]


_ENCODERS = ("vision_config", "audio_config", "thinker_config")
_LENGTHS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions",
    "max_sequence_length", "max_seq_length", "seq_len",
)  # fmt: skip
_PREDICTORS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""Fields of config.json that count layers for multi-token prediction."""
_DEFAULT_LENGTH = 2048  # vLLM's default for a configuration without a length
_SCALED_ALREADY = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "default")
_OURS = ("quark", "compressed-tensors")
_EXCLUDED = ("modules_to_not_convert", "ignored_layers", "exclude_modules", "ignore", "exclude")


@dataclass(frozen=True, slots=True)
class ModelFacts(Shape):
    """A model as `vllm serve` sees it.

    ``attention`` is "none" for a model without attention layers, "csa" for DeepSeek V4's. ``sliding_layers`` counts
    the layers that cache nothing but a window of tokens, ``linear_layers`` those with a recurrent state (Mamba, gated
    delta nets). ``quantization`` is a scheme of schemes.yaml, else the method's own name, "none" for 16 bit.
    ``expert_schemes`` are the schemes of routed experts, without 16 bit, as far as their names are known. ``group`` is
    the number of input elements that share a scale, None without groups. ``weights`` is in bytes, measured from
    headers, or computed if ``counted``. ``predictor`` says whether the model has layers for multi-token prediction,
    which ``parameters`` and ``weights`` leave out. ``schemes`` are those of all quantized modules, of which
    ``quantization`` has the most weights.
    """

    architecture: str
    model_type: str
    attention: Attention
    gpt_oss: bool
    multimodal: bool
    hybrid: bool
    parameters: int
    encoder_parameters: int
    layers: int
    sliding_layers: int
    linear_layers: int
    context: int
    quantization: str
    expert_schemes: tuple[str, ...]
    checkpoint_format: str
    group: int | None
    kv_cache_scheme: Literal["fp8"] | None
    weights: int
    counted: bool
    module_weights: tuple[ModuleWeight, ...] = field(repr=False, compare=False)
    predictor: bool = False
    schemes: tuple[str, ...] = ()

    @property
    def family(self) -> Literal["gpt-oss", "dsa", "mla", "moe", "dense"]:
        """The model family of the layout table: gpt-oss, DSA, MLA, MoE or dense, the first that applies."""
        if self.gpt_oss:
            return "gpt-oss"
        if self.attention in ("dsa", "mla"):
            return self.attention
        return "moe" if self.experts else "dense"

    @property
    def density(self) -> float | None:
        """Percentage of the routed experts that a token visits; None for a dense model."""
        return 100 * self.experts_per_token / self.experts if self.experts else None

    @property
    def encoder_share(self) -> float:
        """Percentage of the parameters that belong to the vision or audio encoder."""
        return 100 * self.encoder_parameters / self.parameters if self.parameters else 0.0


def model_facts(folder: Path) -> ModelFacts:
    """Return the facts of a folder, from config.json and the headers of its shards, if any.

    Raises `UserError` when config.json is missing, or a file is damaged.
    """
    config = read_config(folder)
    counted = facts_of_config(config)
    if not any((folder / name).is_file() for name in (INDEX_NAME, SINGLE_NAME)):
        return counted
    tensors = (info for _, info in open_checkpoint(folder).tensors.values())
    module_weights = measure_weights(tensors, layers=counted.layers)
    experts, quantization = counted.expert_schemes, _quantization(config)
    names = tuple(weight.name for weight in module_weights if weight.role == "experts" and weight.linear)
    if quantization and names:
        experts = tuple(sorted({scheme for scheme in _declared(quantization, names)[0].values() if scheme is not None}))
    return replace(
        counted, module_weights=module_weights, weights=_bytes(module_weights), counted=False, expert_schemes=experts
    )


def schemes_of_experts(section: Quantization, config: Mapping[str, Any]) -> frozenset[str]:
    """Return the schemes that a recipe gives a model's routed experts; empty for a dense model.

    For ``scheme: auto`` these are all schemes to choose from. Empty too for a config.json that serving does not
    support.
    """
    try:
        layers = read_shape(config).expert_layers
    except UserError:
        return frozenset()
    schemes = frozenset(expert_schemes(partial(assigned, section), layers))
    return schemes | set(section.from_ or ()) if section.scheme in schemes else schemes


def facts_of_config(config: Mapping[str, Any]) -> ModelFacts:
    """Return the facts of a parsed config.json, with computed sizes. Raises `UserError` as in `read_shape`."""
    shape = read_shape(config)
    module_weights = count_weights(config, shape)
    linear = {weight.name: weight.parameters for weight in module_weights if weight.linear}
    quantization = _quantization(config)
    schemes, cached = _declared(quantization, tuple(linear)) if quantization else (dict.fromkeys(linear), False)
    experts = tuple(name for names in expert_names(shape.expert_layers) for name in names) if quantization else ()
    of_experts = _declared(quantization, experts)[0] if experts else {}
    parameters: Counter[str] = Counter()  # of quantized weights, by scheme
    for module, scheme in schemes.items():
        if scheme is not None:
            parameters[scheme] += linear[module]
    module_weights = tuple(
        weight.stored(schemes[weight.name]) if weight.linear else weight for weight in module_weights
    )
    kinds = shape.kinds
    attends = {"full", "sliding", "chunked"} & set(kinds)
    attention: Attention = "mha" if attends else "none"
    if shape.latent:
        attention = "dsa" if shape.indexer else "mla"
    if shape.compressed:
        attention = "csa"
    recurrent = sum(kind in ("delta", "mamba2") for kind in kinds)
    return ModelFacts(
        **{item.name: getattr(shape, item.name) for item in fields(shape)},
        architecture=str((config.get("architectures") or [""])[0]),
        model_type=str(config.get("model_type") or shape.text_type),
        attention=attention,
        gpt_oss=shape.text_type == "gpt_oss",
        multimodal=any(isinstance(config.get(key), Mapping) for key in _ENCODERS),
        hybrid=recurrent > 0,
        parameters=sum(weight.parameters for weight in module_weights if weight.role != "mtp"),
        encoder_parameters=sum(weight.parameters for weight in module_weights if weight.role == "encoder"),
        layers=len(kinds),
        sliding_layers=kinds.count("sliding"),
        linear_layers=recurrent,
        context=_context(shape),
        quantization=next(iter(parameters.most_common(1)), ("none", 0))[0],
        schemes=tuple(sorted(parameters)),
        expert_schemes=expert_schemes(of_experts.get, shape.expert_layers),
        checkpoint_format=str(quantization.get("quant_method") or "unknown") if quantization else "none",
        group=max(filter(None, (_group(scheme, quantization) for scheme in parameters)), default=None),
        kv_cache_scheme="fp8" if cached else None,
        weights=_bytes(module_weights),
        counted=True,
        module_weights=module_weights,
        predictor=any(section.get(key) for section in (config, text_config(config)) for key in _PREDICTORS),
    )


def as_quantized(
    facts: ModelFacts,
    *,
    scheme: str,
    kv_cache: Literal["auto", "fp8"] = "auto",
    format: str = "quark",  # noqa: A002 - the recipe's own word
    assigned: Callable[[str], str | None] | None = None,
) -> ModelFacts:
    """Return the facts of a model after quantization: every linear layer of the decoder in ``scheme``.

    ``assigned`` returns the scheme of a module by its name, None for 16 bit; by default all get ``scheme``. Raises
    `UserError` for a scheme that is not in schemes.yaml. Whether a quantized source can be decoded, `select` decides.
    """
    if scheme not in table():
        raise UserError(f"found scheme {scheme!r}, expected one of {', '.join(table())}.")
    scheme_of = assigned or (lambda name: scheme)
    quantized = {
        weight.name: scheme_of(weight.name) for weight in facts.module_weights if weight.linear and weight.role != "mtp"
    }
    module_weights = tuple(
        weight.stored(quantized[weight.name]) if weight.name in quantized else weight for weight in facts.module_weights
    )
    divisor = table()[scheme].input_divisor
    return replace(
        facts,
        quantization=scheme,
        schemes=tuple(sorted({name for name in quantized.values() if name} or {scheme})),
        expert_schemes=expert_schemes(scheme_of, facts.expert_layers),
        checkpoint_format=format,
        group=divisor if divisor > 1 else None,
        kv_cache_scheme="fp8" if kv_cache == "fp8" else None,
        module_weights=module_weights,
        weights=_bytes(module_weights),
        counted=True,
    )


def _bytes(module_weights: tuple[ModuleWeight, ...]) -> int:
    return sum(weight.nbytes for weight in module_weights if weight.role != "mtp")


def _context(shape: Shape) -> int:
    """Return the context in tokens, by vLLM's rule (0.32 vllm/config/model.py, _get_and_verify_max_len).

    It is model_max_length of the configuration, or the smallest of the length fields, times the rope factor. YaRN's and
    Llama-3's configurations have the scaled length; long rope serves the original one, and Gemma 3's factor is left
    out. A tokenizer's model_max_length counts for pooling models only.
    """
    text = shape.fields
    lengths = [value for name in _LENGTHS if isinstance(value := text.get(name), int) and value > 0]
    length = float(text.get("model_max_length") or min(lengths, default=_DEFAULT_LENGTH))
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    # Either one set for all layers, or one for each type of layer.
    scalings = [rope] if "rope_type" in rope or "type" in rope else [part for part in rope.values() if part]
    for scaling in scalings:
        if not isinstance(scaling, Mapping) or "gemma3" in shape.text_type:
            continue
        kind = scaling.get("rope_type") or scaling.get("type")
        if kind == "longrope":
            return int(text.get("original_max_position_embeddings") or length)
        if kind not in _SCALED_ALREADY:
            return int(length * float(scaling.get("factor") or 1.0))
    return int(length)


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `quantization_config`, empty for 16 bit, with the type of DeepSeek V4's experts, declared beside it."""
    declared = declared_quantization(config)
    return {**declared, "expert_dtype": config.get("expert_dtype")} if declared else {}


def _declared(quantization: Mapping[str, Any], modules: Sequence[str]) -> tuple[Mapping[str, str | None], bool]:
    """Return the scheme of each of these linear modules, None for 16 bit, and whether there are FP8 cache scales."""
    method = str(quantization.get("quant_method") or "unknown")
    if method in _OURS:
        claims = layout_of_method(method).claims(quantization, modules)
        # A specification that the table lacks counts as FP8; its bytes are measured if there are shards.
        schemes = {module: "fp8" if module in claims.unknown else scheme for module, scheme in claims.schemes.items()}
        return schemes, claims.kv_cache or bool(quantization.get("kv_cache_quant_config"))
    in_16_bit = [str(pattern) for key in _EXCLUDED for pattern in quantization.get(key) or ()]
    scheme = _scheme(method, quantization)
    of_experts = "mxfp4" if quantization.get("expert_dtype") == "fp4" else scheme
    # gpt-oss keeps all modules but its experts in 16 bit, listed or not.
    schemes = {
        module: None
        if any(_matches(module, pattern) for pattern in in_16_bit) or (method == "mxfp4" and ".experts." not in module)
        else (of_experts if ".experts." in module else scheme)
        for module in modules
    }
    return schemes, str(quantization.get("kv_cache_quant_algo") or "").upper() == "FP8" or _kv_scales(quantization)


def _kv_scales(quantization: Mapping[str, Any]) -> bool:
    """Return whether ``kv_cache_scheme`` declares FP8 scales: "static" (ROCm guides), or ModelOpt's mapping."""
    declared = quantization.get("kv_cache_scheme")
    if isinstance(declared, Mapping):
        return (declared.get("type"), declared.get("num_bits")) == ("float", 8)  # vLLM 0.32 modelopt.py
    return declared == "static"


def _scheme(method: str, quantization: Mapping[str, Any]) -> str:
    if method in ("fp8", "fbgemm_fp8"):
        if quantization.get("weight_block_size"):
            return "fp8_block"
        return "ptpc_fp8" if method == "fbgemm_fp8" else "fp8"
    if method.startswith("modelopt"):
        return "nvfp4" if "FP4" in str(quantization.get("quant_algo")).upper() else "fp8"
    return {"awq_marlin": "awq", "gptq_marlin": "gptq"}.get(method, method)


def _group(scheme: str, quantization: Mapping[str, Any]) -> int | None:
    if scheme in table():
        divisor = table()[scheme].input_divisor
        return divisor if divisor > 1 else None
    size = quantization.get("group_size")
    if isinstance(size, int) and size > 0:
        return size
    return {"nvfp4": 16, "awq": 128, "gptq": 128}.get(scheme)


def _matches(module: str, pattern: str) -> bool:
    """Return whether an entry of an exclusion list matches a module: a name, part of one, a glob, or ``re:`` regex."""
    globs = (pattern, f"{pattern}.*", f"*.{pattern}", f"*.{pattern}.*")
    return matches(pattern, module) or any(fnmatch.fnmatchcase(module, glob) for glob in globs)

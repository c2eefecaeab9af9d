"""Tiny models of the architectures that both transformers and vLLM know, as their releases lie on disk.

    >>> build("qwen3_moe", Path("folder"))
    PosixPath('folder')

The tables beside this file (`*.yaml`) hold the configurations. Weights are random, but equal for equal names and seeds.
The other functions make variants of a folder: FP8 in blocks, predictors, tied heads, several files, extra tensors.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    import torch

_HERE = Path(__file__).parent
_TOKENIZER = _HERE.parents[1] / "recipes" / "tiny" / "model"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
KINDS = ("dense", "mixtures", "hybrids", "latent", "multimodal")

Tensors = dict[str, "torch.Tensor"]


@cache
def table() -> Mapping[str, Mapping[str, Any]]:
    """Return the entries of all tables by model name, each with `kind`, `model_type`, `architecture` and `config`."""
    entries: dict[str, Mapping[str, Any]] = {}
    for kind in KINDS:
        path = _HERE / f"{kind}.yaml"
        for name, entry in yaml.safe_load(path.read_text(encoding="utf-8")).items():
            if name.startswith("_"):
                continue
            if name in entries:
                raise ValueError(f"{path.name}: {name} is also in {entries[name]['kind']}.yaml")
            entries[name] = {"model_type": name, **entry, "kind": kind}
    return entries


def names(kind: str | None = None) -> tuple[str, ...]:
    """Return the names of all models, or of those in one table."""
    return tuple(name for name, entry in table().items() if kind in (None, entry["kind"]))


def configuration(name: str) -> Any:
    """Return the transformers configuration of a model."""
    from transformers import CONFIG_MAPPING

    entry = table()[name]
    return CONFIG_MAPPING[entry["model_type"]].from_dict(json.loads(json.dumps(entry["config"])))


def build(name: str, folder: Path, *, dtype: str = "bfloat16", seed: int = 0) -> Path:
    """Write the model to ``folder`` as its release would be: weights, config.json and a tokenizer; return the folder.

    ``dtype`` is bfloat16, float16 or float32. The weights lie in one file: `shard` cuts it into several.
    """
    import torch
    import transformers

    entry = table()[name]
    folder.mkdir(parents=True, exist_ok=True)
    model_class = getattr(transformers, entry.get("class", entry["architecture"]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(configuration(name)).float()
    _fill(model, seed)
    _cast(model, getattr(torch, dtype), entry.get("float32"))
    model.save_pretrained(folder, max_shard_size="5GB")
    _arrange(folder, entry)
    _write_config(folder, entry, dtype)
    (folder / "generation_config.json").unlink(missing_ok=True)
    for file in _TOKENIZER_FILES:
        shutil.copyfile(_TOKENIZER / file, folder / file)
    return folder


# Parameters whose values have a meaning of their own: decay rates, time steps, learned activations.
_MEANINGFUL = ("A_log", "dt_bias", "alpha_p", "alpha_n", "beta", "eps", "layer_scalar", "slope_rate")


def _fill(model: Any, seed: int) -> None:
    """Draw every matrix anew, with rows of different size, and give a value to all that is zero or not finite.

    One-dimensional parameters that the initialiser has set, norms of ones above all, stay.
    """
    import torch

    with torch.no_grad():
        for name, tensor in _stored(model):
            if not tensor.is_floating_point() or not tensor.numel():
                continue
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:6], "big"))
            sound = bool(tensor.isfinite().all() and tensor.any() and tensor.abs().max() < 1e3)
            if sound and (tensor.ndim < 2 or name.rpartition(".")[2] in _MEANINGFUL):
                continue
            if tensor.ndim < 2:
                tensor.copy_(0.02 * torch.randn(tensor.shape, generator=generator))
                continue
            inputs = max(tensor.shape[1:]) if tensor.ndim == 3 else math.prod(tensor.shape[1:])
            size = 0.5 if "embed" in name else 1 / math.sqrt(inputs)
            rows = torch.rand((*tensor.shape[:-1], 1), generator=generator) + 0.5
            tensor.copy_(size * rows * torch.randn(tensor.shape, generator=generator))


def _stored(model: Any) -> list[tuple[str, Any]]:
    """Parameters, and the buffers that are saved with them."""
    saved = model.state_dict().keys()
    return [*model.named_parameters(), *((name, value) for name, value in model.named_buffers() if name in saved)]


def _cast(model: Any, dtype: torch.dtype, float32: list[str] | None) -> None:
    """Convert to ``dtype``; leave in float32 the names that end with ``float32``, else those the class insists on."""
    import torch

    strict = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    for name, tensor in _stored(model):
        if tensor.is_floating_point():
            wide = name.endswith("e_score_correction_bias") or (
                any(part in name for part in strict) if float32 is None else name.endswith(tuple(float32))
            )
            tensor.data = tensor.data.to(torch.float32 if wide else dtype)
    for config in _configurations(model.config):
        config.dtype = dtype


def _configurations(config: Any) -> Iterator[Any]:
    yield config
    for key in config.sub_configs or {}:
        if (child := getattr(config, key, None)) is not None:
            yield from _configurations(child)


def _arrange(folder: Path, entry: Mapping[str, Any]) -> None:
    """Give tensors the names and the stacking of the release, where `save_pretrained` writes others."""
    patterns, stacked, transposed = entry.get("rename", {}), entry.get("stacked"), entry.get("transposed")
    if not (patterns or stacked or transposed):
        return
    tensors = read(folder)
    for pattern, replacement in patterns.items():
        tensors = {re.sub(pattern, replacement, name): tensor for name, tensor in tensors.items()}
    if stacked:
        tensors = stack_experts(tensors)
    if transposed:
        tensors = {n: t.transpose(1, 2) if ".experts." in n and t.ndim == 3 else t for n, t in tensors.items()}
    write(folder, tensors)


def _write_config(folder: Path, entry: Mapping[str, Any], dtype: str) -> None:
    """Add to config.json what the release names, and transformers translates or leaves out."""
    config = read_config(folder)
    _complete(config, entry["config"])
    named = {"architectures": [entry["architecture"]], "model_type": entry["model_type"], "dtype": dtype}
    write_config(folder, config | named)


def _complete(config: dict[str, Any], fields: Mapping[str, Any]) -> None:
    for key, value in fields.items():
        if isinstance(value, Mapping) and isinstance(config.get(key), dict):
            _complete(config[key], value)
        else:
            config.setdefault(key, value)


def read(folder: Path) -> Tensors:
    """Read all tensors of a folder, by its index where there is one."""
    from safetensors.torch import load_file

    index = folder / INDEX
    if not index.is_file():
        return load_file(folder / SINGLE)
    files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    return {name: tensor for file in files for name, tensor in load_file(folder / file).items()}


def write(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors into one file."""
    _save(tensors, folder / SINGLE)


def _save(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write config.json."""
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a config.json that describes the language model; changes to it change ``config``."""
    for key in ("thinker_config", "text_config"):
        if isinstance(config.get(key), dict):
            return text_config(config[key])
    return config


_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


def stack_experts(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Replace single experts by the stacks `gate_up_proj` [E, 2 I, H] and `down_proj` [E, H, I]."""
    import torch

    matches = [match for name in tensors if (match := _EXPERT.fullmatch(name))]
    stacks = {prefix: 1 + max(int(m[2]) for m in matches if m[1] == prefix) for prefix in {m[1] for m in matches}}
    stacked = {name: tensor for name, tensor in tensors.items() if not _EXPERT.fullmatch(name)}
    for prefix, count in sorted(stacks.items()):
        parts = {
            part: torch.stack([tensors[f"{prefix}.{expert}.{part}.weight"] for expert in range(count)])
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        stacked[f"{prefix}.gate_up_proj"] = torch.cat([parts["gate_proj"], parts["up_proj"]], dim=1)
        stacked[f"{prefix}.down_proj"] = parts["down_proj"]
    return stacked


def split_experts(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Replace the stacks of `stack_experts` by single experts."""
    split: Tensors = {}
    for name, tensor in tensors.items():
        prefix, _, last = name.rpartition(".")
        if tensor.ndim != 3 or last not in ("gate_up_proj", "down_proj"):
            split[name] = tensor
            continue
        parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
        for expert, matrix in enumerate(tensor):
            for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                split[f"{prefix}.{expert}.{part}.weight"] = rows.clone()
    return split


# Modules of a layer that releases in FP8 leave in 16 bit: routers, gates of shared experts, small projections of a
# state space or an indexer.
_SIXTEEN_BIT = re.compile(
    r"(^|\.)(gate|router|wg|shared_expert_gate|classifier|in_proj_[ab]|in_proj_ba|weights_proj|conv1d|[abf]_proj"
    r"|[fg]_[ab]_proj|eh_proj|fc|layer|A_log)$|norm|embed|vision|visual|audio|tower|projector|(^|\.)(lm_)?head$|tid2eid"
)
_LAYER = re.compile(r"(^|\.)(layers|h|blocks)\.\d+\.")


def encode_blocks(folder: Path, out: Path, block: int = 128) -> Path:
    """Copy a 16-bit model into ``out`` as DeepSeek's release in FP8: linear weights in blocks, F8_E4M3; return ``out``.

    ``X.weight`` [O, I] lies beside ``X.weight_scale_inv``, F32 [ceil(O / block), ceil(I / block)]. Stacks of experts
    become single experts. Norms, embeddings, the head, routers and towers stay as they are.
    """
    _copy(folder, out)
    encoded: Tensors = {}
    kept: list[str] = []
    for name, tensor in split_experts(read(out)).items():
        module = name.removesuffix(".weight")
        if tensor.ndim != 2 or module == name:
            encoded[name] = tensor
        elif _SIXTEEN_BIT.search(module) or not _LAYER.search(module):
            encoded[name] = tensor
            kept.append(module)
        else:
            encoded[name], encoded[f"{name}_scale_inv"] = to_blocks(tensor, block)
    write(out, encoded)
    declared = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [block, block],
        "modules_to_not_convert": sorted(kept),
    }
    write_config(out, {**read_config(out), "quantization_config": declared})
    return out


def to_blocks(weight: torch.Tensor, block: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode a matrix [O, I] as F8_E4M3 with a scale F32 for each block, by which its numbers are multiplied."""
    import torch

    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % block, 0, -rows % block))
    tiles = padded.unflatten(1, (-1, block)).unflatten(0, (-1, block))  # [O / block, block, I / block, block]
    scales = tiles.abs().amax(dim=(1, 3)).clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    codes = (tiles / scales[:, None, :, None]).reshape(padded.shape)[:rows, :columns]
    return codes.to(torch.float8_e4m3fn), scales


def encode_v4(folder: Path, out: Path) -> Path:
    """Copy a 16-bit DeepSeek V4 into ``out`` as its release stores it; return ``out``.

    Routed experts are MXFP4, ``X.weight`` I8 [O, I / 2] with ``X.scale`` F8_E8M0 [O, I / 32]. Other linear weights that
    a release quantizes are F8_E4M3 in blocks of 128 x 128 with ``X.scale`` F8_E8M0. The rest stays as it is.
    """
    import torch

    _copy(folder, out)
    encoded: Tensors = {}
    for name, tensor in read(out).items():
        module = name.removesuffix(".weight")
        if module == name or not _V4_BLOCKS.search(name):
            encoded[name] = tensor
        elif ".experts." in name:
            encoded[name], encoded[f"{module}.scale"] = _to_mxfp4(tensor)
        else:
            scales = to_blocks(tensor)[1].log2().ceil().exp2()  # powers of two, none below the block's own
            wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: len(tensor), : tensor.shape[1]]
            encoded[name] = (tensor.float() / wide).to(torch.float8_e4m3fn)
            encoded[f"{module}.scale"] = scales.to(torch.float8_e8m0fnu)
    write(out, encoded)
    declared = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0",
    }
    write_config(out, {**read_config(out), "expert_dtype": "fp4", "quantization_config": declared})
    return out


_V4_BLOCKS = re.compile(r"\.(w[123]|wq_a|wq_b|wkv|wo_a|wo_b|[eh]_proj)\.weight$(?<!compressor\.wkv\.weight)")


def _to_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode a matrix [O, I] as MXFP4: int8 [O, I / 2], low bits first, and F8_E8M0 [O, I / 32]."""
    import torch

    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    groups = weight.float().unflatten(1, (-1, 32))
    scales = (groups.abs().amax(2) / 6).clamp(min=2.0**-126).log2().ceil().exp2()
    quotient = groups / scales.unsqueeze(2)
    codes = (quotient.abs().unsqueeze(-1) - values).abs().argmin(-1) + 8 * (quotient < 0)
    low, high = codes.flatten(1).unflatten(1, (-1, 2)).unbind(-1)
    return (low | high << 4).to(torch.uint8).view(torch.int8), scales.to(torch.float8_e8m0fnu)


def encode_int4(folder: Path, out: Path, group: int = 32) -> Path:
    """Copy a 16-bit model into ``out`` as Kimi's releases: single experts in INT4, in groups of inputs; return ``out``.

    ``X.weight_packed`` I32 [O, I / 8] lies beside ``X.weight_scale`` [O, I / group] and ``X.weight_shape``.
    """
    import torch

    from quantmint.pipeline.quantize.schemes.elements import pack_int4

    _copy(folder, out)
    encoded: Tensors = {}
    for name, tensor in split_experts(read(out)).items():
        if _EXPERT.fullmatch(name) is None:
            encoded[name] = tensor
            continue
        groups = tensor.float().unflatten(1, (-1, group))
        scales = (groups.abs().amax(dim=2) / 7.5).to(tensor.dtype)
        numbers = (groups / scales.float().unsqueeze(2)).round().clamp(-8, 7).flatten(1)
        encoded[f"{name}_packed"], encoded[f"{name}_scale"] = pack_int4(numbers), scales
        encoded[f"{name}_shape"] = torch.tensor(tensor.shape, dtype=torch.int32)
    write(out, encoded)
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group, "symmetric": True}
    declared = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    }
    write_config(out, {**read_config(out), "quantization_config": declared})
    return out


def add_predictor(folder: Path, style: str, *, stacked: bool = True) -> None:
    """Add a multi-token predictor of one layer to a folder, and the field of config.json that announces it.

    Style "deepseek" is another layer of the model: ``model.layers.{N}`` with its own embedding and head. Style "qwen"
    is ``mtp.*`` (Qwen3-Next, Qwen3.5), a layer with attention that is not linear; ``stacked`` says whether its experts
    are one tensor for all (Qwen3.5) or single ones (Qwen3-Next).
    """
    tensors, config = read(folder), read_config(folder)
    text = text_config(config)
    prefix, count = _last_layer(tensors, quadratic=style == "qwen")
    inside = f"{prefix}."
    layer = {name.removeprefix(inside): tensor for name, tensor in tensors.items() if name.startswith(inside)}
    layer = {name: (tensor * 0.875).to(tensor.dtype) for name, tensor in layer.items()}  # no bytes of another layer
    hidden, embedding = text["hidden_size"], next(n for n in tensors if n.endswith("embed_tokens.weight"))
    norm, matrix = tensors[embedding].new_ones(hidden), _matrix(tensors[embedding], hidden)
    if style == "deepseek":
        root = f"{prefix.rpartition('.')[0]}.{count}"
        table_of_tokens = tensors[embedding]
        tensors |= {f"{root}.{name}": tensor for name, tensor in layer.items()}
        tensors |= {f"{root}.{name}.weight": norm.clone() for name in ("enorm", "hnorm", "shared_head.norm")}
        tensors |= {f"{root}.{name}.weight": table_of_tokens.clone() for name in ("embed_tokens", "shared_head.head")}
        tensors[f"{root}.eh_proj.weight"] = matrix
        text["num_nextn_predict_layers"] = 1
    elif style == "qwen":
        layer = stack_experts(layer) if stacked else split_experts(layer)
        tensors |= {f"mtp.layers.0.{name}": tensor for name, tensor in layer.items()}
        norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
        tensors |= {f"mtp.{name}.weight": norm.clone() for name in norms}
        tensors["mtp.fc.weight"] = matrix
        text["mtp_num_hidden_layers"] = 1
    else:
        raise ValueError(f"style: found {style!r}, expected deepseek or qwen")
    write(folder, tensors)
    write_config(folder, config)


def _last_layer(tensors: Mapping[str, torch.Tensor], *, quadratic: bool) -> tuple[str, int]:
    """Return the prefix of the last layer, or of the last with usual attention, and the number of layers."""
    pattern = re.compile(r"(.*\blayers)\.(\d+)\..*")
    matches = [m for n in tensors if (m := pattern.fullmatch(n)) and not re.search("vis|audio|tower|mtp", n)]
    chosen = [m for m in matches if "self_attn" in m[0]] if quadratic else matches
    number = max(int(match[2]) for match in chosen)
    return f"{chosen[0][1]}.{number}", 1 + max(int(match[2]) for match in matches)


def _matrix(like: torch.Tensor, hidden: int) -> torch.Tensor:
    import torch

    generator = torch.Generator().manual_seed(hidden)
    return (torch.randn(hidden, 2 * hidden, generator=generator) / math.sqrt(2 * hidden)).to(like.dtype)


def tie_head(folder: Path) -> None:
    """Remove the output head from a folder, and have config.json tie it to the embedding."""
    tensors, config = read(folder), read_config(folder)
    write(folder, {name: tensor for name, tensor in tensors.items() if not name.endswith("lm_head.weight")})
    for part in (config, text_config(config)):
        part["tie_word_embeddings"] = True
    write_config(folder, config)


def shard(folder: Path, files: int = 2, *, stale: bool = False) -> None:
    """Cut the weights into several files with an index; leave the old single file beside them where ``stale``.

    What the stale file holds are other weights: whoever reads it reads the wrong model.
    """
    tensors = read(folder)
    order = sorted(tensors)
    places: dict[str, str] = {}
    for number in range(files):
        file = f"model-{number + 1:05}-of-{files:05}.safetensors"
        part = order[number * len(order) // files : (number + 1) * len(order) // files]
        _save({name: tensors[name] for name in part}, folder / file)
        places |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if stale:
        write(folder, {name: tensor.flip(0) if tensor.ndim else tensor for name, tensor in tensors.items()})
    else:
        (folder / SINGLE).unlink()


def add_tensors(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Add tensors of ones that no module of the model has."""
    import torch

    tensors = read(folder)
    dtype = next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())
    write(folder, tensors | {name: torch.ones(shape, dtype=dtype) for name, shape in shapes.items()})


def _copy(folder: Path, out: Path) -> None:
    """Copy a folder, its weights into one file."""
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors", INDEX))
    write(out, read(folder))


Variant = Callable[[Path], None]
VARIANTS: Mapping[str, Variant] = {
    "tied": tie_head,
    "shards": shard,
    "stale": lambda folder: shard(folder, stale=True),
    "rotary": lambda folder: add_tensors(folder, {"model.layers.0.self_attn.rotary_emb.inv_freq": (16,)}),
    "unknown": lambda folder: add_tensors(folder, {"model.layers.0.self_attn.unknown_proj.weight": (64, 128)}),
}
"""Changes to a folder of one file, by name: those that a release may have and whoever reads it must tell apart."""


def variant(name: str, folder: Path, out: Path) -> Path:
    """Copy a model into ``out`` with one of the `VARIANTS`; return ``out``."""
    _copy(folder, out)
    VARIANTS[name](out)
    return out

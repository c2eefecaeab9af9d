"""The compressed-tensors layout, as llm-compressor 0.14 writes it (compressed-tensors 0.19)."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from pipeline.quantize.formats.layout import Choice, Claims

_VERSION = "0.19.0"  # of the format, not of a library that would have to be installed
_ARGUMENTS: Mapping[str, Any] = {
    "actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "num_bits": 8, "observer": None,
    "observer_kwargs": {}, "scale_dtype": None, "strategy": "tensor", "symmetric": True, "type": "float",
    "zp_dtype": None,
}  # fmt: skip
_WEIGHT_OBSERVER = {"observer": "memoryless_minmax"}
_MX = {"num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
_MX8 = {**_MX, "num_bits": 8}
# scheme: (storage format, weights, input activations); None: not quantized.
_GROUPS: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any] | None]] = {
    "ptpc_fp8": (
        "float-quantized",
        {"strategy": "channel", **_WEIGHT_OBSERVER},
        {"strategy": "token", "dynamic": True},
    ),
    "fp8": ("float-quantized", _WEIGHT_OBSERVER, {"observer": "static_minmax"}),
    "fp8_block": (
        "float-quantized",
        {"strategy": "block", "block_structure": [128, 128], **_WEIGHT_OBSERVER},
        {"strategy": "group", "group_size": 128, "dynamic": True},
    ),
    "mxfp4": ("mxfp4-pack-quantized", {**_MX, **_WEIGHT_OBSERVER}, {**_MX, "dynamic": True}),
    "mxfp4_weight_only": ("mxfp4-pack-quantized", {**_MX, **_WEIGHT_OBSERVER}, None),
    "mxfp8": ("mxfp8-quantized", {**_MX8, **_WEIGHT_OBSERVER}, {**_MX8, "dynamic": True}),
    "int8_w8a8": (
        "int-quantized",
        {"type": "int", "strategy": "channel", **_WEIGHT_OBSERVER},
        {"type": "int", "strategy": "token", "dynamic": True},
    ),
    "w4a16": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, **_WEIGHT_OBSERVER},
        None,
    ),
}
_DECISIVE = ("num_bits", "type", "strategy", "dynamic", "symmetric", "group_size", "block_structure")


class CompressedTensors:
    """compressed-tensors: one config group a scheme, exact names in ``ignore``, KV scales beside the attention."""

    name = "compressed-tensors"

    def quantization_config(self, choice: Choice) -> dict[str, Any]:
        """See `Layout`. With one scheme the group targets the class ``Linear``; with several, exact names."""
        groups: dict[str, Any] = {}
        used = sorted(set(choice.schemes.values()), key=lambda scheme: (scheme != choice.default, scheme))
        for number, scheme in enumerate(used):
            storage, weights, inputs = _GROUPS[scheme]
            names = sorted(module for module, chosen in choice.schemes.items() if chosen == scheme)
            groups[f"group_{number}"] = {
                "format": storage,
                "input_activations": None if inputs is None else {**_ARGUMENTS, **inputs},
                "output_activations": None,
                "targets": ["Linear"] if len(used) == 1 else names,
                "weights": {**_ARGUMENTS, **weights},
            }
        formats = {group["format"] for group in groups.values()}
        return {
            "config_groups": groups,
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "global_compression_ratio": None,
            "ignore": sorted(choice.kept),
            "kv_cache_scheme": _kv_cache(choice),
            "quant_method": self.name,
            "quantization_status": "compressed",
            "sparsity_config": {},
            "transform_config": {},
            "version": _VERSION,
        }

    def claims(self, config: Mapping[str, Any], modules: Collection[str]) -> Claims:
        """See `Layout`. A target or an ignored name is exact, a class name, or ``re:`` with a regular expression."""
        ignore = tuple(config.get("ignore") or ())
        groups = tuple((config.get("config_groups") or {}).values())
        schemes: dict[str, str | None] = {}
        unknown: dict[str, str] = {}
        for module in modules:
            schemes[module] = None
            if any(_matches(module, pattern) for pattern in ignore):
                continue
            group = next((g for g in groups if any(_matches(module, t) for t in g.get("targets") or ())), None)
            if group is not None:
                schemes[module] = _recognise(group)
                if schemes[module] is None:
                    unknown[module] = f"weights {_short(group.get('weights'))}"
        return Claims(schemes, unknown, bool(config.get("kv_cache_scheme")))

    def kv_scale_names(self, attention: str) -> tuple[str, str]:
        """See `Layout`."""
        return f"{attention}.k_scale", f"{attention}.v_scale"

    def kv_scale_shape(self, heads: int | None = None) -> tuple[int, ...]:
        """See `Layout`."""
        return (1,) if heads is None else (heads, 1, 1)


def _kv_cache(choice: Choice) -> dict[str, Any] | None:
    if not choice.kv_cache:
        return None
    strategy = "attn_head" if choice.kv_per_head else "tensor"
    return {**_ARGUMENTS, "observer": "static_minmax", "strategy": strategy}


def _matches(module: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return pattern in (module, "Linear")


def _recognise(group: Mapping[str, Any]) -> str | None:
    def same(found: Mapping[str, Any] | None, expected: Mapping[str, Any] | None) -> bool:
        if found is None or expected is None:
            return found is expected
        full = {**_ARGUMENTS, **expected}
        return all(found.get(key) == full[key] for key in _DECISIVE if key in found)

    for scheme, (_, weights, inputs) in _GROUPS.items():
        if same(group.get("weights"), weights) and same(group.get("input_activations"), inputs):
            return scheme
    return None


def _short(arguments: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{key}={(arguments or {}).get(key)}" for key in _DECISIVE)

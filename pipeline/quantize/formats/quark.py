"""The Quark layout, as amd-quark 0.13 exports a model that was quantized in memory."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Mapping
from typing import Any

from pipeline.base.errors import UserError
from pipeline.quantize.formats.layout import Choice, Claims

_VERSION = "0.13"
_KV_GROUP = ("*k_proj", "*v_proj")
_SPEC: Mapping[str, Any] = {
    "block_size": None, "ch_axis": None, "dtype": "fp8_e4m3", "enable_buffer_reuse": False, "group_size": None,
    "is_dynamic": False, "is_scale_quant": False, "max_input_numel": 4194304, "mx_element_dtype": None,
    "observer_cls": "PerTensorMinMaxObserver", "qscheme": "per_tensor", "round_method": "half_even",
    "scale_calculation_mode": None, "scale_format": None, "scale_type": "float", "symmetric": True,
    "zero_point_type": "int32",
}  # fmt: skip
_CHANNEL = {"qscheme": "per_channel", "observer_cls": "PerChannelMinMaxObserver"}
_MX = {
    "dtype": "fp4", "qscheme": "per_group", "group_size": 32, "ch_axis": -1, "scale_format": "e8m0",
    "scale_calculation_mode": "even", "observer_cls": "PerBlockMXObserver", "symmetric": None,
}  # fmt: skip
# scheme: (weight, input tensors); None: not quantized.
_SPECS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any] | None]] = {
    "ptpc_fp8": ({**_CHANNEL, "ch_axis": 0}, {**_CHANNEL, "ch_axis": 1, "is_dynamic": True}),
    "fp8": ({}, {}),
    "mxfp4": (_MX, {**_MX, "is_dynamic": True}),
    "mxfp4_weight_only": (_MX, None),
    "mxfp4_fp8": (_MX, {"scale_type": None}),
    "mxfp6_e2m3": ({**_MX, "dtype": "fp6_e2m3"}, {**_MX, "dtype": "fp6_e2m3", "is_dynamic": True}),
    "mxfp6_e3m2": ({**_MX, "dtype": "fp6_e3m2"}, {**_MX, "dtype": "fp6_e3m2", "is_dynamic": True}),
    "int8_w8a8": (
        {**_CHANNEL, "dtype": "int8", "ch_axis": 0},
        {**_CHANNEL, "dtype": "int8", "ch_axis": 1, "is_dynamic": True},
    ),
    "w4a16": (
        {
            "dtype": "int4",
            "qscheme": "per_group",
            "group_size": 128,
            "ch_axis": -1,
            "observer_cls": "PerGroupMinMaxObserver",
        },
        None,
    ),
}
_DECISIVE = ("dtype", "qscheme", "is_dynamic", "group_size")


class Quark:
    """Quark: a global spec, per-layer specs, exact names in ``exclude``, KV scales as outputs of k_proj and v_proj."""

    name = "quark"

    def quantization_config(self, choice: Choice) -> dict[str, Any]:
        """See `Layout`. Modules of another scheme than the most frequent are written with exact names.

        The KV entries use Quark's own two patterns, or exact names where a k_proj or v_proj has a scheme of its own:
        a name then matches one key only, and the order of keys, which is sorted on disk, cannot change the meaning.
        """
        default = _layer(choice.default)
        layers: dict[str, Any] = {
            module: _layer(scheme) for module, scheme in choice.schemes.items() if scheme != choice.default
        }
        cached = {m: scheme for m, scheme in choice.schemes.items() if any(_matches(m, key) for key in _KV_GROUP)}
        if layers.keys().isdisjoint(cached):
            cached = dict.fromkeys(_KV_GROUP, choice.default)
        output = {"output_tensors": {**_SPEC, "scale_type": None}}
        cache = {key: {**_layer(scheme), **output} for key, scheme in cached.items()} if choice.kv_cache else {}
        return {
            "algo_config": None,
            "exclude": sorted(choice.kept),
            "export": {
                "kv_cache_group": list(_KV_GROUP) if choice.kv_cache else [],
                "min_kv_scale": 0.0,
                "pack_method": "reorder",
                "weight_format": "real_quantized",
                "weight_merge_groups": None,
            },
            "global_quant_config": default,
            "kv_cache_post_rope": choice.kv_cache,
            "kv_cache_quant_config": cache,
            "layer_quant_config": {**layers, **cache},
            "layer_type_quant_config": {},
            "quant_method": self.name,
            "quant_mode": "eager_mode",
            "softmax_quant_spec": None,
            "version": _VERSION,
        }

    def claims(self, config: Mapping[str, Any], modules: Collection[str]) -> Claims:
        """See `Layout`. The order of look-ups is vLLM's: excluded, by layer, global."""
        exclude = tuple(config.get("exclude") or ())
        layers: Mapping[str, Any] = config.get("layer_quant_config") or {}
        fallback: Mapping[str, Any] = config.get("global_quant_config") or {}
        schemes: dict[str, str | None] = {}
        unknown: dict[str, str] = {}
        for module in modules:
            schemes[module] = None
            if any(_matches(module, pattern) for pattern in exclude):
                continue
            spec = next((value for key, value in layers.items() if fnmatch.fnmatchcase(module, key)), fallback)
            if spec:
                schemes[module] = _recognise(spec)
                if schemes[module] is None:
                    unknown[module] = f"weight {_short(spec.get('weight'))}"
        group = (config.get("export") or {}).get("kv_cache_group")
        return Claims(schemes, unknown, bool(group))

    def kv_scale_names(self, attention: str) -> tuple[str, str]:
        """See `Layout`."""
        return f"{attention}.k_proj.output_scale", f"{attention}.v_proj.output_scale"

    def kv_scale_shape(self, heads: int | None = None) -> tuple[int, ...]:
        """See `Layout`. There are no scales by head."""
        if heads is not None:
            raise UserError("the format quark has no KV scales by head; it has one for K and one for V of a layer.")
        return ()


def _layer(scheme: str) -> dict[str, Any]:
    weight, inputs = _SPECS[scheme]
    return {
        "bias": None,
        "input_tensors": None if inputs is None else {**_SPEC, **inputs},
        "output_tensors": None,
        "target_device": None,
        "weight": {**_SPEC, **weight},
    }


def _matches(module: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return module == pattern or fnmatch.fnmatchcase(module, pattern)


def _recognise(spec: Mapping[str, Any]) -> str | None:
    def same(found: Mapping[str, Any] | None, expected: Mapping[str, Any] | None) -> bool:
        if not found or expected is None:
            return not found and expected is None
        full = {**_SPEC, **expected}
        # Of integers the zero point must be zero; floating-point formats have none, and some exports say null.
        asymmetric = str(full["dtype"]).startswith("int") and found.get("symmetric") is not True
        return not asymmetric and all(found.get(key) == full[key] for key in _DECISIVE)

    for scheme, (weight, inputs) in _SPECS.items():
        if same(spec.get("weight"), weight) and same(spec.get("input_tensors"), inputs):
            return scheme
    return None


def _short(spec: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{key}={(spec or {}).get(key)}" for key in _DECISIVE)

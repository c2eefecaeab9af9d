"""The two layouts that vLLM loads: what their configurations say, and the tensors that each stores for a module.

A layout writes a model's ``quantization_config`` from a `Choice`, and reads one back into `Claims`: what the
configuration promises about each linear module and about the KV cache. `inspect` holds the promise against the files.
What is stored for a quantized module is in the table ``tensors.yaml``.
"""

from __future__ import annotations

import fnmatch
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from math import ceil
from typing import Any, ClassVar

import yaml

from pipeline.base.errors import UserError
from pipeline.quantize.formats.checkpoint import tensor_bytes


@dataclass(frozen=True, slots=True)
class Choice:
    """What was done to a model.

    ``schemes`` maps each quantized linear module to its scheme; ``kept`` are the modules with a two-dimensional
    weight that stay in 16 bit, routers included, because vLLM must be told about each of them; ``kv_cache`` is
    whether static FP8 scales are stored for the attention modules, ``kv_per_head`` whether there is one a KV head.
    """

    schemes: Mapping[str, str]
    kept: tuple[str, ...]
    kv_cache: bool
    kv_per_head: bool = False

    @property
    def default(self) -> str:
        """The scheme of the most modules; the first by name where two are as frequent."""
        names = list(self.schemes.values())
        return max(sorted(set(names)), key=names.count)


@dataclass(frozen=True, slots=True)
class Claims:
    """What a ``quantization_config`` promises: a scheme, or None for 16 bit, per module; None also for an unknown one.

    ``unknown`` holds descriptions of settings that are not in the table of schemes, by module.
    """

    schemes: Mapping[str, str | None]
    unknown: Mapping[str, str]
    kv_cache: bool


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor that belongs in a checkpoint; ``role`` is its name's last part in the format's table."""

    name: str
    role: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size on disk, bytes."""
        return tensor_bytes(self.dtype, self.shape)


@cache
def _table() -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    text = resources.files("pipeline.quantize.formats").joinpath("tensors.yaml").read_text(encoding="utf-8")
    table: dict[str, dict[str, dict[str, dict[str, Any]]]] = yaml.safe_load(text)
    return table


def stores(checkpoint_format: str, scheme: str) -> bool:
    """Whether the format has a layout for the scheme."""
    return scheme in _table().get(checkpoint_format, {})


def weight_tensors(
    checkpoint_format: str, scheme: str, module: str, shape: tuple[int, int], scale_dtype: str
) -> tuple[StoredTensor, ...]:
    """What is stored for a linear module whose 16-bit weight is ``shape`` = [O, I].

    Raises `UserError` where the format has no layout for the scheme.
    """
    if not stores(checkpoint_format, scheme):
        known = ", ".join(sorted(_table().get(checkpoint_format, {})))
        raise UserError(f"the format {checkpoint_format} has no layout for {scheme}; it has: {known}.")
    return tuple(
        StoredTensor(
            f"{module}.{role}",
            role,
            scale_dtype if entry["dtype"] == "scale" else entry["dtype"],
            tuple(_dimension(token, shape) for token in entry["shape"]),
        )
        for role, entry in _table()[checkpoint_format][scheme].items()
    )


def _dimension(token: str | int, shape: tuple[int, int]) -> int:
    if isinstance(token, int):
        return token
    product, _, divisor = token.partition("/")
    symbol, _, factor = product.partition("*")
    value = {"O": shape[0], "I": shape[1]}[symbol] * int(factor or 1)
    return ceil(value / int(divisor)) if divisor else value


class Layout(ABC):
    """A checkpoint format."""

    name: ClassVar[str]
    _weights: ClassVar[str]
    _decisive: ClassVar[tuple[str, ...]]

    @abstractmethod
    def quantization_config(self, choice: Choice) -> dict[str, Any]:
        """The value of ``quantization_config`` in ``config.json``."""

    @abstractmethod
    def kv_scale_names(self, attention: str) -> tuple[str, str]:
        """The names of the K and the V scale of an attention module."""

    @abstractmethod
    def kv_scale_shape(self, heads: int | None = None) -> tuple[int, ...]:
        """The shape of a KV scale: one for a layer, or one for each of its ``heads``.

        Raises `UserError` where the format has no scales by head.
        """

    def claims(self, config: Mapping[str, Any], modules: Collection[str]) -> Claims:
        """What such a value promises about these linear modules."""
        schemes: dict[str, str | None] = {}
        unknown: dict[str, str] = {}
        for module in modules:
            settings = self._settings(config, module)
            schemes[module] = self._recognise(settings) if settings else None
            if settings and schemes[module] is None:
                found = settings.get(self._weights) or {}
                unknown[module] = f"{self._weights} {', '.join(f'{key}={found.get(key)}' for key in self._decisive)}"
        return Claims(schemes, unknown, self._has_kv_cache(config))

    @abstractmethod
    def _settings(self, config: Mapping[str, Any], module: str) -> Mapping[str, Any] | None:
        """What holds for a module; nothing where it stays in 16 bit."""

    @abstractmethod
    def _recognise(self, settings: Mapping[str, Any]) -> str | None:
        """The scheme that has such settings."""

    @abstractmethod
    def _has_kv_cache(self, config: Mapping[str, Any]) -> bool: ...


# compressed-tensors, as llm-compressor 0.14 writes it (compressed-tensors 0.19).
_CT_VERSION = "0.19.0"  # of the format, not of a library that would have to be installed
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


class CompressedTensors(Layout):
    """compressed-tensors: one config group a scheme, exact names in ``ignore``, KV scales beside the attention."""

    name = "compressed-tensors"
    _weights = "weights"
    _decisive = ("num_bits", "type", "strategy", "dynamic", "symmetric", "group_size", "block_structure")

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
        strategy = "attn_head" if choice.kv_per_head else "tensor"
        cache = {**_ARGUMENTS, "observer": "static_minmax", "strategy": strategy}
        formats = {group["format"] for group in groups.values()}
        return {
            "config_groups": groups,
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "global_compression_ratio": None,
            "ignore": sorted(choice.kept),
            "kv_cache_scheme": cache if choice.kv_cache else None,
            "quant_method": self.name,
            "quantization_status": "compressed",
            "sparsity_config": {},
            "transform_config": {},
            "version": _CT_VERSION,
        }

    def kv_scale_names(self, attention: str) -> tuple[str, str]:
        """See `Layout`."""
        return f"{attention}.k_scale", f"{attention}.v_scale"

    def kv_scale_shape(self, heads: int | None = None) -> tuple[int, ...]:
        """See `Layout`."""
        return (1,) if heads is None else (heads, 1, 1)

    def _settings(self, config: Mapping[str, Any], module: str) -> Mapping[str, Any] | None:
        # A target or an ignored name is exact, a class name, or "re:" with a regular expression.
        def among(patterns: Collection[str] | None) -> bool:
            return any(_expression(module, one) or one in (module, "Linear") for one in patterns or ())

        groups: Collection[Mapping[str, Any]] = (config.get("config_groups") or {}).values()
        if among(config.get("ignore")):
            return None
        return next((group for group in groups if among(group.get("targets"))), None)

    def _recognise(self, settings: Mapping[str, Any]) -> str | None:
        def same(found: Mapping[str, Any] | None, expected: Mapping[str, Any] | None) -> bool:
            if found is None or expected is None:
                return found is expected
            full = {**_ARGUMENTS, **expected}
            return all(found.get(key) == full[key] for key in self._decisive if key in found)

        for scheme, (_, weights, inputs) in _GROUPS.items():
            if same(settings.get("weights"), weights) and same(settings.get("input_activations"), inputs):
                return scheme
        return None

    def _has_kv_cache(self, config: Mapping[str, Any]) -> bool:
        return bool(config.get("kv_cache_scheme"))


# Quark, as amd-quark 0.13 exports a model that was quantized in memory.
_QUARK_VERSION = "0.13"
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


class Quark(Layout):
    """Quark: a global spec, per-layer specs, exact names in ``exclude``, KV scales as outputs of k_proj and v_proj."""

    name = "quark"
    _weights = "weight"
    _decisive = ("dtype", "qscheme", "is_dynamic", "group_size")

    def quantization_config(self, choice: Choice) -> dict[str, Any]:
        """See `Layout`. Modules of another scheme than the most frequent are written with exact names.

        The KV entries use Quark's own two patterns, or exact names where a k_proj or v_proj has a scheme of its own:
        a name then matches one key only, and the order of keys, which is sorted on disk, cannot change the meaning.
        """
        default = _quark_layer(choice.default)
        layers: dict[str, Any] = {
            module: _quark_layer(scheme) for module, scheme in choice.schemes.items() if scheme != choice.default
        }
        cached = {
            m: scheme for m, scheme in choice.schemes.items() if any(fnmatch.fnmatchcase(m, key) for key in _KV_GROUP)
        }
        if layers.keys().isdisjoint(cached):
            cached = dict.fromkeys(_KV_GROUP, choice.default)
        output = {"output_tensors": {**_SPEC, "scale_type": None}}
        cache = {key: {**_quark_layer(scheme), **output} for key, scheme in cached.items()} if choice.kv_cache else {}
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
            "version": _QUARK_VERSION,
        }

    def kv_scale_names(self, attention: str) -> tuple[str, str]:
        """See `Layout`."""
        return f"{attention}.k_proj.output_scale", f"{attention}.v_proj.output_scale"

    def kv_scale_shape(self, heads: int | None = None) -> tuple[int, ...]:
        """See `Layout`. There are no scales by head."""
        if heads is not None:
            raise UserError("the format quark has no KV scales by head; it has one for K and one for V of a layer.")
        return ()

    def _settings(self, config: Mapping[str, Any], module: str) -> Mapping[str, Any] | None:
        # The order of look-ups is vLLM's: excluded, by layer, global.
        exclude: Collection[str] = config.get("exclude") or ()
        if any(_expression(module, one) or module == one or fnmatch.fnmatchcase(module, one) for one in exclude):
            return None
        layers: Mapping[str, Any] = config.get("layer_quant_config") or {}
        fallback: Mapping[str, Any] | None = config.get("global_quant_config")
        return next((found for key, found in layers.items() if fnmatch.fnmatchcase(module, key)), fallback)

    def _recognise(self, settings: Mapping[str, Any]) -> str | None:
        def same(found: Mapping[str, Any] | None, expected: Mapping[str, Any] | None) -> bool:
            if not found or expected is None:
                return not found and expected is None
            full = {**_SPEC, **expected}
            # Of integers the zero point must be zero; floating-point formats have none, and some exports say null.
            asymmetric = str(full["dtype"]).startswith("int") and found.get("symmetric") is not True
            return not asymmetric and all(found.get(key) == full[key] for key in self._decisive)

        for scheme, (weight, inputs) in _SPECS.items():
            if same(settings.get("weight"), weight) and same(settings.get("input_tensors"), inputs):
                return scheme
        return None

    def _has_kv_cache(self, config: Mapping[str, Any]) -> bool:
        return bool((config.get("export") or {}).get("kv_cache_group"))


def _quark_layer(scheme: str) -> dict[str, Any]:
    weight, inputs = _SPECS[scheme]
    return {
        "bias": None,
        "input_tensors": None if inputs is None else {**_SPEC, **inputs},
        "output_tensors": None,
        "target_device": None,
        "weight": {**_SPEC, **weight},
    }


def _expression(module: str, pattern: str) -> bool:
    return pattern.startswith("re:") and re.match(pattern[3:], module) is not None


_LAYOUTS: Mapping[str, Layout] = {known.name: known for known in (CompressedTensors(), Quark())}


def layout(name: str) -> Layout:
    """The layout of that name; raise `UserError` for one that is not there."""
    if name not in _LAYOUTS:
        raise UserError(f"unknown checkpoint format {name!r}; known: {', '.join(_LAYOUTS)}.")
    return _LAYOUTS[name]


def layout_of(config: Mapping[str, Any]) -> Layout:
    """The layout that a model's ``config.json`` declares."""
    declared = config.get("quantization_config")
    if not isinstance(declared, Mapping):
        raise UserError("config.json has no quantization_config: this is not a quantized checkpoint.")
    return layout(str(declared.get("quant_method")))

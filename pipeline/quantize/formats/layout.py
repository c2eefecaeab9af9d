"""The two layouts that vLLM loads: what their configurations say, and the tensors that each stores for a module.

A layout writes a model's ``quantization_config`` from a `Choice`, and reads one back into `Claims`: what the
configuration promises about each linear module and about the KV cache. `inspect` holds the promise against the files.
What is stored for a quantized module is in the table ``tensors.yaml``.
"""

from __future__ import annotations

import fnmatch
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import Any, ClassVar

from quantmint.pipeline.base.data import load_table
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.quantize.formats.checkpoint import tensor_bytes
from quantmint.pipeline.quantize.formats.choice import Choice
from quantmint.pipeline.recipe.modules import matches as matches_module


@dataclass(frozen=True, slots=True)
class Claims:
    """The claims of a ``quantization_config`` on each module: its scheme, or None for 16 bit and for unknown settings.

    ``unknown`` describes the settings of modules that match no scheme in the table; ``kv_cache`` is whether an FP8 KV
    cache is declared.
    """

    schemes: Mapping[str, str | None]
    unknown: Mapping[str, str]
    kv_cache: bool


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor that belongs in a checkpoint; ``role`` is the last part of its name in the format's table, or "copy"."""

    name: str
    role: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Return the size on disk in bytes."""
        return tensor_bytes(self.dtype, self.shape)


def _table(name: str) -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    table: dict[str, dict[str, dict[str, dict[str, Any]]]] = load_table(__file__, name)
    return table


@cache
def _declared(checkpoint_format: str, scheme: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return all settings that a format declares for a scheme's weights and inputs; None for inputs not quantized."""
    table = _table("layouts.yaml")[checkpoint_format]
    row = table["schemes"][scheme]
    inputs = row["inputs"]
    return {**table["defaults"], **row["weights"]}, None if inputs is None else {**table["defaults"], **inputs}


def stores(checkpoint_format: str, scheme: str) -> bool:
    """Return whether a checkpoint format can store a scheme."""
    return scheme in _table("tensors.yaml").get(checkpoint_format, {})


def weight_tensors(
    checkpoint_format: str, scheme: str, module: str, shape: tuple[int, int], scale_dtype: str
) -> tuple[StoredTensor, ...]:
    """Return the tensors stored for a linear module whose 16-bit weight has ``shape`` [O, I].

    Scales that take the weight's dtype get ``scale_dtype``, a safetensors dtype. Raises `UserError` where the format
    has no layout for the scheme.
    """
    if not stores(checkpoint_format, scheme):
        stored_schemes = ", ".join(sorted(_table("tensors.yaml").get(checkpoint_format, {})))
        raise UserError(f"the format {checkpoint_format} has no layout for {scheme}; it has: {stored_schemes}.")
    parts = _parts(checkpoint_format, scheme, shape, scale_dtype)
    return tuple(StoredTensor(f"{module}.{role}", role, dtype, dimensions) for role, dtype, dimensions in parts)


@cache  # a model of 70,000 modules has some ten shapes
def _parts(
    checkpoint_format: str, scheme: str, shape: tuple[int, int], scale_dtype: str
) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """Return role, dtype and shape of each tensor of `weight_tensors`."""
    return tuple(
        (
            role,
            scale_dtype if entry["dtype"] == "scale" else entry["dtype"],
            tuple(_dimension(token, shape) for token in entry["shape"]),
        )
        for role, entry in _table("tensors.yaml")[checkpoint_format][scheme].items()
    )


def _dimension(token: str | int, shape: tuple[int, int]) -> int:
    if isinstance(token, int):
        return token
    product, _, divisor = token.partition("/")
    symbol, _, factor = product.partition("*")
    value = {"O": shape[0], "I": shape[1]}[symbol] * int(factor or 1)
    return ceil(value / int(divisor)) if divisor else value


class Layout(ABC):
    """A checkpoint format: it writes a ``quantization_config``, reads one back, and names the stored scales."""

    name: ClassVar[str]
    _keys: ClassVar[tuple[str, str]]
    _decisive: ClassVar[tuple[str, ...]]
    _kv_scales: ClassVar[tuple[str, str]]

    @abstractmethod
    def quantization_config(self, choice: Choice) -> dict[str, Any]:
        """Return the value of ``quantization_config`` in ``config.json`` for a choice."""

    def kv_scale_names(self, attention: str) -> tuple[str, str]:
        """Return the names of the K and the V scale of an attention module."""
        return f"{attention}.{self._kv_scales[0]}", f"{attention}.{self._kv_scales[1]}"

    @abstractmethod
    def kv_scale_shape(self, heads: int | None = None) -> tuple[int, ...]:
        """Return the shape of a KV scale: of one for a layer (None), or of one for each of its ``heads``.

        Raises `UserError` where the format has no scales by head.
        """

    def claims(self, config: Mapping[str, Any], modules: Collection[str]) -> Claims:
        """Return what a ``quantization_config`` says of the given modules and of the KV cache."""
        schemes: dict[str, str | None] = {}
        unknown: dict[str, str] = {}
        settings_of = self._settings(config)
        recognized: dict[int, str | None] = {}  # by the settings' identity, which many modules share
        for module in modules:
            settings = settings_of(module)
            if settings and id(settings) not in recognized:
                recognized[id(settings)] = self._recognise(settings)
            schemes[module] = recognized[id(settings)] if settings else None
            if settings and schemes[module] is None:
                key, found = self._keys[0], settings.get(self._keys[0]) or {}
                unknown[module] = f"{key} {', '.join(f'{each}={found.get(each)}' for each in self._decisive)}"
        return Claims(schemes, unknown, self._has_kv_cache(config))

    def weights(self, config: Mapping[str, Any], modules: Iterable[str]) -> dict[str, Mapping[str, Any]]:
        """Return what a ``quantization_config`` says of the weights of each linear module that it quantizes."""
        settings_of = self._settings(config)
        settings = {module: settings_of(module) for module in modules}
        return {module: of_module[self._keys[0]] for module, of_module in settings.items() if of_module}

    @abstractmethod
    def _settings(self, config: Mapping[str, Any]) -> Callable[[str], Mapping[str, Any] | None]:
        """Return a function that maps a module to the settings that hold for it; None where it stays in 16 bit."""

    @abstractmethod
    def _same(self, found: Mapping[str, Any] | None, expected: Mapping[str, Any] | None) -> bool:
        """Return whether ``found`` settings of weights or inputs are those of a scheme; None means not quantized."""

    @abstractmethod
    def _has_kv_cache(self, config: Mapping[str, Any]) -> bool: ...

    def _recognise(self, settings: Mapping[str, Any]) -> str | None:
        for scheme in _table("layouts.yaml")[self.name]["schemes"]:
            if all(map(self._same, map(settings.get, self._keys), _declared(self.name, scheme))):
                return scheme
        return None


class CompressedTensors(Layout):
    """compressed-tensors: one config group for each scheme, exact names in ``ignore``, KV scales beside attention."""

    name = "compressed-tensors"
    _keys, _kv_scales = ("weights", "input_activations"), ("k_scale", "v_scale")
    _decisive = ("num_bits", "type", "strategy", "dynamic", "symmetric", "group_size", "block_structure")

    def quantization_config(self, choice: Choice) -> dict[str, Any]:
        """Return the value for config.json: one scheme targets the class ``Linear``, several target exact names."""
        groups: dict[str, Any] = {}
        default = choice.default
        schemes = sorted(set(choice.schemes.values()), key=lambda scheme: (scheme != default, scheme))
        for number, scheme in enumerate(schemes):
            weights, inputs = _declared(self.name, scheme)
            names = choice.named(module for module, chosen in choice.model_schemes.items() if chosen == scheme)
            if scheme == default and set(choice.model_schemes.values()) == {default}:
                names = ["Linear", *choice.named(choice.heads)]
            predicted = [
                f"re:(.*\\.)?{re.escape(prefix)}({'|'.join(kinds)})$" for prefix, kinds in choice.predicted(scheme)
            ]
            groups[f"group_{number}"] = {
                "format": _table("layouts.yaml")[self.name]["schemes"][scheme]["format"],
                "input_activations": inputs,
                "output_activations": None,
                "targets": ["Linear", *choice.named(choice.heads)] if len(schemes) == 1 else [*names, *predicted],
                "weights": weights,
            }
        strategy = "attn_head" if choice.kv_per_head else "tensor"
        cache = {**_table("layouts.yaml")[self.name]["defaults"], "observer": "static_minmax", "strategy": strategy}
        formats = {group["format"] for group in groups.values()}
        return {
            "config_groups": groups,
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "global_compression_ratio": None,
            "ignore": choice.ignored,
            "kv_cache_scheme": cache if choice.kv_cache else None,
            "quant_method": self.name,
            "quantization_status": "compressed",
            "sparsity_config": {},
            "transform_config": {},
            "version": "0.19.0",  # of the format, not of a library that would have to be installed
        }

    def kv_scale_shape(self, heads: int | None = None) -> tuple[int, ...]:
        """Return the shape of a KV scale: (1,) for the layer, or (heads, 1, 1) for one for each of its ``heads``."""
        return (1,) if heads is None else (heads, 1, 1)

    def _settings(self, config: Mapping[str, Any]) -> Callable[[str], Mapping[str, Any] | None]:
        # A target or an ignored name is exact, a class name, or "re:" with a regular expression.
        def matches(module: str, pattern: str) -> bool:
            return _expression(module, pattern) or pattern == "Linear"

        ignored = _Patterns(config.get("ignore") or (), matches)
        groups: Collection[Mapping[str, Any]] = (config.get("config_groups") or {}).values()
        # Names and expressions go before a class, in whichever order the groups stand.
        names = [[target for target in group.get("targets") or () if target != "Linear"] for group in groups]
        targets = [(_Patterns(listed, matches), group) for listed, group in zip(names, groups, strict=True)]
        fallback = next((group for group in groups if "Linear" in (group.get("targets") or ())), None)

        def settings(module: str) -> Mapping[str, Any] | None:
            if ignored.first(module) is not None:
                return None
            return next((group for listed, group in targets if listed.first(module) is not None), fallback)

        return settings

    def _same(self, settings: Mapping[str, Any] | None, expected: Mapping[str, Any] | None) -> bool:
        if settings is None or expected is None:
            return settings is expected
        size = settings.get("group_size")
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
        implied = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, "strategy": strategy}
        # What is left out is what compressed-tensors takes it for (0.19 QuantizationArgs): of a type it is an integer.
        full = {**implied, **{key: value for key, value in settings.items() if value is not None}}
        if size == -1:  # another way to say so
            del full["group_size"]
        return all(full[key] == expected[key] for key in self._decisive if key in full)

    def _has_kv_cache(self, config: Mapping[str, Any]) -> bool:
        return bool(config.get("kv_cache_scheme"))


_KV_GROUP = ("*k_proj", "*v_proj")


class Quark(Layout):
    """Quark: global and per-layer specs, exact names in ``exclude``, KV scales as outputs of k_proj and v_proj."""

    name = "quark"
    _keys, _kv_scales = ("weight", "input_tensors"), ("k_proj.output_scale", "v_proj.output_scale")
    _decisive = ("dtype", "qscheme", "is_dynamic", "group_size", "block_size")

    def quantization_config(self, choice: Choice) -> dict[str, Any]:
        """Return the value for config.json; modules of another scheme than the most frequent are listed by exact names.

        The KV entries use Quark's own two patterns, or exact names where a k_proj or v_proj has a scheme of its own: a
        name then matches one key only, and the order of keys, which is sorted on disk, cannot change the meaning.
        """
        default = choice.default
        model = choice.model_schemes
        layers: dict[str, Any] = {
            name: self._layer(scheme)
            for module, scheme in model.items()
            if scheme != default
            for name in choice.named([module])
        }
        cached = {m: scheme for m, scheme in model.items() if any(fnmatch.fnmatchcase(m, key) for key in _KV_GROUP)}
        predicted = self._predicted(choice, default)
        if layers.keys().isdisjoint(cached) and not predicted:
            cached = dict.fromkeys(_KV_GROUP, default)
        output = {"output_tensors": {**_table("layouts.yaml")[self.name]["defaults"], "scale_type": None}}
        cache = {key: {**self._layer(scheme), **output} for key, scheme in cached.items()} if choice.kv_cache else {}
        return {
            "algo_config": None,
            "exclude": choice.ignored,
            "export": {
                "kv_cache_group": list(_KV_GROUP) if choice.kv_cache else [],
                "min_kv_scale": 0.0,
                "pack_method": "reorder",
                "weight_format": "real_quantized",
                "weight_merge_groups": None,
            },
            "global_quant_config": self._layer(default),
            "kv_cache_post_rope": choice.kv_cache,
            "kv_cache_quant_config": cache,
            "layer_quant_config": {**layers, **cache, **predicted},
            "layer_type_quant_config": {},
            "quant_method": self.name,
            "quant_mode": "eager_mode",
            "softmax_quant_spec": None,
            "version": "0.13",
        }

    def _predicted(self, choice: Choice, default: str) -> dict[str, Any]:
        """Return the settings of a predictor's modules with another scheme than the ``default``, by wildcards.

        A dot is written as a set: vLLM renames keys as it renames tensors, and drops those that contain ``mtp.``.
        """
        return {
            f"*{prefix.replace('.', '[.]')}{_wildcard(kind)}": self._layer(scheme)
            for scheme in sorted({choice.schemes[module] for module in choice.predictor} - {default})
            for prefix, kinds in choice.predicted(scheme)
            for kind in kinds
        }

    def kv_scale_shape(self, heads: int | None = None) -> tuple[int, ...]:
        """Return the shape of a KV scale, (), one for the whole layer. Raises `UserError` where ``heads`` are given."""
        if heads is not None:
            raise UserError("the format quark has no KV scales by head; it has one for K and one for V of a layer.")
        return ()

    def _settings(self, config: Mapping[str, Any]) -> Callable[[str], Mapping[str, Any] | None]:
        # The order of look-ups is vLLM's: excluded, by layer, global.
        excluded = _Patterns(
            config.get("exclude") or (),
            lambda module, one: _expression(module, one) or fnmatch.fnmatchcase(module, one),
        )
        layers: Mapping[str, Any] = config.get("layer_quant_config") or {}
        keys = _Patterns(layers, fnmatch.fnmatchcase)
        fallback: Mapping[str, Any] | None = config.get("global_quant_config")

        def settings(module: str) -> Mapping[str, Any] | None:
            if excluded.first(module) is not None:
                return None
            key = keys.first(module)
            return fallback if key is None else layers[key]

        return settings

    def _same(self, settings: Mapping[str, Any] | None, expected: Mapping[str, Any] | None) -> bool:
        if not settings or expected is None:
            return not settings and expected is None
        # Of integers the zero point must be zero; floating-point formats have none, and some exports say null.
        asymmetric = str(expected["dtype"]).startswith("int") and settings.get("symmetric") is not True
        return not asymmetric and all(settings.get(key) == expected[key] for key in self._decisive)

    def _has_kv_cache(self, config: Mapping[str, Any]) -> bool:
        return bool((config.get("export") or {}).get("kv_cache_group"))

    def _layer(self, scheme: str) -> dict[str, Any]:
        weight, inputs = _declared(self.name, scheme)
        return {
            "bias": None,
            "input_tensors": inputs,
            "output_tensors": None,
            "target_device": None,
            "weight": weight,
        }


def _wildcard(kind: str) -> str:
    """Return the wildcards for one of `_kinds`, or for ``.*``."""
    return "*" if kind == ".*" else kind.replace(r"\d+", "*").replace(r"\.", "[.]")


class _Patterns:
    """Names and patterns, in the order in which a configuration lists them.

    Exact names are looked up in a table: DeepSeek R1 has 45,000 modules, each of which may have settings of its own.
    ``matches(module, pattern)`` decides on the others, which are "re:...", "Linear" or contain a wildcard.
    """

    def __init__(self, patterns: Collection[str], matches: Callable[[str, str], bool]) -> None:
        self._matches = matches
        self._wild = [
            (place, pattern)
            for place, pattern in enumerate(patterns)
            if pattern == "Linear" or pattern.startswith("re:") or not _WILDCARDS.isdisjoint(pattern)
        ]
        self._places = {pattern: place for place, pattern in enumerate(patterns)}

    def first(self, module: str) -> str | None:
        """Return the first name or pattern that matches a module; None where none does."""
        place = self._places.get(module)
        for number, pattern in self._wild:
            if place is not None and place < number:
                break
            if self._matches(module, pattern):
                return pattern
        return None if place is None else module


_WILDCARDS = frozenset("*?[")


def _expression(module: str, pattern: str) -> bool:
    return pattern.startswith("re:") and matches_module(pattern, module)


_LAYOUTS: Mapping[str, Layout] = {layout.name: layout for layout in (CompressedTensors(), Quark())}


def layout(name: str) -> Layout:
    """Return the checkpoint format of that name. Raises `UserError` for an unknown one."""
    if name not in _LAYOUTS:
        raise UserError(f"unknown checkpoint format {name!r}; known: {', '.join(_LAYOUTS)}.")
    return _LAYOUTS[name]


def layout_of(config: Mapping[str, Any]) -> Layout:
    """Return the format that a ``config.json`` declares. Raises `UserError` where it is missing or unknown."""
    declared = config.get("quantization_config")
    if not isinstance(declared, Mapping):
        raise UserError("config.json has no quantization_config: this is not a quantized checkpoint.")
    return layout(str(declared.get("quant_method")))

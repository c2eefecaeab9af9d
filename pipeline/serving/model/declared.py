"""What a configuration declares about its quantization: the method, each module's scheme, the KV cache.

    >>> declared = read_declared(config["quantization_config"], modules)
    >>> declared.schemes["model.layers.0.mlp.down_proj"]
    'ptpc_fp8'

The two layouts that this project writes are read by `pipeline.formats`; of the others only what serving depends on.
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.formats.layout import layout
from pipeline.schemes import table

_OURS = ("quark", "compressed-tensors")
_KEPT = ("modules_to_not_convert", "ignored_layers", "exclude_modules", "ignore", "exclude")


@dataclass(frozen=True, slots=True)
class Declared:
    """``schemes`` has an entry, None for 16 bit, for each module that was asked about."""

    method: str
    schemes: Mapping[str, str | None]
    group: int | None
    kv_cache: Literal["fp8"] | None

    def most(self, parameters: Mapping[str, int]) -> str:
        """The scheme of the most parameters; "none" where nothing is quantized."""
        weights: Counter[str] = Counter()
        for module, scheme in self.schemes.items():
            if scheme is not None:
                weights[scheme] += parameters[module]
        return weights.most_common(1)[0][0] if weights else "none"


def read_declared(quantization: Mapping[str, Any] | None, modules: Sequence[str]) -> Declared:
    """Read a ``quantization_config`` for these linear modules; a missing one leaves them all in 16 bit."""
    if not quantization:
        return Declared("none", dict.fromkeys(modules), None, None)
    method = str(quantization.get("quant_method") or "unknown")
    if method in _OURS:
        claims = layout(method).claims(quantization, modules)
        schemes = {
            module: _guess(claims.unknown[module]) if module in claims.unknown else scheme
            for module, scheme in claims.schemes.items()
        }
        cached = claims.kv_cache or bool(quantization.get("kv_cache_quant_config"))
    else:
        kept = [str(pattern) for key in _KEPT for pattern in quantization.get(key) or ()]
        scheme = _scheme(method, quantization)
        # gpt-oss keeps everything but its experts in 16 bit, whether or not it lists them.
        schemes = {
            module: None
            if any(_named(module, pattern) for pattern in kept) or (method == "mxfp4" and ".experts." not in module)
            else scheme
            for module in modules
        }
        cached = str(quantization.get("kv_cache_quant_algo") or "").upper() == "FP8"
    used = {scheme for scheme in schemes.values() if scheme is not None}
    groups = [_group(scheme, quantization) for scheme in used]
    return Declared(method, schemes, max(filter(None, groups), default=None), "fp8" if cached else None)


def _scheme(method: str, quantization: Mapping[str, Any]) -> str:
    if method in ("fp8", "fbgemm_fp8"):
        if quantization.get("weight_block_size"):
            return "fp8_block"
        return "ptpc_fp8" if method == "fbgemm_fp8" else "fp8"
    if method.startswith("modelopt"):
        return "nvfp4" if "FP4" in str(quantization.get("quant_algo")).upper() else "fp8"
    return {"awq_marlin": "awq", "gptq_marlin": "gptq"}.get(method, method)


def _guess(description: str) -> str:
    """The nearest scheme by width of a spec that is in no table; "fp8" where the width cannot be told."""
    if re.search(r"int4|num_bits=4, type=int", description):
        return "w4a16"
    if re.search(r"fp4|num_bits=4", description):
        return "nvfp4" if "group_size=16" in description else "mxfp4"
    if re.search(r"fp6", description):
        return "mxfp6_e3m2"
    return "int8_w8a8" if re.search(r"int8|type=int", description) else "fp8"


def _group(scheme: str, quantization: Mapping[str, Any]) -> int | None:
    if scheme in table():
        divisor = table()[scheme].input_divisor
        return divisor if divisor > 1 else None
    size = quantization.get("group_size")
    if isinstance(size, int) and size > 0:
        return size
    return {"nvfp4": 16, "awq": 128, "gptq": 128}.get(scheme)


def _named(module: str, pattern: str) -> bool:
    """Whether a list's entry means a module: a name, a part of one, a glob, or ``re:`` with a regular expression."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    if fnmatch.fnmatchcase(module, pattern) or fnmatch.fnmatchcase(module, f"{pattern}.*"):
        return True
    return f".{pattern}." in f".{module}."

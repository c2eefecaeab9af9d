"""Which module gets which scheme: the recipe's wishes, applied to a model's own modules."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.base.errors import UserError, did_you_mean
from pipeline.quantize.formats.layout import Choice
from pipeline.quantize.model.structure import Structure
from pipeline.recipe.modules import assigned, matches
from pipeline.recipe.schema import Quantization


def select(structure: Structure, quantization: Quantization) -> Choice:
    """Assign a scheme, or 16 bit, to every linear module.

    Raises `UserError` for a name that matches nothing, because a typo would otherwise quantize what was meant to stay,
    where nothing is left to quantize, and for a source that is quantized already.
    """
    if structure.quantized_by is not None:
        raise UserError(
            f"source: found a model that is quantized already (quant_method {structure.quantized_by}), expected 16-bit "
            "weights, or FP8 in blocks of 128x128.",
            hint="Start from the 16-bit release of the model.",
        )
    everything = (*structure.linear, *structure.kept)
    for pattern in quantization.exclude:
        _require_match(pattern, everything, "exclude")
    for override in quantization.overrides:
        for pattern in override.modules:
            _refuse_kept(pattern, structure)
            _require_match(pattern, tuple(structure.linear), "overrides")
    wanted = {module: assigned(quantization, module) for module in structure.linear}
    schemes = {module: scheme for module, scheme in wanted.items() if scheme is not None}
    if not schemes:
        raise UserError(
            f"quantization.exclude: found every one of the model's {len(wanted)} linear modules excluded, "
            "expected at least one to quantize."
        )
    kept = (*structure.kept, *(module for module in structure.linear if module not in schemes))
    return Choice(
        schemes=schemes,
        kept=tuple(sorted(kept)),
        kv_cache=quantization.kv_cache == "fp8",
        kv_per_head=quantization.kv_cache_granularity == "head",
    )


def _refuse_kept(pattern: str, structure: Structure) -> None:
    """A pattern may sweep over what is kept; a name, or a pattern that means nothing else, is a wish that fails.

    vLLM 0.32 has no quantized output head in Quark's layout: its loader gives schemes to linear layers alone, and the
    head is none there.
    """
    kept = [module for module in structure.kept if matches(pattern, module)]
    if kept and not any(matches(pattern, module) for module in structure.linear):
        raise UserError(
            f"quantization.overrides: found {pattern!r}, which means {kept[0]} and nothing that is quantized; the "
            "output head, routers, vision towers and the layers of a multi-token predictor stay in 16 bit.",
            hint="Take it out of `overrides`.",
        )


def _require_match(pattern: str, modules: Sequence[str], field: str) -> None:
    if not any(matches(pattern, module) for module in modules):
        raise UserError(
            f"quantization.{field}: found {pattern!r}, which matches none of the model's {len(modules)} modules"
            f"{did_you_mean(pattern, modules)}."
        )

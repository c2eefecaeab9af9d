"""Select the scheme of each linear module, and the modules that stay in 16 bit."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from quantmint.pipeline.base.errors import UserError, did_you_mean
from quantmint.pipeline.base.schemes import scheme as scheme_row
from quantmint.pipeline.quantize.formats.choice import Choice, most_frequent
from quantmint.pipeline.quantize.model.encodings import DECODED
from quantmint.pipeline.quantize.model.kinds import kind_of
from quantmint.pipeline.quantize.model.stored import stored_schemes
from quantmint.pipeline.quantize.model.structure import UNQUANTIZED, Structure
from quantmint.pipeline.recipe.modules import assigned, is_excluded, matches, override_of
from quantmint.pipeline.recipe.quantization import AUTO, Quantization

ABSORBED_BITS = 8
"""Fewest bits of a weight that vLLM absorbs: it first restores it to 16 bit, which it does from FP8 and INT8."""


def select(structure: Structure, quantization: Quantization) -> Choice:
    """Assign a scheme, or 16 bit, to every linear module of a model by a recipe's ``quantization``.

    An FP8 cache of latent attention has no scales to store. A module that vLLM multiplies into its neighbours in 16 bit
    (kv_b_proj of latent attention) stays there where the scheme is narrower than 8 bits. Raises `UserError` where a
    pattern means no module, because a typo would otherwise quantize what was meant to stay; where a tensor of the
    decoder is claimed by no rule and the recipe does not exclude it; where a scheme does not fit the width of a module,
    or needs a range that calibration cannot measure; where nothing is left to quantize; and for a source that is
    quantized already or not what its configuration says.
    """
    return _select(_Identity(structure), quantization.model_dump_json())


@dataclass(frozen=True, slots=True, eq=False)
class _Identity:
    """A structure as a cache key that equals only the same object: comparing contents would be slow."""

    structure: Structure

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.structure is other.structure

    def __hash__(self) -> int:
        return id(self.structure)


@lru_cache(maxsize=2)
def _select(identity: _Identity, section: str) -> Choice:
    """Return the choice for a structure and a recipe's quantization in JSON; plan, forecast and others share it.

    Raises `UserError` as `select` does.
    """
    structure, quantization = identity.structure, Quantization.model_validate_json(section)
    if structure.undecodable is not None:
        raise UserError(
            f"source: found a model that is quantized already (quant_method {structure.undecodable}), expected 16-bit "
            f"weights, or an encoding that is decoded: {DECODED}.",
            hint="Start from the 16-bit release of the model.",
        )
    structure.require_whole("source")
    _require_claims(structure, quantization)
    _require_runnable(structure, quantization)
    _require_patterns(structure, quantization)
    absorbed = frozenset(structure.absorbed)
    schemes = {
        module: scheme
        for module in structure.linear
        if (scheme := assigned(quantization, module)) is not None
        and not (module in absorbed and _stays(module, scheme, quantization))
    }
    if not schemes:
        raise UserError(_nothing_left(structure))
    rounded = frozenset(schemes)
    if quantization.keep == "source":
        excluded = [module for module in structure.linear if module not in schemes]
        schemes |= stored_schemes(structure, excluded, quantization.format, "quantization.keep")
    _require_share(structure, quantization)
    heads = {head: scheme for head in structure.head if (scheme := _named_scheme(head, quantization)) is not None}
    schemes |= heads
    predicted, predicted_stored = predictor_schemes(structure, quantization)
    _require_widths(structure, {**schemes, **predicted}, quantization)
    _require_blocks(structure, schemes, quantization)
    stacks = _whole_stacks(structure, schemes, quantization)
    _require_names(structure, schemes, stacks)
    _require_reached(structure, schemes, quantization)
    unquantized = (module for module in structure.linear.keys() - schemes.keys() if not module.startswith(stacks))
    sixteen_bit = {*structure.kept, *_modules_of(structure.unclaimed), *unquantized} - heads.keys()
    if predicted:
        unrounded = structure.predictor_linear.keys() - predicted.keys()
        sixteen_bit = (sixteen_bit - predicted.keys() - structure.predictor_stacks) | unrounded
    return Choice(
        schemes={**schemes, **predicted},
        kept=tuple(sorted(sixteen_bit)),
        kv_cache=quantization.kv_cache == "fp8" and not structure.latent,
        kv_per_head=quantization.kv_cache_granularity == "head",
        prefixes=(*structure.predictor, *stacks),
        aliases=structure.aliases,
        predictor=frozenset(predicted),
        stored=predicted_stored | (schemes.keys() - rounded - heads.keys()),
        heads=frozenset(heads),
    )


def _require_patterns(structure: Structure, quantization: Quantization) -> None:
    """Raise `UserError` for a pattern of the recipe that means no module, or one that stays in 16 bit."""
    everything = [*structure.linear, *structure.kept, *structure.unclaimed, *_modules_of(structure.unclaimed)]
    for pattern in quantization.exclude:
        _require_match(pattern, everything, "exclude")
    for override in quantization.overrides:
        for pattern in override.modules:
            if pattern in structure.head:
                _require_head(pattern, override.scheme, quantization)
            else:
                _refuse_kept(pattern, structure)
                _require_match(pattern, tuple(structure.linear), "overrides")


def _named_scheme(head: str, quantization: Quantization) -> str | None:
    """Return the scheme of the first override that names the output head itself; None without one."""
    return next((override.scheme for override in quantization.overrides if head in override.modules), None)


def predictor_schemes(structure: Structure, quantization: Quantization) -> tuple[dict[str, str], frozenset[str]]:
    """Return the schemes of a predictor's modules by ``mtp``, and those modules that keep the bytes of the source.

    Modules that the recipe excludes, and those that vLLM multiplies into their neighbours and that would have fewer
    than 8 bits, stay in 16 bit. Raises `UserError` for a model without a predictor, for one that is to be quantized, or
    to stay so, of which vLLM loads nothing quantized, and where the layout cannot hold the source's encoding.
    """
    if quantization.mtp in (None, "bf16"):
        return {}, frozenset()
    if not structure.predictor:
        raise UserError(
            f"quantization.mtp: found {quantization.mtp} for a model without the layers of a multi-token predictor.",
            hint="Take `mtp` out of the recipe.",
        )
    absorbed = frozenset(structure.absorbed)
    modules = [module for module in structure.predictor_linear if not is_excluded(quantization, module)]
    scheme = quantization.predictor_scheme
    if scheme is None:
        stored = stored_schemes(structure, modules, quantization.format, "quantization.mtp")
        if not stored and structure.encoded_predictor:
            raise UserError(
                f"quantization.mtp: found source, and {structure.encoded_predictor} is quantized there, but vLLM loads "
                "no module of the predictor quantized under the names of this source, or the recipe excludes all.",
                hint="Set `mtp: bf16`.",
            )
        return stored, frozenset(stored)
    narrow = scheme_row(scheme).weight.bits < ABSORBED_BITS
    schemes = {module: scheme for module in modules if not (narrow and module in absorbed)}
    if not schemes:
        raise UserError(
            f"quantization.mtp: found {scheme}, and vLLM loads no module of the predictor quantized, or the recipe "
            "excludes all.",
            hint="Set `mtp: bf16`.",
        )
    return schemes, frozenset()


def kept_because(structure: Structure, choice: Choice, quantization: Quantization) -> dict[str, int]:
    """Return how many modules a choice leaves in 16 bit for each reason, the most frequent reason first."""
    absorbed = frozenset(structure.absorbed)

    def reason(module: str) -> str:
        if module in structure.kept:
            return structure.kept[module]
        folded = module in absorbed and not is_excluded(quantization, module)
        return "vLLM multiplies it into its neighbours" if folded else "excluded by the recipe"

    return dict(Counter(map(reason, choice.kept)).most_common())


def _require_claims(structure: Structure, quantization: Quantization) -> None:
    """Raise `UserError` for a tensor of the decoder that no rule claims, unless the recipe excludes it by name."""
    unclaimed = {
        name: reason
        for name, reason in structure.unclaimed.items()
        if not any(is_excluded(quantization, label) for label in (name, *_modules_of([name])))
    }
    if unclaimed:
        name, reason = next(iter(unclaimed.items()))
        others = f", and {len(unclaimed) - 1} more tensors" if len(unclaimed) > 1 else ""
        raise UserError(
            f"quantization.scheme: {name} is a weight that quantmint cannot quantize: {reason}{others}.",
            hint="To leave such tensors in 16 bit, name them in quantization.exclude; expect the checkpoint to be "
            "little smaller than its source.",
        )


def _require_runnable(structure: Structure, quantization: Quantization) -> None:
    """Raise `UserError` for a recipe that measures what transformers cannot run, before hours are spent."""
    if quantization.engine != "stream":
        return
    walked = "algorithm" if quantization.by_layers else "scheme" if quantization.scheme == AUTO else None
    if walked is not None and structure.walk_obstacle is not None:
        raise UserError(
            f"quantization.{walked}: found {getattr(quantization, walked)} for a model whose layers cannot be run one "
            f"at a time: {structure.walk_obstacle}.",
            hint="Take a scheme and `algorithm: none`, or an engine that is a library.",
        )
    names = {quantization.scheme, *(override.scheme for override in quantization.overrides)} - {AUTO}
    static = sorted(name for name in names if scheme_row(name).needs_ranges)
    if structure.text_obstacle is not None and (static or quantization.kv_cache == "fp8"):
        field, value = ("scheme", static[0]) if static else ("kv_cache", "fp8")
        raise UserError(
            f"quantization.{field}: found {value}, which is calibrated, for a model that cannot be run on text: "
            f"{structure.text_obstacle}.",
            hint="Take a scheme without static scales, such as ptpc_fp8 or mxfp4, and `kv_cache: auto`.",
        )


def _require_share(structure: Structure, quantization: Quantization) -> None:
    """Raise `UserError` where most of the decoder would stay in 16 bit because vLLM builds it so.

    Whoever wants that all the same excludes these modules by name.
    """
    quantizable = sum(rows * columns for rows, columns in structure.linear.values())
    unquantized = [name for name, reason in structure.kept.items() if reason == UNQUANTIZED]
    if structure.unquantizable > quantizable and not any(is_excluded(quantization, name) for name in unquantized):
        share = quantizable / (quantizable + structure.unquantizable)
        first = unquantized[0] if unquantized else "in matrices of their own"
        raise UserError(
            f"quantization.scheme: found a model of which {share:.0%} of the decoder's weights can be quantized: vLLM "
            f"builds the rest without a quantization, {first} first.",
            hint="To make such a checkpoint all the same, name those modules in quantization.exclude.",
        )


def _modules_of(names: Collection[str]) -> Iterator[str]:
    """Yield the modules that tensors belong to, under the names by which servers know them."""
    return (name.removesuffix(".weight") if name.endswith(".weight") else name.rpartition(".")[0] for name in names)


def _stays(module: str, scheme: str, quantization: Quantization) -> bool:
    """Return whether a module that vLLM multiplies into its neighbours stays in 16 bit: it does below 8 bits.

    Raises `UserError` where an override of the recipe gives the module a ``scheme`` of fewer than 8 bits.
    """
    if scheme_row(scheme).weight.bits >= ABSORBED_BITS:
        return False
    if override_of(quantization, module) is not None:
        raise UserError(
            f"quantization.overrides: found {scheme} for {module}, expected a scheme of 8 bits or 16 bit: vLLM "
            "multiplies its weight into its neighbours when it loads the model, which it cannot do with fewer bits."
        )
    return True


def _nothing_left(structure: Structure) -> str:
    if not structure.linear:
        return (
            "quantization.scheme: found a model without a linear module that vLLM loads quantized, "
            "so there is nothing to quantize."
        )
    return (
        f"quantization.exclude: found every one of the model's {len(structure.linear)} linear modules excluded, "
        "expected at least one to quantize."
    )


def _require_widths(structure: Structure, schemes: dict[str, str], quantization: Quantization) -> None:
    """Raise `UserError` for a module whose inputs are no multiple of its scheme's groups."""
    if quantization.engine != "stream":  # a library says itself what it does not fit
        return
    divisors = {scheme: scheme_row(scheme).input_divisor for scheme in set(schemes.values())}
    shapes = structure.quantizable
    unfit = [module for module, scheme in schemes.items() if shapes[module][1] % divisors[scheme]]
    if unfit:
        module, lasts = unfit[0], sorted({".".join(name.rsplit(".", 2)[-2:]) for name in unfit})
        field = "scheme" if override_of(quantization, module) is None else "overrides"
        field = "mtp" if module in structure.predictor_linear else field
        patterns = ", ".join(repr(f"re:.*{re.escape(last)}$") for last in lasts[:4])
        raise UserError(
            f"quantization.{field}: found {schemes[module]} for {module}, which has {shapes[module][1]} "
            f"inputs, expected a multiple of {divisors[schemes[module]]}; {len(unfit)} modules do not fit.",
            hint=f"Leave them in 16 bit: exclude: [{patterns}{', …' if len(lasts) > 4 else ''}].",
        )


def _require_blocks(structure: Structure, schemes: Mapping[str, str], quantization: Quantization) -> None:
    """Raise `UserError` for a module whose last block is not full, if vLLM puts another module's rows behind it.

    vLLM refuses to load it (vLLM 0.32 layers/quantization/utils/fp8_utils.py, validate_fp8_block_shape).
    """
    divisors = {scheme: scheme_row(scheme).row_divisor for scheme in set(schemes.values())}
    if max(divisors.values()) == 1:
        return
    for module, scheme in schemes.items():
        rows, group = structure.quantizable[module][0], structure.joined.get(kind_of(module), ())
        if group and rows % divisors[scheme]:
            field = "scheme" if override_of(quantization, module) is None else "overrides"
            neighbours = " and ".join(last for last in group if last != module.rpartition(".")[2])
            pattern = f"re:.*[.]({'|'.join(map(re.escape, group))})$"
            raise UserError(
                f"quantization.{field}: found {scheme} for {module}, which has {rows} rows, expected a multiple of "
                f"{divisors[scheme]}: vLLM loads it in one matrix with {neighbours}.",
                hint=f"Leave them in 16 bit: exclude: [{pattern!r}].",
            )


def _require_names(structure: Structure, schemes: Mapping[str, str], stacks: tuple[str, ...]) -> None:
    """Raise `UserError` for a module that vLLM asks for under no name, unless it has the default scheme.

    Those below the prefixes ``stacks`` are listed by a pattern.
    """
    default = most_frequent(schemes.values())
    for module, names in structure.aliases.items():
        scheme = schemes.get(module)
        if not names and scheme != default and not module.startswith(stacks):
            raise UserError(
                f"quantization: found {scheme or '16 bit'} for {module}, expected {default} as for the others: vLLM "
                "asks for this module under a name that no list can hold, and would load it as the others.",
                hint="Take it out of `exclude` and `overrides`." if module in structure.linear else None,
            )


_INTERLEAVED = re.compile(r"(.+\.experts)\.\d+\.gate_up_proj")


def _whole_stacks(structure: Structure, schemes: Mapping[str, str], quantization: Quantization) -> tuple[str, ...]:
    """Return the prefixes of experts whose gate and up are one projection (gpt-oss) that stay in their 16-bit stacks.

    Raises `UserError` for such experts where vLLM cannot load them.

    vLLM 0.32 loads them quantized in Quark's layout alone, and all of a layer; in 16 bit in compressed-tensors' alone
    (models/gpt_oss.py, `_load_weights_quark` and `_load_weights_other`).
    """
    containers = {match[1] for module in structure.linear if (match := _INTERLEAVED.fullmatch(module)) is not None}
    experts = [module for module in structure.linear if module.rpartition(".")[0].rpartition(".")[0] in containers]
    quantized = [module for module in experts if module in schemes]
    unquantized = [module for module in experts if module not in schemes]
    expected = {"format": "quark", "engine": "stream"}
    unfit = next((field for field, value in expected.items() if getattr(quantization, field) != value), None)
    if quantized and unfit is not None:
        raise UserError(
            f"quantization.{unfit}: found {getattr(quantization, unfit)} for {quantized[0]}, expected "
            f"{expected[unfit]}: vLLM loads quantized experts whose gate and up are one projection in Quark's layout "
            "only, and that of such experts is made by this engine.",
            hint="Set `format: quark`, or leave the experts in 16 bit: exclude: ['re:.*[.]experts[.]'].",
        )
    if unquantized and quantization.format == "quark":
        raise UserError(
            f"quantization.exclude: found 16 bit for {unquantized[0]}, expected a scheme for each expert: vLLM loads "
            "experts whose gate and up are one projection in 16 bit in the layout of compressed-tensors only.",
            hint="Take it out of `exclude`, or set `format: compressed-tensors` and exclude all experts.",
        )
    encoded = next((module for module in unquantized if structure.weights[module].encoded is not None), None)
    if encoded is not None:
        raise UserError(
            f"quantization.exclude: found 16 bit for {encoded}, which the source stores in a stack of MXFP4, expected "
            "a scheme for it: in 16 bit it would take four times the bytes.",
            hint="Take it out of `exclude`, and set `format: quark`.",
        )
    return tuple(sorted(f"{container}." for container in containers)) if unquantized else ()


def _require_reached(structure: Structure, schemes: Mapping[str, str], quantization: Quantization) -> None:
    """Raise `UserError` for a module that needs calibration and is not run on text (``structure.unreached``).

    That are modules of schemes with static scales and, for an FP8 cache, attention. Engines of libraries are not
    checked.
    """
    if quantization.engine != "stream":  # a library measures in its own way
        return
    unreached = frozenset(structure.unreached)
    static = [module for module in schemes if module in unreached and scheme_row(schemes[module]).needs_ranges]
    if static:
        module, count = static[0], len(static)
        field = "scheme" if override_of(quantization, module) is None else "overrides"
        raise UserError(
            f"quantization.{field}: found {schemes[module]} for {module}, which needs the range of its inputs, and "
            "calibration cannot measure it: the model does not run this module on text.",
            hint="Take a scheme without static scales, such as ptpc_fp8, or leave "
            f"{'this module' if count == 1 else f'the {count} such modules'} in 16 bit by `exclude`.",
        )
    attention = next((module for module in structure.attention if module in unreached), None)
    if quantization.kv_cache == "fp8" and not structure.latent and attention is not None:
        raise UserError(
            f"quantization.kv_cache: found fp8 for {attention}, which needs the ranges of its keys and values, and "
            "calibration cannot measure them: the model does not run this module on text.",
            hint="Set `kv_cache: auto`.",
        )


def _require_head(head: str, scheme: str, quantization: Quantization) -> None:
    """Raise `UserError` for an output head in a scheme, layout or engine in which vLLM would not load it.

    vLLM 0.32 builds a head with a quantization in compressed-tensors' layout, by its name among the targets
    (compressed_tensors.py, get_quant_method); Quark's leaves all heads in 16 bit (quark.py).
    """
    expected = {"format": "compressed-tensors", "engine": "stream"}
    unfit = next((field for field, value in expected.items() if getattr(quantization, field) != value), None)
    if scheme != "ptpc_fp8":
        raise UserError(
            f"quantization.overrides: found {scheme} for {head}, expected ptpc_fp8: the output head's scheme."
        )
    if unfit is not None:
        raise UserError(
            f"quantization.{unfit}: found {getattr(quantization, unfit)} for {head} in ptpc_fp8, expected "
            f"{expected[unfit]}: in Quark's layout vLLM builds the output head in 16 bit.",
            hint="Set `format: compressed-tensors`, or take the head out of `overrides`.",
        )


def _refuse_kept(pattern: str, structure: Structure) -> None:
    # A pattern may sweep over what is kept; a name, or a pattern that means nothing else, is a wish that fails.
    sixteen_bit = [module for module in structure.kept if matches(pattern, module)]
    if sixteen_bit and not any(matches(pattern, module) for module in structure.linear):
        raise UserError(
            f"quantization.overrides: found {pattern!r}, which means {sixteen_bit[0]} and nothing that is quantized: "
            f"{structure.kept[sixteen_bit[0]]}; the output head, routers, vision towers, the layers of a multi-token "
            "predictor, and what vLLM builds without a quantization stay in 16 bit.",
            hint="Take it out of `overrides`.",
        )


def _require_match(pattern: str, modules: Sequence[str], field: str) -> None:
    if not any(matches(pattern, module) for module in modules):
        raise UserError(
            f"quantization.{field}: found {pattern!r}, which matches none of the model's {len(modules)} modules"
            f"{did_you_mean(pattern, modules)}."
        )

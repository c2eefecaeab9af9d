"""Say what becomes of a source's numbers where the source is quantized already: kept, or rounded again.

    >>> expected_outcome("mxfp4", "ptpc_fp8")
    'keep their numbers where the exponents behind a scale span 14 binades, and are rounded again elsewhere'
    >>> expected_outcome("int4", "mxfp4")
    'are rounded again'
    >>> expected_outcome("mxfp4", "mxfp4")
    'keep their bytes'

`tests/quantize/schemes/test_exact.py` tries all codes of MXFP4 under all exponents.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

from quantmint.calibration.encodings import Encoded
from quantmint.pipeline.base.schemes import scheme
from quantmint.pipeline.quantize.schemes.registry import SCHEMES

_TITLES = {
    "fp8_block": "FP8 in blocks",
    "fp8_block_e8m0": "FP8 in blocks with E8M0 scales",
    "fp8_channel": "FP8 by channel",
    "fp8_tensor": "FP8 by tensor",
    "mxfp8": "MXFP8",
    "mxfp4": "MXFP4",
    "mxfp4_stack": "MXFP4",
    "nvfp4": "NVFP4",
    "nvfp4_by": "NVFP4",
    "int4": "INT4",
    "int4_zero": "INT4",
    "awq": "INT4 of AWQ",
    "gptq": "INT4 of GPTQ",
    "gptq_v2": "INT4 of GPTQ",
}


_MXFP4 = ("mxfp4", "mxfp4_stack")
_E4M3 = ("mxfp8", "fp8_block_e8m0")  # with powers of two as scales
_SAME = {
    "fp8_block": "fp8_block", "fp8_block_e8m0": "fp8_block", "fp8_channel": "ptpc_fp8", "fp8_tensor": "ptpc_fp8",
    "mxfp8": "mxfp8",
    "mxfp4": "mxfp4", "mxfp4_stack": "mxfp4", "nvfp4": "nvfp4", "int4": "w4a16",
}  # fmt: skip
"""Schemes that store weights as an encoding does.

Those of one scale get it for every channel; E8M0 scales of blocks become the same numbers in float32.
"""


def encodings_in_words(encoded: Iterable[Encoded]) -> str:
    """Return the names of the encodings of a source, for people: "FP8 in blocks and MXFP4"."""
    return " and ".join(sorted({_TITLES[weight.encoding] for weight in encoded}))


def stores_as(encoding: str, name: str) -> bool:
    """Return whether a scheme stores weights as an encoding does; of INT4, where it has groups of 128."""
    same = _SAME.get(encoding)
    return same is not None and scheme(name).weight == scheme(same).weight


_WEIGHT_ONLY = {"mxfp4": "mxfp4_weight_only"}
SOURCE_SCHEMES = frozenset({*_SAME.values(), *_WEIGHT_ONLY.values()})
"""Schemes that may declare weights that stay as the source stores them."""


def source_scheme(encoding: str, rounds_inputs: bool) -> str | None:
    """Return the scheme without static scales that declares weights in an encoding; None where there is none.

    ``rounds_inputs`` is whether the source rounds the inputs of linear layers.
    """
    name = _SAME.get(encoding)
    if name is None or scheme(name).needs_ranges:
        return None
    return name if rounds_inputs else _WEIGHT_ONLY.get(name, name)


def expected_outcome(encoding: str, name: str) -> str:
    """Return what becomes of weights in an encoding that are quantized to the scheme ``name``, as a verb phrase."""
    if stores_as(encoding, name):
        if encoding == "fp8_block_e8m0":
            return "keep their numbers"
        return (
            "keep their bytes"
            if encoding != "int4"
            else "keep their bytes in groups of 128, and are rounded again in others"
        )
    if encoding in _MXFP4 and SCHEMES[name].exact is not None:
        return "keep their numbers where the exponents behind a scale span 14 binades, and are rounded again elsewhere"
    if encoding in _E4M3 and (SCHEMES[name].exact is not None or stores_as("mxfp8", name)):
        return "keep their numbers where FP8 holds them under one scale, and are rounded again elsewhere"
    if encoding in _MXFP4 and stores_as("mxfp8", name):
        return "keep their numbers"
    return "are rounded again"


def outcome_forecast(encoded: Mapping[str, Encoded], schemes: Collection[str]) -> str | None:
    """Return a sentence on what quantizing to some schemes does to a source; None for a source in 16 bit."""
    if not encoded:
        return None
    kinds = sorted({weight.encoding for weight in encoded.values()})
    phrases = dict.fromkeys(
        f"weights in {_TITLES[kind]} {expected_outcome(kind, name)} in {name}" for kind in kinds for name in schemes
    )
    return f"the source is quantized already, and decoded where it is read: {'; '.join(phrases)}"


def outcome_note(encoded: Mapping[str, Encoded], sqnr_db: Collection[float | None]) -> str | None:
    """Return a sentence on a checkpoint of a quantized source; None for a source in 16 bit.

    ``sqnr_db`` are the errors of its quantized modules against the decoded source, None or infinite for none at all.
    """
    if not encoded or not sqnr_db:
        return None
    rounded = [value for value in sqnr_db if value is not None and not math.isinf(value)]
    least = f", with a least SQNR of {min(rounded):.1f} dB against the decoded source" if rounded else ""
    exact, total = len(sqnr_db) - len(rounded), len(sqnr_db)
    return (
        f"The source is quantized already, in {encodings_in_words(encoded.values())}: {exact:,} of the {total:,} "
        f"quantized modules hold its very numbers, and {len(rounded):,} were rounded again{least}."
    )

"""Weights that stay as the source stores them: the schemes that declare them in the checkpoint.

An FP8 weight of a source that is copied is half the bytes of one that is decoded to 16 bit, and holds the same numbers.
A checkpoint can declare it where its layout has a scheme with the same elements and scales:

    source                                    checkpoint, compressed-tensors
    X.weight            F8_E4M3 [O, I]        X.weight        the same bytes
    X.weight_scale_inv  F32 [O/128, I/128]    X.weight_scale  the same bytes
    X.scale         F8_E8M0 [O/128, I/128]    X.weight_scale  the same numbers, F32
"""

from __future__ import annotations

from collections.abc import Collection

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.quantize.formats.layout import stores
from quantmint.pipeline.quantize.model.outcomes import source_scheme
from quantmint.pipeline.quantize.model.structure import Structure


def stored_schemes(
    structure: Structure, modules: Collection[str], checkpoint_format: str, field: str
) -> dict[str, str]:
    """Return the scheme by which a checkpoint declares each of ``modules`` whose weight the source has encoded.

    Modules in 16 bit are left out. Raises `UserError`, which names the recipe's ``field``, for an encoding that the
    layout cannot declare as it is.
    """
    schemes: dict[str, str] = {}
    for module in modules:
        encoded = structure.weights[module].encoded
        if encoded is None:
            continue
        scheme = source_scheme(encoded.encoding, structure.rounds_inputs)
        if scheme is None or not stores(checkpoint_format, scheme):
            raise UserError(
                f"{field}: found source for {module}, whose encoding {encoded.encoding} has no declaration in the "
                f"layout {checkpoint_format}.",
                hint="Set `format: compressed-tensors`."
                if scheme is not None and stores("compressed-tensors", scheme)
                else "Decode it to 16 bit (bf16), or round it to a scheme.",
            )
        schemes[module] = scheme
    return schemes

"""Weights that stay as the source stores them: the scheme that declares them, and the names of their tensors.

An FP8 weight of a source that is copied is half the bytes of one that is decoded to 16 bit, and holds the same numbers.
A checkpoint can declare it where its layout has a scheme with the same elements and scales:

    source                                    checkpoint, compressed-tensors
    X.weight            F8_E4M3 [O, I]        X.weight        the same bytes
    X.weight_scale_inv  F32 [O/128, I/128]    X.weight_scale  the same bytes
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from quantmint.calibration.encodings import plain_name
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.quantize.formats.checkpoint import Checkpoint
from quantmint.pipeline.quantize.formats.layout import StoredTensor, stores, weight_tensors
from quantmint.pipeline.quantize.model.structure import Structure

STORED_SCHEMES = {"fp8_block": "fp8_block", "fp8_channel": "ptpc_fp8", "mxfp8": "mxfp8", "mxfp4": "mxfp4"}
"""Scheme that declares a weight in an encoding of `calibration.encodings`, without a change of its bytes.

Encodings that are missing need more than their weight's tensors: a static scale of inputs, or another group size.
"""


def stored_schemes(
    structure: Structure, modules: Collection[str], checkpoint_format: str, field: str
) -> dict[str, str]:
    """Return the scheme by which a checkpoint declares each of ``modules`` whose weight the source has encoded.

    Modules in 16 bit are left out. Raises `UserError`, which names the recipe's ``field``, for an encoding that the
    layout cannot hold as it is.
    """
    schemes: dict[str, str] = {}
    for module in modules:
        encoded = structure.weights[module].encoded
        if encoded is None:
            continue
        scheme = STORED_SCHEMES.get(encoded.encoding)
        if scheme is None or not stores(checkpoint_format, scheme):
            raise UserError(
                f"{field}: found source for {module}, which the source holds in {encoded.encoding}; the format "
                f"{checkpoint_format} has no layout for it as it is.",
                hint="Set `format: compressed-tensors`."
                if scheme is not None and stores("compressed-tensors", scheme)
                else "Decode it to 16 bit, or round it to a scheme.",
            )
        schemes[module] = scheme
    return schemes


def stored_tensors(
    source: Checkpoint, structure: Structure, module: str, shape: tuple[int, int], checkpoint_format: str, scheme: str
) -> Iterator[tuple[StoredTensor, str]]:
    """Yield each tensor that a checkpoint holds for a module whose bytes are the source's, and its name in the source.

    ``shape`` is [O, I] of the decoded weight. Raises `UserError` for a tensor of another dtype or size than declared.
    """
    weight = structure.weights[module]
    assert weight.encoded is not None  # noqa: S101 - `stored_schemes` chose it
    (scale,) = weight.encoded.scales
    dtype = source.tensors[scale][1].dtype
    for stored in weight_tensors(checkpoint_format, scheme, module, shape, dtype):
        name = scale if stored.role.endswith("_scale") else weight.tensor
        info = source.tensors[name][1]
        if info.dtype != stored.dtype or info.nbytes != stored.nbytes:
            raise UserError(
                f"{source.folder}: {name} is {info.dtype} {list(info.shape)}, expected {stored.dtype} "
                f"{list(stored.shape)} to keep {plain_name(weight.tensor)} as it is stored."
            )
        yield replace(stored, role="copy"), name

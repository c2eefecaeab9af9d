"""Pieces of a model's weights: how many parameters, how vLLM divides them, how many bytes they take when stored.

A piece is one module's weight, or the same module's of all experts of a layer. `counting.py` makes pieces from a
configuration, `measuring.py` from the headers of shards.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pipeline.schemes import SCALE_BITS, table

Role = Literal[
    "embeddings", "head", "attention", "indexer", "linear-attention", "mlp", "experts", "shared-experts", "router",
    "norms", "encoder", "mtp",
]  # fmt: skip

Split = Literal["tensor", "kv", "vocabulary", "experts", "shared", "encoder", "copied"]
"""How the ranks share a piece: by tensor parallelism; by it, but at most once per KV head; by rows of the vocabulary;
over all ranks of a server; as a dense layer beside the experts; as a vision tower; or not at all."""

OTHER_BITS = {"awq": 4.15625, "gptq": 4.15625, "nvfp4": 4.5, "bitsandbytes": 4.5}
"""Bits of a weight with its share of the scales, for methods that are no scheme of ours: groups of 128 with a 16-bit
scale and a 4-bit zero point; groups of 16 with an E4M3 scale; groups of 64 with a float32 scale."""


@dataclass(frozen=True, slots=True)
class Piece:
    """``name`` is the module's on disk, of expert 0 for experts; ``layer`` is None outside the decoder's layers.

    ``rows`` counts output channels, over all experts: scales by channel need it. ``linear`` says that it is a matrix
    that quantization may touch; ``scheme`` is what it is stored in, None for the model's 16 bit.
    """

    name: str
    layer: int | None
    role: Role
    split: Split
    parameters: int
    nbytes: int
    rows: int = 0
    linear: bool = False
    scheme: str | None = None

    def stored(self, scheme: str | None) -> Piece:
        """The same weight in another scheme."""
        return replace(self, scheme=scheme, nbytes=stored_bytes(self.parameters, self.rows, scheme))


def bits_per_weight(scheme: str | None) -> float:
    """Bits of one weight with its share of group scales; 16 for None and for a method that nothing is known of."""
    if scheme in table():
        return table()[str(scheme)].bits_per_weight
    return OTHER_BITS.get(str(scheme), 16.0)


def stored_bytes(parameters: int, rows: int, scheme: str | None) -> int:
    """Bytes of a weight in a scheme, scales included; a scale by channel is one a row, by tensor one in all."""
    nbytes = parameters * bits_per_weight(scheme) / 8
    known = table().get(str(scheme))
    if known is not None and known.weight.granularity == "per_channel":
        nbytes += rows * SCALE_BITS[known.weight.scale] / 8
    return round(nbytes)

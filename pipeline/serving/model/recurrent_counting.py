"""Parameters of the layers that keep a state instead of keys and values: gated delta nets and Mamba.

Formulas are those of transformers 5.17's modules (qwen3_next, granitemoehybrid, nemotron_h, jamba).
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.serving.model.architecture import Shape
from pipeline.serving.model.parts import Piece


def recurrent_pieces(shape: Shape, prefix: str, layer: int, kind: str) -> Iterator[Piece]:
    """The weights of one such layer; tensor parallelism divides all of its matrices by heads."""
    sizes, hidden = shape.recurrent, shape.hidden
    assert sizes is not None  # noqa: S101 - a layer of this kind has them
    inner, groups = sizes.heads * sizes.head_dim, sizes.groups * sizes.state
    at = f"{prefix}linear_attn." if kind == "delta" else f"{prefix}mamba."
    if kind == "delta":
        yield _matrix(f"{at}in_proj_qkvz", layer, 2 * groups + 2 * inner, hidden)
        yield _matrix(f"{at}in_proj_ba", layer, 2 * sizes.heads, hidden)
        vectors = (2 * groups + inner) * sizes.kernel + 2 * sizes.heads + sizes.head_dim
    elif kind == "mamba2":
        yield _matrix(f"{at}in_proj", layer, 2 * inner + 2 * groups + sizes.heads, hidden)
        vectors = (inner + 2 * groups) * (sizes.kernel + 1) + 3 * sizes.heads + inner
    else:
        yield _matrix(f"{at}in_proj", layer, 2 * inner, hidden)
        yield _matrix(f"{at}x_proj", layer, sizes.time_rank + 2 * sizes.state, inner)
        yield _matrix(f"{at}dt_proj", layer, inner, sizes.time_rank)
        vectors = inner * (sizes.kernel + 1 + sizes.state + 2) + sizes.time_rank + 2 * sizes.state
    yield _matrix(f"{at}out_proj", layer, hidden, inner)
    yield Piece(f"{at}vectors", layer, "linear-attention", "tensor", vectors, 2 * vectors)


def _matrix(name: str, layer: int, rows: int, columns: int) -> Piece:
    size = rows * columns
    return Piece(name, layer, "linear-attention", "tensor", size, 2 * size, rows, linear=True)

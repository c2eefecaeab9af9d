"""How vLLM divides weights among the ranks of a server, and layers among the stages of a pipeline."""

from __future__ import annotations

from pipeline.serving.model.facts import ModelFacts
from pipeline.serving.model.parts import Piece
from pipeline.serving.plan import Layout

_VOCABULARY_STEP = 64  # rows are padded to it (vLLM 0.26 layers/vocab_parallel_embedding.py)
_MXFP4_STEPS = {"rocm": (256, 256), "cuda": (1, 64), "cpu": (32, 32)}
"""Hidden and intermediate sizes of MXFP4 experts are padded to these for the kernels of gpt-oss
(vLLM 0.32 layers/fused_moe/oracle/mxfp4.py: AITER and Triton on ROCm, Triton on Hopper, the CPU's)."""


def stages(layers: int, count: int) -> tuple[range, ...]:
    """The layers of each pipeline stage: as equal as can be, what is over goes to the stages before the last.

    vLLM 0.26 vllm/distributed/utils.py, get_pp_indices.
    """
    sizes = [layers // count] * count
    for number in range(layers % count):
        sizes[-(number + 2) if count > 1 else 0] += 1
    starts = [sum(sizes[:number]) for number in range(count)]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))


def stage_bytes(
    facts: ModelFacts, layout: Layout, stage: int, *, kind: str, encoder_copied: bool, speculative: bool
) -> int:
    """Bytes of weights on one rank of a stage, the fullest.

    Embeddings and the vision tower are in the first stage, the output head, a predictor and tied embeddings in the
    last. Latent attention keeps its up-projections a second time, in 16 bit, to fold them into queries and outputs
    (vLLM 0.32 layers/attention/mla_attention.py, process_weights_after_loading).
    """
    layers = stages(facts.layers, layout.pipeline)[stage]
    last = stage == layout.pipeline - 1
    tied = facts.shape.tied
    total = 0.0
    for piece in facts.pieces:
        if piece.layer is not None:
            here = piece.layer in layers
        elif piece.role == "mtp":
            here = last and speculative
        elif piece.role in ("embeddings", "encoder"):
            here = stage == 0 or (last and tied and piece.role == "embeddings")
        else:
            here = last
        if here:
            total += piece.nbytes * _share(piece, facts, layout, kind, encoder_copied)
    if latent := facts.shape.latent:
        folded = facts.heads * (latent.nope + latent.value) * latent.rank
        total += len(layers) * 2 * folded / layout.tensor
    return round(total)


def _share(piece: Piece, facts: ModelFacts, layout: Layout, kind: str, encoder_copied: bool) -> float:
    """The part of a piece's bytes that the fullest rank holds; more than 1 where padding adds to it."""
    tensor, ranks = layout.tensor, layout.tensor * layout.data
    if piece.split == "tensor":
        return 1 / tensor
    if piece.split == "kv":
        return 1 / min(tensor, max(1, facts.kv_heads))
    if piece.split == "vocabulary":
        padded = -(-facts.vocabulary // _VOCABULARY_STEP) * _VOCABULARY_STEP
        return padded / max(1, facts.vocabulary) / tensor
    if piece.split == "experts":
        whole = -(-facts.experts // ranks) / facts.experts if layout.expert else 1 / ranks
        return whole * _padding(facts, layout, kind)
    if piece.split == "shared":
        # With tokens sharded over the ranks of an engine, each needs the whole of what every token visits.
        return 1.0 if layout.expert and layout.data > 1 and tensor > 1 else 1 / tensor
    if piece.split == "encoder":
        return 1.0 if encoder_copied else 1 / tensor
    return 1.0


def _padding(facts: ModelFacts, layout: Layout, kind: str) -> float:
    if not facts.gpt_oss or facts.quantization != "mxfp4":
        return 1.0
    hidden, intermediate = _MXFP4_STEPS[kind]
    width = facts.expert_intermediate / (1 if layout.expert else layout.tensor * layout.data)
    return (-(-facts.hidden // hidden) * hidden / facts.hidden) * (-(-width // intermediate) * intermediate / width)

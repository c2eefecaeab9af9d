"""Whether a model can be cut up as a layout says: heads, the groups that share a scale, experts, layers.

    >>> split_faults(llama_70b, Layout(tensor=6))
    ('64 attention heads cannot be split over 6 GPUs',)

A fault is what vLLM refuses; a caution is what it pads or computes with a slower kernel. Read in vLLM 0.32:
config/model.py, layers/linear.py, layers/quantization, layers/fused_moe.
"""

from __future__ import annotations

from pipeline.serving.model.facts import ModelFacts
from pipeline.serving.plan import Layout

#: Methods whose loader pads what does not divide.
_PADDED = frozenset({"mxfp4"})
#: Width of the tiles of AITER's expert kernels above 192 columns (`aiter_moe_intermediate_alignment`).
_EXPERT_TILE = 128
#: AITER's assembly kernels for MXFP4 take whole tiles of this many columns.
_MX_TILE = 256


def split_faults(facts: ModelFacts, layout: Layout) -> tuple[str, ...]:
    """Why vLLM would refuse this layout, one clause each; empty where it would not."""
    tensor = layout.tensor
    found = []
    if facts.heads % tensor:
        found.append(f"{facts.heads} attention heads cannot be split over {tensor} GPUs")
    elif facts.attention == "mha" and max(tensor, facts.kv_heads) % min(tensor, facts.kv_heads):
        found.append(f"{facts.kv_heads} key-value heads can be neither split over {tensor} GPUs nor repeated evenly")
    if layout.pipeline > facts.layers:
        found.append(f"{facts.layers} layers do not fill {layout.pipeline} stages")
    if layout.expert and not facts.experts:
        found.append("there are no experts to spread")
    elif layout.expert and facts.experts < tensor * layout.data:
        found.append(f"{facts.experts} experts do not fill {tensor * layout.data} GPUs")
    group = facts.group
    if group is not None and facts.checkpoint_format not in _PADDED:
        for noun, width, parts in _widths(facts, layout):
            if width % (group * parts):
                found.append(
                    f"{noun} of {width} cannot be split over {parts} GPUs in whole groups of {group}"
                    f" ({facts.quantization})"
                )
    return tuple(found)


def split_cautions(facts: ModelFacts, layout: Layout, *, kind: str) -> tuple[str, ...]:
    """What works and costs: padding, slower kernels, repeated heads."""
    found = []
    tensor = layout.tensor
    if facts.attention == "mha" and facts.kv_heads and tensor > facts.kv_heads:
        found.append(
            f"{facts.kv_heads} key-value heads are repeated {tensor // facts.kv_heads} times over tensor parallelism of"
            f" {tensor}: each GPU caches one, so the KV cache does not shrink beyond {facts.kv_heads} GPUs"
        )
    sliced = facts.experts and facts.expert_intermediate and not layout.expert
    if kind == "rocm" and sliced and facts.checkpoint_format not in _PADDED:
        slice_ = facts.expert_intermediate // (tensor * layout.data)
        if slice_ > 192 and slice_ % _EXPERT_TILE:
            found.append(
                f"each GPU holds {slice_} columns of an expert, no multiple of {_EXPERT_TILE}: AITER pads them"
                " (vLLM 0.32 fused_moe/oracle/unquantized.py)"
            )
    if kind == "rocm" and facts.quantization.startswith("mxfp4") and facts.checkpoint_format not in _PADDED:
        odd = [f"{noun} {width // parts}" for noun, width, parts in _widths(facts, layout) if width // parts % _MX_TILE]
        if odd:
            found.append(
                f"what one GPU holds is no multiple of {_MX_TILE} ({', '.join(odd)}): AITER's assembly MXFP4 kernel"
                " leaves those layers to a slower one (vLLM 0.32 layers/quantization/quark)"
            )
    if layout.expert and facts.experts % (tensor * layout.data):
        found.append(f"{facts.experts} experts over {tensor * layout.data} GPUs: some hold one more than others")
    return tuple(found)


def _widths(facts: ModelFacts, layout: Layout) -> list[tuple[str, int, int]]:
    """Inputs of layers that tensor parallelism cuts, each with the number of parts; what is kept whole is left out."""
    tensor = layout.tensor
    found = []
    if facts.intermediate:
        found.append(("an MLP width", facts.intermediate, tensor))
    if facts.experts and facts.expert_intermediate:
        if not layout.expert:
            # Without expert parallelism vLLM cuts experts over tensor and data parallelism together.
            found.append(("an expert width", facts.expert_intermediate, tensor * layout.data))
        if facts.shared_experts:
            found.append(("a shared expert's width", facts.expert_intermediate * facts.shared_experts, tensor))
    if facts.attention == "mha":
        found.append(("an attention output", facts.heads * facts.head_dim, tensor))
    return [(noun, width, parts) for noun, width, parts in found if parts > 1]

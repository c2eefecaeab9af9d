"""The refusal of a model that does not fit its target: its memory by part, and the smallest changes that would fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from quantmint.eval.report.numbers import size
from quantmint.pipeline.base import hardware as accelerators
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.serving.plan import Memory, ParallelLayout
from quantmint.pipeline.serving.planning.attention import reads_fp8_cache
from quantmint.pipeline.serving.planning.draft import LaunchDraft
from quantmint.pipeline.serving.planning.layout import choose_layout, layout_words, split_faults


def shortfall(draft: LaunchDraft) -> UserError:
    """Return the error for a draft that no layout fits: the memory by part, and the changes that would make it fit."""
    target = f"{draft.target} ({draft.target.accelerator.title})"
    best = _roomiest_layout(draft)
    if best is None:
        faults = split_faults(draft.facts, ParallelLayout(draft.target.gpus))
        message, kv_tokens = f"the model cannot be split over {target}: {'; '.join(faults)}", 0
    else:
        layout, memory = best
        kv_tokens = max(0, memory.kv_tokens)
        message = _memory_words(draft, target, layout, memory)
    fixes = list(_fixes(draft, kv_tokens))
    hint = "it fits with " + "; or ".join(fixes) if fixes else "no target of the table holds it: quantize it further"
    return UserError(message, hint=hint)


def _memory_words(draft: LaunchDraft, target: str, layout: ParallelLayout, memory: Memory) -> str:
    device = "the process" if draft.target.accelerator.kind == "cpu" else "each accelerator"
    needed = memory.kv_bytes_per_token * draft.max_model_len
    return (
        f"{draft.facts.architecture or 'the model'} does not fit {target}: of {size(memory.total)} in {device} vLLM"
        f" may take {size(memory.budget)}; with {layout_words(layout)} weights take {size(memory.weights)},"
        f" activations {size(memory.activations)} and graphs {size(memory.graphs)}, which leaves"
        f" {size(max(0, memory.kv_cache))} for a KV cache that needs {size(needed)} for one request of"
        f" {draft.max_model_len:,} tokens"
    )


def _roomiest_layout(draft: LaunchDraft) -> tuple[ParallelLayout, Memory] | None:
    """Return the layout over all accelerators that leaves the most KV cache, with its memory; None if none splits."""
    gpus, nodes = draft.target.gpus, draft.target.nodes
    sizes = [tensor for tensor in range(1, gpus + 1) if gpus % tensor == 0]
    layouts = [ParallelLayout(tensor, gpus // tensor * nodes, nodes=nodes) for tensor in sizes]
    if draft.facts.experts and gpus * nodes > 1:
        layouts += [ParallelLayout(tensor, data=gpus // tensor * nodes, expert=True, nodes=nodes) for tensor in sizes]
    possible = [(layout, draft.memory(layout)) for layout in layouts if not split_faults(draft.facts, layout)]
    # When no layout leaves a cache, a reader expects to see the largest tensor parallelism.
    return max(possible, key=lambda pair: (max(0, pair[1].kv_cache), pair[0].tensor), default=None)


def _fixes(draft: LaunchDraft, kv_tokens: int) -> Iterator[str]:
    """Yield the smallest change of each kind that fits: more accelerators, larger ones, FP8 cache, shorter context."""
    target, row = draft.target, draft.target.accelerator
    sizes = [(gpus, 1) for gpus in (1, 2, 4, 8) if gpus <= row.gpus_per_node]
    sizes += [(row.gpus_per_node, nodes) for nodes in (2, 4, 8)]
    with_more = [
        replace(target, gpus=gpus, nodes=nodes) for gpus, nodes in sizes if gpus * nodes > target.gpus * target.nodes
    ]
    with_larger = [
        replace(target, hardware=name, hbm_bytes=None)
        for name, hardware in accelerators.table().items()
        if hardware.kind == row.kind and (hardware.hbm_bytes or 0) > (target.memory or 0)
        if target.gpus <= hardware.gpus_per_node
    ]
    for targets in (with_more if row.kind != "cpu" else [], with_larger):
        enough = next((option for option in targets if _fits(draft.with_target(option))), None)
        if enough is not None:
            yield f"--target {enough}"
    fp8_possible = draft.facts.attention != "none" and reads_fp8_cache(draft.facts, draft.version)
    if draft.kv_cache_dtype == "auto" and fp8_possible and _fits(replace(draft, kv_cache_dtype="fp8")):
        yield "an FP8 KV cache (--kv-cache-dtype fp8, best with calibrated scales: kv_cache: fp8 in a recipe)"
    context = kv_tokens // 1024 * 1024
    if 0 < context < draft.max_model_len and _fits(replace(draft, max_model_len=context)):
        yield f"a context of {context:,} tokens"


def _fits(draft: LaunchDraft) -> bool:
    return choose_layout(draft) is not None

"""A model that does not fit: the parts in GB, and the smallest changes with which it would. Everything is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from pipeline.errors import UserError
from pipeline.serving import hardware as accelerators
from pipeline.serving.plan import Layout, Memory
from pipeline.serving.planning.attention import takes
from pipeline.serving.planning.launch_request import LaunchRequest
from pipeline.serving.planning.layout import Choice
from pipeline.serving.planning.splitting import split_faults
from pipeline.serving.planning.target import Target

Choose = Callable[[LaunchRequest], Choice | None]

_STEP = 1024
"""Tokens that a proposed context is rounded down to."""
_NODES = (1, 2, 4, 8)


def shortfall(request: LaunchRequest, choose: Choose) -> UserError:
    """The refusal of a model that no layout of the target has room for."""
    best = _closest(request)
    target = f"{request.target} ({request.target.accelerator.title})"
    if best is None:
        faults = split_faults(request.facts, Layout(request.target.gpus))
        return UserError(
            f"the model cannot be split over {target}: {'; '.join(faults)}", hint=_hint(request, choose, 0)
        )
    layout, memory = best
    each = "the process" if request.target.accelerator.kind == "cpu" else "each accelerator"
    needed = memory.kv_bytes_per_token * request.max_model_len
    message = (
        f"{request.facts.architecture or 'the model'} does not fit {target}: of {_gb(memory.total)} GB in {each} vLLM"
        f" may take {_gb(memory.budget)}; with {_form(layout)} weights take {_gb(memory.weights)}, activations"
        f" {_gb(memory.activations)} and graphs {_gb(memory.graphs)}, which leaves {_gb(max(0, memory.kv_cache))} for a"
        f" KV cache that needs {_gb(needed)} for one request of {request.max_model_len:,} tokens"
    )
    return UserError(message, hint=_hint(request, choose, max(0, memory.kv_tokens)))


def _closest(request: LaunchRequest) -> tuple[Layout, Memory] | None:
    """The layout over all of the target's accelerators that leaves the most, with its memory."""
    gpus, nodes = request.target.gpus, request.target.nodes
    whole = [Layout(tensor, gpus // tensor * nodes, nodes=nodes) for tensor in range(1, gpus + 1) if gpus % tensor == 0]
    spread = [
        Layout(tensor, data=gpus // tensor * nodes, expert=True, nodes=nodes)
        for tensor in range(1, gpus + 1)
        if gpus % tensor == 0 and request.facts.experts and gpus * nodes > 1
    ]
    found = [
        (layout, request.memory(layout)) for layout in (*whole, *spread) if not split_faults(request.facts, layout)
    ]
    # Where nothing is left either way, the largest tensor parallelism is what a reader expects to see.
    return max(found, key=lambda pair: (max(0, pair[1].kv_cache), pair[0].tensor), default=None)


def _hint(request: LaunchRequest, choose: Choose, kv_tokens: int) -> str:
    ways = list(_ways(request, choose, kv_tokens))
    return "it fits with " + "; or ".join(ways) if ways else "no target of the table holds it: quantize it further"


def _ways(request: LaunchRequest, choose: Choose, kv_tokens: int) -> Iterator[str]:
    larger = next((target for target in _more(request.target) if choose(replace(request, target=target))), None)
    if larger is not None:
        yield f"--target {larger}"
    for name, row in accelerators.table().items():
        same = replace(request.target, hardware=name, hbm_bytes=None)
        larger_memory = (row.hbm_bytes or 0) > (request.target.memory or 0) and same.gpus <= row.gpus_per_node
        if row.kind == request.target.accelerator.kind and larger_memory and choose(replace(request, target=same)):
            yield f"--target {same}"
            break
    if request.kv_cache_dtype == "auto" and _may_be_fp8(request) and choose(replace(request, kv_cache_dtype="fp8")):
        yield "an FP8 KV cache (--kv-cache-dtype fp8, best with calibrated scales: kv_cache: fp8 in a recipe)"
    context = kv_tokens // _STEP * _STEP
    if 0 < context < request.max_model_len and choose(replace(request, max_model_len=context)):
        yield f"a context of {context:,} tokens"


def _more(target: Target) -> Iterator[Target]:
    """Targets with more of the same accelerator, the fewest first."""
    row = target.accelerator
    sizes = [(gpus, 1) for gpus in (1, 2, 4, 8) if gpus <= row.gpus_per_node]
    sizes += [(row.gpus_per_node, nodes) for nodes in _NODES[1:]]
    if row.kind == "cpu":
        return
    for gpus, nodes in sizes:
        if gpus * nodes > target.gpus * target.nodes:
            yield replace(target, gpus=gpus, nodes=nodes)


def _may_be_fp8(request: LaunchRequest) -> bool:
    backend = {"mla": "ROCM_AITER_MLA", "dsa": "ROCM_AITER_MLA_SPARSE"}.get(request.facts.attention)
    return request.facts.attention != "none" and takes(backend, request.numbers).fp8


def _form(layout: Layout) -> str:
    parts = [(layout.tensor, "tensor"), (layout.pipeline, "pipeline"), (layout.data, "data")]
    said = [f"{noun} parallelism of {size}" for size, noun in parts if size > 1]
    return (" and ".join(said) or "one accelerator") + (", experts spread" if layout.expert else "")


def _gb(count: int) -> str:
    return f"{count / 1e9:,.1f}"

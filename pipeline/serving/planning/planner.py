"""The launch that a model on a target gets, with the reason and source of every value.

Pure: nothing is read but the package's tables. The layout comes first (`layout.py`), then the knobs that it calls for
(`launch_request.py`), then what they leave for the KV cache (`memory.py`). A model that does not fit is refused with
the smallest changes that would make it fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quantmint.eval.report.numbers import size
from quantmint.pipeline.base import hardware as accelerators
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.recipe.schema import Speculative
from quantmint.pipeline.serving.environment import Version, parse_version
from quantmint.pipeline.serving.knobs.table import (
    NEWEST_READ,
    OLDEST_READ,
    checked_arguments,
    checked_overrides,
    layout_said,
    table,
)
from quantmint.pipeline.serving.model.facts import ModelFacts, as_quantized
from quantmint.pipeline.serving.plan import LaunchPlan, Layout, Memory, Reason
from quantmint.pipeline.serving.planning.launch_request import (
    GIVEN,
    LEN_FLAG,
    SET,
    KvDtype,
    LaunchRequest,
    Purpose,
    running,
    takes,
)
from quantmint.pipeline.serving.planning.layout import Choice, choose, split_faults
from quantmint.pipeline.serving.planning.target import Profile, Target, checked

_KV_FLAG = "--kv-cache-dtype"
_SCALED = ("fp8", "fp8_e4m3")  # by scales of the checkpoint; others compute theirs, or have the range of 16 bit
_BACKENDS = {"mla": "ROCM_AITER_MLA", "dsa": "ROCM_AITER_MLA_SPARSE"}
_IMAGE = "image"  # the container's one knob that is no option of `docker run`
#: Contexts that are tried, in tokens, where nobody says one: the longest that fits is taken.
_CONTEXTS = (32768, 16384, 8192, 4096, 2048)


def plan_serving(
    model: str | Path,
    facts: ModelFacts,
    *,
    target: Target,
    profile: Profile,
    vllm_version: str,
    purpose: Purpose = "serve",
    overrides: Mapping[str, str | bool] | None = None,
    speculative: Speculative | None = None,
    layout: Layout | None = None,
    kv_cache_dtype: KvDtype | None = None,
    served_model_name: str = "model",
    trust_remote_code: bool = False,
    cpu_threads: int = 1,
    packed: int = 1,
    tunableop: str | None = None,
    arguments: Sequence[str] = (),
) -> LaunchPlan:
    """Plan how ``model`` is served.

    ``purpose`` "measure" leaves out what would measure a cache instead of the model. ``overrides`` win over the table,
    by the knob's name: True is a flag without a value, False leaves the knob out. ``layout`` is taken as it is, for a
    pair that must share one. ``kv_cache_dtype`` None follows the checkpoint. ``packed`` servers share each accelerator.
    ``tunableop`` is the file of kernels that tuning found. ``arguments`` are passed on behind the plan's own.

    UserError, with what would do instead, for what does not load, does not fit or cannot be split.
    """
    checked(target)
    version = parse_version(vllm_version)
    if version[:2] < parse_version(OLDEST_READ)[:2]:
        raise UserError(
            f"vLLM {vllm_version} is older than {OLDEST_READ}, the oldest that is supported",
            hint=f"update vLLM; plans are made for {OLDEST_READ} to {NEWEST_READ}",
        )
    said = checked_overrides(overrides or {}, vllm_version)
    dtype = _kv_dtype(facts, target, version, said, kv_cache_dtype)
    refusal = accelerators.refusal(
        target.hardware, facts.quantization, dtype, facts.checkpoint_format, expert_schemes=facts.expert_schemes
    )
    if refusal is not None:
        raise UserError(refusal)
    asked = _length(facts, said, profile)
    made = table()["--quantization"].values.get(str(said.get("--quantization")))
    if made is not None and facts.quantization == "none":  # vLLM makes them while it loads
        stored = as_quantized(facts, scheme=made.scheme)
        facts = replace(facts, pieces=stored.pieces, weights=stored.weights, group=stored.group)
    request = LaunchRequest(
        facts=facts,
        target=target,
        profile=profile,
        version=vllm_version,
        max_model_len=asked or min(_CONTEXTS[0], facts.context),
        len_given=asked is not None,
        kv_cache_dtype=dtype,
        purpose=purpose,
        overrides=MappingProxyType(said),
        speculative=speculative,
        served_model_name=served_model_name,
        trust_remote_code=trust_remote_code,
        cpu_threads=cpu_threads,
        tunableop=tunableop,
    )
    passed = checked_arguments(arguments)
    request, choice = _laid_out(request, layout, packed)
    layout, settings, kind = choice.layout, request.settings(choice.layout), target.accelerator.kind
    argv = ["vllm", "serve", str(model)]
    for name, value in settings.flags.items():
        argv += [name] if value is None else [name, value]
    return LaunchPlan(
        env=settings.env,
        argv=(*argv, *arguments),
        served_model_name=settings.flags.get("--served-model-name") or str(model),
        tensor_parallel_size=layout.tensor,
        reasons=(Reason("layout", layout_words(layout), choice.why, choice.source), *settings.reasons, *passed),
        layout=layout,
        memory=request.memory(layout),
        host=settings.host,
        warnings=(*choice.notes, *_remarks(request, layout)),
        docker=tuple("=".join(filter(None, pair)) for pair in settings.docker if pair[0] != _IMAGE),
        image=dict(settings.docker).get(_IMAGE),
        attention_backend=running(request.facts, kind, settings.env, argv),
        target=str(target),
        profile=profile.name,
        vllm_version=vllm_version,
    )


def _laid_out(request: LaunchRequest, given: Layout | None, packed: int) -> tuple[LaunchRequest, Choice]:
    """The request with its context settled, and the layout."""
    said, layout = None, given or layout_said(request.overrides, request.target, busy=request.profile.for_throughput)
    if layout is not None:
        if faults := split_faults(request.facts, layout):
            raise UserError("; ".join(faults))
        why = "both sides of a comparison are laid out alike, as the larger of them needs it"
        said = Choice(layout, why, "quantmint") if given is not None else Choice(layout, SET, GIVEN)
    lengths = [request.max_model_len]
    if not request.len_given:
        least = _needed(request.facts, request.profile)
        lengths += [length for length in _CONTEXTS if least <= length < request.max_model_len]
    for length in lengths:
        tried = replace(request, max_model_len=length)
        choice = choose(tried, packed, said)
        if choice is not None:
            return tried, choice
    raise _shortfall(request, packed)


def layout_words(layout: Layout) -> str:
    """A layout in the terms of vLLM: "4 x (TP 2)", "DP 8 + EP", "TP 8 x PP 2 on 2 nodes"."""
    sizes = [("DP", layout.data), ("TP", layout.tensor), ("PP", layout.pipeline)]
    text = " x ".join(f"{name} {size}" for name, size in sizes if size > 1) or "TP 1"
    text += " + EP" if layout.expert else ""
    text += f" on {layout.nodes} nodes" if layout.nodes > 1 else ""
    servers = layout.replicas * layout.packed
    text = f"{servers} x ({text})" if servers > 1 else text
    return f"{text}, {layout.packed} on each accelerator" if layout.packed > 1 else text


def _kv_dtype(
    facts: ModelFacts, target: Target, version: Version, said: Mapping[str, str | bool], given: KvDtype | None
) -> KvDtype:
    """The type of the KV cache. A checkpoint with scales asks for nothing: where FP8 cannot be read it gets 16 bit."""
    override = said.get(_KV_FLAG)
    if override is not None:
        given = "fp8" if isinstance(override, str) and override.startswith("fp8") else "auto"
    dtype = given or ("fp8" if facts.kv_cache_scheme == "fp8" else "auto")
    backend = _BACKENDS.get(facts.attention)
    if dtype == "auto" or target.accelerator.kind != "rocm" or takes(backend, version).get("fp8", True):
        return dtype
    if given is not None:
        raise UserError(
            f"{backend} of this vLLM reads no FP8 KV cache ({takes(backend, version)['source']})",
            hint="leave the cache in 16 bit (kv_cache: auto), or plan for a later vLLM",
        )
    return "auto"


def _length(facts: ModelFacts, said: Mapping[str, str | bool], profile: Profile) -> int | None:
    """Tokens of the longest request that somebody asked for; UserError for more than the model knows."""
    override = said.get(LEN_FLAG)
    if override is not None and override is not False:
        text = str(override)
        if not text.isdecimal() or int(text) < 1:
            raise UserError(f"{LEN_FLAG} is {override!r}: expected a number of tokens")
        asked: int | None = int(text)
    else:
        needed = 0 if profile.max_model_len else _needed(facts, profile)
        asked = profile.max_model_len or (_with_room(needed, facts.context) if needed else None)
    if asked is not None and asked > facts.context:
        raise UserError(f"a context of {asked:,} tokens is asked for, but the model ends at {facts.context:,}")
    return asked


def _with_room(needed: int, context: int) -> int:
    """Return the least of the usual contexts that holds so many tokens, where the model's own does not end before it.

    A longer request is planned for as it is.
    """
    return max(needed, min(min((length for length in _CONTEXTS if length >= needed), default=needed), context))


def _needed(facts: ModelFacts, profile: Profile) -> int:
    """Tokens that a workload's longest request may take, 0 without one; UserError for more than the model knows."""
    if profile.longest > facts.context:
        raise UserError(
            f"the workload's longest request has {profile.longest:,} tokens, but the model ends at {facts.context:,}",
            hint="--max-model-len plans for shorter ones.",
        )
    # Random prompts are text again before they are sent, and the server may count some tokens more than were drawn.
    return min(profile.longest + max(16, profile.longest // 16), facts.context) if profile.longest else 0


def _remarks(request: LaunchRequest, layout: Layout) -> Iterator[str]:
    """What to know before a plan is started, in the order in which it matters, one sentence each."""
    facts, accelerator = request.facts, request.target.accelerator
    yield from accelerators.cautions(
        accelerator.name,
        facts.quantization,
        request.kv_cache_dtype,
        facts.checkpoint_format,
        expert_schemes=facts.expert_schemes,
    )
    if facts.attention == "mha" and 0 < facts.kv_heads < layout.tensor:
        yield (
            f"{facts.kv_heads} key-value heads are repeated {layout.tensor // facts.kv_heads} times over tensor"
            f" parallelism of {layout.tensor}: each GPU caches one, so the KV cache does not shrink beyond"
            f" {facts.kv_heads} GPUs"
        )
    if accelerator.kind == "rocm" and facts.kv_cache_scheme == "fp8" and request.kv_cache_dtype == "auto":
        yield "the checkpoint has scales for an FP8 KV cache, which is not used: it stays in 16 bit"
    said = str(request.overrides.get(_KV_FLAG, request.kv_cache_dtype))
    if said in _SCALED and facts.kv_cache_scheme is None and facts.attention in ("mha", "mla"):
        yield (
            "the checkpoint has no scales for an FP8 KV cache: vLLM takes 1.0 for each, and keys and values beyond"
            f" {accelerator.fp8_max:g} are cut off; `kv_cache: fp8` in a recipe calibrates them"
        )
    memory = request.memory(layout)
    if memory.beside and memory.beside > memory.total - memory.budget:
        yield (
            f"--gpu-memory-utilization leaves {size(memory.total - memory.budget)} beside vLLM, and Quick Reduce takes"
            f" {size(memory.beside)} there before vLLM looks: it will not start"
        )
    if not request.len_given and request.max_model_len < facts.context:
        yield (
            f"planned for {request.max_model_len:,} tokens of the {facts.context:,} that the model knows, because"
            " nobody said how long requests are: --max-model-len says it"
        )
    if request.speculative is None and facts.predictor:
        yield (
            "--speculative-config is not set because nobody asked for it: the model has a predictor of further tokens, "
            "and `serve: {speculative: {method: mtp, tokens: 1}}` in a recipe turns it on"
        )
    if request.purpose == "measure" and layout.replicas * layout.packed > 1:
        yield (
            f"one of {layout.replicas * layout.packed} independent servers is measured: the whole target gives as many"
            " times its throughput"
        )
    if request.numbers[:2] > parse_version(NEWEST_READ)[:2]:
        yield f"vLLM {request.version} is newer than the tables of this plan, which end at {NEWEST_READ}"


def _shortfall(request: LaunchRequest, packed: int) -> UserError:
    """The refusal of a model that no layout of the target has room for: the parts in GB, and what would do."""
    target = f"{request.target} ({request.target.accelerator.title})"
    best = _closest(request)
    if best is None:
        faults = split_faults(request.facts, Layout(request.target.gpus))
        message, kv_tokens = f"the model cannot be split over {target}: {'; '.join(faults)}", 0
    else:
        layout, memory = best
        each = "the process" if request.target.accelerator.kind == "cpu" else "each accelerator"
        needed, kv_tokens = memory.kv_bytes_per_token * request.max_model_len, max(0, memory.kv_tokens)
        message = (
            f"{request.facts.architecture or 'the model'} does not fit {target}: of {size(memory.total)} in {each} vLLM"
            f" may take {size(memory.budget)}; with {layout_words(layout)} weights take {size(memory.weights)},"
            f" activations {size(memory.activations)} and graphs {size(memory.graphs)}, which leaves"
            f" {size(max(0, memory.kv_cache))} for a KV cache that needs {size(needed)} for one request of"
            f" {request.max_model_len:,} tokens"
        )
    ways = list(_ways(request, packed, kv_tokens))
    hint = "it fits with " + "; or ".join(ways) if ways else "no target of the table holds it: quantize it further"
    return UserError(message, hint=hint)


def _closest(request: LaunchRequest) -> tuple[Layout, Memory] | None:
    """The layout over all of the target's accelerators that leaves the most, with its memory."""
    gpus, nodes = request.target.gpus, request.target.nodes
    sizes = [tensor for tensor in range(1, gpus + 1) if gpus % tensor == 0]
    layouts = [Layout(tensor, gpus // tensor * nodes, nodes=nodes) for tensor in sizes]
    if request.facts.experts and gpus * nodes > 1:
        layouts += [Layout(tensor, data=gpus // tensor * nodes, expert=True, nodes=nodes) for tensor in sizes]
    found = [(layout, request.memory(layout)) for layout in layouts if not split_faults(request.facts, layout)]
    # Where nothing is left either way, the largest tensor parallelism is what a reader expects to see.
    return max(found, key=lambda pair: (max(0, pair[1].kv_cache), pair[0].tensor), default=None)


def _ways(request: LaunchRequest, packed: int, kv_tokens: int) -> Iterator[str]:
    """More accelerators, larger ones, a smaller cache, a shorter context: the least of each that does."""

    def fits(**changes: Any) -> bool:
        return choose(replace(request, **changes), packed) is not None

    target, row = request.target, request.target.accelerator
    sizes = [(gpus, 1) for gpus in (1, 2, 4, 8) if gpus <= row.gpus_per_node]
    sizes += [(row.gpus_per_node, nodes) for nodes in (2, 4, 8)]
    more = [
        replace(target, gpus=gpus, nodes=nodes) for gpus, nodes in sizes if gpus * nodes > target.gpus * target.nodes
    ]
    larger = [
        replace(target, hardware=name, hbm_bytes=None)
        for name, other in accelerators.table().items()
        if other.kind == row.kind and (other.hbm_bytes or 0) > (target.memory or 0)
        if target.gpus <= other.gpus_per_node
    ]
    for others in (more if row.kind != "cpu" else [], larger):
        enough = next((other for other in others if fits(target=other)), None)
        if enough is not None:
            yield f"--target {enough}"
    backend = _BACKENDS.get(request.facts.attention)
    readable = request.facts.attention != "none" and takes(backend, request.numbers).get("fp8", True)
    if request.kv_cache_dtype == "auto" and readable and fits(kv_cache_dtype="fp8"):
        yield "an FP8 KV cache (--kv-cache-dtype fp8, best with calibrated scales: kv_cache: fp8 in a recipe)"
    context = kv_tokens // 1024 * 1024
    if 0 < context < request.max_model_len and fits(max_model_len=context):
        yield f"a context of {context:,} tokens"

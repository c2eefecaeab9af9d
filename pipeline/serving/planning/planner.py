"""Plan a launch: a model on a target becomes a vLLM command line, with the reason and source of every value.

Pure: it reads nothing but the package's tables. It chooses the layout first (`layout.py`), then the knobs that the
layout needs (`draft.py`), and counts what they leave for the KV cache (`memory.py`). A model that does not fit is
refused with the smallest changes that would make it fit (`shortfall.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from quantmint.eval.report.numbers import size
from quantmint.pipeline.base import hardware as accelerators
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.serving.environment import parse_version
from quantmint.pipeline.serving.knobs.overrides import check_arguments, check_overrides, layout_override
from quantmint.pipeline.serving.knobs.table import NEWEST_READ, OLDEST_READ, table
from quantmint.pipeline.serving.model.facts import ModelFacts, as_quantized
from quantmint.pipeline.serving.plan import LaunchPlan, ParallelLayout, Reason
from quantmint.pipeline.serving.planning.attention import (
    attention_backend,
    backend_limits,
    backend_of,
    reads_fp8_cache,
)
from quantmint.pipeline.serving.planning.draft import LEN_FLAG, OVERRIDE_SOURCE, OVERRIDE_WHY, LaunchDraft
from quantmint.pipeline.serving.planning.layout import LayoutChoice, choose_layout, layout_words, split_faults
from quantmint.pipeline.serving.planning.request import KvCacheDtype, ServingRequest
from quantmint.pipeline.serving.planning.shortfall import shortfall
from quantmint.pipeline.serving.planning.target import Profile, check_target

_KV_FLAG = "--kv-cache-dtype"
#: FP8 caches that use the checkpoint's scales; other 8-bit caches compute their own.
_STATIC_FP8 = ("fp8", "fp8_e4m3")
_IMAGE = "image"  # the container's one knob that is not an option of `docker run`
#: Contexts to try, in tokens, when no length is requested; the longest that fits is taken.
_CONTEXTS = (32768, 16384, 8192, 4096, 2048)


def plan_serving(request: ServingRequest) -> LaunchPlan:
    """Return the launch for a request.

    Raises `UserError`, with what would work instead, when the target or version is not supported, when vLLM cannot load
    the model there, when the model does not fit or cannot be split, and for overrides or arguments that are not
    allowed.
    """
    draft = _draft(request)
    reasons = check_arguments(request.arguments)
    draft, choice = _choose_layout(draft)
    layout, settings, kind = choice.layout, draft.settings(choice.layout), request.target.accelerator.kind
    argv = ["vllm", "serve", str(request.model)]
    for name, value in settings.flags.items():
        argv += [name] if value is None else [name, value]
    return LaunchPlan(
        env=settings.env,
        argv=(*argv, *request.arguments),
        served_model_name=settings.flags.get("--served-model-name") or str(request.model),
        tensor_parallel_size=layout.tensor,
        reasons=(Reason("layout", layout_words(layout), choice.why, choice.source), *settings.reasons, *reasons),
        layout=layout,
        memory=draft.memory(layout),
        host=settings.host,
        warnings=(*choice.notes, *_warnings(draft, layout)),
        docker=tuple("=".join(filter(None, pair)) for pair in settings.docker if pair[0] != _IMAGE),
        image=dict(settings.docker).get(_IMAGE),
        attention_backend=attention_backend(draft.facts, kind, settings.env, argv),
        target=str(request.target),
        profile=request.profile.name,
        vllm_version=request.vllm_version,
    )


def _draft(request: ServingRequest) -> LaunchDraft:
    """Return the request's draft with all settled but the layout: overrides, KV cache, context, quantization on load.

    Raises `UserError` for a target, version, override or length that is not supported, and where vLLM cannot load the
    model.
    """
    check_target(request.target)
    version = parse_version(request.vllm_version)
    if version[:2] < parse_version(OLDEST_READ)[:2]:
        raise UserError(
            f"vLLM {request.vllm_version} is older than {OLDEST_READ}, the oldest that is supported",
            hint=f"update vLLM; plans are made for {OLDEST_READ} to {NEWEST_READ}",
        )
    overrides = check_overrides(request.overrides, request.vllm_version)
    facts = request.facts
    dtype = _kv_cache_dtype(request, overrides)
    schemes = facts.schemes or (facts.quantization,)
    refusal = accelerators.refusal(
        request.target.hardware, schemes, dtype, facts.checkpoint_format, expert_schemes=facts.expert_schemes
    )
    if refusal is not None:
        raise UserError(refusal)
    length = _requested_length(facts, overrides, request.profile)
    online = table()["--quantization"].values.get(str(overrides.get("--quantization")))
    if online is not None and facts.quantization == "none":
        stored = as_quantized(facts, scheme=online.scheme)
        facts = replace(facts, module_weights=stored.module_weights, weights=stored.weights, group=stored.group)
    return LaunchDraft(
        request=request,
        facts=facts,
        max_model_len=length or min(_CONTEXTS[0], facts.context),
        length_requested=length is not None,
        kv_cache_dtype=dtype,
        overrides=MappingProxyType(overrides),
    )


def _choose_layout(draft: LaunchDraft) -> tuple[LaunchDraft, LayoutChoice]:
    """Return the draft with its context settled, and its layout. Raises `UserError` when no context fits any layout."""
    fixed = _fixed_layout(draft)
    lengths = [draft.max_model_len]
    if not draft.length_requested:
        minimum = _workload_length(draft.facts, draft.profile)
        lengths += [length for length in _CONTEXTS if minimum <= length < draft.max_model_len]
    for length in lengths:
        candidate = replace(draft, max_model_len=length)
        choice = choose_layout(candidate, fixed)
        if choice is not None:
            return candidate, choice
    raise shortfall(draft)


def _fixed_layout(draft: LaunchDraft) -> LayoutChoice | None:
    """Return the layout that the request or its overrides name.

    Raises `UserError` when the model cannot be split that way.
    """
    request = draft.request
    if request.layout is not None:
        why = "both sides of a comparison use the same layout, the one that the larger side needs"
        choice = LayoutChoice(request.layout, why, "quantmint")
    else:
        layout = layout_override(draft.overrides, request.target, fill=request.profile.for_throughput)
        if layout is None:
            return None
        choice = LayoutChoice(layout, OVERRIDE_WHY, OVERRIDE_SOURCE)
    if faults := split_faults(draft.facts, choice.layout):
        raise UserError("; ".join(faults))
    return choice


def _kv_cache_dtype(request: ServingRequest, overrides: Mapping[str, str | bool]) -> KvCacheDtype:
    """Return the type of the KV cache: the override's, the request's, or the one that the checkpoint has scales for.

    A checkpoint's FP8 scales are ignored when the attention backend reads no FP8 cache. Raises `UserError` when the
    user asked for FP8 there.
    """
    requested, facts, target = request.kv_cache_dtype, request.facts, request.target
    override = overrides.get(_KV_FLAG)
    if override is not None:
        requested = "fp8" if isinstance(override, str) and override.startswith("fp8") else "auto"
    dtype = requested or ("fp8" if facts.kv_cache_scheme == "fp8" else "auto")
    version = parse_version(request.vllm_version)
    if dtype == "auto" or target.accelerator.kind != "rocm" or reads_fp8_cache(facts, version):
        return dtype
    if requested is None:
        return "auto"
    backend = backend_of(facts)
    raise UserError(
        f"{backend} reads no FP8 KV cache in vLLM {request.vllm_version} ({backend_limits(backend, version).source})",
        hint="keep the cache in 16 bit (kv_cache: auto), or plan for a later vLLM",
    )


def _requested_length(facts: ModelFacts, overrides: Mapping[str, str | bool], profile: Profile) -> int | None:
    """Return the context that the override, profile or workload asks for, in tokens; None when none of them does.

    Raises `UserError` for more tokens than the model's context, and for an override that is not a number.
    """
    override = overrides.get(LEN_FLAG)
    length: int | None
    if override is not None and override is not False:
        text = str(override)
        if not text.isdecimal() or int(text) < 1:
            raise UserError(f"{LEN_FLAG} is {override!r}: expected a number of tokens")
        length = int(text)
    elif profile.max_model_len:
        length = profile.max_model_len
    else:
        needed = _workload_length(facts, profile)
        length = _rounded_context(needed, facts.context) if needed else None
    if length is not None and length > facts.context:
        raise UserError(f"max_model_len is {length:,} tokens, more than the model's context of {facts.context:,}")
    return length


def _rounded_context(needed: int, context: int) -> int:
    """Return the smallest of the usual contexts that holds ``needed`` tokens, or the model's own if that is shorter.

    Beyond the usual contexts it is ``needed`` itself.
    """
    return max(needed, min(min((length for length in _CONTEXTS if length >= needed), default=needed), context))


def _workload_length(facts: ModelFacts, profile: Profile) -> int:
    """Return the tokens that a workload's longest request may take, 0 without a workload.

    Raises `UserError` for more tokens than the model's context.
    """
    if profile.longest > facts.context:
        raise UserError(
            f"the workload's longest request has {profile.longest:,} tokens, more than the model's context of"
            f" {facts.context:,}",
            hint="--max-model-len plans for shorter requests.",
        )
    # Random prompts are sent as text, and the server's tokenizer may count a few tokens more than were drawn.
    return min(profile.longest + max(16, profile.longest // 16), facts.context) if profile.longest else 0


def _warnings(draft: LaunchDraft, layout: ParallelLayout) -> Iterator[str]:
    """Yield what a user must know before starting the launch, one sentence each, the most important first."""
    facts, accelerator = draft.facts, draft.target.accelerator
    yield from accelerators.cautions(
        accelerator.name,
        facts.quantization,
        draft.kv_cache_dtype,
        facts.checkpoint_format,
        expert_schemes=facts.expert_schemes,
    )
    yield from _memory_warnings(draft, layout)
    if not draft.length_requested and draft.max_model_len < facts.context:
        yield (
            f"the plan has room for requests of {draft.max_model_len:,} tokens, though the model takes"
            f" {facts.context:,}, because no request length was given; --max-model-len sets one"
        )
    if draft.request.speculative is None and facts.predictor:
        yield (
            "the model can predict several tokens at a time (MTP), but --speculative-config is not set;"
            " `serve: {speculative: {method: mtp, tokens: 1}}` in a recipe turns it on"
        )
    servers = layout.replicas * layout.packed
    if draft.request.purpose == "measure" and servers > 1:
        yield f"one of {servers} independent servers is measured; the whole target has {servers} times its throughput"
    if draft.version[:2] > parse_version(NEWEST_READ)[:2]:
        yield f"vLLM {draft.request.vllm_version} is newer than the tables of this plan, which end at {NEWEST_READ}"


def _memory_warnings(draft: LaunchDraft, layout: ParallelLayout) -> Iterator[str]:
    facts, accelerator = draft.facts, draft.target.accelerator
    if facts.attention == "mha" and 0 < facts.kv_heads < layout.tensor:
        yield (
            f"tensor parallelism of {layout.tensor} repeats {facts.kv_heads} key-value heads"
            f" {layout.tensor // facts.kv_heads} times: each GPU caches one head, and the KV cache does not shrink"
            f" beyond {facts.kv_heads} GPUs"
        )
    if accelerator.kind == "rocm" and facts.kv_cache_scheme == "fp8" and draft.kv_cache_dtype == "auto":
        yield "the checkpoint has scales for an FP8 KV cache, but the cache stays in 16 bit"
    dtype = str(draft.overrides.get(_KV_FLAG, draft.kv_cache_dtype))
    if dtype in _STATIC_FP8 and facts.kv_cache_scheme is None and facts.attention in ("mha", "mla"):
        yield (
            "the checkpoint has no scales for an FP8 KV cache: vLLM uses scales of 1.0 and clips keys and values beyond"
            f" {accelerator.fp8_max:g}; `kv_cache: fp8` in a recipe calibrates the scales"
        )
    memory = draft.memory(layout)
    if memory.beside and memory.beside > memory.total - memory.budget:
        yield (
            f"--gpu-memory-utilization leaves {size(memory.total - memory.budget)} outside vLLM's share, but Quick"
            f" Reduce takes {size(memory.beside)} there before vLLM starts: the server will not start"
        )

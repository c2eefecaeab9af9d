"""The launch that a model on a target gets, with the reason and source of every value.

    >>> plan = plan_serving("/models/m", facts, target=parse_target("mi300x:8"), profile=profile("throughput"),
    ...                     vllm_version="0.33.0")
    >>> plan.argv[:3], plan.layout.replicas
    (('vllm', 'serve', '/models/m'), 8)

Pure: the same arguments give the same plan, and nothing is read but the package's tables. The layout comes first
(`layout.py`), then the knobs that it calls for (`knobs.py`), then what they leave for the KV cache (`memory.py`), and
last what a reader should know (`remarks.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType

from pipeline.errors import UserError
from pipeline.recipe.schema import Speculative
from pipeline.serving import hardware as accelerators
from pipeline.serving.knobs.overrides import checked_overrides, layout_said
from pipeline.serving.knobs.passed import checked_arguments
from pipeline.serving.model.facts import ModelFacts
from pipeline.serving.plan import LaunchPlan, Layout, Memory, Reason
from pipeline.serving.planning.attention import known_on_rocm, running, takes
from pipeline.serving.planning.launch_request import GIVEN, LEN_FLAG, SET, KvDtype, LaunchRequest, Purpose
from pipeline.serving.planning.layout import Choice, choose
from pipeline.serving.planning.profiles import Profile
from pipeline.serving.planning.remarks import OLDEST_READ, remarks
from pipeline.serving.planning.shortfall import shortfall
from pipeline.serving.planning.splitting import split_faults
from pipeline.serving.planning.target import Target, checked
from pipeline.serving.versions import parse_version

_KV_FLAG = "--kv-cache-dtype"
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

    ``profile`` holds the load: its ``max_model_len`` may be None, and is then chosen. ``purpose`` "measure" leaves out
    what would measure a cache instead of the model. ``overrides`` win over the table, by the knob's name: True is a
    flag without a value, False leaves the knob out. ``layout`` is taken as it is, for a pair that must share one.
    ``kv_cache_dtype`` None follows the checkpoint. ``packed`` servers share each accelerator. ``cpu_threads`` are the
    cores that a CPU server may use. ``tunableop`` is the file of kernels that tuning found.
    ``arguments`` are passed on to vLLM behind the plan's own.

    UserError, with what would do instead, for what does not load, does not fit or cannot be split.
    """
    checked(target)
    if packed < 1:
        raise UserError(f"pack is {packed}: expected 1 or more servers on an accelerator")
    said = checked_overrides(overrides or {}, vllm_version)
    version = parse_version(vllm_version)
    if version < parse_version(OLDEST_READ)[:2]:
        raise UserError(f"vLLM {vllm_version} is older than the tables of knobs, which begin at {OLDEST_READ}")
    dtype, explicit = _kv_dtype(facts, said, kv_cache_dtype)
    dtype = _readable(facts, target, version, dtype, explicit=explicit)
    _loads(facts, target, version, dtype)
    request = LaunchRequest(
        facts=facts,
        target=target,
        profile=profile,
        version=vllm_version,
        max_model_len=_length(facts, said, profile) or min(_CONTEXTS[0], facts.context),
        len_given=_length(facts, said, profile) is not None,
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
    plan = _assembled(str(model), request, choice)
    return replace(plan, argv=(*plan.argv, *arguments), reasons=(*plan.reasons, *passed))


def _laid_out(request: LaunchRequest, given: Layout | None, packed: int) -> tuple[LaunchRequest, Choice]:
    """The request with its context settled, and the layout."""
    said = given or layout_said(request.overrides, request.target, busy=request.profile.for_throughput)
    lengths = (
        [request.max_model_len]
        if request.len_given
        else [
            length for length in dict.fromkeys((request.max_model_len, *_CONTEXTS)) if length <= request.max_model_len
        ]
    )
    for length in lengths:
        tried = replace(request, max_model_len=length)
        choice = _fixed(tried, said, by_caller=given is not None) if said is not None else _chosen(tried, packed)
        if choice is not None:
            return tried, choice
    raise shortfall(request, lambda other: _chosen(other, packed))


def _chosen(request: LaunchRequest, packed: int = 1) -> Choice | None:
    memory_of = cache(request.memory)

    def memory(layout: Layout) -> Memory:
        # Copies of a server change nothing about what one of them holds.
        return memory_of(replace(layout, replicas=1))

    return choose(
        request.facts,
        request.target,
        request.profile,
        memory,
        max_model_len=request.max_model_len,
        packed=packed,
    )


def _fixed(request: LaunchRequest, layout: Layout, *, by_caller: bool) -> Choice | None:
    faults = split_faults(request.facts, layout)
    if faults:
        raise UserError("; ".join(faults))
    memory = request.memory(layout)
    if memory.kv_cache <= 0 or memory.kv_tokens < request.max_model_len:
        return None
    if by_caller:
        why = "both sides of a comparison are laid out alike, as the larger of them needs it"
        return Choice(layout, why, "quantmint")
    return Choice(layout, SET, GIVEN)


def _assembled(model: str, request: LaunchRequest, choice: Choice) -> LaunchPlan:
    layout = choice.layout
    settings = request.settings(layout)
    argv = ["vllm", "serve", model]
    for name, value in settings.flags.items():
        argv += [name] if value is None else [name, value]
    kind = request.target.accelerator.kind
    return LaunchPlan(
        env=settings.env,
        argv=tuple(argv),
        served_model_name=settings.flags.get("--served-model-name") or model,
        tensor_parallel_size=layout.tensor,
        reasons=(Reason("layout", layout_words(layout), choice.why, choice.source), *settings.reasons),
        layout=layout,
        memory=request.memory(layout),
        host=settings.host,
        warnings=(*choice.notes, *remarks(request, layout)),
        docker=tuple(word for pair in settings.docker if pair[0] != _IMAGE for word in pair if word is not None),
        image=dict(settings.docker).get(_IMAGE),
        attention_backend=running(request.facts, kind, request.numbers, settings.env, argv),
        target=str(request.target),
        profile=request.profile.name,
        vllm_version=request.version,
    )


def layout_words(layout: Layout) -> str:
    """A layout in the terms of vLLM: "4 x (TP 2)", "DP 8 + EP", "TP 8 x PP 2 on 2 nodes"."""
    sizes = [("DP", layout.data), ("TP", layout.tensor), ("PP", layout.pipeline)]
    text = " x ".join(f"{name} {size}" for name, size in sizes if size > 1) or "TP 1"
    text += " + EP" if layout.expert else ""
    text += f" on {layout.nodes} nodes" if layout.nodes > 1 else ""
    servers = layout.replicas * layout.packed
    text = f"{servers} x ({text})" if servers > 1 else text
    return f"{text}, {layout.packed} on each accelerator" if layout.packed > 1 else text


def _kv_dtype(facts: ModelFacts, said: Mapping[str, str | bool], given: KvDtype | None) -> tuple[KvDtype, bool]:
    """The type of the KV cache and whether somebody asked for it; a checkpoint with scales asks for nothing."""
    override = said.get(_KV_FLAG)
    if isinstance(override, str):
        return ("fp8" if override.startswith("fp8") else "auto"), True
    if override is False:
        return "auto", True
    if given is not None:
        return given, True
    return ("fp8" if facts.kv_cache_scheme == "fp8" else "auto"), False


def _readable(
    facts: ModelFacts, target: Target, version: tuple[int, ...], dtype: KvDtype, *, explicit: bool
) -> KvDtype:
    """The type that this version's attention can read; UserError where somebody asked for another."""
    backend = {"mla": "ROCM_AITER_MLA", "dsa": "ROCM_AITER_MLA_SPARSE"}.get(facts.attention)
    if dtype == "auto" or target.accelerator.kind != "rocm" or takes(backend, version).fp8:
        return dtype
    if explicit:
        raise UserError(
            f"{backend} of this vLLM reads no FP8 KV cache ({takes(backend, version).source})",
            hint="leave the cache in 16 bit (kv_cache: auto), or plan for a later vLLM",
        )
    return "auto"


def _loads(facts: ModelFacts, target: Target, version: tuple[int, ...], dtype: KvDtype) -> None:
    refusal = accelerators.refusal(target.hardware, facts.quantization, dtype, facts.checkpoint_format)
    if refusal is not None:
        raise UserError(refusal)
    if target.accelerator.kind == "rocm" and not known_on_rocm(facts, version):
        raise UserError(
            f"vLLM {'.'.join(map(str, version))} has no sparse attention on ROCm (platforms/rocm.py)",
            hint="0.12 is the first that serves DeepSeek-V3.2 and its like there",
        )


def _length(facts: ModelFacts, said: Mapping[str, str | bool], profile: Profile) -> int | None:
    """Tokens of the longest request that somebody asked for; UserError for more than the model knows."""
    override = said.get(LEN_FLAG)
    if override is not None and override is not False:
        text = str(override)
        if not text.isdecimal() or int(text) < 1:
            raise UserError(f"{LEN_FLAG} is {override!r}: expected a number of tokens")
        asked: int | None = int(text)
    else:
        asked = profile.max_model_len
    if asked is not None and asked > facts.context:
        raise UserError(f"a context of {asked:,} tokens is asked for, but the model ends at {facts.context:,}")
    return asked

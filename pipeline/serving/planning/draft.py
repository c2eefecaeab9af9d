"""A launch before its layout is chosen, and the knobs, with reasons, that each layout would get.

`LaunchDraft.rule_facts` gathers the facts that rules of the knob table ask for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from quantmint.pipeline.base import hardware as accelerators
from quantmint.pipeline.recipe.serving import Speculative
from quantmint.pipeline.serving.environment import Version, parse_version
from quantmint.pipeline.serving.knobs.table import Fact, table, value_of
from quantmint.pipeline.serving.model.facts import ModelFacts
from quantmint.pipeline.serving.plan import HostCheck, Memory, ParallelLayout, Reason
from quantmint.pipeline.serving.planning.attention import aiter_mla, bidirectional_images
from quantmint.pipeline.serving.planning.kv_cache import kv_bytes_per_token
from quantmint.pipeline.serving.planning.memory import EngineSettings, estimate_memory
from quantmint.pipeline.serving.planning.request import KvCacheDtype, ServingRequest
from quantmint.pipeline.serving.planning.target import Profile, ServingTarget

LEN_FLAG = "--max-model-len"
OVERRIDE_WHY, OVERRIDE_SOURCE = "set in the recipe or on the command line", "given"
"""Reason and source of a value that overrides the table's."""

#: vLLM's defaults for a launch that does not set them (config/cache.py, config/scheduler.py, engine/arg_utils.py).
_DEFAULT_MAX_NUM_SEQS, _DEFAULT_BATCHED_TOKENS, _DEFAULT_GRAPHS = 1024, 8192, "FULL_AND_PIECEWISE"
_QUICK_REDUCE = "VLLM_ROCM_QUICK_REDUCE_"


@dataclass(frozen=True, slots=True)
class KnobSettings:
    """The knobs of one layout by kind, in the order of the table.

    The value None is a flag or option without a value.
    """

    flags: Mapping[str, str | None]
    env: Mapping[str, str]
    docker: tuple[tuple[str, str | None], ...]
    host: tuple[HostCheck, ...]
    reasons: tuple[Reason, ...]


class _KnobValue(NamedTuple):
    value: str | None
    why: str
    source: str


@dataclass(frozen=True, slots=True)
class LaunchDraft:
    """A request whose open choices are settled, except for the layout.

    ``facts`` are the model's as vLLM holds it in memory, which differ from the request's when vLLM quantizes while it
    loads. ``max_model_len`` is in tokens; ``length_requested`` is False when the planner chose it. ``overrides`` are
    the request's, checked.
    """

    request: ServingRequest
    facts: ModelFacts
    max_model_len: int
    length_requested: bool
    kv_cache_dtype: KvCacheDtype
    overrides: Mapping[str, str | bool] = field(hash=False)

    @property
    def target(self) -> ServingTarget:
        """The request's machines."""
        return self.request.target

    @property
    def profile(self) -> Profile:
        """The request's load."""
        return self.request.profile

    @property
    def version(self) -> Version:
        """The release numbers of the request's vLLM version."""
        return parse_version(self.request.vllm_version)

    def with_target(self, target: ServingTarget) -> LaunchDraft:
        """Return the same draft on other machines."""
        return replace(self, request=replace(self.request, target=target))

    def settings(self, layout: ParallelLayout) -> KnobSettings:
        """Return every knob that the table's rules or the overrides set for this layout."""
        facts = self.rule_facts(layout)
        facts |= self._quick_reduce_facts(facts)
        flags: dict[str, str | None] = {}
        env: dict[str, str] = {}
        docker: list[tuple[str, str | None]] = []
        host: list[HostCheck] = []
        reasons: list[Reason] = []
        for knob in table().values():
            setting = self._knob_value(knob.name, facts)
            if setting is None:
                continue
            value, why, source = setting
            if knob.kind == "host":
                host.append(HostCheck(knob.name, value or "", why, source))
                continue
            if knob.kind == "flag":
                flags[knob.name] = value
            elif knob.kind == "env":
                env[knob.name] = value or ""
            else:
                docker.append((knob.name, value))
            reasons.append(Reason(knob.name, "on" if value is None else value, why, source))
        host += self._package_checks()
        return KnobSettings(MappingProxyType(flags), MappingProxyType(env), tuple(docker), tuple(host), tuple(reasons))

    def _package_checks(self) -> list[HostCheck]:
        """Return a check for each Python package without which vLLM cannot emulate the model's scheme here."""
        model, accelerator = self.facts, self.target.accelerator
        packages = accelerators.needs(
            accelerator.name, model.quantization, self.kv_cache_dtype, model.checkpoint_format
        )
        why = f"vLLM emulates {model.quantization} on {accelerator.title} with it, and stops without it"
        source = "vLLM 0.32 layers/quantization/quark"
        return [HostCheck(package, "installed beside vLLM", why, source) for package in packages]

    def _quick_reduce_facts(self, facts: Mapping[str, Fact]) -> dict[str, Fact]:
        """Return the number format of Quick Reduce, and MB of the launch's largest all-reduce, at least its minimum."""
        quantization = self._knob_value(f"{_QUICK_REDUCE}QUANTIZATION", facts)
        batched = self._knob_value("--max-num-batched-tokens", facts)
        nbytes = 2 * self.facts.hidden * int((batched and batched.value) or _DEFAULT_BATCHED_TOKENS)
        minimum = int(self.overrides.get(f"{_QUICK_REDUCE}MIN_SIZE_BYTES_MB") or 16)
        return {
            "quick_reduce": (quantization and quantization.value) or "NONE",
            "quick_reduce_mb": max(minimum, math.ceil(nbytes / 2**20)),
        }

    def _knob_value(self, name: str, facts: Mapping[str, Fact]) -> _KnobValue | None:
        """Return the knob's value with its reason: the override, else the first rule's; None leaves the knob unset."""
        if name in self.overrides:
            override = self.overrides[name]
            if override is False:
                return None
            return _KnobValue(None if override is True else str(override), OVERRIDE_WHY, OVERRIDE_SOURCE)
        if self.overrides.get(opposite(name)) not in {None, False}:
            return None
        rule = table()[name].choose(facts, self.version)
        if rule is None:
            return None
        if name == LEN_FLAG and not self.length_requested:
            why = "no request length was given; the plan makes room for at least one request of this length"
            return _KnobValue(str(self.max_model_len), why, "quantmint")
        if name == LEN_FLAG and self.profile.longest and not self.profile.max_model_len:
            why = f"the workload's longest request has {self.profile.longest:,} tokens, and this has room for it"
            return _KnobValue(str(self.max_model_len), why, "quantmint")
        return _KnobValue(value_of(rule, facts), rule.why, rule.source)

    def memory(self, layout: ParallelLayout) -> Memory:
        """Return the memory of the fullest accelerator under this layout and its knobs.

        Raises `UserError` when the accelerator's memory is not known.
        """
        settings = self.settings(layout)
        flags, env = settings.flags, settings.env
        cpu_gib = env.get("VLLM_CPU_KVCACHE_SPACE")
        block = flags.get("--block-size")
        float32 = self.kv_cache_dtype == "auto" and flags.get("--dtype") in ("float", "float32")
        quick_reduce = env.get(f"{_QUICK_REDUCE}QUANTIZATION", "NONE") != "NONE" and layout.tensor > 1
        buffers = 2 * int(env.get(f"{_QUICK_REDUCE}MAX_SIZE_BYTES_MB") or 2048) * 2**20 if quick_reduce else 0
        engine = EngineSettings(
            vllm_version=self.request.vllm_version,
            utilization=float(flags.get("--gpu-memory-utilization") or (0.9 if self.version < (0, 20) else 0.92)),
            max_model_len=self.max_model_len,
            max_num_seqs=int(flags.get("--max-num-seqs") or _DEFAULT_MAX_NUM_SEQS),
            max_num_batched_tokens=int(flags.get("--max-num-batched-tokens") or _DEFAULT_BATCHED_TOKENS),
            kv_cache_dtype="float32" if float32 else self.kv_cache_dtype,
            block_size=None if block is None else int(block),
            cudagraph_mode=cudagraph_mode(flags),
            cpu_kv_bytes=None if cpu_gib is None else int(float(cpu_gib) * 2**30),
        )
        memory = estimate_memory(self.facts, self.target.accelerator, layout, engine, hbm_bytes=self.target.hbm_bytes)
        return replace(memory, beside=buffers)

    def rule_facts(self, layout: ParallelLayout) -> dict[str, Fact]:
        """Return the facts that rules of the knob table test or insert, by name."""
        request, facts, accelerator, profile = self.request, self.facts, self.target.accelerator, self.profile
        engines = layout.data * layout.replicas * layout.packed
        request_facts = ("cpu_threads", "purpose", "served_model_name")
        model_facts = ("family", "attention", "encoder_share", "head_dim", "quantization")
        return {
            **{name: getattr(request, name) for name in request_facts},
            **{name: getattr(facts, name) for name in model_facts},
            "max_model_len": self.max_model_len,
            "kv_cache_dtype": self.kv_cache_dtype,
            "kind": accelerator.kind,
            "arch": accelerator.arch or "",
            "nodes": layout.nodes,
            "vllm_version": ".".join(str(part) for part in (*self.version, 0, 0)[:3]),  # image tags have three parts
            "cpu_kv_gib": self._cpu_kv_gib(),
            "profile": profile.name,
            # A measured server gets the whole load: its siblings are not started.
            "engine_concurrency": math.ceil(
                profile.concurrency / (layout.data if request.purpose == "measure" else engines)
            ),
            # A length that the planner chose does not describe the requests that will come.
            "context": self.max_model_len if self.length_requested else profile.request_tokens,
            # A length below the model's own must be passed on, or vLLM takes the model's.
            "model_len_given": _yes(self.length_requested or self.max_model_len < facts.context),
            "trust_remote_code": _yes(request.trust_remote_code),
            "speculative": _yes(request.speculative is not None),
            "speculative_config": "" if request.speculative is None else speculative_config(request.speculative),
            "tuned_gemms": _yes(request.tunableop is not None),
            "tunableop_file": request.tunableop or "",
            "hybrid": _yes(facts.hybrid),
            "sliding": _yes(facts.sliding_layers > 0),
            "multimodal": _yes(facts.multimodal),
            "parameters_b": facts.parameters / 1e9,
            "aiter_mla": _yes(aiter_mla(facts, layout.tensor, self.version)),
            "mm_prefix": _yes(bidirectional_images(facts)),
            "chunked": _yes(facts.chunk is not None and self.max_model_len > facts.chunk),
            "tp": layout.tensor,
            "pp": layout.pipeline,
            "dp": layout.data,
            "ep": _yes(layout.expert),
            "gpus": layout.gpus,
            "packed": layout.packed,
        }

    def _cpu_kv_gib(self) -> int:
        """Return GiB for every concurrent request at full length in 16 bit: at most 4, but enough for one request."""
        # vLLM's CPU blocks hold 128 tokens; a request's last block counts whole.
        tokens = math.ceil(self.max_model_len / 128) * 128
        request_bytes = kv_bytes_per_token(self.facts, 1, "auto", kind="cpu") * tokens
        all_requests = math.ceil(request_bytes * self.profile.concurrency / 2**30)
        return max(1, math.ceil(request_bytes / 2**30), min(4, all_requests))


def speculative_config(speculative: Speculative) -> str:
    """Return the JSON value of --speculative-config, without the two keys of AMD's example that vLLM refuses."""
    model = {} if speculative.model is None else {"model": speculative.model}
    return json.dumps({"method": speculative.method, **model, "num_speculative_tokens": speculative.tokens})


def opposite(name: str) -> str:
    """Return the flag that negates a flag: ``--no-X`` for ``--X``, and ``--X`` for ``--no-X``."""
    return name.replace("--no-", "--") if name.startswith("--no-") else name.replace("--", "--no-", 1)


def cudagraph_mode(flags: Mapping[str, str | None]) -> str | None:
    """Return the graph mode of a launch with these flags; None when it runs eagerly."""
    if "--enforce-eager" in flags:
        return None
    mode = json.loads(flags.get("--compilation-config") or "{}").get("cudagraph_mode")
    return mode or _DEFAULT_GRAPHS


def _yes(condition: bool) -> str:
    return "yes" if condition else "no"

"""Everything that a launch is planned from except its layout, and what a layout makes of it: knobs with reasons.

The facts that the rules of the knob table ask for are put together here; among them which attention backend an Instinct
GPU runs, and what that takes (`attention.yaml`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from quantmint.pipeline.base import hardware as accelerators
from quantmint.pipeline.base.data import beside
from quantmint.pipeline.recipe.schema import Speculative
from quantmint.pipeline.serving.environment import Version, parse_version, within
from quantmint.pipeline.serving.knobs.table import Fact, table, value_of
from quantmint.pipeline.serving.model.facts import ModelFacts
from quantmint.pipeline.serving.plan import HostCheck, Layout, Memory, Reason
from quantmint.pipeline.serving.planning.memory import fit, kv_bytes_per_token
from quantmint.pipeline.serving.planning.target import Profile, Target

Purpose = Literal["serve", "measure", "tune"]
"""For users; a side of a comparison; or a server for users while its knobs are measured."""
KvDtype = Literal["auto", "fp8"]

LEN_FLAG = "--max-model-len"
SET, GIVEN = "set in the recipe or on the command line", "given"
"""Why, and who says so, for what overrules the table."""
#: What vLLM takes where a launch says nothing (config/cache.py, config/scheduler.py, engine/arg_utils.py).
_SEQS, _BATCHED, _GRAPHS = 1024, 8192, "FULL_AND_PIECEWISE"
_BACKEND = "--attention-backend"
_QUICK_REDUCE = "VLLM_ROCM_QUICK_REDUCE_"


@dataclass(frozen=True, slots=True)
class Settings:
    """What the table and the recipe say for one layout, in the order of the table; a flag's value may be None."""

    flags: Mapping[str, str | None]
    env: Mapping[str, str]
    docker: tuple[tuple[str, str | None], ...]
    host: tuple[HostCheck, ...]
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """``max_model_len`` is in tokens; ``len_given`` says whether somebody asked for it. ``version`` is vLLM's."""

    facts: ModelFacts
    target: Target
    profile: Profile
    version: str
    max_model_len: int
    len_given: bool
    kv_cache_dtype: KvDtype
    purpose: Purpose = "serve"
    overrides: Mapping[str, str | bool] = field(default_factory=lambda: MappingProxyType({}), hash=False)
    speculative: Speculative | None = None
    served_model_name: str = "model"
    trust_remote_code: bool = False
    cpu_threads: int = 1
    tunableop: str | None = None

    @property
    def numbers(self) -> Version:
        """The version as numbers."""
        return parse_version(self.version)

    def settings(self, layout: Layout) -> Settings:
        """Every knob that this layout calls for, or that the recipe sets."""
        facts = self.knob_facts(layout)
        facts |= self._quick_reduce(facts)
        flags: dict[str, str | None] = {}
        env: dict[str, str] = {}
        docker: list[tuple[str, str | None]] = []
        host: list[HostCheck] = []
        reasons: list[Reason] = []
        for knob in table().values():
            chosen = self._chosen(knob.name, facts)
            if chosen is None:
                continue
            value, why, source = chosen
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
        model, accelerator = self.facts, self.target.accelerator
        for package in accelerators.needs(
            accelerator.name, model.quantization, self.kv_cache_dtype, model.checkpoint_format
        ):
            why = f"vLLM emulates {model.quantization} on {accelerator.title} with it, and stops without it"
            host.append(HostCheck(package, "installed beside vLLM", why, "vLLM 0.32 layers/quantization/quark"))
        return Settings(MappingProxyType(flags), MappingProxyType(env), tuple(docker), tuple(host), tuple(reasons))

    def _quick_reduce(self, facts: Mapping[str, Fact]) -> dict[str, Fact]:
        """The type in which the launch adds up, and the MB of its largest all-reduce; at least those it begins at."""
        reduced = self._chosen(f"{_QUICK_REDUCE}QUANTIZATION", facts)
        batched = self._chosen("--max-num-batched-tokens", facts)
        size = 2 * self.facts.hidden * int((batched and batched[0]) or _BATCHED)
        least = int(self.overrides.get(f"{_QUICK_REDUCE}MIN_SIZE_BYTES_MB") or 16)
        return {
            "quick_reduce": (reduced and reduced[0]) or "NONE",
            "quick_reduce_mb": max(least, math.ceil(size / 2**20)),
        }

    def _chosen(self, name: str, facts: Mapping[str, Fact]) -> tuple[str | None, str, str] | None:
        """Value, why and source; None where the knob is left alone."""
        if name in self.overrides:
            given = self.overrides[name]
            return None if given is False else (None if given is True else str(given), SET, GIVEN)
        if self.overrides.get(opposite(name)) not in {None, False}:
            return None
        rule = table()[name].choose(facts, self.numbers)
        if rule is not None and name == LEN_FLAG and not self.len_given:
            why = "nobody said how long requests are: so much is planned for, and one request of that length must fit"
            return str(self.max_model_len), why, "quantmint"
        if rule is not None and name == LEN_FLAG and self.profile.longest and not self.profile.max_model_len:
            why = f"the workload's longest request has {self.profile.longest:,} tokens, and this has room for it"
            return str(self.max_model_len), why, "quantmint"
        return None if rule is None else (value_of(rule, facts), rule.why, rule.source)

    def memory(self, layout: Layout) -> Memory:
        """What the layout's knobs leave for the KV cache."""
        settings = self.settings(layout)
        flags = settings.flags
        cpu_gib = settings.env.get("VLLM_CPU_KVCACHE_SPACE")
        block = flags.get("--block-size")
        wide = self.kv_cache_dtype == "auto" and flags.get("--dtype") in ("float", "float32")
        reduced = settings.env.get(f"{_QUICK_REDUCE}QUANTIZATION", "NONE") != "NONE" and layout.tensor > 1
        buffers = 2 * int(settings.env.get(f"{_QUICK_REDUCE}MAX_SIZE_BYTES_MB") or 2048) * 2**20 if reduced else 0
        found = fit(
            self.facts,
            self.target.accelerator,
            layout,
            hbm_bytes=self.target.hbm_bytes,
            utilization=float(flags.get("--gpu-memory-utilization") or (0.9 if self.numbers < (0, 20) else 0.92)),
            max_model_len=self.max_model_len,
            max_num_seqs=int(flags.get("--max-num-seqs") or _SEQS),
            max_num_batched_tokens=int(flags.get("--max-num-batched-tokens") or _BATCHED),
            kv_cache_dtype="float32" if wide else self.kv_cache_dtype,
            block_size=None if block is None else int(block),
            cudagraph_mode=cudagraph_mode(flags),
            version=self.version,
            cpu_kv_bytes=None if cpu_gib is None else int(float(cpu_gib) * 2**30),
        )
        return replace(found, beside=buffers)

    def knob_facts(self, layout: Layout) -> dict[str, Fact]:
        """The facts that rules of the knob table ask for."""
        facts, accelerator, profile = self.facts, self.target.accelerator, self.profile
        engines = layout.data * layout.replicas * layout.packed
        own = ("cpu_threads", "purpose", "max_model_len", "served_model_name", "kv_cache_dtype")
        models = ("family", "attention", "encoder_share", "head_dim", "quantization")
        return {
            **{name: getattr(self, name) for name in own},
            **{name: getattr(facts, name) for name in models},
            "kind": accelerator.kind,
            "arch": accelerator.arch or "",
            "nodes": layout.nodes,
            "vllm_version": ".".join(str(part) for part in (*self.numbers, 0, 0)[:3]),  # a tag has three parts
            "cpu_kv_gib": self._cpu_kv_gib(),
            "profile": profile.name,
            # A measured server meets the whole load by itself.
            "engine_concurrency": math.ceil(
                profile.concurrency / (layout.data if self.purpose == "measure" else engines)
            ),
            # A length that nobody said tells nothing of the requests that come.
            "context": self.max_model_len if self.len_given else profile.request_tokens,
            # A length that the plan chose must be said as well, or vLLM takes the model's own.
            "model_len_given": _yes(self.len_given or self.max_model_len < facts.context),
            "trust_remote_code": _yes(self.trust_remote_code),
            "speculative": _yes(self.speculative is not None),
            "speculative_config": "" if self.speculative is None else speculative_config(self.speculative),
            "tuned_gemms": _yes(self.tunableop is not None),
            "tunableop_file": self.tunableop or "",
            "hybrid": _yes(facts.hybrid),
            "sliding": _yes(facts.sliding_layers > 0),
            "multimodal": _yes(facts.multimodal),
            "parameters_b": facts.parameters / 1e9,
            "aiter_mla": _yes(aiter_mla(facts, layout.tensor, self.numbers)),
            # Tokens of an image attend to each other in both directions, which AITER's backends do not do.
            "mm_prefix": _yes(facts.multimodal and facts.model_type in beside(__file__, "attention.yaml")["mm_prefix"]),
            "chunked": _yes(facts.chunk is not None and self.max_model_len > facts.chunk),
            "tp": layout.tensor,
            "pp": layout.pipeline,
            "dp": layout.data,
            "ep": _yes(layout.expert),
            "gpus": layout.gpus,
            "packed": layout.packed,
        }

    def _cpu_kv_gib(self) -> int:
        """GiB that hold every request at full length in 16 bit: at most 4, but never less than one such request."""
        # vLLM's CPU blocks hold 128 tokens: the last block of a request is counted whole.
        tokens = math.ceil(self.max_model_len / 128) * 128
        one = kv_bytes_per_token(self.facts, 1, "auto", kind="cpu") * tokens
        whole = math.ceil(one * self.profile.concurrency / 2**30)
        return max(1, math.ceil(one / 2**30), min(4, whole))


def speculative_config(speculative: Speculative) -> str:
    """The value of --speculative-config, without two keys of the guides' example that vLLM refuses."""
    model = {} if speculative.model is None else {"model": speculative.model}
    return json.dumps({"method": speculative.method, **model, "num_speculative_tokens": speculative.tokens})


def opposite(name: str) -> str:
    """The flag that says the contrary of a flag: ``--no-X`` of ``--X``, and the other way round."""
    return name.replace("--no-", "--") if name.startswith("--no-") else name.replace("--", "--no-", 1)


def cudagraph_mode(flags: Mapping[str, str | None]) -> str | None:
    """The graph mode that a launch gets; None where it computes eagerly."""
    if "--enforce-eager" in flags:
        return None
    said = json.loads(flags.get("--compilation-config") or "{}").get("cudagraph_mode")
    return said or _GRAPHS


def takes(backend: str | None, version: Version) -> Mapping[str, Any]:
    """What a backend takes in a version of vLLM, as `attention.yaml` has it; empty where that knows no limit."""
    for row in beside(__file__, "attention.yaml")["takes"].get(backend, ()):
        first, end = (parse_version(bound) if bound else () for bound in row["vllm"])
        if within(version, first, end):
            return dict(row)
    return {}


def aiter_mla(facts: ModelFacts, tensor: int, version: Version) -> bool:
    """Whether AITER's latent attention takes this model's heads, split over ``tensor`` accelerators."""
    return facts.attention == "mla" and facts.heads // tensor in takes("ROCM_AITER_MLA", version)["heads"]


def running(facts: ModelFacts, kind: str, env: Mapping[str, str], argv: Sequence[str]) -> str | None:
    """The backend that a launch's log must name; None where that cannot be told from here."""
    if _BACKEND in argv:
        return argv[argv.index(_BACKEND) + 1]
    if kind != "rocm" or facts.attention == "none":
        return None
    switched_on = env.get("VLLM_ROCM_USE_AITER") == "1"
    if facts.attention == "mla":
        return "ROCM_AITER_MLA" if switched_on and env.get("VLLM_ROCM_USE_AITER_MLA") != "0" else "TRITON_MLA"
    if not switched_on:
        return None
    return "ROCM_AITER_MLA_SPARSE" if facts.attention == "dsa" else "ROCM_ATTN"


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"

"""How a checkpoint is served: environment, arguments, and the reason of each.

    >>> plan = plan_launch("/models/m", config=config, hardware="mi300x", gpus=8, max_model_len=8192,
    ...                    kv_cache_dtype="fp8", concurrency=64, vllm_version="0.33.0")
    >>> plan.argv[:3]
    ('vllm', 'serve', '/models/m')

A plan is a pure function of its arguments; the launcher adds host, port and what keeps the server offline. Baseline and
candidate get the same plan but for the model's folder and the KV cache's type. The knobs are `knobs.yaml`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import yaml

from pipeline.errors import UserError
from pipeline.serving import hardware as accelerators

_CPU_KV_MOST_GIB = 4


class Reason(NamedTuple):
    """Why a knob has its value, and who says so."""

    knob: str
    value: str
    why: str
    source: str


class HostCheck(NamedTuple):
    """Something that the machine must offer for this launch; `name` is the knob's, `quantmint doctor` looks at it."""

    name: str
    expected: str
    why: str
    source: str


@dataclass(frozen=True, slots=True)
class Layout:
    """How accelerators share the work.

    One server holds ``data`` engines of ``tensor`` x ``pipeline`` accelerators and spans ``nodes``; ``replicas``
    servers are independent of each other. ``packed`` servers share one accelerator. ``expert`` spreads whole experts
    over an engine's (with ``data``: a server's) accelerators instead of slices of each.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: bool = False
    replicas: int = 1
    packed: int = 1
    nodes: int = 1

    @property
    def gpus(self) -> int:
        """Accelerators of one server."""
        return self.tensor * self.pipeline * self.data


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the fullest accelerator of a server, by part; on a CPU those of the process.

    ``total`` is the accelerator's, ``budget`` the share that vLLM may take, ``kv_cache`` what of it is left for keys
    and values, ``kv_tokens`` how many tokens that holds in one engine, ``concurrency`` requests of full length in it.
    """

    total: int
    budget: int
    weights: int
    activations: int
    graphs: int
    kv_cache: int
    kv_bytes_per_token: int
    kv_tokens: int
    concurrency: float

    def to_json(self) -> dict[str, int | float]:
        """A plain mapping of the fields."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Process:
    """One process of a launch. ``port`` is None where nothing is served (a headless engine, a Ray worker)."""

    node: int
    role: Literal["server", "headless", "ray-head", "ray-worker"]
    replica: int
    gpus: tuple[int, ...]
    port: int | None
    env: Mapping[str, str]
    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """What `vllm serve` gets. `argv` starts with ("vllm", "serve", MODEL) and names neither host nor port."""

    env: Mapping[str, str]
    argv: tuple[str, ...]
    served_model_name: str
    tensor_parallel_size: int
    reasons: tuple[Reason, ...]
    layout: Layout = Layout()
    memory: Memory | None = None
    host: tuple[HostCheck, ...] = ()
    warnings: tuple[str, ...] = ()
    docker: tuple[str, ...] = ()
    image: str | None = None
    attention_backend: str | None = None
    target: str = ""
    profile: str = ""
    vllm_version: str = ""

    @property
    def model(self) -> str:
        """The checkpoint's folder."""
        return self.argv[2]

    def option(self, name: str) -> str | None:
        """The value of an argument, the last where it is repeated; "" for a flag that takes none, None where absent."""
        value = None
        for word, following in zip(self.argv, (*self.argv[1:], "--"), strict=True):
            if word == name:
                value = "" if following.startswith("--") else following
            elif word.startswith(f"{name}="):
                value = word.partition("=")[2]
        return value

    def canonical(self) -> dict[str, Any]:
        """The part that shapes a measurement, for a fingerprint: no model path, no prose."""
        return {"env": dict(sorted(self.env.items())), "arguments": list(self.argv[3:])}

    def to_json(self) -> dict[str, Any]:
        """The whole plan as JSON values."""
        return {
            "target": self.target,
            "profile": self.profile,
            "vllm_version": self.vllm_version,
            "env": dict(self.env),
            "argv": list(self.argv),
            "served_model_name": self.served_model_name,
            "replicas": self.layout.replicas,
            "tensor_parallel_size": self.tensor_parallel_size,
            "pipeline_parallel_size": self.layout.pipeline,
            "data_parallel_size": self.layout.data,
            "expert_parallel": self.layout.expert,
            "nodes": self.layout.nodes,
            "servers_per_gpu": self.layout.packed,
            "attention_backend": self.attention_backend,
            "memory": None if self.memory is None else self.memory.to_json(),
            "host": [check._asdict() for check in self.host],
            "image": self.image,
            "docker": list(self.docker),
            "reasons": [reason._asdict() for reason in self.reasons],
            "warnings": list(self.warnings),
        }


@dataclass(frozen=True, slots=True)
class Knob:
    """One entry of the table; `value` is None for a flag that takes none."""

    name: str
    kind: Literal["flag", "env"]
    value: str | None
    when: Mapping[str, tuple[str, ...]]
    first: tuple[int, ...]
    end: tuple[int, ...]
    why: str
    source: str

    def holds(self, facts: Mapping[str, str], version: tuple[int, ...]) -> bool:
        """Whether the knob belongs to a launch with these facts on this version of vLLM."""
        known = self.first <= version and (not self.end or version < self.end)
        return known and all(facts[fact] in values for fact, values in self.when.items())


def plan_launch(
    model_dir: Path | str,
    *,
    config: Mapping[str, Any],
    hardware: str,
    gpus: int,
    max_model_len: int,
    kv_cache_dtype: Literal["auto", "fp8"],
    concurrency: int,
    vllm_version: str,
    cpu_threads: int = 1,
    served_model_name: str = "model",
    trust_remote_code: bool = False,
) -> LaunchPlan:
    """Plan one server on one node.

    ``config`` is the model's parsed config.json. ``max_model_len`` counts tokens of a prompt with its answer,
    ``concurrency`` the requests in flight, ``cpu_threads`` the cores that a CPU server may use. UserError where the
    model cannot be split over ``gpus`` or the hardware is unknown.
    """
    target = accelerators.hardware(hardware)
    text = config.get("text_config") or config
    heads = int(text.get("num_attention_heads", 0))
    if target.kind == "cpu" and gpus != 1:
        raise UserError(f"hardware cpu serves with one device, not {gpus}")
    if gpus < 1 or gpus > target.gpus_per_node:
        raise UserError(f"gpus is {gpus}: {target.title} has 1 to {target.gpus_per_node} in a node")
    if heads and heads % gpus:
        raise UserError(f"{heads} attention heads cannot be split over {gpus} GPUs")
    facts = {
        "kind": target.kind,
        "arch": target.arch or "",
        "hardware": target.name,
        "gpus": str(gpus),
        "multi_gpu": "yes" if gpus > 1 else "no",
        "attention": "mla" if text.get("kv_lora_rank") else "mha",
        "head_dim": str(_head_dim(text)),
        "kv_cache_dtype": kv_cache_dtype,
        "max_model_len": str(max_model_len),
        "concurrency": str(concurrency),
        "cpu_threads": str(cpu_threads),
        "cpu_kv_gib": str(_cpu_kv_gib(text, max_model_len, concurrency)),
        "served_model_name": served_model_name,
        "trust_remote_code": "yes" if trust_remote_code else "no",
    }
    version = parse_version(vllm_version)
    chosen: dict[str, Knob] = {}
    for knob in knobs():
        if knob.holds(facts, version):
            chosen.setdefault(knob.name, knob)
    env: dict[str, str] = {}
    argv = ["vllm", "serve", str(model_dir)]
    reasons = []
    for knob in chosen.values():
        value = None if knob.value is None else knob.value.format_map(facts)
        if knob.kind == "env":
            env[knob.name] = value or ""
        else:
            argv += [knob.name] if value is None else [knob.name, value]
        reasons.append(Reason(knob.name, "on" if value is None else value, knob.why, knob.source))
    return LaunchPlan(MappingProxyType(env), tuple(argv), served_model_name, gpus, tuple(reasons))


def parse_version(text: str) -> tuple[int, ...]:
    """Release numbers of a vLLM version: "0.32.0+cpu" is (0, 32, 0). UserError for a text that starts with none."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", text)
    if found is None:
        raise UserError(f"{text!r} is not a version of vLLM: expected something like 0.32.0")
    return tuple(int(part) for part in found[1].split("."))


@cache
def knobs() -> tuple[Knob, ...]:
    """The table, in the order of its file."""
    text = resources.files("pipeline.serving").joinpath("knobs.yaml").read_text(encoding="utf-8")
    return tuple(_knob(row) for row in yaml.safe_load(text))


def _knob(row: dict[str, Any]) -> Knob:
    first, end = row.get("vllm", (None, None))
    return Knob(
        name=row["name"],
        kind=row["kind"],
        value=None if row["value"] is True else row["value"],
        when=MappingProxyType({fact: tuple(values) for fact, values in row.get("when", {}).items()}),
        first=parse_version(first) if first else (),
        end=parse_version(end) if end else (),
        why=row["why"],
        source=row["source"],
    )


def _head_dim(text: Mapping[str, Any]) -> int:
    heads = int(text.get("num_attention_heads") or 1)
    return int(text.get("head_dim") or int(text.get("hidden_size", 0)) // heads)


def _cpu_kv_gib(text: Mapping[str, Any], max_model_len: int, concurrency: int) -> int:
    """GiB that hold every request at full length in 16 bit: at most 4, but never less than one such request."""
    layers = int(text.get("num_hidden_layers", 1))
    kv_heads = int(text.get("num_key_value_heads") or text.get("num_attention_heads") or 1)
    # vLLM's CPU blocks hold 128 tokens: the last block of a request is counted whole.
    tokens = math.ceil(max_model_len / 128) * 128
    one = 2 * layers * kv_heads * _head_dim(text) * 2 * tokens
    return max(math.ceil(one / 2**30), min(_CPU_KV_MOST_GIB, math.ceil(one * concurrency / 2**30)))

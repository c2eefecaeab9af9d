"""How accelerators share a model: the rows of `layouts.yaml`, the layouts that a row allows, and the first that fits.

A layout *has room* when one request of full length fits; it is *comfortable* when the KV caches of all servers also
hold the profile's share of what is in flight.

Whether a model can be cut up as a layout says is read from vLLM 0.32 (config/model.py, layers/linear.py,
layers/quantization, layers/fused_moe).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Final, NamedTuple

from quantmint.pipeline.base.data import beside
from quantmint.pipeline.serving.model.facts import ModelFacts
from quantmint.pipeline.serving.plan import Layout, Memory
from quantmint.pipeline.serving.planning.launch_request import LaunchRequest
from quantmint.pipeline.serving.planning.target import Profile

LOW, CROSSING, HIGH = 128, 256, 512
"""Requests in flight up to which, and from which on, the guides decide (ROCm 2026: Parallelism strategies); and the
fewest at which data parallelism overtook tensor parallelism for latent attention (Data Parallel Attention)."""

#: Methods whose loader pads what does not divide.
_PADDED = frozenset({"mxfp4"})


class Row(NamedTuple):
    """One entry of the table."""

    name: str
    when: Mapping[str, list[str]]
    form: str
    why: str
    source: str
    expert: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """A layout, the reason for it, and what a reader should know beside it."""

    layout: Layout
    why: str
    source: str
    notes: tuple[str, ...] = ()


class _Case:
    """A request, with the memory of each layout, which does not change with copies of a server, reckoned once."""

    def __init__(self, request: LaunchRequest) -> None:
        self.facts, self.target, self.profile = request.facts, request.target, request.profile
        self.max_model_len = request.max_model_len
        self._memory = cache(request.memory)

    def memory_of(self, layout: Layout) -> Memory:
        return self._memory(replace(layout, replicas=1))

    def has_room(self, layout: Layout) -> bool:
        memory = self.memory_of(layout)
        return memory.kv_cache > 0 and memory.kv_tokens >= self.max_model_len

    def tokens(self, layout: Layout) -> int:
        """Tokens in the KV caches of all engines of all servers."""
        return self.memory_of(layout).kv_tokens * layout.data * layout.replicas * layout.packed

    @property
    def demand(self) -> float:
        """Tokens that the profile asks the KV caches to hold."""
        usual = min(self.profile.request_tokens, self.max_model_len)
        return self.profile.share * self.profile.concurrency * usual

    def comfortable(self, layout: Layout) -> bool:
        return self.has_room(layout) and self.tokens(layout) >= self.demand


def choose(request: LaunchRequest, packed: int = 1, said: Choice | None = None) -> Choice | None:
    """The layout, that which is ``said`` if one is; None where none holds a request of full length.

    Nothing chooses ``packed`` by itself.
    """
    case, facts, target = _Case(request), request.facts, request.target
    if said is not None:
        return said if case.has_room(said.layout) else None
    if packed > 1:
        shared = Layout(packed=packed, replicas=target.gpus * target.nodes)
        why = f"asked for: {packed} servers share each accelerator, each with its part of the memory"
        source = "ROCm 2026: Configure the gpu-memory-utilization parameter"
        return Choice(shared, why, source) if case.has_room(shared) else None
    if target.accelerator.kind == "cpu":
        why, source = "a CPU serves with one process", "vLLM 0.32 platforms/cpu.py"
        return Choice(Layout(), why, source) if case.has_room(Layout()) else None
    room = _room(case)
    if room is None:
        return None
    share = facts.density
    conditions = {
        "family": facts.family,
        "density": ("none" if share is None else "sparse" if share < 1 else "unsettled" if share < 3 else "standard"),
        "load": load(request.profile),
        "experts": "none" if not facts.experts else "few" if facts.experts < 2 * target.gpus else "many",
        "room": room,
        "gpus": "one" if target.gpus == 1 else "several",
    }
    for row in rows():
        if all(conditions[name] in values for name, values in row.when.items()):
            layout = _first(case, row)
            if layout is not None:
                why = row.why.replace("{gpus}", str(target.gpus)) + _departure(case, row, layout)
                return Choice(layout, why, row.source, tuple(_notes(case, layout)))
    return None


def load(profile: Profile) -> str:
    """``low`` or ``high``; between the guides' limits the profile decides, below the crossing for ``between``."""
    if profile.concurrency <= LOW or (profile.concurrency < HIGH and not profile.for_throughput):
        return "low"
    return "between" if profile.concurrency < CROSSING else "high"


@cache
def rows() -> tuple[Row, ...]:
    """The table, in the order of its file."""
    return tuple(Row(**entry) for entry in beside(__file__, "layouts.yaml"))


def _room(case: _Case) -> str | None:
    alone = Layout(replicas=case.target.gpus * case.target.nodes)
    whole = case.comfortable if case.target.gpus > 1 else case.has_room
    if whole(alone):
        return "gpu"
    within = [("tensor", False), ("tensor", True), ("data", True), ("pipeline", False)]
    across = [("stages", False), ("stages", True), ("spread", True)] if case.target.nodes > 1 else []
    for room, forms in (("node", within), ("nodes", across)):
        if any(case.has_room(layout) for form, expert in forms for layout in _layouts(case, form, expert=expert)):
            return room
    return None


def _first(case: _Case, row: Row) -> Layout | None:
    # Where slices of an expert break the groups of its scales, whole experts are the way out, and the other way round
    # where there are fewer experts than accelerators.
    for expert in (row.expert, not row.expert) if case.facts.experts else (False,):
        fitting = [layout for layout in _layouts(case, row.form, expert=expert) if case.has_room(layout)]
        fitting = [layout for layout in fitting if layout.tensor in _REDUCED_AT_ONCE] or fitting
        if fitting:
            enough = next((layout for layout in fitting if case.comfortable(layout)), None)
            return enough or max(fitting, key=case.tokens)
    return None


def _layouts(case: _Case, form: str, *, expert: bool = False) -> list[Layout]:
    """The layouts of a form that the model can be cut up for, in the order in which they are tried."""
    gpus, nodes = case.target.gpus, case.target.nodes
    found = []
    for tensor in range(1, gpus + 1):
        share, whole, experts = gpus // tensor, gpus % tensor == 0, expert and tensor > 1
        if form in {"single", "tensor", "replicas"}:
            found.append(Layout(tensor, expert=experts, replicas=share * nodes))
        elif form == "data" and whole:
            found.append(Layout(tensor, data=share, expert=expert and gpus > 1, replicas=nodes))
        elif form == "spread" and whole:
            found.append(Layout(tensor, data=share * nodes, expert=expert, nodes=nodes))
        elif form == "pipeline" and share > 1:
            found.append(Layout(tensor, share, expert=experts, replicas=nodes))
        elif form == "stages":
            found.append(Layout(tensor, share * nodes, expert=experts, nodes=nodes))
    valid = [layout for layout in found if not split_faults(case.facts, layout)]
    ordered = valid if form in {"replicas", "data", "spread"} else valid[::-1]
    if form == "tensor":  # the widest; one that leaves accelerators idle counts half
        ordered = sorted(ordered, key=lambda one: -one.tensor / (1 if gpus % one.tensor == 0 else 2))
    return ordered


_REDUCED_AT_ONCE: Final = frozenset((1, 2, 4, 6, 8))
"""Sizes of tensor parallelism that vLLM's custom all-reduce takes (`CustomAllreduce`, vLLM 0.32
distributed/device_communicators); others are taken where none of these fits."""


def _departure(case: _Case, row: Row, layout: Layout) -> str:
    facts, gpus = case.facts, case.target.gpus
    if row.form == "tensor" and layout.tensor < gpus and layout.expert == row.expert:
        faults = split_faults(facts, Layout(gpus, expert=row.expert and gpus > 1))
        why = "; ".join([*faults, "vLLM's own all-reduce takes 2, 4, 6 or 8 GPUs"])
        return f". Here each server takes {layout.tensor} of {gpus}: {why}"
    if layout.expert == row.expert or not facts.experts or layout.gpus == 1:
        return ""
    way = "whole experts are spread" if layout.expert else "experts are sliced"
    faults = split_faults(facts, Layout(layout.tensor, layout.pipeline, layout.data, row.expert))
    return f". Here {way} all the same: {'; '.join(faults) or 'else it would not fit'}"


def _notes(case: _Case, layout: Layout) -> Iterator[str]:
    target, profile = case.target, case.profile
    idle = (target.gpus * target.nodes) - layout.gpus * layout.replicas
    if idle:
        yield f"{idle} of {target.gpus * target.nodes} accelerators stay idle: the model cannot be cut for all of them"
    if case.tokens(layout) < case.demand:
        held = case.tokens(layout) / (case.demand / profile.share / profile.concurrency)
        yield (
            f"the KV cache holds {held:,.0f} of {profile.concurrency} requests of usual length"
            f" ({min(profile.request_tokens, case.max_model_len):,} tokens): the others wait or are preempted"
        )


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

"""Choose how accelerators share a model: the first rule of `layouts.yaml` that applies and whose layout fits.

A layout *fits* when its KV cache holds one request of full length. It is *comfortable* when the KV caches of all
servers also hold the profile's share of the requests in flight.

`split_faults` says which layouts vLLM refuses for a model, by vLLM 0.32 (config/model.py, layers/linear.py,
layers/quantization, layers/fused_moe).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Final, NamedTuple

from quantmint.pipeline.base.data import load_table
from quantmint.pipeline.serving.model.facts import ModelFacts
from quantmint.pipeline.serving.plan import Memory, ParallelLayout
from quantmint.pipeline.serving.planning.draft import LaunchDraft
from quantmint.pipeline.serving.planning.target import Profile

LOW, CROSSING, HIGH = 128, 256, 512
"""Requests in flight. Up to LOW and from HIGH on, the guides decide (ROCm 2026: Parallelism strategies); CROSSING is
the lowest load at which data parallelism overtook tensor parallelism for latent attention (Data Parallel Attention)."""

#: Quantization methods whose loader pads widths that do not divide.
_PADDED = frozenset({"mxfp4"})

_CUSTOM_ALL_REDUCE: Final = frozenset((1, 2, 4, 6, 8))
"""Sizes of tensor parallelism that vLLM's custom all-reduce takes (`CustomAllreduce`, vLLM 0.32
distributed/device_communicators); other sizes are taken only if none of these fits."""


class LayoutRule(NamedTuple):
    """One entry of `layouts.yaml`: the conditions (``when``) and the form of layout that it recommends."""

    name: str
    when: Mapping[str, list[str]]
    form: str
    why: str
    source: str
    expert: bool = False


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """A layout with its reason and source; ``notes`` become warnings of the plan."""

    layout: ParallelLayout
    why: str
    source: str
    notes: tuple[str, ...] = ()


class _Candidates:
    """The layouts of one draft under test; the memory of each layout is computed once."""

    def __init__(self, draft: LaunchDraft) -> None:
        self.facts, self.target, self.profile = draft.facts, draft.target, draft.profile
        self.max_model_len = draft.max_model_len
        self._memory = cache(draft.memory)

    def memory_of(self, layout: ParallelLayout) -> Memory:
        """Return the memory of one server; the number of replicas does not change it."""
        return self._memory(replace(layout, replicas=1))

    def fits(self, layout: ParallelLayout) -> bool:
        """Return whether the KV cache holds one request of full length."""
        memory = self.memory_of(layout)
        return memory.kv_cache > 0 and memory.kv_tokens >= self.max_model_len

    def capacity(self, layout: ParallelLayout) -> int:
        """Return the tokens that the KV caches of all engines of all servers hold."""
        return self.memory_of(layout).kv_tokens * layout.data * layout.replicas * layout.packed

    @property
    def demand(self) -> float:
        """Number of tokens that the profile wants the KV caches to hold."""
        typical = min(self.profile.request_tokens, self.max_model_len)
        return self.profile.share * self.profile.concurrency * typical

    def comfortable(self, layout: ParallelLayout) -> bool:
        """Return whether the layout fits and holds the profile's demand."""
        return self.fits(layout) and self.capacity(layout) >= self.demand


def choose_layout(draft: LaunchDraft, fixed: LayoutChoice | None = None) -> LayoutChoice | None:
    """Return ``fixed`` if there is one, else the best layout for the draft; None when it does not fit."""
    candidates, facts, target = _Candidates(draft), draft.facts, draft.target
    choice = fixed or _forced_choice(draft)
    if choice is not None:
        return choice if candidates.fits(choice.layout) else None
    room = _smallest_room(candidates)
    if room is None:
        return None
    conditions = {
        "family": facts.family,
        "density": _density_class(facts),
        "load": load_level(draft.profile),
        "experts": "none" if not facts.experts else "few" if facts.experts < 2 * target.gpus else "many",
        "room": room,
        "gpus": "one" if target.gpus == 1 else "several",
    }
    for rule in layout_rules():
        if all(conditions[name] in values for name, values in rule.when.items()):
            layout = _first_fitting(candidates, rule)
            if layout is not None:
                why = rule.why.replace("{gpus}", str(target.gpus)) + _deviation(candidates, rule, layout)
                return LayoutChoice(layout, why, rule.source, tuple(_notes(candidates, layout)))
    return None


def _density_class(facts: ModelFacts) -> str:
    """Return the class of `layouts.yaml` for the share of experts that a token visits."""
    if facts.density is None:
        return "none"
    return "sparse" if facts.density < 1 else "unsettled" if facts.density < 3 else "standard"


def _forced_choice(draft: LaunchDraft) -> LayoutChoice | None:
    """Return the only possible layout, of packed servers or of a CPU; None when there is a choice."""
    target, packed = draft.target, draft.request.servers_per_gpu
    if packed > 1:
        layout = ParallelLayout(packed=packed, replicas=target.gpus * target.nodes)
        why = f"the recipe or command line packs {packed} servers on each accelerator, each with its part of the memory"
        return LayoutChoice(layout, why, "ROCm 2026: Configure the gpu-memory-utilization parameter")
    if target.accelerator.kind == "cpu":
        return LayoutChoice(ParallelLayout(), "a CPU serves with one process", "vLLM 0.32 platforms/cpu.py")
    return None


def load_level(profile: Profile) -> str:
    """Return ``low``, ``between`` or ``high`` for the profile's requests in flight.

    Between the guides' limits, profiles for latency count as ``low``, those for throughput as ``between`` or ``high``.
    """
    if profile.concurrency <= LOW or (profile.concurrency < HIGH and not profile.for_throughput):
        return "low"
    return "between" if profile.concurrency < CROSSING else "high"


@cache
def layout_rules() -> tuple[LayoutRule, ...]:
    """Return the rules of `layouts.yaml`, in the order of the file."""
    return tuple(LayoutRule(**entry) for entry in load_table(__file__, "layouts.yaml"))


def layout_words(layout: ParallelLayout) -> str:
    """Return a layout in vLLM's terms: "4 x (TP 2)", "DP 8 + EP", "TP 8 x PP 2 on 2 nodes"."""
    sizes = [("DP", layout.data), ("TP", layout.tensor), ("PP", layout.pipeline)]
    text = " x ".join(f"{name} {size}" for name, size in sizes if size > 1) or "TP 1"
    text += " + EP" if layout.expert else ""
    text += f" on {layout.nodes} nodes" if layout.nodes > 1 else ""
    servers = layout.replicas * layout.packed
    text = f"{servers} x ({text})" if servers > 1 else text
    return f"{text}, {layout.packed} on each accelerator" if layout.packed > 1 else text


def _smallest_room(candidates: _Candidates) -> str | None:
    """Return where the model fits: "gpu" (on one), "node" (within one) or "nodes" (across several); None when nowhere.

    Among several GPUs, "gpu" also needs every GPU alone to hold the profile's demand.
    """
    replicas = ParallelLayout(replicas=candidates.target.gpus * candidates.target.nodes)
    suits_one_gpu = candidates.comfortable if candidates.target.gpus > 1 else candidates.fits
    if suits_one_gpu(replicas):
        return "gpu"
    node_forms = [("tensor", False), ("tensor", True), ("data", True), ("pipeline", False)]
    multi_node_forms = [("stages", False), ("stages", True), ("spread", True)] if candidates.target.nodes > 1 else []
    for room, forms in (("node", node_forms), ("nodes", multi_node_forms)):
        layouts = (layout for form, expert in forms for layout in _layouts(candidates, form, expert=expert))
        if any(candidates.fits(layout) for layout in layouts):
            return room
    return None


def _first_fitting(candidates: _Candidates, rule: LayoutRule) -> ParallelLayout | None:
    """Return the rule's first comfortable layout, else the one with the largest KV cache; None when none fits."""
    # Slices of an expert may break the groups of its scales, which whole experts avoid; whole experts fail when there
    # are fewer experts than accelerators, which slices avoid.
    for expert in (rule.expert, not rule.expert) if candidates.facts.experts else (False,):
        fitting = [layout for layout in _layouts(candidates, rule.form, expert=expert) if candidates.fits(layout)]
        fitting = [layout for layout in fitting if layout.tensor in _CUSTOM_ALL_REDUCE] or fitting
        if fitting:
            enough = next((layout for layout in fitting if candidates.comfortable(layout)), None)
            return enough or max(fitting, key=candidates.capacity)
    return None


def _layouts(candidates: _Candidates, form: str, *, expert: bool = False) -> list[ParallelLayout]:
    """Return the layouts of a form that the model can be split into, in the order to try them."""
    gpus, nodes = candidates.target.gpus, candidates.target.nodes
    layouts = []
    for tensor in range(1, gpus + 1):
        groups, divides, experts = gpus // tensor, gpus % tensor == 0, expert and tensor > 1
        if form in {"single", "tensor", "replicas"}:
            layouts.append(ParallelLayout(tensor, expert=experts, replicas=groups * nodes))
        elif form == "data" and divides:
            layouts.append(ParallelLayout(tensor, data=groups, expert=expert and gpus > 1, replicas=nodes))
        elif form == "spread" and divides:
            layouts.append(ParallelLayout(tensor, data=groups * nodes, expert=expert, nodes=nodes))
        elif form == "pipeline" and groups > 1:
            layouts.append(ParallelLayout(tensor, groups, expert=experts, replicas=nodes))
        elif form == "stages":
            layouts.append(ParallelLayout(tensor, groups * nodes, expert=experts, nodes=nodes))
    valid = [layout for layout in layouts if not split_faults(candidates.facts, layout)]
    ordered = valid if form in {"replicas", "data", "spread"} else valid[::-1]
    if form == "tensor":  # the widest first; one that leaves accelerators idle counts half
        ordered = sorted(ordered, key=lambda layout: -layout.tensor / (1 if gpus % layout.tensor == 0 else 2))
    return ordered


def _deviation(candidates: _Candidates, rule: LayoutRule, layout: ParallelLayout) -> str:
    """Return a sentence on why the layout differs from the rule's, to append to its reason; empty when it does not."""
    facts, gpus = candidates.facts, candidates.target.gpus
    if rule.form == "tensor" and layout.tensor < gpus and layout.expert == rule.expert:
        faults = split_faults(facts, ParallelLayout(gpus, expert=rule.expert and gpus > 1))
        why = "; ".join([*faults, "vLLM's own all-reduce takes 2, 4, 6 or 8 GPUs"])
        return f". Here each server takes {layout.tensor} of {gpus}: {why}"
    if layout.expert == rule.expert or not facts.experts or layout.gpus == 1:
        return ""
    split = "whole experts are spread" if layout.expert else "experts are sliced"
    faults = split_faults(facts, ParallelLayout(layout.tensor, layout.pipeline, layout.data, rule.expert))
    return f". Here {split} nevertheless: {'; '.join(faults) or 'the model would not fit otherwise'}"


def _notes(candidates: _Candidates, layout: ParallelLayout) -> Iterator[str]:
    """Yield a warning for idle accelerators, and for a KV cache smaller than the profile's demand."""
    target, profile = candidates.target, candidates.profile
    total = target.gpus * target.nodes
    idle = total - layout.gpus * layout.replicas
    if idle:
        yield f"{idle} of {total} accelerators stay idle: the model cannot be split over all of them"
    if candidates.capacity(layout) < candidates.demand:
        requests = candidates.capacity(layout) / (candidates.demand / profile.share / profile.concurrency)
        yield (
            f"the KV cache holds {requests:,.0f} of {profile.concurrency} typical requests"
            f" ({min(profile.request_tokens, candidates.max_model_len):,} tokens): the others wait or are preempted"
        )


def split_faults(facts: ModelFacts, layout: ParallelLayout) -> tuple[str, ...]:
    """Return the reasons why vLLM would refuse this layout, one clause per reason; empty when it would accept it."""
    tensor = layout.tensor
    faults = []
    if facts.heads % tensor:
        faults.append(f"{facts.heads} attention heads cannot be split over {tensor} GPUs")
    elif facts.attention == "mha" and max(tensor, facts.kv_heads) % min(tensor, facts.kv_heads):
        faults.append(f"{facts.kv_heads} key-value heads can be neither split over {tensor} GPUs nor repeated evenly")
    elif facts.compressed and facts.compressed.groups % tensor:
        faults.append(f"{facts.compressed.groups} groups of the attention's output cannot be split over {tensor} GPUs")
    if layout.pipeline > facts.layers:
        faults.append(f"{facts.layers} layers do not fill {layout.pipeline} stages")
    if layout.expert and not facts.experts:
        faults.append("there are no experts to spread")
    elif layout.expert and facts.experts < tensor * layout.data:
        faults.append(f"{facts.experts} experts do not fill {tensor * layout.data} GPUs")
    group = facts.group
    if group is not None and facts.checkpoint_format not in _PADDED:
        for noun, width, parts in _split_widths(facts, layout):
            if width % (group * parts):
                faults.append(
                    f"{noun} of {width} cannot be split over {parts} GPUs in whole groups of {group}"
                    f" ({facts.quantization})"
                )
    return tuple(faults)


def _split_widths(facts: ModelFacts, layout: ParallelLayout) -> list[tuple[str, int, int]]:
    """Return the layer inputs that the layout splits: name, width in elements, and number of parts."""
    tensor = layout.tensor
    widths = []
    if facts.intermediate:
        widths.append(("an MLP width", facts.intermediate, tensor))
    if facts.experts and facts.expert_intermediate:
        if not layout.expert:
            # Without expert parallelism vLLM splits experts over tensor and data parallelism together.
            widths.append(("an expert width", facts.expert_intermediate, tensor * layout.data))
        if facts.shared_experts:
            widths.append(("a shared expert's width", facts.expert_intermediate * facts.shared_experts, tensor))
    if facts.attention == "mha":
        widths.append(("an attention output", facts.heads * facts.head_dim, tensor))
    return [(noun, width, parts) for noun, width, parts in widths if parts > 1]

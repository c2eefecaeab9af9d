"""Forecast the stages that work on weights: seconds, memory and disk on a machine.

Loads of one resource add up, and resources work at the same time: the cores (copying from and to the page cache,
hashing, and the kernels where no GPU computes), the device, the link to it, and the disk. The busiest decides.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from types import SimpleNamespace
from typing import Any

from quantmint.calibration.errors import CalibrationError
from quantmint.calibration.layers import PARTS
from quantmint.calibration.room import Mode, Need, decide, forward_bytes
from quantmint.pipeline.quantize.engines.stream.plan import STATIC_ROLES, ShardPlan
from quantmint.pipeline.quantize.engines.stream.schedule import CPU_PIECE, GPU_PIECE, open_files, workers_of
from quantmint.pipeline.quantize.formats.checkpoint import Checkpoint, TensorInfo
from quantmint.pipeline.quantize.formats.choice import Choice
from quantmint.pipeline.quantize.gptq.latents import STATE_BYTES, has_groups
from quantmint.pipeline.quantize.gptq.solver import SUPPORTED
from quantmint.pipeline.quantize.gptq.tuned_model import tuning_bytes
from quantmint.pipeline.quantize.model.structure import Structure
from quantmint.pipeline.quantize.schemes.registry import KERNELS, kernel_name
from quantmint.pipeline.recipe.calibration import Calibration
from quantmint.pipeline.recipe.modules import expert_count, text_config
from quantmint.pipeline.recipe.quantization import Quantization
from quantmint.pipeline.recipe.schema import Recipe
from quantmint.pipeline.stages.rates import Rates

_SHARE, _MOST = 2, 16


def sensitivity_samples(samples: int) -> int:
    """Return the number of calibration samples that sensitivities are measured with: half of ``samples``, at most 16.

    Each takes as long as four samples of the calibration, and one more for each scheme.
    """
    return min(_MOST, -(-samples // _SHARE))


_SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "hidden_size": ("hidden_size", "n_embd", "n_embed", "d_model"),
}
"""Fields of a config.json by which families call a size."""


def _size(text: Mapping[str, Any], name: str) -> int:
    """Return the size under any of its spellings, the largest of a list by layer; 0 where the config has none."""
    value = next((text[spelling] for spelling in _SPELLINGS[name] if text.get(spelling)), 0)
    return int(max(value) if isinstance(value, list) else value)


_CACHED_SHARE = 0.8
"""Of the machine's memory: a model up to that size is taken to be in the page cache, since it was hashed or fetched."""
_DIRTY_SHARE = 0.1
"""Of the machine's memory: what Linux lets a program write before it must wait for the disk (vm.dirty_ratio is 0.2)."""
_CPU_PIECES, _PINNED_PIECES, _DEVICE_PIECES = 6, 2, 6
"""Memory of a worker in pieces of its weight: the piece that was read, its result, and the steps in between."""


@dataclass(frozen=True, slots=True)
class MachineCapacity:
    """The rates, cores and memory of a machine, in bytes; ``device_memory`` is that of each of the ``devices``."""

    rates: Rates
    cores: int
    memory: int
    devices: tuple[str, ...]
    device_memory: int


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one stage: seconds until everything is on the disk, and bytes of memory, device memory and disk.

    ``written`` is the seconds until the last byte was handed to the operating system. ``parts`` are the seconds that
    each part would take by itself, ``bound`` names the part that decides. ``mode`` is "resident" or "layer" for a
    calibration, None for other stages.
    """

    seconds: float
    written: float
    memory: int
    device_memory: int
    disk: int
    bound: str
    parts: Mapping[str, float]
    mode: str | None = None


def quantize_cost(volume: QuantizeVolume, machine: MachineCapacity) -> Cost:
    """Return the stream engine's cost: read, compute, hash and write overlap; finished files are synced meanwhile."""
    rates = machine.rates
    started = len(workers_of(machine.devices, machine.cores))
    lanes = open_files(volume.files, started)
    workers = min(started, machine.cores)
    computed = sum(count / rates.kernel(name) for name, count in volume.kernels.items())
    parts = {
        "read": volume.read / rates.read,
        "compute": computed,
        "hash": volume.written / rates.hash,
        "write": volume.written / rates.write,
        "sync": volume.written / rates.sync,
    }
    on_cpu = rates.link is None
    # Rates are those of all cores; hashing is a thread's, and as many files are hashed at a time as there are lanes.
    busy = {
        "cores": (parts["read"] + parts["write"] + (computed if on_cpu else 0.0)) * machine.cores / workers
        + parts["hash"] / workers,
        "hash": parts["hash"] / lanes,
    }
    if rates.link is not None:
        busy["device"] = computed / len(machine.devices)
        parts["link"] = max(volume.read, volume.written) / rates.link
        busy["link"] = parts["link"] / len(machine.devices)
    if volume.distinct > _CACHED_SHARE * machine.memory:
        busy["disk"] = parts["disk"] = volume.distinct / rates.disk
    bound = max(busy, key=lambda name: busy[name])
    tail = min(volume.largest * lanes, volume.written) / rates.sync  # of the files that end together
    # The page cache takes what the disk does not take at once, but not for ever.
    synced = parts["sync"] - tail
    durable = max(busy[bound], synced) + tail
    if volume.written > _DIRTY_SHARE * machine.memory and synced > busy[bound]:
        bound, busy["sync"] = "sync", synced
    piece, pieces = (CPU_PIECE, _CPU_PIECES) if on_cpu else (GPU_PIECE, _PINNED_PIECES)
    return Cost(
        seconds=durable,
        written=busy[bound],
        memory=rates.resident + started * pieces * piece,
        device_memory=0 if on_cpu else -(-started // len(machine.devices)) * _DEVICE_PIECES * piece,
        disk=volume.written,
        bound=bound,
        parts=parts,
    )


def calibrate_cost(volume: CalibrateVolume, machine: MachineCapacity) -> Cost:
    """Return the cost of one forward over the set, layer by layer while the next is loaded, or with a resident model.

    In layer mode hidden states stay on the device where they take half of what is free beside two layers, else in a
    quarter of the host's memory; the time of writing the rest of them to the disk and back is not counted.
    """
    rates, need = machine.rates, volume.need
    on_cpu = rates.link is None
    try:
        mode = decide(volume.mode, need, ["it"], {"it": machine.device_memory}, None).mode
    except CalibrationError:  # fits in neither way, which a run says before it starts
        mode = "layer"
    parts = {
        "load": need.weights / rates.load,
        "products": volume.flops / rates.flops,
        "scores": volume.scores / rates.scores,
    }
    if need.weights > _CACHED_SHARE * machine.memory:
        parts["load"] = max(parts["load"], need.weights / rates.disk)
    forward = (parts["products"] + parts["scores"]) / len(machine.devices)
    if mode == "resident":
        device_bytes, host_bytes = need.weights + need.forward, 0
        seconds = parts["load"] + forward
    else:
        running = 2 * need.layer + need.forward
        free = machine.device_memory - running
        on_device = not on_cpu and need.states <= len(machine.devices) * free // 2
        device_bytes = running + (need.states // len(machine.devices) if on_device else 0)
        host_bytes = 0 if on_device else min(need.states, machine.memory // 4)
        seconds = max(parts["load"], forward)
    return Cost(
        seconds=seconds,
        written=seconds,
        memory=rates.resident + host_bytes + (device_bytes if on_cpu else 0),
        device_memory=0 if on_cpu else device_bytes,
        disk=0,
        bound=max(parts, key=lambda name: parts[name]),
        parts=parts,
        mode=mode,
    )


_EXPERT = re.compile(r"\.experts\.\d+\.")
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_FILE = 5_000_000_000  # bytes, at which the Hub cuts; a model that is only imagined is one file
CARRIED = "carried"
"""Stands for a kernel where numbers stay what they are, and only their largest is taken: it must be finite."""


@dataclass(frozen=True, slots=True)
class QuantizeVolume:
    """The bytes of a quantization: ``read``, ``distinct`` (without what is read twice) and ``written``.

    ``files`` is the number of files written, ``largest`` the bytes of the largest. ``kernels`` are the bytes of 16-bit
    weight by kernel; the key `CARRIED` counts tensors that are only copied.
    """

    read: int
    distinct: int
    written: int
    files: int
    largest: int
    kernels: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class CalibrateVolume:
    """The work and memory of one pass over the calibration set.

    ``need`` are the bytes on a device, ``flops`` the operations of all matrix products, ``scores`` the number of
    attention scores. ``mode`` is the recipe's setting.
    """

    need: Need
    flops: float
    scores: float
    mode: Mode


def quantize_volume(plans: Iterable[ShardPlan]) -> QuantizeVolume:
    """Return the volume of the plans; a weight whose scale needs its largest element first is read twice."""
    plans = tuple(plans)
    kernels: Counter[str] = Counter()
    for plan in plans:
        for step in plan.steps:
            kernels[step.kernel or CARRIED] += 2 * prod(step.origin.shape)
    scanned = {origin for plan in plans for step in plan.steps for origin in step.group}
    written = sum(plan.nbytes for plan in plans)
    files = max(len(plans), -(-written // _FILE))
    distinct = sum(plan.read_bytes for plan in plans)
    return QuantizeVolume(
        read=distinct + sum(origin.nbytes for origin in scanned),
        distinct=distinct,
        written=written,
        files=files,
        largest=min(max(plan.nbytes for plan in plans), _FILE) if files > len(plans) else max(p.nbytes for p in plans),
        kernels=dict(kernels),
    )


def _loaded_bytes(info: TensorInfo) -> int:
    """Return the bytes of a tensor in the running model, which decodes FP8 in blocks to bfloat16."""
    return info.nbytes * (2 if info.dtype == "F8_E4M3" else 1)


def calibrate_volume(
    source: Checkpoint, structure: Structure, calibration: Calibration, *, is_fused: bool = False
) -> CalibrateVolume:
    """Return the volume of a forward over the whole calibration set, without the output head.

    A product of [t, i] and [i, o] takes 2 t i o operations. Eager attention computes all L x L scores of a head, with 4
    D operations each for a head of D elements, in the product with the keys and that with the values. An expert gets
    every token once, besides those that the router sends, unless the recipe asks for the router's only. With
    ``is_fused`` attention keeps no scores in memory.
    """
    text: Mapping[str, Any] = source.config.get("text_config") or source.config
    tokens, length = calibration.samples * calibration.sequence_length, calibration.sequence_length
    share = routed_share(text) + (1.0 if calibration.experts == "all" else 0.0)
    products = sum(
        (share if _EXPERT.search(name) else 1.0) * rows * columns for name, (rows, columns) in structure.linear.items()
    )
    heads, hidden = (_size(text, name) for name in _SPELLINGS)
    scores = float(tokens * length * heads * len(structure.attention))
    width = int(text.get("head_dim") or hidden // max(heads, 1))
    layers: Counter[str] = Counter()
    for name, (_, info) in source.tensors.items():
        if match := _LAYER.search(name):
            layers[match.group(1)] += _loaded_bytes(info)
    body = sum(_loaded_bytes(info) for name, (_, info) in source.tensors.items() if "lm_head." not in name)
    batch = min(calibration.batch_size, calibration.samples)
    sizes = {**text, "num_attention_heads": heads, "hidden_size": hidden}
    forward = forward_bytes(SimpleNamespace(**sizes), batch, length, is_fused=is_fused)
    return CalibrateVolume(
        need=Need(body, max(layers.values(), default=body), forward, states=2 * tokens * hidden),
        flops=2.0 * tokens * products + 4.0 * scores * width,
        scores=scores,
        mode=calibration.mode,
    )


def routed_share(config: Mapping[str, Any]) -> float:
    """Return the share of a mixture's experts that a token passes through; 1 for a dense model."""
    total = expert_count(config)
    chosen = int(config.get("num_experts_per_tok") or 0)
    return chosen / total if total and chosen else 1.0


def gptq_volume(source: Checkpoint, structure: Structure, recipe: Recipe, *, routed: bool = False) -> CalibrateVolume:
    """Return the volume of one forward of GPTQ in layer mode, with fused attention.

    Compensation and tuning double the hidden states, because a reference model runs alongside. With ``routed`` experts
    get the tokens that the router sends to them alone.
    """
    assert recipe.calibration is not None  # noqa: S101 - the recipe is checked
    section = recipe.calibration.model_copy(update={"experts": "routed"}) if routed else recipe.calibration
    volume = replace(calibrate_volume(source, structure, section, is_fused=True), mode="layer")
    parameters = recipe.quantization.parameters
    has_reference_model = parameters["compensation"] or "steps" in parameters
    states, forward = volume.need.states * (2 if has_reference_model else 1), volume.need.forward
    if "steps" in parameters:
        vocabulary = int(text_config(source.config).get("vocab_size") or 0)
        forward = tuning_bytes(forward, recipe.calibration.sequence_length, vocabulary)
    return replace(volume, need=replace(volume.need, states=states, forward=forward))


def learned_weights(structure: Structure, choice: Choice, quantization: Quantization) -> dict[str, int]:
    """Return the numbers of weights whose rounding is learned, by kernel; empty where the recipe learns none."""
    counts: Counter[str] = Counter()
    if _learns(quantization):
        for module, name in choice.schemes.items():
            if module in structure.linear and module not in choice.stored:
                kernel = KERNELS[kernel_name(name, quantization.format)]
                counts[kernel.name] += prod(structure.linear[module]) if has_groups(kernel) else 0
    return dict(+counts)


def temporary_bytes(plans: Iterable[ShardPlan], structure: Structure, quantization: Quantization) -> int:
    """Return the bytes of GPTQ's files, which stay until the checkpoint is written; 0 without GPTQ.

    These are the layers' results. Where rounding is learned, also the best results, the weights before rounding in 16
    bit, and the state of the steps, twice while it is replaced. Hidden states that memory lacks room for are not
    counted.
    """
    count = 0
    for step in (step for plan in plans for step in plan.steps if quantization.by_layers):
        if step.kernel in SUPPORTED and not step.untouched and step.name in structure.linear:
            result = sum(out.nbytes for out in step.outputs if out.role not in STATIC_ROLES)
            count += result
            if _learns(quantization) and has_groups(KERNELS[step.kernel]):
                count += result + (2 + 2 * STATE_BYTES) * prod(step.origin.shape)
    return count


def _learns(quantization: Quantization) -> bool:
    return quantization.algorithm == "tuned" and bool(quantization.parameters.get("weights"))


def tuning_batch(recipe: Recipe) -> int:
    """Return the number of samples that run together: at most an eighth with tuning, which holds some out."""
    assert recipe.calibration is not None  # noqa: S101 - the recipe is checked
    samples, size = recipe.calibration.samples, recipe.calibration.batch_size
    return max(1, min(size, samples // PARTS)) if recipe.quantization.algorithm == "tuned" else size

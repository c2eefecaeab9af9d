"""Forecast the stages of a recipe that work on weights, for this machine or another one, by `stages.cost`.

forecast_weights(source, structure, recipe, machine_of(parse_target("mi300x:8"))).stages["calibrate"].seconds
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from quantmint.calibration.errors import CalibrationError
from quantmint.calibration.room import learning_place, require_learning_room
from quantmint.pipeline.base.machine import cores
from quantmint.pipeline.quantize.device import device_memory, resolve_devices
from quantmint.pipeline.quantize.engines.stream.plan import ShardPlan
from quantmint.pipeline.quantize.formats.checkpoint import Checkpoint
from quantmint.pipeline.quantize.gptq.latents import LATENT_BYTES
from quantmint.pipeline.quantize.gptq.solve import gptq_bytes
from quantmint.pipeline.quantize.model.selection import select
from quantmint.pipeline.quantize.model.structure import Structure
from quantmint.pipeline.recipe.modules import text_config
from quantmint.pipeline.recipe.schema import Recipe
from quantmint.pipeline.serving.planning.target import ServingTarget
from quantmint.pipeline.stages.calibrate import needs_ranges
from quantmint.pipeline.stages.cost import (
    Cost,
    MachineCapacity,
    calibrate_cost,
    calibrate_volume,
    gptq_volume,
    learned_weights,
    quantize_cost,
    quantize_volume,
    routed_share,
    sensitivity_samples,
    temporary_bytes,
    tuning_batch,
)
from quantmint.pipeline.stages.rates import HOST_BYTES, HOST_CORES, Origin, Rates, rates_here, rates_of
from quantmint.pipeline.stages.rounding_cost import (
    change_seconds,
    expert_passes,
    hessian_seconds,
    learning_seconds,
    rounding_seconds,
    tuning_seconds,
)
from quantmint.pipeline.stages.sizes import planned_shards


def machine_here(device: str) -> tuple[MachineCapacity, Origin]:
    """Return this machine's capacity with PyTorch's ``device``, and the origin of its rates.

    Rates that the table lacks are measured, in about a second.
    """
    devices, count = resolve_devices(device), cores()  # several GPUs are taken to be of a kind
    rates, origin = rates_here(devices[0], count)
    return MachineCapacity(rates, count, device_memory("cpu"), devices, device_memory(devices[0])), origin


def machine_of(target: ServingTarget) -> tuple[MachineCapacity, Origin]:
    """Return the capacity of a node of ``target``, and the origin of its rates.

    The host is a typical one for its GPUs.
    """
    rates, origin = rates_of(target.hardware)
    gpus, memory = target.gpus, target.memory or HOST_BYTES
    devices = tuple(f"{target.hardware}:{number}" for number in range(gpus))
    return MachineCapacity(rates, gpus * HOST_CORES, gpus * HOST_BYTES, devices, memory), origin


@dataclass(frozen=True, slots=True)
class WeightForecast:
    """The costs of the stages that work on weights, by stage, with the machine's rates and their ``origin``.

    The entry "start" of ``stages`` is the start of the process. A library's stages are left out. ``cautions`` say what
    speaks against learning the rounding of weights with these texts, or on this machine.
    """

    origin: Origin
    rates: Rates
    stages: Mapping[str, Cost]
    cautions: tuple[str, ...] = ()

    @property
    def seconds(self) -> Mapping[str, float]:
        """Return the seconds of each stage, without the start of the process."""
        return {name: cost.seconds for name, cost in self.stages.items() if name != "start"}

    def to_json(self) -> dict[str, Any]:
        """Return the rates with their origin, and the costs by stage, as JSON values."""
        return {
            "rates": {"origin": self.origin, **asdict(self.rates)},
            "stages": {name: asdict(cost) for name, cost in self.stages.items()},
        }


def forecast_weights(
    source: Checkpoint,
    structure: Structure,
    recipe: Recipe,
    where: tuple[MachineCapacity, Origin],
    *,
    written: Recipe | None = None,
    plans: tuple[ShardPlan, ...] | None = None,
) -> WeightForecast:
    """Return the costs by stage on a machine ``where`` (with the origin of its rates), from tensor headers.

    ``recipe`` has chosen schemes; ``written`` is the recipe before the choice (None: there was no choice). ``plans``
    are its `planned_shards` (None: they are made here).
    """
    machine, origin = where
    rates = machine.rates
    stages: dict[str, Cost] = {}
    cautions: tuple[str, ...] = ()
    quantization = recipe.quantization
    if quantization.engine == "stream":
        parts = {"import": rates.start}
        stages["start"] = Cost(rates.start, rates.start, rates.resident, 0, 0, bound="import", parts=parts)
        if written is not None and written.quantization.from_:
            stages["sensitivity"] = sensitivity_cost(source, structure, written, machine)
        if recipe.calibration is not None and needs_ranges(quantization):
            stages["calibrate"] = calibrate_cost(calibrate_volume(source, structure, recipe.calibration), machine)
        plans = planned_shards(source, structure, recipe) if plans is None else plans
        stages["quantize"] = quantize_cost(quantize_volume(plans), machine)
        if quantization.by_layers and recipe.calibration is not None:
            disk = stages["quantize"].disk + temporary_bytes(plans, structure, quantization)
            cost = replace(stages["quantize"], disk=disk)
            stages["quantize"], cautions = _with_gptq(cost, source, structure, recipe, machine)
    return WeightForecast(origin, rates, stages, cautions)


def _with_gptq(
    cost: Cost, source: Checkpoint, structure: Structure, recipe: Recipe, machine: MachineCapacity
) -> tuple[Cost, tuple[str, ...]]:
    """Return ``cost``, the cost of writing a checkpoint, with that of the GPTQ before it, and cautions.

    Weights to learn take memory when GPTQ's squares are freed.
    """
    choice, on_cpu = select(structure, recipe.quantization), machine.rates.link is None
    volume = gptq_volume(source, structure, recipe)
    once = calibrate_cost(volume, machine)
    forwards = _FORWARDS * once.seconds + _pass_seconds(source, structure, recipe, choice.schemes, machine)
    seconds = gptq_seconds(source, structure, recipe, choice.schemes, machine)
    rounding = gptq_bytes(structure, choice.schemes, on_gpu=not on_cpu)
    learned = learned_weights(structure, choice, recipe.quantization)
    if not learned:
        return _after(cost, once, (forwards, seconds), (rounding, 0) if on_cpu else (0, rounding)), ()
    takes, device = LATENT_BYTES * sum(learned.values()), "cpu" if on_cpu else machine.devices[0]
    place = learning_place(takes, volume.need.weights, device, machine.device_memory)
    batches, parameters = _batches(recipe), recipe.quantization.parameters
    on_host, held_out = not on_cpu and place == "cpu", float(parameters["held_out"]) * batches
    seconds += learning_seconds(learned, int(parameters["steps"]), held_out, machine.rates, on_host=on_host)
    most = max(rounding, takes)
    room = (takes, rounding) if on_host else (most, 0) if on_cpu else (0, most)
    cautions = _learning_cautions(recipe, takes, place, machine.memory if place == "cpu" else machine.device_memory)
    return _after(cost, once, (forwards, seconds), room), cautions


def _learning_cautions(recipe: Recipe, takes: int, place: str, room: int) -> tuple[str, ...]:
    """Return cautions where weights to learn get few samples, or ``takes`` bytes at ``place``, which has ``room``."""
    assert recipe.calibration is not None  # noqa: S101 - the recipe is checked
    cautions: list[str] = []
    if (samples := recipe.calibration.samples) < _SAMPLES_TO_LEARN:
        cautions.append(
            f"tuned.weights fits few texts by heart, and there are {samples} samples: SmolLM2-135M in W4A8 came from "
            "0.143 to 0.120 nats with 1,013 samples of 512 tokens, and from 0.147 to 0.137 with 256 "
            "(docs/notes/measurements.md)"
        )
    try:
        require_learning_room(takes, place, room)
    except CalibrationError as error:
        cautions.append(str(error))
    return tuple(cautions)


def _batches(recipe: Recipe) -> float:
    assert recipe.calibration is not None  # noqa: S101 - the recipe is checked
    return recipe.calibration.samples / tuning_batch(recipe)


def _pass_seconds(
    source: Checkpoint, structure: Structure, recipe: Recipe, schemes: Mapping[str, str], machine: MachineCapacity
) -> float:
    """Return the seconds in which GPTQ runs layers again for their experts; 0 for a dense model.

    The experts of a pass are a part of a layer's, and get the tokens that the router sends to them.
    """
    once = calibrate_cost(gptq_volume(source, structure, recipe, routed=True), machine)
    on_gpu = machine.rates.link is not None
    free = machine.device_memory - once.device_memory if on_gpu else machine.memory - once.memory
    shapes = {name: shape for name, shape in structure.linear.items() if name in schemes}
    passes = expert_passes(structure, shapes, max(free, 0), on_gpu=on_gpu)
    forward = (once.parts["products"] + once.parts["scores"]) / len(machine.devices)
    return passes * forward / max(len(structure.attention), 1)


def gptq_seconds(
    source: Checkpoint, structure: Structure, recipe: Recipe, schemes: Mapping[str, str], machine: MachineCapacity
) -> float:
    """Return GPTQ's seconds beside its forwards: Hessians, cross terms with compensation, factors, rounding, tuning.

    ``schemes`` are the chosen schemes by module.
    """
    assert recipe.calibration is not None  # noqa: S101 - the recipe is checked
    shapes = {name: shape for name, shape in structure.linear.items() if name in schemes}
    tokens = recipe.calibration.samples * recipe.calibration.sequence_length
    share = routed_share(text_config(source.config))
    sums = 2 if recipe.quantization.parameters["compensation"] else 1
    rates = machine.rates
    rate = rates.float32 if rates.link is None else rates.flops  # a GPU sums products of 16 bit in float32
    hessians = hessian_seconds(shapes, tokens, share, rate, sums=sums) / len(machine.devices)
    seconds = hessians + rounding_seconds(shapes, recipe.quantization.schemes, rates)
    if recipe.quantization.algorithm == "tuned":
        parameters, batches = recipe.quantization.parameters, _batches(recipe)
        forward, layers = gptq_volume(source, structure, recipe).flops / batches, len(structure.attention)
        held_out = float(parameters["held_out"]) * batches
        seconds += tuning_seconds(forward, layers, int(parameters["steps"]), held_out, rates)
    return seconds


def sensitivity_cost(source: Checkpoint, structure: Structure, recipe: Recipe, machine: MachineCapacity) -> Cost:
    """Return the cost of measuring every group in every scheme: a pass through the layers and one back, in float32.

    The way back runs each layer forward and backward, and its linear modules once for each scheme.
    """
    assert recipe.calibration is not None  # noqa: S101 - the recipe's checks
    rates, names = machine.rates, recipe.quantization.from_ or ()
    samples = sensitivity_samples(recipe.calibration.samples)
    part = recipe.calibration.model_copy(update={"samples": samples, "experts": "routed"})
    volume = calibrate_volume(source, structure, part)
    tokens, share = samples * part.sequence_length, routed_share(text_config(source.config))
    parts = {
        "load": 2 * volume.need.weights / rates.load,
        "products": (_PASSES + len(names)) * volume.flops / rates.float32,
        "changes": change_seconds(structure.linear, names, samples),
    }
    if recipe.quantization.is_by_gptq:
        parts["rounding"] = rounding_seconds(structure.linear, names, rates)
        parts["products"] += hessian_seconds(structure.linear, tokens, share, rates.float32, sums=1)
    on_cpu, seconds = rates.link is None, sum(parts.values())
    working_set = 2 * volume.need.layer + volume.need.forward + 2 * volume.need.states
    return Cost(
        seconds=seconds,
        written=seconds,
        memory=rates.resident + (working_set if on_cpu else 0),
        device_memory=0 if on_cpu else working_set,
        disk=2 * volume.need.states * max(len(structure.attention), 1),
        bound=max(parts, key=lambda name: parts[name]),
        parts=parts,
    )


_SAMPLES_TO_LEARN = 256
"""Calibration samples, below which learned weights are cautioned of."""
_PASSES = 4
"""Forwards of the model that a pass through its layers and one back take; the way back counts for two."""
_FORWARDS = 3
"""Forwards of each layer that GPTQ takes, the one that channels are scaled by among them, but for its own products."""


def _after(cost: Cost, once: Cost, times: tuple[float, float], room: tuple[int, int]) -> Cost:
    """Return ``cost``, the cost of writing a checkpoint, with that of the GPTQ before it.

    ``once`` is the cost of one forward, ``times`` are the seconds of GPTQ's forwards and those beside them, ``room``
    are the bytes that it takes beside a forward in the host's memory and in a device's.
    """
    forwards, seconds = times
    once = replace(once, memory=once.memory + room[0], device_memory=once.device_memory + room[1])
    spent = forwards + seconds
    bound = max(("forwards", forwards), ("rounding", seconds), (cost.bound, cost.seconds), key=lambda part: part[1])[0]
    memory, there = max(cost.memory, once.memory), max(cost.device_memory, once.device_memory)
    later = replace(cost, seconds=cost.seconds + spent, written=cost.written + spent, bound=bound)
    return replace(
        later, memory=memory, device_memory=there, parts={**cost.parts, "forwards": forwards, "rounding": seconds}
    )

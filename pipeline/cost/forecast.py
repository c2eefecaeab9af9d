"""What the stages of a recipe that work on weights will take on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.cost.rates import Origin, Rates, identify, rates_for, remember
from pipeline.cost.stages import Cost, Machine, calibrate_cost, quantize_cost
from pipeline.cost.volume import calibrate_volume, quantize_volume
from pipeline.device import device_memory, resolve_devices
from pipeline.engines.stream.plan import plan_shards
from pipeline.formats.checkpoint import Checkpoint
from pipeline.model.select import select
from pipeline.model.structure import Structure
from pipeline.recipe.schema import Recipe
from pipeline.stages.quantize import needs_ranges


@dataclass(frozen=True, slots=True)
class Forecast:
    """Costs by stage, and the machine whose rates they were computed from."""

    machine: str
    origin: Origin
    rates: Rates
    stages: Mapping[str, Cost]

    def to_json(self) -> dict[str, Any]:
        """A plain mapping."""
        return {
            "rates": {"origin": self.origin, **asdict(self.rates)},
            "stages": {name: cost.to_json() for name, cost in self.stages.items()},
        }


def forecast(
    source: Checkpoint, structure: Structure, recipe: Recipe, device: str, store: Path, *, probing: bool = False
) -> Forecast:
    """Predict from headers, real or imagined, and what is known of this machine; ``probing`` measures it first.

    There are no stages where a library quantizes: how long it takes is its own affair.
    """
    machine, origin = machine_here(device, store, probing=probing)
    stages: dict[str, Cost] = {}
    quantization = recipe.quantization
    if quantization.engine == "stream":
        if recipe.calibration is not None and needs_ranges(quantization):
            stages["calibrate"] = calibrate_cost(calibrate_volume(source, structure, recipe.calibration), machine)
        choice, shared = select(structure, quantization), quantization.shared_scales
        plans = plan_shards(source, structure, choice, quantization.format, shared_scales=shared)
        stages["quantize"] = quantize_cost(quantize_volume(plans), machine)
    return Forecast(machine.rates.machine, origin, machine.rates, stages)


def machine_here(device: str, store: Path, *, probing: bool = False) -> tuple[Machine, Origin]:
    """This machine with the rates that are known of it; ``probing`` measures them first, and the store remembers.

    Several GPUs are taken to be of a kind: one of them is measured.
    """
    devices = resolve_devices(device)
    identity = identify(devices[0], store)
    if probing:
        from pipeline.cost.probe import probe

        on_device = "" if identity.device == "cpu" else f", {identity.device}"
        words = f"{identity.cores} cores of {identity.processor}{on_device}"
        remember(identity, probe(devices[0], store, words), store)
    rates, origin = rates_for(identity, store)
    return Machine(rates, identity.cores, device_memory("cpu"), devices, device_memory(devices[0])), origin

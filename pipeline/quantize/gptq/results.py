"""Keep the results of each layer in a file that is there when the layer is done, and read all of them back.

The steps of the plans that a file answers name it, and the rest of the engine takes rows from it in the place of a
kernel's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path

from quantmint.calibration.activations import save_whole
from quantmint.calibration.durable import sweep
from quantmint.calibration.lazy import torch
from quantmint.pipeline.quantize.engines.stream.plan import Step
from quantmint.pipeline.quantize.engines.stream.shard import ERRORS, error_of
from quantmint.pipeline.quantize.formats.checkpoint import torch_dtype
from quantmint.pipeline.quantize.gptq.latents import is_learned
from quantmint.pipeline.quantize.gptq.request import Gain, GptqRequest, GptqResult, Tuning
from quantmint.pipeline.quantize.gptq.solve import Solution
from quantmint.pipeline.quantize.gptq.weights import ModelWeights, largest_by_group
from quantmint.pipeline.quantize.inspection.numbers import Error
from quantmint.pipeline.quantize.schemes.registry import KERNELS
from quantmint.pipeline.quantize.schemes.scheme import Parts


@dataclass(slots=True)
class LayerResult:
    """Results of a layer until they are written: tensors by "{step}.{role}"; errors, gains and others by step.

    ``weights`` are those before rounding whose rounding can be learned, on the CPU, where it ``learns``. Tensors are on
    the CPU once ``copied`` has come: a GPU goes on meanwhile.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    errors: dict[str, Error] = field(default_factory=dict)
    gains: dict[str, Gain] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    learns: bool = False
    copied: torch.cuda.Event | None = None

    def add(self, solutions: Sequence[Solution]) -> None:
        """Add the solutions of one of the layer's steps."""
        for solution in solutions:
            # Of experts it is gigabytes a layer, and what is copied meanwhile lies in memory that is not given back.
            waits = solution.member.view is not None
            self._add(solution.member.step, solution.weight, solution.rounded.parts, waits=waits)
            self.gains[solution.member.step.name] = solution.gain
            if self.learns and is_learned(solution.member):
                self.weights[solution.member.step.name] = solution.weight.cpu()

    def add_scaled(self, weights: ModelWeights, layer: str, touched: set[str]) -> None:
        """Add the layer's other tensors among the parameters ``touched`` by scaling, which no solution holds.

        These are norms, biases, 16-bit weights, and quantized weights such as those of experts that no token reached,
        which are rounded to the nearest. Raises `StageError` for a weight that is not finite.
        """
        members = [
            member
            for member in weights.members
            if member.parameter.startswith(f"{layer}.") and member.parameter in touched
        ]
        unsolved = {
            member.step: weights.finite(member)
            for member in members
            if member.step.kernel and not member.step.untouched and member.step.name not in self.gains
        }
        largest = largest_by_group(unsolved)
        for step, weight in unsolved.items():
            self._add(step, weight, KERNELS[str(step.kernel)].compute(weight, largest.get(step.name)))
        self.tensors |= {
            f"{member.step.name}.{out.role}": weights.weight(member).to(torch_dtype(out.dtype)).cpu()
            for member in members
            if member.step.kernel is None
            for out in member.step.outputs
        }

    def save(self, folder: Path, layer: int, ranges: Mapping[str, float]) -> None:
        """Write the file of layer number ``layer``, with the ``ranges`` of inputs that scaling changed.

        Raises `OSError`.
        """
        if self.copied is not None:
            self.copied.synchronize()
        metadata = {
            "gains": json.dumps({name: astuple(gain) for name, gain in self.gains.items()}),
            ERRORS: json.dumps({name: astuple(error) for name, error in self.errors.items()}),
            "ranges": json.dumps(ranges),
        }
        save_whole(folder / f"{layer:05}.safetensors", self.tensors, metadata)

    def _add(self, step: Step, weight: torch.Tensor, parts: Parts, *, waits: bool = True) -> None:
        on_host = {role: part.to("cpu", non_blocking=not waits) for role, part in parts.items()}
        self.tensors.update({f"{step.name}.{role}": part for role, part in on_host.items()})
        if weight.is_cuda and not waits:
            self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.copied.record(torch.cuda.current_stream(weight.device))
        self.errors[step.name] = error_of(weight, parts, str(step.kernel))


def layers_folder(work: Path) -> Path:
    """Return the folder of the layers' files below ``work``; create it, and remove half-written files from it."""
    folder = work / "made"
    folder.mkdir(parents=True, exist_ok=True)
    sweep(folder)
    return folder


def read_result(request: GptqRequest, folder: Path, unscaled: Sequence[str]) -> GptqResult:
    """Return the result of all layers from their files in ``folder``, those of earlier attempts included.

    Files of learned weights and of tuned vectors, whose names come last, replace those of the layers.

    ``unscaled`` names modules whose channels cannot be scaled.
    """
    from safetensors import safe_open

    files: dict[str, Path] = {}
    gains: dict[str, Gain] = {}
    ranges: dict[str, torch.Tensor] = {}
    tuning: Tuning | None = None
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as stored:
            metadata = stored.metadata()
            files |= {name.rpartition(".")[0]: path for name in stored.keys()}  # noqa: SIM118 - it is no mapping
        gains |= {name: Gain(*facts) for name, facts in json.loads(metadata["gains"]).items()}
        if "tuning" in metadata:
            tuning = Tuning(*json.loads(metadata["tuning"]))
        ranges |= {name: torch.tensor([value]) for name, value in json.loads(metadata["ranges"]).items()}
    plans = tuple(
        replace(plan, steps=tuple(replace(step, made=files.get(step.name)) for step in plan.steps))
        for plan in request.plans
    )
    untouched = tuple(sorted(request.choice.schemes.keys() - request.choice.stored - gains.keys()))
    return GptqResult(plans, gains, untouched, ranges, tuple(unscaled), tuning)

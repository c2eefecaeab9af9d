"""Weights that calibration decides on: linear modules by GPTQ, layer by layer, each made with what came before.

    plans = round_layers(plans, choice, folder, batches, ranges, devices=["cuda:0"], work=scratch, ...).plans

What is made of a layer lies in one file of the working folder, which is there when the layer is done; the steps of the
plans that it answers name it, and the rest of the engine takes rows from it in the place of a kernel's. Modules that no
Hessian is measured for, experts that no token reached and what lies outside the layers, are left to their kernels, and
named. Experts get no compensation: in the 16-bit model the router may send them other tokens.

Where channels are scaled first (`scaling`), all that the factors may reach is made here: norms, biases and what stays
in 16 bit as well, and experts that no token reached.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantmint.calibration.activations import save_whole
from quantmint.calibration.durable import sweep
from quantmint.calibration.hessians import Inputs, Rounding
from quantmint.calibration.layers import PARTS
from quantmint.calibration.lazy import torch
from quantmint.calibration.replica import Replica, replica, sources
from quantmint.calibration.room import (
    activations_for,
    free_bytes,
    host_bytes,
    measuring,
    need_of,
    require_rounding_room,
    rounding_bytes,
)
from quantmint.calibration.sequential import Look, run_sequential
from quantmint.pipeline.base.errors import StageError
from quantmint.pipeline.base.schemes import ActivationFormat, scheme
from quantmint.pipeline.quantize.engines.stream.plan import ShardPlan, Step
from quantmint.pipeline.quantize.engines.stream.shard import ERRORS, error_of
from quantmint.pipeline.quantize.formats.checkpoint import torch_dtype
from quantmint.pipeline.quantize.formats.layout import Choice
from quantmint.pipeline.quantize.gptq.compensation import compensated
from quantmint.pipeline.quantize.gptq.folds import Fold, Matrix, study
from quantmint.pipeline.quantize.gptq.scaling import ChannelReader, scale_layer
from quantmint.pipeline.quantize.gptq.solver import (
    SUPPORTED,
    RoundedWeight,
    factorize,
    in_tf32,
    round_stack,
    round_weight,
)
from quantmint.pipeline.quantize.inspection.numbers import Error
from quantmint.pipeline.quantize.model.experts import expert_slice
from quantmint.pipeline.quantize.model.structure import Structure
from quantmint.pipeline.quantize.rounding import round_activations, round_mx
from quantmint.pipeline.quantize.schemes.registry import KERNELS, dequantize
from quantmint.pipeline.quantize.schemes.scales import amax, fp8_scale
from quantmint.pipeline.recipe.modules import fused_with

if TYPE_CHECKING:
    from quantmint.pipeline.quantize.schemes.scheme import Parts

_MADE = "made"  # a file a layer
_STATES = "layers"  # what an interrupted run is gone on with
_STACK = 1 << 30  # bytes in float32 of the Hessians, or of the weights, that a GPU rounds side by side


@dataclass(frozen=True, slots=True)
class Gain:
    """The gain of GPTQ on one module: tr((W-Q) H (W-Q)^T) by RTN and as it is stored, and how many
    tokens entered it; ``fault`` says why it was rounded to the nearest. ``pooled``: H is of all experts of its layer,
    for its own tokens were fewer than its inputs."""

    before: float
    after: float
    tokens: int
    fault: str | None
    pooled: bool = False


@dataclass(frozen=True, slots=True)
class Rounded:
    """Plans whose steps name what was made, what was gained by module, and modules that are rounded to the nearest.

    ``ranges`` are those of inputs that became others, by the names of their scales. ``unscaled`` names what makes
    channels that cannot be scaled.
    """

    plans: tuple[ShardPlan, ...]
    gains: Mapping[str, Gain]
    left: tuple[str, ...]
    ranges: Mapping[str, torch.Tensor] = field(default_factory=dict)
    unscaled: tuple[str, ...] = ()


def round_layers(
    plans: tuple[ShardPlan, ...],
    structure: Structure,
    choice: Choice,
    folder: Path,
    batches: Sequence[torch.Tensor],
    ranges: Mapping[str, torch.Tensor],
    *,
    devices: Sequence[str],
    work: Path,
    parameters: Mapping[str, float | int | bool],
    activation_bytes: int | None = None,
    trust_remote_code: bool = False,
    bar: Callable[[int], AbstractContextManager[Callable[[int], None]]] = lambda _: nullcontext(lambda _: None),
) -> Rounded:
    """Make the weights of a model's linear modules, going on at the last layer that an earlier attempt committed.

    ``ranges`` are those behind static scales of inputs, by their tensors' names. ``parameters`` are the recipe's.
    The ``devices`` share the batches. ``bar`` opens a progress bar over a total of samples, each counted once a layer;
    its value is called with each advance.

    Raises `CalibrationError` where the model cannot be run layer by layer, `StageError` for weights that are not
    finite.
    """
    with measuring(folder):
        used = devices[: min(len(batches), PARTS)]
        replicas = [replica(folder, device, trust_remote_code=trust_remote_code) for device in used]
        for each in replicas:
            each.fuse_attention()
        one, need = replicas[0], need_of(replicas[0], batches)
        if parameters["compensation"]:
            need = replace(need, states=2 * need.states)
        require_rounding_room(need, gptq_bytes(structure, choice.schemes), free_bytes(used[0]), used[0])
        made = work / _MADE
        made.mkdir(parents=True, exist_ok=True)
        sweep(made)
        layers = _Layers(one, plans, structure, choice, made, parameters, ranges)
        unscaled = layers.study(batches[0]) if parameters.get("scaling") else ()
        with bar(len(one.walkable.layers) * sum(batch.shape[0] for batch in batches)) as advance:
            run_sequential(
                replicas,
                batches,
                layers.roundings,
                layers.solve,
                activations_for(devices, need, host_bytes(activation_bytes), work / _STATES),
                layers.facts,
                stacked=layers.stacked,
                fold=layers.fold if parameters.get("scaling") else None,
                beside=layers.strength > 0,
                advance=advance,
            )
    files: dict[str, Path] = {}
    gains: dict[str, Gain] = {}
    found: dict[str, torch.Tensor] = {}
    for path in sorted(made.glob("*.safetensors")):
        steps, of_path, changed = _facts(path)
        files |= dict.fromkeys(steps, path)
        gains |= of_path
        found |= changed
    return Rounded(
        tuple(
            replace(plan, steps=tuple(replace(step, made=files.get(step.name)) for step in plan.steps))
            for plan in plans
        ),
        gains,
        tuple(sorted(choice.schemes.keys() - gains.keys())),
        found,
        tuple(unscaled),
    )


def gptq_bytes(structure: Structure, modules: Collection[str]) -> int:
    """Return the bytes that GPTQ takes for the largest of some modules; those that vLLM fuses are rounded as one."""
    widths: dict[str, tuple[int, int]] = {}
    for name in modules:
        rows, columns = structure.linear[name]
        group = fused_with(name) or name
        widths[group] = widths.get(group, (0, columns))[0] + rows, columns
    return rounding_bytes(widths.values())


def _own_modules(one: Replica, steps: Mapping[str, Step]) -> dict[str, str]:
    """The model's own linear module behind each quantized one that is all of it, within a layer."""
    inside = tuple(f"{name}." for name in one.walkable.layers)
    named = sources(one.model, one.owned)
    modules = dict(one.model.named_modules())
    whole = list(named.values())
    return {
        name: own
        for name in steps
        if (own := named.get(name, "")).startswith(inside)
        and isinstance(modules.get(own), torch.nn.Linear)
        and whole.count(own) == 1
        and tuple(modules[own].weight.shape) == steps[name].origin.shape
    }


@dataclass(frozen=True, slots=True)
class _Member:
    """A step of a plan, the model's own parameter that its tensor is (a part of), and how it is taken out of that.

    ``expert`` is the number of one of several that the parameter stacks.
    """

    step: Step
    parameter: str
    take: Callable[[torch.Tensor], torch.Tensor]
    expert: int | None = None


def _members(one: Replica, structure: Structure, steps: Iterable[Step]) -> Iterator[_Member]:
    """Steps whose tensor the model has."""
    modules, parameters = dict(one.model.named_modules()), one.model.state_dict()
    stacks = {source.tensor: module for module, source in structure.weights.items() if source.expert is not None}
    for step in steps:
        module = stacks.get(step.name, step.name if step.kernel is not None else step.name.removesuffix(".weight"))
        source = structure.weights.get(module)
        own = one.owned.get(step.name if source is None else source.tensor, step.name)
        if own in parameters and source is not None and parameters[own].ndim == 3:
            name, number, projection = structure.modules[module].rsplit(".", 2)
            place = expert_slice(modules[name], name, int(number), projection)
            own = f"{name}.{place.parameter}"  # of several stacks that one list becomes, that of this expert
            whole = _whole(turned=source.transposed != place.transposed)
            if step.name in stacks:
                yield _Member(step, own, whole)
            else:
                yield _Member(step, own, place.of, int(number))
        elif own in parameters and tuple(parameters[own].shape) == step.origin.shape:
            yield _Member(step, own, _whole(turned=False))


def _whole(turned: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    return (lambda whole: whole.mT) if turned else (lambda whole: whole)


@dataclass(slots=True)
class _LayerResult:
    """The results of a layer until they are on the disk: tensors by step and role, errors and gains by step."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    errors: dict[str, Error] = field(default_factory=dict)
    gains: dict[str, Gain] = field(default_factory=dict)

    def add(self, step: Step, weight: torch.Tensor, parts: Parts) -> None:
        """Take what was made of a weight."""
        self.tensors.update({f"{step.name}.{role}": part.cpu() for role, part in parts.items()})
        self.errors[step.name] = error_of(weight, parts, str(step.kernel))


class _Layers:
    """Round the weights of each layer, and scale the tensors around them."""

    def __init__(
        self,
        one: Replica,
        plans: Iterable[ShardPlan],
        structure: Structure,
        choice: Choice,
        folder: Path,
        parameters: Mapping[str, float | int | bool],
        ranges: Mapping[str, torch.Tensor],
    ) -> None:
        self._replica, self._choice, self._folder, self._parameters = one, choice, folder, parameters
        steps = [step for plan in plans for step in plan.steps]
        quantized = {step.name: step for step in steps if step.kernel is not None}
        own = _own_modules(one, {name: step for name, step in quantized.items() if step.kernel in SUPPORTED})
        self._steps = {own[name]: quantized[name] for name in own}
        self._names = one.walkable.layers
        self._members = list(_members(one, structure, steps))
        carried = [each for each in self._members if each.expert is not None and each.step.kernel in SUPPORTED]
        self._experts: dict[str, list[str]] = {}  # steps by the product that makes them
        for each in carried:
            self._experts.setdefault(f"{each.parameter}.{each.expert}", []).append(each.step.name)
        self._parts = {each.step.name: each for each in carried}
        self._steps |= {each.step.name: each.step for each in carried}
        self._ranges, self._changed = dict(ranges), dict[str, float]()
        self.roundings = {own[name]: self._served(quantized[name]) for name in own}
        self.stacked = {name: self._served(self._steps[steps[0]]) for name, steps in self._experts.items()}
        made_here = sorted([*own, *self._parts])
        self.facts = [[name, choice.schemes[name], quantized[name].kernel] for name in made_here] + [dict(parameters)]
        self._folds: dict[str, tuple[Fold, ...]] = {}
        self._touched: set[str] = set()
        self._made = _LayerResult()
        self.strength = float(parameters["compensation"])

    def study(self, batch: torch.Tensor) -> list[str]:
        """Find out what can be scaled; names what makes channels that cannot."""
        found, left = study(self._replica, batch)
        stored = {member.parameter for member in self._members}
        for name, folds in found.items():
            touched = {fold: {f"{name}.{each}" for each in fold.names} for fold in folds}
            # What several tensors on the disk become one of is not written back.
            self._folds[name] = tuple(fold for fold in folds if touched[fold] <= stored)
            left += [f"{name}.{fold.weight.removesuffix('.weight')}" for fold in folds if not touched[fold] <= stored]
            self._touched |= set[str]().union(*(touched[fold] for fold in self._folds[name]))
        return left

    def fold(self, number: int, look: Look) -> None:
        """Scale the channels of a layer; inputs whose range was measured before get the one that they have now."""
        name = self._names[number]

        def reader(matrix: Matrix) -> ChannelReader | None:
            module = f"{name}.{matrix.module}"
            return self._reader(module) if module in self._steps else None

        ranged = any(each.endswith(".input_scale") for each in self._ranges)
        for fold, largest in scale_layer(self._replica.model, name, self._folds[name], look, reader, ranged):
            weights = {f"{name}.{each.weight}" for each in fold.readers}
            for member in (each for each in self._members if each.parameter in weights):
                if (scale := f"{member.step.name}.input_scale") in self._ranges:
                    self._ranges[scale] = largest.amax().reshape(1).cpu()
                    self._changed[scale] = float(self._ranges[scale])
        inside = [module for module in self.roundings if module.startswith(f"{name}.")]
        self.roundings |= {module: self._served(self._steps[module]) for module in inside}
        self.stacked |= {
            product: self._served(self._steps[steps[0]])
            for product, steps in self._experts.items()
            if product.startswith(f"{name}.")
        }

    def _served(self, step: Step, largest: torch.Tensor | None = None) -> Rounding:
        known = self._ranges.get(f"{step.name}.input_scale")
        known = known if known is None or largest is None else largest.amax()
        return _rounding(scheme(self._choice.schemes[step.name]).activations, None if known is None else float(known))

    def _reader(self, module: str) -> ChannelReader:
        step = self._steps[module]
        kernel, scheme_name = KERNELS[str(step.kernel)], self._choice.schemes[step.name]

        def stored(weight: torch.Tensor) -> torch.Tensor:
            row = scheme(scheme_name).weight
            if row.scale == "e8m0":  # the same numbers, without what is packed between
                return round_mx(weight, row.dtype)
            return dequantize(scheme_name, kernel.compute(weight, None))

        return ChannelReader(self._own(module).float(), lambda rows, largest: self._served(step, largest)(rows), stored)

    def solve(self, number: int, found: Sequence[Inputs], last: bool) -> None:
        """Make the weights of a layer's turn; with its last one, all of the layer is put on the disk."""
        # Of an expert's product the names are those of its projections.
        found = [replace(each, modules=tuple(self._experts.get(each.modules[0], each.modules))) for each in found]
        targets = {name: target for inputs in found for name, target in self._targets(inputs).items()}
        largest = self._largest({self._steps[name]: target for name, target in targets.items()})
        self._round(found, targets, largest)
        if last:
            members = [each for each in self._members if each.parameter.startswith(f"{self._names[number]}.")]
            changed = [each for each in members if each.parameter in self._touched]
            kernels = [each for each in changed if each.step.kernel and each.step.name not in self._made.gains]
            weights = {each.step: self._finite(each.step, self._weight(each)) for each in kernels}
            largest = self._largest(weights)
            for step, weight in weights.items():
                self._made.add(step, weight, KERNELS[str(step.kernel)].compute(weight, largest.get(step.name)))
            self._made.tensors |= {  # of what no kernel makes
                f"{each.step.name}.{out.role}": self._weight(each).to(torch_dtype(out.dtype)).cpu()
                for each in changed
                if each.step.kernel is None
                for out in each.step.outputs
            }
            self._save(f"{number:05}", self._made)
            self._made = _LayerResult()

    def _round(
        self, found: Sequence[Inputs], targets: Mapping[str, torch.Tensor], largest: Mapping[str, torch.Tensor]
    ) -> None:
        """Round modules by their inputs; on a GPU experts of one shape side by side, where columns take as long."""
        together: dict[tuple[str, int, int], list[tuple[Inputs, list[str], list[torch.Tensor]]]] = {}
        for inputs in found:
            factor = cache(lambda kernel, hessian=inputs.hessian: self._factored(hessian, kernel))
            for names in self._alike(inputs.modules):
                step = self._steps[names[0]]
                weights = [self._own(name) if inputs.is_beside else targets[name] for name in names]
                kernel, shared = str(step.kernel), largest.get(step.name)
                if shared is None and not inputs.is_beside and not self._replica.device.startswith("cpu"):
                    shape = kernel, sum(map(len, weights)), inputs.hessian.shape[0]
                    together.setdefault(shape, []).append((inputs, names, weights))
                    continue
                target = torch.cat([targets[name] for name in names]) if inputs.is_beside else None
                self._take(
                    inputs,
                    names,
                    weights,
                    round_weight(torch.cat(weights), factor(kernel), KERNELS[kernel], shared, target),
                )
        for (kernel, rows, columns), members in together.items():
            count = max(1, _STACK // (4 * columns * max(rows, columns)))
            for stack in (members[first : first + count] for first in range(0, len(members), count)):
                factors = [self._factored(inputs.hessian, kernel) for inputs, _, _ in stack]
                wholes = [torch.cat(weights) for _, _, weights in stack]
                for (inputs, names, weights), made in zip(
                    stack, round_stack(wholes, factors, KERNELS[kernel]), strict=True
                ):
                    self._take(inputs, names, weights, made)

    def _take(
        self, inputs: Inputs, names: Sequence[str], weights: Sequence[torch.Tensor], whole: RoundedWeight
    ) -> None:
        """Keep what was made of modules, whose rows lay one below the other, and give the model their weights."""
        for name, weight, made in zip(names, weights, whole.split(list(map(len, weights))), strict=True):
            step = self._steps[name]
            self._put(name, dequantize(self._choice.schemes[step.name], made.parts).to(weight.dtype))
            self._made.add(step, weight, made.parts)
            self._made.gains[step.name] = Gain(made.before, made.after, inputs.tokens, made.fault, inputs.pooled)

    def _own(self, name: str) -> torch.Tensor:
        if name in self._parts:
            return self._weight(self._parts[name]).clone()
        weight: torch.Tensor = self._replica.model.get_submodule(name).weight.detach()
        return weight

    def _alike(self, names: Iterable[str]) -> list[list[str]]:
        """Modules whose rows can be rounded as those of one, by kernels whose scales are of a row at most."""
        found: dict[str, list[str]] = {}
        for name in names:
            kernel = str(self._steps[name].kernel)
            found.setdefault(name if KERNELS[kernel].whole else kernel, []).append(name)
        return list(found.values())

    def _targets(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        """Return the weights to be stored, in their own type, which their scales take over."""
        weights = {name: self._finite(self._steps[name], self._own(name)) for name in inputs.modules}
        whole = torch.cat(list(weights.values()))
        with in_tf32():
            lacking = inputs.lacking(whole)
        if lacking is None:
            return weights
        whole = compensated(whole, inputs.hessian, lacking, self.strength).to(whole.dtype)
        return dict(zip(weights, torch.split(whole, list(map(len, weights.values()))), strict=True))

    def _factored(self, hessian: torch.Tensor, kernel: str) -> Any:
        dampening, ordered = float(self._parameters["dampening"]), bool(self._parameters["activation_order"])
        return factorize(hessian, KERNELS[kernel], dampening=dampening, ordered=ordered)

    def _weight(self, member: _Member) -> torch.Tensor:
        return member.take(self._replica.model.get_parameter(member.parameter).detach()).contiguous()

    def _finite(self, step: Step, weight: torch.Tensor) -> torch.Tensor:
        if not bool(amax(weight).isfinite()):
            raise StageError(f"{step.name}: its weight holds numbers that are not finite.")
        return weight

    def _put(self, name: str, weight: torch.Tensor) -> None:
        if name in self._parts:
            part = self._parts[name]
            part.take(self._replica.model.get_parameter(part.parameter).detach()).copy_(weight)
            return
        self._replica.model.get_submodule(name).weight = torch.nn.Parameter(weight, requires_grad=False)

    def _largest(self, weights: Mapping[Step, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The largest magnitude behind each scale that several weights share, by step."""
        origins = {step.origin: amax(weight) for step, weight in weights.items() if step.group}
        return {
            step.name: torch.stack([origins[other] for other in step.group]).amax()
            for step in weights
            if step.group and all(other in origins for other in step.group)
        }

    def _save(self, name: str, made: _LayerResult) -> None:
        metadata = {
            "gains": json.dumps({each: astuple(gain) for each, gain in made.gains.items()}),
            ERRORS: json.dumps({each: astuple(error) for each, error in made.errors.items()}),
            "ranges": json.dumps(self._changed),
        }
        save_whole(self._folder / f"{name}.safetensors", made.tensors, metadata)
        self._changed = {}


def _facts(path: Path) -> tuple[set[str], dict[str, Gain], dict[str, torch.Tensor]]:
    """Read a layer's file: its steps, gains, and ranges of inputs."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as stored:
        metadata = stored.metadata()
        gains = {name: Gain(*facts) for name, facts in json.loads(metadata["gains"]).items()}
        ranges = {name: torch.tensor([found]) for name, found in json.loads(metadata["ranges"]).items()}
        return {name.rpartition(".")[0] for name in stored.keys()}, gains, ranges  # noqa: SIM118 - it is no mapping


@cache
def _rounding(activations: ActivationFormat, largest: float | None) -> Rounding:
    """Return the rounding of inputs as served; equal ranges, which are of the same input, share one function."""
    if activations.kind == "none":
        return lambda entering: entering
    scale = None if largest is None else fp8_scale(torch.tensor(largest))

    def rounded(entering: torch.Tensor) -> torch.Tensor:
        of_input = None if scale is None else scale.to(entering.device)
        return round_activations(entering, activations, of_input).to(entering.dtype)

    return rounded

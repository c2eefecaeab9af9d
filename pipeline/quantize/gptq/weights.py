"""Find the model's own parameter behind each step of a checkpoint's plan, and how its inputs are served.

The checkpoint's names and shapes are not always the model's: transformers renames tensors, and stacks experts that lie
one by one on the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from quantmint.calibration.encodings import plain_name
from quantmint.calibration.hessians import InputStatistics
from quantmint.calibration.inputs import Rounding
from quantmint.calibration.lazy import torch
from quantmint.calibration.replica import Replica, sources
from quantmint.pipeline.base.errors import StageError
from quantmint.pipeline.base.schemes import MxScales, activations_on
from quantmint.pipeline.quantize.engines.stream.plan import Step
from quantmint.pipeline.quantize.formats.choice import Choice
from quantmint.pipeline.quantize.gptq.runner import InputRoundings
from quantmint.pipeline.quantize.gptq.solver import SUPPORTED
from quantmint.pipeline.quantize.model.experts import expert_slice
from quantmint.pipeline.quantize.model.structure import Structure
from quantmint.pipeline.quantize.rounding import activation_rounding
from quantmint.pipeline.quantize.schemes.registry import KERNELS
from quantmint.pipeline.quantize.schemes.scales import amax
from quantmint.pipeline.quantize.schemes.scheme import Kernel


@dataclass(frozen=True, slots=True)
class Member:
    """A step of a plan, and the model's ``parameter`` that holds its tensor.

    ``view`` takes the tensor out of the parameter, None where it is the whole parameter. ``expert`` is the expert's
    number where the parameter stacks several.
    """

    step: Step
    parameter: str
    view: Callable[[torch.Tensor], torch.Tensor] | None = None
    expert: int | None = None

    @property
    def kernel(self) -> Kernel:
        """Return the kernel of the step. Raises `KeyError` for a step without one."""
        return KERNELS[str(self.step.kernel)]


@dataclass(frozen=True, slots=True)
class InputGroup:
    """Weights [O, I] that read the same input, with the statistics of that input.

    ``targets`` are stored in the place of the weights, in the same dtype; None where the weights themselves are.
    ``compensation`` is the share of the error against the reference model that each target compensates, 0 where it is
    the weight itself; None without a reference model. ``probe`` are rows [n, I] of the input by which a target's output
    is judged once it is rounded.
    """

    statistics: InputStatistics
    members: tuple[Member, ...]
    weights: tuple[torch.Tensor, ...]
    targets: tuple[torch.Tensor, ...] | None = None
    compensation: tuple[float, ...] | None = None
    probe: torch.Tensor | None = None


class ModelWeights:
    """Finds the model's parameter behind each step of the plan.

    ``linear`` maps each linear module that GPTQ rounds, by the model's name, to its member; ``experts`` maps
    ``{stack}.{expert number}`` to the members of that expert's product. ``members`` are those of all steps whose tensor
    the model has.
    """

    def __init__(self, replica: Replica, structure: Structure, steps: Sequence[Step]) -> None:
        self._replica = replica
        supported = {step.name: step for step in steps if _is_rounded(step)}
        modules = _own_modules(replica, supported)
        self.linear = {module: Member(supported[name], f"{module}.weight") for name, module in modules.items()}
        self.members = list(_members(replica, structure, steps))
        self.experts: dict[str, list[Member]] = {}
        for member in self.members:
            if member.expert is not None and _is_rounded(member.step):
                self.experts.setdefault(f"{member.parameter}.{member.expert}", []).append(member)

    @property
    def names(self) -> list[str]:
        """Return the modules that GPTQ rounds, by their names on disk, sorted."""
        members = (*self.linear.values(), *(member for product in self.experts.values() for member in product))
        return sorted(member.step.name for member in members)

    def groups(self, statistics: Iterable[InputStatistics]) -> list[InputGroup]:
        """Return the group of weights of the modules of each of the statistics.

        Raises `StageError` for a weight that is not finite.
        """
        groups = []
        for inputs in statistics:
            members = tuple(
                member for module in inputs.modules for member in (self.experts.get(module) or [self.linear[module]])
            )
            groups.append(InputGroup(inputs, members, tuple(self.finite(member) for member in members)))
        return groups

    def weight(self, member: Member) -> torch.Tensor:
        """Return a member's tensor from the model; a copy where it is a part of a parameter."""
        parameter: torch.Tensor = self._replica.model.get_parameter(member.parameter).detach()
        return parameter if member.view is None else member.view(parameter).contiguous().clone()

    def finite(self, member: Member) -> torch.Tensor:
        """Return a member's tensor from the model. Raises `StageError` where it is not finite."""
        weight = self.weight(member)
        if not bool(amax(weight).isfinite()):
            raise StageError(f"{member.step.name}: its weight holds numbers that are not finite.")
        return weight


def largest_by_group(weights: Mapping[Step, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the largest magnitude behind each scale that several weights share, by the name of each sharing step.

    Steps of a group of which not all weights are given are left out.
    """
    origins = {step.origin: amax(weight) for step, weight in weights.items() if step.group}
    return {
        step.name: torch.stack([origins[origin] for origin in step.group]).amax()
        for step in weights
        if step.group and all(origin in origins for origin in step.group)
    }


class ServedInputs:
    """Roundings of inputs as they are served, by measured ``ranges``.

    ``changed`` holds, by name, the ranges that scaling replaced.
    """

    def __init__(self, choice: Choice, ranges: Mapping[str, torch.Tensor], mx_scales: MxScales = "even") -> None:
        self._choice, self._ranges, self._mx_scales = choice, dict(ranges), mx_scales
        self.changed: dict[str, float] = {}
        self.is_ranged = any(name.endswith(".input_scale") for name in ranges)

    def rounding(self, step: Step, largest: torch.Tensor | None = None) -> Rounding:
        """Return the rounding of a step's input by its range; ``largest`` magnitudes replace the range, if any."""
        limit = self._ranges.get(f"{step.name}.input_scale")
        limit = limit if limit is None or largest is None else largest.amax()
        activations = activations_on(self._choice.schemes[step.name], self._mx_scales)
        return activation_rounding(activations, None if limit is None else float(limit))

    def roundings(self, weights: ModelWeights, layer: str | None = None) -> InputRoundings:
        """Return the roundings of the inputs of all modules that GPTQ rounds, or of those in ``layer``."""
        inside = "" if layer is None else f"{layer}."
        linear = {name: member for name, member in weights.linear.items() if name.startswith(inside)}
        experts = {name: members for name, members in weights.experts.items() if name.startswith(inside)}
        return InputRoundings(
            {module: self.rounding(member.step) for module, member in linear.items()},
            {product: self.rounding(members[0].step) for product, members in experts.items()},
            {product.rpartition(".")[0]: members[0].step.origin.shape[1] for product, members in experts.items()},
        )

    def set_range(self, step: Step, largest: torch.Tensor) -> None:
        """Replace the range of a step's input, if it has one, by the largest of its channels' magnitudes [I]."""
        if (name := f"{step.name}.input_scale") in self._ranges:
            self._ranges[name] = largest.amax().reshape(1).cpu()
            self.changed[name] = float(self._ranges[name])


def _own_modules(replica: Replica, steps: Mapping[str, Step]) -> dict[str, str]:
    """Map each quantized module within a layer to the model's linear module that holds its weight and no other."""
    inside = tuple(f"{name}." for name in replica.walkable.layers)
    named = sources(replica.model, replica.owned)
    modules = dict(replica.model.named_modules())
    owners = list(named.values())
    return {
        name: module
        for name in steps
        if (module := named.get(name, "")).startswith(inside)
        and isinstance(modules.get(module), torch.nn.Linear)
        and owners.count(module) == 1
        and tuple(modules[module].weight.shape) == steps[name].origin.shape
    }


def _is_rounded(step: Step) -> bool:
    """Return whether GPTQ rounds a step's weight: on a grid that it has, and not one that keeps its source's bytes."""
    return step.kernel in SUPPORTED and not step.untouched


def _members(replica: Replica, structure: Structure, steps: Iterable[Step]) -> Iterator[Member]:
    """Yield a `Member` for each step of the plan whose tensor is a parameter, or a part of one; others are left out."""
    modules, parameters = dict(replica.model.named_modules()), replica.model.state_dict()
    stacks = {source.tensor: module for module, source in structure.weights.items() if source.expert is not None}
    for step in steps:
        module = stacks.get(step.name, step.name if step.kernel is not None else step.name.removesuffix(".weight"))
        source = structure.weights.get(module)
        parameter = replica.owned.get(step.name if source is None else plain_name(source.tensor), step.name)
        if parameter in parameters and source is not None and parameters[parameter].ndim == 3:
            name, number, projection = structure.modules[module].rsplit(".", 2)
            place = expert_slice(modules[name], name, int(number), projection)
            parameter = f"{name}.{place.parameter}"  # of several stacks that one list becomes, that of this expert
            if step.name in stacks:
                yield Member(step, parameter, _transposed if source.transposed != place.transposed else None)
            else:
                yield Member(step, parameter, place.of, int(number))
        elif parameter in parameters and tuple(parameters[parameter].shape) == step.origin.shape:
            yield Member(step, parameter)


def _transposed(stack: torch.Tensor) -> torch.Tensor:
    return stack.mT

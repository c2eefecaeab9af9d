"""Solve for the quantized weights of a step: from groups of weights with their statistics to tensors to store.

Groups are independent of each other given their statistics, so several devices each solve some of them. What is
computed on a device does not depend on how many there are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod

from quantmint.calibration.lazy import torch
from quantmint.calibration.room import rounding_bytes
from quantmint.pipeline.quantize.device import map_devices
from quantmint.pipeline.quantize.gptq.request import Gain, GptqSettings
from quantmint.pipeline.quantize.gptq.runner import EXPERT_SUMS, NewWeight, stack_size
from quantmint.pipeline.quantize.gptq.solver import Attempt, Factor, RoundedWeight, attempt, factorize, finish
from quantmint.pipeline.quantize.gptq.weights import InputGroup, Member, largest_by_group
from quantmint.pipeline.quantize.inspection.numbers import Error
from quantmint.pipeline.quantize.model.structure import Structure
from quantmint.pipeline.quantize.schemes.scheme import Kernel
from quantmint.pipeline.recipe.modules import fused_with, scale_group

_MOST_DB = 200.0
"""Ratios beyond it, infinite ones among them, are recorded as this, which JSON can hold."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Weights of one group that are rounded as one matrix [O, I] by one kernel.

    That is several weights where a scale covers a row at most; otherwise a single weight. ``largest`` is then the
    largest magnitude of all weights that share its scale, None where it shares none. ``targets`` are stored in the
    place of the weights; None where the weights themselves are.
    """

    group: InputGroup
    members: tuple[Member, ...]
    weights: tuple[torch.Tensor, ...]
    targets: tuple[torch.Tensor, ...] | None
    largest: torch.Tensor | None

    @property
    def kernel(self) -> Kernel:
        """Return the kernel, which all members have in common."""
        return self.members[0].kernel

    @property
    def shape(self) -> tuple[int, int]:
        """Return the rows and columns of the matrix."""
        return sum(map(len, self.weights)), self.weights[0].shape[1]

    def matrix(self, device: str) -> torch.Tensor:
        """Return the weights stacked by rows, [O, I], on ``device``."""
        return torch.cat(self.weights).to(device)

    def target(self, device: str) -> torch.Tensor | None:
        """Return the targets stacked by rows, [O, I], on ``device``; None where there are none."""
        return None if self.targets is None else torch.cat(self.targets).to(device)


@dataclass(frozen=True, slots=True)
class Solution:
    """The quantized weight of a ``member``, which is number ``place`` of its ``group``, and its ``weight`` before."""

    member: Member
    weight: torch.Tensor
    rounded: RoundedWeight
    group: InputGroup
    place: int

    @property
    def gain(self) -> Gain:
        """Return the gain over round-to-nearest."""
        rounded, statistics, compensation = self.rounded, self.group.statistics, self.group.compensation
        return Gain(
            rounded.before,
            rounded.after,
            statistics.tokens,
            rounded.fault,
            statistics.pooled,
            None if compensation is None else compensation[self.place],
            self._output_db(),
        )

    def _output_db(self) -> float | None:
        """Return the SQNR of the products with the group's probe, see `Gain`; None for a module not compensated."""
        group = self.group
        if group.probe is None or group.targets is None or not group.compensation or not group.compensation[self.place]:
            return None
        target = group.targets[self.place].float()
        error = target - self.member.kernel.decode(self.rounded.parts)
        signal, noise = (
            float((group.probe @ matrix.t()).square().sum(dtype=torch.float64)) for matrix in (target, error)
        )
        sqnr = Error(signal, noise).sqnr_db
        return -_MOST_DB if math.isnan(sqnr) else max(-_MOST_DB, min(sqnr, _MOST_DB))

    def served(self) -> NewWeight:
        """Return the decoded weight, which the served model computes with, as a new weight of the model's parameter."""
        weight = self.member.kernel.decode(self.rounded.parts).to(self.weight.dtype)
        return NewWeight(self.member.parameter, weight, self.member.view)


def solve(groups: Sequence[InputGroup], settings: GptqSettings, devices: Sequence[str]) -> list[Solution]:
    """Return the solution of each member of ``groups``, whose tensors lie on the first of the ``devices``.

    Each device solves one batch of problems at a time; see `solver.attempt` for why they are finished together.
    """
    problems = _problems(groups)
    batches = _batches(problems, devices[0])
    batches.sort(key=lambda batch: -sum(prod(problem.shape) for problem in batch))  # alike in size at a time
    rounded: dict[int, RoundedWeight] = {}
    for first in range(0, len(batches), len(devices)):
        here = batches[first : first + len(devices)]
        attempts = map_devices(
            lambda pair: _attempt(pair[0], settings, pair[1]), list(zip(here, devices, strict=False))
        )
        for batch, attempted in zip(here, attempts, strict=True):
            matrices = [matrix.to(devices[0]) for tried in attempted for matrix in finish(tried)]
            rounded |= {id(problem): matrix for problem, matrix in zip(batch, matrices, strict=True)}
    return [solution for problem in problems for solution in _solutions(problem, rounded[id(problem)])]


def _problems(groups: Sequence[InputGroup]) -> list[Problem]:
    """Return the problems of groups: members of one kernel together, or alone where a scale covers a whole weight."""
    stored = {
        member.step: target
        for group in groups
        for member, target in zip(group.members, group.targets or group.weights, strict=True)
    }
    largest = largest_by_group(stored)
    problems = []
    for group in groups:
        by_kernel: dict[str, list[int]] = {}
        for place, member in enumerate(group.members):
            key = member.step.name if member.kernel.whole else member.kernel.name
            by_kernel.setdefault(key, []).append(place)
        for places in by_kernel.values():
            weights = tuple(group.weights[place] for place in places)
            targets = None if group.targets is None else tuple(group.targets[place] for place in places)
            members = tuple(group.members[place] for place in places)
            shared = largest.get(members[0].step.name)
            problems.append(Problem(group, members, weights, targets, shared))
    return problems


def _batches(problems: Sequence[Problem], device: str) -> list[list[Problem]]:
    """Return the problems in batches that a device solves at a time.

    On a GPU, experts of one shape are solved side by side, where columns take as long as those of one; else the
    problems of one group that share the kernel, and with it the factor.
    """
    batches: dict[tuple[object, ...], list[Problem]] = {}
    for problem in problems:
        rows, columns = problem.shape
        if problem.targets is None and problem.largest is None and torch.device(device).type != "cpu":
            key: tuple[object, ...] = problem.kernel.name, rows, columns
        else:
            key = problem.kernel.name, id(problem.group)
        batches.setdefault(key, []).append(problem)
    divided = []
    for batch in batches.values():
        rows, columns = batch[0].shape
        count = stack_size(rows, columns) if _is_stack(batch) else len(batch)
        divided += [batch[first : first + count] for first in range(0, len(batch), count)]
    return divided


def _is_stack(batch: Sequence[Problem]) -> bool:
    """Return whether the problems are of different groups, and so have a Hessian each."""
    return any(problem.group is not batch[0].group for problem in batch)


def _attempt(batch: Sequence[Problem], settings: GptqSettings, device: str) -> list[Attempt]:
    """Round the matrices of a batch on a device, which is this thread's current one meanwhile."""
    with torch.cuda.device(device) if torch.device(device).type == "cuda" else nullcontext():
        return _attempt_here(batch, settings, device)


def _attempt_here(batch: Sequence[Problem], settings: GptqSettings, device: str) -> list[Attempt]:
    kernel = batch[0].kernel

    def factor(problem: Problem) -> Factor:
        hessian = problem.group.statistics.hessian.to(device)
        return factorize(hessian, kernel, dampening=settings.dampening, ordered=settings.activation_order)

    if _is_stack(batch):
        matrices = [problem.matrix(device) for problem in batch]
        return [attempt(matrices, [factor(problem) for problem in batch], kernel)]
    shared = factor(batch[0])
    return [
        attempt(
            [problem.matrix(device)],
            [shared],
            kernel,
            None if problem.largest is None else problem.largest.to(device),
            problem.target(device),
        )
        for problem in batch
    ]


def _solutions(problem: Problem, matrix: RoundedWeight) -> list[Solution]:
    group = problem.group
    return [
        Solution(member, weight, rounded, group, group.members.index(member))
        for member, weight, rounded in zip(
            problem.members, problem.weights, matrix.split(list(map(len, problem.weights))), strict=True
        )
    ]


def gptq_bytes(structure: Structure, modules: Collection[str], *, on_gpu: bool) -> int:
    """Return an upper bound on the bytes that GPTQ takes for ``modules``, beside layers and a forward.

    Modules that a layer or an expert fuses are one matrix, and the largest counts. Experts have a Hessian each, summed
    for some of them over a part of the batches and over all, and a GPU rounds some side by side.
    """
    shapes: dict[str, tuple[int, int]] = {}
    of_layer: dict[str, set[str]] = {}  # the experts of each layer
    for name in modules:
        if name not in structure.linear:  # a predictor's, which no calibration reaches
            continue
        rows, columns = structure.linear[name]
        matrix = scale_group(name)
        shapes[matrix] = shapes.get(matrix, (0, columns))[0] + rows, columns
        if (experts := fused_with(name)) is not None and experts != matrix:
            of_layer.setdefault(experts, set()).add(matrix)
    of_experts = set().union(*of_layer.values())
    dense = rounding_bytes(shape for matrix, shape in shapes.items() if matrix not in of_experts)
    layers = ([shapes[matrix] for matrix in matrices] for matrices in of_layer.values())
    return max(dense, max((_expert_bytes(layer, on_gpu=on_gpu) for layer in layers), default=0))


def _expert_bytes(shapes: Sequence[tuple[int, int]], *, on_gpu: bool) -> int:
    """Return an upper bound on the bytes for a layer's experts, whose matrices have ``shapes`` [O, I]."""
    peak = 0
    for (rows, columns), count in Counter(shapes).items():
        side_by_side = min(count, stack_size(rows, columns)) if on_gpu else 1
        square = 4 * columns**2
        sums = square * max(1, min(count, EXPERT_SUMS // square))
        peak = max(peak, sums + max(sums, side_by_side * rounding_bytes([(rows, columns)])))
    return peak

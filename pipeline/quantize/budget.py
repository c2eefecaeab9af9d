"""Choose the scheme of each group of modules for a budget of bits, by measured costs.

    >>> points = frontier(groups)                       # from all in the fewest bits to all in the least cost
    >>> spend(groups, 5.0).schemes["model.layers.0.mlp.down_proj"]
    'ptpc_fp8'
    >>> overrides(groups, spend(groups, 5.0).schemes)   # what a person would have written into a recipe

A multiple-choice knapsack: costs add up, bits add up, and each group is in one scheme. Where options have an estimated
time (`Roofline`), that is spent in the place of bits. What lies on the lower convex hull of a group's (bits, cost) is
taken step by step, always the step that saves the most for a bit; every prefix of these steps is the best choice for
its own bits, and they are the frontier. A budget between two of them is spent by dynamic programming: exactly for a
few dozen groups, within a step of the sums that are kept apart for thousands.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any, Final

from quantmint.eval.workloads import Cell
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.hardware import Hardware
from quantmint.pipeline.base.schemes import scheme

_STATES = 4096
"""Sums of bits that are kept apart."""
_EXPERTS = ".experts."


@dataclass(frozen=True, slots=True)
class Option:
    """A scheme for a group: its predicted ``cost`` in nats of KL, and the ``bits`` stored for all the group's weights.

    ``time`` is its estimated share of the time that all groups take in 16 bit; None where the budget is in bits.
    """

    scheme: str
    cost: float
    bits: float
    time: float | None = None

    @property
    def price(self) -> float:
        """Return what the option takes of the budget: its bits, or its time where the budget is a speedup."""
        return self.bits if self.time is None else self.time


@dataclass(frozen=True, slots=True)
class Group:
    """Modules, by name on disk, that get one scheme; ``weights`` counts their weights, ``options`` are the schemes."""

    name: str
    modules: tuple[str, ...]
    weights: int
    options: tuple[Option, ...]

    @property
    def useful(self) -> tuple[Option, ...]:
        """Return the options that cost less than every cheaper one, from the lowest price to the least cost."""
        efficient: list[Option] = []
        for option in sorted(self.options, key=lambda option: (option.price, option.cost, option.scheme)):
            if not efficient or option.cost < efficient[-1].cost:
                efficient.append(option)
        return tuple(efficient)

    @property
    def hull(self) -> tuple[Option, ...]:
        """Return the useful options on the lower convex hull of (price, cost), from the lowest price on."""
        hull: list[Option] = []
        for option in self.useful:
            while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], option):
                hull.pop()
            hull.append(option)
        return tuple(hull)


def _slope(cheaper: Option, dearer: Option) -> float:
    """Return the cost saved per unit of price between two options."""
    return (cheaper.cost - dearer.cost) / (dearer.price - cheaper.price)


@dataclass(frozen=True)
class Point:
    """A choice of schemes: mean ``bits`` per weight, predicted ``cost`` in nats of KL, each group's scheme by its name.

    ``speedup`` is the estimated speedup of the groups alone over 16 bit; None where the budget is in bits.
    """

    bits: float
    cost: float
    schemes: Mapping[str, str]
    speedup: float | None = None

    @cached_property
    def counts(self) -> dict[str, int]:
        """Return the number of groups by scheme, the most frequent scheme first."""
        return dict(Counter(self.schemes.values()).most_common())

    @property
    def spent(self) -> str:
        """Return the budget that was spent, in words."""
        estimated = "" if self.speedup is None else f", estimated {self.speedup:.2f} x 16 bit until it was served"
        return f"{self.bits:.2f} bits{estimated}"

    def to_json(self) -> dict[str, Any]:
        """Return bits per weight, predicted cost in nats, the number of groups by scheme and, if any, the speedup."""
        estimated = {} if self.speedup is None else {"estimated_speedup": round(self.speedup, 4)}
        return {"bits": round(self.bits, 4), "cost": self.cost, "groups": self.counts, **estimated}


@dataclass(frozen=True, slots=True)
class _BudgetStep:
    group: str
    before: Option
    after: Option

    @property
    def key(self) -> tuple[float, str, float]:
        """Return the sort key: the steepest step first; equal ones by the group's name, to be reproducible."""
        return -_slope(self.before, self.after), self.group, self.after.price


def _steps(groups: Sequence[Group]) -> list[_BudgetStep]:
    steps = [
        _BudgetStep(group.name, *pair) for group in groups for pair in zip(group.hull, group.hull[1:], strict=False)
    ]
    return sorted(steps, key=lambda step: step.key)


def _point(groups: Sequence[Group], chosen: Mapping[str, Option]) -> Point:
    weights = sum(group.weights for group in groups)
    bits, cost = (sum(getattr(option, field) for option in chosen.values()) for field in ("bits", "cost"))
    times = [option.time for option in chosen.values() if option.time is not None]
    return Point(
        bits / weights,
        cost,
        {name: option.scheme for name, option in chosen.items()},
        1 / sum(times) if times else None,
    )


def frontier(groups: Sequence[Group]) -> tuple[Point, ...]:
    """Return the Pareto-optimal choices by increasing price; each gives one group its next option on the hull."""
    chosen = {group.name: group.hull[0] for group in groups}
    points = [_point(groups, chosen)]
    for step in _steps(groups):
        chosen[step.group] = step.after
        points.append(_point(groups, chosen))
    return tuple(points)


def spend(groups: Sequence[Group], budget: float) -> Point:
    """Return the choice of least cost with at most ``budget`` bits per weight, or for timed groups at that speedup.

    Raises `UserError` where no choice has so few bits, or is so fast.
    """
    import numpy as np

    least = _point(groups, {group.name: group.hull[0] for group in groups})
    if least.speedup is not None and budget > least.speedup + 1e-9:
        raise UserError(
            f"quantization.speedup: found {budget:g}, expected at most {math.floor(least.speedup * 100) / 100:g}: what "
            "the target's figures give this model with each group in its fastest scheme, an estimate, with its "
            "exclusions and overrides."
        )
    if least.speedup is None and budget < least.bits - 1e-9:
        raise UserError(
            f"quantization.bits: found {budget:g}, expected at least {least.bits:.4g}: what this model needs with each "
            "group in the smallest scheme that holds it, and with its exclusions and overrides."
        )
    # Group by group, the least cost of all before it for each sum of bits: what another has for fewer bits is dropped.
    limit = (budget + 1e-9) * sum(group.weights for group in groups) if least.speedup is None else 1 / (budget - 1e-9)
    room = limit - sum(group.hull[0].price for group in groups)
    spent, costs = np.zeros(1), np.zeros(1)
    choices: list[tuple[Any, Any]] = []
    for group in groups:
        extra = np.array([option.price - group.hull[0].price for option in group.useful])
        sums = (spent[:, None] + extra).ravel()
        totals = (costs[:, None] + np.array([option.cost for option in group.useful])).ravel()
        order = np.lexsort((totals, sums))
        order = order[sums[order] <= room]
        order = order[np.r_[True, totals[order][1:] < np.minimum.accumulate(totals[order])[:-1]]]
        if len(order) > _STATES:
            order = order[np.r_[np.diff((sums[order] * (_STATES / room)).astype(int)) > 0, True]]
        choices.append(np.divmod(order, len(extra)))
        spent, costs = sums[order], totals[order]
    chosen, state = {}, int(costs.argmin())
    for group, (parents, options) in zip(reversed(groups), reversed(choices), strict=True):
        chosen[group.name] = group.useful[int(options[state])]
        state = int(parents[state])
    return _point(groups, {group.name: chosen[group.name] for group in groups})


RESOLUTION: Final = 0.25
"""Bits a weight within which a search finds the fewest that pass."""


def next_try(
    groups: Sequence[Group], budget: float, count: int, failed: Sequence[Point], passed: Sequence[Point]
) -> Point | None:
    """Return the choice that a search of at most ``count`` tries measures next; None where the search is over.

    ``failed`` and ``passed`` are the choices tried so far. The first try spends the budget; if it passes, the search
    ends. While nothing has passed, it goes half of the way to the least cost of all, in bits and in the logarithm of
    the predicted cost; the least cost is its last try. After a PASS it goes down again, half of the way in bits to the
    largest choice that failed, until that is `RESOLUTION` away. Raises `UserError` where the budget is too small.
    """
    if not failed and not passed:
        return spend(groups, budget)
    if not failed or len(failed) + len(passed) >= count:
        return None
    low = max(failed, key=lambda point: point.bits)
    if passed:
        high = min(passed, key=lambda point: point.bits)
        middle = (low.bits + high.bits) / 2
        between = [point for point in frontier(groups) if low.bits + 1e-9 < point.bits < high.bits - 1e-9]
        if high.bits - low.bits <= RESOLUTION or not between:
            return None
        return min(between, key=lambda point: abs(point.bits - middle))
    above = [point for point in frontier(groups) if point.bits > low.bits + 1e-9 and point.cost < low.cost]
    if not above:
        return None
    last = above[-1]
    if len(failed) + 1 == count or last.bits - low.bits <= RESOLUTION:
        return last
    cost, bits = math.sqrt(low.cost * last.cost) * (1 + 1e-9), (low.bits + last.bits) / 2 - 1e-9
    return next(point for point in above if point.cost <= cost and point.bits >= bits)


def costliest(groups: Sequence[Group], schemes: Mapping[str, str], most: int = 3) -> list[tuple[str, str, float]]:
    """Return the ``most`` groups of highest predicted cost in the chosen ``schemes``: name, scheme, share of cost."""
    costs = [
        (group.name, o.scheme, o.cost) for group in groups for o in group.options if o.scheme == schemes[group.name]
    ]
    total = sum(cost for *_, cost in costs) or 1.0
    return [(name, scheme, cost / total) for name, scheme, cost in sorted(costs, key=lambda entry: -entry[2])[:most]]


_LAYER = re.compile(r"(.*?\.)(\d+)\.(.+)")


def overrides(groups: Sequence[Group], schemes: Mapping[str, str]) -> tuple[str, list[dict[str, Any]]]:
    """Return the scheme of the most modules, and a recipe's overrides {"modules": patterns, "scheme": name} for others.

    Groups of the same name in several layers become one pattern.
    """
    count: Counter[str] = Counter()
    layers: defaultdict[str, defaultdict[tuple[str, str], list[str]]] = defaultdict(lambda: defaultdict(list))
    for group in groups:
        count[schemes[group.name]] += len(group.modules)
    default = min(count, key=lambda scheme: (-count[scheme], scheme))
    plain: defaultdict[str, list[str]] = defaultdict(list)
    for group in groups:
        if (scheme := schemes[group.name]) == default:
            continue
        if match := _LAYER.fullmatch(group.name):
            layers[scheme][match[1], match[3]].append(match[2])
        else:
            plain[scheme] += group.modules
    return default, [
        {
            "modules": plain[scheme] + [_pattern(*ends, numbers) for ends, numbers in sorted(layers[scheme].items())],
            "scheme": scheme,
        }
        for scheme in sorted(layers.keys() | plain.keys())
    ]


def _pattern(before: str, after: str, numbers: Sequence[str]) -> str:
    """Return one ``re:`` pattern for groups of the same name in the layers ``numbers``.

    ``before`` and ``after`` are what stands around the layer's number; ``after`` may be like mlp.down_proj,
    self_attn.{q_proj, k_proj} or experts.*.
    """
    which = numbers[0] if len(numbers) == 1 else f"({'|'.join(numbers)})"
    if after.endswith(".*"):
        return f"re:{re.escape(before)}{which}\\.{re.escape(after.removesuffix('*'))}"
    parent, brace, members = after.rstrip("}").partition("{")
    last = f"({members.replace(', ', '|')})" if brace else ""
    return f"re:{re.escape(before)}{which}\\.{re.escape(parent)}{last}$"


def fastest(hardware: Hardware, names: Sequence[str]) -> float:
    """Return the largest speedup over 16 bit that the named schemes can give, by reading or by multiplying."""
    reading = 16 / min(scheme(name).bits_per_weight for name in names)
    return max(reading, *(hardware.flops(_dtype(name)) / hardware.flops("bf16") for name in names))


def _dtype(name: str) -> str:
    return scheme(name).activations.dtype or "bf16"


@dataclass(frozen=True, slots=True)
class Roofline:
    """Estimate of the time of linear layers on an accelerator by its data sheet, used until a checkpoint was served.

    A product takes the longer of reading its weights and multiplying: each request of a cell reads them once for its
    prompt, and for each token of its answer shares them with all that are in flight. Cells count alike, each against
    its own time in 16 bit. What is not a linear layer of the decoder is left out, attention, caches and launches before
    all, and no kernel reaches its data sheet: a server gains less. Several accelerators share the work evenly.
    ``routed`` is the share of a mixture's experts that a token passes through.
    """

    hardware: Hardware
    cells: tuple[Cell, ...]
    routed: float = 1.0

    def timed(self, groups: Sequence[Group]) -> tuple[Group, ...]:
        """Return the groups with each option's estimated time, as a share of what all groups take in 16 bit."""
        plain = [self._times(group, 16.0 * group.weights, "bf16") for group in groups]
        totals = [sum(times) for times in zip(*plain, strict=True)]

        def share(group: Group, bits: float, dtype: str) -> float:
            times = self._times(group, bits, dtype)
            return fmean(time / total for time, total in zip(times, totals, strict=True))

        return tuple(
            replace(
                group,
                options=tuple(replace(o, time=share(group, o.bits, _dtype(o.scheme))) for o in group.options),
            )
            for group in groups
        )

    def _times(self, group: Group, bits: float, dtype: str) -> list[float]:
        """Return the estimated seconds of a group's products for a request of each cell; ``bits`` are stored in all."""
        routed = self.routed if _EXPERTS in group.modules[0] else 1.0

        def product(rows: int) -> float:
            read = bits / 8 * (1 - (1 - routed) ** rows) / self.hardware.bytes_per_second
            return max(read, 2 * group.weights * routed * rows / self.hardware.flops(dtype))

        seconds = []
        for cell in self.cells:
            answer = cell.longest - cell.input_len if cell.output_len is None else cell.output_len
            prompt, answer = cell.mean_lengths or (cell.input_len, answer)
            seconds.append(product(prompt) + answer / cell.in_flight * product(cell.in_flight))
        return seconds

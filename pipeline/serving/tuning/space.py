"""The search space of a sweep: knobs with values to try (axes), and their combinations (points).

A point is a tuple of changes to the base plan, pairs of a knob and its value in the order of the sweep; ``()`` is the
base plan. `True` sets a flag without a value, `False` leaves a knob out. `sweeps.yaml` has the default axes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

from quantmint.pipeline.base.data import load_table
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.serving.environment import parse_version
from quantmint.pipeline.serving.knobs.table import knob as knob_of
from quantmint.pipeline.serving.plan import LaunchPlan

Value: TypeAlias = "str | bool"
Point: TypeAlias = tuple[tuple[str, Value], ...]

BASE: Point = ()
TUNABLEOP = "PYTORCH_TUNABLEOP_ENABLED"
_KILO = re.compile(r"(\d+)k", re.IGNORECASE)
_SWITCHES: Mapping[str, Value] = {"on": True, "true": True, "off": False, "false": False}


@dataclass(frozen=True, slots=True)
class Axis:
    """A knob with the values to try."""

    knob: str
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class SweepTrial:
    """A launch of a point: repetition ``run``, from 0, in the screening or in the contest with id ``contest``."""

    point: Point
    run: int = 0
    contest: str = ""


def parse_knob(text: str) -> tuple[str, tuple[Value, ...]]:
    """Parse ``NAME=v1,v2`` into a knob's name and values; 16k is 16384, on and off switch a flag.

    Commas inside braces do not separate values. Raises `UserError` without values.
    """
    name, _, values = text.partition("=")
    words = (word.strip() for word in re.findall(r"(?:\{[^}]*\}|[^,{])+", values))
    parsed = tuple(dict.fromkeys(_value(word) for word in words if word))
    if not parsed or not name.strip():
        raise UserError(f"--knob {text!r}: expected NAME=v1,v2,...")
    return name.strip(), parsed


def _value(word: str) -> Value:
    kilo = _KILO.fullmatch(word)
    return str(int(kilo[1]) * 1024) if kilo is not None else _SWITCHES.get(word.lower(), word)


def value_in(plan: LaunchPlan, knob: str) -> Value:
    """Return a knob's value in a plan; False if the plan leaves it out, True for a flag without a value."""
    if not knob.startswith("--"):
        return plan.env.get(knob, False)
    value = plan.option(knob)
    return False if value is None else value or True


def without_base_values(
    axes: Sequence[Axis], base: LaunchPlan, default: Callable[[str], str] = lambda _: ""
) -> tuple[Axis, ...]:
    """Return the axes without values that the base plan has; ``default`` returns vLLM's value of an unset knob."""

    def new(knob: str, value: Value) -> bool:
        before = value_in(base, knob)
        return not same(value, before) and not (before is False and same(value, default(knob)))

    reduced = (Axis(axis.knob, tuple(value for value in axis.values if new(axis.knob, value))) for axis in axes)
    return tuple(axis for axis in reduced if axis.values)


def same(first: Value, second: Value) -> bool:
    """Return whether two values are equal; numbers and JSON are compared by value, not by spelling."""
    return first == second or (isinstance(first, str) and isinstance(second, str) and _plain(first) == _plain(second))


def _plain(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def label(point: Point) -> str:
    """Return a point's changes in words: "max-num-seqs 64, no enforce-eager"; "base plan" without any."""
    return ", ".join(change_label(knob, value) for knob, value in point) or "base plan"


def change_label(knob: str, value: Value) -> str:
    """Return one change in words: "max-num-batched-tokens 16384", "no enforce-eager", "cudagraph_mode FULL"."""
    if knob == TUNABLEOP:
        return "TunableOp"
    if knob.startswith("AITER_CONFIG_GEMM_"):  # a path
        return "AITER's tuned kernels"
    name = knob.removeprefix("--")
    if isinstance(value, bool):
        return name if value else name[3:] if name.startswith("no-") else f"no {name}"
    inner = _plain(value)
    if isinstance(inner, dict):
        return " ".join(f"{key} {item}" for key, item in inner.items())
    return f"{name} {value}"


def default_axes(
    kind: str, *, facts: Mapping[str, str], version: str, cores: int, concurrency: int
) -> tuple[Axis, ...]:
    """Return the axes of `sweeps.yaml` for a target of ``kind`` (rocm, cuda, cpu) whose knobs this vLLM has.

    ``facts`` are tested by the rows' `when`; ``cores`` and ``concurrency`` fill the {placeholders} of values.
    """
    numbers = {
        "{cores}": str(cores),
        "{half_cores}": str(max(1, cores // 2)),
        "{half_concurrency}": str(max(1, concurrency // 2)),
        "{double_concurrency}": str(2 * concurrency),
    }
    axes = []
    for row in load_table(__file__, "sweeps.yaml")[kind]:
        holds = all(facts.get(fact) in values for fact, values in row.get("when", {}).items())
        knob = knob_of(row["knob"])
        if holds and knob.exists_in(parse_version(version)):
            values = row.get("values") or knob.sweep
            filled = dict.fromkeys(numbers.get(value, value) for value in values)
            axes.append(Axis(knob.name, tuple(filled)))
    return tuple(axes)


def option_axes(options: Sequence[tuple[str, tuple[Value, ...]]], *, version: str) -> tuple[Axis, ...]:
    """Return the axes of ``--knob`` options; a repeated knob collects its values.

    Raises `UserError` for a knob that this vLLM does not have, or that belongs to the machine or container.
    """
    axes: dict[str, Axis] = {}
    for knob, values in options:
        entry = knob_of(knob)
        if entry.kind not in {"flag", "env"}:
            raise UserError(
                f"--knob {knob}: a sweep changes arguments and variables of vLLM, but this knob is of kind {entry.kind}"
            )
        if not entry.exists_in(parse_version(version)):
            raise UserError(f"--knob {knob}: vLLM {version} does not know it")
        earlier = axes[knob].values if knob in axes else ()
        axes[knob] = Axis(knob, tuple(dict.fromkeys((*earlier, *values))))
    return tuple(axes.values())


@cache
def gated() -> frozenset[str]:
    """Return the knobs that change a model's answers, not only its speed.

    They are those marked in `sweeps.yaml`, and those that set number formats.
    """
    marked = {row["knob"] for rows in load_table(__file__, "sweeps.yaml").values() for row in rows if row.get("gated")}
    return frozenset(
        marked | {"--kv-cache-dtype", "--dtype", "--quantization", "VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16"}
    )

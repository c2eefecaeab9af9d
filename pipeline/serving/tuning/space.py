"""What a sweep may change, the points that it measures, and the knobs that it tries by itself (`sweeps.yaml`).

A point is what is changed in the base plan: pairs of a knob and its value in the order of the sweep, ``()`` for the
base plan itself. `True` is a flag without a value, `False` a knob that the launch leaves out.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from pipeline.base.errors import UserError
from pipeline.serving.knobs.table import known_in, table
from pipeline.serving.plan import LaunchPlan

Value: TypeAlias = "str | bool"
Point: TypeAlias = tuple[tuple[str, Value], ...]

BASE: Point = ()
TUNABLEOP = "PYTORCH_TUNABLEOP_ENABLED"
_KILO = re.compile(r"(\d+)k", re.IGNORECASE)
_SWITCHES: Mapping[str, Value] = {"on": True, "true": True, "off": False, "false": False}


@dataclass(frozen=True, slots=True)
class Axis:
    """One knob with the values to try. ``gated`` knobs change what the model answers, not only how fast."""

    knob: str
    values: tuple[Value, ...]
    gated: bool = False
    source: str = "the command line"


@dataclass(frozen=True, slots=True)
class Trial:
    """One launch of a point; ``run`` counts its repetitions from 0."""

    point: Point
    run: int = 0


def parse_knob(text: str) -> tuple[str, tuple[Value, ...]]:
    """Read ``NAME=v1,v2``: 16k is 16384, on and off are a switch; commas inside braces and quotes do not separate."""
    name, _, values = text.partition("=")
    found = tuple(dict.fromkeys(_value(word) for word in _words(values)))
    if not found or not name.strip():
        raise UserError(f"--knob {text!r}: expected NAME=v1,v2,...")
    return name.strip(), found


def _words(text: str) -> list[str]:
    words, depth, quoted = [""], 0, False
    for letter in text:
        quoted ^= letter == '"'
        if not quoted:
            depth += (letter in "{[") - (letter in "}]")
        if letter == "," and not quoted and not depth:
            words.append("")
        else:
            words[-1] += letter
    return [word.strip() for word in words if word.strip()]


def _value(word: str) -> Value:
    kilo = _KILO.fullmatch(word)
    if kilo is not None:
        return str(int(kilo[1]) * 1024)
    return _SWITCHES.get(word.lower(), word)


def value_in(plan: LaunchPlan, knob: str) -> Value:
    """What a plan says of a knob; False where it leaves it out. A switch's opposite (``--no-...``) counts as False."""
    if not knob.startswith("--"):
        return plan.env.get(knob, False)
    arguments = plan.argv[3:]
    for index, argument in enumerate(arguments):
        if argument == knob:
            following = arguments[index + 1 : index + 2]
            return following[0] if following and not following[0].startswith("--") else True
    return False


def without_base_values(
    axes: Sequence[Axis], base: LaunchPlan, default: Callable[[str], str] = lambda _: ""
) -> tuple[Axis, ...]:
    """Leave out the values that the base plan has already, and the knobs for which nothing else is left.

    ``default`` is what vLLM takes where a plan leaves a knob out.
    """

    def new(knob: str, value: Value) -> bool:
        before = value_in(base, knob)
        return not same(value, before) and not (before is False and same(value, default(knob)))

    left = (Axis(a.knob, tuple(v for v in a.values if new(a.knob, v)), a.gated, a.source) for a in axes)
    return tuple(axis for axis in left if axis.values)


def same(one: Value, other: Value) -> bool:
    """Whether two values ask for the same: numbers and JSON by what they say, not by how they are written."""
    return one == other or (isinstance(one, str) and isinstance(other, str) and _plain(one) == _plain(other))


def _plain(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def label(point: Point) -> str:
    """What a point changes, in the words of a reader: ``max-num-seqs 64, no enforce-eager``."""
    return ", ".join(change_label(knob, value) for knob, value in point) or "base plan"


def change_label(knob: str, value: Value) -> str:
    """One change in words: ``max-num-batched-tokens 16384``, ``no enforce-eager``, ``cudagraph_mode FULL``."""
    if knob == TUNABLEOP:
        return "TunableOp"
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
    """The axes for a target of ``kind`` (rocm, cuda, cpu).

    ``facts`` are those that the file's ``when`` asks for. ``version`` is vLLM's; a knob that it does not know is left
    out.
    """
    numbers = {
        "cores": cores,
        "half_cores": max(1, cores // 2),
        "concurrency": concurrency,
        "half_concurrency": max(1, concurrency // 2),
        "double_concurrency": 2 * concurrency,
    }
    axes = []
    for row in sweeps()[kind]:
        holds = all(facts.get(fact) in values for fact, values in row.get("when", {}).items())
        if holds and known_in(row["knob"], version):
            values = row.get("values") or table()[row["knob"]].sweep
            found = dict.fromkeys(_filled(value, numbers) for value in values)
            axes.append(Axis(row["knob"], tuple(found), bool(row.get("gated", False)), row["why"]))
    return tuple(axes)


def given_axes(given: Sequence[tuple[str, tuple[Value, ...]]], *, version: str) -> tuple[Axis, ...]:
    """The axes of ``--knob``; a repeated knob collects its values. UserError for one that this vLLM does not have."""
    axes: dict[str, Axis] = {}
    for knob, values in given:
        if knob not in table():
            near = difflib.get_close_matches(knob, table(), n=1)
            hint = f"did you mean {near[0]!r}?" if near else "`docs/serving-knobs.md` lists them"
            raise UserError(f"--knob {knob}: not a knob of the table", hint=hint)
        entry = table()[knob]
        if entry.kind not in {"flag", "env"}:
            raise UserError(f"--knob {knob}: a sweep changes arguments and variables of vLLM, this is a {entry.kind}'s")
        if not known_in(knob, version):
            raise UserError(f"--knob {knob}: vLLM {version} does not know it")
        earlier = axes[knob].values if knob in axes else ()
        axes[knob] = Axis(knob, tuple(dict.fromkeys((*earlier, *values))), knob in gated())
    return tuple(axes.values())


@cache
def gated() -> frozenset[str]:
    """The knobs that change what a model answers: those of the file, and what decides number formats."""
    listed = {row["knob"] for rows in sweeps().values() for row in rows if row.get("gated")}
    return frozenset(
        listed | {"--kv-cache-dtype", "--dtype", "--quantization", "VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16"}
    )


@cache
def sweeps() -> Mapping[str, list[dict[str, Any]]]:
    """The file."""
    text = Path(__file__).with_name("sweeps.yaml").read_text(encoding="utf-8")
    rows: Mapping[str, list[dict[str, Any]]] = yaml.safe_load(text)
    return rows


def _filled(value: Value, numbers: Mapping[str, int]) -> Value:
    if isinstance(value, str) and value[:1] == "{" and value[1:-1] in numbers:
        return str(numbers[value[1:-1]])
    return value

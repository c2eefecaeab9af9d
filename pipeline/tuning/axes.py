"""The knobs that a sweep tries by itself: `sweeps.yaml`, cut down to what this target, model and vLLM have."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

import yaml

from pipeline.errors import UserError
from pipeline.serving.knobs.table import known_in, replacement, table
from pipeline.tuning.space import Axis, Value


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
            instead = replacement(knob, version)
            raise UserError(
                f"--knob {knob}: vLLM {version} does not know it", hint=f"{instead} took its place" if instead else None
            )
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
    text = resources.files("pipeline.tuning").joinpath("sweeps.yaml").read_text(encoding="utf-8")
    rows: Mapping[str, list[dict[str, Any]]] = yaml.safe_load(text)
    return rows


def _filled(value: Value, numbers: Mapping[str, int]) -> Value:
    if isinstance(value, str) and value[:1] == "{" and value[1:-1] in numbers:
        return str(numbers[value[1:-1]])
    return value

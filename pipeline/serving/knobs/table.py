"""The table of serving knobs: what each is, in which versions of vLLM it exists, and which value it gets when.

    >>> knob("--max-num-seqs").kind
    'flag'

Facts about model, hardware, layout, workload and version choose a knob's value: `Knob.choose` takes the first rule that
holds. The table is ``entries/*.yaml``, in the order of files and entries; the first file describes its syntax.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from quantmint.pipeline.base.data import rows
from quantmint.pipeline.base.errors import UserError, did_you_mean
from quantmint.pipeline.recipe.yaml_positions import parse
from quantmint.pipeline.serving.environment import Version, parse_version, within

OLDEST_READ, NEWEST_READ = "0.19.0", "0.33.0"
"""The oldest and newest vLLM that the tables of knobs and backends cover; older ones are refused."""

KnobKind = Literal["flag", "env", "host", "docker"]
"""An argument of `vllm serve`, an environment variable, a setting of the machine, an option of `docker run`."""

Fact = str | int | float

_COMPARISON = re.compile(r"(>=|<=|!=|>|<)\s*(-?\d+(?:\.\d+)?)")
_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "!=": operator.ne,
}
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on one fact: it is one of ``values``, or a number for which all ``comparisons`` hold."""

    values: tuple[str, ...] = ()
    comparisons: tuple[tuple[str, float], ...] = ()

    def holds(self, fact: Fact) -> bool:
        """Return whether the fact fulfils the condition."""
        if self.comparisons:
            return all(_OPERATORS[sign](float(fact), number) for sign, number in self.comparisons)
        return str(fact) in self.values

    def __str__(self) -> str:
        if self.comparisons:
            return " and ".join(f"{sign} {number:g}" for sign, number in self.comparisons)
        return " or ".join(self.values)


def parse_condition(text: str | list[Fact]) -> Condition:
    """Parse a list of values, or comparisons separated by commas (">= 4, <= 8").

    Raises `ValueError` for anything else.
    """
    if isinstance(text, list):
        return Condition(values=tuple(map(str, text)))
    matches = [_COMPARISON.fullmatch(part.strip()) for part in text.split(",")]
    comparisons = [(match[1], float(match[2])) for match in matches if match is not None]
    if len(comparisons) != len(matches):
        raise ValueError(f'expected a list of values or comparisons like ">= 32", found {text!r}')
    return Condition(comparisons=tuple(comparisons))


def _parse_range(bounds: list[str | None]) -> tuple[Version, ...]:
    return tuple(parse_version(bound) if bound else () for bound in bounds)


VersionRange = Annotated[tuple[Version, Version], BeforeValidator(_parse_range)]
"""The first version, and the version before which the range ends; an empty tuple leaves that side open."""
_OneLine = Annotated[str, BeforeValidator(lambda text: " ".join(text.split()))]
_EVERY_VERSION: tuple[Version, Version] = ((), ())


@dataclass(frozen=True, slots=True)
class KnobRule:
    """One value of a knob, with the facts and versions that call for it and the reason; True is a bare flag."""

    value: str | Literal[True]
    why: _OneLine
    source: _OneLine
    when: Mapping[str, Annotated[Condition, BeforeValidator(parse_condition)]] = field(default_factory=dict)
    vllm: VersionRange = _EVERY_VERSION

    def holds(self, facts: Mapping[str, Fact], version: Version) -> bool:
        """Return whether the rule applies. Raises `KeyError` for a fact that ``facts`` lacks."""
        return within(version, *self.vllm) and all(
            condition.holds(facts[name]) for name, condition in self.when.items()
        )


@dataclass(frozen=True, slots=True)
class KnobOption:
    """A possible value of a knob: the versions that accept it, and the scheme that it gives 16-bit weights on load."""

    scheme: str
    vllm: VersionRange = _EVERY_VERSION


@dataclass(frozen=True, slots=True)
class Knob:
    """One entry of the table.

    ``vllm`` is the range of versions that have the knob, except ``gaps``; None for a knob that is not vLLM's own.
    ``sweep`` are the values that tuning tries, ``values`` the options whose versions and schemes are known, ``never``
    the reason why no rule sets the knob.
    """

    name: str
    kind: KnobKind
    topic: str
    about: _OneLine
    vllm: VersionRange | None = _EVERY_VERSION
    gaps: tuple[VersionRange, ...] = ()
    replaces: tuple[str, ...] = ()
    default: _OneLine = ""
    sweep: tuple[str, ...] = ()
    guides: tuple[str, ...] = ()
    disagreement: _OneLine = ""
    never: _OneLine = ""
    rules: tuple[KnobRule, ...] = ()
    values: Mapping[str, KnobOption] = field(default_factory=dict)

    def exists_in(self, version: Version) -> bool:
        """Return whether that version of vLLM has the knob."""
        if any(within(version, *gap) for gap in self.gaps):
            return False
        return within(version, *(self.vllm or _EVERY_VERSION))

    def choose(self, facts: Mapping[str, Fact], version: Version) -> KnobRule | None:
        """Return the first rule that holds for a launch; None leaves the knob unset."""
        if not self.exists_in(version):
            return None
        return next((rule for rule in self.rules if rule.holds(facts, version)), None)


def value_of(rule: KnobRule, facts: Mapping[str, Fact]) -> str | None:
    """Return a rule's value with its {facts} filled in; None for a flag that takes no value."""
    if rule.value is True:
        return None
    texts = {name: f"{fact:g}" if isinstance(fact, float) else str(fact) for name, fact in facts.items()}
    return _PLACEHOLDER.sub(lambda match: texts[match[1]], rule.value)


def knob(name: str) -> Knob:
    """Return an entry by its name.

    Raises `UserError` when there is none, with its replacement or the nearest spelling.
    """
    entry = table().get(name)
    if entry is not None:
        return entry
    for successor in table().values():
        if name in successor.replaces:
            raise UserError(f"vLLM {OLDEST_READ} and later have no {name}", hint=f"{successor.name} replaces it")
    raise UserError(f"no knob {name!r} in the table{did_you_mean(name, table())}")


@cache
def table() -> Mapping[str, Knob]:
    """Return every knob by its name, in the order of the files and of their entries."""
    folder = resources.files("quantmint.pipeline.serving.knobs") / "entries"
    files = sorted((item for item in folder.iterdir() if item.name.endswith(".yaml")), key=lambda item: item.name)
    entries: dict[str, Any] = {}
    for item in files:
        entries |= parse(item.read_text(encoding="utf-8"), f"entries/{item.name}").data
    return rows(Knob, entries)

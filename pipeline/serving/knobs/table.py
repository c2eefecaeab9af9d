"""The table of serving knobs: what each is, in which versions of vLLM it exists, and which value it gets when.

    >>> knob = table()["--attention-backend"]
    >>> knob.known((0, 12)), knob.known((0, 33))
    (False, True)
    >>> replacement("VLLM_ATTENTION_BACKEND", "0.33.0")
    '--attention-backend'

A knob is chosen by facts about model, hardware, layout, workload and version: `Knob.choose` takes the first of its
rules that holds. The table is ``entries/*.yaml``, whose files and entries keep their order; its syntax is described
in the first of them.
"""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Literal, get_args

from pipeline.errors import UserError
from pipeline.serving.versions import Version, parse_version, trimmed, within

Kind = Literal["flag", "env", "host", "docker"]
"""An argument of `vllm serve`, an environment variable, a setting of the machine, an option of `docker run`."""

KINDS: tuple[Kind, ...] = get_args(Kind)
Fact = str | int | float

YES_NO = ("yes", "no")
FACTS: Mapping[str, tuple[str, ...] | type] = MappingProxyType(
    {
        # where
        "kind": ("rocm", "cuda", "cpu"),
        "hardware": str,
        "arch": str,
        "nodes": int,
        "container": YES_NO,
        "cpu_threads": int,
        "cpu_kv_gib": int,
        # what for
        "purpose": ("serve", "measure"),
        "profile": ("latency", "streaming", "throughput", "offline"),
        "concurrency": int,
        "engine_concurrency": int,
        "context": int,
        "max_model_len": int,
        "model_len_given": YES_NO,
        "served_model_name": str,
        "trust_remote_code": YES_NO,
        "speculative": YES_NO,
        "speculative_config": str,
        "vllm_version": str,
        "tuned_gemms": YES_NO,
        "tunableop_file": str,
        # the model
        "family": ("gpt-oss", "dsa", "mla", "moe", "dense"),
        "attention": ("mha", "mla", "dsa", "none"),
        "experts": int,
        "shared_experts": int,
        "density": float,
        "hybrid": YES_NO,
        "sliding": YES_NO,
        "multimodal": YES_NO,
        "encoder_share": float,
        "head_dim": int,
        "parameters_b": float,
        "quantization": str,
        "format": str,
        "kv_cache_dtype": ("auto", "fp8"),
        "aiter_mla": YES_NO,  # AITER's latent attention takes the heads that one accelerator gets
        "chunked": YES_NO,  # some layers attend to chunks, and prompts may be longer than one
        "mm_prefix": YES_NO,  # tokens of an image attend to each other in both directions
        # how it is laid out
        "tp": int,
        "pp": int,
        "dp": int,
        "ep": YES_NO,
        "replicas": int,
        "gpus": int,
        "node_gpus": int,
        "packed": int,
        "executor": ("mp", "ray", "none"),
    }
)
"""What a rule may ask: the values that a fact can have, or its type."""

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
    """What one fact must be: one of ``values``, or everything that ``comparisons`` say of a number."""

    values: tuple[str, ...] = ()
    comparisons: tuple[tuple[str, float], ...] = ()

    def holds(self, fact: Fact) -> bool:
        """Whether a fact fulfils it."""
        if self.comparisons:
            return all(_OPERATORS[sign](float(fact), number) for sign, number in self.comparisons)
        return str(fact) in self.values

    def __str__(self) -> str:
        if self.comparisons:
            return " and ".join(f"{sign} {number:g}" for sign, number in self.comparisons)
        return " or ".join(self.values)


@dataclass(frozen=True, slots=True)
class Rule:
    """One value of a knob, the facts and versions that call for it, and why; True for a flag without a value."""

    value: str | Literal[True]
    when: Mapping[str, Condition]
    first: Version
    end: Version
    why: str
    source: str

    def holds(self, facts: Mapping[str, Fact], version: Version) -> bool:
        """Whether the rule applies. `KeyError` names a fact that is not there."""
        return within(version, self.first, self.end) and all(
            condition.holds(facts[name]) for name, condition in self.when.items()
        )


@dataclass(frozen=True, slots=True)
class Knob:
    """One entry of the table.

    It exists from ``first`` up to ``end``, without the ``gaps``; an empty version leaves that side open. ``outside``
    says that it is not vLLM's own, but torch's, RCCL's, the kernel's or Docker's. ``sweep`` holds what tuning tries,
    ``never`` why no rule sets it.
    """

    name: str
    kind: Kind
    topic: str
    about: str
    outside: bool
    first: Version
    end: Version
    gaps: tuple[tuple[Version, Version], ...]
    replaced_by: tuple[str, ...]
    replaces: tuple[str, ...]
    default: str
    sweep: tuple[str, ...]
    guides: tuple[str, ...]
    disagreement: str
    never: str
    rules: tuple[Rule, ...]

    def known(self, version: Version) -> bool:
        """Whether that version of vLLM has the knob."""
        return within(version, self.first, self.end) and not any(within(version, *gap) for gap in self.gaps)

    def choose(self, facts: Mapping[str, Fact], version: Version | str) -> Rule | None:
        """The first rule that holds for a launch; None leaves the knob alone."""
        number = parse_version(version) if isinstance(version, str) else version
        if not self.known(number):
            return None
        return next((rule for rule in self.rules if rule.holds(facts, number)), None)


def value_of(rule: Rule, facts: Mapping[str, Fact]) -> str | None:
    """A rule's value with the facts that it names; None for a flag that takes no value."""
    if rule.value is True:
        return None
    return _PLACEHOLDER.sub(lambda found: _text(facts[found[1]]), rule.value)


def known_in(name: str, version: str) -> bool:
    """Whether a version of vLLM has a knob. UserError, with the nearest spelling, for a name without an entry."""
    return knob(name).known(parse_version(version))


def replacement(name: str, version: str) -> str | None:
    """What does a knob's work in a version that lacks it; None where it is still there or nothing took its place."""
    number = parse_version(version)
    seen = {name}
    ahead = [name]
    while ahead:
        entry = knob(ahead.pop(0))
        if entry.known(number):
            return None if entry.name == name else entry.name
        # A version older than the knob needs its predecessor, a younger one its successor.
        older = bool(entry.first) and trimmed(number) < trimmed(entry.first)
        for other in entry.replaces if older else entry.replaced_by:
            if other not in seen:
                seen.add(other)
                ahead.append(other)
    return None


def knob(name: str) -> Knob:
    """An entry by its name. UserError, with the nearest spelling, where there is none."""
    entry = table().get(name)
    if entry is None:
        near = difflib.get_close_matches(name, table(), n=1)
        raise UserError(f"no knob {name!r} in the table" + (f" (did you mean {near[0]!r}?)" if near else ""))
    return entry


@cache
def table() -> Mapping[str, Knob]:
    """Every knob by its name, in the order of the files and of their entries."""
    from pipeline.serving.knobs.files import read_knobs

    folder = resources.files("pipeline.serving.knobs") / "entries"
    files = sorted((item for item in folder.iterdir() if item.name.endswith(".yaml")), key=lambda item: item.name)
    return MappingProxyType(read_knobs({f"entries/{item.name}": item.read_text(encoding="utf-8") for item in files}))


def parse_condition(text: str) -> Condition:
    """Comparisons separated by commas: ">= 4, <= 8". `ValueError` where the text is anything else."""
    parts = [_COMPARISON.fullmatch(part.strip()) for part in text.split(",")]
    found = [(part[1], float(part[2])) for part in parts if part is not None]
    if len(found) != len(parts):
        raise ValueError(f'expected a list of values or comparisons like ">= 32", found {text!r}')
    return Condition(comparisons=tuple(found))


def placeholders(value: str) -> tuple[str, ...]:
    """Names of the facts that a value mentions."""
    return tuple(_PLACEHOLDER.findall(value))


def _text(fact: Fact) -> str:
    return f"{fact:g}" if isinstance(fact, float) else str(fact)

"""The table of serving knobs (what each is, in which versions of vLLM, which value it gets when), and its page.

A knob is chosen by facts about model, hardware, layout, workload and version: `Knob.choose` takes the first of its
rules that holds. The table is ``entries/*.yaml``, whose files and entries keep their order; its syntax is described
in the first of them.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from quantmint.pipeline.base.data import rows
from quantmint.pipeline.base.errors import UserError, did_you_mean
from quantmint.pipeline.recipe.yaml_positions import parse
from quantmint.pipeline.serving.environment import Version, parse_version, within
from quantmint.pipeline.serving.plan import ParallelLayout, Reason
from quantmint.pipeline.serving.planning.target import ServingTarget

OLDEST_READ, NEWEST_READ = "0.19.0", "0.33.0"
"""The versions of vLLM that the tables of knobs and backends were written for; older ones are refused."""

Kind = Literal["flag", "env", "host", "docker"]
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


def parse_condition(given: str | list[Fact]) -> Condition:
    """A list of values, or comparisons separated by commas: ">= 4, <= 8". `ValueError` for anything else."""
    if isinstance(given, list):
        return Condition(values=tuple(map(str, given)))
    parts = [_COMPARISON.fullmatch(part.strip()) for part in given.split(",")]
    found = [(part[1], float(part[2])) for part in parts if part is not None]
    if len(found) != len(parts):
        raise ValueError(f'expected a list of values or comparisons like ">= 32", found {given!r}')
    return Condition(comparisons=tuple(found))


Range = Annotated[
    tuple[Version, Version], BeforeValidator(lambda given: tuple(parse_version(one) if one else () for one in given))
]
"""The first version, and the one before which it ends; an empty one leaves that side open."""
_Words = Annotated[str, BeforeValidator(lambda text: " ".join(text.split()))]
_EVERY: tuple[Version, Version] = ((), ())


@dataclass(frozen=True, slots=True)
class KnobRule:
    """One value of a knob, the facts and versions that call for it, and why; True for a flag without a value."""

    value: str | Literal[True]
    why: _Words
    source: _Words
    when: Mapping[str, Annotated[Condition, BeforeValidator(parse_condition)]] = field(default_factory=dict)
    vllm: Range = _EVERY

    def holds(self, facts: Mapping[str, Fact], version: Version) -> bool:
        """Whether the rule applies. `KeyError` names a fact that is not there."""
        return within(version, *self.vllm) and all(
            condition.holds(facts[name]) for name, condition in self.when.items()
        )


@dataclass(frozen=True, slots=True)
class KnobOption:
    """A value of a knob: the versions that take it, and the scheme that it gives to the weights of a 16-bit model."""

    scheme: str
    vllm: Range = _EVERY


@dataclass(frozen=True, slots=True)
class Knob:
    """One entry of the table.

    ``vllm`` are the versions that have it, but for the ``gaps``; None says that it is not vLLM's own. ``sweep`` holds
    what tuning tries, ``values`` what is known of single values, ``never`` why no rule sets it.
    """

    name: str
    kind: Kind
    topic: str
    about: _Words
    vllm: Range | None = _EVERY
    gaps: tuple[Range, ...] = ()
    replaces: tuple[str, ...] = ()
    default: _Words = ""
    sweep: tuple[str, ...] = ()
    guides: tuple[str, ...] = ()
    disagreement: _Words = ""
    never: _Words = ""
    rules: tuple[KnobRule, ...] = ()
    values: Mapping[str, KnobOption] = field(default_factory=dict)

    def known(self, version: Version) -> bool:
        """Whether that version of vLLM has the knob."""
        return within(version, *(self.vllm or _EVERY)) and not any(within(version, *gap) for gap in self.gaps)

    def choose(self, facts: Mapping[str, Fact], version: Version) -> KnobRule | None:
        """The first rule that holds for a launch; None leaves the knob alone."""
        return next((rule for rule in self.rules if rule.holds(facts, version)), None) if self.known(version) else None


def value_of(rule: KnobRule, facts: Mapping[str, Fact]) -> str | None:
    """A rule's value with the facts that it names; None for a flag that takes no value."""
    if rule.value is True:
        return None
    texts = {name: f"{fact:g}" if isinstance(fact, float) else str(fact) for name, fact in facts.items()}
    return _PLACEHOLDER.sub(lambda found: texts[found[1]], rule.value)


def knob(name: str) -> Knob:
    """An entry by its name. UserError where there is none, with what took its place or the nearest spelling."""
    entry = table().get(name)
    if entry is not None:
        return entry
    for other in table().values():
        if name in other.replaces:
            raise UserError(f"vLLM {OLDEST_READ} and later have no {name}", hint=f"{other.name} does its work there")
    raise UserError(f"no knob {name!r} in the table{did_you_mean(name, table())}")


@cache
def table() -> Mapping[str, Knob]:
    """Every knob by its name, in the order of the files and of their entries."""
    folder = resources.files("quantmint.pipeline.serving.knobs") / "entries"
    files = sorted((item for item in folder.iterdir() if item.name.endswith(".yaml")), key=lambda item: item.name)
    found: dict[str, Any] = {}
    for item in files:
        found |= parse(item.read_text(encoding="utf-8"), f"entries/{item.name}").data
    return rows(Knob, found)


#: Knobs that say the layout: they become one, so that memory and processes follow.
_SIZES = {
    "--tensor-parallel-size": "tensor",
    "--pipeline-parallel-size": "pipeline",
    "--data-parallel-size": "data",
}
_EXPERT = "--enable-expert-parallel"
LAYOUT = frozenset({*_SIZES, _EXPERT})
"""The knobs that say the layout."""
#: What the launcher gives to each process (`plan.processes`), and what is no argument of a server.
_NOT_OURS = frozenset(
    {
        *("--host", "--port", "--headless", "--model", "--nnodes", "--node-rank", "--master-addr"),
        *("--distributed-executor-backend", "--data-parallel-size-local", "--data-parallel-address"),
        *("--data-parallel-rank", "--data-parallel-start-rank", "--data-parallel-rpc-port"),
        *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "VLLM_HOST_IP", "HF_TOKEN"),
    }
)
_BENCHMARK = "Benchmarks"
#: Arguments with a secret.
_KEYS = frozenset({"--api-key", "--hf-token"})
#: Knobs whose value the plan must know as a number.
_NUMBERS = frozenset({"--max-num-seqs", "--max-num-batched-tokens", "--block-size", *_SIZES})


def checked_overrides(overrides: Mapping[str, str | bool], version: str) -> dict[str, str | bool]:
    """The same; UserError for a name that the table or this vLLM lacks, that a launch sets, or that wants a number."""
    for name, value in overrides.items():
        entry = knob(name)
        if entry.kind not in {"flag", "env"}:
            raise UserError(f"{name} is no flag or variable of a launch: it is set on the machine")
        if name in _NOT_OURS or entry.topic == _BENCHMARK:
            raise UserError(f"{name} cannot be set in a plan: {entry.never}")
        if value is False:
            continue
        if not entry.known(parse_version(version)):
            raise UserError(f"vLLM {version} does not know {name}", hint=entry.never or None)
        there = [text for text, one in entry.values.items() if within(parse_version(version), *one.vllm)]
        if value in entry.values and value not in there:
            raise UserError(f"vLLM {version} has no {name}={value}", hint=f"it has {', '.join(there)}")
        if name in _NUMBERS and (isinstance(value, bool) or not value.isdecimal()):
            raise UserError(f"{name} is {value!r}: expected a whole number")
        if name == "--gpu-memory-utilization" and not re.fullmatch(r"0?\.\d*[1-9]\d*|1(\.0*)?", str(value)):
            raise UserError(f"{name} is {value!r}: expected a number above 0 and up to 1")
    return dict(overrides)


def layout_override(overrides: Mapping[str, str | bool], target: ServingTarget, *, fill: bool) -> ParallelLayout | None:
    """Return the layout that the overrides set; None when they set no size and no expert parallelism.

    ``fill`` starts as many servers as the target has room for. UserError for more accelerators than the target has.
    """
    sizes = {field: int(overrides[name]) for name, field in _SIZES.items() if overrides.get(name) not in {None, False}}
    expert = bool(overrides.get(_EXPERT, False))
    if not sizes and not expert:
        return None
    layout = ParallelLayout(**sizes, expert=expert)
    total = target.gpus * target.nodes
    if layout.gpus > total or 0 in sizes.values():
        raise UserError(f"the parallelism that is set takes {layout.gpus} accelerators, and {target} has {total}")
    if layout.gpus > target.gpus:
        return ParallelLayout(**sizes, expert=expert, nodes=-(-layout.gpus // target.gpus))
    return ParallelLayout(**sizes, expert=expert, replicas=target.gpus // layout.gpus * target.nodes if fill else 1)


def checked_arguments(arguments: Sequence[str]) -> tuple[Reason, ...]:
    """Why each is there. UserError for a word that belongs to no flag, a knob of the table, and a secret."""
    found: list[Reason] = []
    for word in arguments:
        if not word.startswith("--"):
            if not found:
                raise UserError(
                    f"arguments for vllm serve: found {word!r} first, expected a flag such as --chat-template"
                )
            last = found[-1]
            found[-1] = last._replace(value=word if last.value == "on" else f"{last.value} {word}")
            continue
        name, _, value = word.partition("=")
        name = name.replace("_", "-")
        if name in _KEYS:
            raise UserError(
                f"{name} would stand in the process list, in logs and in records",
                hint="Servers listen on the loopback interface; a proxy before them asks for keys.",
            )
        knob = next((known for known in (name, f"--{name.removeprefix('--no-')}") if known in table()), None)
        if knob is not None:
            raise UserError(
                f"{name} is a knob of the plan, which would not know of it",
                hint=f"Say it with --set {knob.removeprefix('--')}=VALUE, or under `serve: knobs:` of the recipe.",
            )
        found.append(Reason(name, value or "on", "passed on as it was given", "given"))
    return tuple(found)


_KINDS = {"flag": "argument", "env": "variable", "host": "of the machine", "docker": "of the container"}
_INTRODUCTION = f"""# Serving knobs

<!-- made by `quantmint knobs --markdown > docs/serving-knobs.md` from pipeline/serving/knobs/entries -->

What a launch of vLLM can set on AMD Instinct, and what `quantmint serve` sets: the value, when, in which versions of
vLLM, why, and who says so. The first line of a table that holds is taken; a knob without a table is left alone.

| short name | guide |
|---|---|
| ROCm 2025, ROCm 2026 | ROCm documentation, vLLM V1 performance optimization: editions of November 2025 and May 2026 |
| vLLM MI300X 2024 | vLLM blog, Serving LLMs on AMD MI300X: Best Practices |
| ROCm FP8 2024 | ROCm blog, Enhancing vLLM Inference on AMD GPUs |
| vLLM parallelism | vLLM documentation, Parallelism and Scaling |

Supported are vLLM {OLDEST_READ} to {NEWEST_READ}: the last eight minor versions that are known (0.26 to 0.33), the two
older ones that AMD's images for Instinct pin, 0.19 (`rocm/vllm:rocm7.13.0_*_vllm_0.19.1`) and 0.23
(`rocm/vllm:rocm7.14.1_cdna_*_vllm_0.23.0`), and what lies between. Older ones are refused, and what only they have is
not here. Where guides contradict each other, the later one wins unless vLLM's source says otherwise for a version.
Nothing here was run on an Instinct."""


def page() -> str:
    """The whole document."""
    topics: dict[str, list[Knob]] = {}
    for knob in table().values():
        topics.setdefault(knob.topic, []).append(knob)
    contents = [f"- **{topic}**: {', '.join(f'`{knob.name}`' for knob in knobs)}" for topic, knobs in topics.items()]
    blocks = [_INTRODUCTION, "\n".join(contents)]
    for topic, knobs in topics.items():
        blocks += [f"## {topic}", *map(entry, knobs)]
    return "\n\n".join(blocks) + "\n"


def entry(knob: Knob) -> str:
    """One knob: what it is, when it gets which value and why."""
    blocks = [f"### `{knob.name}`", f"{knob.about[0].upper()}{knob.about[1:]}.", " · ".join(_facts(knob))]
    if knob.rules:
        lines = ["| value | when | vLLM | why | source |", "|---|---|---|---|---|", *map(_row, knob.rules)]
        blocks.append("\n".join(lines))
    else:
        blocks.append(f"Not set: {knob.never}.")
    if knob.disagreement:
        blocks.append(f"Where they disagree: {knob.disagreement}.")
    if knob.guides:
        blocks.append(f"Named in {'; '.join(knob.guides)}.")
    return "\n\n".join(blocks)


def versions(first: Version, end: Version) -> str:
    """A range in words: "0.22 and later", "before 0.28", "0.22 to before 0.26"; empty for every version."""
    if not first and not end:
        return ""
    since, until = ".".join(map(str, first)), ".".join(map(str, end))
    if not end:
        return f"{since} and later"
    return f"{since} to before {until}" if first else f"before {until}"


def existence(knob: Knob) -> str:
    """Where a knob comes from and in which versions of vLLM it exists."""
    if knob.vllm is None:
        return "not vLLM's own"
    text = versions(*knob.vllm) or "every version"
    return text + "".join(f", not {versions(*gap)}" for gap in knob.gaps)


def conditions(rule: KnobRule) -> str:
    """The facts that a rule asks for, in words; empty where it asks for none."""
    return ", ".join(f"{name} {condition}" for name, condition in rule.when.items())


def _facts(knob: Knob) -> list[str]:
    found = [_KINDS[knob.kind], f"vLLM: {existence(knob)}" if knob.vllm is not None else existence(knob)]
    if knob.default:
        found.append(f"default: {knob.default}")
    if knob.replaces:
        found.append(f"replaces {', '.join(f'`{name}`' for name in knob.replaces)}")
    if knob.sweep:
        found.append(f"tuning tries {', '.join(f'`{value}`' for value in knob.sweep)}")
    return found


def _row(rule: KnobRule) -> str:
    value = "on" if rule.value is True else f"`{rule.value}`"
    texts = (value, conditions(rule) or "always", versions(*rule.vllm), rule.why, rule.source)
    cells = [text.replace("|", "\\|") for text in texts]
    return f"| {' | '.join(cells)} |"

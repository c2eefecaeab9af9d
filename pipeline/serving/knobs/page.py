"""The table of serving knobs as a page of the documentation: `docs/serving-knobs.md`, none of it written by hand."""

from __future__ import annotations

from pipeline.serving.environment import Version
from pipeline.serving.knobs.table import NEWEST_READ, OLDEST_READ, Knob, Rule, table

REFRESH = "quantmint knobs --markdown > docs/serving-knobs.md"
"""The command that brings the page up to date."""
_KINDS = {"flag": "argument", "env": "variable", "host": "of the machine", "docker": "of the container"}
_INTRODUCTION = f"""# Serving knobs

<!-- made by `{REFRESH}` from pipeline/serving/knobs/entries -->

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
    blocks = [_INTRODUCTION, _contents(topics)]
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
    if knob.outside:
        return "not vLLM's own"
    text = versions(knob.first, knob.end) or "every version"
    return text + "".join(f", not {versions(*gap)}" for gap in knob.gaps)


def conditions(rule: Rule) -> str:
    """The facts that a rule asks for, in words; empty where it asks for none."""
    return ", ".join(f"{name} {condition}" for name, condition in rule.when.items())


def _contents(topics: dict[str, list[Knob]]) -> str:
    lines = [f"- **{topic}**: {', '.join(f'`{knob.name}`' for knob in knobs)}" for topic, knobs in topics.items()]
    return "\n".join(lines)


def _facts(knob: Knob) -> list[str]:
    found = [_KINDS[knob.kind], f"vLLM: {existence(knob)}" if not knob.outside else existence(knob)]
    if knob.default:
        found.append(f"default: {knob.default}")
    if knob.replaces:
        found.append(f"replaces {', '.join(f'`{name}`' for name in knob.replaces)}")
    if knob.sweep:
        found.append(f"tuning tries {', '.join(f'`{value}`' for value in knob.sweep)}")
    return found


def _row(rule: Rule) -> str:
    value = "on" if rule.value is True else f"`{rule.value}`"
    cells = (value, conditions(rule) or "always", versions(rule.first, rule.end), rule.why, rule.source)
    return f"| {' | '.join(_cell(cell) for cell in cells)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")

"""The Markdown page of all serving knobs (docs/serving-knobs.md), and the section of one knob."""

from __future__ import annotations

from quantmint.pipeline.serving.environment import Version
from quantmint.pipeline.serving.knobs.table import NEWEST_READ, OLDEST_READ, Knob, KnobRule, table

_KINDS = {"flag": "argument", "env": "variable", "host": "machine", "docker": "container"}
_INTRODUCTION = f"""# Serving knobs

<!-- made by `quantmint knobs --markdown > docs/serving-knobs.md` from pipeline/serving/knobs/entries -->

The knobs of a vLLM launch on AMD Instinct, and the values that `quantmint serve` gives them: under which conditions, in
which versions of vLLM, with the reason and its source. The first row of a table whose conditions hold sets the knob; a
knob without a table is not set.

| short name | guide |
|---|---|
| ROCm 2025, ROCm 2026 | ROCm documentation, vLLM V1 performance optimization: editions of November 2025 and May 2026 |
| vLLM MI300X 2024 | vLLM blog, Serving LLMs on AMD MI300X: Best Practices |
| ROCm FP8 2024 | ROCm blog, Enhancing vLLM Inference on AMD GPUs |
| vLLM parallelism | vLLM documentation, Parallelism and Scaling |

vLLM {OLDEST_READ} to {NEWEST_READ} is supported: the last eight minor versions (0.26 to 0.33), the two older ones
that AMD's images for Instinct contain, 0.19 (`rocm/vllm:rocm7.13.0_*_vllm_0.19.1`) and 0.23
(`rocm/vllm:rocm7.14.1_cdna_*_vllm_0.23.0`), and those between. Older versions are refused, and knobs that only they
have are left out. If guides contradict each other, the later one wins, unless vLLM's source decides for a version.
Nothing here was run on an Instinct."""


def knob_page() -> str:
    """Return the whole page, ending with a newline."""
    topics: dict[str, list[Knob]] = {}
    for knob in table().values():
        topics.setdefault(knob.topic, []).append(knob)
    contents = [f"- **{topic}**: {', '.join(f'`{knob.name}`' for knob in knobs)}" for topic, knobs in topics.items()]
    blocks = [_INTRODUCTION, "\n".join(contents)]
    for topic, knobs in topics.items():
        blocks += [f"## {topic}", *map(knob_section, knobs)]
    return "\n\n".join(blocks) + "\n"


def knob_section(knob: Knob) -> str:
    """Return the section of one knob: its meaning, its values with conditions and reasons, and its guides."""
    blocks = [f"### `{knob.name}`", f"{knob.about[0].upper()}{knob.about[1:]}.", " · ".join(_properties(knob))]
    if knob.rules:
        lines = ["| value | when | vLLM | why | source |", "|---|---|---|---|---|", *map(_row, knob.rules)]
        blocks.append("\n".join(lines))
    else:
        blocks.append(f"Not set: {knob.never}.")
    if knob.disagreement:
        blocks.append(f"Disagreement: {knob.disagreement}.")
    if knob.guides:
        blocks.append(f"Named in {'; '.join(knob.guides)}.")
    return "\n\n".join(blocks)


def range_words(first: Version, end: Version) -> str:
    """Return a version range in words: "0.22 and later", "before 0.28", "0.22 to before 0.26"; empty for all."""
    if not first and not end:
        return ""
    since, until = ".".join(map(str, first)), ".".join(map(str, end))
    if not end:
        return f"{since} and later"
    return f"{since} to before {until}" if first else f"before {until}"


def version_words(knob: Knob) -> str:
    """Return the vLLM versions that have a knob, in words."""
    if knob.vllm is None:
        return "not vLLM's own"
    text = range_words(*knob.vllm) or "every version"
    return text + "".join(f", not {range_words(*gap)}" for gap in knob.gaps)


def condition_words(rule: KnobRule) -> str:
    """Return a rule's conditions in words; empty for a rule that always holds."""
    return ", ".join(f"{name} {condition}" for name, condition in rule.when.items())


def _properties(knob: Knob) -> list[str]:
    properties = [_KINDS[knob.kind], f"vLLM: {version_words(knob)}" if knob.vllm is not None else version_words(knob)]
    if knob.default:
        properties.append(f"default: {knob.default}")
    if knob.replaces:
        properties.append(f"replaces {', '.join(f'`{name}`' for name in knob.replaces)}")
    if knob.sweep:
        properties.append(f"tuning tries {', '.join(f'`{value}`' for value in knob.sweep)}")
    return properties


def _row(rule: KnobRule) -> str:
    value = "on" if rule.value is True else f"`{rule.value}`"
    texts = (value, condition_words(rule) or "always", range_words(*rule.vllm), rule.why, rule.source)
    cells = [text.replace("|", "\\|") for text in texts]
    return f"| {' | '.join(cells)} |"

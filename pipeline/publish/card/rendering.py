"""The card's text: `README.md.j2` over the facts, where every value is escaped unless it is Markdown already."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from eval.gate import GateReport
from eval.report import markdown
from eval.report.summary import meaning, notes, runtime
from pipeline.publish.card.facts import CardFacts
from pipeline.publish.card.metadata import front_matter
from pipeline.publish.card.sections import base_link, figures, licence, limits, made, verifying
from pipeline.publish.card.words import Markdown, block, code, escaped
from pipeline.publish.release import RECIPE

if TYPE_CHECKING:
    from jinja2 import Environment

_TEMPLATE: Final = "README.md.j2"
_MANY: Final = re.compile(r"\n{3,}")  # what is left of parts that have nothing to say


def render(facts: CardFacts) -> str:
    """The whole README.md. Raises `StageError` where the Hub's classes would not read its metadata."""
    report = facts.report
    gate = GateReport.from_json(report["gate"])
    values = {
        "facts": facts,
        "gate": gate,
        "base": base_link(facts.base),
        "meaning": meaning(report, gate),
        "runtime": runtime(report),
        "device": gate.device or gate.hardware,
        "day": facts.judged[:10],
        "not_passed": [Markdown(reason) for reason in markdown.not_passed(gate)],
        "notes": notes(report, gate),
        "figures": figures(facts, gate),
        "accuracy": Markdown(markdown.accuracy(gate)),
        "throughput": Markdown(markdown.throughput(report, gate)),
        "size": Markdown(markdown.size(report)),
        "made": made(facts),
        "run": block(f"quantmint run {RECIPE}"),
        "recipe": RECIPE,
        "versions": ", ".join(f"{name} {version}" for name, version in report["versions"].items()),
        "limits": limits(facts, gate),
        "verifying": verifying(facts),
        "licence": licence(facts),
    }
    text = _environment().get_template(_TEMPLATE).render(values).strip()
    return f"{front_matter(facts)}\n{_MANY.sub(chr(10) * 2, text)}\n"


def sentence(facts: CardFacts) -> str:
    """What it is, on one plain line: the title of a release."""
    cache_type = " with an FP8 KV cache" if facts.made.kv_cache == "fp8" else ""
    return f"{facts.base.name} in {facts.made.scheme}{cache_type}, {facts.made.format}"


def notice(facts: CardFacts) -> str | None:
    """The text of the file `NOTICE` that the base's licence asks for; None where it asks for none."""
    if facts.terms.notice is None:
        return None
    return f"{facts.terms.notice}\n\nThe weights were changed: {sentence(facts)}.\n"


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made_once = Environment(  # noqa: S701 - Markdown, escaped by `finalize`
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=escaped,
    )
    made_once.filters |= {"code": code, "block": block}
    return made_once

"""The sections of a recipe on measurements beside the suite: function calls, long texts, sampled answers.

Each measures under tasks of its own, which a gate judges as it judges the suite's. None is on by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field

from quantmint.pipeline.recipe.section import PRINTABLE, Section, wrong

if TYPE_CHECKING:
    from quantmint.eval.suites import SuiteTask

Margin = Annotated[float, Field(gt=0, lt=1)] | None
TemplateValue = Annotated[Any, Field(json_schema_extra={"type": ["string", "number", "boolean"]})]


def _defaults(value: object) -> object:
    if value == "auto":
        return {}
    if value is not None and not isinstance(value, dict | Section):
        raise wrong("auto, or a mapping")
    return value


def _or_auto(schema: dict[str, Any]) -> None:
    schema["anyOf"].insert(1, {"const": "auto", "type": "string"})


OrAuto = (BeforeValidator(_defaults), Field(json_schema_extra=_or_auto))
"""Annotations of a section that may be written as `auto`, which means all of its defaults."""


class ToolCalls(Section):
    """Function calls through the server's chat endpoint, judged against the functions' JSON Schemas."""

    file: str | None = Field(default=None, min_length=1, pattern=PRINTABLE)
    """JSONL file with calls of your own, relative to this file: each line has a request (or messages), the tools on
    offer and the right calls. null: generated requests."""
    items: int = Field(default=600, ge=50, le=5000)
    """Number of requests; all lines of `file`."""
    max_tokens: int = Field(default=512, ge=1)
    """Most tokens of an answer."""

    def tasks(self, gate: ToolCallsGate, flip_rate: float | None) -> tuple[SuiteTask, ...]:
        """Return the tasks of this endpoint; ``flip_rate`` is the recipe's expectation (None: 4 %, 1 % invalid)."""
        from quantmint.eval.suites import SuiteTask
        from quantmint.eval.tool_calls import EXACT, VALID

        return tuple(
            SuiteTask(task, "exact_match", self.items, flip_rate or flips, margin is not None, margin=margin)
            for task, flips, margin in ((EXACT, 0.04, gate.exact), (VALID, 0.01, gate.valid))
        )


class ToolCallsGate(Section):
    """Losses of function calls that are accepted, as fractions of the requests; null: shown, and decides nothing."""

    exact: Margin = 0.04
    """Largest loss of right calls: the right functions with equal arguments."""
    valid: Margin = 0.03
    """Largest loss of valid calls: JSON that keeps the schema of a function on offer."""


def template_settings(value: Mapping[str, object]) -> Mapping[str, object]:
    """Return the arguments of a chat template; raises pydantic's error for a value that no template takes."""
    for name, setting in value.items():
        if not isinstance(setting, str | bool | int | float):
            raise wrong("text, a number, true or false", actual=repr(setting), at=name)
    return value

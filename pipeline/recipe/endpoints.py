"""The sections of a recipe on measurements beside the suite: function calls, long texts, sampled answers.

Each measures under tasks of its own, which a gate judges as it judges the suite's. None is on by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

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


class LongContext(Section):
    """Texts as long as the server allows: likelihood and KL by position, and what was hidden in them."""

    lengths: tuple[Annotated[int, Field(ge=64)], ...] | None = Field(default=None, strict=False, min_length=2)
    """Positions where buckets end, ascending; the last is the length of a text in tokens. null: doubling, up to
    target.max_model_len."""
    texts: int = Field(default=48, ge=8, le=500)
    """Number of texts, which are the units of all intervals."""
    needles: int | None = Field(default=None, ge=1, le=16)
    """Sentences hidden in each text, at as many depths (null: one for each 256 tokens, 2 to 8)."""
    set: str | None = None
    """Calibration set that the texts are joined from, by name or path (null: the recipe's, behind what it calibrates
    with)."""

    @model_validator(mode="after")
    def _ascending(self) -> LongContext:
        lengths = self.lengths or ()
        if list(lengths) != sorted(set(lengths)):
            raise wrong("ascending positions", actual=", ".join(map(str, lengths)), at="lengths")
        return self

    def ends(self, max_model_len: int) -> tuple[int, ...]:
        """Return the positions where buckets end; a token of the server's length is left for its answer."""
        from quantmint.eval.long_context import bucket_ends

        return self.lengths or bucket_ends(max_model_len - 1)

    def needles_of(self, max_model_len: int) -> int:
        """Return the number of needles in each text."""
        from quantmint.eval.long_context import needle_count

        return self.needles or needle_count(self.ends(max_model_len)[-1])

    def tasks(self, gate: LongContextGate, max_model_len: int) -> tuple[SuiteTask, ...]:
        """Return the tasks of this endpoint: the likelihood in each bucket, and retrieval."""
        from quantmint.eval.long_context import METRIC, RETRIEVAL, likelihood_task
        from quantmint.eval.suites import SuiteTask

        needles = self.needles_of(max_model_len)
        # Needles of a text that are found or missed together tell less than as many texts: the forecast counts less.
        independent = round(self.texts * needles / (1 + _TOGETHER * (needles - 1)))
        return (
            *(
                SuiteTask(
                    *(likelihood_task(end), METRIC, self.texts, _LIKELIHOOD_FLIPS, gate.likelihood is not None),
                    margin=gate.likelihood,
                    expected_spread=_SPREAD,
                )
                for end in self.ends(max_model_len)
            ),
            SuiteTask(
                *(RETRIEVAL, "exact_match", independent, _FOUND_FLIPS, gate.retrieval is not None),
                margin=gate.retrieval,
            ),
        )


_TOGETHER, _FOUND_FLIPS = 0.2, 0.02
"""Correlation of two needles of a text, and share of needles that a good checkpoint finds or misses otherwise."""
_SPREAD, _LIKELIHOOD_FLIPS = 0.01, 0.5
"""Deviation between texts of the change in nats per token; the share of flips says nothing of a likelihood."""


class LongContextGate(Section):
    """Losses on long texts that are accepted; null: shown, and decides nothing."""

    likelihood: Margin = 0.02
    """Largest rise of the perplexity in each bucket of positions, relative: 0.02 is two per cent more."""
    retrieval: Margin = 0.1
    """Largest loss of needles that are found, as a fraction."""
    max_kl: float | None = Field(default=None, gt=0)
    """Largest KL in each bucket, in nats; what is measured is a lower bound of the true one (null: shown)."""


class Reasoning(Section):
    """Problems that take several steps, each answered several times as the model is sampled in use."""

    file: str | None = Field(default=None, min_length=1, pattern=PRINTABLE)
    """JSONL file with problems of your own, relative to this file: each line has a question and its answer. null:
    generated problems."""
    items: int = Field(default=600, ge=50, le=5000)
    """Number of problems; all lines of `file`."""
    answers: int = Field(default=4, ge=1, le=64)
    """Answers to each problem on each side."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of an answer with its thoughts (null: what target.max_model_len leaves)."""
    temperature: float | None = Field(default=None, gt=0, le=2)
    """Temperature of the samples (null: as the model's generation_config.json says, else 1)."""

    def tasks(self, gate: ReasoningGate, flip_rate: float | None) -> tuple[SuiteTask, ...]:
        """Return the tasks of this endpoint: right answers, complete ones, and those without a loop."""
        from quantmint.eval.reasoning import COMPLETE, METRIC, RIGHT, UNREPEATED
        from quantmint.eval.suites import SuiteTask

        return tuple(
            SuiteTask(task, METRIC, self.items, flip_rate or noise / self.answers, margin is not None, margin=margin)
            for task, noise, margin in (
                (RIGHT, _SAMPLED, gate.score),
                (COMPLETE, _SELDOM, gate.cut),
                (UNREPEATED, _SELDOM, gate.loops),
            )
        )


_SAMPLED, _SELDOM = 0.24, 0.08
"""Variance of the difference of two sampled answers to a problem: twice p (1 - p), of a mean p (1 - p) of 0.12 over
problems, and of answers that are seldom cut or repeated 0.04. As many answers to a problem divide it."""


class ReasoningGate(Section):
    """Losses on sampled problems that are accepted, as fractions of the answers; null: shown, and decides nothing."""

    score: Margin = 0.05
    """Largest loss of right answers (avg@k)."""
    cut: Margin = 0.03
    """Largest rise of answers that the limit of length cuts."""
    loops: Margin = 0.03
    """Largest rise of answers that end in a loop."""


def template_settings(value: Mapping[str, object]) -> Mapping[str, object]:
    """Return the arguments of a chat template; raises pydantic's error for a value that no template takes."""
    for name, setting in value.items():
        if not isinstance(setting, str | bool | int | float):
            raise wrong("text, a number, true or false", actual=repr(setting), at=name)
    return value

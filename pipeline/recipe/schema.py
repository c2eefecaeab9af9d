"""The whole recipe: its sections, the rules between them, and values that several sections decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_serializer, model_validator

from quantmint.pipeline.base import schemes
from quantmint.pipeline.recipe.calibration import Calibration
from quantmint.pipeline.recipe.endpoints import LongContextGate, ReasoningGate, ToolCallsGate
from quantmint.pipeline.recipe.models import Draft, Source
from quantmint.pipeline.recipe.quantization import AUTO, Quantization
from quantmint.pipeline.recipe.section import Section, wrong
from quantmint.pipeline.recipe.sections import Evaluation, Gate, Publish, Refresh, Tracking
from quantmint.pipeline.recipe.serving import Serve, Target

if TYPE_CHECKING:
    from quantmint.eval.suites import Suite, SuiteTask


class Search(Section):
    """Further tries of a run with `scheme: auto`: more bits after a FAIL, fewer after a PASS that follows one."""

    until: Literal["pass"] = "pass"
    """pass: publish the checkpoint with the fewest bits that passes, known to a quarter bit where tries are left."""
    tries: int = Field(default=4, ge=2, le=10)
    """Checkpoints at most, from the budget up to all in the largest scheme and back down. Each try is judged with a
    share of the error that gate.accuracy.confidence leaves, so that all tries together have no more."""


class Recipe(Section):
    """One checkpoint: what to make, from what, for which machine, and what it must prove."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")
    """Name of the recipe: that of its file, without .yaml."""
    description: str = ""
    """One sentence for lists of recipes."""
    source: Source
    """The 16-bit model to start from."""
    trust_remote_code: bool = False
    """Run Python code from the repository; only with a revision that is a 40-digit commit."""
    quantization: Quantization
    """Scheme, KV cache, format and algorithm of the quantization."""
    calibration: Calibration | None = None
    """Data that ranges are measured on; needed for static activation scales or an fp8 KV cache."""
    draft: Draft | None = None
    """Model that proposes tokens for speculative decoding (null: none)."""
    search: Search | None = None
    """Further tries with more bits where the gate says FAIL (null: none)."""
    target: Target = Field(default_factory=Target)
    """Machine and load that the checkpoint is made for."""
    serve: Serve = Field(default_factory=Serve)
    """Settings that replace those of the launch plan."""
    evaluation: Evaluation = Field(default_factory=Evaluation)
    """Tasks that measure its accuracy."""
    gate: Gate = Field(default_factory=Gate)
    """Limits of accuracy and throughput that decide PASS or FAIL."""
    publish: Publish = Field(default_factory=Publish)
    """Destinations of the release after a PASS."""
    tracking: Tracking = Field(default_factory=Tracking)
    """Tracking server that the figures of a run are logged to."""
    refresh: Refresh = Field(default_factory=Refresh)
    """Schedule of checks whether the checkpoint must be made again."""

    @model_validator(mode="after")
    def _search_of_a_choice(self) -> Recipe:
        if self.search is not None and self.quantization.scheme != AUTO:
            raise wrong("it only with `quantization.scheme: auto`", actual="a search", at="search")
        return self

    @model_validator(mode="after")
    def _draft_of_a_server(self) -> Recipe:
        if self.draft is None:
            return self
        if self.serve.speculative is None:
            raise wrong("it with `serve.speculative`, which says the method", actual="a draft", at="draft")
        if self.serve.speculative.model is not None:
            raise wrong("none in `speculative`: `draft` is the model", actual="a model", at="serve")
        return self

    @model_validator(mode="after")
    def _acceptance_of_a_server(self) -> Recipe:
        if self.gate.acceptance is None:
            return self
        if self.serve.speculative is None:
            raise wrong("it with `serve.speculative`", actual="a promise on acceptance", at="gate")
        if self.evaluation.runtime == "reference":
            raise wrong("`runtime: vllm` for it", actual="a promise on acceptance", at="gate")
        return self

    @model_serializer(mode="wrap")
    def _omit_unset(self, dump: Any) -> dict[str, Any]:
        dumped: dict[str, Any] = dump(self)
        return {name: value for name, value in dumped.items() if name not in ("search", "draft") or value is not None}

    @property
    def answered_by(self) -> Literal["vllm", "sglang", "reference"]:
        """Return the runtime that answers for both sides: the server's, or the reference runtime in its place."""
        return "reference" if self.evaluation.runtime == "reference" else self.serve.runtime

    @property
    def endpoints(self) -> Mapping[str, tuple[SuiteTask, ...]]:
        """Return the tasks that are measured beside the suite, by the family of the stage that measures them."""
        evaluation, gate = self.evaluation, self.gate
        tasks: dict[str, tuple[SuiteTask, ...]] = {}
        if evaluation.tools is not None:
            tasks["tools"] = evaluation.tools.tasks(gate.tools or ToolCallsGate(), gate.accuracy.expected_flip_rate)
        if evaluation.long is not None:
            tasks["long"] = evaluation.long.tasks(gate.long or LongContextGate(), self.target.max_model_len)
        if evaluation.reasoning is not None:
            limits = gate.reasoning or ReasoningGate()
            tasks["reasoning"] = evaluation.reasoning.tasks(limits, gate.accuracy.expected_flip_rate)
        return tasks

    @property
    def judged_at_once(self) -> tuple[str, ...]:
        """Return the tasks that are judged in one look, however many the recipe asks for."""
        return tuple(task.task for task in self.endpoints.get("long", ()))

    def judged(self, suite: Suite) -> Suite:
        """Return the suite with the tasks of the endpoints behind its own."""
        return replace(suite, tasks=(*suite.tasks, *(task for tasks in self.endpoints.values() for task in tasks)))

    @property
    def mx_scales(self) -> schemes.MxScales:
        """Return the rounding of the scales of MX inputs on the target."""
        return self.target.rounding or "even"

    @property
    def mx_settings(self) -> dict[str, str]:
        """Return the rounding of MX scales as part of a fingerprint's settings; empty where none is known or needed."""
        named, is_rounded = self.target.rounding, schemes.has_mx_activations(self.quantization.schemes)
        return {} if named is None or not is_rounded else {"mx_scales": named}

    @property
    def confidence(self) -> float:
        """Return the confidence that each checkpoint's accuracy is judged with.

        A checkpoint at the margin passes with the remaining error probability. Where a search tries several until one
        passes, each has an equal share of it (Bonferroni), so that all tries together have no more.
        """
        confidence = self.gate.accuracy.confidence
        return confidence if self.search is None else 1 - (1 - confidence) / self.search.tries

"""What a recipe says about its proof: how a checkpoint is measured, and what it must show.

evaluation: {suite: core}
gate:
  accuracy: {margin: 0.01}
  throughput: {min_ratio: 1.1, launches: 4}
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator

from pipeline.recipe.section import Section, wrong

if TYPE_CHECKING:
    from eval.gate import Policy
    from eval.suites import Suite

Runtime = Literal["vllm", "reference"]


class Evaluation(Section):
    """How good the checkpoint is: the tasks that the baseline and the candidate both answer."""

    suite: str = Field(default="core", description="Name of a suite in eval/suites.")
    limit: int | None = Field(
        default=None, ge=1, description="Use at most so many items of each task, drawn by the seed (null: all of them)."
    )
    concurrency: int = Field(default=32, ge=1, description="Requests in flight.")
    runtime: Runtime = Field(
        default="vllm",
        description="What answers. vllm: the server that will serve the checkpoint. reference: transformers with the "
        "weights that the bytes stand for, activations and KV cache rounded as the format says; for formats that no "
        "vLLM here loads. It measures no throughput, and the verdict names it.",
    )
    looks: int = Field(
        default=4,
        ge=1,
        le=20,
        description="How often a task's items are judged while they are asked: a clear case stops early, by an "
        "alpha-spending boundary that keeps the error rates. 1: only at the end.",
    )
    control: int | None = Field(
        default=500,
        ge=20,
        description="Items of each task that the baseline answers a second time: how many answers change by "
        "themselves (null: none).",
    )
    seed: int = Field(default=1234, ge=0, description="Seed of the order of items and of few-shot examples.")


class AccuracyGate(Section):
    """How much accuracy may be lost, and how sure the gate must be."""

    margin: float = Field(
        default=0.01, gt=0, lt=1, description="Largest loss that is accepted, as a fraction: 0.01 is one point."
    )
    margins: dict[str, Annotated[float, Field(gt=0, lt=1)] | None] = Field(
        default_factory=dict,
        description="Margins of single tasks in place of the suite's, relative for a perplexity (0.02: two per cent "
        "more); null: the task is shown and does not decide.",
    )
    confidence: float = Field(default=0.95, ge=0.5, lt=1, description="Confidence of the one-sided bound.")
    power: float = Field(
        default=0.8,
        ge=0.5,
        lt=1,
        description="Chance that a lossless checkpoint passes; a suite too small for it is refused.",
    )
    expected_flip_rate: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of items whose score changes (null: what the suite expects of each task).",
    )
    baseline_score: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default_factory=dict,
        description="Score that the 16-bit baseline is known to reach, by task (a perplexity for perplexity tasks); "
        "where it is elsewhere, nothing is judged.",
    )
    baseline_tolerance: float = Field(
        default=0.03,
        gt=0,
        lt=1,
        description="How far from it the baseline may be, beside its sampling error; relative for a perplexity.",
    )


class CanaryGate(Section):
    """What a checkpoint must show before the long evaluation: it says much the same as its baseline, token by token."""

    # These stop what is broken; whether something coarse is good enough is the evaluation's to say. Published for
    # 4-bit weights (IQ4_XS): 90 % and 0.04 nats; for 2-bit weights of a 4B model (IQ2_S): 70 % and 0.6 nats (llama.cpp,
    # pull requests 12557 and 19661). The embedded model of four layers: 74 to 82 % and 0.1 nats with MXFP4 rounded to
    # nearest; with the scales of one layer doubled 47 to 66 % and 0.7 to 1.2 nats, with four times those 13 to 46 %
    # and 1.8 to 2.6 nats.
    min_agreement: float = Field(
        default=0.7,
        ge=0,
        le=1,
        description="Least share of positions whose likeliest token is the baseline's, on held-out prompts.",
    )
    max_kl: float = Field(
        default=0.5, gt=0, description="Largest mean KL divergence of the next token from the baseline's, in nats."
    )


class ThroughputGate(Section):
    """How fast the checkpoint must be, on the target's hardware."""

    min_ratio: float | None = Field(
        default=1.0,
        gt=0,
        description="Least ratio of the candidate's output tokens/s to the 16-bit baseline's. Above 1: this gain and a "
        "significant one. Up to 1: no slower than this, shown by an equivalence test. null: shown only.",
    )
    launches: int = Field(
        default=4,
        ge=1,
        le=20,
        description="Fresh launches of the server on each side, in the order ABBA BAAB. Three are the fewest that an "
        "exact test can decide by at 95 %.",
    )
    confidence: float = Field(default=0.95, ge=0.5, lt=1, description="Confidence of the exact one-sided rank test.")


class Gate(Section):
    """What a checkpoint must show before it is published."""

    accuracy: AccuracyGate = Field(default_factory=AccuracyGate, description="Loss of accuracy that is accepted.")
    canary: CanaryGate = Field(default_factory=CanaryGate, description="What stops a broken checkpoint in a minute.")
    throughput: ThroughputGate = Field(default_factory=ThroughputGate, description="Speed that is required.")

    def policy(self, suite: Suite, hardware: str) -> Policy:
        """The limits of a judgement, on a suite that has its margins; speed is promised of `hardware`."""
        from eval.canary import CanaryPolicy
        from eval.gate import Policy

        rate = self.accuracy.expected_flip_rate
        return Policy.for_suite(
            suite,
            margin=self.accuracy.margin,
            confidence=self.accuracy.confidence,
            power=self.accuracy.power,
            baseline_score=dict(self.accuracy.baseline_score),
            baseline_tolerance=self.accuracy.baseline_tolerance,
            canary=CanaryPolicy(self.canary.min_agreement, self.canary.max_kl),
            min_ratio=self.throughput.min_ratio,
            launches=self.throughput.launches,
            throughput_confidence=self.throughput.confidence,
            hardware=hardware,
            **({} if rate is None else {"expected_flip_rate": rate}),
        )


class Tracking(Section):
    """Where the figures of a run are logged, beside the report."""

    mlflow: str | None = Field(
        default=None,
        min_length=1,
        description="Tracking URI of an MLflow server (null: none). A key for it is read from MLflow's own variables.",
    )
    experiment: str = Field(default="quantmint", min_length=1, description="Experiment that the runs are put into.")

    @field_validator("mlflow")
    @classmethod
    def _no_key(cls, value: str | None) -> str | None:
        if value is not None and "@" in value.partition("//")[2].partition("/")[0]:
            raise wrong(
                "none: MLflow reads MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
                found="a user or a password in an address",
            )
        return value

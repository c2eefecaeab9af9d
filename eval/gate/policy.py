"""What a recipe promises: the limits that a candidate is judged by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from eval.canary import CanaryPolicy
from eval.records import Record
from eval.suites import Suite

Share = Annotated[float, Field(gt=0, lt=1)]
Confidence = Annotated[float, Field(ge=0.5, lt=1)]


@dataclass(frozen=True, slots=True)
class Policy(Record):
    """The limits, all that a judgement needs beside the measurements.

    `margins` maps each gated task to the loss that is accepted: of a score as a fraction (0.01 is one point), of a
    perplexity relative to it; tasks that are not in it are shown only. `confidence` is that of the one-sided bounds
    over all looks together, `power` the chance that a lossless candidate is to have; `expected_flip_rate` stands in
    where no item flipped. `baseline_score` maps a task to the score (or perplexity) that the baseline is known to
    reach, give or take `baseline_tolerance` and its sampling error.

    `min_ratio` is the least output throughput relative to the baseline in every cell (None: shown only), shown by at
    least `launches` launches a side at `throughput_confidence`, on `hardware`: a name of the table of targets, and
    measured elsewhere the promise is neither kept nor broken (None: any will do).
    """

    margins: Mapping[str, Share]
    confidence: Confidence = 0.95
    power: Confidence = 0.8
    expected_flip_rate: Annotated[float, Field(gt=0, le=1)] = 0.04
    baseline_score: Mapping[str, Annotated[float, Field(ge=0)]] = field(default_factory=dict)
    baseline_tolerance: Share = 0.03
    canary: CanaryPolicy = field(default_factory=lambda: CanaryPolicy(min_agreement=0.7, max_kl=0.5))
    min_ratio: Annotated[float, Field(gt=0)] | None = None
    launches: Annotated[int, Field(ge=1)] = 1
    throughput_confidence: Confidence = 0.95
    hardware: str | None = None

    @classmethod
    def for_suite(cls, suite: Suite, *, margin: float, **limits: Any) -> Policy:
        """The policy of a recipe on a suite: its margin for each gated task that has none of its own.

        `limits` are further fields, by name; without one, the flip rate is the largest that a gated task expects.
        """
        gated = [task for task in suite.tasks if task.gated]
        limits.setdefault("expected_flip_rate", max(task.expected_flip_rate for task in gated))
        return cls(margins={task.task: task.margin or margin for task in gated}, **limits)

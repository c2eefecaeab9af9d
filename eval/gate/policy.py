"""What a recipe promises: the limits that a candidate is judged by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from eval.canary import CanaryPolicy
from eval.errors import MeasurementError
from eval.suites import Suite
from eval.typed import typed


@dataclass(frozen=True, slots=True)
class Policy:
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

    margins: Mapping[str, float]
    confidence: float = 0.95
    power: float = 0.8
    expected_flip_rate: float = 0.04
    baseline_score: Mapping[str, float] = field(default_factory=dict)
    baseline_tolerance: float = 0.03
    canary: CanaryPolicy = field(default_factory=lambda: CanaryPolicy(min_agreement=0.7, max_kl=0.5))
    min_ratio: float | None = None
    launches: int = 1
    throughput_confidence: float = 0.95
    hardware: str | None = None

    @classmethod
    def for_suite(cls, suite: Suite, *, margin: float, **limits: Any) -> Policy:
        """The policy of a recipe on a suite: its margin for each gated task that has none of its own.

        `limits` are further fields, by name; without one, the flip rate is the largest that a gated task expects.
        """
        gated = [task for task in suite.tasks if task.gated]
        limits.setdefault("expected_flip_rate", max(task.expected_flip_rate for task in gated))
        return cls(margins={task.task: task.margin or margin for task in gated}, **limits)

    def to_json(self) -> dict[str, Any]:
        """A plain mapping of the fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Policy:
        """Read back what `to_json` wrote; `MeasurementError` for anything else."""
        try:
            policy = typed(cls, {**data, "canary": CanaryPolicy.from_json(data["canary"])})
        except (KeyError, TypeError, ValueError) as error:
            raise MeasurementError(f"not a policy of the gate: {error!r}") from error
        for name, sound in policy._limits():
            if not sound:
                raise MeasurementError(f"not a policy of the gate: {name} {getattr(policy, name)!r}")
        return policy

    def _limits(self) -> Iterator[tuple[str, bool]]:
        """Whether each limit is one that a recipe can set."""
        yield "margins", all(0 < margin < 1 for margin in self.margins.values())
        yield "confidence", 0.5 <= self.confidence < 1
        yield "power", 0.5 <= self.power < 1
        yield "expected_flip_rate", 0 < self.expected_flip_rate <= 1
        yield "baseline_score", all(score >= 0 for score in self.baseline_score.values())
        yield "baseline_tolerance", 0 < self.baseline_tolerance < 1
        yield "canary", 0 <= self.canary.min_agreement <= 1 and self.canary.max_kl > 0
        yield "min_ratio", self.min_ratio is None or self.min_ratio > 0
        yield "launches", self.launches >= 1
        yield "throughput_confidence", 0.5 <= self.throughput_confidence < 1

"""The sections of a recipe on proof, publication and upkeep."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, model_serializer, model_validator

from quantmint.eval.statistics.ranks import MOST_LOOKS
from quantmint.pipeline.base.schemes import has_mx_activations, scheme
from quantmint.pipeline.recipe.destinations import Address, Destinations
from quantmint.pipeline.recipe.endpoints import (
    LongContext,
    LongContextGate,
    OrAuto,
    Reasoning,
    ReasoningGate,
    TemplateValue,
    ToolCalls,
    ToolCallsGate,
    template_settings,
)
from quantmint.pipeline.recipe.section import PRINTABLE, Section, wrong

if TYPE_CHECKING:
    from quantmint.eval.canary import CanaryPolicy
    from quantmint.eval.gate import Policy
    from quantmint.eval.suites import Suite


Runtime = Literal["vllm", "reference"]
_ENDPOINTS = ("tools", "long", "reasoning", "chat_template_kwargs")


class Evaluation(Section):
    """The tasks that baseline and candidate both answer, and the requests' settings."""

    suite: str = "core"
    """Name of a suite in eval/suites, or the path of a YAML file, whose own tasks are in the same folder."""
    limit: int | None = Field(default=None, ge=1)
    """Largest number of items of each task, drawn by the seed (null: all items)."""
    concurrency: int = Field(default=32, ge=1)
    """Requests in flight."""
    runtime: Runtime = "vllm"
    """Engine that answers. vllm: the server that will serve the checkpoint. reference: transformers with the
    dequantized weights, activations and KV cache rounded as the format says; for formats that no vLLM here loads. It
    measures no throughput, and the verdict names it."""
    looks: int = Field(default=4, ge=1, le=20)
    """Looks at a task's scores while its items are asked: a clear case stops early, by an alpha-spending boundary that
    keeps the error rates. 1: only at the end."""
    control: int | None = Field(default=500, ge=20)
    """Items of each task that the baseline answers twice, to measure how many answers change without quantization
    (null: none)."""
    seed: int = Field(default=1234, ge=0)
    """Seed of the order of items and of few-shot examples."""
    tools: Annotated[ToolCalls | None, *OrAuto] = None
    """Function calls, besides the suite (auto: all defaults; null: none). The server needs a tool parser."""
    long: Annotated[LongContext | None, *OrAuto] = None
    """Long texts, besides the suite (auto: all defaults; null: none)."""
    reasoning: Annotated[Reasoning | None, *OrAuto] = None
    """Problems that are answered several times, sampled, besides the suite (auto: all defaults; null: none)."""
    chat_template_kwargs: Annotated[dict[str, TemplateValue], AfterValidator(template_settings)] = Field(
        default_factory=dict
    )
    """Arguments of the chat template for what is asked by chat, such as enable_thinking: false."""

    @model_serializer(mode="wrap")
    def _omit_unset(self, dump: Any) -> dict[str, Any]:
        """Omit the endpoints that a recipe does not have: recipes without them keep their fingerprints."""
        dumped: dict[str, Any] = dump(self)
        return {name: value for name, value in dumped.items() if name not in _ENDPOINTS or value}


class AccuracyGate(Section):
    """The loss of accuracy that is allowed, and the confidence of the gate."""

    margin: float = Field(default=0.01, gt=0, lt=1)
    """Largest loss that is accepted, as a fraction: 0.01 is one point."""
    margins: dict[str, Annotated[float, Field(gt=0, lt=1)] | None] = Field(default_factory=dict)
    """Margins of single tasks in place of the suite's, relative for a perplexity (0.02: two per cent more); null: the
    task is shown and does not decide."""
    confidence: float = Field(default=0.95, ge=0.5, lt=1)
    """Confidence of the one-sided bound."""
    power: float = Field(default=0.8, ge=0.5, lt=1)
    """Chance that a lossless checkpoint passes all tasks; a suite too small for it is refused."""
    expected_flip_rate: float | None = Field(default=None, gt=0, le=1)
    """Share of items whose score changes (null: what the suite expects of each task)."""
    baseline_score: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """Score that the 16-bit baseline is known to reach, by task (a perplexity for perplexity tasks); a baseline with
    another score makes the measurement invalid."""
    baseline_tolerance: float = Field(default=0.03, gt=0, lt=1)
    """Largest distance of the baseline from `baseline_score` that is accepted, besides its sampling error; relative for
    a perplexity."""


class CanaryGate(Section):
    """Limits before the long evaluation: the candidate predicts nearly the same tokens as its baseline."""

    min_agreement: float | None = Field(default=None, ge=0, le=1)
    """Least share of positions whose likeliest token is the baseline's, on held-out prompts. Less stops the run, with
    FAIL where the whole interval is below. null: by the scheme of the fewest bits, 0.7, or 0.45 in four bits, where it
    FAILs below 0.35."""
    max_kl: float | None = Field(default=None, gt=0)
    """Largest mean KL divergence of the next token from the baseline's, in nats. More stops the run, with FAIL where
    the whole interval is above. null: by the scheme of the fewest bits, 0.5, or 1.2 in four bits, where it FAILs above
    2."""

    def policy(self, schemes: Iterable[str]) -> CanaryPolicy:
        """Return the canary's limits for a checkpoint with these schemes."""
        from quantmint.eval.canary import CanaryPolicy

        bits = min(scheme(name).bits_per_weight for name in schemes)
        agreement, kl, *broken = _FOUR_BITS if bits < _FEW_BITS else _MORE_BITS
        return CanaryPolicy(
            agreement if self.min_agreement is None else self.min_agreement,
            kl if self.max_kl is None else self.max_kl,
            broken[0] if self.min_agreement is None else None,
            broken[1] if self.max_kl is None else None,
        )


# Agreement and KL that stop a checkpoint, and those that no sound one has; docs/gate.md has what they are from. In
# eight and six bits a sound model of 135M parameters shows 87 % and 0.05 nats, a sixth of what stops it. In four it
# shows up to 47 % and 1.14 nats by plain rounding, and 39 % and 1.7 nats by a rotation that does harm.
_FEW_BITS = 5.0
_FOUR_BITS = (0.45, 1.2, 0.35, 2.0)
_MORE_BITS = (0.7, 0.5, None, None)
_LAUNCHES = 4


class KlGate(Section):
    """A promise on the KL divergence of the next token from the baseline's, over held-out texts."""

    max: float = Field(gt=0)
    """Largest mean divergence, in nats: PASS where the upper end of its interval is at most this, FAIL where the lower
    end is above. The reference runtime compares the whole vocabulary; in vLLM the likeliest tokens and a sampled one
    estimate it without bias."""
    confidence: float = Field(default=0.95, ge=0.5, lt=1)
    """Confidence of the one-sided bounds, clustered by text."""


class LayoutGate(Section):
    """A promise that the recipe's layout (TP, EP, DP) answers as a single accelerator does with the same weights."""

    max: float = Field(default=0.02, gt=0)
    """Largest distance in nats beyond what the single accelerator differs from itself by, of reading (KL) and of greedy
    answers. The checkpoint must fit a single accelerator."""
    confidence: float = Field(default=0.95, ge=0.5, lt=1)
    """Confidence of the one-sided bounds, clustered by text."""


class ThroughputGate(Section):
    """The speed that the checkpoint must have on the target's hardware."""

    min_ratio: float | None = Field(default=1.0, gt=0)
    """Least ratio of the candidate's output tokens/s to the 16-bit baseline's. The lower bound of the measured ratio
    must reach it, so the true ratio must be a little larger: `quantmint plan` says how much. null: no speed is
    required."""
    launches: int = Field(default=_LAUNCHES, ge=0, le=20)
    """Launches of a fresh server on each side, in the order ABBA BAAB, after one that does not count. Three are the
    fewest that an exact test can decide by at 95 %. Of four to seven, half of the baseline's are those of an earlier
    run with the same baseline on this machine, if they agree with the new ones. With `min_ratio: null` the default is
    0, which measures no throughput; more launches are measured and shown, but do not decide."""
    confidence: float = Field(default=0.95, ge=0.5, lt=1)
    """Confidence of the exact one-sided rank test."""
    stop_early: bool = False
    """true: launches end as soon as every cell is decided, or one is lost, and `launches` are the most, 7 of them. The
    looks share the error probability, so a series that runs to its end proves slightly less than a fixed one. No launch
    of an earlier run is used."""

    @model_validator(mode="after")
    def _counted_out(self) -> ThroughputGate:
        if self.stop_early and self.launches > MOST_LOOKS:
            raise wrong(f"at most {MOST_LOOKS} with stop_early", actual=str(self.launches), at="launches")
        return self

    @model_serializer(mode="wrap")
    def _omit_unset(self, dump: Any) -> dict[str, Any]:
        dumped: dict[str, Any] = dump(self)
        return {name: value for name, value in dumped.items() if name != "stop_early" or value}

    @model_validator(mode="before")
    @classmethod
    def _measured_where_promised(cls, data: Any) -> Any:
        unasked = isinstance(data, dict) and data.get("min_ratio", "") is None
        return {"launches": 0, **data} if unasked else data


class AcceptanceGate(Section):
    """The acceptance of proposed tokens that must remain where `serve.speculative` proposes them."""

    margin: float = Field(default=0.02, gt=0, lt=1)
    """Largest loss of acceptance length that is accepted, relative to the 16-bit baseline's, which is served with the
    same speculative decoding: 0.02 is two percent fewer tokens in a step."""
    confidence: float = Field(default=0.95, ge=0.5, lt=1)
    """Confidence of the one-sided bounds, whose standard error is clustered by prompt."""


class Gate(Section):
    """The promises that a checkpoint must keep before it is published."""

    accuracy: AccuracyGate = Field(default_factory=AccuracyGate)
    """Loss of accuracy that is accepted."""
    canary: CanaryGate | None = Field(default_factory=CanaryGate)
    """Check that stops a broken checkpoint within a minute, before the tasks (null: no check)."""
    kl: KlGate | None = None
    """Divergence of the next token that is promised (null: none is)."""
    layout: LayoutGate | None = None
    """Comparison of the recipe's layout with a single accelerator (null: none)."""
    throughput: ThroughputGate = Field(default_factory=ThroughputGate)
    """Speed that is required."""
    acceptance: AcceptanceGate | None = None
    """Loss of acceptance of speculative decoding that is accepted (null: shown only)."""
    tools: ToolCallsGate | None = None
    """Losses of `evaluation.tools` that are accepted (null: the defaults)."""
    long: LongContextGate | None = None
    """Losses of `evaluation.long` that are accepted (null: the defaults)."""
    reasoning: ReasoningGate | None = None
    """Losses of `evaluation.reasoning` that are accepted (null: the defaults)."""

    @model_serializer(mode="wrap")
    def _omit_unset(self, dump: Any) -> dict[str, Any]:
        """Omit absent promises that are not in earlier records: recipes without them stay as they were recorded."""
        dumped: dict[str, Any] = dump(self)
        new = (*_ENDPOINTS, "acceptance", "kl", "layout")
        return {name: value for name, value in dumped.items() if name not in new or value is not None}

    def policy(self, suite: Suite, hardware: str, schemes: Iterable[str], mx_scales: str | None = None) -> Policy:
        """Return the gate's policy for a suite with its own margins; the speed is required on `hardware`.

        ``mx_scales`` is the target's rounding of MX scales; it is required where a scheme has MX inputs.
        """
        from quantmint.eval.acceptance import AcceptancePolicy
        from quantmint.eval.gate import Policy
        from quantmint.eval.kl import KlPolicy
        from quantmint.eval.layout import LayoutPolicy

        promise = self.acceptance
        rate = self.accuracy.expected_flip_rate
        return Policy.for_suite(
            suite,
            margin=self.accuracy.margin,
            confidence=self.accuracy.confidence,
            power=self.accuracy.power,
            baseline_score=dict(self.accuracy.baseline_score),
            baseline_tolerance=self.accuracy.baseline_tolerance,
            canary=None if self.canary is None else self.canary.policy(schemes),
            min_ratio=self.throughput.min_ratio,
            launches=self.throughput.launches or _LAUNCHES,  # nothing is promised: no judgement reads it
            throughput_confidence=self.throughput.confidence,
            stop_early=self.throughput.stop_early,
            hardware=hardware,
            acceptance=None if promise is None else AcceptancePolicy(promise.margin, promise.confidence),
            long_kl=None if self.long is None else self.long.max_kl,
            kl=None if self.kl is None else KlPolicy(self.kl.max, self.kl.confidence),
            mx_scales=mx_scales if has_mx_activations(schemes) else None,
            layout=None if self.layout is None else LayoutPolicy(self.layout.max, self.layout.confidence),
            **({} if rate is None else {"expected_flip_rate": rate}),
        )


class Tracking(Section):
    """The tracking server that the figures of a run are logged to, besides the report."""

    mlflow: Address | None = Field(default=None, min_length=1)
    """Tracking URI of an MLflow server (null: none). A key for it is read from MLflow's own variables."""
    experiment: str = Field(default="quantmint", min_length=1)
    """Experiment that the runs are put into."""


class Signing(Section):
    """The signer of a release: a key, or an identity."""

    key: str | None = Field(default=None, min_length=1, pattern=PRINTABLE)
    """PEM file with an elliptic-curve private key, relative to this file; its passphrase is read from
    QUANTMINT_SIGNING_PASSPHRASE."""
    keyless: bool = False
    """Sign with the identity of the workload or person through Sigstore; needs a network."""

    @model_validator(mode="after")
    def _one_of_two(self) -> Signing:
        if (self.key is not None) == self.keyless:
            actual = "both" if self.keyless else "neither"
            raise wrong("a key or `keyless: true`", actual=actual)
        return self


class Licence(Section):
    """Terms that the source's own card lacks, or asks readers to agree to."""

    id: str | None = Field(default=None, pattern=r"^[a-z0-9][a-z0-9.-]*$")
    """Identifier of the licence as the Hub writes it: apache-2.0, llama3.3, ... (null: the source's)."""
    link: str | None = Field(default=None, pattern=r"^(https://[^\x00-\x20]+|LICENSE[A-Za-z0-9._-]*)$")
    """Address of the licence's text, or the name of its LICENSE file."""
    accepted: bool = False
    """true: you know and meet the source licence's conditions on derived models. Required where a licence has such
    conditions."""


class Publish(Destinations):
    """The destinations of a checkpoint that passed, and how it is released there."""

    to: Literal["release", "candidate"] = "release"
    """release: readers get it at once. candidate: it waits for `quantmint release promote`."""
    keep: int | None = Field(default=None, ge=1)
    """Releases that stay; older ones are removed after a publication, never the current one or a candidate (null: all
    stay)."""
    sign: Signing | None = None
    """Signature over all files (null: none)."""
    licence: Licence = Field(default_factory=Licence)
    """Terms of the source, where its card is silent."""


Cause = Literal["base", "dataset", "recipe", "toolchain", "serving"]
"""What can change between two releases of a recipe."""
CAUSES: tuple[Cause, ...] = get_args(Cause)


def _cron(expression: str) -> str:
    from quantmint.pipeline.base.times import fault_of

    fault = fault_of(expression)
    if fault is not None:
        raise wrong(f"a cron expression of five fields ({fault})")
    return expression


def _zone(name: str) -> str:
    from zoneinfo import ZoneInfo, available_timezones

    from quantmint.pipeline.base.errors import did_you_mean

    try:
        ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        near = did_you_mean(name, sorted(available_timezones()))
        raise wrong(f"a time zone of the IANA database, such as Europe/Paris{near}") from None
    return name


class Refresh(Section):
    """The schedule of checks whether the recipe is due, and the limits of `requantize` on it."""

    schedule: Annotated[str, AfterValidator(_cron)] | None = None
    """Cron expression of five fields (minute, hour, day of month, month, day of week), with Debian cron's meaning: 0 3
    * * 6 (null: only when somebody asks)."""
    timezone: Annotated[str, AfterValidator(_zone)] = "UTC"
    """Time zone of the expression, by its IANA name: Europe/Berlin."""
    triggers: tuple[Cause, ...] = Field(default=CAUSES, strict=False, min_length=1)
    """Causes that make the recipe due. base: a new commit of the model. dataset: of a calibration or evaluation set.
    recipe: the recipe itself. toolchain: quantmint or a library that shapes bytes or scores. serving: vLLM, its image
    or the launch plan."""
    priority: int = Field(default=0, ge=-100, le=100)
    """Order in which due recipes run: the highest first, then by name."""
    max_hours: float | None = Field(default=None, gt=0)
    """Hours that one attempt may take before it is ended (null: no limit)."""

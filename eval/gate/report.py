"""The verdict with all that led to it: the limits of a judgement, its findings, and how it differs from another one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from quantmint.eval.acceptance import Acceptance, AcceptancePolicy
from quantmint.eval.accuracy import Accuracy
from quantmint.eval.canary import Canary, CanaryPolicy
from quantmint.eval.history import EarlierVerdict
from quantmint.eval.kl import Kl, KlPolicy
from quantmint.eval.layout import LayoutComparison, LayoutPolicy
from quantmint.eval.long_context import LongReport
from quantmint.eval.measurements import UNKNOWN
from quantmint.eval.records import Record
from quantmint.eval.statistics.sequential import Look
from quantmint.eval.suites import Share, Suite
from quantmint.eval.throughput import Throughput
from quantmint.eval.verdict import Verdict

Confidence = Annotated[float, Field(ge=0.5, lt=1)]


_LATER: Final = ("stop_early", "acceptance", "long_kl", "kl", "layout", "mx_scales")
"""Fields of a policy that earlier records do not have."""


@dataclass(frozen=True, slots=True)
class Policy(Record):
    """The limits, all that a judgement needs beside the measurements.

    `margins` maps each gated task to the loss that is accepted: of a score as a fraction (0.01 is one point), of a
    perplexity relative to it; tasks that are not in it are shown only. `confidence` is that of the one-sided bounds
    over all looks together, `power` the chance that a lossless candidate is to have; `expected_flip_rate` stands in
    where no item flipped. `baseline_score` maps a task to the score (or perplexity) that the baseline is known to
    reach, give or take `baseline_tolerance` and its sampling error. `canary` is None where none is asked.

    `min_ratio` is the least output throughput relative to the baseline in every cell (None: shown only), shown by at
    least `launches` launches a side at `throughput_confidence`, on `hardware`: a name of the table of targets, and
    measured elsewhere the promise is neither kept nor broken (None: any will do). With `stop_early` the launches end
    at the first look that decides, and `launches` a side are the most (`eval.statistics.ranks.look_boundaries`).
    `acceptance` is the promise on speculative decoding (None: its acceptance length is shown only). `long_kl` is the
    largest KL in nats in each bucket of positions of long texts (None: shown only). `kl` and `layout` are None where
    nothing of that is promised, `mx_scales` where the recipe names no rounding.
    """

    margins: Mapping[str, Share]
    confidence: Confidence = 0.95
    power: Confidence = 0.8
    expected_flip_rate: Annotated[float, Field(gt=0, le=1)] = 0.04
    baseline_score: Mapping[str, Annotated[float, Field(ge=0)]] = field(default_factory=dict)
    baseline_tolerance: Share = 0.03
    canary: CanaryPolicy | None = field(default_factory=lambda: CanaryPolicy(min_agreement=0.7, max_kl=0.5))
    min_ratio: Annotated[float, Field(gt=0)] | None = None
    launches: Annotated[int, Field(ge=1)] = 1
    throughput_confidence: Confidence = 0.95
    hardware: str | None = None
    stop_early: bool = False
    acceptance: AcceptancePolicy | None = None
    long_kl: Annotated[float, Field(gt=0)] | None = None
    kl: KlPolicy | None = None
    layout: LayoutPolicy | None = None
    mx_scales: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a mapping of the fields, without unset ones that earlier records lack."""
        return {name: value for name, value in Record.to_json(self).items() if name not in _LATER or value}

    @classmethod
    def for_suite(cls, suite: Suite, *, margin: float, **limits: Any) -> Policy:
        """Return a recipe's policy for a suite: `margin` for each gated task without a margin of its own.

        `limits` are further fields by name. Without `expected_flip_rate` among them it is the largest that a gated task
        expects.
        """
        gated = [task for task in suite.tasks if task.gated]
        limits.setdefault("expected_flip_rate", max(task.expected_flip_rate for task in gated))
        return cls(margins={task.task: task.margin or margin for task in gated}, **limits)


JUDGEMENT: Final = 2
"""Version of the judgement, raised whenever the same measurements and limits may get another verdict or other figures.

A new wording of a reason or a headline is no new version: sentences are not compared. Version 2 stops by the canary's
figures themselves; version 1 stopped by the bounds of their intervals.
"""
SEQUENTIAL_JUDGEMENT: Final = 3
"""The same of launches that may end early, whose intervals and p-values version 2 took from the fixed test."""

Kind = Literal["validity", "accuracy", "canary", "kl", "layout", "long", "throughput", "structure", "acceptance"]
ANOMALOUS = "ANOMALOUS"
"""Label of a gain that quantization cannot explain."""


@dataclass(frozen=True, slots=True)
class Finding(Record):
    """The result of one check of a task, a cell or a side (`subject`); `label` names a special case."""

    kind: Kind
    subject: str
    verdict: Verdict
    reason: str
    label: str | None = None

    @classmethod
    def invalid(cls, subject: str, fault: str) -> Finding:
        """Return a validity finding with the verdict INVALID; `fault` says why the measurement must not be judged."""
        return cls("validity", subject, Verdict.INVALID, sentence(fault))


@dataclass(frozen=True, slots=True)
class Control(Record):
    """The A/A control: how many scores change when the baseline answers twice.

    Of `items` that the baseline answered twice, the score of `flips` changed. `rate` is flips / items; `low` and `high`
    bound it (Clopper and Pearson, two-sided).
    """

    items: int
    flips: int
    rate: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Headline(Record):
    """One claim of a guide about this kind of checkpoint.

    `promised` and `measured` are factors against the 16-bit baseline; `measured` and `kept` are None if nothing was
    measured. A guide's figure has two digits, so a measurement that rounds to it keeps it. With `upto` the guide gives
    an upper limit, which a smaller figure does not break: `kept` then only says whether this checkpoint reaches it.
    """

    name: str
    title: str
    promised: float
    measured: float | None
    unit: str
    kept: bool | None
    source: str
    upto: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GateReport(Record):
    """The result of a judgement: the verdict, every finding, the figures, and what they were measured on.

    `runtime` and `hardware` are part of the verdict: a figure belongs to what it was measured on. `hardware` is a name
    of the table of targets, `device` the accelerator's own name. `looks` maps a task to the looks up to the one that
    decided (none for a task that is shown only), `control` to how often the baseline disagrees with itself on it.
    `long` has figures of long texts by position, None without any. `history` are the earlier verdicts on this model, by
    their times; they change nothing here. `judgement` is the version of the judgement, which `eval.record` keeps beside
    the rest.
    """

    artefact: str
    verdict: Verdict
    runtime: str = "vllm"
    hardware: str = UNKNOWN
    device: str = ""
    findings: tuple[Finding, ...]
    accuracy: tuple[Accuracy, ...]
    looks: Mapping[str, tuple[Look, ...]] = field(default_factory=dict)
    control: Mapping[str, Control] = field(default_factory=dict)
    canary: Canary | None = None
    acceptance: Acceptance | None = None
    long: LongReport | None = None
    kl: Kl | None = None
    layout: LayoutComparison | None = None
    throughput: tuple[Throughput, ...]
    headlines: tuple[Headline, ...] = ()
    policy: Policy
    history: tuple[EarlierVerdict, ...] = ()
    judgement: int = field(default=JUDGEMENT, compare=False)

    def to_json(self) -> dict[str, Any]:
        """Return a mapping of the fields, without the version of the judgement.

        An empty history, what was not measured, and a cell's `reused` of 0 are left out too, as in earlier records.
        """
        optional = ("history", "acceptance", "long", "kl", "layout")
        left_out = ("judgement", *(name for name in optional if not getattr(self, name)))
        fields = {**Record.to_json(self), "policy": self.policy.to_json()}
        for cell in fields["throughput"]:
            if not cell["reused"]:  # nor of launches that were reused
                del cell["reused"]
        if self.long is None:
            left_out = (*left_out, "long")
        return {name: value for name, value in fields.items() if name not in left_out}

    @property
    def reasons(self) -> tuple[str, ...]:
        """Return the reasons of the findings whose verdict is the report's verdict."""
        return tuple(finding.reason for finding in self.findings if finding.verdict is self.verdict)

    @property
    def claims(self) -> tuple[Headline, ...]:
        """Return the headlines that apply to this hardware: no guide speaks of a CPU's throughput."""
        return tuple(row for row in self.headlines if (row.name, self.hardware) != ("throughput", "cpu"))

    @property
    def unmeasured_speed(self) -> str | None:
        """Return a sentence that throughput was not measured; None if it was."""
        if self.throughput:
            return None
        return f"Throughput was not measured{': nothing is promised of it' if self.policy.min_ratio is None else ''}."

    def verdict_of(self, kind: Kind, subject: str | None = None) -> Verdict | None:
        """Return the worst verdict of one kind of check, or of its `subject` alone; None without such a finding."""
        verdicts = [f.verdict for f in self.findings if f.kind == kind and subject in (None, f.subject)]
        return Verdict.combine(verdicts) if verdicts else None


def sentence(text: str) -> str:
    """Return the stripped text with a full stop at its end, unless it ends in ".", "!" or "?"."""
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else f"{text}."


def changes(recorded: GateReport, found: GateReport) -> tuple[str, ...]:
    """Return a sentence for each difference in verdict, limits or figures between two reports; empty if there is none.

    Reasons and headline texts are not compared, because each version writes its own: of a finding the kind, subject,
    verdict and label are compared, of a headline in both reports its factors. A record of this version of the judgement
    whose verdict does not follow from its own numbers was edited.
    """
    sentences = []
    if recorded.artefact != found.artefact:
        sentences.append(f"The artefact is {found.artefact}, the record says {recorded.artefact}.")
    if recorded.verdict is not found.verdict:
        sentences.append(f"The numbers lead to {found.verdict.value}, the record says {recorded.verdict.value}.")
    old, new = Counter(map(_outcome, recorded.findings)), Counter(map(_outcome, found.findings))
    sentences += [f"Only the record says: {_sentence(f)}" for f in recorded.findings if _outcome(f) in old - new]
    sentences += [f"The record does not say: {_sentence(f)}" for f in found.findings if _outcome(f) in new - old]
    before, after = _figures(recorded), _figures(found)
    differing = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    shared = {row.name: row for row in recorded.headlines}
    if any(_factors(shared[row.name]) != _factors(row) for row in found.headlines if row.name in shared):
        differing.append("headlines")
    if differing:
        sentences.append(f"Other figures than recorded: {', '.join(differing)}.")
    return tuple(sentences)


def _outcome(finding: Finding) -> tuple[Kind, str, Verdict, str | None]:
    return finding.kind, finding.subject, finding.verdict, finding.label


def _factors(row: Headline) -> tuple[float, float | None]:
    return row.promised, row.measured


def _figures(report: GateReport) -> dict[str, Any]:
    """Return the JSON fields of a report without artefact, verdict, findings and headlines."""
    texts = ("artefact", "verdict", "findings", "headlines")
    return {name: value for name, value in report.to_json().items() if name not in texts}


def _sentence(finding: Finding) -> str:
    return f"{finding.verdict.value}, {finding.kind}: {finding.reason}"

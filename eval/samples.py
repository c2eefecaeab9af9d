"""Scores per item, joined between two models."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, Literal

from quantmint.eval.errors import MeasurementError
from quantmint.eval.records import Record, checked, to_columns, to_rows

Kind = Literal["score", "perplexity"]
"""score: the mean over items counts. perplexity: exp(-sum of log likelihoods / sum of words) counts."""


@dataclass(frozen=True, slots=True)
class Sample(Record):
    """One scored item.

    `task` is the leaf task (a group such as mmlu has many), `doc_id` the item's number in it. The three hashes are
    the first 16 hexadecimal digits of the SHA-256 of the document, the prompt and the target. Of a perplexity task,
    `score` is the document's log likelihood in nats and `weight` its number of words. `cluster` is the hash of the
    passage that several items share ("": an item of its own), `look` the 0-based batch in which the item was asked.
    """

    task: str
    doc_id: int
    filter: str
    doc_hash: str
    prompt_hash: str
    target_hash: str
    score: float
    weight: float = 1.0
    cluster: str = ""
    look: int = 0

    @property
    def key(self) -> tuple[str, int, str]:
        """Return (leaf task, document number, filter), the item's identity in both runs."""
        return (self.task, self.doc_id, self.filter)


MOST_ITEMS = 250_000
"""Items that a set may have: MMLU has 14,042, and each takes a kilobyte of memory while it is read."""
_DEFAULTS: Mapping[str, Any] = {f.name: f.default for f in fields(Sample) if f.default is not MISSING}


@dataclass(frozen=True, slots=True)
class SampleSet(Record):
    """The samples of one task (or group) of a suite, by one metric, from one model.

    `planned` is the number of items that all `looks` together have, `len(samples)` where nothing stopped early.
    `settings` is how the items were asked (temperature, num_fewshot, chat_template, seed, lm_eval, tokenizer, limit);
    two sets are comparable only where theirs are equal.
    """

    task: str
    metric: str
    samples: tuple[Sample, ...]
    kind: Kind = "score"
    planned: int = 0  # 0, which no measurement plans, stands for len(samples)
    looks: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.planned:
            object.__setattr__(self, "planned", len(self.samples))

    @property
    def mean(self) -> float:
        """Return the reported score: the mean, or the perplexity per word. Raises `MeasurementError` without items."""
        if not self.samples:
            raise MeasurementError(f"{self.task}: no items")
        total = math.fsum(sample.score for sample in self.samples)
        if self.kind == "perplexity":
            return math.exp(-total / math.fsum(sample.weight for sample in self.samples))
        return total / len(self.samples)

    def on(self, other: SampleSet) -> SampleSet:
        """Return the samples of the items that `other` has too, as a set with one look, to be paired with it."""
        keys = {sample.key for sample in other.samples}
        common = tuple(replace(sample, look=0) for sample in self.samples if sample.key in keys)
        return replace(self, samples=common, planned=len(common), looks=1)

    def to_json(self) -> dict[str, Any]:
        """Return a mapping of the fields, with the samples as one plain list per field of `Sample`.

        A column whose values are all the field's default (no weights, no clusters, one look) is left out.
        """
        columns = to_columns(Sample, self.samples)
        for name, default in _DEFAULTS.items():
            if all(value == default for value in columns[name]):
                del columns[name]
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**plain, "settings": dict(self.settings), "samples": columns}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SampleSet:
        """Read back a mapping that `to_json` returned.

        Raises `MeasurementError` for columns that are missing, of unequal length or of a wrong type, for looks or item
        counts that contradict the plan, and for more than `MOST_ITEMS` items.
        """
        columns = data.get("samples")
        lists = columns.values() if isinstance(columns, Mapping) else ()
        longest = max((len(column) for column in lists if isinstance(column, list)), default=0)
        if longest > MOST_ITEMS:
            raise MeasurementError(f"not a SampleSet: {longest:,} items, expected at most {MOST_ITEMS:,}")
        samples = checked(cls, {**data, "samples": to_rows(columns)})
        items = len(samples.samples)
        if samples.planned < items or not all(0 <= sample.look < samples.looks for sample in samples.samples):
            raise MeasurementError(
                f"not a SampleSet: {items} of {samples.planned} planned items in {samples.looks} looks"
            )
        if samples.kind == "perplexity" and not all(sample.weight > 0 for sample in samples.samples):
            raise MeasurementError("not a SampleSet: a document without words")
        return samples


@dataclass(frozen=True, slots=True)
class Pairs:
    """The scores of both models on the same items, in the same order.

    `baseline`, `candidate`, `weights`, `clusters` and `looks` have one value per item; see `Sample`. An item that
    shares no passage is a cluster of its own. If the last three are left out, the items are independent, of weight 1,
    and asked in one look. Raises `MeasurementError` for sequences of unequal length.
    """

    task: str
    metric: str
    baseline: tuple[float, ...]
    candidate: tuple[float, ...]
    kind: Kind = "score"
    weights: tuple[float, ...] = ()
    clusters: tuple[str, ...] = ()
    looks: tuple[int, ...] = ()
    planned: int = 0

    def __post_init__(self) -> None:
        items = len(self.baseline)
        left_out: dict[str, Any] = {
            "weights": (1.0,) * items,
            "clusters": tuple(f"#{number}" for number in range(items)),
            "looks": (0,) * items,
            "planned": items,
        }
        for name, value in left_out.items():
            if not getattr(self, name):
                object.__setattr__(self, name, value)
        for name in ("candidate", "weights", "clusters", "looks"):
            if len(getattr(self, name)) != items:
                raise MeasurementError(f"{self.task}: {items} items, but {len(getattr(self, name))} {name}")


def pair(baseline: SampleSet, candidate: SampleSet) -> Pairs:
    """Join two runs on (task, doc_id, filter).

    A candidate that stopped early is compared on the looks that it was asked: each must be whole on both sides.
    Raises `MeasurementError` when an item is missing or repeated on a side, or when its document, prompt, target,
    words, passage or look differs, or when the sides were asked in different ways: scores on different questions
    cannot be compared.
    """
    same_measure(baseline, candidate)
    last = max((sample.look for sample in candidate.samples), default=0)
    by_key = _by_key(baseline, "baseline", last)
    right = _by_key(candidate, "candidate", last)
    for missing, side in ((by_key.keys() - right.keys(), "candidate"), (right.keys() - by_key.keys(), "baseline")):
        if missing:
            raise MeasurementError(
                f"{baseline.task}: {len(missing)} of {len(by_key.keys() | right.keys())} items are missing "
                f"from the {side}, first {_names(missing)}"
            )
    for what, noun in _SAME.items():
        other = [key for key in by_key if getattr(by_key[key], what) != getattr(right[key], what)]
        if other:
            raise MeasurementError(
                f"{baseline.task}: the {noun} differs in {len(other)} of {len(by_key)} items, first {_names(other)}; "
                "both sides must see the same questions in the same template"
            )
    if not by_key:
        raise MeasurementError(f"{baseline.task}: no items")
    if (baseline.planned, baseline.looks) != (candidate.planned, candidate.looks):
        raise MeasurementError(
            f"{baseline.task}: the baseline has {baseline.planned} items in {baseline.looks} looks, "
            f"the candidate {candidate.planned} in {candidate.looks}"
        )
    keys = sorted(by_key)
    if last == candidate.looks - 1 and len(keys) != candidate.planned:
        raise MeasurementError(f"{baseline.task}: all looks were asked, but {len(keys)} of {candidate.planned} items")
    return Pairs(
        baseline.task,
        baseline.metric,
        tuple(by_key[key].score for key in keys),
        tuple(right[key].score for key in keys),
        baseline.kind,
        tuple(by_key[key].weight for key in keys),
        tuple(by_key[key].cluster or "#".join(map(str, key)) for key in keys),
        tuple(by_key[key].look for key in keys),
        baseline.planned,
    )


_SAME: Mapping[str, str] = {
    "doc_hash": "document",
    "prompt_hash": "prompt",
    "target_hash": "target",
    "weight": "number of words",
    "cluster": "passage",
    "look": "look",
}


def same_measure(baseline: SampleSet, candidate: SampleSet) -> None:
    """Raise `MeasurementError` where the sets are of different tasks, or were asked in different ways."""
    if (baseline.task, baseline.metric, baseline.kind) != (candidate.task, candidate.metric, candidate.kind):
        raise MeasurementError(
            f"{baseline.task} by {baseline.metric} cannot be paired with {candidate.task} by {candidate.metric}"
        )
    for name in sorted(baseline.settings.keys() | candidate.settings.keys()):
        ours, theirs = baseline.settings.get(name), candidate.settings.get(name)
        if ours != theirs:
            raise MeasurementError(
                f"{baseline.task}: asked with {name} {ours!r} of the baseline, {theirs!r} of the candidate"
            )


def _by_key(samples: SampleSet, side: str, last: int) -> dict[tuple[str, int, str], Sample]:
    by_key = {sample.key: sample for sample in samples.samples}
    repeated = len(samples.samples) - len(by_key)
    if repeated:
        raise MeasurementError(f"{samples.task}: {repeated} items appear more than once in the {side}")
    return {key: sample for key, sample in by_key.items() if sample.look <= last}


def _names(keys: Iterable[tuple[str, int, str]]) -> str:
    return ", ".join(f"{task}#{doc_id}" for task, doc_id, _ in sorted(keys)[:3])

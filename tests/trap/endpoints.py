"""What may stop a checkpoint: the inspection against its source, the comparison of the servers, canary and KL.

Behaviour is that of the reference runtime in this process, on texts that the source knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from quantmint.eval import canary, kl, prompts
from quantmint.eval.canary import Answer, CanaryAnswers
from quantmint.eval.gate import Policy, judge
from quantmint.eval.kl import Divergences, KlPolicy, TextDivergence
from quantmint.eval.measurements import Measurements, Server, StructureCheck
from quantmint.eval.verdict import Verdict
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.schemes import scheme
from quantmint.pipeline.quantize.digest import template_digest, tokenizer_digest
from quantmint.pipeline.quantize.formats.checkpoint import open_checkpoint
from quantmint.pipeline.quantize.inspection.findings import Inspection
from quantmint.pipeline.quantize.inspection.inspect import Expectations, inspect_checkpoint
from quantmint.pipeline.quantize.model.reader import read_structure
from quantmint.pipeline.recipe.sections import CanaryGate
from tests.trap.checkpoints import SMOLLM2, Sound

_TEXTS = {True: (48, 500), False: (8, 200)}
"""Texts that the embedded model (True) and others read, and the most tokens of each."""
_PROMISES = {False: 0.05, True: 0.5}
_PROMISE_SMOLLM2 = 0.1
"""Largest divergence that is promised in nats: in eight and six bits, and in four; of SmolLM2 in eight bits."""
STATIC_SCALES = (".k_scale", ".v_scale", ".input_scale", ".output_scale")


@dataclass(frozen=True)
class Behaviour:
    """What one side says: its canary's answers, and log probabilities [places, vocabulary] of each text."""

    answers: CanaryAnswers
    logprobs: tuple[Any, ...]


@dataclass(frozen=True)
class Outcome:
    """The verdict and the reasons of each endpoint that looked at a checkpoint, by the endpoint's name."""

    verdicts: Mapping[str, Verdict]
    reasons: Mapping[str, tuple[str, ...]]

    @property
    def stoppers(self) -> tuple[str, ...]:
        """The endpoints whose verdict is no PASS."""
        return tuple(name for name, verdict in self.verdicts.items() if verdict is not Verdict.PASS)


def calibrated_scales(checkpoint: Path) -> dict[str, float]:
    """Return the static scales of a checkpoint by tensor name: of a sound one they are those that were calibrated."""
    from safetensors import safe_open

    scales: dict[str, float] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            names = [name for name in file.keys() if name.endswith(STATIC_SCALES)]  # noqa: SIM118 - no mapping
            scales |= {name: float(value) for name in names if (value := file.get_tensor(name)).numel() == 1}
    return scales


def inspection(checkpoint: Path, source: Path, scales: Mapping[str, float]) -> Inspection:
    """Inspect a checkpoint against its source, and against the scales that its calibration gave."""
    made, original = open_checkpoint(checkpoint), open_checkpoint(source)
    return inspect_checkpoint(
        made,
        read_structure(checkpoint, made.tensors),
        source=original,
        source_structure=read_structure(source, original.tensors),
        expected=Expectations(scales),
    )


@lru_cache(maxsize=3)  # log probabilities of a large vocabulary: the source's, and those of the last checkpoints
def behaviour(folder: Path, tokenizer: Path) -> Behaviour:
    """Return what the model in ``folder`` says of some texts, in tokens by the tokenizer in ``tokenizer``."""
    import torch
    from transformers import AutoTokenizer

    from quantmint.pipeline.serving.reference.lm import logits_of
    from quantmint.pipeline.serving.reference.model import load

    loaded, reader = load(folder, "cpu"), AutoTokenizer.from_pretrained(tokenizer)
    answers: list[Answer] = []
    rows: list[Any] = []
    embedded = tokenizer.parent.name == "tiny"
    count, length = _TEXTS[embedded]
    for prompt in prompts.load("tiny" if embedded else "general")[:count]:
        ids = torch.tensor(reader(prompt.text)["input_ids"][:length])
        logprobs = logits_of(loaded, ids[None])[0, :-1].float().log_softmax(-1)
        actual = logprobs.gather(1, ids[1:, None])[:, 0].tolist()
        values, tokens = (tuple(map(tuple, top.tolist())) for top in logprobs.topk(20))
        finite = bool(logprobs.isfinite().all())
        listed = (tuple(actual), tokens, values) if finite else ((), (), ())
        answers.append(Answer(prompt.name, tuple(ids.tolist()), *listed))
        rows.append(logprobs[list(kl.places(len(ids)))])
    return Behaviour(CanaryAnswers(tuple(answers)), tuple(rows))


def divergences(baseline: Behaviour, candidate: Behaviour) -> Divergences:
    """Return the exact divergences of two sides, text by text."""
    texts = []
    for answer, first, second in zip(baseline.answers.answers, baseline.logprobs, candidate.logprobs, strict=True):
        first, second = first.double(), second.double()
        total = float((first.exp() * (first - second)).sum())
        texts.append(TextDivergence(answer.prompt, len(first), total if total == total else None))
    return Divergences(True, tuple(texts))


def outcome(
    base: Sound, checkpoint: Path, source: Path, scales: Mapping[str, float], mx_scales: str | None = None
) -> Outcome:
    """Return what the inspection says of a checkpoint, and the gate of its servers, its canary and its divergence.

    The target rounds the scales of MX inputs as ``mx_scales`` says (None: that is not named); here they go to even.
    """
    found = inspection(checkpoint, source, scales)
    structure = StructureCheck(Verdict.PASS if found.passed else Verdict.FAIL, tuple(found.summary().splitlines()))
    verdicts = {"inspection": structure.verdict}
    reasons = {"inspection": structure.reasons if not found.passed else ()}
    measured = Measurements("trap", structure, _server(source), _server(checkpoint))
    policy = Policy({}, canary=None, mx_scales=mx_scales)
    if base.is_trained and not _unreadable(checkpoint):
        few_bits = scheme(base.scheme).bits_per_weight < 5
        before, after = behaviour(source, source), behaviour(checkpoint, source)
        measured = replace(
            measured, canary=canary.compare(before.answers, after.answers), kl=divergences(before, after)
        )
        promise = _PROMISE_SMOLLM2 if base.source == SMOLLM2 else _PROMISES[few_bits]
        policy = replace(policy, canary=CanaryGate().policy([base.scheme]), kl=KlPolicy(promise))
    for kind, verdict, texts in _judged(measured, policy):
        verdicts[kind], reasons[kind] = verdict, texts
    return Outcome(verdicts, reasons)


def _judged(measured: Measurements, policy: Policy) -> Iterator[tuple[str, Verdict, tuple[str, ...]]]:
    report = judge(measured, policy)
    yield "servers", report.verdict_of("validity") or Verdict.PASS, _reasons(report, "validity")
    for kind in ("canary", "kl"):
        if (verdict := report.verdict_of(kind)) is not None:  # type: ignore[arg-type]
            yield kind, verdict, _reasons(report, kind)


def _reasons(report: Any, kind: str) -> tuple[str, ...]:
    return tuple(f.reason for f in report.findings if f.kind == kind and f.verdict is not Verdict.PASS)


def _unreadable(checkpoint: Path) -> bool:
    """Return whether the reference runtime refuses a checkpoint, which then has no behaviour."""
    from quantmint.pipeline.serving.reference.model import load

    try:
        load(checkpoint, "cpu")
    except UserError:
        return True
    return False


def _server(folder: Path) -> Server:
    return Server(
        "1", "CPU", (), {}, template=template_digest(folder), tokenizer=tokenizer_digest(folder), mx_scales="even"
    )

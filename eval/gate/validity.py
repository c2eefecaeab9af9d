"""Whether both sides were measured alike: what must hold before a difference means anything.

Every check here has voided real comparisons: another version of the server, scales that defaulted to 1.0, a KV cache in
another type than asked for, a chat template on one side only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import NormalDist

from eval import servers
from eval.accuracy import margin_in_units
from eval.bench import Side
from eval.gate.finding import Finding
from eval.gate.policy import Policy
from eval.measurements import Measurements
from eval.samples import SampleSet
from eval.servers import Server

_SIDES: tuple[Side, ...] = ("baseline", "candidate")


def check(measurements: Measurements, policy: Policy) -> Iterator[Finding]:
    """Everything that voids the measurements as a whole, or a task's. Pairing and launches have checks of their own."""
    for fault in measurements.faults:
        yield Finding.invalid("measurement", fault)
    for difference in servers.differences(measurements.baseline, measurements.candidate):
        yield Finding.invalid("servers", difference)
    for side in _SIDES:
        yield from _server(side, measurements.baseline if side == "baseline" else measurements.candidate)
    for task, (baseline, candidate) in measurements.samples.items():
        for side, samples in zip(_SIDES, (baseline, candidate), strict=True):
            yield from _asked(task, side, samples)
        yield from _plausible(task, baseline, policy)


def kv_cache_fault(promised: str, effective: str | None) -> str | None:
    """What is wrong with the type of a KV cache that a log names; None where it is the promised one, or not said."""
    if effective is None or _kind_of_cache(promised) == _kind_of_cache(effective):
        return None
    return f"its KV cache is {effective}, but the launch asked for {promised}"


def _server(side: Side, server: Server) -> Iterator[Finding]:
    for line in server.faults:
        yield Finding.invalid(side, f"The {side}'s server log says: {line}")
    fault = kv_cache_fault(server.promised_kv_cache, server.kv_cache_dtype)
    if fault is not None:
        yield Finding.invalid(side, f"The {side} was not served as planned: {fault}")


def _asked(task: str, side: Side, samples: SampleSet) -> Iterator[Finding]:
    """Sampling adds noise that belongs to no checkpoint; a baseline that stopped early has nothing to stop for."""
    temperature = samples.settings.get("temperature")
    if temperature not in (None, 0):
        yield Finding.invalid(task, f"The {side} answered {task} at temperature {temperature}, expected 0")
    if side == "baseline" and len(samples.samples) != samples.planned:
        yield Finding.invalid(
            task, f"The baseline has {len(samples.samples)} of the {samples.planned} items of {task} that were planned"
        )


def _plausible(task: str, baseline: SampleSet, policy: Policy) -> Iterator[Finding]:
    """The whole baseline against the score that it is known to reach, in the units of the task's difference."""
    known = policy.baseline_score.get(task)
    if known is None or not baseline.samples:
        return
    perplexity = baseline.kind == "perplexity"
    found = baseline.mean
    distance = abs(math.log(found / known)) if perplexity and known > 0 else abs(found - known)
    error = NormalDist().inv_cdf((1 + policy.confidence) / 2) * standard_error(baseline)
    if distance <= margin_in_units(baseline.kind, policy.baseline_tolerance) + error:
        return
    reaches = f"{found:.4g}, not the {known:.4g}" if perplexity else f"{found:.2%}, not the {known:.2%}"
    allowed = f"{policy.baseline_tolerance:.1%} and {error:.1%} of sampling error are allowed"
    reason = f"The baseline has {reaches} on {task} that this model is known to reach ({allowed})"
    yield Finding.invalid(task, f"{reason}, so something other than quantization is wrong")


def standard_error(samples: SampleSet) -> float:
    """Standard error of `SampleSet.mean` (of a perplexity: of its logarithm), over passages that items share.

    The linearised ratio of sums (Cochran, Sampling Techniques, 3rd ed., section 6.4); 0 below two passages.
    """
    sums: dict[object, tuple[float, float]] = {}
    for sample in samples.samples:
        weight = sample.weight if samples.kind == "perplexity" else 1.0
        score, total = sums.get(sample.cluster or sample.key, (0.0, 0.0))
        sums[sample.cluster or sample.key] = (score + sample.score, total + weight)
    return _ratio_error(list(sums.values()))


def _ratio_error(sums: Sequence[tuple[float, float]]) -> float:
    count, total = len(sums), math.fsum(weight for _, weight in sums)
    if count < 2:
        return 0.0
    mean = math.fsum(score for score, _ in sums) / total
    squares = math.fsum((score - mean * weight) ** 2 for score, weight in sums)
    return math.sqrt(count / (count - 1) * squares) / total


def _kind_of_cache(dtype: str) -> str:
    """vLLM's names of what is the same: fp8 is E4M3, and auto is the model's own 16 bit."""
    name = dtype.lower().removeprefix("torch.")
    if name in ("auto", "bfloat16", "float16", "half"):
        return "16 bit"
    return "fp8_e4m3" if name in ("fp8", "fp8_e4m3", "float8_e4m3fn", "float8_e4m3fnuz") else name

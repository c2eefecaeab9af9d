"""Whether both sides were measured alike: what must hold before a difference means anything.

Every check here has voided real comparisons: another version of the server, scales that defaulted to 1.0, a KV cache in
another type than asked for, a chat template on one side only.

**Clocks.** A kernel that draws more power runs at a lower clock under the same cap. That is the checkpoint's own speed,
so a clock that differs between the sides is no fault, as long as each side's is the same in all its launches. What
changes between launches of one side is the machine: another tenant, a fan, a cap that somebody set. A throttle for heat
or power supply voids a launch whatever its clock. A drift of both sides together needs no check of its own: it shows as
a change within each side, and the order ABBA BAAB balances what is too small to be seen. A CPU's clock follows its
temperature and everything else that runs, at all times: for a CPU that is the speed that it has, and the launches'
spread tells of it.

**Steady state.** The load generator is one thread, and so is an API server. Where one is busy all the time, it sets the
pace, and two servers of different speed look alike. An API server that falls behind also hands out several tokens at a
time: what arrived in the best second is then less than the mean of tokens that were counted. A load of few prompts for
each that is in flight is mostly the filling and emptying of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from statistics import NormalDist, median

from quantmint.eval.accuracy import margin_in_units
from quantmint.eval.gate.report import Finding, Policy
from quantmint.eval.measurements import (
    CellResult,
    Launch,
    Measurements,
    Server,
    Side,
    differences,
    order,
    reusable,
    reuse_order,
)
from quantmint.eval.samples import SampleSet
from quantmint.eval.statistics.means import are_alike
from quantmint.eval.statistics.paired import ratio
from quantmint.eval.workloads import WAVES

CLOCK_TOLERANCE = 0.05
"""Relative: what clocks of one GPU differ by from launch to launch is below this, what a throttle takes is above."""

AGREEMENT_ALPHA = 0.05
"""How often reused launches are made anew although the machine has not changed."""

CLIENT_LIMIT = 0.95
"""Share of one core from which on the load generator has no time to spare."""

LOOP_LIMIT = 0.9
"""The same of an API server over a whole cell: others hold its interpreter's lock now and then."""

GROUPED = frozenset({"--stream-interval", "--speculative-config"})

CPU = "cpu"
"""The name of a CPU in the table of targets."""

# Whose pace one core may set, from which share of it on, and what was measured then.
_ALONE = (
    ("client", CLIENT_LIMIT, "The load generator used", "the client was measured"),
    (
        "server",
        LOOP_LIMIT,
        "The API server used",
        "making text was measured, and not the accelerators (`serve: {arguments: [--api-server-count, 4]}` shares "
        "that work)",
    ),
)
_SIDES: tuple[Side, ...] = ("baseline", "candidate")


def check(measurements: Measurements, policy: Policy) -> Iterator[Finding]:
    """Yield a finding for each fault that voids all measurements or those of a task.

    The pairing of samples and the launches are checked elsewhere (`eval.samples.pair`, `check_launches`).
    """
    for fault in measurements.faults:
        yield Finding.invalid("measurement", fault)
    for difference in differences(measurements.baseline, measurements.candidate):
        yield Finding.invalid("servers", difference)
    rounded = measurements.candidate.mx_scales
    if policy.mx_scales is not None and rounded not in (None, policy.mx_scales):
        reason = f"The candidate's inputs were rounded with MX scales to {rounded!r}, the target rounds to"
        yield Finding.invalid("rounding", f"{reason} {policy.mx_scales!r}: the proof is of other arithmetic")
    for side in _SIDES:
        yield from _server(side, measurements.baseline if side == "baseline" else measurements.candidate)
    for task, (baseline, candidate) in measurements.samples.items():
        for side, samples in zip(_SIDES, (baseline, candidate), strict=True):
            yield from _asked(task, side, samples)
        yield from _plausible(task, baseline, policy)
        if task in policy.margins and baseline.kind == "score" and baseline.samples:
            yield from _shows(task, baseline, policy, measurements.chance.get(task, 0.0))


def kv_cache_fault(promised: str, effective: str | None) -> str | None:
    """Return how the KV cache's type in a log differs from the promised one; None where it agrees or is not logged."""
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
    """Yield a finding where answers were sampled at a temperature, or the baseline did not answer all items."""
    temperature = samples.settings.get("temperature")
    if temperature not in (None, 0):
        yield Finding.invalid(task, f"The {side} answered {task} at temperature {temperature}, expected 0")
    if side == "baseline" and len(samples.samples) != samples.planned:
        yield Finding.invalid(
            task, f"The baseline has {len(samples.samples)} of the {samples.planned} items of {task} that were planned"
        )


def _plausible(task: str, baseline: SampleSet, policy: Policy) -> Iterator[Finding]:
    """Yield a finding if the baseline misses the score that the policy says it reaches.

    The tolerance is the policy's plus the baseline's sampling error at the policy's confidence.
    """
    expected_score = policy.baseline_score.get(task)
    if expected_score is None or not baseline.samples:
        return
    perplexity = baseline.kind == "perplexity"
    score = baseline.mean
    distance = (
        abs(math.log(score / expected_score)) if perplexity and expected_score > 0 else abs(score - expected_score)
    )
    error = NormalDist().inv_cdf((1 + policy.confidence) / 2) * standard_error(baseline)
    if distance <= margin_in_units(baseline.kind, policy.baseline_tolerance) + error:
        return
    reaches = (
        f"{score:.4g}, not the {expected_score:.4g}" if perplexity else f"{score:.2%}, not the {expected_score:.2%}"
    )
    allowed = f"{policy.baseline_tolerance:.1%} and {error:.1%} of sampling error are allowed"
    reason = f"The baseline has {reaches} on {task} that this model is known to reach ({allowed})"
    yield Finding.invalid(task, f"{reason}, so something other than quantization is wrong")


def _shows(task: str, baseline: SampleSet, policy: Policy, chance: float) -> Iterator[Finding]:
    """Yield a finding if the baseline's score is too close to `chance`, the score that guessing reaches.

    Its lower bound must be above chance, and the score itself above chance by more than the margin: a baseline that
    guesses has nothing to lose, and a candidate that knows nothing would be within the margin too.
    """
    score, margin = baseline.mean, policy.margins[task]
    spread = max(standard_error(baseline), math.sqrt(chance * (1 - chance) / len(baseline.samples)))
    lower = score - NormalDist().inv_cdf(policy.confidence) * spread
    if lower > chance and score - chance > margin:
        return
    guessed = f"guessing reaches {chance:.2%}" if chance else "knowing nothing reaches 0"
    reason = f"The baseline has {score:.2%} on {task} (above {max(lower, 0.0):.2%}), where {guessed}"
    yield Finding.invalid(task, f"{reason}: so little shows no loss of {margin:.2%}, whatever the candidate scores")


def standard_error(samples: SampleSet) -> float:
    """Return the standard error of `SampleSet.mean`, of a perplexity that of its logarithm, clustered by passage.

    Returns 0 below two passages; an item without a passage counts as one.
    """
    import numpy as np

    sums: dict[object, tuple[float, float]] = {}
    for sample in samples.samples:
        weight = sample.weight if samples.kind == "perplexity" else 1.0
        score, total = sums.get(sample.cluster or sample.key, (0.0, 0.0))
        sums[sample.cluster or sample.key] = (score + sample.score, total + weight)
    if len(sums) < 2:
        return 0.0
    scores, weights = np.array(list(sums.values())).T
    return ratio(scores, weights).standard_error


def _kind_of_cache(dtype: str) -> str:
    """Return one name for the names that vLLM has for a type: fp8 is E4M3, and auto is the model's own 16 bit."""
    name = dtype.lower().removeprefix("torch.")
    if name in ("auto", "bfloat16", "float16", "half"):
        return "16 bit"
    return "fp8_e4m3" if name in ("fp8", "fp8_e4m3", "float8_e4m3fn", "float8_e4m3fnuz") else name


def check_launches(measurements: Measurements) -> Iterator[Finding]:
    """Yield a finding for each fault that voids the launches; none without launches."""
    launches = sorted(measurements.launches, key=lambda launch: launch.number)
    if not launches:
        return
    yield from _series(launches)
    yield from _reused(launches, measurements.candidate.hardware)
    yield from _results(launches)
    for launch in launches:
        server = measurements.baseline if launch.side == "baseline" else measurements.candidate
        faults = [*launch.faults, kv_cache_fault(server.promised_kv_cache, launch.kv_cache_dtype)]
        sentences = [f": {fault}" for fault in filter(None, faults)]
        if launch.device not in (None, server.device):
            sentences.append(f" ran on {launch.device}, where the {launch.side} was served on {server.device}")
        for fault in sentences:
            yield Finding.invalid(launch.side, f"Launch {launch.number} of the {launch.side}{fault}")
    for subject, limit, usage, measured in _ALONE:
        shares = [getattr(launch, f"{subject}_cpu") or 0.0 for launch in launches]
        if busy := [launch for launch, share in zip(launches, shares, strict=True) if share > limit]:
            reason = f"{usage} {max(shares):.0%} of its core in {_launches(busy)}: {measured}"
            yield Finding.invalid(subject, reason)
    yield from _steady(launches, measurements)
    if measurements.candidate.hardware != CPU:
        yield from _clocks(launches)
    yield from _backends(launches)


def _series(launches: Sequence[Launch]) -> Iterator[Finding]:
    """Yield a finding where launches are missing, or not in the order that cancels a drift of the machine."""
    numbers = [launch.number for launch in launches]
    planned = _planned_order(launches)
    if numbers != list(range(len(planned))):
        yield Finding.invalid("launches", f"Launches are missing or repeated: found the numbers {_list(numbers)}")
    elif tuple(launch.side for launch in launches) != planned:
        order = "".join("AB"[launch.side == "candidate"] for launch in launches)
        expected = "".join("AB"[side == "candidate"] for side in planned)
        yield Finding.invalid(
            "launches", f"The launches were made in the order {order}, expected {expected} (A is the baseline)"
        )


def _planned_order(launches: Sequence[Launch]) -> tuple[Side, ...]:
    """Return the sides in the order that the series should have: reused launches first, then as `reuse_order` plans it.

    A series whose reused launches were dropped because they disagreed ends with the second end of `reuse_order`.
    """
    count = (len(launches) + 1) // 2
    start, agreed, disagreed = reuse_order(count)
    if any(launch.reused for launch in launches):
        return (*_SIDES[:1] * reusable(count), *start, *agreed)
    anew = (*start, *disagreed)
    return anew if reusable(count) and tuple(launch.side for launch in launches) == anew else order(count)


def _reused(launches: Sequence[Launch], hardware: str) -> Iterator[Finding]:
    """Yield a finding for each fault in the reuse of the baseline's launches of an earlier run.

    The reused launches must be the first of the series, as many as `reusable` says, and must agree with the fresh ones
    of the baseline (`disagreement`).
    """
    reused = [launch for launch in launches if launch.reused]
    if not reused:
        return
    count = reusable((len(launches) + 1) // 2)
    if [launch.number for launch in reused] != list(range(count)):
        numbers = _list([launch.number for launch in reused])
        yield Finding.invalid("launches", f"Launches {numbers} are reused, expected the first {count} at most")
    fresh = [launch for launch in launches if launch.side == "baseline" and not launch.reused]
    if (fault := disagreement(reused, fresh, hardware)) is not None:
        yield Finding.invalid("baseline", f"The reused launches disagree with the fresh ones: {fault}")


def is_sound(launch: Launch, argv: Sequence[str]) -> bool:
    """Return whether a launch of a server with this command line would void no series by itself."""
    limits = {subject: limit for subject, limit, *_ in _ALONE}
    shares = {"client": launch.client_cpu or 0.0, "server": launch.server_cpu or 0.0}
    cells = launch.cells.values()
    late = not GROUPED & set(argv) and any(map(_behind, cells))
    busy = any(shares[subject] > limit for subject, limit in limits.items())
    return not (launch.faults or launch.machine.throttled or busy or late or any(cell.failed for cell in cells))


def disagreement(reused: Sequence[Launch], fresh: Sequence[Launch], hardware: str) -> str | None:
    """Return a clause on how reused launches of a baseline differ from fresh ones; None if they agree.

    Device, attention backend and type of the KV cache must be the same. Every cell must be in all launches, and
    Student's test of its throughput, which errs at `AGREEMENT_ALPHA` over all cells together, must see no difference.
    The clocks must lie within `CLOCK_TOLERANCE`, unless `hardware` is a CPU.
    """
    for field, noun in (
        ("device", "device"),
        ("attention_backend", "attention backend"),
        ("kv_cache_dtype", "type of the KV cache"),
    ):
        before, now = ({getattr(launch, field) for launch in launches} for launches in (reused, fresh))
        if before != now:
            return f"the {noun} was {_values(before)} and is {_values(now)}"
    if hardware != CPU and (changed := _clock_change((*reused, *fresh))) is not None:
        return f"the clock changed {changed}"
    cells = fresh[0].cells
    for name in cells:
        if any(name not in launch.cells for launch in (*reused, *fresh)):
            return f"{name} was not measured in all of them"
        before_speed, speed = (
            [launch.cells[name].output_throughput for launch in launches] for launches in (reused, fresh)
        )
        if min(*before_speed, *speed) <= 0 or not are_alike(before_speed, speed, AGREEMENT_ALPHA / len(cells)):
            return f"{name} had {median(before_speed):,.1f} tokens/s and has {median(speed):,.1f}"
    return None


def _values(values: Collection[str | None]) -> str:
    return " or ".join(sorted("unknown" if value is None else value for value in values))


def _results(launches: Sequence[Launch]) -> Iterator[Finding]:
    cells = dict.fromkeys(name for launch in launches for name in launch.cells)
    for cell in cells:
        without = [launch.number for launch in launches if cell not in launch.cells]
        if without:
            yield Finding.invalid(cell, f"Launches without a result of {cell}: {_list(without)}")
        failed = sum(launch.cells[cell].failed for launch in launches if cell in launch.cells)
        if failed:
            yield Finding.invalid(cell, f"{failed} requests of {cell} failed, so that the load was not the planned one")


def _steady(launches: Sequence[Launch], measurements: Measurements) -> Iterator[Finding]:
    # By design, several tokens arrive at a time.
    grouped = any(GROUPED & set(server.argv) for server in (measurements.baseline, measurements.candidate))
    for name in dict.fromkeys(name for launch in launches for name in launch.cells):
        with_it = [launch for launch in launches if name in launch.cells]
        late = [launch for launch in with_it if not grouped and _behind(launch.cells[name])]
        if late:
            why = f"The best second of {name} was below half of its mean in {_launches(late)}"
            yield Finding.invalid(name, f"{why}: answers came late, or without text")
        few = [launch for launch in with_it if not _steady_load(launch.cells[name])]
        if few:
            cell = few[0].cells[name]
            why = f"{cell.completed} prompts for {cell.concurrency} in flight are mostly filling and emptying a batch"
            yield Finding.invalid(name, f"{why}: {WAVES} for each are a steady state")


def _steady_load(cell: CellResult) -> bool:
    return cell.request_rate is not None or cell.completed >= WAVES * (cell.concurrency or 0)


def _behind(cell: CellResult) -> bool:
    """Return whether the API server fell behind: pieces of answers had more than two tokens each on average.

    vLLM's best second counts pieces, its mean throughput counts tokens. A server on most of a core sometimes sends two
    tokens of a request as one piece, so up to two are allowed. A second that was begun counts as a whole one.
    """
    tokens = cell.output_throughput * cell.duration
    return (
        cell.peak_output_throughput is not None and 2 * cell.peak_output_throughput * math.ceil(cell.duration) < tokens
    )


def _clocks(launches: Sequence[Launch]) -> Iterator[Finding]:
    throttled = [launch for launch in launches if launch.machine.throttled]
    if throttled:
        reasons = ", ".join(dict.fromkeys(reason for launch in throttled for reason in launch.machine.throttled))
        yield Finding.invalid("machine", f"The machine was slowed down in {_launches(throttled)}: {reasons}")
    for side in _SIDES:
        changed = _clock_change([launch for launch in launches if launch.side == side])
        if changed is not None:
            yield Finding.invalid(side, f"The clock changed between launches of the {side}, {changed}")


def _clock_change(launches: Sequence[Launch]) -> str | None:
    """Return a phrase with lowest and highest clock if they differ by more than `CLOCK_TOLERANCE`, else None."""
    clocks = [launch.machine.clock_mhz for launch in launches if launch.machine.clock_mhz is not None]
    if not clocks or max(clocks) - min(clocks) <= CLOCK_TOLERANCE * median(clocks):
        return None
    return f"from {min(clocks):,.0f} to {max(clocks):,.0f} MHz"


def _backends(launches: Sequence[Launch]) -> Iterator[Finding]:
    """Yield a finding where a side ran on several attention backends; between the sides they may differ."""
    for side in _SIDES:
        names = [launch.attention_backend for launch in launches if launch.side == side]
        backends = dict.fromkeys(backend for backend in names if backend is not None)
        if len(backends) > 1:
            yield Finding.invalid(side, f"The {side} ran on several attention backends: {', '.join(backends)}")


def _launches(launches: Sequence[Launch]) -> str:
    noun = "launch" if len(launches) == 1 else "launches"
    return f"{noun} {_list([launch.number for launch in launches])}"


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))

"""An 8B model and its FP8 checkpoint as a run on an MI300X would have measured them; every figure is made up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from quantmint.eval import long_context
from quantmint.eval.acceptance import AcceptancePairs, AcceptancePolicy, PromptDrafts
from quantmint.eval.canary import Canary
from quantmint.eval.gate import Policy, judge
from quantmint.eval.kl import Divergences, KlPolicy, TextDivergence
from quantmint.eval.layout import LayoutMeasurement, LayoutPolicy
from quantmint.eval.long_context import BucketDivergence, LongDivergence
from quantmint.eval.measurements import CellResult, Launch, MachineState, Measurements, Server, StructureCheck, order
from quantmint.eval.reasoning import COMPLETE, RIGHT, UNREPEATED
from quantmint.eval.report.model import Flip, KvScale, Report, ShownLayerError, ShownStage
from quantmint.eval.samples import Sample, SampleSet
from quantmint.eval.statistics.sequential import plan_looks
from quantmint.eval.tool_calls import EXACT, VALID
from quantmint.eval.verdict import Verdict
from tests.eval.measured import digest

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CELLS = {"in1024-out512-c8": (8, 905.0), "in1024-out512-c32": (32, 3010.0), "in1024-out512-c128": (128, 7420.0)}


def samples(
    task: str,
    scores: Sequence[float] | np.ndarray,
    metric: str,
    *,
    looks: int = 4,
    until: int | None = None,
    passage: int = 1,
    words: Sequence[int] | None = None,
) -> SampleSet:
    """Items in looks as an evaluation would plan them, of which those up to look ``until`` were asked."""
    ends = plan_looks(len(scores), looks)
    found = []
    for number, score in enumerate(scores):
        look = next(index for index, end in enumerate(ends) if number < end)
        if until is None or look <= until:
            found.append(
                Sample(
                    task, number, "none", digest(f"d{number}"), digest(f"p{number}"), digest(f"t{number}"),
                    float(score), weight=1.0 if words is None else float(words[number]),
                    cluster=digest(f"c{number // passage}") if passage > 1 else "", look=look,
                )
            )  # fmt: skip
    kind = "score" if words is None else "perplexity"
    return SampleSet(task, metric, tuple(found), kind=kind, planned=len(scores), looks=len(ends))


def answered(items: int, right: float, lost: int, gained: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Which items both sides get right, flips spread evenly over the order in which they are asked."""
    random = np.random.RandomState(seed)
    baseline = (random.random_sample(items) < right).astype(float)
    candidate = baseline.copy()
    candidate[random.permutation(np.flatnonzero(baseline))[:lost]] = 0
    candidate[random.permutation(np.flatnonzero(1 - baseline))[:gained]] = 1
    return baseline, candidate


def all_samples() -> dict[str, tuple[SampleSet, SampleSet]]:
    math_before, math_after = answered(1319, 0.81, 5, 6, 1)
    know_before, know_after = answered(2850, 0.68, 38, 31, 2)
    follow_before, follow_after = answered(541, 0.79, 17, 14, 3)
    random = np.random.RandomState(4)
    words = random.randint(900, 6000, 62)
    before = -words * random.normal(1.95, 0.06, 62)
    after = before - words * random.normal(0.0071, 0.002, 62)
    return {
        "gsm8k": (samples("gsm8k", math_before, "exact_match"), samples("gsm8k", math_after, "exact_match", until=1)),
        "mmlu": (
            samples("mmlu", know_before, "acc", passage=3),
            samples("mmlu", know_after, "acc", passage=3),
        ),
        "ifeval": (
            samples("ifeval", follow_before, "prompt_level_strict_acc", looks=1),
            samples("ifeval", follow_after, "prompt_level_strict_acc", looks=1),
        ),
        "wikitext": (
            samples("wikitext", before, "word_perplexity", looks=1, words=words),
            samples("wikitext", after, "word_perplexity", looks=1, words=words),
        ),
    }


def control_of(pair: tuple[SampleSet, SampleSet], changed: int) -> SampleSet:
    """The baseline again on its first 300 items, with a few other answers."""
    baseline = pair[0]
    again = tuple(
        replace(sample, look=0, score=1 - sample.score if number < changed else sample.score)
        for number, sample in enumerate(baseline.samples[:300])
    )
    return SampleSet(baseline.task, baseline.metric, again)


def launches(ratio: float = 1.31, each: int = 4) -> tuple[Launch, ...]:
    random = np.random.RandomState(5)
    found = []
    for number, side in enumerate(order(each)):
        cells = {}
        for name, (concurrency, speed) in CELLS.items():
            gain = (ratio if side == "candidate" else 1.0) * random.normal(1, 0.012)
            wait = (1 + concurrency / 40) / gain
            cells[name] = CellResult(
                name, 10 * concurrency, 0, 10 * concurrency * 512 / speed, speed * gain, 3 * speed * gain,
                31 * wait, 88 * wait, 1000 * concurrency / speed / gain, 1200 * concurrency / speed / gain,
                960 * concurrency / speed / gain, 1900 * concurrency / speed / gain,
                512e3 * concurrency / speed / gain, 590e3 * concurrency / speed / gain,
                concurrency=concurrency, requests_per_second=speed * gain / 512, goodput=0.94 * speed * gain / 512,
                peak_output_throughput=1.1 * speed * gain,
            )  # fmt: skip
        tokens, kind = (2_524_704, "fp8") if side == "candidate" else (1_262_352, "auto")
        machine = MachineState(2088.0 + number, 2040.0 - number, 71.0, 640.0 + number, (), 180)
        found.append(Launch(side, number, cells, tokens, kind, 64.0 + number, 0.41 + number / 100, machine))
    return tuple(found)


@cache
def _good_measurements() -> Measurements:
    return _measurements()


def measurements(**changes: Any) -> Measurements:
    """Sound measurements, but for the changes."""
    return replace(_good_measurements(), **changes)


def _measurements() -> Measurements:
    argv = ("vllm", "serve", "MODEL", "--max-model-len", "8192", "--max-num-seqs", "256", "--max-num-batched-tokens",
            "16384", "--compilation-config", '{"cudagraph_mode": "FULL_AND_PIECEWISE"}')  # fmt: skip
    env = {"VLLM_ROCM_USE_AITER": "1", "HIP_FORCE_DEV_KERNARG": "1"}
    known = all_samples()
    server: dict[str, Any] = {"hardware": "mi300x", "template": "ab" * 32, "tokenizer": "cd" * 32}
    values: dict[str, Any] = {
        "artefact": "sha256:" + "ab" * 32,
        "structure": StructureCheck(Verdict.PASS),
        "baseline": Server("0.32.0", "AMD Instinct MI300X", argv, env, kv_cache_dtype="auto", **server),
        "candidate": Server(
            "0.32.0", "AMD Instinct MI300X", (*argv, "--kv-cache-dtype", "fp8"), env, kv_cache_dtype="fp8", **server
        ),
        "samples": known,
        "control": {"gsm8k": control_of(known["gsm8k"], 1), "mmlu": control_of(known["mmlu"], 2)},
        "canary": Canary(
            prompts=48, positions=6412, confidence=0.95, agreement=0.9731, agreement_low=0.9684, agreement_high=0.9778,
            kl=0.00412, kl_low=0.0036, kl_high=0.00464, baseline_perplexity=9.312, candidate_perplexity=9.357,
            worst=(("german-letter", 0.0123), ("table", 0.0101), ("haskell", 0.0094)),
        ),
        "launches": launches(),
        "weights": (16_060_522_496, 9_083_392_000),
        "claims": {"memory_fp8": 2.0, "kv_tokens_fp8": 2.0, "throughput": 1.6},
    }  # fmt: skip
    return Measurements(**values)


def policy(**changes: Any) -> Policy:
    values: dict[str, Any] = {
        "margins": {"gsm8k": 0.02, "mmlu": 0.012, "wikitext": 0.02},
        "min_ratio": 1.1,
        "launches": 4,
        "hardware": "mi300x",
    }
    return Policy(**{**values, **changes})


def layers(count: int = 32, *, experts: int = 0) -> list[ShownLayerError]:
    found: list[ShownLayerError] = []
    for layer in range(count):
        for index, kind in enumerate(LINEAR):
            many = experts if index > 3 and experts else 1
            value = 31.4 + 0.25 * math.sin(layer / 3 + index) - 5.2 * (layer == 1 and kind == "down_proj")
            value -= 1.6 * (layer > count - 3 and kind == "o_proj")
            name = f"experts.{kind}" if many > 1 else kind
            found.append({"layer": layer, "kind": name, "sqnr_db": value, "modules": many})
    return found


def kv_scales(count: int = 32) -> list[KvScale]:
    return [
        {"layer": layer, "which": which, "low": scale, "high": scale}
        for layer in range(count)
        for which, scale in (
            ("K", 0.052 + 0.016 * math.sin(layer / 4) + 0.03 * (layer == 0)),
            ("V", 0.0042 + 0.0011 * layer),
        )
    ]


def flips_of(known: Measurements) -> list[Any]:
    """The flips of all tasks with answers that are made up, one of them long, one of them hostile."""
    found = []
    for task, (baseline, candidate) in known.samples.items():
        before = {sample.key: sample.score for sample in baseline.samples}
        changed: list[Flip] = []
        for sample in candidate.samples:
            score = before[sample.key]
            if sample.score != score and baseline.kind == "score":
                number = sample.doc_id
                said = (
                    f"She bakes {number % 17} trays of {number % 5 + 2} rolls.\n#### {number % 17 * (number % 5 + 2)}"
                )
                changed.append(
                    {
                        "task": task, "doc_id": number, "direction": "gained" if sample.score > score else "lost",
                        "scores": (score, sample.score),
                        "prompt": f"Question: A baker bakes {number % 17} trays with {number % 5 + 2} rolls each and "
                        "sells a third of them before noon. How many rolls are there in all?\nAnswer:",
                        "target": f"{number % 17 * (number % 5 + 2)}", "baseline": said,
                        "candidate": said.replace("####", "So there are more than that.\n####") + "1",
                    }
                )  # fmt: skip
        if changed:
            changed[0]["candidate"] = "</pre><script>alert(1)</script> & <b>bold</b>"
            changed[1]["baseline"] = "Let us think. " * 2000
        if baseline.kind == "score":
            found.append({"task": task, "flips": changed})
    return found


def stages() -> list[ShownStage]:
    found: list[ShownStage] = []
    clock = 0
    for name, seconds, cached in (
        ("source", 41.2, True), ("calibrate", 96.0, True), ("quantize", 38.5, False), ("inspect", 6.1, False),
        ("serve-baseline", 66.0, False), ("canary-baseline", 9.2, False), ("serve-candidate", 71.0, False),
        ("canary-candidate", 8.8, False), ("evaluate-baseline", 812.7, False), ("control", 140.2, False),
        ("evaluate-candidate", 511.9, False), ("bench", 1488.3, False), ("gate", 2.4, False),
    ):  # fmt: skip
        day = 13 if cached else 14
        found.append(
            {
                "name": name,
                "started": f"2026-03-{day}T{9 + clock // 3600:02d}:{clock // 60 % 60:02d}:{clock % 60:02d}+00:00",
                "seconds": seconds, "cached": cached, "fingerprint": digest(name) * 4,
            }
        )  # fmt: skip
        clock += round(seconds) + 1
    return found


def report(known: Measurements, limits: Policy, **changes: Any) -> Report:
    servers = {"baseline": known.baseline, "candidate": known.candidate}
    values: dict[str, Any] = {
        "name": "llama8b-ptpc-kv",
        "model": "meta-llama/Llama-3.1-8B-Instruct @ 0e9e39f",
        "scheme": "ptpc_fp8 with an FP8 KV cache, quark",
        "created": "2026-03-14T09:26:53+00:00",
        "notes": [],
        "stopped": known.stopped,
        "gate": judge(known, limits).to_json(),
        "size": {
            "baseline_bytes": 16_060_522_496,
            "candidate_bytes": 9_083_392_000,
            "parts": [
                {"name": "linear weights", "baseline_bytes": 13_958_643_712, "candidate_bytes": 6_979_321_856},
                {"name": "scales", "baseline_bytes": 0, "candidate_bytes": 2_191_360},
                {"name": "embeddings and head", "baseline_bytes": 2_101_346_304, "candidate_bytes": 2_101_346_304},
                {"name": "norms and biases", "baseline_bytes": 532_480, "candidate_bytes": 532_480},
            ],
        },
        "kv_tokens": {"baseline": 1_262_352, "candidate": 2_524_704} if known.launches else {},
        "layers": layers(),
        "kv_scales": kv_scales(),
        "flips": flips_of(known),
        "prompts": {"german-letter": "Sehr geehrte Frau Weber,\nvielen Dank für Ihre Nachricht vom 3. Mai."},
        "launches": [launch.to_json() for launch in known.launches],
        "stages": stages(),
        "servers": [
            {
                "side": side, "runtime": server.runtime, "version": server.version, "hardware": server.hardware,
                "device": server.device, "image": server.image, "env": dict(server.env), "argv": list(server.argv),
            }
            for side, server in servers.items()
        ],
        "recipe": "name: llama8b-ptpc-kv\nsource: {repo: meta-llama/Llama-3.1-8B-Instruct}\nquantization:\n"
        "  scheme: ptpc_fp8\n  kv_cache: fp8\n  format: quark\n# <script>alert(1)</script>\n",
        "reproduce": ["quantmint run llama8b-ptpc-kv", "quantmint gate published/llama8b-ptpc-kv"],
        "versions": {"quantmint": "0.1.0", "vllm": "0.32.0", "lm-eval": "0.4.13"},
        "digests": {"source": "0e9e39f249a16976918f6564b8830bc894c89659"},
    }  # fmt: skip
    return Report(**{**values, **changes})


@cache
def good() -> Report:
    """Nothing to complain of."""
    return report(measurements(), policy())


@cache
def stopped() -> Report:
    """A run that its canary ended: one layer's scales are wrong."""
    canary = Canary(
        prompts=48, positions=6412, confidence=0.95, agreement=0.213, agreement_low=0.19, agreement_high=0.24,
        kl=4.91, kl_low=4.6, kl_high=5.2, baseline_perplexity=9.312, candidate_perplexity=1630.5,
        worst=(("german-letter", 7.31), ("table", 6.87)), unanswered=("haskell",),
    )  # fmt: skip
    known = measurements(samples={}, control={}, launches=(), canary=canary, stopped="canary")
    return report(known, policy(), stages=stages()[:8], kv_tokens={})


@cache
def invalid() -> Report:
    """The baseline was served with another template, its baseline score is off, and a launch lost its clock."""
    known = measurements()
    other = replace(known.baseline, template="ef" * 32)
    return report(replace(known, baseline=other), policy(baseline_score={"gsm8k": 0.9}))


@cache
def by_reference() -> Report:
    """A format that no vLLM here loads: transformers answered, and nothing was fast or slow."""
    runtime = "transformers 5.17.0, dequantized weights, simulated MXFP4 activations"
    known = measurements(launches=())
    sides = {
        side: replace(getattr(known, side), runtime=runtime, version="5.17.0", hardware="cpu", device="EPYC 9654")
        for side in ("baseline", "candidate")
    }
    known = replace(known, **sides, claims={"memory_mxfp4": 4.0})
    notes = ["Both sides were answered by the reference runtime, not by vLLM."]
    return report(known, policy(min_ratio=None), kv_tokens={}, kv_scales=[], notes=notes)


@cache
def elsewhere() -> Report:
    """Measured on an H100 although the recipe's promise is made for an MI300X."""
    known = measurements()
    sides = {
        side: replace(getattr(known, side), hardware="h100", device="NVIDIA H100 80GB HBM3")
        for side in ("baseline", "candidate")
    }
    return report(replace(known, **sides), policy())


@cache
def long() -> Report:
    """Texts of 32k tokens: what is past 16k is read worse, and needles at the beginning are lost."""
    rng, ends, texts, needles = np.random.RandomState(3), (1024, 2048, 4096, 8192, 16_384, 32_768), 24, 8
    known = measurements()
    sets: dict[str, tuple[SampleSet, SampleSet]] = {}
    buckets = []
    for start, end in zip((0, *ends), ends, strict=False):
        loss = 0.001 + 0.045 * (end > 16_384) + rng.normal(0, 0.002, texts)
        length = float(end - start)
        sides = [
            tuple(
                Sample(
                    task, n, "none", f"{n:x}", f"{n:x}", f"{n:x}", -length * (2.2 + 0.01 * n + gone), length, f"{n:x}"
                )
                for n, gone in enumerate(change)
            )
            for task in [long_context.likelihood_task(end)]
            for change in (np.zeros(texts), loss)
        ]
        task = long_context.likelihood_task(end)
        sets[task] = tuple(SampleSet(task, "token_perplexity", rows, "perplexity") for rows in sides)  # type: ignore[assignment]
        sums = 200 * np.abs(0.01 + 0.06 * (end > 16_384) + rng.normal(0, 0.003, texts))
        buckets.append(BucketDivergence(start, end, tuple(map(float, sums)), (200,) * texts))
    shares = np.array([np.full(needles, 0.97), np.linspace(0.75, 0.97, needles)])
    right = rng.random_sample((2, texts, needles)) < shares[:, None]
    where = long_context.RETRIEVAL
    sets[where] = tuple(  # type: ignore[assignment]
        SampleSet(
            where,
            "exact_match",
            tuple(
                Sample(where, n, "none", *(f"{n:x}",) * 3, float(s), 1.0, f"{n // needles:x}")
                for n, s in enumerate(side.ravel())
            ),
        )
        for side in right
    )
    known = replace(known, samples={**known.samples, **sets}, long=LongDivergence(20, tuple(buckets), needles))
    margins = {**policy().margins, **dict.fromkeys(sets, 0.02), long_context.RETRIEVAL: 0.1}
    return report(known, policy(margins=margins, long_kl=0.05))


@cache
def endpoints() -> Report:
    """All promises beside the suite: function calls, sampled problems, KL, the layout and speculative decoding."""
    rng = np.random.RandomState(11)
    sets: dict[str, tuple[SampleSet, SampleSet]] = {}
    for task, right, lost, gained in ((EXACT, 0.71, 14, 11), (VALID, 0.94, 3, 2)):
        before, after = answered(600, right, lost, gained, len(task))
        sets[task] = samples(task, before, "exact_match"), samples(task, after, "exact_match", until=2)
    for task, share in ((RIGHT, 0.62), (COMPLETE, 0.97), (UNREPEATED, 0.985)):
        chances = np.clip(rng.normal(share, 0.1, 600), 0, 1)
        sides = [rng.binomial(4, chances) / 4 for _ in range(2)]
        sets[task] = samples(task, sides[0], "avg"), samples(task, sides[1], "avg")
    names = [f"text {number}" for number in range(47)] + ["german-letter"]

    def nats(mean: float, positions: int = 64) -> Divergences:
        values = positions * mean * rng.lognormal(-0.1, 0.45, len(names))
        rows = zip(names, values.tolist(), strict=True)
        return Divergences(False, tuple(TextDivergence(name, positions, value) for name, value in rows))

    drafts = [
        tuple(
            PromptDrafts(name, int(count), 3 * int(count), int(count * rate))
            for name, count in zip(names, counts, strict=True)
        )
        for rate in (1.31, 1.29)
        for counts in [rng.randint(24, 34, len(names))]
    ]
    layout = LayoutMeasurement(
        "TP 8", nats(0.021), nats(0.018), replace(nats(0.004, 32), exact=True), replace(nats(0.0037, 32), exact=True)
    )
    known = measurements(
        samples={**all_samples(), **sets}, kl=nats(0.021), layout=layout,
        acceptance=AcceptancePairs("eagle3", 3, *drafts),
    )  # fmt: skip
    margins = {**policy().margins, EXACT: 0.04, VALID: 0.03, RIGHT: 0.05, COMPLETE: 0.03, UNREPEATED: 0.03}
    promises = {"kl": KlPolicy(0.03), "layout": LayoutPolicy(0.02), "acceptance": AcceptancePolicy(0.02)}
    return report(known, policy(margins=margins, **promises))


@cache
def rounded() -> Report:
    """A proof by emulation, which rounds MX scales to even, of a checkpoint for a target that rounds them up."""
    known = measurements(launches=())
    candidate = replace(known.candidate, mx_scales="even")
    return report(replace(known, candidate=candidate), policy(min_ratio=None, mx_scales="up"), kv_tokens={})


VARIANTS = {
    "endpoints": endpoints,
    "rounded": rounded,
    "long": long,
    "good": good,
    "stopped": stopped,
    "invalid": invalid,
    "reference": by_reference,
    "elsewhere": elsewhere,
}

"""Two models with known scores, served on known machines: what the tests of the gate and of its report start from."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np

from quantmint.eval.canary import Canary
from quantmint.eval.gate.judgement import claims
from quantmint.eval.measurements import CellResult, Launch, MachineState, Measurements, Server, StructureCheck, order
from quantmint.eval.samples import Sample, SampleSet
from quantmint.eval.verdict import Verdict


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def make_samples(task: str, scores: np.ndarray, metric: str = "acc") -> SampleSet:
    return SampleSet(
        task,
        metric,
        tuple(
            Sample(task, i, "none", digest(f"d{i}"), digest(f"p{i}"), digest(f"t{i}"), float(score))
            for i, score in enumerate(scores)
        ),
    )


def make_pair(
    task: str, items: int, *, right: int, losses: int, gains: int, metric: str = "acc"
) -> tuple[SampleSet, SampleSet]:
    """The baseline gets the first `right` items right; the candidate loses some of them and gains some others."""
    baseline = np.zeros(items)
    baseline[:right] = 1
    candidate = baseline.copy()
    candidate[:losses] = 0
    candidate[right : right + gains] = 1
    return make_samples(task, baseline, metric), make_samples(task, candidate, metric)


def make_cell(cell: str, speed: float, latency: float = 1.0) -> CellResult:
    return CellResult(
        cell, 64, 0, 10.0, speed, 3 * speed,
        52.4 * latency, 131.7 * latency, 9.82 * latency, 14.1 * latency,
        9.61 * latency, 21.4 * latency, 361.2 * latency, 498.0 * latency,
    )  # fmt: skip


SPEED = {  # output tokens/s and latency of (baseline, candidate)
    "in1024-out1024-c64": ((4118.0, 1.0), (5230.0, 0.81)),
    "in1024-out1024-c256": ((9875.0, 2.6), (13120.0, 2.1)),
}
WOBBLE = (1.0, 0.996, 1.003, 0.999)  # from launch to launch, as on a quiet machine


def make_launches(a_side: int = 4) -> tuple[Launch, ...]:
    """So many launches a side, in the order ABBA BAAB, the candidate a quarter faster."""
    made: list[Launch] = []
    for number, side in enumerate(order(a_side)):
        quick = side == "candidate"
        wobble = WOBBLE[sum(launch.side == side for launch in made) % len(WOBBLE)]
        cells = {name: make_cell(name, wobble * both[quick][0], both[quick][1]) for name, both in SPEED.items()}
        machine = MachineState(clock_mhz=2080.0 if quick else 2095.0, temperature_c=71.0, power_w=690.0, samples=60)
        made.append(
            Launch(
                side,
                number,
                cells,
                2_524_704 if quick else 1_262_352,
                "fp8" if quick else "auto",
                41.0,
                0.37,
                machine,
                attention_backend="ROCM_AITER_FA",
            )
        )
    return tuple(made)


def good_measurements() -> Measurements:
    """A good candidate: no loss beyond a point, a quarter faster."""
    argv = ("vllm", "serve", "models/base", "--port", "8000", "--max-model-len", "512", "--max-num-seqs", "256")
    baseline = Server(
        "vllm 0.32.0",
        "AMD Instinct MI300X",
        argv,
        {"VLLM_ROCM_USE_AITER": "1"},
        runtime="vllm 0.32.0",
        hardware="mi300x",
        kv_cache_dtype="auto",
        template=digest("template"),
        tokenizer=digest("tokenizer"),
    )
    facts = make_pair("tiny_facts", 2000, right=1741, losses=21, gains=19)
    return Measurements(
        artefact="sha256:" + "ab" * 32,
        structure=StructureCheck(Verdict.PASS),
        baseline=baseline,
        candidate=replace(
            baseline,
            argv=("vllm", "serve", "out/model", "--port", "8001", *argv[5:], "--kv-cache-dtype", "fp8"),
            kv_cache_dtype="fp8",
        ),
        samples={
            "tiny_facts": facts,
            "tiny_arithmetic": make_pair("tiny_arithmetic", 400, right=312, losses=9, gains=10, metric="exact_match"),
            "tiny_grammar": make_pair("tiny_grammar", 250, right=201, losses=6, gains=3),
        },
        control={"tiny_facts": again(facts[0], items=500, flips=2)},
        canary=Canary(24, 3120, 0.95, 0.962, 0.949, 0.975, 0.018, 0.012, 0.024, 11.2, 11.4, (("recipe", 0.041),)),
        launches=make_launches(),
        weights=(16_060_522_496, 9_083_392_000),
        claims=claims(weights="e4m3", kv_cache="fp8"),
    )


def again(samples: SampleSet, *, items: int, flips: int) -> SampleSet:
    """The first items once more; so many of them change their score."""
    asked = tuple(
        replace(s, score=1 - s.score if i < flips else s.score) for i, s in enumerate(samples.samples[:items])
    )
    return replace(samples, samples=asked, planned=items)

"""The plan for people: nothing of it is left out."""

from __future__ import annotations

from dataclasses import replace

from quantmint.pipeline.serving.model.facts import ModelFacts
from quantmint.pipeline.serving.plan import LaunchPlan, Process
from quantmint.pipeline.serving.render.explanation import explain

Launch = tuple[LaunchPlan, tuple[Process, ...]]


def test_everything_is_said(one: Launch, facts: ModelFacts) -> None:
    plan, processes = one
    text = explain(plan, facts, processes, installed="0.33.0")
    assert "mixture of experts, 2 of 8 experts a token (25 %), 46.7 B parameters" in text
    assert "ptpc_fp8 with fp8 KV scales, 47.0 GB of weights, counted from config.json" in text
    assert "mi300x:4 (AMD Instinct MI300X), throughput" in text
    assert "planned for 0.33.0, the one installed" in text
    assert "ROCM_AITER_FA" in text
    rows = {line[:22].strip(): line[22:].strip() for line in text.splitlines()}
    assert (rows["weights"], rows["KV cache"], rows["total"]) == ("16.00", "170.00", "206.00")
    assert "room for 1,297,000 tokens (131,072 B each): 158.3 requests of full length" in " ".join(text.split())
    for reason in plan.reasons:
        assert reason.knob in text
        assert f"{reason.why} [{reason.source}]" in " ".join(text.split())
    assert "\n  --async-scheduling\n" in text, "a flag without a value"
    assert "\n  VLLM_ROCM_USE_AITER=1\n" in text
    assert text.index("--ipc=host") > text.index("in a container") > text.index("--max-num-seqs")
    assert "numa_balancing 0" in text
    assert "warning: nobody has run this yet" in text
    assert max(len(line) for line in text.splitlines()) <= 100


def test_without_reasons(one: Launch, facts: ModelFacts) -> None:
    text = explain(one[0], facts, one[1], installed="0.19.0", reasons=False)
    assert "AITER holds" not in text
    assert "planned for 0.33.0; installed is 0.19.0" in text


def test_a_vllm_for_a_cpu_is_not_that_of_a_gpu(one: Launch, facts: ModelFacts) -> None:
    plan = replace(one[0], vllm_version="0.32.0+cpu")
    text = " ".join(explain(plan, facts, one[1], installed="0.32.0+cpu", reasons=False).split())
    assert (
        "planned for 0.32.0+cpu: this machine's vLLM is 0.32.0+cpu, a CPU build; the target's vLLM is not known" in text
    )
    assert "the one installed" not in text


def test_rows(replicas: Launch, on_cpu: Launch, facts: ModelFacts) -> None:
    def row(launch: Launch, name: str) -> str:
        lines = explain(launch[0], facts, launch[1]).splitlines()
        return next(line[11:] for line in lines if line.startswith(name))

    assert row(replicas, "layout") == "4 x (TP 2)"
    assert "           the smallest that fits [ROCm 2026: Parallelism]" in explain(replicas[0], facts, replicas[1])
    assert row(replicas, "ports") == "8000 to 8002"
    assert row(on_cpu, "vllm") == "planned for 0.32.0+cpu; none is installed here"
    assert "memory of the process, GB" in explain(on_cpu[0], facts, on_cpu[1])

"""Plans made by hand, so that what is rendered is tested without what is planned."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from quantmint.pipeline.serving.model.facts import ModelFacts, as_quantized, facts_of_config
from quantmint.pipeline.serving.plan import HostCheck, LaunchPlan, Memory, ParallelLayout, Process, Reason

SPECULATION = '{"method": "eagle3", "model": "/models/draft $1", "num_speculative_tokens": 2}'
CONFIGS = Path(__file__).parents[2] / "assets" / "configs"
MODEL = "/models/it's a model"
_GB = 10**9
INSTINCT = (
    "--network=host",
    "--ipc=host",
    "--group-add=video",
    "--cap-add=SYS_PTRACE",
    "--security-opt=seccomp=unconfined",
    "--device=/dev/kfd",
    "--device=/dev/dri",
)
RDMA = ("--cap-add=IPC_LOCK", "--device=/dev/infiniband")


def _plan(
    target: str,
    layout: ParallelLayout,
    *more: str,
    version: str = "0.33.0",
    docker: tuple[str, ...] = INSTINCT,
    image: str | None = "vllm/vllm-openai-rocm:v0.33.0",
) -> LaunchPlan:
    """A plan with everything that quoting could break: an apostrophe, blanks, a dollar sign, JSON."""
    return LaunchPlan(
        env={"VLLM_ROCM_USE_AITER": "1", "PYTORCH_TUNABLEOP_FILENAME": "/models/tuned %d.csv"},
        argv=("vllm", "serve", MODEL, "--served-model-name", "mine", "--max-num-seqs", "512", *more),
        served_model_name="org/Mine_8B",
        tensor_parallel_size=layout.tensor,
        reasons=(
            Reason("layout", "4 x (TP 2)", "the smallest that fits", "ROCm 2026: Parallelism"),
            Reason("VLLM_ROCM_USE_AITER", "1", "AITER holds the fast kernels of CDNA3 and CDNA4", "ROCm 2026: AITER"),
            Reason("--max-num-seqs", "512", "the load of the profile", "quantmint"),
            Reason("--ipc=host", "on", "64 MB are too few", "ROCm FP8 2024: Installation"),
            Reason("--async-scheduling", "on", "hides the scheduler", "ROCm 2026: Scheduling"),
        ),
        layout=layout,
        memory=Memory(206 * _GB, 190 * _GB, 16 * _GB, 3 * _GB, 1 * _GB, 170 * _GB, 131072, 1297000, 158.3),
        host=(HostCheck("numa_balancing", "0", "pages must not wander", "ROCm 2026: NUMA"),),
        warnings=("nobody has run this yet",),
        docker=docker,
        image=image,
        attention_backend="ROCM_AITER_FA",
        target=target,
        profile="throughput",
        vllm_version=version,
    )


@pytest.fixture
def one() -> tuple[LaunchPlan, tuple[Process, ...]]:
    """One server on four GPUs."""
    plan = _plan(
        "mi300x:4", ParallelLayout(tensor=4), "--tensor-parallel-size", "4", "--speculative-config", SPECULATION
    )
    env = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    return plan, (Process(0, "server", 0, (0, 1, 2, 3), 8000, env, plan.argv),)


@pytest.fixture
def replicas() -> tuple[LaunchPlan, tuple[Process, ...]]:
    """Three servers with a GPU each."""
    plan = _plan("mi300x:3", ParallelLayout(replicas=3))
    return plan, tuple(
        Process(0, "server", rank, (rank,), 8000 + rank, {"CUDA_VISIBLE_DEVICES": str(rank)}, plan.argv)
        for rank in range(3)
    )


@pytest.fixture
def packed() -> tuple[LaunchPlan, tuple[Process, ...]]:
    """Two servers on each of two GPUs."""
    plan = _plan("mi300x:2", ParallelLayout(replicas=2, packed=2))
    gpus = [rank // 2 for rank in range(4)]
    return plan, tuple(
        Process(0, "server", rank, (gpu,), 8900 + rank, {"CUDA_VISIBLE_DEVICES": str(gpu)}, plan.argv)
        for rank, gpu in enumerate(gpus)
    )


@pytest.fixture
def headless() -> tuple[LaunchPlan, tuple[Process, ...]]:
    """One server over three nodes, each with processes of its own."""
    plan = _plan(
        "mi300x:8x3",
        ParallelLayout(tensor=8, pipeline=3, nodes=3),
        "--nnodes",
        "3",
        "--master-addr",
        "10.0.0.1",
        docker=INSTINCT + RDMA,
    )
    made = []
    for node in range(3):
        env = {"VLLM_HOST_IP": f"10.0.0.{node + 1}"}
        argv = (*plan.argv, "--node-rank", str(node), *(("--headless",) if node else ()))
        role, port = ("headless", None) if node else ("server", 8000)
        made.append(Process(node, role, 0, tuple(range(8)), port, env, argv))  # type: ignore[arg-type]
    return plan, tuple(made)


@pytest.fixture
def on_cpu() -> tuple[LaunchPlan, tuple[Process, ...]]:
    """The CPU has none of it."""
    plan = _plan("cpu:1", ParallelLayout(), version="0.32.0+cpu", docker=(), image=None)
    return plan, (Process(0, "server", 0, (), 8000, {}, plan.argv),)


@pytest.fixture
def facts() -> ModelFacts:
    """A mixture of experts in FP8."""
    config = json.loads((CONFIGS / "Mixtral-8x7B-Instruct-v0.1" / "config.json").read_text())
    return replace(as_quantized(facts_of_config(config), scheme="ptpc_fp8", format="quark"), kv_cache_scheme="fp8")

"""A server on a cluster that is there: with the stand-in for vLLM, which writes what it was given."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.serving.plan import LaunchPlan, ParallelLayout
from quantmint.pipeline.serving.running.launchers import Cluster, ClusterLauncher

HERE = Cluster("10.1.2.3:6379", "10.1.2.4")


def plan_of(model: Path) -> LaunchPlan:
    return LaunchPlan(
        env={"VLLM_ROCM_USE_AITER": "1", "NCCL_MIN_NCHANNELS": "112", "HSA_NO_SCRATCH_RECLAIM": "1"},
        argv=("vllm", "serve", str(model), "--served-model-name", "m", "--distributed-executor-backend", "ray"),
        served_model_name="m",
        tensor_parallel_size=8,
        reasons=(),
        layout=ParallelLayout(tensor=8, pipeline=2, nodes=2),
    )


@pytest.fixture
def launcher(fake_vllm: Path) -> ClusterLauncher:
    return ClusterLauncher(fake_vllm, HERE, stop_grace=1)


def test_the_engine_gets_its_gpus_from_the_cluster(
    launcher: ClusterLauncher, fake_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_shell")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/etc/ray/token")
    monkeypatch.setenv("RAY_ADDRESS", "ray://elsewhere:10001")
    model = fake_model()
    with launcher.launch(plan_of(model), tmp_path / "server.log", startup_timeout=60) as server:
        assert server.base_url.startswith("http://127.0.0.1:")
    given = json.loads((model / "environment.json").read_text())
    assert (given["RAY_ADDRESS"], given["VLLM_HOST_IP"]) == ("10.1.2.3:6379", "10.1.2.4")
    assert given["RAY_AUTH_TOKEN_PATH"] == "/etc/ray/token"
    assert given["VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"] == "HSA_NO_SCRATCH_RECLAIM,NCCL_MIN_NCHANNELS"
    assert given["VLLM_ROCM_USE_AITER"] == "1"
    assert not [name for name in given if name.endswith("_VISIBLE_DEVICES") or name == "HF_TOKEN"]
    arguments = json.loads((model / "arguments.json").read_text())
    assert arguments[:2] == ["serve", str(model)]
    assert arguments[arguments.index("--distributed-executor-backend") + 1] == "ray"


def test_engines_that_each_node_starts_are_refused(launcher: ClusterLauncher, fake_model: Callable[..., Path]) -> None:
    plan = replace(plan_of(fake_model()), layout=ParallelLayout(tensor=8, data=2, nodes=2))
    with pytest.raises(UserError, match="2 engines on 2 nodes"):
        launcher.require(plan)

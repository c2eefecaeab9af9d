"""What is decided before, and without, a cluster: addresses, what a task asks for, whether nodes are alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.clusters.ray.nodes import (
    Node,
    TaskResources,
    drop_secrets,
    local_facts,
    local_versions,
    parse_nodes,
    probe_files,
    ray_address,
    require_same,
    require_versions,
    task_resources,
)
from quantmint.pipeline.quantize.engines.stream.shard import PARTIAL_SUFFIX

SMALL, LARGE = Node("1", "small", 4, 0), Node("2", "large", 64, 0)
WITH_GPUS = Node("3", "gpus", 96, 8, "AMD-Instinct-MI300X-OAM")


@pytest.mark.parametrize(
    ("on", "variable", "expected"),
    [
        ("ray", "", "auto"),
        ("ray", "10.0.0.1:6379", "10.0.0.1:6379"),
        ("ray", "ray://head", "ray://head:10001"),
        ("ray://head", "10.0.0.1:6379", "ray://head:10001"),
        ("ray://head:7", "", "ray://head:7"),
        ("ray://[::1]", "", "ray://[::1]:10001"),
    ],
)
def test_addresses(on: str, variable: str, expected: str) -> None:
    assert ray_address(on, {"RAY_ADDRESS": variable}) == expected


@pytest.mark.parametrize("on", ["slurm", "ray:/head", "ray://", "http://head:8265", "ray://head:port", "ray://head/x"])
def test_what_is_no_address(on: str) -> None:
    with pytest.raises(UserError, match=r"--on: found .*, expected ray"):
        ray_address(on, {})


def test_a_task_takes_a_gpu_or_the_cores_of_the_smallest_node() -> None:
    assert task_resources([SMALL, WITH_GPUS], "auto") == TaskResources("cuda", 0, 1)
    assert task_resources([SMALL, WITH_GPUS], "cpu") == TaskResources("cpu", 4, 0)
    assert task_resources([LARGE], "auto") == TaskResources("cpu", 64, 0)
    assert task_resources([LARGE], "auto", max_cores=8) == TaskResources("cpu", 8, 0)
    assert [TaskResources("cpu", 8, 0).slots(node) for node in (SMALL, LARGE, WITH_GPUS)] == [0, 8, 12]
    assert [TaskResources("cuda", 0, 1).slots(node) for node in (SMALL, LARGE, WITH_GPUS)] == [0, 0, 8]


@pytest.mark.parametrize(
    ("nodes", "device", "message"),
    [
        ([SMALL], "cuda", "no node of the cluster has a GPU"),
        ([SMALL], "cuda:1", "expected auto, cpu or cuda"),
        ([], "auto", "no node with CPUs"),
    ],
)
def test_what_no_node_has(nodes: list[Node], device: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        task_resources(nodes, device)


def test_only_nodes_that_can_be_given_work_count() -> None:
    def entry(number: str, *, alive: bool = True, **resources: float) -> dict[str, Any]:
        told = {"NodeManagerHostname": f"host-{number}", "NodeManagerAddress": "10.0.0.1"}
        return {"NodeID": number * 56, "Alive": alive, "Resources": resources, **told}

    found = parse_nodes(
        [entry("b", CPU=8, GPU=2, **{"accelerator_type:H100": 1}), entry("a", CPU=4), entry("c", memory=1)]
    )
    assert [(node.name, node.cpus, node.gpus, node.accelerator) for node in found] == [
        ("host-a (10.0.0.1, node aaaaaaaa)", 4, 0, ""),
        ("host-b (10.0.0.1, node bbbbbbbb)", 8, 2, "H100"),
    ]
    assert parse_nodes([entry("d", alive=False, CPU=8)]) == ()


def test_a_node_with_another_version_is_named() -> None:
    require_versions("here", local_versions(), local_versions())
    assert {"quantmint", "torch", "transformers", "safetensors"} <= local_versions().keys()
    with pytest.raises(UserError, match=r"there: torch is 1\.0 there and .* here"):
        require_versions("there", {**local_versions(), "torch": "1.0"}, local_versions())
    with pytest.raises(UserError, match="quantmint's code is not what it is here"):
        require_versions("there", {**local_versions(), "quantmint's code": "0"}, local_versions())


def test_folders_are_the_same_or_are_named(models: Callable[..., Path], tmp_path: Path) -> None:
    model, shared = models("llama"), tmp_path / "shared"
    shared.mkdir()
    here = local_facts([model])
    with probe_files([shared]) as probes:
        there = local_facts([model], probes)
        assert all(probe.name.endswith(PARTIAL_SUFFIX) for probe in shared.iterdir())
    require_same("there", there, here)
    with pytest.raises(UserError, match=r"does not see files that are written to .*shared here"):
        require_same("there", local_facts([model], probes), here)
    for digest, message in (("0", "holds other files there"), (None, "is not there")):
        with pytest.raises(UserError, match=message):
            require_same("there", replace(there, folders={str(model): digest}), here)
    assert list(shared.iterdir()) == []


def test_a_worker_forgets_what_the_shell_of_ray_had(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "QUANTMINT_WEBHOOK", "QUANTMINT_WEBHOOK_SECRET"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    drop_secrets()
    left = set(os.environ)
    assert not left & {"HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "QUANTMINT_WEBHOOK", "QUANTMINT_WEBHOOK_SECRET"}
    assert {"NCCL_SOCKET_IFNAME", "TOKENIZERS_PARALLELISM", "PATH"} <= left

"""The arguments of `docker run`, one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.errors import UserError
from pipeline.serving.plan import LaunchPlan, Process
from pipeline.serving.render.docker import docker_run, mounted
from pipeline.serving.render.invocation import containers

Launch = tuple[LaunchPlan, tuple[Process, ...]]
MODEL = "/models/it's a model"


def test_a_server_on_instinct(one: Launch) -> None:
    plan, processes = one
    assert docker_run(plan, processes, name="mine") == (
        "docker",
        "run",
        "--rm",
        "--name=mine",
        "--network=host",
        "--ipc=host",
        "--group-add=video",
        "--cap-add=SYS_PTRACE",
        "--security-opt=seccomp=unconfined",
        "--device=/dev/kfd",
        "--device=/dev/dri",
        f"--volume={MODEL}:{MODEL}:ro",
        "--volume=/models/draft $1:/models/draft $1:ro",
        "--volume=/models/tuned %d.csv:/models/tuned %d.csv:ro",
        "--env=VLLM_ROCM_USE_AITER=1",
        "--env=PYTORCH_TUNABLEOP_FILENAME=/models/tuned %d.csv",
        "--env=CUDA_VISIBLE_DEVICES=0,1,2,3",
        "--entrypoint=vllm",
        "vllm/vllm-openai-rocm:v0.33.0",
        *plan.argv[1:],
        "--host",
        "127.0.0.1",
        "--port",
        "8000",
    )


def test_several_nodes_get_their_adapters(ray: Launch) -> None:
    plan, processes = ray
    head, worker = (docker_run(plan, group, image="mine:1") for group in containers(processes))
    for command in (head, worker):
        assert {"--cap-add=IPC_LOCK", "--device=/dev/infiniband", "--ipc=host"} < set(command)
        assert not any(word.startswith("--shm-size") for word in command), "docker sets it aside beside --ipc=host"
    at = head.index("mine:1")
    assert head[at - 1] == "--entrypoint=/bin/sh"
    assert head[at + 1 :] == (
        "-c",
        'ray start --head --node-ip-address=10.0.0.1 --port=6379 && exec "$@"',
        "sh",
        *plan.argv,
        "--host",
        "127.0.0.1",
        "--port",
        "8000",
    )
    assert worker[worker.index("mine:1") - 1 :] == (
        "--entrypoint=ray",
        "mine:1",
        "start",
        "--address=10.0.0.1:6379",
        "--node-ip-address=10.0.0.12",
        "--block",
    ), "a container ends with its first process"
    assert "--env=VLLM_HOST_IP=10.0.0.12" in worker


def test_other_machines(on_cpu: Launch) -> None:
    plan, processes = on_cpu
    assert docker_run(plan, processes, image="mine:1")[3] == "--network=host", "the server listens on the loopback"
    assert docker_run(plan, processes, image="mine:1")[4].startswith("--volume=")
    with pytest.raises(UserError, match=r"no image of vLLM 0\.32\.0\+cpu for cpu:1"):
        docker_run(plan, processes)
    on_cuda = replace(plan, docker=("--gpus", "all", "--ipc=host"), image="theirs:1")
    assert docker_run(on_cuda, processes)[3:6] == ("--network=host", "--gpus=all", "--ipc=host")


def test_a_snapshot_of_the_hub_is_mounted_with_its_blobs(one: Launch) -> None:
    plan, _ = one
    cache = "/home/me/.cache/huggingface/hub/models--org--name"
    argv = ("vllm", "serve", f"{cache}/snapshots/abc", "--chat-template", f"{cache}/snapshots/abc/chat.jinja")
    assert mounted(replace(plan, argv=argv, env={})) == (cache,)
    assert mounted(replace(plan, argv=("vllm", "serve", "org/name"), env={})) == ()

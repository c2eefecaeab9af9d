"""The arguments of `docker run`, one by one, and the compose file, read back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import yaml

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.serving.knobs.table import table
from quantmint.pipeline.serving.plan import LaunchPlan, Process
from quantmint.pipeline.serving.render.docker import compose, docker_run, mounted
from quantmint.pipeline.serving.render.invocation import arguments

Launch = tuple[LaunchPlan, tuple[Process, ...]]
MODEL = "/models/it's a model"


def test_a_server_on_instinct(one: Launch) -> None:
    plan, processes = one
    assert docker_run(plan, processes[0], name="mine") == (
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


def test_several_nodes_get_their_adapters(headless: Launch) -> None:
    plan, processes = headless
    for process in processes:
        command = docker_run(plan, process, image="mine:1")
        assert {"--cap-add=IPC_LOCK", "--device=/dev/infiniband", "--ipc=host"} < set(command)
        assert not any(word.startswith("--shm-size") for word in command), "docker sets it aside beside --ipc=host"
        assert f"--env=VLLM_HOST_IP={process.env['VLLM_HOST_IP']}" in command
        assert command[command.index("mine:1") + 1 :][: len(process.argv) - 1] == process.argv[1:]


def test_other_machines(on_cpu: Launch) -> None:
    plan, processes = on_cpu
    assert docker_run(plan, processes[0], image="mine:1")[3] == "--network=host", "the server listens on the loopback"
    assert docker_run(plan, processes[0], image="mine:1")[4].startswith("--volume=")
    with pytest.raises(UserError, match=r"no image of vLLM 0\.32\.0\+cpu for cpu:1"):
        docker_run(plan, processes[0])
    on_cuda = replace(plan, docker=("--gpus=all", "--ipc=host"), image="theirs:1")
    assert docker_run(on_cuda, processes[0])[3:6] == ("--network=host", "--gpus=all", "--ipc=host")


def test_a_snapshot_of_the_hub_is_mounted_with_its_blobs(one: Launch) -> None:
    plan, _ = one
    cache = "/home/me/.cache/huggingface/hub/models--org--name"
    argv = ("vllm", "serve", f"{cache}/snapshots/abc", "--chat-template", f"{cache}/snapshots/abc/chat.jinja")
    assert mounted(replace(plan, argv=argv, env={})) == (cache,)
    assert mounted(replace(plan, argv=("vllm", "serve", "org/name"), env={})) == ()


def services(text: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(text)["services"]
    return found


def plain(value: str) -> str:
    """What compose makes of a value: it has no variables of ours."""
    assert "$" not in value.replace("$$", "")
    return value.replace("$$", "$")


@pytest.mark.parametrize("launch", ["one", "replicas", "on_cpu"])
def test_a_service_runs_what_the_plan_says(launch: str, request: pytest.FixtureRequest) -> None:
    plan, processes = request.getfixturevalue(launch)
    found = list(services(compose(plan, processes, image="ours:1")).values())
    assert len(found) == len(processes)
    for service, process in zip(found, processes, strict=True):
        given = tuple(plain(word) for word in (*service["entrypoint"], *service["command"]))
        assert given == arguments(process)
        environment = {name: plain(value) for name, value in service["environment"].items()}
        assert environment == {**plan.env, **process.env}
        assert f":{process.port}/health" in service["healthcheck"]["test"][-1]
        assert "profiles" not in service
        assert service["network_mode"] == "host"
        assert all(volume["read_only"] and volume["type"] == "bind" for volume in service["volumes"])
    kfd = "/dev/kfd:/dev/kfd" in found[0].get("devices", ())
    assert kfd == (launch != "on_cpu")


def test_servers_of_one_gpu_wait_for_each_other(packed: Launch) -> None:
    found = services(compose(*packed))
    ready = {"condition": "service_healthy"}
    waits = {name: service.get("depends_on") for name, service in found.items()}
    assert waits == {"vllm-0": None, "vllm-1": {"vllm-0": ready}, "vllm-2": None, "vllm-3": {"vllm-2": ready}}


def test_nodes_are_profiles(headless: Launch) -> None:
    found = services(compose(*headless))
    assert {name: service["profiles"] for name, service in found.items()} == {
        f"node-{node}": [f"node-{node}"] for node in range(3)
    }
    for service in found.values():
        assert "/dev/infiniband:/dev/infiniband" in service["devices"]
        assert "IPC_LOCK" in service["cap_add"]
    assert "healthcheck" not in found["node-1"]


def test_it_says_what_it_is_and_warns(one: Launch, replicas: Launch) -> None:
    plan, processes = one
    text = compose(plan, processes)
    assert text == compose(plan, processes)
    assert "&id" not in compose(*replicas), "nobody reads anchors"
    top = text[: text.index("services:")]
    assert all(line.startswith("#") for line in top.splitlines())
    assert "planned for vLLM 0.33.0" in top
    assert "warning: nobody has run this yet" in top


def test_every_option_of_the_table_has_a_form(one: Launch) -> None:
    plan, processes = one
    options = [knob for knob in table().values() if knob.kind == "docker" and not knob.never and knob.name != "image"]
    assert len(options) >= 8
    words = [knob.name if knob.rules[0].value is True else f"{knob.name}={knob.rules[0].value}" for knob in options]
    (service,) = services(compose(replace(plan, docker=tuple(words)), processes)).values()
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["count"] == "all"

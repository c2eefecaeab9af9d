"""A launch in containers: the arguments of `docker run`, or a compose file.

In a compose file of several nodes every service has a profile: ``docker compose --profile node-1 up`` starts the
second node's. Containers use the network of the host, so that servers listen on the loopback interface as they do
without a container. Every container gets all GPUs and selects its own by CUDA_VISIBLE_DEVICES: the numbers are those of
the host.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

from quantmint.pipeline.serving.plan import LaunchPlan, Process
from quantmint.pipeline.serving.render.invocation import arguments, image_of
from quantmint.pipeline.serving.render.manifest import comments, dump

_COMPOSE_KEYS = {
    **{"--network": "network_mode", "--ipc": "ipc"},
    **{"--group-add": "group_add", "--cap-add": "cap_add", "--security-opt": "security_opt", "--device": "devices"},
}
"""Keys of a compose service for the options of `docker run` in the knob table; all but the first two are lists."""
START_PERIOD_S = 3600
"""Seconds that loading may take before a health check counts: a 405B model from a network disk takes most of it."""


def options(plan: LaunchPlan) -> tuple[tuple[str, str], ...]:
    """Return the options of `docker run` that give the container its network and devices, with their values."""
    words = (word.partition("=") for word in dict.fromkeys(("--network=host", *plan.docker)))
    return tuple((name, value) for name, _, value in words)


def mounted(plan: LaunchPlan) -> tuple[str, ...]:
    """Return the folders and files to mount: those that the plan names, without paths inside another.

    For a snapshot in the Hub's cache it is the repository's folder, which holds the blobs that the snapshot links to.
    """
    paths = [_mount_point(path) for word in (plan.model, *plan.argv[3:], *plan.env.values()) for path in _paths(word)]
    return tuple(
        path
        for path in dict.fromkeys(paths)
        if not any(PurePosixPath(path).is_relative_to(outer) for outer in paths if outer != path)
    )


def _paths(word: str) -> Iterator[str]:
    """Yield the absolute paths in an argument, which may be a JSON object (--speculative-config's draft model)."""
    if word.startswith("{"):
        values = json.loads(word).values()
        yield from (value for value in values if isinstance(value, str) and value.startswith("/"))
    elif word.startswith("/"):
        yield word


def _mount_point(path: str) -> str:
    parents = PurePosixPath(path).parents
    return next((str(parent.parent) for parent in parents if parent.name == "snapshots"), path)


def docker_run(
    plan: LaunchPlan, process: Process, *, image: str | None = None, name: str | None = None
) -> tuple[str, ...]:
    """Return the `docker run` command of one process, as words; it mounts the model read-only at its own path.

    ``image`` overrides the plan's, ``name`` names the container. Raises `UserError` when neither ``image`` nor the plan
    names an image.
    """
    program, *words = arguments(process)
    env = {**plan.env, **process.env}
    return (
        "docker",
        "run",
        "--rm",
        *([] if name is None else [f"--name={name}"]),
        *(f"{option}={value}" for option, value in options(plan)),
        *(f"--volume={path}:{path}:ro" for path in mounted(plan)),
        *(f"--env={variable}={value}" for variable, value in env.items()),
        f"--entrypoint={program}",
        image_of(plan, image),
        *words,
    )


def compose(plan: LaunchPlan, processes: Sequence[Process], *, image: str | None = None) -> str:
    """Return a compose file with one service for each process, and the plan's warnings as comments at its top.

    Raises `UserError` when neither ``image`` nor the plan names an image.
    """
    several_nodes = len({process.node for process in processes}) > 1
    services: dict[str, Any] = {}
    for process in processes:
        node = f"node-{process.node}" if several_nodes else "vllm"
        name = node if sum(p.node == process.node for p in processes) == 1 else f"{node}-{process.replica}"
        services[name] = _service(plan, process, image)
        if several_nodes:
            services[name]["profiles"] = [f"node-{process.node}"]
        if process.replica % plan.layout.packed:  # servers of one GPU load one after another, as in `plan.waves`
            previous = f"{node}-{process.replica - 1}"
            services[name]["depends_on"] = {previous: {"condition": "service_healthy"}}
    return comments(plan) + dump({"services": services})


def _service(plan: LaunchPlan, process: Process, image: str | None) -> dict[str, Any]:
    program, *words = arguments(process)
    service: dict[str, Any] = {
        "image": image_of(plan, image),
        "entrypoint": [program],
        "command": [_literal(word) for word in words],
        "environment": {name: _literal(value) for name, value in {**plan.env, **process.env}.items()},
        "volumes": [
            {"type": "bind", "source": path, "target": path, "read_only": True, "bind": {"create_host_path": False}}
            for path in map(_literal, mounted(plan))
        ],
        "restart": "unless-stopped",
        "stop_grace_period": "30s",
    }
    for option, value in options(plan):
        if option == "--gpus":
            devices = [{"driver": "nvidia", "count": value, "capabilities": ["gpu"]}]
            service["deploy"] = {"resources": {"reservations": {"devices": devices}}}
        elif option in ("--network", "--ipc"):
            service[_COMPOSE_KEYS[option]] = value
        else:
            service.setdefault(_COMPOSE_KEYS[option], []).append(f"{value}:{value}" if option == "--device" else value)
    if process.port is not None:
        # By Python, which every image with vLLM has; it may lack curl.
        url = f"http://127.0.0.1:{process.port}/health"
        request = f"import urllib.request; urllib.request.urlopen('{url}', timeout=5)"
        timing = {"interval": "10s", "timeout": "10s", "retries": 3, "start_period": f"{START_PERIOD_S}s"}
        service["healthcheck"] = {"test": ["CMD", "python3", "-c", request], **timing}
    return service


def _literal(text: str) -> str:
    """Return text in which compose substitutes nothing: a single dollar sign would begin a variable."""
    return text.replace("$", "$$")

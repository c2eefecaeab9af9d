"""A launch in containers: the arguments of ``docker run``, a list and never a shell string, and a compose file.

On several nodes every service has a profile: ``docker compose --profile node-1 up`` is what the second node runs. The
network is always the host's, so that the server can listen on the loopback interface like one without a container.
Devices are all passed and selected by CUDA_VISIBLE_DEVICES: a number means the same inside and outside.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from pipeline.base.errors import UserError
from pipeline.serving.plan import LaunchPlan, Process
from pipeline.serving.render.invocation import LOOPBACK, arguments, comments, dump, image_of, variables

_SINGLE = {"--network": "network_mode", "--ipc": "ipc"}
_LISTED = {
    "--group-add": "group_add",
    "--cap-add": "cap_add",
    "--security-opt": "security_opt",
    "--device": "devices",
}
START_PERIOD_S = 3600
"""Seconds that loading may take before a health check counts: a 405B model from a network disk takes most of it."""


def options(plan: LaunchPlan) -> tuple[tuple[str, str], ...]:
    """What the container gets from the host, as options of `docker run` with their values."""
    words = list(plan.docker)
    pairs: list[tuple[str, str]] = [("--network", "host")]
    while words:
        name, equals, value = words.pop(0).partition("=")
        pairs.append((name, value if equals or not words or words[0].startswith("-") else words.pop(0)))
    return tuple(dict.fromkeys(pairs))


def mounted(plan: LaunchPlan) -> tuple[str, ...]:
    """Folders and files that the plan names by absolute paths, outermost first; they keep their paths inside.

    A snapshot of the Hub's cache holds links to the blobs beside it: the repository's folder stands for it.
    """
    named = [_whole(path) for word in (plan.model, *plan.argv[3:], *plan.env.values()) for path in _paths(word)]
    return tuple(
        path
        for path in dict.fromkeys(named)
        if not any(PurePosixPath(path).is_relative_to(other) for other in named if other != path)
    )


def _paths(word: str) -> Iterator[str]:
    """Absolute paths in an argument, which may be a JSON object (the draft model of --speculative-config)."""
    if word.startswith("{"):
        values = json.loads(word).values()
        yield from (value for value in values if isinstance(value, str) and value.startswith("/"))
    elif word.startswith("/"):
        yield word


def _whole(path: str) -> str:
    parents = PurePosixPath(path).parents
    return next((str(parent.parent) for parent in parents if parent.name == "snapshots"), path)


def docker_run(
    plan: LaunchPlan,
    process: Process,
    *,
    image: str | None = None,
    name: str | None = None,
    host: str = LOOPBACK,
    more_env: tuple[tuple[str, str], ...] = (),
) -> tuple[str, ...]:
    """The whole command for the container of one process.

    The model is mounted read-only where it lies, so that the plan's paths hold inside. ``more_env`` are variables
    beside the plan's, such as those that keep the server offline.
    """
    program, *rest = arguments(process, host=host)
    env = {**variables(plan, process), **dict(more_env)}
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
        *rest,
    )


def compose(plan: LaunchPlan, processes: Sequence[Process], *, image: str | None = None, host: str = LOOPBACK) -> str:
    """The file, with the warnings of the plan as comments at its top."""
    several = len({process.node for process in processes}) > 1
    services: dict[str, Any] = {}
    for process in processes:
        name = f"node-{process.node}" if several else "vllm"
        name += "" if sum(other.node == process.node for other in processes) == 1 else f"-{process.replica}"
        services[name] = _service(plan, process, image, host)
        if several:
            services[name]["profiles"] = [f"node-{process.node}"]
    return comments(plan) + dump({"services": services})


def _service(plan: LaunchPlan, process: Process, image: str | None, host: str) -> dict[str, Any]:
    program, *rest = arguments(process, host=host)
    service: dict[str, Any] = {
        "image": image_of(plan, image),
        "entrypoint": [program],
        "command": [_literal(word) for word in rest],
        "environment": {name: _literal(value) for name, value in variables(plan, process).items()},
        "volumes": [
            {"type": "bind", "source": path, "target": path, "read_only": True, "bind": {"create_host_path": False}}
            for path in map(_literal, mounted(plan))
        ],
        "restart": "unless-stopped",
        "stop_grace_period": "30s",
    }
    service |= _from_the_host(plan)
    if process.port is not None:
        service["healthcheck"] = _health(process.port)
    return service


def _from_the_host(plan: LaunchPlan) -> dict[str, Any]:
    """The options of `docker run` in compose's words."""
    found: dict[str, Any] = {}
    for option, value in options(plan):
        if option in _LISTED:
            found.setdefault(_LISTED[option], []).append(f"{value}:{value}" if option == "--device" else value)
        elif option in _SINGLE:
            found[_SINGLE[option]] = value
        elif option == "--gpus":
            reserved = [{"driver": "nvidia", "count": value, "capabilities": ["gpu"]}]
            found["deploy"] = {"resources": {"reservations": {"devices": reserved}}}
        else:
            raise UserError(f"{option} of `docker run` has no form in a compose file")
    return found


def _health(port: int) -> Mapping[str, Any]:
    """Asked by Python, which an image with vLLM has; curl it may lack."""
    ask = f"import urllib.request; urllib.request.urlopen('http://127.0.0.1:{port}/health', timeout=5)"
    return {
        "test": ["CMD", "python3", "-c", ask],
        "interval": "10s",
        "timeout": "10s",
        "retries": 3,
        "start_period": f"{START_PERIOD_S}s",
    }


def _literal(text: str) -> str:
    """Text that compose leaves alone: a dollar sign begins one of its variables."""
    return text.replace("$", "$$")

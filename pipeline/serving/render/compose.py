"""A launch as a docker compose file: one service for each container, ``docker compose up`` runs all of a node.

On several nodes every service has a profile, and ``docker compose --profile node-1 up`` is what the second node runs.
The same options as `docker.py`, which says why they are what they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.errors import UserError
from pipeline.serving.plan import LaunchPlan, Process
from pipeline.serving.render.comments import comments, dump
from pipeline.serving.render.docker import mounted, options
from pipeline.serving.render.invocation import LOOPBACK, contained, containers, image_of, variables

_SINGLE = {"--network": "network_mode", "--ipc": "ipc"}
_LISTED = {
    "--group-add": "group_add",
    "--cap-add": "cap_add",
    "--security-opt": "security_opt",
    "--device": "devices",
}
START_PERIOD_S = 3600
"""Seconds that loading may take before a health check counts: a 405B model from a network disk takes most of it."""


def compose(plan: LaunchPlan, processes: Sequence[Process], *, image: str | None = None, host: str = LOOPBACK) -> str:
    """The file, with the reasons of the plan as comments at its top."""
    groups = containers(processes)
    several = len({group[-1].node for group in groups}) > 1
    services: dict[str, Any] = {}
    for group in groups:
        last = group[-1]
        name = f"node-{last.node}" if several else "vllm"
        name += "" if sum(other[-1].node == last.node for other in groups) == 1 else f"-{last.replica}"
        services[name] = _service(plan, group, image, host)
        if several:
            services[name]["profiles"] = [f"node-{last.node}"]
    return comments(plan) + dump({"services": services})


def _service(plan: LaunchPlan, group: Sequence[Process], image: str | None, host: str) -> dict[str, Any]:
    port = group[-1].port
    program, *rest = contained(group, host=host)
    service: dict[str, Any] = {
        "image": image_of(plan, image),
        "entrypoint": [program],
        "command": [_literal(word) for word in rest],
        "environment": {name: _literal(value) for name, value in variables(plan, group[-1]).items()},
        "volumes": [
            {"type": "bind", "source": path, "target": path, "read_only": True, "bind": {"create_host_path": False}}
            for path in map(_literal, mounted(plan))
        ],
        "restart": "unless-stopped",
        "stop_grace_period": "30s",
    }
    service |= _from_the_host(plan)
    if port is not None:
        service["healthcheck"] = _health(port)
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

"""A launch as a docker compose file: one service for each container, ``docker compose up`` runs all of a node.

On several nodes every service has a profile, and ``docker compose --profile node-1 up`` is what the second node runs.
The same options as `docker.py`, which says why they are what they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from pipeline.serving.plan import LaunchPlan, Process
from pipeline.serving.render.comments import comments
from pipeline.serving.render.docker import mounted
from pipeline.serving.render.invocation import LOOPBACK, accelerator, contained, containers, image_of, variables

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
    text = yaml.safe_dump({"services": services}, sort_keys=False, allow_unicode=True, width=1000)
    return comments(plan) + text


def _service(plan: LaunchPlan, group: Sequence[Process], image: str | None, host: str) -> dict[str, Any]:
    kind, port = accelerator(plan).kind, group[-1].port
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
        "network_mode": "host",
        "ipc": "host",
        "restart": "unless-stopped",
        "stop_grace_period": "30s",
    }
    service |= _devices(kind, rdma=plan.layout.nodes > 1 and kind != "cpu")
    if port is not None:
        service["healthcheck"] = _health(port)
    return service


def _devices(kind: str, *, rdma: bool) -> dict[str, Any]:
    devices = ["/dev/kfd:/dev/kfd", "/dev/dri:/dev/dri"] if kind == "rocm" else []
    capabilities = ["SYS_PTRACE"] if kind == "rocm" else []
    found: dict[str, Any] = {}
    if kind == "rocm":
        found |= {"group_add": ["video"], "security_opt": ["seccomp=unconfined"]}
    if kind == "cuda":
        reserved = [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]
        found["deploy"] = {"resources": {"reservations": {"devices": reserved}}}
    if rdma:
        devices.append("/dev/infiniband:/dev/infiniband")
        capabilities.append("IPC_LOCK")
        found["ulimits"] = {"memlock": -1}
    return found | {name: value for name, value in (("devices", devices), ("cap_add", capabilities)) if value}


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

"""Nodes of Ray without what nobody asks here: dashboard, metrics, environments of tasks, scaling, logs.

Each of those is one more Python beside a node's raylet, which takes more of a machine than the raylet does; and on a
busy one a node gives up where they take longer than a quarter of a minute.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
_NO_PORT = -1  # what an agent says of a service that it does not have
_BY_PIPE = {"RAY_enable_pipe_based_agent_to_parent_health_check": "1"}


@contextmanager
def lean_nodes() -> Iterator[None]:
    """Nodes that are started within take tasks, and nothing else; a task with a ``runtime_env`` waits for ever."""
    from ray._private import node, services, utils

    start = services.start_ray_process

    def start_lean(command: Sequence[str], process_type: str, *given: Any, **named: Any) -> Any:
        if process_type == "raylet":
            command = _without_agents(command)
            named["env_updates"] = {**(named.get("env_updates") or {}), **_BY_PIPE}
        return start(command, process_type, *given, **named)

    with ExitStack() as stack:
        # Whoever starts a node would import what the dashboard needs, to see whether it is there.
        stack.enter_context(mock.patch.object(utils, "get_dashboard_dependency_error", return_value=ImportError()))
        stack.enter_context(mock.patch.object(services, "start_ray_process", start_lean))
        for name in ("start_api_server", "start_monitor", "start_log_monitor"):
            stack.enter_context(mock.patch.object(node.Node, name))
        yield


def _without_agents(command: Sequence[str]) -> list[str]:
    """A raylet's command whose agents only wait for its end, which must be there, and have told it of no port."""
    from ray._raylet import persist_port

    values = {name: value for name, _, value in (word.partition("=") for word in command)}
    for name in _PORTS:
        persist_port(values["--session_dir"], values["--node_id"], name, _NO_PORT)
    # A raylet holds the other end of their input; the session is named for whoever looks what is left of it.
    waits = subprocess.list2cmdline(["sh", "-c", "read end", values["--session_dir"]])
    agents = {f"--{name}_command": waits for name in ("dashboard_agent", "runtime_env_agent")}
    return [f"{name}={agents[name]}" if (name := word.partition("=")[0]) in agents else word for word in command]

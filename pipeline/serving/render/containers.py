"""A launch in containers: `docker run` as a list and never a shell string, a compose file, or Kubernetes manifests.

In a compose file of several nodes every service has a profile: ``docker compose --profile node-1 up`` is what the
second node runs. The network is that of the host, so that the server can listen on the loopback interface like one
without a container. Devices are all passed and selected by CUDA_VISIBLE_DEVICES: a number means the same inside.

Kubernetes gets a Deployment of replicas. The device plugin numbers GPUs from 0, so no process selects its own. A pod
has its own network: the server listens on all of its interfaces, behind a Service that only the cluster reaches. No
variables of Services are injected: one that is called `vllm` would set VLLM_PORT.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.serving.plan import PORT, LaunchPlan, Process
from quantmint.pipeline.serving.render.invocation import LOOPBACK, accelerator, arguments, comments, dump, image_of

_COMPOSED = {
    **{"--network": "network_mode", "--ipc": "ipc"},
    **{"--group-add": "group_add", "--cap-add": "cap_add", "--security-opt": "security_opt", "--device": "devices"},
}
"""What compose calls the options of `docker run` that the table of knobs has; some take several values."""
_NGINX = "nginx:stable"
_BALANCED = """\
events {{}}
http {{
  upstream vllm {{ least_conn;{servers} keepalive 64; }}
  server {{
    listen {listen};
    client_max_body_size 0;
    proxy_http_version 1.1;
    proxy_set_header Connection "";
    proxy_buffering off;
    proxy_read_timeout 1h;
    location / {{ proxy_pass http://vllm; }}
  }}
}}
"""
"""Requests last seconds to minutes, so they go where the fewest are; tokens of a stream are passed on as they come."""
START_PERIOD_S = 3600
"""Seconds that loading may take before a health check counts: a 405B model from a network disk takes most of it."""


def options(plan: LaunchPlan) -> tuple[tuple[str, str], ...]:
    """What the container gets from the host, as options of `docker run` with their values."""
    words = (word.partition("=") for word in dict.fromkeys(("--network=host", *plan.docker)))
    return tuple((name, value) for name, _, value in words)


def mounted(plan: LaunchPlan) -> tuple[str, ...]:
    """Folders and files that the plan names, outermost first; of a snapshot in the Hub's cache its repository's."""
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
    plan: LaunchPlan, process: Process, *, image: str | None = None, name: str | None = None
) -> tuple[str, ...]:
    """The command for one process's container, the model read-only where it lies."""
    program, *rest = arguments(process)
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
        *rest,
    )


def compose(
    plan: LaunchPlan,
    processes: Sequence[Process],
    *,
    image: str | None = None,
    balancer: int | None = None,
) -> str:
    """The file, with the warnings of the plan as comments at its top; ``balancer`` is the port of one before servers.

    UserError for a balancer of several nodes, whose addresses only their network knows.
    """
    several = len({process.node for process in processes}) > 1
    services: dict[str, Any] = {}
    for process in processes:
        name = f"node-{process.node}" if several else "vllm"
        name += "" if sum(other.node == process.node for other in processes) == 1 else f"-{process.replica}"
        services[name] = _composed(plan, process, image)
        if several:
            services[name]["profiles"] = [f"node-{process.node}"]
        if process.replica % plan.layout.packed:  # as `waves` has it
            before = name.replace(f"-{process.replica}", f"-{process.replica - 1}")
            services[name]["depends_on"] = {before: {"condition": "service_healthy"}}
    if balancer is None:
        return comments(plan) + dump({"services": services})
    if several:
        raise UserError(
            f"{plan.target}: a compose file has no balancer over several nodes",
            hint="Name their addresses in one of your own.",
        )
    services["balancer"] = {
        "image": _NGINX,
        "network_mode": "host",
        "configs": [{"source": "balancer", "target": "/etc/nginx/nginx.conf"}],
        "depends_on": {name: {"condition": "service_healthy"} for name in services},
        "restart": "unless-stopped",
    }
    servers = "".join(f" server {LOOPBACK}:{process.port};" for process in processes)
    config = _BALANCED.format(servers=servers, listen=f"{LOOPBACK}:{balancer}")
    return comments(plan) + dump({"services": services, "configs": {"balancer": {"content": config}}})


def _composed(plan: LaunchPlan, process: Process, image: str | None) -> dict[str, Any]:
    program, *rest = arguments(process)
    service: dict[str, Any] = {
        "image": image_of(plan, image),
        "entrypoint": [program],
        "command": [_literal(word) for word in rest],
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
            reserved = [{"driver": "nvidia", "count": value, "capabilities": ["gpu"]}]
            service["deploy"] = {"resources": {"reservations": {"devices": reserved}}}
        elif option in ("--network", "--ipc"):
            service[_COMPOSED[option]] = value
        else:
            service.setdefault(_COMPOSED[option], []).append(f"{value}:{value}" if option == "--device" else value)
    if process.port is not None:  # asked by Python, which an image with vLLM has; curl it may lack
        ask = f"import urllib.request; urllib.request.urlopen('http://127.0.0.1:{process.port}/health', timeout=5)"
        how = {"interval": "10s", "timeout": "10s", "retries": 3, "start_period": f"{START_PERIOD_S}s"}
        service["healthcheck"] = {"test": ["CMD", "python3", "-c", ask], **how}
    return service


def _literal(text: str) -> str:
    """Text that compose leaves alone: a dollar sign begins one of its variables."""
    return text.replace("$", "$$")


_ANYWHERE = "0.0.0.0"  # noqa: S104 - of the pod, which nothing outside the cluster reaches
SHARED_VOLUME = {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}
SHARED_MOUNT = {"name": "shared-memory", "mountPath": "/dev/shm"}  # noqa: S108
"""What processes of one server share is more than a container's 64 MiB."""
RESOURCES = {"rocm": "amd.com/gpu", "cuda": "nvidia.com/gpu"}
"""What the vendors' device plugins call a GPU."""
_ASK = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 10, "timeoutSeconds": 5}
_PROBES = {
    "startupProbe": {**_ASK, "failureThreshold": START_PERIOD_S // 10},
    "readinessProbe": {**_ASK, "failureThreshold": 1},
    "livenessProbe": {**_ASK, "failureThreshold": 6},
}


def manifests(plan: LaunchPlan, *, image: str | None = None, claim: str | None = None) -> str:
    """The YAML documents, with the warnings of the plan as comments at their top.

    The model comes from the nodes' own disks, or with ``claim`` from a PersistentVolumeClaim of that name whose root
    is the model's folder. UserError for servers that share one GPU, which device plugins do not hand out, and for one
    that several nodes share.
    """
    if plan.layout.packed > 1:
        raise UserError(
            f"{plan.layout.packed} servers on one GPU: Kubernetes gives a GPU to one container",
            hint="Plan with --pack 1, or use --compose.",
        )
    if plan.layout.nodes > 1:
        raise UserError(
            f"the plan has one server on {plan.layout.nodes} nodes, and a pod is on one",
            hint="Use --shell or --compose, which have a section for each node.",
        )
    name = object_name("serve-", plan.served_model_name.rstrip("/").rpartition("/")[2])
    labels = {"app.kubernetes.io/name": name}
    spec = {
        "replicas": plan.layout.replicas,
        # No GPU is free for a second pod beside the one that it replaces.
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
        "selector": {"matchLabels": labels},
        "template": _pod(plan, labels, image, claim),
    }
    service = {"selector": labels, "ports": [{"name": "http", "port": PORT, "targetPort": "http"}]}
    documents = [
        {"apiVersion": api, "kind": kind, "metadata": {"name": name, "labels": labels}, "spec": spec}
        for api, kind, spec in (("apps/v1", "Deployment", spec), ("v1", "Service", service))
    ]
    return comments(plan) + dump(*documents)


def _pod(plan: LaunchPlan, labels: Mapping[str, str], image: str | None, claim: str | None) -> dict[str, Any]:
    kind = accelerator(plan).kind
    program, *rest = arguments(Process(0, "server", 0, (), PORT, {}, plan.argv), host=_ANYWHERE)
    capabilities = [value for option, value in options(plan) if option == "--cap-add"]
    volumes: list[dict[str, Any]] = [SHARED_VOLUME]
    mounts: list[dict[str, Any]] = [SHARED_MOUNT]
    for number, path in enumerate(mounted(plan)):
        name = f"model-{number}" if number else "model"
        claimed = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        volumes.append({"name": name, **({"hostPath": {"path": path}} if claim is None or number else claimed)})
        mounts.append({"name": name, "mountPath": path, "readOnly": True})
    container: dict[str, Any] = {
        "name": "vllm",
        "image": image_of(plan, image),
        "command": [program],
        "args": rest,
        "env": plain_variables(plan.env),
        "volumeMounts": mounts,
        "ports": [{"name": "http", "containerPort": PORT}],
        **_PROBES,
    }
    if kind != "cpu":
        count = {RESOURCES[kind]: str(plan.layout.gpus)}
        container["resources"] = {"requests": count, "limits": dict(count)}
    if capabilities:
        container["securityContext"] = {"capabilities": {"add": capabilities}}
    if ("--security-opt", "seccomp=unconfined") in options(plan):
        container.setdefault("securityContext", {})["seccompProfile"] = {"type": "Unconfined"}
    return {
        "metadata": {"labels": labels},
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 60,
            "containers": [container],
            "volumes": volumes,
        },
    }


def plain_variables(values: Mapping[str, str]) -> list[dict[str, Any]]:
    """Variables of a container with their values as they stand: neither $(NAME) nor $$ is replaced."""
    return [{"name": name, "value": value.replace("$", "$$")} for name, value in values.items()]


def object_name(prefix: str, text: str) -> str:
    """A name that Kubernetes takes, with room for what it adds: at most 52 lower-case letters, digits and dashes."""
    word = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return f"{prefix}{word}"[:52].rstrip("-")

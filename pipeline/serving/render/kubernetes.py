"""A launch as one Kubernetes Deployment, and the parts of pods that jobs of `clusters` share with it.

The device plugin numbers a pod's GPUs from 0, so no process selects its own. A pod has its own network: the server
listens on all of its interfaces, which only the cluster reaches. Kubernetes must not inject variables of Services: a
Service that is called `vllm` would set VLLM_PORT.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.serving.plan import PORT, LaunchPlan, Process
from quantmint.pipeline.serving.render.docker import START_PERIOD_S, mounted, options
from quantmint.pipeline.serving.render.invocation import accelerator, arguments, image_of
from quantmint.pipeline.serving.render.manifest import comments, dump

_ALL_INTERFACES = "0.0.0.0"  # noqa: S104 - of the pod, which nothing outside the cluster reaches
SHARED_VOLUME = {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}
SHARED_MOUNT = {"name": "shared-memory", "mountPath": "/dev/shm"}  # noqa: S108
"""Shared memory for the processes of one server, which need more than a container's 64 MiB."""
RESOURCES = {"rocm": "amd.com/gpu", "cuda": "nvidia.com/gpu"}
"""Names of a GPU in the vendors' device plugins."""
_HEALTH = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 10, "timeoutSeconds": 5}
_PROBES = {
    "startupProbe": {**_HEALTH, "failureThreshold": START_PERIOD_S // 10},
    "readinessProbe": {**_HEALTH, "failureThreshold": 1},
    "livenessProbe": {**_HEALTH, "failureThreshold": 6},
}


def deployment(plan: LaunchPlan, *, image: str | None = None, claim: str | None = None) -> str:
    """Return the Deployment of the plan's replicas as YAML, with the plan's warnings as comments at the top.

    The model comes from the nodes' own disks, or with ``claim`` from a PersistentVolumeClaim of that name whose root is
    the model's folder. Raises `UserError` for several servers on one GPU, for a server on several nodes, and when no
    image is known.
    """
    if plan.layout.packed > 1:
        raise UserError(
            f"{plan.layout.packed} servers on one GPU: Kubernetes gives a GPU to one container",
            hint="Plan with --pack 1, or use --compose.",
        )
    if plan.layout.nodes > 1:
        raise UserError(
            f"the plan has one server on {plan.layout.nodes} nodes, but a pod runs on one",
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
    document = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": spec,
    }
    return comments(plan) + dump(document)


def _pod(plan: LaunchPlan, labels: Mapping[str, str], image: str | None, claim: str | None) -> dict[str, Any]:
    kind = accelerator(plan).kind
    process = Process(0, "server", 0, (), PORT, {}, plan.argv)
    program, *words = arguments(process, host=_ALL_INTERFACES)
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
        "args": words,
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
    """Return the `env` of a container: a list of {"name": ..., "value": ...}.

    Each $ is written twice, because Kubernetes would put a variable's value in the place of $(NAME).
    """
    return [{"name": name, "value": value.replace("$", "$$")} for name, value in values.items()]


def object_name(prefix: str, text: str) -> str:
    """Return a valid Kubernetes name: at most 52 lower-case letters, digits and dashes.

    The API takes 63; the rest is for the suffixes that Kubernetes adds.
    """
    word = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return f"{prefix}{word}"[:52].rstrip("-")

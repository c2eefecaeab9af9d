"""A pod that runs one command of ours once, in a Job or a CronJob, from the template job.yaml.j2.

The command's exit codes 1 to 4 end the Job, because another try would give the same. Any other end is tried again and
goes on where the last try stopped, because the store is on a volume. A secret is a reference to the cluster's Secret;
its value is in no manifest.

A cluster's own pod template is merged over our defaults, and the run's needs (image, command, variables, GPUs, claims)
over both. The API server checks the result.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any, Literal

import yaml

from quantmint.pipeline.base.errors import SECRET, RecipeError, UserError, shown_path
from quantmint.pipeline.clusters.submit import job
from quantmint.pipeline.recipe.yaml_positions import parse, text_of
from quantmint.pipeline.serving.environment import IMAGE_VARIABLE
from quantmint.pipeline.serving.render import kubernetes as manifests

CONTAINER = "quantmint"
RETRIES = 3
_TEMPLATE = Path(__file__).with_name("job.yaml.j2")


@dataclass(frozen=True, slots=True)
class VolumeClaim:
    """A PersistentVolumeClaim, with the absolute path that its root has in the pod."""

    name: str
    path: str = "/work"


@dataclass(frozen=True, slots=True)
class SecretVariable:
    """A variable whose value is a key of a Secret."""

    variable: str
    secret: str
    key: str


@dataclass(frozen=True, slots=True)
class Pod:
    """``command`` in ``image``, word by word, started in ``folder`` with ``gpus`` accelerators of ``kind``.

    ``variables`` are plain ones. ``cpus`` and ``memory_gb`` are requests: the pod may use more. ``template`` is the
    cluster's own, see `read_template`.
    """

    image: str
    name: str = ""
    command: tuple[str, ...] = ()
    kind: Literal["rocm", "cuda", "cpu"] = "cpu"
    gpus: int = 0
    folder: str | None = None
    claims: tuple[VolumeClaim, ...] = ()
    secrets: tuple[SecretVariable, ...] = ()
    cpus: int | None = None
    memory_gb: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    template: Mapping[str, Any] | None = None

    @property
    def labels(self) -> dict[str, str]:
        """Return the labels of all pods of quantmint, and of this recipe's."""
        instance = manifests.object_name("", self.name)
        return {"app.kubernetes.io/name": CONTAINER, "app.kubernetes.io/instance": instance}


def has_digest(image: str) -> bool:
    """Return whether the image is named by its digest, as in ``NAME@sha256:...``."""
    return re.fullmatch(r".+@sha256:[0-9a-f]{64}", image) is not None


def job_manifest(request: job.JobRequest, pod: Pod) -> dict[str, Any]:
    """Return the manifest of a Job, which the API server gives a new name each time.

    Raises `UserError` for several nodes, for a store that ends with the pod, and for a secret among the variables.
    """
    if request.nodes > 1:
        hint = "Make a Ray cluster of them (KubeRay) and submit to that: --ray http://HEAD:8265"
        raise UserError(f"the run needs {request.nodes} nodes, and a Job's pod is on one", hint=hint)
    needs = {name: getattr(request, name) for name in ("name", "kind", "gpus", "cpus", "memory_gb")}
    pod = replace(pod, command=request.command(CONTAINER), **needs)
    spec = job_spec(pod, hours=None if request.seconds is None else request.seconds / 3600)
    require_persistent(pod, request.store)
    metadata = {"generateName": manifests.object_name("quantmint-", request.name) + "-", "labels": pod.labels}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def job_spec(pod: Pod, *, retries: int = RETRIES, hours: float | None = None) -> dict[str, Any]:
    """Return the `spec` of a Job, which is also a CronJob's `jobTemplate.spec`; ``hours`` is its deadline.

    Raises `UserError` for a secret among the plain variables.
    """
    for name in pod.variables:
        job.refuse_secret("--env", name, f"Put it into a Secret of the cluster: --secret {name}=SECRET:KEY")
    image = {IMAGE_VARIABLE: pod.image} if has_digest(pod.image) else {}
    memory = None if pod.memory_gb is None else f"{pod.memory_gb}G"
    gpus = {manifests.RESOURCES[pod.kind]: str(pod.gpus)} if pod.gpus else {}
    requests = {name: str(value) for name, value in (("cpu", pod.cpus), ("memory", memory)) if value is not None}
    text = job.render(
        _TEMPLATE,
        pod=pod,
        name=CONTAINER,
        retries=retries,
        hours=hours,
        gpus=gpus,
        requests={**requests, **gpus},
        shared_mount=manifests.SHARED_MOUNT,
        shared_volume=manifests.SHARED_VOLUME,
        variables=manifests.plain_variables({**image, **pod.variables}),
    )
    spec, defaults, needs = yaml.safe_load_all(text)
    return {**spec, "template": merge(merge(defaults, pod.template or {}), needs)}


def merge(base: Any, over: Any) -> Any:
    """Return ``over`` merged into ``base``: mappings by key, lists of mappings by name or mountPath, the rest replaced.

    >>> merge({"a": 1, "volumes": [{"name": "x"}]}, {"volumes": [{"name": "x", "nfs": 2}, {"name": "y"}]})
    {'a': 1, 'volumes': [{'name': 'x', 'nfs': 2}, {'name': 'y'}]}
    """
    if over is None:
        return base
    if isinstance(base, Mapping) and isinstance(over, Mapping):
        return {**base, **{key: merge(base.get(key), value) for key, value in over.items()}}
    if isinstance(base, list) and isinstance(over, list):
        items = [*base, *over]
        for key in ("mountPath", "name"):
            if all(isinstance(item, Mapping) and key in item for item in items):
                merged: dict[str, Any] = {}
                for item in items:
                    merged[item[key]] = merge(merged.get(item[key]), item)
                return list(merged.values())
    return over


def read_template(path: Path) -> dict[str, Any]:
    """Read a PodTemplateSpec, a Pod, or a pod's spec. Raises `RecipeError` for other files and for secrets."""
    file = shown_path(path)
    data = parse(text_of(path), file).data
    data = data if "spec" in data or "metadata" in data else {"spec": data}
    spec, metadata = data.get("spec") or {}, data.get("metadata") or {}
    if not isinstance(spec, dict) or not isinstance(metadata, dict):
        raise RecipeError(f"{file}: found no pod, expected metadata and spec")
    for container in (*(spec.get("initContainers") or ()), *(spec.get("containers") or ())):
        for entry in container.get("env") or () if isinstance(container, dict) else ():
            name, value = str(entry.get("name")), entry.get("value")
            if value and SECRET.search(name) and not str(value).startswith("/"):
                message = f"{file}: found a value of {name}, which everyone with access to the manifest can read"
                raise RecipeError(message, hint="valueFrom: {secretKeyRef: {name: SECRET, key: KEY}}")
    return {"metadata": {key: metadata[key] for key in ("labels", "annotations") if metadata.get(key)}, "spec": spec}


def require_persistent(pod: Pod, store: str) -> None:
    """Raise `UserError` for a store that ends with the pod; with a cluster's template any path may be on a volume."""
    folder = pod.folder or (pod.claims[0].path if pod.claims else "/")
    path = PurePosixPath(normpath(PurePosixPath(folder) / store))
    if pod.template is None and not any(path.is_relative_to(claim.path) for claim in pod.claims):
        raise UserError(
            f"--store: found {path}, which is on no volume that outlives the pod",
            hint="--pvc CLAIM[:/path] mounts a PersistentVolumeClaim; --store is a path in the pod.",
        )

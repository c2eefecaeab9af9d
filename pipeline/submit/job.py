"""A task as a Job of Kubernetes: one pod, tried again where trying again can help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from posixpath import normpath
from typing import Any

from pipeline.errors import UserError
from pipeline.serving.render.kubernetes import object_name
from pipeline.submit.pod import CONTAINER, Claim, Pod, Reference, job_spec
from pipeline.submit.pod_template import PodTemplate
from pipeline.submit.task import Task

_PASSING = {"emptyDir", "ephemeral", "configMap", "secret", "downwardAPI", "projected", "image", "gitRepo"}
"""Kinds of volumes that end with their pod, or that nobody writes."""


@dataclass(frozen=True, slots=True)
class Options:
    """``folder`` is where the run starts in the pod, and what recipe and store are relative to (None: the claim).

    ``template`` is what the cluster wants of every pod.
    """

    image: str
    claims: tuple[Claim, ...]
    folder: str | None = None
    secrets: tuple[Reference, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    selector: Mapping[str, str] = field(default_factory=dict)
    template: PodTemplate | None = None


def manifest(task: Task, options: Options) -> dict[str, Any]:
    """The Job, with a name that the cluster completes: one recipe may be submitted again.

    Raises UserError for several nodes, and for a store that is on no claim: what a run makes must outlive its pod.
    """
    if task.nodes > 1:
        raise UserError(
            f"the run needs {task.nodes} nodes, and a Job's pod is on one",
            hint="Make a Ray cluster of them (KubeRay) and submit to that: --ray http://HEAD:8265",
        )
    pod = Pod(
        name=task.name,
        image=options.image,
        command=task.words(CONTAINER),
        kind=task.kind,
        gpus=task.gpus,
        folder=options.folder,
        claims=options.claims,
        secrets=options.secrets,
        cpus=task.cpus,
        memory_gb=task.memory_gb,
        variables=options.variables,
        selector=options.selector,
        given=options.template,
    )
    hours = None if task.seconds is None else task.seconds / 3600
    spec = job_spec(pod, hours=hours)
    _require_kept(task, pod, spec["template"]["spec"])
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"generateName": object_name("quantmint-", task.name) + "-", "labels": pod.labels},
        "spec": spec,
    }


def _require_kept(task: Task, pod: Pod, spec: Mapping[str, Any]) -> None:
    """The innermost volume that holds the store must be there when the pod is not."""
    container = next(item for item in spec["containers"] if item["name"] == CONTAINER)
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounts = {normpath(mount["mountPath"]): mount for mount in container["volumeMounts"]}
    lasting = [path for path, mount in mounts.items() if not _PASSING & set(volumes[mount["name"]])]
    if not lasting or pod.starts_in is None:
        raise UserError(
            "--pvc is missing: the store and what is published must outlive the pod",
            hint="--pvc CLAIM[:/path] mounts a PersistentVolumeClaim that several nodes can write.",
        )
    store = PurePosixPath(normpath(PurePosixPath(pod.starts_in) / task.store))
    holding = max((path for path in mounts if store.is_relative_to(path)), key=len, default=None)
    if holding not in lasting:
        raise UserError(
            f"--store: found {store}, which is on none of the volumes and would end with its pod",
            hint=f"--store is a path in the pod, such as {lasting[0]}/store.",
        )
    if mounts[holding].get("readOnly"):
        raise UserError(f"--store: found {store}, which is on a volume that is mounted to be read")

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
from pipeline.submit.task import Task


@dataclass(frozen=True, slots=True)
class Options:
    """``folder`` is where the run starts in the pod, and what recipe and store are relative to (None: the claim)."""

    image: str
    claims: tuple[Claim, ...]
    folder: str | None = None
    secrets: tuple[Reference, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    selector: Mapping[str, str] = field(default_factory=dict)


def manifest(task: Task, options: Options) -> dict[str, Any]:
    """The Job, with a name that the cluster completes: one recipe may be submitted again.

    Raises UserError for several nodes, and for a store that is on no claim: what a run makes must outlive its pod.
    """
    if task.nodes > 1:
        raise UserError(
            f"the run needs {task.nodes} nodes, and a Job's pod is on one",
            hint="Make a Ray cluster of them (KubeRay) and submit to that: --ray http://HEAD:8265",
        )
    if not options.claims:
        raise UserError(
            "--pvc is missing: the store and what is published must outlive the pod",
            hint="--pvc CLAIM[:/path] mounts a PersistentVolumeClaim that several nodes can write.",
        )
    folder = options.folder or options.claims[0].path
    store = PurePosixPath(normpath(PurePosixPath(folder) / task.store))
    if not any(store.is_relative_to(claim.path) for claim in options.claims):
        raise UserError(
            f"--store: found {store}, which is on none of the volumes and would end with its pod",
            hint=f"--store is a path in the pod, such as {options.claims[0].path}/store.",
        )
    pod = Pod(
        name=task.name,
        image=options.image,
        command=task.words(CONTAINER),
        kind=task.kind,
        gpus=task.gpus,
        folder=folder,
        claims=options.claims,
        secrets=options.secrets,
        cpus=task.cpus,
        memory_gb=task.memory_gb,
        variables=options.variables,
        selector=options.selector,
    )
    hours = None if task.seconds is None else task.seconds / 3600
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"generateName": object_name("quantmint-", task.name) + "-", "labels": pod.labels},
        "spec": job_spec(pod, hours=hours),
    }

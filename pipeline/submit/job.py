"""A task as a Job of Kubernetes: one pod, tried again where trying again can help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import UserError
from pipeline.serving.render.kubernetes import object_name
from pipeline.submit.kept import require_kept
from pipeline.submit.pod import CONTAINER, Claim, Pod, Reference, job_spec
from pipeline.submit.pod_template import PodTemplate
from pipeline.submit.task import Task


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
    require_kept(spec["template"]["spec"], pod.starts_in, task.store)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"generateName": object_name("quantmint-", task.name) + "-", "labels": pod.labels},
        "spec": spec,
    }

"""A schedule as a CronJob of Kubernetes (batch/v1).

The pod is `pipeline.clusters.submit.pod`'s: it starts in the folder of its volume, where the store, what was published
and ./recipes lie. Jobs of one CronJob do not overlap (``Forbid``). Since 1.27, which `timeZone` needs, the newest
missed time is begun however many were missed, unless a deadline says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pipeline.base.hardware import hardware
from pipeline.clusters.submit.pod import Claim, Pod, Reference, by_digest, job_spec, require_lasting
from pipeline.serving.render.invocation import dump
from pipeline.serving.render.kubernetes import object_name
from pipeline.upkeep.schedule.export import PREFIX, Export, classic_or_refuse, refusal
from pipeline.upkeep.schedule.recipes import LATE, Scheduled

_RETRIES: Final = 1
"""Of a pod that was killed: `requantize` itself repeats what may succeed in a while."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """What a pod gets from its cluster, as `pipeline.clusters.submit.pod.Pod` has it."""

    image: str
    namespace: str | None = None
    claims: tuple[Claim, ...] = ()
    secrets: tuple[Reference, ...] = ()
    selector: Mapping[str, str] = field(default_factory=dict)
    cpus: int | None = None
    memory_gb: int | None = None
    template: Mapping[str, Any] | None = None


def cron_job(item: Scheduled, export: Export, cluster: Cluster) -> dict[str, str]:
    """The text of ``quantmint-NAME.yaml``. UserError for what a CronJob cannot say."""
    target = item.recipe.target
    machine = hardware(target.hardware)
    gpus = 0 if machine.kind == "cpu" or export.on is not None else target.gpus  # jobs of a Ray cluster hold their own
    if gpus > machine.gpus_per_node:
        hint = "Run it on a Ray cluster: --on http://HEAD:8265"
        raise refusal(item, f"a pod has the GPUs of one node, and {gpus} are of several", hint)
    pod = Pod(
        name=item.name,
        image=cluster.image,
        command=export.command(item),
        kind=machine.kind,
        gpus=gpus,
        folder=export.directory,
        claims=cluster.claims,
        secrets=cluster.secrets,
        cpus=cluster.cpus,
        memory_gb=cluster.memory_gb,
        variables=export.variables,
        selector=cluster.selector,
        given=cluster.template,
    )
    job = job_spec(pod, retries=_RETRIES)
    if cluster.claims:  # else the store is where the image has it
        require_lasting(job["template"]["spec"], export.store or "store")
    within = {"namespace": cluster.namespace} if cluster.namespace else {}
    deadline = {"startingDeadlineSeconds": int(LATE.total_seconds())} if item.skips_missed else {}
    manifest = {
        "apiVersion": "batch/v1",
        "kind": "CronJob",
        "metadata": {"name": object_name(PREFIX, item.name), **within, "labels": pod.labels},
        "spec": {
            "schedule": classic_or_refuse(item, "Kubernetes", either_day=True),
            "timeZone": item.zone,
            "concurrencyPolicy": "Forbid",
            **deadline,
            "successfulJobsHistoryLimit": 3,
            "failedJobsHistoryLimit": 3,
            "jobTemplate": {"metadata": {"labels": pod.labels}, "spec": job},
        },
    }
    file = f"{PREFIX}{item.name}.yaml"
    notes = [] if by_digest(pod.image) else ["the image is named by a tag: that it was moved makes no recipe due"]
    return {file: export.header(file, item.words, *notes) + dump(manifest)}

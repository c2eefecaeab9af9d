"""A schedule as a CronJob of Kubernetes (batch/v1).

The pod is `pipeline.submit.pod`'s: it starts in the folder of its volume, where the store, what was published and
./recipes lie. Jobs of one CronJob do not overlap (``Forbid``); one that comes meanwhile is begun late, if its deadline
allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise

from pipeline.errors import UserError
from pipeline.schedule.cron import LATE_S, parsed, times
from pipeline.schedule.exported import PREFIX, Export, comment, refusal, refuse_clock_changes
from pipeline.schedule.expression import DAYS, WEEK, InexpressibleError, classic
from pipeline.schedule.recipes import Scheduled
from pipeline.serving.hardware import hardware
from pipeline.serving.render.comments import dump
from pipeline.serving.render.kubernetes import object_name
from pipeline.submit.kept import on_a_volume, require_kept
from pipeline.submit.pod import Claim, Pod, Reference, job_spec
from pipeline.submit.pod_template import PodTemplate

_RETRIES = 1
"""Of a pod that was killed: `requantize` itself repeats what may succeed in a while."""
_BEGIN = datetime(2000, 1, 1, tzinfo=UTC)
_SAMPLE = 400


@dataclass(frozen=True, slots=True)
class Cluster:
    """What a pod gets from its cluster, as `pipeline.submit.pod.Pod` has it."""

    image: str
    namespace: str | None = None
    claims: tuple[Claim, ...] = ()
    secrets: tuple[Reference, ...] = ()
    selector: Mapping[str, str] = field(default_factory=dict)
    cpus: int | None = None
    memory_gb: int | None = None
    template: PodTemplate | None = None


def cron_jobs(items: Sequence[Scheduled], export: Export, cluster: Cluster) -> dict[str, str]:
    """The texts of ``quantmint-NAME.yaml``. UserError for what a CronJob cannot say or does otherwise."""
    names: dict[str, str] = {}
    files: dict[str, str] = {}
    for item in items:
        other = names.setdefault(object_name(PREFIX, item.name), item.name)
        if other != item.name:
            raise UserError(
                f"{other} and {item.name} have one name in Kubernetes, {object_name(PREFIX, item.name)}",
                hint="Export them into two namespaces, or rename one.",
            )
        file = f"{PREFIX}{item.name}.yaml"
        files[file] = _cron_job(item, export, cluster, file)
    return files


def _cron_job(item: Scheduled, export: Export, cluster: Cluster, file: str) -> str:
    refuse_clock_changes(item, export, "Kubernetes")
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
    name = object_name(PREFIX, item.name)
    job = job_spec(pod, retries=_RETRIES)
    where = job["template"]["spec"], pod.starts_in, export.store or "store"
    if on_a_volume(*where):
        require_kept(*where)
    within = {"namespace": cluster.namespace} if cluster.namespace else {}
    manifest = {
        "apiVersion": "batch/v1",
        "kind": "CronJob",
        "metadata": {"name": name, **within, "labels": pod.labels},
        "spec": {
            "schedule": _schedule(item),
            "timeZone": item.zone,
            "concurrencyPolicy": "Forbid",
            "startingDeadlineSeconds": LATE_S if item.recipe.refresh.missed == "skip" else deadline(item.expression),
            "successfulJobsHistoryLimit": 3,
            "failedJobsHistoryLimit": 3,
            "jobTemplate": {"metadata": {"labels": pod.labels}, "spec": job},
        },
    }
    notes = [] if pod.by_digest else ["the image is named by a tag: that it was moved makes no recipe due"]
    return comment(*export.header(item, file), *notes) + dump(manifest)


def deadline(expression: str) -> int:
    """Seconds for which a missed time may still be begun: until the next one comes, however long that takes.

    So exactly one is begun after any outage. An hour is added for the clock's changes. Without a deadline the
    controller counts all missed times since the last run, and older ones give up beyond a hundred.
    """
    sim = parsed(expression)
    a_day = [timedelta(hours=hour, minutes=minute) for hour in sorted(sim.hours) for minute in sorted(sim.minutes)]
    day_only = " ".join(("0", "0", *expression.split()[2:]))
    days = list(islice(times(day_only, "UTC", _BEGIN), _SAMPLE))
    nights = max((later - former for former, later in pairwise(days)), default=timedelta(days=366))
    within = max((later - former for former, later in pairwise(a_day)), default=timedelta(0))
    longest = max(nights - (a_day[-1] - a_day[0]), within)
    return round((longest + timedelta(hours=1)).total_seconds())


def _schedule(item: Scheduled) -> str:
    sim = parsed(item.expression)
    try:
        schedule = classic(item.expression)
    except InexpressibleError as error:
        raise refusal(item, f"Kubernetes cannot say {error}", "Use --systemd, or `quantmint schedule run`.") from None
    day, weekday = schedule.split()[2::2]
    if sim.day_and and sim.days != DAYS and not WEEK.issubset(sim.weekdays):
        raise refusal(
            item,
            f"of {day} and {weekday} both must hold for cron, and one is enough for Kubernetes",
            "Use --systemd, or `quantmint schedule run`.",
        )
    return schedule

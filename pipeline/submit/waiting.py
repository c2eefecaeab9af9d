"""Why a job does not run yet, in its place's words, and what to do where waiting alone does not help.

Tables: what Slurm's controller says of a pending job (https://slurm.schedmd.com/job_reason_codes.html), and what
Kubernetes says of a pod that is not placed, or whose container does not start. What is in none of them passes by
itself: others end, nodes come back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

_SLURM: Final[Mapping[str, str]] = {
    r"JobHeldUser|JobHeldAdmin|.*held\b.*|JobHoldMaxRequeue|MaxRequeueExceeded": "It is held: scontrol release "
    "{job}, or whoever runs the cluster does it.",
    "BadConstraints": "No node has what --constraint, --gres, --gpus and --memory ask for: "
    "sinfo -o '%P %N %f %G %m' says what they have. Submit it with less, and --cancel {job}.",
    "InvalidAccount|AccountNotAllowed": "--account names another account: sacctmgr show associations user=$USER "
    "says which you have. --cancel {job}.",
    "InvalidQOS|QOSNotAllowed": "--qos names another quality of service: sacctmgr show associations user=$USER says "
    "which you have. --cancel {job}.",
    r"(QOS|Assoc)(Max\w+Per(Job|Node)(Limit)?|Min\w+)": "This job alone is outside of what the "
    "account or quality of service allows a job: submit it with other --gpus, --cpus, --memory or --time, or with "
    "another --qos, and --cancel {job}.",
    "PartitionTimeLimit": "--time is longer than the partition allows: sinfo -o '%P %l' says how long. A run that is "
    "cut goes on where it stopped. scontrol update JobId={job} TimeLimit=HOURS:00:00 makes it shorter.",
    "DependencyNeverSatisfied": "What it depends on has failed: --cancel {job}.",
    "ReservationDeleted": "The reservation that it names is gone: submit it without, and --cancel {job}.",
}
_CONTAINER: Final[Mapping[str, str]] = {
    "ImagePullBackOff": "Look at the image's name, and whether the pod may read its registry: imagePullSecrets of "
    "--pod-template.",
    "InvalidImageName": "--image is no name of an image: --cancel {job}.",
    "ErrImageNeverPull": "imagePullPolicy is Never and the node has no such image: --pod-template says it.",
    "CreateContainerConfigError": "A Secret or ConfigMap is not there, or has no such key: --secret, --pod-template.",
    "CreateContainerError": "The node cannot make the container, with these volumes and this runtime.",
    "RunContainerError": "The node cannot start the container, with this command, runtime and security context.",
    "CrashLoopBackOff": "A container beside the run ends again and again: kubectl logs POD --container NAME.",
}
_SAME: Final = {"ErrImagePull": "ImagePullBackOff"}
"""What alternates while the same thing is wrong."""
_BACKS_OFF: Final = re.compile(r"[^:]+: (ImagePullBackOff|CrashLoopBackOff)\b")
"""Whose message changes with each try and each pause, which say nothing new."""
_UNSCHEDULABLE: Final[Mapping[str, str]] = {
    r"persistentvolumeclaim .* not found": "--pvc names a claim that this namespace does not have. --cancel {job}.",
    r"untolerated taint(?!.*\{node\.kubernetes\.io/)": "The nodes take only pods that tolerate this: "
    "tolerations of --pod-template.",
    r"didn't match Pod's node affinity/selector": "No node has these labels: --node-selector, and affinity of "
    "--pod-template.",
}
_BUSY: Final = re.compile(r"\bInsufficient\b|\bToo many pods\b")


@dataclass(frozen=True, slots=True)
class Waiting:
    """``reason`` in one line; ``remedy`` only where it does not pass by itself."""

    reason: str
    remedy: str | None = None


def in_slurm(job: str, reason: str) -> Waiting | None:
    """What `scontrol show job` has as Reason of a pending job; None where it has none yet."""
    if reason in {"", "None", "(null)"}:
        return None
    code = re.split(r"[,:(]", reason, maxsplit=1)[0].rstrip("_")
    remedy = next((text for pattern, text in _SLURM.items() if re.fullmatch(pattern, code.replace("_", " "))), None)
    return Waiting(reason.replace("_", " "), _filled(remedy, job))


def in_kubernetes(job: str, pod: Any) -> Waiting | None:
    """What a V1Pod that does not run yet says of itself; None where it says nothing."""
    for condition in pod.status.conditions or ():
        if condition.type == "PodScheduled" and condition.status == "False":
            said = _joined(condition.reason, condition.message)
            busy = _BUSY.search(said)  # with nodes that would do
            remedy = next((text for pattern, text in _UNSCHEDULABLE.items() if re.search(pattern, said)), None)
            return Waiting(said, None if busy else _filled(remedy, job))
    ended: list[Any] = [*(pod.status.init_container_statuses or ()), *(pod.status.container_statuses or ())]
    found = [(status.name, status.state.waiting) for status in ended if status.state and status.state.waiting]
    if not found:
        return None
    # A container that merely comes after others says so too.
    name, state = next(((name, state) for name, state in found if _code(state) in _CONTAINER), found[0])
    return Waiting(f"{name}: {_joined(_code(state), state.message)}", _filled(_CONTAINER.get(_code(state)), job))


class Telling:
    """Says why a job waits, once for each change: a job that runs meanwhile waits anew."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._last: Waiting | str | None = None

    def __call__(self, waits: Waiting | None) -> None:
        """Take the newest look."""
        tries = None if waits is None else _BACKS_OFF.match(waits.reason)
        same = waits if tries is None else tries[0]
        if waits is not None and same != self._last:
            self._tell(f"waits: {waits.reason}")
            if waits.remedy is not None:
                self._tell(f"  {waits.remedy}")
        self._last = same


def _code(state: Any) -> str:
    return _SAME.get(str(state.reason), str(state.reason))


def _joined(*parts: str | None) -> str:
    return ": ".join(" ".join(part.split()) for part in parts if part)


def _filled(remedy: str | None, job: str) -> str | None:
    return None if remedy is None else remedy.replace("{job}", job)

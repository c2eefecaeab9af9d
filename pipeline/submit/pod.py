"""A command of ours as one pod of Kubernetes that runs once: what a Job and a CronJob have in common.

    >>> pod = Pod(name="llama8b-ptpc", image="quantmint@sha256:...", command=("quantmint", "run", "llama8b-ptpc"))
    >>> job_spec(pod)["template"]["spec"]["restartPolicy"]
    'Never'

An exit code of 1 to 4 is a judgement or a wrong recipe: another try finds the same, so the Job ends there. A pod that
was evicted, preempted or drained counts as no try, and any other end is tried again; all of them go on where the last
one stopped, because the store is on the volume. A token comes from a Secret of the cluster by reference: its value is
in no manifest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import UserError
from pipeline.serving.render.kubernetes import RESOURCES, object_name, plain_variables, shared_memory
from pipeline.submit.joining import joined
from pipeline.submit.pod_template import PodTemplate
from pipeline.submit.task import Kind, require_no_secret

CONTAINER = "quantmint"
WORK = "/work"
"""Where a claim is mounted that does not say where."""
GRACE_S = 120
"""Seconds between SIGTERM and SIGKILL: a server ends, a shard that is being written is left out."""
RETRIES = 3
IMAGE_VARIABLE = "QUANTMINT_IMAGE"
_NO_RETRY = (1, 2, 3, 4)
"""FAIL, a wrong recipe, INCONCLUSIVE, INVALID."""
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
"""What most objects may be called."""
_KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_IMAGE = re.compile(r"[A-Za-z0-9][\w./:@-]*")
_DIGEST = re.compile(r".+@sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Claim:
    """A PersistentVolumeClaim, with the absolute path that its root has in the pod."""

    name: str
    path: str = WORK


@dataclass(frozen=True, slots=True)
class Reference:
    """A variable whose value is a key of a Secret."""

    variable: str
    secret: str
    key: str


@dataclass(frozen=True, slots=True)
class Pod:
    """``command`` in ``image``, word by word, started in ``folder`` with ``gpus`` accelerators of ``kind``.

    ``selector`` are labels that the node must have, ``variables`` plain ones of the environment: nothing secret.
    ``cpus`` and ``memory_gb`` are what is kept free for it; it may use more where the node has more. ``given`` is what
    the cluster wants of every pod.
    """

    name: str
    image: str
    command: tuple[str, ...]
    kind: Kind = "cpu"
    gpus: int = 0
    folder: str | None = None
    claims: tuple[Claim, ...] = ()
    secrets: tuple[Reference, ...] = ()
    cpus: int | None = None
    memory_gb: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    selector: Mapping[str, str] = field(default_factory=dict)
    given: PodTemplate | None = None

    @property
    def labels(self) -> dict[str, str]:
        """What finds the pods of one recipe, and those of all."""
        return {"app.kubernetes.io/name": CONTAINER, "app.kubernetes.io/instance": object_name("", self.name)}

    @property
    def starts_in(self) -> str | None:
        """Its working folder; None is the image's own."""
        named = None if self.given is None else self.given.working_folder(CONTAINER)
        return self.folder or named or (self.claims[0].path if self.claims else None)

    @property
    def by_digest(self) -> bool:
        """Whether the image is named by its digest, which no one can move."""
        return by_digest(self.image)


def by_digest(image: str) -> bool:
    """Whether an image is named by its digest."""
    return _DIGEST.fullmatch(image) is not None


def job_spec(
    pod: Pod, *, retries: int = RETRIES, hours: float | None = None, keep_s: int | None = None
) -> dict[str, Any]:
    """The `spec` of a Job, which is also a CronJob's `jobTemplate.spec`.

    ``hours`` ends it whatever it does; ``keep_s`` removes a finished Job with its log after so many seconds.
    """
    rules = [
        {"action": "FailJob", "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [*_NO_RETRY]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    return {
        "backoffLimit": retries,
        **({} if hours is None else {"activeDeadlineSeconds": max(1, round(hours * 3600))}),
        **({} if keep_s is None else {"ttlSecondsAfterFinished": keep_s}),
        "podFailurePolicy": {"rules": rules},
        "template": template(pod),
    }


def template(pod: Pod) -> dict[str, Any]:
    """The pod's template. UserError for what Kubernetes or we would not take, and for what contradicts the file."""
    _check(pod)
    memory, mount = shared_memory()
    volumes, mounts = [memory], [mount]
    for number, claim in enumerate(pod.claims):
        name = f"work-{number}" if number else "work"
        volumes.append({"name": name, "persistentVolumeClaim": {"claimName": claim.name}})
        mounts.append({"name": name, "mountPath": claim.path})
    folder = pod.starts_in
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": pod.image,
        "command": [_literal(word) for word in pod.command],
        **({} if folder is None else {"workingDir": folder}),
        "env": _variables(pod),
        "securityContext": {"allowPrivilegeEscalation": False},
        # The end of what went wrong, in `kubectl describe`, where nothing else is said.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    gpus = {RESOURCES[pod.kind]: str(pod.gpus)} if pod.gpus else {}
    asked = {"cpu": pod.cpus, "memory": None if pod.memory_gb is None else f"{pod.memory_gb}G"}
    requests = {**{name: str(value) for name, value in asked.items() if value is not None}, **gpus}
    if requests:
        container["resources"] = {"requests": requests, **({"limits": dict(gpus)} if gpus else {})}
    ours = {
        "metadata": {"labels": pod.labels},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": GRACE_S,
            **({"nodeSelector": dict(pod.selector)} if pod.selector else {}),
            "containers": [{**container, "volumeMounts": mounts}],
            "volumes": volumes,
        },
    }
    return ours if pod.given is None else joined(ours, pod.given)


def parse_claim(text: str) -> Claim:
    """``NAME`` or ``NAME:/path``."""
    name, _, path = text.partition(":")
    return Claim(name, path or WORK)


def parse_reference(text: str) -> Reference:
    """``VARIABLE=SECRET`` or ``VARIABLE=SECRET:KEY``; a key that is left out is the variable's name."""
    variable, found, source = text.partition("=")
    secret, _, key = source.partition(":")
    if not found or not secret:
        raise _wrong("--secret", variable, "VARIABLE=SECRET or VARIABLE=SECRET:KEY, as in HF_TOKEN=hub:token")
    return Reference(variable, secret, key or variable)


def parse_pairs(option: str, given: tuple[str, ...]) -> dict[str, str]:
    """``NAME=VALUE`` of an option that is given several times."""
    pairs: dict[str, str] = {}
    for text in given:
        name, found, value = text.partition("=")
        if not found or not name:
            raise _wrong(option, name, "NAME=VALUE")
        pairs[name] = value
    return pairs


def _variables(pod: Pod) -> list[dict[str, Any]]:
    image = {IMAGE_VARIABLE: pod.image} if pod.by_digest else {}
    references = [
        {"name": item.variable, "valueFrom": {"secretKeyRef": {"name": item.secret, "key": item.key}}}
        for item in pod.secrets
    ]
    return [*plain_variables({**image, **pod.variables}), *references]


def _literal(word: str) -> str:
    """Kubernetes reads $(NAME) and $$ in a command; a word of ours is meant as it stands."""
    return word.replace("$", "$$")


def _check(pod: Pod) -> None:
    if not _IMAGE.fullmatch(pod.image):
        raise _wrong("--image", pod.image, "the name of an image, best with its digest: NAME@sha256:...")
    for claim in pod.claims:
        if not SUBDOMAIN.fullmatch(claim.name) or not claim.path.startswith("/") or ":" in claim.path:
            raise _wrong("--pvc", f"{claim.name}:{claim.path}", "CLAIM or CLAIM:/path")
    paths = [claim.path.rstrip("/") or "/" for claim in pod.claims]
    if twice := [path for path in paths if paths.count(path) > 1]:
        raise _wrong("--pvc", twice[0] + " twice", "another path for each claim")
    names = [*pod.variables, *(item.variable for item in pod.secrets)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise _wrong("--secret", twice[0] + " twice", "each variable once, from --env or --secret")
    for item in pod.secrets:
        if not (_VARIABLE.fullmatch(item.variable) and SUBDOMAIN.fullmatch(item.secret) and _KEY.fullmatch(item.key)):
            raise _wrong("--secret", item.variable, "VARIABLE=SECRET or VARIABLE=SECRET:KEY, as in HF_TOKEN=hub:token")
    for name in pod.variables:
        if not _VARIABLE.fullmatch(name):
            raise _wrong("--env", name, "NAME=VALUE")
        if name == IMAGE_VARIABLE:
            raise UserError(f"--env: found {name}, which --image says", hint="By its digest: --image NAME@sha256:...")
        require_no_secret("--env", name, f"Put it into a Secret of the cluster: --secret {name}=SECRET:KEY")
    if pod.gpus and pod.kind == "cpu":
        raise UserError(f"found {pod.gpus} GPUs for a recipe whose target is a CPU")


def _wrong(option: str, found: str, expected: str) -> UserError:
    return UserError(f"{option}: found {found!r}, expected {expected}")

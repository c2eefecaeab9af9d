"""A command of ours as one pod of Kubernetes that runs once: what a Job and a CronJob have in common.

An exit code of 1 to 4 is a judgement or a wrong recipe: another try finds the same, so the Job ends there. A pod that
was evicted, preempted or drained counts as no try, and any other end is tried again; all of them go on where the last
one stopped, because the store is on the volume. A token comes from a Secret of the cluster by reference: its value is
in no manifest.

What a cluster wants of every pod (a template) is merged over our defaults, and what the run needs over both: its
image, command, variables, GPUs, claims. Whether the result is a pod is the API server's to say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

from quantmint.pipeline.base.errors import SECRET, RecipeError, UserError, shown_path
from quantmint.pipeline.clusters.submit.place import Kind, Task, require_no_secret
from quantmint.pipeline.recipe.yaml_positions import parse, text_of
from quantmint.pipeline.serving.environment import IMAGE_VARIABLE
from quantmint.pipeline.serving.render.kubernetes import (
    RESOURCES,
    SHARED_MOUNT,
    SHARED_VOLUME,
    object_name,
    plain_variables,
)

CONTAINER = "quantmint"
WORK = "/work"
"""Where a claim is mounted that does not say where."""
GRACE_S = 120
"""Seconds between SIGTERM and SIGKILL: a server ends, a shard that is being written is left out."""
RETRIES = 3
_NO_RETRY = (1, 2, 3, 4)
"""FAIL, a wrong recipe, INCONCLUSIVE, INVALID."""
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

    ``variables`` are plain ones of the environment: nothing secret.
    ``cpus`` and ``memory_gb`` are what is kept free for it; it may use more where the node has more. ``given`` is what
    the cluster wants of every pod, see `read_template`.
    """

    image: str
    name: str = ""
    command: tuple[str, ...] = ()
    kind: Kind = "cpu"
    gpus: int = 0
    folder: str | None = None
    claims: tuple[Claim, ...] = ()
    secrets: tuple[Reference, ...] = ()
    cpus: int | None = None
    memory_gb: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    given: Mapping[str, Any] | None = None

    @property
    def labels(self) -> dict[str, str]:
        """What finds the pods of one recipe, and those of all."""
        return {"app.kubernetes.io/name": CONTAINER, "app.kubernetes.io/instance": object_name("", self.name)}


def by_digest(image: str) -> bool:
    """Whether an image is named by its digest."""
    return _DIGEST.fullmatch(image) is not None


def manifest(task: Task, pod: Pod) -> dict[str, Any]:
    """A task as a Job, named anew each time; UserError for several nodes, and for a store that ends with the pod."""
    if task.nodes > 1:
        raise UserError(
            f"the run needs {task.nodes} nodes, and a Job's pod is on one",
            hint="Make a Ray cluster of them (KubeRay) and submit to that: --ray http://HEAD:8265",
        )
    needs = {name: getattr(task, name) for name in ("name", "kind", "gpus", "cpus", "memory_gb")}
    pod = replace(pod, command=task.words(CONTAINER), **needs)
    spec = job_spec(pod, hours=None if task.seconds is None else task.seconds / 3600)
    require_lasting(pod, task.store)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"generateName": object_name("quantmint-", task.name) + "-", "labels": pod.labels},
        "spec": spec,
    }


def job_spec(pod: Pod, *, retries: int = RETRIES, hours: float | None = None) -> dict[str, Any]:
    """The `spec` of a Job, which is also a CronJob's `jobTemplate.spec`. ``hours`` ends it whatever it does."""
    rules = [
        {"action": "FailJob", "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [*_NO_RETRY]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    return {
        "backoffLimit": retries,
        **({} if hours is None else {"activeDeadlineSeconds": max(1, round(hours * 3600))}),
        "podFailurePolicy": {"rules": rules},
        "template": template(pod),
    }


def template(pod: Pod) -> dict[str, Any]:
    """The pod's PodTemplateSpec. UserError for a secret among its plain variables."""
    for name in pod.variables:
        require_no_secret("--env", name, f"Put it into a Secret of the cluster: --secret {name}=SECRET:KEY")
    image = {IMAGE_VARIABLE: pod.image} if by_digest(pod.image) else {}
    references = [
        {"name": item.variable, "valueFrom": {"secretKeyRef": {"name": item.secret, "key": item.key}}}
        for item in pod.secrets
    ]
    claims = {f"work-{number}" if number else "work": claim for number, claim in enumerate(pod.claims)}
    volumes = [{"name": name, "persistentVolumeClaim": {"claimName": claim.name}} for name, claim in claims.items()]
    mounts = [{"name": name, "mountPath": claim.path} for name, claim in claims.items()]
    gpus = {RESOURCES[pod.kind]: str(pod.gpus)} if pod.gpus else {}
    kept = {"cpu": pod.cpus, "memory": None if pod.memory_gb is None else f"{pod.memory_gb}G"}
    requests = {**{name: str(value) for name, value in kept.items() if value is not None}, **gpus}
    resources = {"requests": requests, **({"limits": gpus} if gpus else {})} if requests else {}
    needed = {
        "name": CONTAINER,
        "image": pod.image,
        "command": [word.replace("$", "$$") for word in pod.command],  # Kubernetes reads $(NAME) and $$ in a command
        **({} if pod.folder is None else {"workingDir": pod.folder}),
        "env": [*plain_variables({**image, **pod.variables}), *references],
        **({"resources": resources} if resources else {}),
        "volumeMounts": mounts,
    }
    defaults = {
        **{name: needed[name] for name in ("name", "image", "command")},  # first, for whoever reads it
        **({"workingDir": pod.claims[0].path} if pod.claims else {}),
        "securityContext": {"allowPrivilegeEscalation": False},
        # The end of what went wrong, in `kubectl describe`, where nothing else is said.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [SHARED_MOUNT],
    }
    spec = {"restartPolicy": "Never", "containers": [needed], "volumes": volumes}
    required = {"metadata": {"labels": pod.labels}, "spec": spec}
    ours = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE_S,
        "containers": [defaults],
        "volumes": [SHARED_VOLUME],
    }
    whole: dict[str, Any] = merged(merged({"metadata": {}, "spec": ours}, pod.given or {}), required)
    return whole


def merged(base: Any, over: Any) -> Any:
    """``over`` on ``base``: mappings key by key, lists of named things by name (mounts by path), all else replaced.

    >>> merged({"a": 1, "volumes": [{"name": "x"}]}, {"volumes": [{"name": "x", "nfs": 2}, {"name": "y"}]})
    {'a': 1, 'volumes': [{'name': 'x', 'nfs': 2}, {'name': 'y'}]}
    """
    if over is None:
        return base
    if isinstance(base, Mapping) and isinstance(over, Mapping):
        return {**base, **{key: merged(base.get(key), value) for key, value in over.items()}}
    if isinstance(base, list) and isinstance(over, list):
        items = [*base, *over]
        for key in ("mountPath", "name"):
            if all(isinstance(item, Mapping) and key in item for item in items):
                found: dict[str, Any] = {}
                for item in items:
                    found[item[key]] = merged(found.get(item[key]), item)
                return list(found.values())
    return over


def read_template(path: Path) -> dict[str, Any]:
    """A YAML file's PodTemplateSpec, Pod, or spec alone; `RecipeError` for others, and for a secret's value."""
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
                raise RecipeError(
                    f"{file}: found the value of {name}, which everyone reads who may read the manifest",
                    hint="valueFrom: {secretKeyRef: {name: SECRET, key: KEY}}",
                )
    kept = {name: metadata[name] for name in ("labels", "annotations") if metadata.get(name)}
    return {"metadata": kept, "spec": spec}


def require_lasting(pod: Pod, store: str) -> None:
    """UserError for a store that is on no claim, and so ends with the pod; a template may have volumes of its own."""
    folder = pod.folder or (pod.claims[0].path if pod.claims else "/")
    whole = PurePosixPath(normpath(PurePosixPath(folder) / store))
    if pod.given is None and not any(whole.is_relative_to(claim.path) for claim in pod.claims):
        raise UserError(
            f"--store: found {whole}, which is on no volume that is there after its pod",
            hint="--pvc CLAIM[:/path] mounts a PersistentVolumeClaim; --store is a path in the pod.",
        )


def parse_claim(text: str) -> Claim:
    """``NAME`` or ``NAME:/path``."""
    name, _, path = text.partition(":")
    return Claim(name, path or WORK)


def parse_reference(text: str) -> Reference:
    """``VARIABLE=SECRET`` or ``VARIABLE=SECRET:KEY``; a key that is left out is the variable's name."""
    variable, _, source = text.partition("=")
    secret, _, key = source.partition(":")
    if not secret:
        expected = "expected VARIABLE=SECRET or VARIABLE=SECRET:KEY, as in HF_TOKEN=hub:token"
        raise UserError(f"--secret: found {variable!r}, {expected}")
    return Reference(variable, secret, key or variable)


def parse_pairs(option: str, given: tuple[str, ...]) -> dict[str, str]:
    """``NAME=VALUE`` of an option that is given several times."""
    pairs: dict[str, str] = {}
    for text in given:
        name, found, value = text.partition("=")
        if not found or not name:
            raise UserError(f"{option}: found {name!r}, expected NAME=VALUE")
        pairs[name] = value
    return pairs

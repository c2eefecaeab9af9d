"""A pod of ours with what a cluster wants of every pod: by name for containers, volumes and variables.

What only the file says is kept: sidecars, init containers, tolerations, and whatever else a pod has. Where both say
something, the file wins if the run works either way (grace period, security context, size of the shared memory).
What the run needs is ours (its command, its image, its GPUs, what is mounted for it), and a file that says otherwise is
refused at that line: overruled in silence, it would look as if it counted. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pipeline.recipe.faults import YamlPath, did_you_mean
from pipeline.serving.image import VARIABLE
from pipeline.serving.render.kubernetes import RESOURCES
from pipeline.submit.pod_template import PodTemplate

_SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108
_PRIVILEGED: Final = {"SYS_ADMIN", "CAP_SYS_ADMIN"}
_ASKED: Final = {"cpu": "--cpus", "memory": "--memory"}
_OURS: Final = {
    "image": "leave it out: --image says it",
    "command": "leave it out: the command is quantmint's",
    "args": "leave it out: the command is quantmint's",
    "workingDir": "leave it out: --workdir of submit, and --directory of an exported schedule, say it",
}


def joined(ours: Mapping[str, Any], given: PodTemplate) -> dict[str, Any]:
    """``ours``, a PodTemplateSpec with one container, and ``given``.

    Raises RecipeError at the line that contradicts ours, or that names a volume which is not there.
    """
    spec, theirs = dict(ours["spec"]), dict(given.spec)
    (own,) = spec.pop("containers")
    volumes, selector = spec.pop("volumes"), spec.pop("nodeSelector", {})
    listed = theirs.pop("containers", [])
    _require_own(own["name"], given)
    number = next((number for number, item in enumerate(listed) if item["name"] == own["name"]), None)
    asked = {} if number is None else listed[number]
    container = _container(own, asked, given, ("containers", number or 0))
    kept = _volumes(volumes, theirs.pop("volumes", []), container, given)
    _mounted(theirs.get("initContainers", []), "initContainers", kept, given)
    _mounted(listed, "containers", kept, given)
    _require_one_try(theirs, given, ())
    wanted = theirs.pop("nodeSelector", {})
    selector = _united(selector, wanted, given, ("nodeSelector",), "--node-selector says it")
    found_by, why = ours["metadata"]["labels"], "its pods are found by it"
    labels = _united(found_by, given.labels, given, ("labels",), why, metadata=True)
    return {
        "metadata": {"labels": labels, **({"annotations": dict(given.annotations)} if given.annotations else {})},
        "spec": {
            **spec,
            **({"nodeSelector": selector} if selector else {}),
            **theirs,
            "containers": [container, *(item for other, item in enumerate(listed) if other != number)],
            "volumes": kept,
        },
    }


def _require_own(name: str, given: PodTemplate) -> None:
    """Each container has a name of its own, and an image, which that of the run gets from us."""
    names = [name]
    for kind in ("containers", "initContainers"):
        for number, item in enumerate(given.spec.get(kind, [])):
            path, ours = (kind, number, "name"), item["name"] == name and kind == "containers"
            if item["name"] in names and not (ours and names.count(name) == 1):
                raise given.fault(path, f"found {item['name']} twice, expected it once")
            names.append(item["name"])
            if "image" not in item and not ours:
                said = f'found "{item["name"]}" without an image; the container of the run is called {name}'
                raise given.fault(path, said)


def _container(own: Mapping[str, Any], asked: Mapping[str, Any], given: PodTemplate, path: YamlPath) -> dict[str, Any]:
    for name, instead in _OURS.items():
        if name in asked and asked[name] != own.get(name) and (name in own or name == "args"):
            raise given.fault((*path, name), f"found another than that of the run; {instead}")
    _require_one_try(asked, given, path)
    container = {**own, **asked, "env": _variables(own["env"], asked.get("env", []), given, (*path, "env"))}
    if "securityContext" in asked:
        container["securityContext"] = _security(own["securityContext"], asked["securityContext"])
    resources = _resources(own.get("resources", {}), asked.get("resources", {}), given, (*path, "resources"))
    container["volumeMounts"] = _mounts(own["volumeMounts"], asked.get("volumeMounts", []), given, path)
    return {**container, **({"resources": resources} if resources else {})}


def _require_one_try(asked: Mapping[str, Any], given: PodTemplate, path: YamlPath) -> None:
    """Of the pod, and of the run's container, which may have a policy of its own since Kubernetes 1.34."""
    for name in ("restartPolicy", "restartPolicyRules"):
        if asked.get(name, "Never") != "Never":
            found = asked[name] if name == "restartPolicy" else name
            raise given.fault((*path, name), f"found {found}, expected Never: a Job tries again with another pod")


def _variables(
    own: Sequence[Mapping[str, Any]], asked: Sequence[Mapping[str, Any]], given: PodTemplate, path: YamlPath
) -> list[Mapping[str, Any]]:
    """Ours first: a later variable may refer to an earlier one."""
    known = {entry["name"]: entry for entry in own}
    for number, entry in enumerate(asked):
        if entry["name"] == VARIABLE and VARIABLE not in known:
            said = (
                f"found {VARIABLE}, which names the image to whoever reads a release; expected --image NAME@sha256:..."
            )
            raise given.fault((*path, number), said)
        if entry != known.setdefault(entry["name"], entry):
            raise given.fault((*path, number), f"found another value of {entry['name']} than that of the run")
    return list(known.values())


def _security(own: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """Kubernetes refuses that a privileged container may not escalate."""
    added = set(asked.get("capabilities", {}).get("add", ()))
    if asked.get("privileged") or added & _PRIVILEGED:
        own = {name: value for name, value in own.items() if name != "allowPrivilegeEscalation"}
    return {**own, **asked}


def _resources(
    own: Mapping[str, Any], asked: Mapping[str, Any], given: PodTemplate, path: YamlPath
) -> dict[str, dict[str, str]]:
    from kubernetes.utils.quantity import parse_quantity

    resources = dict(asked)
    for part in ("requests", "limits"):
        mine = own.get(part, {})
        for name, value in asked.get(part, {}).items():
            if name in mine and parse_quantity(value) != parse_quantity(mine[name]):
                said = f"found {value}, and the run has {mine[name]}: {_ASKED.get(name, '--gpus')} says it"
                raise given.fault((*path, part, name), said)
            if name in RESOURCES.values() and name not in mine and parse_quantity(value):
                raise given.fault((*path, part, name), f"found {value}, and the run has none of them")
        if united := {**mine, **asked.get(part, {})}:
            resources[part] = united
    requests = resources.get("requests", {})
    for name, limit in asked.get("limits", {}).items():
        if name in requests and parse_quantity(requests[name]) > parse_quantity(limit):
            said = f"found {limit}, expected at least the {requests[name]} that are kept free for it"
            raise given.fault((*path, "limits", name), said)
    return resources


def _mounts(
    own: Sequence[Mapping[str, Any]], asked: Sequence[Mapping[str, Any]], given: PodTemplate, path: YamlPath
) -> list[Mapping[str, Any]]:
    known = {_folder(mount): mount for mount in own}
    for number, mount in enumerate(asked):
        mine = known.get(_folder(mount))
        if mine is not None and mine["name"] != mount["name"] and _folder(mount) != _SHARED_MEMORY:
            there = "--pvc mounts a claim" if mine in own else f"{mine['name']} is"
            said = f"found {mount['name']} at {_folder(mount)}, where {there}"
            raise given.fault((*path, "volumeMounts", number), said)
        known[_folder(mount)] = {**(mine or {}), **mount}
    return list(known.values())


def _volumes(
    own: Sequence[Mapping[str, Any]],
    asked: Sequence[Mapping[str, Any]],
    container: Mapping[str, Any],
    given: PodTemplate,
) -> list[Mapping[str, Any]]:
    """Without our shared memory where the file has another."""
    names = [volume["name"] for volume in asked]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise given.fault(("volumes", number, "name"), f"found {name} twice, expected it once")
    shared = next(mount["name"] for mount in container["volumeMounts"] if _folder(mount) == _SHARED_MEMORY)
    theirs = {volume["name"]: volume for volume in asked}
    memory = own[0]["name"]
    kept = {volume["name"]: volume for volume in own if volume["name"] != memory or memory == shared}
    for number, volume in enumerate(asked):
        mine = kept.get(volume["name"])
        if mine is not None and mine != volume and volume["name"] != memory:
            said = f"found another {volume['name']} than the claim of --pvc, expected another name"
            raise given.fault(("volumes", number), said)
    return list({**kept, **theirs}.values())


def _mounted(
    containers: Sequence[Mapping[str, Any]], kind: str, volumes: Sequence[Mapping[str, Any]], given: PodTemplate
) -> None:
    names = [volume["name"] for volume in volumes]
    for number, container in enumerate(containers):
        for place, mount in enumerate(container.get("volumeMounts", [])):
            if mount["name"] not in names:
                said = f'found the volume "{mount["name"]}", expected one of {", ".join(names)}'
                path = (kind, number, "volumeMounts", place, "name")
                raise given.fault(path, said + did_you_mean(mount["name"], names))


def _united(
    own: Mapping[str, str],
    asked: Mapping[str, str],
    given: PodTemplate,
    path: YamlPath,
    why: str,
    *,
    metadata: bool = False,
) -> dict[str, str]:
    for name, value in asked.items():
        if own.get(name, value) != value:
            raise given.fault((*path, name), f"found {value}, expected {own[name]}: {why}", metadata=metadata)
    return {**own, **asked}


def _folder(mount: Mapping[str, Any]) -> str:
    return str(mount["mountPath"]).rstrip("/") or "/"

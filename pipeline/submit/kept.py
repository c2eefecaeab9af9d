"""Whether what a run writes outlives its pod: on which volume the store is, and what that is. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from posixpath import normpath
from typing import Any, Final

from pipeline.errors import UserError
from pipeline.submit.pod import CONTAINER

_PASSING: Final = {"emptyDir", "ephemeral", "configMap", "secret", "downwardAPI", "projected", "image", "gitRepo"}
"""Kinds of volumes that end with their pod, or that nobody writes."""


def require_kept(spec: Mapping[str, Any], folder: str | None, store: str) -> None:
    """UserError unless the innermost volume that holds ``store`` is there when the pod is not, and can be written.

    ``folder`` is where the run starts; None is the image's own, which is on no volume that we know.
    """
    mounts = _mounts(spec)
    lasting = [path for path, (_, volume) in mounts.items() if _lasts(volume)]
    if not lasting or folder is None:
        raise UserError(
            "--pvc is missing: the store and what is published must outlive the pod",
            hint="--pvc CLAIM[:/path] mounts a PersistentVolumeClaim that several nodes can write.",
        )
    whole = _whole(folder, store)
    holding = _holding(mounts, whole)
    if holding not in lasting:
        raise UserError(
            f"--store: found {whole}, which is on none of the volumes and would end with its pod",
            hint=f"--store is a path in the pod, such as {lasting[0]}/store.",
        )
    mount, volume = mounts[holding]
    if mount.get("readOnly") or any(
        isinstance(source, Mapping) and source.get("readOnly") for source in volume.values()
    ):
        raise UserError(f"--store: found {whole}, which is on a volume that is mounted to be read")


def on_a_volume(spec: Mapping[str, Any], folder: str | None, store: str) -> bool:
    """Whether any volume holds the store; else it is where the image has it."""
    return folder is not None and _holding(_mounts(spec), _whole(folder, store)) is not None


def _mounts(spec: Mapping[str, Any]) -> dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Mount and volume by the path in the run's container."""
    container = next(item for item in spec["containers"] if item["name"] == CONTAINER)
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    return {normpath(mount["mountPath"]): (mount, volumes[mount["name"]]) for mount in container["volumeMounts"]}


def _lasts(volume: Mapping[str, Any]) -> bool:
    """One without a kind is an emptyDir to the API."""
    return not _PASSING & set(volume) and set(volume) != {"name"}


def _whole(folder: str, store: str) -> PurePosixPath:
    return PurePosixPath(normpath(PurePosixPath(folder) / store))


def _holding(mounts: Mapping[str, Any], store: PurePosixPath) -> str | None:
    return max((path for path in mounts if store.is_relative_to(path)), key=len, default=None)
